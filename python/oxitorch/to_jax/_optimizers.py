"""Optimizers of PyTorch in optax, one row each: the settings that optax spells otherwise, and the same formula."""

from __future__ import annotations

import re

import torch

from oxitorch.to_jax import _schedules
from oxitorch.to_jax._emit import Problem


def sgd(g, rate):
    momentum = f", momentum={g['momentum']!r}" if g["momentum"] else ""
    nesterov = ", nesterov=True" if g["nesterov"] else ""
    return decayed(g, f"optax.sgd({rate}{momentum}{nesterov})")


def decayed(g, text):
    """Weight decay that is part of the gradient."""
    if not g["weight_decay"]:
        return text
    return f"optax.chain(optax.add_decayed_weights({g['weight_decay']!r}), {text})"


def betas(g, rate):
    return f"{rate}, b1={g['betas'][0]!r}, b2={g['betas'][1]!r}, eps={g['eps']!r}"


def adam(g, rate):
    if g.get("decoupled_weight_decay"):
        return adamw(g, rate)
    return decayed(g, f"optax.adam({betas(g, rate)})")


def adamw(g, rate):
    return f"optax.adamw({betas(g, rate)}, weight_decay={g['weight_decay']!r})"


def adagrad(g, rate):
    # optax adds eps within the root.
    if g["lr_decay"] or g["eps"]:
        return None
    options = f"initial_accumulator_value={g['initial_accumulator_value']!r}"
    return decayed(g, f"optax.adagrad({rate}, {options}, eps={g['eps']!r})")


def adadelta(g, rate):
    scale = f"optax.scale_by_adadelta(rho={g['rho']!r}, eps={g['eps']!r})"
    return decayed(g, f"optax.chain({scale}, optax.scale_by_learning_rate({rate}))")


def adamax(g, rate):
    return decayed(g, f"optax.adamax({betas(g, rate)})")


def nadam(g, rate):
    b1, b2 = g["betas"]
    options = f"b1={b1!r}, b2={b2!r}, eps={g['eps']!r}, momentum_decay={g['momentum_decay']!r}"
    stages = [f"scale_by_nadam({options})", f"optax.scale_by_learning_rate({rate})"]
    if not g.get("decoupled_weight_decay"):
        return decayed(g, chained(*stages))
    if g["weight_decay"]:
        stages.insert(1, f"optax.add_decayed_weights({g['weight_decay']!r})")
    return chained(*stages)


def rmsprop(g, rate):
    options = f"decay={g['alpha']!r}, eps={g['eps']!r}, eps_in_sqrt=False"
    if not g["momentum"]:
        centered = ", centered=True" if g["centered"] else ""
        return decayed(g, f"optax.rmsprop({rate}, {options}{centered})")
    # optax has the rate within the momentum, which is something else where the rate changes.
    scale = f"optax.scale_by_{'stddev' if g['centered'] else 'rms'}({options})"
    trace = f"optax.trace({g['momentum']!r})"
    return decayed(g, f"optax.chain({scale}, {trace}, optax.scale_by_learning_rate({rate}))")


ROWS = {
    torch.optim.SGD: sgd,
    torch.optim.Adam: adam,
    torch.optim.AdamW: adamw,
    torch.optim.NAdam: nadam,
    torch.optim.Adamax: adamax,
    torch.optim.RMSprop: rmsprop,
    torch.optim.Adagrad: adagrad,
    torch.optim.Adadelta: adadelta,
}
UNSUPPORTED = ("amsgrad", "maximize", "dampening")


def default(model):
    """SGD with momentum, whose steps are proportional to gradients; a module may have no parameters."""
    return torch.optim.SGD(list(model.parameters()) or [torch.zeros(1)], lr=0.01, momentum=0.9)


def transformation(optimizer, group, rate: str) -> str | None:
    """One group's optimizer in optax, or None if it has none."""
    row = ROWS.get(type(optimizer))
    return None if row is None or any(group.get(n) for n in UNSUPPORTED) else row(group, rate)


