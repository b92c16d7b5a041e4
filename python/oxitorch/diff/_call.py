"""`oxitorch.diff(fn, args)`: both runs in this process."""

import copy
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from oxitorch import _activate
from oxitorch.diff import _compare
from oxitorch.diff._platform import Platform
from oxitorch.diff._record import Recorder
from oxitorch.diff._report import Report
from oxitorch.diff._trace import Trace, Writer


def diff(
    fn: Callable,
    args: Iterable = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    a: str = "cpu",
    b: str = "tpu",
    backward: bool | None = None,
    seed: int = 0,
    loss: float = _compare.LOSS,
    keep: str | os.PathLike | None = None,
) -> Report:
    """Runs a function or a module on two platforms, and says which operations differ, where, and whether that is right.

    Each run has copies of the modules and tensors that it is given, on its platform; accelerators that the function
    names itself are its platform too. Both draw the same random numbers.

    Args:
        fn: a module, or a function: a forward, some steps of a training.
        args, kwargs: its arguments.
        a, b: `cpu`, `tpu` or `cuda`, with options: `tpu:strict`, `tpu:debug`, `tpu:bfloat16`, `tpu:highest`,
            `cpu:float64`; or the path of a file that was recorded before.
        backward: whether a backward from the results follows; by default if `fn` is a module whose results have
            gradients. The derivatives of the results are random numbers, the same for both.
        seed: what `torch.manual_seed` is given before each run.
        loss: from which relative difference on losses part.
        keep: a folder for the recorded runs, `a.trace` and `b.trace`; without it they are removed.

    Raises:
        ValueError: a platform that nobody knows, or a file that is no recorded run.
        RuntimeError: the platform is not there; and what the function raises.
    """
    kwargs = dict(kwargs or {})
    if backward is None:
        backward = isinstance(fn, torch.nn.Module)
    with tempfile.TemporaryDirectory(prefix="oxitorch-") as folder:
        if keep is not None:
            folder = os.fspath(keep)
            os.makedirs(folder, exist_ok=True)
        sides = {"a": a, "b": b}
        platforms = {s: None if os.path.isfile(x) else Platform(x) for s, x in sides.items()}
        traces: dict[str, Trace] = {}
        try:
            for s, platform in platforms.items():
                path = sides[s]
                if platform is not None:
                    path = os.path.join(folder, f"{s}.trace")
                    _record(path, platform, fn, tuple(args), kwargs, backward, seed, traces.get("a"))
                traces[s] = Trace(path)
            return Report(_compare.compare(traces["a"], traces["b"], loss, runs_here))
        finally:
            for trace in traces.values():
                trace.close()


def runs_here(device: str) -> bool:
    """Whether this process can run operations there."""
    return device == "cpu" or getattr(torch, device).is_available()


def _record(path, platform: Platform, fn, args, kwargs, backward: bool, seed: int, share: Trace | None) -> None:
    if platform.device == "tpu":
        _activate.raise_unavailable()
    elif platform.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("oxitorch.diff: there is no CUDA device here; record a file where there is one")
    with torch.random.fork_rng(devices=[]), platform.active():
        torch.manual_seed(seed)
        fn, args, kwargs = _moved((fn, args, kwargs), platform)
        # Modules of arguments have names too.
        modules = [m for m in (fn, *args, *kwargs.values()) if isinstance(m, torch.nn.Module)]
        recorder = Recorder(Writer(path), share=share)
        try:
            with recorder:
                results = fn(*args, **kwargs)
                if backward:
                    _backward(results)
            recorder.keep_gradients(
                [(f"{type(m).__name__}.{n}", p) for m in modules for n, p in m.named_parameters() if p.grad is not None]
                if backward
                else []
            )
        finally:
            recorder.finish(platform.header())


def _moved(x, platform: Platform):
    """Copies on the platform; what is the same tensor or module twice is so again."""
    made: dict[int, Any] = {}

    def move(v):
        if id(v) not in made:
            if isinstance(v, torch.nn.Module):
                made[id(v)] = copy.deepcopy(v).to(platform.device, platform.cast)
            else:
                cast = platform.cast if v.is_floating_point() else None
                moved = v.detach().to(platform.device, cast, copy=True)
                made[id(v)] = moved.requires_grad_(v.requires_grad)
        return made[id(v)]

    there = (torch.nn.Module, torch.Tensor)
    return torch.utils._pytree.tree_map(lambda v: move(v) if isinstance(v, there) else v, x)


def _backward(results) -> None:
    """From random derivatives of all results: sums of some, as of a softmax, have none."""
    outputs = [t for t in torch.utils._pytree.tree_leaves(results) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs:
        return
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        derivatives = [
            torch.ones_like(t)
            if t.dim() == 0
            else torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.device, t.dtype)
            for t in outputs
        ]
    torch.autograd.backward(outputs, derivatives)
