"""Functions of `torch.tpu.jit` with collectives give in each call what they give in eager mode."""

import copy
import functools
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.distributed.ranks import IS_TORCH_2_11, case
from tests.steps import training

CALLS = 3


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def peer(step: int) -> int:
    return (rank() + step) % size()


def data(call: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * call + rank())
    return torch.randn(shape, generator=generator).to("tpu")


def equal(got, wanted, **tolerance):
    torch.testing.assert_close(got, wanted, **({"rtol": 0, "atol": 0} | tolerance))


def counted(names, call):
    """What a call gives, and by how much it raised these counts of the process."""
    torch.tpu.synchronize()  # what was recorded before does not count
    before = torch.tpu.metrics()
    result = call()
    torch.tpu.synchronize()
    after = torch.tpu.metrics()
    return result, [after[name] - before[name] for name in names]


def number() -> int:
    """Of the group's last collective. PyTorch 2.11 tells those of its own groups alone: how many there were."""
    if not IS_TORCH_2_11:
        return dist.group.WORLD._get_sequence_number_for_group()
    torch.tpu.synchronize()
    return sum(counts["count"] for counts in torch.tpu.metrics()["collectives"].values())


def check(f, shape=(4, 6)):
    """`f(x)` gives in each call what it gives without jit, by one trace, and has as many collectives."""
    jitted = torch.tpu.jit(f)
    for call in range(CALLS):
        x, begin = data(call, *shape), number()
        got, (programs, replays) = counted(["programs", "replays"], functools.partial(jitted, x))
        end = number()
        equal(got, f(x))
        assert number() - end == end - begin
        assert replays == (call > 0)
        assert programs == 0 or call == 0
    assert jitted.traces == 1


# ---------------------------------------------------------------- each collective


def in_place(x):
    y = (x * 2).sin()
    dist.all_reduce(y)
    z = y * 3 + x
    dist.broadcast(z, size() - 1)
    dist.reduce(u := z.cos(), 0)
    return y, z, u if rank() == 0 else z


def averaged(x):
    y = x.exp()
    dist.all_reduce(y, dist.ReduceOp.AVG)
    dist.all_reduce(y, dist.ReduceOp.MAX)
    return y + 1


def gathered(x):
    out = torch.empty(size() * x.shape[0], x.shape[1], device=x.device)
    dist.all_gather_into_tensor(out, x + 1)
    lists = [torch.empty_like(x) for _ in range(size())]
    dist.all_gather(lists, out[: x.shape[0]] * 2)
    return out.sin(), *lists


def scattered(x):
    out = torch.empty_like(x)
    dist.reduce_scatter_tensor(out, torch.cat([x * (i + 1) for i in range(size())]))
    mean = torch.empty_like(x)
    dist.reduce_scatter(mean, [out + i for i in range(size())], dist.ReduceOp.AVG)
    part = torch.empty_like(x)
    dist.scatter(part, [mean * i for i in range(size())] if rank() == 0 else None, src=0)
    return out, mean, part


def exchanged(x):
    out = torch.empty_like(x)
    rows = x.repeat(1, size())
    whole = torch.empty_like(rows.t().contiguous())
    dist.all_to_all_single(whole, rows.t().contiguous())
    parts = [torch.empty_like(x) for _ in range(size())]
    dist.all_to_all(parts, [x + i for i in range(size())])
    dist.gather(out + x, [torch.empty_like(x) for _ in range(size())] if rank() == 0 else None)
    return whole, *parts


def asynchronous(x):
    y, z = x.sin(), x.cos()
    works = [dist.all_reduce(y, async_op=True), dist.all_reduce(z, async_op=True)]
    u = x @ x.t()
    for work in works:
        work.wait()
    return y + z, u


