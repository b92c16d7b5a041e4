"""A function's program before it is called, in the stages that JAX has: lowered, compiled.

With collectives of several processes it is several programs.
"""

import json
from typing import Any

from oxitorch import _activate
from oxitorch._graph import Graph


class Lowered:
    """A function's program for some arguments, as it goes to the compiler, which begins to work on it."""

    def __init__(self, jitted, steps: list[int | str]):
        self._jitted = jitted
        # Numbers of programs, and the collectives between them in words.
        self._steps = steps

    def as_text(self) -> str:
        """The program in StableHLO. Collectives between programs are comments."""
        return _text(self._shown(), lambda graph: graph.stablehlo)

    def compile(self) -> "Compiled":
        """Waits for the compiler.

        Raises:
            RuntimeError: it cannot compile the program.
        """
        return Compiled(self._jitted, self._shown())

    def cost_analysis(self) -> dict[str, float]:
        """As `Compiled.cost_analysis`, for which it waits for the compiler."""
        return self.compile().cost_analysis()

    def _shown(self) -> list:
        steps = _steps(self._steps)
        for graph in _graphs(steps):
            _ = graph.stablehlo  # waits
        return steps

    def __repr__(self) -> str:
        return f"<lowered: {_names(_steps(self._steps))}>"


class Compiled:
    """A compiled program. A call of it is a call of the function that it is of."""

    def __init__(self, jitted, steps: list):
        self._jitted = jitted
        # `Graph`s, and the collectives between them in words.
        self._steps = steps

    def __call__(self, *args, **kwargs) -> Any:
        return self._jitted(*args, **kwargs)

    def as_text(self) -> str | None:
        """The program as the compiler left it; None where the plugin does not give it in a form that can be shown."""
        if any(graph.optimized_hlo is None for graph in _graphs(self._steps)):
            return None
        return _text(self._steps, lambda graph: graph.optimized_hlo)

    def cost_analysis(self) -> dict[str, float]:
        """The compiler's estimates, under its names: "flops", "bytes accessed" and more; of several programs sums."""
        total: dict[str, float] = {}
        for graph in _graphs(self._steps):
            for name, value in graph.cost.items():
                total[name] = total.get(name, 0) + value
        return total

    def memory_analysis(self) -> dict[str, int]:
        """Bytes of "arguments", "outputs", "aliased" (arguments whose memory results take), "temporaries",
        "host_temporaries" (in the memory of the host), "peak" and "code", as the compiler says; empty where it says
        nothing. Of several programs the largest of each, as they run one after another, but of "code" the sum.
        """
        total: dict[str, int] = {}
        for graph in _graphs(self._steps):
            for name, value in graph.memory_bytes.items():
                total[name] = total.get(name, 0) + value if name == "code" else max(total.get(name, 0), value)
        return total

    def __repr__(self) -> str:
        return f"<compiled: {_names(self._steps)}>"


def _graph(number: int):
    facts = next((json.loads(f) for f in _activate.core().graphs(number)), None)
    if facts is None or facts.pop("number") != number:
        raise RuntimeError("the program is forgotten: 4096 others came after it")
    return Graph(number, facts)


def _steps(steps: list[int | str]) -> list:
    return [step if isinstance(step, str) else _graph(step) for step in steps]


def _graphs(steps: list) -> list:
    return [step for step in steps if not isinstance(step, str)]


def _text(steps: list, text) -> str:
    return "\n".join([f"// {step}\n" if isinstance(step, str) else text(step) for step in steps])


def _names(steps: list) -> str:
    return ", ".join([step if isinstance(step, str) else repr(step) for step in steps])
