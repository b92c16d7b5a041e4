"""`python -m oxitorch.diff`, which is what `oxitorch diff` starts: a script on two platforms, or two recorded files."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from oxitorch.diff import _compare
from oxitorch.diff._call import runs_here
from oxitorch.diff._platform import Platform
from oxitorch.diff._report import Report
from oxitorch.diff._trace import Trace

CANNOT = 2
# What an argument of the script is in the one run, and in the other.
_EITHER = re.compile(r"\{(?P<a>[^{}|]*)\|(?P<b>[^{}|]*)\}")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; the exit status: 0 all is explained, 1 not, 2 nothing could be compared."""
    parser = argparse.ArgumentParser(prog="oxitorch diff")
    parser.add_argument("--a", default="cpu", help="a platform, or a recorded file")
    parser.add_argument("--b", default="tpu", help="a platform, or a recorded file")
    parser.add_argument("--steps", type=int, default=3, help="how many steps of an optimizer are run")
    parser.add_argument("--step", type=int, help="the step to record op by op")
    parser.add_argument(
        "--loss", type=float, default=_compare.LOSS, help="the relative difference on which losses part"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", metavar="DIR", help="keep the recorded runs there")
    parser.add_argument("--record", metavar="FILE", help="record the run of --a into this file, and compare nothing")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--html", metavar="FILE")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    try:
        return _Command(asked).run()
    except (ValueError, RuntimeError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return CANNOT


class _Command:
    def __init__(self, asked):
        self.asked = asked
        self.script = asked.script[1:] if asked.script[:1] == ["--"] else asked.script
        self.sides = {"a": asked.a, "b": asked.b}
        self.runs = [s for s in self.sides if not os.path.isfile(self.sides[s])]
        if asked.record:
            self.runs = ["a"]
        for s in self.runs:
            _known(self.sides[s])
        if self.runs and not self.script:
            names = " and ".join(f"--{s} {self.sides[s]}" for s in self.runs)
            raise ValueError(f"there is no script to run for {names}\nhint: two recorded files need none")
        if asked.steps < 1:
            raise ValueError(f"--steps {asked.steps}: at least one step is run")

    def run(self) -> int:
        if self.asked.record:
            self._record("a", self.asked.record, self.asked.step or 0, None)
            return 0
        with tempfile.TemporaryDirectory(prefix="oxitorch-") as folder:
            if self.asked.keep:
                folder = self.asked.keep
                os.makedirs(folder, exist_ok=True)
            report = self._compared(folder)
        if self.asked.html:
            Path(self.asked.html).write_text(report.html(), encoding="utf-8")
        if self.asked.json == "-":
            print(report.to_json())
            return report.status
        if self.asked.json:
            Path(self.asked.json).write_text(report.to_json() + "\n", encoding="utf-8")
        print(report.text(), end="")
        return report.status

    def _compared(self, folder: str) -> Report:
        """The first step is recorded op by op, and then the first one where losses part or something is not finite."""
        step = self.asked.step or 0
        traces = self._traces(folder, step)
        try:
            rows = _compare.steps(traces["a"], traces["b"], self.asked.loss)
            later = next((r["step"] for r in rows if r["parted"] or not all(r["finite"].values())), step)
            if later != step and self.asked.step is None and len(self.runs) == 2:
                first = _compare.compare(traces["a"], traces["b"], self.asked.loss, runs_here)
                if Report(first).ok:
                    self._close(traces)
                    traces = self._traces(folder, later)
            return Report(_compare.compare(traces["a"], traces["b"], self.asked.loss, runs_here))
        finally:
            self._close(traces)

    def _traces(self, folder: str, step: int) -> dict[str, Trace]:
        traces: dict[str, Trace] = {}
        for s, on in self.sides.items():
            path = on
            if s in self.runs:
                path = os.path.join(folder, f"{s}.trace")
                self._record(s, path, step, traces["a"].path if "a" in traces else None)
            traces[s] = Trace(path)
        return traces

    @staticmethod
    def _close(traces: dict[str, Trace]) -> None:
        for trace in traces.values():
            trace.close()

    def _record(self, side: str, path: str, step: int, share: str | None) -> None:
        on = self.sides[side]
        print(f"diff: {side}, on {on}, step {step} op by op", file=sys.stderr, flush=True)
        argv = [sys.executable, "-m", "oxitorch.diff._child", "--on", on, "--trace", path, "--detail", str(step)]
        argv += ["--steps", str(max(self.asked.steps, step + 1)), "--seed", str(self.asked.seed)]
        argv += ["--share", share] if share else []
        script = [_EITHER.sub(lambda m: m[side], x) for x in self.script]
        # What the script prints is not the report.
        done = subprocess.run([*argv, "--", *script], stdout=sys.stderr, check=False)
        if done.returncode:
            raise RuntimeError(f"the script failed on {on}: exit status {done.returncode}")


def _known(platform: str) -> None:
    """A platform, or what looks like the name of a file that is not there."""
    if os.sep in platform or "." in platform:
        raise ValueError(f"there is no file {platform}")
    Platform(platform)


if __name__ == "__main__":
    sys.exit(main())
