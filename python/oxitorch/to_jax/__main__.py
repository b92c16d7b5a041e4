"""`oxitorch to-jax`: a module of a file, its example inputs and its optimizer, as a JAX package."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

DTYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64", "i64": "int64", "i32": "int32",
    "u8": "uint8", "bool": "bool",
}  # fmt: skip
SPEC = re.compile(r"(?:(\w+)=)?(\w+)\[([\d,\s]*)\](?:<(\d+))?")
HINT = "hint: pass --input 'f32[2,3,32,32]' (or 'i64[2,16]<1000' for integers below 1000), or define `example_inputs`"


class Usage(Exception):
    """What was asked for is not there; the message says what to do."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command: 0 if the module was converted and agrees, 1 if not, 2 if there was nothing to convert."""
    args = parser().parse_args(argv)
    try:
        return run(args)
    except Usage as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="oxitorch to-jax",
        description="Write a PyTorch module as a flax.nnx package, run both, and say how far they differ.",
    )
    p.add_argument(
        "target", help="FILE.py, FILE.py:NAME or package.module:NAME; a module, a class or a function that makes one"
    )
    p.add_argument("--out", metavar="FOLDER", type=Path, help="the package to write [default: NAME_jax]")
    p.add_argument(
        "--input",
        metavar="SPEC",
        action="append",
        default=[],
        help="an input, such as f32[2,3,32,32], i64[2,16]<1000 or mask=bool[2,16]; in their order",
    )
    p.add_argument("--loss", metavar="NAME", help="the function of the file that is `loss(output, **targets)`")
    p.add_argument(
        "--target",
        metavar="SPEC",
        dest="targets",
        action="append",
        default=[],
        help="a target of the loss, such as labels=i64[2]<10",
    )
    p.add_argument("--no-run", action="store_true", help="only write the files; nothing is called converted then")
    p.add_argument("--json", action="store_true", help="print the report as JSON")
    return p


def run(args) -> int:
    module, name = load(args.target)
    import torch

    from oxitorch.to_jax import convert

    torch.manual_seed(0)
    if args.loss and not hasattr(module, args.loss):
        raise Usage(f"`{args.target}` has no function `{args.loss}`")
    options, name = parts(module, name, args.input, args.targets, args.loss)
    folder = args.out or Path(f"{re.sub(r'[^A-Za-z0-9_]', '_', name).lower()}_jax")
    try:
        result = convert(**options, folder=folder, run=not args.no_run)
    except ValueError as e:
        raise Usage(str(e)) from e
    if args.json:
        print((folder / "report.json").read_text(), end="")
    else:
        show(args.target, folder, result)
    return 0 if result.status in ("converted", "not run") else 1


def parts(module, name, given=(), given_targets=(), loss=None):
    """What `convert` takes of a file, and the name of its model."""
    model, name = find_model(module, name)
    args, kwargs = inputs(module, given)
    targets = specs(given_targets)[1] or dict(call_or(getattr(module, "example_targets", {})))
    optimizer = find_optimizer(module, model)
    scheduler, scheduler_name = find_scheduler(module, optimizer)
    options = {
        "model": model,
        "args": args,
        "kwargs": kwargs,
        "loss": getattr(module, loss or "loss", None) if targets or loss else None,
        "targets": targets,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "clip_norm": getattr(module, "grad_clip", None) or None,
        "places": {"optimizer": place_of(module, "optimizer"), "scheduler": place_of(module, scheduler_name)},
    }
    return options, name


def show(target, folder, result):
    from oxitorch.to_jax import _check

    lines = {
        n: len((folder / n).read_text().splitlines())
        for n in ("model.py", "layers.py", "train.py", "weights.py", "test_model.py")
    }
    print(f"{target} -> {folder}/")
    print("  " + ", ".join(f"{n} {k} lines" for n, k in lines.items()))
    for problem in result.problems:
        print(f"  no translation: {problem}")
    for note in result.notes:
        print(f"  note: {note}")
    if result.differences:
        limits = _check.limits()
        print(f"  {'compared with PyTorch':24}{'difference':>12}{'allowed':>10}")
        for what, value in result.differences.items():
            mark = "" if value <= limits[what] else "   too much"
            print(f"  {what.replace('_', ' '):24}{value:12.1e}{limits[what]:10.0e}{mark}")
    if result.error:
        print(f"  it did not run: {result.error}")
    print(result.status)


