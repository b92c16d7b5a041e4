"""The classes of a translation: one for each class of modules whose instances have the same graph.

Modules are written from the leaves up. Instances whose texts differ in numbers alone share a class, and the numbers are
arguments of its constructor.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import itertools
import re
import textwrap
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from oxitorch.to_jax import _leaves
from oxitorch.to_jax._body import Body
from oxitorch.to_jax._graph import Place, Scope
from oxitorch.to_jax._text import LITERAL, constant, dtype, identifier, literal, plain, shortest

WIDTH = 100


@dataclass
class Problem:
    """What has no translation, and where it stands."""

    what: str
    where: str

    def __str__(self):
        return f"{self.where}: {self.what}"


@dataclass
class Written:
    """A class, and how each of its instances is made."""

    name: str
    text: str = ""
    made: dict[str, str] = field(default_factory=dict)  # by the path of the instance


class Emitter:
    """Writes `model.py` of a capture."""

    def __init__(self, capture, folder: Path | None = None):
        self.capture, self.model = capture, capture.model
        self.folder = folder or Path.cwd()
        self.classes: list[Written] = []
        self.made: dict[str, str] = {}  # the expression that makes the class instance at a path
        self.problems: list[Problem] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.digests: dict[str, str] = {}
        self.used_names: set[str] = set()

    def write(self):
        heights: dict[int, list[str]] = {}
        for path, module in self.model.named_modules():
            if path == "" or self.is_class(module, path):
                heights.setdefault(height(module), []).append(path)
        for h in sorted(heights):
            self.group([Owner(self, path) for path in heights[h]])
        return self

    def is_class(self, module, path):
        return _leaves.kind(module, path, self.capture.tied) == "class" and not holds(module) and not chain(module)

    def group(self, owners):
        groups: dict[tuple, list[Owner]] = {}
        for owner in owners:
            owner.write()
            groups.setdefault((type(owner.module), owner.template()), []).append(owner)
        for members in groups.values():
            self.settle(members)

    def settle(self, owners):
        """One class for these instances: numbers in which they differ become arguments."""
        first = owners[0]
        name = self.class_name(type(first.module))
        columns = list(zip(*(o.values() for o in owners), strict=True))
        hints = first.hints()
        arguments: dict[tuple, str] = {}
        for column, hint in zip(columns, hints, strict=True):
            if len(set(column)) > 1 and column not in arguments:
                arguments[column] = self.argument_name(owners, column, hint, set(arguments.values()))
        written = Written(name)
        for i, o in enumerate(owners):
            given = "".join(f"{a}={literal(a, Raw(column[i]))}, " for column, a in arguments.items())
            self.made[o.path] = f"{name}({given}rngs=rngs)"
        kept = set()
        cells = iter(columns)

        def in_init(m):
            column = next(cells)
            return arguments.get(column, column[0])

        init = LITERAL.sub(in_init, first.init)

        def in_method(m):
            column = next(cells)
            if column in arguments:
                kept.add(arguments[column])
                return f"self.{arguments[column]}"
            return column[0]

        methods = LITERAL.sub(in_method, first.methods)
        have = set(re.findall(r"self\.(\w+) =", init))
        keep = "".join(f"        self.{a} = {a}\n" for a in arguments.values() if a in kept and a not in have)
        written.text = first.assemble(name, list(arguments.values()), keep + init, methods)
        self.classes.append(written)

    def argument_name(self, owners, column, hint, taken):
        """The name of the attribute that has these numbers in all instances, or of the constructor's parameter that is
        handed on where they stand, or what they are for: `conv1.in_features`.
        """
        parameters = list(inspect.signature(type(owners[0].module).__init__).parameters)[1:]
        own = [n for n in vars(owners[0].module) if not n.startswith("_") and n != "training"]
        for name in [*[p for p in parameters if p in own], *own]:
            values = [vars(o.module).get(name) for o in owners]
            fits = all(
                type(v) in (int, float, str, tuple) and constant(v) == c for v, c in zip(values, column, strict=True)
            )
            if fits and name not in taken and identifier(name) == name:
                return name
        base = name = owners[0].parameter_of(hint) or identifier(hint)
        n = 1
        while name in taken:
            name, n = f"{base}_{n}", n + 1
        return name

    def class_name(self, cls):
        base = {"Sequential": "Model"}.get(cls.__name__, cls.__name__)
        taken = self.used_names | LAYERS
        name, n = base, 2
        while name in taken:
            name, n = f"{base}{n}", n + 1
        self.used_names.add(name)
        return name

    # --- values that the model has and that are not trained

    def constant(self, t, hint="") -> str:
        """The text of a tensor's value."""
        t = t.detach()
        known = simple(t)
        if known is not None:
            return known
        data = t.to(torch.float32).numpy() if t.dtype == torch.bfloat16 else t.cpu().numpy()
        digest = hashlib.blake2b(data.tobytes() + str((t.dtype, t.shape)).encode()).hexdigest()
        if digest not in self.digests:
            self.digests[digest] = hint or f"constant_{len(self.constants)}"
            self.constants[self.digests[digest]] = t
        return f"jnp.array(constants[{literal('key', self.digests[digest])}])"


