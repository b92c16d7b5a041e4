"""Which lines of Python are a user's: they run in neither PyTorch, oxitorch nor another library."""

import dis
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

_LIBRARIES = (
    *(
        os.path.join(folder, "")
        for folder in (
            os.path.dirname(torch.__file__),
            os.path.dirname(os.path.abspath(__file__)),
            sysconfig.get_paths()["stdlib"],
        )
    ),
    "<frozen",
    "<eval_with_key>",
)


def is_library(name: str) -> bool:
    """Whether a file, or what a code object names as its file, is a library's."""
    return name.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in name


def instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, str]]:
    """Those of a code object, with their lines: `file.py:12`."""
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        position = getattr(step, "positions", None)
        if position is not None and position.lineno is not None:
            line = position.lineno
        elif isinstance(step.starts_line, int) and not isinstance(step.starts_line, bool):
            line = step.starts_line
        yield step, f"{code.co_filename}:{line}"


def user_frame() -> FrameType | None:
    """The innermost frame of the running thread that is a user's."""
    frame = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def warn(message: str) -> None:
    """A warning that points at the innermost line of the user's that runs, through however many of ours it comes."""
    frame = user_frame()
    if frame is None:
        warnings.warn(message, stacklevel=2)
        return
    scope = frame.f_globals
    # As `warnings.warn` does it, which counts frames.
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=scope.get("__name__", "<unknown>"),
        registry=scope.setdefault("__warningregistry__", {}),
    )
