"""`torch.compile(model, backend="tpu")`.

Dynamo captures graphs and guards them, AOTAutograd makes forward and backward graphs of ATen operations of them, and
these are played on the device: the engine records the operations like any others, so a compiled region shares windows,
programs and caches with the code around it. From the second call on no Python runs for an operation of the device; see
`_Graph`.

PyTorch loads this module, through the entry point group `torch_dynamo_backends`, when the backend is first asked for;
Dynamo is slow to import.
"""

import functools
import operator
import os
from collections.abc import Callable

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from oxitorch import _activate, _fences, _flex, _loops, _solved, _steps
from oxitorch._compile_sizes import SizedGraph
from oxitorch._recipes import Recipes, watched
from oxitorch.jit._pieces import recounted


def tpu(gm: GraphModule, example_inputs: list, *, mode: str | None = None, options: dict | None = None, **_):
    """The backend. XLA has one level of effort, so every `mode` is the same.

    Raises:
        RuntimeError: `options` are given; XLA's own are set by `torch.tpu.compiler.custom_compiler_options`.
    """
    if options:
        raise RuntimeError(
            f"backend 'tpu' has no options, got {sorted(options)}\n"
            "hint: torch.tpu.compiler.custom_compiler_options sets XLA's"
        )
    return _backend()(gm, example_inputs)


@functools.cache
def _backend():
    # Writes to arguments stay in the graphs, as one copy_ each at the end. Each intermediate value that the backward
    # needs is saved: where forward and backward become one program, XLA decides what to keep.
    return aot_autograd(
        fw_compiler=functools.partial(_compiler, of_backward=False),
        bw_compiler=functools.partial(_compiler, of_backward=True),
        keep_inference_input_mutations=True,
    )


_OPTIMIZERS = os.path.join(os.path.dirname(torch.__file__), "optim", "")


def _compiler(gm: GraphModule, _example_inputs, of_backward: bool):
    if of_backward:
        _fences.put(gm)
    _solved.put(gm)
    graph = _Graph(gm, of_backward)
    # As after an optimizer's eager step, whose hook is traced away.
    ends_step = not of_backward and any(_OPTIMIZERS in (n.meta.get("stack_trace") or "") for n in gm.graph.nodes)

    def call(args: list) -> list:
        results = graph.call(args)
        if ends_step:
            _steps.ended()
        return results

    # AOTAutograd hands the arguments over in a list, so that they can end when the graph is done with them.
    call._boxed_call = True
    return call


class _Graph:
    """A graph: played once for each kind of arguments while the engine notes what it records, from then on recorded by
    that recipe in one call.

    What the graph computes on the host PyTorch does in each call, first.
    A graph with operations that may do anything (custom ones) is played every time.
    """

    def __init__(self, gm: GraphModule, of_backward: bool):
        self._replay = _activate.core().replay
        self._known: dict[tuple, Recipes] = {}
        self._parts = _split(gm)
        self._player = _Player(self._parts.device if self._parts else gm, of_backward)
        # If sizes vary.
        self._sized = SizedGraph.of(self._parts.device, self._player.run) if self._parts else None
        # Whether all that the device takes are tensors, whatever the call.
        arguments = [n for n in self._player.module.graph.nodes if n.op == "placeholder"]
        self._takes_tensors = all(isinstance(n.meta.get("val"), torch.Tensor) for n in arguments)
        # What its first program is told to be for.
        self._remark = None if of_backward else recounted(gm)

    def call(self, args: list) -> list:
        given = list(args)
        args.clear()
        parts = self._parts
        if parts is None:
            return watched(self._player.run, [a for a in given if isinstance(a, torch.Tensor)], given, None)
        on_host = () if parts.host is None else parts.host(*[given[i] for i in parts.host_inputs])
        if parts.takes_all:
            inputs = given
        else:
            inputs = [given[i] for i in parts.inputs] + [on_host[i] for i in parts.from_host] + parts.constants
        results = self._run(inputs)
        if parts.host_writes is not None:
            parts.host_writes(*[given[i] for i in parts.host_inputs], *on_host)
        if parts.gives_all:
            return results
        sources = {"result": results, "argument": given, "host": on_host, "constant": parts.constants}
        return [value if source is None else sources[source][value] for source, value in parts.outputs]

    def _run(self, inputs: list) -> list:
        if self._remark is not None:
            _activate.core().remark(f"for this number of pieces alone: {self._remark}")
            self._remark = None
        if self._sized is not None:
            results = self._sized.call(inputs)
            if results is not None:
                return results
        tensors = inputs if self._takes_tensors else [x for x in inputs if isinstance(x, torch.Tensor)]
        # The arguments that are no tensors, with their types: 1, 1.0 and True are different.
        kind = ()
        if len(tensors) != len(inputs):
            kind = tuple(None if isinstance(x, torch.Tensor) else (type(x), x) for x in inputs)
        known = self._known.get(kind)
        if known is not None and known.results is not None:
            done, made = self._replay(known.number, tensors)
            if done:
                if known.written:
                    torch.autograd.graph.increment_version([tensors[i] for i in known.written])
                if known.all_tensors:
                    return made
                made = iter(made)
                return [next(made) if r is torch.Tensor else r for r in known.results]
        if known is None and len(self._known) < _MAX_KINDS:
            known = self._known[kind] = Recipes()
        return watched(self._player.run, tensors, inputs, known)


