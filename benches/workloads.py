"""Whole training steps against stock PyTorch on the CPU, and against other compilers: one definition of the work, a
process for each, in turns.

    python benches/workloads.py                       # all workloads, against PyTorch on the CPU
    python benches/workloads.py gpt resnet --rounds 5
    python benches/workloads.py mlp --steps 20        # a loop of steps: the host runs ahead, and caches are warm
    python benches/workloads.py --mode fused,strict   # both modes; ratios are to the first
    python benches/workloads.py --mode jit --peer jax=PYTHON --peer xla=PYTHON --peer inductor
    python benches/workloads.py gpt --memory          # peak resident size of each process
    python benches/workloads.py gpt --start           # from starting Python to the end of the first step, cold and warm
    python benches/workloads.py gpt2 --on cuda        # on a GPU, against PyTorch on it

PYTHON is the interpreter of an environment with `jax` and `optax`, or with `torch_xla`. Run it on a quiet machine and
compare ratios within one run only; everything else about the machine moves.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

# The sizes are fixed, so that numbers of different versions can be compared.


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(d, dim=2)
        q, k, v = (z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab=256, dim=256, heads=4, layers=4, block=128):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(block, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


class BasicBlock(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.norm2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.shortcut = nn.Identity()
        if stride != 1 or i != o:
            self.shortcut = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet():
    layers = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    for i, o, stride in [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]:
        layers.append(BasicBlock(i, o, stride))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def mlp():
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


# How functions are compiled: on our device in the modes "compile" and "jit", by inductor on the CPU or a GPU.
COMPILED = ""


def compiled(f):
    """`f`, through `torch.compile` or `torch.tpu.jit`."""
    if COMPILED == "jit":
        return torch.tpu.jit(f)
    return torch.compile(f, backend=COMPILED) if COMPILED else f


def wait(device):
    if device == "tpu":
        torch.tpu.synchronize()
    elif device == "cuda":
        torch.cuda.synchronize()
    elif str(device).startswith("xla"):
        import torch_xla
        import torch_xla.core.xla_model

        torch_xla.sync(wait=True)
        torch_xla.core.xla_model.wait_device_ops()


def ops(device):
    """1000 dependent adds on 4 floats, then one wait."""
    a, b = torch.ones(4, device=device), torch.ones(4, device=device)

    def add(c):
        for _ in range(1000):
            c = c + b
        return c

    add = compiled(add)

    return lambda: add(a)


def chain(device):
    """40 elementwise operations on 4 MiB."""
    torch.manual_seed(0)
    x = torch.randn(1024, 1024).to(device)

    def run(y):
        for _ in range(10):
            y = torch.tanh(y * 1.01 + 0.1) - 0.05
        return y

    run = compiled(run)

    return lambda: run(x)


def training(make_model, make_batch, dtype=None):
    """Forward, backward and AdamW; weights and data are made on the CPU and the same on both devices. `dtype`: what
    autocast takes for the forward.
    """

    def build(device):
        torch.manual_seed(0)
        model = make_model()
        x, y = make_batch()
        model, x, y = model.to(device), x.to(device), y.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        # Of a jitted step all is one program; torch.compile takes forward, backward and the optimizer's step.
        forward, update = (model, optimizer.step) if COMPILED == "jit" else (compiled(model), compiled(optimizer.step))

        def train():
            with torch.autocast(device, dtype, enabled=dtype is not None):
                out = forward(x)
            loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
            loss.backward()
            update()
            # Nobody sees the gradients, as in JAX's step.
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return compiled(train) if COMPILED == "jit" else train

    return build


WORKLOADS = {
    "ops": ops,
    "chain": chain,
    "mlp": training(mlp, lambda: (torch.randn(128, 784), torch.randint(0, 10, (128,)))),
    "gpt": training(GPT, lambda: (torch.randint(0, 256, (8, 128)), torch.randint(0, 256, (8, 128)))),
    # 163 million parameters and 8,192 tokens: for GPUs and TPUs.
    "gpt2": training(
        lambda: GPT(vocab=50304, dim=768, heads=12, layers=12, block=1024),
        lambda: (torch.randint(0, 50304, (8, 1024)), torch.randint(0, 50304, (8, 1024))),
        torch.bfloat16,
    ),
    "resnet": training(resnet, lambda: (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,)))),
}


# What a CPU takes a minute for is not among those that run without being named.
ON_HARDWARE = ["gpt2"]


def timed(step, device, steps=1):
    """Seconds a step, of some that follow each other with one wait at the end, and the last result."""
    started = time.perf_counter()
    for _ in range(steps):
        result = step()
    wait(device)
    return (time.perf_counter() - started) / steps, result


# ---------------------------------------------------------------- the process that does the work


def serve(backend: str, name: str):
    """Makes as many steps as a line that comes in says; a line of JSON for each goes out, the first step's at once."""
    global COMPILED
    torch.set_num_threads(2)
    device, _, mode = backend.partition(":")
    if device == "xla":
        import torch_xla

        device = torch_xla.device()
    elif device == "inductor":
        device, COMPILED = mode, "inductor"
    elif device == "tpu":
        COMPILED = {"compile": "tpu", "jit": "jit"}.get(mode, "")
        torch.tpu.eager_mode = "fused" if COMPILED else mode
    step = WORKLOADS[name](device)
    reply(*timed(step, device))
    for line in sys.stdin:
        reply(*timed(step, device, int(line)))


