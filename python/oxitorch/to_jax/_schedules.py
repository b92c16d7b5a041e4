"""Learning rates by the step: schedulers of PyTorch, one row each, and functions of the step that a file has.

`optax` calls a schedule with a traced step, so a function's branches become `jnp.select`; its names stay.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import re
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.optim import lr_scheduler as torch_schedulers

from oxitorch.to_jax._graph import Unsupported

STEP = "step"
# Names that a training step has for itself.
RESERVED = {
    "optax", "jax", "jnp", "nnx", "loss_fn", "transformation", "create_optimizer", "train_step", "groups", "labels",
}  # fmt: skip
CALLS = {
    "cos": "jnp.cos", "sin": "jnp.sin", "sqrt": "jnp.sqrt", "exp": "jnp.exp", "log": "jnp.log", "tanh": "jnp.tanh",
    "floor": "jnp.floor", "ceil": "jnp.ceil", "pow": "jnp.power", "abs": "jnp.abs", "min": "jnp.minimum",
    "max": "jnp.maximum", "round": "jnp.round", "minimum": "jnp.minimum", "maximum": "jnp.maximum",
}  # fmt: skip


@dataclass
class Schedule:
    """The functions of a training step's learning rates, one for each distinct one of the optimizer's groups."""

    text: str = ""
    names: list[str] = field(default_factory=list)  # of each group's function
    problems: list[tuple[str, str]] = field(default_factory=list)  # what has no translation, and where


# --- functions of the step


class Translation(ast.NodeTransformer):
    """An expression of Python's numbers as one of traced arrays."""

    def __init__(self, function, parameter: str, local: set[str]):
        self.parameter, self.local = parameter, local
        closure = inspect.getclosurevars(function)
        self.known = {**closure.builtins, **closure.globals, **closure.nonlocals, **defaults(function)}
        self.constants: dict[str, float] = {}

    def refuse(self, node, why=""):
        raise Refused(f"`{ast.unparse(node).splitlines()[0]}`{why}", node.lineno)

    def value(self, node):
        """What a name or an attribute of one is outside of the function."""
        if isinstance(node, ast.Name) and node.id not in {self.parameter, *self.local}:
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self.value(node.value), node.attr, None)
        return None

    def decided(self, test):
        """Whether a condition that does not depend on the step is met; None for others."""
        if any(isinstance(n, ast.Name) and n.id in {self.parameter, *self.local} for n in ast.walk(test)):
            return None
        try:
            return bool(eval(compile(ast.Expression(test), "", "eval"), self.known))
        except Exception as e:
            return self.refuse(test, f", which raises {type(e).__name__},")

    def visit_Name(self, node):
        if node.id in {self.parameter, *self.local}:
            return node
        x = self.known.get(node.id)
        if not isinstance(x, int | float):
            self.refuse(node, ", which is no number,")
        if node.id in RESERVED:
            return ast.Constant(x)
        self.constants[node.id] = x
        return node

    def visit_Attribute(self, node):
        x = self.value(node)
        if not isinstance(x, int | float):
            self.refuse(node, ", which is no number,")
        return ast.parse("jnp.pi" if x == math.pi else repr(x), mode="eval").body

    def visit_Constant(self, node):
        return node if isinstance(node.value, int | float) else self.refuse(node, ", which is no number,")

    def visit_Call(self, node):
        f = self.value(node.func)
        name = getattr(f, "__name__", "")
        module = getattr(f, "__module__", None)
        if f is float and len(node.args) == 1:
            return self.visit(node.args[0])
        if f is int and len(node.args) == 1:
            return ast.Call(ast.parse("jnp.trunc", mode="eval").body, [self.visit(node.args[0])], [])
        known = module in ("math", "builtins", "numpy", None) and name in CALLS
        if not known or node.keywords or not node.args or any(isinstance(a, ast.Starred) for a in node.args):
            self.refuse(node)
        args = [self.visit(a) for a in node.args]
        call = ast.parse(CALLS[name], mode="eval").body
        out = args[:2] if name != "pow" or len(args) == 2 else self.refuse(node)
        made = ast.Call(call, out, [])
        for other in args[2:]:
            made = ast.Call(call, [made, other], [])
        return made

    def visit_Compare(self, node):
        sides = [self.visit(x) for x in (node.left, *node.comparators)]
        if any(isinstance(op, ast.In | ast.NotIn | ast.Is | ast.IsNot) for op in node.ops):
            self.refuse(node)
        parts = [ast.Compare(a, [op], [b]) for a, op, b in zip(sides, node.ops, sides[1:], strict=False)]
        return joined(parts, ast.BitAnd())

    def visit_BoolOp(self, node):
        return joined(
            [self.visit(v) for v in node.values], ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        )

    def visit_UnaryOp(self, node):
        operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return ast.Call(ast.parse("jnp.logical_not", mode="eval").body, [operand], [])
        return ast.UnaryOp(node.op, operand)

    def visit_IfExp(self, node):
        known = self.decided(node.test)
        if known is not None:
            return self.visit(node.body if known else node.orelse)
        return where(*(self.visit(x) for x in (node.test, node.body, node.orelse)))

    def visit_BinOp(self, node):
        return ast.BinOp(self.visit(node.left), node.op, self.visit(node.right))

    def generic_visit(self, node):
        return self.refuse(node) if isinstance(node, ast.expr) else super().generic_visit(node)


