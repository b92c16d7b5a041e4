"""Metrics: what is counted, where time goes, and the forms in which it is shown."""

import math
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from prometheus_client.parser import text_string_to_metric_families
from support import DEVICE
from torch import nn

pytestmark = pytest.mark.usefixtures("fused")


class Loop:
    """A training loop with places to sleep and to read in."""

    def __init__(self, size=32):
        torch.manual_seed(0)
        self.size = size
        self.model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 4)).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.run(3)
        torch.tpu.synchronize()
        torch.tpu.reset_metrics()

    def run(self, steps, data_s=0.0, python_s=0.0, read=False):
        for _ in range(steps):
            time.sleep(data_s)
            x = torch.ones(64, self.size).to(DEVICE)
            y = torch.zeros(64, dtype=torch.long).to(DEVICE)
            time.sleep(python_s)
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if read:
                loss.item()
        torch.tpu.synchronize()


# Parts are times that passed: a part has what was slept in it, and more on a machine that has other work. Half of it is
# asked for, since the device may still have run.
SLEPT = 0.1


def parts_of_a_step(**how):
    """Seconds of each part in a step: the mean of eight, and those of the last one."""
    loop = Loop()
    loop.run(8, **how)
    device = torch.tpu.metrics()["devices"][0]
    assert device["steps"] == 8
    for parts in (device["time_s"], device["last_step_s"]):
        assert list(parts) == ["python", "compile", "input", "sync", "device"]
        assert all(t >= 0 for t in parts.values())
    return {name: t / 8 for name, t in device["time_s"].items()}, device["last_step_s"]


def test_a_slow_loader_is_input():
    for part in parts_of_a_step(data_s=SLEPT):
        assert part["input"] >= 0.5 * SLEPT, part


def test_slow_python_is_python():
    for part in parts_of_a_step(python_s=SLEPT):
        assert part["python"] >= 0.5 * SLEPT, part


def test_a_program_that_is_compiled_is_compile():
    Loop(size=33)  # all of its programs are new, or new in this process
    torch.tpu.reset_metrics()
    x = torch.ones(5, 7, 11, device=DEVICE)
    for i in range(40):
        x = (x @ x.mT).softmax(-1) @ x + i
    x.sum().item()
    parts = torch.tpu.metrics()["devices"][0]["time_s"]
    assert parts["compile"] > 0.005 and parts["compile"] > parts["input"] + parts["sync"], parts


def test_reading_in_each_step_is_sync_and_no_more_than_it_costs():
    core = torch.tpu.modes._activate.core()
    x = torch.ones(4, device=DEVICE)

    def parts(read):
        """Where time went in four steps of 0.1 s of Python, and how long Python waited for the device in each."""
        y, waits = torch.tpu.ops.optimization_barrier(x + 1), []
        torch.tpu.synchronize()
        torch.tpu.reset_metrics()
        for _ in range(4):
            time.sleep(0.1)
            core.hold_launches(read)
            y = torch.tpu.ops.optimization_barrier(y + 1)
            if read:
                # The device starts 0.3 s late, in which Python could have come to the next step.
                threading.Timer(0.3, core.hold_launches, [False]).start()
                started = time.perf_counter()
                y[0].item()
                waits.append(time.perf_counter() - started)
        torch.tpu.synchronize()
        return torch.tpu.metrics()["devices"][0]["time_s"], waits

    parts(True)  # compiles
    reading, waits = parts(True)
    # The last wait has no launch after it that could have been earlier.
    assert 3 * 0.29 <= reading["sync"] <= sum(waits[:-1]) + 0.01
    running, _ = parts(False)
    assert running["sync"] < 0.01 and running["python"] > 0.39


def test_the_parts_are_the_whole_time():
    loop = Loop()
    started = time.perf_counter()
    loop.run(10, data_s=0.01, python_s=0.01)
    wall = time.perf_counter() - started
    # The first part begins where the device ended last, which was before.
    total = sum(torch.tpu.metrics()["devices"][0]["time_s"].values())
    assert total == pytest.approx(wall, rel=0.2)


def test_counters_of_a_settled_loop():
    loop = Loop()
    loop.run(5)
    m = torch.tpu.metrics()
    assert (m["programs"], m["window_hits"], m["launches"], m["compiles"]) == (0, 5, 5, 0)
    assert m["flushes"] == {"step": 5}
    assert m["transfers_h2d"] == 10 and m["bytes_h2d"] == 5 * (64 * 32 * 4 + 64 * 8)
    weights = sum(p.numel() * 4 for p in loop.model.parameters())
    assert m["bytes_donated"] >= 5 * 3 * weights, "weights and the two moments, in each step"
    device = m["devices"][0]
    assert (device["queue_launches"], device["queue_ops"]) == (0, 0)
    assert 3 * weights <= device["memory_bytes"] <= device["memory_peak_bytes"] <= device["memory_limit_bytes"]


