"""Version counters, by which autograd finds that a saved tensor was written: every form that writes counts as on the CPU.

The schemas are those that PyTorch has registered. The arguments are those of calls that PyTorch's databases of ops make,
caught below autograd; where there is none, small tensors and numbers that the CPU takes.
"""

import itertools
import warnings

import pytest
import torch
from support import to_device
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
    op_db,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

FOREACH_DB = (
    *foreach_binary_op_db,
    *foreach_other_op_db,
    *foreach_pointwise_op_db,
    *foreach_reduce_op_db,
    *foreach_unary_op_db,
)
# Called with what is made up here. Of other private ops, some do not check what they are given.
PRIVATE = ("__i", "_foreach_", "_fused_", "_amp_", "_index_put_impl_", "_add_relu")
UNSAFE = ("from_file", "fbgemm_", "range")
# Layouts and libraries that the device has not.
ELSEWHERE = (
    "sparse",
    "mkldnn",
    "cudnn",
    "miopen",
    "quant",
    "nested",
    "jagged",
    "_mps",
    "_test_",
    "csr",
    "q_per_channel",
)
# Written by the CPU's kernels without counting, and counted on the device.
UNCOUNTED = ("_fused_", "_amp_foreach_non_finite_check_and_unscale_", "kron.out")
# The fewest forms that have to be compared; the rest takes arguments that nothing here makes.
COMPARED = 1100


class Calls(TorchDispatchMode):
    """The first call of each overload."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "aten" and func not in self.seen:
            self.seen[func] = copied((args, kwargs))
        return func(*args, **kwargs)


def copied(value):
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, value)


def empty_as(value):
    return pytree.tree_map(lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x, value)


def result_of(f, *args, **kwargs):
    """None where it is refused."""
    try:
        return f(*args, **kwargs)
    except Exception:
        return None


def samples(op, most):
    dtypes = op.supported_dtypes("cpu")
    dtype = torch.float32 if torch.float32 in dtypes or not dtypes else next(iter(dtypes))
    grad = op.supports_autograd and dtype.is_floating_point and op not in FOREACH_DB
    # Not `sample_inputs`, which looks for the running test in the whole stack, each time.
    return list(itertools.islice(op.sample_inputs_func(op, "cpu", dtype, grad), most))


def backward(out):
    out.backward(torch.ones_like(out))


def calls():
    """The first call of each overload that the databases make, by the base name of the op."""
    caught = Calls()
    for op in (*op_db, *FOREACH_DB):
        foreach = op in FOREACH_DB
        for f, sample in itertools.product(
            (op.method_variant, op.inplace_variant) if foreach else (op.op,),
            result_of(samples, op, 8 if foreach else 2) or (),
        ):
            with caught:
                out = f and result_of(f, sample.input, *sample.args, **sample.kwargs)
                if isinstance(out, torch.Tensor) and out.requires_grad:
                    result_of(backward, out)
    named = {}
    for f, given in caught.seen.items():
        named.setdefault(base(f), []).append((f, *given))
    return named


def base(f):
    name = f._schema.name.removeprefix("aten::")
    return f"__{name[3:]}" if name.startswith("__i") else name.strip("_")


def forms_that_write():
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if name != schema.name and schema.is_mutable and not any(word in name for word in ELSEWHERE):
            packet = getattr(torch.ops.aten, name, None)
            if packet is not None and (schema.overload_name or "default") in packet.overloads():
                yield getattr(packet, schema.overload_name or "default")


def from_calls(f, named):
    """Arguments for a form from calls of it or of one that is named alike."""
    parameters = f._schema.arguments
    outs = [p for p in parameters if p.is_out]
    for g, args, kwargs in named.get(base(f), ()):
        given = dict(zip((p.name for p in g._schema.arguments), args, strict=False)) | kwargs
        given |= {p.name: p.default_value for p in parameters if p.has_default_value() and p.name not in given}
        if outs:
            result = result_of(g, *copied(args), **copied(kwargs))
            results = list(result) if isinstance(result, tuple) else [result]
            if len(results) != len(outs) or not all(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(results)):
                continue
            given |= {p.name: empty_as(r) for p, r in zip(outs, results, strict=True)}
        if all(p.name in given for p in parameters):
            yield {p.name: given[p.name] for p in parameters}


def made_up(f):
    """Arguments for a form by the types of its parameters."""
    name = f._schema.name.removeprefix("aten::")
    if name.startswith(UNSAFE) or (name.startswith("_") and not name.startswith(PRIVATE)):
        return
    tensors = [
        torch.ones(2, 2),
        torch.ones(2, 2, dtype=torch.int64),
        torch.ones(2, 2) > 0,
        torch.ones(()),
        torch.ones(4),
    ]
    for tensor, ints, text in itertools.product(tensors, ([2, 2], [0]), (None, "none", "sum")):
        values = {
            "Tensor": tensor,
            "List[Tensor]": [tensor, tensor],
            "List[Optional[Tensor]]": [tensor],
            "number": 1,
            "List[number]": [1, 1],
            "int": 1,
            "float": 0.5,
            "bool": False,
            "List[int]": ints,
            "List[float]": [0.5, 0.5],
            "str": text,
            "Storage": torch.ones(4).untyped_storage(),
        }
        given = {}
        for p in f._schema.arguments:
            kind = str(p.type)
            if p.has_default_value() and not p.is_out:
                given[p.name] = p.default_value
            elif kind.startswith("Optional["):
                given[p.name] = None
            elif values.get(kind) is not None:
                given[p.name] = copied(values[kind])
        if len(given) == len(f._schema.arguments):
            yield given


def written(f, given):
    """Which of the tensors among the arguments have another version after the call."""
    positional = [given[p.name] for p in f._schema.arguments if not p.kwarg_only]
    named = {p.name: given[p.name] for p in f._schema.arguments if p.kwarg_only}
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
    before = [x._version for x in tensors]
    f(*positional, **named)
    return [x._version != v for x, v in zip(tensors, before, strict=True)]


def on_device(given):
    return {k: torch.device("tpu") if isinstance(v, torch.device) else to_device(v) for k, v in given.items()}


def test_all_forms_that_write_count_as_on_the_cpu(fused):
    warnings.simplefilter("ignore")
    named = calls()
    compared, wrong = 0, []
    for f in forms_that_write():
        for given in itertools.chain(from_calls(f, named), made_up(f)):
            cpu = result_of(written, f, copied(given))
            device = cpu and result_of(written, f, on_device(copied(given)))
            if device:
                compared += 1
                more = str(f).removeprefix("aten.").startswith(UNCOUNTED) and all(
                    d or not c for c, d in zip(cpu, device, strict=True)
                )
                if cpu != device and not more:
                    wrong.append(f"{f}: on the CPU {cpu}, on the device {device}")
                break
    assert not wrong, "\n".join(wrong)
    assert compared >= COMPARED


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("form", ["for", "foreach", "fused"])
def test_backward_after_a_step_is_refused(fused, form, how):
    """A step between forward and backward writes weights that the backward wants."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)).to("tpu")
    optimizer = torch.optim.Adam(model.parameters(), **({form: True} if form != "for" else {"foreach": False}))
    step = torch.compile(optimizer.step, backend="tpu") if how == "compiled" else optimizer.step
    for _ in range(3):  # played, noted, recorded by the recipe
        loss = model(torch.ones(2, 3, device="tpu")).sum()
        loss.backward(retain_graph=True)
        step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
