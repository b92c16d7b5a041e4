"""The cases of `training.py` in 2, 4 and 8 processes."""

import pytest

from tests.distributed import ranks

outcomes = ranks.Outcomes()


@pytest.mark.parametrize("size, name", ranks.parameters("training"))
def test_training(size, name):
    outcomes.check("training", size, name)


strict = ranks.Outcomes(lambda: {"OXITORCH_EAGER_MODE": "strict"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.names("training", 2))
def test_training_one_operation_at_a_time(name):
    strict.check("training", 2, name)
