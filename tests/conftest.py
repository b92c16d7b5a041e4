"""Shared by all tests: the repository, and running a piece of Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


def child_environment(**changes: str | None) -> dict[str, str]:
    """The environment without the settings of whoever runs the tests; None removes a variable."""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("OXITORCH_", "TORCH_DEVICE_BACKEND")) and k != "CXX"
    }
    for name, value in changes.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


@pytest.fixture
def python():
    """`python("print(1)", NAME="value")` runs code in a child and returns the finished process with its text output."""

    def run(code: str, *args: str, check: bool = True, timeout: float = 120, **env: str | None):
        argv = [sys.executable, *(["-c", code] if code else []), *args]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout, env=child_environment(**env), cwd="/"
        )
        if check:
            assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the source tree."""
    return REPO
