"""What a process remembers is bounded: programs and operations of ever new shapes, and the memory that they take."""

import json

import pytest

LOOP = """
import json, os, sys, torch
shapes, device = int(sys.argv[1]), "tpu"

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def maps():
    with open("/proc/self/maps") as f:
        return sum(1 for _ in f)

weight, hot, seen = torch.randn(8, 8).to(device), torch.randn(5, 8).to(device), []
for n in range(shapes):
    x = torch.full((n + 6, 8), 2.0, device=device)
    assert (x.sum(1) * 3).sum().item() == 48 * (n + 6), n
    before = torch.tpu.metrics()["programs"]
    (hot @ weight).relu().sum().item()
    made = torch.tpu.metrics()["programs"] - before
    known = torch.tpu.metrics()["devices"][0]
    seen.append((made, known["known_programs"], known["known_ops"], resident(), maps()))
print(json.dumps(seen))
"""


def run(python, shapes, timeout=120, **env):
    seen = json.loads(python(LOOP, str(shapes), timeout=timeout, **env).stdout)
    assert sum(made for made, *_ in seen[1:]) == 0, "what is used all the time is remembered"
    return seen


def test_what_is_remembered_is_bounded(python):
    seen = run(python, 150, OXITORCH_KNOWN_PROGRAMS="40", OXITORCH_KNOWN_OPS="100")
    assert max(programs for _, programs, *_ in seen) <= 40 and max(ops for _, _, ops, *_ in seen) <= 100
    assert seen[-1][1] >= 20 and seen[-1][2] >= 50


def test_what_was_forgotten_is_learned_again(python):
    code = """
import torch
one = torch.ones(1, device="tpu")
for _ in range(3):
    for n in range(1, 30):
        x = torch.cat([one] * n)  # lists of other lengths are other programs
        assert x.tolist() == [1] * n, n
m = torch.tpu.metrics()
print(m["programs"], m["compiles"])
"""
    programs, compiles = map(int, python(code, OXITORCH_KNOWN_PROGRAMS="5", OXITORCH_KNOWN_OPS="12").stdout.split())
    assert programs >= 60 and compiles <= 40, "the executables were still there"


@pytest.mark.slow
def test_memory_levels_off(python):
    """Programs of thousands of shapes; all bounds are reached in the first half."""
    env = {"OXITORCH_KNOWN_PROGRAMS": "500", "OXITORCH_KNOWN_OPS": "2000", "OXITORCH_LOADED_PROGRAMS": "300"}
    seen = run(python, 5000, timeout=1200, **env)
    half, end = seen[2500], seen[-1]
    assert end[3] < 1.05 * half[3], f"{half[3] >> 20} MiB, {end[3] >> 20} MiB"
    assert end[4] < 1.1 * half[4] + 50, f"{half[4]} maps, {end[4]} maps"
