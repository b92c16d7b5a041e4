"""A program that this process has made, to be looked at."""

import json
from functools import cached_property
from typing import Any

from oxitorch import _activate


class Graph:
    """A program that was made from recorded operations.

    Attributes, all as they were when `torch.tpu.graphs()` was called:
        number: counts the programs of the process, from 0.
        id: a name that stays the same as long as the program does; `oxitorch cache ls` knows it too.
        name: its first and last operation.
        ops: for each operation its name ("op"), the types of its results ("results") and its Python line ("line").
        inputs, outputs: types, as in "float32[2, 3]".
        donated: the numbers of the inputs whose memory the program takes for its results.
        first_line, ended_by, ended_at: where the window began, why it ended (see `torch.tpu.metrics()["flushes"]`) and
            where.
        ended_by_collective: if a collective ended it, which: "all_reduce(float32[1000]), number 3 of group 0".
        origin: "compiled", "loaded" from a cache folder, "memory": another program of the process is the same, or
            "pending".
        compile_s: how long that took.
        launches, device_s: how often it ran, and how long in all.
    """

    def __init__(self, number: int, facts: dict[str, Any]):
        self.number = number
        self.id: str = facts["id"]
        self.name: str = facts["name"]
        self.ops: list[dict[str, Any]] = facts["ops"]
        self.inputs: list[str] = facts["inputs"]
        self.outputs: list[str] = facts["outputs"]
        self.donated: list[int] = facts["donated"]
        self.first_line: str | None = facts["first_line"]
        self.ended_by: str | None = facts["ended_by"]
        self.ended_by_collective: str | None = facts.get("ended_by_collective")
        self.ended_at: str | None = facts["ended_at"]
        self.origin: str = facts["from"]
        self.compile_s: float = facts["compile_s"]
        self.launches: int = facts["launches"]
        self.device_s: float = facts["device_s"]

    @cached_property
    def _shown(self) -> tuple[dict[str, Any], str, str | None]:
        shown = _activate.core().graph(self.number)
        if shown is None:
            raise RuntimeError(f"program {self.id} could not be compiled, or 4096 others came after it")
        facts, stablehlo, optimized = shown
        return json.loads(facts), stablehlo, optimized

    @property
    def stablehlo(self) -> str:
        """The program as it went to the compiler."""
        return self._shown[1]

    @property
    def optimized_hlo(self) -> str | None:
        """The program as the compiler left it; None where the plugin does not give it in a form that can be shown."""
        return self._shown[2]

    @property
    def cost(self) -> dict[str, float]:
        """The compiler's estimates, under its names: "flops", "bytes accessed" and more."""
        return self._shown[0]["cost"]

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes of "arguments", "outputs", "aliased" (arguments whose memory results take), "temporaries",
        "host_temporaries" (in the memory of the host), "peak" (0 where the plugin does not say) and "code". Empty
        where the plugin says nothing.
        """
        return self._shown[0].get("memory_bytes", {})

    def __repr__(self) -> str:
        return f"Graph({self.id}, {self.name}, {len(self.ops)} ops, {self.launches} launches, {self.device_s:.3f} s)"
