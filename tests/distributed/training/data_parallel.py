"""DistributedDataParallel."""

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from oxitorch.data import BucketBatchSampler, bucketize, next_token_labels, pad_collate
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.distributed.ranks import case
from tests.distributed.training.models import STEPS, adamw, alone, batch, close, loss_of, made, model, rank, size, train


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