# Kinds of arguments besides tensors for which recipes are kept.
_MAX_KINDS = 64


class _Player(Interpreter):
    """Runs a graph operation by operation.

    The graph was made from shapes and strides that PyTorch's meta functions foretold. Where an operation of ours gives
    other strides, its result is copied into the foretold ones: the graph may go on to make views that depend on them.
    """

    def __init__(self, gm: GraphModule, of_backward: bool):
        super().__init__(gm)
        core = _activate.core()
        self._play_site = core.play_site
        self._sites = {
            n: core.site_of_trace(n.meta.get("stack_trace") or "", of_backward)
            for n in gm.graph.nodes
            if n.op == "call_function"
        }
        # The bodies of loops, and branches.
        self._bodies = {
            n.target: _Player(body, of_backward)
            for n in gm.graph.nodes
            if n.op == "get_attr" and isinstance(body := _attribute(gm, n), GraphModule)
        }

    def run(self, *args):
        outer = self._play_site(0)
        try:
            return super().run(*args)
        finally:
            self._play_site(outer)
            self.env, self.args_iter = {}, iter(())  # they have the results, and the arguments

    def get_attr(self, target, args, kwargs):
        body = self._bodies.get(target)
        return super().get_attr(target, args, kwargs) if body is None else body.run

    def output(self, target, args, kwargs):
        # The lists of graphs are of a type of their own, and who runs a body may look at the type.
        results = super().output(target, args, kwargs)
        return list(results) if isinstance(results, list) else results

    def run_node(self, n):
        if n.op != "call_function":
            return super().run_node(n)
        self._play_site(self._sites[n])
        result = super().run_node(n)
        foretold = n.meta.get("val")
        if isinstance(foretold, (list, tuple)) and isinstance(result, (list, tuple)):
            pairs = zip(result, foretold, strict=False)
            return type(result)(_restrided(r, f) for r, f in pairs)
        return _restrided(result, foretold)

    def call_function(self, target, args, kwargs):
        # With sizes that are only known now, the strides cannot be compared; this copies where a view is not possible.
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        elif target is torch.ops.higher_order.run_and_save_rng_state:
            return torch.tpu.get_rng_state(_device_of(args, kwargs)), args[0](*args[1:], **kwargs)
        elif target is torch.ops.higher_order.run_with_rng_state:
            return _with_rng_state(*args, **kwargs)
        return super().call_function(target, args, kwargs)


# What a backward computes again takes the random numbers of the forward. PyTorch's own implementations of the two
# operations for that know PyTorch's own devices only.


def _with_rng_state(state, op, *args, **kwargs):
    device = _device_of(args, kwargs)
    now = torch.tpu.get_rng_state(device)
    torch.tpu.set_rng_state(state, device)
    try:
        return op(*args, **kwargs)
    finally:
        torch.tpu.set_rng_state(now, device)


def _device_of(args, kwargs):
    return next((x.device for x in args if isinstance(x, torch.Tensor)), kwargs.get("device", "tpu"))


