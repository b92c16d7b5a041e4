"""Processes that end or are interrupted in the middle of work: quietly, in time, and with their exit codes."""

import pytest

EXITS = {
    "work in flight": """
x = torch.randn(1024, 1024, device="tpu")
for _ in range(20):
    x = x @ x
""",
    "compiles in flight": """
for n in range(1, 12):
    torch.randn(n, 3, device="tpu").sin().softmax(0)
""",
    "objects alive": """
import atexit, builtins, threading
x = torch.ones(3, device="tpu", requires_grad=True)
y = (x * 2).sum()
y.backward()
cycle = [x, y]; cycle.append(cycle)
local = threading.local(); local.x = x
torch.keep = x  # dies with torch's module
builtins.keep = y
atexit.register(lambda: x.detach().add_(1).tolist() == [2, 2, 2] or print("wrong"))
class Late:
    def __init__(self): self.x = torch.ones(3, device="tpu")
    def __del__(self): del self.x
late = Late(); late.self = late
e = torch.tpu.Event(enable_timing=True); e.record(); s = torch.tpu.Stream()
""",
    "daemon thread": """
import threading, time
def work():
    x = torch.ones(4, device="tpu")
    while True:
        x = x * 1.0
threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
""",
    "daemon thread that starts the device": """
import threading
def work():
    x = torch.ones(4, device="tpu")
    while True:
        x = x * 1.0
started = threading.Event()
threading.Thread(target=lambda: (started.set(), work()), daemon=True).start()
started.wait()
""",
    "daemon thread that starts the device when the program has ended": """
import atexit, threading, time
def work():
    time.sleep(0.3)
    torch.ones(4, device="tpu")
threading.Thread(target=work, daemon=True).start()
atexit._run_exitfuncs()
time.sleep(0.6)
""",
    "daemon threads that wait for programs": """
import threading, time
def work(k):
    for n in range(1, 10**6):
        (torch.ones(n, k + 1, device="tpu") * 2).sum().item()
for k in range(3):
    threading.Thread(target=work, args=(k,), daemon=True).start()
time.sleep(0.7)
""",
    "operations of finalizers": """
class Owner:
    def __init__(self):
        self.t = torch.ones(3, device="tpu")
    def __del__(self):
        try:
            (self.t * 3).tolist()
        except RuntimeError:
            pass
kept = Owner()
kept.own = kept
globals_too = [Owner()]
""",
    "a backward that just failed": """
x = torch.zeros(3, device="tpu", requires_grad=True)
torch.tpu.eager_mode = "debug"
torch.tpu.nan_trap = True
try:
    x.sqrt().sum().backward()
except RuntimeError:
    pass
""",
    "backward in a thread": """
import threading
def work():
    x = torch.ones(4, device="tpu", requires_grad=True)
    (x * 2).sum().backward()
t = threading.Thread(target=work); t.start(); t.join()
""",
    # One batch: PyTorch's own thread raises when a worker ends with more of them on their way.
    "loader": """
from torch.utils.data import DataLoader, TensorDataset
loader = iter(DataLoader(TensorDataset(torch.ones(1, 2)), num_workers=1, pin_memory=True))
next(loader)[0].to("tpu")
""",
    "device never used": "",
    "failed value": """
with torch.tpu.compiler.custom_compiler_options({"xla_no_such_option": True}):
    y = torch.ones(3, 5, device="tpu").erfinv()
""",
}


@pytest.mark.parametrize("name", EXITS)
def test_exits_are_quiet(python, name):
    # Programs that another test has compiled would not be in flight for long.
    done = python("import torch\n" + EXITS[name], check=False, timeout=60, OXITORCH_CACHE="off")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_exit_codes(python):
    body = """
import os, sys, torch
x = torch.randn(512, 512, device="tpu")
for _ in range(20):
    x = x @ x
"""
    assert python(body + "sys.exit(5)", check=False, timeout=60).returncode == 5
    assert python(body + "os._exit(6)", check=False, timeout=60).returncode == 6
    done = python(body + "raise ValueError('mine')", check=False, timeout=60)
    assert done.returncode == 1 and "ValueError: mine" in done.stderr


WAITS = {
    "item": "y[0, 0].item()",
    "item behind others": "\nfor _ in range(2): y = torch.tpu.ops.optimization_barrier(y @ x)\ny[0, 0].item()",
    "synchronize": "torch.tpu.synchronize()",
    "event": "e = torch.Event('tpu'); e.record(); e.synchronize()",
    "running ahead": "\nwhile True: y = y @ x",
    "compiling": "\ntorch.tpu.synchronize()\nfor n in range(1, 100000): (torch.ones(n, device='tpu') * 2).sum().item()",
}


@pytest.mark.parametrize("name", WAITS)
def test_an_interrupt_ends_a_wait(python, name):
    """Seconds of device work are queued; SIGINT must raise KeyboardInterrupt within a second."""
    code = f"""
import os, signal, threading, time, torch
x = torch.randn(2000, 2000, device="tpu", dtype=torch.float64)
torch.tpu.synchronize()
y = x @ x
for _ in range({0 if name == "compiling" else 60}):
    y = y @ x
due = time.monotonic() + 1
threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    {WAITS[name].replace(chr(10), chr(10) + "    ")}
    print("nothing to interrupt", flush=True)
except KeyboardInterrupt:
    late = time.monotonic() - due
    print("in time" if 0 <= late < 1 else f"after {{late}} s", flush=True)
os._exit(0)
"""
    assert python(code, timeout=90).stdout == "in time\n"


HANDLERS = """
import signal, torch

class Late(Exception):
    pass

def handler(*_):
    # Runs inside the wait, PyTorch lets go of the GIL in it, and its lines are new.
    seen.append((torch.ones(3, 5, device="tpu") * len(seen)).sum())
    if len(seen) == 3:
        raise Late("too late")
    signal.setitimer(signal.ITIMER_REAL, 0.05)

seen = []
x = torch.randn(1500, 1500, device="tpu", dtype=torch.float64)
torch.tpu.synchronize()
for wait in (lambda: y.sum().item(), torch.tpu.synchronize):
    seen.clear()
    y = x
    for _ in range(10):
        y = y @ x / 1500
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        wait()
        print("nothing to interrupt")
    except Late as e:
        print(e, [t.item() for t in seen])
    signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_signal_handlers_run_ops_and_raise_what_they_like(python):
    done = python(HANDLERS, timeout=90)
    assert done.stdout == "too late [0.0, 15.0, 30.0]\n" * 2


def test_the_device_works_after_an_interrupt(python):
    code = """
import os, signal, threading, time, torch
x = torch.randn(2000, 2000, device="tpu", dtype=torch.float64)
torch.tpu.synchronize()
y = x @ x
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    y.sum().item()
    time.sleep(5)
    print("not interrupted")
except KeyboardInterrupt:
    pass
assert torch.allclose(y[:2].cpu(), x[:2].cpu() @ x.cpu())
print("works")
"""
    assert python(code, timeout=90).stdout == "works\n"
