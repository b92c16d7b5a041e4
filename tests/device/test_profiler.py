"""`torch.profiler` shows launches, compiles, waits and copies, and the programs on the device with their time."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

pytestmark = [
    pytest.mark.usefixtures("fused"),
    pytest.mark.skipif(torch.tpu.platform() == "cuda", reason="there is also each kernel of the programs"),
]


BOTH = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]


class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.run(3)
        torch.tpu.synchronize()

    def run(self, steps):
        for _ in range(steps):
            x = torch.ones(8, 32).to(DEVICE)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), torch.zeros(8, dtype=torch.long).to(DEVICE))
            loss.backward()
            self.optimizer.step()
        return loss.item()


def on_device(prof):
    return [e for e in prof.events() if e.device_type == DeviceType.PrivateUse1]


def named(prof, start):
    return [e for e in prof.events() if e.name.startswith(start)]


def test_a_settled_loop():
    loop = Loop()
    with profile(activities=BOTH) as prof:
        loop.run(4)
    programs = on_device(prof)
    assert [p.device_index for p in programs] == [0] * 4
    assert all(p.time_range.elapsed_us() > 0 for p in programs)
    launches = named(prof, "oxitorch::launch ")
    assert [e.name.removeprefix("oxitorch::launch ") for e in launches] == [p.name for p in programs]
    assert all(a.time_range.end <= p.time_range.end for a, p in zip(launches, programs, strict=True))
    assert len(named(prof, "oxitorch::copy_to_device")) == 8 and len(named(prof, "oxitorch::copy_to_host")) == 1
    assert not named(prof, "oxitorch::compile"), "the loop has settled"
    assert not named(prof, "oxitorch::load")
    # Time on the device belongs to the range that launched it.
    (step,) = [a for a in prof.key_averages() if a.key.startswith("Optimizer.step")]
    total = sum(p.time_range.elapsed_us() for p in programs)
    assert step.count == 4 and step.device_time_total == pytest.approx(total, rel=0.01)
    assert DEVICE.upper() in prof.key_averages().table(), "the table has columns of the device"


def test_a_range_of_the_user_and_an_op_that_reads():
    x = torch.ones(300, 300, device=DEVICE)
    torch.tpu.synchronize()
    with profile(activities=BOTH) as prof:
        with record_function("mine"):
            y = (x @ x).sum()
            torch.tpu.synchronize()
        (y + 1).item()
    by_name = {a.key: a for a in prof.key_averages()}
    assert by_name["mine"].device_time_total > 0
    assert by_name["aten::_local_scalar_dense"].device_time_total > 0
    assert named(prof, "oxitorch::wait") and len(on_device(prof)) == 2


def test_a_new_program_is_compiled_or_loaded():
    x = torch.ones(3, 11, device=DEVICE)
    torch.tpu.synchronize()
    with profile(activities=BOTH) as prof:
        (x.cosh().softmax(0) @ x.mT).sum().item()
    made = named(prof, "oxitorch::compile ") + named(prof, "oxitorch::load ")
    (program,) = on_device(prof)
    # The compiler may still be at work on a program of an earlier test.
    (own,) = [e for e in made if e.name.split(" ", 1)[1] == program.name]
    assert own.time_range.elapsed_us() > 0


def test_the_chrome_trace_has_them(tmp_path):
    loop = Loop()
    with profile(activities=BOTH) as prof:
        loop.run(2)
    prof.export_chrome_trace(str(tmp_path / "t.json"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    programs = [e for e in events if e.get("cat") == "kernel"]
    assert len(programs) == 2 and all(e["pid"] == 0 and e["dur"] > 0 for e in programs)
    launches = [e for e in events if e.get("name", "").startswith("oxitorch::launch ")]
    assert len(launches) == 2 and all(__file__ in e["args"]["line"] for e in launches)
    steps = [e for e in events if e.get("name", "").startswith("Optimizer.step")]
    for launch in launches:
        assert any(s["ts"] <= launch["ts"] and launch["ts"] + launch["dur"] <= s["ts"] + s["dur"] for s in steps)
        assert launch["pid"] == steps[0]["pid"] and launch["tid"] == steps[0]["tid"]
    arrows = [sorted(e["ph"] for e in events if e.get("cat") == "ac2g" and e["id"] == i) for i in
              {e["id"] for e in events if e.get("cat") == "ac2g"}]  # fmt: skip
    assert arrows == [["f", "s"]] * 2


def test_a_profile_of_the_host_alone():
    loop = Loop()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        loop.run(2)
    assert len(named(prof, "aten::addmm")) == 4
    # PyTorch asks for launches too if it has asked for the device before, and torch 2.11 for programs in any case.
    assert len(named(prof, "oxitorch::launch ")) in (0, 2) and len(on_device(prof)) in (0, 2)


def test_profiles_one_after_another():
    loop = Loop()
    counts = []
    for steps in (1, 3):
        with profile(activities=BOTH) as prof:
            loop.run(steps)
        counts.append(len(on_device(prof)))
    assert counts == [1, 3]


def test_a_schedule():
    loop = Loop()
    seen = []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(activities=BOTH, schedule=schedule, on_trace_ready=lambda p: seen.append(len(on_device(p)))) as prof:
        for _ in range(6):
            loop.run(1)
            prof.step()
    assert seen == [2]


def test_a_device_that_starts_while_the_profiler_runs():
    code = """
import torch
from torch.profiler import ProfilerActivity as A, profile
assert not torch.tpu.is_initialized()
with profile(activities=[A.CPU, A.PrivateUse1]) as prof:
    (torch.ones(3, device="tpu") + 1).tolist()
print([e.name for e in prof.events() if e.device_type == torch.autograd.DeviceType.PrivateUse1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "add" in done.stdout, done.stdout


def test_values_and_programs_are_the_same():
    loop, other = Loop(), Loop()
    before = torch.tpu.metrics()["programs"]
    with profile(activities=BOTH):
        profiled = loop.run(3)
    assert profiled == other.run(3) and torch.tpu.metrics()["programs"] == before


def counted(device, backward):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2, batch_first=True).to(device)
    x = torch.randn(2, 5, 16, device=device)
    q = torch.randn(2, 4, 5, 8, device=device, requires_grad=backward)
    k = torch.randn(2, 2, 7, 8, device=device, requires_grad=backward)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        y = layer(x, x, x, need_weights=False)[0].sum()
        y = y + F.scaled_dot_product_attention(q, k, k, enable_gqa=True).sum()
        y = y + F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()
        if backward:
            y.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("backward", [False, True])
def test_attention_is_counted_as_on_the_cpu(backward):
    assert counted(DEVICE, backward) == counted("cpu", backward) > 0
