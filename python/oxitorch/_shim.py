"""Finds, or builds once, the C++ shim that fits the installed torch.

The shim is the only C++ in oxitorch: it registers the Rust core's kernels with PyTorch. A binary fits one
torch minor version, so it is looked for in this order: `OXITORCH_SHIM`, the package (`oxitorch/lib`, filled when torch
was there at install time), the user's cache folder; if none is there it is built into the cache folder with g++.
This module does not import torch.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from oxitorch import _env

_COMPILERS = ("g++", "c++", "clang++")
_LOG_LINES = 25


class ShimError(RuntimeError):
    """No shim for this torch: not found and not buildable. The message says what to do."""


@dataclass(frozen=True)
class Torch:
    """An installed torch: its full version ("2.15.0+cu132") and its folder."""

    version: str
    root: Path

    @property
    def minor(self) -> str:
        return ".".join(self.version.split("+")[0].split(".")[:2])


def find_torch() -> Torch | None:
    """The torch that this interpreter would import, found without importing it; None where there is none."""
    loaded = sys.modules.get("torch")
    if loaded is not None and getattr(loaded, "__file__", None):
        return Torch(str(loaded.__version__), Path(loaded.__file__).parent)
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0])
    try:
        text = (root / "version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.M)
    return Torch(found.group(1), root) if found else None


def sources() -> dict[str, str]:
    """The shim's files by name, as compiled into the core, so that core and shim always fit."""
    from oxitorch import _core

    return _core.shim_sources()


def digest(files: dict[str, str]) -> str:
    """A short name for these exact sources."""
    h = hashlib.sha256()
    for name in sorted(files):
        h.update(f"{name}\0{len(files[name])}\0".encode())
        h.update(files[name].encode())
    return h.hexdigest()[:16]


def package_path(torch: Torch, files: dict[str, str]) -> Path:
    """Where a shim built at install time lies."""
    return Path(__file__).parent / "lib" / package_name(torch, files)


def package_name(torch: Torch, files: dict[str, str]) -> str:
    return f"shim-{torch.minor}-{digest(files)}.so"


def cache_path(torch: Torch, files: dict[str, str]) -> Path:
    """Where a shim built on this machine lies. The machine is part of the name: home folders are shared."""
    return Path(_env.cache_dir()) / "shim" / f"{torch.version}-{platform.machine()}-{digest(files)}" / "shim.so"


def find(torch: Torch) -> Path | None:
    """A shim that fits, without building one."""
    override = _env.SHIM.read()
    if override:
        path = Path(override).expanduser()
        if not path.is_file():
            raise ShimError(f"OXITORCH_SHIM={override}: no such file")
        return path
    files = sources()
    packaged, built = package_path(torch, files), cache_path(torch, files)
    if packaged.is_file():
        return packaged
    _check_private(built)
    return built if built.is_file() else None


def _check_private(path: Path) -> None:
    """Refuses a path in the cache folder if anybody but this user and the administrator can write to it, to the cache
    folder, or to a folder between: a shim is code. What is not there is well."""
    root = Path(_env.cache_dir())
    between = [p for p in path.parents if p == root or root in p.parents]
    for place in [*reversed(between), path]:
        try:
            found = place.stat()
            regular = place != path or stat.S_ISREG(place.lstat().st_mode)
        except OSError:
            return
        why, cure = None, "remove it"
        if not regular:
            why = f"{place} is not a regular file"
        elif found.st_uid not in (os.geteuid(), 0):
            why = f"{place} belongs to user {found.st_uid}"
        elif found.st_mode & 0o022:
            why = f"other users may write to {place} (mode {stat.S_IMODE(found.st_mode):o})"
            cure = f"`chmod go-w {place}`"
        if why is not None:
            other = "or set OXITORCH_CACHE_DIR to a folder of your own; what is in it runs as you"
            raise ShimError(f"{why}\nhint: {cure}, {other}")


def _make_private(folder: Path) -> None:
    """Makes a folder and those above it that are missing, for this user alone, whatever the umask."""
    if folder.is_dir():
        return
    _make_private(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o700)


def find_or_build(torch: Torch) -> Path:
    """A shim that fits; the first time on a machine this compiles for about half a minute and says so on stderr."""
    found = find(torch)
    if found:
        return found
    files = sources()
    target = cache_path(torch, files)
    _check_private(target.parent / "failed.txt")
    failure = _Failure(target.with_name("failed.txt"))
    compiler = find_compiler()
    earlier = failure.read(compiler)
    if earlier:
        raise ShimError(f"{earlier}\nhint: this was the answer of an earlier try; `oxitorch shim build` tries again")
    try:
        with _lock(target.parent):
            _check_private(target)
            if not target.is_file():
                _say(f"oxitorch: building the C++ shim for torch {torch.version} (about 30 s, once per torch version)")
                started = time.monotonic()
                compile_shim(torch, files, target, compiler)
                _say(f"oxitorch: built in {time.monotonic() - started:.0f} s: {target}")
    except ShimError as e:
        failure.write(compiler, str(e))
        raise
    except OSError as e:
        raise ShimError(
            f"cannot write the shim to the cache folder: {e}\n"
            "hint: set OXITORCH_CACHE_DIR to a folder that can be written"
        ) from e
    return target


def build(torch: Torch, into: Path | None = None) -> Path:
    """Builds without looking for an existing one, into the folder `into` (under the package name) or the cache."""
    files = sources()
    target = cache_path(torch, files) if into is None else Path(into) / package_name(torch, files)
    with _lock(target.parent):
        compile_shim(torch, files, target, find_compiler())
    with contextlib.suppress(FileNotFoundError):
        target.with_name("failed.txt").unlink()
    return target


