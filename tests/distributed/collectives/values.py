"""What a collective reads and writes: views, old values, gradients, tensors of no or other sizes."""

import torch
import torch.distributed as dist

from tests.distributed.collectives.data import as_on_cpu, data, rank, rounds, same, size
from tests.distributed.ranks import case


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
