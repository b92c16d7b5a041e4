"""What a traced function does besides computing, which later calls do not do again."""

import sys
import warnings

from oxitorch._lines import instructions, is_library, user_frame


def user_line() -> str | None:
    """The innermost line that runs in neither PyTorch nor oxitorch: `file.py:12 in function`."""
    frame = user_frame()
    return frame and f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class Effects:
    """While a function is traced: warns about what it prints, and about global names that it binds."""

    def __init__(self, name: str):
        self._name = name
        self._seen: set = set()
        self._said: list[str] = []

    def __enter__(self):
        self._before = sys.getprofile()
        if self._before is None:
            sys.setprofile(self._profile)
        return self

    def __exit__(self, *_):
        if self._before is None:
            sys.setprofile(None)
        if self._said:
            lines = "\n".join(f"  {line}" for line in self._said)
            warnings.warn(
                f"torch.tpu.jit: {self._name} does this when it is traced, and not in later calls:\n{lines}",
                stacklevel=6,
            )

    def _profile(self, frame, event, arg):
        code = frame.f_code
        if event == "call":
            if code in self._seen:
                return
            self._seen.add(code)
            if not is_library(code.co_filename):
                self._look(code)
        elif event == "c_call" and arg is print and not is_library(code.co_filename):
            self._say(f"prints at {code.co_filename}:{frame.f_lineno}")

    def _look(self, code) -> None:
        for instruction, line in instructions(code):
            binds_cell = instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and (
                instruction.argval in code.co_freevars
            )
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or binds_cell:
                self._say(f"binds {instruction.argval} at {line}")

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.append(what)
