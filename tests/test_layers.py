"""The modules of the package stand on each other in one order, and import at their top what they need.

`ARCHITECTURE.md` has the order: a module may import those before it in the table there. What the files of one package
import of each other is free but for circles. Imports in functions count like others, and so does a package whose part
is imported. An import in a function has a reason in `LATE`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "oxitorch"
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")

IMPORTS_TORCH = "`import oxitorch` and the command line import no torch"
START_UP = "slow to import, and few programs need it"
COMMAND = "the command line starts without it"
LATE = {
    IMPORTS_TORCH: """
        oxitorch: _activate importlib tpu
        data._collate: torch
        data._packing: torch
        data._segments: torch
        diff: diff._call diff._report
        preflight: _preflight
        to_jax.__main__: torch to_jax to_jax._check
    """,
    START_UP: """
        _decompose: _sparse
        _default_backend: _compile
        _dtensor: torch
        _pretend: _remat _roles
        integrations: integrations.accelerate
        integrations.accelerate: torch
        selftest.values: torch
        tpu: _scan_layers jit
    """,
    COMMAND: """
        _env: multiprocessing
    """,
    "`doctor` tells of an installation whose core cannot be loaded": """
        _cli: _core
        _shim: _core
        oxitorch: _core
    """,
    "while a module waits for torch, another thread that imports torch waits for the module": """
        _activate: torch
    """,
    "importing them is what puts the checks into their order, and a torch that fails is a check that fails": """
        selftest.__main__: selftest.memory selftest.order selftest.processes selftest.speed selftest.transfers
            selftest.values torch
    """,
}


def modules(root: Path) -> dict[str, ast.Module]:
    """The files below a folder, by their names within it; the folder itself is "oxitorch"."""
    found = {}
    for path in root.rglob("*.py"):
        if "templates" not in path.parts:  # what a translation gets a copy of
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "oxitorch"
            found[name] = ast.parse(path.read_text("utf-8"))
    return found


def imports(name: str, known: dict[str, ast.Module]) -> Iterator[tuple[str, bool]]:
    """What a module imports: modules of ours by their names within the package, others by their first names; and
    whether it does so in a function.
    """
    is_package = any(other.startswith(f"{name}.") for other in known)
    package = name if is_package else name.rpartition(".")[0]

    def walk(node: ast.AST, in_function: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            for full in _named(child, package):
                yield _shortened(full, known), in_function
            yield from walk(child, in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    yield from walk(known[name], False)


def _named(node: ast.AST, package: str) -> list[str]:
    """The full names of what a statement or call imports."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(level=0):
            return [f"{node.module}.{alias.name}" for alias in node.names]
        case ast.ImportFrom():
            parts = ["oxitorch", *filter(None, package.split("."))]
            parts = [*parts[: len(parts) - node.level + 1], *filter(None, [node.module])]
            return [".".join([*parts, alias.name]) for alias in node.names]
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name))]):
            return [name]
    return []


def _shortened(full: str, known: dict[str, ast.Module]) -> str:
    first, _, rest = full.partition(".")
    if first != "oxitorch":
        return first
    # A name of a module, or of something in it.
    return next((n for n in (rest, rest.rpartition(".")[0]) if n in known or n == "_core"), "oxitorch")


