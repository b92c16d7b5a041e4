"""Operands that do not fit give a value or an error of Python: no call of the op table ends the process, panics or hangs."""

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.tpu.platform() == "cuda", reason="CUDA does not start where memory is limited")

# Goldens of which some calls are made, and how many of each; all of them take long.
FIRST, STEP, EACH = 7, 41, 2
PARTS = 16
# What a panic becomes at the door to Python.
PANIC = "oxitorch has a bug"


def check(python, timeout, *which):
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import unfit; unfit.main(*{which})"
    made = python(code, check=False, timeout=timeout)
    lines = made.stdout.splitlines()
    assert made.returncode == 0, f"{lines[-1] if lines else 'the start'}\n{made.stderr[-2000:]}"
    panicked = [pair for pair in zip(lines[::2], lines[1::2], strict=True) if PANIC in pair[1]]
    assert lines and not panicked, "\n".join(map("\n".join, panicked))


def test_some_calls(python):
    check(python, 120, FIRST, STEP, EACH)


def test_kernels_of_the_cpu_that_read_beyond_operands(python):
    """These have rows, which check what the kernels do not."""
    check(python, 120, 0, 1, 8, "_for_cpu")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_calls(python, part):
    check(python, 3600, part, PARTS, 8)
