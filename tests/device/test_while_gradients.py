"""Gradients of a `while_loop`, against the rounds one after another on the CPU.

PyTorch's own are no referee: `test_what_pytorch_gives` says where they are others.
"""

import pytest
import torch
from compile_support import WAYS, fresh_dynamo  # noqa: F401 (a fixture)
from oxitorch import _while_gradients
from support import DEVICE, NewGraphs, assert_same, tensors, to_device
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop


def close(actual, expected):
    for i, (a, b) in enumerate(zip(tensors(actual), tensors(expected), strict=True)):
        assert_same(a, b.cpu(), str(i), strides=False, rtol=1e-4, atol=1e-5)


def times_played():
    return torch.tpu.explain().count("its body needs")


def turned(i, x, w):
    return i + 1, torch.tanh(x @ w), w


def counted(i, x, w):
    """A result that follows the number of the round, and one that follows from nothing."""
    return i + 1, torch.where(i % 2 == 0, x @ w, x.sin()), torch.ones_like(w)


def branching(i, x, w):
    x = torch.cond(x.sum() > 0, lambda x, w: (x @ w).sin(), lambda x, w: x * 1.5, (x, w))
    return i + 1, scan(lambda h, row: (torch.tanh(h + row), h.clone()), x, torch.stack([x, -x]))[0], w.clone()


def attending(i, x, w):
    q = (x @ w).reshape(1, 1, *x.shape)
    return i + 1, nn.functional.scaled_dot_product_attention(q, q, q).reshape(x.shape), w.clone()


BODIES = {
    "turned": lambda i, x, w: (*turned(i, x, w)[:2], w.clone()),
    "counted": counted,
    "branching": branching,
    "attending": attending,
}


def looped(body):
    def run(n, x, w, v):
        _, x, w = while_loop(lambda i, x, w: i < n, lambda i, x, w: body(i, x, w @ v), (torch.zeros_like(n), x, w))
        return x, w

    return run


def one_by_one(body):
    def run(n, x, w, v):
        i = torch.zeros_like(n)
        for _ in range(int(n)):
            i, x, w = body(i, x, w @ v)
        return x.clone(), w.clone()

    return run


def gradients(f, needs, n, *args):
    """Results, and the gradients of the arguments that need them; None where there is none."""
    args = [t.detach().requires_grad_(need) for t, need in zip(args, needs, strict=True)]
    results = f(n, *args)
    loss = sum((t * t).sum() for t in results)
    wanted = [t for t in args if t.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(wanted)
    found = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]
    return [*(t.detach() for t in results), *found]


ALL = (True, True, True)
CASES = [
    *(("eager", name, ALL, "few") for name in ("turned", "counted", "attending")),
    pytest.param("eager", "branching", ALL, "few", marks=pytest.mark.slow),
    ("eager", "turned", (False, True, False), "few"),
    ("eager", "turned", (False, False, True), "few"),
    ("jit", "turned", ALL, "few"),
    ("compile", "turned", ALL, "few"),
    ("eager", "turned", ALL, "all"),
    pytest.param("jit", "branching", (False, True, True), "few", marks=pytest.mark.slow),
    pytest.param("jit", "attending", (True, False, False), "few", marks=pytest.mark.slow),
    *(
        pytest.param("compile", name, (False, True, True), "few", marks=pytest.mark.slow)
        for name in ("counted", "branching", "attending")
    ),
]


@pytest.mark.parametrize(("way", "body", "needs", "rows"), CASES)
def test_gradients(way, body, needs, rows, monkeypatch):
    """Also where few rounds are kept: rounds of which all, some or one part are computed again, by one program."""
    if rows == "few":
        monkeypatch.setattr(_while_gradients, "_rows", lambda carried: 2)
    torch.manual_seed(0)
    args = [torch.randn(3, 3), torch.randn(3, 3) / 2, torch.randn(3, 3) / 2 + torch.eye(3)]
    f = looped(BODIES[body])
    if way == "compile":
        compiled = torch.compile(f, backend="tpu")
        run = lambda *args: gradients(compiled, needs, *args)  # noqa: E731
    else:
        run = WAYS[way](lambda *args: gradients(f, needs, *args))
    graphs, played = NewGraphs(), times_played()
    for n in (3, 0, 1, 2, 4, 5, 9):
        n = torch.tensor(n)
        close(run(*to_device([n, *args])), gradients(one_by_one(BODIES[body]), needs, n, *args))
    texts = {g.stablehlo for g in graphs.take() if "stablehlo.while" in g.stablehlo}
    # One, or one more for each answer to what is seen of its results, or two, as what is compiled has a backward.
    assert 1 <= len(texts) <= 4
    assert times_played() == played


def test_rounds_make_no_program():
    f = looped(BODIES["turned"])
    args = to_device([torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3)])
    run = lambda n: [t.cpu() for t in gradients(f, ALL, torch.tensor(n, device=DEVICE), *args)]  # noqa: E731
    for n in (1, 2, 3, 2, 1):  # then it is known what is seen of the results
        run(n)
    before = torch.tpu.metrics()
    for n in (0, 7, 70, 200):
        run(n)
    after = torch.tpu.metrics()
    assert {k: after[k] - before[k] for k in ("programs", "launches")} == {"programs": 0, "launches": 4}


def dropped(n, x):
    return while_loop(lambda i, x: i < n, lambda i, x: (i + 1, torch.dropout(x, 0.5, True)), (torch.zeros_like(n), x))[
        1
    ]


def test_what_is_drawn_is_drawn_once():
    """Rounds with random numbers are recorded one by one; compiled functions have no gradients of them."""
    n, x = torch.tensor(2, device=DEVICE), torch.ones(200, device=DEVICE, requires_grad=True)
    y = dropped(n, x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert 0 < (y == 0).sum() < 200 and torch.equal(y, grad)
    assert "while_loop at" in torch.tpu.explain() and "random numbers (aten::native_dropout)" in torch.tpu.explain()
    with pytest.raises(RuntimeError, match=r"(?s)no gradients in a compiled function.*random numbers.*hint: "):
        torch.compile(dropped, backend="tpu")(n, x)
    with pytest.raises(RuntimeError, match=r"(?s)reads a value on the host.*test_while_gradients.py"):
        torch.tpu.jit(lambda n, x: torch.autograd.grad(dropped(n, x).sum(), x))(n, x)


def test_second_derivatives_are_those_of_the_rounds():
    def second(f, n, x, w, v):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(f(n, x, w, v)[0].square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    args = [torch.tensor(3), *(torch.randn(3, 3) / 2 for _ in range(3))]
    close(second(looped(BODIES["turned"]), *to_device(args)), second(one_by_one(BODIES["turned"]), *args))


@pytest.mark.slow
def test_what_pytorch_gives():
    """Where PyTorch's gradients on the CPU are others; if this fails, they are right now and may be the referee."""
    x, w, v = (torch.randn(3, 3) for _ in range(3))

    def differs(n, needs):
        n = torch.tensor(n)
        expected = gradients(one_by_one(BODIES["turned"]), needs, n, x, w, v)
        pairs = zip(gradients(looped(BODIES["turned"]), needs, n, x, w, v), expected, strict=True)
        return not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)

    assert differs(0, ALL) and differs(3, (False, False, True)) and not differs(3, ALL)
