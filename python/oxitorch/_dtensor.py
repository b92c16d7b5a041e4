"""What DTensor has to know of the device's attention: how it may be sharded, and as a ring for context parallelism.

PyTorch has rules for the attention ops of CUDA. `scaled_dot_product_attention` calls another on devices that are not
PyTorch's own, `aten._scaled_dot_product_fused_attention_overrideable`.
"""

import functools

import torch

from oxitorch import _after_import

# Dimensions of query, key and value, in which parts are computed apart.
_BATCH, _HEADS = 0, 1
_SEQUENCE = 2


def install() -> None:
    """Tells DTensor when it is imported."""
    _after_import.call(
        {
            "torch.distributed.tensor": _register,
            "torch.distributed.tensor.experimental._context_parallel._attention": _add_ring,
        }
    )


def _ops():
    name = "_scaled_dot_product_fused_attention_overrideable"
    return getattr(torch.ops.aten, name).default, getattr(torch.ops.aten, f"{name}_backward").default


@functools.cache
def _add_meta(backward):
    """Shapes of the gradients, which DTensor asks for; PyTorch 2.11 does not know them."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(backward.name(), "Meta"):
        return None

    def gradients(grad_out, query, key, value, attn_bias, grad_input_mask, *others, **named):
        inputs = zip((query, key, value, attn_bias), grad_input_mask, strict=True)
        return tuple(torch.empty_like(x) if wanted and x is not None else None for x, wanted in inputs)

    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl(backward.name().partition("::")[2], gradients)
    return library  # which undoes it when it goes


def _register(tensor) -> None:
    """Batch and heads may be sharded."""
    from torch.distributed.tensor.experimental import register_sharding

    whole = tensor.Replicate()

    def ways(bias):
        """For each dimension that may be sharded, or none: placements of queries, of the mask, and of its gradient."""
        yield whole, whole, whole
        for dim in (_BATCH, _HEADS):
            own = None if bias is None else bias.ndim - 4 + dim
            if own is None or own < 0 or bias.shape[own] == 1:  # each part is masked alike
                yield tensor.Shard(dim), whole, tensor.Partial()
            else:
                yield tensor.Shard(dim), tensor.Shard(own), tensor.Shard(own)

    def placed(args, places):
        """Those of the tensors among arguments; offsets of sequences and the generator's state are whole."""
        tensors = [hasattr(arg, "placements") for arg in args]
        return [places.get(i, whole) if is_tensor else None for i, is_tensor in enumerate(tensors)]

    forward, backward = _ops()
    _add_meta(backward)

    @register_sharding(forward)
    def _(*args, **named):
        bias = args[3] if len(args) > 3 else None
        # Output, logsumexp, and the generator's state; there are no offsets, sizes are numbers, a mask is never made.
        return [
            ([q, q, None, None, None, None, whole, whole, None], placed(args, {0: q, 1: q, 2: q, 3: mask}))
            for q, mask, _ in ways(bias)
        ]

    @register_sharding(backward)
    def _(*args, **named):
        bias = args[4]
        wanted = bias is not None and args[5][3]
        queries = (0, 1, 2, 3, 6, 7)  # and what has their dimensions
        return [
            ([q, q, q, grad if wanted else None], placed(args, dict.fromkeys(queries, q) | {4: mask}))
            for q, mask, grad in ways(bias)
        ]


def _add_ring(theirs) -> None:
    """Within `context_parallel` the sequence is sharded, and keys and values go around the ranks."""
    from torch.distributed.tensor import DTensor

    forward, backward = _ops()

    def local(x):
        return x.to_local() if isinstance(x, DTensor) else x

    def like(query, results):
        return tuple(DTensor.from_local(r, query.device_mesh, query.placements, run_check=False) for r in results)

    def named(op, args, kwargs):
        """The arguments by their names, with the parts that this rank has."""
        all_of = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
        all_of |= dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        if all_of["attn_bias"] is not None:
            raise NotImplementedError("context parallel attention takes no mask: is_causal=True is all that it knows")
        return {name: local(x) for name, x in all_of.items()}

    def run(op, args, kwargs):
        query = args[0]
        given = named(op, args, kwargs)
        del given["return_debug_mask"]
        results = theirs._templated_ring_attention(query.device_mesh.get_group(), _SEQUENCE, op, **given)
        return *like(query, results[:2]), *results[2:]

    def run_backward(op, args, kwargs):
        query = args[1]
        given = named(op, args, kwargs)
        results = theirs._templated_ring_attention_backward(
            query.device_mesh.get_group(), _SEQUENCE, op, grad_out_name="grad_out", **given
        )
        return *like(query, results[:3]), None

    theirs.custom_ops |= {forward: run, backward: run_backward}
