"""The cases of `collectives` in 2, 3, 4 and 8 processes."""

import pytest

from tests.distributed import ranks

outcomes = ranks.Outcomes()


@pytest.mark.parametrize("size, name", ranks.parameters("collectives", (2, 3, 4, 8)))
def test_collectives(size, name):
    outcomes.check("collectives", size, name)


@pytest.mark.parametrize("size, name", ranks.parameters("several_devices"))
def test_several_devices(size, name):
    outcomes.check("several_devices", size, name)