class Refused(Unsupported):
    """What of a function has no translation, and on which line of its source."""

    def __init__(self, what, line):
        super().__init__(what)
        self.line = line


def joined(parts, op):
    out = parts[0]
    for p in parts[1:]:
        out = ast.BinOp(out, op, p)
    return out


def where(test, yes, no):
    return ast.Call(ast.parse("jnp.where", mode="eval").body, [test, yes, no], [])


def defaults(function):
    own = list(inspect.signature(function).parameters.values())
    return {p.name: p.default for p in own[1:] if p.default is not p.empty}


def parsed(function):
    """The tree of a function or lambda, with the lines of its file."""
    try:
        lines, first = inspect.getsourcelines(function)
        if function.__name__ != "<lambda>":
            return ast.increment_lineno(ast.parse(textwrap.dedent("".join(lines))), first - 1).body[0]
        whole = ast.parse("".join(inspect.findsource(function)[0]))
    except (OSError, TypeError, AttributeError, SyntaxError) as e:
        raise Refused("a function without source", 0) from e
    # Several may stand on a line: the one that has the place of the code's first instruction.
    found = [n for n in ast.walk(whole) if isinstance(n, ast.Lambda) and n.lineno == function.__code__.co_firstlineno]
    if len(found) > 1 and hasattr(function.__code__, "co_positions"):
        at = {(line, column) for line, _, column, _ in function.__code__.co_positions() if column is not None}
        found = [n for n in found if (n.body.lineno, n.body.col_offset) in at]
    if len(found) != 1:
        raise Refused("one of several lambdas on a line", function.__code__.co_firstlineno)
    return found[0]


def function_text(function: Callable, name: str, scale: float | None = None) -> str:
    """A function of the step as one that JAX can trace; times `scale`, if there is one.

    Raises:
        Refused: it has what is no arithmetic of numbers.
    """
    tree = parsed(function)
    parameters = [a.arg for a in tree.args.args]
    if not parameters or len(parameters) - 1 > len(tree.args.defaults) or tree.args.vararg or tree.args.kwonlyargs:
        raise Refused(f"`{ast.unparse(tree.args)}`, which are not one step,", tree.lineno)
    statements = [ast.Return(tree.body)] if isinstance(tree, ast.Lambda) else tree.body
    stored = [n for s in statements for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    local = {n.id for n in stored}
    t = Translation(function, parameters[0], local)
    for n in stored:
        # Branches are expressions at the end, where a name has one value.
        if n.id in parameters or sum(n.id == m.id for m in stored) > 1:
            raise Refused(f"`{n.id}`, a name that is given several values,", n.lineno)
    lines: list[str] = []
    result = block(statements, t, lines)
    if result is None:
        raise Refused("a function that may end without a result", tree.lineno)
    constants = "".join(f"{n} = {v!r}\n" for n, v in t.constants.items())
    text = ast.unparse(ast.fix_missing_locations(result))
    text = text if scale is None else f"{scale!r} * ({text})"
    body = "".join(f"    {line}\n" for line in [*lines, f"return {text}"])
    origin = re.sub(r"<locals>\.|[<>]", "", function.__qualname__)
    head = f"{constants}\n\n" if constants else ""
    return f'{head}def {name}({parameters[0]}):\n    """From `{function.__module__}.{origin}`."""\n{body}'


def block(statements, t: Translation, lines: list[str]):
    """The result of statements as an expression; what they assign goes to `lines`."""
    cases, default = [], None
    for i, s in enumerate(statements):
        if isinstance(s, ast.Assert | ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)):
            continue
        if isinstance(s, ast.Return) and s.value is not None:
            default = t.visit(s.value)
            break
        if isinstance(s, ast.Assign) and len(s.targets) == 1 and isinstance(s.targets[0], ast.Name):
            value = ast.unparse(ast.fix_missing_locations(t.visit(s.value)))
            lines.append(f"{s.targets[0].id} = {value}")
            continue
        if isinstance(s, ast.If):
            known = t.decided(s.test)
            if known is not None:
                default = block([*(s.body if known else s.orelse), *statements[i + 1 :]], t, lines)
                break
            test = t.visit(s.test)
            yes = block(s.body, t, lines) if returns(s.body) else None
            if yes is None:
                t.refuse(s, ", a branch that does not return,")
            cases.append((test, yes))
            if s.orelse:
                default = block([*s.orelse, *statements[i + 1 :]], t, lines)
                break
            continue
        t.refuse(s)
    if default is None:
        return None
    if not cases:
        return default
    if len(cases) == 1:
        return where(*cases[0], default)
    lists = [ast.List([c[n] for c in cases]) for n in (0, 1)]
    return ast.Call(ast.parse("jnp.select", mode="eval").body, [*lists, default], [])


