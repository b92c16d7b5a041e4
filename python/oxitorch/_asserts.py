"""`torch._assert_async`, and what it is in compiled graphs, as `F.one_hot` there has it: a check of the program.

Nothing waits for the value: who waits for the device is told.
"""

import torch

_libraries: list[torch.library.Library] = []


def install() -> None:
    own, aten = torch.library.Library("oxitorch", "FRAGMENT"), torch.library.Library("aten", "IMPL")
    _libraries.extend([own, aten])
    own.define("_assert(Tensor ok, str message) -> Tensor")
    own.impl("_assert", lambda ok, message: ok.new_empty((), dtype=torch.bool), "Meta")
    torch.ops.oxitorch._bind("oxitorch")
    aten.impl("_assert_async", _assert, "PrivateUse1")
    aten.impl("_assert_async.msg", _assert, "PrivateUse1")
    aten.impl("_functional_assert_async.msg", _assert_functionally, "PrivateUse1")


def _assert(ok: torch.Tensor, message: str | None = None) -> None:
    if message is None:
        message = "Expected Tensor with single nonzero value, but got zero"
    torch.ops.oxitorch._assert(ok, message or "Assertion is failed")


def _assert_functionally(ok: torch.Tensor, message: str, dep_token: torch.Tensor) -> torch.Tensor:
    _assert(ok, message)
    return dep_token.clone()
