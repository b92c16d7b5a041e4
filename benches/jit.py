"""What a call of a jitted training step costs the host, and what tracing and compiling one takes.

    python benches/jit.py                    # torch.tpu.jit alone
    python benches/jit.py --peer PYTHON      # and jax.jit, in an environment that has jax
    python benches/jit.py trace --layers 24  # the first call of a GPT's step: running it, lowering, compiling

`call`: a step on the weights and AdamW's state of a GPT of so many layers, whose tensors have 4 elements each, so that
nearly all of a call is the host's. Weights and state go in and come out as dicts. Microseconds, best of the rounds: of
the processor in the thread that calls, and from the call until the device is done.
"""

import argparse
import json
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


def trace(layers: int) -> dict:
    """Seconds of the first call of a GPT's step, without the compiler's."""
    import torch
    from workloads import GPT

    torch.manual_seed(0)
    model = GPT(layers=layers).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randint(0, 256, (8, 128), device="tpu")

    @torch.tpu.jit
    def step(x):
        optimizer.zero_grad(set_to_none=True)
        out = model(x)
        loss = torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), x.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    times = []
    for _ in range(2):
        started = time.perf_counter()
        step(x)
        times.append(time.perf_counter() - started)
    ops = torch.tpu.metrics()["ops"]
    torch.tpu.synchronize()
    return {"trace_s": times, "ops": ops}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("call", "trace"), default="call")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has jax")
    parser.add_argument("--serve", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "trace":
        print(json.dumps(trace(args.layers)))
        return
    if args.serve:
        print(json.dumps({"ours": ours, "theirs": theirs}[args.serve](args.layers, args.rounds)))
        return
    best = {}
    for who, python in (("ours", sys.executable), ("theirs", args.peer)):
        if python is None:
            continue
        command = [python, __file__, "--serve", who, "--layers", str(args.layers), "--rounds", str(args.rounds)]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rounds = json.loads(out.splitlines()[-1])
        best[who] = [min(r[i] for r in rounds) for i in (0, 1)]
        middle = [statistics.median(r[i] for r in rounds) for i in (0, 1)]
        name = {"ours": "torch.tpu.jit", "theirs": "jax.jit"}[who]
        print(
            f"{name:14} call {best[who][0]:8.1f} us (median {middle[0]:.1f}), with the device {best[who][1]:8.1f} us "
            f"(median {middle[1]:.1f})"
        )
    if len(best) == 2:
        print(f"ratio          call {best['ours'][0] / best['theirs'][0]:8.2f}x, with the device "
              f"{best['ours'][1] / best['theirs'][1]:8.2f}x")  # fmt: skip


if __name__ == "__main__":
    main()
