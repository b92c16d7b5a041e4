"""Timelines: in the trace event format, with the lanes that the docs name, and of what happened."""

import gzip
import json
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch import nn

pytestmark = pytest.mark.usefixtures("fused")


def read(path):
    """The events of a file that keeps to the trace event format, checked."""
    open_it = gzip.open if path.name.endswith(".gz") else open
    with open_it(path, "rt") as f:
        document = json.load(f)
    events = document["traceEvents"]
    assert document["otherData"]["events left out"] == 0
    lanes = defaultdict(list)
    for e in events:
        assert e["ph"] in {"X", "M", "s", "f"} and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        if e["ph"] == "M":
            assert e["name"] in {"process_name", "process_sort_index", "thread_name"}
            continue
        assert e["ts"] >= 0 and e["cat"] and e["name"]
        if e["ph"] == "X":
            assert e["dur"] >= 0
            lanes[e["pid"], e["tid"]].append((round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)))
    for lane, slices in lanes.items():
        open_slices = []
        for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_slices and open_slices[-1] <= start:
                open_slices.pop()
            assert not open_slices or end <= open_slices[-1], f"slices of lane {lane} overlap and do not nest"
            open_slices.append(end)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(lanes) <= named, "each lane has a name"
    return events


def slices(events, category):
    return [e for e in events if e["ph"] == "X" and e["cat"] == category]


def lanes(events):
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return {(processes[e["pid"]], e["args"]["name"]) for e in events if e["name"] == "thread_name"}


def train(steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        x = torch.ones(4, 8).to(DEVICE)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), torch.zeros(4, dtype=torch.long).to(DEVICE))
        loss.backward()
        optimizer.step()
        value = loss.item()  # read here
    return value


def line_of(marker):
    with open(__file__) as f:
        return next(f"{Path(__file__).name}:{i}" for i, text in enumerate(f, 1) if marker in text)


def test_a_training_loop(tmp_path):
    with torch.tpu.trace(tmp_path / "t.json"):
        train(3)
    events = read(tmp_path / "t.json")

    assert {("recorded", "tpu:0"), ("tpu:0", "programs")} <= lanes(events)
    windows = slices(events, "window")
    steps = [w for w in windows if w["args"]["ended by"] == "step"]
    assert len(steps) == 3 and all(w["args"]["ops"] > 30 for w in steps)
    assert [w["args"]["program"] for w in steps][2:] == ["known"]

    # Operations are in lines, and lines in windows; together they are all that was recorded.
    lines, ops = slices(events, "line"), slices(events, "op")
    assert sum(w["args"]["ops"] for w in windows) == len(ops) == sum(line["args"]["ops"] for line in lines)
    assert {"addmm", "relu"} <= {op["name"] for op in ops}
    assert {line_of("loss = F.cross_entropy"), line_of("optimizer.step()")} <= {line["name"] for line in lines}

    # Each window has an arrow to the program that ran it, forward in time.
    programs = {p["args"]["window"]: p for p in slices(events, "program")}
    arrows = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert arrows["s"].keys() == arrows["f"].keys() == {w["args"]["window"] for w in windows}
    for window in windows:
        number = window["args"]["window"]
        assert programs[number]["args"]["ops"] <= window["args"]["ops"], "dead results are left out"
        start, end = arrows["s"][number]["ts"], arrows["f"][number]["ts"]
        assert window["ts"] <= start <= window["ts"] + window["dur"] + 0.001
        assert start <= end == programs[number]["ts"]

    copies = slices(events, "copy")
    to_device = [c for c in copies if c["name"] == "copy to tpu:0" and line_of("x = torch.ones") in c["args"]["line"]]
    assert [c["args"]["bytes"] for c in to_device] == [4 * 8 * 4] * 3
    from_device = [c for c in copies if c["name"] == "copy from tpu:0"]
    assert len(from_device) == 3 and all(line_of("# read here") in c["args"]["line"] for c in from_device)


def test_a_program_that_is_compiled_and_waited_for(tmp_path):
    x = torch.ones(3, 5, 7, device=DEVICE)
    torch.tpu.synchronize()
    with torch.tpu.trace(tmp_path / "t.json.gz"):
        y = x.cos()
        for _ in range(20):  # which take a compiler longer than a thread to wake up
            y = (y @ x.mT).softmax(1) @ x
        y.sum().item()  # waits here
    events = read(tmp_path / "t.json.gz")
    compiled = slices(events, "compile")
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {processes[e["pid"]] for e in compiled} == {"compiler", "tpu:0"}, "the compiler works and the device waits"
    waits = [w for w in slices(events, "wait") if line_of("# waits here") in w["name"]]
    (program,) = slices(events, "program")
    assert waits[0]["ts"] < program["ts"] + program["dur"] and waits[0]["dur"] > 0


def test_only_the_block_is_in_it(tmp_path):
    x = torch.ones(3, device=DEVICE)
    (x + 1).tolist()
    with torch.tpu.trace(tmp_path / "a.json"):
        (x + 2).tolist()
        with torch.tpu.trace(tmp_path / "b.json"):
            (x * 3).tolist()
    (x + 4).tolist()
    names = {name: [op["name"] for op in slices(read(tmp_path / f"{name}.json"), "op")] for name in "ab"}
    assert names == {"a": ["add.Tensor", "mul.Tensor"], "b": ["mul.Tensor"]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json"], "nothing else is left"


def test_an_exception_still_writes_the_file(tmp_path):
    with pytest.raises(ZeroDivisionError), torch.tpu.trace(tmp_path / "t.json"):
        x = torch.ones(3, device=DEVICE) + 1
        raise ZeroDivisionError
    assert [op["name"] for op in slices(read(tmp_path / "t.json"), "op")][-1] == "add.Tensor"
    assert x.tolist() == [2, 2, 2]


def test_a_folder_that_does_not_exist_is_said_before_the_work(tmp_path):
    ran = []
    with pytest.raises(FileNotFoundError, match="nowhere"), torch.tpu.trace(tmp_path / "nowhere" / "t.json"):
        ran.append(1)
    assert not ran


def test_threads_have_lanes_of_their_own(tmp_path):
    x = torch.ones(5, device=DEVICE)
    torch.tpu.synchronize()

    def work():
        for i in range(5):
            (x + i).tolist()

    with torch.tpu.trace(tmp_path / "t.json"):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    copies = slices(read(tmp_path / "t.json"), "copy")
    assert len(copies) == 15 and len({c["tid"] for c in copies}) == 3


def test_values_are_the_same_and_nothing_is_compiled_for_it(tmp_path, no_background_compile):
    plain = train(4)
    before = torch.tpu.metrics()["programs"]
    with torch.tpu.trace(tmp_path / "t.json"):
        traced = train(4)
    assert traced == plain and torch.tpu.metrics()["programs"] == before
