"""What is checked: units, each one entry of a database, one dtype and one question."""

import copy
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
    op_db,
)
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.testing._internal.opinfo.core import ForeachFuncInfo, OpInfo, SampleInput
from torch.utils import _pytree as pytree

from .compare import as_good, differences, leaves, wide

DEVICE = "tpu"
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
# Whose lowerings are run, if not those of the platform.
LOWER_FOR = os.environ.get("OXITORCH_LOWER_FOR")
# What TPUs and GPUs get by rotations and the CPU from LAPACK: it may have other signs, and be three bits further from
# what float64 gives, as rotations sum up in another order.
BY_ROTATIONS = ("linalg.svd", "svd", "svd_lowrank", "pca_lowrank", "linalg.eigh")
TIMES = 8
# Results that hold whatever the memory held.
UNINITIALIZED = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "nn.functional.fractional_max_pool2d",
)


# Entries whose tensors among the further arguments are on the host for every device.
HOST_ARGUMENTS = ("tensor_split",)


# How many samples of a unit are run, if not all.
MOST_SAMPLES: int | None = None


@dataclass
class Outcome:
    """What running a unit gave."""

    samples: int = 0
    # (kind, text): see `compare.differences`; "error" is an exception that the CPU does not raise.
    problems: list[tuple[str, str]] = field(default_factory=list)
    # Why there was nothing to check.
    skipped: str | None = None

    def add(self, number: int, problems: list[tuple[str, str]]) -> None:
        self.problems += [(kind, f"sample {number}: {text}") for kind, text in problems]


def entry_name(op: OpInfo) -> str:
    """`div` or `div:floor_rounding`."""
    return f"{op.name}:{op.variant_test_name}" if op.variant_test_name else op.name


