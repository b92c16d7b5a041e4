"""Eight models, each trained for three steps (the last one only runs): what the table of `test_preflight_table.py` is
made of. `jax_models.py` has the same eight in JAX.

Run as a script, with the names of models or none for all.
"""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "tpu"
STEPS = 3


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000))


class Block(nn.Module):
    """Attention and MLP behind layer norms."""

    def __init__(self, dim, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab=4096, dim=512, heads=8, layers=1, block=256):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(block, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads, True) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


class Llama(nn.Module):
    """Grouped queries, rotary positions, SwiGLU, bfloat16."""

    def __init__(self, vocab=8192, dim=512, heads=8, groups=2, layers=1, hidden=1536):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, dim // heads
        self.token = nn.Embedding(vocab, dim)
        kv = groups * self.size

        def one():
            linears = {"q": (dim, dim), "k": (dim, kv), "v": (dim, kv), "o": (dim, dim)}
            linears |= {"gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}
            parts = {name: nn.Linear(i, o, bias=False) for name, (i, o) in linears.items()}
            return nn.ModuleDict({**parts, "norm1": nn.RMSNorm(dim), "norm2": nn.RMSNorm(dim)})

        self.layers = nn.ModuleList(one() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.to(torch.bfloat16)

    def rotate(self, x):
        half = self.size // 2
        frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angle = torch.arange(x.shape[2], device=x.device)[:, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def forward(self, tokens):
        x = self.token(tokens)
        b, t, d = x.shape
        for layer in self.layers:
            y = layer["norm1"](x)
            q, k, v = (layer[n](y).view(b, t, -1, self.size).transpose(1, 2) for n in "qkv")
            y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
            x = x + layer["o"](y.transpose(1, 2).reshape(b, t, d))
            y = layer["norm2"](x)
            x = x + layer["down"](F.silu(layer["gate"](y)) * layer["up"](y))
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self, dim=192, heads=3, layers=1, patch=16, size=224, classes=1000):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, patch, patch)
        self.position = nn.Parameter(torch.randn(1, (size // patch) ** 2, dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(dim, heads, False) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


class Residual(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.norm2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.shortcut = nn.Conv2d(i, o, 1, stride, bias=False) if stride != 1 else nn.Identity()

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Sequential):
    def __init__(self):
        blocks = [Residual(i, o, s) for i, o, s in ((64, 64, 1), (64, 128, 2))]
        stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class AutoEncoder(nn.Sequential):
    def __init__(self):
        down = [(3, 64), (64, 128)]
        layers = [m for i, o in down for m in (nn.Conv2d(i, o, 4, 2, 1), nn.ReLU())]
        layers += [m for i, o in reversed(down) for m in (nn.ConvTranspose2d(o, i, 4, 2, 1), nn.ReLU())]
        super().__init__(*layers[:-1])


class Recommender(nn.Module):
    """Tables of embeddings, and an MLP on what is looked up."""

    def __init__(self, tables=8, rows=20000, dim=64):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim) for _ in range(tables))
        self.mlp = nn.Sequential(
            nn.Linear(tables * dim, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, ids):
        return self.mlp(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)).squeeze(1)


class Encoder(nn.Module):
    """What a model like BERT does to answer."""

    def __init__(self, vocab=30522, dim=768, heads=12, layers=1):
        super().__init__()
        self.token = nn.Embedding(vocab, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads, False) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 2)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.token(tokens)))[:, 0])


def ints(*shape, high):
    return torch.randint(0, high, shape)


def classes(logits, targets):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model, make_optimizer, loss_of, *batch):
    model, batch = model.to(DEVICE), [x.to(DEVICE) for x in batch]
    optimizer = make_optimizer(model.parameters())
    for _ in range(STEPS):
        loss = loss_of(model(batch[0]), batch[-1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def mlp():
    train(MLP(), adamw, classes, torch.randn(256, 1024), ints(256, high=1000))


def gpt():
    train(GPT(), adamw, classes, ints(8, 256, high=4096), ints(8, 256, high=4096))


def llama():
    train(Llama(), adamw, classes, ints(4, 512, high=8192), ints(4, 512, high=8192))


def vit():
    train(ViT(), adamw, classes, torch.randn(32, 3, 224, 224), ints(32, high=1000))


def resnet():
    train(ResNet(), momentum, classes, torch.randn(32, 3, 64, 64), ints(32, high=10))


def autoencoder():
    train(AutoEncoder(), adamw, F.mse_loss, torch.rand(32, 3, 64, 64))


def recommender():
    ids, clicked = ints(2048, 8, high=20000), torch.rand(2048).round()
    train(Recommender(), momentum, F.binary_cross_entropy_with_logits, ids, clicked)


def encoder():
    model, tokens = Encoder().to(DEVICE, torch.bfloat16).eval(), ints(16, 128, high=30522).to(DEVICE)
    with torch.no_grad():
        for _ in range(STEPS):
            model(tokens).argmax(1).tolist()


MODELS = [mlp, gpt, llama, vit, resnet, autoencoder, recommender, encoder]

if __name__ == "__main__":
    for name in sys.argv[1:] or [m.__name__ for m in MODELS]:
        torch.manual_seed(0)
        globals()[name]()
        torch.tpu.synchronize()
