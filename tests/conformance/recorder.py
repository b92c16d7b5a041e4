"""Records units on a device that is not there: their names come on stdin, and a line of JSON for each goes to stdout.

When stdin ends, the programs go into the folder, each with the numbers of the units that made it, counted from 0.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

# More steps than there are units.
ENDLESS = 1 << 40


def runs(unit: str) -> Iterator:
    """What the unit does with each of its samples: a function that gives results, for those that the CPU accepts."""
    from . import units

    db, entry, dtype, question = unit.split("/")
    dtype = units.DTYPES[dtype]
    out = units.Outcome()
    if db == "model":
        from .. import real_models

        case = real_models.MODELS[entry]
        model = case.make().to(units.DEVICE).train()
        optimizer, g = real_models.optimizer_of(case, model), torch.Generator().manual_seed(1)
        for _ in range(2):
            yield lambda: real_models.step(model, case, optimizer, g, units.DEVICE)
        return
    if db == "module":
        info = next(i for i in units.module_db if i.name == entry)
        for case in units.module_cases(info, dtype, out):
            if units.attempt(case.run)[1] is None:
                yield case.on_device().run
        return
    if db == "optim":
        info = next(i for i in units.optim_db if i.optim_cls.__name__ == entry)
        for case, foreach in units.optimizer_cases(info, out):
            if units.attempt(lambda c=case, f=foreach: units.optimized(info, dtype, c, f, "cpu"))[1] is None:
                yield lambda c=case, f=foreach: units.optimized(info, dtype, c, f, units.DEVICE)
        return
    op = (units.ops() if db == "op" else units.foreach_ops())[entry]
    with_gradients = question in ("grad", "gradgrad")

    def run(s):
        if with_gradients:
            return units.gradients_of(op, s, question == "gradgrad")
        return units.seeded(lambda: op(s.input, *s.args, **s.kwargs))

    for sample in units.each_sample(op, dtype, out, requires_grad=with_gradients):
        moved = units.sample_on_device(sample, op)
        moved.output_process_fn_grad = sample.output_process_fn_grad
        if units.attempt(lambda s=sample: run(s))[1] is None:
            yield lambda s=moved: run(s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int)
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what ops print is not ours
    from oxitorch import _activate, _pretend

    description = json.loads((args.folder / "device.json").read_text())
    _pretend.pretend({**description, "steps": ENDLESS}, str(args.folder))
    core = _activate.core()

    from . import units  # which asks what devices there are

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    units.MOST_SAMPLES = args.samples
    for line in sys.stdin:
        unit, problems, count = line.strip(), [], 0
        samples, e = units.attempt(lambda unit=unit: list(runs(unit)))
        problems += [units.text_of(e)] if e is not None else []
        results = []
        for run in samples or []:
            result, e = units.attempt(run)
            results.append(result)  # what nobody holds is not computed
            problems += [units.text_of(e)] if e is not None else []
            count += 1
        units.attempt(torch.tpu.synchronize)
        core.mark_step()
        out.write(json.dumps({"unit": unit, "samples": count, "problems": problems}) + "\n")
    core.shutdown()


main()
