"""PyTorch's tests of its compiler, most of which name no device, or CUDA, as tests of the device and of the CPU.

What they make is made on the device (or the CPU), and so is what they name CUDA: the file is read with other words.
Where they ask for inductor, which has no code generator for the device, they get the device's backend.
"""

import os
import re
import types
from pathlib import Path

from . import source

FOLDERS = ("dynamo/", "functorch/", "higher_order_ops/")
# Those of other folders that are of one process and name no device.
ALSO = tuple(f"distributed/pipelining/test_{name}" for name in ("backward", "microbatch", "pipe", "unflatten"))

# Names of CUDA in the files; longer names, as of modules, are not the device's.
OF_CUDA = (
    (re.compile(r"""\[torch\.device\("cpu"\), torch\.device\("cuda"\)\]"""), '[torch.device("{}")]'),
    (re.compile(r"""(?<=["'])cuda(?=[:"'])"""), "{}"),
    (re.compile(r"\btorch\.cuda\b"), "torch.{}"),
    (re.compile(r"\.cuda\("), ".{}("),
    (re.compile(r"\bGPU_TYPE\b"), '"{}"'),
)
# What newer versions of PyTorch say otherwise.
NEWER = (
    (re.compile(r"\bfor sample_input, subtest_ctx in\b"), "for sample_input, subtest_ctx, _ in"),
    (
        re.compile(r"(?<=def guard_manager_clone_hook_fn)\(self, guard_manager_wrapper, f_locals\)"),
        "(self, guard_manager_wrapper, f_locals, *_)",
    ),
    (re.compile(r'@patch\("functorch\.compile\.config\.use_functionalize", True\)'), ""),  # it always does by now
)
# Names of the CPU that stand for no choice: the tests are of what is under `vmap`, wherever it is.
OF_THE_CPU = {
    "test_vmap": (
        (
            re.compile(
                r"""(?:(?<=getter, )|(?<=randn, )|(?<=device = )|(?<=size, device=)|(?<=^ {12}))["']cpu["']""",
                re.MULTILINE,
            ),
            '"{}"',
        ),
    ),
}
# Words that keep their meaning on the CPU.
OF_THE_DEVICE_ALONE = (
    (re.compile(r"""(?<=["'])inductor(?=["'])"""), "tpu"),
    (re.compile(r"\bDispatchKey\.AutogradCUDA\b"), "DispatchKey.AutogradPrivateUse1"),
    (re.compile(r"\btorch\.([gs]et_rng_state)\b"), r"torch.tpu.\1"),
)


def is_placed(name: str) -> bool:
    return name.startswith(FOLDERS) or name in ALSO


def load(path: Path, device: str) -> types.ModuleType:
    """The file as a module, whose classes for devices are for this one."""
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "privateuse1" if device == "tpu" else "cpu"
    from torch.testing._internal import common_device_type, common_utils

    instantiate = common_device_type.instantiate_device_type_tests
    common_device_type.instantiate_device_type_tests = lambda case, scope, **how: instantiate(
        case, scope, **{k: v for k, v in how.items() if k != "only_for"}
    )
    common_utils.requires_cuda = lambda test: test
    expect = common_utils.TestCase.assertExpectedInline

    def as_on_cpu(self, actual, *args, **kwargs):
        if isinstance(actual, str):
            actual = re.sub(r"device\(type='tpu'(, index=0)?\)", "device(type='cpu')", actual)
        return expect(self, actual, *args, **kwargs)

    common_utils.TestCase.assertExpectedInline = as_on_cpu
    if path.parent.name == "functorch":
        only_known_ops()
    compared_on_host()
    words = OF_CUDA + OF_THE_CPU.get(path.name, ()) + NEWER + (OF_THE_DEVICE_ALONE if device == "tpu" else ())
    made_on(device)
    module = source.load(path, [(pattern, name.format(device)) for pattern, name in words])
    made_on(None)
    return module


def compared_on_host() -> None:
    """Has results compared on the host: the operations of a comparison would be compiled for each shape."""
    from torch.testing._comparison import TensorLikePair

    close = TensorLikePair._compare_regular_values_close

    def compare(self, actual, expected, **how):
        if actual.device.type == "tpu":
            actual, expected = actual.cpu(), expected.cpu()
        close(self, actual, expected, **how)

    TensorLikePair._compare_regular_values_close = compare


def made_on(device: str | None) -> None:
    """Has tensors of no device made on this one from now on.

    On the CPU too, as PyTorch's compiler traces the mode that a default device is.
    """
    import torch

    torch.set_default_device(device)


def only_known_ops() -> None:
    """Lets functorch's files name operations that newer versions of PyTorch have no samples of."""
    import common_utils
    from functorch_additional_op_db import additional_op_db
    from torch.testing._internal.common_methods_invocations import op_db

    known = {(op.name, op.variant_test_name) for op in (*op_db, *additional_op_db)}
    for name in ("skipOps", "opsToleranceOverride"):
        mark = getattr(common_utils, name)
        setattr(
            common_utils,
            name,
            lambda case, test, marks, mark=mark: mark(case, test, [m for m in marks if m[:2] in known]),
        )


def on_device(run, device: str) -> dict:
    """What `run()` gives where what it makes is made on the device; unused if nothing ran there."""
    import torch

    before = torch.tpu.metrics()["ops"]
    made_on(device)
    try:
        record = run()
    finally:
        made_on(None)
    if record["status"] == "pass" and device == "tpu" and torch.tpu.metrics()["ops"] == before:
        record |= {"status": "unused"}
    return record
