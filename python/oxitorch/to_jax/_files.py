"""The files of a translation: the model, its layers, weights, a training step, and a test."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from oxitorch.to_jax import _body, _optimizers
from oxitorch.to_jax._emit import Emitter, Owner, chain, layer_sources, layers_used
from oxitorch.to_jax._text import identifier, plain

HEAD = Path(__file__).parent / "_layers.py"


class LossOwner(Owner):
    """The loss around the model, a function."""

    def __init__(self, emitter, loss):
        super().__init__(emitter, "")
        self.file, self.comments = "", {}
        code = getattr(loss, "__code__", None)
        self.file = code.co_filename if code else ""

    def attribute(self, name, x):
        return None


def model_text(emitter: Emitter, root: str, title: str) -> str:
    classes = "\n\n".join(c.text for c in emitter.classes)
    used = layers_used(classes)
    used += [n for n in ("Buffer", "Constant") if re.search(rf"\b{n}\(", classes)]
    used = sorted(set(used))
    tied = emitter.capture.tied
    renamed = sorted(
        {
            (identifier(p), p)
            for n in all_names(emitter.model)
            for p in n.split(".")
            if not p.isdigit() and identifier(p) != p
        }
    )
    members = {
        path: list(m._modules)
        for path, m in emitter.model.named_modules()
        if chain(m) and list(m._modules) != [str(i) for i in range(len(m))]
    }
    out = [f'"""{title}"""\n\n']
    if emitter.constants:
        out.append("from pathlib import Path\n\n")
    out.append("import jax\nimport jax.numpy as jnp\n")
    if emitter.constants:
        out.append("import numpy as np\n")
    out.append("from flax import nnx\n")
    if used:
        out.append(f"\nfrom .layers import {', '.join(used)}\n")
    if emitter.constants:
        out.append("\n# Values that are neither trained nor saved.\n")
        out.append('constants = np.load(Path(__file__).with_name("constants.npz"))\n')
    if tied:
        out.append("\n# PyTorch's other names of the same parameters.\nTIED = {\n")
        out += [f"    {a!r}: {b!r},\n" for a, b in tied.items()]
        out.append("}\n")
    if renamed:
        out.append(f"\n# Attributes that have another name than in PyTorch.\nRENAMED = {dict(renamed)!r}\n")
    if members:
        out.append(f"\n# Names that members of a sequence have in PyTorch.\nMEMBERS = {members!r}\n")
    out.append("\n\n" + classes)
    out.append(
        f"\n\ndef create(seed: int = 0) -> {root}:\n"
        '    """The model with random weights; `weights.from_torch` gives it others."""\n'
        f"    return {plain(emitter.made[''])[:-10]}rngs=nnx.Rngs(seed))\n"
    )
    text = "".join(out)
    if not re.search(r"\bjax\.(?!numpy)", text.split("from flax")[1]):
        text = text.replace("import jax\nimport jax.numpy as jnp\n", "import jax.numpy as jnp\n", 1)
    if "jnp." not in text.split("from flax")[1]:
        text = text.replace("import jax.numpy as jnp\n", "", 1)
    return text


def all_names(model):
    return [
        n
        for n, _ in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
            *model.named_modules(),
        ]
    ]


def layers_text(names: list[str]) -> str:
    """The part of `_layers.py` that these need."""
    sources = layer_sources()
    # `weights.py` knows the kinds of values, and a problem has its function.
    need = ["Buffer", "Constant", *names]
    for name in need:
        for other in layers_used(sources[name]):
            if other not in need:
                need.append(other)
    body = "\n\n".join(text for name, text in sources.items() if name in need)
    imports = {
        "math": "import math\n\n",
        "jax": "import jax\n",
        "jnp": "import jax.numpy as jnp\n",
        "optax": "import optax\n",
        "nnx": "from flax import nnx\n",
        "lax": "from jax import lax\n",
    }
    head = "".join(line for word, line in imports.items() if re.search(rf"(?<![\w.]){word}\.", body))
    return (
        '"""Layers and functions that jax and flax have not, or have with another meaning.\n\n'
        "Parameters have PyTorch's names and layouts, and images their channels before height and width.\n"
        f'"""\n\n{head}\n\n{body}'
    )


