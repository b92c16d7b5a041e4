"""Views and in-place operations have exactly PyTorch's aliasing.

The property test plays random programs of views, writes and storage operations on the CPU and on the device side by
side. After each step every alias is compared: bytes, sizes, strides, offset, dtype, which aliases share a storage, and
the size of that storage.
"""

import copy
import io
import itertools
import pickle
import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import DEVICE, assert_same, bits, outcome

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


# ---------------------------------------------------------------- named cases


@pytest.fixture(params=["cpu", DEVICE])
def device(request):
    """Every named case states what is right and holds on the CPU too: the statement itself is tested."""
    return request.param


def test_writes_through_a_slice_show_in_the_base(device):
    a = torch.zeros(6, device=device)
    b = a[2:4]
    b.add_(3)
    assert a.tolist() == [0, 0, 3, 3, 0, 0]
    a[3] = 7
    assert b.tolist() == [3, 7]


def test_reads_before_a_write_keep_their_values(device):
    a = torch.arange(4.0, device=device)
    b, c = a * 2, a.clone()
    a.zero_()
    assert b.tolist() == [0, 2, 4, 6] and c.tolist() == [0, 1, 2, 3] and a.tolist() == [0, 0, 0, 0]


def test_buckets_as_ddp_makes_them(device):
    """One flat buffer, a view for each gradient; gradients are written, the bucket is reduced, the views show it."""
    shapes = [(4, 3), (3,), (2, 2, 2)]
    bucket = torch.zeros(sum(torch.Size(s).numel() for s in shapes), device=device)
    views, at = [], 0
    for s in shapes:
        n = torch.Size(s).numel()
        views.append(bucket.narrow(0, at, n).view(s))
        at += n
    for i, v in enumerate(views):
        v.copy_(torch.full(v.shape, i + 1.0, device=device))
    bucket.div_(2)
    assert [v.flatten()[0].item() for v in views] == [0.5, 1, 1.5]
    views[1].mul_(10)
    assert bucket[12:15].tolist() == [10, 10, 10]
    assert bucket.sum().item() == 12 * 0.5 + 3 * 10 + 8 * 1.5


def test_gradients_accumulate_into_bucket_views(device):
    lin = torch.nn.Linear(3, 2).to(device)
    bucket = torch.zeros(8, device=device)
    lin.weight.grad, lin.bias.grad = bucket[:6].view(2, 3), bucket[6:]
    before = bucket.data_ptr()
    for _ in range(2):
        lin(torch.ones(4, 3, device=device)).sum().backward()
    assert lin.weight.grad.data_ptr() == before
    assert bucket.tolist() == [8.0] * 8


def test_flat_parameters(device):
    """As FSDP keeps them: the module's parameters are views of one flat parameter, which the optimizer steps."""
    flat = torch.nn.Parameter(torch.arange(8.0, device=device))
    weight, bias = flat[:6].view(2, 3), flat[6:]
    x = torch.ones(4, 3, device=device)
    torch.nn.functional.linear(x, weight, bias).sum().backward()
    assert flat.grad.tolist() == [4.0] * 8
    torch.optim.SGD([flat], lr=0.5).step()
    assert weight.tolist() == [[-2, -1, 0], [1, 2, 3]] and bias.tolist() == [4, 5]


def test_flat_parameter_freed_and_regrown(device):
    """FSDP frees the storage between uses; the views stay and show what is written after it is there again."""
    flat = torch.arange(6.0, device=device)
    view = flat[2:5]
    size = flat.untyped_storage().nbytes()
    flat.untyped_storage().resize_(0)
    assert flat.untyped_storage().nbytes() == 0 and flat.shape == (6,)
    flat.untyped_storage().resize_(size)
    flat.copy_(torch.arange(10.0, 16.0, device=device))
    assert view.tolist() == [12, 13, 14]


@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizer_on_views(device, foreach):
    base = torch.ones(3, 4, device=device)
    params = [base[0], base.t()[1][1:]]
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    torch.optim.SGD(params, lr=0.25, foreach=foreach).step()
    assert base.tolist() == [[0.5] * 4, [1, 0.5, 1, 1], [1, 0.5, 1, 1]]


