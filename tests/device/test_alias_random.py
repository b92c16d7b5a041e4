"""Random programs of views, writes and storage operations have exactly PyTorch's aliasing.

They are played on the CPU and on the device side by side. After each step every alias is compared: bytes, sizes,
strides, offset, dtype, which aliases share a storage, and the size of that storage.
"""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import DEVICE, bits, outcome

MOST_ALIASES = 6

# ---------------------------------------------------------------- the programs


class World:
    """The same tensors on the CPU and on the device."""

    def __init__(self, base):
        self.cpu = [base]
        self.dev = [base.to(DEVICE)]
        self.log = [f"x0 = {base.dtype}{list(base.shape)}"]
        # What the storage's bytes mean: arithmetic happens in this dtype only, and not after single bytes were seen, so
        # that it meets neither NaN nor denormals (which XLA's CPU client flushes to zero).
        self.home = base.dtype
        self.arithmetic = True

    def step(self, text, f):
        """Does `f(tensors)` on both; a new tensor that it returns becomes an alias."""
        self.log.append(text)
        before = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self.cpu}
        a, b = outcome(f, self.cpu), outcome(f, self.dev)
        if isinstance(a, Exception) or isinstance(b, Exception):
            assert type(a) is type(b), f"{self}\non the CPU {a!r}\non the device {b!r}"
        elif isinstance(a, torch.Tensor) and not any(a is t for t in self.cpu):
            self.cpu.append(a)
            self.dev.append(b)
        self.clear_new_memory(before)
        self.compare()

    def clear_new_memory(self, before):
        """Memory that nobody wrote reads as zeros on the device; on the CPU it is made so."""
        for t in self.cpu:
            storage = t.untyped_storage()
            old = before.get(storage._cdata)
            if old is not None and storage.nbytes() > old:
                torch.empty(0, dtype=torch.uint8).set_(storage)[old:].zero_()
                before[storage._cdata] = storage.nbytes()

    def compare(self):
        for i, (a, b) in enumerate(zip(self.cpu, self.dev, strict=True)):
            seen = [(t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in (a, b)]
            assert seen[0] == seen[1], f"{self}\nx{i}: on the CPU {seen[0]}, on the device {seen[1]}"
            assert torch.equal(bits(a), bits(b)), f"{self}\nx{i}:\non the CPU {a}\non the device {b.cpu()}"
        for i, j in itertools.combinations(range(len(self.cpu)), 2):
            shared = [w[i].untyped_storage()._cdata == w[j].untyped_storage()._cdata for w in (self.cpu, self.dev)]
            assert shared[0] == shared[1], f"{self}\nx{i} and x{j} share a storage: {shared}"

    def drop_one(self, i):
        self.log.append(f"del x{i}, the later ones move down")
        del self.cpu[i], self.dev[i]

    def __str__(self):
        return "\n".join(self.log)


def is_dense(t):
    """Whether the elements fill one piece of memory, each place once."""
    dims = sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1)
    expected = 1
    for s, n in dims:
        if s != expected:
            return False
        expected *= n
    return True


def overlaps_itself(t):
    """Whether two elements may be one place of memory (never wrong when it says no)."""
    if t.numel() == 0:
        return False
    dims = sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1)
    reach = 0
    for s, n in dims:
        if s <= reach:
            return True
        reach += s * (n - 1)
    return False


VIEW_DTYPES = {
    torch.float32: [torch.int32, torch.uint8, torch.float64, torch.bfloat16, torch.complex64, torch.float32],
    torch.int64: [torch.int32, torch.uint8, torch.float64, torch.int16, torch.int64],
    torch.complex64: [torch.float32, torch.int64, torch.float64, torch.complex64],
}

DTYPES = list(VIEW_DTYPES)


def pick(data, what):
    return data.draw(st.sampled_from(what))


def number(data, low, high):
    return data.draw(st.integers(low, high))


