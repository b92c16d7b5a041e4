"""Models, their data and their training, alone and by all ranks."""

import torch
import torch.distributed as dist
from torch import nn

STEPS = 4


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A small GPT."""

    def __init__(self, width: int = 16, layers: int = 2, tokens: int = 13):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, tokens)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> Model:
    torch.manual_seed(1)
    return Model()


def batch(step: int, of: int | None = None):
    """The part of a step's batch that a rank has, or all of it (-1)."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 13, (2 * size(), 6), generator=generator)
    r = rank() if of is None else of
    return ids if r < 0 else ids[2 * r : 2 * r + 2]


def loss_of(logits, ids):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def made(optimizer, m):
    # The keys' biases have no gradient but for rounding, which AdamW would make steps of.
    return optimizer(m.parameters(), lr=1e-2, **({"eps": 1e-3} if optimizer is torch.optim.AdamW else {}))


def adamw(m):
    return made(torch.optim.AdamW, m)


def train(m, optimizer, device, of=None, steps=STEPS, step=None):
    losses = []
    for i in range(steps):
        ids = batch(i, of).to(device)
        loss = loss_of(m(ids), ids)
        loss.backward()
        if step is not None:
            step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack([x.cpu() for x in losses])


def alone(make=torch.optim.AdamW, steps=STEPS, step=None):
    """The parameters after training in one process on the CPU with whole batches, and the losses."""
    m = model()
    losses = train(m, made(make, m), "cpu", -1, steps, (lambda: step(m)) if step else None)
    return m.state_dict(), losses


def close(got, wanted, **tolerance):
    tolerance = tolerance or {"rtol": 2e-4, "atol": 2e-5}
    assert got.keys() == wanted.keys()
    for name, t in wanted.items():
        x = got[name]
        x = x.full_tensor() if hasattr(x, "full_tensor") else x
        torch.testing.assert_close(x.detach().cpu().float(), t.float(), **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def as_one(m, one, inputs, loss=lambda y: y.square().mean(), call=lambda m: m):
    """Trains both, and they end with the same parameters."""
    for x, device, forward in ((m, "tpu", call(m)), (one, "cpu", one)):
        optimizer = torch.optim.AdamW(x.parameters(), lr=1e-2, eps=1e-3)
        for given in inputs:
            loss(forward(given.to(device))).backward()
            optimizer.step()
            optimizer.zero_grad()
    close(m.state_dict(), one.state_dict())


def numbers(*shape):
    return [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]


def cpu_mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, size() // 2))
