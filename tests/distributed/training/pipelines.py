"""Pipelines of stages."""

import torch
from torch import nn

from tests.distributed.ranks import case
from tests.distributed.training.models import close, rank, size


class Stage(nn.Module):
    def __init__(self, i):
        super().__init__()
        torch.manual_seed(i)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def pipeline(schedule, per_rank=1):
    """A step of a pipeline with so many stages on a rank gives the gradients and the loss of the whole on the CPU."""
    from torch.distributed.pipelining import PipelineStage

    x, target = torch.arange(64.0).view(8, 8) / 64, torch.ones(8, 8)
    stages = size() * per_rank
    whole = nn.Sequential(*(Stage(i) for i in range(stages)))
    wanted = nn.functional.mse_loss(whole(x), target)
    wanted.backward()
    numbers = range(rank(), stages, size())
    own = [Stage(i).to("tpu") for i in numbers]
    device = torch.device("tpu", torch.tpu.current_device())
    made = [PipelineStage(m, i, stages, device) for m, i in zip(own, numbers, strict=True)]
    batches = max(4, size())
    steps = schedule(made[0] if per_rank == 1 else made, n_microbatches=batches, loss_fn=nn.functional.mse_loss)
    losses = []
    last = {"target": target.to("tpu"), "losses": losses} if rank() == size() - 1 else {}
    steps.step(*([x.to("tpu")] if rank() == 0 else []), **last)
    if last:
        torch.testing.assert_close(torch.stack(losses).mean().detach().cpu(), wanted.detach())
    for m, i in zip(own, numbers, strict=True):
        close({"w": m.linear.weight.grad}, {"w": whole[i].linear.weight.grad})


@case
def pipelines():
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    for schedule in (ScheduleGPipe, Schedule1F1B):
        pipeline(schedule)


@case
def pipelines_of_several_stages():
    from torch.distributed.pipelining import (
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
    )

    for schedule in (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble):
        pipeline(schedule, 2)