def refused(optimizer, group) -> str:
    """The name of an optimizer that has no translation, with the settings that are the reason."""
    names = (*UNSUPPORTED, "lr_decay", "eps") if isinstance(optimizer, torch.optim.Adagrad) else UNSUPPORTED
    settings = [f"{n}={group[n]!r}" for n in names if group.get(n)]
    reason = f" with `{', '.join(settings)}`" if type(optimizer) in ROWS else ""
    return f"`torch.optim.{type(optimizer).__name__}`{reason}"


def text(optimizer, model, scheduler=None, clip_norm: float | None = None, places: dict[str, str] | None = None):
    """The functions of the learning rate and `transformation` of the training step, and what has no translation."""
    optimizer, places = default(model) if optimizer is None else optimizer, places or {}
    rates = _schedules.schedule(optimizer, scheduler, places.get("scheduler", "scheduler"))
    problems = [Problem(*p) for p in rates.problems]
    head = f"{rates.text}\n\n" if rates.text else ""
    made = []
    for i, group in enumerate(optimizer.param_groups):
        rate = rates.names[i] if rates.names else repr(float(group["lr"]))
        tx = transformation(optimizer, group, rate)
        if tx is None:
            problem = Problem(refused(optimizer, group), places.get("optimizer", "optimizer"))
            said = f"{problem.where}: {problem.what} has no translation to optax"
            return f"{head}def transformation():\n    raise NotImplementedError({said!r})\n", [*problems, problem]
        made.append((tx, {id(p) for p in group["params"]}))
    names = dict(model.named_parameters())
    trained = {n for n, p in names.items() if p.requires_grad and any(id(p) in own for _, own in made)}
    groups = [(tx, {n for n in trained if id(names[n]) in own}) for tx, own in made]
    return head + written(groups, names, clip_norm), problems


DOC = '    """What the optimizer makes of gradients."""\n'


def written(groups, names, clip_norm) -> str:
    """`transformation` of groups, each an optimizer and the names of its parameters."""
    clip = "" if clip_norm is None else f"clip_grad_norm({clip_norm!r})"
    frozen = set(names) - set().union(*(own for _, own in groups))
    groups = [g for g in groups if g[1]] or groups[:1]
    one = masked(groups, names) if len(groups) == 2 else groups[0][0] if len(groups) == 1 else None
    if one is not None and not frozen:
        return f"def transformation():\n{DOC}    return {chained(clip, one)}\n"
    labelled = [(f"group_{i}", tx, own) for i, (tx, own) in enumerate(groups)]
    everything = [*labelled, *([("frozen", "optax.set_to_zero()", frozen)] if frozen else [])]
    largest = max(everything, key=lambda g: len(g[2]))[0]
    rows = "".join(
        f"    {label!r}: [\n" + "".join(f"        {n!r},\n" for n in sorted(own)) + "    ],\n"
        for label, _, own in everything
        if label != largest
    )
    if clip and frozen:
        # The norm is that of what is trained.
        kept = ", ".join(
            f"{label!r}: optax.{'set_to_zero' if label == 'frozen' else 'identity'}()" for label, *_ in everything
        )
        clip = f"optax.partition({{{kept}}}, groups), {clip}"
    transforms = ", ".join(f"{label!r}: {tx}" for label, tx, _ in everything)
    return (
        "# Parameters of each group, by PyTorch's names; all others are of the group "
        f"{largest!r}.\nGROUPS = {{\n{rows}}}\n\n\n"
        f"def transformation(model):\n{DOC}"
        f"    groups = labels(model, GROUPS, {largest!r})\n"
        f"    return {chained(clip, f'optax.partition({{{transforms}}}, groups)')}\n"
    )


def chained(*stages):
    stages = [s for s in stages if s]
    return stages[0] if len(stages) == 1 else f"optax.chain({', '.join(stages)})"


def masked(groups, names) -> str | None:
    """AdamW whose two groups are the matrices, which decay, and the rest, which does not."""
    (tx, own), (plain, rest) = groups if groups[1][0].endswith("weight_decay=0.0)") else groups[::-1]
    same = [re.sub(r"weight_decay=[^,)]*", "", t) for t in (tx, plain)]
    matrices = {n for n in own | rest if names[n].ndim >= 2}
    if not tx.startswith("optax.adamw(") or not plain.endswith("weight_decay=0.0)") or same[0] != same[1]:
        return None
    if own != matrices:
        return None
    return f"{tx[:-1]}, mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params))"
