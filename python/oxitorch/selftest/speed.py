"""How fast the device is, and what preflight thought."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from oxitorch.selftest import Found, Skip, check, step


def _seconds(f: Callable[[], object], least_s: float = 0.3) -> float:
    """The best time of a call, of as many as fit into this time; at least three."""
    kept = f()  # what nobody keeps is not computed
    torch.tpu.synchronize()
    best, spent, count = float("inf"), 0.0, 0
    while count < 3 or spent < least_s:
        del kept
        began = time.perf_counter()
        kept = f()
        torch.tpu.synchronize()
        took = time.perf_counter() - began
        best, spent, count = min(best, took), spent + took, count + 1
    return best


@check("products")
def products() -> Found:
    """Floating-point operations per second of one large product."""
    n = 1024 if torch.tpu.platform() == "cpu" else 8192
    speeds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(n, n, device="tpu").to(dtype)
        speeds[str(dtype).removeprefix("torch.")] = 2 * n**3 / _seconds(lambda a=a: a @ a)
    text = ", ".join(f"{name} {flops / 1e12:.2f} TFLOP/s" for name, flops in speeds.items())
    return Found(f"{text} ({n} x {n})", {f"{name}_flops_per_s": flops for name, flops in speeds.items()})


@check("memory and transfers")
def bandwidth() -> Found:
    """Bytes per second that an addition reads and writes on the device, and of copies to it and from it."""
    size = (64 if torch.tpu.platform() == "cpu" else 512) << 20
    x = torch.ones(size // 4, device="tpu")
    host = torch.ones(size // 4)
    speeds = {
        "copy": 2 * size / _seconds(lambda: x + 1),
        "to_device": size / _seconds(lambda: host.to("tpu")),
        "to_host": size / _seconds(lambda: x.cpu()),
    }
    words = {"copy": "on the device", "to_device": "to it", "to_host": "from it"}
    text = ", ".join(f"{speeds[k] / 1e9:.1f} GB/s {words[k]}" for k in speeds)
    return Found(text, {f"{k}_bytes_per_s": v for k, v in speeds.items()})


@check("launches")
def launches() -> Found:
    """What a launch costs, with one small operation in it and a wait for it; and what recording an operation costs."""
    x = torch.ones(8, device="tpu")
    alone = _seconds(lambda: x + 1)

    def many():
        y = x
        for _ in range(200):
            y = y + 1
        return y

    each = _seconds(many) / 200
    text = f"{alone * 1e6:.0f} us for one and its wait, {each * 1e6:.1f} us for each of 200 in a row"
    return Found(text, {"alone_s": alone, "in_a_row_s": each})


# The name of a device as it calls itself, and as preflight does.
_SLICES = {
    "H200": "cuda:h200", "H100": "cuda:h100", "A100": "cuda:a100", "B300": "cuda:b300", "B200": "cuda:b200",
    "L40S": "cuda:l40s", "L4": "cuda:l4", "4090": "cuda:rtx4090", "5090": "cuda:rtx5090", "v5 lite": "v5e-1",
    "v5e": "v5e-1", "v6": "v6e-1", "v5p": "v5p-1", "v4": "v4-1",
}  # fmt: skip


def _slice() -> str:
    if torch.tpu.platform() == "cpu":
        return "cpu"
    name = torch.tpu.get_device_name()
    for word, found in _SLICES.items():
        if word in name:
            return found
    raise Skip(f"preflight does not know {name}")


_PREFLIGHT = "import sys; from oxitorch._cli import main; sys.exit(main())"


@check("preflight's prediction", quick=False, limit_s=300)
def prediction() -> Found:
    """A training step's memory and time, as preflight says for this device and as they are."""
    where = _slice()
    with tempfile.TemporaryDirectory(prefix="oxitorch-selftest-") as folder:
        report = os.path.join(folder, "report.json")
        command = [sys.executable, "-c", _PREFLIGHT, "preflight", "--slice", where, "--json", report]
        done = subprocess.run([*command, step.__file__], capture_output=True, text=True)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        assert os.path.exists(report), f"preflight ended with {done.returncode}: {last}"
        with open(report, encoding="utf-8") as f:
            (said,) = json.load(f)["slices"]
    run = step.training("tpu")
    for _ in range(step.STEPS):
        run()
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.memory_allocated()
    seconds = _seconds(run, least_s=1.0)
    alive = torch.tpu.max_memory_allocated()
    predicted, least = said["resident_peak_bytes"], said["step"]["roofline_s"]
    measured = {
        "slice": where,
        "resident_peak_bytes_said": predicted,
        "resident_peak_bytes": alive,
        "need_bytes_said": said["need_bytes"],
        "roofline_s_said": least,
        "step_s": seconds,
        "resident_before_bytes": before,
    }
    assert alive <= 1.2 * predicted + (16 << 20), f"tensors take {alive} bytes, preflight said {predicted}"
    time_text = f"{seconds * 1e3:.2f} ms a step"
    if least:
        assert seconds >= 0.9 * least, f"a step takes {seconds} s, and preflight said at least {least}"
        time_text += f", said: at least {least * 1e3:.2f}"
    mib = 1 << 20
    return Found(f"{alive / mib:.1f} MiB of tensors, said: {predicted / mib:.1f}; {time_text}", measured)
