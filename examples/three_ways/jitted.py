"""The same as a pure function of weights and state, which is one program."""

import torch
import torch.nn.functional as F
from data import batches, weights


def adamw(w, g, state, lr=3e-3, b1=0.9, b2=0.999, eps=1e-8, decay=0.01):
    """One step of AdamW (Loshchilov and Hutter, 2019): the new weights and state."""
    m, v, t = state
    t = t + 1
    m = {k: b1 * m[k] + (1 - b1) * g[k] for k in w}
    v = {k: b2 * v[k] + (1 - b2) * g[k] ** 2 for k in w}
    c1, c2 = 1 - b1**t, 1 - b2**t
    step = {k: m[k] / c1 / ((v[k] / c2).sqrt() + eps) + decay * w[k] for k in w}
    return {k: w[k] - lr * step[k] for k in w}, (m, v, t)


# -- page
def model(w, x):
    h = F.gelu(x @ w["w0"] + w["b0"])
    return h @ w["w1"] + w["b1"]


def loss_of(w, x, y):
    return F.cross_entropy(model(w, x), y)


@torch.tpu.jit(donate_argnums=(0, 1))
def train_step(w, state, x, y):
    grads, loss = torch.func.grad_and_value(loss_of)(w, x, y)
    w, state = adamw(w, grads, state)
    return w, state, loss


w = {k: torch.from_numpy(v).to("tpu") for k, v in weights().items()}
zeros = [{k: torch.zeros_like(v) for k, v in w.items()} for _ in range(2)]
state = (*zeros, torch.zeros((), device="tpu"))

for x, y in batches():
    x, y = torch.from_numpy(x).to("tpu"), torch.from_numpy(y).to("tpu")
    w, state, loss = train_step(w, state, x, y)
print(f"loss {loss.item():.5f}")
