"""Runs a module on fake tensors and notes the ATen operations of each module's forward, with names and lines.

Sizes of the inputs are symbols, so that the graph says which sizes are the batch's; a size on which the module's Python
decides becomes a number. Operations are seen before PyTorch decomposes them: `linear`, `layer_norm`,
`scaled_dot_product_attention`.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
from pathlib import Path

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from oxitorch.to_jax import _leaves
from oxitorch.to_jax._graph import Const, Node, Param, Place, Scope, Size, Unsupported, Value, leaves, replace

TORCH = str(Path(torch.__file__).parent) + os.sep
# Views whose result shares memory with the argument, and that a write goes through.
THROUGH = {"select", "slice", "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "alias", "detach", "t"}
# They leave values as they are.
SAME = {"aten::detach", "aten::detach_", "aten::alias", "aten::lift_fresh", "aten::requires_grad_"}


class Capture:
    """The scopes of one run: `root` is that of the module, `loss` that of the loss around it, if there is one."""

    def __init__(self, model):
        self.model = model
        self.paths = {}
        for path, module in model.named_modules(remove_duplicate=True):
            self.paths[id(module)] = path
        self.params = {}
        for path, t in [*model.named_parameters(), *model.named_buffers()]:
            self.params.setdefault(id(t), Param(path, t))
        # Names of the same parameter, which share what the first has.
        every = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self.tied = {path: self.params[id(t)].path for path, t in every if self.params[id(t)].path != path}
        self.calls: dict[str, list[Scope]] = {}  # of each module that has a forward of its own
        self.parts: dict[str, Scope] = {}  # members of Sequential, which are callables without a class
        self.scope: Scope | None = None
        self.keep = []  # tensors, so that their ids stay theirs
        self.views = {}  # id of a tensor -> (base, op, args)
        self.writes = {}  # id of a storage -> [(tensor, scope)]
        self.seen = {}  # (scope, tensor) -> how many writes its value has
        self.fresh_memory = {}  # storage -> the tensor that an operation made it for
        self.shapes = ShapeEnv()
        self.recording = True
        self.random = []  # places where random numbers are drawn

    # --- values

    def expr(self, x):
        """A size as a number, if it is known, or an expression."""
        if isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool):
            e = self.shapes.simplify(x.node.expr)
            if e.is_number:
                return float(e) if isinstance(x, torch.SymFloat) else int(e)
            return Size(e)
        return x

    def describe(self, t, node=None, index=0):
        shape = tuple(s.expr if isinstance(s := self.expr(n), Size) else s for n in t.shape)
        return Value(shape, t.dtype, None, node, index)

    def storage(self, t):
        """What stands for a tensor's memory: its storage, or itself if it has none, as a sparse tensor."""
        try:
            return t.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):
            return "tensor", id(t)

    def bind(self, scope, t, value):
        self.keep.append(t)
        scope.values[id(t)] = value
        self.seen[scope, id(t)] = len(self.writes.get(self.storage(t), ()))

    def value(self, t, scope):
        """What a tensor is within a scope."""
        if id(t) not in scope.values:
            t = self.same_object(t)
        if id(t) in scope.values:
            return self.fresh(t, scope)
        if id(t) in self.params:
            param = self.params[id(t)]
            if scope.path is None or not inside(param.path, scope.path):
                return self.lift(t, scope) if scope.parent is not None else param
            return param
        outer = scope.parent
        while outer is not None and id(t) not in outer.values:
            outer = outer.parent
        if outer is not None:
            return self.lift(t, scope)
        if isinstance(t, FakeTensor):
            if t.constant is not None:
                return Const(t.constant)
            raise Unsupported("a tensor that was made in another module's forward and is no result of it")
        return Const(t)

    def same_object(self, t):
        """The tensor that was seen. PyTorch hands out factories' results as another object, if somebody holds them."""
        made = self.fresh_memory.get(self.storage(t))
        if made is None or id(t) in self.views or made.dtype != t.dtype or len(made.shape) != len(t.shape):
            return t
        return made if all(str(a) == str(b) for a, b in zip(made.shape, t.shape, strict=True)) else t

    def known(self, t, scope):
        """What a tensor is within a scope; for what cannot be said, a node that says so."""
        try:
            return self.value(t, scope)
        except Unsupported as e:
            node = Node({}, [], self.place(scope), problem=str(e))
            node.outs = [self.describe(t, node)]
            scope.nodes.append(node)
            self.bind(scope, t, node.outs[0])
            return node.outs[0]

    def lift(self, t, scope):
        """Makes a caller's tensor an input."""
        v = self.describe(t)
        self.bind(scope, t, v)
        scope.inputs.append(v)
        scope.lifted.append(t)
        if isinstance(v, Value) and id(t) in self.params:
            v.name = self.params[id(t)].path.replace(".", "_")
        return v

    def fresh(self, t, scope):
        """The value after writes to the tensor's memory through other tensors."""
        value = scope.values[id(t)]
        if not isinstance(value, Value):
            return value
        writes = self.writes.get(self.storage(t), [])
        since = self.seen.get((scope, id(t)), 0)
        if since == len(writes):
            return value
        if id(t) in self.views:
            base, op, args = self.views[id(t)]
            new = self.fresh(base, scope) if id(base) in scope.values else self.value(base, scope)
            name = op._schema.arguments[0].name
            node = Node({**args, name: new}, [], self.place(scope), op=op)
            node.outs = [self.describe(t, node)]
            scope.nodes.append(node)
            self.bind(scope, t, node.outs[0])
            return node.outs[0]
        for written, where in writes[since:]:
            if where is not scope:
                raise Unsupported("an operation in place on a tensor of another module's forward")
            value = self.put(t, written, scope, value)
            self.bind(scope, t, value)
        return value

    def put(self, base, written, scope, value):
        """The base's value with what was written through a view of it."""
        if written is base:
            return scope.values[id(written)]
        chain = []
        t = written
        while t is not base:
            if id(t) not in self.views:
                raise Unsupported("an operation in place on memory that is shared in an unknown way")
            up, op, args = self.views[id(t)]
            if op._schema.name.split("::")[1] not in THROUGH:
                raise Unsupported(f"an operation in place through `{op._schema.name.split('::')[1]}`")
            chain.append((t, up, op, args))
            t = up
        new = scope.values[id(written)]
        for _, up, op, args in chain:
            old = value if up is base else scope.values[id(up)]
            node = Node({**args, "base": old, "new": new}, [], self.place(scope), op=f"put_{op._schema.name[6:]}")
            node.outs = [Value(old.shape, old.dtype, old.name, node)]
            scope.nodes.append(node)
            new = node.outs[0]
        return new

    # --- places and names

    def place(self, scope):
        """The innermost line of the source that is not PyTorch's, and the text of its call."""
        frame = sys._getframe(1)
        found = None
        while frame is not None:
            file = frame.f_code.co_filename
            if found is None and not file.startswith(TORCH) and __name__ not in frame.f_globals.get("__name__", ""):
                found = frame
            if frame.f_code is scope.code:
                break
            frame = frame.f_back
        frame = found if frame is None else frame
        if found is None:
            return Place()
        return Place(found.f_code.co_filename, found.f_lineno, call_text(found))

    def names(self, scope):
        """Gives values the names of local variables that hold them."""
        frame = sys._getframe(1)
        active = []
        while frame is not None:
            code = frame.f_code
            if code is scope.code:
                active.append(frame)
                scope.frames[0] = frame
                break
            if not code.co_filename.startswith(TORCH) and frame.f_globals.get("__name__") != __name__:
                active.append(frame)
            frame = frame.f_back
        else:
            active = active if scope.code is None else []
        for f in reversed(active):
            self.read(f, scope)

    def read(self, frame, scope):
        for name, x in frame.f_locals.items():
            if isinstance(x, torch.Tensor):
                v = scope.values.get(id(x)) or scope.values.get(id(self.same_object(x)))
                if isinstance(v, Value) and v.name is None:
                    v.name = name
            elif isinstance(x, torch.SymInt):
                e = self.expr(x)
                if isinstance(e, Size):
                    scope.sizes.setdefault(e.expr, name)
            elif isinstance(x, list | tuple) and len(x) < 8:
                for i, y in enumerate(x):
                    v = scope.values.get(id(y)) if isinstance(y, torch.Tensor) else None
                    if isinstance(v, Value) and v.name is None and v.node is not None:
                        v.name = f"{name}_{i}"

    # --- operations

    def arguments(self, func, args, kwargs, scope):
        """Arguments by the schema's names, with its defaults."""
        out = {}
        for i, a in enumerate(func._schema.arguments):
            if i < len(args) and not a.kwarg_only:
                x = args[i]
            elif a.name in kwargs:
                x = kwargs[a.name]
            elif a.has_default_value():
                x = a.default_value
            else:
                continue
            out[a.name] = replace(x, lambda y: self.argument(y, scope))
        return out

    def argument(self, x, scope):
        return self.value(x, scope) if isinstance(x, torch.Tensor) else self.expr(x)

    def record(self, func, args, kwargs, result):
        scope = self.scope
        self.names(scope)
        name = func._schema.name
        if name in SAME and isinstance(args[0], torch.Tensor):
            if name == "aten::lift_fresh":
                self.bind(scope, result, Const(args[0].clone()))
            elif name == "aten::detach":
                pass
            else:
                self.alias(scope, args[0], result)
                return
            if name == "aten::lift_fresh":
                return
        writes = [
            a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write and not a.kwarg_only
        ]
        node = Node({}, [], self.place(scope), op=func)
        try:
            node.args = self.arguments(func, args, kwargs, scope)
        except Unsupported as e:
            node.problem = str(e)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random.append((name, node.place))
        scope.nodes.append(node)
        node.many = isinstance(result, list)
        outs = list(leaves(result))
        for i, t in enumerate(outs):
            node.outs.append(
                self.describe(t, node, i) if isinstance(t, torch.Tensor) else Value((), None, None, node, i)
            )
        if writes and outs and isinstance(outs[0], torch.Tensor):
            self.write(args[0], node, scope)
            return
        view = any(r.alias_info is not None for r in func._schema.returns)
        for t, v in zip(outs, node.outs, strict=True):
            if isinstance(t, torch.Tensor):
                self.bind(scope, t, v)
                if not view and isinstance(t, FakeTensor):
                    self.fresh_memory.setdefault(self.storage(t), t)
                shares = view or name in ("aten::reshape", "aten::contiguous", "aten::flatten")
                if shares and not node.many and args and isinstance(args[0], torch.Tensor) and self.shares(t, args[0]):
                    self.views[id(t)] = (args[0], func, node.args)

    def shares(self, a, b):
        return self.storage(a) == self.storage(b)

    def alias(self, scope, old, new):
        if old is not new:
            self.bind(scope, new, self.value(old, scope))

    def write(self, t, node, scope):
        """Notes that an operation wrote to a tensor: it has a new value."""
        t = t if id(t) in scope.values else self.same_object(t)
        if isinstance(t, torch.nn.Parameter) and id(t) not in scope.values:
            node.problem = f"an operation in place on `{self.params[id(t)].path}`"
        self.writes.setdefault(self.storage(t), []).append((t, scope))
        old = scope.values.get(id(t))
        node.outs[0].name = old.name if isinstance(old, Value) else None
        self.bind(scope, t, node.outs[0])

    # --- modules

    def call(self, module, original, args, kwargs):
        """The call of a module while the model runs."""
        scope = self.scope
        path = self.paths.get(id(module))
        if not self.recording or path is None or scope is None:
            return original(module, *args, **kwargs)
        self.names(scope)
        kind = _leaves.kind(module, path, self.tied)
        if kind == "inline" and self.sequential(scope) and path not in self.parts:
            return self.part(module, path, original, args, kwargs)
        if kind == "inline":
            return original(module, *args, **kwargs)
        if kind == "leaf":
            return self.leaf(module, path, original, args, kwargs)
        if scope.path is not None and not inside(path, scope.path):
            return self.foreign(module, path, original, args, kwargs)
        inner = Scope(path, module, scope, code=forward_code(module))
        bound = arguments_of(module, args, kwargs)
        for name, x in bound.items():
            tensors = [t for t in pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]
            for i, t in enumerate(tensors):
                if id(t) in inner.values or (id(t) in self.params and inside(self.params[id(t)].path, path)):
                    continue
                v = self.describe(t)
                if x is t:
                    v.name = name
                else:
                    v.other_name = f"{name}_{i}"
                self.bind(inner, t, v)
                inner.inputs.append(v)
                inner.lifted.append(t)
            sizes = [e.expr for n in pytree.tree_leaves(x) if isinstance(e := self.expr(n), Size)]
            inner.given_sizes.update(zip(numbered(name, len(sizes)), sizes, strict=True))
        place = self.place(scope)
        # Before it runs, as it may write to them.
        given = {id(t): self.known(t, scope) for t in inner.lifted}
        self.scope = inner
        try:
            result = original(module, *args, **kwargs)
            if 0 in inner.frames:
                self.read(inner.frames[0], inner)
            self.finish(inner, result)
        finally:
            self.scope = scope
            inner.frames.clear()
        calls = self.calls.setdefault(path, [])
        calls.append(inner)
        node = Node({}, [], place, path=path, method=len(calls) - 1)
        node.args = {str(i): given.get(id(t)) or self.known(t, scope) for i, t in enumerate(inner.lifted)}
        node.args |= {name: Size(e) for name, e in inner.given_sizes.items()}
        self.results(node, result, scope)
        return result

    def foreign(self, module, path, original, args, kwargs):
        """The call of a module that the caller does not own."""
        scope = self.scope
        self.recording = False
        try:
            result = original(module, *args, **kwargs)
        finally:
            self.recording = True
        problem = f"the call of `{path}`, which is a part of another module than `{scope.path}`,"
        self.results(Node({}, [], self.place(scope), problem=problem), result, scope)
        return result

    def sequential(self, scope):
        return (
            isinstance(scope.module, torch.nn.Sequential) and type(scope.module).forward is torch.nn.Sequential.forward
        )

    def part(self, module, path, original, args, kwargs):
        """A member of Sequential without parameters: what it does becomes a function."""
        scope = self.scope
        inner = Scope(path, module, scope, code=forward_code(module))
        for t in args:
            v = self.describe(t)
            v.name = "x"
            self.bind(inner, t, v)
            inner.inputs.append(v)
            inner.lifted.append(t)
        given = {id(t): self.known(t, scope) for t in inner.lifted}
        self.scope = inner
        try:
            result = original(module, *args, **kwargs)
            self.finish(inner, result)
        finally:
            self.scope = scope
            inner.frames.clear()
        self.parts[path] = inner
        node = Node({}, [], self.place(scope), path=path)
        node.args = {str(i): given.get(id(t)) or self.known(t, scope) for i, t in enumerate(inner.lifted)}
        self.results(node, result, scope)
        return result

    def leaf(self, module, path, original, args, kwargs):
        """The call of a layer that is translated as a whole."""
        scope = self.scope
        node = Node({}, [], self.place(scope), path=path)
        bound = {**{str(i): a for i, a in enumerate(args)}, **kwargs}

        def argument(x):
            return self.known(x, scope) if isinstance(x, torch.Tensor) else self.expr(x)

        node.args = {k: replace(x, argument) for k, x in bound.items() if x is not None}
        self.recording = False
        try:
            result = original(module, *args, **kwargs)
        finally:
            self.recording = True
        if isinstance(result, tuple):
            numbers = iter(range(len(pytree.tree_leaves(result))))
            node.nested = replace(result, lambda _: next(numbers))
        self.results(node, result, scope)
        return result

    def finish(self, scope, result):
        """Notes what a forward returned."""
        if hasattr(result, "to_tuple") and hasattr(result, "keys"):
            result = {k: result[k] for k in result.keys()}  # noqa: SIM118 - an object with keys
        flat = pytree.tree_leaves(result)
        if isinstance(result, dict) and all(isinstance(v, torch.Tensor) for v in result.values()):
            scope.keys = list(result)
        elif isinstance(result, dict):
            result = {k: v for k, v in result.items() if pytree.tree_leaves(v)}
            if all(isinstance(v, torch.Tensor) for v in result.values()):
                scope.keys = list(result)
        scope.outputs = [self.known(t, scope) for t in flat if isinstance(t, torch.Tensor)]
        if scope.keys is not None and len(scope.keys) != len(scope.outputs):
            scope.keys = None

    def results(self, node, result, scope):
        scope.nodes.append(node)
        if hasattr(result, "to_tuple") and hasattr(result, "keys"):
            result = {k: result[k] for k in result.keys()}  # noqa: SIM118 - an object with keys
        flat = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        node.many = len(flat) > 1
        for i, t in enumerate(flat):
            v = self.describe(t, node, i)
            node.outs.append(v)
            self.views.pop(id(t), None)
            self.bind(scope, t, v)

    # --- the run

    def fake(self, mode, x, symbols):
        """A fake tensor whose sizes are symbols, or numbers where `symbols` is false; sizes 0 and 1 are numbers."""
        if not isinstance(x, torch.Tensor):
            return x
        way = DimDynamic.DYNAMIC if symbols else DimDynamic.STATIC
        dynamic = [way if n > 1 else DimDynamic.STATIC for n in x.shape]
        return mode.from_tensor(x.detach(), symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))

    def run(self, args, kwargs, loss, targets, symbols):
        mode = FakeTensorMode(shape_env=self.shapes, allow_non_fake_inputs=True)
        args, kwargs, targets = (
            pytree.tree_map(lambda x: self.fake(mode, x, symbols), y) for y in (args, kwargs, targets)
        )
        top = Scope(None, None)
        self.scope = top
        for name, x in [*arguments_of(self.model, args, kwargs).items(), *targets.items()]:
            for t in pytree.tree_leaves(x):
                if isinstance(t, torch.Tensor):
                    v = self.describe(t)
                    v.name = name
                    self.bind(top, t, v)
                    top.inputs.append(v)
        original = torch.nn.Module.__call__
        capture = self

        @functools.wraps(original)
        def call(module, *args, **kwargs):
            return capture.call(module, original, args, kwargs)

        torch.nn.Module.__call__ = call
        try:
            with mode, enable_python_dispatcher(), Recorder(self):
                out = self.model(*args, **kwargs)
                if loss is not None:
                    top.code = inspect.unwrap(loss).__code__ if hasattr(loss, "__code__") else None
                    self.finish(top, loss(out, **targets))
        finally:
            torch.nn.Module.__call__ = original
            self.scope = None
        self.top = top
        self.root = self.calls[""][0] if "" in self.calls else None
        for scopes in self.calls.values():
            for s in scopes:
                self.settle(s)
        for s in [*self.parts.values(), top]:
            self.settle(s)
        return self

    def settle(self, scope):
        """Expressions of sizes that a later decision of the program made numbers."""

        def known(x):
            if isinstance(x, Size):
                e = self.shapes.simplify(x.expr)
                return int(e) if e.is_number else Size(e)
            return x

        def shape(v):
            v.shape = tuple(
                s if isinstance(s, int) else (int(e) if (e := self.shapes.simplify(s)).is_number else e)
                for s in v.shape
            )

        for v in scope.inputs:
            shape(v)
        scope.sizes = {e: n for x, n in scope.sizes.items() if not (e := self.shapes.simplify(x)).is_number}
        scope.given_sizes = {n: self.shapes.simplify(x) for n, x in scope.given_sizes.items()}
        for node in scope.nodes:
            node.args = {k: replace(a, known) for k, a in node.args.items()}
            for v in node.outs:
                shape(v)


