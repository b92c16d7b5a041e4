"""Recurrent nets, whose layers are loops over their steps, against PyTorch on the CPU."""

import copy

import pytest
import torch
from support import DEVICE, NewGraphs, assert_same, to_device
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode

KINDS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "ReLU": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
    "projected": lambda *args, **options: nn.LSTM(*args, proj_size=3, **options),
}
STEPS, BATCH, INPUT, HIDDEN = 5, 3, 4, 6
LENGTHS = [5, 3, 1]


def net(kind, **options):
    torch.manual_seed(1)
    return KINDS[kind](INPUT, HIDDEN, **options)


def states_of(module, batch=BATCH):
    """States that are no zeros."""
    layers = module.num_layers * (1 + module.bidirectional)
    hx = torch.randn(layers, batch, module.proj_size or HIDDEN)
    return (hx, torch.randn(layers, batch, HIDDEN)) if isinstance(module, nn.LSTM) else hx


def leaves(value):
    return [t for v in value for t in leaves(v)] if isinstance(value, tuple | list) else [value]


def moved(value, device, dtype):
    """Leaves of a graph of their own on the device."""
    if isinstance(value, tuple):
        return tuple(moved(v, device, dtype) for v in value)
    return value.detach().to(device, dtype).requires_grad_()


def run(module, x, states, device, dtype, packed):
    """Output, last states, and the gradients of everything, by name."""
    module = copy.deepcopy(module).to(device, dtype)
    x, states = moved(x, device, dtype), states if states is None else moved(states, device, dtype)
    given = pack_padded_sequence(x, LENGTHS, batch_first=module.batch_first) if packed else x
    output, last = module(given, states)
    output = output.data if packed else output
    # Different weights for all elements, so that no gradients cancel out.
    loss = sum((t * torch.linspace(0.5, 1.5, t.numel()).view(t.shape).to(t)).sum() for t in (output, *leaves(last)))
    loss.backward()
    found = {"output": output, **{f"state {i}": t for i, t in enumerate(leaves(last))}, "x": x.grad}
    if states is not None:
        found.update({f"first state {i}": t.grad for i, t in enumerate(leaves(states))})
    return found | {name: p.grad for name, p in module.named_parameters()}


# Each option, and some of them together; of kinds that have the code in common, with one of them.
TABLE = [
    *((kind, {}) for kind in KINDS),
    *((kind, {"packed": True, "bidirectional": True, "dtype": torch.float64}) for kind in KINDS),
    ("LSTM", {"num_layers": 2, "bidirectional": True, "states": False}),
    ("LSTM", {"batch_first": True, "bias": False, "unbatched": True}),
    ("GRU", {"batch_first": True, "bias": False, "packed": True, "states": False}),
    ("RNN", {"num_layers": 3, "batch_first": True, "dtype": torch.float64}),
    ("projected", {"num_layers": 2, "bidirectional": True, "bias": False}),
]


