"""`torch.compile(model, backend="tpu")`.

Dynamo captures graphs and guards them, AOTAutograd makes forward and backward graphs of ATen operations of them, and
these are played on the device: the engine records the operations like any others, so a compiled region shares windows,
programs and caches with the code around it.

PyTorch loads this module, through the entry point group `torch_dynamo_backends`, when the backend is first asked for;
Dynamo is slow to import.
"""

import functools

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule


def tpu(gm: GraphModule, example_inputs: list, *, mode: str | None = None, options: dict | None = None, **_):
    """The backend. XLA has one level of effort, so every `mode` is the same.

    Raises:
        RuntimeError: `options` are given; XLA's own are set by `torch.tpu.compiler.custom_compiler_options`.
    """
    if options:
        raise RuntimeError(
            f"backend 'tpu' has no options, got {sorted(options)}\n"
            "hint: torch.tpu.compiler.custom_compiler_options sets XLA's"
        )
    return _backend()(gm, example_inputs)


@functools.cache
def _backend():
    # Writes to arguments stay in the graphs, as one copy_ each at the end. Each intermediate value that the backward
    # needs is saved: where forward and backward become one program, XLA decides what to keep.
    return aot_autograd(fw_compiler=_play, keep_inference_input_mutations=True)


def _play(gm: GraphModule, _example_inputs):
    player = _Player(gm)

    def play(args: list):
        given = list(args)
        args.clear()  # what only the graph still needs ends when the graph is done with it
        return player.run(*given)

    play._boxed_call = True
    return play


class _Player(torch.fx.Interpreter):
    """Runs a graph operation by operation.

    The graph was made from shapes and strides that PyTorch's meta functions foretold. Where an operation of ours gives
    other strides, its result is copied into the foretold ones: the graph may go on to make views that depend on them.
    """

    def run_node(self, n):
        result = super().run_node(n)
        if n.op != "call_function":
            return result
        foretold = n.meta.get("val")
        if isinstance(foretold, (list, tuple)) and isinstance(result, (list, tuple)):
            pairs = zip(result, foretold, strict=False)
            return type(result)(_restrided(r, f) for r, f in pairs)
        return _restrided(result, foretold)

    def call_function(self, target, args, kwargs):
        # With sizes that are only known now, the strides cannot be compared; this copies where a view is not possible.
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def _restrided(result, foretold):
    if not isinstance(result, torch.Tensor) or not isinstance(foretold, torch.Tensor) or result.layout != torch.strided:
        return result
    shape, strides = tuple(foretold.shape), tuple(foretold.stride())
    if not all(type(n) is int for n in shape + strides) or result.numel() == 0:
        return result
    if all(n == 1 or a == b for n, a, b in zip(shape, result.stride(), strides, strict=True)):
        return result
    return torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device).copy_(result)
