"""One operation that fails does not take its window with it: what depends on it fails, with its name and line."""

import warnings

import pytest
import torch
from support import DEVICE

pytestmark = pytest.mark.usefixtures("fused")


@pytest.fixture
def broken():
    """XLA cannot compile Cholesky factorisations or triangular solves: it leaves them to passes that are off here."""
    passes = "cholesky_expander,triangular_solve_expander"
    with torch.tpu.compiler.custom_compiler_options({"xla_disable_hlo_passes": passes}):
        yield


def line_of(marker):
    with open(__file__) as f:
        return next(f"{__file__}:{i}" for i, text in enumerate(f, 1) if marker in text)


def clear():
    """Takes the failure that a synchronisation would raise."""
    with pytest.raises(RuntimeError):
        torch.tpu.synchronize()


def test_only_what_depends_on_the_failing_op_fails(broken):
    x = torch.arange(9.0, device=DEVICE).reshape(3, 3)
    before = x + 1
    factor = torch.linalg.cholesky_ex(x @ x.T + torch.eye(3, device=DEVICE))[0]  # fails
    after = before * 2
    dependent = factor.sum() + after
    assert after.tolist() == [[2, 4, 6], [8, 10, 12], [14, 16, 18]]
    assert before.sum().item() == 45 and x.sum().item() == 36
    for value in (factor, dependent):
        with pytest.raises(RuntimeError, match="(?s)cholesky.*compilation failed") as e:
            value.cpu()
        assert line_of("# fails") in str(e.value)
    torch.tpu.synchronize()  # the failure was seen


def test_two_failures_are_two_errors(broken):
    x = torch.eye(3, device=DEVICE)
    one = torch.linalg.cholesky_ex(x)[0]
    two = torch.linalg.solve_triangular(x, x, upper=True)
    assert (x + x).sum().item() == 6
    with pytest.raises(RuntimeError, match="solve_triangular"):
        two.cpu()
    with pytest.raises(RuntimeError, match="cholesky"):
        one.cpu()


def test_a_later_window_loses_only_what_depends_on_the_failure(broken):
    x = torch.eye(3, device=DEVICE)
    factor = torch.linalg.cholesky_ex(x)[0]
    clear()
    both = factor + 1
    other = x + 1
    assert other.sum().item() == 12
    with pytest.raises(RuntimeError, match="cholesky"):
        both.cpu()


def test_a_training_step_keeps_its_weights(broken):
    weight = torch.ones(3, 3, device=DEVICE)
    for _ in range(3):
        weight.mul_(2)
        norm = torch.linalg.cholesky_ex(torch.eye(3, device=DEVICE))[0]
    assert weight.tolist() == [[8.0] * 3] * 3
    del norm
    clear()


def test_a_failing_window_fails_again_alike(broken):
    x = torch.eye(3, device=DEVICE)
    torch.tpu.synchronize()
    torch.tpu.reset_metrics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(3):
            y = x + n
            factor = torch.linalg.cholesky_ex(y)[0]
            assert y.sum().item() == 3 + 9 * n
            with pytest.raises(RuntimeError, match="cholesky"):
                factor.cpu()
    counted = torch.tpu.metrics()
    assert counted["isolations"] >= 3
    # The ops that work are compiled once.
    assert counted["compiles"] < 12
