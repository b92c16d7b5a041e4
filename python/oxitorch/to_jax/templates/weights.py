"""Weights of the PyTorch model into this one and back, by PyTorch's names."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import model as _model
from .layers import Buffer

TIED = getattr(_model, "TIED", {})
RENAMED = getattr(_model, "RENAMED", {})
MEMBERS = getattr(_model, "MEMBERS", {})

# Where a layer of flax has another name for a parameter, and whether its matrix is the transpose.
LAYERS = {
    nnx.Linear: {"kernel": ("weight", True)},
    nnx.LayerNorm: {"scale": ("weight", False)},
    nnx.RMSNorm: {"scale": ("weight", False)},
    nnx.Embed: {"embedding": ("weight", False)},
}


def variables(layer, prefix=""):
    """PyTorch's name, the variable, and whether it is the transpose, of all that PyTorch's state has."""
    if isinstance(layer, nnx.Sequential):
        names = MEMBERS.get(prefix[:-1]) or [str(i) for i in range(len(layer.layers))]
        members = zip(names, layer.layers, strict=True)
    elif isinstance(layer, nnx.List):
        members = [(str(i), x) for i, x in enumerate(layer)]
    elif isinstance(layer, nnx.Dict):
        members = list(layer.items())
    else:
        members = [(RENAMED.get(k, k), x) for k, x in vars(layer).items()]
    for name, x in members:
        if isinstance(x, nnx.Param | Buffer):
            torch_name, turned = LAYERS.get(type(layer), {}).get(name, (name, False))
            yield prefix + torch_name, x, turned
        elif isinstance(x, nnx.Module | nnx.List | nnx.Dict):
            yield from variables(x, f"{prefix}{name}.")


def from_torch(model, state):
    """Sets the model's values to those of a `state_dict` (tensors or arrays, by name); returns the model.

    Of tied parameters one name is enough. Raises KeyError for names that are missing, or are none of the model's.
    """
    # By the name that a parameter has here, whichever of its names the state has.
    state = {TIED.get(name, name): value for name, value in state.items()}
    found = list(variables(model))
    names = {name for name, _, _ in found}
    if state.keys() != names:
        missing, unknown = sorted(names - state.keys()), sorted(state.keys() - names)
        raise KeyError(f"the state has no {', '.join(missing) or '-'}; the model has no {', '.join(unknown) or '-'}")
    for name, variable, turned in found:
        value = state[name]
        value = np.asarray(value.detach().cpu().float() if hasattr(value, "detach") else value)
        value = value.T if turned else value
        old = variable.get_value()
        if value.shape != old.shape:
            raise ValueError(f"{name} has the shape {value.shape}, expected {old.shape}")
        variable.set_value(jnp.asarray(value, old.dtype))
    return model


def load(model, path):
    """Sets the model's values to those of a safetensors file that PyTorch's model was saved to; returns the model."""
    from safetensors.flax import load_file

    return from_torch(model, load_file(path))


def save(model, path):
    """Saves the model's values to a safetensors file, for PyTorch's `load_state_dict`."""
    from safetensors.numpy import save_file

    save_file(to_torch(model), path)


def to_torch(model):
    """The model's values by PyTorch's names, as arrays: `torch.from_numpy` of each is a `state_dict`."""
    out = {}
    for name, variable, turned in variables(model):
        value = np.array(variable.get_value())
        out[name] = np.ascontiguousarray(value.T) if turned else value
    for name, same in TIED.items():
        out[name] = out[same]
    return out


def gradients(model, grads):
    """Gradients, as `nnx.grad` gives them, by PyTorch's names."""
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    return {
        n: v for n, v in to_torch(nnx.merge(graphdef, grads, rest)).items() if n not in TIED and not is_buffer(model, n)
    }


def is_buffer(model, name):
    return any(n == name and isinstance(v, Buffer) for n, v, _ in variables(model))


def labels(model, groups, other):
    """For optax.partition: the group of each parameter, of which `groups` has PyTorch's names."""
    of = {name: label for label, names in groups.items() for name in names}
    names = {id(variable): name for name, variable, _ in variables(model)}
    by_path = {path: of.get(names.get(id(x)), other) for path, x in nnx.iter_graph(model)}
    return lambda params: nnx.map_state(lambda path, _: by_path[path], params)
