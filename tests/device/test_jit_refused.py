"""What no program can do is an error with its line, and side effects are warned about."""

import pytest
import torch
from support import DEVICE, assert_close

EVERYTHING = []


def item(x):
    return x + x.sum().item()


def condition(x):
    return x + 1 if x.sum() > 0 else x


def to_host(x):
    return x + x.cpu().sum().to(x.device)


def to_numpy(x):
    return x.detach().cpu().numpy()


def sizes(x):
    return x[x > 0].sum()


PARAMETERS = []


def exchanges(x):
    parameter = PARAMETERS[0]
    parameter.add_(1)
    parameter.data = torch.zeros(2)
    return x


def keeps(x):
    EVERYTHING.append(x * 2)
    return x


COUNTER = torch.zeros(())
LARGE = torch.zeros(1 << 19)


def draws_a_count(x):
    COUNTER.uniform_()
    return x


def on_host(x, n=LARGE):
    return x + (n * 2).to(x.device).sum()


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (item, "reads a value on the host"),
        (condition, "reads a value on the host"),
        (to_host, "on the host"),
        (to_numpy, "on the host"),
        (sizes, "a size that depends on values"),
        (draws_a_count, "writes to a tensor of the host"),
        (on_host, "computes on the host with tensors"),
    ],
)
def test_what_a_program_cannot_do(f, message):
    x = torch.ones(4, device=DEVICE)
    with pytest.raises(RuntimeError, match=f"(?s)torch.tpu.jit: {f.__name__} .*{message}.*test_jit_refused.py:"):
        torch.tpu.jit(f)(x)
    assert_close(x + 1, torch.full((4,), 2.0), "the device works on")


HOST_READS = {
    "item": lambda x, n: x * n.item(),
    "int": lambda x, n: x[: int((n + 1)[0])],
    "if": lambda x, n: x if n[0] > 2 else x * 2,
    "tolist": lambda x, n: x.split(n.tolist())[0],
    "numpy": lambda x, n: x * float(n.numpy()[0]),
    "tensor_split": lambda x, n: x.tensor_split(n + 1)[0],
    "equal": lambda x, n: x if torch.equal(n, n + 1) else -x,
}


@pytest.mark.parametrize("name", HOST_READS)
def test_what_python_reads_of_an_argument_is_no_constant(name):
    """A tensor of the host has other values in the next call."""
    f = torch.tpu.jit(HOST_READS[name])
    with pytest.raises(
        RuntimeError, match="(?s)reads a value of an argument that is a tensor of the host.*test_jit_ref"
    ):
        f(torch.arange(6.0).to(DEVICE), torch.tensor([3]))


def test_what_the_function_makes_on_the_host_may_be_read():
    def f(x):
        sizes = torch.tensor([2, 4])
        first, second = x.split(sizes.tolist())
        return first * sizes[0].item() + second.sum() * int(sizes.sum()) + float(sizes.numpy()[1])

    x = torch.arange(6.0)
    assert_close(torch.tpu.jit(f)(x.to(DEVICE)), f(x))


def test_what_is_kept_is_named():
    EVERYTHING.clear()
    f = torch.tpu.jit(keeps)
    f(torch.ones(4, device=DEVICE))  # it may be what a first call does, as that of an optimizer
    with pytest.raises(RuntimeError, match=r"(?s)keeps tensors that it makes.*test_jit_refused.py:"):
        f(torch.ones(4, device=DEVICE))


def prints(x):
    print("once")
    return x + 1


CALLS = 0


def binds(x):
    global CALLS
    CALLS += 1
    return x + 1


@pytest.mark.parametrize(
    ("f", "message"), [(prints, "prints at .*test_jit_refused.py"), (binds, "binds CALLS at .*test_jit_refused.py")]
)
def test_side_effects_are_warned_about(f, message):
    g = torch.tpu.jit(f)
    x = torch.ones(4, device=DEVICE)
    with pytest.warns(UserWarning, match=f"(?s)in later calls.*{message}"):
        g(x)
    assert_close(g(x), torch.full((4,), 2.0))


