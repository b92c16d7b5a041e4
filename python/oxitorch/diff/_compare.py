"""Two recorded runs compared: what differs first, what explains it, what does not."""

import math
from collections import Counter
from collections.abc import Callable

import torch

from oxitorch.diff import _align, _judge, _kinds
from oxitorch.diff._judge import Unjudged, Worst
from oxitorch.diff._trace import Trace, tensors

# How many times larger than the differences of its inputs a difference is that is looked at.
_GROWTH = 8
# How many operations are judged, and findings told.
_JUDGED, _FINDINGS = 400, 20
# From where losses part, if nobody says.
LOSS = 1e-3

# What a difference is put down to, from harmless to not.
VERDICTS = ("same", "rounding", "carried", "tie", "random", "arguments", "unknown", "defect")
EXPLAINED = VERDICTS[:4]


def compare(a: Trace, b: Trace, loss: float = LOSS, runs_here: Callable[[str], bool] = lambda device: False) -> dict:
    """What `docs/diff.md` lists as the fields of the JSON.

    Args:
        loss: from which relative difference on losses part.
        runs_here: whether operations can be run again on a device in this process.
    """
    return _Comparison(a, b, runs_here).found(loss)


class _Comparison:
    def __init__(self, a: Trace, b: Trace, runs_here):
        self.a, self.b, self.runs_here = a, b, runs_here
        self.counts: Counter = Counter()
        self.first: dict | None = None
        self.findings: list[dict] = []
        self.judged = 0
        # The first operation without a partner of each run, of two on one device: there a platform does not explain it.
        self.alone: dict[str, dict] = {}
        # The verdict of each operation of b, by its number.
        self.verdicts: dict[int, str] = {}

    def found(self, loss: float) -> dict:
        for left, right in _align.align(self.a, self.b):
            if len(left) == len(right) == 1:
                self._pair(left[0], right[0])
            else:
                self._block(left, right)
        sides = {"a": self.a, "b": self.b}
        return {
            "a": self.a.header | {"file": self.a.path},
            "b": self.b.header | {"file": self.b.path},
            "steps": self._steps(loss),
            "parted": self._parted(loss),
            "not_finite": {side: _first_not_finite(t) for side, t in sides.items()},
            "counts": {v: self.counts[v] for v in VERDICTS},
            "unpaired": {"a": self.counts["only a"], "b": self.counts["only b"], "first": self.alone},
            "first": self.first,
            "findings": self.findings,
            "modules": self._modules(),
            "gradients": self._gradients(),
            "notes": self._notes(),
        }

    # -- operations

    def _pair(self, i: int, j: int) -> None:
        op, other = self.a.ops[i], self.b.ops[j]
        if _shapes(self.a, op) != _shapes(self.b, other):
            return self._block([i], [j])
        verdict, reason, side, worst = self._verdict(op, other)
        self._tell(verdict, reason, side, worst, i, j)

    def _verdict(self, op: dict, other: dict) -> tuple[str, str, str, Worst | None]:
        """What a pair's difference is put down to, why, whose it is, and the worst element."""
        a, b = self.a, self.b
        results = list(zip(op["results"], other["results"], strict=False))
        if len(op["results"]) == len(other["results"]) and all(a.same(x, b, y) for x, y in results):
            return "same", "", "", None
        off_in = self._relative(list(tensors([op["args"], *op["kwargs"].values()])),
                                list(tensors([other["args"], *other["kwargs"].values()])))  # fmt: skip
        off = [_judge.relative(a.tensor(x), b.tensor(y)) for x, y in results]
        moved, why = _judge.arguments(op, other)
        if moved > LOSS:
            return "arguments", why, "", None
        off_in = max(off_in, moved)
        unit = max(_unit(a, op), _unit(b, other))
        if op.get("draws") or other.get("draws"):
            if max(off) > _GROWTH * (off_in + unit):
                return "random", "each run drew its own random numbers", "", None
            why = _carried(off_in, max(off)) if off_in else "both runs drew the same random numbers"
            return "carried" if off_in else "rounding", why, "", None
        if (why := _judge.tie(a, op, b, other)) and self._places_only(op, off):
            return "tie", why, "", None
        if off_in and max(off) <= _GROWTH * (off_in + unit):
            return "carried", _carried(off_in, max(off)), "", None
        if not off_in and max(off) <= 4 * unit and self._close(results, unit):
            return "rounding", f"within {max(off) / unit:.1f} roundings of the dtype", "", self._apart(results)
        return self._judged(op, other, results, off_in, max(off))

    def _judged(self, op, other, results, off_in, off):
        if self.judged >= _JUDGED:
            return "unknown", f"more than {_JUDGED} operations differ; this one was not judged", "", None
        self.judged += 1
        worsts = {}
        for side, trace, own in (("a", self.a, op), ("b", self.b, other)):
            try:
                # Of the first difference the report has the numbers.
                worsts[side] = _judge.check(trace, own, exact=self.first is None)
            except Unjudged as e:
                return "unknown", f"there is no referee: {e}", "", self._apart(results)
        side, worst = max(worsts.items(), key=lambda kv: kv[1].ratio)
        if worst.ratio > 1:
            return "defect", _wrong(side, worst), side, worst
        if off_in:
            return "carried", _carried(off_in, off) + "; both are right for their own inputs", "", worst
        return "rounding", f"at most {worst.ratio:.2g} of what rounding may make", "", worst

    def _block(self, left: list[int], right: list[int]) -> None:
        """Operations that have no partner are judged by themselves; the CPU's not, whose kernels the referee has."""
        devices = {self.a.header["device"], self.b.header["device"]}
        for side, trace, numbers in (("a", self.a, left), ("b", self.b, right)):
            self.counts[f"only {side}"] += len(numbers)
            if numbers and len(devices) == 1:
                self.alone.setdefault(side, self._where(trace, numbers[0]))
            if trace.header["device"] == "cpu" and len(devices) > 1:
                continue
            for n in numbers:
                op = trace.ops[n]
                if op.get("draws") or not op["results"] or self.judged >= _JUDGED:
                    continue
                try:
                    worst = _judge.check(trace, op, exact=False)
                except Unjudged as e:
                    self._unjudged(side, n, left if side == "b" else right, str(e))
                    continue
                self.judged += 1
                if worst.ratio > 1:
                    i, j = (n, None) if side == "a" else (None, n)
                    self._tell("defect", _wrong(side, worst), side, worst, i, j)

    def _unjudged(self, side: str, n: int, others: list[int], why: str) -> None:
        """An operation without partner and referee: what it gives should be near something that the other run has."""
        trace, other = (self.a, self.b) if side == "a" else (self.b, self.a)
        there = [v for m in others for v in other.ops[m]["results"]]
        for value in trace.ops[n]["results"]:
            about = trace.about(value)
            dtype = getattr(torch, about["dtype"])
            if not dtype.is_floating_point or 0 in about["shape"]:
                continue
            like = [v for v in there if other.about(v)["shape"] == about["shape"]]
            mine = trace.tensor(value)
            off = min((_judge.relative(mine, other.tensor(v)) for v in like), default=math.inf)
            if off > math.sqrt(torch.finfo(dtype).eps):
                near = (
                    f"the nearest that the other run has there is {off:.2g} of its size off"
                    if like
                    else "the other run has none of its shape there"
                )
                i, j = (n, None) if side == "a" else (None, n)
                self._tell("unknown", f"there is no referee: {why}; {near}", "", None, i, j)
                return

    def _tell(self, verdict, reason, side, worst, i: int | None, j: int | None) -> None:
        if i is not None and j is not None:
            self.counts[verdict] += 1
            self.verdicts[j] = verdict
        else:
            self.counts[verdict] += 1
        if verdict == "same":
            return
        if self.first is None:
            self.first = self._finding(verdict, reason, side, worst, i, j)
        if verdict not in EXPLAINED or verdict == "tie":
            known = sum(f["verdict"] == verdict for f in self.findings)
            if known < _FINDINGS:
                found = self._finding(verdict, reason, side, worst, i, j)
                if verdict == "defect":
                    found["alone"] = self._alone(side, i if side == "a" else j)
                self.findings.append(found)

    def _finding(self, verdict, reason, side, worst, i, j) -> dict:
        trace, op = (self.b, self.b.ops[j]) if side == "b" or i is None else (self.a, self.a.ops[i])
        lines = {s: t.ops[n]["line"] for s, t, n in (("a", self.a, i), ("b", self.b, j)) if n is not None}
        return {
            "verdict": verdict,
            "reason": reason,
            "side": side,
            "op": op["name"],
            "numbers": {"a": i, "b": j},
            "step": op["step"],
            "phase": op["phase"],
            "module": op["module"],
            "lines": lines,
            "inputs": [_about(trace, x) for x in tensors([op["args"], *op["kwargs"].values()])],
            "worst": None if worst is None else {**vars(worst), "ratio": worst.ratio},
        }

    @staticmethod
    def _where(trace: Trace, n: int) -> dict:
        return {k: trace.ops[n][k] for k in ("step", "phase", "module", "line")} | {"op": trace.ops[n]["name"]}

    def _alone(self, side: str, n: int) -> str:
        """What the operation gives by itself: whether the defect is its own, or of the program that it was in."""
        trace = {"a": self.a, "b": self.b}[side]
        device = trace.header["device"]
        if not self.runs_here(device):
            return f"{device} is not here to run it again"
        try:
            worst = _judge.alone(trace, trace.ops[n], device)
        except Unjudged as e:
            return f"by itself it cannot be run again: {e}"
        if worst.ratio > 1:
            return "by itself, with the same inputs, it is wrong too: the operation has the defect"
        return "by itself, with the same inputs, it is right: the defect is of the program that it was part of"

    # -- tensors

    def _relative(self, xs: list[dict], ys: list[dict]) -> float:
        worst = 0.0
        for x, y in zip(xs, ys, strict=True):
            if not self.a.same(x["value"], self.b, y["value"]):
                worst = max(worst, _judge.relative(self.a.tensor(x["value"]), self.b.tensor(y["value"])))
        return worst

    def _places_only(self, op: dict, off: list[float]) -> bool:
        place = _kinds.CHOOSES[_kinds.base(op["name"])]
        return all(i == place or o < 1e-2 for i, o in enumerate(off))

    def _close(self, results, unit: float) -> bool:
        """Whether each element is within some roundings of its partner."""
        for x, y in results:
            p, q = self.a.tensor(x), self.b.tensor(y)
            if not p.is_floating_point():
                if not torch.equal(p, q):
                    return False
                continue
            p, q = p.double(), q.double()
            if not torch.where(p == q, True, (p - q).abs() <= 4 * unit * p.abs()).all():
                return False
        return True

    def _apart(self, results) -> Worst | None:
        """The element where the runs are farthest apart."""
        found = []
        for i, (x, y) in enumerate(results):
            p, q = self.a.tensor(x), self.b.tensor(y)
            if p.shape == q.shape and p.numel() and not self.a.same(x, self.b, y):
                found.append(_judge.measure(i, q, p.double() if p.is_floating_point() else p, torch.ones(p.shape)))
        return max(found, key=lambda w: w.error, default=None)

    # -- modules, gradients, steps

    def _modules(self) -> list[dict]:
        theirs = {(m["step"], m["name"], m["call"]): m for m in self.b.modules}
        rows = []
        for m in self.a.modules:
            other = theirs.get((m["step"], m["name"], m["call"]))
            if other is None or not m["outputs"] or len(m["outputs"]) != len(other["outputs"]):
                continue
            pairs = [(x, y) for x, y in zip(m["outputs"], other["outputs"], strict=True)]
            off = max(_judge.relative(self.a.tensor(x), self.b.tensor(y)) for x, y in pairs)
            inside = [
                f["verdict"]
                for f in self.findings
                if f["step"] == m["step"] and f"{f['module']}.".startswith(f"{m['name']}.")
            ]
            worst = max(inside, key=VERDICTS.index, default=None)
            rows.append({"name": m["name"], "step": m["step"], "call": m["call"], "depth": m["depth"], "op": m["op"],
                         "relative": off, "largest": self._largest(m["outputs"]), "finding": worst})  # fmt: skip
        return rows

    def _gradients(self) -> list[dict]:
        theirs = {(g["step"], g["name"]): g["value"] for g in self.b.gradients}
        rows = []
        for g in self.a.gradients:
            value = theirs.get((g["step"], g["name"]))
            if value is not None:
                off = _judge.relative(self.a.tensor(g["value"]), self.b.tensor(value))
                largest = self._largest([g["value"]])
                rows.append({"name": g["name"], "step": g["step"], "relative": off, "largest": largest})
        return rows

    def _largest(self, values: list[int]) -> float:
        """The largest element of tensors of a."""
        found = [self.a.tensor(v) for v in values]
        return max((float(t.abs().double().max()) for t in found if t.numel() and t.dtype != torch.bool), default=0.0)

    def _steps(self, loss: float) -> list[dict]:
        return steps(self.a, self.b, loss)

    def _parted(self, loss: float) -> int | None:
        return next((s["step"] for s in self._steps(loss) if s["parted"]), None)

    def _notes(self) -> list[str]:
        notes = []
        for side, trace in (("a", self.a), ("b", self.b)):
            device = trace.header["device"]
            if trace.ops and not trace.header["devices"].get(device):
                notes.append(f"{side} ran no operation on {device}: does the script choose another device itself?")
        return notes


