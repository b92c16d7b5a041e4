"""The original in JAX, with flax and optax."""

import jax
import jax.numpy as jnp
import optax
from data import SIZES, batches, weights
from flax import linen as nn


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(SIZES[1])(x), approximate=False)
        return nn.Dense(SIZES[2])(h)


model = Model()
start = {f"Dense_{i}": {"kernel": weights()[f"w{i}"], "bias": weights()[f"b{i}"]} for i in range(2)}
# -- page
optimizer = optax.adamw(3e-3, weight_decay=0.01)


def loss_of(w, x, y):
    logits = model.apply({"params": w}, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return losses.mean()


@jax.jit(donate_argnums=(0, 1))
def train_step(w, state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(w, x, y)
    updates, state = optimizer.update(grads, state, w)
    return optax.apply_updates(w, updates), state, loss


w = jax.tree.map(jnp.asarray, start)
state = optimizer.init(w)

for x, y in batches():
    w, state, loss = train_step(w, state, x, y)
print(f"loss {loss.item():.5f}")
