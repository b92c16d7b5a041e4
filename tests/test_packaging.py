"""Finding and building the shim: once, by one process, with a useful word when it fails. The compilers are scripts."""

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from oxitorch import _env, _shim

FILES = {"shim.cpp": "int main;", "oxitorch_abi.h": "// empty"}


@pytest.fixture
def torch(tmp_path):
    """A torch as far as the shim's build looks at it."""
    header = tmp_path / "torch" / "include" / "torch" / "library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    return _shim.Torch("2.15.0+cpu", tmp_path / "torch")


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """A cache of its own, fixed sources, and `compiler(script)` that makes a script the C++ compiler."""
    monkeypatch.setenv("OXITORCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("OXITORCH_SHIM", raising=False)
    monkeypatch.setattr(_shim, "sources", lambda: FILES)

    def compiler(script: str, name: str = "g++") -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(path))
        return path

    return compiler


# Writes "library" to the file after -o, and one line to a log.
GOOD = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"; echo built >> "$LOG"'


def test_builds_once_and_finds_it_again(setup, torch, tmp_path, monkeypatch, capfd):
    log = tmp_path / "log"
    monkeypatch.setenv("LOG", str(log))
    setup(GOOD)
    path = _shim.find_or_build(torch)
    assert path.read_text() == "library\n"
    assert "building the C++ shim for torch 2.15.0+cpu" in capfd.readouterr().err
    assert _shim.find_or_build(torch) == path == _shim.find(torch)
    assert log.read_text() == "built\n"
    assert capfd.readouterr() == ("", "")
    # Nothing is left of the build, and the name says what it fits.
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "shim.so"]
    assert path.parent.name.startswith("2.15.0+cpu-")
    assert _shim.state(torch)["where"] == "cache"


def test_a_shim_is_the_users_alone_and_one_that_others_can_write_is_refused(setup, torch, tmp_path, monkeypatch):
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    setup(GOOD)
    before = os.umask(0)
    try:
        path = _shim.find_or_build(torch)
    finally:
        os.umask(before)
    root = Path(_env.cache_dir())
    assert path.stat().st_mode & 0o777 == (path.parent / ".lock").stat().st_mode & 0o777 == 0o600
    folders = [p for p in path.parents if p == root or root in p.parents]
    assert [p.stat().st_mode & 0o777 for p in folders] == [0o700] * 3
    for place in (path, *folders):
        mode = place.stat().st_mode
        for open_to in (0o020, 0o002):
            place.chmod(mode | open_to)
            for refused in (_shim.find, _shim.find_or_build):
                with pytest.raises(_shim.ShimError, match=re.escape(f"chmod go-w {place}")):
                    refused(torch)
            assert _shim.state(torch)["where"] == "refused"
        place.chmod(mode)
    with monkeypatch.context() as m:
        if os.getuid() == 0:
            os.chown(root, 4711, -1)
        else:
            m.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(_shim.ShimError, match="belongs to user"):
            _shim.find(torch)
    os.chown(root, os.getuid(), -1)
    assert _shim.find(torch) == path
    moved = path.rename(path.with_name("other.so"))
    path.symlink_to(moved)
    with pytest.raises(_shim.ShimError, match="not a regular file"):
        _shim.find(torch)


