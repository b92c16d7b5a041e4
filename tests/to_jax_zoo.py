"""Modules as people write them, small: what `oxitorch to-jax` is tried on."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    """Two layers and what is between them."""

    def __init__(self, features=12, hidden=24, classes=5):
        super().__init__()
        # widens
        self.up = nn.Linear(features, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(hidden, classes)  # one logit for each class

    def forward(self, x):
        # exact, not the tanh form
        h = F.gelu(self.norm(self.up(x)))
        return self.down(self.drop(h))


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self, widths=(8, 16, 32), classes=10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        layers, inputs = [], 8
        for width in widths:
            layers += [BasicBlock(inputs, width, 1 if width == inputs else 2), BasicBlock(width, width, 1)]
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x):
        x = self.layers(self.stem(x))
        return self.fc(torch.flatten(self.pool(x), 1))


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        # key, query, value projections for all heads, but in a batch
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        # output projection
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = n_head
        self.n_embd = n_embd

    def forward(self, x):
        B, T, C = x.size()
        # calculate query, key, values for all heads in batch and move head forward to be the batch dim
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        # causal self-attention
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)  # re-assemble all head outputs side by side
        return self.resid_dropout(self.c_proj(y))


class GPTBlock(nn.Module):
    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, dropout)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.ModuleDict({"fc": nn.Linear(n_embd, 4 * n_embd), "proj": nn.Linear(4 * n_embd, n_embd)})

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["proj"](F.gelu(self.mlp["fc"](self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder with the head tied to the embedding."""

    def __init__(self, vocab=61, n_embd=32, n_head=4, n_layer=3, block_size=32, dropout=0.1):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([GPTBlock(n_embd, n_head, dropout) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        B, T = idx.shape
        pos = torch.arange(0, T, dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class ViTBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class ViT(nn.Module):
    def __init__(self, size=16, patch=4, dim=32, depth=2, heads=4, classes=10):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.Sequential(*[ViTBlock(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        x = self.blocks(x)
        return self.head(self.norm(x)[:, 0])


class LSTMTagger(nn.Module):
    def __init__(self, vocab=40, dim=16, hidden=24, tags=7):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, hidden, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.out = nn.Linear(2 * hidden, tags)

    def forward(self, ids):
        y, (h, c) = self.lstm(self.embed(ids))
        return self.out(y)


def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, inputs, outputs, emb):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.emb_proj = nn.Linear(emb, outputs)
        self.norm2 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb_proj(F.silu(emb))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h


class SpatialAttention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        B, C, H, W = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(B, 3 * C, H * W).chunk(3, dim=1)
        weights = torch.einsum("bci,bcj->bij", q, k) * C**-0.5
        out = torch.einsum("bij,bcj->bci", weights.softmax(-1), v)
        return x + self.proj(out.reshape(B, C, H, W))


class UNet(nn.Module):
    """With time steps, and attention where it is smallest."""

    def __init__(self, width=16, emb=32):
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.inp = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = ResBlock(width, width, emb)
        self.downsample = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.down2 = ResBlock(width, 2 * width, emb)
        self.mid = SpatialAttention(2 * width)
        self.upsample = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = ResBlock(2 * width, width, emb)
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t, self.width))
        h1 = self.down1(self.inp(x), emb)
        h = self.mid(self.down2(self.downsample(h1), emb))
        h = self.up1(torch.cat([self.upsample(h), h1], dim=1), emb)
        return self.out(F.silu(h))


class DiffusionStep(nn.Module):
    """The loss of one step of DDPM."""

    def __init__(self, steps=100):
        super().__init__()
        self.model = UNet()
        betas = torch.linspace(1e-4, 0.02, steps)
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, dim=0))

    def forward(self, x0, t, noise):
        a = self.alphas_cumprod[t].view(-1, 1, 1, 1)
        x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise
        return F.mse_loss(self.model(x_t, t), noise)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class LlamaAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = LlamaAttention(dim, heads, kv_heads)
        self.feed_forward = FeedForward(dim, 2 * dim)

    def forward(self, x, cos, sin):
        h = x + self.attention(self.attention_norm(x), cos, sin)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self, vocab=50, dim=32, layers=3, heads=4, kv_heads=2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([LlamaBlock(dim, heads, kv_heads) for _ in range(layers)])
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        head_dim = dim // heads
        inv_freq = 1.0 / (10000 ** (torch.arange(0, head_dim, 2).float() / head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, tokens):
        B, T = tokens.shape
        freqs = torch.outer(torch.arange(T).float(), self.inv_freq)
        angles = torch.cat((freqs, freqs), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, cos, sin)
        return self.output(self.norm(h))


class MoE(nn.Module):
    """Each token goes to the two experts that the router likes best."""

    def __init__(self, dim=16, hidden=32, experts=4, k=2):
        super().__init__()
        self.k = k
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList([FeedForward(dim, hidden) for _ in range(experts)])

    def forward(self, x):
        weights, chosen = torch.topk(self.router(x).softmax(dim=-1), self.k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            share = (weights * (chosen == i)).sum(dim=-1, keepdim=True)
            out = out + share * expert(x)
        return out


class MoEModel(nn.Module):
    def __init__(self, vocab=40, dim=16, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(layers)])
        self.layers = nn.ModuleList([MoE(dim) for _ in range(layers)])
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, moe in zip(self.norms, self.layers, strict=True):
            x = x + moe(norm(x))
        return self.head(x)


def ids(vocab, *shape):
    return torch.randint(0, vocab, shape)


def images(size=16):
    return torch.randn(2, 3, size, size)


# How each is made, and its inputs.
ZOO = {
    "mlp": (MLP, lambda: (torch.randn(6, 12),)),
    "resnet": (ResNet, lambda: (images(),)),
    "gpt": (GPT, lambda: (ids(61, 2, 12),)),
    "vit": (ViT, lambda: (images(),)),
    "lstm": (LSTMTagger, lambda: (ids(40, 3, 9),)),
    "unet": (UNet, lambda: (images(8), ids(100, 2))),
    "diffusion": (DiffusionStep, lambda: (images(8), ids(100, 2), torch.randn(2, 3, 8, 8))),
    "llama": (Llama, lambda: (ids(50, 2, 10),)),
    "moe": (MoEModel, lambda: (ids(40, 2, 6),)),
}


def cross_entropy(output, labels):
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


def wide(kind):
    """Models of timm and transformers, tiny: a function that makes the model, and its inputs."""
    import timm
    import transformers as t

    def net(name, size=64, **options):
        return lambda: (timm.create_model(name, num_classes=10, **options), (images(size),), {})

    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    text = {"vocab_size": 40, "hidden_size": 32, **heads}
    patches = {"image_size": 16, "patch_size": 4, "hidden_size": 32, **heads}
    # Of models with an encoder and a decoder.
    halves = {
        f"{half}_{name}": n
        for half in ("encoder", "decoder")
        for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    }

    def hf(model, config, inputs, **settings):
        return lambda: (getattr(t, model)(getattr(t, config)(**settings)), (), inputs())

    def tokens():
        return {"input_ids": ids(40, 2, 12)}

    def decoder():
        return {**tokens(), "use_cache": False}

    def both():
        return {**decoder(), "decoder_input_ids": ids(40, 2, 8)}

    def sound():
        return {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": ids(40, 2, 8), "use_cache": False}

    def wave():
        return {"input_values": torch.randn(2, 800)}

    def pixels():
        return {"pixel_values": images(16)}

    return {
        "timm": {
            "ResNet-18": net("resnet18"),
            "ViT": net("test_vit", 32, img_size=32, patch_size=8),
            "ConvNeXt": net("test_convnext", 32),
            "EfficientNet": net("test_efficientnet"),
            "MobileNetV3": net("mobilenetv3_small_050"),
            "RegNetX": net("regnetx_002"),
            "DenseNet": net("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
            "Swin": net("swin_tiny_patch4_window7_224", 56, img_size=56, patch_size=2, window_size=7, embed_dim=16, depths=(2, 2), num_heads=(2, 4)),
            "XCiT": net("xcit_nano_12_p16_224", 64, img_size=64, depth=2, embed_dim=32, num_heads=4),
            "MLP-Mixer": lambda: (timm.models.mlp_mixer.MlpMixer(num_classes=10, img_size=32, patch_size=8, embed_dim=32, num_blocks=2), (images(32),), {}),
        },
        "transformers": {
            "GPT-2": hf("GPT2LMHeadModel", "GPT2Config", decoder, vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=32),
            "Llama": hf("LlamaForCausalLM", "LlamaConfig", decoder, num_key_value_heads=2, **text),
            "Mistral": hf("MistralForCausalLM", "MistralConfig", decoder, num_key_value_heads=2, **text),
            "Qwen3": hf("Qwen3ForCausalLM", "Qwen3Config", decoder, num_key_value_heads=2, head_dim=8, **text),
            "Gemma 2": hf("Gemma2ForCausalLM", "Gemma2Config", decoder, num_key_value_heads=2, head_dim=8, **text),
            "GPT-NeoX": hf("GPTNeoXForCausalLM", "GPTNeoXConfig", decoder, **text),
            "OPT": hf("OPTForCausalLM", "OPTConfig", decoder, vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=32),
            "Mamba": hf("MambaForCausalLM", "MambaConfig", decoder, vocab_size=40, hidden_size=16, state_size=4, num_hidden_layers=2, intermediate_size=32),
            "BERT": hf("BertForMaskedLM", "BertConfig", tokens, **text),
            "RoBERTa": hf("RobertaForSequenceClassification", "RobertaConfig", tokens, **text),
            "DistilBERT": hf("DistilBertForMaskedLM", "DistilBertConfig", tokens, vocab_size=40, dim=32, n_layers=2, n_heads=4, hidden_dim=48),
            "ALBERT": hf("AlbertForMaskedLM", "AlbertConfig", tokens, embedding_size=16, **text),
            "T5": hf("T5ForConditionalGeneration", "T5Config", both, vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
            "Whisper": hf(
                "WhisperForConditionalGeneration", "WhisperConfig", sound, vocab_size=40, num_mel_bins=16, d_model=32, max_source_positions=20, max_target_positions=16,
                pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None, **halves,
            ),
            "Wav2Vec2": hf(
                "Wav2Vec2ForCTC", "Wav2Vec2Config", wave, conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_feat_extract_layers=3,
                num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, mask_time_prob=0.0, layerdrop=0.0, **text,
            ),
            "ViT": hf("ViTForImageClassification", "ViTConfig", pixels, **patches),
            "CLIP's image model": hf("CLIPVisionModel", "CLIPVisionConfig", pixels, **patches),
        },
    }[kind]  # fmt: skip


def prepared(kind, name):
    """What `to_jax.convert` takes of an architecture: of our own ("own"), of "timm" or of "transformers"."""
    torch.manual_seed(0)
    if kind == "own":
        make, inputs = ZOO[name]
        model, args, kwargs = make(), inputs(), {}
    else:
        model, args, kwargs = wide(kind)[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))  # a layer of zeros would hide what is before it
    out = {"model": model, "args": args, "kwargs": kwargs, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
    if kind == "own" and name not in ("unet", "diffusion"):
        shape = model.eval()(*args).shape
        out |= {"loss": cross_entropy, "targets": {"labels": torch.randint(0, shape[-1], shape[:-1])}}
    return out
