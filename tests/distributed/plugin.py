"""A platform whose client spans processes: XLA's CPU plugin with what makes it so around it (`crates/testkit`).

It says that it drives GPUs, so that the device is started and collectives are recorded as there. What ordinary programs
compute is what XLA computes on the CPU.
"""

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"


@functools.cache
def environ() -> dict[str, str]:
    """What processes that use it are told."""
    from oxitorch import _env

    if shutil.which("cargo") is None:
        pytest.skip("the plugin of several processes is built by cargo, which is not here")
    example = ["-p", "oxitorch-testkit", "--example", "multi_process_plugin"]
    subprocess.run(["cargo", "build", "-q", "--profile", "ci", "--locked", *example], cwd=ROOT, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "ci"
    folder = target / "multi-process"
    place = folder / "jax_plugins/xla_cuda13/xla_cuda_plugin.so"
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_suffix(f".{os.getpid()}")  # other tests may use the one that is there
    shutil.copy(target / "examples/libmulti_process_plugin.so", new)
    new.rename(place)
    cpu = next(path for path in (Path(d) / PLUGIN for d in _env.site_dirs()) if path.exists())
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return {"OXITORCH_PLATFORM": "cuda", "OXITORCH_CPU_PLUGIN": str(cpu), "PYTHONPATH": paths}