class Raw(str):
    """Text that is a literal already."""

    def __repr__(self):
        return str(self)


class Owner:
    """One instance of a class while its text is written."""

    def __init__(self, emitter: Emitter, path: str):
        self.emitter, self.path = emitter, path
        self.module = emitter.model.get_submodule(path)
        self.scopes: list[Scope] = emitter.capture.calls.get(path, [])
        self.attributes: dict[str, str] = {}
        self.dropouts: dict[str, float] = {}
        self.flags: dict[str, str] = {}
        self.init, self.methods = "", ""
        self.file, self.comments = "", {}
        cls = type(self.module)
        try:
            self.file = inspect.getsourcefile(cls) or ""
            if not cls.__module__.startswith("torch."):
                self.comments = comments(cls)
        except (TypeError, OSError):
            pass

    def parameter_of(self, hint):
        """The parameter of the constructor that a member gets as what the hint says."""
        name, _, what = hint.partition(".")
        child = self.module._modules.get(name)
        if child is None or not what:
            return None
        parameters = list(inspect.signature(type(child).__init__).parameters)[1:]
        made = _leaves.made(child)
        # Arguments of layers stand in PyTorch's order.
        given = list(made.args) if made is not None else parameters
        at = given.index(what) if what in given else None
        passed = handed_on(type(self.module))
        of_class = None if made is not None or identifier(what) != what else what
        keyword = parameters[at] if at is not None and at < len(parameters) else None
        return passed.get((name, at)) or passed.get((name, keyword)) or of_class

    # --- what a body asks for

    def module_text(self, scope, path) -> str:
        """How a forward reaches a module."""
        return self.emitter_path(path, scope.path or "", "self" if scope.path is not None else "model")

    def emitter_path(self, path, start, text):
        parts = path.removeprefix(start).lstrip(".").split(".") if path != start else []
        module = self.emitter.model.get_submodule(start)
        for part in parts:
            child = module._modules[part] if part in module._modules else getattr(module, part)
            if chain(module):
                text += f".layers[{part}]"
            elif holds(module, nn.ModuleList):
                text += f"[{part}]"
            elif holds(module, nn.ModuleDict):
                text += f"[{part!r}]"
            else:
                text += f".{identifier(part)}"
            module = child
        return text

    def method_name(self, n):
        return f"call_{n + 1}"

    def problem(self, what, place):
        p = Problem(what, self.shown(place))
        if str(p) not in {str(q) for q in self.emitter.problems}:
            self.emitter.problems.append(p)

    def shown(self, place):
        """The place, with a path that says no more than it must."""
        if not place.file:
            return "?"
        file = Path(place.file)
        for part in ("site-packages", str(self.emitter.folder)):
            if f"{part}/" in place.file:
                return f"{place.file.split(f'{part}/', 1)[1]}:{place.line}"
        return f"{file.name}:{place.line}"

    def constant(self, t):
        return self.emitter.constant(t)

    def stored(self, path):
        """The name of a parameter in its layer, and whether it is turned around there."""
        module, _, name = path.rpartition(".")
        layer = self.emitter.model.get_submodule(module)
        leaf = _leaves.kind(layer, module, self.emitter.capture.tied) == "leaf"
        made = _leaves.made(layer) if leaf else None
        row = _leaves.RENAMED.get(made.layer, {}) if made else {}
        return row.get(name, (identifier(name), False))

    def attribute(self, name, x):
        name = identifier(name)
        self.attributes[name] = literal(name, x)
        return f"self.{name}"

    def flag(self, name):
        self.flags[name] = "False"
        return f"self.{name}"

    def dropout(self, p):
        for name, q in self.dropouts.items():
            if p == q:
                return f"self.{name}"
        name = "dropout" if "dropout" not in dir(self.module) else f"dropout_{len(self.dropouts)}"
        name = name if name not in self.module._modules else f"{name}_of_values"
        self.dropouts[name] = p
        return f"self.{name}"

    # --- the text

    def write(self):
        bodies = []
        texts: list[str] = []
        for scope in () if chain(self.module) else self.scopes:
            body = Body(scope, self.emitter.capture, self).write()
            text = "\n".join("    " * (indent + 2) + t for indent, t, _ in body.lines)
            if self.path:
                names = dict(zip(body.keys, body.parameters, strict=True))
                scope.unused = frozenset(k for k, n in names.items() if not re.search(rf"\b{n}\b", text))
                body.parameters = [n for k, n in names.items() if k not in scope.unused]
            if (key := (tuple(body.parameters), text)) in texts:
                scope.method = texts.index(key)
                continue
            scope.method = len(texts)
            texts.append(key)
            bodies.append(body)
        self.methods = "".join(self.method(n, body) for n, body in enumerate(bodies))
        self.init = self.constructor()

    def method(self, n, body):
        name = "__call__" if n == 0 else self.method_name(n)
        out = [f"    def {name}({', '.join(['self', *body.parameters])}):"]
        written = set()
        before = None
        for indent, text, line in body.lines or [(0, "pass", 0)]:
            pad = "    " * (indent + 2)
            if line:
                start = min(before, line) if before is not None else line
                for at in range(start if before is not None else line - 1, line + 1):
                    for note in self.comments.get(at, ()):
                        if (at, note) not in written and (before is not None or at in (line, line - 1)):
                            out.append(f"{pad}{note}")
                            written.add((at, note))
                before = line
            out.append(pad + text)
        return "\n".join(out) + "\n\n"

    def constructor(self):
        """The lines of `__init__`."""
        pad = "        "
        lines = []
        m = self.module
        if chain(m):
            members = [self.part(child, join(self.path, name)) for name, child in m._modules.items()]
            inner = "".join(f"{pad}    {t},\n" for t in members)
            return f"{pad}super().__init__(\n{inner}{pad})\n"
        for name, p in m._parameters.items():
            target = f"self.{identifier(name)}"
            path = join(self.path, name)
            if p is None:
                lines.append(f"{target} = None")
            elif path not in self.emitter.capture.tied:
                lines.append(f"{target} = nnx.Param({self.initial(name, p)})")
        for name, b in m._buffers.items():
            path = join(self.path, name)
            if b is not None and path not in self.emitter.capture.tied:
                kind = "Constant" if name in m._non_persistent_buffers_set else "Buffer"
                text = self.emitter.constant(b, path) if kind == "Constant" or b.numel() <= 16 else None
                text = text or simple(b) or f"jnp.zeros({constant(tuple(b.shape))}, {dtype(b.dtype)})"
                lines.append(f"self.{identifier(name)} = {kind}({text})")
        notes = init_comments(type(m), self.comments)
        for name, child in m._modules.items():
            text = None if child is None else self.construct(child, join(self.path, name), name)
            if text is not None:
                lines += notes.get(name, [])
                lines.append(f"self.{identifier(name)} = {text}")
        for name, text in self.attributes.items():
            lines.append(f"self.{name} = {text}")
        for name, p in self.dropouts.items():
            lines.append(f"self.{name} = nnx.Dropout({literal('rate', float(p))}, rngs=rngs)")
        for name, text in self.flags.items():
            lines.append(f"self.{name} = {text}")
        return "".join(f"{pad}{line}\n" for line in lines)

    def initial(self, name, p):
        shape = "(" + ", ".join(literal(f"{name}_size", n) for n in p.shape) + ("," if p.ndim == 1 else "") + ")"
        if p.device.type != "meta" and p.numel() and bool((p == 0).all()):
            return f"jnp.zeros({shape})"
        if p.device.type != "meta" and p.numel() and bool((p == 1).all()):
            return f"jnp.ones({shape})"
        return f"0.02 * jax.random.normal(rngs.params(), {shape})"

    def construct(self, child, path, name) -> str | None:
        """The expression that makes a child; None for what needs no object."""
        tied = self.emitter.capture.tied
        first = self.emitter.capture.paths.get(id(child), path)
        if first != path:  # the same module under another name
            outer = self.path
            if first.startswith(outer + "." if outer else ""):
                return self.emitter_path(first, outer, "self")
            self.problem(f"`{path}` is the module `{first}` of another parent", place_of(type(self.module)))
            return None
        kind = _leaves.kind(child, path, tied)
        if kind == "leaf":
            return leaf_text(child, name)
        if kind == "inline":
            return None
        if holds(child, nn.ModuleList):
            made = [self.construct(c, join(path, n), name) or "None" for n, c in child._modules.items()]
            if len(made) > 1 and len(set(map(plain, made))) == 1:
                return f"nnx.List([{made[0]} for _ in range({literal(f'{name}_count', len(made))})])"
            return f"nnx.List([{', '.join(made)}])"
        if holds(child, nn.ModuleDict):
            made = {n: self.construct(c, join(path, n), n) or "None" for n, c in child._modules.items()}
            return "nnx.Dict({" + ", ".join(f"{k!r}: {v}" for k, v in made.items()) + "})"
        if chain(child):
            made = [self.part(c, join(path, n)) for n, c in child._modules.items()]
            if len(made) > 2 and len(set(map(plain, made))) == 1:
                return f"nnx.Sequential(*[{made[0]} for _ in range({literal(f'{name}_count', len(made))})])"
            return f"nnx.Sequential({', '.join(made)})"
        text = self.emitter.made.get(path)
        return text if text is None or name.isdigit() else LITERAL.sub(lambda m: f"\x01{name}.{m[1]}|{m[2]}\x02", text)

    def part(self, child, path) -> str:
        """The expression of a member of Sequential."""
        text = self.construct(child, path, path.rpartition(".")[2])
        if text is not None:
            return text
        scope = self.emitter.capture.parts.get(path)
        if scope is None:
            return "lambda x: x"
        owner = Owner(self.emitter, path)
        owner.file = self.file
        for v in (v for node in scope.nodes for v in node.outs):
            v.name = None  # one expression
        body = Body(scope, self.emitter.capture, owner).write()
        if owner.dropouts or owner.attributes or len(body.lines) != 1 or len(body.parameters) != 1:
            what = f"`{type(child).__name__}` at `{path}`, which is more than an expression within Sequential,"
            self.problem(what, place_of(type(self.module)))
            return f"lambda x: unsupported({what!r}, {path!r})"
        text = body.lines[0][1].removeprefix("return ")
        x = body.parameters[0]
        function = re.fullmatch(r"([\w.]+)\((\w+)\)", text)
        return function[1] if function and function[2] == x else f"lambda {x}: {text}"

    # --- grouping

    def template(self):
        return LITERAL.sub("\x01", self.init), LITERAL.sub("\x01", self.methods)

    def values(self):
        return [m[2] for m in LITERAL.finditer(self.init + self.methods)]

    def hints(self):
        return [m[1] for m in LITERAL.finditer(self.init + self.methods)]

    def assemble(self, name, arguments, init, methods):
        cls = type(self.module)
        base = "nnx.Sequential" if chain(self.module) else "nnx.Module"
        doc = f'    """{doc_of(cls)}"""\n\n'
        if not init.strip():
            init = "        pass\n"
        if "rngs" not in init:
            init = init.replace("        pass\n", "        del rngs  # it has no parameters\n")
        given = "".join(f"{a}, " for a in arguments)
        return f"class {name}({base}):\n{doc}    def __init__(self, *, {given}rngs):\n{init}\n{methods}".rstrip() + "\n"


