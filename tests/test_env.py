"""The table of environment variables and what is made from it."""

import re

import pytest
from oxitorch import _env


def test_the_reference_page_is_the_table(repo):
    page = (repo / "docs" / "environment.md").read_text()
    assert page == _env.markdown(), "run `make docs`"


def test_no_other_python_file_reads_the_environment(repo):
    # CXX, XDG_CACHE_HOME and what a child is given are not settings of oxitorch.
    for path in (repo / "python").rglob("*.py"):
        if path.name == "_env.py":
            continue
        for name in re.findall(r"OXITORCH_[A-Z_]+", path.read_text()):
            known = {v.name for v in _env.TABLE} | {"OXITORCH_CLI_FACTS"}
            assert name in known, f"{path.name} names {name}, which the table lacks"
        assert 'environ.get("OXITORCH' not in path.read_text(), path


@pytest.mark.parametrize(
    ("var", "text", "value"),
    [
        (_env.PLATFORM, "", None),
        (_env.PLATFORM, " CPU ", "cpu"),
        (_env.CPU_DEVICES, "8", 8),
        (_env.NAN_TRAP, "1", True),
        (_env.NAN_TRAP, "off", False),
        (_env.SHIM, "/x/y.so", "/x/y.so"),
    ],
)
def test_values(var, text, value):
    assert var.read({var.name: text}) == value
    assert var.read({}) is None


@pytest.mark.parametrize(
    ("var", "text"),
    [
        (_env.PLATFORM, "gpu"),
        (_env.CPU_DEVICES, "0"),
        (_env.CPU_DEVICES, "two"),
        (_env.CPU_DEVICES, "-1"),
        (_env.NAN_TRAP, "maybe"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_variable(var, text):
    with pytest.raises(ValueError, match=f"^{var.name}={text}: expected"):
        var.read({var.name: text})


def test_the_cache_folder(monkeypatch):
    monkeypatch.delenv("OXITORCH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert _env.cache_dir() == "/x/oxitorch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert _env.cache_dir() == "/home/me/.cache/oxitorch"
    monkeypatch.setenv("OXITORCH_CACHE_DIR", "~/mine")
    assert _env.cache_dir() == "/home/me/mine"