@pytest.mark.parametrize("kind, options", TABLE, ids=lambda o: o if isinstance(o, str) else ",".join(o) or "plain")
def test_results_and_gradients(kind, options, no_fallback):
    options = dict(options)
    dtype, packed = options.pop("dtype", torch.float32), options.pop("packed", False)
    unbatched, given = options.pop("unbatched", False), options.pop("states", True)
    module = net(kind, **options)
    x, states = torch.randn(STEPS, BATCH, INPUT), states_of(module) if given else None
    if module.batch_first:
        x = x.transpose(0, 1).contiguous()
    if unbatched:
        x, states = x[0], tuple(s[:, 0] for s in states)
    expected = run(module, x, states, "cpu", dtype, packed)
    found = run(module, x, states, DEVICE, dtype, packed)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(found[name], value, name, strides=name == "output", rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind, dtype", [("LSTM", torch.bfloat16), ("GRU", torch.float16), ("ReLU", torch.bfloat16)])
def test_16_bits_are_as_exact_as_on_the_cpu(kind, dtype):
    module = net(kind)
    x, states = torch.randn(STEPS, BATCH, INPUT).to(dtype), states_of(module)
    module, states = module.to(dtype), tuple(s.to(dtype) for s in leaves(states))
    states = states if isinstance(module, nn.LSTM) else states[0]
    right = run(module, x, states, "cpu", torch.float64, False)
    on_cpu, found = (run(module, x, states, device, dtype, False) for device in ("cpu", DEVICE))
    for name, value in right.items():
        assert found[name].dtype == dtype
        error, allowed = ((t[name].detach().cpu().double() - value).norm() / value.norm() for t in (found, on_cpu))
        assert error <= 1.5 * allowed + torch.finfo(dtype).eps, name


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_the_length_changes_nothing_but_sizes(kind, fused):
    module = net(kind, num_layers=2, bidirectional=True).to(DEVICE)
    counts = []
    for steps in (10, 100):
        x = torch.randn(steps, 2, INPUT, device=DEVICE)
        new, before = NewGraphs(), torch.tpu.metrics()
        module.zero_grad()
        module(x)[0].sum().backward()
        graphs, now = new.take(), torch.tpu.metrics()
        counts.append((now["ops"] - before["ops"], now["launches"] - before["launches"], [len(g.ops) for g in graphs]))
        lines = [len(g.stablehlo.splitlines()) for g in graphs]
        counts[-1] += (lines,)
    assert counts[0] == counts[1] and counts[0][0] < 250


def test_the_backward_is_shown_at_the_line_of_the_forward(fused):
    module, new = net("GRU").to(DEVICE), NewGraphs()
    output = module(torch.ones(STEPS, BATCH, INPUT, device=DEVICE))[0]
    output.sum().backward()
    (graph,) = new.take()
    lines = {op["line"].rpartition(" in ")[0] for op in graph.ops if "rnn_layer" in op["op"] or "mm" in op["op"]}
    first = test_the_backward_is_shown_at_the_line_of_the_forward.__code__.co_firstlineno
    assert lines == {f"{__file__}:{first + 2}"}


def test_floating_point_operations_are_those_of_the_products():
    module, x = net("projected"), torch.randn(STEPS, BATCH, INPUT)

    def count(packed):
        given = x.to(DEVICE).requires_grad_()
        states = moved(states_of(module), DEVICE, torch.float32)
        with FlopCounterMode(display=False) as counter:
            on_device = copy.deepcopy(module).to(DEVICE)
            output = on_device(pack_padded_sequence(given, LENGTHS) if packed else given, states)[0]
            (output.data if packed else output).sum().backward()
        return counter.get_total_flops()

    # Each forward product has two in the backward. Packed sequences have the rows of the padded batch.
    weights = sum(p.numel() for p in module.parameters() if p.dim() == 2)
    assert [count(False), count(True)] == [6 * STEPS * BATCH * weights] * 2


def test_packed_sequences_of_all_lengths(fused):
    module = net("LSTM", bidirectional=True)
    on_device = copy.deepcopy(module).to(DEVICE)
    lengths = [[7, 7, 7], [7, 1, 1], [2, 6, 4], [1, 1, 1], [3]]
    for of in lengths:
        sequences = [torch.randn(n, INPUT) for n in of]
        expected, (h, c) = module(pack_sequence(sequences, enforce_sorted=False))
        found, (h_found, c_found) = on_device(pack_sequence([s.to(DEVICE) for s in sequences], enforce_sorted=False))
        padded, sizes = pad_packed_sequence(found)
        assert sizes.tolist() == of
        for a, b in ((padded, pad_packed_sequence(expected)[0]), (h_found, h), (c_found, c)):
            assert_same(a, b, str(of), strides=False)
    # As many rows and steps of other lengths: the numbers of samples are no part of a program.
    module = net("GRU").to(DEVICE)
    made = []
    for of in ([6, 4, 2], [6, 5, 1], [6, 3, 3]):
        data, sizes = torch.randn(12, INPUT, device=DEVICE), pack_sequence([torch.zeros(n) for n in of]).batch_sizes
        before = torch.tpu.metrics()["programs"]
        module(PackedSequence(data, sizes))[0].data.cpu()
        made.append(torch.tpu.metrics()["programs"] - before)
    assert made[1:] == [0, 0]


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(20, 8), nn.LSTM(8, 8, 2, dropout=0.0)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens, states):
        output, states = self.rnn(self.embedding(tokens), states)
        return self.head(output), states


