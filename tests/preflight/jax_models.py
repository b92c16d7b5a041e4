"""The models of `models.py` in JAX, compiled for slices without running them, and what XLA says of their memory.

    PYTHON tests/preflight/jax_models.py > tests/preflight/jax.json

PYTHON is the interpreter of an environment with jax, optax and libtpu; a table that exists is the referee of
`test_preflight_table.py`, which needs none of them.
"""

import json
import os
import sys
from functools import partial
from importlib.metadata import version
from itertools import pairwise

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

SLICES = {"v5e-1": "v5e:1x1", "v6e-1": "v6e:1x1", "v5p-8": "v5p:2x2x1"}


def array(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def linear(i, o, bias=True):
    # As PyTorch keeps them, the outputs first.
    return {"w": array(o, i), "b": array(o)} if bias else {"w": array(o, i)}


def apply(p, x):
    y = x @ p["w"].T
    return y + p["b"] if "b" in p else y


def norm(dim):
    return {"w": array(dim), "b": array(dim)}


def layer_norm(p, x):
    # Statistics in float32, as PyTorch has them.
    wide = x.astype(jnp.float32)
    mean, variance = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype) * p["w"] + p["b"]


def rms_norm(p, x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * p["w"]


# PyTorch's attention has scores in float32, and makes them again in the backward.
@partial(jax.checkpoint, static_argnums=3)
def attention(q, k, v, causal):
    scores = jnp.matmul(q, k.swapaxes(-1, -2), preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jax.nn.softmax(scores).astype(v.dtype) @ v


def heads_of(x, size):
    return x.reshape(*x.shape[:2], -1, size).transpose(0, 2, 1, 3)


def block(dim):
    return {
        "norm1": norm(dim), "norm2": norm(dim), "qkv": linear(dim, 3 * dim), "proj": linear(dim, dim),
        "up": linear(dim, 4 * dim), "down": linear(4 * dim, dim),
    }  # fmt: skip


def run_block(p, x, heads, causal):
    size = x.shape[-1] // heads
    q, k, v = (heads_of(z, size) for z in jnp.split(apply(p["qkv"], layer_norm(p["norm1"], x)), 3, -1))
    y = attention(q, k, v, causal).transpose(0, 2, 1, 3).reshape(x.shape)
    x = x + apply(p["proj"], y)
    y = jax.nn.gelu(apply(p["up"], layer_norm(p["norm2"], x)), approximate=False)
    return x + apply(p["down"], y)


def conv(w, x, stride, padding):
    numbers = ("NCHW", "OIHW", "NCHW")
    return jax.lax.conv_general_dilated(x, w, (stride, stride), [(padding, padding)] * 2, dimension_numbers=numbers)


# ---------------------------------------------------------------- models: weights, and what is made of them


def mlp():
    def run(p, x):
        for layer in p[:-1]:
            x = jax.nn.relu(apply(layer, x))
        return apply(p[-1], x)

    return [linear(i, o) for i, o in pairwise((1024, 4096, 4096, 1000))], run


def gpt(vocab=4096, dim=512, heads=8, layers=1, length=256):
    def run(p, tokens):
        x = p["token"][tokens] + p["position"][jnp.arange(tokens.shape[1])]
        for b in p["blocks"]:
            x = run_block(b, x, heads, True)
        return apply(p["head"], layer_norm(p["norm"], x))

    return {
        "token": array(vocab, dim), "position": array(length, dim), "blocks": [block(dim) for _ in range(layers)],
        "norm": norm(dim), "head": linear(dim, vocab, bias=False),
    }, run  # fmt: skip


def llama(vocab=8192, dim=512, heads=8, groups=2, layers=1, hidden=1536):
    size, kv = dim // heads, groups * dim // heads

    def rotate(x):
        frequency = 10000.0 ** (-jnp.arange(size // 2) / (size // 2))
        angle = jnp.arange(x.shape[2])[:, None] * frequency
        cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def run(p, tokens):
        x = p["token"][tokens]
        for layer in p["layers"]:
            y = rms_norm(layer["norm1"], x)
            q, k, v = (heads_of(apply(layer[n], y), size) for n in "qkv")
            k, v = (z.repeat(heads // groups, 1) for z in (rotate(k), v))
            y = attention(rotate(q), k, v, True).transpose(0, 2, 1, 3).reshape(x.shape)
            x = x + apply(layer["o"], y)
            y = rms_norm(layer["norm2"], x)
            x = x + apply(layer["down"], jax.nn.silu(apply(layer["gate"], y)) * apply(layer["up"], y))
        return apply(p["head"], rms_norm(p["norm"], x))

    linears = {"q": (dim, dim), "k": (dim, kv), "v": (dim, kv), "o": (dim, dim)}
    linears |= {"gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}

    def one():
        return {n: linear(i, o, bias=False) for n, (i, o) in linears.items()} | {
            "norm1": {"w": array(dim)},
            "norm2": {"w": array(dim)},
        }

    p = {
        "token": array(vocab, dim), "layers": [one() for _ in range(layers)], "norm": {"w": array(dim)},
        "head": linear(dim, vocab, bias=False),
    }  # fmt: skip
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), p), run


def vit(dim=192, heads=3, layers=1, patch=16, size=224, classes=1000):
    def run(p, x):
        x = conv(p["patch"]["w"], x, patch, 0) + p["patch"]["b"][:, None, None]
        x = x.reshape(*x.shape[:2], -1).transpose(0, 2, 1) + p["position"]
        for b in p["blocks"]:
            x = run_block(b, x, heads, False)
        return apply(p["head"], layer_norm(p["norm"], x).mean(1))

    return {
        "patch": {"w": array(dim, 3, patch, patch), "b": array(dim)}, "position": array(1, (size // patch) ** 2, dim),
        "blocks": [block(dim) for _ in range(layers)], "norm": norm(dim), "head": linear(dim, classes),
    }, run  # fmt: skip


def batch_norm(p, x, kept):
    """What comes out, and the statistics that a run keeps."""
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    scaled = (x - mean[:, None, None]) * jax.lax.rsqrt(variance + 1e-5)[:, None, None]
    kept = {"mean": 0.9 * kept["mean"] + 0.1 * mean, "var": 0.9 * kept["var"] + 0.1 * variance, "n": kept["n"] + 1}
    return scaled * p["w"][:, None, None] + p["b"][:, None, None], kept


def resnet(blocks=((64, 64, 1), (64, 128, 2))):
    def one(i, o, stride):
        p = {"conv1": array(o, i, 3, 3), "norm1": norm(o), "conv2": array(o, o, 3, 3), "norm2": norm(o)}
        return p | ({"shortcut": array(o, i, 1, 1)} if stride != 1 else {})

    def run(p, x, kept):
        kept, new = iter(kept), []

        def normed(q, x):
            y, k = batch_norm(q, x, next(kept))
            new.append(k)
            return y

        x = jax.nn.relu(normed(p["norm"], conv(p["conv"], x, 1, 1)))
        for (_, _, stride), b in zip(blocks, p["blocks"], strict=True):
            y = jax.nn.relu(normed(b["norm1"], conv(b["conv1"], x, stride, 1)))
            y = normed(b["norm2"], conv(b["conv2"], y, 1, 1))
            x = jax.nn.relu(y + (conv(b["shortcut"], x, stride, 0) if stride != 1 else x))
        return apply(p["head"], x.mean((2, 3))), new

    p = {"conv": array(64, 3, 3, 3), "norm": norm(64), "blocks": [one(*b) for b in blocks], "head": linear(128, 10)}
    sizes = [64, *(o for _, o, _ in blocks for _ in range(2))]
    return p, run, [{"mean": array(n), "var": array(n), "n": ints()} for n in sizes]


def autoencoder(sizes=((3, 64), (64, 128))):
    def run(p, x):
        for layer in p["down"]:
            x = jax.nn.relu(conv(layer["w"], x, 2, 1) + layer["b"][:, None, None])
        for i, layer in enumerate(p["up"]):
            x = jax.lax.conv_transpose(x, layer["w"], (2, 2), [(2, 2)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW"))
            x = x + layer["b"][:, None, None]
            x = jax.nn.relu(x) if i + 1 < len(p["up"]) else x
        return x

    down = [{"w": array(o, i, 4, 4), "b": array(o)} for i, o in sizes]
    return {"down": down, "up": [{"w": array(i, o, 4, 4), "b": array(i)} for i, o in reversed(sizes)]}, run


def recommender(tables=8, rows=20000, dim=64):
    def run(p, ids):
        x = jnp.concatenate([table[ids[:, i]] for i, table in enumerate(p["tables"])], 1)
        for layer in p["mlp"][:-1]:
            x = jax.nn.relu(apply(layer, x))
        return apply(p["mlp"][-1], x)[:, 0]

    layers = [linear(i, o) for i, o in pairwise((tables * dim, 1024, 512, 1))]
    return {"tables": [array(rows, dim) for _ in range(tables)], "mlp": layers}, run


def encoder(vocab=30522, dim=768, heads=12, layers=1):
    def run(p, tokens):
        x = p["token"][tokens]
        for b in p["blocks"]:
            x = run_block(b, x, heads, False)
        return apply(p["head"], layer_norm(p["norm"], x)[:, 0]).argmax(1)

    p = {"token": array(vocab, dim), "blocks": [block(dim) for _ in range(layers)], "norm": norm(dim)}
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), p | {"head": linear(dim, 2)}), run


# ---------------------------------------------------------------- steps


def classes(logits, targets):
    logits = logits.reshape(-1, logits.shape[-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets.reshape(-1)).mean()


def training(model, optimizer, loss_of, *batch):
    """A step, what it overwrites and what it reads."""
    p, run, kept = model if len(model) == 3 else (model[0], lambda p, x, kept: (model[1](p, x), kept), [])

    def loss(p, kept, *batch):
        out, kept = run(p, batch[0], kept)
        return loss_of(out, batch[-1]), kept

    def step(held, *batch):
        p, state, kept = held
        (_, kept), gradients = jax.value_and_grad(loss, has_aux=True)(p, kept, *batch)
        updates, state = optimizer.update(gradients, state, p)
        # PyTorch keeps gradients from one step to the next.
        return (optax.apply_updates(p, updates), state, kept), gradients

    return step, (p, optimizer.init(p), kept), batch


def ints(*shape):
    return array(*shape, dtype=jnp.int32)


def answering(model, *batch):
    p, run = model
    return lambda held, p, *batch: run(p, *batch), (), (p, *batch)


ADAMW = optax.adamw(1e-3, weight_decay=0.01)
MOMENTUM = optax.sgd(0.1, momentum=0.9)

MODELS = {
    "mlp": lambda: training(mlp(), ADAMW, classes, array(256, 1024), ints(256)),
    "gpt": lambda: training(gpt(), ADAMW, classes, ints(8, 256), ints(8, 256)),
    "llama": lambda: training(llama(), ADAMW, classes, ints(4, 512), ints(4, 512)),
    "vit": lambda: training(vit(), ADAMW, classes, array(32, 3, 224, 224), ints(32)),
    "resnet": lambda: training(resnet(), MOMENTUM, classes, array(32, 3, 64, 64), ints(32)),
    "autoencoder": lambda: training(autoencoder(), ADAMW, lambda a, b: ((a - b) ** 2).mean(), array(32, 3, 64, 64)),
    "recommender": lambda: training(
        recommender(),
        MOMENTUM,
        lambda a, b: optax.sigmoid_binary_cross_entropy(a, b).mean(),
        ints(2048, 8),
        array(2048),
    ),
    "encoder": lambda: answering(encoder(), ints(16, 128)),
}


def measure(step, held, batch, topology):
    wide = all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves((held, batch)))
    sharding = SingleDeviceSharding(topology.devices[0])
    held, batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (held, batch))
    # What PyTorch means by float32; ours multiplies so as well. bfloat16 has but one precision.
    with jax.default_matmul_precision("highest" if wide else "default"):
        memory = jax.jit(step, donate_argnums=0).lower(held, *batch).compile().memory_analysis()
    fields = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporaries": "temp"}
    return {name: getattr(memory, f"{field}_size_in_bytes") for name, field in fields.items()} | {
        "peak": memory.peak_memory_in_bytes
    }


def main():
    # The same effort as `oxitorch preflight` has if nothing is said.
    jax.config.update("jax_optimization_level", "O0")
    tables = {}
    for name, topology in SLICES.items():
        devices = topologies.get_topology_desc(topology, "tpu")
        for model in sys.argv[1:] or MODELS:
            tables.setdefault(model, {})[name] = measure(*MODELS[model](), devices)
            print(name, model, tables[model][name], file=sys.stderr)
    versions = {"jax": jax.__version__, "libtpu": version("libtpu")}
    json.dump({**versions, "memory_bytes": tables}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
