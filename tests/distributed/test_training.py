"""The cases of `training.py` in 2 and 4 processes."""

import pytest

from tests.distributed import ranks

outcomes = ranks.Outcomes()


@pytest.mark.parametrize("name", ranks.names("training"))
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training(size, name):
    outcomes.check("training", size, name)