def returns(statements):
    last = statements[-1]
    return isinstance(last, ast.Return) or (
        isinstance(last, ast.If) and returns(last.body) and bool(last.orelse) and returns(last.orelse)
    )


# --- schedulers, each as an expression of `step` for a group that begins with the rate `base`


def cosine(s, base, step):
    turn = f"(1 + jnp.cos(jnp.pi * {step} / {s.T_max})) / 2"
    return f"{s.eta_min!r} + {base - s.eta_min!r} * {turn}" if s.eta_min else f"{base!r} * {turn}"


def linear(s, base, step):
    return f"optax.linear_schedule({base * s.start_factor!r}, {base * s.end_factor!r}, {s.total_iters})({step})"


def polynomial(s, base, step):
    power = f" ** {s.power!r}" if s.power != 1 else ""
    return f"{base!r} * (1 - jnp.minimum({step}, {s.total_iters}) / {s.total_iters}){power}"


def constant(s, base, step):
    return f"jnp.where({step} < {s.total_iters}, {base * s.factor!r}, {base!r})"


def multi_step(s, base, step):
    scales = {int(m): s.gamma**n for m, n in sorted(s.milestones.items())}
    return f"optax.piecewise_constant_schedule({base!r}, {scales!r})({step})"


def restarts(s, base, step):
    if s.T_mult != 1:
        raise Refused("`CosineAnnealingWarmRestarts` with `T_mult`", 0)
    turn = f"(1 + jnp.cos(jnp.pi * ({step} % {s.T_0}) / {s.T_0})) / 2"
    return f"{s.eta_min!r} + {base - s.eta_min!r} * {turn}" if s.eta_min else f"{base!r} * {turn}"


def one_cycle(s, base, step):
    if s.cycle_momentum:
        raise Refused("`OneCycleLR` with `cycle_momentum`, which changes betas or the momentum,", 0)
    group = next(g for g in s.optimizer.param_groups if g["initial_lr"] == base)
    out, first = "", 0
    for phase in s._schedule_phases:
        begin, end, last = group[phase["start_lr"]], group[phase["end_lr"]], phase["end_step"]
        share = f"({step} - {first!r}) / {last - first!r}" if first else f"{step} / {last!r}"
        if s._anneal_func_type == "linear":
            text = f"{begin!r} + {end - begin!r} * ({share})"
        else:
            text = f"{end!r} + {(begin - end) / 2!r} * (1 + jnp.cos(jnp.pi * ({share})))"
        out = f"jnp.where({step} <= {first!r}, {out}, {text})" if out else text
        first = last
    return out


def sequential(s, base, step):
    texts = [
        expression(inner, base, f"({step} - {m})" if m else step)
        for inner, m in zip(s._schedulers, [0, *s._milestones], strict=True)
    ]
    out = texts[-1]
    for text, m in zip(texts[-2::-1], s._milestones[::-1], strict=True):
        out = f"jnp.where({step} < {m}, {text}, {out})"
    return out


