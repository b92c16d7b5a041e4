"""What PyTorch asks of a decomposition's `info` on the host: whether it was found. The program asserts it."""

import operator

import torch
from torch.fx import GraphModule, Node

# By a part of the name, in PyTorch's order.
_UNSOLVED = (
    ("inv", True, "The inversion could not be completed because the input matrix is singular."),
    ("solve", True, "The solver failed because the input matrix is singular."),
    ("cholesky", True, "The factorization could not be completed because the input is not positive-definite."),
    (
        "lu_factor",
        False,
        "A diagonal element of U is zero and using it on lu_solve would result in a division by zero. "
        "If you still want to perform the factorization, consider calling linalg.lu(A, pivot) or "
        "linalg.lu_factor_ex(A, pivot)",
    ),
    ("", False, "The factorization could not be completed."),
)


def says_unsolved(name: str) -> tuple[bool, str]:
    """PyTorch's words for a decomposition that was not found, but for the place, and whether it is a `LinAlgError`."""
    return next((is_linalg, f"{name}: {text}") for part, is_linalg, text in _UNSOLVED if part in name)


def put(gm: GraphModule) -> None:
    """In a compiled graph what was found is asserted to be so, where the graph would read `info`."""
    checks = [(n, check) for n in gm.graph.nodes if (check := _check(n)) is not None]
    for n, (info, name) in checks:
        found = _found(info)
        if not found:
            continue
        is_linalg, text = says_unsolved(name)
        with gm.graph.inserting_after(_last(gm, [info, *found])):
            after = info if is_linalg else gm.graph.call_function(torch.ops.aten.eq.Scalar, (info, 0))
        for t in found:
            with gm.graph.inserting_after(_last(gm, [after, *found])):
                op = torch.ops.oxitorch._solved if is_linalg else torch.ops.oxitorch._asserted
                asserted = gm.graph.call_function(op.default, (t, after, text))
            asserted.meta = dict(t.meta)
            t.replace_all_uses_with(asserted, delete_user_cb=lambda user, own=asserted: user is not own)
        _drop(gm, n)
    if checks:
        gm.graph.lint()
        gm.recompile()


def _check(n: Node) -> tuple[Node, str] | None:
    """The `info` that a node reads, and of which decomposition."""
    if n.op != "call_function":
        return None
    op, args = n.target, n.args
    if op is torch.ops.higher_order.with_effects:
        op, args = args[1], args[2:]
    return (args[0], args[1]) if op is torch.ops.aten._linalg_check_errors.default else None


def _found(info: Node) -> list[Node]:
    """What the decomposition of an `info` found."""
    if info.target is not operator.getitem:
        return []
    value = lambda n: n.meta.get("val")  # noqa: E731
    own = [n for n in info.args[0].users if n.target is operator.getitem and n is not info and n.users]
    return [
        n
        for n in own
        if isinstance(value(n), torch.Tensor) and value(n).dtype.is_floating_point | value(n).dtype.is_complex
    ]


def _last(gm: GraphModule, some: list[Node]) -> Node:
    """The one of these nodes that comes last."""
    return next(n for n in reversed(gm.graph.nodes) if n in some)


def _drop(gm: GraphModule, n: Node) -> None:
    """Takes a check out of a graph, and out of the order of effects."""
    for user in list(n.users):
        assert user.target is operator.getitem and user.args[1] == 0, user
        user.replace_all_uses_with(n.args[0])
        gm.graph.erase_node(user)
    gm.graph.erase_node(n)
