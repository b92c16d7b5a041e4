"""The text of a forward: one statement for each value that had a name or is used twice, the rest within expressions."""

from __future__ import annotations

import re
from collections import Counter

import sympy
import torch
from torch import nn

from oxitorch.to_jax import _ops
from oxitorch.to_jax._graph import Const, Param, Scope, Size, Unsupported, Value, replace
from oxitorch.to_jax._text import ATOM, OPERATORS, bind, constant, dtype, identifier, literal

# An expression has at most so many operations.
LONGEST = 5


SDPA = "aten::scaled_dot_product_attention"
SAME = {"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::contiguous", "aten::clone", "aten::expand"}


def stays(node):
    """Whether the result of a node is its argument."""
    if node.path is not None or isinstance(node.op, str) or node.problem or node.op._schema.name not in SAME:
        return False
    x, out = node.args["self"], node.outs[0]
    return isinstance(x, Value) and x.shape == out.shape and x.dtype == out.dtype and x.node is not None


def swaps(node):
    """Whether a node exchanges dimensions 1 and 2 of four."""
    if (
        node.path is not None
        or isinstance(node.op, str)
        or node.op._schema.name not in ("aten::transpose", "aten::swapaxes")
    ):
        return False
    dims = [node.args.get("dim0", node.args.get("axis0")), node.args.get("dim1", node.args.get("axis1"))]
    return len(node.outs[0].shape) == 4 and {d % 4 for d in dims} == {1, 2}


