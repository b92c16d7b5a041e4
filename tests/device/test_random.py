"""Random numbers: reproducible, the same in all eager modes, and distributed as they say."""

import math

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE

N = 20_000


def sample(name, generator=None):
    """Draws once from a distribution."""
    return DRAWS[name](generator)


def on_device(*shape, dtype=torch.float32):
    return torch.empty(*shape, device=DEVICE, dtype=dtype)


# Each with a generator argument; sizes are equal so that programs are shared.
DRAWS = {
    "rand": lambda g: torch.rand(N, device=DEVICE, generator=g),
    "randn": lambda g: torch.randn(N, device=DEVICE, generator=g),
    "randint": lambda g: torch.randint(-3, 7, (N,), device=DEVICE, generator=g),
    "randperm": lambda g: torch.randperm(100, device=DEVICE, generator=g),
    "uniform_": lambda g: on_device(N).uniform_(2, 5, generator=g),
    "normal_": lambda g: on_device(N).normal_(1, 3, generator=g),
    "normal double": lambda g: on_device(N, dtype=torch.float64).normal_(generator=g),
    "normal bfloat16": lambda g: on_device(N, dtype=torch.bfloat16).normal_(generator=g),
    "bernoulli_": lambda g: on_device(N).bernoulli_(0.3, generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((N,), 0.7, device=DEVICE), generator=g),
    "exponential_": lambda g: on_device(N).exponential_(2, generator=g),
    "geometric_": lambda g: on_device(N).geometric_(0.25, generator=g),
    "cauchy_": lambda g: on_device(N).cauchy_(1, 2, generator=g),
    "log_normal_": lambda g: on_device(N).log_normal_(0, 0.5, generator=g),
    "random_": lambda g: on_device(N, dtype=torch.int64).random_(0, 1000, generator=g),
    "multinomial": lambda g: torch.multinomial(
        torch.tensor([1.0, 2, 3, 4], device=DEVICE), N, replacement=True, generator=g
    ),
    "multinomial without replacement": lambda g: torch.multinomial(
        torch.tensor([[1.0, 2, 3, 4]], device=DEVICE).expand(1000, 4), 2, generator=g
    ),
    "normal of tensors": lambda g: torch.normal(
        torch.zeros(N, device=DEVICE), torch.ones(N, device=DEVICE), generator=g
    ),
    "poisson": lambda g: torch.poisson(torch.full((N,), 3.0, device=DEVICE), generator=g),
    "gamma": lambda g: torch._standard_gamma(torch.full((N,), 2.0, device=DEVICE), generator=g),
}
# These take no generator.
DROPS = {
    "dropout": lambda: F.dropout(torch.ones(N, device=DEVICE), 0.25),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(N, device=DEVICE), 0.25, training=True),
    "rand_like": lambda: torch.rand_like(on_device(N)),
    "randn_like": lambda: torch.randn_like(on_device(N)),
    "randint_like": lambda: torch.randint_like(on_device(N), 10),
    "rrelu": lambda: F.rrelu(-torch.ones(N, device=DEVICE), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(N // 4, 4, device=DEVICE), hard=True),
    "trunc_normal_": lambda: torch.nn.init.trunc_normal_(on_device(N)),
    "kaiming_uniform_": lambda: torch.nn.init.kaiming_uniform_(on_device(100, 200)),
    "orthogonal_": lambda: torch.nn.init.orthogonal_(on_device(8, 8)),
}
EVERY = {**{k: lambda k=k: sample(k) for k in DRAWS}, **DROPS}


def same(a, b):
    """Equal but for how XLA rounds: what an op is compiled with may change the last digits."""
    a, b = a.cpu(), b.cpu()
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6) if a.is_floating_point() else torch.equal(a, b)


@pytest.mark.parametrize("name", EVERY)
def test_seeds_and_modes(name):
    """The same seed gives the same numbers, in both modes; the next call and another seed give others."""
    draw = EVERY[name]
    torch.manual_seed(7)
    first, second = draw(), draw()
    torch.tpu.manual_seed(7)
    assert same(draw(), first) and same(draw(), second)
    assert not same(first, second), "two calls in a row gave the same numbers"
    torch.manual_seed(8)
    assert not same(draw(), first)
    torch.manual_seed(7)
    with torch.tpu.set_eager_mode("debug"):
        assert same(draw(), first) and same(draw(), second)


