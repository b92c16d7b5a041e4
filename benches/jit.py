"""What a call of a jitted training step costs the host, and what tracing and compiling one takes.

    python benches/jit.py                    # torch.tpu.jit alone
    python benches/jit.py --peer PYTHON      # and jax.jit, in an environment that has jax
    python benches/jit.py trace --layers 24  # the program of a GPT's step: tracing and lowering it, without compiling

`call`: a step on the weights and AdamW's state of a GPT of so many layers, whose tensors have 4 elements each, so that
nearly all of a call is the host's. Weights and state go in and come out as dicts. Microseconds, best of the rounds: of
the processor in the thread that calls, and from the call until the device is done.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

NAMES = [f"{part}.{kind}" for part in ("norm1", "norm2", "qkv", "proj", "up", "down") for kind in "wb"]
CALLS = 20


def names(layers: int) -> list[str]:
    return [f"blocks.{i}.{n}" for i in range(layers) for n in NAMES] + ["token", "position", "norm.w", "norm.b", "head"]


def update(w, m, v, t):
    """One round of elementwise work for each weight."""
    m = {k: 0.9 * m[k] + 0.1 * w[k] for k in w}
    v = {k: 0.99 * v[k] + 0.01 * w[k] * w[k] for k in w}
    return {k: w[k] - 0.001 * m[k] / (v[k] + 1e-8) for k in w}, m, v, t + 1


def timed(call, state, wait, rounds: int) -> list[tuple[float, float]]:
    """Microseconds of a call: of the thread that calls, and until the device is done. Each is the mean of some in a
    row, which wait for each other on the device; few enough not to fill its queue.
    """
    out = []
    for i in range(rounds + 5):
        started, own = time.perf_counter(), time.thread_time()
        for _ in range(CALLS):
            state = call(*state)
        asked = time.thread_time() - own
        wait(state)
        if i >= 5:
            out.append((1e6 * asked / CALLS, 1e6 * (time.perf_counter() - started) / CALLS))
    return out


def ours(layers: int, rounds: int):
    import torch

    def tensors():
        return {k: torch.ones(4, device="tpu") for k in names(layers)}

    step = torch.tpu.jit(update, donate_argnums=(0, 1, 2, 3))
    state = (tensors(), tensors(), tensors(), torch.zeros((), device="tpu"))
    return timed(step, state, lambda _: torch.tpu.synchronize(), rounds)


def theirs(layers: int, rounds: int):
    import jax
    import jax.numpy as jnp

    def arrays():
        return {k: jnp.ones(4) for k in names(layers)}

    step = jax.jit(update, donate_argnums=(0, 1, 2, 3))
    return timed(step, (arrays(), arrays(), arrays(), jnp.zeros(())), jax.block_until_ready, rounds)


def our_program(layers: int, rounds: int) -> list[float]:
    """Seconds until there is the StableHLO of a GPT's step with AdamW, each time anew."""
    import torch
    from workloads import GPT

    torch.manual_seed(0)
    model = GPT(layers=layers).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randint(0, 256, (8, 128), device="tpu")

    def step(x):
        optimizer.zero_grad(set_to_none=True)
        out = model(x)
        loss = torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), x.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    def lower():
        torch.tpu.jit(step).lower(x).as_text()

    step(x)  # which gives the optimizer its state, as optax's is there before
    torch.tpu.synchronize()
    return seconds(lower, rounds)


def their_program(layers: int, rounds: int) -> list[float]:
    """The same of JAX, with flat weights and optax."""
    import jax
    import optax
    from jax_workloads import gpt, gpt_weights, ints, jitted_step

    weights, optimizer, x = gpt_weights(layers=layers), optax.adamw(1e-3), ints(8, 128, high=256)
    step, args = jitted_step(gpt, optimizer), (weights, optimizer.init(weights), x, x)

    def lower():
        jax.clear_caches()
        step.lower(*args).as_text()

    return seconds(lower, rounds)


def seconds(f, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        f()
        times.append(time.perf_counter() - started)
    return times


# What is measured, of ours and of theirs.
MEASURES = {"call": (ours, theirs), "trace": (our_program, their_program)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=MEASURES, default="call")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, help="100 calls, or 5 programs, if it is not given")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has jax and optax")
    parser.add_argument("--serve", type=int, choices=(0, 1), help=argparse.SUPPRESS)
    args = parser.parse_args()
    rounds = args.rounds or {"call": 100, "trace": 5}[args.what]
    if args.serve is not None:
        print(json.dumps(MEASURES[args.what][args.serve](args.layers, rounds)))
        return
    best = []
    for who, python in enumerate((sys.executable, args.peer)):
        if python is None:
            continue
        command = [python, __file__, args.what, "--serve", str(who), "--layers", str(args.layers)]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        out = subprocess.run(
            [*command, "--rounds", str(rounds)], check=True, stdout=subprocess.PIPE, text=True, env=env
        ).stdout
        best.append(report(args.what, ("torch.tpu.jit", "jax.jit")[who], json.loads(out.splitlines()[-1])))
    if len(best) == 2:
        print("ratio          " + ", ".join(f"{a / b:.2f}x" for a, b in zip(*best, strict=True)))


def report(what: str, name: str, rounds: list) -> list[float]:
    """Prints the best and the median of the rounds, and gives the best."""
    if what == "trace":
        print(f"{name:14} {min(rounds):.3f} s (median {statistics.median(rounds):.3f})")
        return [min(rounds)]
    best, middle = ([f(r[i] for r in rounds) for i in (0, 1)] for f in (min, statistics.median))
    print(
        f"{name:14} call {best[0]:8.1f} us (median {middle[0]:.1f}), with the device {best[1]:8.1f} us "
        f"(median {middle[1]:.1f})"
    )
    return best


if __name__ == "__main__":
    main()