def test_a_compiler_that_links_its_own_libstdcxx_is_given_the_one_of_the_process(setup, tmp_path):
    """Two of them in a process crash when PyTorch prints a number."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    setup('exec g++ -static-libstdc++ -static-libgcc "$@"', "static")
    source = """
    #include <sstream>
    __attribute__((visibility("default"))) int length(double x) {
        std::ostringstream text;
        text << x;
        if (x < 0) throw 1;
        return text.str().size();
    }
    """
    target = tmp_path / "shim.so"
    _shim.compile_shim(_shim.find_torch(), {"length.cpp": source}, target, _shim.find_compiler())
    with target.open("rb") as f:
        library = ELFFile(f)
        needed = {t.needed for t in library.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        symbols = list(library.get_section_by_name(".dynsym").iter_symbols())
    assert {"libstdc++.so.6", "libgcc_s.so.1"} <= needed
    assert [s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF" and "length" not in s.name] == []


def test_other_sources_or_another_torch_need_another_shim(setup, torch, monkeypatch):
    first = _shim.cache_path(torch, FILES)
    assert _shim.cache_path(torch, {**FILES, "shim.cpp": "int other;"}) != first
    assert _shim.cache_path(_shim.Torch("2.15.1+cpu", torch.root), FILES) != first
    # A shim that came with the package serves all patch releases of a minor version.
    assert _shim.package_path(_shim.Torch("2.15.1", torch.root), FILES) == _shim.package_path(torch, FILES)
    # Where a file ends must count, not only what all files hold together.
    assert _shim.digest({"a": "xy", "b": ""}) != _shim.digest({"a": "x", "b": "y"})


def test_several_processes_build_once(setup, torch, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("LOG", str(log))
    setup(f"sleep 0.5; {GOOD}")
    code = (
        "import sys; from pathlib import Path; from oxitorch import _shim\n"
        f"_shim.sources = lambda: {FILES!r}\n"
        "print(_shim.find_or_build(_shim.Torch(sys.argv[1], Path(sys.argv[2]))))"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, torch.version, str(torch.root)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    outputs = {child.communicate(timeout=60)[0] for child in children}
    assert [child.returncode for child in children] == [0] * 4
    assert outputs == {f"{_shim.cache_path(torch, FILES)}\n"}
    assert log.read_text() == "built\n"


def test_a_failed_build_shows_the_compilers_words_and_is_not_repeated(setup, torch, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("LOG", str(log))
    noise = "for i in $(seq 60); do echo note $i; done"
    setup(f"echo tried >> $LOG; echo 'shim.cpp:1: error: no such thing'; {noise}; exit 3")
    with pytest.raises(_shim.ShimError) as e:
        _shim.find_or_build(torch)
    message = str(e.value)
    assert "failed with status 3" in message and "note 60" in message and "note 20\n" not in message
    assert "shim.cpp:1: error: no such thing" in message and "hint:" in message
    with pytest.raises(_shim.ShimError, match="earlier try"):
        _shim.find_or_build(torch)
    assert log.read_text() == "tried\n"
    # Asked for by name, or with another compiler, it is tried again.
    with pytest.raises(_shim.ShimError, match="status 3"):
        _shim.build(torch)
    setup(GOOD, "clang++")
    assert _shim.find_or_build(torch).is_file()
    assert log.read_text() == "tried\ntried\nbuilt\n"


def test_a_compiler_that_is_killed(setup, torch):
    setup("kill -KILL $$")
    with pytest.raises(_shim.ShimError, match=r"killed by signal 9(.|\n)*memory"):
        _shim.build(torch)


def test_no_compiler(setup, torch, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(_shim.ShimError, match=r"no C\+\+ compiler found(.|\n)*apt-get install g\+\+"):
        _shim.find_or_build(torch)


def test_a_cache_that_cannot_be_written(setup, torch, monkeypatch, tmp_path):
    setup("exit 0")
    (tmp_path / "file").touch()
    monkeypatch.setenv("OXITORCH_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(_shim.ShimError, match="OXITORCH_CACHE_DIR"):
        _shim.find_or_build(torch)


def test_a_compiler_with_arguments(setup, torch, monkeypatch, tmp_path):
    path = setup('echo "$1" > "$LOG2"; ' + GOOD)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("LOG2", str(tmp_path / "first"))
    monkeypatch.setenv("CXX", f"{path} --wrapped")
    _shim.build(torch)
    assert (tmp_path / "first").read_text() == "--wrapped\n"


def test_the_override(setup, torch, monkeypatch, tmp_path):
    mine = tmp_path / "mine.so"
    monkeypatch.setenv("OXITORCH_SHIM", str(mine))
    with pytest.raises(_shim.ShimError, match="no such file"):
        _shim.find_or_build(torch)
    mine.touch()
    assert _shim.find_or_build(torch) == mine


def test_torch_is_found_without_importing_it():
    code = "import sys; from oxitorch import _shim; print(_shim.find_torch().version); print('torch' in sys.modules)"
    env = {k: v for k, v in os.environ.items() if not k.startswith("OXITORCH_")}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout
    import torch

    assert out == f"{torch.__version__}\nFalse\n"


def test_files_are_added_to_a_wheel_and_to_its_record(repo, tmp_path):
    spec = importlib.util.spec_from_file_location("oxitorch_build", repo / "build_backend" / "oxitorch_build.py")
    backend = importlib.util.module_from_spec(spec)
    pytest.importorskip("maturin", reason="the build backend needs maturin")
    spec.loader.exec_module(backend)
    wheel = tmp_path / "x-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("x/__init__.py", "1")
        z.writestr("x-1.0.dist-info/RECORD", "x/__init__.py,sha256=abc,1\nx-1.0.dist-info/RECORD,,\n")
    backend._append(wheel, {"x/lib/shim.so": b"library"})
    with zipfile.ZipFile(wheel) as z:
        assert z.read("x/lib/shim.so") == b"library" and z.read("x/__init__.py") == b"1"
        assert z.infolist()[-1].filename == "x-1.0.dist-info/RECORD"
        record = z.read("x-1.0.dist-info/RECORD").decode().splitlines()
        assert z.testzip() is None
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"library").digest()).rstrip(b"=").decode()
    assert record == [
        f"x/lib/shim.so,sha256={digest},7",
        "x/__init__.py,sha256=abc,1",
        "x-1.0.dist-info/RECORD,,",
    ]


def test_extras_bring_the_plugins_that_are_looked_for(repo):
    """What is installed is the wheel, so these are its own words."""
    brought = {}
    for line in importlib.metadata.requires("oxitorch"):
        package, _, condition = line.partition(";")
        if extra := re.fullmatch(r"\s*extra == '(tpu|cuda|preflight)'", condition):
            brought.setdefault(extra[1], set()).add(package.strip())
    assert brought == {"tpu": {"libtpu"}, "cuda": {"jax-cuda13-pjrt"}, "preflight": {"libtpu", "jax-cuda13-pjrt"}}
    # The names are packages: here, where the tests' own extra brought them, and in the table of plugins.
    plugins = (repo / "crates" / "pjrt" / "src" / "discover.rs").read_text()
    page = (repo / "docs" / "install.md").read_text()
    for extra, packages in brought.items():
        assert f"'.[{extra}]'` | " + ", ".join(f"`{p}`" for p in sorted(packages, reverse=True)) in page
        for package in packages:
            assert f'"{package}")' in plugins
            if platform.machine() == "x86_64":
                assert importlib.metadata.version(package)


@pytest.fixture
def release_wheel(repo):
    """The script that makes the published wheel."""
    path = repo / "build_backend" / "release_wheel.py"
    spec = importlib.util.spec_from_file_location("release_wheel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_published_wheel_has_a_shim_for_each_torch_that_is_supported(release_wheel, repo):
    first, *_, last = release_wheel.minors()
    assert f"PyTorch {first} to {last}" in (repo / "docs" / "install.md").read_text()
    assert _shim.find_torch().minor in release_wheel.minors()


def test_what_old_systems_have_not_is_found(release_wheel, monkeypatch):
    """In a library that is for them. The shim's are those of the compiler here, and `make release-wheel` asks."""
    library = _shim.find_torch().root / "lib" / "libc10.so"
    assert release_wheel.too_new(library) == []
    monkeypatch.setitem(release_wheel.OLDEST, "GLIBC", (2, 2, 4))
    assert "GLIBC_2.14" in release_wheel.too_new(library)
    assert "GLIBC_2.2.5" in release_wheel.too_new(library) and "GLIBC_2.2.4" not in release_wheel.too_new(library)
