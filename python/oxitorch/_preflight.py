"""`oxitorch.preflight(fn, args, slice=...)`.

The command does the work: this process is its script. Each time that the command would run the script, a small client
(`_as_script.py`) asks here, and a child of this process calls the function on a device that is not there. A process has
one device for all its life, so it is always a child: forked, which takes any function, or, where this process uses the
device already, spawned, which takes what can be pickled.
"""

import contextlib
import io
import json
import multiprocessing
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch

from oxitorch import _activate, _as_script, _fork, _pretend
from oxitorch._dims import Dynamic, checked
from oxitorch.jit import Jitted


class Report:
    """What was found out: the fields of the JSON that `docs/preflight.md` lists, as attributes.

    `report.slices[0].step.roofline_s` and `report.to_dict()["slices"][0]["step"]["roofline_s"]` are the same.
    """

    def __init__(self, data: dict, text: str, status: int):
        self._data, self._text = data, text
        self._fields = json.loads(json.dumps(data), object_hook=lambda d: SimpleNamespace(**d))
        self.status = status

    @property
    def fits(self) -> bool:
        """Whether it fits all slices. Not if that could not be told."""
        return all(s.verdict in ("fits", "fits_barely") for s in self.slices)

    @property
    def ok(self) -> bool:
        """Whether it fits and keeps its budget, and all of that is known: the command's exit status is 0."""
        return self.status == 0

    def text(self) -> str:
        """What the command prints."""
        return self._text

    def to_dict(self) -> dict:
        """The JSON, parsed."""
        return json.loads(json.dumps(self._data))

    def to_json(self) -> str:
        """The JSON, as `oxitorch preflight --json` writes it."""
        return json.dumps(self._data, indent=2)

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._fields, name)
        except AttributeError:
            raise AttributeError(f"the report has no `{name}`") from None

    def __dir__(self):
        return [*super().__dir__(), *vars(self._fields)]

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{s.slice}: {s.verdict}" for s in self.slices)
        return f"<preflight {verdicts}>"

    __str__ = text


def preflight(
    fn: Callable,
    args: Iterable = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    slice: str | Iterable[str],
    steps: int = 3,
    move: bool | None = None,
    dynamic: Dynamic | None = None,
    progress: bool = True,
    **options,
) -> Report:
    """Calls a function on a TPU that is not there, and says whether it fits slices and how fast it could be.

    Nothing is computed, and nothing changes in this process: a child calls the function.

    Args:
        fn: a step of a training, a prediction, a module, something compiled by `torch.compile`. Each call is a step,
            and what it returns is alive until the next one. It puts things on `"tpu"` itself, as it does elsewhere.
        args, kwargs: its arguments. Those on `meta` become tensors of that shape on the device, as do a module's.
        slice: what to compile for, as `--slice` takes it; several in a list.
        steps: how often it is called.
        move: whether arguments, and `fn` if it is a module, are moved to the device first; they are by default if `fn`
            is a module.
        dynamic: dimensions of arguments whose sizes vary, as `torch.tpu.jit` takes them: `fn` is one program for all
            sizes up to the bound of these arguments. A function that `torch.tpu.jit(dynamic=)` gave needs none.
        progress: whether to say on stderr what goes on.
        options: as the command has them: `effort="full"`, `budget="hbm=90%"`, `fit="batch"`, `host_value=1`.

    Raises:
        TypeError: `dynamic` is not of that form, or `fn` is a function of `torch.tpu.jit` already.
        ValueError: an option or a slice that nobody knows, or a compiler that is not installed.
        RuntimeError: the function failed, or cannot be sent to a child.
    """
    _activate.raise_unavailable()
    if move is None:
        move = isinstance(fn, torch.nn.Module)
    if dynamic is not None and isinstance(fn, Jitted):
        raise TypeError("preflight: dynamic is for a function; give it to torch.tpu.jit, which this one is of already")
    call = _Call(fn, tuple(args), dict(kwargs or {}), move, checked(dynamic or {}))
    slices = [slice] if isinstance(slice, str) else list(slice)
    flags = [f"--slice={s}" for s in slices] + [f"--steps={steps}"]
    for name, value in options.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        flag = "--" + name.replace("_", "-")
        flags += [flag if v is True else f"{flag}={v}" for v in values if v is not None and v is not False]
    return _Run(call, flags, progress).report()


class _Call:
    """The function with its arguments, as a child calls it."""

    def __init__(self, fn, args, kwargs, move, dynamic):
        self.fn, self.args, self.kwargs, self.move, self.dynamic = fn, args, kwargs, move, dynamic

    def run(self) -> None:
        """In the child: ends with a SystemExit when all steps were made."""
        core = _activate.core()
        # Threads do not survive a fork, and there is nothing to compute.
        torch.set_num_threads(1)
        fn, args, kwargs = torch.utils._pytree.tree_map(self._place, (self.fn, self.args, self.kwargs))
        if self.dynamic:
            fn = torch.tpu.jit(fn, dynamic=self.dynamic)
        while True:
            result = fn(*args, **kwargs)
            core.mark_step()  # raises SystemExit in the end
            del result

    def _place(self, x):
        if isinstance(x, torch.nn.Module):
            if any(t.is_meta for t in (*x.parameters(), *x.buffers())):
                return x.to_empty(device="tpu")
            return x.to("tpu") if self.move else x
        if isinstance(x, torch.Tensor) and x.is_meta:
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="tpu")
            return made.requires_grad_(x.requires_grad)
        return x.to("tpu") if self.move and isinstance(x, torch.Tensor) else x


