"""Compiles what PyTorch's databases make for TPUs and GPUs that are not there.

    python -m tests.conformance.aot                         # everything that has no result yet
    python -m tests.conformance.aot 'op/*/float32/*' --slice v5e-1
    python -m tests.conformance.aot --smoke                 # one unit of one entry in 16

Units are those of `python -m tests.conformance` that ask for values: forward and gradients, modules, optimizers; and a
training step of each of `tests/device/test_real_models.py`. Each is recorded on a device that is not there, all of its
samples in one window, and XLA compiles its programs. Exit status: 0 if all is as `aot.toml` says, 1 if not.
"""

import argparse
import collections
import fnmatch
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

from .__main__ import contradictions, exceptions, load

# What may fail.
EXPECTED = "aot.toml"
# What is compiled for, and what a program may want to know of it: the same programs serve all slices of a platform.
SLICES = {"v5e-1": "tpu", "v6e-1": "tpu", "cuda:h200": "cuda"}
DEVICES = {
    "tpu": {"platform": "tpu", "kind": "TPU v5 lite", "memory_bytes": 16_909_336_064},
    "cuda": {"platform": "cuda", "kind": "NVIDIA H200", "memory_bytes": 150_000_000_000},
}
# What compiles for them; there is none for every kind of processor.
COMPILERS = {"tpu": "libtpu", "cuda": "jax_plugins"}
QUESTIONS = ("forward", "grad", "module", "optimizer", "step")
# Units of one process: it starts in seconds, and what it holds it holds to its end.
CHUNK = 120
# Of each unit, evenly spread over all.
SAMPLES = 8
SMOKE_SAMPLES = 2
# Of so many entries a smoke run takes one.
SMOKE_SHARE = 16


def record(units: list[str], slice_name: str, folder: Path, samples: int, timeout: float, reads_as: float) -> dict:
    """Records units into a new folder; those that end or stop the process are left out and said."""
    folder.mkdir()
    device = {**DEVICES[SLICES[slice_name]], "reads_as": reads_as}
    found: dict[str, dict] = {}
    waiting = list(units)
    while waiting:
        (folder / "device.json").write_text(json.dumps(device))
        argv = [sys.executable, "-m", f"{__package__}.recorder", str(folder), f"--samples={samples}"]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        out, _ = process.communicate("".join(f"{u}\n" for u in waiting))
        late = not timer.is_alive()
        timer.cancel()
        lines = [json.loads(line) for line in out.splitlines()]
        if process.returncode == 0:
            found |= {r["unit"]: {**r, "step": step} for step, r in enumerate(lines)}
            return found
        # The unit that it was at, or the end of all.
        bad = waiting[len(lines)] if len(lines) < len(waiting) else waiting[-1]
        what = f"hangs, over {timeout:.0f} s for {len(waiting)} units" if late else f"crash {process.returncode}"
        found[bad] = {"unit": bad, "samples": 0, "problems": [what], "step": None}
        waiting.remove(bad)
    return found


