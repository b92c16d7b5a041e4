"""PyTorch's samples of its ops, with a first size that varies: the CPU's values at each size, from one program.

What takes more programs, or is refused, is in `dynamic_ops.toml` with its reason. What is there and works fails.
"""

import zlib
from pathlib import Path

import dynamic_ops
import pytest
import tomllib

ALL = dynamic_ops.entries()
LISTED = tomllib.loads((Path(__file__).parent / "dynamic_ops.toml").read_text())
# By entry.
KNOWN = {kind: {e: group["reason"] for group in LISTED[kind] for e in group["entries"]} for kind in LISTED}
ENTRIES = {name: op for name, op in ALL.items() if name not in KNOWN["left_out"]}
BLOCKS = 12


def block(name: str, of: int) -> int:
    return zlib.crc32(name.encode()) % of


def check(names: list[str]) -> None:
    problems, samples = [], 0
    for name in names:
        found = dynamic_ops.run(ENTRIES[name])
        samples += found.samples
        problems += [f"{name}: {wrong}" for wrong in found.wrong]
        for kind, got in (("programs", found.programs), ("refused", found.refused)):
            reason = KNOWN[kind].get(name)
            if got and reason is None:
                problems.append(f"{name}: {kind}: {got[0]}")
            if reason is not None and not got:
                problems.append(f"{name} works now: take it out of dynamic_ops.toml, under {kind} ({reason})")
        problems += [f"{name}: {made} programs, and explain() does not say why" for made in found.silent]
    assert not problems, "\n".join(problems)
    assert samples


def test_some_ops_have_one_program_for_all_sizes(fused):
    check([name for name in ENTRIES if block(name, 41) == 0])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(BLOCKS))
def test_ops_have_one_program_for_all_sizes(number, fused):
    check([name for name in ENTRIES if block(name, BLOCKS) == number])


def test_what_is_listed_is_an_entry():
    for kind, known in KNOWN.items():
        names = [name for group in LISTED[kind] for name in group["entries"]]
        assert set(names) <= set(ALL) and len(names) == len(known), kind
