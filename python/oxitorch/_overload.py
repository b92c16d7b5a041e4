"""Operations by their names."""

import torch


def overload(name: str):
    """PyTorch's object for an overload, of "aten::add.Tensor" `torch.ops.aten.add.Tensor`."""
    namespace, name = name.split("::")
    name, _, of = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), of or "default")