def load(target: str):
    """The Python module of a target, and the name in it that was asked for."""
    where, _, name = target.partition(":")
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(where), name
        except ModuleNotFoundError as e:
            raise Usage(f"`{where}` is neither a file that ends in .py nor a module: {e}") from e
    path = Path(where)
    if not path.is_file():
        raise Usage(f"there is no file `{where}`")
    sys.path.insert(0, str(path.parent.absolute()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module, name


def find_model(module, name: str):
    from torch import nn

    own = {n: x for n, x in vars(module).items() if not n.startswith("_")}
    classes = {
        n: c
        for n, c in own.items()
        if isinstance(c, type) and issubclass(c, nn.Module) and c.__module__ == module.__name__
    }
    if not name:
        made = [n for n, x in own.items() if isinstance(x, nn.Module)]
        ready = [n for n, c in classes.items() if not needs_arguments(c)]
        choices = ["model"] if "model" in own else made or ready
        if len(choices) != 1:
            have = ", ".join(f"`{n}`" for n in [*made, *classes]) or "none"
            raise Usage(f"which module is meant? the file has {have}\nhint: name it: {module.__name__}.py:NAME")
        name = choices[0]
    if name not in own:
        raise Usage(f"the file has no `{name}`; it has {', '.join(f'`{n}`' for n in classes) or 'no modules'}")
    x = own[name]
    if not isinstance(x, nn.Module):
        if not callable(x) or needs_arguments(x):
            hint = f"hint: define `model = {name}(...)`, or a function without arguments that makes it"
            raise Usage(f"`{name}` needs arguments\n{hint}")
        x = x()
    if not isinstance(x, nn.Module):
        raise Usage(f"`{name}` is a {type(x).__name__}, expected a torch.nn.Module")
    return x, name if name != "model" else type(x).__name__


def needs_arguments(f) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(p.default is p.empty and p.kind in kinds for p in inspect.signature(f).parameters.values())


def call_or(x):
    return x() if callable(x) else x


def inputs(module, given):
    """Positional and named example inputs."""
    if given:
        return specs(given)
    if not hasattr(module, "example_inputs"):
        raise Usage(f"there are no example inputs\n{HINT}")
    x = call_or(module.example_inputs)
    if isinstance(x, dict):
        return (), x
    return (tuple(x) if isinstance(x, tuple | list) else (x,)), {}


def specs(texts):
    """Random tensors by their specifications: those without and with a name."""
    import torch

    positional, named = [], {}
    for text in texts:
        m = SPEC.fullmatch(text)
        if m is None or m[2] not in DTYPES:
            raise Usage(f"`{text}` is no input\n{HINT}")
        shape = [int(n) for n in m[3].replace(" ", "").split(",") if n]
        dtype = getattr(torch, DTYPES[m[2]])
        if dtype == torch.bool:
            x = torch.ones(shape, dtype=dtype)
        elif dtype.is_floating_point:
            x = torch.randn(shape).to(dtype)
        else:
            x = torch.randint(0, int(m[4] or 2), shape, dtype=dtype)
        if m[1]:
            named[m[1]] = x
        else:
            positional.append(x)
    return tuple(positional), named


def find_optimizer(module, model):
    """The file's optimizer for the model, if it has one."""
    import torch

    x = getattr(module, "optimizer", None)
    if callable(x) and not isinstance(x, torch.optim.Optimizer):
        x = x(model)
    own = {id(p) for p in model.parameters()}
    if isinstance(x, torch.optim.Optimizer) and any(id(p) in own for g in x.param_groups for p in g["params"]):
        return x
    return None


def find_scheduler(module, optimizer):
    """The scheduler of the optimizer, or the function of the step that says the learning rate; and its name."""
    import torch

    x = getattr(module, "scheduler", None)
    if optimizer is None:
        return None, ""
    if callable(x):
        x = x(optimizer)
    if isinstance(x, torch.optim.lr_scheduler.LRScheduler) and x.optimizer is optimizer:
        return x, "scheduler"
    return getattr(module, "get_lr", None), "get_lr"


def place_of(module, name: str) -> str:
    """The line of a file that gives a name its value: `train.py:12`."""
    path = Path(module.__file__)
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        if any(name in (getattr(t, "id", None), getattr(t, "name", None)) for t in targets):
            return f"{path.name}:{node.lineno}"
    return name


if __name__ == "__main__":
    sys.exit(main())
