"""Several devices in one process: the CPU platform gives as many as `OXITORCH_CPU_DEVICES` says.

The programs run in a process of their own with three devices.
"""

import json

import pytest

PRELUDE = """
import copy, io, threading, torch, torch.nn as nn, torch.nn.functional as F
assert torch.tpu.device_count() == 3
a, b, c = (torch.device("tpu", i) for i in range(3))
def raises(kind, words, f):
    try:
        f()
    except kind as e:
        assert all(w in str(e) for w in words), e
    else:
        raise AssertionError(f"no {kind}")
"""

PROGRAMS = {
    "copies": """
x = torch.arange(6.0, device=a).view(2, 3)
y = x.to(b)
assert y.device == b and y.tolist() == x.tolist() and y.to(b) is y and x.tpu(2).device == c
x.add_(1)
assert y.tolist() == [[0, 1, 2], [3, 4, 5]]
t = x.t().to(b)
assert t.stride() == x.t().stride() and t.tolist() == x.t().tolist()
assert x[:, 1:].to(c).tolist() == [[2, 3], [5, 6]]
z = torch.zeros(3, 3, device=c)
z[1:, ::2].copy_(x[:, :2])
assert z.tolist() == [[0, 0, 0], [1, 0, 2], [4, 0, 5]]
z[0].copy_(torch.tensor([7, 8, 9], device=b))  # another dtype too
assert z[0].tolist() == [7, 8, 9]
assert torch.zeros(0, device=a).to(b).shape == (0,) and torch.tensor(True, device=a).to(c).item() is True
assert x.to(b, torch.int64).dtype == torch.int64
""",
    "where ops run": """
x = torch.ones(3, device=b)
assert (x + 1).device == b and (x @ x).device == b and torch.zeros_like(x).device == b and x.new_ones(2).device == b
assert torch.cat([x, x]).device == b and torch._foreach_add([x], 1)[0].device == b and x.nonzero().device == b
assert torch.ones(2, device="tpu").device == a
with torch.tpu.device(2):
    assert torch.ones(2, device="tpu").device == c and (x * 2).device == b and x.cpu().sum() == 3
    assert torch.tensor([1.0]).tpu().device == c and torch.tpu.current_device() == 2
assert torch.tpu.current_device() == 0
assert x[torch.tensor([0, 2])].device == b and x.sum().item() == 3
""",
    "mixed devices are errors": """
x, y = torch.ones(3, device=a), torch.ones(3, device=b)
both = ["tpu:0", "tpu:1", "same device"]
raises(RuntimeError, both, lambda: x + y)
raises(RuntimeError, both, lambda: x.add_(y))
raises(RuntimeError, both, lambda: torch.cat([x, y]))
raises(RuntimeError, both, lambda: x @ y)
raises(RuntimeError, ["tpu"], lambda: torch._foreach_add([x], [y]))
raises(RuntimeError, ["tpu"], lambda: x.gather(0, torch.zeros(1, dtype=torch.int64, device=b)))
raises(RuntimeError, ["tpu"], lambda: x[torch.tensor([1], device=b)])
raises(RuntimeError, ["3"], lambda: torch.ones(1, device="tpu:3"))
raises(RuntimeError, ["3"], lambda: x.to("tpu:3"))
assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2]
assert (x + 1).tolist() == [2, 2, 2] and y.tolist() == [1, 1, 1]
""",
    "lists that span devices": """
x, y, z = torch.ones(3, device=a), torch.full((2,), 2.0, device=b), torch.full((2,), 3.0)
lists = [x, y, z]
made = torch._foreach_add(lists, lists, alpha=2)
assert [(t.device, t.tolist()) for t in made] == [(a, [3] * 3), (b, [6] * 2), (z.device, [9] * 2)]
torch._foreach_mul_(lists, [2.0, 3.0, 4.0])
torch._foreach_addcmul_(lists, lists, lists)
torch._foreach_copy_(lists, [t + 1 for t in lists])
assert [t.tolist() for t in lists] == [[7] * 3, [43] * 2, [157] * 2]
norms = torch._foreach_norm(lists)
assert [t.device for t in norms] == [a, b, z.device] and torch._foreach_max([x, y])[1].item() == 43
torch._foreach_zero_([y, x])
assert x.tolist() == [0] * 3 and y.tolist() == [0] * 2
""",
    "results on another device are errors": """
x, y = torch.ones(3, device=a), torch.ones(3, device=b)
both = ["tpu:0", "tpu:1", "same device"]
raises(RuntimeError, both, lambda: torch.add(x, 1, out=y))
raises(RuntimeError, both, lambda: torch.mm(x.view(1, 3), x.view(3, 1), out=y[:1].view(1, 1)))
raises(RuntimeError, ["tpu"], lambda: torch._foreach_add_([x, y], [x, x]))
raises(RuntimeError, ["tpu"], lambda: y.index_add_(0, torch.tensor([0], device=a), x[:1]))
assert y.tolist() == [1, 1, 1]
""",
    "autograd": """
x = torch.ones(3, device=a, requires_grad=True)
w = torch.full((3,), 2.0, device=b, requires_grad=True)
y = (x * 3).to(b) * w
loss = y.to(c).square().sum().cpu()
loss.backward()
assert x.grad.device == a and w.grad.device == b
assert x.grad.tolist() == [2 * 6 * 6.0] * 3 and w.grad.tolist() == [2 * 6 * 3.0] * 3
""",
    "pipeline": """
torch.manual_seed(0)
first, second = nn.Linear(4, 8), nn.Linear(8, 2)
one = nn.Sequential(copy.deepcopy(first), nn.Tanh(), copy.deepcopy(second)).to(c)
first, second = first.to(a), second.to(b)
optimizers = [torch.optim.AdamW([*first.parameters(), *second.parameters()]), torch.optim.AdamW(one.parameters())]
x = torch.randn(5, 4)
for _ in range(3):
    losses = [second(torch.tanh(first(x.to(a))).to(b)).square().mean(), one(x.to(c)).square().mean()]
    for o, loss in zip(optimizers, losses):
        o.zero_grad(); loss.backward(); o.step()
    assert abs(losses[0].item() - losses[1].item()) < 1e-6
""",
    "random numbers": """
torch.manual_seed(3)
x, y = torch.rand(4, device=a), torch.rand(4, device=b)
assert x.tolist() == y.tolist()  # one seed, a generator each
with torch.tpu.device(1):
    torch.tpu.manual_seed(4)
assert torch.tpu.get_rng_state(0).tolist() != torch.tpu.get_rng_state(1).tolist()
state = torch.tpu.get_rng_state(1)
p = torch.rand(4, device=b)
torch.rand(9, device=a)
torch.tpu.set_rng_state(state, 1)
assert torch.rand(4, device=b).tolist() == p.tolist()
g = torch.Generator(c).manual_seed(1)
assert g.device == c and torch.rand(2, device=c, generator=g).device == c
""",
    "memory": """
torch.tpu.synchronize(0); torch.tpu.synchronize(1)
before = [torch.tpu.memory_allocated(i) for i in range(3)]
x = torch.ones(1 << 16, device=b)
torch.tpu.synchronize(b)
after = [torch.tpu.memory_allocated(i) for i in range(3)]
assert [q - p for p, q in zip(before, after)] == [0, 4 << 16, 0], (before, after)
del x
torch.tpu.synchronize(b)
assert torch.tpu.memory_allocated(1) == before[1]
""",
    "streams and events": """
s = torch.Stream(b)
assert s.device == b and torch.tpu.current_stream(2).device == c
x = torch.randn(256, 256, device=b)
e = torch.Event(b); e.record(torch.tpu.current_stream(1)); e.synchronize()
f = torch.tpu.Event(enable_timing=True); f.record(torch.tpu.current_stream(b))
torch.tpu.current_stream(c).wait_event(e)
(x @ x).sum().item()
torch.accelerator.synchronize(1)
""",
    "saving": """
file = io.BytesIO()
torch.save({"x": torch.arange(3.0, device=c), "y": torch.ones(2, device=a)}, file)
for place, where in ((None, c), ("tpu:1", b), ("tpu", None), ("cpu", torch.device("cpu")), ({"tpu:2": "tpu:0"}, a)):
    file.seek(0)
    back = torch.load(file, map_location=place, weights_only=True)
    assert where is None or back["x"].device == where, (place, back["x"].device)
    assert back["x"].tolist() == [0, 1, 2]
assert copy.deepcopy(torch.ones(2, device=b)).device == b
""",
    "threads": """
results = {}
def work(i):
    d = torch.device("tpu", i)
    torch.tpu.set_device(i)
    x = torch.ones(8, 8, device="tpu")
    assert x.device == d
    for _ in range(50):
        x = (x @ x) / 8
    results[i] = x.sum().item()
threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
[t.start() for t in threads]; [t.join(60) for t in threads]
assert results == {0: 64.0, 1: 64.0, 2: 64.0}, results
assert torch.tpu.current_device() == 0
""",
    "modules": """
m = nn.Linear(2, 2).to(b)
assert m.to(c).weight.device == c and m(torch.ones(1, 2, device=c)).device == c
raises(RuntimeError, ["tpu:0", "tpu:2"], lambda: m(torch.ones(1, 2, device=a)))
assert repr(torch.ones(1, device=b)) == "tensor([1.], device='tpu:1')"
""",
}


