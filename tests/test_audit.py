"""`oxitorch audit` as users start it, and what it says that runs unchanged."""

import json
import subprocess
import sys

import pytest
import torch

SCRIPT = """\
import torch
from torch.utils.data import DataLoader

device = "cuda" if torch.cuda.is_available() else "cpu"  # where


def train(data, model, optimizer):
    model.cuda()
    for x in DataLoader(data, batch_size=8, shuffle=True):
        loss = model(x.to(device)).sum()
        loss.backward()
        optimizer.step()
        print(loss.item())
"""


def audit(*args, check=True):
    """The command's exit status and what it printed."""
    argv = [sys.executable, "-m", "oxitorch", "audit", *map(str, args)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert not check or done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def rules():
    """All rules by id, as `--rules --json` has them."""
    return {r["id"]: r for r in json.loads(audit("--rules", "--json")[1])["rules"]}


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_what_runs_unchanged_does(rules, python, needs, tmp_path):
    """Each rule that says so has a pattern, which runs on the device. One process, since most of it is starting."""
    needs("transformers", "torchvision")
    patterns = {id: r["pattern"] for id, r in rules.items() if r["unchanged"]}
    assert len(patterns) >= 60 and all(patterns.values())
    file = tmp_path / "patterns.py"
    # A spawned child imports the file again.
    file.write_text(
        "import json, sys, traceback\nimport torch\n"
        "if __name__ == '__main__':\n"
        "    wrong = []\n"
        f"    for id, pattern in {patterns!r}.items():\n"
        "        try:\n"
        "            exec(pattern, {'torch': torch, '__name__': 'pattern'})\n"
        "        except Exception:\n"
        "            wrong.append(id + ': ' + traceback.format_exc(limit=1))\n"
        "    sys.exit('\\n'.join(wrong) or None)\n"
    )
    python("", str(file), timeout=300)


def test_what_is_mirrored_is_there(rules):
    """`--fix` writes `torch.tpu` for `torch.cuda` where the name is in both."""
    code = "import torch\n" + "".join(f"torch.cuda.{n}\n" for n in dir(torch.cuda) if n.isidentifier())
    found = findings_of(code)
    mended = {f["source"].removeprefix("torch.cuda.") for f in found if f["fixable"]}
    assert len(mended) > 30 and [n for n in mended if not hasattr(torch.tpu, n)] == []


def findings_of(code):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.py"
        file.write_text(code)
        return json.loads(audit(file, "--json")[1])["findings"]


def test_text_shows_the_line_the_reason_and_the_fix(script):
    status, text = audit(script)
    assert status == 1
    assert "error[DEV001]: `model.cuda()` moves to a CUDA device, which is not there." in text
    assert f"--> {script}:8:5\n  |\n8 |     model.cuda()\n  |     ^^^^^^^^^^^^\n  = fix: Write `.tpu()`" in text
    assert "warning[SYN001]" in text and "(runs unchanged)" in text
    assert "days needed" in text and "chosen, not measured" in text


def test_fix_changes_names_and_nothing_else(script):
    status, diff = audit(script, "--diff")
    assert status == 1 and script.read_text() == SCRIPT
    expected = SCRIPT.replace('"cuda" if torch.cuda', '"tpu" if torch.tpu').replace("model.cuda()", "model.tpu()")
    lines = [line for line in diff.splitlines() if line[0] in "+-"][2:]
    assert [line[1:] for line in lines if line[0] == "+"] == [n for o, n in changed(SCRIPT, expected)]
    assert [line[1:] for line in lines if line[0] == "-"] == [o for o, n in changed(SCRIPT, expected)]
    assert audit(script, "--fix")[0] == 0
    assert script.read_text() == expected
    assert audit(script, "--diff") == (0, "")


def changed(before, after):
    return [(o, n) for o, n in zip(before.splitlines(), after.splitlines(), strict=True) if o != n]


def test_rules_are_chosen_by_options_settings_and_comments(script):
    def ids(*args):
        return sorted({f["rule"] for f in json.loads(audit(script, "--json", *args)[1])["findings"]})

    assert ids() == ["DAT002", "DEV001", "DEV002", "DEV003", "SHP001", "SYN001"]
    assert ids("--select", "DEV", "--ignore", "DEV003") == ["DEV001", "DEV002"]
    (script.parent / "pyproject.toml").write_text('[tool.oxitorch.audit]\nignore = ["DEV", "DAT002"]\n')
    assert ids() == ["SHP001", "SYN001"]
    script.write_text(SCRIPT.replace("print(loss.item())", "print(loss.item())  # oxitorch: ignore[SYN001]"))
    assert ids() == ["SHP001"]
    script.write_text("# oxitorch: ignore-file[SHP]\n" + script.read_text())
    assert ids() == []
    (script.parent / "pyproject.toml").write_text("[tool.oxitorch.audit]\nignored = []\n")
    assert audit(script, check=False)[0] == 2
    (script.parent / "pyproject.toml").write_text('[tool.oxitorch.audit]\nexclude = ["train.py"]\n')
    assert json.loads(audit(script.parent, "--json")[1])["files"] == 1


def test_the_exit_status_is_for_scripts(script):
    assert audit(script, "--select", "SYN")[0] == 0
    assert audit(script, "--select", "SYN", "--fail-on", "warning")[0] == 1
    assert audit(script, "--fail-on", "never")[0] == 0
    for wrong in (["--select", "XYZ", script], [script.parent / "none.py"], [script.parent / "a.png"], []):
        assert audit(*wrong, check=False)[0] == 2


def test_sarif_annotations_and_a_page(script, rules):
    sarif = json.loads(audit(script, "--sarif")[1])
    (run,) = sarif["runs"]
    assert sarif["version"] == "2.1.0" and {r["id"] for r in run["tool"]["driver"]["rules"]} == set(rules)
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        region = result["locations"][0]["physicalLocation"]["region"]
        assert region["startLine"] >= 1 and region["endColumn"] >= region["startColumn"] >= 1
    assert f"::error file={script},line=8,endLine=8,col=5,title=DEV001 cuda() method::" in audit(script, "--github")[1]
    page = script.parent / "page.html"
    script.write_text(SCRIPT + "\n'<script>alert(1)</script>'; model.cuda()\n")
    audit(script, "--html", page)
    html = page.read_text()
    assert "days needed" in html and "DEV001" in html and "<script" not in html


def test_notebooks_have_cells(tmp_path):
    def cell(*lines):
        return {"cell_type": "code", "source": [line + "\n" for line in lines]}

    cells = [
        {"cell_type": "markdown", "source": ["# cuda"]},
        cell("import torch", "%matplotlib inline"),
        cell("def f(:"),
    ]
    cells += [cell("x = 1", "y = torch.ones(2).cuda()")]
    file = tmp_path / "a.ipynb"
    file.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    found = json.loads(audit(file, "--json")[1])["findings"]
    assert [(f["rule"], f["cell"], f["line"]) for f in found] == [("REA001", 3, 1), ("DEV001", 4, 2)]


def test_a_rule_is_explained(rules):
    text = audit("--explain", "syn001")[1]
    assert text.startswith("# SYN001: item() in the loop\n") and rules["SYN001"]["fix"].split(", ")[0] in text
    assert audit("--explain", "SYN999", check=False)[0] == 2