def steps(a: Trace, b: Trace, loss: float) -> list[dict]:
    """The steps that both runs have, with their losses, and whether they part there."""
    theirs = {s["step"]: s for s in b.steps}
    rows = []
    for s in a.steps:
        other = theirs.get(s["step"])
        if other is None:
            continue
        x, y = (t.tensor(r["loss"]).double().item() if "loss" in r else None for t, r in ((a, s), (b, other)))
        finite = {side: all(map(math.isfinite, _numbers(t, r))) for side, t, r in (("a", a, s), ("b", b, other))}
        parted = finite["a"] != finite["b"]
        if x is not None and y is not None and math.isfinite(x) and math.isfinite(y):
            parted |= abs(x - y) > loss * max(abs(x), abs(y))
        rows.append({"step": s["step"], "loss_a": x, "loss_b": y, "finite": finite, "parted": parted})
    return rows


def _numbers(trace: Trace, row: dict) -> list[float]:
    found = [
        trace.tensor(row[k]).double().flatten()
        for k in ("loss", "grad_norms", "parameter_norms")
        if row.get(k) is not None
    ]
    return torch.cat(found).tolist() if found else []


def _first_not_finite(trace: Trace) -> dict:
    """The first operation that makes NaN of what has none, and the first that makes Inf of numbers."""
    found = {"nan": None, "inf": None}
    for i, op in enumerate(trace.ops):
        made = {kind: sum(trace.about(v)[kind] for v in op["results"]) for kind in found}
        new = [kind for kind in found if made[kind] and found[kind] is None]
        if not new:
            continue
        inputs = list(tensors([op["args"], *op["kwargs"].values()]))
        taken = {kind: sum(trace.about(x["value"])[kind] for x in inputs) for kind in found}
        for kind in new:
            # An infinite number that the program names, as of a mask, is meant.
            meant = kind == "inf" and (taken["inf"] or _infinite([op["args"], *op["kwargs"].values()]))
            if taken["nan"] or meant:
                continue
            found[kind] = {
                "op": op["name"],
                "number": i,
                "step": op["step"],
                "phase": op["phase"],
                "module": op["module"],
                "line": op["line"],
                "elements": made[kind],
                "inputs": [_about(trace, x) for x in inputs],
            }
    return found


