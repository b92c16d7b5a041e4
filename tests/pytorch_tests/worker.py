"""Runs tests of one of PyTorch's files, whose names come on stdin; one line of JSON for each on stdout.

The first line out is the list of the file's tests for the device. A crash of the process is a result of its test.
"""

import contextlib
import importlib
import json
import os
import sys
import time
import unittest
import warnings
from pathlib import Path

from . import processes

# What files of PyTorch 2.6 import from torch.testing._internal and newer versions have no more.
DROPPED = {
    "common_cuda": {"tf32_is_not_fp32": lambda: False},
    "common_nn": {"new_module_tests": [], "get_new_module_tests": list},
    "common_mkldnn": {"bf32_on_and_off": lambda *_: lambda test: test},
}


def main() -> None:
    folder, name = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tests print is not ours
    sys.argv = [name]
    module = processes.load() if name == processes.NAME else load(Path(folder), name)

    import torch

    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, unittest.TestCase)]
    tests = [
        f"{c.__name__}.{test}"
        for c in classes
        if getattr(c, "device_type", None) in ("privateuse1", "tpu")
        for test in unittest.TestLoader().getTestCaseNames(c)
    ]
    out.write(json.dumps(tests) + "\n")
    for line in sys.stdin:
        out.write(json.dumps(run(module, line.strip(), torch)) + "\n")


def load(folder: Path, name: str):
    """The file as a module, with the tests for the device and those for the CPU."""
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "cpu,privateuse1"
    os.environ["PYTORCH_DISABLE_FP32_PRECISION_LEAK_CHECK"] = "1"  # newer than the files
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(folder))
    sys.path.insert(0, str((folder / name).parent))
    os.chdir(folder)
    for where, names in DROPPED.items():
        internal = importlib.import_module(f"torch.testing._internal.{where}")
        for dropped, stand_in in names.items():
            if not hasattr(internal, dropped):
                setattr(internal, dropped, stand_in)
    module = importlib.import_module(Path(name).name)
    own_set_up(module)
    return module


def own_set_up(module) -> None:
    """Gives the classes for devices what their generic class does before and after each test, as PyTorch 2.6 did.

    Newer versions inherit it, and `super(self.__class__, self).setUp()` would call itself.
    """
    generic = set()
    for case in [c for c in vars(module).values() if isinstance(c, type) and hasattr(c, "device_type")]:
        for base in [b for b in case.__mro__[1:] if b.__module__ == module.__name__]:
            for name in {"setUp", "tearDown"} & vars(base).keys():
                setattr(case, name, vars(base)[name])
                generic.add((base, name))
    for base, name in generic:
        delattr(base, name)


def run(module, test: str, torch) -> dict:
    result = unittest.TestResult()
    started = time.perf_counter()
    unittest.defaultTestLoader.loadTestsFromName(test, module).run(result)
    record = {"test": test, "seconds": round(time.perf_counter() - started, 2)}
    problems = [*result.errors, *result.failures]
    if problems:
        record |= {"status": "fail", "why": problems[0][1][-3000:]}
    elif result.unexpectedSuccesses:
        record |= {"status": "fail", "why": "unexpected success"}
    elif result.skipped:
        record |= {"status": "skip", "why": result.skipped[0][1]}
    else:
        record |= {"status": "pass"}
    if module.__name__ != processes.NAME:
        with contextlib.suppress(RuntimeError):
            torch.tpu.synchronize()  # nobody's failure must not become the next test's
    return record


main()
