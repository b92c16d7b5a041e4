"""The environment variables of oxitorch, each declared in exactly one row.

`docs/environment.md` and `oxitorch env` are made from this table. Only Python (here) and the command line read the
environment; everything below takes values.
"""

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Var:
    """One environment variable.

    kind is one of: "choice" (one of `choices`), "int" (at least `minimum`), "bool" (0 or 1), "path", "text".
    """

    name: str
    kind: str
    default: str
    since: str
    doc: str
    choices: tuple[str, ...] = ()
    minimum: int = 0

    def read(self, environ=os.environ) -> Any:
        """The parsed value, or None where the variable is unset or empty; ValueError names the variable otherwise."""
        text = environ.get(self.name, "").strip()
        if not text:
            return None
        if self.kind == "choice":
            if text.lower() not in self.choices:
                raise ValueError(f"{self.name}={text}: expected one of {', '.join(self.choices)}")
            return text.lower()
        if self.kind == "int":
            if not text.isdecimal() or int(text) < self.minimum:
                raise ValueError(f"{self.name}={text}: expected a whole number of at least {self.minimum}")
            return int(text)
        if self.kind == "bool":
            known = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
            if text.lower() not in known:
                raise ValueError(f"{self.name}={text}: expected 0 or 1")
            return known[text.lower()]
        return text

    def values(self) -> str:
        """What may be assigned, for people."""
        return {
            "choice": ", ".join(f"`{c}`" for c in self.choices),
            "int": f"a whole number, at least {self.minimum}",
            "bool": "`0` or `1`",
            "path": "a path",
            "text": "text",
        }[self.kind]


PLATFORM = Var(
    "OXITORCH_PLATFORM",
    "choice",
    "the first of tpu, cuda, cpu that has a device",
    "0.1",
    "Which PJRT plugin runs the work. The device is called `tpu` on all of them.",
    choices=("cpu", "cuda", "tpu"),
)
CPU_DEVICES = Var(
    "OXITORCH_CPU_DEVICES",
    "int",
    "1",
    "0.1",
    "How many virtual devices the cpu platform shows, to try multi-device programs on one machine.",
    minimum=1,
)
EAGER_MODE = Var(
    "OXITORCH_EAGER_MODE",
    "choice",
    "strict",
    "0.1",
    "The eager mode a process starts in; `torch.tpu.eager_mode` changes it later.",
    choices=("strict", "debug"),
)
FALLBACK = Var(
    "OXITORCH_FALLBACK",
    "choice",
    "warn",
    "0.1",
    "What happens at an op that has no lowering: `warn` runs it on the CPU, warns once per op and counts it in "
    "`torch.tpu.metrics()`; `error` raises.",
    choices=("warn", "error"),
)
NAN_TRAP = Var(
    "OXITORCH_NAN_TRAP",
    "bool",
    "0",
    "0.1",
    "In debug mode, raise at the first op whose result holds a NaN or an infinity that its inputs did not hold.",
)
COMPILE_THREADS = Var(
    "OXITORCH_COMPILE_THREADS",
    "int",
    "as many as there are cores",
    "0.1",
    "How many programs may be compiled at the same time.",
    minimum=1,
)
SHIM = Var(
    "OXITORCH_SHIM",
    "path",
    "the package, then the cache folder, then a build",
    "0.1",
    "A shim library to load instead of searching or building one (`oxitorch shim build` makes them).",
)
CACHE_DIR = Var(
    "OXITORCH_CACHE_DIR",
    "path",
    "`$XDG_CACHE_HOME/oxitorch`, else `~/.cache/oxitorch`",
    "0.1",
    "The folder that holds built shims.",
)

TABLE: tuple[Var, ...] = (
    PLATFORM,
    CPU_DEVICES,
    EAGER_MODE,
    FALLBACK,
    NAN_TRAP,
    COMPILE_THREADS,
    SHIM,
    CACHE_DIR,
)

# Read by oxitorch, defined by somebody else.
FOREIGN: tuple[tuple[str, str], ...] = (
    (
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "PyTorch's: `0` keeps `import torch` from loading oxitorch; `import oxitorch` after it still does.",
    ),
    ("CXX", "The C++ compiler that builds the shim; default `g++`, then `c++`, then `clang++`."),
    ("XDG_CACHE_HOME", "The parent of the cache folder; default `~/.cache`."),
)


def cache_dir() -> str:
    """The folder for files that can be made again."""
    chosen = CACHE_DIR.read()
    if chosen:
        return os.path.expanduser(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "oxitorch")


def core_config() -> dict[str, Any]:
    """What the environment says, as the core takes it (without the shim and the site folders)."""
    return {
        "platform": PLATFORM.read(),
        "cpu_devices": CPU_DEVICES.read(),
        "eager_mode": EAGER_MODE.read() or "strict",
        "fallback": FALLBACK.read() or "warn",
        "nan_trap": NAN_TRAP.read() or False,
        "compile_threads": COMPILE_THREADS.read(),
    }


def markdown() -> str:
    """`docs/environment.md`."""
    out = [
        "<!-- generated by `python -m oxitorch._env`; edit python/oxitorch/_env.py -->",
        "# Environment variables",
        "",
        "They are read once, when the device is registered with PyTorch.",
        "A value that cannot be understood is an error that names the variable, not a default.",
        "`oxitorch env` prints this table with the values of the current shell.",
        "",
    ]
    for v in TABLE:
        out += [
            f"## `{v.name}`",
            "",
            v.doc,
            "",
            f"- values: {v.values()}",
            f"- default: {v.default}",
            f"- since: {v.since}",
            "",
        ]
    out += ["## Variables of others that oxitorch reads", ""]
    out += [f"- `{name}`: {doc}" for name, doc in FOREIGN]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