def draw_view(data, w, i):
    """Adds a view of alias i."""
    x = w.cpu[i]
    rank = x.dim()
    kinds = ["view", "as_strided", "unsqueeze", "detach", "dtype", "flatten"]
    if rank:
        kinds += ["slice", "slice", "select", "narrow", "unfold", "squeeze", "expand", "chunk"]
    if rank >= 2:
        kinds += ["transpose", "permute", "diagonal", "t"]
    if x.is_complex():
        kinds += ["real", "imag", "view_as_real"]
    kind = pick(data, kinds)
    d = number(data, 0, rank - 1) if rank else 0
    n = x.shape[d] if rank else 1
    if kind == "slice":
        a, step = number(data, -n, n), number(data, 1, 3)
        b = number(data, a, n + 1)
        index = (slice(None),) * d + (slice(a, b, step),)
        w.step(f"x{i}[{index}]", lambda ts: ts[i][index])
    elif kind == "select":
        k = number(data, -n, n)
        w.step(f"x{i}.select({d}, {k})", lambda ts: ts[i].select(d, k))
    elif kind == "narrow":
        a, m = number(data, 0, n), number(data, 0, n)
        w.step(f"x{i}.narrow({d}, {a}, {m})", lambda ts: ts[i].narrow(d, a, m))
    elif kind == "unfold":
        size, step = number(data, 1, max(n, 1)), number(data, 1, 2)
        w.step(f"x{i}.unfold({d}, {size}, {step})", lambda ts: ts[i].unfold(d, size, step))
    elif kind == "squeeze":
        w.step(f"x{i}.squeeze({d})", lambda ts: ts[i].squeeze(d))
    elif kind == "unsqueeze":
        w.step(f"x{i}.unsqueeze({d})", lambda ts: ts[i].unsqueeze(d))
    elif kind == "expand":
        shape = [2, *x.shape]
        w.step(f"x{i}.expand({shape})", lambda ts: ts[i].expand(shape))
    elif kind == "chunk":
        w.step(f"x{i}.chunk(2, {d})[-1]", lambda ts: ts[i].chunk(2, d)[-1])
    elif kind == "transpose":
        e = number(data, 0, rank - 1)
        w.step(f"x{i}.transpose({d}, {e})", lambda ts: ts[i].transpose(d, e))
    elif kind == "permute":
        order = data.draw(st.permutations(range(rank)))
        w.step(f"x{i}.permute({order})", lambda ts: ts[i].permute(order))
    elif kind == "t":
        w.step(f"x{i}.t()", lambda ts: ts[i].t())  # an error above two dimensions
    elif kind == "diagonal":
        offset = number(data, -2, 2)
        w.step(f"x{i}.diagonal({offset})", lambda ts: ts[i].diagonal(offset))
    elif kind == "view":
        shapes = [[-1], [2, -1], [-1, 3], [1, -1, 2], [4, 3], [6, 4]]
        shape = pick(data, shapes)
        w.step(f"x{i}.view({shape})", lambda ts: ts[i].view(shape))
    elif kind == "flatten":
        w.step(f"x{i}.flatten()", lambda ts: ts[i].flatten())  # a view or a copy
    elif kind == "as_strided":
        size = pick(data, [[3], [2, 3], [3, 2], [2, 2, 2], [4], [0], []])
        stride = [pick(data, [1, 2, 3, 6]) for _ in size]
        offset = number(data, 0, 4)
        w.step(f"x{i}.as_strided({size}, {stride}, {offset})", lambda ts: ts[i].as_strided(size, stride, offset))
    elif kind == "dtype":
        dtype = pick(data, VIEW_DTYPES[w.home])
        w.arithmetic &= dtype.itemsize > 2
        w.step(f"x{i}.view({dtype})", lambda ts: ts[i].view(dtype))
    elif kind == "detach":
        w.step(f"x{i}.detach()", lambda ts: ts[i].detach())
    else:
        f = {"real": torch.real, "imag": torch.imag, "view_as_real": torch.view_as_real}[kind]
        w.step(f"torch.{kind}(x{i})", lambda ts: f(ts[i]))


def draw_write(data, w, i):
    """Writes to alias i."""
    x = w.cpu[i]
    kinds = ["fill_", "fill_"]
    expanded = any(s == 0 and n > 1 for n, s in zip(x.shape, x.stride(), strict=True))
    if expanded or not overlaps_itself(x):
        kinds += ["copy_", "copy_other", "setitem"]
        if x.dim():
            kinds += ["setitem_slice"]
        # On expanded tensors these are deprecated, and the result depends on the order in which places are written.
        if not expanded:
            kinds += ["masked_fill_", *(["index_put_"] if x.dim() else [])]
        if x.dtype == w.home and w.arithmetic:
            kinds += ["add_", "add_", "mul_", "out", "add_other"]
    kind = pick(data, kinds)
    value = number(data, 60, 70)
    if x.dtype != w.home and x.dtype.itemsize > 1 and not x.is_floating_point() and not x.is_complex():
        value = int.from_bytes([value] * x.dtype.itemsize)  # a number of ordinary size in every float type
    if kind == "fill_":
        w.step(f"x{i}.fill_({value})", lambda ts: ts[i].fill_(value))
    elif kind == "add_":
        w.step(f"x{i}.add_({value}, alpha=2)", lambda ts: ts[i].add_(value, alpha=2))
    elif kind == "mul_":
        w.step(f"x{i}.mul_(2)", lambda ts: ts[i].mul_(2))
    elif kind == "copy_":
        source = torch.arange(60, 60 + x.numel()).reshape(x.shape).to(x.dtype)
        w.step(f"x{i}.copy_(arange)", lambda ts: ts[i].copy_(source.to(ts[i].device)))
    elif kind == "out":
        source = torch.arange(x.numel()).reshape(x.shape).to(x.dtype)
        w.step(f"torch.mul(arange, 2, out=x{i})", lambda ts: torch.mul(source.to(ts[i].device), 2, out=ts[i]))
    elif kind in ("copy_other", "add_other"):
        j = number(data, 0, len(w.cpu) - 1)
        y = w.cpu[j]
        one_storage = x.untyped_storage()._cdata == y.untyped_storage()._cdata
        if one_storage and not (is_dense(x) and is_dense(y)):
            return  # PyTorch does not look for overlap here, and what comes out depends on the order
        if y.dtype != x.dtype:
            return  # conversions of arbitrary bits are not what is tested
        if kind == "copy_other":
            w.step(f"x{i}.copy_(x{j})", lambda ts: ts[i].copy_(ts[j]))
        else:
            w.step(f"x{i}.add_(x{j})", lambda ts: ts[i].add_(ts[j]))
    elif kind == "setitem":
        w.step(f"x{i}[...] = {value}", lambda ts: ts[i].__setitem__(Ellipsis, value))
    elif kind == "setitem_slice":
        step = number(data, 1, 2)
        w.step(f"x{i}[::{step}] = {value}", lambda ts: ts[i].__setitem__(slice(None, None, step), value))
    elif kind == "masked_fill_":
        mask = (torch.arange(x.numel()) % 3 == 1).reshape(x.shape)
        w.step(f"x{i}.masked_fill_(every third, {value})", lambda ts: ts[i].masked_fill_(mask.to(ts[i].device), value))
    else:
        index = torch.tensor([0, x.shape[0] - 1]) if x.shape[0] else torch.tensor([], dtype=torch.int64)
        w.step(
            f"x{i}[{index.tolist()}] = {value}",
            lambda ts: ts[i].index_put_(
                (index.to(ts[i].device),), torch.tensor(value, dtype=ts[i].dtype, device=ts[i].device)
            ),
        )


