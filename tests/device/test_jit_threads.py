"""Functions of `torch.tpu.jit` that several threads call at once give each what it would get alone."""

import threading
import time

import pytest
import torch
from jit_support import launches
from support import DEVICE
from torch import nn
from torch.optim import optimizer as optimizer_module

THREADS, CALLS = 4, 12


def at_once(run):
    """`run(k)` in so many threads, which begin together; raises what the first raised."""
    failed, start = [], threading.Barrier(THREADS)

    def thread(k):
        start.wait()
        try:
            run(k)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=thread, args=(k,)) for k in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise failed[0]


def same(got, wanted):
    torch.testing.assert_close(got.detach().cpu(), wanted.detach(), rtol=1e-4, atol=1e-5)


def plain(x, scale):
    return (x * 2).sum() + x.shape[0]


def with_a_number(x, scale):
    return (x * scale).sum(0) + scale


# What each thread calls one function with, and how often it is run at most: the threads share what one has found out.
KINDS = {
    "of one size": (plain, {}, lambda k, i: ((5, 3), 1.0), 1),
    "of several sizes": (plain, {}, lambda k, i: ((3 + (i + k) % 3, 3), 1.0), 3),
    "with numbers": (with_a_number, {}, lambda k, i: ((5, 3), 0.25 + i + k), 5),
    "up to a bound": (plain, {"x": {0: torch.tpu.Dim(buckets=[16])}}, lambda k, i: ((3 + (i + k) % 5, 3), 1.0), 12),
}


@pytest.mark.parametrize("name", KINDS)
def test_one_function(name):
    f, dynamic, arguments, traces = KINDS[name]
    jitted = torch.tpu.jit(f, dynamic=dynamic)

    def run(k):
        generator = torch.Generator().manual_seed(k)
        for i in range(CALLS):
            shape, scale = arguments(k, i)
            x = torch.randn(shape, generator=generator)
            same(jitted(x.to(DEVICE), scale), f(x, scale))

    at_once(run)
    assert jitted.calls == THREADS * CALLS
    assert jitted.traces <= traces


def test_models_of_their_own():
    """Some threads train by a function of their own, and others in eager mode while those are traced."""

    def trained(k, device, jit):
        generator = torch.Generator().manual_seed(k)
        torch_model = models[k][device]
        optimizer = torch.optim.AdamW(torch_model.parameters(), lr=0.01)

        def step(x):
            optimizer.zero_grad()
            loss = torch_model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = torch.tpu.jit(step) if jit else step
        losses = [step(torch.randn(4, 6, generator=generator).to(device)).cpu() for _ in range(6)]
        assert not jit or step.traces == 2
        return torch.stack(losses)

    models = []
    for k in range(THREADS):
        torch.manual_seed(k)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        models.append({"cpu": model, DEVICE: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).to(DEVICE)})
        models[k][DEVICE].load_state_dict(model.state_dict())
    results = {}

    def run(k):
        results[k] = trained(k, DEVICE, jit=k % 2 == 0)

    at_once(run)
    for k in range(THREADS):
        same(results[k], trained(k, "cpu", jit=False))
    assert not torch.compiler.is_compiling()


def test_tracing_leaves_the_hooks_of_all_optimizers():
    """A step of another thread goes through them meanwhile, and fails if there are more or less."""
    hooks = optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer, seen = torch.optim.SGD([p], lr=0.1), []
    optimizer.register_step_post_hook(lambda *_: seen.append([list(of) for of in hooks]))

    @torch.tpu.jit
    def step(x):
        (p * x).sum().backward()
        optimizer.step()
        return x + 1

    before = [list(of) for of in hooks]
    step(torch.ones(3, device=DEVICE))
    assert seen and all(found == before for found in seen)


def test_other_threads_are_not_taken_for_compilers():
    """While a function is traced, optimizers of other threads would else compute as compilers want it."""
    found = []

    def look():
        found.append(bool(torch.compiler.is_compiling()))

    @torch.tpu.jit
    def f(x):
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return x + 1

    f(torch.ones(2, device=DEVICE))
    assert found == [True, False]
    assert not torch.compiler.is_compiling()


def test_donated_steps_follow_each_other():
    """The next step is launched while the one that its state was donated to still runs."""

    on_cpu = torch.tpu.platform() == "cpu"
    size = 512 if on_cpu else 4096

    def step(w, x):
        for _ in range(60):  # XLA's CPU client runs small programs where it launches them
            w = torch.tanh(w + x if on_cpu else w @ x)
        return w

    step = torch.tpu.jit(step, donate_argnums=0)
    w, x = torch.randn(size, size, device=DEVICE), torch.randn(size, size, device=DEVICE)

    def waited(calls):
        """Seconds until so many steps are launched, and until they have run."""
        nonlocal w
        wanted, start = launches() + calls, time.perf_counter()
        for _ in range(calls):
            w = step(w, x)
        while launches() < wanted:
            time.sleep(0.001)
        launched = time.perf_counter() - start
        torch.tpu.synchronize()
        return launched, time.perf_counter() - start

    waited(1)
    rounds = [waited(2) for _ in range(3)]
    assert any(launched < both / 4 for launched, both in rounds), rounds
    assert w.isfinite().all()
