"""The calls of `crates/aten/goldens`, run by PyTorch on the CPU and on the device.

The golden files pin what a call lowers to; here the same calls have to give PyTorch's results, through the dispatcher
and without falling back to the CPU. The notation is that of `oxitorch_aten::case`.
"""

import importlib
import importlib.util
import os
import re
import zlib
from pathlib import Path

import oxitorch._sparse  # noqa: F401 (what it defines)
import pytest
import torch
from referees import REFEREES
from support import assert_same_form, outcome, tensors, to_device
from ulps import MOST, Referee

GOLDENS = Path(__file__).parents[2] / "crates" / "aten" / "goldens"


@torch.library.impl("oxitorch::_spmm", "CPU")
def spmm(rows, columns, values, dense, size):
    """The referee for what PyTorch has under another name."""
    return torch.sparse_coo_tensor(torch.stack([rows, columns]), values, (size, dense.shape[0])).to_dense() @ dense


@torch.library.impl("oxitorch::_fence", "CPU")
def fence(x, *_):
    """The referee for a barrier, which changes nothing."""
    return x.clone()


@torch.library.impl("oxitorch::_asserted", "CPU")
def asserted(x, ok, message):
    """The referee for what a program asserts."""
    if not ok.all():
        raise RuntimeError(message)
    return x.clone()


@torch.library.impl("oxitorch::_assert", "CPU")
def alone(ok, message):
    """The referee for what is called for what it asserts."""
    if not ok.all():
        raise RuntimeError(message)
    return ok.bool().all()


@torch.library.impl("oxitorch::_solved", "CPU")
def solved(x, info, message):
    """The referee for what a decomposition has found."""
    if info.any():
        raise torch.linalg.LinAlgError(message)
    return x.clone()


for _name in ("_offload", "_reload", "_same"):
    torch.library.impl(f"oxitorch::{_name}", "CPU", lambda x: x.clone())


