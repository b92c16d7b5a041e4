"""Architectures that people use, out of torchvision, timm and transformers, tiny and with random weights."""

from dataclasses import dataclass
from typing import Any

import timm
import torch
import torch.nn.functional as F
import torchvision
import transformers
from torch import nn

WORDS = 40


def words(g, *shape):
    return torch.randint(3, WORDS, shape, generator=g)


@dataclass
class Images:
    """A classifier of images."""

    size: int = 32

    def batch(self, g):
        return torch.randn(4, 3, self.size, self.size, generator=g), torch.randint(0, 10, (4,), generator=g)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])


class Pixels(Images):
    """A class for each pixel."""

    def batch(self, g):
        x = torch.randn(2, 3, self.size, self.size, generator=g)
        return x, torch.randint(0, 10, (2, self.size, self.size), generator=g)

    def loss(self, model, batch):
        out = model(batch[0])
        return F.cross_entropy(out["out"] if isinstance(out, dict) else out, batch[1])


class Detection(Pixels):
    """Logits at a quarter of the size."""

    def loss(self, model, batch):
        return model(pixel_values=batch[0], labels=batch[1]).loss


class Text:
    """A language model, which shifts the labels itself; one text is shorter."""

    def batch(self, g):
        i = words(g, 3, 12)
        mask = torch.ones_like(i)
        mask[0, 8:] = 0
        return {"input_ids": i, "attention_mask": mask, "labels": i.masked_fill(mask == 0, -100)}

    def loss(self, model, batch):
        return model(**batch).loss


class Sentences(Text):
    """A classifier of texts."""

    def batch(self, g):
        return {**super().batch(g), "labels": torch.randint(0, 4, (3,), generator=g)}


class Pairs(Text):
    """An encoder and a decoder."""

    def batch(self, g):
        return {**super().batch(g), "labels": words(g, 3, 7)}


class Sound(Text):
    """Spectrograms and what was said."""

    def batch(self, g):
        return {"input_features": torch.randn(2, 8, 32, generator=g), "labels": words(g, 2, 6)}


def unet():
    """A segmentation net that upsamples and joins: torchvision's FCN head would not."""

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = timm.create_model("resnet10t", features_only=True, out_indices=(0, 1, 2))
            a, b, c = self.down.feature_info.channels()
            self.up = nn.ModuleList([nn.ConvTranspose2d(c, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
            self.join = nn.ModuleList([nn.Conv2d(b + 16, 16, 3, padding=1), nn.Conv2d(a + 8, 8, 3, padding=1)])
            self.head = nn.Conv2d(8, 10, 1)

        def forward(self, x):
            a, b, c = self.down(x)
            c = F.relu(self.join[0](torch.cat([b, self.up[0](c)], 1)))
            c = F.relu(self.join[1](torch.cat([a, self.up[1](c)], 1)))
            return F.interpolate(self.head(c), size=x.shape[-2:], mode="bilinear", align_corners=False)

    return UNet()


def from_transformers(model, config, **settings):
    """A model of transformers by its configuration."""
    return lambda: getattr(transformers, model)(getattr(transformers, config)(vocab_size=WORDS, **settings))


LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


@dataclass
class Model:
    """How to make one, and what it is trained with."""

    make: Any
    data: Any
    optimizer: str = "AdamW"


MODELS = {
    "ResNet": Model(
        lambda: torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10),
        Images(64),
        "SGD",
    ),
    "MobileNetV3": Model(
        lambda: torchvision.models.mobilenet_v3_small(num_classes=10, width_mult=0.25, dropout=0), Images(), "SGD"
    ),
    "ConvNeXt": Model(lambda: timm.create_model("test_convnext", num_classes=10), Images(64)),
    "ViT": Model(lambda: timm.create_model("test_vit", num_classes=10, img_size=32, patch_size=8), Images()),
    "Swin": Model(
        lambda: timm.models.swin_transformer.SwinTransformer(
            img_size=32, patch_size=2, window_size=4, num_classes=10, embed_dim=12, depths=(2, 2), num_heads=(2, 4),
            drop_path_rate=0,
        ),
        Images(),
    ),
    "EfficientNet": Model(lambda: timm.create_model("test_efficientnet", num_classes=10), Images(), "SGD"),
    "UNet": Model(unet, Pixels(), "SGD"),
    "SegFormer": Model(
        from_transformers(
            "SegformerForSemanticSegmentation", "SegformerConfig", num_labels=10, depths=[1, 1, 1, 1],
            hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16,
            classifier_dropout_prob=0, drop_path_rate=0,
        ),
        Detection(),
    ),
    "BERT": Model(
        from_transformers(
            "BertForSequenceClassification", "BertConfig", hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
            intermediate_size=48, max_position_embeddings=32, num_labels=4, hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        ),
        Sentences(),
    ),
    "GPT-2": Model(
        from_transformers(
            "GPT2LMHeadModel", "GPT2Config", n_positions=32, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0,
            embd_pdrop=0, attn_pdrop=0,
        ),
        Text(),
    ),
    "Llama": Model(from_transformers("LlamaForCausalLM", "LlamaConfig", **LLAMA), Text()),
    "Mixtral": Model(
        from_transformers(
            "MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=4, num_experts_per_tok=2,
            output_router_logits=True,
        ),
        Text(),
    ),
    "T5": Model(
        from_transformers(
            "T5ForConditionalGeneration", "T5Config", d_model=24, d_kv=8, d_ff=48, num_layers=2, num_heads=3,
            dropout_rate=0, decoder_start_token_id=0,
        ),
        Pairs(),
    ),
    "Whisper": Model(
        from_transformers(
            "WhisperForConditionalGeneration", "WhisperConfig", num_mel_bins=8, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32,
            max_source_positions=16, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        ),
        Sound(),
    ),
}  # fmt: skip
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=2e-3, eps=1e-4),
}


def moved(batch, device):
    if isinstance(batch, dict):
        return {name: t.to(device) for name, t in batch.items()}
    return tuple(t.to(device) for t in batch)


def optimizer_of(case, model):
    return OPTIMIZERS[case.optimizer](model.parameters())


def step(model, case, optimizer, g, device):
    """A training step on the next batch; the loss."""
    loss = case.data.loss(model, moved(case.data.batch(g), device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