def _restrided(result, foretold):
    if not isinstance(result, torch.Tensor) or not isinstance(foretold, torch.Tensor) or result.layout != torch.strided:
        return result
    shape, strides = tuple(foretold.shape), tuple(foretold.stride())
    if not all(type(n) is int for n in shape + strides) or result.numel() == 0:
        return result
    if tuple(result.shape) != shape:  # the function of an associative scan gets many slices at once
        return result
    if all(n == 1 or a == b for n, a, b in zip(shape, result.stride(), strides, strict=True)):
        return result
    return torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device).copy_(result)


class _Parts:
    """A graph's part for the host and its part for the device."""

    def __init__(self):
        # Takes the arguments `host_inputs`, gives what the device and the outputs need.
        self.host: Callable | None = None
        self.host_inputs: list[int] = []
        # Writes to arguments on the host; takes `host_inputs` and all that `host` gave, after everything else.
        self.host_writes: Callable | None = None
        # Takes the arguments `inputs`, these results of `host`, the graph's constants.
        self.device: GraphModule
        self.inputs: list[int] = []
        self.from_host: list[int] = []
        self.constants: list = []
        # Where each output of the graph is found, and at which place there; (None, value) for one that is no node.
        self.outputs: list[tuple] = []
        # Whether `device` takes just the arguments, and gives just the outputs.
        self.takes_all = False
        self.gives_all = False


def _split(gm: GraphModule) -> _Parts | None:
    """The parts of a graph; None for one that has to be played as it is."""
    nodes = list(gm.graph.nodes)
    arguments = [n for n in nodes if n.op == "placeholder"]
    attributes = [n for n in nodes if n.op == "get_attr"]
    constants = [n for n in attributes if isinstance(_attribute(gm, n), torch.Tensor)]
    bodies = [n for n in attributes if isinstance(_attribute(gm, n), GraphModule)]
    calls = [n for n in nodes if n.op == "call_function"]
    output = nodes[-1]
    if len(arguments) + len(constants) + len(bodies) + len(calls) + 1 != len(nodes):
        return None
    if not all(_is_pure(gm, n) for n in calls):
        return None
    host, writes = _host_part([*arguments, *constants, *bodies], calls)
    if writes is None:
        return None

    parts = _Parts()
    on_device = [n for n in calls if n not in host and n not in writes]
    moved = _moved(on_device, [n for n in calls if n in host])
    on_device = [n for n in calls if n in moved or (n not in host and n not in writes)]
    used_by_device = {i for n in on_device for i in n.all_input_nodes}
    used = used_by_device.union(output.all_input_nodes)
    writes = _in_place(gm, host, writes, {*output.all_input_nodes, *(used_by_device - moved)})
    used_on_host = {i for n in [*writes, output] for i in n.all_input_nodes} | (used_by_device - moved)
    on_host: list[Node] = []
    for n in reversed(calls):
        if n in host and (n in used_on_host or not n.users):
            on_host.insert(0, n)
            used_on_host.update(n.all_input_nodes)
    # What the host part takes and gives.
    taken = [n for n in arguments if n in host]
    given = [n for n in on_host if n in used or any(n in w.all_input_nodes for w in writes)]
    if on_host or writes:
        if on_host:
            parts.host = _module(gm, taken, on_host, given).forward
        parts.host_inputs = [arguments.index(n) for n in taken]
        parts.from_host = [i for i, n in enumerate(given) if n in used_by_device and n not in moved]
    if writes:
        parts.host_writes = _module(gm, [*taken, *given], writes, []).forward
    inputs = [n for n in arguments if n in used_by_device or n not in host]
    parts.inputs = [arguments.index(n) for n in inputs]
    inputs += [given[i] for i in parts.from_host]
    held = [n for n in constants if n in used]
    parts.constants = [getattr(gm, n.target) for n in held]
    results: list[Node] = []

    def place(x):
        for source, among in (("argument", arguments), ("constant", held), ("host", given)):
            if x in among:
                return source, among.index(x)
        if not isinstance(x, Node):
            return None, x
        if x not in results:
            results.append(x)
        return "result", results.index(x)

    parts.outputs = [place(x) for x in output.args[0]]
    parts.device = _module(gm, [*inputs, *held], on_device, results, moved)
    parts.takes_all = inputs == arguments and not held
    parts.gives_all = parts.outputs == [("result", i) for i in range(len(results))]
    return parts