def compile_all(slice_name: str, folder: Path) -> dict[str, str | None]:
    """The error of each program of a folder, by its id."""
    argv = [sys.executable, "-m", "oxitorch", "aot-folder", slice_name, str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{slice_name}: {done.stderr.strip()[-500:]}")
    return {r["id"]: r["error"] for r in map(json.loads, done.stdout.splitlines())}


class Recorded:
    """What a folder has of units that were recorded into it."""

    def __init__(self, folder: Path, found: dict[str, dict]):
        self.folder, self.found = folder, found
        self.programs, self.on_cpu = collections.defaultdict(set), collections.defaultdict(set)
        self.is_empty = not (folder / "capture.json").exists()
        if not self.is_empty:
            capture = json.loads((folder / "capture.json").read_text())
            for p in capture["programs"]:
                for step, _ in p["launches"]:
                    self.programs[step].add(p["id"])
            for f in capture["fallbacks"]:
                self.on_cpu[f["step"]].add(f["op"])

    def compiled(self, slice_name: str) -> Iterator[dict]:
        """The result of each unit."""
        if not self.found:
            return
        errors = {} if self.is_empty else compile_all(slice_name, self.folder)
        for unit, r in self.found.items():
            programs, on_cpu = self.programs[r["step"]], sorted(self.on_cpu[r["step"]])
            missing = {errors.get(i, "the program was not compiled") for i in programs} - {None}
            problems = r["problems"] + sorted(e[:400] for e in missing)
            status = "fail" if problems else "cpu" if on_cpu else "pass" if r["samples"] else "skip"
            result = {"unit": f"{slice_name}/{unit}", "status": status, "samples": r["samples"]}
            yield result | {"programs": len(programs), "problems": problems[:5], "fallbacks": on_cpu}


def run_chunk(units: list[str], slices: list[str], samples: int, timeout: float) -> list[dict]:
    """The results of some units for slices of one platform."""
    with tempfile.TemporaryDirectory(prefix="oxitorch-aot-") as name:
        zeros, ones = Path(name) / "0", Path(name) / "1"
        first, second = record(units, slices[0], zeros, samples, timeout, 0.0), {}
        # What reads a number may not go on with a zero.
        if again := [u for u, r in first.items() if r["problems"]]:
            second = record(again, slices[0], ones, samples, timeout, 1.0)
        for unit in again:
            one, other = first[unit], second[unit]
            crashed, fewer = other["step"] is None, len(other["problems"]) < len(one["problems"])
            del (first if fewer and not crashed else second)[unit]
        both = [Recorded(zeros, first), Recorded(ones, second)]
        return [result for s in slices for recorded in both for result in recorded.compiled(s)]


def run_all(work: list[tuple[list[str], list[str]]], results: Path, jobs: int, samples: int, timeout: float) -> None:
    """Runs chunks of units and appends their results to the file as they come."""
    from tqdm import tqdm

    waiting = queue.SimpleQueue()
    for chunk in work:
        waiting.put(chunk)
    lock = threading.Lock()
    failures = []
    bar = tqdm(total=sum(len(units) for units, _ in work), unit="unit", smoothing=0.02, disable=None)
    bad = 0

    def run() -> None:
        nonlocal bad
        while not failures:
            try:
                units, slices = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                records = run_chunk(units, slices, samples, timeout)
            except Exception as e:
                failures.append(e)
                return
            with lock, results.open("a") as f:
                f.writelines(json.dumps(r) + "\n" for r in records)
                bad += sum(r["status"] == "fail" for r in records)
                bar.set_postfix_str(f"{bad} bad, {units[0]}"[:60])
                bar.update(len(units))

    threads = [threading.Thread(target=run, daemon=True) for _ in range(jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    bar.close()
    if failures:
        raise failures[0]


def models() -> list[str]:
    """The units of real models, where the packages that have them are installed."""
    try:
        from .. import real_models
    except ImportError as e:
        print(f"models are left out: {e}", file=sys.stderr)
        return []
    return [f"model/{name}/float32/step" for name in real_models.MODELS]


def verdict(known: dict[str, dict], chosen: set[str]) -> int:
    """Says how many compile, and what is not as `aot.toml` has it."""
    counts = collections.defaultdict(collections.Counter)
    statuses = {unit: known[unit]["status"] for unit in chosen & known.keys()}
    for unit, status in statuses.items():
        counts[unit.split("/")[0]][status] += 1
    bad = contradictions(statuses, exceptions(EXPECTED), EXPECTED)
    for line in bad:
        problems = known.get(line.partition(": ")[0], {}).get("problems")
        print(f"{line}: {problems[0]}"[:300] if problems else line)
    for slice_name, c in counts.items():
        of = c["pass"] + c["cpu"] + c["fail"]
        print(f"{slice_name}: {c['pass']} of {of} units compile, {c['cpu']} run in part on the CPU, {c['fail']} fail")
    print(f"{len(bad)} of {len(chosen)} units are not as they should be")
    return int(bool(bad))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance.aot",
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("patterns", nargs="*", default=["*"], help="units, as shell patterns (default: all)")
    parser.add_argument(
        "--slice", action="append", choices=list(SLICES), help="may be given several times (default: all)"
    )
    parser.add_argument("--results", type=Path, help="a file of JSON lines (default: aot-TORCH.jsonl)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"of each unit, at most (default: {SAMPLES})")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds to record so many units")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--smoke", action="store_true", help="one unit of some entries, two samples of it")
    args = parser.parse_args()

    import torch

    from .units import all_units, spread

    units = [u for u in all_units() + models() if u.rsplit("/", 1)[1] in QUESTIONS]
    units = [u for u in units if any(fnmatch.fnmatchcase(u, p) for p in args.patterns)]
    slices = []
    for name in args.slice or SLICES:
        if importlib.util.find_spec(COMPILERS[SLICES[name]]):
            slices.append(name)
        else:
            print(f"{name} is left out: {COMPILERS[SLICES[name]]} is not installed")
    if not slices:
        return 0
    if args.smoke:
        may_fail = exceptions(EXPECTED)
        chosen = [u for u in spread(units) if zlib.crc32(u.encode()) % SMOKE_SHARE == 0]
        units = [u for u in chosen if not any(fnmatch.fnmatchcase(f"{slices[0]}/{u}", p) for p in may_fail)]
    if not units:
        parser.error("no unit matches; `python -m tests.conformance --list` prints them")
    with tempfile.TemporaryDirectory() as folder:
        if args.smoke:
            args.results, args.samples = Path(folder) / "results.jsonl", SMOKE_SAMPLES
        results = args.results or Path(f"aot-{torch.__version__.split('+')[0]}.jsonl")
        known = {} if args.again else load(results)
        work = []
        for platform in DEVICES:
            of_platform = [s for s in slices if SLICES[s] == platform]
            missing = [u for u in units if of_platform and any(f"{s}/{u}" not in known for s in of_platform)]
            work += [(missing[i : i + CHUNK], of_platform) for i in range(0, len(missing), CHUNK)]
        run_all(work, results, args.jobs, args.samples, args.timeout)
        return verdict(load(results), {f"{s}/{u}" for s in slices for u in units})


if __name__ == "__main__":
    sys.exit(main())