def find_compiler() -> list[str]:
    """The compiler's command; CXX may hold arguments or a wrapper ("ccache g++")."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise ShimError(f"no C++ compiler: CXX={os.environ['CXX']} is not a program that can be run")
        return chosen
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise ShimError(
        "no C++ compiler found, and there is no ready shim for this torch\n"
        "hint: install g++ 11 or newer (Debian: apt-get install g++) or point CXX at a compiler"
    )


def runtime_libraries() -> list[str]:
    """The files of libstdc++ and libgcc that PyTorch uses, or will use, in this process.

    Some compilers link their own, statically. A process with two libstdc++ crashes when it prints a number.
    """
    names = ("libstdc++.so.6", "libgcc_s.so.1")
    for name in names:
        with contextlib.suppress(OSError):  # where PyTorch is of another library, nothing is given
            ctypes.CDLL(name)  # finds what is loaded, first
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path("/", *line.partition("/")[2:])
        found.update({name: str(path) for name in names if path.name.startswith(name) and path.exists()})
    return [found[name] for name in names if name in found]


def command(torch: Torch, compiler: list[str], folder: Path, target: Path) -> list[str]:
    """How the shim is compiled, from the sources in a folder."""
    inc, lib = torch.root / "include", torch.root / "lib"
    # What its headers ask for. With C++20 some of the older ones want a newer libstdc++ than PyTorch does.
    standard = 20 if tuple(map(int, torch.minor.split("."))) >= (2, 14) else 17
    return [
        *compiler, f"-std=c++{standard}", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fdiagnostics-color=never",
        f"-I{folder}", "-isystem", str(inc), "-isystem", str(inc / "torch/csrc/api/include"),
        "-isystem", str(inc / "kineto"),
        *sorted(str(p) for p in folder.glob("*.cpp")), "-o", str(target), *runtime_libraries(),
        # No rpath: torch is imported first, so its libraries are loaded already. -z now: a shim of the wrong torch
        # fails when it is loaded, not in the middle of a run.
        f"-L{lib}", "-ltorch_python", "-ltorch_cpu", "-lc10", "-Wl,-z,now",
    ]  # fmt: skip


def compile_shim(torch: Torch, files: dict[str, str], target: Path, compiler: list[str]) -> None:
    """Compiles to a temporary name and renames: a reader never sees half a library."""
    if not (torch.root / "include" / "torch" / "library.h").is_file():
        raise ShimError(f"torch {torch.version} at {torch.root} came without its C++ headers\nhint: reinstall torch")
    _make_private(target.parent)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as tmp:
        folder = Path(tmp)
        for name, text in files.items():
            (folder / name).write_text(text)
        out = folder / "shim.so"
        argv = command(torch, compiler, folder, out)
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode != 0 or not out.is_file():
            raise ShimError(_compile_failure(argv, done.returncode, done.stdout))
        out.chmod(0o600 if target.name == "shim.so" else 0o644)  # of the cache folder, or of a package for everybody
        os.replace(out, target)


def _compile_failure(argv: list[str], status: int, output: str) -> str:
    lines = output.strip().splitlines()
    errors = [line for line in lines if "error:" in line]
    shown = lines[-_LOG_LINES:]
    # The first error is the one that matters, and the last lines may not reach back to it.
    head = [errors[0], "..."] if errors and errors[0] not in shown else []
    how = f"was killed by signal {-status}" if status < 0 else f"failed with status {status}"
    killed = "\nhint: the compiler needs about 2 GB of memory" if status < 0 or "Killed" in output else ""
    body = "\n".join(f"  {line}" for line in [*head, *shown])
    return f"building the shim: `{argv[0]}` {how}\n{body}{killed}\nhint: g++ 11 or newer is needed; CXX picks another"


class _Failure:
    """Remembers a failed build beside its target, so that every later import does not pay for the same failure."""

    def __init__(self, path: Path):
        self.path = path

    @staticmethod
    def _identity(compiler: list[str]) -> str:
        path = shutil.which(compiler[0]) or compiler[0]
        with contextlib.suppress(OSError):
            s = os.stat(path)
            return f"{shlex.join(compiler)} {os.path.realpath(path)} {s.st_size} {int(s.st_mtime)}"
        return shlex.join(compiler)

    def read(self, compiler: list[str]) -> str | None:
        try:
            who, _, message = self.path.read_text().partition("\n")
        except OSError:
            return None
        return message if who == self._identity(compiler) else None

    def write(self, compiler: list[str], message: str) -> None:
        with contextlib.suppress(OSError):
            _make_private(self.path.parent)
            with open(self.path, "w", opener=_own) as f:
                f.write(f"{self._identity(compiler)}\n{message}")


@contextlib.contextmanager
def _lock(folder: Path):
    """One builder at a time, across processes; the lock dies with its holder."""
    _make_private(folder)
    with open(folder / ".lock", "w", opener=_own) as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _own(path: str, flags: int) -> int:
    """Opens a file for this user alone, and nothing that a link leads to."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)
    return fd


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def state(torch: Torch) -> dict[str, str]:
    """For `oxitorch doctor`: where this torch's shim is ("override", "package", "cache", "missing") and its path."""
    override = _env.SHIM.read()
    if override:
        return {
            "where": "override",
            "path": override,
            "exists": str(os.path.isfile(os.path.expanduser(override))),
        }
    files = sources()
    places = (("package", package_path(torch, files)), ("cache", cache_path(torch, files)))
    for where, path in places:
        if path.is_file():
            try:
                if where == "cache":
                    _check_private(path)
            except ShimError as e:
                return {"where": "refused", "path": str(path), "error": str(e)}
            return {"where": where, "path": str(path)}
    return {"where": "missing", "path": str(places[1][1])}
