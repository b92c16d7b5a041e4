"""Programs for sizes that vary, compiled before the first call that needs them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from steps import training
from support import DEVICE, assert_same, to_device
from torch import nn
from torch.tpu import Dim


def programs():
    torch.tpu.synchronize()
    return torch.tpu.metrics()["programs"]


def test_a_training_step(fused):
    """Calls of all sizes compile nothing then, and are what they were."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = copy.deepcopy(reference).to(DEVICE)

    def step_of(model):
        return training(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    f = torch.tpu.jit(step_of(model), dynamic={"x": {1: Dim(buckets=[4, 8, 20])}})
    expected = step_of(reference)
    x = torch.randn(2, 3, 4)
    assert_same(f(x.to(DEVICE)), expected(x), "the first step")  # makes the state
    compiled = f.warm_up(x.to(DEVICE))
    assert len(compiled) == 3 and all(c.cost_analysis()["flops"] > 0 for c in compiled)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_same(p.detach(), q.detach(), name, rtol=1e-4, atol=1e-6)  # nothing was computed
    before = programs()
    f.warm_up(x.to(DEVICE))
    for n in (2, 20, 5, 8, 4, 13, 7):
        x = torch.randn(2, n, 4)
        assert_same(f(x.to(DEVICE)), expected(x), str(n), rtol=1e-4, atol=1e-6)
    assert programs() == before


def test_before_the_first_call(fused):
    """Sizes that are one `Dim` go together, others in all combinations; a number may be among the arguments."""
    rows, columns = Dim(max=24), Dim(buckets=[4, 6])
    f = torch.tpu.jit(
        lambda x, y, scale: (x @ y).sum() * scale, dynamic={"x": {0: rows, 1: columns}, "y": {0: columns, 1: rows}}
    )
    assert len(f.warm_up(torch.ones(2, 3, device=DEVICE), torch.ones(3, 2, device=DEVICE), 2.0)) == 4
    before = programs()
    for m, n in ((3, 2), (20, 5), (17, 3), (10, 5), (24, 5), (20, 6), (16, 4)):
        x, y = torch.randn(m, n), torch.randn(n, m)
        result = f(to_device(x), to_device(y), 2.0)
        assert_same(result, (x @ y).sum() * 2, f"{m}, {n}", rtol=1e-4, atol=1e-4)
    assert programs() == before


def means_of_four(x):
    return F.pad(x, (0, -x.shape[-1] % 4)).unflatten(-1, (-1, 4)).mean(-1)


def halves(x):
    if x.shape[-1] % 2:
        raise ValueError("an odd number")
    return x.unflatten(-1, (2, -1)).sum(-2)


@pytest.mark.parametrize(
    ("function", "programs_", "sizes"),
    [(means_of_four, 4, (31, 32, 24, 17, 5, 16, 12, 15)), (halves, 2, (32, 30, 6, 16))],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_every_program_of_a_bound(function, programs_, sizes, fused):
    """Of whole parts, and of what is left over; a function may refuse such sizes."""
    f = torch.tpu.jit(function, dynamic={"x": {1: Dim(max=32)}})
    assert len(f.warm_up(torch.ones(3, 6, device=DEVICE))) == programs_
    before = programs()
    for n in sizes:
        x = torch.randn(3, n)
        assert_same(f(x.to(DEVICE)), function(x), str(n), strides=False, rtol=1e-5, atol=1e-5)
    assert programs() == before


def makes_its_state(x, kept=[]):  # noqa: B006
    if not kept:
        kept.append(torch.zeros(4, device=DEVICE))
    return (x.sum(0) + kept[0].add_(1)) * 2


REFUSED = {
    "nothing varies": (lambda x: x * 2, None, ValueError, "dynamic= names none here"),
    "no largest size": (lambda x: x * 2, Dim(), ValueError, "give it max= or buckets="),
    "too many": (lambda x: x * 2, Dim(max=1000, multiple=2), ValueError, "there are 500 programs for all bounds"),
    "cannot be bounded": (
        lambda x: torch.stack([part[0] for part in x.split(3)]),
        Dim(max=16),
        RuntimeError,
        "torch.tpu.explain",
    ),
    "a state": (makes_its_state, Dim(max=16), RuntimeError, "called once before"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, fused):
    f, dim, error, says = REFUSED[name]
    f = torch.tpu.jit(f, dynamic=None if dim is None else {"x": {0: dim}})
    x = torch.randn(5, 4, device=DEVICE)
    with pytest.raises(error, match=says):
        f.warm_up(x)
    f(x).cpu()  # a call is as ever
