"""Layers, sequences and losses over several ranks."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.distributed.ranks import case
from tests.distributed.training.models import as_one, close, numbers, size


@case
def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("tpu", (size(),))
    for call in (lambda m: m, lambda m: torch.compile(m, backend="tpu", fullgraph=True)):
        torch.manual_seed(2)
        m = nn.Sequential(nn.Linear(8, 4 * size()), nn.GELU(), nn.Linear(4 * size(), 8))
        one = copy.deepcopy(m)
        m = parallelize_module(m.to("tpu"), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        as_one(m, one, numbers(5, 8), call=call)


class Parts(nn.Module):
    """What a plan of sequence parallel speaks of: rows of tokens between two embeddings."""

    def __init__(self, tokens, width):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.last = nn.RMSNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(F.silu(self.up(self.norm(x))))
        return self.head(self.last(x))


@case
def sequence_parallel():
    """Between products each rank has a part of the sequence, and of the logits a part of the classes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("tpu", (size(),))
    torch.manual_seed(3)
    one = Parts(4 * size(), 8)
    m = copy.deepcopy(one).to("tpu")
    seen = []
    m.norm.register_forward_hook(lambda _, inputs, out: seen.append(out.placements))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(m, mesh, plan)
    parallelize_module(m.up, mesh, ColwiseParallel())
    ids = [torch.randint(0, 4 * size(), (2, 2 * size()), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    for x, device in ((m, "tpu"), (one, "cpu")):
        optimizer = torch.optim.AdamW(x.parameters(), lr=1e-2, eps=1e-3)
        for given in ids:
            with loss_parallel() if x is m else nullcontext():
                logits, given = x(given.to(device)), given.to(device)
                assert isinstance(logits, DTensor) == (x is m)
                F.cross_entropy(logits.flatten(0, 1), given.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen[0] == (Shard(1),)
    close(m.state_dict(), one.state_dict())


@case
def random_numbers():
    """Follow the seed, agree where they are replicated and differ where they are not, as on CUDA."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, empty, rand, randn

    mesh = init_device_mesh("tpu", (size(),))
    shape = (4 * size(), 3 * size())
    ones = torch.ones(shape, device="tpu")

    def drawn(place):
        torch.manual_seed(5)
        x = distribute_tensor(ones, mesh, [place]).requires_grad_()
        y = nn.functional.dropout(x, 0.5)
        y.sum().backward()
        assert torch.equal(x.grad.full_tensor(), y.detach().full_tensor())  # the same mask
        made = [make(shape, device_mesh=mesh, placements=[place]) for make in (rand, randn)]
        made.append(empty(shape, device_mesh=mesh, placements=[place]).uniform_())
        return [t.detach() for t in (y, *made)] + [torch.rand(shape, device="tpu")]

    for place in (Replicate(), Shard(0), Shard(1)):
        found, again = drawn(place), drawn(place)
        for i, (x, y) in enumerate(zip(found, again, strict=True)):
            own = x.to_local() if i < 4 else x
            # Logarithms round by how the program was compiled, which may change between the rounds.
            torch.testing.assert_close(own, y.to_local() if i < 4 else y)
            every = torch.empty((size(), *own.shape), device="tpu")
            dist.all_gather_into_tensor(every.view(-1), own.contiguous().view(-1))
            # Ordinary tensors are alike too: afterwards all ranks' generators are at one place.
            alike = isinstance(place, Replicate) or i == 4
            for other in every[1:]:
                assert torch.allclose(every[0], other, atol=1e-5) == alike, (place, i)
    # Of one process they are at the start; DTensor then goes further on than the device's generator.
    first = drawn(Replicate())[0].to_local()
    torch.manual_seed(5)
    assert torch.equal(first, nn.functional.dropout(ones, 0.5))


@case
def attention_of_shards():
    """Batch and heads may be sharded, and a mask with them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("tpu", (size(),))
    attend = nn.functional.scaled_dot_product_attention
    n = max(4, size())
    shapes = (None, (n, n, 6, 6), (1, n, 6, 6), (n, 1, 6, 6), (6, 6))
    torch.manual_seed(0)
    inputs = [torch.randn(n, n, 6, 8) for _ in range(4)]
    for place, shape in itertools.product((Replicate(), Shard(0), Shard(1)), shapes):
        mask = None if shape is None else torch.randn(shape)
        is_cut = isinstance(place, Shard) and mask is not None and mask.ndim == 4 and mask.shape[place.dim] > 1

        def outcome(put, place=place, mask=mask, is_cut=is_cut):
            leaves = [put(x, place).requires_grad_() for x in inputs[:3]]
            bias = None if mask is None else put(mask, place if is_cut else Replicate()).requires_grad_()
            out = attend(*leaves, attn_mask=bias, is_causal=mask is None)
            out.backward(put(inputs[3], place))
            leaves += [] if bias is None else [bias]
            return [out.detach(), *(x.grad for x in leaves)]

        want = outcome(lambda x, _: x.clone())
        got = outcome(lambda x, place: distribute_tensor(x.to("tpu"), mesh, [place]))
        assert got[0].placements == (place,)
        for one, several in zip(want, got, strict=True):
            torch.testing.assert_close(several.full_tensor().cpu(), one, atol=1e-4, rtol=1e-4)


@case
def context_parallel():
    """Each rank has a part of the sequence, and keys and values go around. It replaces the function of its module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention as attention
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("tpu", (size(),))
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 8 * size(), 8) for _ in range(4)]
    for rotate, kernel, dtype in (
        ("allgather", SDPBackend.FLASH_ATTENTION, torch.float32),
        ("alltoall", SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16),
    ):
        attention.set_rotate_method(rotate)
        whole = [x.to(dtype).float().clone().requires_grad_() for x in inputs[:3]]
        want = F.scaled_dot_product_attention(*whole, is_causal=True)
        want.backward(inputs[3].to(dtype).float())
        buffers = [x.to("tpu", dtype) for x in inputs]
        kept = set(buffers)
        with (
            sdpa_kernel(kernel),
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=kept),
        ):
            own = [x.requires_grad_() for x in buffers[:3]]
            out = F.scaled_dot_product_attention(*own, is_causal=True)
            assert out.shape[2] == 8
            out.backward(buffers[3])
        parts = [out.detach(), *(x.grad for x in own)]
        found = attention.context_parallel_unshard(mesh, parts, [2] * 4)
        bound = 1e-4 if dtype == torch.float32 else 5e-2
        for got, exact in zip(found, [want, *(x.grad for x in whole)], strict=True):
            torch.testing.assert_close(got.cpu().float(), exact.detach(), atol=bound, rtol=bound)
    x = torch.randn(2, 4, 8 * size(), 8, device="tpu")
    with (
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[2], no_restore_buffers={x}),
        pytest.raises(NotImplementedError, match="takes no mask"),
    ):
        F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(2, 4, 8, 8, device="tpu"))


@case
def loss_in_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("tpu", (size(),))
    torch.manual_seed(0)
    logits, target = torch.randn(6, 4 * size()), torch.randint(0, 4 * size(), (6,))
    x = distribute_tensor(logits.to("tpu"), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(x, target.to("tpu"))
        loss.backward()
    one = logits.requires_grad_()
    wanted = nn.functional.cross_entropy(one, target)
    wanted.backward()
    torch.testing.assert_close(loss.full_tensor().cpu(), wanted.detach())
    torch.testing.assert_close(x.grad.full_tensor().cpu(), one.grad)
