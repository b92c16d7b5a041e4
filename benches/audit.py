"""How fast `oxitorch audit` reads: all of PyTorch's own package, and all that is installed beside it.

    python benches/audit.py

Prints lines for each second, by the clock and by processor time, and the largest resident memory.
"""

import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Not imported, as the memory of a child is counted from that of who starts it.
PACKAGE = Path(importlib.util.find_spec("torch").origin).parent
ROUNDS = 3


def read(paths: list[Path]) -> dict[str, float]:
    """Lines, files and findings of an audit, its seconds by the clock and of the processor, and its MiB."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        argv = [
            sys.executable,
            "-m",
            "oxitorch",
            "audit",
            f"--json={report}",
            "--summary",
            "--fail-on",
            "never",
            *paths,
        ]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        clock, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        said = json.loads(report.read_text())
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = len(said["findings"])
    return {
        "files": said["files"],
        "lines": said["lines"],
        "findings": found,
        "clock_s": clock,
        "processor_s": processor,
        "mib": after.ru_maxrss / 1024,
    }


def main() -> None:
    beside = [p for p in PACKAGE.parent.iterdir() if p.is_dir() and not p.name.endswith(("-info", "__pycache__"))]
    for name, paths in (("torch", [PACKAGE]), ("site-packages", beside)):
        # The first reads the disk, which is not what is measured.
        _, *rounds = (read(paths) for _ in range(1 + ROUNDS))
        r = min(rounds, key=lambda r: r["clock_s"])
        print(
            f"{name}: {r['files']} files, {r['lines']} lines, {r['findings']} findings;"
            f" {r['clock_s']:.2f} s, {r['processor_s']:.2f} s of the processor, {r['mib']:.0f} MiB;"
            f" {r['lines'] / r['clock_s']:,.0f} lines a second, {r['lines'] / r['processor_s']:,.0f} for one core"
        )


if __name__ == "__main__":
    main()
