"""CUDA beside the device: PyTorch's accelerator is CUDA until the device is in use. No GPU is needed: a process may be
told to share although there is none.
"""

import functools

import pytest


@pytest.fixture
def python(python):
    """What is replaced is replaced for the whole process."""
    return functools.partial(python, fresh=True)


BESIDE = """
import torch
from oxitorch import _accelerators, _core


def accelerator():
    return str(torch.accelerator.current_accelerator())


class OnCuda(torch.Tensor):
    is_cuda = True


seen = []
run = torch.autograd._engine_run_backward
torch.autograd._engine_run_backward = lambda *args, **kwargs: seen.append(accelerator()) or run(*args, **kwargs)
assert accelerator() == "tpu"
_accelerators.share()
print("before:", accelerator(), _core.is_started())


def backward(device, kind=torch.Tensor):
    x = torch.ones(3, device=device, requires_grad=True)
    (x * 2).sum().as_subclass(kind).backward()
    assert x.grad.tolist() == [2, 2, 2]


backward("cpu")
print("on the CPU:", seen.pop(), _core.is_started())
backward("tpu")
print("on the device:", seen.pop())
backward("cpu", OnCuda)
print("on CUDA:", seen.pop())
edge = torch.autograd.graph.get_gradient_edge((torch.ones(3, requires_grad=True) * 2).sum())
torch.autograd.backward([edge], [torch.ones(())])
print("of an edge:", seen.pop())
try:
    torch.autograd.grad(torch.ones(()).as_subclass(OnCuda), [torch.ones(())])
except RuntimeError:
    print("after an error:", seen.pop(), accelerator())
"""


def test_the_accelerator_is_cuda_until_the_device_is_used_and_for_backwards_on_cuda(python):
    said = dict(line.split(": ") for line in python(BESIDE).stdout.splitlines())
    theirs = said["on CUDA"]
    assert theirs in ("cuda", "None")  # a PyTorch that knows CUDA, or not
    assert said == {
        "before": f"{theirs} False",
        "on the CPU": f"{theirs} False",
        "on the device": "tpu",
        "on CUDA": theirs,
        "of an edge": "tpu",
        "after an error": f"{theirs} tpu",
    }


def test_where_that_cannot_be_a_backward_on_cuda_is_refused(python):
    code = """
import torch
from oxitorch import _accelerators, _core

_core.share_accelerator = lambda: False
_accelerators.share()
x = torch.ones(3, device="tpu", requires_grad=True)
x.sum().backward()
x.sum().cpu().as_subclass(type("OnCuda", (torch.Tensor,), {"is_cuda": True})).backward()
"""
    done = python(code, check=False)
    assert done.returncode == 1
    assert "tensors on CUDA have no backward" in done.stderr and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr


def test_nothing_is_shared_where_there_is_no_gpu(python):
    code = """
import torch
from oxitorch import _accelerators, _core

def refuse():
    raise AssertionError("shared")

_core.has_gpu, _core.share_accelerator = lambda: False, refuse
before = torch.autograd._engine_run_backward
_accelerators.install()
assert torch.autograd._engine_run_backward is before
"""
    python(code)
