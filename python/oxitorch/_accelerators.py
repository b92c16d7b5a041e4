"""CUDA beside the device: a process has one accelerator, and it is CUDA until the device is in use.

A backward takes streams of PyTorch's accelerator, which a device from outside is as soon as it is registered: that of
CUDA tensors then ends with an internal assertion (pytorch/pytorch#161129). So where PyTorch has CUDA and the machine a
GPU, the core says which it is (`crates/torch/src/accelerator.rs`), and backwards of CUDA tensors are announced here.
"""

import functools

import torch

from oxitorch import _core


def install() -> None:
    """Lets scripts that train on CUDA do so, although the device is registered. Nothing where PyTorch has no GPU."""
    if torch.version.cuda is None or not _core.has_gpu():
        return
    share()


def share() -> None:
    """Makes CUDA the accelerator until the device is started, and of backwards of CUDA tensors afterwards."""
    shared = _core.share_accelerator()
    run = torch.autograd._engine_run_backward

    @functools.wraps(run)
    def of_its_accelerator(tensors, *args, **kwargs):
        if not any(map(_is_on_cuda, tensors)):
            return run(tensors, *args, **kwargs)
        if not shared:
            raise RuntimeError(
                "this PyTorch takes streams of one kind of device in a backward, and with oxitorch that is 'tpu': "
                "tensors on CUDA have no backward\n"
                "hint: set TORCH_DEVICE_BACKEND_AUTOLOAD=0 for scripts that train on CUDA"
            )
        _core.backward_elsewhere(True)
        try:
            return run(tensors, *args, **kwargs)
        finally:
            _core.backward_elsewhere(False)

    # Both names are called.
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = of_its_accelerator


def _is_on_cuda(root: torch.Tensor | torch.autograd.graph.GradientEdge) -> bool:
    if isinstance(root, torch.Tensor):
        return root.is_cuda
    return root.node._input_metadata[root.output_nr].device.type == "cuda"
