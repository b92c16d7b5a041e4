"""Calls of functions that are one program go past PyTorch's dispatcher, but for profilers."""

import threading

import pytest
import torch
from oxitorch import _core
from support import DEVICE, assert_close, to_device
from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def step():
    f = torch.tpu.jit(lambda w, x: ({k: v + x for k, v in w.items()}, x.sum()))
    weights = {str(i): to_device(torch.full((3,), float(i))) for i in range(4)}
    x = to_device(torch.arange(3.0))
    for _ in range(2):
        f(weights, x)
    return f, weights, x


def is_right(done):
    sums, total = done
    for i in range(4):
        assert sums[str(i)].tolist() == [i, i + 1, i + 2]
    assert total.item() == 3


def test_the_tensors_of_this_pytorch_are_found():
    assert _core.tensor_place() is not None


def test_modes_see_no_operator_of_it(step):
    f, weights, x = step
    with Ops() as ops:
        done = f(weights, x)
    assert ops.names == []
    is_right(done)


def test_a_profiler_sees_it(step):
    f, weights, x = step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        is_right(f(weights, x))
    assert any(e.key == "oxitorch::_replay" for e in p.key_averages())


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.device(DEVICE)])
def test_what_is_in_force(step, around):
    f, weights, x = step
    with around():
        for _ in range(3):
            is_right(f(weights, x))


def test_other_keys_order_and_parameters(step):
    f, weights, x = step
    keys = ["".join(list(k)) for k in reversed(weights)]
    is_right(f({k: weights[k] for k in keys}, x))
    traces = f.traces
    w = {k: torch.nn.Parameter(v, requires_grad=False) for k, v in weights.items()}
    is_right(f(w, x))
    w["0"].requires_grad_()
    sums, _ = f(w, x)
    assert_close(sums["0"], torch.arange(3.0))
    assert f.traces == traces + 1  # gradients are wanted, and the function was traced without


def test_tensors_of_other_classes():
    class Tagged(torch.Tensor):
        pass

    f = torch.tpu.jit(lambda x: x * 2)
    x = to_device(torch.arange(3.0))
    for given in (x, x.as_subclass(Tagged), x):
        for _ in range(3):
            assert_close(f(given), torch.arange(3.0) * 2)


ODD = {
    "coo": lambda x: x.to(DEVICE).to_sparse(),
    "csr": lambda x: x.to(DEVICE).to_sparse_csr(),
    "coo of the host": lambda x: x.to_sparse(),
    "csr of the host": lambda x: x.to_sparse_csr(),
    "nested of the host": lambda x: torch.nested.nested_tensor([x, x[:1]]),
    "of oneDNN": lambda x: x.to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "meta": lambda x: x.to("meta"),
    "a lazy clone": lambda x: torch._lazy_clone(x.to(DEVICE)),
    "of the host": lambda x: x,
}


@pytest.mark.parametrize("kind", ODD)
def test_tensors_that_no_program_takes_are_errors(kind):
    f = torch.tpu.jit(lambda d: {"y": d["x"] * 2})
    x = torch.arange(12.0).reshape(3, 4)
    for _ in range(2):
        f({"x": to_device(x)})
    odd = ODD[kind](x)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            f({"x": odd})
        assert_close(f({"x": to_device(x)})["y"], x * 2)


def test_views_of_arguments_share_their_storage():
    f = torch.tpu.jit(lambda x: (x[1:], x.view(2, 2), x + 1))
    x = to_device(torch.arange(4.0))
    for _ in range(4):
        tail, square, _ = f(x)
        assert (
            tail.untyped_storage().data_ptr() == square.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        )
        assert_close(tail, torch.arange(1.0, 4.0))


def test_a_donated_argument_says_so():
    f = torch.tpu.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(4):
        x = to_device(torch.arange(3.0))
        assert_close(f(x), torch.arange(1.0, 4.0))
    with pytest.raises(RuntimeError, match="donate_argnums"):
        f(x).tolist()


def test_threads_beside_each_other(step):
    f, weights, x = step
    failed = []

    def work():
        try:
            for _ in range(50):
                is_right(f(weights, x))
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work) for _ in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failed