def test_states_are_carried_between_batches(fused):
    """Backpropagation through time that is cut at each batch, as in PyTorch's word_language_model."""

    def train(device):
        torch.manual_seed(3)
        tokens, model = torch.randint(0, 20, (25, 4)), LanguageModel()
        tokens, model = tokens.to(device), model.to(device)
        names = list(model.state_dict())
        states = tuple(torch.zeros(2, 4, 8, device=device) for _ in range(2))
        losses = []
        for start in range(0, 24, 6):
            states = tuple(s.detach() for s in states)
            model.zero_grad()
            output, states = model(tokens[start : start + 6], states)
            loss = nn.functional.cross_entropy(output.flatten(0, 1), tokens[start + 1 : start + 7].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=-2.0)
            losses.append(loss.detach())
        assert list(model.state_dict()) == names
        return [loss.item() for loss in losses], {k: v.cpu() for k, v in model.state_dict().items()}

    (losses, weights), (found, found_weights) = train("cpu"), train(DEVICE)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_weights, weights, rtol=1e-4, atol=1e-5)


def test_what_nobody_wants_has_no_gradient(no_fallback):
    module, x = net("LSTM", num_layers=2).to(DEVICE), torch.randn(STEPS, BATCH, INPUT, device=DEVICE)
    for p in module.parameters():
        p.requires_grad_(p is module.weight_hh_l0)
    module(x)[1][1].sum().backward()  # of the cell states alone
    assert [n for n, p in module.named_parameters() if p.grad is not None] == ["weight_hh_l0"]
    module.requires_grad_(False)
    x.requires_grad_()
    module(x)[0].sum().backward()
    assert x.grad.shape == x.shape
    with torch.inference_mode():
        output, _ = module(x)
    assert output.is_inference()
    torch.testing.assert_close(output.cpu(), module(x)[0].cpu())


# Derivatives of other kinds


def penalty(module, x, packed):
    """Gradients of a sum of squares of gradients."""
    x = x.clone().requires_grad_()
    output = module(pack_padded_sequence(x, [3, 2, 1]) if packed else x)[0]
    output = output.data if packed else output
    inputs = [x, *module.parameters()]
    grads = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)


@pytest.mark.parametrize("kind, packed", [("LSTM", True), ("GRU", False), ("RNN", False), ("projected", False)])
def test_second_derivatives(kind, packed):
    module, x = net(kind, bidirectional=packed).double(), torch.randn(3, BATCH, INPUT, dtype=torch.float64)
    expected = penalty(module, x, packed)
    found = penalty(copy.deepcopy(module).to(DEVICE), x.to(DEVICE), packed)
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b, strides=False)


def loss(module, weights, x):
    return functional_call(module, weights, (x,))[0].square().sum()


def dual(f, x, tangent):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(f(torch.autograd.forward_ad.make_dual(x, tangent))).tangent


# Of a function of weights and input, its weights, and two inputs.
TRANSFORMS = {
    "grad": lambda f, w, x, y: torch.func.grad(f)(w, x),
    "vmap of grad": lambda f, w, x, y: torch.func.vmap(torch.func.grad(f), (None, 0))(w, torch.stack([x, y])),
    "jvp": lambda f, w, x, y: torch.func.jvp(lambda x: f(w, x), (x,), (y,))[1],
    "hessian": lambda f, w, x, y: torch.func.hessian(lambda x: f(w, x))(x),
    "dual": lambda f, w, x, y: dual(lambda x: f(w, x), x, y),
    "vectorized": lambda f, w, x, y: torch.autograd.functional.jacobian(lambda x: f(w, x), x, vectorize=True),
}