def draw_storage(data, w, i):
    """Changes what alias i shows, or its storage."""
    x = w.cpu[i]
    j = number(data, 0, len(w.cpu) - 1)
    kind = pick(data, ["set_", "set_at", "resize_", "storage", "data", "t_", "clone", "as_strided_", "squeeze_"])

    def resize_storage(ts, nbytes):
        ts[i].untyped_storage().resize_(nbytes)

    def set_data(ts):
        ts[i].data = ts[j]

    if kind == "set_":
        w.step(f"x{i}.set_(x{j})", lambda ts: ts[i].set_(ts[j]))
    elif kind == "set_at":
        offset = number(data, 0, 3)
        w.step(
            f"x{i}.set_(storage of x{j}, {offset}, [2, 2], [3, 1])",
            lambda ts: ts[i].set_(ts[j].untyped_storage(), offset, [2, 2], [3, 1]),
        )
    elif kind == "resize_":
        shape = pick(data, [[3], [2, 4], [5, 6], [0]])
        w.step(f"x{i}.resize_({shape})", lambda ts: ts[i].resize_(shape))
    elif kind == "storage":
        # Never smaller than what an alias shows: PyTorch would read beyond the end.
        own = x.untyped_storage()
        aliases = [t for t in w.cpu if t.untyped_storage()._cdata == own._cdata]
        need = max(
            0
            if t.numel() == 0
            else (t.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
            * t.itemsize
            for t in aliases
        )
        nbytes = need + pick(data, [0, 16, 64])
        w.step(f"x{i}.untyped_storage().resize_({nbytes})", lambda ts: resize_storage(ts, nbytes))
    elif kind == "data":
        w.step(f"x{i}.data = x{j}", set_data)
    elif kind == "t_":
        w.step(f"x{i}.t_()", lambda ts: ts[i].t_())
    elif kind == "squeeze_":
        w.step(f"x{i}.squeeze_()", lambda ts: ts[i].squeeze_())
    elif kind == "as_strided_":
        w.step(f"x{i}.as_strided_([2, 2], [2, 1])", lambda ts: ts[i].as_strided_([2, 2], [2, 1]))
    else:
        w.step(f"x{i}.clone()", lambda ts: ts[i].clone())


def play(data, dtype, steps):
    shape = pick(data, {torch.float32: [[24], [4, 6], [2, 3, 4]]}.get(dtype, [[12], [3, 4]]))
    base = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    w = World(base)
    w.compare()
    for _ in range(number(data, steps // 2, steps)):
        if len(w.cpu) > MOST_ALIASES:
            w.drop_one(number(data, 0, len(w.cpu) - 1))
        i = number(data, 0, len(w.cpu) - 1)
        pick(data, [draw_view, draw_view, draw_write, draw_write, draw_write, draw_storage])(data, w, i)


# Programs are small, but each view costs a compile the first time: few examples, long ones.
COMMON = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate, Phase.shrink],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_programs(dtype):
    @settings(max_examples=40, **COMMON)
    @given(st.data())
    def run(data):
        play(data, dtype, 14)

    with torch.no_grad():
        run()


def test_random_programs_in_debug_mode():
    @settings(max_examples=12, **COMMON)
    @given(st.data(), st.sampled_from(DTYPES))
    def run(data, dtype):
        play(data, dtype, 12)

    with torch.no_grad(), torch.tpu.set_eager_mode("debug"):
        run()
