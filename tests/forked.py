"""Runs pieces of Python in children of a process that has imported PyTorch, which takes seconds, and no oxitorch.

A child differs from `python -c` in nothing that a test of the device sees: environment, arguments, standard streams,
`__main__`, and the exit of the interpreter are its own. What is about importing itself needs a process of its own.
"""

import contextlib
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path


class Template:
    """A process that forks a child for each piece of code."""

    def __init__(self):
        self._process = None

    def _started(self) -> subprocess.Popen:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                cwd="/",
            )
        return self._process

    def run(self, code: str, *args: str, env: dict[str, str], timeout: float) -> subprocess.CompletedProcess:
        """The finished child with its text output, as `subprocess.run` gives it; raises `subprocess.TimeoutExpired`."""
        process = self._started()
        with tempfile.TemporaryDirectory(prefix="oxitorch-forked-") as folder:
            request = {"code": code, "args": args, "env": env, "folder": folder}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            pid = int(process.stdout.readline())
            in_time = select.select([process.stdout], [], [], timeout)[0]
            if not in_time:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            status = int(process.stdout.readline())
            out, err = ((Path(folder) / name).read_text(errors="replace") for name in ("out", "err"))
        argv = [sys.executable, "-c", code, *args]
        if not in_time:
            raise subprocess.TimeoutExpired(argv, timeout, out, err)
        return subprocess.CompletedProcess(argv, status, out, err)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()


def _serve() -> dict | None:
    """Forks for each request until there are no more; gives the request in the child, None in the parent."""
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return request
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return None


def _become(request: dict) -> None:
    """Makes the child what `python -c` would be when it has imported PyTorch."""
    streams = [("/dev/null", os.O_RDONLY)]
    streams += [(f"{request['folder']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("out", "err")]
    for fd, (path, flags) in enumerate(streams):
        new = os.open(path, flags, 0o600)
        os.dup2(new, fd)
        os.close(new)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 -- what was read ahead of the requests stays behind
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["-c", *request["args"]]
    sys.path[0] = ""
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main


def _run(code: str) -> None:
    main = sys.modules["__main__"]
    faulthandler.enable()  # a signal that ends the child says where
    try:
        import torch

        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0":
            torch._import_device_backends()
        exec(compile(code, "<string>", "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as e:
        ours = e.__traceback__
        while ours and ours.tb_frame.f_code.co_filename == __file__:
            ours = ours.tb_next
        traceback.print_exception(type(e), e, ours)
        sys.exit(1)


if __name__ == "__main__":
    import torch  # noqa: F401 -- what takes the time

    # The parent ends here when the tests do, and a child when its code does.
    if (asked := _serve()) is not None:
        _become(asked)
        _run(asked["code"])
