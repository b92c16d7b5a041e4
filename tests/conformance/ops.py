"""Writes docs/ops.md: how each ATen op is served, and what the last whole run found. Older versions of torch have files
of their own.

python -m tests.conformance.ops                              # from results.txt, which is kept
python -m tests.conformance.ops conformance-2.15.0.jsonl     # makes results.txt of a run first
python -m tests.conformance.ops --part again.jsonl           # puts what was run again into results.txt first
python -m tests.conformance.ops --aot aot-2.15.0.jsonl           # makes aot.txt, what compiles for TPUs and GPUs, first
"""

import argparse
import collections
import datetime
import re
import sys
from pathlib import Path

from .kept import OLDER, ROOT, aot_words_of, files, ops_on_cpu, parse, put_in, read, summary, units, words_of

# What was compiled for, by the platform's name on the page.
AOT = {"tpu": ("v5e-1", "v6e-1"), "cuda": ("cuda:h200",)}
SHORT = {
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "float16": "f16",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "bool": "bool",
    "complex64": "c64",
    "complex128": "c128",
}
# What serves an overload, in the order of the page, and what that means.
KINDS = {
    "row": "a row of the op table",
    "derived": "the row of another overload: in-place, `out=` and `_foreach_` forms",
    "shim": "the shim itself: memory, views, copies; nested tensors of the strided layout, which it refuses",
    "loop": "a loop for each direction of a layer, by an operation of ours that has a row",
    "PyTorch": "PyTorch's own composition of other ops",
    "recipe": "PyTorch's decomposition in Python, once for each kind of arguments; then what was recorded then",
    "CPU": "a copy to the CPU, PyTorch's kernel there, and back; warned about and counted",
    "sparse": "on sparse tensors: PyTorch's kernel on top of ops on their parts, a function of ours, or the CPU's",
    "none": "nothing: quantized and nested tensors, and kernels of one vendor's library",
}
RENAMED = {"normal": "normal_functional", "bernoulli": "bernoulli", "conj_physical": "_conj_physical"}


def rows() -> set[str]:
    """The overloads in the op table; each has a golden."""
    cases = re.compile(r"^case: (\S+)", re.MULTILINE)
    files = (ROOT / "crates" / "aten" / "goldens").glob("*/*.txt")
    return {name for file in files for name in cases.findall(file.read_text())}


