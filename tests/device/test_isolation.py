"""One operation that fails does not take its window with it: what depends on it fails, with its name and line."""

import warnings

import pytest
import torch
from support import DEVICE

pytestmark = [
    pytest.mark.usefixtures("fused"),
    pytest.mark.skipif(torch.tpu.platform() != "cpu", reason="other platforms compile what this turns off"),
]


@pytest.fixture
def broken():
    """XLA cannot compile `topk`, nor sums by an index: it leaves them to passes that are off here."""
    with torch.tpu.compiler.custom_compiler_options({"xla_disable_hlo_passes": "topk-decomposer,scatter_expander"}):
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
    largest = torch.topk(x @ x.T, 2).values  # fails
    after = before * 2
    dependent = largest.sum() + after
    assert after.tolist() == [[2, 4, 6], [8, 10, 12], [14, 16, 18]]
    assert before.sum().item() == 45 and x.sum().item() == 36
    for value in (largest, dependent):
        with pytest.raises(RuntimeError, match="(?s)topk.*compilation failed") as e:
            value.cpu()
        assert line_of("# fails") in str(e.value)
    torch.tpu.synchronize()  # the failure was seen


def test_two_failures_are_two_errors(broken):
    x = torch.eye(3, device=DEVICE)
    one = torch.topk(x, 2).values
    two = x.index_put((torch.tensor([0, 1], device=DEVICE),), x[0], accumulate=True)
    assert (x + x).sum().item() == 6
    with pytest.raises(RuntimeError, match="index_put"):
        two.cpu()
    with pytest.raises(RuntimeError, match="topk"):
        one.cpu()


def test_a_later_window_loses_only_what_depends_on_the_failure(broken):
    x = torch.eye(3, device=DEVICE)
    largest = torch.topk(x, 2).values
    clear()
    both = largest + 1
    other = x + 1
    assert other.sum().item() == 12
    with pytest.raises(RuntimeError, match="topk"):
        both.cpu()


def test_a_training_step_keeps_its_weights(broken):
    weight = torch.ones(3, 3, device=DEVICE)
    for _ in range(3):
        weight.mul_(2)
        found = torch.topk(torch.eye(3, device=DEVICE), 2).values
    assert weight.tolist() == [[8.0] * 3] * 3
    del found
    clear()


def test_a_failing_window_fails_again_alike(broken):
    x = torch.eye(3, device=DEVICE)
    torch.tpu.synchronize()
    torch.tpu.reset_metrics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(3):
            y = x + n
            largest = torch.topk(y, 2).values
            assert y.sum().item() == 3 + 9 * n
            with pytest.raises(RuntimeError, match="topk"):
                largest.cpu()
    counted = torch.tpu.metrics()
    assert counted["isolations"] >= 3
    # The ops that work are compiled once.
    assert counted["compiles"] < 12


# Kernels of LAPACK that find no solution of a matrix of NaN.
UNSOLVABLE = {
    "svd": torch.linalg.svd,
    "svdvals": torch.linalg.svdvals,
    "eigh": torch.linalg.eigh,
    "eigvalsh": torch.linalg.eigvalsh,
    "pinv": torch.linalg.pinv,
    "matrix_rank": torch.linalg.matrix_rank,
}


@pytest.mark.parametrize("name", UNSOLVABLE)
def test_what_fails_while_it_runs_fails_alone_and_is_raised_once(name):
    """Wherever it is noticed: where the result is read, at a synchronisation if nobody has it any more, or at once."""
    f = UNSOLVABLE[name]
    x = torch.full((4, 4), torch.nan)
    try:
        f(x)
    except RuntimeError as e:
        expected = type(e)
    else:
        pytest.skip("this build of PyTorch has a solution")
    x, weight = x.to(DEVICE), torch.ones(8, device=DEVICE)
    torch.tpu.synchronize()
    weight.mul_(3)  # in place: its old memory is not given away before the outcome is known
    result = f(x)  # unsolvable
    other = weight + 1
    with pytest.raises(expected) as e:
        [t.cpu() for t in (result if isinstance(result, tuple) else (result,))]
    assert line_of("# unsolvable") in str(e.value)
    assert weight.tolist() == [3] * 8 and other.tolist() == [4] * 8
    torch.tpu.synchronize()  # it was seen
    result = f(x)
    torch.tpu.current_stream().query()  # launches it
    del result  # and nobody has it any more
    with pytest.raises(expected):
        torch.tpu.synchronize()
    torch.tpu.synchronize()
    with torch.tpu.set_eager_mode("debug"):
        with pytest.raises(expected):
            f(x)
        torch.tpu.synchronize()


def test_what_fits_survives_what_does_not():
    x = torch.ones(1 << 20, device=DEVICE)
    torch.tpu.synchronize()
    before = torch.tpu.get_per_process_memory_fraction()
    total, held = torch.tpu.mem_get_info()[1], torch.tpu.memory_allocated()
    try:
        torch.tpu.set_per_process_memory_fraction((held + (10 << 20)) / total)
        a, b, c = x + 1, x * 2, x.double()  # 4, 4 and 8 MiB
        with pytest.raises(torch.OutOfMemoryError, match="may use .*set_per_process_memory_fraction"):
            c.sum().item()
        assert a[3].item() == b[5].item() == 2
        torch.tpu.synchronize()
        # Python may be ahead: a copy waits for what is queued before it gives up.
        del a, b, c
        host = torch.ones(1 << 20)
        for _ in range(200):
            y = host.to(DEVICE) * 2
        assert y[7].item() == 2
    finally:
        torch.tpu.set_per_process_memory_fraction(before)


@pytest.mark.parametrize("wrap", [torch.compile, torch.tpu.jit], ids=["compile", "jit"])
def test_results_of_one_function_that_need_no_failing_op_are_there(wrap, broken):
    def both(x):
        return x + 1, torch.topk(x, 2).values, x * 3

    torch.compiler.reset()
    f = wrap(both)
    x = torch.eye(3, device=DEVICE)
    for _ in range(3):
        first, largest, last = f(x)
        assert first.sum().item() == 12 and last.sum().item() == 9
        with pytest.raises(RuntimeError, match="(?s)topk.*compilation failed"):
            largest.cpu()
    assert (first + last).sum().item() == 21