def sent(x):
    y, out = x * 2, torch.empty_like(x)
    works = [dist.isend(y, peer(1)), dist.irecv(out, peer(-1))]
    for work in works:
        work.wait()
    ops = [
        dist.P2POp(dist.isend, out, peer(1), tag=3),
        dist.P2POp(dist.irecv, last := torch.empty_like(x), peer(-1), tag=3),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out + 1, last


def coalesced(x):
    parts = [x.sin(), x.cos(), x + 1]
    with dist._coalescing_manager(async_ops=True) as manager:
        for part in parts:
            dist.all_reduce(part)
    manager.wait()
    return tuple(part * 2 for part in parts)


def functional(x):
    group = dist.group.WORLD
    y = funcol.all_reduce(x * 2, "sum", group)
    z = funcol.all_gather_tensor(y + 1, 0, group)
    u = funcol.reduce_scatter_tensor(z.sin(), "sum", 0, group)
    return u + y, funcol.all_to_all_single(z, None, None, group)


def views(x):
    """Parts of tensors are read and written, and tensors that are there in each call."""
    y = x.clone()
    dist.all_reduce(y[1])
    t = y.t()[:2].contiguous()
    dist.all_reduce(t)
    return y, t


FORMS = (in_place, averaged, gathered, scattered, exchanged, asynchronous, sent, coalesced, functional, views)


def add_forms():
    for f in FORMS:
        run = functools.partial(check, f)
        run.__module__, run.__name__ = __name__, f.__name__
        case(run)


add_forms()


# ---------------------------------------------------------------- groups, numbers, calls that differ


@case
def subgroups():
    pairs = [dist.new_group([i, i + 1]) for i in range(0, size() - 1, 2)]

    def f(x):
        y = x.sin()
        dist.all_reduce(y, group=pairs[rank() // 2])
        dist.all_reduce(y)
        return y * 2

    if size() % 2 == 0:
        check(f)


@case
def random_numbers_are_those_of_eager_mode():
    def f(x):
        y = nn.functional.dropout(x, 0.5)
        dist.all_reduce(y)
        return nn.functional.dropout(y, 0.5) + torch.rand_like(y)

    jitted, x = torch.tpu.jit(f), data(0, 8, 8)
    torch.tpu.manual_seed(rank())
    got = [jitted(x) for _ in range(CALLS)]
    torch.tpu.manual_seed(rank())
    for y in got:
        equal(y, f(x))


@case
def numbers_and_positions():
    def f(x, scale, at):
        y = x * scale
        dist.all_reduce(y)
        z = y[:, at] + scale
        dist.all_reduce(z)
        return z, y / scale

    jitted = torch.tpu.jit(f)
    for call in range(6):
        x, begin = data(call, 4, 6), number()
        got = jitted(x, 0.3 + call, call % 6)
        end = number()
        equal(got, f(x, 0.3 + call, call % 6))
        # Runs by which it is found out what moves with a number send nothing.
        assert number() - end == end - begin
    assert jitted.traces <= 5, jitted


@case
def ranks_that_trace_meet_ranks_that_do_not():
    def f(x):
        y = x.sum(0)
        dist.all_reduce(y)
        return y * 2

    jitted = torch.tpu.jit(f)
    for call in range(CALLS):
        x = data(call, 3 + call * rank(), 5)  # other sizes in each call of ranks but the first
        equal(jitted(x), f(x))
    assert jitted.traces == (1 if rank() == 0 else CALLS)


@case
def what_is_donated_is_not_overwritten_while_it_is_needed():
    def f(w, x):
        y = w * 2
        dist.all_reduce(y)
        z = w.sin() + y
        dist.all_reduce(z)
        return w + z, x.copy_(x + w)

    jitted = torch.tpu.jit(f, donate_argnums=0)
    w, plain, x, other = data(0, 64, 64), data(0, 64, 64), data(1, 64, 64), data(1, 64, 64)
    for _ in range(CALLS):
        w, _ = jitted(w, x)
        plain, _ = f(plain, other)
        equal((w, x), (plain, other))


@case
def what_is_lowered_sends_nothing():
    def f(x):
        y = x * 2
        dist.all_reduce(y)
        return y.sin()

    jitted, x, begin = torch.tpu.jit(f), data(0, 3), number()
    lowered = jitted.lower(x)
    assert number() == begin
    before, between, after = lowered.as_text().partition("// all_reduce(float32[3])")
    assert "multiply" in before and between and "sine" in after
    compiled = lowered.compile()
    assert compiled.cost_analysis()["flops"] >= 3 and compiled.memory_analysis()["arguments"] >= 12
    assert compiled.as_text().count("HloModule") == 2 and number() == begin
    # These are the programs of a call.
    compiled(x)
    got, (programs,) = counted(["programs"], functools.partial(compiled, x))
    equal(got, f(x))
    assert programs == 0


# ---------------------------------------------------------------- training


class Net(nn.Module):
    def __init__(self, norm: bool = False, unused: bool = False):
        super().__init__()
        self.up, self.down = nn.Linear(6, 32), nn.Linear(32, 6)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.unused = nn.Linear(6, 6) if unused else None

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)).relu())


def trained(make, jit: bool, steps: int = 5, net=Net, optimizer=torch.optim.AdamW, device="tpu"):
    """The losses, parameters, buffers and gradients after some steps; the function."""
    torch.manual_seed(1)
    model = make(net().to(device))
    step = training(model, optimizer(model.parameters(), lr=1e-2))
    step = torch.tpu.jit(step) if jit else step
    losses = [whole(step(data(call, 4, 6).to(device))) for call in range(steps)]
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    grads = {name: p.grad for name, p in model.named_parameters()}
    return (losses, {k: whole(v) for k, v in state.items()}, {k: whole(v) for k, v in grads.items()}), step


