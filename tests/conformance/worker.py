"""Runs units whose names come on stdin; one line of JSON for each on stdout. A crash of it is a result of its unit."""

import argparse
import json
import os
import sys
import time
import warnings


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what ops print is not ours
    import torch

    from tests.effort import LEAST

    from . import units

    warnings.simplefilter("ignore")
    torch.tpu.eager_mode = os.environ.get("OXITORCH_EAGER_MODE", "strict")
    torch.set_num_threads(1)
    units.MOST_SAMPLES = args.samples
    if args.quick and torch.tpu.get_device_properties().platform == "cpu":
        torch.tpu.compiler.custom_compiler_options(LEAST).__enter__()
    for line in sys.stdin:
        unit = line.strip()
        torch.tpu.reset_metrics()
        started, cpu_started = time.perf_counter(), time.process_time()
        outcome, e = units.attempt(lambda unit=unit: units.run(unit))
        units.attempt(torch.tpu.synchronize)  # nobody's failure must not become the next unit's
        record = {"unit": unit, "seconds": round(time.perf_counter() - started, 3)}
        record["cpu_seconds"] = round(time.process_time() - cpu_started, 3)
        if e is not None:
            record |= {"status": "broken", "problems": [["broken", units.text_of(e)]], "samples": 0}
        else:
            status = "fail" if outcome.problems else "skip" if outcome.skipped else "pass"
            record |= {"status": status, "problems": outcome.problems[:20], "samples": outcome.samples}
            record |= {"failures": len(outcome.problems), "skipped": outcome.skipped}
        record["fallbacks"] = torch.tpu.metrics()["fallbacks"]
        out.write(json.dumps(record) + "\n")


main()