def served() -> dict[str, str]:
    """`add.Tensor` and all others that the dispatcher knows, with what serves them."""
    import torch
    from oxitorch._decompose import UNFAITHFUL
    from oxitorch._rnn import CELLS

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    table = rows()
    bases = {r.split(".")[0] for r in table}
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")]
    names = {s.name + ("." + s.overload_name if s.overload_name else ""): s for s in schemas}
    decompositions = {op.name() for op in torch._decomp.decomposition_table if isinstance(op, torch._ops.OpOverload)}

    def decomposed(schema) -> bool:
        new = [a.alias_info is None for a in (*schema.arguments, *schema.returns)]
        name = schema.name + ("." + schema.overload_name if schema.overload_name else "")
        return all(new) and schema.name not in UNFAITHFUL and name in decompositions

    def kind(name: str) -> str | None:
        try:
            own = has(name, "PrivateUse1")
        except RuntimeError:  # of TorchScript alone
            return None
        short = name.removeprefix("aten::")
        if own:
            base = short.split(".")[0].removeprefix("_foreach_")
            plain = base if base in bases else base.removesuffix("_")
            plain = RENAMED.get(plain, plain)
            if short in table:
                return "row"
            if base in CELLS:
                return "loop"
            return "derived" if plain in bases or plain == "norm" or plain.startswith("__i") else "shim"
        if has(name, "CompositeImplicitAutograd") or has(name, "CompositeExplicitAutograd") or short == "narrow_copy":
            return "PyTorch"
        if has(name, "CompositeExplicitAutogradNonFunctional"):
            # Made by PyTorch from the form with `out=`.
            forms = [n for n in names if n.startswith(f"{name.split('.')[0]}.") and kind_of_out(n)]
            return "CPU" if forms else "PyTorch"
        if decomposed(names[name]):
            return "recipe"
        if has(name, "SparsePrivateUse1") or has(name, "SparseCsrPrivateUse1"):
            return "sparse"
        return "CPU" if has(name, "CPU") else "none"

    def kind_of_out(name: str) -> bool:
        try:
            composite = any(
                has(name, k) for k in ("PrivateUse1", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
            )
            return has(name, "CPU") and not composite
        except RuntimeError:
            return False

    kinds = {n.removeprefix("aten::"): kind(n) for n in sorted(names)}
    return {n: k for n, k in kinds.items() if k is not None}


def compiled(words: list[str], platform: str) -> dict[str, str]:
    """The worst sign of each dtype, over slices and questions; dtypes with nothing to compile are left out."""
    found: dict[str, str] = {}
    for slice_name, sign, dtype, _ in units(words):
        if slice_name in AOT[platform] and sign != "~":
            found[dtype] = min(found.get(dtype, "+"), sign, key="-!+".index)
    return found


def aot_cells(words: list[str]) -> list[str]:
    """What compiles for each platform, and what runs on the CPU there."""
    cells, on_cpu = [], []
    for platform in AOT:
        found = compiled(words, platform)
        of = {sign: " ".join(SHORT[d] for d in SHORT if found.get(d) == sign) for sign in "+-!"}
        cells.append(f"{of['+']} (fails: {of['-']})".strip() if of["-"] else of["+"])
        on_cpu += [f"{platform}: {of['!']}"] if of["!"] else []
    return [*cells, "; ".join(on_cpu)]


def aot_totals(entries: dict[str, list[str]]) -> list[str]:
    counts: dict[tuple[str, str, str], collections.Counter] = {}
    for entry, words in entries.items():
        for slice_name, sign, dtype, question in units(words):
            key = slice_name, f"{entry.split('/')[0]} {question}", dtype
            counts.setdefault(key, collections.Counter())[sign] += 1
    slices, dtypes = [s for of in AOT.values() for s in of], list(SHORT)
    rows = sorted(counts.items(), key=lambda x: (slices.index(x[0][0]), x[0][1], dtypes.index(x[0][2])))
    lines = ["| slice | question | dtype | compile | of | in part on the CPU |", "|---|---|---|---|---|---|"]
    for (slice_name, question, dtype), c in rows:
        of = c["+"] + c["-"] + c["!"]
        lines += [f"| {slice_name} | {question} | {dtype} | {c['+']} | {of} | {c['!'] or ''} |"] if of else []
    return lines


def totals(entries: dict[str, list[str]]) -> list[str]:
    counts: dict[tuple[str, str, str], collections.Counter] = {}
    for entry, words in entries.items():
        for _, sign, dtype, question in units(words):
            counts.setdefault((entry.split("/")[0], question, dtype), collections.Counter())[sign] += 1
    dtypes = list(SHORT)
    rows = sorted(counts.items(), key=lambda x: (x[0][0] != "op", x[0][1], dtypes.index(x[0][2])))
    lines = ["| database | question | dtype | right | of | share |", "|---|---|---|---|---|---|"]
    for (db, question, dtype), c in rows:
        if of := c["+"] + c["-"]:
            lines.append(f"| {db} | {question} | {dtype} | {c['+']} | {of} | {100 * c['+'] / of:.1f} % |")
    return lines


def headline(entries: dict[str, list[str]]) -> str:
    """The row of README.md."""

    def right(unit: str) -> str:
        found = [w[0] for entry, words in entries.items() if entry.startswith("op/") for w in words if w[1:] == unit]
        return f"{found.count('+')} of {found.count('+') + found.count('-')}"

    on_cpu = sum(bool(ops_on_cpu(words)) for words in entries.values())
    return (
        "| PyTorch's own samples on the cpu platform, all of an entry ([docs/ops.md](docs/ops.md)) | "
        f"float32: {right('float32/forward')} entries right, gradients {right('float32/grad')}; "
        f"{on_cpu} entries run in part on the CPU |"
    )


def cell(words: list[str], question: str) -> str:
    """The dtypes of a question: those that are right, and the others after a word."""
    found = {sign: [SHORT[d] for d in SHORT if f"{sign}{d}/{question}" in words] for sign in "+-"}
    right = " ".join(found["+"])
    return f"{right} (wrong: {' '.join(found['-'])})".strip() if found["-"] else right


def aot_section(source: str, entries: dict[str, list[str]]) -> list[str]:
    if not entries:
        return []
    return [
        "",
        "## Compiled for TPUs and GPUs",
        "",
        f"What `make conformance-aot` found ({source}): XLA's compilers for TPUs and GPUs, without either.",
        "A unit compiles when all programs of its samples do and none of its operations runs on the CPU there.",
        "Why units fail is in `tests/conformance/aot.toml`.",
        "",
        *aot_totals(entries),
    ]


def page(source: str, entries: dict[str, list[str]], aot: tuple[str, dict[str, list[str]]]) -> str:
    from torch.testing._internal.common_methods_invocations import op_db

    from .units import entry_name

    kinds = served()
    pages = {"the newest": "ops.md", **{version: f"ops-{version}.md" for version in OLDER}}
    by_op = collections.defaultdict(list)
    for op in op_db:
        name = f"op/{entry_name(op)}"
        by_op[op.aten_name.split(".")[-1]] += [(name, entries[name])] if name in entries else []
    of_kind = collections.Counter(kinds.values())
    fallbacks = collections.defaultdict(list)
    for entry, words in entries.items():
        for op in ops_on_cpu(words):
            fallbacks[op].append(entry.removeprefix("op/"))
    out = [
        "<!-- generated by `python -m tests.conformance.ops`; a test compares it with what is there -->",
        f"# Operations ({source.split(', ')[0]})",
        "",
        f"What `make conformance` found ({source}), and how each overload of ATen is served.",
        "See [conformance.md](conformance.md) for what the questions are.",
        "Why entries are wrong is in `tests/conformance/exceptions.toml`.",
        "Each version of torch has its page: " + ", ".join(f"[{name}]({link})" for name, link in pages.items()) + ".",
        "",
        "## Results",
        "",
        "An entry counts as right when all of its samples are; entries without anything to check, or not run, are left "
        "out.",
        "",
        *totals(entries),
        "",
        f"{len({e for es in fallbacks.values() for e in es})} float32 entries run in part on the CPU:",
        "",
        *(f"- `{op}`: {', '.join(sorted(names))}" for op, names in sorted(fallbacks.items())),
        *aot_section(*aot),
        "",
        "## How overloads are served",
        "",
        "| | overloads | is |",
        "|---|---|---|",
        *(f"| {kind} | {of_kind[kind]} | {text} |" for kind, text in KINDS.items()),
        f"| | {sum(of_kind.values())} | in all |",
        "",
        "## Ops",
        "",
        "Overloads by what serves them; then, where a database has the op, the dtypes whose samples are right.",
        "Behind them are those for which forward and gradient compile, and those that run in part on the CPU there.",
        "",
        "| op | served | forward | gradient | `out=` | in place | compiles for tpu | for cuda | on the CPU there |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ops = collections.defaultdict(collections.Counter)
    for name, kind in kinds.items():
        ops[name.split(".")[0]][kind] += 1
    for base, counts in ops.items():
        how = ", ".join(f"{k} {counts[k]}" for k in KINDS if counts[k])
        found = by_op.get(base, [])
        for entry, words in found or [("", [])]:
            variant = entry.partition(":")[2]
            name = f"`{base}`" + (f" ({variant})" if variant else "")
            cells = [cell(words, q) for q in ("forward", "grad", "out", "inplace")]
            cells += aot_cells(aot[1].get(entry, []))
            out.append(f"| {name} | {how} | " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def main() -> int:
    import torch

    from .__main__ import load

    parser = argparse.ArgumentParser(prog="python -m tests.conformance.ops", description=__doc__.split("\n\n")[0])
    parser.add_argument("--note", default="", help="what else there is to say about where the results are from")
    parser.add_argument("results", nargs="?", type=Path, help="JSON lines of a run, to be summed up first")
    parser.add_argument("--aot", type=Path, help="JSON lines of `tests.conformance.aot`, to be summed up first")
    parser.add_argument("--part", action="store_true", help="the run was of some units: the others stay as they are")
    args = parser.parse_args()
    version = torch.__version__.split("+")[0]
    results, aot, written = files(version)
    for file, run, words in ((results, args.results, words_of), (aot, args.aot, aot_words_of)):
        if run is None:
            continue
        found = words(load(run))
        day = datetime.date.fromtimestamp(run.stat().st_mtime).isoformat()
        source = ", ".join(filter(None, (f"torch {version}", day, args.note)))
        if args.part:
            before, entries = read(file)
            put_in(entries, found)
            source, found = before if not args.note else source, entries
        file.write_text(summary(source, found))
    written.write_text(page(*parse(results.read_text()), read(aot)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
