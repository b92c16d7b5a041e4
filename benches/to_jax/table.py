"""Translates the training scripts beside this file and the architectures of `tests/to_jax_zoo.py`, and runs them.

usage: python benches/to_jax/table.py [--jobs N] [--only KIND ...] [--page docs/to-jax.md] [--rows FILE]

Prints a line of JSON for each, with the differences between PyTorch and JAX and the processor's seconds; `--rows` reads
such lines instead of running anything. `--page` writes the tables of the page anew, with the commit. Kinds: `files`,
`own`, `timm`, `transformers`, and `speed`, a GPT of 24 layers.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests"))
KINDS = ("files", "own", "timm", "transformers", "speed")
SCRIPTS = {"mlp.py": "model", "convnet.py": "ConvNet", "gpt.py": "GPT", "lstm.py": "CharLSTM"}
COLUMNS = ("forward", "gradients", "steps")


def prepared(kind, name):
    """What `to_jax.convert` takes of one of a kind."""
    import to_jax_zoo

    if kind == "files":
        from oxitorch.to_jax.__main__ import load, parts

        return parts(load(str(HERE / name))[0], SCRIPTS[name])[0]
    if kind == "speed":
        made = to_jax_zoo.GPT(vocab=1024, n_embd=128, n_layer=24, block_size=64)
        return {"model": made, "args": (to_jax_zoo.ids(1024, 1, 32),)}
    return to_jax_zoo.prepared(kind, name)


def names(kind):
    import to_jax_zoo

    if kind == "files":
        return list(SCRIPTS)
    if kind == "speed":
        return ["GPT of 24 layers"]
    return list(to_jax_zoo.ZOO if kind == "own" else to_jax_zoo.wide(kind))


def processor_s():
    """Seconds of the processor that this process and its children have had; other work hardly disturbs them."""
    return sum(os.times()[:4])


def one(kind, name):
    """Translates and runs one; its row."""
    import torch
    from oxitorch import to_jax

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        options, seconds = prepared(kind, name), {}
        for run in (False, True) if kind == "speed" else (True,):
            start = processor_s()
            result = to_jax.convert(**options, folder=Path(folder) / f"run_{run}", run=run)
            seconds["in all" if run else "without the run"] = processor_s() - start
    for problem in [*result.problems, *result.notes, *filter(None, [result.error])]:
        print(f"  {name}: {problem}", file=sys.stderr)
    return {"kind": kind, "name": name, "status": result.status, "seconds": seconds, **result.differences}


def shown(row):
    cells = [f"{row[c]:.1e}" if c in row else "" for c in COLUMNS]
    return f"| {row['kind']} | {row['name']} | {' | '.join(cells)} | {row['status']} |"


def table(rows):
    head = "| from | architecture | forward | gradients | three steps | status |\n|---|---|---|---|---|---|"
    return "\n".join([head, *map(shown, rows)])


def paragraphs(rows):
    """The parts of the page, by their names."""
    good = [r for r in rows if r["status"] == "converted"]
    of = {k: [r for r in rows if r["kind"] == k] for k in KINDS}
    count = {k: sum(r["status"] == "converted" for r in of[k]) for k in KINDS}
    files = "\n".join(
        [
            f"{count['files']} of {len(of['files'])} files are converted, which means that they were run.",
            "",
            "| file | forward | gradients | three steps | status |\n|---|---|---|---|---|",
            *(shown(r).replace("| files ", "", 1) for r in of["files"]),
        ]
    )
    zoo = [r for r in rows if r["kind"] in ("own", "timm", "transformers")]
    libraries = count["timm"] + count["transformers"]
    total = sum(r in good for r in zoo)
    said = f"{total} of {len(zoo)} are converted: {count['own']} of our own, and {libraries} of timm and transformers."
    return {"files": files, "architectures": f"{said}\n\n{table(zoo)}"}


def head():
    """The commit that is measured."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def write(page, commit, rows):
    text = page.read_text()
    for name, new in paragraphs(rows).items():
        first, last = f"<!-- written by benches/to_jax/table.py: {name} -->", "<!-- end -->"
        before, rest = text.split(first)
        section = before.rfind("<!-- measured: ")
        before = before[:section] + re.sub(r"(?<=measured: )\w+", commit, before[section:], count=1)
        text = f"{before}{first}\n\n{new}\n\n{last}{rest.split(last, 1)[1]}"
    page.write_text(text)


def measured(kinds, jobs):
    """The rows of a run, each as soon as it is there."""
    todo = [(kind, name) for kind in kinds for name in names(kind)]
    # Processes have this one's modules, as libraries are slow to import.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(one, *zip(*todo, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="how many are run at a time")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--page", type=Path, help="the page whose tables are written")
    parser.add_argument("--rows", type=Path, help="what an earlier run printed, which is shown instead of a new one")
    args = parser.parse_args()
    if args.rows:
        commit, *rows = map(json.loads, args.rows.read_text().splitlines())
    else:
        commit, rows = {"commit": head()}, []
        print(json.dumps(commit), flush=True)
        for row in measured(args.only, args.jobs):
            print(json.dumps(row), flush=True)
            rows.append(row)
    if args.page:
        write(args.page, commit["commit"], rows)


if __name__ == "__main__":
    main()
