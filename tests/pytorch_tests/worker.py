"""Runs tests of one of PyTorch's files, whose names come on stdin; one line of JSON for each on stdout.

    python -m tests.pytorch_tests.worker DIR FILE DEVICE

The first line out is the list of the file's tests for the device. A crash of the process is a result of its test.
DEVICE is what tests of several processes and of the compiler run on, tpu or cpu; the other files have tests of both.
"""

import contextlib
import gc
import importlib
import inspect
import json
import os
import re
import sys
import time
import unittest
import warnings
from pathlib import Path

from . import placed, processes

# What files of PyTorch 2.6 import and newer versions have no more.
INTERNAL = "torch.testing._internal"
DROPPED = {
    f"{INTERNAL}.common_cuda": {"tf32_is_not_fp32": lambda: False},
    f"{INTERNAL}.common_mkldnn": {"bf32_on_and_off": lambda *_: lambda test: test},
    f"{INTERNAL}.common_nn": {"new_module_tests": [], "get_new_module_tests": list},
    f"{INTERNAL}.common_utils": {"disable_translation_validation_if_dynamic_shapes": lambda test: test},
    f"{INTERNAL}.inductor_utils": {"HAS_CUDA": True},
    f"{INTERNAL}.triton_utils": {"HAS_CUDA": False, "requires_cuda": lambda test: test},
    "functorch.experimental.control_flow": {"UnsupportedAliasMutationException": RuntimeError},
}


def main() -> None:
    folder, name, device = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tests print is not ours
    sys.argv = [name]
    in_processes = name.startswith(processes.FOLDER) and not placed.is_placed(name)
    with processes.imports(name, device) if in_processes else contextlib.nullcontext():
        module = processes.load() if name == processes.NAME else load(Path(folder), name, device)

    import torch

    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, unittest.TestCase)]
    tests = [
        f"{c.__name__}.{test}"
        for c in classes
        if in_processes or placed.is_placed(name) or getattr(c, "device_type", None) in ("privateuse1", "tpu")
        for test in unittest.TestLoader().getTestCaseNames(c)
    ]
    cheap_stacks()
    gc.freeze()  # thousands of tests, which every collection would go through
    out.write(json.dumps(tests) + "\n")
    for line in sys.stdin:
        test = line.strip()
        if in_processes:
            record = processes.in_a_process(lambda test=test: run(module, test, torch), device)
        elif placed.is_placed(name):
            record = placed.on_device(lambda test=test: run(module, test, torch), device)
        else:
            record = run(module, test, torch)
        out.write(json.dumps({"test": test} | record) + "\n")


def load(folder: Path, name: str, device: str):
    """The file as a module, with its tests for the device, or for both."""
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "cpu,privateuse1"
    os.environ["PYTORCH_DISABLE_FP32_PRECISION_LEAK_CHECK"] = "1"  # newer than the files
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(folder))
    sys.path.insert(0, str((folder / name).parent))
    os.chdir(folder)
    text = (folder / f"{name}.py").read_text()
    for other in re.findall(r"^\s*import (test_\w+)$", text, re.MULTILINE):  # one file that another takes tests from
        text += (folder / name).with_name(f"{other}.py").read_text()
    for where, names in [x for x in DROPPED.items() if x[0] in text]:
        module = importlib.import_module(where)
        for dropped, stand_in in names.items():
            if not hasattr(module, dropped):
                setattr(module, dropped, stand_in)
    if placed.is_placed(name):
        module = placed.load(folder / name, device)
    elif name.startswith(processes.FOLDER):
        module = processes.load_file(folder, name, device)
    else:
        module = importlib.import_module(Path(name).name)
    own_set_up(module)
    return module


def cheap_stacks() -> None:
    """Has a stack look for no source: PyTorch takes one for each iterator of samples, and looks at frames alone."""

    def stack(context=0):
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
            frame = frame.f_back
        return frames

    inspect.stack = stack


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
    if torch.tpu.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.tpu.synchronize()  # nobody's failure must not become the next test's
    return record


main()