def test_the_queue_has_a_depth():
    x = torch.ones(4, device=DEVICE)
    core = torch.tpu.modes._activate.core()
    torch.tpu.synchronize()
    core.hold_launches(True)
    try:
        with torch.tpu.set_window(ops=2):
            for _ in range(9):
                x = x + 1
        device = torch.tpu.metrics()["devices"][0]
    finally:
        core.hold_launches(False)
    assert device["queue_launches"] == 4 and device["queue_ops"] == 8


def test_held_launches_make_nobody_wait():
    """However many there are: Python is not held back as it is where the device cannot follow."""
    core = torch.tpu.modes._activate.core()

    def f(x):
        for _ in range(50):
            x = x + 1
        return x

    x = torch.ones(4, device=DEVICE)
    for _ in range(3):
        f(x)
    torch.tpu.synchronize()
    release = threading.Timer(20, core.hold_launches, [False])
    release.start()
    core.hold_launches(True)
    try:
        kept = [f(x) for _ in range(250)]  # of what nobody sees the ops are left out
        queued = torch.tpu.metrics()["devices"][0]["queue_ops"]
        assert release.is_alive(), "it went on when launches did"
        assert len(kept) == 250 and queued > 8192, "more than Python may be ahead by"
    finally:
        core.hold_launches(False)
        release.cancel()


def test_asking_changes_nothing():
    x = torch.ones(3, device=DEVICE) + 1
    before = torch.tpu.metrics()["launches"]
    torch.tpu.metrics_text(), torch.tpu.metrics_summary()
    assert torch.tpu.metrics()["launches"] == before, "nothing is launched for it"
    assert x.tolist() == [2, 2, 2]


def test_prometheus_text_is_what_prometheus_reads():
    Loop().run(2)
    torch.ops.aten._add_relu(torch.eye(3, device=DEVICE), torch.eye(3, device=DEVICE))  # has no lowering
    torch.ones(3, device=DEVICE).add(1).cpu()
    torch.tpu.synchronize()
    m = torch.tpu.metrics()
    families = {f.name: f for f in text_string_to_metric_families(torch.tpu.metrics_text())}
    assert all(name.startswith("oxitorch_") and f.documentation for name, f in families.items())

    def samples(name, label=None):
        found = {s.labels.get(label) if label else s.name: s.value for s in families["oxitorch_" + name].samples}
        assert found, name
        return found

    assert families["oxitorch_ops"].type == "counter" and samples("ops") == {"oxitorch_ops_total": m["ops"]}
    assert samples("flushes", "reason") == m["flushes"]
    assert samples("fallbacks", "op") == m["fallbacks"] and m["fallbacks"]
    hits = samples("cache_hits", "tier")
    assert set(hits) == {"window", "memory", "disk", "shared"} and hits["window"] == m["window_hits"]
    assert samples("transfer_bytes", "direction") == {"to_device": m["bytes_h2d"], "to_host": m["bytes_d2h"]}
    assert samples("time_seconds", "part").keys() == {"python", "compile", "input", "sync", "device"}
    assert samples("last_step_seconds", "part")["device"] > 0
    assert samples("info", "platform") == {torch.tpu.platform(): 1}
    assert samples("memory_bytes", "device").keys() == {str(i) for i in range(torch.tpu.device_count())}

    histogram = families["oxitorch_compile_seconds"]
    assert histogram.type == "histogram"
    buckets = [s for s in histogram.samples if s.name.endswith("_bucket")]
    ends = [float(s.labels["le"]) for s in buckets]
    assert ends == sorted(ends) and math.isinf(ends[-1]) and ends == list(m["compile_times"])
    assert [s.value for s in buckets] == sorted(s.value for s in buckets), "they count up"
    values = samples("compile_seconds")
    assert values["oxitorch_compile_seconds_count"] == buckets[-1].value == m["compiles"]
    assert values["oxitorch_compile_seconds_sum"] == pytest.approx(m["compile_s"])


def test_the_summary_names_what_bounds_the_device():
    loop = Loop()
    loop.run(4, data_s=0.15)
    text = torch.tpu.metrics_summary()
    assert text.startswith("tpu:0") and "4 steps" in text
    assert "bound by input: the device waits for data" in text
    assert "launched 4 times" in text and "flushes    step 4\n" in text and "fallbacks  none\n" in text


def test_reset_starts_again_at_zero():
    Loop().run(2)
    torch.tpu.reset_metrics()
    m = torch.tpu.metrics()
    assert m["launches"] == 0 and sum(m["compile_times"].values()) == 0
    assert m["devices"][0]["steps"] == 0 and m["devices"][0]["last_step_s"] is None
    assert set(m["devices"][0]["time_s"].values()) == {0.0}