def leaf_text(module, name):
    made = _leaves.made(module)
    options = {**made.options}
    of = "" if name.isdigit() else f"{name}."
    args = [literal(of + hint, v) for hint, v in made.args.items()]
    args += [f"{k}={literal(of + k, v)}" for k, v in options.items()]
    return f"{made.layer}({', '.join(args)}, rngs=rngs)"


def join(path, name):
    return f"{path}.{name}" if path else name


def chain(module):
    """Whether it calls its members one after another and does nothing else."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and not module._parameters
        and not module._buffers
    )


def holds(module, kind=nn.ModuleList | nn.ModuleDict):
    """Whether it keeps modules and does nothing itself, as a list or dict has no forward."""
    return isinstance(module, kind) and type(module).forward is nn.Module.forward


def height(module):
    return 1 + max((height(c) for c in module.children()), default=0)


def doc_of(cls):
    """Where a class comes from, with the first line of what its author says of it."""
    said = (
        (cls.__doc__ or "").strip().splitlines()
        if "__doc__" in vars(cls) and cls.__module__.split(".")[0] != "torch"
        else []
    )
    first = " ".join(line.strip() for line in itertools.takewhile(str.strip, said))
    first = first.replace("\\", "\\\\").replace('"""', "'''")
    first = "" if len(first) > 100 else first
    origin = f"From `{cls.__module__}.{cls.__qualname__}`."
    first = first if not first or first.endswith((".", "!", "?")) else first + "."
    return f"{first}\n\n    {origin}\n    " if first else origin


