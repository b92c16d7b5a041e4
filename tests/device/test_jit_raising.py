"""A function of `torch.tpu.jit` that raises while it runs leaves everything as it was, and calls go on from there."""

import copy

import pytest
import torch
from support import DEVICE, assert_close
from torch import nn

WHERE = ["in the forward", "before the step", "in the step", "behind the step"]


class Interrupted(torch.optim.AdamW):
    now = False

    @torch.no_grad()
    def step(self, closure=None):
        if self.now:
            raise KeyboardInterrupt
        return super().step(closure)


class Training:
    def __init__(self, device):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2).to(device)
        self.seen = torch.zeros(2, device=device)
        self.optimizer = Interrupted(self.model.parameters(), lr=0.1)
        self.where = None

    def step(self, x, rate):
        if self.where == "in the forward":
            raise KeyboardInterrupt
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=False)
        y = self.model(x)
        self.seen.add_(y.detach().sum(0))
        loss = y.square().mean()
        loss.backward()
        if self.where == "before the step":
            raise ValueError
        self.optimizer.now = self.where == "in the step"
        self.optimizer.step()
        if self.where == "behind the step":
            raise ValueError
        return loss.detach()

    def everything(self):
        host = lambda x: x.detach().cpu().clone() if isinstance(x, torch.Tensor) else x  # noqa: E731
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        held = [*self.model.parameters(), *[p.grad for p in self.model.parameters()], self.seen]
        state = [{k: host(v) for k, v in s.items()} for s in self.optimizer.state.values()]
        return copy.deepcopy(groups), [host(t) for t in held], state


@pytest.mark.parametrize("numbers", [False, True], ids=["", "numbers"])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("where", WHERE)
def test_what_raises_leaves_everything_as_it_was(where, at, numbers):
    ours, theirs = Training(DEVICE), Training("cpu")
    f = torch.tpu.jit(ours.step)
    for i in range(7):
        x, rate = torch.full((4, 3), 0.1 + i / 10), 0.01 / (1 + i) if numbers else 0.01
        if i == at:
            ours.where, before = where, ours.everything()
            with pytest.raises((KeyboardInterrupt, ValueError)):
                f(x.to(DEVICE), rate)
            ours.where = None
            after = ours.everything()
            assert str(after[0]) == str(before[0])
            for a, b in zip(after[1], before[1], strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
            assert str(after[2]) == str(before[2])
        assert_close(f(x.to(DEVICE), rate), theirs.step(x, rate))
    for a, b in zip(ours.everything()[1], theirs.everything()[1], strict=True):
        assert_close(a, b)
