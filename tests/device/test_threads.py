"""Threads that share a device: each has its own windows, so how they take turns makes no programs and no other values."""

import itertools
import queue
import random
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

DEVICE = "tpu"


def together(*functions):
    """Runs each in a thread; the first error is raised here."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def programs():
    return torch.tpu.metrics()["programs"]


def small_model():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
    return nn.Sequential(*layers).to(DEVICE)


def serving():
    model = small_model().eval()

    @torch.no_grad()
    def one(steps):
        for i in range(steps):
            x = torch.full((4, 16), float(i), device=DEVICE)
            model(x).softmax(-1).argmax(-1).cpu()

    return lambda steps: together(*[lambda: one(steps)] * 4)


def training_each_its_own():
    data, labels = torch.randn(64, 16, device=DEVICE), torch.randint(0, 4, (64,), device=DEVICE)
    models = [small_model() for _ in range(3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in models]

    def one(model, optimizer, steps):
        for i in range(steps):
            at = i * 8 % 56
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data[at : at + 8]), labels[at : at + 8])
            loss.backward()
            optimizer.step()
            if i % 5 == 0:
                loss.item()

    def run(steps):
        together(*[lambda m=m, o=o: one(m, o, steps) for m, o in zip(models, optimizers, strict=True)])

    return run


def feeding():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run(steps):
        batches = queue.Queue(3)

        def produce():
            for _ in range(steps):
                x = torch.randn(8, 16).to(DEVICE)
                batches.put(((x - 0.1) / 0.9, torch.randint(0, 4, (8,)).to(DEVICE)))
            batches.put(None)

        def train():
            while (batch := batches.get()) is not None:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch[0]), batch[1])
                loss.backward()
                optimizer.step()
            loss.item()

        together(produce, train)

    return run


# Which values of another thread are recorded and not launched yet when one is used is chance: some rounds more.
SETTLED_AFTER = {serving: 2, training_each_its_own: 3, feeding: 4}


@pytest.mark.parametrize("make", SETTLED_AFTER, ids=lambda f: f.__name__)
def test_how_threads_take_turns_makes_no_programs(make):
    run = make()
    made = []
    for _ in range(SETTLED_AFTER[make] + 4):
        before = programs()
        run(20)
        torch.tpu.synchronize()
        made.append(programs() - before)
    assert sum(made[-4:]) <= 1, made


# `total.add_((torch.full(...) * 2 + 1).sin())`, and the steps that a thread makes between two reads.
STEP = ["full", "mul.Tensor", "add.Tensor", "sin", "add.Tensor"]
EVERY = 7


# Of the value that they share: each run of the test makes programs of its own.
WIDTHS = itertools.count(33)


def accumulating(total, steps):
    for i in range(steps):
        total.add_((torch.full(total.shape, float(i), device=DEVICE) * 2 + 1).sin())
        if i % EVERY == 0:
            total.sum().item()


def test_threads_that_share_a_value_are_cut_between_its_uses():
    """A read launches what it needs of other threads, so how many steps of one are in a row there is chance, and any
    round may be the first with so many. But each program is of one thread, of whole steps, and of no more than lie
    between two reads: so many sequences there are, however long the threads run.
    """
    runs = [STEP * n for n in range(EVERY + 1)]
    possible = [["zeros"], *runs, *[[*run, "sum"] for run in runs]]
    known = torch.tpu.graphs()
    total = torch.zeros(next(WIDTHS), device=DEVICE)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(8):
            together(*[lambda: accumulating(total, 20)] * 3)
            torch.tpu.synchronize()
    finally:
        sys.setswitchinterval(interval)
    made = [[op["op"] for op in graph.ops] for graph in torch.tpu.graphs(known[-1] if known else None)]
    assert made
    assert [ops for ops in made if ops not in possible] == []


def penalty(model, x):
    """A gradient of a gradient, whose graph a backward made: one launch."""
    gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
    sum(g.square().sum() for g in gradients).backward()


def recomputing(model, x):
    """A forward that a backward repeats, and its backward: a launch before and one after the barrier between."""
    checkpoint(model, x.requires_grad_(), use_reentrant=True).square().mean().backward()


@pytest.mark.parametrize("in_autograds", [False, True], ids=["in its thread", "in autograd's"])
@pytest.mark.parametrize(
    ("step", "launches"), [(penalty, 1), (recomputing, 2)], ids=lambda x: getattr(x, "__name__", "")
)
def test_a_backward_belongs_to_its_forward(step, launches, in_autograds):
    model, x = small_model(), torch.ones(4, 16, device=DEVICE)
    torch.tpu.synchronize()
    made = []
    for _ in range(3):
        before = torch.tpu.metrics()["launches"]
        with torch.autograd.set_multithreading_enabled(in_autograds):
            step(model, x)
        torch.tpu.synchronize()
        made.append(torch.tpu.metrics()["launches"] - before)
        model.zero_grad()
        x = torch.ones(4, 16, device=DEVICE)
        torch.tpu.synchronize()
    assert made == [launches] * 3


def test_a_thread_that_ended_left_its_results():
    made = {}
    together(lambda: made.update(y=torch.arange(8, device=DEVICE) * 3), lambda: torch.ones(3, device=DEVICE) + 1)
    assert made["y"].tolist() == [3 * i for i in range(8)]


def shared_updates(seed):
    """Threads that take turns at random on shared tensors, and the same steps in the same order on the CPU."""
    rng = random.Random(seed)
    n, lock, log = 6, threading.Lock(), []
    start = [torch.arange(12).reshape(3, 4) + i for i in range(n)]
    shared = [t.to(DEVICE) for t in start]

    def step(tensors, kind, a, b, c):
        x, y, z = tensors[a], tensors[b], tensors[c]
        if kind == 0:
            tensors[c] = (x + y) % 97
        elif kind == 1:
            z.add_(x, alpha=3).remainder_(89)
        elif kind == 2:
            z[1:] = x[:2] * 2 % 83
        elif kind == 3:
            tensors[c] = torch.stack([x[0], y[1], z[2]])
        else:
            tensors[c] = x.clone()
            tensors[c].t()[0] = y.t()[1]
        return tensors[c]

    def work(seed):
        own = random.Random(seed)
        for _ in range(60):
            plan = [own.randrange(5), *(own.randrange(n) for _ in range(3))]
            with lock:
                log.append(plan)
                result = step(shared, *plan)
                if own.random() < 0.1:
                    assert result.tolist() is not None
            if own.random() < 0.05:
                torch.tpu.synchronize()

    seeds = [rng.random() for _ in range(4)]
    together(*[lambda s=s: work(s) for s in seeds])
    expected = [t.clone() for t in start]
    for plan in log:
        step(expected, *plan)
    return [t.tolist() for t in shared], [t.tolist() for t in expected]


@pytest.mark.parametrize("seed", range(2))
def test_threads_on_shared_tensors_compute_what_the_order_says(seed):
    got, expected = shared_updates(seed)
    assert got == expected
