"""Programs that take long to compile run in a quick version first, which is replaced while a loop goes on."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

# A training step whose gradients and update are one program of some hundred ops on little data.
LOOP = """
import json, os, signal, sys, time, torch
torch.manual_seed(0)
layers = [m for _ in range(DEPTH) for m in (torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8))]
model = torch.nn.Sequential(*layers).to("tpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, y = torch.randn(16, 8).to("tpu"), torch.randn(16, 8).to("tpu")

def step():
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    torch.tpu.synchronize()
    return loss

def until(key, n=1):
    while torch.tpu.metrics()[key] < n:
        time.sleep(0.01)

def report(**more):
    print(json.dumps({"values": [p.flatten()[0].item() for p in model.parameters()], **torch.tpu.metrics(), **more}))
"""


def loop(body, depth=4):
    return LOOP.replace("DEPTH", str(depth)) + body


def result(done):
    assert done.stderr == ""
    return json.loads(done.stdout)


STEPS = """
losses = [step() for _ in range(4)]
SWAP
losses += [step() for _ in range(3)]
report(losses=[l.item() for l in losses])
"""


def steps(python, folder, swap="until('swaps')", before="", **env):
    return result(python(before + loop(STEPS.replace("SWAP", swap)), OXITORCH_CACHE_DIR=str(folder), **env))


def test_a_loop_goes_on_while_its_program_is_compiled(python, empty_cache):
    on = steps(python, empty_cache)
    off = steps(python, empty_cache, "pass", OXITORCH_BACKGROUND_COMPILE="0")
    # The first step is a program of its own and runs once: nothing better is made of it.
    assert (on["background_compiles"], on["swaps"]) == (1, 1)
    assert (off["background_compiles"], off["swaps"]) == (0, 0)
    for key in ("programs", "launches", "donations"):
        assert on[key] == off[key], key
    assert on["losses"] == pytest.approx(off["losses"], rel=1e-5)
    assert on["values"] == pytest.approx(off["values"], rel=1e-4, abs=1e-5)


def test_what_is_compiled_meanwhile_is_no_program_of_the_users(python, empty_cache):
    body = """
    for _ in range(2): step()
    before, explained = torch.tpu.metrics(), torch.tpu.explain()
    with torch.tpu.max_graphs(0):
        step()
        until("swaps")
        step()
    after = torch.tpu.metrics()
    assert torch.tpu.explain() == explained
    assert (after["programs"], after["compiles"]) == (before["programs"], before["compiles"])
    assert after["background_compile_s"] > 0
    """
    python(loop("if True:" + body), OXITORCH_CACHE_DIR=str(empty_cache))


def test_the_next_process_finds_the_better_version(python, empty_cache):
    cold = steps(python, empty_cache)
    warm = steps(python, empty_cache, "pass")
    assert cold["compiles"] > 0 == warm["compiles"] == warm["background_compiles"] == warm["swaps"]
    assert warm["loads"] == cold["compiles"]


@pytest.mark.parametrize(
    "how", ["variable", *(pytest.param(how, marks=pytest.mark.slow) for how in ("setting", "deterministic", "options"))]
)
def test_it_can_be_turned_off(python, empty_cache, how):
    before, env = "import torch\n", {}
    if how == "variable":
        env["OXITORCH_BACKGROUND_COMPILE"] = "0"
    elif how == "setting":
        before += "torch.tpu.set_background_compile(False)\n"
    elif how == "deterministic":
        before += "torch.use_deterministic_algorithms(True)\n"
    else:
        before += "torch.tpu.compiler.custom_compiler_options({'xla_cpu_enable_fast_math': False})\n"
    first, second = (steps(python, empty_cache, "pass", before, OXITORCH_CACHE="off", **env) for _ in range(2))
    assert first["background_compiles"] == second["background_compiles"] == 0
    assert (first["losses"], first["values"]) == (second["losses"], second["values"])


@pytest.mark.slow
def test_turning_it_off_replaces_quick_versions_before_they_run(python, empty_cache):
    body = """
    for _ in range(2): step()
    compiles = torch.tpu.metrics()["compiles"]
    with torch.tpu.set_background_compile(False):
        assert not torch.tpu.get_background_compile()
        step()
    assert torch.tpu.get_background_compile()
    assert torch.tpu.metrics()["compiles"] == compiles + 1
    """
    python(loop("if True:" + body), OXITORCH_CACHE_DIR=str(empty_cache))


# Long enough for the tests that follow to act while it is compiled.
LONG = 12
BUSY = "for _ in range(3): step()\nassert torch.tpu.metrics()['swaps'] == 0\n"


def test_exit_does_not_hang_or_crash(python, empty_cache):
    done = python(loop(BUSY, LONG), OXITORCH_CACHE_DIR=str(empty_cache))
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.slow
def test_a_forked_child_ends(python, empty_cache):
    body = """
    children = []
    for leave in (sys.exit, os._exit):
        children.append(os.fork())
        if children[-1] == 0:
            leave(7)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    step()
    until("swaps")
    report(codes=codes)
    """
    warnings = "import warnings; warnings.simplefilter('ignore')\n"  # forking with threads, which is the point
    done = result(python(warnings + loop(BUSY + "if True:" + body, LONG), OXITORCH_CACHE_DIR=str(empty_cache)))
    assert done["codes"] == [7, 7]


def start(environment, folder, body):
    return subprocess.Popen(
        [sys.executable, "-c", loop(body, LONG)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(OXITORCH_CACHE_DIR=str(folder)),
        cwd="/",
    )


def test_an_interrupt_ends_the_loop(environment, empty_cache):
    child = start(environment, empty_cache, BUSY + "print('busy', flush=True)\nwhile True: step()")
    assert child.stdout.readline() == "busy\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGINT and "KeyboardInterrupt" in err, err


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_cache_that_works(python, environment, empty_cache):
    child = start(environment, empty_cache, BUSY + "print('busy', flush=True)\nwhile True: step()")
    assert child.stdout.readline() == "busy\n"
    time.sleep(0.1)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    body = BUSY + "until('swaps')\nprint(json.dumps(torch.tpu.metrics()))"
    done = result(python(loop(body, LONG), OXITORCH_CACHE_DIR=str(empty_cache)))
    assert done["compiles"] == 0 < done["loads"] and done["cache"]["damaged"] == 0


def test_a_long_chain_of_ops(python):
    # XLA walks through it by recursion, deeper than the stack that threads usually have.
    code = """
import torch
x = torch.ones(4, device="tpu")
for _ in range(9000): x = x * 1.0
print(x.sum().item())
"""
    assert python(code, OXITORCH_CACHE="off").stdout == "4.0\n"


SAMPLED = """
import json, torch, torch.nn.functional as F

@torch.tpu.jit
def transformed(image, theta):
    for _ in range(40):  # enough operations for a quick version
        theta = theta + 1.0 - 1.0
    grid = F.affine_grid(theta, image.shape, align_corners=image.shape[-1] % 2 == 0)
    return F.grid_sample(image, grid, align_corners=image.shape[-1] % 2 == 0)

found = []
for size in (5, 8, 17, 33):
    image = torch.randn(2, 3, size, size)
    same = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).repeat(2, 1, 1)
    found.append((transformed(image.to("tpu"), same.to("tpu")).cpu() - image).abs().max().item())
torch.tpu.synchronize()
print(json.dumps(found))
"""


def test_a_quick_version_computes_a_value_that_it_needs_twice_alike(python, empty_cache):
    # The corner of a pixel and how far a place is from it follow from the place, in loops of their own. Where the place is
    # rounded in two ways, a pixel's neighbour is taken for it.
    found = result(python(SAMPLED, OXITORCH_CACHE_DIR=str(empty_cache)))
    assert max(found) < 1e-4, found
