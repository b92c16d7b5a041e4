"""Loops and branches as PyTorch has them, and layers in a loop, against PyTorch on the CPU."""

import copy
import gc
import re

import pytest
import torch
from compile_support import WAYS, fresh_dynamo  # noqa: F401 (a fixture)
from support import DEVICE, NewGraphs, assert_same, tensors, to_device
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import ScanAutogradImpl, scan
from torch._higher_order_ops.while_loop import while_loop


def halved(n, x):
    """x / 2, n times."""
    return while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x / 2), (torch.zeros_like(n), x))


def counted(x):
    """A loop that carries a number of Python."""
    i, x = while_loop(lambda i, x: 2 * i < 9, lambda i, x: (i + 1, x / 2 + i), (1, x))
    return x + i


def chosen(flag, x, w):
    return torch.cond(flag, lambda x, w: (x @ w).sin() + 1, lambda x, w: x * 3 - w, (x, w))


def recurrent(x, xs, w):
    def step(h, x):
        h = torch.tanh(h @ w + x)
        return h, h * 2

    return scan(step, x, xs)


def backwards(x, xs):
    return scan(lambda h, x: (h * 0.5 + x, h.exp()), x, xs, reverse=True)


def mapped(xs, w):
    return map_(lambda x, w: (x @ w).relu(), xs, w)


def products(xs):
    # Pointwise, the default, PyTorch 2.11 takes on CUDA alone.
    return associative_scan(lambda a, b: a * b, xs, 0, combine_mode="generic")


def nested(x, xs):
    """A loop in a loop, with a branch in it."""

    def inner(h, x):
        h = torch.cond(x.sum() > 0, lambda h, x: h + x, lambda h, x: h - 2 * x, (h, x))
        return h, h.clone()

    def outer(h, x):
        h, all_of = scan(inner, h, torch.stack([x, -x, x * 2]))
        return h, all_of.sum(0)

    return scan(outer, x, xs)


def square(n):
    return torch.randn(n, n)


# The function, its arguments, and how many loops and branches its program has.
CASES = {
    "while": (halved, lambda: [torch.tensor(5), torch.randn(4)], 1),
    "while with a number": (counted, lambda: [torch.randn(4)], 1),
    "cond": (chosen, lambda: [torch.tensor(True), square(4), square(4)], 1),
    "scan": (recurrent, lambda: [torch.randn(2, 4), torch.randn(6, 2, 4), square(4)], 1),
    "scan in reverse": (backwards, lambda: [torch.randn(3), torch.randn(5, 3)], 1),
    "map": (mapped, lambda: [torch.randn(5, 3, 4), square(4)], 1),
    "associative_scan": (products, lambda: [torch.rand(9, 3) + 0.5], 0),
    "nested": (nested, lambda: [torch.randn(3), torch.randn(4, 3)], 3),
}
# Other values of the first argument, which make no other program.
OTHERWISE = {"while": [torch.tensor(0), torch.tensor(30)], "cond": [torch.tensor(False)]}


def regions(graph):
    return sum(graph.stablehlo.count(f"stablehlo.{op}") for op in ("while", "if", "case"))


