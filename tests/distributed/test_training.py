"""The cases of `training.py` in 2 and 4 processes."""

import pytest

from tests.distributed import ranks

outcomes = ranks.Outcomes()


@pytest.mark.parametrize("size, name", ranks.parameters("training"))
def test_training(size, name):
    outcomes.check("training", size, name)
