"""Whole training steps against stock PyTorch on the CPU: one definition of the work, both in one process, in turns.

    python benches/workloads.py                       # all workloads
    python benches/workloads.py gpt resnet --rounds 5
    python benches/workloads.py --json

Run it on a quiet machine and compare ratios within one run only; everything else about the machine moves.
"""

import argparse
import json
import os
import time

# The first step is to show what compiling takes.
os.environ.setdefault("OXITORCH_CACHE", "off")

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


COMPILED = False


def compiled(f, device):
    """`f`, through `torch.compile` on our device in mode "compile"."""
    return torch.compile(f, backend="tpu") if COMPILED and device == "tpu" else f


def wait(device):
    if device == "tpu":
        torch.tpu.synchronize()


def ops(device):
    """1000 dependent adds on 4 floats, then one wait."""
    a, b = torch.ones(4, device=device), torch.ones(4, device=device)

    def add(c):
        for _ in range(1000):
            c = c + b
        return c

    add = compiled(add, device)

    def step():
        c = add(a)
        wait(device)
        return c.sum()

    return step


def chain(device):
    """40 elementwise operations on 4 MiB."""
    torch.manual_seed(0)
    x = torch.randn(1024, 1024).to(device)

    def run(y):
        for _ in range(10):
            y = torch.tanh(y * 1.01 + 0.1) - 0.05
        return y

    run = compiled(run, device)

    def step():
        y = run(x)
        wait(device)
        return y.sum()

    return step


def training(make_model, make_batch):
    """Forward, backward and AdamW; weights and data are made on the CPU and the same on both devices."""

    def build(device):
        torch.manual_seed(0)
        model = make_model()
        x, y = make_batch()
        model, x, y = model.to(device), x.to(device), y.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        forward, update = compiled(model, device), compiled(optimizer.step, device)

        def step():
            optimizer.zero_grad(set_to_none=True)
            out = forward(x)
            loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
            loss.backward()
            update()
            wait(device)
            return loss.detach()

        return step

    return build


WORKLOADS = {
    "ops": ops,
    "chain": chain,
    "mlp": training(mlp, lambda: (torch.randn(128, 784), torch.randint(0, 10, (128,)))),
    "gpt": training(GPT, lambda: (torch.randint(0, 256, (8, 128)), torch.randint(0, 256, (8, 128)))),
    "resnet": training(resnet, lambda: (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,)))),
}


def timed(step):
    started = time.perf_counter()
    result = step()
    return time.perf_counter() - started, result


def measure(name: str, rounds: int) -> dict:
    """First and best step of both, in milliseconds, and the last losses."""
    out: dict = {"workload": name}
    steps = {}
    for device in ("cpu", "tpu"):
        steps[device] = WORKLOADS[name](device)
        first, _ = timed(steps[device])
        out[f"{device}_first_ms"] = first * 1e3
    best = dict.fromkeys(steps, float("inf"))
    for i in range(rounds + 3):
        for device, step in steps.items():
            seconds, result = timed(step)
            # The first rounds warm up: optimizers make their state in the second step.
            if i >= 3:
                best[device] = min(best[device], seconds)
            out[f"{device}_result"] = result
    for device in steps:
        out[f"{device}_ms"] = best[device] * 1e3
        out[f"{device}_result"] = out[f"{device}_result"].item()
    out["ratio"] = out["tpu_ms"] / out["cpu_ms"]
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "workload", nargs="*", choices=[*WORKLOADS, []], help=f"of {', '.join(WORKLOADS)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mode", default="fused", help="the eager mode, or compile (default: fused)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.workload) - set(WORKLOADS):
        parser.error(f"unknown workload: {', '.join(sorted(unknown))}")

    torch.set_num_threads(2)
    global COMPILED
    COMPILED = args.mode == "compile"
    torch.tpu.eager_mode = "fused" if COMPILED else args.mode
    if not args.json:
        print(f"torch {torch.__version__}, {torch.tpu.get_device_name()}, {args.mode} mode, {os.cpu_count()} cores")
        print(f"milliseconds, best of {args.rounds}\n")
        print(
            f"{'workload':10} {'oxitorch':>10} {'PyTorch CPU':>12} {'ratio':>7} {'first step':>11}  result here, there"
        )
    for name in args.workload or WORKLOADS:
        r = measure(name, args.rounds)
        times = f"{r['tpu_ms']:10.2f} {r['cpu_ms']:12.2f} {r['ratio']:6.2f}x {r['tpu_first_ms']:11.0f}"
        text = f"{name:10} {times}  {r['tpu_result']:.5f}, {r['cpu_result']:.5f}"
        print(json.dumps(r) if args.json else text, flush=True)


if __name__ == "__main__":
    main()
