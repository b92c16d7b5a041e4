"""PyTorch's ways to train in several processes give what one process gives on the CPU with the whole batch."""

import copy
import itertools
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oxitorch.data import BucketBatchSampler, bucketize, next_token_labels, pad_collate
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.distributed.ranks import case

STEPS = 4


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A small GPT."""

    def __init__(self, width: int = 16, layers: int = 2, tokens: int = 13):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, tokens)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> Model:
    torch.manual_seed(1)
    return Model()


def batch(step: int, of: int | None = None):
    """The part of a step's batch that a rank has, or all of it (-1)."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 13, (2 * size(), 6), generator=generator)
    r = rank() if of is None else of
    return ids if r < 0 else ids[2 * r : 2 * r + 2]


def loss_of(logits, ids):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def made(optimizer, m):
    # The keys' biases have no gradient but for rounding, which AdamW would make steps of.
    return optimizer(m.parameters(), lr=1e-2, **({"eps": 1e-3} if optimizer is torch.optim.AdamW else {}))


def adamw(m):
    return made(torch.optim.AdamW, m)


def train(m, optimizer, device, of=None, steps=STEPS, step=None):
    losses = []
    for i in range(steps):
        ids = batch(i, of).to(device)
        loss = loss_of(m(ids), ids)
        loss.backward()
        if step is not None:
            step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack([x.cpu() for x in losses])


def alone(make=torch.optim.AdamW, steps=STEPS, step=None):
    """The parameters after training in one process on the CPU with whole batches, and the losses."""
    m = model()
    losses = train(m, made(make, m), "cpu", -1, steps, (lambda: step(m)) if step else None)
    return m.state_dict(), losses


def close(got, wanted, **tolerance):
    tolerance = tolerance or {"rtol": 2e-4, "atol": 2e-5}
    assert got.keys() == wanted.keys()
    for name, t in wanted.items():
        x = got[name]
        x = x.full_tensor() if hasattr(x, "full_tensor") else x
        torch.testing.assert_close(x.detach().cpu().float(), t.float(), **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def ddp(hook=None, tolerance=None, optimizer=torch.optim.AdamW, **options):
    m = DDP(model().to("tpu"), **options)
    if hook is not None:
        hook(m)
    losses = train(m, made(optimizer, m), "tpu")
    wanted, wanted_losses = alone(optimizer)
    close(m.module.state_dict(), wanted, **(tolerance or {}))
    dist.all_reduce(losses, dist.ReduceOp.SUM)
    torch.testing.assert_close(losses / size(), wanted_losses, rtol=1e-3, atol=1e-3)


@case
def ddp_as_it_is():
    ddp()


@case
def ddp_with_buckets_as_views():
    ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.01)


@case
def ddp_static_graph():
    ddp(static_graph=True, gradient_as_bucket_view=True)


@case
def ddp_finds_unused():
    ddp(find_unused_parameters=True)
    torch.manual_seed(0)
    both = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).to("tpu")
    m = DDP(Either(both), find_unused_parameters=True)
    m(torch.ones(1, 3, device="tpu"), rank() % 2).sum().backward()
    shares = [len(range(i, size(), 2)) / size() for i in range(2)]
    for i, share in enumerate(shares):
        torch.testing.assert_close(both[i].weight.grad.cpu(), torch.full((3, 3), share))


class Either(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.both = both

    def forward(self, x, which):
        return self.both[which](x)


@case
def ddp_accumulates():
    m = DDP(model().to("tpu"))
    one = model()
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (m, one)]
    for i in range(4):
        ids = batch(i)
        with m.no_sync() if i % 2 == 0 else nullcontext():
            loss_of(m(ids.to("tpu")), ids.to("tpu")).backward()
        ids = batch(i, -1)
        loss_of(one(ids), ids).backward()
        if i % 2:
            for o in optimizers:
                o.step()
                o.zero_grad()
    close(m.module.state_dict(), one.state_dict())


