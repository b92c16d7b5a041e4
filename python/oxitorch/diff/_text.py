"""The report as text."""

import math
import os
from itertools import pairwise

# What verdicts mean, in the order of the table.
MEANS = {
    "same": "the same bits",
    "rounding": "both right for the same inputs, which rounding explains",
    "carried": "both right, or no larger than the difference of their inputs",
    "tie": "other elements were chosen, that are equal or nearly so",
    "random": "each run drew its own random numbers",
    "arguments": "called with other numbers or flags: the runs are of other programs",
    "unknown": "they differ, and nothing can tell which is right",
    "defect": "wrong for its own inputs",
}


def headline(data: dict) -> str:
    """The answer in a line."""
    counts = data["counts"]
    if data["notes"]:
        return "the runs could not be compared"
    if counts["defect"]:
        worst = next(f for f in data["findings"] if f["verdict"] == "defect")
        more = counts["defect"] - 1
        behind = f", and {more} more" if more else ""
        return f"{short(worst['op'])} is wrong on {side(data, worst['side'])}, {at(worst)}{behind}"
    if counts["arguments"]:
        first = next(f for f in data["findings"] if f["verdict"] == "arguments")
        more = counts["arguments"] - 1
        behind = f", and {more} more" if more else ""
        return f"{short(first['op'])} was called with other arguments, {at(first)}{behind}"
    left = counts["unknown"] + counts["random"]
    if left:
        return f"{many(left, 'operation')} whose difference is not explained"
    if data["first"] is None:
        return "the same bits everywhere" + _also(data)
    return "all differences are explained by rounding" + (" and ties" if counts["tie"] else "") + _also(data)


def _also(data: dict) -> str:
    """What a headline of runs that agree has to say besides."""
    broken = [s for s in data["steps"] if not all(s["finite"].values())]
    if broken:
        return f"; NaN or Inf from step {broken[0]['step']} on"
    return f"; losses part at step {data['parted']}" if data["parted"] is not None else ""


def text(data: dict) -> str:
    lines = [f"a  {about(data['a'])}", f"b  {about(data['b'])}", "", headline(data), ""]
    lines += [f"note: {n}" for n in data["notes"]]
    for f in data["findings"]:
        lines += [*finding(data, f), ""]
    if data["first"] is not None and data["first"] not in data["findings"]:
        lines += ["the first difference:", *(f"  {line}" for line in finding(data, data["first"])), ""]
    lines += not_finite(data)
    lines += _steps(data)
    lines += ["operations:"]
    lines += [f"  {n:>6}  {v:<9} {MEANS[v]}" for v, n in data["counts"].items() if n]
    lines += unpaired(data)
    lines += _table("modules", by_name(data["modules"]), lambda m: "  " * m["depth"] + m["name"])
    lines += _table("gradients", sorted(data["gradients"], key=lambda g: -g["relative"]), lambda g: g["name"])
    return "\n".join(lines).rstrip() + "\n"


def unpaired(data: dict) -> list[str]:
    """How many operations only one run has, and which are the first, if the platform does not explain them."""
    n = data["unpaired"]
    lines = []
    if n["a"] or n["b"]:
        told = "but for the CPU's, they were judged by themselves"
        lines.append(f"  {n['a']} of a and {n['b']} of b have no partner; {told}")
    return lines + [f"  the first of {side}: {short(f['op'])}, {at(f)}" for side, f in n["first"].items()]


def by_name(modules: list[dict]) -> list[dict]:
    """Of several calls of a module the one that differs most."""
    worst: dict[str, dict] = {}
    for m in modules:
        known = worst.get(m["name"])
        if known is None or (bool(m["finding"]), m["relative"]) > (bool(known["finding"]), known["relative"]):
            worst[m["name"]] = m
    return list(worst.values())


def finding(data: dict, f: dict) -> list[str]:
    lines = [f"{f['verdict']}: {short(f['op'])}, {at(f)}", f"  {f['reason']}"]
    if f["worst"]:
        lines.append(f"  {worst(data, f)}")
    if f.get("alone"):
        lines.append(f"  {f['alone']}")
    lines += [f"  input {i}: {tensor(x)}" for i, x in enumerate(f["inputs"][:6])]
    return lines


