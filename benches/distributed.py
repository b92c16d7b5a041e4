"""Training and collectives in two processes: what the second one costs, on the device and on PyTorch's CPU with gloo.

    python benches/distributed.py              # all: recording, collectives, training, functions of jit, comparison
    python benches/distributed.py ddp --rounds 20 --json

Each process has one core of its own, so that one process alone and each of two have the same threads. A step's cost is
the time of a step in two processes by that of one process with the same share of the batch. Device and CPU take turns.

`record` is what a call costs until Python goes on, with launches held, in calls of a tiny operation (`x.add_(1)`). What
of it is PyTorch's own shows a group of PyTorch's that does nothing (`fake`), on CPU tensors.
`jit` is the same of calls of functions of `torch.tpu.jit` with so many operations and collectives, against eager mode;
and a step of DDP on a small model, until its loss is there, by `torch.tpu.jit` and in eager mode in turn.

A collective is read after each call, or once after a chain of calls.

`check` is a DDP step in which ranks compare what they are about to do, as ever, in turns with one in which they do not.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
KINDS = ("record", "jit", *COLLECTIVES, "ddp", "fsdp2", "check")
# Elements of the larger tensor of a collective.
SIZES = {"4 B": 1, "4 KB": 1 << 10, "64 KB": 1 << 14, "1 MB": 1 << 18, "16 MB": 1 << 22, "64 MB": 1 << 24}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], help="what to measure; all if none is named")
    parser.add_argument("--rounds", type=int, default=10, help="measurements of each, of which the median is taken")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    args = parser.parse_args()
    if "OXITORCH_BENCH_FOLDER" in os.environ:
        return _rank(args)
    found = {}
    for kind in args.kinds or KINDS:
        two = _run(kind, 2, args.rounds)
        if kind in ("record", "jit"):
            found[kind] = two
        elif kind == "check":
            found[kind] = two | {"cost": two["compared"] / two["not compared"] - 1}
        elif kind in COLLECTIVES:
            found[kind] = {what: t | {"ratio": t["tpu"] / t["cpu"]} for what, t in two.items()}
        else:
            one = _run(kind, 1, args.rounds)
            cost = {device: two[device] / one[device] for device in ("tpu", "cpu")}
            found[kind] = {"one": one, "two": two, "cost": cost, "ratio": cost["tpu"] / cost["cpu"]}
    if args.json:
        print(json.dumps(found))
        return
    for kind, rows in found.items():
        if kind == "record":
            for call, seconds in rows.items():
                print(f"record {call:22} {seconds * 1e6:6.2f} us  {seconds / rows['add_']:5.2f}x add_")
        elif kind == "check":
            times = "  ".join(f"{what} {rows[what] * 1e3:8.2f} ms" for what in ("compared", "not compared"))
            print(f"{kind:10} {times}  {rows['messages']:.0f} messages a step  {rows['cost']:+.2%}")
        elif kind == "jit":
            for name, t in rows.items():
                jit, eager = t["jit"] * 1e6, t["eager"] * 1e6
                print(f"jit {name:32} {jit:8.1f} us  eager {eager:8.1f} us  {jit / eager:5.2f}x")
        elif kind in COLLECTIVES:
            for what, t in rows.items():
                times = "  ".join(f"{device} {t[device] * 1e3:9.3f} ms" for device in ("tpu", "cpu"))
                print(f"{kind:14} {what:>14}  {times}  {t['ratio']:5.2f}x")
        else:
            for device in ("tpu", "cpu"):
                one, two = rows["one"][device] * 1e3, rows["two"][device] * 1e3
                print(f"{kind:10} {device}  alone {one:8.2f} ms  two {two:8.2f} ms  {rows['cost'][device]:5.2f}x")
            print(f"{kind:10} the device's cost by the CPU's: {rows['ratio']:.2f}x")


def _run(kind: str, size: int, rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"OXITORCH_BENCH_FOLDER": folder, "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, kind, "--rounds", str(rounds)]
        ranks = [subprocess.Popen(command, env=env | {"RANK": str(rank)}) for rank in range(size)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"{kind}: a process failed")
        with open(f"{folder}/found") as file:
            return json.load(file)


def _rank(args) -> None:
    rank, size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["OXITORCH_BENCH_FOLDER"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("cpu:gloo,tpu:tpu", store=store, rank=rank, world_size=size)
    kind = args.kinds[0]
    measures = {"record": _record, "jit": _jit, "check": _check} | dict.fromkeys(COLLECTIVES, _collective)
    measure = measures.get(kind, _steps)
    found = measure(torch, dist, kind, args.rounds)
    if rank == 0:
        with open(f"{folder}/found", "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def _record(torch, dist, _kind: str, rounds: int) -> dict:
    from oxitorch import _core

    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # makes the backend known

    nothing, x, host = dist.new_group(backend="fake"), torch.ones(4, device="tpu"), torch.ones(4)
    two = torch.ones(8, device="tpu")

    def after_op():
        x.add_(1)
        dist.all_reduce(x)

    calls = {
        "add_": lambda: x.add_(1),
        "all_reduce": lambda: dist.all_reduce(x),
        "add_ and all_reduce": after_op,
        "all_reduce, async_op": lambda: dist.all_reduce(x, async_op=True),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(two, x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, two),
        "PyTorch's all_reduce": lambda: dist.all_reduce(host, group=nothing),
    }
    best = dict.fromkeys(calls, float("inf"))
    for i in range(rounds + 2):
        for name, call in calls.items():
            torch.tpu.synchronize()
            _core.hold_launches(True)
            start = time.perf_counter()
            for _ in range(100):
                call()
            if i >= 2:
                best[name] = min(best[name], (time.perf_counter() - start) / 100)
            _core.hold_launches(False)
            torch.tpu.synchronize()
    return best


def _jit(torch, dist, _kind: str, rounds: int) -> dict:
    from oxitorch import _core
    from torch import nn

    def function(ops: int, collectives: int):
        def f(x):
            for _ in range(max(collectives, 1)):
                for _ in range(ops // max(collectives, 1)):
                    x = x * 1.5
                if collectives:
                    dist.all_reduce(x)
            return x

        return f

    found, x = {}, torch.ones(4, device="tpu")
    for ops, collectives in ((128, 0), (128, 1), (128, 4), (128, 16), (16, 16), (512, 16)):
        f = function(ops, collectives)
        calls = {"jit": torch.tpu.jit(f), "eager": f}
        best = dict.fromkeys(calls, float("inf"))
        for i in range(rounds + 3):
            for name, call in calls.items():
                torch.tpu.synchronize()
                dist.barrier()
                _core.hold_launches(True)
                start = time.perf_counter()
                call(x)
                if i >= 3:
                    best[name] = min(best[name], time.perf_counter() - start)
                _core.hold_launches(False)
        found[f"{ops} operations, {collectives} collectives"] = best
    torch.tpu.synchronize()

    def stepper(jit: bool):
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to("tpu"), bucket_cap_mb=0.05)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return torch.tpu.jit(step) if jit else step

    steps = {"jit": stepper(True), "eager": stepper(False)}
    times = {name: [] for name in steps}
    x = torch.randn(32, 64, device="tpu")
    for i in range(10 * rounds + 20):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(x).item()
            torch.tpu.synchronize()
            if i >= 20:
                times[name].append(time.perf_counter() - start)
    return found | {"a step of DDP": {name: statistics.median(t) for name, t in times.items()}}


def _collective(torch, dist, kind: str, rounds: int) -> dict:
    found = {}
    for name, elements in SIZES.items():
        if kind != "all_reduce" and elements < dist.get_world_size():
            continue
        calls = {device: _call(torch, dist, kind, elements, device) for device in ("tpu", "cpu")}
        repeat = 1 if elements > 1 << 18 else 20
        for chained in (False, True):
            times = {device: [] for device in calls}
            for i in range(rounds + 2):
                for device, call in calls.items():
                    wait = torch.tpu.synchronize if device == "tpu" else lambda: None
                    dist.barrier()
                    start = time.perf_counter()
                    for _ in range(repeat):
                        call()
                        if not chained:
                            wait()
                    wait()
                    if i >= 2:
                        times[device].append((time.perf_counter() - start) / repeat)
            median = {device: statistics.median(t) for device, t in times.items()}
            found[f"{name}, chain" if chained else name] = median
    return found


def _call(torch, dist, kind: str, elements: int, device: str):
    x = torch.ones(elements, device=device)
    part = torch.ones(elements // dist.get_world_size(), device=device)
    return {
        "all_reduce": lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
        "all_gather": lambda: dist.all_gather_into_tensor(x, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, x),
    }[kind]


def _check(torch, dist, _kind: str, rounds: int) -> dict:
    step = _stepper(torch, dist, "ddp", "tpu")
    times = {"compared": [], "not compared": []}
    messages = torch.ops.oxitorch._group_messages
    sent = 0
    for i in range(2 * rounds + 3):
        # In pairs that change places, so that neither is always the first.
        for what in sorted(times, reverse=i % 2 == 1):
            dist.barrier()
            torch.ops.oxitorch._group_compares(what == "compared")
            before, start = messages()[0], time.perf_counter()
            step()
            if i >= 3:
                times[what].append(time.perf_counter() - start)
            if what == "compared":
                sent = messages()[0] - before
    torch.ops.oxitorch._group_compares(True)
    return {what: statistics.median(t) for what, t in times.items()} | {"messages": sent}


def _stepper(torch, dist, kind: str, device: str):
    """A function that trains one step."""
    from torch import nn

    def model():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        return nn.Sequential(
            nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(256, 1000)
        )

    def wrapped():
        m = model().to(device)
        if kind == "ddp":
            return nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for block in m[1].layers:
            fully_shard(block, mesh=mesh)
        return fully_shard(m, mesh=mesh)

    m = wrapped()
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-4)
    ids = torch.randint(0, 1000, (8, 128)).to(device)

    def step():
        loss = nn.functional.cross_entropy(m(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        torch.tpu.synchronize()  # else what is left runs in the time of the CPU's step

    return step


def _steps(torch, dist, kind: str, rounds: int) -> dict:
    # FSDP2 takes one device type in a process: the CPU's step has a run of its own there.
    steps = {device: _stepper(torch, dist, kind, device) for device in ("tpu", "cpu")}
    times = {device: [] for device in steps}
    for i in range(rounds + 3):
        for device, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if i >= 3:
                times[device].append(time.perf_counter() - start)
    return {device: statistics.median(t) for device, t in times.items()}


if __name__ == "__main__":
    main()
