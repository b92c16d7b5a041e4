"""What `oxitorch preflight --parallel` says of the GPT of `workloads.py`, and what XLA says of the same step in JAX
with the same shardings on the same slice: memory of a chip, FLOPs, and the bytes of collectives.

    python benches/preflight_jax.py PYTHON --slice v5e-4 v5e-8 --parallel dp fsdp

Both environments need `libtpu`, the same version; PYTHON is the interpreter of one with `jax` and `optax`. No TPU is
needed. The gradients are among the results of both steps, as a script holds them until the next one.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent

SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import torch, torch.nn.functional as F
from workloads import GPT

torch.manual_seed(0)
model = GPT().to("tpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(9):
    x, y = (torch.randint(0, 256, ({batch}, 128)).to("tpu") for _ in "xy")
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
"""

# What an instruction sends, by its operands: the shapes in its result's type are those after it.
COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
SHAPE = re.compile(r"\b(f32|bf16|s32|u32|pred|f16|s64)\[([\d,]*)\]")
BYTES = {"f32": 4, "s32": 4, "u32": 4, "s64": 8, "bf16": 2, "f16": 2, "pred": 1}


def of_oxitorch(slice_name, parallel, effort, batch):
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "gpt.py")
        script.write_text(SCRIPT.format(here=str(HERE), batch=batch))
        argv = [sys.executable, "-m", "oxitorch", "preflight", "--slice", slice_name, "--parallel", parallel]
        argv += ["--effort", effort, "--json", "-", str(script)]
        done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    (judged,) = json.loads(done.stdout)["slices"]
    (program,) = [p for p in judged["programs"] if p["launches_in_last_step"]]
    memory, step = program["memory_bytes"], judged["step"]
    sums = {c["kind"]: c["bytes"] for c in step["collectives"]}
    numbers = {k: memory[k] for k in ("arguments", "outputs", "aliased", "temporaries", "peak")}
    return {**numbers, "flops": step["flops"], "topology": judged["topology"], "collectives": sums}


def of_jax(topology, parallel, effort, batch):
    """Runs in the other environment."""
    import jax
    import jax.numpy as jnp
    import jax_workloads
    import numpy as np
    import optax
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    if effort == "fast":
        jax.config.update("jax_optimization_level", "O0")
    devices = topologies.get_topology_desc(topology, "tpu").devices
    n = len(devices)
    mesh = Mesh(np.array(devices), ("data",))

    def split(path, x):
        dims = [d for d in range(x.ndim) if x.shape[d] % n == 0]
        if parallel == "dp" or math.prod(x.shape) < 1024 or not dims:
            return NamedSharding(mesh, P())
        # Of equal sides PyTorch's first one: its weights are transposed, its tables are not.
        table = any(getattr(key, "key", None) in ("token", "position") for key in path)
        dim = max(dims, key=lambda d: (x.shape[d], -d if table else d))
        return NamedSharding(mesh, P(*["data" if d == dim else None for d in range(x.ndim)]))

    def shardings(tree):
        return jax.tree_util.tree_map_with_path(split, tree)

    weights = jax.eval_shape(jax_workloads.gpt_weights)
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(optimizer.init, weights)

    def step(p, state, x, y):
        def loss_of(p):
            return optax.softmax_cross_entropy_with_integer_labels(jax_workloads.gpt(p, x), y).mean()

        loss, gradients = jax.value_and_grad(loss_of)(p)
        updates, state = optimizer.update(gradients, state, p)
        return optax.apply_updates(p, updates), state, gradients, loss

    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    held = (shardings(weights), shardings(state))
    jitted = jax.jit(
        step,
        in_shardings=(*held, rows, rows),
        out_shardings=(*held, shardings(weights), whole),
        donate_argnums=(0, 1),
    )
    tokens = jax.ShapeDtypeStruct((batch, 128), jnp.int32)
    with jax.default_matmul_precision("highest"):
        compiled = jitted.lower(weights, state, tokens, tokens).compile()
    m = compiled.memory_analysis()
    return {
        "arguments": m.argument_size_in_bytes,
        "outputs": m.output_size_in_bytes,
        "aliased": m.alias_size_in_bytes,
        "temporaries": m.temp_size_in_bytes,
        "peak": m.peak_memory_in_bytes,
        "flops": compiled.cost_analysis()["flops"],
        "collectives": collectives(compiled.as_text()),
    }


def collectives(text):
    """Bytes by kind. A reduce-scatter of libtpu is a fusion with an all-reduce; others go on in further fusions."""
    sums, computation = {}, ""
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            computation = line.removeprefix("ENTRY ").lstrip("%")
        found = COLLECTIVE.search(line)
        if not found or re.search(r'"async_collective_fusion_config":\{"flag_start":"(?!-1")', line):
            continue
        types, kind = found.groups()
        shapes = SHAPE.findall(types)
        if "-start(" in line and len(shapes) > 1:
            shapes = shapes[len(shapes) // 2 :]  # operands, then results
        size = sum(BYTES[t] * math.prod(int(n) for n in dims.split(",") if n) for t, dims in shapes)
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        sums[kind] = sums.get(kind, 0) + size
    return sums


def peer(python, *args):
    """Runs `of_jax` there."""
    env = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    code = f"import json, preflight_jax; print('said', json.dumps(preflight_jax.of_jax(*{args!r})))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=env, cwd=HERE)
    said = [line for line in done.stdout.splitlines() if line.startswith("said ")]
    if not said:
        raise SystemExit(done.stderr)
    return json.loads(said[-1].removeprefix("said "))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="an interpreter with jax and optax")
    parser.add_argument("--slice", nargs="+", default=["v5e-4"])
    parser.add_argument("--parallel", nargs="+", default=["dp", "fsdp"], choices=["dp", "fsdp"])
    parser.add_argument("--effort", default="fast", choices=["fast", "full"])
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    for name in args.slice:
        for parallel in args.parallel:
            ours = of_oxitorch(name, parallel, args.effort, args.batch)
            theirs = peer(args.python, ours.pop("topology"), parallel, args.effort, args.batch)
            for side in (ours, theirs):
                side |= side.pop("collectives")
            print(f"\n{name} {parallel:5} {'oxitorch':>14} {'jax':>14}  difference")
            for key in dict.fromkeys([*ours, *theirs]):
                a, b = ours.get(key, 0), theirs.get(key, 0)
                share = f"{100 * (a - b) / b:+.2f} %" if b else "-"
                print(f"  {key:18} {a:14.0f} {b:14.0f}  {share}")


if __name__ == "__main__":
    main()