@pytest.mark.parametrize("name", DRAWS)
def test_generators(name):
    """A generator of one's own: reproducible, and it leaves the device's generator alone."""
    torch.manual_seed(1)
    state = torch.tpu.get_rng_state()
    g = torch.Generator(DEVICE).manual_seed(5)
    first, second = sample(name, g), sample(name, g)
    again = torch.Generator(DEVICE).manual_seed(5)
    assert same(sample(name, again), first) and same(sample(name, again), second)
    assert torch.equal(torch.tpu.get_rng_state(), state)
    saved = g.get_state()
    third = sample(name, g)
    g.set_state(saved)
    assert same(sample(name, g), third)
    twin = g.clone_state() if hasattr(g, "clone_state") else None
    assert twin is None or same(sample(name, twin), sample(name, g))


# What the numbers must look like: mean, variance, range. The bounds are six standard errors of 20,000 draws.
MOMENTS = {
    "rand": (0.5, 1 / 12, 0, 1),
    "randn": (0, 1, -7, 7),
    "randint": (1.5, 99 / 12, -3, 6),
    "uniform_": (3.5, 9 / 12, 2, 5),
    "normal_": (1, 9, -20, 22),
    "normal double": (0, 1, -7, 7),
    "normal bfloat16": (0, 1, -7, 7),
    "bernoulli_": (0.3, 0.21, 0, 1),
    "bernoulli": (0.7, 0.21, 0, 1),
    "exponential_": (0.5, 0.25, 0, 20),
    "geometric_": (4, 12, 1, 200),
    "random_": (499.5, 999999 / 12, 0, 999),
    "multinomial": (2, 1, 0, 3),
    "normal of tensors": (0, 1, -7, 7),
    "poisson": (3, 3, 0, 30),
    "gamma": (2, 2, 0, 40),
    "log_normal_": (math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25), 0, 40),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_distributions(name):
    mean, variance, low, high = MOMENTS[name]
    torch.manual_seed(3)
    x = sample(name).double().cpu()
    assert x.min() >= low and x.max() <= high
    assert abs(x.mean() - mean) < 6 * math.sqrt(variance / N)
    assert abs(x.var() / variance - 1) < 0.15
    # Neighbours, and numbers one Philox block or one row of lanes apart, are independent.
    y = (x - x.mean()) / x.std()
    for lag in (1, 2, 3, 4, 8, 128, 1024):
        assert abs((y[lag:] * y[:-lag]).mean()) < 6 / math.sqrt(N), f"correlation at distance {lag}"


def test_the_whole_distribution():
    """Quantiles of rand and randn: the Kolmogorov distance of 20,000 draws is below 0.0138 in 999 of 1000 seeds."""
    torch.manual_seed(4)
    u = torch.rand(N, device=DEVICE).cpu().double().sort().values
    z = torch.special.ndtr(torch.randn(N, device=DEVICE).cpu().double()).sort().values
    grid = torch.arange(1, N + 1, dtype=torch.float64) / N
    assert (u - grid).abs().max() < 0.0138 and (z - grid).abs().max() < 0.0138
    assert u.unique().numel() > N - 30 and u.max() < 1


def test_cauchy():
    x = sample("cauchy_").cpu()
    assert abs(x.median() - 1) < 0.15
    q = x.quantile(torch.tensor([0.25, 0.75]))
    assert abs((q[1] - q[0]) / 2 - 2) < 0.2


def test_permutations():
    for n in (0, 1, 2, 100, 5000):
        p = torch.randperm(n, device=DEVICE)
        assert p.dtype == torch.int64 and torch.equal(p.cpu().sort().values, torch.arange(n))
    firsts = torch.stack([torch.randperm(4, device=DEVICE)[0] for _ in range(200)]).cpu()
    assert (firsts.bincount(minlength=4) > 25).all()


def test_bits_of_integers():
    """Every bit of random_ over a full range is set half of the time."""
    for dtype, bits in ((torch.int64, 63), (torch.int32, 31), (torch.uint8, 8), (torch.int8, 7)):
        x = on_device(4000, dtype=dtype).random_().cpu()
        assert (x >= 0).all()
        for b in range(bits):
            share = ((x >> b) & 1).double().mean()
            assert 0.42 < share < 0.58, f"{dtype} bit {b}: {share}"


