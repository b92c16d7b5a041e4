"""`python -m oxitorch.diff`, which is what `oxitorch diff` starts: a script on two platforms, or two recorded files."""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from oxitorch.diff import _child, _compare, _process
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
        for s, on in self.sides.items():
            if s in self.runs:
                _known(on)
            elif not asked.record:
                Trace(on).close()  # what cannot be read is said before anything runs
        if self.runs and not self.script:
            names = " and ".join(f"--{s} {self.sides[s]}" for s in self.runs)
            raise ValueError(f"there is no script to run for {names}\nhint: two recorded files need none")
        if asked.steps < 1:
            raise ValueError(f"--steps {asked.steps}: at least one step is run")

    def run(self) -> int:
        if self.asked.record:
            self._record("a", self.asked.record, self.asked.step or 0, None)
            return 0
        folder = tempfile.mkdtemp(prefix="oxitorch-")
        try:
            report = self._compared(folder)
        finally:
            shutil.rmtree(folder)
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
        kept = self.asked.keep or folder
        os.makedirs(kept, exist_ok=True)
        step = self.asked.step or 0
        report, later = self._round(kept, folder, step)
        if later not in (None, step) and self.asked.step is None and len(self.runs) == 2 and report.ok:
            report, _ = self._round(kept, folder, later)
        return report

    def _round(self, kept: str, folder: str, step: int) -> tuple[Report, int | None]:
        """Both runs and their comparison, and the first step to look at."""
        files = dict(self.sides)
        for s in self.runs:
            files[s] = os.path.join(kept, f"{s}.trace")
            self._record(s, files[s], step, files["a"] if s == "b" else None)
        found = os.path.join(folder, "found.json")
        if status := _process.run(lambda: _found(files["a"], files["b"], self.asked.loss, found)):
            raise RuntimeError(f"the comparison of the runs ended with status {status}")
        with open(found, encoding="utf-8") as f:
            answer = json.load(f)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return Report(answer["found"]), answer["later"]

    def _record(self, side: str, path: str, step: int, share: str | None) -> None:
        on = self.sides[side]
        print(f"diff: {side}, on {on}, step {step} op by op", file=sys.stderr, flush=True)
        script = [_EITHER.sub(lambda m: m[side], x) for x in self.script]
        steps = max(self.asked.steps, step + 1)
        recorded = (script, Platform(on), path, step, steps, self.asked.seed, share)
        if status := _process.run(lambda: _child.record(*recorded)):
            raise RuntimeError(f"the script failed on {on}: exit status {status}")


def _found(a: str, b: str, loss: float, path: str) -> int:
    """Compares two files, and writes what is found and the first step that is worth to be recorded op by op."""
    try:
        left, right = Trace(a), Trace(b)
        rows = _compare.steps(left, right, loss)
        later = next((r["step"] for r in rows if r["parted"] or not all(r["finite"].values())), None)
        answer = {"found": _compare.compare(left, right, loss, runs_here), "later": later}
    except (ValueError, RuntimeError, OSError) as e:
        answer = {"error": str(e)}
    with open(path, "w", encoding="utf-8") as f:
        json.dump(answer, f)
    return 0


def _known(platform: str) -> None:
    """A platform, or what looks like the name of a file that is not there."""
    if os.sep in platform or "." in platform:
        raise ValueError(f"there is no file {platform}")
    Platform(platform)


if __name__ == "__main__":
    sys.exit(main())