class Body:
    """Writes one scope. `owner` keeps what the class needs besides: dropouts, attributes, constants."""

    def __init__(self, scope: Scope, capture, owner):
        self.scope, self.capture, self.owner = scope, capture, owner
        self.lines: list[tuple[int, str, int]] = []  # indentation, text, line of the source
        self.names: dict[Value, str] = {}
        self.holders: dict[str, Value] = {}
        self.header: dict[str, str] = {}
        self.live()
        self.plan()

    # --- which nodes are needed, and where they are written

    def live(self):
        for node in self.scope.nodes:
            for scope in self.capture.calls.get(node.path, ())[node.method : node.method + 1]:
                node.args = {k: v for k, v in node.args.items() if k not in scope.unused}
        needed = {v for v in self.scope.outputs if isinstance(v, Value)}
        nodes = []
        for node in reversed(self.scope.nodes):
            effect = node.path is not None or node.problem is not None or self.updates(node)
            if effect or any(v in needed for v in node.outs):
                nodes.append(node)
                needed.update(node.uses())
        self.nodes = nodes[::-1]
        self.drop_same()
        self.heads()

    def drop_same(self):
        """Leaves out what does nothing: a view of the same sizes, a copy."""
        known: dict[Value, Value] = {}

        def first(v):
            return known.get(v, v) if isinstance(v, Value) else v

        nodes = []
        for node in self.nodes:
            node.args = {k: replace(a, first) for k, a in node.args.items()}
            if stays(node):
                inner = node.args["self"]
                inner.name = inner.name or node.outs[0].name
                known[node.outs[0]] = inner
            else:
                nodes.append(node)
        self.nodes = nodes
        self.scope.outputs = [first(v) for v in self.scope.outputs]

    def heads(self):
        """Attention with its heads behind the times, as JAX has it, where the transposes around it do nothing else."""
        uses = Counter(v for node in self.nodes for v in node.uses())
        uses.update(v for v in self.scope.outputs if isinstance(v, Value))
        for node in list(self.nodes):
            if node.path is not None or isinstance(node.op, str) or node.op._schema.name != SDPA or node.problem:
                continue
            if not _ops.heads_last(node.args):
                continue
            for name in ("query", "key", "value"):
                v = node.args[name]
                before = v.node if isinstance(v, Value) else None
                if before is None or uses[v] != 1 or not swaps(before) or before.problem:
                    continue
                inner = before.args["self"]
                if isinstance(inner, Value):
                    self.nodes = [n for n in self.nodes if n is not before]
                    inner.name = v.name or inner.name if uses[inner] == 1 else inner.name
                    node.args[name] = inner
                    node.swapped = {*getattr(node, "swapped", ()), name}
            users = [n for n in self.nodes if node.outs[0] in n.uses()]
            if len(users) == 1 and uses[node.outs[0]] == 1 and swaps(users[0]) and len(node.outs[0].shape) == 4:
                after = users[0]
                self.nodes = [n for n in self.nodes if n is not after]
                node.outs = after.outs
                node.outs[0].node = node
                node.swapped = {*getattr(node, "swapped", ()), "out"}

    def updates(self, node):
        """Whether an operation changes a buffer."""
        if node.path is not None or isinstance(node.op, str):
            return False
        first = next(iter(node.args.values()), None)
        return (
            isinstance(first, Param) and node.op._schema.name.endswith("_") and not node.op._schema.name.endswith("__")
        )

    def plan(self):
        self.uses = Counter(v for node in self.nodes for v in node.uses())
        self.uses.update(v for v in self.scope.outputs if isinstance(v, Value))
        self.loops = self.find_loops()
        looped = {id(n) for loop in self.loops.values() for n in loop}
        user = {}
        for node in self.nodes:
            for v in node.uses():
                user[v] = node
        for v in self.scope.outputs:
            user[v] = None
        place = {id(n): i for i, n in enumerate(self.nodes)}
        self.inlined = set()
        size = {}
        for node in self.nodes:
            size[id(node)] = 1 + sum(size[id(v.node)] for v in node.uses() if v.node in self.inlined)
            out = node.outs[0] if len(node.outs) == 1 else None
            if out is None or self.uses[out] != 1 or node.problem or self.updates(node) or id(node) in looped:
                continue
            to = user[out]
            # What is only returned needs no name.
            kept = to is not None and out.name is not None and not (to.outs and to.outs[0].name == out.name)
            whole = to is not None and (to.many or id(to) in looped)
            if kept or (whole and node.many):
                continue
            # What is returned is a statement of its own.
            if (size[id(node)] <= LONGEST or to is None) and not self.crosses(node, to, place):
                self.inlined.add(node)
        # The statement in which a node is written.
        self.at = {}
        for node in reversed(self.nodes):
            self.at[id(node)] = place[id(node)]
            if node in self.inlined:
                to = user[node.outs[0]]
                self.at[id(node)] = len(self.nodes) if to is None else self.at[id(to)]
        self.last = {}
        for node in self.nodes:
            for v in node.uses():
                self.last[v] = max(self.last.get(v, 0), self.at[id(node)])
        for v in self.scope.outputs:
            if isinstance(v, Value):
                self.last[v] = len(self.nodes)

    def crosses(self, node, to, place):
        """Whether an update of a buffer stands between a node and where it would be written."""
        end = len(self.nodes) if to is None else place[id(to)]
        return any(self.updates(n) for n in self.nodes[place[id(node)] + 1 : end])

    def find_loops(self):
        """Runs of calls of all members of a list, each with the result of the one before."""
        loops = {}
        i = 0
        while i < len(self.nodes):
            run = self.run_from(i)
            if len(run) > 1:
                loops[id(run[0])] = run
            i += max(len(run), 1)
        return loops

    def run_from(self, i):
        node = self.nodes[i]
        path, _, last = (node.path or "").rpartition(".")
        if node.path is None or last != "0" or node.problem:
            return []
        container = self.capture.model.get_submodule(path)
        if not isinstance(container, nn.ModuleList | nn.Sequential) or len(container) < 2:
            return []
        run = [node]
        for n in range(1, len(container)):
            after = self.nodes[i + n] if i + n < len(self.nodes) else None
            before = run[-1]
            if after is None or after.path != f"{path}.{n}" or after.args.keys() != before.args.keys():
                return []
            changed = [k for k in after.args if not same(after.args[k], before.args[k])]
            same_method = self.method(after) == self.method(before)
            carried = len(changed) == 1 and after.args[changed[0]] is before.outs[0]
            if not (same_method and carried and self.uses[before.outs[0]] == 1 and len(after.outs) == len(before.outs)):
                return []
            if any(self.uses[v] for v in before.outs[1:]) or any(self.uses[v] for v in after.outs[1:]):
                return []
            run.append(after)
        keys = [k for k in run[1].args if run[1].args[k] is run[0].outs[0]]
        run[0].carry = keys[0]
        return run if isinstance(run[0].args[keys[0]], Value) else []

    # --- names

    def assign(self, v: Value, base: str | None, at: int) -> str:
        """A name for a value, that of its local variable if nothing that is still needed has it."""
        base = identifier(base or v.name or "h")
        name, n = base, 1
        while name in self.header or (name in self.holders and self.last.get(self.holders[name], -1) > at):
            name, n = f"{base}_{n}", n + 1
        old = self.holders.get(name)
        if old is not None and old is not v:
            self.names.pop(old, None)
        self.holders[name] = v
        self.names[v] = name
        return name

    # --- statements

    def write(self):
        """The lines of the body, its parameters and what it returns."""
        self.parameters = [self.assign(v, v.name or v.other_name or "x", -1) for v in self.scope.inputs]
        for v in self.scope.inputs:
            self.last[v] = max(self.last.get(v, -1), 0)
        self.keys = [*map(str, range(len(self.parameters))), *self.scope.given_sizes]
        self.given = {}
        for name, e in self.scope.given_sizes.items():
            v = Value((), None, name)
            self.last[v] = len(self.nodes)
            self.parameters.append(self.assign(v, name, -1))
            self.given.setdefault(e, self.parameters[-1])
        skip = set()
        for at, node in enumerate(self.nodes):
            if id(node) in skip or node in self.inlined:
                continue
            if id(node) in self.loops:
                run = self.loops[id(node)]
                skip.update(id(n) for n in run)
                self.loop(run, at)
                continue
            self.statement(node, at)
        result = self.result()
        if result is not None:
            self.lines.append((0, f"return {result}", 0))
        ranks = {name: len(v.shape) for name, v in zip(self.parameters, self.scope.inputs, strict=False)}
        self.lines = [(0, text, 0) for text in merge(self.header, ranks)] + self.lines
        return self

    def result(self):
        outs = [self.text(v) for v in self.scope.outputs]
        if self.scope.keys is not None and self.scope.path == "":
            return "{" + ", ".join(f"{k!r}: {t}" for k, t in zip(self.scope.keys, outs, strict=True)) + "}"
        return ", ".join(outs) if outs else None

    def statement(self, node, at):
        line = node.place.line if node.place.file == self.owner.file else 0
        text = self.expression(node)
        if self.updates(node):
            target = self.member(next(iter(node.args.values())).path)
            # What was run was the mode of training.
            self.lines.append((0, f"if not {self.owner.flag('use_running_average')}:", line))
            self.lines.append((1, f"{target}[...] = {text}", 0))
            out = node.outs[0]
            if self.uses[out]:
                self.lines.append((0, f"{self.assign(out, None, at)} = {target}[...]", 0))
            return
        used = [v for v in node.outs if self.uses[v]]
        if not used:
            if node.path is not None or node.problem is not None:
                self.lines.append((0, text, line))
            return
        if len(node.outs) == 1 and not node.many:
            name = self.assign(node.outs[0], None, at)
            if name != text:
                self.lines.append((0, f"{name} = {text}", line))
            return
        if len(used) == 1 and len(node.outs) > 1 and node.path is None:
            name = self.assign(used[0], None, at)
            self.lines.append((0, f"{name} = {bind(text, ATOM)}[{used[0].index}]", line))
            return
        targets = [self.assign(v, None, at) if self.uses[v] else "_" for v in node.outs]
        comma = "," if len(targets) == 1 else ""
        together = nest(node.nested, targets)[1:-1] if node.nested else ", ".join(targets) + comma
        self.lines.append((0, f"{together} = {text}", line))

    def loop(self, run, at):
        first, last = run[0], run[-1]
        end = at + len(run) - 1
        start = first.args[first.carry]
        out = last.outs[0]
        text = self.text(start)
        for n in run:
            self.last[n.outs[0]] = max(self.last.get(n.outs[0], 0), end)
        base = out.name or (text if text.isidentifier() else "x")
        others = {v for n in run for v in n.uses()} - {start} - {n.outs[0] for n in run}
        for v in others | {start}:
            self.last[v] = max(self.last.get(v, 0), end if v is not start else self.last.get(start, 0))
        name = self.assign(out, base, end - 1)
        if text != name:
            self.lines.append((0, f"{name} = {text}", 0))
        container = first.path.rpartition(".")[0]
        owner = self.owner.module_text(self.scope, container)
        if isinstance(self.capture.model.get_submodule(container), nn.Sequential):
            owner += ".layers"
        member = singular(container.rpartition(".")[2])
        while member in self.holders or member in self.header:
            member += "_"
        args = self.arguments({**first.args, first.carry: out})
        method = self.method(first)
        tail = "[0]" if len(first.outs) > 1 else ""
        line = first.place.line if first.place.file == self.owner.file else 0
        self.lines.append((0, f"for {member} in {owner}:", line))
        self.lines.append((1, f"{name} = {member}{method}({', '.join(args)}){tail}", 0))

    # --- expressions

    def expression(self, node) -> str:
        if node.problem is not None:
            return self.stub(node, node.problem)
        if node.path is not None:
            return self.call(node)
        name, row = _ops.find(node)
        if row is None:
            what = node.op if isinstance(node.op, str) else node.op.name()
            return self.stub(node, f"`{what}`")
        try:
            args = Args(self, node, name)
            return args.fill(row) if isinstance(row, str) else row(args)
        except Unsupported as e:
            return self.stub(node, str(e))

    def stub(self, node, what):
        what = " ".join(what.split())
        self.owner.problem(what, node.place)
        return f"unsupported({what!r}, {self.owner.shown(node.place)!r})"

    def call(self, node):
        text = self.owner.module_text(self.scope, node.path)
        method = self.method(node)
        return f"{text}{method}({', '.join(self.arguments(node.args))})"

    def arguments(self, args):
        """Arguments of a call: those of which the names are numbers stand without them."""
        return [self.text(v) if k.isdigit() else f"{CALL_NAMES.get(k, k)}={self.text(v)}" for k, v in args.items()]

    def method(self, node):
        """The method of the module that has the graph of this call."""
        scopes = self.capture.calls.get(node.path)
        n = scopes[node.method].method if scopes else 0
        return f".{self.owner.method_name(n)}" if n else ""

    def text(self, x) -> str:
        """A value, size or constant as an expression."""
        if isinstance(x, Value):
            if x in self.names:
                return self.names[x]
            if x.node is None:
                raise Unsupported("a value that is not known here")
            if x.node in self.inlined:
                return self.expression(x.node)
            raise Unsupported("a value that is not known here")
        if isinstance(x, Param):
            return self.parameter(x)
        if isinstance(x, Const):
            return self.owner.constant(x.tensor)
        if isinstance(x, Size):
            return self.size(x.expr)
        if isinstance(x, sympy.Expr):
            return self.size(x)
        if isinstance(x, list | tuple):
            inner = ", ".join(self.text(y) for y in x)
            return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' if len(x) == 1 else ''})"
        if isinstance(x, bool) or not isinstance(x, int | float):
            return constant(x)
        return literal("size", x) if isinstance(x, int) else literal("value", x)

    def parameter(self, x: Param) -> str:
        name, turned = self.owner.stored(x.path)
        return f"{self.member(x.path, name)}[...]{'.T' if turned else ''}"

    def member(self, path, name=None):
        module, _, last = path.rpartition(".")
        return f"{self.owner.module_text(self.scope, module)}.{name or identifier(last)}"

    def size(self, e) -> str:
        """A size by the sizes of the inputs."""
        if isinstance(e, int) or e.is_Integer:
            return literal("size", int(e))
        if e in self.given:
            return self.given[e]
        if e in self.scope.sizes:
            name = identifier(self.scope.sizes[e])
            if name not in self.header:
                source = self.source(e) or self.computed(e)
                if name in self.holders:
                    return source
                self.header[name] = source
            return name
        return self.source(e) or self.computed(e)

    def source(self, e):
        for v in self.scope.inputs:
            for i, s in enumerate(v.shape):
                if s == e and v in self.names:
                    return f"{self.names[v]}.shape[{i}]"
        return None

    def product(self, e):
        """A size that is the product of two sizes of the inputs, which sympy may have multiplied out."""
        known = {s for v in self.scope.inputs for s in v.shape if isinstance(s, sympy.Expr)} | set(self.scope.sizes)
        known |= {e for e in self.given if isinstance(e, sympy.Symbol)}
        known = sorted(known, key=str)
        for i, a in enumerate(known):
            for b in known[i:]:
                if sympy.expand(e - a * b) == 0:
                    return f"{self.size(a)} * {self.size(b)}"
        return None

    def beside(self, e):
        """A size that is an argument and a number, where the argument was computed from others by the caller."""
        for given, name in self.given.items():
            if not isinstance(given, int) and not given.is_Symbol and (off := sympy.expand(e - given)).is_Integer:
                return f"{name} {'+' if off > 0 else '-'} {abs(off)}"
        return None

    def computed(self, e):
        if e.is_Add and (text := self.beside(e)) is not None:
            return text
        if e.is_Add and (text := self.product(e)) is not None:
            return text
        if e.is_Symbol:
            for v, name in self.names.items():
                if e in v.shape:
                    return f"{name}.shape[{v.shape.index(e)}]"
            raise Unsupported("a size that is not one of this forward's inputs")
        if e.is_Add or e.is_Mul:
            op = "+" if e.is_Add else "*"
            terms = sorted(e.args, key=lambda t: (t.is_number, str(t)))
            least = OPERATORS[op]
            if e.is_Mul and any(t.is_Rational and not t.is_Integer for t in terms):
                n, d = e.as_numer_denom()
                return f"{bind(self.size(n), 10)} // {bind(self.size(d), 11)}"
            return f" {op} ".join(bind(self.size(t), least) for t in terms).replace("+ -", "- ")
        if e.is_Pow and e.exp.is_Integer and e.exp > 0:
            return f"{bind(self.size(e.base), 14)} ** {e.exp}"
        name = type(e).__name__
        if name in ("FloorDiv", "CleanDiv", "IntTrueDiv"):
            op = "/" if name == "IntTrueDiv" else "//"
            return f"{bind(self.size(e.args[0]), 10)} {op} {bind(self.size(e.args[1]), 11)}"
        if name in ("PythonMod", "Mod"):
            return f"{bind(self.size(e.args[0]), 10)} % {bind(self.size(e.args[1]), 11)}"
        if name in ("Max", "Min"):
            return f"{name.lower()}({', '.join(self.size(t) for t in e.args)})"
        if name == "ToFloat":
            return f"float({self.size(e.args[0])})"
        if e.is_Number:
            return literal("value", float(e))
        if name in ("FloatPow", "FloatTrueDiv"):
            op = "**" if name == "FloatPow" else "/"
            return f"({self.size(e.args[0])}) {op} ({self.size(e.args[1])})"
        if name in ("OpaqueUnaryFn_sqrt",):
            return f"({self.size(e.args[0])}) ** 0.5"
        if e.is_Pow:
            return f"({self.size(e.base)}) ** ({self.size(e.exp)})"
        raise Unsupported(f"the size `{e}`")


