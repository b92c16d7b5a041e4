"""fully_shard()."""

import copy
import time

import torch
from torch import nn

from tests.distributed.ranks import case
from tests.distributed.training.models import (
    Model,
    adamw,
    alone,
    batch,
    close,
    loss_of,
    model,
    numbers,
    rank,
    size,
    train,
)


def sharded(reshard=True, **options):
    from torch.distributed.fsdp import fully_shard

    m = model().to("tpu")
    for block in m.blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    return fully_shard(m, reshard_after_forward=reshard, **options)


@case
def fsdp2():
    for reshard in (True, False):
        m = sharded(reshard)
        train(m, adamw(m), "tpu")
        close(m.state_dict(), alone()[0])


@case
def fsdp2_recomputes():
    """Activation checkpointing in both ways, and with a block's parameters fetched ahead."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def products(_, op, *args, **kwargs):
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def some(function, *args, **kwargs):
        def contexts():
            return create_selective_checkpoint_contexts(products)

        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    for options in ({}, {"checkpoint_fn": some}):
        m = model().to("tpu")
        for i, block in enumerate(m.blocks):
            m.blocks[i] = fully_shard(checkpoint_wrapper(block, **options))
        fully_shard(m)
        m.set_modules_to_forward_prefetch([m.blocks[0]])
        m.blocks[1].set_modules_to_backward_prefetch([m.blocks[0]])
        train(m, adamw(m), "tpu")
        got = {name.replace("_checkpoint_wrapped_module.", ""): t for name, t in m.state_dict().items()}
        close(got, alone()[0])


@case
def fsdp2_compiled():
    """Block by block, as TorchTitan does it, and the whole."""
    from torch.distributed.fsdp import fully_shard

    blocks = model().to("tpu")
    for block in blocks.blocks:
        block.compile(backend="tpu", fullgraph=True)
        fully_shard(block)
    train(fully_shard(blocks), adamw(blocks), "tpu")
    whole = sharded()
    train(torch.compile(whole, backend="tpu"), adamw(whole), "tpu")
    for m in (blocks, whole):
        close(m.state_dict(), alone()[0])


@case
def fsdp2_compiles_nothing_after_two_steps():
    m = sharded()
    optimizer = adamw(m)
    train(m, optimizer, "tpu", steps=2)
    torch.tpu.synchronize()
    before = torch.tpu.metrics()["programs"]
    train(m, optimizer, "tpu", steps=3)
    torch.tpu.synchronize()
    made = torch.tpu.metrics()["programs"] - before
    assert made == 0, made


@case(ranks=(4,))
def fsdp2_holds_a_quarter():
    """Accounted bytes: a share of parameters, gradients and state, and while a step runs two whole layers besides."""
    from torch.distributed.fsdp import fully_shard

    width, layers = 256, 8
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    m = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to("tpu")
    for layer in m:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(fully_shard(m).parameters())
    x = torch.ones(2, width, device="tpu")

    def step():
        optimizer.zero_grad()
        m(x).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    layer = 4 * width * width
    share = 4 * layers * layer / size()  # parameters, gradients, and two of AdamW's
    torch.tpu.synchronize()
    for _ in range(100):  # a task lets go of what it had right after it is done
        held = torch.tpu.memory_allocated() - before
        if held <= 1.1 * share:
            break
        time.sleep(0.01)
    assert held <= 1.1 * share, (held, share)
    torch.tpu.reset_peak_memory_stats()
    step()
    torch.tpu.synchronize()
    # Of a layer: parameters and gradients, and what is sent and received of them.
    peak = torch.tpu.max_memory_allocated() - before - held
    assert peak <= 2 * 2 * layer, (peak / layer, held / layer)


@case
def fsdp2_shards_a_model_of_the_host_layer_by_layer():
    """While a model of the host is sharded, no more of it is on the device than the shares and a few layers."""
    from torch.distributed.fsdp import fully_shard

    width, layers = 1024, 24
    m = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    layer = 4 * width * width
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    torch.tpu.reset_peak_memory_stats()
    for each in m:
        fully_shard(each)
    fully_shard(m)
    torch.tpu.synchronize()
    peak = torch.tpu.max_memory_allocated() - before - layers * layer / size()
    assert peak <= 14 * layer, peak / layer  # two windows of 16 MiB, and what is on its way


@case
def fsdp2_mixed_precision():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for reduce in (torch.bfloat16, torch.float32):
        m = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce))
        train(m, torch.optim.SGD(m.parameters(), lr=1e-2), "tpu")
        close(m.state_dict(), alone(torch.optim.SGD)[0], rtol=5e-2, atol=5e-2)


@case
def fsdp2_offloads():
    from torch.distributed.fsdp import CPUOffloadPolicy

    m = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    train(m, adamw(m), "tpu")
    close(m.state_dict(), alone()[0])


@case
def fsdp2_clips_and_accumulates():
    m = sharded()
    norms = []

    def clip(x):
        norms.append(torch.nn.utils.clip_grad_norm_(x.parameters(), 0.1))

    train(m, torch.optim.SGD(m.parameters(), lr=1e-2), "tpu", step=lambda: clip(m))
    got, norms = [n.full_tensor().cpu() for n in norms], []
    wanted, _ = alone(torch.optim.SGD, step=clip)
    torch.testing.assert_close(torch.stack(got), torch.stack(norms), rtol=1e-4, atol=1e-5)
    close(m.state_dict(), wanted)
    m = sharded()
    for i in range(2):
        m.set_requires_gradient_sync(i == 1)
        ids = batch(i).to("tpu")
        loss_of(m(ids), ids).backward()
    one = model()
    for i in range(2):
        ids = batch(i, -1)
        loss_of(one(ids), ids).backward()
    grads = {n: p.grad for n, p in m.named_parameters()}
    close(grads, {n: p.grad for n, p in one.named_parameters()})


@case
def fsdp2_in_other_ways():
    """Cut along another dimension, with a parameter left alone, with sums for means, and fetched by hand."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def ways(m):
        yield fully_shard(m, shard_placement_fn=lambda p: Shard(p.dim() - 1)), 1
        m = net().to("tpu")
        yield fully_shard(m, ignored_params={m[0].bias}), 1
        m = fully_shard(net().to("tpu"))
        m.set_gradient_divide_factor(2.0)
        yield m, size() / 2
        m.set_force_sum_reduction_for_comms(True)
        yield m, size() / 2
        m = net().to("tpu")
        for layer in (m[0], m[2], m):
            fully_shard(layer)
        m.unshard(async_op=True).wait()
        m[0].set_unshard_in_backward(False)
        m.set_post_optim_event(torch.tpu.current_stream().record_event())
        yield m, 1

    inputs, one = numbers(size(), 8)[0], net()
    one(inputs).square().sum().backward()
    for m, factor in ways(net().to("tpu")):
        m.zero_grad()
        m(inputs[rank()].to("tpu")).square().sum().backward()
        for of in (0, 2):
            grad = m[of].weight.grad.full_tensor().cpu()
            torch.testing.assert_close(grad, one[of].weight.grad * factor / size(), rtol=1e-4, atol=1e-5)


@case
def fsdp2_from_meta():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    full = model().state_dict()
    with torch.device("meta"):
        m = Model()
    for block in m.blocks:
        fully_shard(block)
    fully_shard(m)
    m.to_empty(device="tpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(m, copy.deepcopy(full) if rank() == 0 else {}, options=options)
    close(m.state_dict(), full)
    train(m, adamw(m), "tpu")
    close(m.state_dict(), alone()[0])
    got = get_model_state_dict(m, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank() == 0:
        close(got, alone()[0])