@case
def batches_of_a_bucket_have_one_shape_on_all_ranks():
    sequences = [torch.arange(n) % 13 for n in (2, 3, 3, 4, 5, 7, 8, 8, 9, 9, 10, 11, 12, 3, 9)]
    lengths = [len(s) for s in sequences]
    buckets = bucketize(lengths, 2)
    sampler = BucketBatchSampler(lengths, buckets, 2)
    assert (sampler.num_replicas, sampler.rank) == (size(), rank())
    of_all = [[*BucketBatchSampler(lengths, buckets, 2, rank=r)] for r in range(size())]

    def step(m, optimizer, samples, device):
        tokens, mask = pad_collate([sequences[i] for i in samples], buckets)
        logits, labels = m(tokens.to(device)), next_token_labels(tokens, mask).to(device)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
        optimizer.step()
        return tuple(tokens.shape)

    m, one = DDP(model().to("tpu")), model()
    optimizer, whole = (torch.optim.SGD(x.parameters(), lr=lr) for x, lr in ((m, 1e-2), (one, 1e-2 / size())))
    shapes = []
    for i, samples in enumerate(sampler):
        shapes.append(step(m, optimizer, samples, "tpu"))
        # What all ranks have in this step, and the mean of their gradients.
        step(one, whole, [j for each in of_all for j in each[i]], "cpu")
    close(m.module.state_dict(), one.state_dict())
    others = [None] * size()
    dist.all_gather_object(others, (shapes, sampler.shapes))
    assert others == [(shapes, sampler.shapes)] * size()
    assert sorted(set(shapes)) == sampler.shapes


@case
def ddp_hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    loose = {"rtol": 5e-2, "atol": 5e-2}
    ddp(lambda m: m.register_comm_hook(None, default_hooks.allreduce_hook))
    ddp(lambda m: m.register_comm_hook(None, default_hooks.bf16_compress_hook), loose, torch.optim.SGD)
    ddp(lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook), loose, torch.optim.SGD)
    ddp(lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE))
    ddp(lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS), loose, torch.optim.SGD)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    ddp(lambda m: m.register_comm_hook(state, powerSGD_hook.powerSGD_hook), loose, torch.optim.SGD)