def _child(call: Callable[[], _Call], folder: str) -> int:
    """In the child: the exit status. A file says what went wrong."""
    try:
        with open(os.path.join(folder, "device.json"), encoding="utf-8") as f:
            device = json.load(f)
        _pretend.pretend(device, folder)
        os.environ["OXITORCH_PREFLIGHT"] = folder
        call().run()
    except SystemExit as e:
        if not e.code:
            return 0
        error = f"it ended with status {e.code}"
    except KeyboardInterrupt:
        return 130
    except BaseException:
        error = traceback.format_exc()
    with open(os.path.join(folder, "error"), "w", encoding="utf-8") as f:
        f.write(error)
    with contextlib.suppress(Exception):
        _activate.core().shutdown()  # writes what was asked of the device until then
    return _BAD_FORK if "fork-based multiprocessing" in error else 1


# PyTorch's backward pass does not work in forked children of a process that has threads for it.
_BAD_FORK = 77


def _spawned(pickled: bytes, folder: str) -> None:
    """In a spawned child. The arguments come late: those on the device are made on the one that is not there."""
    sys.exit(_child(lambda: pickle.loads(pickled), folder))


class _Run:
    """The command, with this process as its script."""

    def __init__(self, call: _Call, flags: list[str], progress: bool):
        self.call, self.flags, self.progress = call, flags, progress
        self.errors: list[str] = []
        self.stderr: list[str] = []

    def report(self) -> Report:
        with tempfile.TemporaryDirectory(prefix="oxitorch-") as folder, socket.socket(socket.AF_UNIX) as listener:
            file = os.path.join(folder, "report.json")
            with _as_script.address(folder) as place:
                listener.bind(place)
            listener.listen()
            argv = [sys.executable, "-m", "oxitorch", "preflight", "--json", file, *self.flags]
            argv += ["-m", "oxitorch._as_script", folder]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
            with subprocess.Popen(argv, env=env, **pipes) as process:
                said = io.StringIO()
                readers = [
                    threading.Thread(target=self._listen, args=(process.stderr,)),
                    threading.Thread(target=lambda: said.write(process.stdout.read())),
                ]
                for r in readers:
                    r.start()
                try:
                    self._serve(listener, process)
                except BaseException:
                    process.kill()
                    raise
                finally:
                    for r in readers:
                        r.join()
            if self.errors:
                raise RuntimeError(f"the function failed on a device that is not there\n{self.errors[0].strip()}")
            if not os.path.exists(file):
                lines = [line for line in self.stderr if not line.startswith("preflight: ")]
                raise ValueError("".join(lines).strip().removeprefix("error: ") or "the command said nothing")
            with open(file, encoding="utf-8") as f:
                data = json.load(f)
        data["script"] = [getattr(self.call.fn, "__qualname__", type(self.call.fn).__qualname__)]
        return Report(data, said.getvalue(), process.returncode)

    def _listen(self, pipe) -> None:
        for line in pipe:
            self.stderr.append(line)
            if self.progress:
                sys.stderr.write(line)
                sys.stderr.flush()

    def _serve(self, listener: socket.socket, process: subprocess.Popen) -> None:
        """Runs the function whenever the command asks for it, until that ends."""
        while process.poll() is None:
            ready, _, _ = select.select([listener], [], [], 0.1)
            if not ready:
                continue
            connection, _ = listener.accept()
            with connection:
                folder = connection.makefile().readline().strip()
                status = self._run(folder)
                error = os.path.join(folder, "error")
                if status and os.path.exists(error):
                    with open(error, encoding="utf-8") as f:
                        self.errors.append(f.read())
                # The command may have ended meanwhile.
                with contextlib.suppress(BrokenPipeError):
                    connection.sendall(f"{status}\n".encode())

    def _run(self, folder: str) -> int:
        core = _activate.core()
        if not core.is_started() and not core.is_in_bad_fork():
            status = _fork.run(lambda: _child(lambda: self.call, folder)) & 0xFF
            if status != _BAD_FORK:
                return status
            os.remove(os.path.join(folder, "error"))
        return self._spawn(folder)

    def _spawn(self, folder: str) -> int:
        try:
            pickled = bytes(ForkingPickler.dumps(self.call))
        except Exception as e:
            self.errors.append(
                "this process has used the device, or run a backward pass, so that the function has to be sent to a "
                f"new one, and it cannot be pickled: {e}\n"
                "hint: call oxitorch.preflight before that, or take a function of a module and arguments that can be "
                "pickled"
            )
            return 1
        process = multiprocessing.get_context("spawn").Process(target=_spawned, args=(pickled, folder))
        process.start()
        try:
            process.join()
        except BaseException:
            process.kill()
            process.join()
            raise
        return (process.exitcode or 0) & 0xFF
