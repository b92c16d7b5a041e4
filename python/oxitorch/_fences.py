"""Backward graphs that compute a part of the forward again: barriers that keep the two apart.

`torch.utils.checkpoint` marks the nodes, and PyTorch's partitioner copies them into the backward. Forward and backward
become one program, and there the compiler would find the same values twice and keep those of the forward.
"""

import math

import torch
from torch.fx import GraphModule, Node


def put(gm: GraphModule) -> None:
    """Puts barriers into a backward graph.

    What such nodes take from elsewhere comes behind the gradient that the backward goes on with, so that nothing is
    computed again before that is there.
    """
    nodes = list(gm.graph.nodes)
    gradients = _reached(nodes, {n for n in nodes if n.op == "placeholder" and "tangents" in str(n.target)})
    marked = {n for n in nodes if n.op == "call_function" and n.meta.get("recompute") is not None}
    again = _reached(nodes, marked - gradients) - gradients
    for run in _runs(nodes, gradients, again):
        after = _gradient(nodes, run, gradients)
        if after is not None:
            _put(gm, run, again, after)
    gm.recompile()


def _reached(nodes: list[Node], starts: set[Node]) -> set[Node]:
    """These, and the nodes that depend on them."""
    found = set(starts)
    for n in nodes:
        if n.op == "call_function" and any(i in found for i in n.all_input_nodes):
            found.add(n)
    return found


def _runs(nodes: list[Node], gradients: set[Node], again: set[Node]) -> list[list[Node]]:
    """The nodes that are computed again, as runs between those of the backward itself."""
    runs: list[list[Node]] = [[]]
    for n in nodes:
        if n in again:
            runs[-1].append(n)
        elif n in gradients and runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _gradient(nodes: list[Node], run: list[Node], gradients: set[Node]) -> Node | None:
    """The gradient that the backward goes on with after a run, if it is there before; else the last one that is."""
    place = {n: i for i, n in enumerate(nodes)}
    before = [n for n in nodes[: place[run[0]]] if n in gradients and _is_on_device(n)]
    made = set(run)
    for n in nodes[place[run[-1]] :]:
        if n in gradients and any(i in made for i in n.all_input_nodes):
            with_it = [i for i in n.all_input_nodes if i in gradients and i in before]
            if with_it:
                return with_it[0]
    return before[-1] if before else None


def _put(gm: GraphModule, run: list[Node], again: set[Node], after: Node) -> None:
    behind: dict[tuple[Node, bool], Node] = {}
    for n in run:
        inputs = [i for i in n.all_input_nodes if _is_on_device(i)]
        taken = [i for i in inputs if i not in again]
        smallest = min((_size(i) for i in taken), default=0)
        for i in taken:
            # Not to wait for what was there before the forward, such as weights, spares the CPU a pass over it.
            firmly = not _is_given(i) or (all(map(_is_given, inputs)) and _size(i) == smallest)
            new = behind.get((i, firmly))
            if new is None:
                with gm.graph.inserting_before(n):
                    new = gm.graph.call_function(torch.ops.oxitorch._fence.default, (i, after, firmly))
                new.meta = {k: v for k, v in n.meta.items() if k == "stack_trace"} | {"val": i.meta["val"]}
                behind[i, firmly] = new
            n.replace_input_with(i, new)


def _is_given(node: Node) -> bool:
    """Whether it is an argument of the forward."""
    return node.op == "placeholder" and "primals" in str(node.target)


def _size(node: Node) -> int:
    sizes = [s if isinstance(s, int) else 1 << 40 for s in node.meta["val"].shape]
    return math.prod(sizes)


def _is_on_device(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "tpu"
