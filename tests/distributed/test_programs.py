"""The cases of `collectives.py` where the processes have one client, and collectives are programs of it."""

import pytest

from tests.distributed import plugin, ranks

outcomes = ranks.Outcomes(plugin.environ)


@pytest.mark.parametrize("name", ranks.names("collectives"))
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives(size, name):
    outcomes.check("collectives", size, name)
