"""`ctc_loss` with lengths that are tensors of the host, as scripts have them.

PyTorch's function reads them, but where a dispatch mode is on, as in functions of `torch.tpu.jit`: there it computes
with them beside tensors of the device.
"""

import torch

CTC = torch.ops.aten.ctc_loss.Tensor
_libraries: list[torch.library.Library] = []


def install() -> None:
    aten = torch.library.Library("aten", "IMPL")
    _libraries.append(aten)
    aten.impl("ctc_loss.Tensor", ctc_loss, "AutogradPrivateUse1")


def ctc_loss(log_probs, targets, input_lengths, target_lengths, *others):
    if torch._C._len_torch_dispatch_stack():
        input_lengths, target_lengths = (x.to(log_probs.device) for x in (input_lengths, target_lengths))
    return CTC.decompose(log_probs, targets, input_lengths, target_lengths, *others)
