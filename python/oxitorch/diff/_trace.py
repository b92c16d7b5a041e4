"""The file of a recorded run: a zip archive of one JSON text and the bytes of tensors, each named by its digest.

A file of another machine is data: reading it runs nothing, and what does not fit together is a ValueError.
"""

import hashlib
import json
import os
import zipfile
from typing import Any

import torch

VERSION = 1


# What each part of the text has at least.
_FIELDS = {
    "header": {"platform", "device", "devices", "torch"},
    "value": {"digest", "dtype", "shape", "nan", "inf"},
    "op": {"name", "step", "phase", "module", "line", "args", "kwargs", "results"},
    "module": {"name", "step", "call", "depth", "op", "outputs"},
    "step": {"step"},
    "gradient": {"name", "step", "value"},
}


class Writer:
    """Writes a file. Tensors go into it as they come, the text when it is closed."""

    def __init__(self, path: str | os.PathLike):
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._there: set[str] = set()

    def value(self, tensor: torch.Tensor) -> dict:
        """Writes a tensor of the host, if none of the same bytes is there; gives what the text says of it."""
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        if digest not in self._there:
            self._there.add(digest)
            self._zip.writestr(f"values/{digest}", data)
        nan = inf = 0
        if tensor.is_floating_point() or tensor.is_complex():
            # One pass, as most tensors have neither; there is no sum of float8.
            total = tensor.sum() if tensor.element_size() > 1 else tensor
            if not torch.isfinite(total).all():
                nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"digest": digest, "dtype": dtype, "shape": list(tensor.shape), "nan": nan, "inf": inf}

    def close(self, text: dict) -> None:
        """Writes the text; without it the file is not one of ours."""
        self._zip.writestr("trace.json", json.dumps({"version": VERSION, **text}), zipfile.ZIP_DEFLATED)
        self._zip.close()


class Trace:
    """A recorded run: `header`, `ops`, `modules`, `steps`, `gradients` as the recorder wrote them, and its tensors.

    Raises:
        ValueError: the file is no recorded run, or of another version.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        try:
            self._zip = zipfile.ZipFile(path)
            with self._zip.open("trace.json") as f:
                text = json.load(f)
        except FileNotFoundError:
            raise ValueError(f"there is no file {self.path}") from None
        except (zipfile.BadZipFile, KeyError, ValueError, OSError) as e:
            raise ValueError(f"{self.path} is no recorded run, or its recording was cut off: {e}") from None
        if not isinstance(text, dict) or text.get("version") != VERSION:
            raise ValueError(f"{self.path} is of another version of oxitorch: record it again with this one")
        try:
            self.header: dict[str, Any] = text["header"]
            self.ops: list[dict] = text["ops"]
            self.modules: list[dict] = text["modules"]
            self.steps: list[dict] = text["steps"]
            self.gradients: list[dict] = text["gradients"]
            self._values: list[dict] = text["values"]
            self._check()
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise ValueError(f"{self.path} is no recorded run, it does not fit together: {e}") from None

    def _check(self) -> None:
        """Raises where something is missing that others rely on."""
        lists = {"op": self.ops, "module": self.modules, "step": self.steps, "gradient": self.gradients}
        rows = [("header", self.header), *(("value", v) for v in self._values)]
        rows += [(kind, row) for kind, those in lists.items() for row in those]
        for kind, row in rows:
            if missing := _FIELDS[kind] - row.keys():
                raise ValueError(f"{kind} without {', '.join(sorted(missing))}")
        there = set(self._zip.namelist())
        used = [v for m in self.modules for v in m["outputs"]] + [g["value"] for g in self.gradients]
        used += [s[k] for s in self.steps for k in s.keys() - {"step"} if s[k] is not None]
        for op in self.ops:
            used += op["results"] + [x["value"] for x in tensors([op["args"], *op["kwargs"].values()])]
            if op["name"].count(".") != 2:
                raise ValueError(f"an operation {op['name']}")
        if any(not 0 <= v < len(self._values) for v in used):
            raise ValueError("a value that is not there")
        if any(f"values/{v['digest']}" not in there for v in self._values):
            raise ValueError("a tensor that is not there")

    def close(self) -> None:
        self._zip.close()

    def about(self, value: int) -> dict:
        """Dtype, shape, digest and how many elements are no numbers."""
        return self._values[value]

    def same(self, value: int, other: "Trace", its: int) -> bool:
        """Whether two tensors have the same bits, dtype and shape."""
        mine, theirs = self._values[value], other._values[its]
        return all(mine[k] == theirs[k] for k in ("digest", "dtype", "shape"))

    def tensor(self, value: int) -> torch.Tensor:
        """A tensor on the host."""
        about = self._values[value]
        dtype = getattr(torch, about["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.path} has a tensor of an unknown dtype, {about['dtype']}")
        with self._zip.open(f"values/{about['digest']}") as f:
            data = bytearray(f.read())
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(about["shape"])


def encode(x: Any, tensor) -> Any:
    """An argument as JSON; `tensor` gives what stands for a tensor."""
    if isinstance(x, torch.Tensor):
        return tensor(x)
    if x is None or isinstance(x, bool | str):
        return x
    if isinstance(x, list | tuple):
        return [encode(v, tensor) for v in x]
    if isinstance(x, int | torch.SymInt):
        return int(x)
    if isinstance(x, float | torch.SymFloat):
        return float(x)
    if isinstance(x, complex):
        return {"complex": [x.real, x.imag]}
    if isinstance(x, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(x).removeprefix("torch.")}
    if isinstance(x, torch.device):
        return {"device": x.type}
    return {"other": type(x).__name__}


def decode(x: Any, tensor, device: str) -> Any:
    """What `encode` was given; `tensor` makes a tensor of what stands for it, and devices that are not the host are
    `device`.

    Raises:
        ValueError: an argument that a file cannot hold, such as a generator.
    """
    if isinstance(x, list):
        return [decode(v, tensor, device) for v in x]
    if not isinstance(x, dict):
        return x
    if "value" in x:
        return tensor(x)
    if "empty" in x:
        return torch.zeros(x["empty"], dtype=getattr(torch, x["dtype"]), device=device)
    if "complex" in x:
        return complex(*x["complex"])
    if "torch" in x:
        found = getattr(torch, x["torch"], None)
        if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
            return found
    if "device" in x:
        return torch.device("cpu" if x["device"] == "cpu" else device)
    raise ValueError(f"an argument that is not kept: {x.get('other', x)}")


def tensors(x: Any):
    """The places where an encoded argument has tensors."""
    if isinstance(x, list):
        for v in x:
            yield from tensors(v)
    elif isinstance(x, dict) and "value" in x:
        yield x
