"""Sparse matrices and sparse gradients, on the device and by PyTorch on the CPU in turns; the best of several.

    python benches/sparse.py
    python benches/sparse.py --check        # a product and its backward may take 1.5 times as long

A graph of 10,000 nodes and 100,000 edges with 64 features; tables of 10,000 and 5,000 rows of which a step takes 512.
"""

import argparse
import sys
import time
import warnings

import torch
from torch import nn

NODES, EDGES, FEATURES = 10_000, 100_000, 64
LIMIT = 1.5
DEVICES = ("tpu", "cpu")


def best(functions: dict, rounds: int) -> dict[str, float]:
    """Milliseconds of each function, which returns what it computed."""
    found = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for device, f in functions.items():
            started = time.perf_counter()
            kept = f()
            if device != "cpu":
                torch.tpu.synchronize()
            found[device] = min(found[device], (time.perf_counter() - started) * 1e3)
            del kept
    return found


def product(layout: torch.layout, device: str):
    """`torch.sparse.mm`, and with its backward for the dense matrix."""
    generator = torch.Generator().manual_seed(0)
    at = torch.randint(NODES, (2, EDGES), generator=generator)
    a = torch.sparse_coo_tensor(at, torch.rand(EDGES, generator=generator), (NODES, NODES)).coalesce()
    if layout == torch.sparse_csr:
        a = a.to_sparse_csr()
    a, x = a.to(device), torch.randn(NODES, FEATURES, generator=generator).to(device).requires_grad_()
    out = torch.ones(NODES, FEATURES, device=device)

    def forward():
        with torch.no_grad():
            return torch.sparse.mm(a, x)

    def both():
        y = torch.sparse.mm(a, x)
        return y, torch.autograd.grad(y, x, out)

    return forward, both


def recommender(optimizer, device: str):
    """A step of two tables with sparse gradients."""
    generator = torch.Generator().manual_seed(0)
    users, items = nn.Embedding(10_000, 16, sparse=True), nn.Embedding(5_000, 16, sparse=True)
    model = nn.ModuleList([users, items]).to(device)
    steps = optimizer(list(model.parameters()))

    def step():
        u = torch.randint(10_000, (512,), generator=generator).to(device)
        i = torch.randint(5_000, (512,), generator=generator).to(device)
        loss = ((users(u) * items(i)).sum(-1) - 1).square().mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
        return loss

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse CSR")
    torch.sparse.check_sparse_tensor_invariants.disable()
    too_slow = False
    print(f"{'milliseconds':24}{'tpu':>9}{'cpu':>9}{'ratio':>8}")

    def row(name: str, found: dict[str, float], limit: float | None = None) -> None:
        nonlocal too_slow
        ratio = found["tpu"] / found["cpu"]
        too_slow |= limit is not None and ratio > limit
        print(f"{name:24}{found['tpu']:9.2f}{found['cpu']:9.2f}{ratio:7.2f}x")

    for layout, name in ((torch.sparse_coo, "COO"), (torch.sparse_csr, "CSR")):
        forward, both = zip(*(product(layout, device) for device in DEVICES), strict=True)
        row(f"{name} product", best(dict(zip(DEVICES, forward, strict=True)), args.rounds))
        row(f"{name} product, backward", best(dict(zip(DEVICES, both, strict=True)), args.rounds), LIMIT)
    optimizers = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
        "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
    }
    for name, optimizer in optimizers.items():
        row(f"tables, {name}", best({d: recommender(optimizer, d) for d in DEVICES}, args.rounds))
    if args.check and too_slow:
        print(f"a product with its backward takes more than {LIMIT} times as long as on the CPU", file=sys.stderr)
    return int(args.check and too_slow)


if __name__ == "__main__":
    sys.exit(main())
