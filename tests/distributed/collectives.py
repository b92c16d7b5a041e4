"""Every collective of c10d on device tensors gives what it gives on CPU tensors, or what its definition says."""

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import IS_TORCH_2_11, case

DEVICES = ("cpu", "tpu")
SUMMED = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
]  # fmt: skip
FLOAT8 = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
MOVED = [
    *SUMMED, torch.bool, torch.int16, *UNSIGNED, torch.complex32, torch.complex64, torch.complex128, *FLOAT8,
]  # fmt: skip


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def data(*shape, dtype=torch.float32, device="cpu", seed=0, of=None):
    """The tensor of a rank: this one, unless another is named."""
    generator = torch.Generator().manual_seed(100 * seed + (rank() if of is None else of))
    x = torch.randint(0, 4, shape, generator=generator)
    if dtype == torch.float8_e8m0fnu:
        x += 1  # it has no zero
    return (x % 2 == 0 if dtype == torch.bool else x.to(dtype)).to(device)


def bits(t):
    """What can be compared: of dtypes that PyTorch hardly computes with, their bytes."""
    t = t.detach().cpu().contiguous()
    return t.view(torch.uint8) if t.dtype in (*FLOAT8, torch.complex32) else t


def same(got, wanted):
    torch.testing.assert_close(bits(got), bits(wanted), rtol=0, atol=0)


def as_on_cpu(f):
    """What `f(device)` gives on the device is what it gives on the CPU."""
    wanted, got = f("cpu"), f("tpu")
    assert len(wanted) == len(got)
    for g, w in zip(got, wanted, strict=True):
        assert g.device.type == "tpu"
        same(g, w)


# A little data goes with the words by which ranks know that they do the same.
LITTLE, MORE = 3, 75


@case
def all_reduce():
    for dtype in SUMMED:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):

            def reduce(device, dtype=dtype, op=op):
                given = [data(n, dtype=dtype, device=device) for n in (LITTLE, MORE)]
                for x in given:
                    dist.all_reduce(x, op)
                return given

            as_on_cpu(reduce)


@case
def all_reduce_of_bits():
    for op, word in ((dist.ReduceOp.BAND, "and"), (dist.ReduceOp.BOR, "or"), (dist.ReduceOp.BXOR, "xor")):
        for dtype, n in itertools.product(
            (torch.int32, torch.int64, torch.uint8, torch.int16, torch.bool), (LITTLE, MORE)
        ):
            x = data(n, dtype=dtype, device="tpu")
            dist.all_reduce(x, op)
            wanted = data(n, dtype=dtype, of=0)
            for r in range(1, size()):
                wanted = getattr(wanted, f"__{word}__")(data(n, dtype=dtype, of=r))
            same(x, wanted)


@case
def all_reduce_of_what_hosts_do_not_reduce():
    def total(dtype, wide):
        return sum(data(9, dtype=dtype, of=r).to(wide) for r in range(size())).to(dtype)

    wides = {
        torch.int16: torch.int32, torch.complex64: torch.complex128, torch.complex128: torch.complex128,
        torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64,
    } | dict.fromkeys(FLOAT8, torch.float32)  # fmt: skip
    for dtype, wide in wides.items():
        x = data(9, dtype=dtype, device="tpu")
        dist.all_reduce(x)
        same(x, total(dtype, wide))
    x = data(9, dtype=torch.bool, device="tpu")
    dist.all_reduce(x)
    same(x, torch.stack([data(9, dtype=torch.bool, of=r) for r in range(size())]).any(0))


def mean(total):
    if not total.is_floating_point() and not total.is_complex():
        return total.div(size(), rounding_mode="trunc")
    # PyTorch's division of complex numbers rounds more than once, also where the divisor is real.
    return torch.view_as_complex(torch.view_as_real(total) / size()) if total.is_complex() else total / size()


@case
def averages():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32):
        for n in (LITTLE, MORE):
            x = data(n, dtype=dtype, device="tpu")
            dist.all_reduce(x, dist.ReduceOp.AVG)
            same(x, mean(sum(data(n, dtype=dtype, of=r) for r in range(size()))))
        out, x = torch.empty(3, dtype=dtype, device="tpu"), data(3 * size(), dtype=dtype, device="tpu")
        dist.reduce_scatter_tensor(out, x, dist.ReduceOp.AVG)
        same(out, mean(sum(data(3 * size(), dtype=dtype, of=r) for r in range(size()))).chunk(size())[rank()])


@case
def scaled_sums():
    x = data(6, device="tpu")
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    same(x, sum(data(6, of=r) for r in range(size())) * 0.5)
    x = data(6, device="tpu")
    dist.all_reduce(x, dist._make_nccl_premul_sum(torch.tensor([0.25], device="tpu")))
    same(x, sum(data(6, of=r) for r in range(size())) * 0.25)
    out = torch.empty(3, device="tpu")
    x = data(3 * size(), device="tpu")
    dist.reduce_scatter_tensor(out, x, dist._make_nccl_premul_sum(2.0))
    same(out, sum(data(3 * size(), of=r) for r in range(size())).chunk(size())[rank()] * 2)
    same(x, data(3 * size()))


@case
def views_are_written():
    def reduce(device):
        base = data(6, 8, device=device)
        dist.all_reduce(base[1:3])
        column = base[:, 2].contiguous()
        dist.all_reduce(column)
        return [base, column]

    as_on_cpu(reduce)
    base = data(6, 8, device="tpu")
    dist.all_reduce(base.t()[3:5])  # hosts refuse what is not contiguous
    wanted = data(6, 8)
    wanted[:, 3:5] = sum(data(6, 8, of=r)[:, 3:5] for r in range(size()))
    same(base, wanted)


