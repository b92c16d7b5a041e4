"""Optimizers of PyTorch in optax, one row each: the settings that optax spells otherwise, and the same formula."""

from __future__ import annotations

import torch

from oxitorch.to_jax._emit import Problem


def number(x):
    return repr(float(x))


def sgd(g):
    momentum = f", momentum={g['momentum']!r}" if g["momentum"] else ""
    nesterov = ", nesterov=True" if g["nesterov"] else ""
    return decayed(g, f"optax.sgd({number(g['lr'])}{momentum}{nesterov})")


def decayed(g, text):
    """Weight decay that is part of the gradient."""
    if not g["weight_decay"]:
        return text
    return f"optax.chain(optax.add_decayed_weights({g['weight_decay']!r}), {text})"


def betas(g):
    return f"{number(g['lr'])}, b1={g['betas'][0]!r}, b2={g['betas'][1]!r}, eps={g['eps']!r}"


def adam(g):
    if g.get("decoupled_weight_decay"):
        return adamw(g)
    return decayed(g, f"optax.adam({betas(g)})")


def adamw(g):
    return f"optax.adamw({betas(g)}, weight_decay={g['weight_decay']!r})"


def adagrad(g):
    if g["lr_decay"]:
        return None
    options = f"initial_accumulator_value={g['initial_accumulator_value']!r}"
    # optax adds eps within the root.
    return decayed(g, f"optax.adagrad({number(g['lr'])}, {options}, eps={g['eps']!r})") if g["eps"] == 0 else None


ROWS = {torch.optim.SGD: sgd, torch.optim.Adam: adam, torch.optim.AdamW: adamw, torch.optim.Adagrad: adagrad}
UNSUPPORTED = ("amsgrad", "maximize")


def default(model):
    """SGD with momentum, whose steps are proportional to gradients; a module may have no parameters."""
    return torch.optim.SGD(list(model.parameters()) or [torch.zeros(1)], lr=0.01, momentum=0.9)


def text(optimizer, model):
    """The function `transformation` of the training step, and what of the optimizer has no translation."""
    problems = []
    optimizer = default(model) if optimizer is None else optimizer
    names = {id(p): n for n, p in model.named_parameters()}
    made = []
    for group in optimizer.param_groups:
        row = ROWS.get(type(optimizer))
        tx = row(group) if row and not any(group.get(n) for n in UNSUPPORTED) and not group.get("dampening") else None
        if tx is None:
            what = f"`torch.optim.{type(optimizer).__name__}` with these settings"
            problems.append(Problem(what, "optimizer"))
            return (
                f"def transformation():\n    raise NotImplementedError({what + ' has no translation to optax'!r})\n",
                problems,
            )
        made.append((tx, {names[id(p)] for p in group["params"] if id(p) in names}))
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    frozen |= set(names.values()) - set().union(*(n for _, n in made)) - frozen
    if len(made) == 1 and not frozen:
        return f"def transformation():\n    return {made[0][0]}\n", problems
    groups = [(f"group_{i}", tx, n - frozen) for i, (tx, n) in enumerate(made)]
    if frozen:
        groups.append(("frozen", "optax.set_to_zero()", frozen))
    largest = max(groups, key=lambda g: len(g[2]))
    rows = "".join(
        f"    {label!r}: [\n" + "".join(f"        {n!r},\n" for n in sorted(ns)) + "    ],\n"
        for label, _, ns in groups
        if label != largest[0]
    )
    transforms = "".join(f"            {label!r}: {tx},\n" for label, tx, _ in groups)
    return (
        "# Parameters of each group, by PyTorch's names; all others are of the group "
        f"{largest[0]!r}.\nGROUPS = {{\n{rows}}}\n\n\n"
        "def transformation():\n"
        "    from .weights import labels\n\n"
        f"    return optax.partition(\n        {{\n{transforms}        }},\n"
        f"        lambda params: labels(params, GROUPS, {largest[0]!r}),\n    )\n"
    ), problems
