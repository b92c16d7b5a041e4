"""Formulas for `torch.utils.flop_counter`, of operations of PyTorch that the device alone takes."""

import torch

from oxitorch import _after_import


def install() -> None:
    _after_import.call({"torch.utils.flop_counter": _count_attention})


# Those whose formulas count by the shapes of the same arguments; PyTorch 2.11 has none for the CPU's.
_ALIKE = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")


def _count_attention(flop_counter) -> None:
    registry = flop_counter.flop_registry
    for ending in ("", "_backward"):
        own, *alike = (
            getattr(torch.ops.aten, of + ending) for of in ("_scaled_dot_product_fused_attention_overrideable", *_ALIKE)
        )
        formula = next((registry[other] for other in alike if other in registry), None)
        if own not in registry and formula is not None:
            flop_counter.register_flop_formula(own, get_raw=True)(formula)