def worst(data: dict, f: dict) -> str:
    """The element that is farthest off: of the referee's, or of the other run's where nobody is wrong."""
    w = f["worst"]
    place = f"result {w['result']}[{', '.join(map(str, w['index']))}]"
    off = f"{w['error']:.3g} off"
    if not f["side"]:
        return f"{place}: {number(w['got'])} and {number(w['want'])}, {off}"
    got = f"{side(data, f['side'])} has {number(w['got'])}, the referee {number(w['want'])}"
    return f"{place}: {got}; {off}, of {w['bound']:.3g} allowed"


def not_finite(data: dict) -> list[str]:
    lines = []
    for who, kinds in data["not_finite"].items():
        for kind, found in kinds.items():
            if found:
                what = many(found["elements"], {"nan": "NaN", "inf": "Inf"}[kind])
                lines.append(f"{side(data, who)} makes {what} first in {short(found['op'])}, {at(found)}")
                lines += [f"  input {i}: {tensor(x)}" for i, x in enumerate(found["inputs"][:6])]
    return [*lines, ""] if lines else []


def _steps(data: dict) -> list[str]:
    rows = [s for s in data["steps"] if s["loss_a"] is not None or s["parted"]]
    if not rows:
        return []
    if data["parted"] is None:
        lines = [f"losses, {many(len(rows), 'step')}: they do not part"]
    else:
        lines = [f"losses part at step {data['parted']}"]
    for before, s in pairwise([None, *told(rows)]):
        if before and s["step"] != before["step"] + 1:
            lines.append("  ...")
        found = f"  <- {mark(s)}" if mark(s) else ""
        lines.append(f"  step {s['step']:<4} a {number(s['loss_a'])}  b {number(s['loss_b'])}{found}")
    return [*lines, ""]


def told(rows: list[dict]) -> list[dict]:
    """Of many steps the first ones, those around the first of which something is to be said, and the last."""
    if len(rows) <= 12:
        return rows
    first = next((i for i, s in enumerate(rows) if mark(s)), 6)
    kept = {0, 1, 2, *range(first - 3, first + 5), len(rows) - 1}
    return [s for i, s in enumerate(rows) if i in kept]


def mark(step: dict) -> str:
    """What is to be said of a step: where losses part, and who has numbers that are not finite."""
    found = ["parted"] if step["parted"] else []
    return ", ".join([*found, *(f"{k} has NaN or Inf" for k, ok in step["finite"].items() if not ok)])


def _table(title: str, rows: list[dict], name) -> list[str]:
    if not rows:
        return []
    shown = rows[:30]
    width = max(len(name(r)) for r in shown)
    lines = ["", f"{title}, the largest difference by the largest element:"]
    for r in shown:
        found = f"  {r['finding']}" if r.get("finding") else ""
        lines.append(f"  {name(r):<{width}}  {r['relative']:.1e} of {r['largest']:.1e}{found}")
    if len(rows) > len(shown):
        lines.append(f"  and {len(rows) - len(shown)} more, in the JSON")
    return lines


def at(f: dict) -> str:
    """Where an operation is: line, module, phase, step."""
    lines = f.get("lines") or {"": f.get("line", "")}
    line = next((x for x in lines.values() if x), "")
    parts = [f"at {_line(line)}" if line else "at no Python line", f"{f['phase']} of step {f['step']}"]
    return ", ".join(parts) + (f", in {f['module']}" if f["module"] else "")


def about(header: dict) -> str:
    runs_on = header.get("runs_on")
    on = f" on {runs_on}" if runs_on and runs_on != header["device"] else ""
    mode = f", {header['mode']} mode" if "mode" in header else ""
    return f"{header['platform']}{on}{mode}, torch {header['torch']}"


def side(data: dict, which: str) -> str:
    return f"{which} ({data[which]['platform']})"


def tensor(x: dict) -> str:
    values = f", {number(x['min'])} to {number(x['max'])}" if "min" in x else ""
    return f"{x['dtype']}{x['shape']}{values}"


def short(op: str) -> str:
    """`aten.mm` of `aten.mm.default`."""
    return op.removesuffix(".default")


def many(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 or what in ("NaN", "Inf") else f"{n} {what}s"


def number(x: float | None) -> str:
    if x is None:
        return "none"
    return f"{x:.8g}" if math.isfinite(x) else str(x)


def _line(line: str) -> str:
    file, _, n = line.rpartition(":")
    return f"{os.path.basename(file)}:{n}"
