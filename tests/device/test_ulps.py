"""The comparison in units in the last place finds what it should."""

import pytest
import torch
from ulps import Referee

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def problem(got, f, *args, pointwise=True, terms=0.0):
    """What is wrong with `got` as the result of `f`."""
    want = f(*args)
    referee = Referee(lambda change: [f(*change(args))], pointwise)
    return referee.problem(0, torch.tensor(got, dtype=want.dtype), want, terms)


# What a result is, its dtype, how far off another one is, and whether that is wrong.
ELEMENTS = [
    (1e4, BF16, 128, False),  # two units
    (1e4, BF16, 192, True),
    (1e-5, BF16, 1e-6, True),  # next to a number that is much larger
    (1.0, F32, 4e-7, False),
    (1.0, F32, 9e-7, True),
    (1e-5, F32, 1e-10, True),
    (0.0, F32, 1e-30, True),
    (1e-40, F32, -1e-40, False),  # less than normal
    (1.0, F64, 1e-13, True),
    (1.0, F32, float("inf"), True),
    (float("inf"), F32, float("-inf"), True),
    (float("nan"), F32, 0.0, False),
]


@pytest.mark.parametrize("value, dtype, off, is_wrong", ELEMENTS)
def test_each_element_has_its_own_tolerance(value, dtype, off, is_wrong):
    x = torch.tensor([1e4, value], dtype=dtype)
    got = [1e4, (x.double() + off)[1].item()]
    assert bool(problem(got, torch.clone, x)) == is_wrong


def test_the_sign_of_infinity_and_what_is_no_number_count():
    x = torch.tensor([float("inf"), float("nan"), 1.0])
    assert not problem([float("inf"), float("nan"), 1.0], torch.clone, x)
    for wrong in (
        [float("-inf"), float("nan"), 1.0],
        [float("inf"), 0.0, 1.0],
        [float("inf"), float("nan"), float("nan")],
    ):
        assert "1 of 3 elements" in problem(wrong, torch.clone, x)


def test_what_is_nearer_to_float64_than_the_cpu_is_right():
    def coarse(x):
        return x.sin() + (0 if x.dtype == F64 else 1e-3)

    x = torch.tensor([0.5, 1.0])
    assert not problem(x.sin().tolist(), coarse, x)
    assert problem((x.sin() - 1e-3).tolist(), coarse, x)


def test_sums_may_have_the_rounding_of_their_terms_and_elements_may_not():
    x = torch.tensor([[1e4, -1e4, 1e-3], [1e-4, -1e-4, 1e-3]])

    def rows(x):
        return x.sum(1)

    assert not problem([0.0, 1e-3], rows, x, pointwise=False)
    assert problem([0.0, 1e-3], rows, x, pointwise=True)
    assert problem([0.1, 1e-3], rows, x, pointwise=False)
    assert "1 of 2 elements" in problem([1e-3, 0.0], rows, x, pointwise=False)


def test_terms_of_a_known_size_have_their_rounding():
    x = torch.tensor([1e-6, 8.0])
    assert problem([1.2e-6, 8.0], torch.clone, x)
    assert not problem([1.2e-6, 8.0], torch.clone, x, terms=1.0)
    assert problem([1e-5, 8.0], torch.clone, x, terms=1.0)
    assert problem([1e-6, 8.00001], torch.clone, x, terms=1.0)
