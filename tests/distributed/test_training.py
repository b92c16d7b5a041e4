"""The cases of `training` in 2, 4 and 8 processes."""

import pytest

from tests.distributed import ranks

outcomes = ranks.Outcomes()


@pytest.mark.parametrize("size, name", ranks.parameters("training"))
def test_training(size, name):
    outcomes.check("training", size, name)


def strictly():
    return {"OXITORCH_EAGER_MODE": "strict"}


strict = ranks.Outcomes(strictly)
SHARDED = ("ddp", "fsdp2")
strict_of_more = ranks.Outcomes(strictly, SHARDED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.names("training", 2))
def test_training_one_operation_at_a_time(name):
    strict.check("training", 2, name)


@pytest.mark.parametrize("size, name", ranks.parameters("training", (4, 8), SHARDED))
def test_ddp_and_fsdp2_one_operation_at_a_time(size, name):
    strict_of_more.check("training", size, name)
