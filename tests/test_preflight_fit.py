"""`oxitorch preflight --fit`: the script again and again, until the answer is found."""

import json

import pytest

SCRIPT = """
import sys
import oxitorch, torch
n = {batch}
kept = torch.ones(n, 1 << 26, device="tpu")
kept.mul_(2).sum().item()
"""


@pytest.fixture
def fit(python, tmp_path):
    """Looks for the batch of a script that keeps 256 MiB for each sample; the report and the finished process."""

    def run(batch: str, *args: str):
        script, report = tmp_path / "train.py", tmp_path / "report.json"
        script.write_text(SCRIPT.format(batch=batch))
        report.unlink(missing_ok=True)
        argv = [
            "-m",
            "oxitorch",
            "preflight",
            "--json",
            str(report),
            "--slice",
            "cpu",
            *args[:-1],
            str(script),
            args[-1],
        ]
        done = python("", *argv, check=False, timeout=600)
        return (json.loads(report.read_text()) if report.exists() else None), done

    return run


def test_the_largest_batch_that_fits(fit):
    report, done = fit(
        "int(sys.argv[1].removeprefix('size='))", "--fit", "batch=size={}", "--fit-multiple", "4", "size=4"
    )
    assert done.returncode == 0, done.stderr
    (judged,) = report["slices"]
    found = judged["fit"]
    tried = {t["batch"]: t for t in found["tries"]}
    n = found["batch"]
    assert found["confirmed"] and n % 4 == 0 and list(tried)[:2] == [4, 8]
    assert tried[n]["verdict"].startswith("fits") and tried[n + 4]["verdict"] == "does_not_fit"
    assert judged["need_bytes"] == tried[n]["need_bytes"] >= n << 28
    assert tried[n + 4]["need_bytes"] > judged["limit_bytes"]
    # It is foretold, as memory is linear.
    third = found["tries"][2]
    assert third["foretold_bytes"] == pytest.approx(third["need_bytes"], rel=0.01) and len(tried) <= 6
    assert f"the largest batch that fits is {n}" in done.stdout


@pytest.mark.slow
def test_a_batch_is_marked_and_a_search_has_an_end(fit):
    report, done = fit("oxitorch.preflight.batch(3)", "--fit", "batch", "--fit-tries", "2", "x")
    found = report["slices"][0]["fit"]
    # The first try is the script's own.
    assert [t["batch"] for t in found["tries"]] == [3, 6] and done.returncode == 2
    assert (found["batch"], found["confirmed"], found["reason"]) == (6, False, "2 tries were made")

    report, done = fit("3", "--fit", "batch", "x")
    assert report is None and done.returncode == 2 and "oxitorch.preflight.batch" in done.stderr
