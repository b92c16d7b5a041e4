"""What PyTorch's own code asks of values on the host only to raise an error (`if torch.any(var < 0): raise ...`): the
program asserts it.
"""

import ast
import linecache
import os
import sys
from functools import lru_cache
from typing import NamedTuple

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
# What hands operations on to modes, and Dynamo's wrapper of what it does not look at.
_BETWEEN = tuple(
    os.path.join(_TORCH, *parts)
    for parts in (
        ("overrides.py",),
        ("_ops.py",),
        ("_compile.py",),
        ("utils", "_python_dispatch.py"),
        ("_dynamo", "eval_frame.py"),
    )
)
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Check(NamedTuple):
    """A value that raises an error, and what that says."""

    raises_if: bool
    message: str


def check_here() -> Check | None:
    """The check of PyTorch's for which it reads a value now, if it does nothing else with it."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, *_BETWEEN)):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(_TORCH):
        return None
    for node in _raising(frame.f_code.co_filename):
        if node.lineno <= frame.f_lineno <= node.test.end_lineno:
            return _check(node, frame)
    return None


def _check(node: ast.If, frame) -> Check | None:
    test = node.test
    if isinstance(test, ast.BoolOp):
        # Its last operand is asked if the others leave it open; these must be no tensors themselves.
        *before, test = test.values
        if not all(isinstance(x, ast.Name) and isinstance(frame.f_locals.get(x.id), bool) for x in before):
            return None
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    asked = test.operand if negated else test
    positions = getattr(frame.f_code, "co_positions", None)  # Python 3.10 has none
    place = list(positions())[frame.f_lasti // 2] if positions else _span(asked)
    # The jump stands where the statement does, or where its condition does.
    if place not in map(_span, (asked, test, node.test, node)):
        return None
    return Check(not negated, _message(node.body[0]))


def _span(node: ast.AST) -> tuple:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


@lru_cache(64)
def _raising(file: str) -> list[ast.If]:
    """The conditions of a file that raise and do nothing else."""
    tree = ast.parse("".join(linecache.getlines(file)) or "")
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.If) and not n.orelse)
    return [n for n in nodes if len(n.body) == 1 and isinstance(n.body[0], ast.Raise)]


def _message(node: ast.Raise) -> str:
    """What the error says, as far as the source has it."""
    args = node.exc.args if isinstance(node.exc, ast.Call) else []
    parts = args[0].values if args and isinstance(args[0], ast.JoinedStr) else args[:1]
    text = "".join(p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else "..." for p in parts)
    return text or "a check of PyTorch's failed"
