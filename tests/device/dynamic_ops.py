"""PyTorch's samples of an op with first sizes that vary, in one function of `torch.tpu.jit`, against the CPU."""

import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.tpu import Dim
from torch.utils import _pytree as pytree

from tests.conformance.compare import as_good, differences
from tests.conformance.units import (
    HOST_ARGUMENTS,
    UNINITIALIZED,
    entry_name,
    on_device_kwargs,
    seeded,
    wide,
)
from tests.effort import LEAST

# The first makes the program, for all sizes up to the bound, which is one of them. Odd and even ones.
SIZES = (5, 8, 6, 7)
BOUND = 8


@dataclass
class Found:
    """What an entry gave."""

    samples: int = 0
    # Wrong values, or errors that the CPU does not have.
    wrong: list[str] = field(default_factory=list)
    # What was refused because it is a function of `torch.tpu.jit`.
    refused: list[str] = field(default_factory=list)
    # Numbers of programs where there are several, with what `explain()` says of those that are new.
    programs: list[tuple[int, list[str]]] = field(default_factory=list)
    # Numbers of new programs, one for each size, of which it does not say why.
    silent: list[int] = field(default_factory=list)


def entries() -> dict:
    """Those with a function of its own: kernels of one device check no sizes."""
    return {entry_name(op): op for op in op_db if not op.name.startswith("torch.ops.")}


class Case:
    """A sample of which some tensors have a first size that varies."""

    def __init__(self, op, leaves: list, spec, process: Callable, varying: list[int]):
        self._op, self._leaves, self._spec, self._process, self.varying = op, leaves, spec, process, varying
        self._tensors = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

    def tensors(self, size: int) -> list[torch.Tensor]:
        return [_sized(self._leaves[i], size) if i in self.varying else self._leaves[i] for i in self._tensors]

    def places(self) -> list[int]:
        """The numbers of the tensors that vary."""
        return [self._tensors.index(i) for i in self.varying]

    def function(self, gradients: bool, device: str, widen=lambda x: x) -> Callable:
        """Of the tensors: the results, and their gradients."""

        def f(*tensors):
            own = list(self._leaves)
            for i, t in zip(self._tensors, tensors, strict=True):
                is_wanted = gradients and self._leaves[i].requires_grad
                own[i] = t.detach().requires_grad_() if is_wanted else t
            given, args, kwargs = pytree.tree_unflatten(own, self._spec)
            kwargs = on_device_kwargs(kwargs) if device == "tpu" else kwargs
            with mock.patch("torch.manual_seed", lambda _: None):  # some entries seed by themselves
                results = self._op(given, *args, **widen(kwargs))
            if not gradients:
                return results
            of = self._process(results)
            wanted = [own[i] for i in self._tensors if own[i].requires_grad]
            outs = [r for r in pytree.tree_leaves(of) if isinstance(r, torch.Tensor) and r.requires_grad]
            grads = torch.autograd.grad(outs, wanted, list(map(_cotangent, outs)), allow_unused=True) if outs else ()
            return pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, (results, grads))

        return f


def _cotangent(r: torch.Tensor) -> torch.Tensor:
    if not r.dim():
        return torch.ones_like(r)
    return (1 + torch.arange(r.shape[-1], device=r.device) / 8).to(r.dtype).expand(r.shape)


