"""What `oxitorch preflight` shows while it works, and what it keeps when Ctrl-C comes."""

import json
import os
import pty
import select
import stat
import subprocess
import sys
import time

import pytest

SCRIPT = """
import torch
x = torch.zeros(8, 8, device="tpu")
(x @ x).sum().item()
(x + 1).sum().item()
"""

# Compiles one program, and is at the next one until a signal comes.
COMPILER = """#!{python}
import json, os, signal, sys
if "aot" not in sys.argv:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
signal.signal(signal.SIGINT, signal.SIG_DFL)
def say(what):
    print("oxitorch-aot", json.dumps(what), flush=True)
folder = next(a for a in sys.argv if os.path.isdir(a))
first, second = [p["id"] for p in json.load(open(os.path.join(folder, "capture.json")))["programs"]]
say({{"device": {{"kind": "slow", "count": 1, "memory_bytes": 1 << 30, "version": "none"}}}})
memory = dict(arguments=1000, outputs=200, aliased=0, temporaries=30, code=4, peak=1230)
done = dict(id=first, compile_s=0.5, error=None, out_of_memory=False, memory=memory, effort="fast", flops=7.0)
done["bytes_accessed"] = 5.0
say({{"begun": first}})
say({{"begun": second}})
say({{"done": done}})
sys.stdin.read() if "--wait-for-end" in os.environ.get("SLOW", "") else signal.pause()
open(os.environ["ENDED"], "w").close()
"""

# The command, with another interpreter for its children.
COMMAND = """
import sys
from oxitorch import _cli
facts = _cli.facts
_cli.facts = lambda: {**facts(), "executable": sys.argv[1]}
sys.exit(_cli.main(sys.argv[2:]))
"""


@pytest.fixture
def command(tmp_path):
    """The arguments of a preflight whose compiler never ends."""
    script, compiler = tmp_path / "train.py", tmp_path / "compiler"
    script.write_text(SCRIPT)
    compiler.write_text(COMPILER.format(python=sys.executable))
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    report = tmp_path / "report.json"
    args = ["preflight", "--json", str(report), "--slice", "cpu", "--slice", "cpu", str(script)]
    return [sys.executable, "-c", COMMAND, str(compiler), *args], report


def until(fd: int, seen: str, wanted: str, seconds: float = 120) -> str:
    """Reads from a terminal until it has shown a text; all that it has shown."""
    end = time.monotonic() + seconds
    while wanted not in seen:
        ready, _, _ = select.select([fd], [], [], max(end - time.monotonic(), 0))
        assert ready, f"no `{wanted}` in\n{seen}"
        try:
            seen += os.read(fd, 4096).decode()
        except OSError as e:  # nobody has the other end
            raise AssertionError(f"ended without `{wanted}`:\n{seen}") from e
    return seen


def test_a_terminal_has_a_line_that_ticks_and_ctrl_c_keeps_what_is_known(command, environment, tmp_path):
    argv, report = command
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(argv[0], argv, environment(TERM="xterm", ENDED=str(tmp_path / "ended")))
    # The line is written anew with the seconds that have gone.
    seen = until(fd, "", "1 of 2 done in 500 ms")
    seen = until(fd, seen, "compiling 2 of 2 for cpu")
    seen = until(fd, seen, " ops, 2 s")
    assert "\r\x1b[K" in seen
    os.write(fd, b"\x03")
    seen = until(fd, seen, "interrupted before it was its turn")
    _, status = os.waitpid(pid, 0)
    os.close(fd)
    assert os.waitstatus_to_exitcode(status) == 2
    cpu, other = json.loads(report.read_text())["slices"]
    assert cpu["interrupted"] and cpu["verdict"] == "unknown"
    assert cpu["reason"].startswith("interrupted after ") and cpu["reason"].endswith(
        "1 of 2 programs compiled until then"
    )
    first, second = cpu["programs"]
    assert first["need_bytes"] == first["beside_bytes"] + 1234 and cpu["need_bytes"] == first["need_bytes"]
    assert first["work"]["flops"] == 7 and second["error"] == "it was not compiled"
    assert f", at {second['name']}, " in cpu["reason"]
    # Nothing was done for the next one.
    assert other["interrupted"] and other["programs"] == [] and seen.count("without a device") == 1
    assert not (tmp_path / "ended").exists()


def test_a_compiler_does_not_outlive_the_command(command, environment, tmp_path):
    argv, _ = command
    ended = tmp_path / "ended"
    env = environment(SLOW="--wait-for-end", ENDED=str(ended))
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with process:
        for line in process.stderr:
            if "1 of 2 done" in line:
                process.kill()
    for _ in range(600):
        if ended.exists():
            return
        time.sleep(0.1)
    raise AssertionError("the compiler goes on")
