"""Copies between host and device, against `clone()` of the same tensor by stock PyTorch on the CPU, in turns.

    python benches/copies.py            # a table
    python benches/copies.py --json     # the same for programs
    python benches/copies.py --check    # exit status 1 if a target is missed

`.cpu()` and `.to("tpu")` make their destination as `clone()` does; `copy_` has one that was written before.
On the cpu platform the device's memory is the host's; elsewhere these are transfers, and the targets mean nothing.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
# Against `clone()`, of the largest.
TARGET = 1.2


@dataclass
class Row:
    """Microseconds of one copy, of its best round and of its median round."""

    name: str
    bytes: int
    best: float
    median: float
    cpu_best: float
    cpu_median: float

    @property
    def ratio(self) -> float:
        return self.best / self.cpu_best

    @property
    def median_ratio(self) -> float:
        return self.median / self.cpu_median

    @property
    def met(self) -> bool | None:
        return self.ratio <= TARGET if self.bytes == SIZES[-1] else None


def copies(size: int) -> dict:
    """What is measured on tensors of so many bytes."""
    host = torch.arange(size // 4, dtype=torch.float32)
    device = host.to("tpu")
    to_host, to_device = torch.zeros_like(host), torch.zeros_like(device)
    torch.tpu.synchronize()
    return {
        "clone": host.clone,
        "clone into memory": lambda: to_host.copy_(host),
        ".cpu()": device.cpu,
        '.to("tpu")': lambda: host.to("tpu"),
        "copy_ to the host": lambda: to_host.copy_(device),
        "copy_ to the device": lambda: to_device.copy_(host),
    }


def measure(size: int, rounds: int) -> list[Row]:
    """Turns, so that what disturbs the machine disturbs all. The device is waited for once in a turn."""
    what = copies(size)
    calls = max(4, min(200, 64 * MIB // size))
    times: dict[str, list[float]] = {name: [] for name in what}
    for _ in range(rounds + 1):
        for name, copy in what.items():
            # Once unmeasured: PyTorch's threads go on spinning for milliseconds after what they did last, and take as
            # long to wake up.
            for _ in range(2):
                started = time.perf_counter()
                for _ in range(calls):
                    copy()
                torch.tpu.synchronize()
                spent = time.perf_counter() - started
            times[name].append(spent * 1e6 / calls)
    # The first round is for what is made once.
    found = {name: (min(t[1:]), statistics.median(t[1:])) for name, t in times.items()}
    return [Row(name, size, *found[name], *found["clone"]) for name in what]


def table(rows: list[Row]) -> str:
    cells = [["", "KiB", "best us", "median us", "best / clone", "median / clone", ""]]
    for r in rows:
        verdict = {None: "", True: "met", False: "MISSED"}[r.met]
        ratios = [f"{r.ratio:.2f}x", f"{r.median_ratio:.2f}x"]
        cells.append([r.name, str(r.bytes // KIB), f"{r.best:.4g}", f"{r.median:.4g}", *ratios, verdict])
    widths = [max(len(c[i]) for c in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(c, widths, strict=True)).rstrip() for c in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measure this often")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a target is missed")
    args = parser.parse_args()

    rows = [row for size in SIZES for row in measure(size, args.rounds)]
    if args.json:
        more = lambda r: {"ratio": r.ratio, "median_ratio": r.median_ratio, "met": r.met}  # noqa: E731
        print(json.dumps([{**asdict(r), **more(r)} for r in rows], indent=2))
    else:
        name, threads = torch.tpu.get_device_name(), torch.get_num_threads()
        print(f"torch {torch.__version__}, {name}, {threads} threads of PyTorch, {os.cpu_count()} cores\n")
        print(table(rows))
    return int(args.check and any(r.met is False for r in rows))


if __name__ == "__main__":
    sys.exit(main())
