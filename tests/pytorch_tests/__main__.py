"""Runs PyTorch's own device-generic test files on the device, in worker processes, with results that are kept.

    python -m tests.pytorch_tests DIR                          # all files, what has no result yet
    python -m tests.pytorch_tests DIR test_indexing --again    # some, once more
    python -m tests.pytorch_tests DIR test_nn --every 5        # every fifth test, by a checksum of its name
    python -m tests.pytorch_tests DIR --failed                 # what fails here and passes on the CPU, once more
    python -m tests.pytorch_tests DIR functorch/test_vmap --classes TestVmapAPI TestRandomness
    python -m tests.pytorch_tests DIR functorch/test_ops --first-sample   # of each operation, its first sample alone
    python -m tests.pytorch_tests DIR distributed_test         # those of torch.distributed, which come with torch
    python -m tests.pytorch_tests DIR distributed/test_device_mesh functorch/test_vmap
    python -m tests.pytorch_tests --page                       # runs nothing; writes results.txt and the page

DIR is PyTorch's folder `test`; nothing of it is copied. Each test that does not pass is repeated on the CPU. A test
that crashes or takes too long is repeated in a process of its own. Exit status: 1 if something fails without a reason
in reasons.toml that passes on the CPU.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from . import page, placed, processes

# Tests in one process, which keeps memory bounded.
MOST_TESTS = 150
# Seconds in which a file is imported.
IMPORT_TIMEOUT = 300


class Worker:
    """A process that runs tests of one file, started anew after a crash."""

    def __init__(self, folder: Path, name: str, timeout: float, device: str = "tpu"):
        self.command = [sys.executable, "-m", f"{__package__}.worker", str(folder), name, device]
        self.timeout = timeout
        self.process = None
        self.ran = 0

    def start(self) -> list[str]:
        """The names of the file's tests for the device."""
        self.stop()
        self.ran = 0
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(page.ROOT)},
            start_new_session=True,
        )
        line = self._answer(IMPORT_TIMEOUT)
        if not line:
            raise SystemExit(f"{self.command[-2]}: its import failed; try {' '.join(self.command)}")
        return json.loads(line)

    def run(self, test: str) -> dict:
        """The test's result; a crash or a hang is one."""
        if self.process is None or self.ran >= MOST_TESTS:
            self.start()
        self.ran += 1
        self.process.stdin.write(test + "\n")
        self.process.stdin.flush()
        if line := self._answer(self.timeout):
            return json.loads(line)
        hung = self.process.poll() is None and line is None
        alone = self.ran == 1
        self.stop()
        if not alone:
            return self.run(test)
        why = f"over {self.timeout:.0f} s" if hung else "the process ended"
        return {"test": test, "seconds": self.timeout, "status": "hang" if hung else "crash", "why": why}

    def _answer(self, timeout: float) -> str | None:
        """A line; None if the time is up, or the process has ended."""
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            return None
        return self.process.stdout.readline()

    def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # a test's processes, too
            self.process.wait()
            self.process = None


def on_cpu(test: str) -> str:
    """The same test for the CPU, if it is for one device."""
    case, name = test.split(".")
    generic = case.removesuffix("PRIVATEUSE1").removesuffix("TPU")
    return f"{generic}{'CPU' if generic != case else ''}.{'_cpu'.join(name.rsplit('_tpu', 1))}"


def run_file(args, name: str, known: dict) -> None:
    """Runs the tests of a file and appends their results as they come."""
    from tqdm import tqdm

    worker = Worker(args.folder, name, args.timeout)
    label = f"{name}{page.FIRST_SAMPLE}" if args.first_sample else name
    comes_with_torch = name == processes.NAME
    of_one_device = name.startswith(processes.FOLDER) or placed.is_placed(name)
    on_host = Worker(args.folder, name, args.timeout, "cpu") if of_one_device else worker
    version = (
        metadata.version("torch") if comes_with_torch else (args.folder.parent / "version.txt").read_text().strip()
    )
    tests = [t for t in worker.start() if page.is_sampled(t, args.every)]
    if args.classes:
        tests = [t for t in tests if page.case_of(t) in args.classes]
    if args.failed:
        tests = [t for t in tests if page.sign(known.get(f"{label} {t}", {"status": "pass"})) in "-!"]
    elif not args.again:
        tests = [t for t in tests if f"{label} {t}" not in known]
    counts = dict.fromkeys(("pass", "skip", "fail", "crash", "hang", "unused"), 0)
    with args.results.open("a", buffering=1) as results, tqdm(tests, desc=label, smoothing=0.02) as bar:
        for test in bar:
            every = known.get(f"{label} {test}", {"every": args.every})["every"]
            record = worker.run(test) | {"file": label, "every": every, "pytorch": version}
            if record["status"] not in ("pass", "unused"):
                record["cpu"] = on_host.run(on_cpu(test))["status"]
                if comes_with_torch and record["cpu"] == "skip" and record["status"] != "skip":
                    record["cpu"] = "pass"  # the test wants devices, and there are some
            results.write(json.dumps(record) + "\n")
            counts[record["status"]] += 1
            bar.set_postfix(counts)
    worker.stop()
    on_host.stop()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.pytorch_tests",
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path, help="PyTorch's folder `test`")
    parser.add_argument("files", nargs="*", default=page.FILES, help="files, without .py (default: those of page.py)")
    parser.add_argument("--results", type=Path, help="a file of JSON lines (default: pytorch-tests-TORCH.jsonl)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one test of N, by a checksum of its name")
    parser.add_argument("--classes", nargs="+", metavar="C", help="only tests of these classes, without their device")
    parser.add_argument("--first-sample", action="store_true", help="of each operation of a database only this sample")
    parser.add_argument("--timeout", type=float, default=120, metavar="S", help="seconds for one test (default: 120)")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--failed", action="store_true", help="only what fails here and passes on the CPU")
    parser.add_argument("--page", action="store_true", help="run nothing; write results.txt and docs/pytorch-tests.md")
    args = parser.parse_args()

    version = metadata.version("torch").split("+")[0]  # torch itself is the workers' alone, as it takes long to import
    args.results = args.results or Path(f"pytorch-tests-{version}.jsonl")
    if not args.page:
        if args.folder is None:
            parser.error("where is PyTorch's folder `test`?")
        args.folder = args.folder.resolve()
        if args.first_sample:
            os.environ["PYTORCH_OPINFO_SAMPLE_INPUT_INDEX"] = "0"  # PyTorch's own switch; workers inherit it
        known = page.load(args.results)
        for name in args.files:
            run_file(args, name, known)
    known = page.load(args.results)
    if args.page:
        page.write(known, version)
    return page.verdict(page.parse(page.summary(known, "")))


if __name__ == "__main__":
    sys.exit(main())
