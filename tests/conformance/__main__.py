"""Runs PyTorch's databases on the device against the CPU, in worker processes, with results that are kept.

    python -m tests.conformance                      # everything that has no result yet
    python -m tests.conformance 'op/add*' --again    # some of it, once more
    python -m tests.conformance --report             # what is known, by dtype and question
    python -m tests.conformance --smoke              # a few samples of one unit of each entry, compiled quickly
    python -m tests.conformance --op add.Tensor      # a few samples of every unit of an op's entries, compiled quickly

A unit is `database/entry/dtype/question`. Exit status: 0 if all is as `exceptions.toml` says, 1 if not.
"""

import argparse
import collections
import fnmatch
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import tomllib

HERE = Path(__file__).parent
# Of compiling ahead of time, `cpu`: in part on the CPU.
GOOD = ("pass", "skip", "cpu")
# Of each unit in a smoke run, and of an op.
SMOKE_SAMPLES = 6


class Worker:
    """A process that runs units, started anew after a crash."""

    def __init__(self, timeout: float, options: list[str]):
        self.timeout = timeout
        self.options = options
        self.process = None

    def start(self) -> None:
        """Starts the process, which imports PyTorch and then waits for units; it ends when this one does."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", *self.options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def run(self, unit: str) -> dict:
        """The unit's result; a crash or a hang is one."""
        self.start()
        try:
            self.process.stdin.write(unit + "\n")
            self.process.stdin.flush()
            if select.select([self.process.stdout], [], [], self.timeout)[0]:
                if line := self.process.stdout.readline():
                    return json.loads(line)
                status = f"crash {self.process.wait()}"
            else:
                status = f"hang, over {self.timeout:.0f} s"
        except BrokenPipeError:
            status = f"crash {self.process.wait()}"
        self.stop()
        return {"unit": unit, "status": status.split()[0].strip(","), "problems": [["process", status]], "samples": 0}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def run_all(units: list[str], results: Path, workers: list[Worker]) -> None:
    """Runs units and appends their results to the file as they come."""
    from tqdm import tqdm

    waiting = queue.SimpleQueue()
    for unit in units:
        waiting.put(unit)
    lock = threading.Lock()
    bar = tqdm(total=len(units), unit="unit", smoothing=0.02, disable=None)  # a terminal alone has one
    bad = 0

    def work(worker: Worker) -> None:
        nonlocal bad
        while True:
            try:
                unit = waiting.get_nowait()
            except queue.Empty:
                return worker.stop()
            record = worker.run(unit)
            with lock:
                with results.open("a") as f:
                    f.write(json.dumps(record) + "\n")
                bad += record["status"] not in GOOD
                bar.set_postfix_str(f"{bad} bad, {unit}"[:60])
                bar.update()

    threads = [threading.Thread(target=work, args=[worker], daemon=True) for worker in workers]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    bar.close()


def load(results: Path) -> dict[str, dict]:
    """The last result of each unit."""
    if not results.exists():
        return {}
    return {r["unit"]: r for r in map(json.loads, results.read_text().splitlines())}


def exceptions(file: str = "exceptions.toml") -> dict[str, str]:
    """Patterns of units that may fail, with the reason."""
    groups = tomllib.loads((HERE / file).read_text()).get("expected", [])
    return {pattern: group["reason"] for group in groups for pattern in group["units"]}


def report(known: dict[str, dict]) -> None:
    """Totals by database, question and dtype; which ops fell back."""
    table = collections.defaultdict(collections.Counter)
    fallbacks = collections.defaultdict(set)
    for unit, record in known.items():
        db, entry, dtype, question = unit.split("/")
        table[db, question, dtype][record["status"]] += 1
        for op in record.get("fallbacks", {}):
            fallbacks[op].add(entry)
    print(f"{'':30}{'right':>7}{'of':>7}{'wrong':>7}{'crash':>7}{'hang':>7}")
    for (db, question, dtype), counts in table.items():
        of = sum(counts.values()) - counts["skip"]
        wrong = counts["fail"] + counts["broken"]
        name = f"{db} {question} {dtype}"
        print(f"{name:30}{counts['pass']:7}{of:7}{wrong:7}{counts['crash']:7}{counts['hang']:7}")
    print(f"\n{len(fallbacks)} ops ran on the CPU:")
    for op, entries in sorted(fallbacks.items(), key=lambda x: -len(x[1])):
        print(f"  {op}: {len(entries)} entries")


