"""Cases where a process uses more devices than one, as it may on the cpu platform."""

import torch
import torch.distributed as dist

from tests.distributed.ranks import case


def rank():
    return dist.get_rank()


def size():
    return dist.get_world_size()


@case
def a_group_keeps_its_order_over_the_devices_of_a_process():
    """One device is behind the other, on each rank another."""
    busy, idle = (f"tpu:{(rank() + i) % 2}" for i in (0, 1))
    a = torch.ones(200, 200, device=busy)
    first, second = torch.ones(4, device=busy), torch.full((8,), 1.0 + rank(), device=idle)
    for i in range(20):
        a = (a @ a * 1e-3 + i % 7).sin()
        dist.all_reduce(first.add_(a.sum() * 0))
        dist.broadcast(second, 0)
        dist.all_reduce(second)
    torch.testing.assert_close(first.cpu(), torch.full((4,), float(size()) ** 20))
    torch.testing.assert_close(second.cpu(), torch.full((8,), float(size()) ** 20))