def close(actual, expected):
    for i, (a, b) in enumerate(zip(tensors(actual), tensors(expected), strict=True)):
        assert_same(a, b.cpu(), str(i), strides=False, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_control_flow(case):
    f, arguments, count = CASES[case]
    torch.manual_seed(0)
    args = arguments()
    expected, graphs = f(*args), NewGraphs()
    for name, way in WAYS.items():
        made = way(f)
        # Arguments are new in each call, so that a program may overwrite them in each.
        run = lambda *args, made=made: made(*to_device(args))  # noqa: E731
        for _ in range(5):  # then it is known what is seen of the results, and what may be overwritten
            close(run(*args), expected)
        before = torch.tpu.metrics()
        close(run(*args), expected)
        after = torch.tpu.metrics()
        new = {key: after[key] - before[key] for key in ("programs", "launches", "replays")}
        assert new == {"programs": 0, "launches": 1, "replays": int(name != "eager")}, name
        for first in OTHERWISE.get(case, []):
            close(run(first, *args[1:]), f(first, *args[1:]))
        assert torch.tpu.metrics()["programs"] == after["programs"], name
    assert max(regions(g) for g in graphs.take()) == count


def gradients(f, *args):
    args = [t.detach().requires_grad_(t.is_floating_point()) for t in args]
    loss = sum((t * t).sum() for t in tensors(f(*args)))
    return [loss.detach(), *torch.autograd.grad(loss, [t for t in args if t.requires_grad])]


def _some(all_of, names, often):
    """Pairs; those that are not made often are slow tests."""
    pairs = [(a, b) for a in all_of for b in names]
    return [pytest.param(*p, marks=() if p in often else pytest.mark.slow, id="-".join(map(str, p))) for p in pairs]


@pytest.mark.parametrize(
    ("case", "way"),
    _some(
        ["cond", "scan", "map", "associative_scan"],
        WAYS,
        [("scan", "compile"), ("scan", "jit"), ("cond", "compile"), ("map", "jit")],
    ),
)
def test_gradients(case, way):
    f, arguments, _ = CASES[case]
    torch.manual_seed(0)
    args = arguments()
    expected, graphs = gradients(f, *args), NewGraphs()
    if way == "compile":
        compiled = torch.compile(f, backend="tpu")
        run = lambda *args: gradients(compiled, *args)  # noqa: E731
    else:
        run = WAYS[way](lambda *args: gradients(f, *args))
    for _ in range(2):
        close(run(*to_device(args)), expected)
    loops = 0 if case == "associative_scan" else 2  # of the forward and the backward
    assert max(regions(g) for g in graphs.take()) == loops


@pytest.mark.parametrize("on_host", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_branches_take_tensors_of_the_host(way, on_host):
    """Predicates and numbers on the CPU, in a branch of a branch too."""

    def inner(x, q, s):
        return torch.cond(q, lambda x, s: x.sin() * s, lambda x, s: x.cos() + s, (x, s))

    def f(p, q, s, x):
        return torch.cond(p, inner, lambda x, q, s: x * s, (x, q, s))

    run = way(f)
    x = torch.arange(3.0)
    for p, q, s in [(True, True, 2.5), (True, False, 2.5), (False, True, 3.5), (True, True, 4.5)]:
        given = [torch.tensor(n) for n in (p, q, s)]
        placed = [t if i in on_host else t.to(DEVICE) for i, t in enumerate(given)]
        assert_same(run(*placed, x.to(DEVICE)), f(*given, x))


def test_random_numbers_are_those_of_one_round_after_the_other():
    def step(h, x):
        h = torch.dropout(torch.tanh(h + x), 0.5, True)
        return h, h + torch.rand_like(h)

    def one_by_one(h, xs):
        outs = []
        for x in xs:
            h, out = step(h, x)
            outs.append(out)
        return h, torch.stack(outs)

    x, xs = torch.ones(3, device=DEVICE), torch.ones(4, 3, device=DEVICE)
    functions = [
        one_by_one,
        torch.compile(lambda x, xs: scan(step, x, xs), backend="tpu"),
        torch.tpu.jit(lambda x, xs: scan(step, x, xs)),
    ]
    found = []
    for f in functions:
        for _ in range(2):
            torch.tpu.manual_seed(5)
            first, second = f(x, xs), f(x, xs)
            found.append((*first, *second, torch.rand(3, device=DEVICE)))
    for other in found[1:]:
        close(other, found[0])


def test_what_cannot_be_a_loop_is_played():
    def on_host(h, x):
        factors, pivots = torch.linalg.ldl_factor(h)  # looks at a value
        return (factors + x).contiguous(), pivots.clone()

    h, xs = torch.eye(2), torch.ones(3, 2, 2)
    close(scan(on_host, h.to(DEVICE), xs.to(DEVICE)), scan(on_host, h, xs))
    assert "scan at" in torch.tpu.explain() and "its body needs a value that the host reads" in torch.tpu.explain()
    x = torch.ones(3, device=DEVICE)
    assert while_loop(lambda i, x: x.sum() < 10, lambda i, x: (i + 1, x * 2), (0, x))[0] == 2
    assert "its body needs to know numbers that follow from tensors" in torch.tpu.explain()


def test_rounds_that_the_host_counts_make_no_program():
    x, graphs = torch.randn(4).to(DEVICE), NewGraphs()
    for n in (3, 5, 9, 7):
        count, y = while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x / 2), (0, x))  # noqa: B023
        assert count == n
        close(y, x.cpu() / 2**n)
    assert len({g.stablehlo for g in graphs.take() if regions(g)}) == 1


