"""Formulas for `torch.utils.flop_counter`, of operations of PyTorch that the device alone takes."""

import torch

from oxitorch import _after_import


def install() -> None:
    _after_import.call({"torch.utils.flop_counter": _count_attention})


def _count_attention(flop_counter) -> None:
    """As those of the CPU's attention, which count by the shapes of arguments."""
    name, cpu = "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_flash_attention_for_cpu"
    for ending in ("", "_backward"):
        own, other = (getattr(torch.ops.aten, of + ending) for of in (name, cpu))
        if own not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(own, get_raw=True)(flop_counter.flop_registry[other])
