"""Preflight's numbers against counts by hand and against JAX: eight models on three slices."""

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
import tomllib

HERE = Path(__file__).parent / "preflight"

# What JAX compiles for the same models; made by `preflight/jax_models.py`.
TABLE = json.loads((HERE / "jax.json").read_text())
JAX = TABLE["memory_bytes"]

# Memory as a multiple of JAX's, where it is not within 5 % of that: docs/preflight.md shows and explains them.
OFF = json.loads((HERE / "off.json").read_text())

SLICES = {"v5e-1": "v5e:1x1", "v6e-1": "v6e:1x1", "v5p-8": "v5p:2x2x1"}


def total(memory):
    """What a program needs of a chip's memory, in bytes."""
    return memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"]


def linears(rows, *sizes):
    """Operations of a chain of linear layers, forward."""
    return sum(2 * rows * i * o for i, o in pairwise(sizes))


def block(batch, length, dim):
    """Of attention and MLP of four times the width: 12 d^2 weights, scores and what is taken by them."""
    return 2 * batch * length * 12 * dim**2 + 4 * batch * length**2 * dim


def llama_block(batch, length, dim, kv, hidden):
    weights = 2 * dim * dim + 2 * dim * kv + 3 * dim * hidden
    return 2 * batch * length * weights + 4 * batch * length**2 * dim


def conv(batch, side, i, o, kernel):
    """Of `side` * `side` results."""
    return 2 * batch * side**2 * i * o * kernel**2


# Forward; a backward pass is twice that, less the gradients of inputs that nobody asks for.
FLOPS = {
    "mlp": 3 * linears(256, 1024, 4096, 4096, 1000) - linears(256, 1024, 4096),
    "gpt": 3 * (block(8, 256, 512) + linears(8 * 256, 512, 4096)),
    "llama": 3 * (llama_block(4, 512, 512, 128, 1536) + linears(4 * 512, 512, 8192)),
    "vit": 3 * (block(32, 196, 192) + linears(32, 192, 1000)) + 2 * conv(32, 14, 3, 192, 16),
    "resnet": 2 * conv(32, 64, 3, 64, 3)
    + 3 * (2 * conv(32, 64, 64, 64, 3) + conv(32, 32, 64, 128, 3) + conv(32, 32, 128, 128, 3))
    + 3 * (conv(32, 32, 64, 128, 1) + linears(32, 128, 10)),
    "autoencoder": 2 * conv(32, 32, 3, 64, 4) + 3 * (2 * conv(32, 16, 64, 128, 4) + conv(32, 32, 3, 64, 4)),
    "recommender": 3 * linears(2048, 8 * 64, 1024, 512, 1),
    "encoder": block(16, 128, 768) + linears(16, 768, 2),
}


def attended(batch, length, dim):
    """The backward pass of attention makes the scores once more, as they are not kept."""
    return 2 * batch * length**2 * dim


for model, shape in {"gpt": (8, 256, 512), "llama": (4, 512, 512), "vit": (32, 196, 192)}.items():
    FLOPS[model] += attended(*shape)


@pytest.fixture(scope="module")
def capture(python, tmp_path_factory):
    """A folder with the programs of all models that ran twice or more, and what the engine says of each."""
    folder = tmp_path_factory.mktemp("capture")
    device = {"platform": "tpu", "kind": "TPU v5 lite", "memory_bytes": 1 << 34, "steps": 1000}
    (folder / "device.json").write_text(json.dumps(device))
    python("", str(HERE / "models.py"), OXITORCH_PREFLIGHT=str(folder), timeout=300)
    facts = json.loads((folder / "capture.json").read_text())
    facts["programs"] = [p for p in facts["programs"] if sum(n for _, n in p["launches"]) >= 2]
    (folder / "capture.json").write_text(json.dumps(facts))
    assert len(facts["programs"]) == len(FLOPS), [p["first_line"] for p in facts["programs"]]
    return folder, dict(zip(FLOPS, facts["programs"], strict=True))


def test_products_are_those_of_a_count_by_hand(capture):
    _, programs = capture
    counted = {model: sum(q["flops"] for q in p["products"]) for model, p in programs.items()}
    assert counted == pytest.approx(FLOPS, rel=0.01)


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize(
    "name", ["v5e-1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v6e-1", "v5p-8"))]
)
def test_memory_is_that_of_jax(capture, environment, name):
    if version("libtpu") != TABLE["libtpu"]:
        pytest.skip(f"JAX's numbers are of libtpu {TABLE['libtpu']}, which the extra `test` installs")
    folder, programs = capture
    library = Path(importlib.util.find_spec("libtpu").submodule_search_locations[0]) / "libtpu.so"
    argv = [sys.executable, "-m", "oxitorch", "aot", "tpu", str(library), str(folder), "--topology", SLICES[name]]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, env=environment())
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("oxitorch-aot ") for line in done.stdout.splitlines() if "oxitorch-aot" in line]
    outcomes = [said["done"] for said in map(json.loads, lines) if "done" in said]
    memory = {o["id"]: o["memory"] for o in outcomes}
    found = {model: memory[p["id"]] for model, p in programs.items()}
    # The compiler lays equivalent programs out differently: those that are further from JAX than 5 % are listed.
    expected = {model: OFF.get(f"{model} {name}", 1) for model in JAX}
    ratios = {model: round(total(m) / total(JAX[model][name]), 3) for model, m in found.items()}
    assert ratios == pytest.approx(expected, abs=0.05), json.dumps(ratios, indent=1)
    listed = [model for model in JAX if f"{model} {name}" in OFF]
    assert [model for model in listed if abs(ratios[model] - 1) <= 0.05] == [], "these need not be listed any more"
    arguments = {model: m["arguments"] / JAX[model][name]["arguments"] for model, m in found.items()}
    assert arguments == pytest.approx(dict.fromkeys(JAX, 1), rel=0.005)


def test_the_table_is_of_the_libtpu_that_the_tests_install(repo):
    tests = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    assert [d.partition(";")[0] for d in tests if d.startswith("libtpu")] == [f"libtpu=={TABLE['libtpu']}"]
    assert {f"{model} {name}" for model in JAX for name in SLICES} >= OFF.keys()