def place_of(cls):
    try:
        return Place(inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)[1])
    except (TypeError, OSError):
        return Place()


def comments(cls):
    """The comments of a class's source by line: those before a line, and those behind its code."""
    lines, start = inspect.getsourcelines(cls)
    out: dict[int, list[str]] = {}
    text = textwrap.dedent("".join(lines))
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not re.match(
                r"#\s*(noqa|type:|fmt:|pylint|ruff|mypy|Copied)", token.string
            ):
                out.setdefault(start + token.start[0] - 1, []).append(token.string)
    except (tokenize.TokenError, IndentationError):
        return {}
    return out


def init_comments(cls, by_line):
    """Comments of the statements of `__init__` that make members, by the member's name."""
    out: dict[str, list[str]] = {}
    if not by_line or "__init__" not in vars(cls):
        return out
    try:
        lines, start = inspect.getsourcelines(cls.__init__)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return out
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        first, last = node.lineno + start - 1, node.end_lineno + start - 1
        above = []
        at = first - 1
        source = dict(enumerate(lines, start))
        while source.get(at, "").strip().startswith("#"):
            above = by_line.get(at, []) + above
            at -= 1
        notes = above + [c for n in range(first, last + 1) for c in by_line.get(n, ())]
        for target in node.targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                out[target.attr] = notes
    return out