@case
def ddp_joins():
    """Rank r has 2 + r batches. Who has none left adds nothing to the others' mean, and ends with their parameters."""
    from torch.distributed.algorithms.join import Join

    m = DDP(nn.Linear(2, 1).to("tpu"))
    start = m.module.weight.detach().cpu().clone()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
    with Join([m]):
        for _ in range(2 + rank()):
            m(torch.full((1, 2), 3.0, device="tpu")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = sum(2 + r for r in range(size())) / size()  # each with a gradient of 3
    torch.testing.assert_close(m.module.weight.detach().cpu(), start - 0.5 * 3 * steps)


@case
def ddp_with_zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for as_views in (False, True):
        m = DDP(model().to("tpu"))
        optimizer = ZeroRedundancyOptimizer(
            m.parameters(), torch.optim.AdamW, parameters_as_bucket_view=as_views, lr=1e-2, eps=1e-3
        )
        train(m, optimizer, "tpu")
        close(m.module.state_dict(), alone()[0])
    optimizer.consolidate_state_dict(to=0)  # of all ranks' parts
    if rank() == 0:
        one = model()
        expected = adamw(one)
        train(one, expected, "cpu", -1)
        got, wanted = optimizer.state_dict()["state"], expected.state_dict()["state"]
        assert got.keys() == wanted.keys()
        for i, state in wanted.items():
            close(got[i], state)


@case
def ddp_broadcasts_buffers():
    torch.manual_seed(rank())  # which DDP evens out
    m = DDP(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to("tpu"))
    for _ in range(2):
        m(torch.randn(4, 3, device="tpu")).sum().backward()
    m.eval()
    m.train()
    m(torch.randn(4, 3, device="tpu"))
    own = torch.cat([p.detach().cpu().flatten() for p in m.parameters()])
    every = [torch.empty_like(own) for _ in range(size())]
    dist.all_gather(every, own)
    for other in every:
        torch.testing.assert_close(other, own, rtol=0, atol=0)


class Convolutions(nn.Module):
    """A small net with a batch norm after each kind of layer."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 2), nn.Flatten()
        )
        self.head = nn.Sequential(nn.LazyLinear(6), nn.BatchNorm1d(6, momentum=None, affine=False), nn.Linear(6, 2))
        self(torch.zeros(2, 3, 5, 5))
        for m in self.modules():
            if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
                m.reset_running_stats()

    def forward(self, x):
        return self.head(self.features(x))


@case
def ddp_with_sync_batch_norm():
    torch.manual_seed(1)
    one = Convolutions().double()
    m = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(one)).to("tpu"))
    assert sum(isinstance(x, nn.SyncBatchNorm) for x in m.modules()) == 2
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.05, momentum=0.9) for x in (m, one)]
    counts = [2 + i for i in range(size())]  # of a batch, by rank
    own = slice(sum(counts[: rank()]), sum(counts[: rank() + 1]))
    for step in range(STEPS):
        x = torch.randn(sum(counts), 3, 5, 5, generator=torch.Generator().manual_seed(step)).double()
        wanted = one(x)
        wanted.square().sum().backward()
        y = m(x[own].to("tpu"))
        torch.testing.assert_close(y.detach().cpu(), wanted[own].detach(), rtol=1e-5, atol=1e-6)
        (y.square().sum() * size()).backward()  # of which DDP makes the mean
        grads = [{n: p.grad for n, p in x.named_parameters()} for x in (m.module, one)]
        close(*grads, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    close(m.module.state_dict(), one.state_dict(), rtol=1e-5, atol=1e-6)
    x = torch.randn(3, 3, 5, 5, generator=torch.Generator().manual_seed(rank())).double()
    torch.testing.assert_close(m.eval()(x.to("tpu")).detach().cpu(), one.eval()(x).detach(), rtol=1e-5, atol=1e-6)


@case
def ddp_compiled():
    m = DDP(model().to("tpu"))
    losses = train(torch.compile(m, backend="tpu"), adamw(m), "tpu")
    assert losses.isfinite().all()
    close(m.module.state_dict(), alone()[0])


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


def fsdp1_of(m, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    return FSDP(m.to("tpu"), device_id=torch.device("tpu", torch.tpu.current_device()), use_orig_params=True, **options)


def whole_parameters(m):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    with FSDP.summon_full_params(m):
        return {name: p.detach().cpu().clone() for name, p in m.module.named_parameters()}


@case
def fsdp1():
    m = fsdp1_of(model())
    train(m, adamw(m), "tpu")
    close(whole_parameters(m), alone()[0])


@case(ranks=(4,))
def fsdp1_in_other_ways():
    from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for options, optimizer, tolerance in (
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, torch.optim.AdamW, {}),
        ({"cpu_offload": CPUOffload(offload_params=True)}, torch.optim.AdamW, {}),
        ({"mixed_precision": half}, torch.optim.SGD, {"rtol": 5e-2, "atol": 5e-2}),
    ):
        m = fsdp1_of(model(), **options)
        train(m, made(optimizer, m), "tpu")
        close(whole_parameters(m), alone(optimizer)[0], **tolerance)


@case(ranks=(4,))
def fsdp1_clips_accumulates_and_saves():
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    m = fsdp1_of(model())
    train(m, torch.optim.SGD(m.parameters(), lr=1e-2), "tpu", step=lambda: m.clip_grad_norm_(0.1))
    wanted, _ = alone(torch.optim.SGD, step=lambda x: torch.nn.utils.clip_grad_norm_(x.parameters(), 0.1))
    close(whole_parameters(m), wanted)
    m, one = fsdp1_of(model()), model()
    for i in range(2):
        with m.no_sync() if i == 0 else nullcontext():
            loss_of(m(batch(i).to("tpu")), batch(i).to("tpu")).backward()
        loss_of(one(batch(i, -1)), batch(i, -1)).backward()
    with FSDP.summon_full_params(m, with_grads=True):
        close(*({name: p.grad for name, p in x.named_parameters()} for x in (m.module, one)))
    m = fsdp1_of(model())
    optimizer = adamw(m)
    train(m, optimizer, "tpu")
    states = copy.deepcopy(get_state_dict(m, optimizer))
    train(m, optimizer, "tpu")
    other = fsdp1_of(model())
    again = adamw(other)
    set_state_dict(other, again, model_state_dict=states[0], optim_state_dict=states[1])
    train(other, again, "tpu")
    close(whole_parameters(other), whole_parameters(m))


def as_one(m, one, inputs, loss=lambda y: y.square().mean(), call=lambda m: m):
    """Trains both, and they end with the same parameters."""
    for x, device, forward in ((m, "tpu", call(m)), (one, "cpu", one)):
        optimizer = torch.optim.AdamW(x.parameters(), lr=1e-2, eps=1e-3)
        for given in inputs:
            loss(forward(given.to(device))).backward()
            optimizer.step()
            optimizer.zero_grad()
    close(m.state_dict(), one.state_dict())


def numbers(*shape):
    return [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]


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


@case(ranks=(4,))
def fsdp2_hybrid():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("tpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for reshard in (True, False):
        m = sharded(reshard, mesh=mesh)
        train(m, adamw(m), "tpu")
        close(m.state_dict(), alone()[0])
        part = m.head.weight.to_local()
        assert part.shape[0] == (7, 6)[mesh.get_local_rank("shards")]
    m = sharded(2)  # between forward and backward a rank keeps a half, and not a quarter
    train(m, adamw(m), "tpu")
    close(m.state_dict(), alone()[0])


@case(ranks=(4,))
def fsdp2_with_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("tpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    m = model().to("tpu")
    for block in m.blocks:
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(m, mesh=mesh["data"])
    one = model()
    optimizers = [made(torch.optim.AdamW, x) for x in (m, one)]
    half = slice(4 * mesh.get_local_rank("data"), 4 * mesh.get_local_rank("data") + 4)
    for step in range(STEPS):
        ids = batch(step, -1)
        for x, part, optimizer in ((m, ids[half].to("tpu"), optimizers[0]), (one, ids, optimizers[1])):
            loss_of(x(part), part).backward()
            optimizer.step()
            optimizer.zero_grad()
    weight = m.blocks[0].up.weight
    assert weight.to_local().shape == (16, 16), "each rank has a quarter"
    close(m.state_dict(), one.state_dict())


@case
def redistributions():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("tpu", (size(),))
    whole = torch.arange(5.0 * 7).view(5, 7)
    for first in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(whole.to("tpu"), mesh, [first])
        for second in (Shard(0), Shard(1), Replicate()):
            y = x.redistribute(mesh, [second])
            torch.testing.assert_close(y.full_tensor().cpu(), whole)
            torch.testing.assert_close((y @ y.t()).full_tensor().cpu(), whole @ whole.t())
            torch.testing.assert_close(y.sum(0).full_tensor().cpu(), whole.sum(0))
    from torch.distributed.tensor import DTensor

    x = DTensor.from_local(whole.to("tpu"), mesh, [Partial()])
    for second in (Shard(0), Shard(1), Replicate()):
        torch.testing.assert_close(x.redistribute(mesh, [second]).full_tensor().cpu(), whole * size())
    torch.testing.assert_close((x.mean() + 1).full_tensor().cpu(), (whole * size()).mean() + 1)


@case(ranks=(4, 8))
def redistributions_of_two_dimensions():
    """Between all pairs of placements, of a tensor whose dimensions the mesh does not divide."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("tpu", (2, size() // 2))
    whole = torch.arange(5.0 * 7 * 3).view(5, 7, 3)
    places = list(itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2))
    for first, second in itertools.product(places, places):
        x = distribute_tensor(whole.to("tpu"), mesh, first).redistribute(mesh, second)
        assert x.placements == tuple(second)
        torch.testing.assert_close(x.to_local().cpu(), distribute_tensor(whole, cpu_mesh(), second).to_local())
        torch.testing.assert_close((x * 2).sum(1).full_tensor().cpu(), (whole * 2).sum(1))
    for kind, exact in (("sum", whole * size()), ("avg", whole), ("max", whole), ("min", whole)):
        x = DTensor.from_local(whole.to("tpu"), mesh, [Partial(kind)] * 2)
        for second in places:
            torch.testing.assert_close(x.redistribute(mesh, second).full_tensor().cpu(), exact)