@pytest.mark.parametrize("way", WAYS)
def test_random_numbers_of_a_while_loop(way):
    def step(x):
        return torch.dropout(x, 0.5, True) + torch.rand_like(x)

    def drawn(n, x):
        return while_loop(lambda i, x: i < n, lambda i, x: (i + 1, step(x)), (torch.zeros_like(n), x))[1]

    def played():
        return torch.tpu.explain().count("its body needs")

    f, x, before = WAYS[way](drawn), torch.ones(5, device=DEVICE), played()
    for n in (2, 4):
        for _ in range(2):
            torch.tpu.manual_seed(5)
            first, second, after = f(torch.tensor(n, device=DEVICE), x), f(torch.tensor(n, device=DEVICE), x), step(x)
            torch.tpu.manual_seed(5)
            expected = x
            for _ in range(n):
                expected = step(expected)
            close(first, expected)
            # What comes afterwards gets numbers of its own.
            assert not torch.equal(first, second) and not torch.equal(after, step(x))
    assert played() == before


class Layer(nn.Module):
    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x, scale=None):
        y = self.down(torch.nn.functional.gelu(self.up(self.norm(x + self.shift))))
        return x + self.dropout(y if scale is None else y * scale)


def stack_of(count, **options):
    torch.manual_seed(1)
    layers = nn.ModuleList(Layer(**options) for _ in range(count))
    for layer in layers:
        layer.shift.normal_()
    return layers


def step_of(call, leaves):
    """Loss, gradients of the arguments and of the parameters."""

    def run(x, scale):
        for p in leaves:
            p.grad = None
        x, scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
        loss = call(x, scale).square().mean()
        loss.backward()
        return loss.detach(), x.grad, scale.grad

    return lambda run_as, *args: [*run_as(run)(*args), *(p.grad for p in leaves)]


def one_by_one(layers):
    def call(x, *args):
        for layer in layers:
            x = layer(x, *args)
        return x

    return call


POLICIES = {"none": "none", "full": "full", "dots": "dots", "list": [torch.ops.aten.gelu.default]}


@pytest.mark.parametrize(
    ("way", "remat"), _some(WAYS, POLICIES, [("eager", "none"), ("jit", "full"), ("jit", "dots"), ("compile", "none")])
)
def test_layers_in_a_loop(way, remat):
    layers = stack_of(4)
    x, scale = torch.randn(3, 16), torch.tensor([1.3])
    expected = step_of(one_by_one(layers), list(layers.parameters()))(lambda f: f, x, scale)
    scanned = torch.tpu.scan_layers(copy.deepcopy(layers), remat=POLICIES[remat]).to(DEVICE)
    assert list(scanned.state_dict()) == list(layers.state_dict())
    if way == "compile":
        step, run_as = (
            step_of(torch.compile(scanned, backend="tpu", fullgraph=True), list(scanned.parameters())),
            lambda f: f,
        )
    else:
        step, run_as = step_of(scanned, list(scanned.parameters())), WAYS[way]
    for _ in range(2):
        close(step(run_as, *to_device([x, scale])), expected)


