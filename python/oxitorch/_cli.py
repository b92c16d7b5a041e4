"""The `oxitorch` command. The command itself is Rust (crates/cli); this hands it what only Python knows."""

import json
import os
import platform
import sys

from oxitorch import _env


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:2] == ["shim", "build"]:
        return _shim_build(argv[2:])
    from oxitorch import _core

    os.environ["OXITORCH_CLI_FACTS"] = json.dumps(facts())
    return _core.run_cli(["oxitorch", *argv])


def facts() -> dict:
    """What the command line needs to know about this interpreter; torch is looked for and not imported."""
    from oxitorch import _activate, _shim

    torch = _shim.find_torch()
    out = {
        "executable": sys.executable,
        "python": platform.python_version(),
        "prefix": sys.prefix,
        "venv": sys.prefix != sys.base_prefix,
        "site_dirs": _activate.site_dirs(),
        "cache_dir": _env.cache_dir(),
        "torch": None if torch is None else {"version": torch.version, "root": str(torch.root)},
        "env": [
            {"name": v.name, "values": v.values(), "default": v.default, "since": v.since, "doc": v.doc, "error": _error(v)}
            for v in _env.TABLE
        ],
        "env_foreign": [{"name": name, "doc": doc} for name, doc in _env.FOREIGN],
    }
    if torch is not None:
        out["shim"] = _shim.state(torch)
    try:
        out["compiler"] = _shim.find_compiler()
    except _shim.ShimError as e:
        out["compiler_error"] = str(e)
    return out


def _error(var: _env.Var) -> str | None:
    try:
        var.read()
    except ValueError as e:
        return str(e)
    return None


_SHIM_BUILD_HELP = """\
Build the C++ shim for the installed torch

Usage: oxitorch shim build [--into DIR]

Options:
      --into DIR  The folder to write shim-<torch minor>-<sources>.so to [default: the cache folder]
  -h, --help      Print help
"""


def _shim_build(argv: list[str]) -> int:
    from pathlib import Path

    from oxitorch import _shim

    if argv in (["-h"], ["--help"]):
        print(_SHIM_BUILD_HELP, end="")
        return 0
    if argv and (argv[0] != "--into" or len(argv) != 2):
        print(f"error: unexpected argument: {' '.join(argv)}\n\n{_SHIM_BUILD_HELP}", end="", file=sys.stderr)
        return 2
    torch = _shim.find_torch()
    if torch is None:
        print("error: torch is not installed for this Python\nhint: pip install torch", file=sys.stderr)
        return 1
    try:
        path = _shim.build(torch, Path(argv[1]) if argv else None)
    except (_shim.ShimError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(path)
    return 0