def _attribute(gm: GraphModule, node: Node):
    return getattr(gm, node.target, None)


# Namespaces of operations for which the core has rows.
_WITH_ROWS = ("oxitorch", "torchvision")


def _is_pure(gm: GraphModule, node: Node) -> bool:
    """Whether what a node does follows from its arguments alone, random numbers aside."""
    target = node.target
    if _loops.is_control_flow(target) or _flex.is_flex(target):
        bodies = [_attribute(gm, n) for n in node.all_input_nodes if n.op == "get_attr"]
        bodies = [body for body in bodies if isinstance(body, GraphModule)]
        return all(_is_pure(body, n) for body in bodies for n in body.graph.nodes if n.op == "call_function")
    if isinstance(target, torch._ops.OpOverload):
        # Of operations that are not PyTorch's those that have a row.
        has_row = target.namespace in _WITH_ROWS and target.has_kernel_for_dispatch_key("PrivateUse1")
        return has_row or target.namespace in ("aten", "prims")
    module = getattr(target, "__module__", None)
    return target is operator.getitem or module in ("_operator", "math", "torch")


def _host_part(sources: list[Node], calls: list[Node]):
    """The nodes that need nothing from the device, and the calls that write arguments on the host; None in place of the
    latter if somebody reads afterwards what they write.
    """
    host = {n for n in sources if not _is_on_device(n)}
    writes: list[Node] = []
    written: set[Node] = set()
    for n in calls:
        inputs = n.all_input_nodes
        if any(i in written or i in writes for i in inputs):
            return host, None
        if not all(i in host for i in inputs) or _is_on_device(n):
            continue
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable:
            writes.append(n)
            written.update(inputs[:1])
        else:
            host.add(n)
    return host, writes


_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "pow", "neg", "reciprocal", "sqrt", "rsqrt", "exp", "log")


def _is_arithmetic(node: Node) -> bool:
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return name.removeprefix("aten::").removeprefix("_foreach_") in _ARITHMETIC


def _in_place(gm: GraphModule, host: set[Node], writes: list[Node], needed: set[Node]) -> list[Node]:
    """The writes on the host, where arithmetic whose results nobody else needs is done in the arguments that it is
    written to: a graph has `x.copy_(x + 1)` for `x.add_(1)`, and lists of an optimizer's step counts are long.
    """
    copies = {n.args[1]: n for n in writes if n.target is torch.ops.aten.copy_.default and len(n.args) == 2}
    written = {i for n in writes for i in n.all_input_nodes[:1]}
    # The copies that each operation stands for, and what it gives.
    found = {n: own for n in gm.graph.nodes if n in host and (own := _written_by(n, copies, written))}
    while found:
        gone = {copy for own in found.values() for copy in own}
        used = needed.union(*(n.all_input_nodes for n in writes if n not in gone))
        for n in reversed(gm.graph.nodes):
            if n in used and n in host and n not in found:
                used.update(n.all_input_nodes)
        wanted = [n for n, own in found.items() if n in used or any(copy.args[1] in used for copy in own)]
        if not wanted:
            break
        for n in wanted:
            del found[n]
    added = []
    for n, own in found.items():
        with gm.graph.inserting_before(own[0]):
            added.append(_by_tensor(gm, n) or gm.graph.call_function(_written(n), n.args, n.kwargs))
    gone = {copy for own in found.values() for copy in own}
    return [n for n in writes if n not in gone] + added


def _written_by(node: Node, copies: dict[Node, Node], written: set[Node]) -> list[Node] | None:
    """The copies that write all results of arithmetic on arguments to its own first operands, if there are such."""
    if not _is_arithmetic(node) or _written(node) is None:
        return None
    first, *others = node.args
    own = list(first) if isinstance(first, (list, tuple)) else [first]
    results = {0: node}
    if isinstance(first, (list, tuple)):
        results = {n.args[1]: n for n in node.users if n.target is operator.getitem}
    found = [copies.get(results.get(i)) for i in range(len(own))]
    if len(set(own)) != len(own) or any(c is None or c.args[0] is not x for c, x in zip(found, own, strict=True)):
        return None
    if not all(_same_type(c.args[1], x) for c, x in zip(found, own, strict=True)):
        return None
    other = [i for x in (*others, *node.kwargs.values()) for i in _nodes(x)]
    return None if any(i in written or i.op != "placeholder" for i in other) else found


