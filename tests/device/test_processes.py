"""Children of a process that uses the device, made in each way; loaders with workers; tensors sent to others."""


def test_a_forked_child_gets_an_error_and_the_parent_is_unharmed(python):
    code = """
import os, torch
x = torch.arange(4.0, device="tpu")
y = x + 1
pid = os.fork()
if pid == 0:
    for use in (lambda: x + 1, lambda: x.cpu(), lambda: x.tolist(), lambda: torch.ones(2, device="tpu"),
                lambda: torch.tpu.synchronize(), lambda: torch.randn(2, device="tpu"), lambda: repr(x)):
        try:
            use()
        except RuntimeError as e:
            assert "fork" in str(e) and "spawn" in str(e), e
        else:
            os._exit(3)
    assert torch.ones(3).sum().item() == 3
    del x, y
    raise SystemExit(7)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert (x + y).tolist() == [1, 3, 5, 7]
print("parent works")
"""
    done = python(code, timeout=60)
    assert done.stdout == "parent works\n" and done.stderr == ""


def test_fork_before_the_device_is_used(python):
    code = """
import os, torch
assert not torch.tpu.is_initialized()
pid = os.fork()
assert torch.arange(3, device="tpu").sum().item() == 3
if pid == 0:
    raise SystemExit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
print("both work")
"""
    assert "both work" in python(code, timeout=60).stdout


def test_spawned_children(python, tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text("""
import torch, torch.multiprocessing as mp
def work(rank, queue):
    queue.put((rank, (torch.ones(2, device="tpu") * rank).tolist()))
if __name__ == "__main__":
    torch.ones(1, device="tpu").item()
    queue = mp.get_context("spawn").Queue()
    mp.spawn(work, (queue,), nprocs=2)
    print(sorted(queue.get() for _ in range(2)))
""")
    assert python("", str(script), timeout=120).stdout == "[(0, [0.0, 0.0]), (1, [1.0, 1.0])]\n"


LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return BODY
torch.ones(1, device="tpu").item()
loader = DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="fork", pin_memory=True)
"""


def test_loaders_with_forked_workers(python):
    code = (
        LOADER.replace("BODY", "torch.full((2,), float(i))")
        + """
for epoch in range(2):
    total = sum(batch.to("tpu", non_blocking=True).sum() for batch in loader)
    assert total.item() == 56, total
print("done")
"""
    )
    done = python(code, timeout=90)
    assert done.stdout == "done\n" and done.stderr == ""


def test_a_forked_worker_that_uses_the_device(python):
    code = (
        LOADER.replace("BODY", 'torch.ones(2, device="tpu")')
        + """
try:
    next(iter(loader))
except RuntimeError as e:
    print("fork" in str(e))
"""
    )
    assert python(code, timeout=90).stdout == "True\n"


def test_tensors_go_to_other_processes(python, tmp_path):
    """As copies, which share storages among them as they did."""
    script = tmp_path / "sent.py"
    script.write_text("""
import torch, torch.multiprocessing as mp
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return torch.full((3,), float(i), device="tpu")
def work(given, back, w, none):
    x, view, p, h, e, cpu = given.get()
    view.add_(1)
    back.put((x, view, p, h, e, cpu, w + 1, none))
    given.get()
if __name__ == "__main__":
    ctx = mp.get_context("spawn")
    given, back = ctx.Queue(), ctx.Queue()
    x = torch.arange(6.0, device="tpu").view(2, 3)
    arguments = torch.ones(2, device="tpu"), torch.ones(0, device="tpu")
    child = ctx.Process(target=work, args=(given, back, *arguments))
    child.start()
    p = torch.nn.Parameter(x[0] * 3)
    given.put((x, x[1, 1:], p, x.half().t(), x[:0], torch.ones(2)))
    for t in back.get(): print(type(t).__name__, t.device, t.requires_grad, t.dtype, t.stride(), t.tolist())
    given.put(None)
    child.join()
    print(child.exitcode, x.tolist())
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
    print([t.tolist() for t in loader])
""")
    assert (
        python("", str(script), timeout=120).stdout
        == """\
Tensor tpu:0 False torch.float32 (3, 1) [[0.0, 1.0, 2.0], [3.0, 5.0, 6.0]]
Tensor tpu:0 False torch.float32 (1,) [5.0, 6.0]
Parameter tpu:0 True torch.float32 (1,) [0.0, 3.0, 6.0]
Tensor tpu:0 False torch.float16 (1, 3) [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
Tensor tpu:0 False torch.float32 (3, 1) []
Tensor cpu False torch.float32 (1,) [1.0, 1.0]
Tensor tpu:0 False torch.float32 (1,) [2.0, 2.0]
Tensor tpu:0 False torch.float32 (1,) []
0 [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
[[[0.0, 0.0, 0.0]], [[1.0, 1.0, 1.0]]]
"""
    )
