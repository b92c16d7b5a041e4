"""What happens when: events, streams, errors that come later."""

import torch

from oxitorch.selftest import Found, check


@check("events and streams")
def events_and_streams() -> Found:
    """Events happen in order and take time; streams are accepted and waited for."""
    x = torch.randn(512, 512, device="tpu")
    (x @ x).sum().item()
    begin, end = (torch.tpu.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(8):
        x = (x @ x).tanh()
    end.record()
    end.synchronize()
    assert begin.query() and end.query(), "what was waited for has not happened"
    took = begin.elapsed_time(end)
    assert took > 0, f"eight products took {took} ms"
    with torch.tpu.stream(torch.tpu.Stream()):
        y = x + 1
    torch.tpu.current_stream().synchronize()
    assert torch.equal(y.cpu(), (x.cpu() + 1)), "what another stream computed is wrong"
    return Found(f"eight products of 512 x 512 in {took:.2f} ms", {"products_ms": took})


@check("errors that come later")
def errors_that_come_later() -> Found:
    """An index out of range is an error at the next wait, names its line, and the device works on."""
    table = torch.arange(10.0, device="tpu")
    index = torch.tensor([1, 99], device="tpu")
    torch.tpu.synchronize()
    # As a user's file: lines of this package are not named.
    script = compile("found = table[index]\nfound.cpu()", "a_users_script.py", "exec")
    try:
        exec(script, {"table": table, "index": index})
    except (IndexError, RuntimeError) as e:
        kind, text = type(e).__name__, str(e)
    else:
        raise AssertionError("index 99 of 10 was read")
    assert "a_users_script.py:1" in text, f"the line is not named: {text}"
    assert (table + 1)[3].item() == 4, "the device does not work on"
    return Found(f"{kind}: {text.splitlines()[0][:100]}")
