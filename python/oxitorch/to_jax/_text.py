"""Pieces of Python text: how closely they bind, and literals that may differ between instances of a class."""

from __future__ import annotations

import ast
import functools
import keyword
import math
import re
from typing import Any

import numpy as np
import torch

# A literal within a text, with what it is for: "\x01hint|repr\x02".
LITERAL = re.compile("\x01([^|\x01]*)\\|([^\x02]*)\x02")

ATOM = 20
BINDS = {
    ast.BitOr: 5, ast.BitXor: 6, ast.BitAnd: 7, ast.LShift: 8, ast.RShift: 8, ast.Add: 9, ast.Sub: 9, ast.Mult: 10,
    ast.Div: 10, ast.FloorDiv: 10, ast.Mod: 10, ast.MatMult: 10, ast.Pow: 13,
}  # fmt: skip
OPERATORS = {
    "|": 5, "^": 6, "&": 7, "<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "//": 10, "%": 10, "@": 10, "**": 13,
    "==": 4, "!=": 4, "<": 4, "<=": 4, ">": 4, ">=": 4,
}  # fmt: skip


def literal(hint: str, value: Any) -> str:
    return f"\x01{hint}|{constant(value)}\x02"


def constant(x: Any) -> str:
    """A Python constant as text."""
    if isinstance(x, float) and not math.isfinite(x):
        return {"inf": "jnp.inf", "-inf": "-jnp.inf", "nan": "jnp.nan"}[str(x)]
    if isinstance(x, float) and x.is_integer() and abs(x) >= 1e16:
        return repr(x)
    if isinstance(x, tuple):
        return "(" + ", ".join(constant(y) for y in x) + ("," if len(x) == 1 else "") + ")"
    if isinstance(x, torch.dtype):
        return dtype(x)
    return repr(x)


def shortest(x: Any, d: torch.dtype) -> Any:
    """Numbers of a tensor, as `tolist` gives them, with no more digits than its dtype tells apart."""
    if isinstance(x, list):
        return [shortest(y, d) for y in x]
    narrow = d in (torch.float32, torch.bfloat16, torch.float16)
    return float(str(np.float32(x))) if narrow else x


def plain(text: str) -> str:
    """The text with its literals written out."""
    return LITERAL.sub(lambda m: m[2], text)


def binding(text: str) -> int:
    return _binding(plain(text))


@functools.cache
def _binding(text: str) -> int:
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return 0
    if isinstance(node, ast.BinOp):
        return BINDS[type(node.op)]
    if isinstance(node, ast.UnaryOp):
        return 11 if not isinstance(node.op, ast.Not) else 3
    if isinstance(node, ast.Compare):
        return 4
    if isinstance(node, ast.Tuple):
        return ATOM if text.startswith("(") else 0
    if isinstance(node, ast.Lambda | ast.IfExp | ast.BoolOp):
        return 1
    return ATOM


def bind(text: str, least: int) -> str:
    """The text, in parentheses if it binds less closely."""
    return text if binding(text) >= least else f"({text})"


DTYPES = {
    torch.float32: "jnp.float32", torch.float64: "jnp.float32", torch.float16: "jnp.float16",
    torch.bfloat16: "jnp.bfloat16", torch.int64: "jnp.int32", torch.int32: "jnp.int32", torch.int16: "jnp.int16",
    torch.int8: "jnp.int8", torch.uint8: "jnp.uint8", torch.bool: "jnp.bool_", torch.complex64: "jnp.complex64",
    torch.complex128: "jnp.complex64",
}  # fmt: skip


def dtype(d: torch.dtype) -> str:
    """JAX's dtype; 64 bits are 32 there, unless it is told otherwise."""
    return DTYPES.get(d, f"jnp.{str(d).removeprefix('torch.')}")


def identifier(name: str) -> str:
    """A name that is none of Python's nor of flax's."""
    taken = {"train", "eval", "sow", "perturb", "set_attributes", "set_mode", "iter_modules", "iter_children", "rngs"}
    name = re.sub(r"\W", "_", name)
    name = f"_{name}" if name[:1].isdigit() else name
    return name + "_" if keyword.iskeyword(name) or name in taken or name in {"jax", "jnp", "nnx", "self"} else name