def _sized(t: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor with another first size: rows that it has, and where these are too few, smaller ones like them."""
    times = -(-size // t.shape[0])
    return torch.cat([_like(t.detach(), i) for i in range(times)])[:size].contiguous()


def _like(t: torch.Tensor, i: int) -> torch.Tensor:
    if t.dtype == torch.bool or not (t.is_floating_point() or t.is_complex()):
        return t
    return (t.roll(i, -1) if t.dim() > 1 else t) * (1 - 0.07 * i)


def cases(op, gradients: bool, most: int) -> list[Case]:
    """Those samples of an op that the CPU takes with all sizes."""
    dtypes = op.supported_dtypes("cpu")
    dtype = next((d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in dtypes), None)
    found: list[Case] = []
    kinds = set()
    if dtype is None or (gradients and not (op.supports_autograd and dtype == torch.float32)):
        return found
    for sample in op.sample_inputs("cpu", dtype, requires_grad=gradients):
        leaves, spec = pytree.tree_flatten((sample.input, list(sample.args), sample.kwargs))
        is_one = [isinstance(x, torch.Tensor) and x.layout == torch.strided and x.dim() > 0 for x in leaves]
        first = next((i for i, one in enumerate(is_one) if one), None)
        if first is None or any(isinstance(x, torch.Tensor) and x.layout != torch.strided for x in leaves):
            continue
        n = leaves[first].shape[0]
        if any(isinstance(x, torch.Tensor) and x.numel() == 0 for x in leaves):
            continue
        together = [i for i, one in enumerate(is_one) if one and leaves[i].shape[0] == n]
        for varying in ([first], together):
            case = Case(op, leaves, spec, sample.output_process_fn_grad, varying)
            if all(_takes(case, gradients, size) for size in SIZES):
                kind = repr([(x.shape[1:] if is_one[i] else x) for i, x in enumerate(leaves)])[:500]
                if kind not in kinds:
                    found.append(case)
                    kinds.add(kind)
                break
        if len(found) >= most:
            break
    return found


def _takes(case: Case, gradients: bool, size: int) -> bool:
    try:
        seeded(lambda: case.function(gradients, "cpu")(*case.tensors(size)))
    except Exception:
        return False
    return True


def run(op, most: int = 2) -> Found:
    """One function for each sample, called with all sizes; with the gradients, where it has such."""
    out = Found()
    gradients = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases(op, gradients, most):
            with torch.tpu.compiler.custom_compiler_options(LEAST | _own(op, out.samples)):
                _run(op, case, gradients, out)
            out.samples += 1
    return out


def _own(op, sample: int) -> dict:
    """Options that no other sample has, so that all its programs are new, whatever was computed before. They change
    nothing: nothing is dumped.
    """
    return {"xla_dump_max_hlo_modules": zlib.crc32(f"{entry_name(op)} {sample}".encode()) >> 1}


def _run(op, case: Case, gradients: bool, out: Found) -> None:
    function = case.function(gradients, "tpu")
    dim = Dim(buckets=[BOUND])
    f = torch.tpu.jit(lambda *tensors: function(*tensors), dynamic={i: {0: dim} for i in case.places()})
    torch.tpu.synchronize()
    made, why = 0, []
    for size in SIZES:
        tensors = case.tensors(size)
        moved = [t.detach().to("tpu") for t in tensors]
        if op.name in HOST_ARGUMENTS:
            moved[1:] = [t.detach() for t in tensors[1:]]
        torch.tpu.synchronize()
        before = torch.tpu.metrics()["programs"]
        try:
            got = seeded(lambda of=moved: f(*of))
            torch.tpu.synchronize()
        except Exception as e:
            text = f"{type(e).__name__}: {' '.join(str(e).split())}"
            (out.refused if "torch.tpu.jit" in text else out.wrong).append(f"size {size}: {text}"[:600])
            return
        new = torch.tpu.metrics()["programs"] - before
        if new:
            made += new
            why += [line.strip() for line in torch.tpu.explain(new).splitlines() if "for this size alone" in line]
        if wrong := _wrong(op, case, gradients, tensors, got, lambda of=moved: function(*of)):
            out.wrong.append(f"size {size}: {wrong}")
            return
    if made > 1:
        out.programs.append((made, why))
        if made == len(SIZES) and not why:
            out.silent.append(made)


def _wrong(op, case: Case, gradients: bool, tensors: list, got, eager: Callable) -> str | None:
    """How results differ from the CPU's; random ones, from those of eager mode."""
    on_cpu = case.function(gradients, "cpu")
    want = seeded(lambda: on_cpu(*tensors))
    found = [d for d in differences(got, want, values=op.name not in UNINITIALIZED) if d[0] != "strides"]
    if not any(kind == "value" for kind, _ in found):
        return found[0][1] if found else None
    if _is_random(lambda: on_cpu(*tensors)):
        want = pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, seeded(eager))
        found = [d for d in differences(got, want) if d[0] != "strides"]
    else:
        truth = case.function(gradients, "cpu", wide)
        # No further from what float64 gives than twice the CPU's own distance.
        found = [] if as_good(got, want, seeded(lambda: truth(*wide(tensors))), 2) else found
    return found[0][1] if found else None


def _is_random(run: Callable) -> bool:
    def once(seed: int):
        torch.manual_seed(seed)
        return run()

    first = once(0)
    return any(differences(once(seed), first) for seed in range(1, 5))
