"""DLPack: a tensor of the device goes to other libraries as a copy on the host, and what they give is copied to it.

The protocol has no number for such a device, and its memory is not the host's. https://dmlc.github.io/dlpack
A capsule of the older `torch.utils.dlpack.to_dlpack` stays on the device: PyTorch alone can read it.
"""

import functools

import torch

NAME = "tpu"
_HOST = (1, 0)  # kDLCPU


def install() -> None:
    tensor = torch.Tensor
    tensor.__dlpack_device__ = _device(tensor.__dlpack_device__)
    tensor.__dlpack__ = _export(tensor.__dlpack__)
    for module in (torch, torch.utils.dlpack):
        module.from_dlpack = _import(module.from_dlpack)


def _is_ours(x) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == NAME


def _device(theirs):
    @functools.wraps(theirs)
    def __dlpack_device__(self):
        return _HOST if _is_ours(self) else theirs(self)

    return __dlpack_device__


def _export(theirs):
    @functools.wraps(theirs)
    def __dlpack__(self, **kwargs):
        if not _is_ours(self):
            return theirs(self, **kwargs)
        _refuse_sharing(kwargs.pop("copy", None))
        kwargs.pop("stream", None)  # the copy is whole when it is there
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return theirs(self.cpu(), **kwargs)

    return __dlpack__


def _refuse_sharing(copy: bool | None) -> None:
    if copy is False:
        raise BufferError(
            f"a tensor on '{NAME}' shares no memory with other libraries, and copy=False forbids a copy\n"
            "hint: leave `copy` out"
        )


def _import(theirs):
    @functools.wraps(theirs)
    def from_dlpack(ext_tensor, *, device=None, copy=None):
        if not _is_ours(ext_tensor):
            if device is None or torch.device(device).type != NAME:
                return theirs(ext_tensor, device=device, copy=copy)
            _refuse_sharing(copy)
            return theirs(ext_tensor).to(device)
        if ext_tensor.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        same = device is None or torch.device(device) in (ext_tensor.device, torch.device(NAME))
        if same:
            return ext_tensor.clone() if copy else ext_tensor.detach()
        _refuse_sharing(copy)
        return ext_tensor.to(device)

    return from_dlpack
