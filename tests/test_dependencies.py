"""What enters the dependency tree: licences, bans and sources as deny.toml says, a reason for each direct choice."""

import json
import re
import subprocess

import pytest
import tomllib


@pytest.fixture(scope="module")
def policy(repo):
    return tomllib.loads((repo / "deny.toml").read_text())


@pytest.fixture(scope="module")
def metadata(repo):
    argv = [
        "cargo",
        "metadata",
        "--format-version=1",
        "--locked",
        "--all-features",
        "--filter-platform=x86_64-unknown-linux-gnu",
    ]
    return json.loads(subprocess.run(argv, cwd=repo, check=True, capture_output=True, text=True).stdout)


def allowed(expression: str, names: set[str]) -> bool:
    """Whether an SPDX expression can be met with these licences."""
    tokens = re.findall(r"\(|\)|[^\s()/]+(?:\s+WITH\s+[^\s()/]+)?|/", expression)
    words = {"AND": "and", "OR": "or", "/": "or", "(": "(", ")": ")"}
    return eval(" ".join(words.get(t) or str(" ".join(t.split()) in names) for t in tokens))


def test_expressions():
    names = {"MIT", "Apache-2.0 WITH LLVM-exception"}
    assert allowed("MIT OR GPL-3.0", names) and allowed("GPL-3.0/MIT", names)
    assert not allowed("MIT AND GPL-3.0", names) and not allowed("(MIT OR ISC) AND Zlib", names)
    assert allowed("Apache-2.0 WITH LLVM-exception", names) and not allowed("Apache-2.0", names)


def test_licences(metadata, policy):
    names = set(policy["licenses"]["allow"])
    bad = [
        f"{p['name']}: {p['license']}"
        for p in metadata["packages"]
        if not p["license"] or not allowed(p["license"], names)
    ]
    assert bad == []


def test_bans_and_sources(metadata, policy):
    banned = {b["name"]: b["reason"] for b in policy["bans"]["deny"]}
    for p in metadata["packages"]:
        assert p["name"] not in banned, f"{p['name']}: {banned[p['name']]}"
        assert p["source"] in (None, "registry+https://github.com/rust-lang/crates.io-index"), p["id"]


def test_each_direct_dependency_has_its_reason(metadata, repo):
    page = (repo / "docs" / "dependencies.md").read_text()
    explained = set(re.findall(r"^- `([^`]+)`", page, re.M))
    own = {p["name"] for p in metadata["packages"] if p["source"] is None}
    direct = {d["name"] for p in metadata["packages"] if p["source"] is None for d in p["dependencies"]} - own
    python = tomllib.loads((repo / "pyproject.toml").read_text())
    project, groups = python["project"], python["dependency-groups"]
    lists = [project["dependencies"], *project["optional-dependencies"].values(), *groups.values()]
    direct |= {re.match(r"[\w.-]+", d).group() for group in lists for d in group}
    assert direct - explained == set(), "say why in docs/dependencies.md"
    assert explained - direct <= {"maturin", "uv", "ruff"}, "no longer used"