# Arguments of layers that are called by name.
CALL_NAMES = {"input": "x", "hx": "state"}


class Args:
    """What the row of an operation sees of a node."""

    def __init__(self, body: Body, node, name):
        self.body, self.node, self.name, self.raw = body, node, name, node.args
        self.out = node.outs[0]

    def __getitem__(self, name):
        if name == "dtype":
            return dtype(self.out.dtype)
        x = self.raw[name]
        if name.startswith("dim") and not isinstance(x, list):
            return self.body.text(x)  # a dimension is no number that the module keeps, though they may be equal
        if isinstance(x, list):
            inner = self.items(x)
            return (
                f"[{inner}]"
                if any(isinstance(y, Value | Param | Const) for y in x)
                else f"({inner}{',' if len(x) == 1 else ''})"
            )
        return self.text(x)

    def get(self, name, default=None):
        return self.text(self.raw.get(name, default))

    def text(self, x):
        known = self.attribute(x)
        return known or self.body.text(x)

    def attribute(self, x):
        """`self.n_head` for a number that the source spells so."""
        if isinstance(x, bool) or not isinstance(x, int | float) or self.body.scope.module is None:
            return None
        for name in re.findall(r"\bself\.(\w+)(?![\w.(\[])", self.node.place.text):
            have = vars(self.body.scope.module).get(name)
            if type(have) is type(x) and have == x and self.node.place.file == self.body.owner.file:
                return self.body.owner.attribute(name, x)
        return None

    def atom(self, name):
        return bind(self[name], ATOM)

    def bound(self, name, op, right):
        least = OPERATORS[op] + (right or op == "**" or OPERATORS[op] == 4)
        return bind(self[name], least)

    def inlined(self, name):
        """The node of an argument that is written where it is used."""
        x = self.raw[name]
        return x.node if isinstance(x, Value) and x.node in self.body.inlined and x.node.path is None else None

    def fill_from(self, node, template):
        """The template with the arguments of another node."""
        return Args(self.body, node, _ops.find(node)[0]).fill(template)

    def fill(self, template):
        def one(m):
            if m[2] == "^":
                return self.last_sizes(len(self.out.shape) - 2)
            return (self.atom if m[1] else self.__getitem__)(m[2])

        return re.sub(r"\{([.#]?)(\w+|\^)\}", one, template)

    def shape(self, name):
        return tuple(_ops.shape_of(self.raw[name]))

    def dtype(self, x):
        return x.dtype if isinstance(x, Value) else x.tensor.dtype

    def same(self, a, b):
        """Whether two dtypes of PyTorch's are one of JAX's."""
        return dtype(a) == dtype(b)

    def size(self, x):
        return self.body.size(x) if isinstance(x, sympy.Expr) else self.text(x)

    def sizes(self, name, first, last):
        """The sizes of dimensions, as texts."""
        return [self.size(s) for s in self.shape(name)[first:last]]

    def last_sizes(self, rank):
        sizes = [self.size(s) for s in self.out.shape[len(self.out.shape) - rank :]]
        return f"({', '.join(sizes)}{',' if rank == 1 else ''})"

    def items(self, xs):
        return ", ".join(self.text(x) for x in xs)

    def shape_text(self, sizes):
        """A shape; the one size that the sizes of the inputs do not say is left to JAX."""
        texts = []
        for s in sizes:
            try:
                texts.append(self.text(s))
            except Unsupported:
                if "-1" in texts or any(isinstance(t, int) and t == -1 for t in sizes):
                    raise
                texts.append("-1")
        return ", ".join(texts)

    def axes(self):
        """The axes of a reduction, and whether they stay."""
        d = self.raw.get("dim")
        parts = []
        if isinstance(d, int):
            parts.append(str(d))
        elif d:
            parts.append(str(d[0]) if len(d) == 1 else f"({', '.join(map(str, d))})")
        if self.raw.get("keepdim"):
            parts.append("keepdims=True")
        return ", ".join(
            [f"axis={parts[0]}", *parts[1:]]
            if parts and parts[0].lstrip("-").isdigit()
            else [f"axis={parts[0]}", *parts[1:]]
            if parts and parts[0].startswith("(")
            else parts
        )

    def cast(self, text, *names):
        """The text, in the dtype that PyTorch gives it where JAX's would be another."""
        kinds = [self.dtype(x) for n in names if isinstance(x := self.raw[n], Value | Param | Const)]
        if not kinds or self.out.dtype in (torch.bool,):
            return text
        jax = kinds[0]
        for k in kinds[1:]:
            jax = torch.promote_types(jax, k)
        if (
            len(kinds) > 1
            and not self.same(jax, self.out.dtype)
            and self.out.dtype.is_floating_point
            and jax.is_floating_point
        ):
            return f"({text}).astype({dtype(self.out.dtype)})"
        return text

    def variable(self, name):
        """A buffer itself, so that it can be updated."""
        x = self.raw[name]
        if not isinstance(x, Param):
            raise Unsupported("running statistics that are no buffer of the module")
        return self.body.member(x.path)

    def flag(self, name):
        return self.body.owner.flag(name)

    def dropout(self, p):
        return self.body.owner.dropout(p)

    def transposed(self, name):
        x = self.raw[name]
        if isinstance(x, Param):
            stored, turned = self.body.owner.stored(x.path)
            text = f"{self.body.member(x.path, stored)}[...]"
            return text if turned else f"{text}.T"
        return f"{self.atom(name)}.T"

    def swapped(self, name):
        """An argument with dimensions 1 and 2 exchanged, as flax and JAX have the heads of attention."""
        if name in getattr(self.node, "swapped", ()):
            return self[name]
        return f"{self.atom(name)}.swapaxes(1, 2)"