@pytest.mark.parametrize("kind", ["GRU", "projected"])
def test_transforms(kind):
    module = net(kind).double()
    x, y = torch.randn(2, 2, 1, INPUT, dtype=torch.float64)
    on_device = copy.deepcopy(module).to(DEVICE)
    weights = {k: v.detach() for k, v in module.named_parameters()}
    for name, transform in TRANSFORMS.items():
        found = transform(lambda w, x: loss(on_device, w, x), to_device(weights), x.to(DEVICE), y.to(DEVICE))
        if name == "vmap of grad":  # more than the CPU can
            each = [torch.func.grad(lambda w, x: loss(module, w, x))(weights, x) for x in (x, y)]
            expected = {k: torch.stack([g[k] for g in each]) for k in weights}
        else:
            expected = transform(lambda w, x: loss(module, w, x), weights, x, y)
        found = {k: v.cpu() for k, v in found.items()} if isinstance(found, dict) else found.cpu()
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


# In other surroundings


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_compiled_graph_keeps_layers_whole(kind, fused):
    module = net(kind, num_layers=2, bidirectional=True)
    on_device = copy.deepcopy(module).to(DEVICE)
    x = torch.randn(STEPS, BATCH, INPUT)
    expected = module(x)[0]
    expected.square().sum().backward()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(lambda x: on_device(x)[0], backend="tpu", fullgraph=True)
        for _ in range(2):
            on_device.zero_grad()
            compiled(x.to(DEVICE)).square().sum().backward()
        assert_same(compiled(x.to(DEVICE)), expected, rtol=1e-5, atol=1e-5)
    for name, p in on_device.named_parameters():
        assert_same(p.grad, module.get_parameter(name).grad, name, rtol=1e-5, atol=1e-5)
    metrics = torch.tpu.metrics()
    assert metrics["plays"] == 2 and metrics["replays"] == 3 and metrics["ops"] < 200
    # Where Dynamo leaves it to eager mode, as it does by default, it does not look into it.
    torch._dynamo.reset()
    assert_same(torch.compile(lambda x: on_device(x)[0], backend="tpu")(x.to(DEVICE)), expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_autocast(kind):
    module, x = net(kind, num_layers=2), torch.randn(STEPS, BATCH, INPUT)
    states = states_of(module)
    expected = run(module, x, states, "cpu", torch.float32, False)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = run(module, x, states, DEVICE, torch.float32, False)
    for name, value in expected.items():
        is_result = name == "output" or name.startswith("state ")
        assert found[name].dtype == (torch.bfloat16 if is_result else torch.float32), name
        torch.testing.assert_close(found[name].cpu().float(), value, rtol=0.05, atol=0.05, msg=name)
    # Double stays what it is.
    with torch.autocast(DEVICE, torch.bfloat16):
        assert run(module, x, states, DEVICE, torch.float64, False)["output"].dtype == torch.float64


def test_dropout_between_layers_follows_the_seed():
    module = nn.LSTM(INPUT, HIDDEN, 2, dropout=0.5).to(DEVICE)
    first, second = nn.LSTM(INPUT, HIDDEN).to(DEVICE), nn.LSTM(HIDDEN, HIDDEN).to(DEVICE)
    for layer, part in enumerate((first, second)):
        part.load_state_dict(
            {k.replace(f"_l{layer}", "_l0"): v for k, v in module.state_dict().items() if k.endswith(f"_l{layer}")}
        )
    x = torch.randn(STEPS, BATCH, INPUT, device=DEVICE)

    def output(seed, f):
        torch.manual_seed(seed)
        return f(x)[0].detach().cpu()

    expected = output(5, lambda x: second(torch.dropout(first(x)[0], 0.5, True)))
    for mode in ("fused", "strict", "debug"):
        with torch.tpu.set_eager_mode(mode):
            torch.testing.assert_close(output(5, module), expected)
    assert not torch.equal(output(6, module), expected)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        torch.testing.assert_close(output(5, torch.compile(module, backend="tpu")), expected)
    torch._dynamo.reset()
    module.eval()
    assert torch.equal(output(5, module), output(6, module))
    packed = pack_padded_sequence(x, LENGTHS)
    module.train()
    assert not torch.equal(*(output(seed, lambda _: (module(packed)[0].data,)) for seed in (5, 6)))


# What does not fit. nn.Module checks before; these are calls of the functions below.


def arguments(device, **changed):
    module = nn.LSTM(INPUT, HIDDEN).to(device)
    given = {
        "x": torch.randn(STEPS, BATCH, INPUT),
        "hx": torch.zeros(1, BATCH, HIDDEN),
        "cx": torch.zeros(1, BATCH, HIDDEN),
    }
    given = {k: v.to(device) for k, v in (given | changed).items()}
    return given["x"], [given["hx"], given["cx"]], [p.detach() for p in module.parameters()]


MISFITS = {
    "no steps": {"x": torch.randn(0, BATCH, INPUT)},
    "input size": {"x": torch.randn(STEPS, BATCH, INPUT + 1)},
    "batch": {"hx": torch.zeros(1, BATCH + 1, HIDDEN)},
    "state size": {"cx": torch.zeros(1, BATCH, HIDDEN + 1)},
    "dtype": {"x": torch.ones(STEPS, BATCH, INPUT, dtype=torch.int64)},
    "dtypes": {"hx": torch.zeros(1, BATCH, HIDDEN, dtype=torch.float64)},
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused(name):
    x, states, weights = arguments(DEVICE, **MISFITS[name])
    with pytest.raises(RuntimeError):
        torch.lstm(x, states, weights, True, 1, 0.0, False, False, False)[0].cpu()


def test_batch_sizes_that_do_not_fit_are_refused():
    x, states, weights = arguments(DEVICE)
    data, rest = x.flatten(0, 1)[:9], (states, weights, True, 1, 0.0, False, False)
    assert torch.lstm(data, torch.tensor([3, 3, 2, 1]), *rest)[0].shape == (9, HIDDEN)
    for sizes in ([3, 3, 2], [3, 3, 2, 2], [1, 3, 3, 2], [3, 3, 3, 0, 0], []):
        with pytest.raises(RuntimeError, match="do not grow"):
            torch.lstm(data, torch.tensor(sizes, dtype=torch.int64), *rest)
    for sizes in (torch.tensor([3, 3, 2, 1], dtype=torch.int32), torch.tensor([3, 3, 2, 1], device=DEVICE)):
        with pytest.raises(RuntimeError, match="vector of int64 on the CPU"):
            torch.lstm(data, sizes, *rest)
    with pytest.raises(RuntimeError):
        torch.lstm(data, torch.tensor([4, 3, 2]), *rest)
    with pytest.raises(RuntimeError, match="same device"):
        torch.lstm(data, torch.tensor([3, 3, 2, 1]), [s.cpu() for s in states], *rest[1:])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_without_data_are_those_of_the_device(kind, packed):
    module = net(kind)
    cell = {"RNN": "rnn_tanh", "ReLU": "rnn_relu", "GRU": "gru"}.get(kind, "lstm")
    w_hh, sizes = module.weight_hh_l0.detach(), torch.tensor([3, 3, 2]) if packed else None
    w_hr = module.weight_hr_l0.detach() if kind == "projected" else None
    gates = torch.randn(*((8,) if packed else (STEPS, BATCH)), len(w_hh))
    hx, cx = (*leaves(states_of(module)), None)[:2]
    forward = (cell, gates, sizes, hx[0], None if cx is None else cx[0], w_hh, None, w_hr, False)
    ops = torch.ops.oxitorch

    def forms(device):
        given = [x.to(device) if isinstance(x, torch.Tensor) else x for x in forward]
        output, hy, cy, saved = ops._rnn_layer(*given)
        found = ops._rnn_layer_backward(cell, output, hy, cy, saved, given[2], given[5], given[7], False)
        return [None if t is None else (t.shape, t.dtype, t.stride()) for t in (output, hy, cy, saved, *found)]

    assert forms("meta") == forms(DEVICE)