class Recorder(ProxyTorchDispatchMode):
    """Shows a capture every operation before PyTorch decomposes it."""

    def __init__(self, capture):
        super().__init__(PythonKeyTracer(), "symbolic", pre_dispatch=True)
        self.capture = capture

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.capture.recording and self.capture.scope is not None and has_tensor(result):
            self.capture.record(func, args, kwargs, result)
        return result

    def __sym_dispatch__(self, func, types, args, kwargs):
        return func(*args, **kwargs)


def has_tensor(result):
    return any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(result))


def inside(path, scope):
    return not scope or path == scope or path.startswith(scope + ".")


def numbered(name, count):
    """A name for each of several parts of an argument."""
    return [name] if count == 1 else [f"{name}_{i}" for i in range(count)]


def forward_code(module):
    return inspect.unwrap(type(module).forward).__code__


def arguments_of(module, args, kwargs):
    """Arguments of a forward by name."""
    signature = inspect.signature(type(module).forward)
    bound = signature.bind(module, *args, **kwargs)
    out = {}
    for i, (name, x) in enumerate(bound.arguments.items()):
        if i == 0:
            continue
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            out.update(x)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            out.update({f"{name}_{i}": y for i, y in enumerate(x)})
        else:
            out[name] = x
    return out


@functools.cache
def positions(code):
    return list(code.co_positions()) if hasattr(code, "co_positions") else []


def call_text(frame):
    """The source of the call that a frame is in."""
    where = positions(frame.f_code)
    at = frame.f_lasti // 2
    if at >= len(where) or None in where[at]:
        return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    first, last, _, _ = where[at]
    return "".join(linecache.getline(frame.f_code.co_filename, n) for n in range(first, last + 1)).strip()


def capture(model, args, kwargs, loss=None, targets=None):
    """Runs `model(*args, **kwargs)`, and `loss(output, **targets)`; with sizes as symbols if that is possible."""
    try:
        return Capture(model).run(args, kwargs, loss, targets or {}, True), None
    except Unsupported:
        raise
    except Exception as e:  # PyTorch's symbols do not get through everything that a module may do
        reason = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    return Capture(model).run(args, kwargs, loss, targets or {}, False), reason
