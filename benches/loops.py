"""Layers in a loop against layers one by one: seconds to compile, seconds of a step, memory.

    python benches/loops.py [--layers 24] [--width 128] [--batch 8] [--length 128]

A training step of a decoder's layers in `torch.tpu.jit`, forward and backward, for each way to keep what the backward
needs. Seconds are the processor's, of all threads. Ways take turns, so that a slow moment of the machine is
nobody's alone.
"""

import argparse
import os
import statistics
import time

os.environ["OXITORCH_CACHE"] = "off"  # nothing is known

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.joint(self.first(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def step_of(model):
    @torch.tpu.jit
    def step(x):
        for p in model.parameters():
            p.grad = None
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return step


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 24), ("width", 128), ("batch", 8), ("length", 128), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.tpu.set_background_compile(False)
    x = torch.randn(options.batch, options.length, options.width, device="tpu")
    steps, compiled = {}, {}

    def step_in(name: str, width: int, layers: int):
        torch.manual_seed(0)
        stack = nn.Sequential(*(Layer(width, width // 64) for _ in range(layers)))
        model = stack if name == "one by one" else torch.tpu.scan_layers(stack, remat=name)
        return step_of(model.to("tpu"))

    for name in ("one by one", "none", "dots", "full"):
        step_in(name, 64, 2)(x[..., :64].contiguous()).item()  # imports what the first one would
        steps[name] = step_in(name, options.width, options.layers)
        torch.tpu.synchronize()
        start = time.process_time()
        program = steps[name].lower(x).compile()
        memory = program.memory_analysis()
        compiled[name] = time.process_time() - start, memory["temporaries"]
        for _ in range(2):
            steps[name](x).item()
    seconds = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            start = time.process_time()
            step(x).item()
            seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(all_of) for name, all_of in seconds.items()}
    for name, (took, temporaries) in compiled.items():
        fewer, slower = compiled["one by one"][0] / took, medians[name] / medians["one by one"]
        print(
            f"{name:11} compiled in {took:6.2f} s ({fewer:4.1f}x less), temporaries {temporaries / 2**20:7.1f} MiB, "
            f"step {medians[name] * 1e3:7.1f} ms ({slower:.2f}x)"
        )


if __name__ == "__main__":
    main()
