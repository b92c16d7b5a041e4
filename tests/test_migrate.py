"""The commands of `docs/migrate.md`, as they stand there, on a script with the idioms of the page's."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PAGE = (REPO / "docs" / "migrate.md").read_text()
# A block of commands begins each line with `$`, and ends a command at the end of a line.
COMMAND = re.compile(r"^\$ (?P<program>oxitorch|python) (?P<rest>.*)$", re.M)


def commands() -> list[list[str]]:
    return [shlex.split(f"{c['program']} {c['rest']}", comments=True) for c in COMMAND.finditer(PAGE)]


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(REPO / "tests" / "migrate", tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__*"))
    return tmp_path


def run(command: list[str], folder: Path, environment) -> subprocess.CompletedProcess:
    program = {"oxitorch": [sys.executable, "-m", "oxitorch"], "python": [sys.executable]}[command[0]]
    env = environment(OXITORCH_PLATFORM="cpu")
    return subprocess.run([*program, *command[1:]], cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def test_the_audit_leaves_nothing_that_has_to_change(folder, environment):
    found = commands()
    assert [c[1] for c in found[:2]] == ["audit", "audit"] and found[1][-1] == "--fix"
    before = run([*found[0], "--json"], folder, environment)
    errors = [f for f in json.loads(before.stdout)["findings"] if f["severity"] == "error"]
    assert before.returncode == 1 and len(errors) > 10 and all(f["fixable"] for f in errors)
    assert run(found[1], folder, environment).returncode == 0
    mended = (folder / "train.py").read_text()
    assert not re.search(r"[\"'](cuda|nccl)|torch\.cuda\.", mended)
    compile(mended, "train.py", "exec")


@pytest.mark.slow
def test_the_commands_of_the_page_run(folder, environment):
    """Compares, compiles for a TPU and trains: most of it is compiling."""
    statuses = []
    for command in commands():
        done = run(command, folder, environment)
        statuses.append((command[1], done.returncode))
        assert done.returncode in (0, 1), done.stderr
    assert statuses == [
        ("audit", 1),
        ("audit", 0),
        ("diff", 0),
        ("preflight", 0),
        ("train.py", 0),
    ]
