"""What `import torch` does with oxitorch installed: quiet, quick, in any order, and never fatal without need."""

import functools
import time

import pytest

USE = "print(torch.ones(2, device='tpu').sum().item())"


@pytest.fixture
def python(python):
    """Importing PyTorch is what is tested."""
    return functools.partial(python, fresh=True)


@pytest.mark.parametrize(
    ("code", "autoload"),
    [
        ("import torch", "1"),
        ("import torch, oxitorch", "1"),
        ("import torch, oxitorch", "0"),
        ("import oxitorch; oxitorch.activate(); import torch", "0"),
        ("import torch; import torch.tpu.random as a, oxitorch.tpu.random as b; assert a is b", "1"),
        *(
            pytest.param(code, autoload, marks=pytest.mark.slow)
            for code, autoload in [
                ("import oxitorch, torch", "1"),
                ("import oxitorch; oxitorch.tpu; import torch", "0"),
                ("import oxitorch.tpu, torch", "0"),
                ("import oxitorch.tpu, torch; assert torch.tpu is oxitorch.tpu", "1"),
                ("from oxitorch import tpu; import torch; assert torch.tpu is tpu", "1"),
                ("import torch; torch.set_num_threads(1); import oxitorch; oxitorch.activate()", "0"),
            ]
        ),
    ],
)
def test_any_order_of_imports_gives_the_device(python, code, autoload):
    done = python(f"{code}; {USE}", TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert done.stdout == "2.0\n"


def test_autoload_can_be_turned_off(python):
    done = python("import torch; print(hasattr(torch, 'tpu'))", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout == "False\n"


def test_import_prints_nothing(python):
    python("import torch")  # builds the shim where it is not there yet
    done = python("import torch; x = torch.ones(3); (x + x).sum().item()")
    assert (done.stdout, done.stderr) == ("", "")


def test_using_the_device_prints_only_what_is_asked_for(python):
    done = python(f"import torch; {USE}")
    assert (done.stdout, done.stderr) == ("2.0\n", "")


def test_import_of_oxitorch_alone_does_not_import_torch(python):
    done = python(
        "import sys, oxitorch; print(oxitorch.__version__ != '', 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert done.stdout == "True False False\n"


@pytest.mark.slow
def test_import_torch_takes_less_than_half_a_second_more(python):
    def seconds(autoload: str) -> float:
        started = time.perf_counter()
        python("import torch", TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
        return time.perf_counter() - started

    seconds("1")
    without, with_it = zip(*((seconds("0"), seconds("1")) for _ in range(4)), strict=True)
    assert min(with_it) - min(without) < 0.5


def test_import_does_not_start_the_platform(python):
    code = "import torch; torch.manual_seed(1); torch.ones(3).sum(); print(torch.tpu.is_initialized())"
    assert python(code).stdout == "False\n"


def test_seeds_of_devices_wait_for_the_start(python):
    """The last one that is of a device is the one that it has."""
    code = """
import torch
torch.manual_seed(1)
torch.tpu.manual_seed(2)
torch.tpu.set_device(1)
torch.tpu.manual_seed_all(3)
torch.tpu.manual_seed(4)
assert not torch.tpu.is_initialized()
for device, seed in ((0, 3), (1, 4)):
    first = torch.rand(4, device=f"tpu:{device}")
    torch.tpu.set_device(device)
    assert torch.tpu.initial_seed() == seed
    torch.tpu.manual_seed(seed)
    assert torch.equal(torch.rand(4, device=f"tpu:{device}"), first)
"""
    python(code, OXITORCH_PLATFORM="cpu", OXITORCH_CPU_DEVICES="2")


def test_another_owner_of_the_device_slot_is_named(python):
    code = """
import torch
torch.utils.rename_privateuse1_backend("jax")
try:
    import oxitorch
except RuntimeError as e:
    print(e)
"""
    out = python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout
    assert "PrivateUse1" in out and "'jax'" in out and "uninstall" in out and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in out


def test_another_owner_that_is_loaded_first_is_named_by_its_package(python, tmp_path):
    (tmp_path / "torch_tpu.py").write_text(
        "def load():\n    import torch\n    torch.utils.rename_privateuse1_backend('tpu')\n"
    )
    info = tmp_path / "torch_tpu-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-tpu\nVersion: 0.2.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntpu = torch_tpu:load\n")
    done = python("import torch", PYTHONPATH=str(tmp_path), check=False)
    assert done.returncode == 1
    assert "`torch-tpu` already registered" in done.stderr and "pip uninstall torch-tpu" in done.stderr


BROKEN = """
import torch
print(torch.ones(2).sum().item(), torch.tpu.is_available(), torch.tpu.device_count())
torch.manual_seed(0)
for use in (
    lambda: torch.ones(2, device="tpu"),
    lambda: torch.ones(2).to("tpu"),
    lambda: torch.ones(2).tpu(),
    lambda: torch.nn.Linear(2, 2).to("tpu"),
    lambda: torch.tpu.synchronize(),
    lambda: torch.tpu.current_device(),
):
    try:
        use()
        print("no error")
    except RuntimeError as e:
        print(str(e).splitlines()[0])
"""


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"OXITORCH_SHIM": "/nonexistent/shim.so"}, "OXITORCH_SHIM=/nonexistent/shim.so: no such file"),
        ({"OXITORCH_PLATFORM": "abacus"}, "OXITORCH_PLATFORM=abacus: expected one of cpu, cuda, tpu"),
        ({"OXITORCH_CPU_DEVICES": "0"}, "OXITORCH_CPU_DEVICES=0: expected a whole number of at least 1"),
        ({"OXITORCH_EAGER_MODE": "fast"}, "OXITORCH_EAGER_MODE=fast"),
    ],
)
def test_a_backend_that_cannot_work_leaves_torch_alone_and_says_why_when_used(python, env, reason):
    lines = python(BROKEN, **env).stdout.splitlines()
    assert lines[0] == "2.0 False 0"
    assert len(lines) == 7
    for line in lines[1:]:
        assert line.startswith("device 'tpu' is not available: ") and reason in line


