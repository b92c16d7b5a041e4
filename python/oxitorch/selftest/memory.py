"""What is allocated, given away, counted and refused."""

import gc

import torch

from oxitorch.selftest import Found, check

MIB = 1 << 20


@check("donation")
def donation() -> Found:
    """A tensor that is overwritten again and again needs room for itself and not for each result."""
    size = 64 * MIB
    x = torch.zeros(size // 4, device="tpu")
    torch.tpu.synchronize()
    torch.tpu.reset_metrics()
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.memory_allocated()
    for _ in range(8):
        x += 1
        torch.tpu.synchronize()
    peak = torch.tpu.max_memory_allocated() - before
    given = torch.tpu.metrics()["donations"]
    assert x[-1].item() == 8, "the sum is wrong"
    assert given > 0, "no input was given to its result"
    assert peak < size, f"{peak / MIB:.0f} MiB more at the peak, for a tensor of {size // MIB} MiB"
    return Found(f"{given} inputs overwritten by their results", {"donations": given, "peak_more_bytes": peak})


@check("accounts")
def accounts() -> Found:
    """What is counted here, and what the plugin counts, if it does, go with what is allocated."""
    gc.collect()
    size = 64 * MIB
    before, (free, total) = torch.tpu.memory_stats(), torch.tpu.mem_get_info()
    x = torch.ones(size, dtype=torch.uint8, device="tpu")
    full = torch.tpu.memory_stats()
    del x
    after = torch.tpu.memory_stats()
    assert 0 < free <= total, f"{free} free of {total}"
    text = f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} free; a tensor of 64 MiB takes"
    measured = {"total_bytes": total, "free_bytes": free}
    for who, key in (("here", "allocated_bytes.all.current"), ("the plugin", "plugin_bytes.current")):
        if key not in before:
            text += f", {who} does not count"
            continue
        held, left = full[key] - before[key], after[key] - before[key]
        assert size <= held <= size + 4 * MIB, f"{who}: a tensor of {size} bytes is counted as {held}"
        assert left <= 4 * MIB, f"{who}: {left} bytes are still counted when it is gone"
        text += f" {held / MIB:.1f} ({who})"
        measured |= {f"{key}.held": held, f"{key}.left": left}
    return Found(text, measured)


@check("out of memory")
def out_of_memory() -> Found:
    """A tensor that cannot fit is torch's own error, and the device works on."""
    kept = torch.arange(1000, device="tpu")
    _, total = torch.tpu.mem_get_info()
    try:
        x = torch.ones(2 * total, dtype=torch.uint8, device="tpu")
        torch.tpu.synchronize()
        del x
        raise AssertionError(f"{2 * total} bytes did fit into {total}")
    except torch.OutOfMemoryError as e:
        text = str(e).splitlines()[0]
    assert (kept + 1).sum().item() == 500500, "what was there before is lost"
    return Found(text[:120])
