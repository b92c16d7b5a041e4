"""The `oxitorch` command as users start it."""

import json
import subprocess
import sys
import time
from pathlib import Path

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
    assert ("C++ shim", "compiler") in found


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
    started = time.perf_counter()
    python("", "-m", "oxitorch", "doctor")
    assert time.perf_counter() - started < 10


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
