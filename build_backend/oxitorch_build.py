"""PEP 517 backend: maturin, and the C++ shim for the torch of the environment that is installed into.

The core is built by maturin and needs no torch. If torch is already installed where the wheel goes, the shim for it is
compiled and packed too, so that the first import has nothing to build. If it is not there (`pip install .` in an empty
environment), the shim is built at the first import instead. torch is never a build requirement: it is gigabytes.

OXITORCH_BUILD_SHIM=0 leaves the shim out, =1 makes a missing torch or compiler an error.
"""

import base64
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import maturin

# An editable install builds the shim at the first import.
from maturin import (  # noqa: F401  # noqa: F401
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """maturin's wheel, with the shim added where torch is at hand."""
    name = maturin.build_wheel(wheel_directory, config_settings, metadata_directory)
    wish = os.environ.get("OXITORCH_BUILD_SHIM", "")
    if wish == "0":
        return name
    try:
        _add_shim(Path(wheel_directory) / name)
    except _NoShim as e:
        if wish == "1":
            raise
        print(f"oxitorch: the wheel goes without a ready shim, the first import will build it: {e}", flush=True)
    return name


class _NoShim(Exception):
    pass


def _add_shim(wheel: Path) -> None:
    python = _python_with_torch()
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        with zipfile.ZipFile(wheel) as z:
            z.extractall(folder / "wheel")
        lib = folder / "lib"
        # -I: pip's build isolation hides the environment's packages through PYTHONPATH and sitecustomize.
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from oxitorch import _cli; sys.exit(_cli.main(sys.argv[2:]))"
        )
        done = subprocess.run(
            [*python, "-c", code, str(folder / "wheel"), "shim", "build", "--into", str(lib)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        if done.returncode != 0:
            raise _NoShim(done.stdout.strip())
        built = list(lib.glob("shim-*.so"))
        _append(wheel, {f"oxitorch/lib/{p.name}": p.read_bytes() for p in built})
        print(f"oxitorch: packed {', '.join(p.name for p in built)}", flush=True)


def _python_with_torch() -> list[str]:
    """This interpreter, with or without the isolation that pip put around the build."""
    probe = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    for python in ([sys.executable], [sys.executable, "-I"]):
        if subprocess.run([*python, "-c", probe], stderr=subprocess.DEVNULL).returncode == 0:
            return python
    raise _NoShim("torch is not installed here yet")


def _append(wheel: Path, files: dict[str, bytes]) -> None:
    """Adds files to a wheel and to its RECORD."""
    with zipfile.ZipFile(wheel) as z:
        content = {i: z.read(i) for i in z.infolist()}
    record_info = next(i for i in content if i.filename.endswith(".dist-info/RECORD"))
    record = content.pop(record_info).decode().splitlines()
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.insert(0, f"{path},sha256={digest},{len(data)}")
    temporary = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as z:
        for info, data in content.items():
            z.writestr(info, data)
        for path, data in files.items():
            info = zipfile.ZipInfo(path, date_time=record_info.date_time)
            info.external_attr = 0o755 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            z.writestr(info, data)
        z.writestr(record_info, "\n".join(record) + "\n")
    os.replace(temporary, wheel)
