"""Shared by all tests: the repository, and running a piece of Python in a process of its own."""

import atexit
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import objects
import pytest
from forked import Template
from oxitorch import _core, _env

REPO = Path(__file__).resolve().parent.parent

# A shell that runs this in the background has it ignore Ctrl-C, and so would every child, of which some are to be ended
# by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What children take over: the run's cache, and how a GPU is shared by processes that run at the same time.
OF_THE_MACHINE = ("OXITORCH_CACHE_DIR", "OXITORCH_CUDA_MEMORY_FRACTION", "OXITORCH_CUDA_PREALLOCATE")


def cache_folder(folder: Path, shims: Path) -> str:
    """Makes a cache folder without programs; shims, which take half a minute to build, are those of another one."""
    shims.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / "shim").is_symlink():
        (folder / "shim").symlink_to(shims)
    return str(folder)


def _own_cache() -> None:
    """Gives this run a cache of its own, which its processes share, so that nothing depends on what ran before.

    `OXITORCH_TEST_CACHE` names a folder that several runs share.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the controller's
    folder = os.environ.get("OXITORCH_TEST_CACHE")
    if folder is None:
        folder = tempfile.mkdtemp(prefix="oxitorch-tests-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["OXITORCH_CACHE_DIR"] = cache_folder(Path(folder) / "cache", Path(_env.cache_dir()) / "shim")


_own_cache()


def pytest_addoption(parser):
    parser.addoption("--mode", choices=("fused", "strict"), default="fused", help="the eager mode of the device tests")
    parser.addoption("--op", help="of the goldens on the device, the calls of this op alone")


def child_environment(**changes: str | None) -> dict[str, str]:
    """The environment without the settings of whoever runs the tests; None removes a variable."""
    own = ("OXITORCH_", "TORCH_DEVICE_BACKEND")
    env = {k: v for k, v in os.environ.items() if k in OF_THE_MACHINE or not k.startswith(own)}
    env.pop("CXX", None)
    for name, value in changes.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


@pytest.fixture(scope="session")
def environment():
    """`environment(NAME="value")` is what a child gets; see `child_environment`."""
    return child_environment


@pytest.fixture(scope="session")
def forked():
    """A process that has imported PyTorch, for children of it."""
    template = Template()
    yield template
    template.stop()


# Variables that the interpreter, its libraries or PyTorch read when they start.
AT_START = ("PYTHON", "LD_", "OMP_", "MALLOC_", "TORCH_")


@pytest.fixture(scope="session")
def python(forked):
    """`python("print(1)", NAME="value")` runs code in a child and returns the finished process with its text output.

    The child has imported PyTorch already, but not with `fresh=True`, nor with variables that are read before that.
    """

    def run(code: str, *args: str, check: bool = True, timeout: float = 120, fresh: bool = False, **env: str | None):
        own = child_environment(**env)
        if code and not fresh and not any(name.startswith(AT_START) for name in env):
            done = forked.run(code, *args, env=own, timeout=timeout)
        else:
            argv = [sys.executable, *(["-c", code] if code else []), *args]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, env=own, cwd="/")
        if check:
            assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def needs():
    """Skips where a library is not installed: the extra `models` has them."""

    def skip(*names: str) -> None:
        for name in names:
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"`pip install {name}`")

    return skip


@pytest.fixture
def empty_cache(tmp_path) -> Path:
    """A cache folder without programs."""
    return Path(cache_folder(tmp_path / "cache", Path(_env.cache_dir()) / "shim"))


@pytest.fixture
def bucket():
    """A server of `s3://bucket`: its objects by their paths, and the variables with which a process finds it."""
    if not _core.has_object_stores():
        pytest.skip("a build without the feature `object-store`; `make test-object-store` tests the store itself")
    with objects.bucket() as found:
        yield found


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the source tree."""
    return REPO


@pytest.fixture
def libtpu():
    """Skips where there is no libtpu: it compiles for TPUs on any machine, and is 200 MB."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("`pip install libtpu` adds the compiler for TPUs")


@pytest.fixture(scope="session")
def cuda_plugin():
    """Skips where there is no plugin for NVIDIA GPUs: it compiles for them on any machine, and is 135 MB."""
    places = importlib.util.find_spec("jax_plugins")
    folders = places.submodule_search_locations if places else []
    if not any(any(Path(folder).glob("xla_cuda*/xla_cuda_plugin.so")) for folder in folders):
        pytest.skip("`pip install jax-cuda13-pjrt` adds the compiler for NVIDIA GPUs")
