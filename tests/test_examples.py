"""The examples: the same losses on both devices, checkpoints that travel, and what the README promises."""

import json
import re

import pytest

from tests.effort import FLAGS

STEPS = 20
# A script in a child that has imported PyTorch already.
RUN = """
import runpy, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def losses(python, repo, tmp_path, example, device, *args):
    out = tmp_path / f"{example}-{device}.json"
    python(
        RUN, str(repo / "examples" / f"{example}.py"), "--device", device, "--steps", str(STEPS), "--losses", str(out),
        "--checkpoint", str(tmp_path / f"{example}-{device}.pt"), *args, timeout=600,
    )  # fmt: skip
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("example", "args", "tolerance"),
    # Batch norm and AdamW's division by small second moments spread rounding differences over the steps: PyTorch with
    # one thread and with two are 1e-4 apart in the end, so the second half is only to stay near.
    [
        pytest.param("digits", (), 2e-3, marks=pytest.mark.slow),
        ("charlm", ("--batch-size", "8", "--layers", "1", "--length", "20"), 2e-3),
    ],
)
def test_the_first_losses_agree_with_the_cpu(python, repo, tmp_path, example, args, tolerance):
    here = losses(python, repo, tmp_path, example, "cpu", *args)
    there = losses(python, repo, tmp_path, example, "tpu", *args)
    assert len(here) == len(there) == STEPS
    assert here[0] == pytest.approx(there[0], rel=1e-5)
    assert here[: STEPS // 2] == pytest.approx(there[: STEPS // 2], rel=tolerance)
    assert here == pytest.approx(there, rel=3e-2)
    assert here[-1] < here[0]

    # The checkpoint that the device wrote is read where oxitorch is not loaded.
    code = f"""
import torch
saved = torch.load({str(tmp_path / f"{example}-tpu.pt")!r}, map_location="cpu", weights_only=True)
print(hasattr(torch, "tpu"), {{t.device.type for t in saved["model"].values()}})
"""
    assert python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout == "False {'cpu'}\n"


def test_varying_lengths_have_the_losses_of_exact_ones(python, repo, tmp_path):
    """Three ways to make batches: the losses agree, and the programs are as many as the shapes."""
    found, printed = {}, {}
    # The losses and counts are the same with little effort of the compiler.
    for device in ("cpu", "tpu"):
        out = tmp_path / f"{device}.json"
        done = python(
            RUN, str(repo / "examples" / "varying_lengths.py"), "--device", device, "--losses", str(out),
            "--lengths", "3", "--max-graphs", "2", "--batch-size", "4", "--rounds", "2", XLA_FLAGS=FLAGS,
        )  # fmt: skip
        found[device], printed[device] = json.loads(out.read_text()), done.stdout
    exact, padded, packed = "a length at a time", "padded to 2 lengths", "packed"
    for one in found.values():
        assert one[exact] == pytest.approx(one[padded], rel=1e-5)
        assert list(one["asked"].values()) == pytest.approx([one["asked"][exact]] * 3, rel=1e-5)
        assert one[exact][-1] < one[exact][0]
    for way in (exact, padded, packed):
        assert found["tpu"][way] == pytest.approx(found["cpu"][way], rel=1e-4)
    counts = {
        way: re.search(rf"^{way} +(\d+) +(\d+) ", printed["tpu"], re.M).groups() for way in (exact, padded, packed)
    }
    assert counts == {exact: ("3", "3"), padded: ("2", "2"), packed: ("1", "1")}


@pytest.mark.slow
def test_digits_reach_98_percent(python, repo, tmp_path):
    done = python("", str(repo / "examples" / "digits.py"), "--checkpoint", str(tmp_path / "d.pt"), timeout=1200)
    first, second = (float(x) for x in re.findall(r"(\d+\.\d)%", done.stdout))
    assert first == second >= 98.0


@pytest.mark.parametrize("example", ["digits", "charlm"])
def test_examples_name_no_backend_but_the_device(repo, example):
    text = (repo / "examples" / f"{example}.py").read_text()
    assert "oxitorch" not in text and "torch.tpu" not in text


WAYS = ("loop", "jitted", "jax_flax")


def test_three_ways_to_write_a_step(python, repo):
    def loss(way):
        script = str(repo / "examples" / "three_ways" / f"{way}.py")
        done = python("" if way == "jax_flax" else RUN, script, JAX_PLATFORMS="cpu", timeout=300)
        return float(done.stdout.removeprefix("loss "))

    first, *others = map(loss, WAYS)
    assert others == pytest.approx([first] * 2, rel=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_the_page_shows_what_is_run(repo, way):
    program = (repo / "examples" / "three_ways" / f"{way}.py").read_text()
    shown = program.split("# -- page\n")[1]
    assert f"```python\n{shown}```\n" in (repo / "docs" / "jit.md").read_text()