@case
def old_values_stay():
    x = data(1000, device="tpu")
    y = x.clone()
    z = x.detach()[:10] * 1
    dist.all_reduce(x)
    same(y, data(1000))
    same(z, data(1000)[:10])
    out = torch.zeros(1000 * size(), device="tpu")
    seen = out.view(size(), 1000)
    dist.all_gather_into_tensor(out, y)
    y.add_(1)  # after it was read
    same(seen, torch.stack([data(1000, of=r) for r in range(size())]))
    same(y, data(1000) + 1)


@case
def broadcast():
    for dtype in MOVED:
        for root in range(size()):
            x = data(4, 2, dtype=dtype, device="tpu")
            dist.broadcast(x, root)
            same(x, data(4, 2, dtype=dtype, of=root))


@case
def reduce():
    for root in range(size()):
        for dtype in (torch.float32, torch.int64, torch.bool, torch.int16):
            x = data(5, dtype=dtype, device="tpu")
            dist.reduce(x, root, dist.ReduceOp.MAX)
            each = torch.stack([data(5, dtype=dtype, of=r).to(torch.int64) for r in range(size())])
            same(x, each.amax(0).to(dtype) if rank() == root else data(5, dtype=dtype))
    x = data(5, device="tpu")
    dist.reduce(x, 0, dist.ReduceOp.AVG)
    same(x, sum(data(5, of=r) for r in range(size())) / size() if rank() == 0 else data(5))


@case
def all_gather():
    for dtype in MOVED:
        outs = [torch.empty(3, 2, dtype=dtype, device="tpu") for _ in range(size())]
        dist.all_gather(outs, data(3, 2, dtype=dtype, device="tpu"))
        for r, out in enumerate(outs):
            same(out, data(3, 2, dtype=dtype, of=r))


@case
def all_gather_of_uneven_sizes():
    outs = [torch.empty(r + 1, 2, device="tpu") for r in range(size())]
    dist.all_gather(outs, data(rank() + 1, 2, device="tpu"))
    for r, out in enumerate(outs):
        same(out, data(r + 1, 2, of=r))


@case
def all_gather_into_tensor():
    wanted = [data(3, 2, of=r) for r in range(size())]
    x = data(3, 2, device="tpu")
    for shape, joined in (((3 * size(), 2), torch.cat(wanted)), ((size(), 3, 2), torch.stack(wanted))):
        out = torch.empty(shape, device="tpu")
        dist.all_gather_into_tensor(out, x)
        same(out, joined)
    out = torch.zeros(3 * size(), 2, device="tpu")
    own = out[3 * rank() : 3 * rank() + 3]
    own.copy_(x)
    dist.all_gather_into_tensor(out, own)  # the input is a part of the output, as FSDP has it
    same(out, torch.cat(wanted))


@case
def gather_and_scatter():
    for root in range(size()):
        outs = [torch.empty(3, device="tpu") for _ in range(size())] if rank() == root else None
        dist.gather(data(3, device="tpu"), outs, root)
        for r, out in enumerate(outs or []):
            same(out, data(3, of=r))
        out = torch.empty(3, device="tpu")
        ins = [data(3, seed=r, device="tpu") for r in range(size())] if rank() == root else None
        dist.scatter(out, ins, root)
        same(out, data(3, seed=rank(), of=root))


