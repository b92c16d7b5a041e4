"""What PyTorch's CUDA kernels assert is an error at the next synchronisation: of its class, with the CPU's message and the
line of the operation. Nothing else is lost.
"""

import pytest
import torch
import torch.nn.functional as F
from compile_support import WAYS
from support import DEVICE, NewGraphs

LONG = torch.tensor([0, 1, 9])


def indices(device):
    return LONG.to(device)


def rows(device):
    return torch.arange(32.0).view(4, 8).to(device)


def embedded(device):
    return F.embedding(indices(device), rows(device))


def picked(device):
    return rows(device)[indices(device)]


def selected(device):
    return rows(device).index_select(0, -indices(device))


def written(device):
    x = rows(device)
    x[indices(device)] = torch.ones(3, 8).to(device)
    return x


def added(device):
    return rows(device).index_add_(0, indices(device), torch.ones(3, 8).to(device))


def bags(device):
    return F.embedding_bag(indices(device).view(1, 3), rows(device))


def classified(device):
    return F.cross_entropy(rows(device)[:3], indices(device))


def segmented(device):
    return F.nll_loss(rows(device).view(1, 4, 2, 4), torch.full((1, 2, 4), 7).to(device))


def margins(device):
    return F.multi_margin_loss(rows(device)[:3], indices(device))


def drawn(device):
    return torch.multinomial(rows(device) - 5, 2)


def tossed(device):
    return torch.bernoulli(rows(device))


def spread(device):
    return torch.normal(rows(device), -rows(device))


def counted(device):
    return torch.poisson(-rows(device))


def binned(device):
    return torch.histogram(rows(device), 3, range=(3.0, 1.0)).hist


def binned_without_end(device):
    return torch.histogram(rows(device), 3, range=(0.0, float("inf"))).hist


def asserted(device):
    x = rows(device)
    torch._assert_async(x[0, 0])
    return x


def asserted_in_words(device):
    x = rows(device)
    torch._assert_async((x > 0).all(), "some are not positive")
    return x


def asserted_functionally(device):
    x = rows(device)
    return torch.ops.aten._functional_assert_async.msg((x >= 1).all(), "some are not positive", x)


CASES = [
    asserted,
    asserted_in_words,
    asserted_functionally,
    embedded,
    picked,
    selected,
    written,
    added,
    bags,
    classified,
    segmented,
    margins,
    drawn,
    tossed,
    spread,
    counted,
    binned,
    binned_without_end,
]  # fmt: skip


def error_of(f):
    with pytest.raises((RuntimeError, IndexError)) as error:
        f()
    return error.value


@pytest.mark.parametrize("mode", ["fused", "strict"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_an_error_when_the_device_is_waited_for(case, mode):
    with torch.tpu.set_eager_mode("debug"):
        expected = error_of(lambda: case(DEVICE))
    with torch.tpu.set_eager_mode(mode):
        beside = torch.ones(3, device=DEVICE) * 2
        torch.tpu.synchronize()
        result = case(DEVICE)
        error = error_of(torch.tpu.synchronize)
        assert type(error) is type(expected)
        message, _, line = str(error).partition("\n")
        assert message == str(expected).partition("\n")[0]
        assert f"{__file__}:{case.__code__.co_firstlineno + 1}" in line or f" in {case.__name__}" in line
        torch.tpu.synchronize()  # it was told
        assert result.cpu().shape == result.shape and beside.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "wait", [lambda x: x.item(), lambda x: x.cpu(), lambda x: torch.tpu.current_stream().synchronize()]
)
def test_whoever_waits_is_told(fused, wait):
    loss = classified(DEVICE)
    assert isinstance(error_of(lambda: wait(loss)), IndexError)
    wait(loss)  # it was told
    assert torch.isfinite(loss).item()


def test_a_value_of_before_is_read_without_it(fused):
    before = torch.ones(3, device=DEVICE) + 1
    torch.tpu.synchronize()
    result = classified(DEVICE)
    assert before.tolist() == [2, 2, 2]
    assert isinstance(error_of(result.item), IndexError)


def test_a_training_loop_stops_at_a_wrong_label(fused):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Flatten(), torch.nn.Linear(24, 5)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    losses, new = [], NewGraphs()
    labels = [torch.randint(0, 5, (6,)) for _ in range(8)]
    labels[6][2] = 5
    with pytest.raises(IndexError, match=r"Target is out of bounds.\n.*test_asserts.py"):
        for label in labels:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randint(0, 20, (6, 3)).to(DEVICE)), label.to(DEVICE))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert len(losses) == 6
    assert len(new.take()) <= 3, "the checks are part of the step's program"


def test_what_is_right_is_no_error(fused):
    labels = torch.tensor([1, -100, 3], device=DEVICE)
    x = torch.randn(3, 5, device=DEVICE, requires_grad=True)
    F.cross_entropy(x, labels).backward()
    picked = x[torch.tensor([-3, 2], device=DEVICE)]
    torch.multinomial(torch.tensor([0.0, 2.0], device=DEVICE), 1)
    torch.bernoulli(torch.tensor([0.0, 1.0], device=DEVICE))
    torch.tpu.synchronize()
    assert picked.shape == (2, 5)


def one_hot(x):
    return F.one_hot(x, 4).float()  # in compiled graphs with two assertions


def checked(x):
    torch._assert_async((x >= 0).all(), "negative")  # nobody takes a result of it
    torch._assert_async((x < 4).all(), "too large")
    return x.float() * 2


@pytest.mark.parametrize("f, way", [(one_hot, "compile"), *((checked, way) for way in WAYS)])
def test_what_a_function_asserts_is_part_of_its_program(fused, f, way):
    torch._dynamo.reset()
    call, new = WAYS[way](f), NewGraphs()
    for i in range(5):
        result = call(torch.tensor([i % 4, 1, 0], device=DEVICE))
        assert torch.equal(result.cpu(), f(torch.tensor([i % 4, 1, 0])))
        graphs = new.take()
        assert len(graphs) <= (1 if i < 3 else 0)
    assert torch.tpu.metrics()["fallbacks"] == {}
    call(torch.tensor([4, 1, 0], device=DEVICE))
    with pytest.raises(RuntimeError, match="smaller than num_classes|too large"):
        torch.tpu.synchronize()
    assert torch.equal(call(torch.tensor([3, 1, 0], device=DEVICE)).cpu(), f(torch.tensor([3, 1, 0])))


def test_a_window_that_only_asserts_is_launched(fused):
    x = torch.ones(3, device=DEVICE)
    torch._assert_async(x.sum() > 4, "four")
    with pytest.raises(RuntimeError, match="four"):
        torch.tpu.synchronize()
    torch._assert_async(x.sum() > 2)
    torch.tpu.synchronize()
    for wrong in (x, x[:0]):
        with pytest.raises(RuntimeError, match="Boolean value of Tensor with .* is ambiguous"):
            torch._assert_async(wrong)


def test_a_round_of_a_loop_asserts(fused):
    from torch._higher_order_ops.scan import scan

    def step(total, x):
        torch._assert_async(total < 5, "more than five")
        return total + x, total * 2

    xs = torch.arange(4.0, device=DEVICE)
    assert scan(step, torch.zeros((), device=DEVICE), xs)[0].item() == 6
    scan(step, torch.zeros((), device=DEVICE), xs * 3)
    with pytest.raises(RuntimeError, match="more than five"):
        torch.tpu.synchronize()
