"""All-reduce, reduce and reduce-scatter."""

import itertools

import torch
import torch.distributed as dist

from tests.distributed.collectives.data import FLOAT8, LITTLE, MORE, SUMMED, as_on_cpu, data, mean, rank, same, size
from tests.distributed.ranks import case


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


@case
def reduce_scatter_of_uneven_sizes():
    out = torch.empty(rank() + 1, device="tpu")
    dist.reduce_scatter(out, [data(r + 1, seed=r, device="tpu") for r in range(size())])
    same(out, sum(data(rank() + 1, seed=rank(), of=r) for r in range(size())))