def contradictions(statuses: dict[str, str], expected: dict[str, str], file: str) -> list[str]:
    """What the file of exceptions says otherwise than a run: units by their statuses against patterns.

    Every unit that a pattern names has to fail, if it has something to check. A crash or a hang is no such failure.
    """
    found = []
    for unit, status in sorted(statuses.items()):
        patterns = [p for p in expected if fnmatch.fnmatchcase(unit, p)]
        if status in GOOD:
            found += [f"{unit}: is right, though {file} has it as {p}" for p in patterns if status != "skip"]
        elif not patterns or status != "fail":
            found.append(f"{unit}: {status}")
    for pattern in expected:
        if {statuses[u] for u in fnmatch.filter(statuses, pattern)} == {"skip"}:
            found.append(f"{pattern}: has nothing to check, though {file} has it")
    return found


def verdict(known: dict[str, dict], chosen: set[str]) -> int:
    """Says what is not as `exceptions.toml` has it."""
    statuses = {unit: known[unit]["status"] for unit in chosen & known.keys()}
    bad = contradictions(statuses, exceptions(), "exceptions.toml")
    for line in bad:
        problems = known.get(line.partition(": ")[0], {}).get("problems")
        print(f"{line}: {problems[0][0]}: {problems[0][1]}"[:300] if problems else line)
    print(f"{len(bad)} of {len(chosen)} units are not as they should be")
    return int(bool(bad))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("patterns", nargs="*", help="units, as shell patterns (default: all)")
    parser.add_argument("--results", type=Path, help="a file of JSON lines (default: conformance-TORCH.jsonl)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="seconds for one unit (default: 300)")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--smoke", action="store_true", help="one unit of each entry, and not all of its samples")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="at most so many samples of each unit, compiled quickly"
    )
    parser.add_argument("--op", help="a few samples of this op's units (default: of entries with its name)")
    parser.add_argument("--report", action="store_true", help="run nothing; print totals")
    parser.add_argument("--list", action="store_true", help="run nothing; print the units")
    args = parser.parse_args()

    few = args.smoke or args.op
    samples = SMOKE_SAMPLES if few else args.samples
    options = ["--quick", "--samples", str(samples)] if samples else []
    workers = [Worker(args.timeout, options) for _ in range(args.jobs)]
    if args.smoke and not args.list:
        for worker in workers:  # what they import takes as long as what is imported here
            worker.start()

    import torch

    from .units import all_units, entries_of, spread

    if args.op and not args.patterns:
        args.patterns = [f"{entry}/*" for entry in entries_of(args.op)]
        if not args.patterns:
            print(f"no entry has the name of {args.op}: name units that test it; --list prints all")
            return 0
    args.patterns = args.patterns or ["*"]
    units = [u for u in all_units() if any(fnmatch.fnmatchcase(u, p) for p in args.patterns)]
    if few:
        may_fail = exceptions()
        chosen = units if args.op else spread(units)
        units = [u for u in chosen if not any(fnmatch.fnmatchcase(u, p) for p in may_fail)]
    if args.list:
        print(*units, sep="\n")
        return 0
    if not units:
        parser.error("no unit matches; --list prints them")
    results = args.results or Path(f"conformance-{torch.__version__.split('+')[0]}.jsonl")
    if few:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results.jsonl"
            run_all(units, results, workers)
            return verdict(load(results), set(units))
    known = load(results)
    if not args.report:
        run_all([u for u in units if args.again or u not in known], results, workers)
        known = load(results)
    report({u: r for u, r in known.items() if u in set(units)})
    return 0 if args.report else verdict(known, set(units))


if __name__ == "__main__":
    sys.exit(main())
