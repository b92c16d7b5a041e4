"""Compiled programs on the disk: a second process compiles nothing, and nothing that is wrong with the folder stops work."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from oxitorch import _core

STEP = """
import json, sys, torch
torch.tpu.eager_mode = "strict"  # many programs
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to("tpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(4, 6, device="tpu"), torch.randn(4, 2, device="tpu")
for step in range(3):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
values = [p.cpu().tolist() for p in model.parameters()]
metrics = torch.tpu.metrics()
print(json.dumps({"values": values, **metrics, "peak": torch.tpu.max_memory_allocated()}))
"""
TINY = """
import json, torch
torch.tpu.eager_mode = "strict"
x = torch.arange(6.0, device="tpu")
values = (x * 2 + 1).tolist()
print(json.dumps({"values": values, **torch.tpu.metrics()}))
"""


def result(done):
    return json.loads(done.stdout)


def entries(folder):
    return sorted((folder / "programs" / "v1").glob("*.oxi"))


def test_a_second_process_compiles_nothing_and_computes_the_same(python, empty_cache):
    cold = result(python(STEP, OXITORCH_CACHE_DIR=str(empty_cache)))
    warm = result(python(STEP, OXITORCH_CACHE_DIR=str(empty_cache)))
    assert cold["compiles"] > 5 and cold["loads"] == 0
    assert (warm["compiles"], warm["loads"]) == (0, cold["compiles"])
    assert warm["values"] == cold["values"]
    # Loaded programs take the memory that they are given, as compiled ones do.
    assert warm["donations"] == cold["donations"] > 0 and warm["peak"] == cold["peak"]
    cache = warm["cache"]
    assert cache["disk_hits"] == warm["loads"] and cache["saved_s"] > 0 and cache["made"] == 0
    assert len(entries(empty_cache)) == cache["disk_hits"]


def test_programs_depend_on_options_and_environment(python, empty_cache):
    code = TINY.replace("values =", "OPTIONS\n    values =", 1)
    options = 'with torch.tpu.compiler.custom_compiler_options({"xla_backend_optimization_level": LEVEL}):'
    run = lambda text, **env: result(python(text, OXITORCH_CACHE_DIR=str(empty_cache), **env))  # noqa: E731
    counts = []
    for level, env in ((1, {}), (2, {}), (1, {"NPROC": "1"}), (1, {})):
        done = run(code.replace("OPTIONS", options.replace("LEVEL", str(level))), **env)
        assert done["values"] == [1, 3, 5, 7, 9, 11]
        counts.append((done["compiles"] > 0, done["compiles"] + done["loads"]))
    # `arange` is outside of the block that has the options.
    assert [compiled for compiled, _ in counts] == [True, True, True, False]
    assert len({total for _, total in counts}) == 1


def test_off_means_nothing_is_read_or_written(python, empty_cache):
    done = result(python(TINY, OXITORCH_CACHE_DIR=str(empty_cache), OXITORCH_CACHE="off"))
    assert done["compiles"] > 0 and done["cache"]["stored"] == 0
    assert not (empty_cache / "programs").exists()


def test_damaged_entries_are_compiled_again(python, empty_cache):
    cold = result(python(TINY, OXITORCH_CACHE_DIR=str(empty_cache)))
    flipped, *others = entries(empty_cache)
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    for path in others:
        path.write_bytes(path.read_bytes()[:-7])
    done = python(TINY, OXITORCH_CACHE_DIR=str(empty_cache))
    warm = result(done)
    assert warm["values"] == cold["values"] and done.stderr == ""
    assert warm["cache"]["damaged"] == warm["compiles"] == cold["compiles"]
    assert result(python(TINY, OXITORCH_CACHE_DIR=str(empty_cache)))["compiles"] == 0


def test_a_folder_that_cannot_be_used_is_one_warning(python, empty_cache):
    (empty_cache / "programs").write_text("in the way")
    done = python(TINY, OXITORCH_CACHE_DIR=str(empty_cache))
    assert result(done)["values"] == [1, 3, 5, 7, 9, 11] and result(done)["compiles"] > 1
    assert done.stderr.count("UserWarning") == 1 and str(empty_cache) in done.stderr, done.stderr


def test_what_others_can_write_is_not_used_and_what_is_made_is_the_users_alone(python, empty_cache):
    python("import os; os.umask(0)\n" + TINY, OXITORCH_CACHE_DIR=str(empty_cache))
    made = [p for p in empty_cache.rglob("*") if "shim" not in p.parts]
    assert {p.stat().st_mode & 0o777 for p in made if p.is_dir()} == {0o700}
    assert {p.stat().st_mode & 0o777 for p in made if p.is_file()} == {0o600}
    (empty_cache / "programs").chmod(0o770)
    done = python(TINY, OXITORCH_CACHE_DIR=str(empty_cache))
    assert result(done)["values"] == [1, 3, 5, 7, 9, 11] and result(done)["loads"] == 0
    assert done.stderr.count("UserWarning") == 1 and "chmod go-w" in done.stderr, done.stderr
    (empty_cache / "programs").chmod(0o700)
    # What is no regular file is as good as damaged, and nobody waits for it.
    first, second, third, *_ = entries(empty_cache)
    content = second.read_bytes()
    first.unlink(), second.unlink(), third.unlink()
    os.mkfifo(first)
    (empty_cache / "elsewhere").write_bytes(content)
    second.symlink_to(empty_cache / "elsewhere")
    third.symlink_to("/dev/zero")
    again = result(python(TINY, OXITORCH_CACHE_DIR=str(empty_cache)))
    assert again["values"] == [1, 3, 5, 7, 9, 11] and again["cache"]["damaged"] == again["compiles"] == 3
    assert all(p.is_file() and not p.is_symlink() for p in (first, second, third))
    # The shim is code too.
    empty_cache.chmod(0o777)
    code = "import torch\nprint(torch.tpu.is_available())\ntorch.ones(1, device='tpu')"
    done = python(code, check=False, OXITORCH_CACHE_DIR=str(empty_cache))
    assert done.stdout == "False\n" and "chmod go-w" in done.stderr and str(empty_cache) in done.stderr
    done = python("", "-m", "oxitorch", "doctor", check=False, OXITORCH_CACHE_DIR=str(empty_cache))
    assert done.returncode != 0 and done.stdout.count("chmod go-w") == 2, done.stdout


def test_a_full_disk_is_one_warning(python, empty_cache):
    # A limit of a file's size: a write ends short and the next one fails, as on a full disk.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
    done = python(limit + TINY, OXITORCH_CACHE_DIR=str(empty_cache))
    assert result(done)["values"] == [1, 3, 5, 7, 9, 11]
    assert done.stderr.count("UserWarning") == 1 and "cannot write" in done.stderr, done.stderr
    assert [p.name for p in (empty_cache / "programs" / "v1").iterdir()] == []


def test_processes_that_start_together_compile_each_program_once(python, environment, empty_cache):
    python("import torch; torch.tpu.is_available()", OXITORCH_CACHE_DIR=str(empty_cache))
    wait = "import sys\nprint('ready', flush=True); sys.stdin.readline()\n"
    code = TINY.replace("import json, torch\n", "import json, torch\n" + wait)
    start = lambda: subprocess.Popen(  # noqa: E731
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(OXITORCH_CACHE_DIR=str(empty_cache)),
        cwd="/",
    )
    processes = [start() for _ in range(3)]
    assert [p.stdout.readline() for p in processes] == ["ready\n"] * 3
    for p in processes:
        p.stdin.write("\n")
        p.stdin.flush()
    done = [json.loads(p.communicate(timeout=60)[0]) for p in processes]
    programs = len(entries(empty_cache))
    assert sum(d["compiles"] for d in done) == programs > 0
    assert all(d["compiles"] + d["loads"] == programs for d in done)


def test_a_process_that_waits_for_another_ends_when_it_wants(python, environment, empty_cache):
    code = "import torch\nx = torch.ones(7, device='tpu').erfinv()\n"
    python(code + "x.cpu()", OXITORCH_CACHE_DIR=str(empty_cache))
    code += "torch.tpu.current_stream().query()  # launches\nwhile not torch.tpu.metrics()['cache']['waits']: pass"
    paths = entries(empty_cache)
    leases = [path.with_suffix(".lease") for path in paths]
    for path in paths:
        path.unlink()
    # A process elsewhere that is at work, as far as anybody can see.
    for beat in range(1000):
        for lease in leases:
            lease.write_text(f"number elsewhere-1-1 {beat}\n")
        if beat == 0:
            child = subprocess.Popen(
                [sys.executable, "-c", code],
                stderr=subprocess.PIPE,
                env=environment(OXITORCH_CACHE_DIR=str(empty_cache)),
                cwd="/",
            )
        if child.poll() is not None:
            break
        time.sleep(0.1)
    assert (child.wait(), child.stderr.read()) == (0, b"")
    assert beat < 300, "it did not wait for the other one to end"


def test_programs_that_were_evicted_come_back(python, empty_cache):
    code = """
import json, torch
torch.tpu.eager_mode = "strict"
x = torch.ones(4, device="tpu")
for round in range(3):
    values = [f(x).sum().item() for f in (torch.sin, torch.cos, torch.exp, torch.neg)]
print(json.dumps({"values": values, **torch.tpu.metrics()}))
"""
    for folder in ({"OXITORCH_CACHE_DIR": str(empty_cache)}, {"OXITORCH_CACHE": "off"}):
        done = result(python(code, OXITORCH_LOADED_PROGRAMS="2", **folder))
        assert done["values"] == pytest.approx([4 * v for v in (0.84147098, 0.54030231, 2.71828183, -1)])
        again = done["loads"] if "OXITORCH_CACHE_DIR" in folder else done["compiles"] - done["programs"]
        assert again >= 8, done


def test_machines_share_a_folder(python, tmp_path, empty_cache):
    shared = str(tmp_path / "shared")
    cold = result(python(TINY, OXITORCH_CACHE_DIR=str(empty_cache), OXITORCH_CACHE_SHARED=shared))
    for path in entries(empty_cache):
        path.unlink()
    warm = result(python(TINY, OXITORCH_CACHE_DIR=str(empty_cache), OXITORCH_CACHE_SHARED=shared))
    assert (warm["compiles"], warm["cache"]["shared_hits"]) == (0, cold["compiles"])
    assert len(entries(empty_cache)) == cold["compiles"]


def test_machines_share_an_object_store(python, bucket, tmp_path, empty_cache):
    objects, where = bucket
    cold = result(python(TINY, OXITORCH_CACHE_DIR=str(empty_cache), **where))
    assert len(objects) == cold["compiles"] and all(name.endswith(".oxi") for name in objects), "no lease stays"
    for path in entries(empty_cache):
        path.unlink()
    warm = result(python(TINY, OXITORCH_CACHE_DIR=str(empty_cache), **where))
    assert (warm["compiles"], warm["cache"]["shared_hits"]) == (0, cold["compiles"])
    assert len(entries(empty_cache)) == cold["compiles"] and warm["values"] == cold["values"]


def test_an_object_store_that_does_not_work_is_one_warning(python, bucket, empty_cache):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes what comes and says nothing
        start = time.monotonic()
        where = {"OXITORCH_CACHE_SHARED": f"http://127.0.0.1:{silent.getsockname()[1]}/x"}
        done = python(TINY, OXITORCH_CACHE_DIR=str(empty_cache), **where)
        took = time.monotonic() - start
    assert done.stderr.count("UserWarning") == 1 and "no answer within 5.000 s" in done.stderr
    assert 0 < result(done)["cache"]["errors"] <= 4 and took < 60, "those that asked at once"
    warm = result(python(TINY, OXITORCH_CACHE_DIR=str(empty_cache), **where))
    assert warm["compiles"] == 0, "the disk has them, and the store is not asked"


def test_a_shared_place_that_cannot_be_is_named(python):
    code = "import torch; torch.ones(1, device='tpu')"
    done = python(code, check=False, OXITORCH_CACHE_SHARED="ftp://host/x")
    what_to_do = "s3://" if _core.has_object_stores() else "--features object-store"
    assert "OXITORCH_CACHE_SHARED=ftp://host/x: " in done.stderr and what_to_do in done.stderr


def test_explain_says_what_differs_from_the_entry_on_the_disk(python, empty_cache):
    code = """
import torch
torch.tpu.eager_mode = "strict"
x = torch.arange(6.0, device="tpu")
with torch.tpu.compiler.custom_compiler_options({"xla_backend_optimization_level": LEVEL}):
    x.erfinv_()
torch.tpu.synchronize()
print([line for line in torch.tpu.explain(last=1).split("\\n") if "cache folder" in line])
"""
    run = lambda level, **env: python(  # noqa: E731
        code.replace("LEVEL", str(level)), OXITORCH_CACHE_DIR=str(empty_cache), **env
    )
    has_it = "the cache folder has it, but not for the same"
    level = "xla_backend_optimization_level = Int({})"
    assert run(1).stdout == "[]\n", "nothing was there"
    assert run(1).stdout == "[]\n", "it was there"
    assert run(2).stdout == f"['  {has_it} `options` (here {level.format(2)}, there {level.format(1)})']\n"
    printed = run(2, NPROC="1", OXITORCH_EXPLAIN="1")
    line = f'{has_it} `environment` (here [("NPROC", "1")], there [])'
    assert printed.stdout == f"['  {line}']\n"
    assert f"oxitorch: erfinv: {line}\n" in printed.stderr
