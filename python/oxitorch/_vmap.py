"""`vmap(randomness="same", chunk_size=...)` and `chunk_vmap`: each chunk draws what the first one drew.

PyTorch sets the generator of the CPU back for each chunk, and no other; here the device's is set back with it.
"""

import functools

import torch
from torch._functorch import apis, vmap


def install() -> None:
    in_chunks = vmap._chunked_vmap

    @functools.wraps(in_chunks)
    def chunked(func, in_dims, chunks, args_spec, out_dims, randomness, **kwargs):
        if randomness == "same":
            chunks = _with_same_numbers(chunks, in_dims)
        return in_chunks(func, in_dims, chunks, args_spec, out_dims, randomness, **kwargs)

    for module in (vmap, apis):  # of `torch.func.vmap`, and of the older `chunk_vmap`
        module._chunked_vmap = chunked


def _with_same_numbers(chunks, in_dims):
    """The chunks; before each that has rows, the generators are as they were before the first."""
    started = torch.tpu.is_initialized()
    states = torch.tpu.get_rng_state_all() if started else []
    for chunk in chunks:
        if all(dim is None or x.size(dim) for x, dim in zip(chunk, in_dims, strict=True)):
            for i, state in enumerate(states):
                if not torch.equal(torch.tpu.get_rng_state(i), state):
                    torch.tpu.set_rng_state(state, i)
        yield chunk
        if not started and torch.tpu.is_initialized():
            # The first chunk started the device, whose generators began with their seeds, at offset 0.
            started, states = True, [torch.cat([s[:8], torch.zeros_like(s[8:])]) for s in torch.tpu.get_rng_state_all()]
