"""`oxitorch preflight --fit remat`: checkpoints repeated blocks of a script's modules, on a device that is not there.

A block is a module with parts of its own, in a ModuleList, ModuleDict or Sequential with another one of its class.
"""

import contextlib
import functools
import json
import os
from collections import Counter

import torch
from torch.nn import Module, ModuleDict, ModuleList, Sequential
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from oxitorch import _roles

# Results that are kept where only products are: those of matrix products, convolutions and attention.
_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "convolution",
    "_scaled_dot_product_fused_attention_overrideable",
)


def install(policy: str, folder: str) -> None:
    """Checkpoints blocks before a module is called for the first time; a file says how many blocks there are.

    The policy is "none", "products" (all blocks, but products are kept), "half" (every second block), "all" or
    "offload" (all, and what blocks take is kept on the host).
    """
    register_module_forward_pre_hook(_Blocks(policy, folder).before)


class _Blocks:
    def __init__(self, policy: str, folder: str):
        self.policy, self.folder = policy, folder
        self.blocks: list[Module] = []
        self.known: set[int] = set()

    def before(self, module, _) -> None:
        """Looks for blocks if this is a module that was not there before."""
        if torch.compiler.is_compiling() or id(module) in self.known:
            return
        _roles._look()
        for root in (m for r in _roles._roots if (m := r()) is not None):
            for block in _repeated(root):
                if id(block) not in self.known:
                    self._take(block)
            self.known.update(id(m) for m in root.modules())
        classes = sorted({type(b).__name__ for b in self.blocks})
        with open(os.path.join(self.folder, "remat"), "w", encoding="utf-8") as f:
            json.dump({"blocks": len(self.blocks), "classes": classes}, f)

    def _take(self, block: Module) -> None:
        wanted = {"none": False, "half": len(self.blocks) % 2 == 0}.get(self.policy, True)
        self.blocks.append(block)
        if wanted:
            block.forward = _checkpointed(block.forward, self.policy)


def _repeated(module: Module):
    """The blocks of a module; not those within blocks."""
    children = list(module.children())
    kinds: Counter = Counter()
    if isinstance(module, (ModuleList, ModuleDict, Sequential)):
        kinds.update(type(c) for c in children if next(c.children(), None) is not None)
    for child in children:
        if kinds[type(child)] > 1:
            yield child
        else:
            yield from _repeated(child)


def _checkpointed(forward, policy: str):
    options = {}
    if policy == "products":
        found = [getattr(torch.ops.aten, name, None) for name in _PRODUCTS]
        kept = [op.default for op in found if op is not None]
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)

    @functools.wraps(forward)
    def run(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with torch.tpu.offload() if policy == "offload" else contextlib.nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run
