"""The wheel for everybody: it runs on Linux with glibc 2.28, as PyTorch's wheels do, and needs no compiler, because it
has a shim for each minor version of PyTorch that is supported.

    python build_backend/release_wheel.py           # into target/release-wheel
    python build_backend/release_wheel.py --check   # and tries it with the oldest and the newest PyTorch

It is for the architecture of this machine. `make release-wheel` installs what it needs: maturin, pyelftools, and zig,
which links the core. PyTorch's headers are taken from its wheels, which are half a gigabyte each to fetch.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import tomllib
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

sys.path.insert(0, str(Path(__file__).parent))
from oxitorch_build import _append

ROOT = Path(__file__).parent.parent
# The newest versions of symbols that there may be: those of Linux with glibc 2.28 and the libraries of gcc 8.
OLDEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
PLATFORM = "manylinux_2_28"
UNWINDER = "libgcc_s.so.1"
# What a shim is compiled from and linked with.
OF_TORCH = ("torch/include/", "torch/lib/libc10.so", "torch/lib/libtorch_cpu.so", "torch/version.py")
TRIAL = """
import torch
from oxitorch import _shim
found = _shim.state(_shim.find_torch())
assert found["where"] == "package", found
model = torch.nn.Linear(4, 2, device="tpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, losses = torch.ones(3, 4, device="tpu"), []
for _ in range(3):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses == sorted(losses, reverse=True) and losses[2] < losses[0], losses
print("torch", torch.__version__, "on", torch.tpu.get_device_name(), "with", found["path"].rsplit("/")[-1])
"""


def minors() -> list[str]:
    """The minor versions of PyTorch that pyproject.toml allows: "2.11" and so on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = next(d for d in project["dependencies"] if d.startswith("torch>="))
    low, high = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", wanted).groups()
    return [f"2.{minor}" for minor in range(int(low), int(high))]


def too_new(library: Path) -> list[str]:
    """The versions of symbols that a library asks for and older systems have not."""
    with library.open("rb") as f:
        sections = [s for s in ELFFile(f).iter_sections() if isinstance(s, GNUVerNeedSection)]
        versions = {version.name for s in sections for _, list_ in s.iter_versions() for version in list_}
    numbers = [re.fullmatch(r"([A-Z]+)_([\d.]+)", v) for v in versions]
    found = {(m[1], tuple(map(int, m[2].split(".")))) for m in numbers if m}
    return sorted(f"{name}_{'.'.join(map(str, v))}" for name, v in found if name in OLDEST and v > OLDEST[name])


def needs(library: Path) -> list[str]:
    """The libraries that a library is loaded with."""
    with library.open("rb") as f:
        tags = ELFFile(f).get_section_by_name(".dynamic").iter_tags()
        return [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]


def run(*argv: str | Path, **options) -> None:
    print("+", *argv, flush=True)
    subprocess.run([str(a) for a in argv], check=True, **options)


def core(into: Path) -> Path:
    """The wheel without shims."""
    shutil.rmtree(into, ignore_errors=True)
    # zig would link an unwinder of its own. CPython ends daemon threads with libgcc's, which must know the frames here.
    found = subprocess.run(["gcc", f"-print-file-name={UNWINDER}"], capture_output=True, text=True, check=True)
    unwinder = found.stdout.strip()
    run(
        Path(sys.executable).parent / "maturin", "build", "--quiet", "--locked", "--release", "--zig",
        "--compatibility", PLATFORM, "--interpreter", sys.executable, "--out", into,
        "--", "-C", f"link-arg={unwinder}",
        cwd=ROOT, env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    return next(into.glob("oxitorch-*.whl"))


def headers(minor: str, folder: Path) -> Path:
    """The newest PyTorch of a minor version, as far as a shim needs it: the folder `torch` of its wheel."""
    with tempfile.TemporaryDirectory(dir=folder) as tmp:
        run(
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
            "--no-cache-dir", "--dest", tmp, f"torch=={minor}.*",
        )  # fmt: skip
        with zipfile.ZipFile(next(Path(tmp).glob("torch-*.whl"))) as wheel:
            names = [n for n in wheel.namelist() if n.startswith(OF_TORCH)]
            wheel.extractall(folder / minor, names)
    return folder / minor / "torch"


def shims(wheel: Path, folder: Path) -> dict[str, Path]:
    """A shim for each minor version, by its name in the wheel."""
    with zipfile.ZipFile(wheel) as z:
        z.extractall(folder / "wheel")
    build = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from oxitorch import _shim\n"
        "root = Path(sys.argv[2]); version = {}; exec((root / 'version.py').read_text(), version)\n"
        "print(_shim.build(_shim.Torch(str(version['__version__']), root), Path(sys.argv[3])))"
    )
    built = {}
    for minor in minors():
        root = headers(minor, folder)
        run(sys.executable, "-c", build, folder / "wheel", root, folder / "lib")
        shutil.rmtree(root)
        path = next((folder / "lib").glob(f"shim-{minor}-*.so"))
        run("strip", "--strip-unneeded", path)
        built[f"oxitorch/lib/{path.name}"] = path
    return built


def check(wheel: Path) -> None:
    """Installs it with the oldest and the newest PyTorch, and trains where there is no compiler."""
    uv = Path(sys.executable).parent / "uv"
    for minor in (minors()[0], minors()[-1]):
        with tempfile.TemporaryDirectory() as tmp:
            python = Path(tmp) / "venv" / "bin" / "python"
            run(uv, "venv", "--quiet", "--python", sys.executable, Path(tmp) / "venv")
            run(uv, "pip", "install", "--quiet", "--python", python, f"torch=={minor}.*", wheel)
            env = {k: v for k, v in os.environ.items() if k not in ("CXX", "PYTHONPATH")}
            env.update(PATH="/nonexistent", OXITORCH_CACHE_DIR=f"{tmp}/cache", OXITORCH_PLATFORM="cpu")
            run(python, "-c", TRIAL, cwd=tmp, env=env)
            left = list(Path(tmp, "cache").glob("shim/*"))
            assert not left, f"a shim was built: {left}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="try it with the oldest and the newest PyTorch")
    arguments = parser.parse_args()
    wheel = core(ROOT / "target" / "release-wheel")
    with tempfile.TemporaryDirectory() as tmp:
        built = shims(wheel, Path(tmp))
        cores = list(Path(tmp, "wheel").glob("oxitorch/*.so"))
        if any(UNWINDER not in needs(core) for core in cores):
            sys.exit(f"the core has another unwinder than {UNWINDER}: processes would crash at their end")
        for library in [*cores, *built.values()]:
            if new := too_new(library):
                sys.exit(f"{library.name} does not run with {PLATFORM}: it asks for {', '.join(new)}")
        _append(wheel, {name: path.read_bytes() for name, path in built.items()})
        for path in built.values():
            print(f"{path.stat().st_size / 2**20:6.2f} MiB  {path.name}")
    print(f"{wheel.stat().st_size / 2**20:6.2f} MiB  {wheel.relative_to(ROOT)}")
    if arguments.check:
        check(wheel)


if __name__ == "__main__":
    main()
