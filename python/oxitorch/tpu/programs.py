"""The programs that this process has made, to be looked at."""

import json

from oxitorch import _activate
from oxitorch._graph import Graph


def graphs(after: Graph | None = None) -> list[Graph]:
    """The programs that this process has made, in the order in which they came: the latest 4096, or those of them that
    came after a graph.

    Their texts, costs and memory are asked for when they are read, which waits for the compiler.
    """
    first = 0 if after is None else after.number + 1
    programs = map(json.loads, _activate.core().graphs(first))
    return [Graph(facts.pop("number"), facts) for facts in programs]
