"""Every form of a collective with every dtype."""

import functools

import numpy as np
import torch
import torch.distributed as dist

from tests.distributed.collectives.data import MOVED, bits, data, mean, rank, same, size
from tests.distributed.ranks import case

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
