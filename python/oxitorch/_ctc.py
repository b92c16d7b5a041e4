"""`ctc_loss` with lengths that are tensors of the host, as scripts have them.

PyTorch's function reads them, but where a dispatch mode is on, as in functions of `torch.tpu.jit`: there it computes
with them beside tensors of the device.
"""

import torch

_libraries: list[torch.library.Library] = []


def install() -> None:
    aten = torch.library.Library("aten", "IMPL")
    _libraries.append(aten)
    aten.impl("ctc_loss.Tensor", _ctc_loss, "AutogradPrivateUse1")


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, *others):
    if torch._C._len_torch_dispatch_stack():
        input_lengths, target_lengths = (x.to(log_probs.device) for x in (input_lengths, target_lengths))
    return torch.ops.aten.ctc_loss.Tensor.decompose(log_probs, targets, input_lengths, target_lengths, *others)
