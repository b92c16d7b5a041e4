"""What an operation costs: against stock PyTorch on the CPU, in one process, in turns, best of several rounds.

    python benches/eager.py            # a table
    python benches/eager.py --json     # the same for programs
    python benches/eager.py --check    # exit status 1 if a target is missed

Run it on a quiet machine; compare ratios, not microseconds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import torch

OPS = 1000


@dataclass
class Row:
    """One line of the table; `target` bounds the ratio to the CPU or, where there is none, our own value."""

    name: str
    unit: str
    ours: float | None
    cpu: float | None = None
    target: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.ours / self.cpu if self.cpu and self.ours is not None else None

    @property
    def met(self) -> bool | None:
        measured = self.ratio if self.cpu else self.ours
        return None if self.target is None or measured is None else measured <= self.target


def in_turns(rounds: int, *measures) -> list[float]:
    """The smallest value of each measure; turns, so that what disturbs the machine disturbs all."""
    best = [float("inf")] * len(measures)
    for _ in range(rounds):
        for i, measure in enumerate(measures):
            best[i] = min(best[i], measure())
    return best


def adds(device: str):
    """Runs dependent adds on 4 floats; gives the seconds until Python is through and until all is done."""
    a, b = torch.ones(4, device=device), torch.ones(4, device=device)
    wait = torch.tpu.synchronize if device == "tpu" else lambda: None

    def run() -> tuple[float, float]:
        c = a
        wait()
        started = time.perf_counter()
        for _ in range(OPS):
            c = c + b
        recorded = time.perf_counter() - started
        wait()
        return recorded, time.perf_counter() - started

    run()
    return run


def tiny_ops(rounds: int) -> list[Row]:
    """`c = c + b`: recording and running, and what Python sees of it."""
    ours, cpu = adds("tpu"), adds("cpu")
    done, seen, stock = in_turns(rounds, lambda: ours()[1], lambda: ours()[0], lambda: cpu()[1])
    us = 1e6 / OPS
    return [
        Row("tiny add, recorded and run", "us/op", done * us, stock * us, 3.0),
        Row(
            "tiny add, until Python goes on",
            "us/op",
            seen * us,
            stock * us,
            note="the device works meanwhile",
        ),
    ]


def dispatch_only(rounds: int) -> list[Row]:
    """The same with launches held back: the cost of recording alone."""
    from oxitorch import _core

    if not hasattr(_core, "hold_launches"):
        return [Row("tiny add, dispatch alone", "us/op", None, note="this core cannot hold launches")]
    cpu = adds("cpu")
    a, b = torch.ones(4, device="tpu"), torch.ones(4, device="tpu")

    def held() -> float:
        torch.tpu.synchronize()
        _core.hold_launches(True)
        try:
            started = time.perf_counter()
            c = a
            for _ in range(OPS):
                c = c + b
            return time.perf_counter() - started
        finally:
            _core.hold_launches(False)
            torch.tpu.synchronize()

    alone, stock = in_turns(rounds, held, lambda: cpu()[1])
    us = 1e6 / OPS
    return [Row("tiny add, dispatch alone", "us/op", alone * us, stock * us, 1.0)]


def views(rounds: int) -> list[Row]:
    """A view is metadata only, on both."""

    def run(device: str):
        x = torch.ones(4, 4, device=device)

        def measure() -> float:
            started = time.perf_counter()
            for _ in range(OPS):
                x.t()
            return time.perf_counter() - started

        return measure

    ours, stock = in_turns(rounds, run("tpu"), run("cpu"))
    return [Row("view (x.t())", "us/op", ours * 1e6 / OPS, stock * 1e6 / OPS)]


def round_trip(rounds: int) -> list[Row]:
    """One add and `.item()`: the whole way to the device and back."""

    def run(device: str):
        x = torch.ones((), device=device)

        def measure() -> float:
            started = time.perf_counter()
            for _ in range(100):
                (x + x).item()
            return time.perf_counter() - started

        return measure

    ours, stock = in_turns(rounds, run("tpu"), run("cpu"))
    return [Row("add and .item()", "us", ours * 1e4, stock * 1e4)]


def call_site(rounds: int) -> list[Row]:
    """Finding out which Python line asked for an operation."""
    from oxitorch import _core

    if not hasattr(_core, "bench_call_site"):
        return [Row("call site of an op", "ns", None, note="this core has no measure of it")]
    (ns,) = in_turns(rounds, lambda: _core.bench_call_site(10_000))
    return [Row("call site of an op", "ns", ns, target=100.0)]


def import_time(rounds: int) -> list[Row]:
    """`import torch` with and without oxitorch, in processes of their own."""

    def run(autoload: str):
        env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}

        def measure() -> float:
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch"], env=env, check=True)
            return time.perf_counter() - started

        return measure

    ours, stock = in_turns(max(3, rounds // 4), run("1"), run("0"))
    return [Row("import torch grows by", "s", ours - stock, target=0.5)]


def table(rows: list[Row]) -> str:
    head = ["", "unit", "oxitorch", "PyTorch CPU", "ratio", "target", ""]
    cells = [head]
    for r in rows:
        number = lambda x: "" if x is None else f"{x:.3g}"  # noqa: E731
        verdict = {None: r.note, True: "met", False: "MISSED"}[r.met]
        ratio = "" if r.ratio is None else f"{r.ratio:.2f}x"
        target = "" if r.target is None else (f"{r.target:g}x" if r.cpu else f"{r.target:g}")
        cells.append([r.name, r.unit, number(r.ours), number(r.cpu), ratio, target, verdict])
    widths = [max(len(c[i]) for c in cells) for i in range(len(head))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(c, widths, strict=True)).rstrip() for c in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="measure this often, keep the best")
    parser.add_argument("--mode", default="fused", help="the eager mode (default: fused)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a target is missed")
    args = parser.parse_args()

    torch.set_num_threads(2)
    torch.tpu.eager_mode = args.mode
    rows = [
        row
        for group in (tiny_ops, dispatch_only, views, round_trip, call_site, import_time)
        for row in group(args.rounds)
    ]
    if args.json:
        print(json.dumps([{**asdict(r), "ratio": r.ratio, "met": r.met} for r in rows], indent=2))
    else:
        print(f"torch {torch.__version__}, {torch.tpu.get_device_name()}, {args.mode} mode, {os.cpu_count()} cores\n")
        print(table(rows))
    return int(args.check and any(r.met is False for r in rows))


if __name__ == "__main__":
    sys.exit(main())