@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.slow), "dots"])
def test_layers_have_the_dropout_of_layers_one_by_one(remat):
    layers = stack_of(3, dropout=0.4).to(DEVICE)
    args = to_device([torch.randn(5, 16), torch.tensor([0.7])])
    scanned = torch.tpu.scan_layers(layers, remat=remat)
    leaves = list(layers.parameters())
    found = []
    for step, run_as in [(one_by_one(layers), "eager"), (scanned, "eager"), (scanned, "jit")]:
        torch.tpu.manual_seed(3)
        run = step_of(step, leaves)
        found.append([*run(WAYS[run_as], *args), torch.rand(2, device=DEVICE)])
    for other in found[1:]:
        close(other, found[0])


@pytest.mark.skipif(not hasattr(ScanAutogradImpl, "_break_bw_input_output_aliasing"), reason="layers one by one")
@pytest.mark.parametrize(("remat", "kept"), [("full", {16}), pytest.param("dots", {16, 32}, marks=pytest.mark.slow)])
def test_a_graph_keeps_what_the_policy_says(remat, kept):
    """Of each of 4 layers the backward finds tensors of 3 rows, of these widths alone."""
    scanned = torch.tpu.scan_layers(stack_of(4), remat=remat).to(DEVICE)
    graphs = NewGraphs()
    step = step_of(torch.compile(scanned, backend="tpu", fullgraph=True), list(scanned.parameters()))
    step(lambda f: f, *to_device([torch.randn(3, 16), torch.ones(1)]))
    stacked = "".join(g.stablehlo for g in graphs.take())
    assert {int(n) for n in re.findall(r"tensor<4x3x(\d+)xf32>", stacked)} == kept


def test_layers_with_dropout_in_a_graph():
    """Layers that are computed again would draw again, so that PyTorch's scan keeps what was drawn."""
    layers = stack_of(3, dropout=0.4).to(DEVICE)
    args, leaves = to_device([torch.randn(5, 16), torch.tensor([0.7])]), list(layers.parameters())
    compiled = torch.compile(torch.tpu.scan_layers(layers, remat="full"), backend="tpu", fullgraph=True)
    found = []
    for step in (one_by_one(layers), compiled, compiled):
        torch.tpu.manual_seed(3)
        found.append(step_of(step, leaves)(lambda f: f, *args))
    for other in found[1:]:
        close(other, found[0])


@pytest.mark.parametrize("remat", ["none", "full"])
def test_layers_leave_nothing_behind(remat):
    scanned = torch.tpu.scan_layers(stack_of(2), remat=remat).to(DEVICE)
    step, args = step_of(scanned, list(scanned.parameters())), to_device([torch.randn(3, 16), torch.ones(1)])
    counts = []
    for _ in range(3):
        step(lambda f: f, *args)
        gc.collect()
        counts.append(sum(issubclass(type(t), torch.Tensor) for t in gc.get_objects()))
    assert counts[1] == counts[2]


def test_a_function_with_layers_in_a_loop_is_traced_until_it_has_gradients():
    layers = stack_of(3)
    scanned = torch.tpu.scan_layers(copy.deepcopy(layers)).to(DEVICE)

    def train(model):
        def step(x):
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    step, x = torch.tpu.jit(train(scanned)), torch.randn(3, 16)
    train(nn.Sequential(*layers))(x)
    expected = [p.grad for p in layers.parameters()]
    kept = []
    for _ in range(4):
        step(x.to(DEVICE))
        kept.append([p.grad for p in scanned.parameters()])  # other tensors in each call
        close(kept[-1], expected)
    before = torch.tpu.metrics()["replays"]
    kept[0][0].zero_()
    for _ in range(3):
        step(x.to(DEVICE))
        close([p.grad for p in scanned.parameters()], expected)
    assert torch.tpu.metrics()["replays"] - before == 3 and step.traces == 2
    close(kept[1], expected)