def reply(seconds, result):
    """Says how long a step took; reading the result is not part of it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"ms": seconds * 1e3, "result": float(result.sum()), "peak_mib": peak / 1024}), flush=True)


# ---------------------------------------------------------------- the process that compares


class Worker:
    """A process that makes steps of one workload."""

    def __init__(self, backend: str, name: str, peers: dict[str, str], on: str = "cpu", **env: str):
        here = Path(__file__).parent
        python = peers.get(backend) or sys.executable
        script = [__file__, "--serve", f"{backend}:{on}" if backend == "inductor" else backend]
        if backend == "jax":
            script = [str(here / "jax_workloads.py")]
        # Of JAX's products in float32 the default on GPUs is TF32, and PyTorch's is not. Several processes share a GPU.
        env = {
            **os.environ,
            "JAX_PLATFORMS": on,
            "JAX_DEFAULT_MATMUL_PRECISION": "float32",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "OXITORCH_CUDA_PREALLOCATE": "0",
            "PJRT_DEVICE": "CPU",
            **env,
        }
        if backend == "xla" or (on == "cuda" and not backend.startswith("tpu")):
            env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # stock PyTorch
        pipe = subprocess.PIPE
        started = time.perf_counter()
        self.process = subprocess.Popen([python, *script, name], stdin=pipe, stdout=pipe, text=True, env=env)
        self.first = self.read()
        self.start_s = time.perf_counter() - started

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended with {self.process.wait()}")
        return json.loads(line)

    def step(self, steps: int = 1) -> dict:
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.read()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def measure(name: str, backends: list[str], peers: dict[str, str], rounds: int, steps: int, on: str) -> dict:
    """By backend: the first and the best step in milliseconds, the last result, the peak of the resident size. A turn
    has `steps`, and a step's time is their mean. Those beside ours are `on` the CPU or a GPU.
    """
    # The first step is to show what compiling takes.
    workers = {b: Worker(b, name, peers, on, OXITORCH_CACHE="off") for b in backends}
    out = {b: {"first_ms": w.first["ms"], "ms": float("inf")} for b, w in workers.items()}
    for i in range(rounds + 3):
        turns = list(workers.items())
        for backend, worker in turns[i % len(turns) :] + turns[: i % len(turns)]:
            # OpenMP's threads look for work for a while after each step, and would take a core from the next process;
            # another one comes after them in each round.
            time.sleep(0.02)
            step, row = worker.step(steps), out[backend]
            # The first rounds warm up: optimizers make their state in the second step.
            if i >= 3:
                row["ms"] = min(row["ms"], step["ms"])
            row.update(result=step["result"], peak_mib=step["peak_mib"])
    for worker in workers.values():
        worker.end()
    return out


def measure_start(name: str, mode: str, rounds: int) -> dict:
    """Seconds from starting Python to the end of the first step: with no programs in the cache, and with all."""
    best = {"cold_s": float("inf"), "warm_s": float("inf")}
    # A shim that has to be built is not what is measured.
    Worker(f"tpu:{mode}", "ops", {}, OXITORCH_CACHE="off").end()
    shims = Path(os.environ.get("OXITORCH_CACHE_DIR") or Path.home() / ".cache" / "oxitorch")
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            if (shims / "shim").is_dir():
                (Path(folder) / "shim").symlink_to(shims / "shim")
            for key in best:
                worker = Worker(f"tpu:{mode}", name, {}, OXITORCH_CACHE_DIR=folder, OXITORCH_CACHE="on")
                best[key] = min(best[key], worker.start_s)
                worker.step()
                worker.end()
    return best


def report(name: str, rows: dict, memory: bool):
    base = next(iter(rows))
    for backend, row in rows.items():
        ratio = "" if backend == base else f"{rows[base]['ms'] / row['ms']:.2f}x"
        text = f"{name:10} {backend:12} {row['ms']:10.2f} {ratio:>8} {row['first_ms']:11.0f}"
        if memory:
            share = rows[base]["peak_mib"] / row["peak_mib"]
            text += f" {row['peak_mib']:9.0f} {'' if backend == base else f'{share:.2f}x':>7}"
        print(f"{text}  {row['result']:.5f}", flush=True)


def main():
    if sys.argv[1:2] == ["--serve"]:
        return serve(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "workload", nargs="*", help=f"of {', '.join(WORKLOADS)} (default: all but {', '.join(ON_HARDWARE)})"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--steps",
        type=int,
        default=1,
        help="steps in a turn, with one wait behind them, as in a training loop",
    )
    parser.add_argument("--mode", default="fused", help="eager modes, compile or jit (default: fused)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="jax=..., xla=..., inductor")
    parser.add_argument("--on", choices=("cpu", "cuda"), default="cpu", help="where PyTorch, inductor and JAX run")
    parser.add_argument("--memory", action="store_true", help="also the peak resident size, in MiB")
    parser.add_argument("--start", action="store_true", help="measure starts instead of steps, in seconds")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.workload) - set(WORKLOADS):
        parser.error(f"unknown workload: {', '.join(sorted(unknown))}")
    peers = dict(p.partition("=")[::2] for p in args.peer)
    if unknown := set(peers) - {"jax", "xla", "inductor"}:
        parser.error(f"unknown peer: {', '.join(sorted(unknown))}")
    modes = args.mode.split(",")
    names = args.workload or [name for name in WORKLOADS if name not in ON_HARDWARE]

    if args.start:
        for name in names:
            r = {"workload": name, **measure_start(name, modes[0], min(args.rounds, 3))}
            text = f"{name:10} {modes[0]:12} cold {r['cold_s']:.2f} s, warm {r['warm_s']:.2f} s"
            print(json.dumps(r) if args.json else text, flush=True)
        return
    backends = [*(f"tpu:{m}" for m in modes), args.on, *peers]
    if not args.json:
        gpu = f", {torch.cuda.get_device_name()}" if args.on == "cuda" else ""
        turns = "" if args.steps == 1 else f" turns of {args.steps} steps"
        print(f"torch {torch.__version__}, {os.cpu_count()} cores{gpu}; milliseconds, best of {args.rounds}{turns}\n")
        sizes = f" {'peak MiB':>9} {'ratio':>7}" if args.memory else ""
        print(f"{'workload':10} {'':12} {'step':>10} {'ratio':>8} {'first step':>11}{sizes}  result")
    for name in names:
        rows = measure(name, backends, peers, args.rounds, args.steps, args.on)
        if args.json:
            print(json.dumps({"workload": name, **rows}), flush=True)
        else:
            report(name, rows, args.memory)


if __name__ == "__main__":
    main()
