"""What `torch.compile` without a backend does for graphs on the device.

PyTorch's default backend, inductor, generates code for "tpu" through another package. PyTorch can change the default
for all devices only (`torch.compiler.set_default_backend`), so the default that is set here looks at each graph: ours
are played by backend "tpu", all others go on to inductor. Where PyTorch has no such call, and where inductor was asked
for by name, inductor's code generator for the device is one that raises what to do.

Dynamo and inductor are slow to import, so all this is done when they are imported.
"""

import torch

from oxitorch import _after_import


def install() -> None:
    """Does it now for what is imported, else when it is."""
    _after_import.call(
        {
            "torch._dynamo.trace_rules": _skip_modules,
            "torch._dynamo.backends.registry": _set_default,
            "torch._inductor.codegen.common": _refuse_inductor,
        }
    )


def _skip_modules(trace_rules) -> None:
    """`torch.tpu` asks the core, where Dynamo cannot follow: its functions run between graphs, as `torch.cuda`'s do.
    And what runs inside of PyTorch's operations is not for Dynamo.
    """
    for name in ("_device", "compiler", "memory", "modes", "programs", "random", "streams", "tracing"):
        trace_rules.add(f"oxitorch.tpu.{name}")
    trace_rules.add("oxitorch._packed")
    trace_rules.add("oxitorch._rnn")


def _set_default(registry) -> None:
    if hasattr(registry, "set_default_backend") and registry.get_default_backend() == "inductor":
        registry.set_default_backend(tpu_or_inductor)


def tpu_or_inductor(gm, example_inputs, *, mode=None, options=None, **_):
    """A backend of Dynamo: "tpu" for graphs with tensors on the device, inductor for others."""
    if _on_device(gm, example_inputs):
        from oxitorch import _compile

        return _compile.tpu(gm, example_inputs, mode=mode, options=options)
    patches = dict(options or {})
    if mode and mode != "default":
        patches.update(torch._inductor.list_mode_options(mode))
    patches = {name.replace("-", "_"): value for name, value in patches.items()}
    return torch._dynamo.lookup_backend("inductor")(gm, example_inputs, config_patches=patches)


def _on_device(gm, example_inputs) -> bool:
    def values():
        yield from example_inputs
        yield from gm.parameters()
        yield from gm.buffers()
        for node in gm.graph.nodes:
            yield node.meta.get("example_value")

    return any(getattr(getattr(v, "device", None), "type", None) == "tpu" for v in values())


class _Refuse(type):
    """The type of a class that raises whatever is done with it."""

    def __getattr__(cls, name):
        raise RuntimeError(
            'inductor generates no code for oxitorch\'s device "tpu"\nhint: torch.compile(model, backend="tpu")'
        )

    def __call__(cls, *args, **kwargs):
        return cls.create


class _Refusal(metaclass=_Refuse):
    """In place of a scheduler and of a wrapper's code generator."""


def _refuse_inductor(common) -> None:
    common.register_backend_for_device("tpu", _Refusal, _Refusal, _Refusal, _Refusal)
