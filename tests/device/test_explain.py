"""Each new program says why it is new: on the mistakes that people make."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE
from torch import nn

pytestmark = pytest.mark.usefixtures("fused")


WIDTHS = itertools.count(13)


class Loop:
    """A small training loop that each test disturbs in its own way.

    Each has a width, and so programs, of its own: only the latest programs are compared with.
    """

    def __init__(self):
        torch.manual_seed(0)
        width = next(WIDTHS)
        self.model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        for _ in range(3):
            self.step()

    def step(self, rows=16, dtype=torch.float32, keep=2, dim=1, peek=False):
        x = torch.ones(rows, 6).to(DEVICE, dtype)
        self.optimizer.zero_grad()
        out = self.model(x.float())
        loss = out[:, :keep].log_softmax(dim).sum()
        if peek:
            loss.item()
        loss.backward()
        self.optimizer.step()
        torch.tpu.synchronize()

    def explain(self, **change):
        before = torch.tpu.metrics()["programs"]
        self.step(**change)
        assert torch.tpu.metrics()["programs"] > before, "no new program"
        return torch.tpu.explain(last=1)


def line_of(marker):
    with open(__file__) as f:
        return next(f"{__file__}:{i}" for i, text in enumerate(f, 1) if marker in text)


def test_a_short_last_batch():
    text = Loop().explain(rows=7)
    assert "launched because an optimizer made its step" in text
    assert "argument 2 is float32[7, 6], was float32[16, 6]" in text
    assert line_of("out = self.model") in text and "drop_last=True" in text


def test_a_number_that_shapes_a_tensor():
    text = Loop().explain(keep=1)
    assert "float32[16, 1], was float32[16, 2]" in text and line_of("log_softmax(dim)") in text


def test_another_dimension():
    text = Loop().explain(dim=0)
    assert "_log_softmax at" in text and "argument 2 is 0, was 1" in text and "keep it fixed" in text


def test_another_dtype():
    x = torch.ones(37, device=DEVICE)  # of which no other test makes programs
    torch.tpu.synchronize()
    for dtype in (torch.float32, torch.float64):
        (x.to(dtype) * 2).sum().item()
    text = torch.tpu.explain(last=1)
    assert "float64[37], was float32[37]" in text or "_to_copy" in text


def test_a_growing_sequence():
    # A length that no other test reads of values.
    tokens, table = torch.zeros(1, 91, dtype=torch.long, device=DEVICE), torch.ones(5, 5, device=DEVICE)
    torch.tpu.synchronize()
    for _ in range(2):  # a third size would be one for all that follow
        nxt = F.embedding(tokens, table).sum(1).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, nxt], 1)
        tokens.tolist()
    text = torch.tpu.explain(last=1)
    assert (
        "int64[1, 92], was int64[1, 91]" in text
        and "a size changed" in text
        and "launched because a value was read" in text
    )


def test_a_read_in_the_middle():
    text = Loop().explain(peek=True)
    assert "an optimizer made its step" in text
    earlier = torch.tpu.explain(last=2)
    assert line_of("loss.item()") in earlier and "launched because a value was read" in earlier
    assert "this one ends before" in earlier and "reads and waits cut the stream" in earlier


def test_a_compiled_graph_whose_sizes_vary_is_named():
    """It ends the window before it, in scripts that have no function of `torch.tpu.jit`."""
    f = torch.compile(lambda x: x.sin().cumsum(0) * 3, backend="tpu", dynamic=True)
    for rows in (5, 6, 7):
        f(torch.ones(rows, 3, device=DEVICE).cos() + 1)
    torch.tpu.synchronize()
    assert "one program (torch.tpu.jit, or torch.compile where sizes vary)" in torch.tpu.explain(last=3)


def test_the_first_step_of_an_optimizer():
    Loop()
    texts = torch.tpu.explain(last=2)
    assert "gone, the first is" in texts, texts


def test_max_graphs():
    loop = Loop()
    with torch.tpu.max_graphs(0):
        loop.step()
        with pytest.raises(RuntimeError, match=r"(?s)max_graphs allows no more.*float32\[5, 6\], was float32"):
            loop.step(rows=5)
    loop = Loop()
    with torch.tpu.max_graphs(1):
        loop.step(rows=9)
        loop.step(rows=9)
        with pytest.raises(RuntimeError, match="max_graphs"):
            loop.step(rows=10)
    with pytest.raises(ValueError, match="-1"):
        torch.tpu.max_graphs(-1)


CODE = """
import torch
x = torch.ones(3, device="tpu")
(x + 1).tolist()
(x[:2] + 1).tolist()
"""


def test_explanations_as_they_come(python):
    err = python(CODE, OXITORCH_EXPLAIN="1").stderr
    assert "oxitorch: program 1: " in err and "oxitorch: program 2: " in err and "the first program" in err
    assert "<string>:5" in err
    assert "program" not in python(CODE).stderr


def test_a_bound_for_a_process(python):
    done = python(CODE, OXITORCH_MAX_GRAPHS="1", check=False)
    assert done.returncode == 1 and "max_graphs allows no more programs" in done.stderr


def test_a_recursion():
    """Its ops lie in another order at each depth, and their sizes follow from it."""

    def halves(x):
        if len(x) < 2:
            return x.tanh()
        left, right = halves(x[: len(x) // 2]), halves(x[len(x) // 2 :])
        return torch.cat([right, left]) * 2  # joined

    for n in (4, 11):
        halves(torch.randn(n).to(DEVICE)).cpu()
    text = torch.tpu.explain(last=1)
    assert "runs 10 times, ran 3 times" in text and line_of("# joined") in text, text
    assert "for the first time" not in text and "a loop or recursion in Python" in text


def test_a_loop_of_other_rounds():
    def rounds(n):
        x = torch.ones(3, device=DEVICE)
        for i in range(n):
            x = torch.tanh(x + i)  # a round
        return x.cpu()

    rounds(3), rounds(7)
    text = torch.tpu.explain(last=1)
    assert f"tanh at {line_of('# a round')} in rounds runs 7 times, ran 3 times" in text, text
    assert "while_loop" in text


def test_a_size_that_varies():
    x = torch.randn(41, 3, device=DEVICE)
    for n in (5, 6, 9, 20):
        (x[:n].sinh() * 3).cpu()
    text = torch.tpu.explain(last=1)
    assert "for all sizes up to 32, as they vary" in text and "hint" not in text, text
