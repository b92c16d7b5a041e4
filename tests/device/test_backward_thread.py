"""Backward passes run in the thread that asks for them, as on the CPU, and record what they record in autograd's."""

import threading

import pytest
import torch
from support import DEVICE
from torch.utils.checkpoint import checkpoint


def thread_of_backward():
    """The thread in which a backward runs that this one asks for."""
    seen = []
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    y = (x * 2).exp()
    y.register_hook(lambda g: seen.append(threading.get_ident()))
    y.sum().backward()
    return seen[0]


def in_a_new_thread(f):
    found = []

    def run():
        try:
            found.append((threading.get_ident(), f()))
        except Exception as e:
            found.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def at_once():
    return thread_of_backward()


def behind_inference():
    with torch.inference_mode():
        torch.ones(2, device=DEVICE).sum()
    return thread_of_backward()


def behind_one_that_turned_it_off():
    with torch.autograd.set_multithreading_enabled(False):
        torch.ones(2, device=DEVICE).sum()
    return thread_of_backward()


@pytest.mark.parametrize("begins", [at_once, behind_inference, behind_one_that_turned_it_off])
def test_a_backward_runs_where_it_is_asked_for(begins):
    own, ran_in = in_a_new_thread(begins)
    assert ran_in == own


def test_a_user_may_have_it_run_elsewhere():
    assert thread_of_backward() == threading.get_ident()
    with torch.autograd.set_multithreading_enabled(True):
        assert thread_of_backward() != threading.get_ident()
        assert thread_of_backward() != threading.get_ident()
    assert thread_of_backward() == threading.get_ident()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2  # this line


def plain(x):
    return (x * 3).exp().sum()


def twice_in_a_graph(x):
    y = x.sin()
    return (y * y + x).sum()


def with_a_function(x):
    return Doubled.apply(x).exp().sum()


def computed_again(x):
    return checkpoint(lambda x: (x * 3).exp(), x, use_reentrant=False).sum()


def computed_again_by_a_backward(x):
    return checkpoint(lambda x: (x * 3).exp(), x, use_reentrant=True).sum()


@pytest.mark.parametrize(
    "forward", [plain, twice_in_a_graph, with_a_function, computed_again, computed_again_by_a_backward]
)
def test_lines_and_programs_are_those_of_autograds_thread(forward):
    def recorded(elsewhere):
        x = torch.full((5,), 0.5, device=DEVICE, requires_grad=True)
        torch.tpu.synchronize()
        before = {g.id: g.launches for g in torch.tpu.graphs()}
        with torch.autograd.set_multithreading_enabled(elsewhere):
            (2 * forward(x)).backward()
            forward(x).backward()  # which is added to what is there
        torch.tpu.synchronize()
        launched = [g for g in torch.tpu.graphs() if g.launches != before.get(g.id)]
        return x.grad.cpu(), [[(op["op"], op["line"]) for op in g.ops] for g in launched]

    (gradient, ops), (expected, in_autograds) = recorded(False), recorded(True)
    assert torch.equal(gradient, expected)
    assert ops
    assert ops == in_autograds
    x = torch.full((5,), 0.5, requires_grad=True)
    (3 * forward(x)).backward()
    torch.testing.assert_close(gradient, x.grad)