def _written(node: Node, overload: str = "") -> Callable | None:
    """The operation in its first operand, if there is one."""
    packet = getattr(torch.ops.aten, f"{node.target._schema.name.removeprefix('aten::')}_", None)
    return getattr(packet, overload or node.target._overloadname, None)


def _by_tensor(gm: GraphModule, node: Node) -> Node | None:
    """An operation on a list and a number, in its operands, with that number as a tensor, if that gives the same.
    PyTorch would make one for each tensor of the list, which takes the host longer than to add it.
    """
    dtypes = {v.dtype for x in _nodes(node.args[0]) for v in _values(x)}
    in_place = _written(node, "Tensor")
    is_number = len(node.args) == 2 and type(node.args[1]) in (int, float) and not node.kwargs
    # Of smaller dtypes the number is not rounded before.
    is_exact = len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}
    if node.target._overloadname != "Scalar" or in_place is None or not (is_number and is_exact):
        return None
    dtype = dtypes.pop()
    if not abs(node.args[1]) <= torch.finfo(dtype).max:  # of which no tensor can be made
        return None
    # One for all calls.
    with unset_fake_temporarily():
        number = torch.tensor(node.args[1], dtype=dtype, device="cpu")
    name = f"_number_of_{node.name}"
    gm.register_buffer(name, number)
    return gm.graph.call_function(in_place, (node.args[0], gm.graph.get_attr(name)))


def _same_type(a: Node, b: Node) -> bool:
    (a,), (b,) = _values(a), _values(b)
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def _nodes(x) -> list[Node]:
    found: list[Node] = []
    map_arg(x, found.append)
    return found


def _moved(on_device: list[Node], on_host: list[Node]) -> set[Node]:
    """The nodes on the host that the device computes for itself: what optimizers make of their step counts. It does
    arithmetic on 0-d tensors better than the host, where each operation costs Python's time.
    """
    movable: set[Node] = set()
    for n in on_host:
        simple = _is_arithmetic(n)
        sources = [i for i in n.all_input_nodes if i not in movable]
        if (simple or n.target is operator.getitem) and all(i.op == "placeholder" for i in sources):
            values = [v for x in (n, *sources) for v in _values(x)]
            if all(isinstance(v, torch.Tensor) and v.dim() == 0 and v.is_floating_point() for v in values):
                movable.add(n)
    used = {i for n in on_device for i in n.all_input_nodes}
    moved = set()
    for n in reversed(on_host):
        if n in used and n in movable:
            moved.add(n)
            used.update(n.all_input_nodes)
    return moved


def _is_on_device(node: Node) -> bool:
    """Whether a node gives a tensor that is not the CPU's."""
    return any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in _values(node))


def _values(node: Node):
    values = node.meta.get("val")
    return values if isinstance(values, (list, tuple)) else [values]


def _module(gm: GraphModule, inputs: list[Node], calls: list[Node], outputs: list[Node], moved=()) -> GraphModule:
    """These calls as a graph of their own. For those that are moved to the device, what they take is copied there."""
    graph = Graph()
    new = {}
    for n in inputs:
        new[n] = graph.placeholder(n.name)
        new[n].meta = n.meta
    made = (v for n in calls if _is_on_device(n) for v in _values(n))
    device = next((v.device for v in made if isinstance(v, torch.Tensor)), None)
    copies = {}
    for n in calls:
        for i in n.all_input_nodes:
            if i not in new and i.op == "get_attr":
                new[i] = graph.node_copy(i)
            if n in moved and i not in moved and i not in copies:
                copies[i] = graph.call_function(torch.ops.aten._to_copy.default, (new[i],), {"device": device})
        source = {**new, **copies} if n in moved else new
        new[n] = graph.node_copy(n, source.__getitem__)
    graph.output(tuple(map_arg(outputs, new.__getitem__)))
    return GraphModule(gm, graph)
