"""The cases of `collectives.py` in 2 and 4 processes."""

import pytest

from tests.distributed import ranks

outcomes = ranks.Outcomes()


@pytest.mark.parametrize("name", ranks.names("collectives"))
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives(size, name):
    outcomes.check("collectives", size, name)
