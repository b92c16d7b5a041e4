"""The `oxitorch` command as users start it."""

import gzip
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from oxitorch import _env


def test_help_is_light(python):
    done = python("", "-X", "importtime", "-m", "oxitorch", "--help")
    assert "doctor" in done.stdout and "Usage:" in done.stdout
    assert " torch\n" not in done.stderr and " numpy\n" not in done.stderr


def test_the_console_script(python):
    script = Path(sys.executable).parent / "oxitorch"
    done = python(f"import subprocess; subprocess.run([{str(script)!r}, '--version'], check=True)")
    assert done.stdout.startswith("oxitorch ")


def test_bad_arguments_have_status_2(python):
    done = python("", "-m", "oxitorch", "doctr", check=False)
    assert done.returncode == 2 and "doctor" in done.stderr


def test_doctor_on_a_good_installation(python):
    done = python("", "-m", "oxitorch", "doctor", "--json", check=False)
    report = json.loads(done.stdout)
    errors = [c for c in report["checks"] if c["status"] == "error"]
    assert errors == [] and done.returncode == 0
    found = {(c["section"], c["name"]): c["found"] for c in report["checks"]}
    assert (
        "xla-cpu-pjrt" in found["Plugins and platform", "cpu"] and "PJRT API 0." in found["Plugins and platform", "cpu"]
    )
    assert "StableHLO" in found["Plugins and platform", "cpu"] and "device" in found["Plugins and platform", "cpu"]
    assert ("C++ shim", "compiler") in found and {"programs", "shim", "ports"} <= {name for _, name in found}
    aot = found["Plugins and platform", "ahead of time"]
    has_libtpu = importlib.util.find_spec("libtpu") is not None
    assert ("libtpu compiles without a TPU (v5e:1x1" in aot) if has_libtpu else aot == "no libtpu"
    aot = found["Plugins and platform", "ahead of time, GPUs"]
    if "no plugin installed" in found["Plugins and platform", "cuda"]:
        assert aot == "no plugin"
    else:
        assert "compiles without a GPU (h200:1x1x1" in aot or aot == "no ptxas and libdevice"
    assert re.search(r" of 5.0 GiB in .*programs/v1$", found["Machine", "compiled programs"])


def test_doctor_text_ends_with_a_sum_and_has_no_colours_in_a_pipe(python):
    done = python("", "-m", "oxitorch", "doctor")
    assert "\x1b" not in done.stdout
    last = done.stdout.rstrip().splitlines()[-1]
    assert last == "Nothing to do." or last.endswith("the device works.")


