"""A function's program before it is called, in the stages that JAX has: lowered, compiled."""

from typing import Any

from oxitorch import _activate


class Lowered:
    """A function's program for some arguments, as it goes to the compiler, which begins to work on it."""

    def __init__(self, jitted, number: int):
        self._jitted = jitted
        self._number = number

    def as_text(self) -> str:
        """The program in StableHLO."""
        return self._shown().stablehlo

    def compile(self) -> "Compiled":
        """Waits for the compiler.

        Raises:
            RuntimeError: it cannot compile the program.
        """
        return Compiled(self._jitted, self._shown())

    def cost_analysis(self) -> dict[str, float]:
        """As `Compiled.cost_analysis`, for which it waits for the compiler."""
        return self.compile().cost_analysis()

    def _shown(self):
        graph = _graph(self._number)
        _ = graph.stablehlo  # waits
        return graph

    def __repr__(self) -> str:
        return f"<lowered: {_graph(self._number)!r}>"


class Compiled:
    """A compiled program. A call of it is a call of the function that it is of."""

    def __init__(self, jitted, graph):
        self._jitted = jitted
        self._graph = graph

    def __call__(self, *args, **kwargs) -> Any:
        return self._jitted(*args, **kwargs)

    def as_text(self) -> str | None:
        """The program as the compiler left it; None where the plugin does not give it in a form that can be shown."""
        return self._graph.optimized_hlo

    def cost_analysis(self) -> dict[str, float]:
        """The compiler's estimates, under its names: "flops", "bytes accessed" and more."""
        return self._graph.cost

    def memory_analysis(self) -> dict[str, int]:
        """Bytes of "arguments", "outputs", "aliased" (arguments whose memory results take), "temporaries",
        "host_temporaries" (in the memory of the host), "peak" and "code", as the compiler says; empty where it says
        nothing.
        """
        return self._graph.memory_bytes

    def __repr__(self) -> str:
        return f"<compiled: {self._graph!r}>"


def _graph(number: int):
    import json

    from oxitorch.tpu.programs import Graph

    facts = next((json.loads(f) for f in _activate.core().graphs(number)), None)
    if facts is None or facts.pop("number") != number:
        raise RuntimeError("the program is forgotten: 4096 others came after it")
    return Graph(number, facts)
