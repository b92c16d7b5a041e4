"""FullyShardedDataParallel."""

import copy
from contextlib import nullcontext

import torch

from tests.distributed.ranks import case
from tests.distributed.training.models import adamw, alone, batch, close, loss_of, made, model, train


def fsdp1_of(m, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    return FSDP(m.to("tpu"), device_id=torch.device("tpu", torch.tpu.current_device()), use_orig_params=True, **options)


def whole_parameters(m):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    with FSDP.summon_full_params(m):
        return {name: p.detach().cpu().clone() for name, p in m.module.named_parameters()}


@case
def fsdp1():
    m = fsdp1_of(model())
    train(m, adamw(m), "tpu")
    close(whole_parameters(m), alone()[0])


@case(ranks=(4,))
def fsdp1_in_other_ways():
    from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for options, optimizer, tolerance in (
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, torch.optim.AdamW, {}),
        ({"cpu_offload": CPUOffload(offload_params=True)}, torch.optim.AdamW, {}),
        ({"mixed_precision": half}, torch.optim.SGD, {"rtol": 5e-2, "atol": 5e-2}),
    ):
        m = fsdp1_of(model(), **options)
        train(m, made(optimizer, m), "tpu")
        close(whole_parameters(m), alone(optimizer)[0], **tolerance)


@case(ranks=(4,))
def fsdp1_clips_accumulates_and_saves():
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    m = fsdp1_of(model())
    train(m, torch.optim.SGD(m.parameters(), lr=1e-2), "tpu", step=lambda: m.clip_grad_norm_(0.1))
    wanted, _ = alone(torch.optim.SGD, step=lambda x: torch.nn.utils.clip_grad_norm_(x.parameters(), 0.1))
    close(whole_parameters(m), wanted)
    m, one = fsdp1_of(model()), model()
    for i in range(2):
        with m.no_sync() if i == 0 else nullcontext():
            loss_of(m(batch(i).to("tpu")), batch(i).to("tpu")).backward()
        loss_of(one(batch(i, -1)), batch(i, -1)).backward()
    with FSDP.summon_full_params(m, with_grads=True):
        close(*({name: p.grad for name, p in x.named_parameters()} for x in (m.module, one)))
    m = fsdp1_of(model())
    optimizer = adamw(m)
    train(m, optimizer, "tpu")
    states = copy.deepcopy(get_state_dict(m, optimizer))
    train(m, optimizer, "tpu")
    other = fsdp1_of(model())
    again = adamw(other)
    set_state_dict(other, again, model_state_dict=states[0], optim_state_dict=states[1])
    train(other, again, "tpu")
    close(whole_parameters(other), whole_parameters(m))
