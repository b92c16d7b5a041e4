"""What `oxitorch diff` costs, against the slower of the two runs that it compares.

    python benches/diff.py             # 20 steps of the GPT and of the ResNet in examples/
    python benches/diff.py --steps 10

Each run alone is the script in a process of its own that ends after so many steps, as `oxitorch diff` ends it. The
ratio is of seconds of the processor, of a process and all that it started, since those of the clock depend on what else
runs; the first round fills the cache of compiled programs and is not counted.
"""

import argparse
import json
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DEVICES = ("cpu", "tpu")


def timed(argv: list[str], folder: str) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    clock, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def alone(steps: int, script: str, *args: str) -> None:
    """Runs a script up to so many steps of an optimizer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    left = iter(range(steps - 1))

    def count(*_):
        if next(left, None) is None:
            sys.exit(0)

    register_optimizer_step_post_hook(count)
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


def measure(script: str, steps: int, rounds: int, folder: str) -> dict:
    of_script = [str(EXAMPLES / script), "--steps", str(max(100, steps)), "--device"]
    commands = {d: [sys.executable, __file__, "--alone", str(steps), *of_script, d] for d in DEVICES}
    commands["diff"] = [sys.executable, "-m", "oxitorch", "diff", *of_script, "{device}", "--a", "cpu", "--b", "tpu"]
    commands["diff"] += ["--steps", str(steps), "--json", "report.json"]
    times: dict[str, list] = {name: [] for name in commands}
    for _ in range(rounds + 1):
        for name, argv in commands.items():
            times[name].append(timed(argv, folder))
    best = {name: min(t[1] for t in those[1:]) for name, those in times.items()}
    report = json.loads((Path(folder) / "report.json").read_text())
    slower = max(DEVICES, key=best.get)
    return {
        "script": script,
        "steps": steps,
        "processor_s": {name: round(s, 2) for name, s in best.items()},
        "clock_s": {name: round(min(t[0] for t in those[1:]), 2) for name, those in times.items()},
        "ratio": round(best["diff"] / best[slower], 2),
        "operations": sum(report["counts"].values()),
    }


def main() -> None:
    if sys.argv[1:2] == ["--alone"]:
        alone(int(sys.argv[2]), *sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    for script in ("charlm.py", "digits.py"):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(script, asked.steps, asked.rounds, folder)), flush=True)


if __name__ == "__main__":
    main()