def test_doctor_says_what_is_wrong(python, tmp_path):
    (tmp_path / "torch_tpu-0.2.0.dist-info").mkdir()
    done = python(
        "", "-m", "oxitorch", "doctor", "--json", check=False,
        OXITORCH_PLATFORM="abacus", OXITORCH_SHIM="/nonexistent.so", CXX="/nonexistent/g++", PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 1
    checks = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    for name in ("OXITORCH_PLATFORM", "for this torch", "compiler", "torch-tpu"):
        assert checks[name]["status"] == "error" and checks[name]["hint"], name


def test_doctor_survives_a_plugin_that_aborts(python, tmp_path):
    # A library that ends the process while it is loaded.
    source = tmp_path / "bad.c"
    source.write_text("#include <stdlib.h>\n__attribute__((constructor)) static void f(void) { abort(); }\n")
    folder = tmp_path / "xla_plugins" / "xla_cpu_pjrt"
    folder.mkdir(parents=True)
    library = folder / "xla_cpu_pjrt.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    done = python("", "-m", "oxitorch", "doctor", "--json", check=False, PYTHONPATH=str(tmp_path))
    cpu = next(c for c in json.loads(done.stdout)["checks"] if c["name"] == "cpu")
    assert done.returncode == 1 and cpu["status"] == "error" and "signal: 6" in cpu["found"]


def test_doctor_is_quick(python):
    # Of the processor, with a bound in time that a busy machine keeps, too.
    used = lambda: sum(os.times()[2:4])  # noqa: E731
    before, started = used(), time.perf_counter()
    python("", "-m", "oxitorch", "doctor")
    assert used() - before < 10
    assert time.perf_counter() - started < 60


def test_env_lists_the_whole_table(python):
    done = python("", "-m", "oxitorch", "env", OXITORCH_CPU_DEVICES="3", OXITORCH_NAN_TRAP="maybe")
    for v in _env.TABLE:
        assert v.name in done.stdout
    assert "OXITORCH_CPU_DEVICES = 3" in done.stdout
    assert "OXITORCH_NAN_TRAP  OXITORCH_NAN_TRAP=maybe: expected 0 or 1" in done.stdout
    listed = json.loads(python("", "-m", "oxitorch", "env", "--json").stdout)
    assert [v["name"] for v in listed["variables"]] == [v.name for v in _env.TABLE]


def test_shim_build_reports_a_failure(python, tmp_path):
    done = python("", "-m", "oxitorch", "shim", "build", "--into", str(tmp_path), check=False, CXX="false")
    assert done.returncode == 1 and done.stderr.startswith("error: building the shim: `false` failed with status 1")


def test_a_reader_that_goes_away_is_no_error(python):
    code = f"""
import subprocess
p = subprocess.Popen([{sys.executable!r}, "-m", "oxitorch", "env"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
p.stdout.close()
print(p.stderr.read().decode(), p.wait())
"""
    assert python(code).stdout.split() == ["0"]


@pytest.fixture
def cache(python, empty_cache, tmp_path):
    """`cache("ls")` runs `oxitorch cache ls` on a folder into which a script has compiled; `cache.folder` is that."""

    def run(*args, **options):
        return python("", "-m", "oxitorch", "cache", *args, OXITORCH_CACHE_DIR=str(empty_cache), **options)

    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "torch.tpu.eager_mode = 'strict'  # several programs\n"
        "torch.ones(3, device='tpu').mul(2).cpu()\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    run.folder, run.script = empty_cache, script
    return run


def test_cache_warm_list_and_clear(cache, python, tmp_path):
    assert len(cache("ls").stdout.splitlines()) == 1, "a heading and no programs"
    done = cache("warm", str(cache.script), "5", check=False)
    assert done.returncode == 5, "the script's"
    assert re.fullmatch(r"compiled \d programs in .*; 0 were there\n", done.stdout), done.stdout
    assert re.match(r"compiled 0 programs .*; [2-9] were there\n", cache("warm", str(cache.script), "0").stdout)

    listed = json.loads(cache("ls", "--json", "--sort", "cost").stdout)
    assert len(listed) >= 2 and all(p["hits"] == 1 and p["compile_s"] > 0 for p in listed)
    assert sorted(listed, key=lambda p: -p["compile_s"]) == listed
    key = listed[0]["key"]
    assert {"oxitorch", "plugin", "platform", "devices", "environment", "cpu", "cpu features"} < set(key)
    assert "stablehlo" in key["module"]["text"] and "xla_allow_excess_precision" in key["options"]["text"]
    assert "mul.Tensor" in cache("ls", "mul", "--long").stdout and "mul" not in cache("ls", "nothing").stdout

    stats = json.loads(cache("stats", "--json").stdout)
    assert (stats["programs"], stats["hits"]) == (len(listed), len(listed)) and stats["saved_s"] > 0
    assert f"{len(listed)}, " in cache("stats").stdout and str(cache.folder) in cache("stats").stdout

    copy = str(tmp_path / "copy")
    assert cache("--dir", copy, "warm", "--from", str(cache.folder)).stdout.startswith(f"copied {len(listed)} programs")
    assert cache("clear").stdout.startswith(f"removed {len(listed)} programs")
    assert json.loads(cache("stats", "--json").stdout)["programs"] == 0
    assert json.loads(cache("stats", "--json", "--dir", copy).stdout)["programs"] == len(listed)


def test_cache_warm_keeps_programs_that_call_pytorchs_kernels(cache, tmp_path):
    script = tmp_path / "product.py"
    script.write_text(
        "import torch\n"
        "x = torch.randn(512, 512, device='tpu', dtype=torch.float64)\n"
        "(x @ x).cpu()\n"
        "m = torch.tpu.metrics()\n"
        "print(m['library_calls'], m['compiles'])\n"
    )
    cold, warm = (cache("warm", str(script)).stdout for _ in range(2))
    assert re.match(r"1 [1-9]\d*\ncompiled [1-9]\d* programs? in ", cold), cold
    assert re.match(r"1 0\ncompiled 0 programs in .*; [1-9]\d* (was|were) there", warm), warm


def test_cache_gc(cache):
    cache("warm", str(cache.script), "0")
    programs = cache.folder / "programs" / "v1"
    damaged, *others = sorted(programs.glob("*.oxi"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (programs / ".tmp-of-nobody").write_text("half")
    foreign = cache.folder / "programs" / "v0"
    foreign.mkdir()
    for age, name in ((40, "old"), (1, "young")):
        (foreign / name).write_text(name)
        then = time.time() - age * 86400
        os.utime(foreign / name, (then, then))
    said = cache("gc").stdout
    assert "removed 1 damaged program\n" in said
    assert "half written" in said and "other versions" in said and f"{len(others)} program" in said
    assert sorted(p.name for p in programs.iterdir()) == [p.name for p in others]
    assert [p.name for p in foreign.iterdir()] == ["young"]

    os.utime(others[0], (0, 0))
    assert "not used for 7 days" in cache("gc", "--max-age", "7").stdout and not others[0].exists()
    assert "0 programs left" in cache("gc", "--max-size", "10").stdout
    assert cache("gc", "--max-size", "x", check=False).returncode == 2


def test_cache_commands_on_an_object_store(cache, bucket, tmp_path):
    objects, where = bucket
    cache("warm", str(cache.script), "0", **where)
    assert len(objects) >= 2
    said = cache("stats", **where).stdout
    assert re.search(rf"^shared +s3://bucket/some/prefix: {len(objects)} programs, ", said, re.M), said
    stats = json.loads(cache("stats", "--json", **where).stdout)["shared"]
    assert stats == {
        "place": where["OXITORCH_CACHE_SHARED"],
        "programs": len(objects),
        "bytes": sum(map(len, objects.values())),
    }
    assert "store" in cache("stats", "--shared", **where).stdout
    listed = json.loads(cache("ls", "--shared", "--json", **where).stdout)
    assert len(listed) == len(objects) and all(p["compile_s"] > 0 for p in listed)
    kept, broken = sorted(objects)[1:], sorted(objects)[0]
    objects[broken] = objects[broken][:-1] + b"?"
    assert "removed 1 damaged program\n" in cache("gc", "--shared", **where).stdout and sorted(objects) == kept
    assert cache("clear", "--shared", **where).stdout.startswith(f"removed {len(kept)} program") and objects == {}
    copied = cache("warm", "--shared", "--from", str(cache.folder), **where).stdout
    assert copied.startswith(f"copied {len(listed)} program") and len(objects) == len(listed)
    done = cache("warm", "--shared", str(cache.script), "0", check=False, **where)
    assert done.returncode == 1 and "leave out `--shared`" in done.stderr
    away = where | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    assert "cannot be read: " in cache("stats", **away).stdout
    assert "Connection refused" in cache("ls", "--shared", check=False, **away).stderr


def test_cache_commands_on_settings_that_are_wrong_or_off(cache):
    assert "folder" in cache("stats", OXITORCH_CACHE_SIZE="much").stdout
    done = cache("warm", str(cache.script), "0", check=False, OXITORCH_CACHE="off")
    assert done.returncode == 1 and "OXITORCH_CACHE" in done.stderr
    assert "OXITORCH_CACHE_SHARED" in cache("ls", "--shared", check=False).stderr
    assert cache("warm", check=False).returncode == 2


@pytest.fixture
def script(tmp_path):
    """A script that uses the device, says its arguments, and ends as they say."""
    file = tmp_path / "train.py"
    file.write_text(
        "import signal, sys, torch\n"
        "x = torch.ones(3, device='tpu')\n"
        "print((x + 1).tolist(), sys.argv[1:], flush=True)\n"
        "if sys.argv[-1] == 'wait':\n"
        "    signal.pause()\n"
        "sys.exit(int(sys.argv[-1]))\n"
    )
    return file


def test_trace_run_is_the_script_with_a_file_more(python, script, tmp_path):
    out = tmp_path / "t.json.gz"
    done = python("", "-m", "oxitorch", "trace", "run", "-o", str(out), str(script), "--lr", "7", check=False)
    assert done.returncode == 7 and done.stdout == "[2.0, 2.0, 2.0] ['--lr', '7']\n"
    assert str(out) in done.stderr and "ui.perfetto.dev" in done.stderr
    with gzip.open(out) as f:
        events = json.load(f)["traceEvents"]
    assert {"window", "line", "op", "program", "copy"} <= {e.get("cat") for e in events}
    assert f"{script.name}:3" in {e["name"] for e in events if e.get("cat") == "line"}


def test_trace_run_of_a_module_and_of_a_script_without_device(python, script, tmp_path):
    out = str(tmp_path / "t.json")
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))}
    done = python("", "-m", "oxitorch", "trace", "run", "-o", out, "-m", "train", "0", **env)
    assert done.stdout.endswith("['0']\n") and json.loads(Path(out).read_text())["traceEvents"]
    script.write_text("print('nothing')")
    done = python("", "-m", "oxitorch", "trace", "run", "-o", out, str(script))
    assert "no timeline: the script did not use the device" in done.stderr and not Path(out).exists()
    done = python("", "-m", "oxitorch", "trace", "run", "-o", "/nowhere/t.json", str(script), check=False)
    assert done.returncode == 1 and "/nowhere is not a folder" in done.stderr and done.stdout == ""


