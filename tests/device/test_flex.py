"""`flex_attention` against attention that has the whole matrix of scores, on the CPU."""

import pytest
import torch
from compile_support import WAYS, fresh_dynamo  # noqa: F401 (a fixture)
from support import DEVICE, NewGraphs, assert_close
from torch import nn
from torch.nn.attention import flex_attention as flex

LENGTH, BLOCK = 32, 16


def dense(q, k, v, score_mod, block_mask):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    places = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    scores = score_mod(scores, *places).masked_fill(~block_mask.mask_mod(*places), -float("inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


class Attention(nn.Module):
    """Grouped heads, a bias that is learned, and the log-sum-exp in the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.to_q, self.to_kv = nn.Linear(8, 16), nn.Linear(8, 16)
        self.bias = nn.Parameter(torch.randn(4, 2 * LENGTH))

    def forward(self, x, block_mask):
        q, (k, v) = self.to_q(x).unflatten(-1, (4, 4)).transpose(1, 2), self.to_kv(x).chunk(2, -1)
        k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (k, v))

        def biased(score, _batch, head, query, key):
            return score + self.bias[head, query - key + LENGTH]

        if x.device.type == "cpu":
            out, lse = dense(q, k, v, biased, block_mask)
        else:
            aux = flex.AuxRequest(lse=True)
            out, aux = flex.flex_attention(q, k, v, biased, block_mask, enable_gqa=True, return_aux=aux)
            lse = aux.lse
        return out.square().mean() + lse.square().mean()


def losses(device, way, steps=4):
    documents = torch.tensor([[0] * 9 + [1] * 23, [0] * 20 + [1] * 12]).to(device)

    def of_one_document(batch, _head, query, key):
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    mask = flex.create_block_mask(of_one_document, 2, None, LENGTH, LENGTH, device=device, BLOCK_SIZE=BLOCK)
    model = Attention().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of = way(lambda x: model(x, mask)) if way is not WAYS["jit"] else lambda x: model(x, mask)

    def step(x):
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = way(step) if way is WAYS["jit"] else step
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield step(torch.randn(2, LENGTH, 8, generator=generator).to(device))
    yield from model.parameters()


@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_dense_attention(fused, way):
    new, graphs, actual = NewGraphs(), [], []
    for value in losses(DEVICE, WAYS[way]):
        actual.append(value.detach().cpu())
        graphs.append(len(new.take()))
    for a, b in zip(actual, losses("cpu", WAYS["eager"]), strict=True):
        assert_close(a, b.detach())
    assert not any(graphs[3:])
    assert not torch.tpu.metrics()["fallbacks"]


def test_other_devices_are_asked_for_as_ever():
    q = torch.randn(1, 1, LENGTH, 4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex.flex_attention(q, q, q)
    q = torch.randn(1, 1, LENGTH, 4, device="meta")
    with pytest.raises(ValueError, match="only supported on"):
        flex.flex_attention(q, q, q)