def test_multinomial_weights():
    x = sample("multinomial").cpu().bincount(minlength=4).double() / N
    assert torch.allclose(x, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), atol=0.02)
    pairs = sample("multinomial without replacement").cpu()
    assert (pairs[:, 0] != pairs[:, 1]).all()
    one = torch.multinomial(torch.tensor([0.0, 1, 0], device=DEVICE), 1)
    assert one.tolist() == [1]


# ---------------------------------------------------------------- dropout


def test_the_mask_of_dropout_is_the_same_in_backward(mode):
    x = torch.ones(N, device=DEVICE, requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert same(y.detach(), x.grad)
    values = y.detach().cpu().unique()
    assert torch.allclose(values, torch.tensor([0, 4 / 3]))
    assert abs((y == 0).float().mean().item() - 0.25) < 0.02


def test_dropout_at_the_ends():
    x = torch.ones(8, device=DEVICE)
    assert F.dropout(x, 0.0).tolist() == [1] * 8 and F.dropout(x, 1.0).tolist() == [0] * 8
    assert F.dropout(x, 0.5, training=False).tolist() == [1] * 8
    state = torch.tpu.get_rng_state()
    F.dropout(x, 0.5, training=False)
    assert torch.equal(torch.tpu.get_rng_state(), state)


def test_dropout_of_channels():
    y = F.dropout2d(torch.ones(50, 20, 3, 3, device=DEVICE), 0.5).cpu()
    per_channel = y.flatten(2)
    assert (per_channel.amin(2) == per_channel.amax(2)).all() and 0.4 < (per_channel[..., 0] == 0).float().mean() < 0.6


def test_dropout_in_place():
    x = torch.ones(N, device=DEVICE)
    assert F.dropout(x, 0.5, inplace=True) is x and 0.4 < (x == 0).float().mean().item() < 0.6


def test_attention_with_dropout():
    q = torch.randn(2, 2, 16, 8, device=DEVICE, requires_grad=True)

    def run():
        torch.manual_seed(1)
        out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        return out, torch.autograd.grad(out.sum(), q)[0]

    (a, ga), (b, gb) = run(), run()
    assert same(a.detach(), b.detach()) and same(ga, gb)
    assert not same(a.detach(), F.scaled_dot_product_attention(q, q, q).detach())


def test_checkpointing_repeats_the_mask():
    x = torch.ones(N, device=DEVICE, requires_grad=True)
    seen = []

    def f(x):
        y = F.dropout(x, 0.5)
        seen.append(y.detach().clone())
        return y * x

    torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2 and same(*seen)
    assert same(x.grad, 2 * seen[0])


# ---------------------------------------------------------------- state


def test_states():
    torch.manual_seed(2)
    state = torch.get_device_module(DEVICE).get_rng_state()
    a = torch.rand(5, device=DEVICE)
    torch.tpu.set_rng_state(state)
    assert same(torch.rand(5, device=DEVICE), a)
    g = torch.Generator(DEVICE)
    g.set_state(state)
    assert same(torch.rand(5, device=DEVICE, generator=g), a)
    assert g.initial_seed() == 2 and g.device == torch.device(DEVICE, 0)


def test_generator_of_the_wrong_kind():
    with pytest.raises(RuntimeError, match="(?i)generator"):
        torch.rand(3, device=DEVICE, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="(?i)generator"):
        torch.rand(3, generator=torch.Generator(DEVICE))
    with pytest.raises((RuntimeError, TypeError)):
        torch.Generator(DEVICE).set_state(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises((RuntimeError, TypeError)):
        torch.Generator(DEVICE).set_state(torch.zeros(16))


def test_seeds_of_generators():
    g = torch.Generator(DEVICE)
    assert g.manual_seed(-1).initial_seed() == 2**64 - 1
    assert g.manual_seed(2**63 + 5).initial_seed() == 2**63 + 5
    assert g.seed() == g.initial_seed()
    assert torch.Generator(DEVICE).seed() != torch.Generator(DEVICE).seed()
    a = torch.rand(4, device=DEVICE, generator=g.manual_seed(2**63 + 5))
    assert not same(a, torch.rand(4, device=DEVICE, generator=g.manual_seed(5)))


def test_fork_rng():
    torch.manual_seed(3)
    a = torch.rand(4, device=DEVICE)
    torch.manual_seed(3)
    with torch.random.fork_rng(device_type=DEVICE):
        torch.rand(100, device=DEVICE)
        torch.manual_seed(99)
    assert same(torch.rand(4, device=DEVICE), a)
    with torch.random.fork_rng(devices=[0], device_type=DEVICE):
        b = torch.rand(4, device=DEVICE)
    assert same(torch.rand(4, device=DEVICE), b)


def new_programs():
    metrics = torch.tpu.metrics()
    return metrics["compiles"] + metrics["loads"]


def test_a_new_seed_compiles_nothing():
    def draw(seed):
        torch.manual_seed(seed)
        x = torch.randn(64, device=DEVICE)
        return F.dropout(x, 0.5).sum().item()

    draw(1)
    torch.tpu.reset_metrics()
    values = {draw(seed) for seed in range(2, 8)}
    assert len(values) == 6
    assert new_programs() == 0 and torch.tpu.metrics()["fallbacks"] == {}


def test_a_new_parameter_compiles_nothing():
    x = on_device(64)
    for i in range(1, 8):
        if i == 3:  # memory that nobody wrote makes the first program a different one
            torch.tpu.synchronize()
            torch.tpu.reset_metrics()
        x.normal_(i, i + 1).uniform_(-i, i).bernoulli_(0.1 * i)
        torch.tpu.synchronize()
    torch.tpu.synchronize()
    assert new_programs() == 0


def test_processes_agree(python):
    """The numbers are a function of seed and call only: another process gets the same, in any mode."""
    code = """
import torch
torch.manual_seed(11)
print(torch.randn(3, device="tpu").tolist(), torch.rand(2, 2, device="tpu").tolist(), torch.randperm(5, device="tpu").tolist())
"""
    torch.manual_seed(11)
    here = f"{torch.randn(3, device=DEVICE).tolist()} {torch.rand(2, 2, device=DEVICE).tolist()} {torch.randperm(5, device=DEVICE).tolist()}\n"
    assert python(code).stdout == here
    assert python(code, OXITORCH_EAGER_MODE="debug").stdout == here


def test_a_prefix_is_a_prefix():
    """Sizes differ, the seed is the same: no number of the small draw depends on how many were asked for in all."""
    torch.manual_seed(1)
    small = torch.rand(8, device=DEVICE)
    torch.manual_seed(1)
    assert same(torch.rand(2, 4, device=DEVICE).flatten(), small)


def test_layout_does_not_matter():
    torch.manual_seed(1)
    a = on_device(4, 6).normal_()
    torch.manual_seed(1)
    b = on_device(6, 4).t().normal_()
    assert same(a, b)
    torch.manual_seed(1)
    c = torch.zeros(4, 12, device=DEVICE)[:, ::2].normal_()
    assert same(a, c)


def philox(counter, key):
    """Four words of Philox4x32-10."""
    x, y, z, w = counter
    low, high = key
    for _ in range(10):
        a, b = 0xD2511F53 * x, 0xCD9E8D57 * z
        x, y, z, w = b >> 32 ^ y ^ low, b & 0xFFFFFFFF, a >> 32 ^ w ^ high, a & 0xFFFFFFFF
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return [x, y, z, w]


def test_the_numbers_are_those_of_philox():
    """The seed is the key and the upper half of the counter, the number of the block the lower; words go by element."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # as published
    seed = 0x123456789ABCDEF
    key = [seed & 0xFFFFFFFF, seed >> 32]

    def words(block, count):
        return [w for b in range(block, block + count) for w in philox([b, 0, *key], key)]

    torch.manual_seed(seed)
    drawn = [torch.rand(3, 5, device=DEVICE), torch.rand((), device=DEVICE), torch.rand(2, 1, 7, 3, device=DEVICE)]
    block = 0
    for x in drawn:
        blocks = -(-x.numel() // 4)
        expected = torch.tensor([w >> 8 for w in words(block, blocks)][: x.numel()], dtype=torch.float32) * 2**-24
        assert torch.equal(x.cpu().flatten(), expected), x.shape
        block += blocks
    wide = on_device(3, 3, dtype=torch.int64).random_()
    w = words(block, 5)
    pairs = [(high << 32 | low) % 2**63 for low, high in zip(w[::2], w[1::2], strict=True)]
    assert wide.cpu().flatten().tolist() == pairs[:9]