def whole(t):
    return t if t is None else (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu()


def train(make, traces: int = 2, referees=("tpu",), rtol=1e-5, atol=1e-6, **options):
    got, step = trained(make, True, **options)
    for device in referees:
        wanted, _ = trained(make, False, device=device, **options)
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)
    assert traces == step.traces, step


SMALL = {"bucket_cap_mb": 0.001}


@case
def ddp():
    for views in (False, True):
        train(lambda net, views=views: DDP(net, gradient_as_bucket_view=views, **SMALL))


@case
def ddp_with_buffers_and_the_builtin_hook():
    def make(net):
        model = DDP(net, **SMALL)
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        return model

    train(make, net=lambda: Net(norm=True), optimizer=torch.optim.SGD)


BOTH = ("tpu", "cpu")


@case
def ddp_static_graph():
    def make(net, begun):
        model = DDP(net, static_graph=True, gradient_as_bucket_view=True, **SMALL)
        if begun:
            model(data(9, 4, 6).to(next(net.parameters()).device)).sum().backward()
        return model

    for unused in (False, True):
        net = functools.partial(Net, unused=unused)
        train(functools.partial(make, begun=True), referees=BOTH, net=net)
        # The first step of such a module is one of eager mode.
        train(functools.partial(make, begun=False), 3, referees=BOTH, net=net)


@case
def ddp_that_asks_the_others_in_each_step():
    """Python runs in each call, which a warning says."""
    for unused in (False, True):
        with pytest.warns(UserWarning, match="find_unused_parameters=True.* in each call, as in eager mode\nhint: "):
            make = functools.partial(DDP, find_unused_parameters=True, **SMALL)
            train(make, 5, referees=BOTH, net=functools.partial(Net, unused=unused))

    def compressed(net):
        model = DDP(net, **SMALL)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model

    with pytest.warns(UserWarning, match="communication hook of DDP that has a state"):
        train(compressed, 5, rtol=1e-3, atol=3e-5)  # it divides by norms, and roundings grow


@case
def ddp_with_uneven_inputs():
    def run(jit, device):
        torch.manual_seed(1)
        model = DDP(Net().to(device), **SMALL)
        step = training(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step = torch.tpu.jit(step) if jit else step
        with Join([model]):
            losses = [whole(step(data(call, 4, 6).to(device))) for call in range(2 + rank() % 2)]
        losses.append(whole(step(data(9, 4, 6).to(device))))
        return losses, [whole(p) for p in model.parameters()]

    with pytest.warns(UserWarning, match="in a Join context"):
        got = run(True, "tpu")
    for device in BOTH:
        torch.testing.assert_close(got, run(False, device), rtol=1e-5, atol=1e-6)


@case
def ddp_around_a_compiled_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo, about hooks of modules
        train(lambda net: DDP(torch.compile(net, **({"backend": "tpu"} if IS_TORCH_2_11 else {}))))


@case
def synchronized_statistics():
    def make(net):
        return DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net), **SMALL)

    train(make, net=functools.partial(Net, norm=True), optimizer=torch.optim.SGD)
    norm = nn.SyncBatchNorm(6).to("tpu")

    def normalized(x):
        x = x.detach().requires_grad_()
        y = norm(x)
        return y.detach(), torch.autograd.grad(y.square().sum(), [x, norm.weight], allow_unused=True)

    jitted = torch.tpu.jit(normalized)
    for rows in (4, 4, 0 if rank() == 0 else 4, 0 if rank() == 0 else 4):  # one has nothing at last
        x, state = data(rows, rows, 6), [t.clone() for t in norm.buffers()]
        got, moved = jitted(x), [t.clone() for t in norm.buffers()]
        for t, before in zip(norm.buffers(), state, strict=True):
            t.copy_(before)
        torch.testing.assert_close(got, normalized(x))
        torch.testing.assert_close(moved, list(norm.buffers()))
    assert jitted.traces == (2 if rank() == 0 else 1)


@case
def ddp_that_trained_before():
    def make(net):
        model = DDP(net, **SMALL)
        model(data(9, 4, 6)).sum().backward()  # its next step begins with other buckets
        return model

    train(make)