def test_ctrl_c_ends_a_traced_script_and_writes_the_file(environment, script, tmp_path):
    out = tmp_path / "t.json"
    argv = [sys.executable, "-m", "oxitorch", "trace", "run", "-o", str(out), str(script), "wait"]
    # A group of its own, so that the signal reaches both, as a terminal's does.
    with subprocess.Popen(
        argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stdout.readline().startswith("[2.0")
        os.killpg(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and err.count("KeyboardInterrupt") == 1, err
    assert any(e.get("cat") == "program" for e in json.loads(out.read_text())["traceEvents"])


def test_graphs_record_list_and_show(python, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "x = torch.rand(32, 16, device='tpu')\n"
        "for _ in range(3):\n"
        "    y = (x @ x.mT).relu().sum()\n"
        "    y.item()\n"
        "sys.exit(4)\n"
    )
    folder = str(tmp_path / "graphs")
    done = python("", "-m", "oxitorch", "graphs", "--dir", folder, "record", str(script), check=False)
    assert done.returncode == 4 and re.search(r"graphs: \d programs", done.stderr), done.stderr

    def graphs(*args, **options):
        return python("", "-m", "oxitorch", "graphs", *args, OXITORCH_GRAPHS=folder, **options)

    listed = json.loads(graphs("ls", "--json").stdout)
    assert [g["device_s"] for g in listed] == sorted((g["device_s"] for g in listed), reverse=True)
    (program,) = [g for g in listed if any(o["op"] == "relu" for o in g["ops"]) and g["launches"] == 2]
    assert program["ended_by"] == "read" and program["ended_at"].startswith(f"{script}:5 in")
    assert program["inputs"] == ["float32[32, 16]"] and program["outputs"] == ["float32[]"]
    assert [o["line"].partition(" in ")[0] for o in program["ops"]] == [f"{script}:4"] * len(program["ops"])
    assert program["cost"]["flops"] >= 2 * 32 * 32 * 16
    assert program["memory_bytes"]["arguments"] >= 32 * 16 * 4
    assert program["from"] in ("compiled", "loaded") and program["compile_s"] > 0

    table = graphs().stdout
    assert len(table.splitlines()) == 1 + len(listed) and program["id"] in table and "train.py:4" in table
    assert len(graphs("ls", "no such op").stdout.splitlines()) == 1
    shown = graphs("show", program["id"][:7]).stdout
    for text in ("train.py:4", "relu", "flops", "arguments", "stablehlo.dot_general", "HloModule", "ENTRY %"):
        assert text in shown, text
    hlo = graphs("show", program["id"], "--only", "hlo").stdout
    assert hlo.startswith("HloModule ") and hlo.rstrip().endswith("}")
    whole = json.loads(graphs("show", program["id"], "--json").stdout)
    assert whole["optimized_hlo"].strip() == hlo.strip() and whole["stablehlo"].startswith("module @")
    assert graphs("show", "zzz", check=False).stderr.startswith("error: no program whose id begins with zzz")
    missing = python("", "-m", "oxitorch", "graphs", "--dir", str(tmp_path / "none"), check=False)
    assert missing.returncode == 1 and "oxitorch graphs record SCRIPT" in missing.stderr
