"""Records a run: each operation with its arguments, results, Python line, module, phase and step.

Tensors are copied on their device when an operation takes or makes them, and read many at a time, so that fused mode
keeps its windows. A tensor that is known from before, and not written since, is not copied again.
"""

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from oxitorch._lines import user_frame
from oxitorch.diff import _kinds
from oxitorch.diff._trace import Trace, Writer, encode

# Copies wait on their device until they are so many bytes.
_PENDING_BYTES = 256 << 20


class Recorder(TorchDispatchMode):
    """Records what runs in its `with` block into a file.

    Args:
        writer: the file.
        detail: whether a step is recorded op by op; of others the loss, the norms of gradients and parameters, and
            random numbers.
        share: a run whose random numbers this one takes, in the order in which those of a kind and shape were drawn.
        stop: called after each step of an optimizer with its number.
    """

    def __init__(
        self,
        writer: Writer,
        detail: Callable[[int], bool] = lambda step: True,
        share: Trace | None = None,
        stop: Callable[[int], None] = lambda step: None,
    ):
        super().__init__()
        self._writer, self._detail, self._stop = writer, detail, stop
        self._pid = os.getpid()
        self._began = time.perf_counter()
        self.step = 0
        self._detailed = detail(0)
        self.ops: list[dict] = []
        self.modules: list[dict] = []
        self.steps: list[dict] = []
        self.gradients: list[dict] = []
        self.devices: dict[str, int] = {}
        self._values: list[dict | None] = []
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._pending_bytes = 0
        # Of tensors that are recorded: their storage, how often it had been written to, and the number of the value, or
        # None where nothing was written to it yet.
        self._known = WeakTensorKeyDictionary()
        self._writes: dict[int, int] = {}
        self._path: list[str] = []
        self._names: dict[int, tuple[str, torch.nn.Module]] = {}
        self._parameters: dict[int, str] = {}
        self._calls: dict[tuple[int, str], int] = {}
        # Of nodes of autograd's graph: where the forward was.
        self._forward: dict[int, tuple[str, str]] = {}
        self._optimizing = False
        # Of this step: what a backward may have started from, and the loss.
        self._start: int | None = None
        self._loss: int | None = None
        self._draws = _draws(share)
        self._share = share
        self.unshared: list[str] = []

    # -- where things happen

    def __enter__(self):
        self._hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        )
        # A backward runs in this thread, which is the one whose operations are seen.
        self._threads = torch.autograd.set_multithreading_enabled(False)
        self._threads.__enter__()
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self._threads.__exit__(*exc)
        for hook in self._hooks:
            hook.remove()

    def finish(self, header: dict) -> None:
        """Writes the file."""
        self._close_step()
        self._flush()
        header = header | {
            "devices": self.devices,
            "unshared": self.unshared,
            "seconds": round(time.perf_counter() - self._began, 3),
        }
        self._writer.close(
            {
                "header": header,
                "ops": self.ops,
                "modules": self.modules,
                "steps": self.steps,
                "gradients": self.gradients,
                "values": self._values,
            }
        )

    def _enter_module(self, module, _args) -> None:
        if id(module) not in self._names:
            root = type(module).__name__
            for name, m in module.named_modules():
                self._names.setdefault(id(m), (f"{root}.{name}" if name else root, m))
            for name, p in module.named_parameters():
                self._parameters.setdefault(id(p), f"{root}.{name}")
        self._path.append(self._names[id(module)][0])

    def _leave_module(self, _module, _args, output) -> None:
        path = self._path.pop() if self._path else ""
        if output is None or not self._seen() or torch._C._current_autograd_node() is not None:
            return
        call = self._calls.get((self.step, path), 0)
        self._calls[self.step, path] = call + 1
        with _disable_current_modes():
            outputs = [self._note(t) for t in _tensors(output) if _plain(t)]
        self.modules.append(
            {
                "name": path,
                "call": call,
                "step": self.step,
                "depth": len(self._path),
                "outputs": outputs,
                "op": len(self.ops),
            }
        )

    def _seen(self) -> bool:
        return self._detailed and os.getpid() == self._pid

    def _begin_step(self, optimizer, _args, _kwargs) -> None:
        self._optimizing = True
        with _disable_current_modes():
            self._keep_gradients([p for g in optimizer.param_groups for p in g["params"]])

    def keep_gradients(self, named) -> None:
        """Records the gradients of parameters that no optimizer takes."""
        with _disable_current_modes():
            for name, p in named:
                self._parameters[id(p)] = name
            self._keep_gradients([p for _, p in named])

    def _keep_gradients(self, parameters) -> None:
        given = [p for p in parameters if p.grad is not None and _plain(p.grad)]
        if given and (norms := self._norms([p.grad for p in given])) is not None:
            self._current()["grad_norms"] = norms
        if self._seen():
            for i, p in enumerate(given):
                name = self._parameters.get(id(p), f"parameter {i}")
                self.gradients.append({"name": name, "step": self.step, "value": self._note(p.grad)})

    def _end_step(self, optimizer, _args, _kwargs) -> None:
        self._optimizing = False
        parameters = [p.detach() for g in optimizer.param_groups for p in g["params"] if _plain(p)]
        with _disable_current_modes():
            self._current()["parameter_norms"] = self._norms(parameters)
        self._close_step()
        self._flush()
        self.step += 1
        self._detailed = self._detail(self.step)
        self._known.clear()  # what is written in steps that are not recorded is not seen
        self._forward.clear()
        self._stop(self.step)

    def _norms(self, tensors) -> int | None:
        kinds = [t.detach().float() for t in tensors if t.is_floating_point()]
        return self._copy(torch.stack(torch._foreach_norm(kinds))) if kinds else None

    def _current(self) -> dict:
        if not self.steps or self.steps[-1]["step"] != self.step:
            self.steps.append({"step": self.step})
        return self.steps[-1]

    def _close_step(self) -> None:
        if self._loss is not None:
            self._current()["loss"] = self._loss
        self._start = self._loss = None

    # -- operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if os.getpid() != self._pid:
            return func(*args, **kwargs)  # a worker that loads data
        kind = _KINDS.get(func) or _KINDS.setdefault(func, _Kind(func))
        node = torch._C._current_autograd_node()
        phase = "optimizer" if self._optimizing else "forward" if node is None else "backward"
        if phase == "backward" and self._loss is None:
            self._loss, self._start = self._start, None
        elif func is _ONES_LIKE and args[0].numel() == 1:
            self._start = self._note(args[0])  # a backward starts so
        if not (self._detailed or kind.drawn) or kind.unseen:
            return self._unseen(kind, func, args, kwargs)
        if kind.view:
            return self._view(func, args, kwargs)
        op = {"name": kind.name, "step": self.step, "phase": phase, **self._place(node, phase)}
        op["args"] = [encode(a, self._argument) for a in args]
        op["kwargs"] = {k: encode(v, self._argument) for k, v in kwargs.items()}
        returned = func(*args, **kwargs)
        results = _kinds.results(func, args, kwargs, returned)
        if kind.drawn and self._share:
            self._take(func.name(), args, results)
        for t in _kinds.written(func, args, kwargs):
            self._wrote(t)
        if kind.uninitialised:
            for t in results:
                self._known[t] = *self._written(t), None
            return returned
        op["results"] = [self._note(t) for t in results if _plain(t)]
        if kind.drawn or _kinds.draws_within(func, args, kwargs):
            op["draws"] = True
        for t in results:
            self.devices[t.device.type] = self.devices.get(t.device.type, 0) + 1
        self.ops.append(op)
        return returned

    def _unseen(self, kind: "_Kind", func, args, kwargs):
        returned = func(*args, **kwargs)
        if kind.mutable and self._detailed:
            for t in _kinds.written(func, args, kwargs):
                self._wrote(t)
        return returned

    def _view(self, func, args, kwargs):
        """A view is no operation of its own: what is wrong with one is seen where it is taken."""
        returned = func(*args, **kwargs)
        base = args[0] if args else None
        known = self._known.get(base) if isinstance(base, torch.Tensor) else None
        if known and base.shape == getattr(returned, "shape", None) and base.stride() == returned.stride():
            self._known[returned] = known
        return returned

    def _place(self, node, phase: str) -> dict:
        if phase == "backward":
            module, line = self._forward.get(node._sequence_nr(), ("", ""))
        else:
            module, line = self._path[-1] if self._path else "", _line()
            if phase == "forward":
                # The node of this operation was made before its kernel was called.
                self._forward[torch.autograd._get_sequence_nr() - 1] = module, line
        return {"module": module, "line": line}

    def _take(self, name: str, args, results) -> None:
        """Replaces what an operation drew by what the other run drew there, if it did."""
        with _disable_current_modes():
            noise = results[_kinds.NOISE.get(_kinds.base(name), 0)]
            there = self._draws.get(_draw(self.step, name, noise.shape))
            if not there:
                return
            noise.copy_(self._share.tensor(there.popleft()))
            if len(results) > 1:  # dropout with its mask
                kept = 1 - args[1]
                results[0].copy_(args[0] * noise / kept if kept else torch.zeros_like(args[0]))

    # -- tensors

    def _argument(self, t: torch.Tensor) -> dict:
        if not _plain(t):
            return {"other": f"a tensor of layout {t.layout}"}
        if self._known.get(t) == (*self._written(t), None):
            return {"empty": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
        return {"value": self._note(t), "stride": list(t.stride())}

    def _wrote(self, t: torch.Tensor) -> None:
        at = t.untyped_storage()._cdata
        self._writes[at] = self._writes.get(at, 0) + 1

    def _written(self, t: torch.Tensor) -> tuple[int, int]:
        """A tensor's storage, and how often it was written to."""
        at = t.untyped_storage()._cdata
        return at, self._writes.get(at, 0)

    def _note(self, t: torch.Tensor) -> int:
        """The number of a tensor's value."""
        if not self._detailed:
            return self._copy(t)  # writes are not seen
        now = self._written(t)
        known = self._known.get(t)
        if known is not None and known[:2] == now and known[2] is not None:
            return known[2]
        value = self._copy(t)
        self._known[t] = *now, value
        return value

    def _copy(self, t: torch.Tensor) -> int:
        self._values.append(None)
        self._pending.append((len(self._values) - 1, t.detach().clone()))
        self._pending_bytes += t.numel() * t.element_size()
        if self._pending_bytes > _PENDING_BYTES:
            self._flush()
        return len(self._values) - 1

    def _flush(self) -> None:
        with _disable_current_modes():
            for i, t in self._pending:
                self._values[i] = self._writer.value(t.cpu())
        self._pending.clear()
        self._pending_bytes = 0


_ONES_LIKE = torch.ops.aten.ones_like.default


def _draws(share: Trace | None) -> dict[tuple, deque[int]]:
    """The values of what a run drew, in their order: of each step what is of one kind and shape, since another platform
    may draw some within its kernels.
    """
    found: dict[tuple, deque[int]] = defaultdict(deque)
    for op in share.ops if share else ():
        if _kinds.drawn(op["name"]) and op["results"]:
            value = op["results"][_kinds.NOISE.get(_kinds.base(op["name"]), 0)]
            found[_draw(op["step"], op["name"], share.about(value)["shape"])].append(value)
    return found


def _draw(step: int, name: str, shape) -> tuple:
    return step, _kinds.drawn(name), tuple(shape)


class _Kind:
    """What is asked of an operation whenever it runs, and does not change."""

    def __init__(self, func):
        name = func.name()
        self.name = str(func)
        self.drawn = _kinds.drawn(name)
        self.unseen = name.startswith(_kinds.UNSEEN) or torch.Tag.inplace_view in func.tags
        self.uninitialised = name.startswith(_kinds.UNINITIALISED)
        self.mutable = func._schema.is_mutable
        # Whether its results are other views of its arguments.
        returns = func._schema.returns
        self.view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


_KINDS: dict[Any, _Kind] = {}


def _plain(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_quantized


def _tensors(of):
    return (x for x in torch.utils._pytree.tree_leaves(of) if isinstance(x, torch.Tensor))


def _line() -> str:
    """The innermost Python line that is in no library."""
    frame = user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