def cpu_mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, size() // 2))


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


class Stage(nn.Module):
    def __init__(self, i):
        super().__init__()
        torch.manual_seed(i)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def pipeline(schedule, per_rank=1):
    """A step of a pipeline with so many stages on a rank gives the gradients and the loss of the whole on the CPU."""
    from torch.distributed.pipelining import PipelineStage

    x, target = torch.arange(64.0).view(8, 8) / 64, torch.ones(8, 8)
    stages = size() * per_rank
    whole = nn.Sequential(*(Stage(i) for i in range(stages)))
    wanted = nn.functional.mse_loss(whole(x), target)
    wanted.backward()
    numbers = range(rank(), stages, size())
    own = [Stage(i).to("tpu") for i in numbers]
    device = torch.device("tpu", torch.tpu.current_device())
    made = [PipelineStage(m, i, stages, device) for m, i in zip(own, numbers, strict=True)]
    batches = max(4, size())
    steps = schedule(made[0] if per_rank == 1 else made, n_microbatches=batches, loss_fn=nn.functional.mse_loss)
    losses = []
    last = {"target": target.to("tpu"), "losses": losses} if rank() == size() - 1 else {}
    steps.step(*([x.to("tpu")] if rank() == 0 else []), **last)
    if last:
        torch.testing.assert_close(torch.stack(losses).mean().detach().cpu(), wanted.detach())
    for m, i in zip(own, numbers, strict=True):
        close({"w": m.linear.weight.grad}, {"w": whole[i].linear.weight.grad})