@functools.cache
def handed_on(cls) -> dict[tuple[str, int | str], str]:
    """Parameters of a class's constructor that are arguments of its members, by the member and the argument."""
    out = {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(vars(cls)["__init__"])))
    except (KeyError, OSError, SyntaxError, TypeError):
        return out
    parameters = {a.arg for a in [*tree.body[0].args.args[1:], *tree.body[0].args.kwonlyargs]}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        given = [*enumerate(node.value.args), *((k.arg, k.value) for k in node.value.keywords)]
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                out |= {(target.attr, at): x.id for at, x in given if isinstance(x, ast.Name) and x.id in parameters}
    return out


def simple(t) -> str | None:
    """The text of a value that has a short one."""
    d = dtype(t.dtype)
    shape = constant(tuple(t.shape))
    if t.numel() == 0:
        return f"jnp.zeros({shape}, {d})"
    if t.ndim == 0:
        return f"jnp.array({constant(shortest(t.item(), t.dtype))}, {d})"
    if bool((t == t.flatten()[0]).all()):
        x = shortest(t.flatten()[0].item(), t.dtype)
        return (
            f"jnp.{'zeros' if x == 0 else 'ones'}({shape}, {d})"
            if x in (0, 1)
            else f"jnp.full({shape}, {constant(x)}, {d})"
        )
    n = t.shape[-1]
    if not t.dtype.is_floating_point and t.numel() == n and t.dtype != torch.bool:
        flat = t.flatten()
        if bool((flat == torch.arange(n, dtype=t.dtype)).all()):
            text = "jnp.arange(" + str(n) + (")" if d == "jnp.int32" else f", dtype={d})")
            return text if t.ndim == 1 else f"{text}.reshape{shape}"
    square = t.ndim >= 2 and t.shape[-2] == n and not t.is_complex()
    if square and bool((t == torch.tril(torch.ones(n, n)).to(t.dtype)).all()):
        return f"jnp.tril(jnp.ones({shape}, {d}))"
    if t.numel() <= 16 and not t.is_complex():
        return f"jnp.array({shortest(t.tolist(), t.dtype)!r}, {d})"
    return None


def layer_sources() -> dict[str, str]:
    """Each class and function of `_layers.py`, in its order."""
    text = Path(__file__).with_name("_layers.py").read_text()
    lines = text.splitlines(keepends=True)
    out = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            out[node.name] = "".join(lines[node.lineno - 1 : node.end_lineno])
    return out


LAYERS = set(layer_sources())


def layers_used(text: str) -> list[str]:
    """Which of `_layers.py` a text needs itself."""
    return sorted(n for n in LAYERS if re.search(rf"(?<![\w.]){n}\(", text))