def _infinite(x) -> bool:
    """Whether an encoded argument has a number that is not finite."""
    if isinstance(x, list):
        return any(map(_infinite, x))
    return isinstance(x, float) and not math.isfinite(x)


def _shapes(trace: Trace, op: dict) -> list:
    """Shapes of what an operation takes and gives."""
    taken = [x["value"] for x in tensors([op["args"], *op["kwargs"].values()])]
    return [trace.about(v)["shape"] for v in (*taken, *op["results"])]


def _about(trace: Trace, x: dict) -> dict:
    about = trace.about(x["value"])
    t = trace.tensor(x["value"])
    row = {"dtype": about["dtype"], "shape": about["shape"]}
    if t.numel() and not t.is_complex():
        row |= {"min": float(t.double().min()), "max": float(t.double().max())}
    return row


def _unit(trace: Trace, op: dict) -> float:
    dtypes = [getattr(torch, trace.about(v)["dtype"], None) for v in op["results"]]
    return max((torch.finfo(d).eps / 2 for d in dtypes if d is not None and d.is_floating_point), default=0.0)


def _carried(off_in: float, off: float) -> str:
    return f"the inputs differ by {off_in:.2g} of their size, the results by {off:.2g}"


def _wrong(side: str, worst: Worst) -> str:
    times = (
        "not finite, or should not be" if math.isinf(worst.ratio) else f"{worst.ratio:.3g} times what rounding may make"
    )
    return f"{side} is wrong for its own inputs: {worst.wrong} of {worst.of} elements, the worst {times}"