def test_no_compiler_and_no_shim(python, tmp_path):
    # Only a package without a ready shim comes to need a compiler.
    code = BROKEN.replace(
        "import torch\n",
        "import oxitorch._shim as s\ns.package_path = lambda *a: s.Path('/none')\nimport torch\n",
        1,
    )
    done = python(code, OXITORCH_CACHE_DIR=str(tmp_path), CXX="/nonexistent/g++")
    lines = done.stdout.splitlines()
    assert lines[0] == "2.0 False 0"
    assert all("no C++ compiler: CXX=/nonexistent/g++" in line for line in lines[1:]) and len(lines) == 7


def test_a_platform_that_is_not_there(python):
    code = "import torch; print(torch.tpu.is_available()); torch.ones(2, device='tpu')"
    done = python(code, check=False, OXITORCH_PLATFORM="cuda", CUDA_VISIBLE_DEVICES="")
    assert done.stdout == "False\n"
    assert "RuntimeError" in done.stderr and "cuda" in done.stderr.splitlines()[-1] + done.stderr


def test_asking_whether_the_device_is_there_does_not_start_it(python):
    """Launchers ask, and a TPU belongs to the process that starts it."""
    code = """
import torch
print(torch.tpu.is_available(), torch.accelerator.is_available(), torch.tpu.device_count(),
      torch.accelerator.device_count(), torch.tpu.is_initialized())
print(torch.ones(2, device="tpu:1").sum().item(), torch.tpu.device_count(), torch.tpu.is_initialized())
"""
    assert python(code, OXITORCH_CPU_DEVICES="2").stdout == "True True 2 2 False\n2.0 2 True\n"


def test_looking_for_a_module_is_not_importing_it(python):
    """Whoever asks whether a library is there must not keep it from being adapted when it is imported."""
    done = python(
        "import importlib.util, json, sys\n"
        "from oxitorch import _after_import\n"
        "seen = []\n"
        "_after_import.call({'wave': lambda m: seen.append(m.__name__), 'json': lambda m: seen.append(m.__name__)})\n"
        "importlib.util.find_spec('wave'); importlib.util.find_spec('wave')\n"
        "import wave; importlib.reload(wave)\n"
        "print(seen)\n"
    )
    assert done.stdout == "['json', 'wave']\n"


def test_a_jitted_function_does_not_import_dynamo(python):
    code = """
import sys, torch
model = torch.nn.Linear(3, 2).to("tpu")

def step(x):
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()

torch.tpu.jit(step)(torch.ones(4, 3, device="tpu")).item()
print("torch._dynamo" in sys.modules)
"""
    assert python(code).stdout == "False\n"
