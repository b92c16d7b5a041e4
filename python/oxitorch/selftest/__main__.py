"""The child of `oxitorch selftest`: runs the checks in their order and writes JSON lines to stdout."""

import argparse
import json
import os
import sys
import time
import traceback

from oxitorch import selftest

# The first check that uses the device in this process.
STARTS = "devices"


def main() -> int:
    """Runs what was asked for; the exit status says nothing."""
    parser = argparse.ArgumentParser(prog="oxitorch.selftest")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--after", help="the check that ended the child before")
    args = parser.parse_args()
    # What checks and plugins print is for people; the lines have the pipe for themselves.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**line):
        print(json.dumps(line), file=lines, flush=True)

    # The order is that of this line: what needs the device free comes first.
    from oxitorch.selftest import processes, transfers, memory, order, values, speed  # noqa: F401, I001

    checks = [c for c in selftest.CHECKS if c.quick or not args.quick]
    names = [c.name for c in checks]
    checks = checks[names.index(args.after) + 1 :] if args.after else checks
    say(checks=len(names))
    there = args.after != STARTS  # or that check crashed or hung, and so would the others
    for check in checks:
        if not there:
            say(end=check.name, status="skip", found="the device does not start", measured={}, seconds=0)
            continue
        say(begin=check.name, limit_s=check.limit_s)
        began = time.perf_counter()
        measured = {}
        try:
            found = check.run()
            status, text, measured = "pass", found.text, found.measured
        except selftest.Skip as e:
            status, text = "skip", str(e)
        except Exception as e:  # whatever it is, it is the finding
            status = "fail"
            text = f"{type(e).__name__}: {e}" if str(e) else f"{type(e).__name__} at {_place(e)}"
            traceback.print_exc(file=sys.stderr)
            there = check.name != STARTS
        say(end=check.name, status=status, found=text, measured=measured, seconds=time.perf_counter() - began)
    say(device=_device() if there else {})
    return 0


def _place(e: Exception) -> str:
    """The line of ours that raised it."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "selftest" in f.filename]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].line}" if frames else "?"


def _device() -> dict:
    import torch

    try:
        properties = torch.tpu.get_device_properties()
        return {
            "name": torch.tpu.get_device_name(),
            "platform": torch.tpu.platform(),
            "count": torch.tpu.device_count(),
            "memory_bytes": properties.total_memory,
            "torch": torch.__version__,
        }
    except Exception as e:  # a device that does not start: each check has said so
        return {"error": str(e), "torch": torch.__version__}


if __name__ == "__main__":
    sys.exit(main())