def test_overlapping_windows(device):
    a = torch.arange(6.0, device=device)
    w = a.as_strided((4, 3), (1, 1))
    assert w.sum(1).tolist() == [3, 6, 9, 12]
    a[2] = 100
    assert w[:3, :].tolist() == [[0, 1, 100], [1, 100, 3], [100, 3, 4]]
    w.fill_(5)
    assert a.tolist() == [5] * 6
    w[1] = torch.tensor([1.0, 2.0, 3.0], device=device)
    assert a.tolist() == [5, 1, 2, 3, 5, 5]


def test_as_strided_ignores_the_view_it_is_called_on(device):
    a = torch.arange(12.0, device=device)
    b = a[6:].as_strided((2, 2), (4, 1), 1)
    assert b.tolist() == [[1, 2], [5, 6]]
    assert a[6:].as_strided((2,), (1,)).tolist() == [6, 7]


IN_PLACE = {
    "add_": lambda t: t.add_(1),
    "fill_": lambda t: t.fill_(1),
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(torch.ones(3, 4, device=t.device)),
    "mul_": lambda t: t.mul_(t),
    "relu_": lambda t: t.relu_(),
    "masked_fill_": lambda t: t.masked_fill_(torch.ones(3, 4, dtype=torch.bool, device=t.device), 1),
    "out": lambda t: torch.add(torch.ones(3, 4, device=t.device), 1, out=t),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([0], device=t.device), torch.ones(1, 4, device=t.device)),
    "scatter_": lambda t: t.scatter_(0, torch.zeros(1, 4, dtype=torch.int64, device=t.device), 1.0),
    "clamp_": lambda t: t.clamp_(0, 1),
    "normal_": lambda t: t.normal_(),
    "addcmul_": lambda t: t.addcmul_(torch.ones(4, device=t.device), torch.ones(4, device=t.device)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_writes_to_expanded_tensors(name):
    """Refused where the CPU refuses; where it does not, the result is the same."""
    results = {}
    for device in ("cpu", DEVICE):
        t = torch.ones(4, device=device).expand(3, 4)
        results[device] = outcome(IN_PLACE[name], t)
    a, b = results["cpu"], results[DEVICE]
    assert type(a) is type(b), (a, b)
    if isinstance(a, Exception):
        assert str(a).splitlines()[0] in str(b)
    elif name != "normal_":
        assert_same(b, a)


OVERLAPS = {
    "add_": lambda a: a[1:].add_(a[:-1]),
    "copy_": lambda a: a[1:].copy_(a[:-1]),
    "out": lambda a: torch.add(a[:-1], 1, out=a[1:]),
    "mul_": lambda a: a[:-1].mul_(a[1:]),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_partial_overlap_is_refused(name):
    for device in ("cpu", DEVICE):
        a = torch.arange(5.0, device=device)
        with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor refer"):
            OVERLAPS[name](a)
        assert a.tolist() == [0, 1, 2, 3, 4]


def test_the_results_of_aminmax_lie_apart():
    a, out = torch.arange(6.0, device=DEVICE).reshape(2, 3), torch.zeros(4, device=DEVICE)
    with pytest.raises(ValueError, match="must not overlap"):
        torch.aminmax(a, dim=1, out=(out[:2], out[1:3]))
    torch.aminmax(a, dim=1, out=(out[:2], out[2:]))
    assert out.tolist() == [0, 3, 2, 5]


def test_full_overlap_is_fine(device):
    a = torch.arange(4.0, device=device)
    a.add_(a)
    torch.mul(a, 2, out=a)
    b = a.view(2, 2)
    b.add_(a.view(2, 2))
    assert a.tolist() == [0, 8, 16, 24]


def test_copies_within_a_storage(device):
    a = torch.arange(8.0, device=device)
    a[:4].copy_(a[4:])
    assert a.tolist() == [4, 5, 6, 7, 4, 5, 6, 7]
    m = torch.arange(9.0, device=device).view(3, 3)
    m.copy_(m.t().clone())
    assert m.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_chained_views_in_odd_order(device):
    a = torch.arange(24.0, device=device).view(2, 3, 4)
    v = a.permute(2, 0, 1)[1:3].transpose(1, 2)[:, 1:, :]
    v.mul_(-1)
    expected = torch.arange(24.0).view(2, 3, 4)
    expected[:, 1:, 1:3] *= -1
    assert a.cpu().equal(expected)


def test_flip_and_negative_steps_are_copies(device):
    a = torch.arange(4.0, device=device)
    b = a.flip(0)
    b[0] = 9
    assert a.tolist() == [0, 1, 2, 3] and b.tolist() == [9, 2, 1, 0]


def test_split_and_unbind_alias(device):
    a = torch.zeros(4, 2, device=device)
    for i, row in enumerate(a.unbind()):
        row.fill_(i)
    for part in a.split([1, 3]):
        part[0, 0] = 9
    assert a.tolist() == [[9, 0], [9, 1], [2, 2], [3, 3]]


def test_reshape_aliases_when_it_can(device):
    a = torch.zeros(2, 3, device=device)
    a.reshape(6)[0] = 1
    a.t().reshape(6)[1] = 5  # a copy
    a.ravel()[1] = 2
    assert a.tolist() == [[1, 2, 0], [0, 0, 0]]


def test_in_place_with_broadcast_and_promotion(device):
    a = torch.zeros(2, 3, device=device)
    a += torch.tensor([1, 2, 3], device=device)
    a[:, 0] -= torch.tensor([1.0, 2.0], device=device)
    a *= 2.5
    assert a.tolist() == [[0, 5, 7.5], [-2.5, 5, 7.5]] and a.dtype == torch.float32


def test_views_of_other_dtypes(device):
    a = torch.ones(4, device=device)
    b = a.view(torch.int32)
    b[0] = 0x40000000
    assert a.tolist() == [2, 1, 1, 1]
    c = a.view(torch.uint8)
    c[4:8] = 0
    assert a.tolist() == [2, 0, 1, 1]
    d = a.view(torch.float64)
    d[1] = 0
    assert a.tolist() == [2, 0, 0, 0]
    z = a.view(torch.complex64)
    z[0] = 1 + 3j
    assert a.tolist() == [1, 3, 0, 0]
    torch.view_as_real(z)[0, 1] = 4
    assert a.tolist() == [1, 4, 0, 0]


def test_real_and_imag_are_views(device):
    z = torch.zeros(3, dtype=torch.complex64, device=device)
    z.real.copy_(torch.arange(3.0, device=device))
    z.imag[1:].fill_(5)
    assert z.tolist() == [0, 1 + 5j, 2 + 5j]
    assert z.real.stride() == (2,) and z.imag.storage_offset() == 1


def test_conj_and_neg_are_lazy_views(device):
    z = torch.tensor([1 + 2j, 3 - 1j], device=device)
    c = z.conj()
    assert c.is_conj() and c.tolist() == [1 - 2j, 3 + 1j]
    z[0] = 5j
    assert c.tolist() == [-5j, 3 + 1j]
    c.add_(1j)  # writes the conjugate back
    assert z.tolist() == [4j, 3 - 2j]
    n = c.imag
    assert n.is_neg() and n.tolist() == [-4, 2]
    assert (n * 2).tolist() == [-8, 4]
    assert (c @ z).item() == pytest.approx(4j.conjugate() * 4j + (3 + 2j) * (3 - 2j))


def test_writes_through_conj_and_neg_views(device):
    z = torch.tensor([1 + 2j, 3 - 1j], device=device)
    c = z.conj()
    c.copy_(torch.tensor([1j, 2j]))  # from the host
    assert z.tolist() == [-1j, -2j]
    c.copy_(torch.tensor([3j, 4j], device=device))
    assert z.tolist() == [-3j, -4j]
    c[0] = 7j
    assert z.tolist() == [-7j, -4j]
    c.copy_(c.clone().conj())
    assert z.tolist() == [7j, 4j]
    torch.add(z, 1j, out=c)
    assert z.tolist() == [-8j, -5j] and c.tolist() == [8j, 5j]
    c.fill_(1 + 1j)
    assert z.tolist() == [1 - 1j, 1 - 1j]
    z.conj().imag.add_(1)
    assert z.tolist() == [1 - 2j, 1 - 2j]
    z.conj().imag.zero_()
    assert z.tolist() == [1, 1]
    torch._neg_view(z.real).mul_(torch.tensor([2.0, 3.0], device=device))
    assert z.tolist() == [2, 3]


def test_data_and_detach(device):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    p.data[1] = 5
    p.detach().mul_(2)
    assert p.tolist() == [2, 10, 2] and p._version == 1  # `.data` does not count, `detach` does
    new = torch.zeros(2, 2, device=device)
    p.data = new
    assert p.shape == (2, 2) and p.requires_grad and p.data_ptr() == new.data_ptr()
    new.fill_(3)
    assert p.tolist() == [[3, 3], [3, 3]]


def test_swapping_data(device):
    a, b = torch.zeros(2, device=device), torch.ones(3, device=device)
    view = a[:1]
    a.data, b.data = b.data, a.data
    assert a.tolist() == [1, 1, 1] and b.tolist() == [0, 0]
    view.fill_(7)
    assert b.tolist() == [7, 0]
    p, q = torch.nn.Parameter(a), torch.nn.Parameter(b)
    torch.utils.swap_tensors(p, q)
    assert p.tolist() == [7, 0] and q.tolist() == [1, 1, 1]


def test_set(device):
    a, b = torch.zeros(4, device=device), torch.arange(4.0, device=device)
    view = a[1:]
    a.set_(b)
    a[0] = 9
    assert b.tolist() == [9, 1, 2, 3] and view.tolist() == [0, 0, 0]
    a.set_(b.untyped_storage(), 1, (2,), (2,))
    assert a.tolist() == [1, 3]
    a.set_()
    assert a.shape == (0,) and a.untyped_storage().nbytes() == 0
    part = torch.arange(5.0, device=device)[2:4]
    part.set_()
    assert part.shape == (0,) and part.storage_offset() == 0


def test_resize(device):
    a = torch.arange(6.0, device=device)
    b = a[1:3]
    a.resize_(2, 2)
    assert a.tolist() == [[0, 1], [2, 3]] and a.untyped_storage().nbytes() == 24
    a.resize_(3, 4)
    assert a.untyped_storage().nbytes() == 48 and a.flatten()[:6].tolist() == [0, 1, 2, 3, 4, 5]
    b.fill_(7)
    assert a.flatten()[:4].tolist() == [0, 7, 7, 3]  # still one storage
    b.resize_(4)
    assert b.tolist() == [7, 7, 3, 4]
    c = torch.zeros(2, 3, 4, 5, device=device).resize_(2, 3, 2, 2, memory_format=torch.channels_last)
    assert c.stride() == (12, 1, 6, 3)
    assert a.resize_as_(torch.zeros(2, device=device)).shape == (2,)


def test_views_of_other_dtypes_one_after_another(device):
    x = torch.arange(8, dtype=torch.int32, device=device)
    with torch.tpu.set_eager_mode("fused"):
        x.view(torch.int16)[0] = 7
        x.view(torch.uint8)[5] = 1
        x.view(torch.int64)[3] = -1
        x.view(torch.float16)[9] = 1.0  # 0x3c00, the upper half of element 4
        b = x.view(2, 4).view(torch.int64).view(torch.uint8)
        c = x.view(torch.complex64)
        assert x.tolist() == [7, 257, 2, 3, 4 + (0x3C00 << 16), 5, -1, -1]
        assert b.shape == (2, 16) and b[0, :6].tolist() == [7, 0, 0, 0, 1, 1]
        assert torch.view_as_real(c).view(torch.int32).flatten().tolist() == x.tolist()


def test_set_grows_the_storage(device):
    a = torch.arange(4.0, device=device)
    b = torch.empty(0, device=device)
    b.set_(a.untyped_storage(), 1, [2, 2], [3, 1])  # the last place is 5
    assert a.untyped_storage().nbytes() == 24
    b.fill_(7)
    assert a.tolist() == [0, 7, 7, 3] and b.tolist() == [[7, 7], [7, 7]]


def test_storage_resize_keeps_bytes(device):
    a = torch.arange(4.0, device=device)
    a.untyped_storage().resize_(8)
    a.untyped_storage().resize_(16)
    assert a[:2].tolist() == [0, 1]
    a.untyped_storage().resize_(1024)
    assert a[:2].tolist() == [0, 1] and a.untyped_storage().nbytes() == 1024


def test_a_tensor_over_a_shrunk_storage_is_an_error():
    """On the CPU this is undefined; on the device it must be an exception, not a crash."""
    a = torch.arange(64.0, device=DEVICE)
    a.untyped_storage().resize_(0)
    for f in (
        lambda: a + 1,
        lambda: a.add_(1),
        lambda: a.cpu(),
        lambda: a[3].item(),
        lambda: repr(a),
        lambda: a.clone(),
    ):
        with pytest.raises(RuntimeError, match="storage"):
            f()


def test_out_resizes_and_aliases(device):
    out = torch.empty(0, device=device)
    assert torch.add(torch.ones(2, 2, device=device), 1, out=out) is out
    assert out.tolist() == [[2, 2], [2, 2]]
    base = torch.zeros(4, device=device)
    torch.add(torch.ones(2, device=device), 1, out=base[1:3])
    assert base.tolist() == [0, 2, 2, 0]
    m = torch.zeros(2, 2, device=device)
    torch.mm(torch.eye(2, device=device), torch.tensor([[1.0, 2], [3, 4]], device=device), out=m.t())
    assert m.tolist() == [[1, 3], [2, 4]]
    with pytest.warns(UserWarning, match="resized"):
        torch.add(torch.ones(3, device=device), 1, out=m)
    assert m.tolist() == [2, 2, 2]


STRIDED = {
    "complex transform": (torch.complex64, lambda x, out: torch.fft.fft2(x.cfloat(), dim=(0, 1), out=out)),
    "transform of reals": (torch.complex64, lambda x, out: torch.fft.rfft2(x, dim=(0, 1), out=out)),
    "transform to reals": (torch.float32, lambda x, out: torch.fft.irfft2(x.cfloat(), dim=(0, 1), out=out)),
    "of a permuted tensor": (torch.float32, lambda x, out: torch.add(x.permute(2, 0, 1), 1, out=out)),
    "inverse": (torch.float32, lambda x, out: torch.linalg.inv(torch.eye(3, device=x.device), out=out)),
    "cholesky_inverse": (torch.float32, lambda x, out: torch.cholesky_inverse(torch.eye(3, device=x.device), out=out)),
    "arange": (torch.float32, lambda x, out: torch.arange(6, out=out)),
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("form", ["empty", "wrong size"])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_that_is_resized_gets_the_strides_of_the_cpu(device, name, form):
    dtype, f = STRIDED[name]
    shape = (0,) if form == "empty" else (2, 5)
    expected, got = (torch.zeros(shape, dtype=dtype, device=d) for d in ("cpu", device))
    for out in (expected, got):
        f(torch.arange(120.0).reshape(4, 6, 5).to(out.device), out)
    assert (got.shape, got.stride()) == (expected.shape, expected.stride())


EXPANDED = {
    "index_put_": lambda x, i, v: x.index_put_((i,), v),
    "index_put_ that adds": lambda x, i, v: x.index_put_((i,), v, accumulate=True),
    "index_fill_": lambda x, i, v: x.index_fill_(0, i, 5.0),
    "index_fill_ of a tensor": lambda x, i, v: x.index_fill_(0, i, v[0]),
    "masked_fill_": lambda x, i, v: x.masked_fill_(x > 0, 5.0),
    "masked_fill_ of a tensor": lambda x, i, v: x.masked_fill_(x > 0, v[0]),
    "x[i] = v": lambda x, i, v: x.__setitem__(i, v),
    "x[mask] = number": lambda x, i, v: x.__setitem__(x > 0, 5.0),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_indexed_writes_to_expanded_tensors_are_warned_of(name):
    """As on the CPU, and only for these tensors."""
    seen = {}
    torch.set_warn_always(True)
    try:
        for device in ("cpu", DEVICE):
            for expanded in (True, False):
                x = torch.ones(1, device=device).expand(3)
                x = x if expanded else x.contiguous()
                i, v = torch.tensor([0, 2], device=device), torch.tensor([2.0, 2.0], device=device)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    EXPANDED[name](x, i, v)
                seen[device, expanded] = [str(w.message).split(" (Triggered")[0] for w in caught]
    finally:
        torch.set_warn_always(False)
    assert seen["cpu", True] and not seen["cpu", False]
    assert [seen[DEVICE, e] for e in (True, False)] == [seen["cpu", e] for e in (True, False)]


@pytest.mark.filterwarnings("ignore:Use of")
def test_masked_writes_to_expanded_tensors(device):
    """What the mask leaves out does not undo what it lets through elsewhere."""
    mask = torch.tensor([[True, False, False], [False, False, True]], device=device)
    for start in ([1.0, 2.0, 3.0], [float("nan"), 0.0, float("nan")]):
        base = torch.tensor(start, device=device)
        base.expand(2, 3).masked_fill_(mask, -0.0)
        assert base.tolist()[::2] == [0, 0] and str(base.tolist()[0]) == "-0.0"
    base = torch.tensor([1.0, 2.0, 3.0], device=device)
    base.expand(2, 3)[mask] = 5.0
    assert base.tolist() == [5, 2, 5]
    base.expand(2, 3).index_put_((torch.tensor([0, 1], device=device), torch.tensor([1, 1], device=device)), base[0])
    assert base.tolist() == [5, 5, 5]
    base = torch.tensor([1j, 2j], device=device)
    base[:1].expand(3).masked_fill_(torch.tensor([False, True, False], device=device), 1 + 1j)
    assert base.tolist() == [1 + 1j, 2j]


def test_an_operand_is_not_resized(device):
    wide = torch.full((5, 5), 2.0, device=device)
    y = torch.ones(5, 1, device=device)
    for f in (lambda: torch.mul(y, wide, out=y), lambda: y.ldexp_(wide), lambda: y.mul_(wide)):
        with pytest.raises(
            RuntimeError, match=r"output with shape \[5, 1\] doesn't match the broadcast shape \[5, 5\]"
        ):
            f()
    assert y.shape == (5, 1) and y.sum().item() == 5
    assert torch.mul(y, 3, out=y) is y and y.sum().item() == 15


# ---------------------------------------------------------------- autograd through views


def test_backward_through_views(device):
    x = torch.arange(6.0, device=device, requires_grad=True)
    v = x.view(2, 3).t()[1:]
    (v * torch.tensor([[1.0, 2], [3, 4]], device=device)).sum().backward()
    assert x.grad.tolist() == [0, 1, 3, 0, 2, 4]


def test_backward_after_in_place_on_a_view(device):
    x = torch.ones(4, device=device, requires_grad=True)
    y = x * 2
    y[1:3].mul_(3)
    z = y.view(2, 2)
    z[0].add_(1)
    (y * torch.arange(4.0, device=device)).sum().backward()
    assert y.tolist() == [3, 7, 6, 2]
    assert x.grad.tolist() == [0, 6, 12, 6]


def test_backward_with_as_strided_expand_unfold_diagonal(device):
    x = torch.arange(9.0, device=device, requires_grad=True)
    m = x.view(3, 3)
    loss = m.diagonal().sum() + x.as_strided((3, 2), (1, 1)).sum() + x.unfold(0, 3, 3).sum() + x[:1].expand(5).sum()
    loss.backward()
    assert x.grad.tolist() == [1 + 1 + 1 + 5, 2 + 1, 2 + 1, 1 + 1, 2, 1, 1, 1, 2]


def test_saved_tensors_notice_in_place(device):
    x = torch.ones(3, device=device, requires_grad=True)
    y = x.exp()
    y[0] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_leaves_refuse_in_place(device):
    x = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x[1:].mul_(2)
    with torch.no_grad():
        x[1:].mul_(2)
    assert x.tolist() == [1, 2, 2]


def test_versions_and_bases(device):
    a = torch.zeros(4, device=device)
    b = a[1:]
    b.add_(1)
    a.mul_(2)
    assert a._version == b._version == 2 and b._base is a and b._is_view()


# ---------------------------------------------------------------- copies that keep or cut aliasing


def test_saving_keeps_aliasing(device):
    a = torch.arange(6.0, device=device)
    saved = {"a": a, "row": a.view(2, 3)[1], "every": a[::2]}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)
    assert all(t.device == a.device for t in back.values())
    back["a"][4] = 40
    assert back["row"].tolist() == [3, 40, 5] and back["every"].tolist() == [0, 2, 40]
    assert back["a"].tolist() == [0, 1, 2, 3, 40, 5]
    assert back["row"].stride() == saved["row"].stride() and back["every"].stride() == (2,)
    assert a.tolist() == [0, 1, 2, 3, 4, 5]


def test_deepcopy_keeps_aliasing(device):
    a = torch.arange(4.0, device=device)
    b, v = copy.deepcopy((a, a[1:3]))
    v.fill_(9)
    assert b.tolist() == [0, 9, 9, 3] and a.tolist() == [0, 1, 2, 3]


def test_tied_weights_stay_tied(device):
    m = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)).to(device)
    m[1].weight = m[0].weight
    n = copy.deepcopy(m)
    assert n[0].weight is n[1].weight and n[0].weight is not m[0].weight
    n = pickle.loads(pickle.dumps(m))
    with torch.no_grad():
        n[0].weight.zero_()
    assert n[1].weight.abs().sum().item() == 0 and m[0].weight.abs().sum().item() > 0


def test_pickled_views(device):
    a = torch.arange(12.0, device=device).view(3, 4)
    for v in (a.t(), a[1], a[:, 1::2], a[2:, 2:], a[0, :0]):
        w = pickle.loads(pickle.dumps(v))
        assert w.tolist() == v.tolist() and w.stride() == v.stride() and w.device == v.device


def test_clone_cuts(device):
    a = torch.arange(6.0, device=device).view(2, 3)
    b, c, d = a.clone(), a.t().contiguous(), a.to(torch.float32, copy=True)
    a.zero_()
    assert b.sum().item() == c.sum().item() == d.sum().item() == 15
    assert a.contiguous() is a and a.to(torch.float32) is a


LAZY_WRITES = {
    "add_": lambda t: t.add_(1),
    "fill_": lambda t: t.fill_(7),
    "copy_": lambda t: t.copy_(torch.arange(4.0) + 9),
    "view": lambda t: t.view(2, 2)[1].mul_(3),
    "setitem": lambda t: t.__setitem__(2, 8.0),
    "out=": lambda t: torch.add(t, 1, out=t),
    "foreach": lambda t: torch._foreach_mul_([t, t.new_ones(2)], 2.0),
    "resize_": lambda t: t.resize_(3).fill_(1),
    "random": lambda t: t.bernoulli_(1.0),
    "on the CPU": lambda t: torch.nn.init.uniform_(t, 1.0, 1.0),
}


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("name", LAZY_WRITES)
def test_a_write_to_a_lazy_clone_is_its_own(name, original):
    """The other storage, and what was computed of either, keep their values; both may be written in turn."""
    found = {}
    for device in ("cpu", DEVICE):
        t = torch.arange(4.0, device=device)
        clone = t._lazy_clone()
        second = clone._lazy_clone()
        before = clone + t
        assert torch._C._is_cow_tensor(t) and torch._C._is_cow_tensor(clone)
        first, then = (t, clone) if original else (clone, t)
        LAZY_WRITES[name](first)
        assert not torch._C._is_cow_tensor(first) and torch._C._is_cow_tensor(then)
        LAZY_WRITES["add_"](then)
        LAZY_WRITES["add_"](second)
        found[device] = [first.cpu(), then.cpu(), second.cpu(), before.cpu()]
    for device, cpu in zip(found[DEVICE], found["cpu"], strict=True):
        assert torch.equal(device, cpu), name