def test_a_program_has_one_layer():
    sizes = {}
    for count in (2, 8):
        scanned = torch.tpu.scan_layers(stack_of(count)).to(DEVICE)
        graphs = NewGraphs()
        step_of(scanned, list(scanned.parameters()))(lambda f: f, *to_device([torch.randn(3, 16), torch.ones(1)]))
        sizes[count] = sum(g.stablehlo.count("dot_general") for g in graphs.take())
    assert sizes[2] == sizes[8] > 0


def test_layers_elsewhere_are_called_one_by_one():
    layers = stack_of(3)
    scanned = torch.tpu.scan_layers(nn.Sequential(*layers))
    x = torch.randn(2, 16)
    torch.testing.assert_close(scanned(x), one_by_one(layers)(x))  # on the CPU
    on_device = copy.deepcopy(scanned).to(DEVICE)
    # Forward derivatives and transforms.
    f = lambda x: on_device(x).sum()  # noqa: E731
    close(torch.func.grad(f)(x.to(DEVICE)), torch.func.grad(lambda x: scanned(x).sum())(x))
    # Second derivatives.
    seconds = []
    for model, x_ in ((scanned, x), (on_device, x.to(DEVICE))):
        x_ = x_.detach().requires_grad_()
        (first,) = torch.autograd.grad(model(x_).square().sum(), x_, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x_)[0])
    close(seconds[1], seconds[0])


def test_layers_that_write_buffers_are_called_one_by_one():
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3)))
    scanned = torch.tpu.scan_layers(copy.deepcopy(layers)).to(DEVICE)
    x = torch.randn(6, 4)
    close(scanned(x.to(DEVICE)), layers(x))
    close(scanned.state_dict(), layers.state_dict())
    assert "scan_layers at" in torch.tpu.explain() and "its body needs to write to" in torch.tpu.explain()


def test_layers_must_be_alike():
    with pytest.raises(ValueError, match=r"layers 1 and 0 differ: .*\(16,\).*\(8,\)|layers 1 and 0 differ: .*\(8,\)"):
        torch.tpu.scan_layers(nn.ModuleList([Layer(16), Layer(8)]))
    with pytest.raises(ValueError, match="at least one layer"):
        torch.tpu.scan_layers(nn.ModuleList())
    with pytest.raises(ValueError, match="remat: expected"):
        torch.tpu.scan_layers(stack_of(2), remat="some")
    with pytest.raises(TypeError, match="nn.ModuleList or nn.Sequential, got list"):
        torch.tpu.scan_layers([Layer()])


def test_stock_optimizers_train_layers_in_a_loop():
    losses = {}
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    for device in ("cpu", DEVICE):
        layers = torch.tpu.scan_layers(stack_of(3)).to(device)
        optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
        losses[device] = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(layers(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            losses[device].append(loss.detach().cpu())
    torch.testing.assert_close(losses[DEVICE], losses["cpu"], rtol=1e-4, atol=1e-5)


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.sin()
        return x * ctx.kept

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.kept


class KeepsElsewhere(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Keeps.apply(x * self.weight)


def test_what_a_layer_keeps_by_itself_is_an_error_of_its_backward():
    layers, x = torch.nn.ModuleList(KeepsElsewhere() for _ in range(2)), torch.randn(2, 4)
    y = torch.tpu.scan_layers(layers).to(DEVICE)(x.to(DEVICE))
    with pytest.raises(RuntimeError, match="has to go through ctx.save_for_backward"):
        y.sum().backward()
    again = torch.tpu.scan_layers(layers, remat="full")
    again(x.to(DEVICE)).sum().backward()
    grads = [layer.weight.grad for layer in layers]
    one_by_one = [KeepsElsewhere() for _ in layers]
    one_by_one[1](one_by_one[0](x)).sum().backward()
    close(grads, [layer.weight.grad for layer in one_by_one])