@case
def reduce_scatter():
    for dtype in (*SUMMED, torch.int16, torch.bool, torch.complex64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            if dtype == torch.complex64 and op != dist.ReduceOp.SUM:
                continue
            ins = [data(3, 2, dtype=dtype, seed=r) for r in range(size())]
            each = [data(3, 2, dtype=dtype, seed=rank(), of=r) for r in range(size())]
            wide = torch.stack(each).to(torch.complex128 if dtype.is_complex else torch.float64)
            wanted = {
                dist.ReduceOp.SUM: lambda w: w.sum(0), dist.ReduceOp.PRODUCT: lambda w: w.prod(0),
                dist.ReduceOp.MAX: lambda w: w.amax(0), dist.ReduceOp.MIN: lambda w: w.amin(0),
            }[op](wide).to(dtype)  # fmt: skip
            out = torch.empty(3, 2, dtype=dtype, device="tpu")
            dist.reduce_scatter(out, [t.to("tpu") for t in ins], op)
            same(out, wanted)
            out = torch.empty(3, 2, dtype=dtype, device="tpu")
            dist.reduce_scatter_tensor(out, torch.cat(ins).to("tpu"), op)
            same(out, wanted)


def rounds() -> int:
    """The messages of a rank by which all know what all are about."""
    return (size() - 1).bit_length()


@case
def data_goes_with_the_comparison():
    """A collective costs its ranks so many messages to compare, and no more; the data of small ones is in them."""

    def messages(collective, times=1):
        torch.tpu.synchronize()
        sent, carrying = torch.ops.oxitorch._group_messages()
        for _ in range(times):
            collective()
        torch.tpu.synchronize()
        now = torch.ops.oxitorch._group_messages()
        return now[0] - sent, now[1] - carrying

    carried = int(torch.tpu.get_device_name() == "XLA:CPU (host)")  # programs carry nothing
    for n, carries in ((100, carried), (1 << 20, 0)):
        x, all_of = torch.ones(n, device="tpu"), torch.ones(n * size(), device="tpu")
        lists = [torch.empty(n, device="tpu") for _ in range(size())]
        for collective in (
            lambda x=x: dist.all_reduce(x),
            lambda x=x: dist.all_reduce(x, dist.ReduceOp.AVG),
            lambda x=x, all_of=all_of: dist.all_gather_into_tensor(all_of, x),
            lambda x=x, lists=lists: dist.all_gather(lists, x),
            lambda x=x, all_of=all_of: dist.reduce_scatter_tensor(x, all_of),
        ):
            assert messages(collective) == (rounds(), carries)
        assert messages(lambda x=x: dist.all_reduce(x), times=10) == (10 * rounds(), 10 * carries)
        for collective in (
            lambda x=x: dist.broadcast(x, 0),
            lambda x=x: dist.reduce(x, 0),
            lambda all_of=all_of: dist.all_to_all_single(torch.empty_like(all_of), all_of),
        ):
            assert messages(collective) == (rounds(), 0)

    def to_the_next():
        work = dist.isend(torch.ones(1, device="tpu"), (rank() + 1) % size())
        dist.recv(torch.empty(1, device="tpu"), (rank() - 1) % size())
        work.wait()

    assert messages(to_the_next) == (0, 0)


@case
def sizes_around_those_of_messages():
    """What goes with the comparison, in messages of two ranks, or by the host gives the same values."""
    most = (2 << 20) // size() ** 2  # bytes that go with a comparison
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.complex128):
        for near in (most, 2 * most, 4 * most) if dtype == torch.float32 else (most,):
            for n in (near // dtype.itemsize // size() * size() + more for more in (-size(), 0, size())):
                each = [data(n, dtype=dtype, of=r) for r in range(size())]
                x = each[rank()].to("tpu")
                out = torch.empty(n * size(), dtype=dtype, device="tpu")
                dist.all_gather_into_tensor(out, x)
                same(out, torch.cat(each))
                part = torch.empty(n // size(), dtype=dtype, device="tpu")
                dist.reduce_scatter_tensor(part, x)
                dist.all_reduce(x)
                same(x, sum(each))
                same(part, sum(each).chunk(size())[rank()])
    x, y = data(most // 8, device="tpu"), data(3, dtype=torch.uint8, device="tpu")
    with dist._coalescing_manager(device=torch.device("tpu")):
        dist.all_reduce(y, dist.ReduceOp.MAX)
        dist.all_reduce(x, dist.ReduceOp.MAX)
    same(x, torch.stack([data(most // 8, of=r) for r in range(size())]).amax(0))
    same(y, torch.stack([data(3, dtype=torch.uint8, of=r) for r in range(size())]).amax(0))


@case
def collectives_of_one_tensor_in_a_row():
    """What a collective takes of the one before it waits for nobody else; values in between stay."""
    x, own = torch.empty(1000, device="tpu"), data(1000, device="tpu")
    total = sum(data(1000, of=r) for r in range(size()))
    seen = []
    for _ in range(20):
        x.copy_(own)
        dist.all_reduce(x)
        out = torch.empty(1000 * size(), device="tpu")
        dist.all_gather_into_tensor(out, x)
        dist.broadcast(x, 0)
        seen.append((x.clone(), out))
    for value, out in seen:
        same(value, total)
        same(out, total.repeat(size()))
    del seen, value, out
    held = []
    for _ in range(2):
        for _ in range(5):
            dist.all_reduce(x, dist.ReduceOp.MAX)
        torch.tpu.synchronize()
        held.append(torch.tpu.memory_allocated())
    same(x, total)
    assert held[0] == held[1]


@case
def reduce_scatter_of_uneven_sizes():
    out = torch.empty(rank() + 1, device="tpu")
    dist.reduce_scatter(out, [data(r + 1, seed=r, device="tpu") for r in range(size())])
    same(out, sum(data(rank() + 1, seed=rank(), of=r) for r in range(size())))


@case
def all_to_all():
    ins = [data(r + 1, seed=r, device="tpu") for r in range(size())]
    outs = [torch.empty(rank() + 1, device="tpu") for _ in range(size())]
    dist.all_to_all(outs, ins)
    for r, out in enumerate(outs):
        same(out, data(rank() + 1, seed=rank(), of=r))


@case
def all_to_all_single():
    for dtype in MOVED:
        x = data(2 * size(), 3, dtype=dtype, device="tpu")
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        same(out, torch.cat([data(2 * size(), 3, dtype=dtype, of=r).chunk(size())[rank()] for r in range(size())]))
        splits = [[r + s for s in range(size())] for r in range(size())]  # of each rank, for each
        x = data(sum(splits[rank()]), 2, dtype=dtype, device="tpu")
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, splits[rank()], splits[rank()])
        parts = [data(sum(s), 2, dtype=dtype, of=r).split(s)[rank()] for r, s in enumerate(splits)]
        same(out, torch.cat(parts))


@case
def point_to_point():
    for dtype in MOVED:
        right, left = (rank() + 1) % size(), (rank() - 1) % size()
        x, out = data(6, dtype=dtype, device="tpu"), torch.empty(6, dtype=dtype, device="tpu")
        works = [
            dist.irecv(out, left),
            dist.isend(x, right),
        ]  # in the order in which blocking calls would wait for ever
        for work in works:
            work.wait()
        same(out, data(6, dtype=dtype, of=left))
    a, b = torch.empty(2, device="tpu"), torch.empty(2, device="tpu")
    if rank() == 0:
        dist.send(torch.full((2,), 1.0, device="tpu"), 1, tag=5)
        dist.send(torch.full((2,), 2.0, device="tpu"), 1, tag=6)
    if rank() == 1:
        works = [dist.irecv(a, 0, tag=6), dist.irecv(b, 0, tag=5)]
        for work in works:
            work.wait()
        same(a, torch.full((2,), 2.0))
        same(b, torch.full((2,), 1.0))


@case
def receive_from_any():
    if rank() == 0:
        seen = set()
        for _ in range(size() - 1):
            x = torch.empty(2, device="tpu")
            source = dist.recv(x)
            same(x, torch.full((2,), float(source)))
            seen.add(source)
        assert seen == set(range(1, size()))
    else:
        dist.send(torch.full((2,), float(rank()), device="tpu"), 0)


@case
def receives_from_any_and_from_one_rank_keep_their_order():
    wanted = [torch.full((n,), float(n)) for n in (2, 5, 1, 3)]
    if rank() == 0:
        for x in wanted:
            dist.send(x.to("tpu"), 1)
    if rank() == 1:
        got = [torch.empty_like(x, device="tpu") for x in wanted]
        dist.recv(got[0], 0)
        works = [dist.irecv(got[1]), dist.irecv(got[2], 0), dist.irecv(got[3])]  # of None: from any
        for work in works:
            work.wait()
        for x, y in zip(got, wanted, strict=True):
            same(x, y)


@case
def batched_point_to_point():
    right, left = (rank() + 1) % size(), (rank() - 1) % size()
    x, out = data(6, device="tpu"), torch.empty(6, device="tpu")
    ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, out, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(out, data(6, of=left))


@case
def coalesced():
    xs = [data(3 + i, device="tpu") for i in range(3)]
    with dist._coalescing_manager(device=torch.device("tpu"), async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    for i, x in enumerate(xs):
        same(x, sum(data(3 + i, of=r) for r in range(size())))
    outs = [torch.empty((3 + i) * size(), device="tpu") for i in range(3)]
    ins = [data(3 + i, device="tpu") for i in range(3)]
    with dist._coalescing_manager(device=torch.device("tpu")):
        for out, x in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, x)
    for i, out in enumerate(outs):
        same(out, torch.cat([data(3 + i, of=r) for r in range(size())]))
    parts = [torch.empty(3 + i, device="tpu") for i in range(3)]
    with dist._coalescing_manager(device=torch.device("tpu")):
        for part, out in zip(parts, outs, strict=True):
            dist.reduce_scatter_tensor(part, out)
    for i, part in enumerate(parts):
        same(part, data(3 + i) * size())
    xs = [data(3 + i, device="tpu") for i in range(3)]
    dist.all_reduce_coalesced(xs, dist.ReduceOp.MAX)
    for i, x in enumerate(xs):
        same(x, torch.stack([data(3 + i, of=r) for r in range(size())]).amax(0))


@case
def a_refusal_in_a_coalescing_block_ends_it():
    out, x = torch.empty(3 * size() + 1, device="tpu"), data(3, device="tpu")
    refusals = [
        lambda: dist.all_gather_into_tensor(out, x),
        lambda: dist.reduce_scatter_tensor(x, out),
        lambda: dist.all_reduce(x.to_sparse()),
    ]
    # PyTorch 2.11 takes all of a block for what the first is.
    for refused in refusals[2:] if IS_TORCH_2_11 else refusals:
        with pytest.raises((RuntimeError, NotImplementedError)), dist._coalescing_manager(device=torch.device("tpu")):
            dist.all_reduce(data(2, device="tpu"))
            refused()
        y = data(3, device="tpu")
        dist.all_reduce(y)
        same(y, sum(data(3, of=r) for r in range(size())))


@case
def forms_that_do_not_wait():
    """Each is the waiting form, and a work that can be asked."""
    parts = [3 * size()]
    total = sum(data(*parts, of=r) for r in range(size()))
    each = [data(*parts, of=r) for r in range(size())]

    def lists():
        return [torch.empty(parts, device="tpu") for _ in range(size())]

    def all_reduce(x):
        return dist.all_reduce(x, async_op=True), x, total

    def broadcast(x):
        return dist.broadcast(x, 0, async_op=True), x, each[0]

    def reduce(x):
        return dist.reduce(x, 0, async_op=True), x, total if rank() == 0 else each[rank()]

    def all_gather(x):
        outs = lists()
        return dist.all_gather(outs, x, async_op=True), outs, each

    def all_gather_into_tensor(x):
        out = torch.empty(parts[0] * size(), device="tpu")
        return dist.all_gather_into_tensor(out, x, async_op=True), out, torch.cat(each)

    def gather(x):
        outs = lists() if rank() == 0 else []
        return dist.gather(x, outs or None, 0, async_op=True), outs, each if rank() == 0 else []

    def scatter(x):
        out = torch.empty(3, device="tpu")
        given = list(x.chunk(size())) if rank() == 0 else None
        return dist.scatter(out, given, 0, async_op=True), out, each[0].chunk(size())[rank()]

    def reduce_scatter(x):
        out = torch.empty(3, device="tpu")
        return dist.reduce_scatter(out, list(x.chunk(size())), async_op=True), out, total.chunk(size())[rank()]

    def reduce_scatter_tensor(x):
        out = torch.empty(3, device="tpu")
        return dist.reduce_scatter_tensor(out, x, async_op=True), out, total.chunk(size())[rank()]

    def all_to_all(x):
        outs = [torch.empty(3, device="tpu") for _ in range(size())]
        work = dist.all_to_all(outs, list(x.chunk(size())), async_op=True)
        return work, outs, [e.chunk(size())[rank()] for e in each]

    def all_to_all_single(x):
        out = torch.empty_like(x)
        return dist.all_to_all_single(out, x, async_op=True), out, torch.cat([e.chunk(size())[rank()] for e in each])

    forms = (all_reduce, broadcast, reduce, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter,
             reduce_scatter_tensor, all_to_all, all_to_all_single)  # fmt: skip
    # All are under way before the first is waited for.
    begun = [form(data(*parts, device="tpu")) for form in forms]
    for work, got, wanted in begun:
        assert work.wait()
        pairs = zip(got, wanted, strict=True) if isinstance(got, list) else [(got, wanted)]
        for g, w in pairs:
            same(g, w)
        torch.tpu.synchronize()
        assert work.is_completed() and work.is_success()


@case
def works():
    x = data(4, device="tpu")
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    torch.tpu.synchronize()
    assert work.is_completed() and work.is_success()
    same(work.get_future().value()[0], x)
    assert [t.data_ptr() for t in work.result()] == [x.data_ptr()]
    then = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] / size())
    same(then.wait(), x.cpu() / size())


def split(parts):
    """This rank's part of the group."""
    if IS_TORCH_2_11:  # which splits groups of CUDA alone
        return dist.new_subgroups_by_enumeration(parts, backend="tpu")[0]
    return dist.split_group(split_ranks=parts)


@case
def groups():
    evens, odds = (list(range(first, size(), 2)) for first in (0, 1))
    pair = [dist.new_group(ranks) for ranks in (evens, odds) if ranks]
    mine, members = pair[rank() % 2], (evens, odds)[rank() % 2]
    x = data(3, device="tpu")
    dist.all_reduce(x, group=mine)
    same(x, sum(data(3, of=r) for r in members))
    own, _ = dist.new_subgroups(1)
    dist.all_reduce(x, group=own)
    same(x, sum(data(3, of=r) for r in members))
    own = split([ranks for ranks in (evens, odds) if ranks])
    x = data(3, device="tpu")
    dist.all_reduce(x, group=own)
    same(x, sum(data(3, of=r) for r in members))
    named, _ = dist.new_subgroups_by_enumeration([ranks for ranks in (evens, odds) if ranks], backend="tpu")
    assert dist.get_process_group_ranks(named) == members
    last = len(members) - 1
    x = data(3, device="tpu")
    dist.broadcast(x, group=named, group_src=last)
    same(x, data(3, of=members[last]))
    dist.reduce(x, group=named, group_dst=0)
    same(x, data(3, of=members[last]) * (len(members) if rank() == members[0] else 1))
    if last > 0 and rank() in (members[0], members[last]):
        if rank() == members[0]:
            dist.send(data(2, device="tpu"), group=named, group_dst=last)
        else:
            dist.recv(x[:2], group=named, group_src=0)
            same(x[:2], data(2, of=members[0]))
    dist.destroy_process_group(named)


FOLDS = {
    "SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum, "BAND": np.bitwise_and,
    "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
}  # fmt: skip


def is_integer(dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def rows(dtype, of=None):
    """A row for each rank: of integers with the ends of their range, of complex numbers with both parts."""
    x = data(size(), 3, of=of)
    if dtype.is_complex:
        return torch.complex(x, data(size(), 3, of=of, seed=1)).to(dtype)
    if not is_integer(dtype):
        return data(size(), 3, dtype=dtype, of=of)
    x, ends = x.numpy().astype(str(dtype).removeprefix("torch.")), torch.iinfo(dtype)
    x[:, 1], x[:, 2] = ends.max - x[:, 1], ends.min + x[:, 2]
    return torch.from_numpy(x)


def reduced(name, dtype, each):
    """What a reduction of these tensors is, by its definition."""
    if dtype == torch.bool:
        every = torch.stack(each)
        return every.any(0) if name in ("SUM", "MAX", "BOR") else every.all(0)
    if is_integer(dtype):
        each = [x.numpy() for x in each]
        if name != "AVG":
            return torch.from_numpy(functools.reduce(FOLDS[name], each))
        mean_of = np.vectorize(lambda total: int(total / size()), otypes=[each[0].dtype])
        return torch.from_numpy(mean_of(sum(x.astype(object) for x in each)))
    every = torch.stack([x.to(torch.complex128 if dtype.is_complex else torch.float64) for x in each])
    if name == "AVG":
        return mean(every.sum(0)).to(dtype)
    return {"SUM": every.sum, "PRODUCT": every.prod, "MIN": every.amin, "MAX": every.amax}[name](0).to(dtype)


# The reductions of collectives by dtype; an average of 64 bits is that of a sum which may be over their range.
BITWISE = "BAND BOR BXOR"
REDUCED = {
    torch.float32: "SUM PRODUCT MIN MAX AVG",
    torch.bfloat16: "SUM MIN MAX AVG",
    **dict.fromkeys((torch.int16, torch.uint16, torch.uint32), f"SUM PRODUCT MIN MAX AVG {BITWISE}"),
    **dict.fromkeys((torch.int64, torch.uint64), f"SUM PRODUCT MIN MAX {BITWISE}"),
    torch.bool: "SUM PRODUCT MIN MAX BAND BOR",
    torch.complex64: "SUM AVG",
    torch.complex32: "SUM",
    torch.float8_e5m2: "SUM MAX",
}


def forms_of_reductions(op, dtype):
    """What each form gives, of a rank's tensor of a row for each rank, and which rows of the result that is."""

    def given():
        return rows(dtype).to("tpu")

    def empty():
        return torch.empty(1, 3, dtype=dtype, device="tpu")

    def in_place(f):
        x = given()
        f(x)
        return x

    def together(f):
        with dist._coalescing_manager(device=torch.device("tpu")):
            return f()

    def scattered(f):
        out = empty()
        f(out)
        return out

    every, own, last = slice(None), slice(rank(), rank() + 1), size() - 1
    yield "all_reduce", in_place(lambda x: dist.all_reduce(x, op)), every
    yield "all_reduce_coalesced", in_place(lambda x: dist.all_reduce_coalesced([x], op)), every
    yield "all_reduce of a block", together(lambda: in_place(lambda x: dist.all_reduce(x, op))), every
    yield "reduce_scatter", scattered(lambda out: dist.reduce_scatter(out, list(given().split(1)), op)), own
    yield "reduce_scatter_tensor", scattered(lambda out: dist.reduce_scatter_tensor(out, given(), op)), own
    yield (
        "reduce_scatter_tensor of a block",
        together(lambda: scattered(lambda out: dist.reduce_scatter_tensor(out, given(), op))),
        own,
    )
    x = in_place(lambda x: dist.reduce(x, last, op))
    yield "reduce", x if rank() == last else None, every


@case
def every_form_reduces_every_dtype():
    for dtype, names in REDUCED.items():
        each = [rows(dtype, of=r) for r in range(size())]
        for name in names.split():
            wanted = reduced(name, dtype, each)
            for form, got, part in forms_of_reductions(getattr(dist.ReduceOp, name), dtype):
                if got is not None:
                    torch.testing.assert_close(
                        bits(got), bits(wanted[part]), rtol=0, atol=0,
                        msg=lambda m, what=(form, name, dtype): f"{what}: {m}",
                    )  # fmt: skip


@case
def every_form_moves_every_dtype():
    for dtype in MOVED:

        def own(shape=(2, 3), dtype=dtype):
            return data(*shape, dtype=dtype, device="tpu")

        def empty(dtype=dtype):
            return torch.empty(2, 3, dtype=dtype, device="tpu")

        each = [data(2, 3, dtype=dtype, of=r) for r in range(size())]
        outs = [empty() for _ in each] if rank() == 0 else None
        dist.gather(own(), outs, 0)
        for out, wanted in zip(outs or [], each, strict=False):
            same(out, wanted)
        out = empty()
        dist.scatter(out, list(own((size(), 2, 3))) if rank() == 0 else None, 0)
        same(out, data(size(), 2, 3, dtype=dtype, of=0)[rank()])
        outs = [empty() for _ in each]
        dist.all_to_all(outs, [own() for _ in each])
        for out, wanted in zip(outs, each, strict=True):
            same(out, wanted)
        into = torch.empty(2 * size(), 3, dtype=dtype, device="tpu")
        dist.all_gather_into_tensor(into, own())
        same(into, torch.cat(each))
        xs = [own(), own()]
        dist._broadcast_coalesced(dist.group.WORLD, xs, 1 << 20, 1)
        for x in xs:
            same(x, each[1])


@case
def many_sends_and_receives_at_once():
    """Between all pairs, of several sizes and dtypes; what was sent changes right after."""
    peers = [r for r in range(size()) if r != rank()]

    def message(source, target, dtype):
        return data((source + 2 * target) % 4, 5, dtype=dtype, seed=target, of=source)

    for _ in range(2):
        sent, received, ops = [], [], []
        for dtype in (torch.float32, torch.int8, torch.bfloat16):
            for peer in peers:
                sent.append(message(rank(), peer, dtype).to("tpu"))
                received.append((torch.empty_like(message(peer, rank(), dtype), device="tpu"), peer, dtype))
                ops.append(dist.P2POp(dist.isend, sent[-1], peer))
                ops.append(dist.P2POp(dist.irecv, received[-1][0], peer))
        works = dist.batch_isend_irecv(ops)
        for x in sent:
            x.zero_()
        for work in works:
            work.wait()
        for x, peer, dtype in received:
            same(x, message(peer, rank(), dtype))


@case
def groups_of_uneven_sizes():
    """One of a single rank and one of the others, and such as overlap: each does all that a group does."""
    ranks = list(range(size()))
    parts = [ranks[:1], ranks[1:]]
    made = [dist.new_group(members) for members in (*parts, ranks[:-1], ranks[::-1])]
    local = dist.new_group(parts[min(rank(), 1)], use_local_synchronization=True)
    for group in (split(parts), local, *made):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        members = dist.get_process_group_ranks(group)
        n, place = len(members), members.index(rank())
        each = [data(n, 2, of=r) for r in members]
        x = data(n, 2, device="tpu")
        dist.all_reduce(x, group=group)
        same(x, sum(each))
        out = torch.empty(n * n, 2, device="tpu")
        dist.all_gather_into_tensor(out, data(n, 2, device="tpu"), group=group)
        same(out, torch.cat(each))
        out = torch.empty(1, 2, device="tpu")
        dist.reduce_scatter_tensor(out, data(n, 2, device="tpu"), dist.ReduceOp.AVG, group=group)
        same(out, (sum(each) / n)[place : place + 1])
        out = torch.empty(n, 2, device="tpu")
        dist.all_to_all_single(out, data(n, 2, device="tpu"), group=group)
        same(out, torch.stack([e[place] for e in each]))
        x = data(n, 2, device="tpu")
        dist.broadcast(x, members[-1], group=group)
        same(x, each[-1])
        things = [None] * n
        dist.all_gather_object(things, rank(), group=group)
        assert things == members
        dist.barrier(group)


@case
def objects():
    got = [None] * size()
    dist.all_gather_object(got, {"rank": rank(), "x": torch.ones(2)})
    assert [g["rank"] for g in got] == list(range(size()))
    things = [{"from": rank()}]
    dist.broadcast_object_list(things, 1 % size())
    assert things == [{"from": 1 % size()}]
    into = [None] * size() if rank() == 0 else None
    dist.gather_object(rank() * 2, into)
    assert rank() != 0 or into == [2 * r for r in range(size())]
    mine = [None]
    dist.scatter_object_list(mine, [{"for": r} for r in range(size())] if rank() == 0 else None, 0)
    assert mine == [{"for": rank()}]
    if rank() == 0:
        dist.send_object_list(["a", {"b": torch.arange(3)}], 1)
    elif rank() == 1:
        things = [None, None]
        assert dist.recv_object_list(things, 0) == 0
        assert things[0] == "a"
        same(things[1]["b"], torch.arange(3))


@case
def barriers():
    dist.barrier()
    dist.barrier(device_ids=[torch.tpu.current_device()])
    dist.barrier(async_op=True).wait()
    if not IS_TORCH_2_11:  # which has it for groups of gloo alone
        dist.monitored_barrier()


@case
def functional():
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    x = data(4 * size(), 2, device="tpu").requires_grad_()
    same(funcol.all_reduce(x, "sum", group), sum(data(4 * size(), 2, of=r) for r in range(size())))
    same(funcol.all_reduce(x, "avg", group), sum(data(4 * size(), 2, of=r) for r in range(size())) / size())
    each = [data(4 * size(), 2, of=r) for r in range(size())]
    same(funcol.all_gather_tensor(x, 0, group), torch.cat(each))
    if not IS_TORCH_2_11:  # which gives the operation a tensor that is not contiguous
        same(funcol.all_gather_tensor(x, 1, group), torch.cat(each, 1))
    same(funcol.reduce_scatter_tensor(x, "sum", 0, group), sum(each).chunk(size())[rank()])
    same(funcol.broadcast(x, 0, group), each[0])
    splits = [4] * size()
    out = funcol.all_to_all_single_autograd(x, splits, splits, group)
    same(out, torch.cat([e.chunk(size())[rank()] for e in each]))
    (out.sum() * (rank() + 1)).backward()
    same(x.grad, torch.cat([torch.full((4, 2), r + 1.0) for r in range(size())]))
    y = data(4, 2, device="tpu").requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(y, 0, group)
    one = torch.ones((), device="tpu").expand_as(gathered)
    gathered.backward(one.contiguous() if IS_TORCH_2_11 else one)  # as above
    same(y.grad, torch.full((4, 2), float(size())))


@case
def functional_lists_and_forms_in_place():
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    shapes = [(2 * size(), 3), (size(), 2)]
    each = [[data(*shape, of=r) for r in range(size())] for shape in shapes]
    xs = [data(*shape, device="tpu") for shape in shapes]
    for got, all_of in zip(funcol.all_reduce_coalesced(xs, "sum", group), each, strict=True):
        same(got, sum(all_of))
    for got, all_of in zip(funcol.all_gather_into_tensor_coalesced(xs, group), each, strict=True):
        same(got, torch.cat(all_of))
    for got, all_of in zip(funcol.reduce_scatter_tensor_coalesced(xs, "sum", [0, 0], group), each, strict=True):
        same(got, sum(all_of).chunk(size())[rank()])
    x, all_of = xs[0], each[0]
    wanted = sum(all_of).t().contiguous().view(3, size(), 2)[:, rank()].t()
    same(funcol.reduce_scatter_tensor(x.t().contiguous(), "sum", 1, group), wanted.t())
    following = [(r + 1) % size() for r in range(size())]
    same(funcol.permute_tensor(x.view(-1), following, group), all_of[rank() - 1].view(-1))
    # What is not waited for is a tensor that waits where it is used.
    y = funcol.all_reduce(x, "max", group)
    same(y + 1, torch.stack(all_of).amax(0) + 1)
    same(funcol.wait_tensor(y), torch.stack(all_of).amax(0))
    y = x.clone()
    assert funcol.all_reduce_inplace(y, "sum", group) is y
    same(y, sum(all_of))
    out = torch.empty(2 * size() * size(), 3, device="tpu")
    funcol.all_gather_tensor_inplace(out, x, group)
    same(out, torch.cat(all_of))
    out = torch.empty(2, 3, device="tpu")
    funcol.reduce_scatter_tensor_inplace(out, x, "sum", group)
    same(out, sum(all_of).chunk(size())[rank()])
    out = torch.empty_like(x)
    funcol.all_to_all_inplace(out, x, group=group)
    same(out, torch.cat([e.chunk(size())[rank()] for e in all_of]))


@case
def functional_with_gradients():
    """Each rank weights its result by its number and one, and sums."""
    import torch.distributed._functional_collectives as funcol

    group, weights = dist.group.WORLD, [r + 1.0 for r in range(size())]
    of_chunks = torch.cat([torch.full((2, 3), w) for w in weights])
    of_all = torch.full((2 * size(), 3), sum(weights))
    forms = {
        "reduce_scatter": (lambda x: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group), of_chunks),
        "all_gather": (lambda x: funcol.all_gather_tensor_autograd(x, 0, group), of_all),
        "all_to_all": (lambda x: funcol.all_to_all_single_autograd(x, None, None, group), of_chunks),
    }
    if torch._C._dispatch_has_kernel_for_dispatch_key("_c10d_functional::all_reduce", "Autograd"):
        forms["all_reduce"] = (lambda x: funcol.all_reduce(x, "sum", group), of_all)
    for name, (form, wanted) in forms.items():
        x = data(2 * size(), 3, device="tpu").requires_grad_()
        (form(x) * weights[rank()]).sum().backward()
        torch.testing.assert_close(x.grad.cpu(), wanted, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@case
def compiled():
    """Collectives in a graph: functional ones, those of c10d which PyTorch makes functional, and their gradients."""
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD

    def forward(x):
        y = x * 2
        dist.all_reduce(y)
        parts = torch.empty(size() * y.shape[0], *y.shape[1:], device=y.device)
        dist.all_gather_into_tensor(parts, y + dist.get_rank())
        mine = funcol.reduce_scatter_tensor(parts, "sum", 0, group)
        return mine * 3, funcol.all_gather_tensor(mine, 0, group).relu()

    total = sum(data(4, 3, of=r) for r in range(size())) * 2
    parts = torch.cat([total + r for r in range(size())]) * size()
    f = torch.compile(forward, backend="tpu", fullgraph=True)
    for _ in range(2):
        mine, all_of = f(data(4, 3, device="tpu"))
        same(mine, (total + rank()) * size() * 3)
        same(all_of, parts)

    @torch.compile(backend="tpu", fullgraph=True)
    def loss(x):
        y = funcol.all_gather_tensor_autograd(x * 2, 0, group)
        return (funcol.reduce_scatter_tensor_autograd(y.square(), "sum", 0, group) * (dist.get_rank() + 1)).sum()

    x = data(4, 3, device="tpu").requires_grad_()
    loss(x).backward()
    # All have all parts, of each the sum over ranks goes to one: 4 x^2 n, by its weight; n ranks give a gradient.
    same(x.grad, 8 * data(4, 3) * size() * (rank() + 1))


@case
def with_gradients():
    """`torch.distributed.nn`: each rank weights its result by its number and one, and sums."""
    import torch.distributed.nn.functional as nn

    weights = [r + 1.0 for r in range(size())]
    shape, src, chunks = (2 * size(), 3), size() - 1, [torch.full((2, 3), w) for w in weights]
    of_all, of_src = torch.full(shape, sum(weights)), torch.full(shape, weights[src])
    nothing = torch.zeros(shape)

    def empty(*shape):
        return torch.empty(shape, device="tpu")

    def parts(x):
        return list(x.chunk(size()))

    forms = {
        "all_reduce": (nn.all_reduce, of_all),
        "broadcast": (lambda x: nn.broadcast(x, src), of_all if rank() == src else nothing),
        "reduce": (lambda x: nn.reduce(x, src), of_src),
        "all_gather": (lambda x: torch.stack(nn.all_gather(x)), of_all),
        "gather": (lambda x: torch.stack(nn.gather(x, src)), of_src),
        "scatter": (lambda x: nn.scatter(parts(x), src), torch.cat(chunks) if rank() == src else nothing),
        "reduce_scatter": (lambda x: nn.reduce_scatter(empty(2, 3), parts(x)), torch.cat(chunks)),
        "all_to_all": (
            lambda x: torch.stack(nn.all_to_all([empty(2, 3) for _ in range(size())], parts(x))), torch.cat(chunks),
        ),
        "all_to_all_single": (lambda x: nn.all_to_all_single(empty(*shape), x), torch.cat(chunks)),
    }  # fmt: skip
    for name, (form, wanted) in forms.items():
        x = data(*shape, device="tpu").requires_grad_()
        (form(x) * weights[rank()]).sum().backward()
        torch.testing.assert_close(x.grad.cpu(), wanted, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@case
def no_elements():
    def nothing(device):
        x = torch.empty(0, 3, device=device)
        dist.all_reduce(x)
        out = torch.empty(0, 3, device=device)
        dist.all_gather_into_tensor(out, x)
        return [x, out]

    as_on_cpu(nothing)


@case
def ranks_may_diverge():
    x = data(4, device="tpu")
    if rank() == 0:  # logs, evaluates, saves
        assert (x * 3).sum().item() >= 0
        torch.ones(10, device="tpu").cumsum(0).cpu()
    dist.all_reduce(x)
    if rank() == size() - 1:
        (x + 1).tolist()
    dist.all_reduce(x)
    same(x, sum(data(4, of=r) for r in range(size())) * size())


@case
def ranks_that_do_not_do_the_same():
    def failing(words, f):
        group = dist.new_group(use_local_synchronization=False)
        with pytest.raises(RuntimeError, match=words):
            f(group)
            dist.barrier(group)  # who only sent has nothing to read
        with pytest.raises(RuntimeError, match="cannot go on, as a collective failed before"):
            dist.all_reduce(torch.ones(1, device="tpu"), group=group)

    def sizes(group):
        x = torch.ones(1000 + rank(), device="tpu")
        dist.all_reduce(x, group=group)
        x.tolist()

    def dtypes(group):
        x = torch.ones(1000, dtype=torch.float32 if rank() else torch.int32, device="tpu")
        dist.all_reduce(x, group=group)
        x.tolist()

    def operations(group):
        x = torch.ones(1000, device="tpu")
        if rank() == 0:
            dist.broadcast(x, 0, group=group)
        else:
            dist.all_reduce(x, group=group)
        torch.tpu.synchronize()

    def splits(group):
        x, out = torch.ones(2 * size(), device="tpu"), torch.empty(2 * size() + rank(), device="tpu")
        into = [2] * size()
        into[0] += rank()
        dist.all_to_all_single(out, x, into, [2] * size(), group=group)
        torch.tpu.synchronize()

    def far_apart(group):
        x = torch.ones(1 if rank() == 0 else 1 << 20, device="tpu")
        dist.all_reduce(x, group=group)
        x.tolist()

    failing(r"do not do the same:\s+rank 0: all_reduce.Float.1000., op=SUM. at .*collectives.py:\d+", sizes)
    failing(r"rank 0: all_reduce.Float.1., op=SUM. at .*\s+rank 1: all_reduce.Float.1048576., op=SUM.", far_apart)
    failing(r"rank 1: all_reduce.Float.1000., op=SUM. at .*collectives.py:\d+", dtypes)
    failing(r"rank 0: broadcast.Float.1000., root=0. at .*collectives.py:\d+", operations)
    failing("bytes to this one|another rank is sent", splits)

    group = dist.new_group()
    if rank() == 0:
        dist.send(torch.ones(3, device="tpu"), 1, group=group)
    if rank() == 1:
        x = torch.empty(4, device="tpu")
        dist.recv(x, 0, group=group)
        with pytest.raises(RuntimeError, match="rank 0 sent 12 bytes, and 16 were expected"):
            x.tolist()


@case
def bad_arguments():
    with pytest.raises(RuntimeError, match=r"Cannot use ReduceOp\.BAND with"):
        dist.all_reduce(torch.ones(2, device="tpu"), dist.ReduceOp.BAND)
    with pytest.raises(RuntimeError, match="output tensor size must be equal to world_size times"):
        dist.all_gather_into_tensor(torch.empty(size() * 2 + 1, device="tpu"), torch.ones(2, device="tpu"))
    with pytest.raises(RuntimeError, match="all_gather: the own output has 3 elements, the input 2"):
        dist.all_gather([torch.empty(3, device="tpu") for _ in range(size())], torch.ones(2, device="tpu"))
    with pytest.raises(RuntimeError, match="unsupported operation: more than one element"):
        dist.all_reduce(torch.ones(1, device="tpu").expand(3))
    for tag in (-1, 2**31 - 1):
        with pytest.raises(RuntimeError, match="tags are from 0 to 2147418111"):
            dist.send(torch.ones(1, device="tpu"), (rank() + 1) % size(), tag=tag)
    x = data(2, device="tpu")
    dist.all_reduce(x)
    same(x, sum(data(2, of=r) for r in range(size())))


@case
def sparse_tensors_are_refused():
    x = torch.eye(3, device="tpu").to_sparse()
    for collective in (dist.all_reduce, lambda t: dist.broadcast(t, 0), lambda t: dist.all_gather([t, t], t)):
        with pytest.raises((NotImplementedError, RuntimeError), match=r"sparse|strided|dense"):
            collective(x)
    same(x.to_dense(), torch.eye(3))
    y = torch.ones(2, device="tpu")
    dist.all_reduce(y)
    same(y, torch.full((2,), float(size())))