DTYPES = {
    "bool": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64, "f16": torch.float16, "bf16": torch.bfloat16,
    "f32": torch.float32, "f64": torch.float64, "c64": torch.complex64, "c128": torch.complex128,
    "f8e4m3fn": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {str(d).removeprefix("torch."): d for d in DTYPES.values()}
EDGE = [0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, float("inf"), float("-inf"), float("nan"), 1e-5, 1e4, 3, -3]

# Arguments of a schema that a case does not write.
PLACEMENT = {"device", "layout", "memory_format", "stream", "pin_memory", "non_blocking", "sparse_grad", "generator"}

# Rows that only oxitorch calls: they give the sizes of results whose shape depends on data.
INTERNAL = re.compile(r"\.(count|counts|sizes)$")

# Calls whose result is another than the CPU's, and why that is so.
DEVIATIONS = {
    "_grouped_mm bf16[3,4,6] bf16[6,8] i32[3]@<5 none bfloat16": "offsets that do not grow",
    "max_pool2d_with_indices_backward f32[1,1,2,2] f32[1,1,4,4] [2] [2] [0] [1] false i64[1,1,2,2]@<16": "indices that no pooling gives",
    "batch_norm_update_stats bf16[2,3] none none 0.1": "statistics of 16 bits; they are float32, as CUDA's",
    "log_sigmoid_backward f32[4] f32[4] f32[0]": "the CPU needs the buffer of its forward",
    "glu_backward_jvp f32[4,6] f32[4,3] f32[4,6] f32[4,3] f32[4,6] -1": "a gradient that no glu gives",
    "_log_softmax_backward_data f32[2,3] f32[2,3]@unit 1 float16": "CUDA's half to float form",
    "_softmax_backward_data f32[2,3] f32[2,3]@unit 1 float16": "CUDA's half to float form",
    "_scaled_dot_product_fused_attention_overrideable_backward f32[1,2,3,4] f32[1,2,3,4] f32[1,2,3,4] f32[1,2,3,4] f32[3,3] [true,true,true,true] f32[1,2,3,4] f32[1,2,3]@pos i32[0] i32[0] 0 0 0.25 true i64[] i64[] 0.5": "a dropout that its forward has drawn",
    "max_pool2d_with_indices_backward f32[1,1,2,2] f32[1,1,4,4] [3] [2] [1] [1] false i64[1,1,2,2]@<16": "indices that no pooling gives",
}
# Results of which a part may be anything, and the part that may not.
DEFINED = {
    # Rows behind the last offset belong to no group.
    "_grouped_mm f32[6,4] f32[1,4,8] i32[1]@<5 none none": lambda y, x, w, offsets, *_: y[: offsets[-1]],
}
# Operations whose elements are judged as numbers of some size, also where they are less, and why: what comes of
# terms of that size has their rounding.
TERMS = {
    "digamma": (2, "a logarithm and a series, near the root"),
    "polygamma": (2, "a logarithm and a series, near the root"),
    "lgamma": (2, "products of logarithms, near the roots"),
    "mvlgamma": (16, "a sum of lgamma"),
    "gelu": (1, "1 + erf(x), which is next to nothing below -3"),
    "gelu_backward": (4, "1 + tanh(x), and its slope"),
    "_addmm_activation": (1, "1 + erf(x), which is next to nothing below -3"),
    "special_erfcx": (0.5, "a Chebyshev series, of which the first terms are 1"),
    "special_chebyshev_polynomial_t": (1, "a recurrence"),
    "special_shifted_chebyshev_polynomial_w": (8, "a recurrence"),
    "upsample_bicubic2d": (1, "weights of both signs, from coordinates of size 1"),
    "native_layer_norm": (1, "the difference of an element and the mean, over the deviation"),
    "_batch_norm_with_update": (
        8,
        "the difference of two elements near each other, over their deviation, times a weight",
    ),
    "linalg_inv_ex": (32, "elimination in a matrix whose condition is 2000"),
    "linalg_matrix_sqrth": (1, "from eigenvectors"),
    "_upsample_bicubic2d_aa_backward": (1, "weights of both signs, from coordinates of size 1"),
    "_thnn_fused_lstm_cell_backward_impl": (1, "1 - tanh(x)^2"),
    "linalg_qr": (1, "reflections, where there is no LAPACK"),
    "_scaled_mm": (16, "sums of 32 products of 8-bit floats, which cannot be moved by less than an eighth"),
}
# What has no referee: the CPU has no kernel, and `referees.py` neither.
NO_REFEREE = {
    "_scaled_dot_product_fused_attention_overrideable": "test_ops_layers.py has it, as scaled_dot_product_attention"
}
# The other results belong to the backward of the same device.
FIRST_RESULT_ONLY = {
    "_ctc_loss",
    "_ctc_loss.Tensor",
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "log_sigmoid_forward",
    "oxitorch::_rnn_layer",
}
# Whose lowerings are run, if not those of the platform; what other algorithms find may have other signs.
LOWER_FOR = os.environ.get("OXITORCH_LOWER_FOR")
# Where no kernel of PyTorch's is called.
if LOWER_FOR:
    DEVIATIONS["linalg_cholesky_ex f32[3,3] false false"] = (
        "not positive definite: what is left in the result is undefined"
    )
OF_ANY_SIGN = re.compile(r"_linalg_eigh|_linalg_svd")
# What the platform's compiler has not: it runs on the CPU.
WITHOUT = {"tpu": re.compile(r"_fft_\w+ .*(f64|c128)\[|hash_tensor (f|bf)")}.get(LOWER_FOR)
# LAPACK leaves its results column by column.
ANY_STRIDES = re.compile(r"linalg_|triangular_solve|cholesky|_lu_|lu_|qr|eig|svd")


def cases(op=None):
    """(file, [(line, what the golden file says first)]), all or those of an op or overload"""
    files = []
    for path in sorted(GOLDENS.rglob("*.txt")):
        found, lines = [], path.read_text().splitlines()
        for i, line in enumerate(lines):
            if line.startswith("case: ") and op in (None, line.split()[1], line.split()[1].partition(".")[0]):
                found.append((line.removeprefix("case: "), lines[i + 1] if i + 1 < len(lines) else ""))
        needs = {name.partition("::")[0] for name, _ in found if name.startswith("torchvision::")}
        missing = [name for name in needs if not importlib.util.find_spec(name)]
        marks = [pytest.mark.skip(f"{name} is not installed") for name in missing]
        for name in needs.difference(missing):
            importlib.import_module(name)
        if found:
            files.append(pytest.param(found, id=str(path.relative_to(GOLDENS).with_suffix("")), marks=marks))
    return files


def values(n, domain, dtype, g):
    """Numbers of a domain, in float64."""
    if m := re.fullmatch(r"<(\d+)", domain):
        return torch.randint(0, int(m[1]), (n,), generator=g).double()
    if m := re.fullmatch(r"(-?[\d.]+)\.\.(-?[\d.]+)", domain):
        low, high = float(m[1]), float(m[2])
        return low + (high - low) * torch.rand(n, generator=g, dtype=torch.float64)
    if domain == "pos":
        return 0.1 + 1.9 * torch.rand(n, generator=g, dtype=torch.float64)
    if domain == "unit":
        return torch.rand(n, generator=g, dtype=torch.float64)
    if domain == "!0":
        sign = torch.randint(0, 2, (n,), generator=g) * 2 - 1
        return sign * (0.5 + 2.5 * torch.rand(n, generator=g, dtype=torch.float64)).add(
            0 if dtype.is_floating_point else 0.5
        )
    if domain == "edge":
        return torch.tensor((EDGE * (n // len(EDGE) + 1))[:n], dtype=torch.float64)
    if dtype == torch.bool:
        return torch.randint(0, 2, (n,), generator=g).double()
    if dtype.is_floating_point or dtype.is_complex:
        return 2 * torch.randn(n, generator=g, dtype=torch.float64)
    return torch.randint(-9, 10, (n,), generator=g).double()


def tensor(token, seed):
    """`f32[2,3]@pos`"""
    token, _, domain = token.partition("@")
    name, shape = re.fullmatch(r"(\w+)\[([\d,]*)\]", token).groups()
    dtype, shape = DTYPES[name], [int(n) for n in shape.split(",") if n]
    g = torch.Generator().manual_seed(seed)
    n = torch.Size(shape).numel()
    if domain == "perm":
        return torch.rand(shape, generator=g).argsort(-1).to(dtype)
    x = values(n, domain, dtype, g)
    if dtype.is_complex:
        x = torch.complex(x, values(n, domain, dtype, g).flip(0))
    if not (dtype.is_floating_point or dtype.is_complex):
        x = x.nan_to_num(7, 100, 0 if dtype.is_signed else 100)
    if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        x = x.abs()
    return x.to(dtype).reshape(shape)


def number(text):
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return complex(text) if text.endswith("j") else float(text)


def split(text):
    """Parts between commas outside brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c == "[") - (c == "]")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p for p in parts if p]


class Default:
    """`none`: the schema's default."""


def argument(token, seed):
    if token == "none":
        return Default
    if token.startswith('"'):
        return token.strip('"')
    if token.startswith("~"):
        return number(token[1:])
    if token.startswith("{"):
        return [None if p == "none" else tensor(p, seed + i) for i, p in enumerate(split(token[1:-1]))]
    if token.startswith("["):
        return [number(p) for p in split(token[1:-1])]
    if re.match(r"\w+\[", token):
        return tensor(token, seed)
    return NAMES[token] if token in NAMES else number(token)


def call(line):
    """(schema, a function of positional and keyword arguments, those arguments on the CPU, whether it is random)"""
    name, *tokens = line.split()
    namespace, base = name.split("::") if "::" in name else ("aten", name)
    base, _, overload = base.partition(".")
    schema = torch._C._get_schema(f"{namespace}::{base}", overload)
    f = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    given = [argument(t, zlib.crc32(f"{line} {i}".encode())) for i, t in enumerate(tokens) if t != "rng"]
    args, kwargs = [], {}
    for a in schema.arguments:
        if a.is_out or a.name in PLACEMENT:
            if a.name == "device":
                kwargs["device"] = torch.device("cpu")
            if a.name == "generator" and not a.has_default_value():
                kwargs["generator"] = None
            continue
        value = given.pop(0)
        if value is Default:
            value = a.default_value if a.has_default_value() else None
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    # A row whose result has a size that depends on data takes that size too; PyTorch finds it by itself.
    assert len(given) <= 1, f"{line}: the schema {schema} takes fewer arguments"
    return schema, f, args, kwargs, "rng" in tokens


def all_results(schema, result, args, kwargs):
    """What is returned, and what the arguments that the schema marks as written hold afterwards."""
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write and not a.is_out]
    by_name = dict(
        zip([a.name for a in schema.arguments if a.name not in PLACEMENT and not a.kwarg_only], args, strict=False)
    )
    return tensors(result) + tensors([{**by_name, **kwargs}[n] for n in written])


def unimplemented(e):
    words = ("not implemented for", "Could not run", "not supported on CPU")
    return isinstance(e, NotImplementedError) or any(w in str(e) for w in words)


def results(f, line, change=lambda arguments: arguments):
    """What a call gives on the CPU, and what it writes, when its arguments are changed first."""
    schema, _, args, kwargs, _ = call(line)
    args, kwargs = change((args, kwargs))
    return all_results(schema, f(*args, **kwargs), args, kwargs)


def comparable(line, found):
    """Results without the signs that other algorithms may choose, and without what may be anything."""
    if part := DEFINED.get(line):
        args = call(line)[2]
        found = [part(t, *args) for t in found]
    return [t.abs() for t in found] if LOWER_FOR and OF_ANY_SIGN.match(line) else found


def is_refusal(lowered):
    """Whether the golden file says that the row raises."""
    return re.match(r"\w+Error: (?!no lowering)", lowered)


def finished(f, args, kwargs):
    """The result of a call that the device has run."""
    result = f(*args, **kwargs)
    torch.tpu.synchronize()
    return result


def check(line, lowered):
    schema, f, args, kwargs, is_random = call(line)
    pointwise = torch.Tag.pointwise in f.tags
    moved, moved_kwargs = to_device(args), to_device(kwargs)
    name = line.split()[0]
    torch.tpu.reset_metrics()
    got = outcome(finished, f, moved, moved_kwargs)
    fallbacks = torch.tpu.metrics()["fallbacks"]
    if is_refusal(lowered):
        # The CPU may be laxer: it reads beyond the end of a vector that is too short.
        assert isinstance(got, Exception), f"no error; the golden file says {lowered}"
        assert type(got).__name__ == lowered.partition(":")[0]
        return
    expected = outcome(results, f, line)
    if isinstance(expected, Exception) and unimplemented(expected):
        f = REFEREES.get(name)
        assert f or name in NO_REFEREE, f"{expected}: referees.py has to say what is right"
        expected = results(f, line) if f else None
    if isinstance(expected, Exception):
        assert isinstance(got, type(expected)), f"{got!r}, on the CPU {expected!r}"
        return
    assert not isinstance(got, Exception), f"{type(got).__name__}: {got}"
    if lowered.startswith("module"):
        assert bool(fallbacks) == bool(WITHOUT and WITHOUT.match(line)), f"ran on the CPU: {fallbacks}"
    if expected is None:
        return
    found = all_results(schema, got, moved, moved_kwargs)
    assert len(found) == len(expected)
    only = slice(1 if name in FIRST_RESULT_ONLY else None)
    for i, (a, b) in enumerate(zip(found[only], expected[only], strict=True)):
        assert_same_form(a, b, f"result {i}", strides=not is_random and not ANY_STRIDES.search(name))
    if not is_random:
        referee = Referee(lambda change: comparable(line, results(f, line, change)), pointwise)
        found = [t.detach().cpu() for t in found[only]]
        compare(comparable(line, found), comparable(line, expected[only]), referee, TERMS.get(name, (0, ""))[0])


def compare(found, expected, referee, terms):
    """Holds results against the CPU's: floats in units in the last place, all others exactly."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if b.dtype in MOST:
            problem = referee.problem(i, a, b, terms)
            assert problem is None, f"result {i}: {problem}"
        else:
            assert torch.equal(a, b), f"result {i}: {a}, on the CPU {b}"


def pytest_generate_tests(metafunc):
    if "found" in metafunc.fixturenames:
        metafunc.parametrize("found", cases(metafunc.config.getoption("--op")))


@pytest.mark.filterwarnings("ignore")
def test_goldens(found):
    wrong = []
    for line, lowered in found:
        if INTERNAL.search(line.split()[0]):
            continue
        try:
            check(line, lowered)
        except Exception as e:
            if line in DEVIATIONS and isinstance(e, AssertionError):
                continue
            reason = f"{type(e).__name__} {e}".strip().partition("\nassert ")[0]
            wrong.append(f"{line}\n    {reason}")
        else:
            if line in DEVIATIONS and not LOWER_FOR:
                wrong.append(f"{line}\n    is right: take it off the list")
    assert not wrong, f"{len(wrong)} of {len(found)} calls are wrong\n" + "\n".join(wrong)


def test_pytorch_hands_each_rows_operation_to_the_row():
    """What PyTorch takes apart before needs no row, or does not reach it."""
    found = [p.values[0] for p in cases() if not p.marks]
    names = {line.split()[0] for calls in found for line, _ in calls}
    names = {n if "::" in n else f"aten::{n}" for n in names if not INTERNAL.search(n)}
    unreached = {n for n in names if not torch._C._dispatch_has_kernel_for_dispatch_key(n, "PrivateUse1")}
    assert unreached == {"aten::copy"}  # its row is for `_foreach_copy_`


def test_there_are_goldens_and_tables_name_no_others():
    files = [p.values[0] for p in cases()]
    assert len(files) > 100 and all(files)
    lines = {line for found in files for line, _ in found}
    names = {line.split()[0] for line in lines}
    assert DEVIATIONS.keys() | DEFINED.keys() <= lines
    assert TERMS.keys() | NO_REFEREE.keys() | REFEREES.keys() | FIRST_RESULT_ONLY <= names
    assert [len(p.values[0]) > 0 for p in cases("add.Tensor")] == [True] and not cases("none")
