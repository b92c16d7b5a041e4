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
        (_env.CUDA_DEVICES, "2, 0", [2, 0]),
        (_env.CUDA_MEMORY_FRACTION, ".9", 0.9),
        (_env.CUDA_MEMORY_FRACTION, "1", 1.0),
        (_env.NAN_TRAP, "1", True),
        (_env.NAN_TRAP, "off", False),
        (_env.SHIM, "/x/y.so", "/x/y.so"),
        (_env.CACHE_SIZE, "1000", 1000),
        (_env.CACHE_SIZE, "1.5G", 3 << 29),
        (_env.CACHE_SIZE, "20 MiB", 20 << 20),
        (_env.CACHE_SIZE, "8kb", 8 << 10),
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
        (_env.CUDA_DEVICES, "0,0"),
        (_env.CUDA_DEVICES, "0,-1"),
        (_env.CUDA_DEVICES, "GPU-1"),
        (_env.CUDA_MEMORY_FRACTION, "0"),
        (_env.CUDA_MEMORY_FRACTION, "1.5"),
        (_env.CUDA_MEMORY_FRACTION, "nan"),
        (_env.NAN_TRAP, "maybe"),
        (_env.CACHE_SIZE, "much"),
        (_env.CACHE_SIZE, "-1G"),
        (_env.CACHE_SIZE, "1P"),
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


def test_programs_are_not_kept_where_the_user_says_so_or_wants_to_see_them_compiled(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("OXITORCH_CACHE_SHARED", "/shared")
    config = _env.core_config()
    assert (config["cache_dir"], config["cache_shared"]) == (_env.cache_dir(), "/shared")
    for name, value in (("OXITORCH_CACHE", "off"), ("XLA_FLAGS", "--xla_dump_to=/tmp/x")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            config = _env.core_config()
            assert (config["cache_dir"], config["cache_shared"]) == (None, None)
    monkeypatch.setenv("OXITORCH_CACHE_SHARED", "s3://bucket/prefix")
    monkeypatch.setenv("AWS_REGION", "here")
    config = _env.core_config()
    assert config["cache_shared"] == "s3://bucket/prefix" and ("AWS_REGION", "here") in config["cache_shared_settings"]


def test_programs_depend_on_what_compilers_read(monkeypatch):
    for name in _env.COMPILER:
        monkeypatch.delenv(name, raising=False)
    assert _env.core_config()["compiler_environment"] == []
    monkeypatch.setenv("NPROC", "3")
    assert _env.core_config()["compiler_environment"] == [("NPROC", "3")]


def test_the_hosts_of_a_tpu_are_named_for_people():
    assert _env.tpu_hosts({}) == []
    assert _env.tpu_hosts({"TPU_WORKER_HOSTNAMES": "one"}) == []
    assert _env.tpu_hosts({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}) == [
        "TPU_WORKER_HOSTNAMES has 2, this is number 1: a, b"
    ]
    (text,) = _env.tpu_hosts({"TPU_PROCESS_ADDRESSES": "a:1,b:2,c:3"})
    assert "has 3, and CLOUD_TPU_TASK_ID does not say which" in text
    (text,) = _env.tpu_hosts({"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_COORDINATOR_ADDRESS": "x:8080"})
    assert text == "2 slices meet at x:8080, MEGASCALE_SLICE_ID is not set"