def test_an_exception_leaves_everything_as_it_was():
    w = torch.ones(4, device=DEVICE)

    @torch.tpu.jit
    def f(x):
        w.add_(x)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        f(torch.ones(4, device=DEVICE))
    assert_close(w, torch.ones(4))


def test_places_to_split_at_are_compared_in_each_call(fused):
    f = torch.tpu.jit(lambda x, places: [y * 2 for y in torch.tensor_split(x, places)])
    x = torch.randn(9, 2)
    for places in ([2, 5], [2, 5], [3, 5], [2, 5], [1], 4):
        at = torch.tensor(places)
        for a, e in zip(f(x.to(DEVICE), at), torch.tensor_split(x, at), strict=True):
            assert torch.equal(a.cpu(), e * 2)
    assert f.traces == 4


def test_windows_that_have_no_inverse_are_an_error(fused):
    f = torch.tpu.jit(lambda x, window: torch.istft(x, 8, 8, window=window))
    x = torch.randn(1, 5, 4, dtype=torch.complex64)
    whole = torch.ones(8)
    assert_close(f(x.to(DEVICE), whole.to(DEVICE)), torch.istft(x, 8, 8, window=whole))
    with pytest.raises(RuntimeError, match="windows that overlap add up to less than"):
        f(x.to(DEVICE), torch.zeros(8, device=DEVICE))
        torch.tpu.synchronize()
    torch.tpu.synchronize()


def normal(x):
    return torch.distributions.MultivariateNormal(x[0] * 0, x, validate_args=False).log_prob(x[0])


def with_gradient(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(torch.linalg.solve(x, x[0]).square().sum() + torch.linalg.inv(x).sum(), x)[0]


DECOMPOSED = {
    "cholesky": torch.linalg.cholesky,
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, x + 1),
    "lu_factor": lambda x: torch.linalg.lu_factor(x)[0],
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(x, check_errors=True)[0],
    "inv_ex": lambda x: torch.linalg.inv_ex(x, check_errors=True)[0],
    "solve_ex": lambda x: torch.linalg.solve_ex(x, x + 1, check_errors=True)[0],
    "method": lambda x: x.inverse(),
    "power": lambda x: torch.linalg.matrix_power(x, -2),
    "batch": lambda x: torch.linalg.cholesky(torch.stack([x, x + 1])),
    "vmap": lambda x: torch.vmap(torch.linalg.inv)(torch.stack([x, x + 1])),
    "distribution": normal,
    "gradient": with_gradient,
}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decompositions_that_are_not_found_are_errors(fused, name):
    f = DECOMPOSED[name]
    step = torch.tpu.jit(f)
    good = torch.eye(3, dtype=torch.float64) * 2 + 0.3
    for x in (good, good + 0.1, good + 0.2):
        assert_close(step(x.to(DEVICE)), f(x))
    assert step.traces == 1
    bad = -torch.ones(3, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError) as expected:
        f(bad)
    with pytest.raises(RuntimeError) as raised:
        step(bad.to(DEVICE))
        torch.tpu.synchronize()
    assert raised.type is expected.type
    what = {"lu_factor": "using it on lu_solve", "cholesky": "positive-definite"}
    assert str(raised.value).startswith(str(expected.value).split(": ")[0])
    assert what.get(name, "could not be completed" if "solve" not in str(expected.value) else "solver") in str(
        raised.value
    )
    torch.tpu.synchronize()
    assert_close(step(good.to(DEVICE)), f(good))


def test_a_search_for_nan_is_named():
    w = torch.ones(3, device=DEVICE, requires_grad=True)

    def f(x):
        (w * x).sum().backward()

    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="anomaly detection reads each"):
        torch.tpu.jit(f)(torch.ones(3, device=DEVICE))


def test_memory_of_the_host_is_named():
    f, x = torch.tpu.jit(exchanges), torch.ones(4, device=DEVICE)
    PARAMETERS[:] = [torch.ones(4, device=DEVICE)]
    with pytest.raises(RuntimeError, match=r"(?s)memory of the host at .*test_jit_refused.py:\d+ .*`p.data.copy_"):
        f(x)