RUNNER = """
import json, sys, traceback
for name, code in json.load(open(sys.argv[1])).items():
    print(json.dumps([name, None]), flush=True)
    try:
        exec(PRELUDE + code, {})
        error = ""
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps([name, error]), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(start_python, tmp_path_factory):
    """What each program ended with. One process runs them all; after a crash or a hang another one goes on."""
    found, file = {}, tmp_path_factory.mktemp("programs") / "programs.json"
    while len(found) < len(PROGRAMS):
        file.write_text(json.dumps({k: v for k, v in PROGRAMS.items() if k not in found}))
        code = f"PRELUDE = {PRELUDE!r}\n{RUNNER}"
        done = start_python(code, str(file), timeout=120, OXITORCH_PLATFORM="cpu", OXITORCH_CPU_DEVICES="3")
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        assert lines, f"nothing was run: {done.stderr}"
        found |= {name: error for name, error in lines if error is not None}
        last, error = lines[-1]
        if error is None:
            found[last] = f"exit status {done.returncode}, None after a timeout\n{done.stderr}"
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_three_devices(outcomes, name):
    assert outcomes[name] == "", outcomes[name]


def test_a_checkpoint_of_a_device_that_is_not_there(python, tmp_path):
    save = f"import torch; torch.save(torch.ones(2, device='tpu:1'), {str(tmp_path / 'x.pt')!r})"
    python(save, OXITORCH_PLATFORM="cpu", OXITORCH_CPU_DEVICES="2")
    load = f"""
import torch
try:
    torch.load({str(tmp_path / "x.pt")!r})
except RuntimeError as e:
    print("map_location" in str(e) or "device" in str(e))
print(torch.load({str(tmp_path / "x.pt")!r}, map_location="tpu:0").tolist())
"""
    out = python(load, OXITORCH_PLATFORM="cpu", OXITORCH_CPU_DEVICES="1").stdout
    assert out.splitlines()[-1] == "[1.0, 1.0]" and out.startswith("True")
