"""The `oxitorch` command. The command itself is Rust (crates/cli); this hands it what only Python knows."""

import contextlib
import json
import os
import platform
import shutil
import signal
import sys
from pathlib import Path

from oxitorch import _env, _shim


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["shim", "build"]:
        return _shim_build(None)
    if argv[:3] == ["shim", "build", "--into"] and len(argv) == 4:
        return _shim_build(Path(argv[3]))
    from oxitorch import _core

    os.environ["OXITORCH_CLI_FACTS"] = json.dumps(facts())
    if argv[:1] in (["aot"], ["selftest"]):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a compiler does not listen; a test ends with its child
    if argv[:1] in (["trace"], ["graphs"], ["cache"], ["preflight"], ["diff"], ["to-jax"]):
        # Ctrl-C is for the script that these may run; they end after it, with what it left.
        signal.signal(signal.SIGINT, lambda *_: None)
    return _core.run_cli(["oxitorch", *argv])


def facts() -> dict:
    """What the command line needs to know about this interpreter; torch is looked for and not imported."""
    torch = _shim.find_torch()
    cache = _env.cache_dir()
    out = {
        "executable": sys.executable,
        "python": platform.python_version(),
        "virtual_environment": sys.prefix if sys.prefix != sys.base_prefix else None,
        "package": str(Path(__file__).parent),
        "site_dirs": _env.site_dirs(),
        "cache_dir": cache,
        "programs": _programs(),
        "ranks": _env.ranks_folder(),
        "disk_free_bytes": _free_bytes(Path(cache)),
        "torch": None if torch is None else {"version": torch.version, "root": str(torch.root)},
        "shim": None,
        "compiler": None,
        "compiler_error": None,
        "env": [_variable(v) for v in _env.TABLE],
        "env_foreign": [{"name": name, "doc": doc, "value": os.environ.get(name)} for name, doc in _env.FOREIGN],
    }
    if torch is not None:
        try:
            out["shim"] = _shim.state(torch)
        except ImportError as e:
            out["shim"] = {"where": "unknown", "path": "", "error": str(e)}
    try:
        out["compiler"] = _shim.find_compiler()
    except _shim.ShimError as e:
        out["compiler_error"] = str(e)
    return out


def _programs() -> dict:
    """Settings of the cache of compiled programs; a wrong value is the default here, and `doctor` and `env` name it."""
    with contextlib.suppress(ValueError):
        config = _env.core_config()
        on = config["cache_dir"] is not None
        return {"on": on, "bytes": config["cache_bytes"], "shared": config["cache_shared"]}
    return {"on": True, "bytes": None, "shared": None}


def _variable(v: _env.Var) -> dict:
    out = {"name": v.name, "doc": v.doc, "values": v.values(), "default": v.default, "since": v.since}
    try:
        v.read()
        error = None
    except ValueError as e:
        error = str(e)
    return {**out, "value": os.environ.get(v.name), "error": error}


def _free_bytes(folder: Path) -> int | None:
    """Free space where the cache is or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _shim_build(into: Path | None) -> int:
    torch = _shim.find_torch()
    if torch is None:
        print("error: torch is not installed for this Python\nhint: pip install torch", file=sys.stderr)
        return 1
    try:
        print(_shim.build(torch, into))
    except (_shim.ShimError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # For `oxitorch doctor --python OTHER`.
    print(json.dumps(facts()))