def same(a, b):
    """Whether two arguments are one value, or one size."""
    return a is b or (isinstance(a, Size) and a == b)


def nest(structure, targets):
    """Names in the structure of a result: `(y, (h, c))`."""
    if isinstance(structure, int):
        return targets[structure]
    inner = [nest(s, targets) for s in structure]
    return "_" if set(inner) == {"_"} else f"({', '.join(inner)})"


def singular(name):
    known = {"h": "block", "layers": "layer", "layer": "layer_", "blocks": "block"}
    if name in known:
        return known[name]
    return name[:-1] if name.endswith("s") and len(name) > 2 else f"{name}_layer" if not name.isdigit() else "layer"


def merge(header, ranks):
    """`B, _, H, W = x.shape` for several sizes of one input, and a line for each other size."""
    of: dict[str, dict[int, str]] = {}
    out = []
    for name, text in header.items():
        m = re.fullmatch(r"(\w+)\.shape\[(\d+)\]", text)
        if m and m[1] in ranks:
            of.setdefault(m[1], {})[int(m[2])] = name
        else:
            out.append(f"{name} = {text}")
    lines = []
    for x, names in of.items():
        last, rank = max(names), ranks[x]
        if len(names) == 1:
            lines.append(f"{names[last]} = {x}.shape[{last}]")
            continue
        count = last + 1 if last + 1 < rank - 1 else rank
        targets = [names.get(i, "_") for i in range(count)]
        lines.append(f"{', '.join(targets)} = {x}.shape" + ("" if count == rank else f"[:{count}]"))
    return lines + out