def to_device(value):
    """The same on the device: leaves with the same strides over a copy of the memory, that need the same gradients.

    What shares memory here shares it there, and one tensor stays one.
    """
    moved_storages: dict = {}
    seen: dict = {}

    def move(t):
        if not isinstance(t, torch.Tensor) or t.device.type == "meta":
            return t
        if id(t) not in seen:
            seen[id(t)] = moved(t)
        return seen[id(t)]

    def moved(t):
        plain = t.detach()
        if plain.layout == torch.strided and plain.numel():
            plain = plain.resolve_conj().resolve_neg()
            storage = plain.untyped_storage()
            key = (storage._cdata, plain.dtype)
            if key not in moved_storages:
                whole = plain.as_strided((storage.nbytes() // plain.element_size(),), (1,), 0)
                moved_storages[key] = whole, whole.to(DEVICE)
            there = moved_storages[key][1].as_strided(plain.shape, plain.stride(), plain.storage_offset())
        else:
            there = plain.to(DEVICE)
        return there.requires_grad_(t.requires_grad)

    return pytree.tree_map(move, value)


def sample_on_device(sample: SampleInput, op: OpInfo) -> SampleInput:
    if op.name in HOST_ARGUMENTS:
        return SampleInput(to_device(sample.input), args=sample.args, kwargs=sample.kwargs)
    given, args, kwargs = to_device((sample.input, sample.args, sample.kwargs))
    return SampleInput(given, args=args, kwargs=on_device_kwargs(kwargs))


def on_device_kwargs(kwargs: dict) -> dict:
    """The same with the device and its generator; tensors stay as they are."""
    moved = dict(kwargs)
    if "device" in moved:
        moved["device"] = DEVICE
    if isinstance(moved.get("generator"), torch.Generator):
        moved["generator"] = torch.Generator(DEVICE).manual_seed(moved["generator"].initial_seed())
    return moved


def twin(value):
    """A copy that may be written."""
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, value)


def seeded(f: Callable):
    torch.manual_seed(0)
    return f()


def is_random(op: OpInfo, sample: SampleInput) -> bool:
    """Whether several seeds give the CPU several results. (Some put the generator back: its state says little.)"""

    def run(seed: int):
        torch.default_generator.manual_seed(seed)
        with mock.patch("torch.manual_seed", lambda _: None):  # some entries seed by themselves
            return op(twin(sample.input), *twin(sample.args), **sample.kwargs)

    first = run(0)
    return any(differences(run(seed), first) for seed in range(1, 5))


def attempt(f: Callable):
    """(result, None) or (None, exception)."""
    try:
        return f(), None
    except Exception as e:
        return None, e


def text_of(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


def some(samples: list) -> list:
    """All, or so many of them, evenly spread."""
    return samples if MOST_SAMPLES is None else samples[:: -(-len(samples) // MOST_SAMPLES) or 1]


def each_sample(op: OpInfo, dtype: torch.dtype, out: Outcome, requires_grad: bool) -> Iterator[SampleInput]:
    def generate() -> list[SampleInput]:
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad))
        if isinstance(op, ForeachFuncInfo):
            samples += op.sample_zero_size_inputs("cpu", dtype, requires_grad=requires_grad)
        return samples

    samples, e = attempt(generate)
    if e is not None:
        out.skipped = f"no samples: {text_of(e)}"
        return
    if not samples:
        out.skipped = "no samples"
    for sample in some(samples):
        out.samples += 1
        yield sample


def forward(op: OpInfo, dtype: torch.dtype, *, noncontiguous: bool = False) -> Outcome:
    """Every sample gives what it gives on the CPU: values, dtype, shape, strides."""
    out = Outcome()
    compared = 0
    for number, sample in enumerate(each_sample(op, dtype, out, requires_grad=False)):
        if noncontiguous:
            sample, e = attempt(sample.noncontiguous)
            if e is not None:
                out.skipped = text_of(e)
                return out
        moved = sample_on_device(sample, op)
        want, refused = attempt(lambda: seeded(lambda: op(sample.input, *sample.args, **sample.kwargs)))
        got, failed = attempt(lambda: seeded(lambda: op(moved.input, *moved.args, **moved.kwargs)))
        if refused is not None:
            if failed is None:
                leaves_read(got)
            continue
        compared += 1
        if failed is not None:
            out.add(number, [("error", text_of(failed))])
            continue
        values = op.name not in UNINITIALIZED and not attempt(lambda: is_random(op, sample))[0]
        if LOWER_FOR and op.name in BY_ROTATIONS:
            got, want = pytree.tree_map(torch.abs, (got, want))
        found, e = attempt(lambda: differences(got, want, values=values))
        found = forgiven(
            op.name, found, got, want, lambda: op(*wide((sample.input, *sample.args)), **wide(sample.kwargs))
        )
        out.add(number, found if e is None else [("error", text_of(e))])
        # An op that writes its arguments must write them alike.
        written = (
            attempt(lambda: differences((moved.input, moved.args), (sample.input, sample.args)))[0] if values else []
        )
        out.add(number, [("argument", text) for kind, text in written or [] if kind == "value"])
    if not compared:
        out.skipped = out.skipped or "the CPU refuses every sample"
    return out


def forgiven(name: str, found: list | None, got, want, truth: Callable) -> list:
    """The differences without those in values where float64 says that the CPU is no better, or not much."""
    if not found or all(kind != "value" for kind, _ in found):
        return found
    times = TIMES if LOWER_FOR and name in BY_ROTATIONS else 1
    if not attempt(lambda: as_good(got, want, seeded(truth), times))[0]:
        return found
    return [d for d in found if d[0] != "value"]


def leaves_read(value) -> None:
    """Waits for results that nobody compares: an error of theirs must not come up later."""
    attempt(lambda: [x.cpu() for x in leaves(value) if isinstance(x, torch.Tensor)])


def in_place(op: OpInfo, dtype: torch.dtype) -> Outcome:
    """The in-place form changes its argument as on the CPU and returns it."""
    out = Outcome()
    inplace = op.get_inplace()
    if inplace is None:
        out.skipped = "no in-place form"
        return out
    for number, sample in enumerate(each_sample(op, dtype, out, requires_grad=False)):
        if sample.broadcasts_input or not all(isinstance(x, torch.Tensor) for x in leaves(sample.input)):
            continue
        moved = sample_on_device(sample, op)
        values = not attempt(lambda: is_random(op, sample))[0]
        expected, target = twin(sample.input), twin(moved.input)
        want, refused = attempt(lambda: seeded(lambda: inplace(expected, *sample.args, **sample.kwargs)))
        got, failed = attempt(lambda: seeded(lambda: inplace(target, *moved.args, **moved.kwargs)))
        if refused is not None:
            if failed is None:
                out.add(number, [("accepts", f"the CPU raises {text_of(refused)}")])
            continue
        if failed is not None:
            out.add(number, [("error", text_of(failed))])
            continue
        found, e = attempt(lambda: differences((got, target), (want, expected), values=values))
        out.add(number, found if e is None else [("error", text_of(e))])
    return out


def out_forms(op: OpInfo, dtype: torch.dtype) -> Outcome:
    """`out=` of the right size, of a wrong size, with strides of its own, and of a wrong dtype, as on the CPU."""
    out = Outcome()
    if not op.supports_out:
        out.skipped = "no out="
        return out

    def like(shape_of: Callable, results):
        return pytree.tree_map(lambda t: shape_of(t) if isinstance(t, torch.Tensor) else t, results)

    def wider(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, [2 * s for s in t.stride()], dtype=t.dtype, device=t.device).fill_(1)

    def wrong(t: torch.Tensor) -> torch.dtype:
        return torch.long if t.dtype.is_floating_point or t.dtype.is_complex else torch.float32

    forms = {
        "right": torch.empty_like,
        "strided": wider,
        "empty": lambda t: torch.empty(0, dtype=t.dtype, device=t.device),
        "wrong size": lambda t: torch.ones(*t.shape, 2, dtype=t.dtype, device=t.device),
        "wrong dtype": lambda t: torch.empty_like(t, dtype=wrong(t)),
    }
    layouts = set()
    for number, sample in enumerate(each_sample(op, dtype, out, requires_grad=False)):
        moved = sample_on_device(sample, op)
        plain, refused = attempt(lambda: op(sample.input, *sample.args, **sample.kwargs))
        if refused is not None or not all(isinstance(x, torch.Tensor) for x in leaves(plain)):
            continue
        layouts |= {x.layout for x in leaves(plain)}
        if any(x.layout != torch.strided for x in leaves(plain)):
            continue
        values = op.name not in UNINITIALIZED and not attempt(lambda: is_random(op, sample))[0]
        for form, shape_of in forms.items():

            def run(s: SampleInput, device: str, shape_of=shape_of):
                place = like(lambda t: shape_of(t.to(device) if t.device.type != device else t), plain)
                result = seeded(lambda: op(s.input, *s.args, **s.kwargs, out=place))
                return result, place

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                want, refused = attempt(lambda: run(sample, "cpu"))
                got, failed = attempt(lambda: run(moved, DEVICE))
            if refused is not None:
                if failed is None:
                    out.add(number, [("accepts", f"{form}: the CPU raises {text_of(refused)}")])
            elif failed is not None:
                out.add(number, [("error", f"{form}: {text_of(failed)}")])
            elif not values or not wrong_by_itself(want[1], plain):
                found, e = attempt(lambda: differences(got, want, values=values))
                found = found if e is None else [("error", text_of(e))]
                out.add(number, [(kind, f"{form}: {text}") for kind, text in found])
    if layouts and torch.strided not in layouts:
        out.skipped = "the forms are those of strided tensors"
    return out


def wrong_by_itself(results, plain) -> bool:
    """Whether the CPU's `out=` form differs from its functional one: some of its kernels overlook strides of `out=`."""
    pairs = zip(leaves(results), leaves(plain), strict=True)
    return any(not torch.allclose(a.to(b.dtype), b, equal_nan=True) for a, b in pairs if a.shape == b.shape)


def gradients_of(op: OpInfo, s: SampleInput, double: bool, keep: bool = False) -> tuple:
    """The gradients of a sample's inputs, or theirs. `keep`: they have a graph."""
    torch.manual_seed(0)
    inputs = [x for x in leaves((s.input, s.args, s.kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
    result = op(s.input, *s.args, **s.kwargs)
    if s.output_process_fn_grad is not None:
        result = s.output_process_fn_grad(result)
    results = [x for x in leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    seeds = [cotangent(x) for x in results]
    first = torch.autograd.grad(results, inputs, seeds, allow_unused=True, create_graph=double or keep)
    if not double:
        return first
    again = [g for g in first if g is not None and g.requires_grad]
    if not again:
        return first
    return torch.autograd.grad(again, inputs, [cotangent(g) for g in again], allow_unused=True)


def with_dual_numbers(s: SampleInput) -> SampleInput:
    """The same with a tangent for each tensor that needs gradients."""

    def dual(x):
        if not isinstance(x, torch.Tensor) or not x.requires_grad:
            return x
        return forward_ad.make_dual(x, cotangent(x))

    given, args, kwargs = pytree.tree_map(dual, (s.input, s.args, s.kwargs))
    moved = SampleInput(given, args=args, kwargs=kwargs)
    moved.output_process_fn_grad = s.output_process_fn_grad
    return moved


def tangents_of(op: OpInfo, s: SampleInput, of_gradients: bool) -> list:
    """The forward derivatives of a sample's results, or of its gradients, along fixed directions."""
    with forward_ad.dual_level():
        s = with_dual_numbers(s)
        if of_gradients:
            found = gradients_of(op, s, double=False, keep=True)
        else:
            found = seeded(lambda: op(s.input, *s.args, **s.kwargs))
            if s.output_process_fn_grad is not None:
                found = s.output_process_fn_grad(found)
        return [forward_ad.unpack_dual(x).tangent for x in leaves(found) if isinstance(x, torch.Tensor)]


def hessian_of(op: OpInfo, s: SampleInput) -> tuple:
    """`torch.func.hessian` of the sum of a sample's results, which are weighted so that all count."""
    given, tree = pytree.tree_flatten((s.input, s.args, s.kwargs))
    places = [i for i, x in enumerate(given) if isinstance(x, torch.Tensor) and x.requires_grad]

    def total(*tensors):
        now = list(given)
        for i, x in zip(places, tensors, strict=True):
            now[i] = x
        first, args, kwargs = pytree.tree_unflatten(now, tree)
        result = seeded(lambda: op(first, *args, **kwargs))
        if s.output_process_fn_grad is not None:
            result = s.output_process_fn_grad(result)
        floats = [
            x for x in leaves(result) if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
        ]
        sums = [(x * cotangent(x)).sum() for x in floats]
        return sum(x.real if x.is_complex() else x for x in sums)

    return torch.func.hessian(total, argnums=tuple(range(len(places))))(*(given[i].detach() for i in places))


# Elements of the inputs of samples of which all second derivatives are taken, and how many samples.
MOST_ELEMENTS = 200
HESSIANS = 2


def hessians(op: OpInfo, dtype: torch.dtype) -> Outcome:
    """All second derivatives of the smallest samples, by all transforms of `torch.func` at once."""

    def elements(sample) -> int:
        return sum(x.numel() for x in leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor))

    def smallest(samples: list) -> list:
        small = [s for s in samples if 0 < elements(s) <= MOST_ELEMENTS]
        return sorted(small, key=elements)[:HESSIANS]

    supported = op.supports_gradgrad and op.supports_fwgrad_bwgrad
    return derivatives(op, dtype, supported, lambda s: hessian_of(op, s), smallest)


def gradients(op: OpInfo, dtype: torch.dtype, *, double: bool = False) -> Outcome:
    """Gradients (and theirs) of every sample that PyTorch differentiates."""
    supported = op.supports_autograd and (op.supports_gradgrad or not double)
    return derivatives(op, dtype, supported, lambda s: gradients_of(op, s, double))


def tangents(op: OpInfo, dtype: torch.dtype, *, of_gradients: bool = False) -> Outcome:
    """Forward derivatives of every sample, or of its gradients."""
    supported = op.supports_fwgrad_bwgrad if of_gradients else op.supports_forward_ad
    return derivatives(op, dtype, supported, lambda s: tangents_of(op, s, of_gradients))


def derivatives(
    op: OpInfo, dtype: torch.dtype, supported: bool, of: Callable[[SampleInput], object], choose: Callable = list
) -> Outcome:
    """Derivatives of samples against the CPU's."""
    out = Outcome()
    if not supported:
        out.skipped = "not differentiable"
        return out

    compared = 0
    samples = choose(list(each_sample(op, dtype, out, requires_grad=True)))
    out.samples = len(samples)
    if not samples:
        out.skipped = out.skipped or f"no sample of {MOST_ELEMENTS} elements or less"
    for number, sample in enumerate(samples):
        moved = sample_on_device(sample, op)
        moved.output_process_fn_grad = sample.output_process_fn_grad
        want, refused = attempt(lambda: of(sample))
        if refused is not None:
            continue
        compared += 1
        got, failed = attempt(lambda: of(moved))
        if failed is not None:
            out.add(number, [("error", text_of(failed))])
            continue
        random = attempt(lambda: is_random(op, sample))[0]
        found, e = attempt(lambda: differences(got, want, values=not random))
        found = forgiven(op.name, found, got, want, lambda: of(widened(sample)))
        out.add(number, [d for d in found if d[0] != "strides"] if e is None else [("error", text_of(e))])
    if not compared:
        out.skipped = out.skipped or "the CPU refuses every sample"
    return out


def widened(sample: SampleInput) -> SampleInput:
    s = SampleInput(wide(sample.input), args=wide(sample.args), kwargs=wide(sample.kwargs))
    s.output_process_fn_grad = sample.output_process_fn_grad
    return s


def cotangent(x: torch.Tensor) -> torch.Tensor:
    """The same numbers on every device, near 1 and all different."""
    ramp = torch.linspace(0.5, 1.5, max(x.numel(), 1), dtype=torch.float64)[: x.numel()]
    return ramp.reshape(x.shape).to(x.dtype).to(x.device)


def errors(op: OpInfo, dtype: torch.dtype) -> Outcome:
    """What the database says is an error raises the same class. In debug mode, which looks at values too."""
    out = Outcome()
    if op.error_inputs_func is None:
        out.skipped = "no error inputs"
        return out
    mode, torch.tpu.eager_mode = torch.tpu.eager_mode, "debug"
    try:
        refusals(op, out)
    finally:
        torch.tpu.eager_mode = mode
    return out


def refusals(op: OpInfo, out: Outcome) -> None:
    for number, case in enumerate(some(list(op.error_inputs("cpu")))):
        out.samples += 1
        sample = case.sample_input
        _, refused = attempt(lambda: op(sample.input, *sample.args, **sample.kwargs))
        if refused is None:
            continue
        moved = sample_on_device(sample, op)

        def run(moved=moved):
            result = op(moved.input, *moved.args, **moved.kwargs)
            torch.tpu.synchronize()
            return result

        _, raised = attempt(run)
        if raised is None:
            out.add(number, [("accepts", f"the CPU raises {text_of(refused)}")])
        elif not isinstance(raised, type(refused)):
            out.add(number, [("class", f"{text_of(raised)} instead of {text_of(refused)}")])


@dataclass
class ModuleCase:
    """A module of `torch.nn` with the arguments of a call, on the CPU."""

    made: torch.nn.Module
    args: tuple
    kwargs: dict

    def on_device(self) -> "ModuleCase":
        kwargs = on_device_kwargs(to_device(self.kwargs))
        return ModuleCase(copy.deepcopy(self.made).to(DEVICE), to_device(self.args), kwargs)

    def run(self) -> tuple:
        """The output, and the gradients of parameters and arguments."""
        torch.manual_seed(0)
        result = self.made(*self.args, **self.kwargs)
        results = [x for x in leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
        inputs = [p for p in self.made.parameters() if p.requires_grad]
        inputs += [x for x in leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not results or not inputs:
            return result, []
        return result, torch.autograd.grad(results, inputs, [cotangent(r) for r in results], allow_unused=True)


def module_cases(info, dtype: torch.dtype, out: Outcome) -> Iterator[ModuleCase]:
    """Those of the database that can be made."""
    for training in (True, False):
        cases = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        for case in some(list(cases)):
            out.samples += 1
            made, given = case.constructor_input, case.forward_input
            if given is None:
                continue
            host, e = attempt(lambda m=made: seeded(lambda: info.module_cls(*m.args, **m.kwargs)))
            if e is not None:
                continue
            host = host.to(dtype).train(training)
            if any(map(is_lazy, host.parameters())):  # their first call makes random parameters
                attempt(lambda h=host, i=given: seeded(lambda: h(*i.args, **i.kwargs)))
            yield ModuleCase(host, given.args, given.kwargs)


def module(info, dtype: torch.dtype) -> Outcome:
    """A module of `torch.nn`: its output and its gradients."""
    out = Outcome()
    for case in module_cases(info, dtype, out):
        number, moved = out.samples - 1, case.on_device()
        want, refused = attempt(case.run)
        if refused is not None:
            continue
        got, failed = attempt(moved.run)
        if failed is not None:
            out.add(number, [("error", text_of(failed))])
            continue
        random = "Dropout" in info.name or "RReLU" in info.name
        found, e = attempt(lambda g=got, w=want: differences(g, w, values=not random))
        out.add(number, [d for d in found if d[0] != "strides"] if e is None else [("error", text_of(e))])
    if not out.samples:
        out.skipped = "no samples"
    return out


def optimizer_cases(info, out: Outcome) -> Iterator[tuple]:
    """Each set of options, as single tensors and as lists."""
    for case in some(list(info.optim_inputs_func(device="cpu"))):
        for foreach in (False, True) if "foreach" in info.supported_impls else (False,):
            out.samples += 1
            yield case, foreach


def optimized(info, dtype: torch.dtype, case, foreach: bool, device: str) -> list[torch.Tensor]:
    """Parameters after five steps."""
    weights = [cotangent(torch.empty(n, 3, dtype=dtype)).to(device).requires_grad_() for n in (2, 5)]
    kwargs = dict(case.kwargs)
    for key in ("lr", "betas"):
        kwargs[key] = to_device(kwargs[key]) if device == DEVICE and key in kwargs else kwargs.get(key)
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    if foreach and not kwargs.get("fused") and not kwargs.get("differentiable"):
        kwargs["foreach"] = True
    opt = info.optim_cls(weights, **kwargs)

    def closure():
        opt.zero_grad()
        loss = sum((w.sin() ** 2).sum() for w in weights)
        loss.backward()
        return loss

    for _ in range(5):
        if info.step_requires_closure:
            opt.step(closure)
        else:
            closure()
            opt.step()
    return [w.detach() for w in weights]


def optimizer(info, dtype: torch.dtype) -> Outcome:
    """An optimizer with every set of options: parameters after five steps."""
    out = Outcome()
    for case, foreach in optimizer_cases(info, out):
        number = out.samples - 1
        want, refused = attempt(lambda c=case, f=foreach: optimized(info, dtype, c, f, "cpu"))
        if refused is not None:
            continue
        got, failed = attempt(lambda c=case, f=foreach: optimized(info, dtype, c, f, DEVICE))
        if failed is not None:
            out.add(number, [("error", f"{case.desc}: {text_of(failed)}")])
            continue
        out.add(number, [(k, f"{case.desc}: {t}") for k, t in differences(got, want)])
    return out


QUESTIONS: dict[str, Callable] = {
    "forward": forward,
    "strided": lambda op, dtype: forward(op, dtype, noncontiguous=True),
    "inplace": in_place,
    "out": out_forms,
    "grad": gradients,
    "gradgrad": lambda op, dtype: gradients(op, dtype, double=True),
    "jvp": tangents,
    "jvp_of_grad": lambda op, dtype: tangents(op, dtype, of_gradients=True),
    "hessian": hessians,
    "errors": errors,
}
# Questions that are asked once, in a dtype where rounding hides nothing; forward is asked for every dtype.
ONCE = {"strided": "float32", "inplace": "float32", "out": "float32", "errors": "float32"}
GRADIENT_DTYPES = ("float64", "float32")
# Questions about derivatives that are asked in float64 alone.
FURTHER_DERIVATIVES = ("gradgrad", "jvp", "jvp_of_grad", "hessian")


def ops() -> dict[str, OpInfo]:
    return {entry_name(op): op for op in op_db}


def foreach_ops() -> dict[str, OpInfo]:
    """Ops of lists of tensors."""
    dbs = foreach_unary_op_db, foreach_binary_op_db, foreach_pointwise_op_db, foreach_reduce_op_db, foreach_other_op_db
    return {entry_name(op): op for db in dbs for op in db}


def all_units() -> list[str]:
    """Every unit's name: `op/div:floor_rounding/float32/forward`."""
    units = []
    for name, op in ops().items():
        supported = op.supported_dtypes("cpu")
        units += [f"op/{name}/{d}/forward" for d, dtype in DTYPES.items() if dtype in supported]
        for question, wanted in ONCE.items():
            dtype = (
                wanted if DTYPES[wanted] in supported else next((d for d, t in DTYPES.items() if t in supported), None)
            )
            units += [f"op/{name}/{dtype}/{question}"] if dtype else []
        grads = op.supported_backward_dtypes("cpu") if op.supports_autograd else ()
        for d in GRADIENT_DTYPES:
            if DTYPES[d] in grads:
                units.append(f"op/{name}/{d}/grad")
        if torch.float64 in grads:
            units += [f"op/{name}/float64/{question}" for question in FURTHER_DERIVATIVES]
    for name, op in foreach_ops().items():
        supported = op.supported_dtypes("cpu")
        units += [f"foreach/{name}/{d}/forward" for d, dtype in DTYPES.items() if dtype in supported]
        units += [f"foreach/{name}/float32/inplace"] + [f"foreach/{name}/float32/grad"] * op.supports_autograd
    for info in module_db:
        units += [f"module/{info.name}/{d}/module" for d in ("float32", "float64") if DTYPES[d] in info.dtypes]
    units += [f"optim/{info.optim_cls.__name__}/float32/optimizer" for info in optim_db]
    return units


# What the name of an overload has and that of its function in Python has not.
BEFORE = re.compile(r"^_*(foreach_|native_|fused_|thnn_fused_|unsafe_)?")
BEHIND = re.compile(
    r"(_(backward|forward|data|input|weight|with_indices|functional|helper|impl|interface|kernel|overrideable|cell))*_?$"
)


def entries_of(op: str) -> list[str]:
    """The entries of an op by their names: `op/nn.functional.max_pool2d` is one of `max_pool2d_with_indices`."""

    def plain(name: str) -> str:
        return BEHIND.sub("", BEFORE.sub("", name))

    base = op.rpartition("::")[2].partition(".")[0]
    found = []
    for name, info in ops().items():
        function = info.name.removeprefix("nn.functional.").removesuffix(".default")
        names = {plain(function.replace(".", "_")), plain(function.rpartition(".")[2])}
        if plain(base) in names or base in (info.aten_name, info.aten_backward_name):
            found.append(f"op/{name}")
    return found + [f"foreach/{name}" for name in foreach_ops() if plain(name) == plain(base)]


def spread(units: list[str]) -> list[str]:
    """One unit of each entry: which dtype and question it is, is as good as random, but the same every time.

    Of the ops of lists, whose entries are much alike, one in eight.
    """
    entries: dict[str, list[str]] = {}
    for unit in units:
        entries.setdefault(unit.rsplit("/", 2)[0], []).append(unit)
    numbers = {entry: zlib.crc32(entry.encode()) for entry in entries}
    chosen = [e for e in entries if not e.startswith("foreach/") or numbers[e] % 8 == 0]
    return [entries[e][numbers[e] % len(entries[e])] for e in chosen]


def run(unit: str) -> Outcome:
    """Runs one unit in this process."""
    db, entry, dtype, question = unit.split("/")
    if db == "op":
        return QUESTIONS[question](ops()[entry], DTYPES[dtype])
    if db == "foreach":
        return QUESTIONS[question](foreach_ops()[entry], DTYPES[dtype])
    if db == "module":
        return module(next(i for i in module_db if i.name == entry), DTYPES[dtype])
    return optimizer(next(i for i in optim_db if i.optim_cls.__name__ == entry), DTYPES[dtype])