ROWS = {
    torch_schedulers.StepLR: lambda s, base, step: f"{base!r} * {s.gamma!r} ** ({step} // {s.step_size})",
    torch_schedulers.ExponentialLR: lambda s, base, step: f"{base!r} * {s.gamma!r} ** {step}",
    torch_schedulers.MultiStepLR: multi_step,
    torch_schedulers.CosineAnnealingLR: cosine,
    torch_schedulers.CosineAnnealingWarmRestarts: restarts,
    torch_schedulers.LinearLR: linear,
    torch_schedulers.PolynomialLR: polynomial,
    torch_schedulers.OneCycleLR: one_cycle,
    torch_schedulers.ConstantLR: constant,
    torch_schedulers.SequentialLR: sequential,
}


def expression(scheduler, base, step):
    row = ROWS.get(type(scheduler))
    if row is None:
        raise Refused(f"`torch.optim.lr_scheduler.{type(scheduler).__name__}`", 0)
    return row(scheduler, base, step)


def of_group(scheduler, group: int, base: float, name: str) -> str:
    """The function of one group's learning rate."""
    if callable(scheduler):
        return function_text(scheduler, name)
    if isinstance(scheduler, torch_schedulers.LambdaLR):
        return function_text(scheduler.lr_lambdas[group], name, base)
    text = expression(scheduler, base, STEP)
    origin = f'"""From `torch.optim.lr_scheduler.{type(scheduler).__name__}`."""'
    return f"def {name}({STEP}):\n    {origin}\n    return {text}\n"


def base_rates(optimizer) -> list[float]:
    return [float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups]


def schedule(optimizer, scheduler, place: str) -> Schedule:
    """The learning rates of an optimizer's groups.

    `scheduler` is one of `torch.optim.lr_scheduler`, or a function of the step whose result all groups get.
    Raises ValueError for a scheduler that has taken steps.
    """
    if scheduler is None:
        return Schedule()
    if not callable(scheduler) and scheduler.last_epoch != 0:
        raise ValueError("the scheduler has taken steps already\nhint: pass one that was just made")
    out, texts = Schedule(), {}
    for group, base in enumerate(base_rates(optimizer)):
        try:
            text = of_group(scheduler, group, base, "schedule")
        except Refused as e:
            at = place_of(scheduler, group, e.line) or place
            if (str(e), at) not in out.problems:
                out.problems.append((str(e), at))
            said = f"{at}: {e} has no translation to optax"
            text = f"def schedule({STEP}):\n    raise NotImplementedError({said!r})\n"
        out.names.append(texts.setdefault(text, f"schedule_{len(texts)}" if texts else "schedule"))
    constants: list[str] = []
    functions = []
    for text, name in texts.items():
        head, _, body = text.partition("def schedule(")
        constants += [line for line in head.splitlines() if line and line not in constants]
        functions.append(f"def {name}({body}")
    out.text = "\n\n".join([*(["\n".join(constants) + "\n"] if constants else []), *functions])
    out.text += f"\n\n# Of each group of parameters.\nSCHEDULES = [{', '.join(out.names)}]\n"
    return out


def place_of(scheduler, group, line):
    """Where in its file a function of the step has a line."""
    function = scheduler if callable(scheduler) else dict(enumerate(getattr(scheduler, "lr_lambdas", ()))).get(group)
    return f"{Path(function.__code__.co_filename).name}:{line}" if line and hasattr(function, "__code__") else None


def rates(optimizer, scheduler, steps: int) -> list[list[float]]:
    """What the groups' learning rates are in the first steps, by PyTorch."""
    groups = base_rates(optimizer)
    if scheduler is None or isinstance(scheduler, torch_schedulers.ReduceLROnPlateau):  # which follows the losses
        return [groups] * steps
    if callable(scheduler):
        return [[float(scheduler(n))] * len(groups) for n in range(steps)]
    # One that stands for the optimizer, so that the given one and its scheduler stay as they are.
    stand_in = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": g["lr"]} for g in optimizer.param_groups])
    for own, g in zip(stand_in.param_groups, optimizer.param_groups, strict=True):
        own |= {k: g[k] for k in ("max_lr", "min_lr") if k in g} | {"initial_lr": g.get("initial_lr", g["lr"])}
    copied = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
    if hasattr(copied, "cycle_momentum"):
        copied.cycle_momentum = False  # the one that stands for the optimizer has no betas
    out = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the scheduler steps before its optimizer
        for _ in range(steps):
            out.append([float(g["lr"]) for g in stand_in.param_groups])
            copied.step()
    return out
