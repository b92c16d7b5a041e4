"""`oxitorch selftest`: what works on the hardware that is there, how fast it is, and how far off preflight was.

The command (crates/cli) runs this package as a child, since a plugin may abort or hang: the child writes a line of JSON
before and after each check, and is started again behind one that ended it. `docs/selftest.md` is for users.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Skip(Exception):
    """This check says nothing here; the text is the reason."""


@dataclass
class Found:
    """What a check that passed has to say: a line for people, and numbers for programs (units are in their names)."""

    text: str
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One question. It fails by raising."""

    name: str
    run: Callable[[], Found]
    quick: bool
    limit_s: int


CHECKS: list[Check] = []


def check(name: str, *, quick: bool = True, limit_s: int = 120) -> Callable[[Callable[[], Found]], Callable[[], Found]]:
    """Puts a function among the checks. `quick`: also with `--quick`. After `limit_s` seconds it counts as hanging."""

    def put(run):
        CHECKS.append(Check(name, run, quick, limit_s))
        return run

    return put