@case
def ddp_accumulates():
    def step_of(model, optimizer):
        def accumulate(x, last):
            with nullcontext() if last else model.no_sync():
                loss = model(x).square().mean()
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return accumulate

    def run(jit):
        torch.manual_seed(1)
        model = DDP(Net(norm=True).to("tpu"), **SMALL)
        step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step = torch.tpu.jit(step) if jit else step
        losses = [step(data(call, 4, 6), call % 3 == 2) for call in range(9)]
        return losses, [whole(p) for p in model.state_dict().values()]

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-6)


@case
def ddp_without_synchronization_outside():
    """`no_sync` around a call is another function than the call alone."""

    def run(jit):
        torch.manual_seed(1)
        model = DDP(Net(norm=True).to("tpu"), **SMALL)

        def backward(x):
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        backward = torch.tpu.jit(backward) if jit else backward
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for call in range(8):
            with model.no_sync() if call % 2 == 0 else nullcontext():
                losses.append(backward(data(call, 4, 6)))
            if call % 2:
                optimizer.step()
                optimizer.zero_grad()
        return losses, [whole(p) for p in model.state_dict().values()]

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-6)


@case
def tensor_parallel():
    """Parameters and their gradients are DTensors."""
    mesh = init_device_mesh("tpu", (size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    make, optimizer = functools.partial(parallelize_module, device_mesh=mesh, parallelize_plan=plan), torch.optim.AdamW
    train(make, optimizer=functools.partial(optimizer, foreach=False))


def sharded(net):
    for layer in (net.up, net.down):
        fully_shard(layer)
    return fully_shard(net)


@case
def fsdp2():
    """Parameters are gathered and let go within a call, and their gradients are scattered."""
    train(sharded, traces=2)


@case
def fsdp2_evaluated_between_steps():
    """By default the outermost module stays gathered behind a forward, which a program does not show PyTorch."""
    for reshards in (None, True):
        model = fully_shard(Net().to("tpu"), reshard_after_forward=reshards)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        evaluate = torch.no_grad()(torch.tpu.jit(lambda x, model=model: model(x)))
        step = training(model, optimizer)
        for call in range(CALLS):
            x = data(call, 4, 6)
            step(x)
            if not reshards:
                with pytest.raises(RuntimeError, match="reshard_after_forward=True"):
                    evaluate(x)
                continue
            with torch.no_grad():
                torch.testing.assert_close(evaluate(x).cpu(), model(x).cpu())


@case
def distributed_tensors_as_results():
    mesh = init_device_mesh("tpu", (size(),))

    def f(x):
        y = DTensor.from_local(x, mesh, [Shard(0)]).sin()
        return y, y.redistribute(placements=[Replicate()]) + 1, y.sum()

    jitted = torch.tpu.jit(f)
    for call in range(CALLS):
        x = data(call, 4, 6)
        for got, wanted in zip(jitted(x), f(x), strict=True):
            assert got.placements == wanted.placements
            torch.testing.assert_close(got.full_tensor(), wanted.full_tensor())
    assert jitted.traces == 1


@case
def distributed_tensors_as_arguments():
    mesh = init_device_mesh("tpu", (size(),))

    def f(x, w, scale):
        y = (x @ w).relu() * scale
        return y, y.redistribute(placements=[Replicate()]).sum(0), x

    jitted = torch.tpu.jit(f)
    traces = 0
    for placement in (Shard(0), Replicate(), Shard(0)):
        for call in range(CALLS):
            x = distribute_tensor(data(call, 8, 6), mesh, [placement])
            w = distribute_tensor(data(call + 5, 6, 4), mesh, [Replicate()])
            for got, wanted in zip(jitted(x, w, 2.5), f(x, w, 2.5), strict=True):
                assert got.placements == wanted.placements
                equal(got.full_tensor(), wanted.full_tensor())
        traces = max(traces, jitted.traces)
    assert traces == jitted.traces == 2
    # Another number is no other kind of call; a plain tensor is.
    for scale in (0.5, 0.75, 0.25):
        for got, wanted in zip(jitted(x, w, scale), f(x, w, scale), strict=True):
            equal(got.full_tensor(), wanted.full_tensor())
    assert jitted.traces <= 6, jitted
    twice = torch.tpu.jit(lambda x: x * 2)
    for x in (data(0, 8, 6), distribute_tensor(data(0, 8, 6), mesh, [Shard(0)]), data(1, 8, 6)):
        assert type(twice(x)) is type(x)
    assert twice.traces == 2


@case
def gradients_of_distributed_arguments():
    mesh = init_device_mesh("tpu", (size(),))

    def loss_of(w, x):
        return (x @ w).square().sum().redistribute(placements=[Replicate()]).to_local()

    def step(w, x):
        loss_of(w, x).backward()
        with torch.no_grad():
            w.sub_(0.1 * w.grad)
        w.grad = None

    jitted = torch.tpu.jit(step)
    # A part for each rank: PyTorch does not write in place to what fewer have.
    start = torch.randn(6, max(4, size()), generator=torch.Generator().manual_seed(1)).to("tpu")
    got, wanted = (nn.Parameter(distribute_tensor(start, mesh, [Shard(1)])) for _ in range(2))
    for call in range(CALLS):
        x = distribute_tensor(data(call, 8, 6), mesh, [Replicate()])
        jitted(got, x)
        step(wanted, x)
        torch.testing.assert_close(got.full_tensor(), wanted.full_tensor())
    assert jitted.traces <= 2, jitted


@case
def modules_in_tensor_parallel_as_arguments():
    mesh = init_device_mesh("tpu", (size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def run(jit):
        torch.manual_seed(1)
        model = parallelize_module(Net().to("tpu"), mesh, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

        def step(model, optimizer, x):
            return training(model, optimizer)(x)

        step = torch.tpu.jit(step) if jit else step
        losses = [step(model, optimizer, data(0, 4, 6)) for _ in range(CALLS)]
        assert not jit or step.traces == 2
        return losses, [whole(p) for p in model.parameters()]

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-6)


@case
def checkpoints_are_loaded():
    """After a checkpoint is loaded, no function is run anew: parameters are DTensors, and plain tensors of DDP."""
    mesh = init_device_mesh("tpu", (size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    ways = {
        "ddp": lambda net: DDP(net, **SMALL),
        "fsdp2": sharded,
        "tensor parallel": lambda net: parallelize_module(net, mesh, plan),
    }
    for name, make in ways.items():
        results = []
        for jit in (True, False):
            torch.manual_seed(1)
            model = make(Net().to("tpu"))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
            step = training(model, optimizer)
            step = torch.tpu.jit(step) if jit else step
            losses = [step(data(call, 4, 6)) for call in range(3)]
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            losses += [step(data(call, 4, 6)) for call in range(3, 5)]
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            losses += [step(data(call, 4, 6)) for call in range(3, 5)]
            results.append((losses, [whole(p) for p in model.parameters()]))
            assert not jit or step.traces == 2, (name, step)
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@case
def gradients_by_torch_func():
    def step(w, x):
        def loss_of(w):
            return ((x @ w["a"]).relu() @ w["b"]).square().mean()

        grads, loss = torch.func.grad_and_value(loss_of)(w)
        flat = torch.cat([g.flatten() for g in grads.values()])
        dist.all_reduce(flat, dist.ReduceOp.AVG)
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        a, b = flat.split([w["a"].numel(), w["b"].numel()])
        return {"a": w["a"] - 0.1 * a.view(6, 8), "b": w["b"] - 0.1 * b.view(8, 2)}, loss

    jitted = torch.tpu.jit(step, donate_argnums=0)
    torch.manual_seed(1)
    start = {"a": torch.randn(6, 8), "b": torch.randn(8, 2)}
    w, plain = ({k: v.to("tpu") for k, v in start.items()} for _ in range(2))
    for call in range(CALLS):
        x = data(call, 4, 6)
        (w, loss), (plain, wanted) = jitted(w, x), step(plain, x)
        torch.testing.assert_close((w, loss), (plain, wanted))
    assert jitted.traces == 1


# ---------------------------------------------------------------- what it refuses


def waits(x):
    dist.barrier(device_ids=[torch.tpu.current_device()])
    return x + 1


def of_the_host(x):
    y = torch.ones(3)
    dist.all_reduce(y)
    return x + y.to("tpu").sum()


REFUSED = {
    torch.tpu.jit(waits): "a collective (for which Python waits|of the host).* at .*jitted.py:[0-9]+ in waits",
    torch.tpu.jit(of_the_host): r"a collective of the host \(c10d.allreduce_.default\) at .*jitted.py:[0-9]+ in of_the",
}  # fmt: skip


@case
def what_is_refused():
    for f, message in REFUSED.items():
        with pytest.raises(RuntimeError, match=message):
            f(data(0, 4, 6))


@case
def a_group_that_ended():
    """It is as in eager mode then: the function is run, and finds out."""
    group = dist.new_group(list(range(size())))

    def f(x):
        y = x * 2
        dist.all_reduce(y, group=group)
        return y

    jitted = torch.tpu.jit(f)
    for call in range(CALLS):
        jitted(data(call, 3))
    dist.destroy_process_group(group)
    with pytest.raises((RuntimeError, ValueError)):
        jitted(data(0, 3)).cpu()