@case
def pipelines():
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    for schedule in (ScheduleGPipe, Schedule1F1B):
        pipeline(schedule)


@case
def pipelines_of_several_stages():
    from torch.distributed.pipelining import (
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
    )

    for schedule in (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble):
        pipeline(schedule, 2)


@case
def checkpoints():
    import torch.distributed.checkpoint as dcp

    m = sharded()
    optimizer = adamw(m)
    train(m, optimizer, "tpu")
    folder = shared_folder()
    dcp.save({"model": m.state_dict()}, checkpoint_id=folder)
    other = zeroed(sharded())
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    close(other.state_dict(), alone()[0])
    one = model().state_dict()  # a process of its own, without the device
    dcp.load({"model": one}, checkpoint_id=folder, no_dist=True)
    close(one, alone()[0])


def shared_folder():
    """A folder of rank 0, known to all."""
    import tempfile

    folder = [tempfile.mkdtemp() if rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return folder[0]


def zeroed(m):
    with torch.no_grad():
        for p in m.parameters():
            p.zero_()
    return m


@case
def checkpoints_in_the_background():
    """What is saved is what was there at the call, whatever the next steps do."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    m = sharded()
    optimizer = adamw(m)
    train(m, optimizer, "tpu")
    folder = shared_folder()
    model_state, optimizer_state = get_state_dict(m, optimizer)
    saved = dcp.async_save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    train(m, optimizer, "tpu")
    saved.result()
    later = {name: p.full_tensor().cpu() for name, p in m.state_dict().items()}
    other = zeroed(sharded())
    again = adamw(other)
    model_state, optimizer_state = get_state_dict(other, again)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    close(other.state_dict(), alone()[0])
    train(other, again, "tpu")
    close(other.state_dict(), later)


@case(ranks=(4, 8))
def checkpoints_of_other_numbers_of_ranks():
    """What some ranks saved some others load, and one process without the device."""
    import torch.distributed.checkpoint as dcp

    for saving, loading, one in meshes_of_other_sizes():
        folder = shared_folder()
        if saving.get_coordinate() is not None:
            group = saving.get_group()
            dcp.save({"model": sharded(mesh=saving).state_dict()}, checkpoint_id=folder, process_group=group)
        dist.barrier()
        if loading.get_coordinate() is not None:
            state = {"model": zeroed(sharded(mesh=loading)).state_dict()}
            dcp.load(state, checkpoint_id=folder, process_group=loading.get_group())
            close(state["model"], one)
        single = zeroed(model()).state_dict()
        dcp.load({"model": single}, checkpoint_id=folder, no_dist=True)
        close(single, one)


def meshes_of_other_sizes():
    """Two meshes of unlike sizes, for all orders of 2, 4 and 8 that there are, and a model's parameters."""
    from torch.distributed.device_mesh import DeviceMesh

    meshes = [DeviceMesh("tpu", list(range(n))) for n in (2, 4, 8) if n <= size()]
    wanted = {name: t.clone() for name, t in model().state_dict().items()}
    return [(saving, loading, wanted) for saving, loading in itertools.permutations(meshes, 2)]


@case(ranks=(4,))
def mesh_of_three_dimensions():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("tpu", (2, 1, 2), mesh_dim_names=("stages", "replicas", "parts"))
    for name, others in (("stages", rank() % 2 * 2 + 2), ("replicas", rank()), ("parts", rank() // 2 * 4 + 1)):
        x = torch.full((3,), float(rank()), device="tpu")
        dist.all_reduce(x, group=mesh.get_group(name))
        torch.testing.assert_close(x.cpu(), torch.full((3,), float(others)))
    flat = mesh["replicas", "parts"]._flatten("all")
    assert flat.size() == 2
    whole = torch.arange(48.0).view(4, 12)
    x = distribute_tensor(whole.to("tpu"), mesh, [Shard(0), Replicate(), Shard(1)])
    assert x.to_local().shape == (2, 6)
    torch.testing.assert_close((x @ x.t()).full_tensor().cpu(), whole @ whole.t())
