"""The work of `workloads.py` in plain JAX: one jitted step with donated weights and AdamW of optax.

Run by `workloads.py --peer jax=PYTHON`, with the workload's name; speaks as its `serve` does.
"""

import json
import resource
import sys
import time
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax

rng = np.random.default_rng(0)


def weight(*shape):
    return jnp.asarray(rng.normal(0, 0.02, shape), jnp.float32)


def ones_and_zeros(n):
    return jnp.ones(n), jnp.zeros(n)


def ints(*shape, high):
    return jnp.asarray(rng.integers(0, high, shape))


# ---------------------------------------------------------------- gpt


def layer_norm(x, p):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p[0] + p[1]


def gpt_weights(vocab=256, dim=256, layers=4, block=128):
    def one():
        return {
            "norm1": ones_and_zeros(dim),
            "norm2": ones_and_zeros(dim),
            "qkv": (weight(dim, 3 * dim), jnp.zeros(3 * dim)),
            "proj": (weight(dim, dim), jnp.zeros(dim)),
            "up": (weight(dim, 4 * dim), jnp.zeros(4 * dim)),
            "down": (weight(4 * dim, dim), jnp.zeros(dim)),
        }

    return {
        "token": weight(vocab, dim),
        "position": weight(block, dim),
        "blocks": [one() for _ in range(layers)],
        "norm": ones_and_zeros(dim),
        "head": weight(dim, vocab),
    }


def linear(x, p):
    return x @ p[0] + p[1]


def attention(q, k, v):
    """Causal attention; shapes are batch, time, heads, size. On GPUs cuDNN's, which takes floats of 16 bits alone."""
    if q.dtype != jnp.float32:
        cudnn = "cudnn" if jax.default_backend() == "gpu" else None
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=cudnn)
    q, k, v = (z.swapaxes(1, 2) for z in (q, k, v))
    past = jnp.tril(jnp.ones((q.shape[2], q.shape[2]), bool))
    scores = jnp.where(past, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -jnp.inf)
    return (jax.nn.softmax(scores) @ v).swapaxes(1, 2)


def gpt(p, tokens, heads=4):
    x = p["token"][tokens] + p["position"][jnp.arange(tokens.shape[1])]
    b, t, d = x.shape
    for block in p["blocks"]:
        q, k, v = jnp.split(linear(layer_norm(x, block["norm1"]), block["qkv"]), 3, -1)
        q, k, v = (z.reshape(b, t, heads, d // heads) for z in (q, k, v))
        x = x + linear(attention(q, k, v).reshape(b, t, d), block["proj"])
        y = jax.nn.gelu(linear(layer_norm(x, block["norm2"]), block["up"]), approximate=False)
        x = x + linear(y, block["down"])
    return layer_norm(x, p["norm"]) @ p["head"]


def gpt2(p, tokens):
    """As under autocast: weights of float32, products of bfloat16."""
    return gpt(jax.tree.map(lambda w: w.astype(jnp.bfloat16), p), tokens, heads=12)


# ---------------------------------------------------------------- mlp and resnet


def mlp_weights(sizes=(784, 512, 512, 10)):
    return [(weight(i, o), jnp.zeros(o)) for i, o in pairwise(sizes)]


def mlp(p, x):
    for layer in p[:-1]:
        x = jax.nn.relu(linear(x, layer))
    return linear(x, p[-1])


def conv(x, kernel, stride):
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))


def batch_norm(x, p):
    mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p[0][:, None, None] + p[1][:, None, None]


BLOCKS = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]


def resnet_weights():
    def one(i, o, stride):
        block = {"conv1": weight(o, i, 3, 3), "norm1": ones_and_zeros(o)}
        block |= {"conv2": weight(o, o, 3, 3), "norm2": ones_and_zeros(o)}
        if stride != 1 or i != o:
            block |= {"shortcut": weight(o, i, 1, 1), "norm": ones_and_zeros(o)}
        return block

    return {
        "conv": weight(32, 3, 3, 3),
        "norm": ones_and_zeros(32),
        "blocks": [one(*b) for b in BLOCKS],
        "head": (weight(128, 10), jnp.zeros(10)),
    }


def resnet(p, x):
    x = jax.nn.relu(batch_norm(conv(x, p["conv"], 1), p["norm"]))
    for (_, _, stride), block in zip(BLOCKS, p["blocks"], strict=True):
        y = jax.nn.relu(batch_norm(conv(x, block["conv1"], stride), block["norm1"]))
        y = batch_norm(conv(y, block["conv2"], 1), block["norm2"])
        if "shortcut" in block:
            x = batch_norm(conv(x, block["shortcut"], stride), block["norm"])
        x = jax.nn.relu(y + x)
    return linear(x.mean((2, 3)), p["head"])


# ---------------------------------------------------------------- steps


def ops():
    a, b = jnp.ones(4), jnp.ones(4)

    def step():
        c = a
        for _ in range(1000):
            c = c + b
        return c

    return step, lambda c: float(c.sum())


def chain():
    x = jnp.asarray(rng.normal(size=(1024, 1024)), jnp.float32)

    @jax.jit
    def run(y):
        for _ in range(10):
            y = jnp.tanh(y * 1.01 + 0.1) - 0.05
        return y

    return lambda: run(x), lambda y: float(y.sum())


def jitted_step(model, optimizer):
    """A step of these on weights, optimizer's state and a batch, the first two of which are given away."""

    def loss_of(p, x, y):
        out = model(p, x)
        logits = out.reshape(-1, out.shape[-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y.reshape(-1)).mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def train(p, state, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(p, x, y)
        updates, state = optimizer.update(gradients, state, p)
        return optax.apply_updates(p, updates), state, loss

    return train


def training(model, weights, x, y):
    optimizer = optax.adamw(1e-3)
    train = jitted_step(model, optimizer)
    held = [weights, optimizer.init(weights)]

    def step():
        *held[:], loss = train(*held, x, y)
        return loss

    return step, float


def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


WORKLOADS = {
    "ops": ops,
    "chain": chain,
    "mlp": lambda: training(mlp, mlp_weights(), normal(128, 784), ints(128, high=10)),
    "gpt": lambda: training(gpt, gpt_weights(), ints(8, 128, high=256), ints(8, 128, high=256)),
    "gpt2": lambda: training(
        gpt2, gpt_weights(50304, 768, 12, 1024), ints(8, 1024, high=50304), ints(8, 1024, high=50304)
    ),
    "resnet": lambda: training(resnet, resnet_weights(), normal(32, 3, 32, 32), ints(32, high=10)),
}


def main():
    step, number = WORKLOADS[sys.argv[1]]()

    def reply(steps):
        started = time.perf_counter()
        for _ in range(steps):
            result = step()
        result.block_until_ready()
        ms = (time.perf_counter() - started) * 1e3 / steps
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"ms": ms, "result": number(result), "peak_mib": peak}), flush=True)

    reply(1)
    for line in sys.stdin:
        reply(int(line))


if __name__ == "__main__":
    main()
