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


def features(repo, *of: str) -> dict[str, set[str]]:
    """The features of each package, by its name and version."""
    argv = ["cargo", "tree", "--locked", "--prefix", "none", "--format", "{p}|{f}", *of]
    out = subprocess.run(argv, cwd=repo, check=True, capture_output=True, text=True).stdout
    found: dict[str, set[str]] = {}
    for line in filter(None, out.splitlines()):
        package, _, of_it = line.removesuffix(" (*)").partition("|")
        found.setdefault(" ".join(package.split()[:2]), set()).add(of_it)
    return found


def test_the_tests_compile_what_the_wheel_is_built_of_no_second_time(repo):
    """A package with other features is another one for cargo, and with it all that stand on it."""
    wheel = features(repo, "-p", "oxitorch-torch", "--edges", "normal,build")
    tests = features(repo, "--workspace", "--edges", "normal,build,dev")
    assert len(wheel) > 100 and {name: (of, tests[name]) for name, of in wheel.items() if of != tests[name]} == {}