def used(name: str, known: dict[str, ast.Module]) -> set[str]:
    """The modules of ours that a module imports, and the packages that are imported with them, but for its own."""
    found = set()
    for what, _ in imports(name, known):
        parts = what.split(".")
        found.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return {u for u in found if u in known and u != name and not f"{name}.".startswith(f"{u}.")}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that can be reached from themselves, together with those that they reach and that reach them."""
    reached: dict[str, set[str]] = {}
    for name in graph:
        seen, todo = set(), [name]
        while todo:
            for other in graph.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        reached[name] = seen
    groups = {tuple(sorted(o for o in reached[n] if n in reached[o])) for n in graph if n in reached[n]}
    return [list(g) for g in sorted(groups)]


@pytest.fixture(scope="module")
def known() -> dict[str, ast.Module]:
    return modules(PACKAGE)


def test_modules_import_each_other_without_circles(known):
    assert len(known) > 100, "this test looks in the wrong place"
    found = circles({name: used(name, known) for name in known})
    assert not found, "these modules import each other:\n" + "\n".join(", ".join(c) for c in found)


def test_modules_import_only_what_is_below_them(known):
    table = ARCHITECTURE.split("Its modules stand on each other in this order", 1)[1].split("\n\n")[1]
    # What else is in code there has a space, a dot or parentheses.
    order = re.findall(r"`(\w+)`", table)
    wrong = [f"there is no module `{o}`" for o in order if o not in known]
    for name in known.keys() - {"oxitorch"}:
        own = name.partition(".")[0]
        if own not in order:
            wrong.append(f"`{name}` is in no layer: put it into the table of `ARCHITECTURE.md`")
            continue
        tops = {u.partition(".")[0] for u in used(name, known)} - {"oxitorch", own}
        above = (t for t in sorted(tops) if t not in order or order.index(t) > order.index(own))
        wrong += [f"`{name}` imports `{t}`, which is above it" for t in above]
    assert not wrong, "\n".join(wrong)


def test_imports_in_functions_have_a_reason(known):
    allowed: set[tuple[str, str]] = set()
    for text in LATE.values():
        for word in text.split():
            if word.endswith(":"):
                importer = word[:-1]
            else:
                allowed.add((importer, word))
    found = {(name, what) for name in known for what, late in imports(name, known) if late}
    new, gone = sorted(found - allowed), sorted(allowed - found)
    assert not new, f"imports in functions, to be moved to the top or put into `LATE` with a reason: {new}"
    assert not gone, f"these are not there any more: {gone}"


def test_crates_depend_on_those_that_the_map_says():
    """The map leaves out what follows from the rest."""
    text = ARCHITECTURE.split("\n## Crates\n", 1)[1].split("```")[1]
    said = {name: set(of.split(", ")) for name, of in re.findall(r"^([\w-]+) --> (.+)$", text, re.M)}
    crates = {path.parent.name: path for path in (ROOT / "crates").glob("*/Cargo.toml")}
    for name, path in crates.items():
        dependencies = tomllib.loads(path.read_text("utf-8")).get("dependencies", {})
        real = {d.removeprefix("oxitorch-") for d in dependencies if d.startswith("oxitorch-")}
        stated = said.get(name, set())
        implied, todo = set(), list(stated)
        while todo:
            below = said.get(todo.pop(), set())
            implied |= below
            todo += below
        assert stated <= real <= stated | implied, f"{name} depends on {sorted(real)}"
    assert said.keys() <= crates.keys()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from oxitorch import _env", {("_env", False)}),
        ("from oxitorch.pack import x", {("pack", False)}),
        ("from oxitorch.pack import a", {("pack.a", False)}),
        ("import oxitorch.pack.a, os.path", {("pack.a", False), ("os", False)}),
        ("def f():\n    from oxitorch._env import A", {("_env", True)}),
        ("class C:\n    def f(self):\n        import torch", {("torch", True)}),
        ("import importlib\nimportlib.import_module('oxitorch.pack')", {("importlib", False), ("pack", False)}),
        ("if TYPE_CHECKING:\n    from oxitorch import _env", set()),
    ],
)
def test_what_counts_as_an_import(source, expected):
    known = {name: ast.parse("") for name in ("oxitorch", "_env", "pack", "pack.a")}
    assert set(imports("of", {**known, "of": ast.parse(source)})) == expected


def test_what_a_file_of_a_package_takes_of_the_files_beside_it():
    known = {name: ast.parse("") for name in ("oxitorch", "pack", "pack.a")}
    known["pack.b"] = ast.parse("from . import a\nfrom .a import x\nfrom oxitorch import pack")
    assert used("pack.b", known) == {"pack.a"}
    known["pack"] = ast.parse("from .b import y\nfrom . import a")
    assert used("pack", known) == {"pack.a", "pack.b"}


def test_circles_are_found_and_what_only_leads_to_them_is_not_one():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]
