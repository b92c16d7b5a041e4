"""Layers of `torch.nn` that are translated as a whole, one row each: the layer in JAX, and how it is made.

flax.nnx's own layer stands where it computes exactly the same; else one of `_layers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class Made:
    """The expression that makes a layer: `layer(*args, **options, rngs=rngs)`."""

    layer: str
    args: dict[str, Any] = field(default_factory=dict)  # by what they are; they are written without it
    options: dict[str, Any] = field(default_factory=dict)


def given(**options):
    """The options that are not None."""
    return {k: v for k, v in options.items() if v is not None}


def linear(m):
    return Made("nnx.Linear", {"in_features": m.in_features, "out_features": m.out_features}, bias(m))


def bias(m):
    return given(use_bias=False if m.bias is None else None)


def layer_norm(m):
    if len(m.normalized_shape) != 1:
        return None
    options = given(epsilon=m.eps, use_bias=False if m.bias is None else None)
    # The other way to compute a variance is quicker and less exact.
    options |= given(use_scale=None if m.elementwise_affine else False, use_fast_variance=False)
    return Made("nnx.LayerNorm", {"num_features": m.normalized_shape[0]}, options)


def rms_norm(m):
    if len(m.normalized_shape) != 1 or m.eps is None:
        return None
    options = given(epsilon=m.eps, use_scale=None if m.elementwise_affine else False)
    return Made("nnx.RMSNorm", {"num_features": m.normalized_shape[0]}, options)


def embedding(m):
    if m.max_norm is not None or m.sparse or m.scale_grad_by_freq:
        return None
    args = {"num_embeddings": m.num_embeddings, "features": m.embedding_dim}
    if m.padding_idx is None:
        return Made("nnx.Embed", args)
    return Made("Embedding", args, {"padding_idx": m.padding_idx})


def same(x):
    """One number, if all are the same."""
    return x[0] if isinstance(x, tuple) and len(set(x)) == 1 else x


def unlike(default, **options):
    """Options that are not the default."""
    return {k: v for k, v in options.items() if v != default}


def conv(m):
    if m.padding_mode != "zeros":
        return None
    args = {"in_features": m.in_channels, "out_features": m.out_channels, "kernel_size": tuple(m.kernel_size)}
    padding = m.padding.upper() if isinstance(m.padding, str) else same(m.padding)
    options = unlike(1, strides=same(m.stride)) | unlike(0, padding=padding)
    return Made("Conv", args, options | unlike(1, dilation=same(m.dilation), groups=m.groups) | bias(m))


def conv_transpose(m):
    args = {"in_features": m.in_channels, "out_features": m.out_channels, "kernel_size": tuple(m.kernel_size)}
    options = unlike(1, strides=same(m.stride))
    options |= unlike(0, padding=same(m.padding), output_padding=same(m.output_padding))
    return Made("ConvTranspose", args, options | unlike(1, dilation=same(m.dilation), groups=m.groups) | bias(m))


def batch_norm(m):
    if not m.track_running_stats or m.momentum is None:
        return None
    options = unlike(0.1, momentum=m.momentum) | unlike(1e-5, epsilon=m.eps) | unlike(True, affine=m.affine)
    return Made("BatchNorm", {"num_features": m.num_features}, options)


def group_norm(m):
    options = unlike(1e-5, epsilon=m.eps) | unlike(True, affine=m.affine)
    return Made("GroupNorm", {"num_groups": m.num_groups, "num_features": m.num_channels}, options)


def recurrent(name):
    def made(m):
        if m.proj_size:
            return None
        options = unlike(1, num_layers=m.num_layers) | unlike(True, use_bias=m.bias)
        options |= unlike(False, batch_first=m.batch_first, bidirectional=m.bidirectional)
        options |= unlike(0.0, dropout=float(m.dropout))
        return Made(name, {"input_size": m.input_size, "hidden_size": m.hidden_size}, options)

    return made


def dropout(dims):
    def made(m):
        return Made("nnx.Dropout", {"rate": float(m.p)}, given(broadcast_dims=dims or None))

    return made


def drops_paths(m) -> bool:
    """Whether it is one of the many copies of stochastic depth, which libraries and papers' codes share by name."""
    return type(m).__name__.endswith("DropPath") and isinstance(getattr(m, "drop_prob", None), float)


def drop_path(m):
    return Made("DropPath", {"rate": m.drop_prob}) if getattr(m, "scale_by_keep", True) else None


LEAVES = {
    nn.Linear: linear,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.Embedding: embedding,
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.Conv3d: conv,
    nn.ConvTranspose1d: conv_transpose,
    nn.ConvTranspose2d: conv_transpose,
    nn.ConvTranspose3d: conv_transpose,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
    nn.GroupNorm: group_norm,
    nn.LSTM: recurrent("LSTM"),
    nn.GRU: recurrent("GRU"),
    nn.Dropout: dropout(()),
    nn.Dropout2d: dropout((2, 3)),
}

# Where flax's layers have other names for the same, and whether a matrix stands the other way around.
RENAMED = {
    "nnx.Linear": {"weight": ("kernel", True), "bias": ("bias", False)},
    "nnx.LayerNorm": {"weight": ("scale", False), "bias": ("bias", False)},
    "nnx.RMSNorm": {"weight": ("scale", False)},
    "nnx.Embed": {"weight": ("embedding", False)},
}


def made(module) -> Made | None:
    """How the layer is made in JAX, for one that is translated as a whole."""
    row = drop_path if drops_paths(module) else LEAVES.get(type(module))
    return None if row is None or module._forward_hooks or module._forward_pre_hooks else row(module)


def kind(module, path, tied) -> str:
    """How a module is translated.

    As a "leaf", a layer of the table; "inline", its operations are the caller's; or as a "class" of its own.
    A layer all of whose parameters are others' is inline; one with some of its own is a class.
    """
    own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
    if made(module) is not None and not any(name in tied for name in own):
        return "leaf"
    standard = type(module).__module__.startswith("torch.nn.modules")
    empty = not any(True for _ in module.children()) and not own and not list(module.buffers())
    return "inline" if (standard and empty) or (own and all(name in tied for name in own)) else "class"
