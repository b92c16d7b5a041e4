"""What a traced function does besides computing, which later calls do not do again."""

import random
import sys
import weakref
from types import CodeType

from oxitorch._lines import instructions, is_library, user_frame, warn


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
        # Code of the user's that was run, and its globals.
        self._ran: list[tuple[weakref.ref[CodeType], dict]] = []

    def __enter__(self):
        self._random = _random_states()
        self._before = sys.getprofile()
        if self._before is None:
            sys.setprofile(self._profile)
        return self

    def __exit__(self, *_):
        if self._before is None:
            sys.setprofile(None)
        self._seen.clear()
        for name, state in _random_states().items():
            if state != self._random.get(name, state):
                self._draws(name)
        if self._said:
            lines = "\n".join(f"  {line}" for line in self._said)
            warn(f"torch.tpu.jit: {self._name} does this when it is traced, and not in later calls:\n{lines}")

    def _note(self, code: CodeType, scope: dict) -> None:
        # Dynamo lets go of what it makes with the code, and makes globals that hold tensors.
        module = sys.modules.get(scope.get("__name__", ""))
        if getattr(module, "__dict__", None) is scope:
            self._ran.append((weakref.ref(code), scope))

    def ran(self) -> list[tuple[CodeType, dict]]:
        return [(code, scope) for ref, scope in self._ran if (code := ref()) is not None]

    def _draws(self, name: str) -> None:
        code = [code for code, _ in self.ran()]
        lines = ((line, c) for c in code for step, line in instructions(c) if "random" in _names(step))
        where = next((f" at {line} in {c.co_name}" for line, c in lines), "")
        self.say(f"draws a random number of {name}{where}")

    def _profile(self, frame, event, arg):
        code = frame.f_code
        if event == "call":
            if code in self._seen:
                return
            self._seen.add(code)
            if not is_library(code.co_filename):
                self._note(code, frame.f_globals)
                self._look(code)
        elif event == "c_call" and arg is print and not is_library(code.co_filename):
            self.say(f"prints at {code.co_filename}:{frame.f_lineno}")

    def _look(self, code) -> None:
        for instruction, line in instructions(code):
            binds_cell = instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and (
                instruction.argval in code.co_freevars
            )
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or binds_cell:
                self.say(f"binds {instruction.argval} at {line}")

    def say(self, what: str) -> None:
        if what not in self._said:
            self._said.append(what)


def _names(step) -> tuple:
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _random_states() -> dict[str, object]:
    """Of generators of the host of which a function may draw what Python computes with."""
    states = {"Python's": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kind, key, *rest = numpy.get_state()
        states["numpy's"] = kind, key.tobytes(), *rest
    return states