def different(names):
    """The names, with numbers where one comes again."""
    return [n if n not in names[:i] else f"{n}_{i}" for i, n in enumerate(names)]


def train_text(emitter: Emitter, loss, training) -> str:
    used = []
    if loss is None:
        names = different([identifier(v.name or v.other_name or "x") for v in emitter.capture.root.inputs])
        body = (
            f"    leaves = jax.tree.leaves(model({', '.join(names)}))\n"
            "    out = [x.astype(jnp.float32) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]\n"
            "    return sum(jnp.square(x).mean() for x in out)\n"
        )
        doc = "The mean of the squares of all results: a stand-in, as no loss was given."
    else:
        scope = emitter.capture.top
        owner = LossOwner(emitter, loss)
        written = _body.Body(scope, emitter.capture, owner).write()
        names = written.parameters
        body = "".join("    " * (i + 1) + plain(t) + "\n" for i, t, _ in written.lines)
        doc = f"From `{getattr(loss, '__qualname__', type(loss).__name__)}`."
        used = layers_used(body)
    tx, problems = _optimizers.text(model=emitter.model, **training)
    emitter.problems += problems
    used = sorted({*used, *layers_used(tx)})
    layers = f"from .layers import {', '.join(used)}\n" if used else ""
    weights = "from .weights import labels\n" if "GROUPS" in tx else ""
    batch = ", ".join(names)
    needs_jax = "import jax\n" if re.search(r"\bjax\.", body + tx) else ""
    needs_jnp = "import jax.numpy as jnp\n" if "jnp." in body + tx else ""
    return f'''"""A training step."""

{needs_jax}{needs_jnp}import optax
from flax import nnx
{chr(10) + layers + weights if layers + weights else ""}

def loss_fn(model, {batch}):
    """{doc}"""
{body}

{tx}

def create_optimizer(model):
    """The optimizer, with its state for the model's parameters."""
    return nnx.Optimizer(model, transformation({"model" if weights else ""}), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, {batch}):
    """One step of training; returns the loss before it."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, {batch})
    optimizer.update(model, grads)
    return loss
'''


TEMPLATES = Path(__file__).parent / "templates"


def write(folder: Path, emitter: Emitter, loss, training: dict, title: str):
    """Writes the package. `training` has the optimizer, and what `_optimizers.text` takes besides."""
    folder.mkdir(parents=True, exist_ok=True)
    root = emitter.classes[-1].name
    model = model_text(emitter, root, title)
    train = train_text(emitter, loss, training)
    (folder / "model.py").write_text(model)
    (folder / "train.py").write_text(train)
    (folder / "layers.py").write_text(layers_text(layers_used(model + train)))
    (folder / "__init__.py").write_text("")
    for name in ("weights.py", "test_model.py"):
        shutil.copy(TEMPLATES / name, folder / name)
    if emitter.constants:
        arrays = {
            k: (v.float() if v.dtype == torch.bfloat16 else v).cpu().numpy() for k, v in emitter.constants.items()
        }
        np.savez_compressed(folder / "constants.npz", **arrays)
    elif (folder / "constants.npz").exists():
        (folder / "constants.npz").unlink()
    tidy(folder)


def tidy(folder: Path):
    """Has ruff format the files, where it is installed; Python reads them either way."""
    ruff = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))
    if Path(ruff).exists():
        files = [str(folder / n) for n in ("model.py", "train.py", "layers.py")]
        subprocess.run(
            [ruff, "format", "-q", "--isolated", "--line-length", "110", *files], check=False, capture_output=True
        )
