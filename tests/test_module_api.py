"""`torch.tpu` in the shape of `torch.cuda`."""

import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from types import FunctionType

import oxitorch
import pytest
import torch

# What programs written for torch.cuda call.
NAMES = """
    Event Stream StreamContext amp can_device_access_peer current_device current_stream default_stream device
    device_count device_of empty_cache get_amp_supported_dtype get_device_capability get_device_name
    get_device_properties get_per_process_memory_fraction get_rng_state get_rng_state_all init initial_seed
    is_available is_bf16_supported is_initialized manual_seed manual_seed_all max_memory_allocated
    max_memory_reserved mem_get_info memory
    memory_allocated memory_reserved memory_stats memory_summary random reset_accumulated_memory_stats
    reset_peak_memory_stats seed seed_all set_device set_per_process_memory_fraction set_rng_state
    set_rng_state_all set_stream stream streams synchronize _is_in_bad_fork _lazy_init
    _exchange_device _maybe_exchange_device
    eager_mode set_eager_mode EagerMode precision Precision allow_excess_precision ops compiler nan_trap metrics
    reset_metrics
""".split()  # noqa: SIM905


@pytest.fixture(autouse=True)
def first_device():
    torch.tpu.set_device(0)
    yield
    torch.tpu.set_device(0)


@pytest.mark.parametrize("name", NAMES)
def test_the_names_are_there(name):
    assert hasattr(torch.tpu, name)


def test_all_public_names_exist_and_are_documented():
    for name in torch.tpu.__all__:
        value = getattr(torch.tpu, name)
        assert value.__doc__, name


def test_submodules_are_the_same_by_both_names():
    for name in ("amp", "compiler", "memory", "ops", "random", "streams"):
        assert importlib.import_module(f"torch.tpu.{name}") is getattr(torch.tpu, name)


def test_torch_finds_the_module():
    assert torch.get_device_module("tpu") is torch.tpu
    assert torch.get_device_module() is torch.tpu
    assert torch.get_device_module(torch.device("tpu", 0)) is torch.tpu
    assert torch.device("tpu:0").type == "tpu" and torch.device("tpu").index is None


def test_accelerator():
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    assert torch.accelerator.device_count() == torch.tpu.device_count()
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    stream = torch.accelerator.current_stream()
    assert stream.device == torch.device("tpu", 0)
    assert torch.accelerator.memory_allocated() == torch.tpu.memory_allocated()


# Devices


def test_devices():
    assert torch.tpu.is_available() and torch.tpu.device_count() >= 1
    assert torch.tpu.current_device() == 0
    torch.tpu.init()
    assert torch.tpu.is_initialized()
    assert torch.tpu.platform() in ("cpu", "cuda", "tpu")


def test_the_name_tells_the_truth():
    name = torch.tpu.get_device_name()
    assert name == torch.tpu.get_device_name(0) == torch.tpu.get_device_name("tpu:0")
    if torch.tpu.platform() == "cpu":
        assert "cpu" in name.lower()


def test_properties():
    p = torch.tpu.get_device_properties()
    assert p.name == torch.tpu.get_device_name() and p["platform"] == torch.tpu.platform()
    assert p.total_memory >= 0 and isinstance(p.total_memory, int)
    assert "name=" in repr(p)
    assert torch.float32 in torch.tpu.get_device_capability()["supported_dtypes"]


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cuda:0"])
def test_other_devices_are_refused(device):
    for f in (
        torch.tpu.get_device_name,
        torch.tpu.synchronize,
        torch.tpu.memory_allocated,
        torch.tpu.set_device,
    ):
        with pytest.raises(ValueError, match="expected a tpu device"):
            f(device)


def test_an_index_that_is_not_there():
    beyond = torch.tpu.device_count()
    for f in (torch.tpu.set_device, torch.tpu.get_device_name, torch.tpu.synchronize):
        with pytest.raises(RuntimeError):
            f(beyond)
    with pytest.raises(RuntimeError):
        torch.ones(1, device=f"tpu:{beyond}")
    assert torch.tpu.current_device() == 0


def test_the_context_manager_restores(python):
    code = """
import torch

import oxitorch
t = torch.tpu
assert t.device_count() == 3
with t.device(2):
    assert t.current_device() == 2 and torch.ones(1, device="tpu").device.index == 2
    with t.device("tpu:1"), t.device(None), t.device(-1):
        assert t.current_device() == 1
    assert t.current_device() == 2
assert t.current_device() == 0
x = torch.ones(1, device="tpu:1")
with t.device_of(x):
    assert t.current_device() == 1
with t.device_of(torch.ones(1)):
    assert t.current_device() == 0
try:
    with t.device(1):
        raise KeyError
except KeyError:
    assert t.current_device() == 0
t.set_device(1); t.set_device(-1)
assert t.current_device() == 1 == torch.accelerator.current_device_index()
assert torch.ones(2, device="tpu").device == torch.device("tpu:1")
assert len(t.get_rng_state_all()) == 3
assert t.can_device_access_peer(0, 1) and not t.can_device_access_peer(0, 0)
print("done")
"""
    assert python(code, OXITORCH_PLATFORM="cpu", OXITORCH_CPU_DEVICES="3").stdout == "done\n"


# Methods that PyTorch generates for the device


def test_methods():
    x = torch.ones(2)
    y = x.tpu()
    assert y.is_tpu and not x.is_tpu and y.device == torch.device("tpu:0")
    model = torch.nn.Linear(2, 2).tpu()
    assert next(model.parameters()).is_tpu
    assert y.untyped_storage().device.type == "tpu"
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert packed.to("tpu").data.is_tpu


# Random numbers


def test_a_seed_gives_the_same_numbers_again():
    torch.manual_seed(5)
    a = torch.rand(4, device="tpu").cpu()
    torch.tpu.manual_seed(5)
    assert torch.equal(a, torch.rand(4, device="tpu").cpu())
    torch.tpu.manual_seed_all(6)
    assert torch.tpu.initial_seed() == 6
    assert not torch.equal(a, torch.rand(4, device="tpu").cpu())


def test_state_of_the_generator():
    state = torch.tpu.get_rng_state()
    assert state.dtype == torch.uint8 and state.device.type == "cpu" and state.numel() == 16
    a = torch.rand(4, device="tpu").cpu()
    assert not torch.equal(state, torch.tpu.get_rng_state())
    torch.tpu.set_rng_state(state)
    assert torch.equal(a, torch.rand(4, device="tpu").cpu())
    with torch.random.fork_rng(device_type="tpu"):
        torch.rand(4, device="tpu")
        inside = torch.tpu.get_rng_state()
    assert not torch.equal(inside, torch.tpu.get_rng_state())


def test_states_that_are_none():
    with pytest.raises(TypeError):
        torch.tpu.set_rng_state(torch.zeros(16))
    with pytest.raises(RuntimeError, match="wrong size"):
        torch.tpu.set_rng_state(torch.zeros(5, dtype=torch.uint8))


def test_seeds_from_entropy_differ():
    torch.tpu.seed()
    a = torch.tpu.initial_seed()
    torch.tpu.seed_all()
    assert a != torch.tpu.initial_seed()
    torch.tpu.manual_seed(-1)
    assert torch.tpu.initial_seed() == 2**64 - 1


# Memory


def test_memory_is_counted():
    torch.tpu.synchronize()
    before = torch.tpu.memory_allocated()
    x = torch.ones(1 << 20, device="tpu")
    torch.tpu.synchronize()
    assert torch.tpu.memory_allocated() - before == 4 << 20
    assert torch.tpu.max_memory_allocated() >= before + (4 << 20)
    assert torch.tpu.memory_reserved() >= torch.tpu.memory_allocated()
    del x
    torch.tpu.synchronize()
    assert torch.tpu.memory_allocated() == before
    torch.tpu.reset_peak_memory_stats()
    assert torch.tpu.max_memory_allocated() == before
    torch.tpu.empty_cache()


def test_memory_that_is_kept_for_reuse(python):
    code = """
import torch

import oxitorch
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
x = torch.ones(64 << 18, device="tpu")
for _ in range(4):
    y = x + 1
    torch.tpu.synchronize()
del y
torch.tpu.synchronize()
kept = resident()
torch.tpu.empty_cache()
print((kept - resident()) >> 20)
"""
    assert int(python(code).stdout) >= 63
    assert int(python(code, OXITORCH_MEMORY_CACHING="0").stdout) < 63
    many = code.replace("y = x + 1", "y = [x[k : k + (1 << 18)] + k for k in range(64)]")
    assert int(python(many).stdout) >= 48, "blocks of 1 MiB go back to the system, too"


def test_memory_reports():
    x = torch.ones(1 << 20, device="tpu")
    torch.tpu.synchronize()
    stats = torch.tpu.memory_stats()
    assert list(stats) == sorted(stats) and all(isinstance(v, int) for v in stats.values())
    assert torch.tpu.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] == torch.tpu.memory_allocated()
    summary = torch.tpu.memory_summary()
    assert "allocated_bytes" in summary and "MiB" in summary
    assert len(torch.tpu.memory_summary(abbreviated=True)) < len(summary)
    free, total = torch.tpu.mem_get_info()
    assert 0 < free <= total
    del x


def test_a_process_may_use_a_part_of_the_memory():
    before = torch.tpu.get_per_process_memory_fraction()
    assert before == pytest.approx(0.8 if torch.tpu.platform() == "cpu" else 1)
    total = torch.tpu.mem_get_info()[1]
    assert total == torch.tpu.get_device_properties().total_memory
    with pytest.raises(TypeError, match="must be `float`"):
        torch.tpu.set_per_process_memory_fraction(1)
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="Allowed range: 0~1"):
            torch.tpu.set_per_process_memory_fraction(wrong)
    try:
        torch.tpu.set_per_process_memory_fraction(0.5, "tpu:0")
        assert torch.tpu.get_per_process_memory_fraction(0) == pytest.approx(0.5)
        free, still = torch.tpu.mem_get_info()
        assert still == total and free + torch.tpu.memory_allocated() == pytest.approx(total / 2)
        torch.tpu.set_per_process_memory_fraction(0.0)
        with pytest.raises(torch.OutOfMemoryError, match=r"may use 0\.00 GiB"):
            torch.ones(1 << 20, device="tpu").sum().item()
    finally:
        torch.tpu.set_per_process_memory_fraction(before)
    assert torch.ones(3, device="tpu").sum().item() == 3


# Streams and events


def test_streams_and_events():
    s = torch.tpu.Stream()
    assert s.device == torch.device("tpu:0") and isinstance(s, torch.Stream)
    with torch.tpu.stream(s):
        x = torch.ones(4, device="tpu") * 3
        done = s.record_event()
    torch.tpu.current_stream().wait_event(done)
    s.wait_stream(torch.tpu.default_stream())
    s.synchronize()
    assert x.sum().item() == 12 and s.query() and done.query()
    assert torch.tpu.current_stream().device_index == 0
    with torch.tpu.stream(None):
        pass


def test_event_times():
    start, end = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    assert isinstance(start, torch.tpu.Event) and isinstance(start, torch.Event)
    start.record()
    x = torch.randn(256, 256, device="tpu")
    for _ in range(10):
        x = x @ x
    end.record()
    end.synchronize()
    assert 0 < start.elapsed_time(end) < 60_000
    with pytest.raises(RuntimeError, match="interprocess"):
        torch.tpu.Event(interprocess=True)


# Modes and settings


@pytest.fixture
def strict():
    before = torch.tpu.eager_mode
    torch.tpu.eager_mode = "strict"
    yield
    torch.tpu.eager_mode = before


def test_eager_modes(strict):
    modes = torch.tpu.EagerMode
    assert torch.tpu.eager_mode is modes.STRICT
    torch.tpu.eager_mode = modes.DEBUG
    assert torch.tpu.eager_mode is modes.DEBUG
    torch.tpu.set_eager_mode("fused")
    assert torch.tpu.eager_mode is modes.FUSED is modes.DEFER_AND_FUSE
    torch.tpu.set_eager_mode("STRICT")
    with torch.tpu.set_eager_mode("debug"):
        assert torch.tpu.eager_mode is modes.DEBUG
        with torch.tpu.set_eager_mode(modes.DEFER_NEVER):
            assert torch.tpu.eager_mode is modes.STRICT
        assert torch.tpu.eager_mode is modes.DEBUG
    assert torch.tpu.eager_mode is modes.STRICT


def test_modes_that_are_none(strict):
    with pytest.raises(ValueError, match=r"'quick'.*'strict', 'debug'"):
        torch.tpu.eager_mode = "quick"
    assert torch.tpu.eager_mode is torch.tpu.EagerMode.STRICT


def test_the_window(strict):
    default = torch.tpu.get_window()
    assert default["ops"] == 10_000 and default["bytes"] > 1 << 30
    torch.tpu.eager_mode = "fused"
    with torch.tpu.set_window(ops=10):
        assert torch.tpu.get_window() == {**default, "ops": 10}
        x = torch.zeros(3, device="tpu")
        torch.tpu.synchronize()
        torch.tpu.reset_metrics()
        for _ in range(35):
            x = x + 1
        assert torch.tpu.metrics()["flushes"] == {"ops": 3}
    assert x.tolist() == [35] * 3 and torch.tpu.get_window() == default
    with torch.tpu.set_window(bytes=12 * 5):
        torch.tpu.reset_metrics()
        for _ in range(11):
            x = x + 1
        assert torch.tpu.metrics()["flushes"] == {"bytes": 2}
    with torch.tpu.set_window(kept_bytes=36 * 2):
        y = x[:, None]
        torch.tpu.synchronize()
        torch.tpu.reset_metrics()
        for _ in range(5):
            y = y + 1  # is fused and counts nothing
            z = y @ y.T  # 36 bytes
        torch.tpu.synchronize()
        assert torch.tpu.metrics()["flushes"] == {"bytes": 2, "wait": 1}
    assert z.tolist() == [[51 * 51] * 3] * 3 and torch.tpu.get_window() == default
    with pytest.raises(ValueError, match="at least 1"):
        torch.tpu.set_window(ops=0)


def test_the_mode_of_a_process(python):
    code = "import torch; print(torch.tpu.eager_mode.value)"
    assert python(code).stdout == "fused\n"
    assert python(code, OXITORCH_EAGER_MODE="debug").stdout == "debug\n"


def test_settings_restore():
    with torch.tpu.set_nan_trap(True):
        assert torch.tpu.nan_trap
    assert not torch.tpu.nan_trap
    with torch.tpu.set_allow_excess_precision(True):
        assert torch.tpu.allow_excess_precision
    assert not torch.tpu.allow_excess_precision
    with pytest.raises(ValueError):
        torch.tpu.set_fallback("ignore")
    with torch.tpu.set_fallback("error"):
        pass


def test_precision_follows_pytorch_unless_overridden():
    p = torch.tpu.Precision
    before = torch.get_float32_matmul_precision()
    try:
        for name, expected in (("highest", p.HIGHEST), ("high", p.HIGH), ("medium", p.DEFAULT)):
            torch.set_float32_matmul_precision(name)
            assert torch.tpu.get_precision() is expected
        with torch.tpu.precision(p.HIGHEST):
            assert torch.tpu.get_precision() is p.HIGHEST
            with torch.tpu.precision("high"):
                assert torch.tpu.get_precision() is p.HIGH
            torch.set_float32_matmul_precision("medium")
            assert torch.tpu.get_precision() is p.HIGHEST
        assert torch.tpu.get_precision() is p.DEFAULT
    finally:
        torch.set_float32_matmul_precision(before)
    with pytest.raises(ValueError):
        torch.tpu.precision("exact")


def test_optimization_barrier():
    x = torch.ones(3, device="tpu", requires_grad=True)
    y, z = torch.tpu.ops.optimization_barrier(x * 2, x * 3)
    (y + z).sum().backward()
    assert x.grad.tolist() == [5, 5, 5]
    assert torch.tpu.ops.optimization_barrier(x).tolist() == [1, 1, 1]
    with pytest.raises(TypeError):
        torch.tpu.ops.optimization_barrier()


def test_compiler_options():
    x = torch.ones(3, 5, 7, device="tpu")
    with torch.tpu.compiler.custom_compiler_options({"xla_backend_optimization_level": 0}):
        assert (x * 3).sum().item() == 315
    unknown = torch.tpu.compiler.custom_compiler_options({"xla_no_such_option": True})
    with pytest.raises(RuntimeError, match="xla_no_such_option"), unknown:
        torch.ones(3, 5, 11, 13, device="tpu").sum().item()
    assert (x * 3).sum().item() == 315


def test_metrics():
    torch.tpu.reset_metrics()
    x = torch.ones(3, device="tpu")
    (x + x).cpu()
    m = torch.tpu.metrics()
    assert m["ops"] >= 2 and m["launches"] >= 1 and m["transfers_d2h"] == 1 and m["fallbacks"] == {}
    torch.tpu.reset_metrics()
    assert torch.tpu.metrics()["ops"] == 0


# Mixed precision


def test_autocast():
    assert torch.amp.is_autocast_available("tpu")
    a = torch.randn(4, 4, device="tpu")
    with torch.autocast("tpu"):
        assert (a @ a).dtype == torch.bfloat16
        assert torch.softmax(a @ a, 0).dtype == torch.float32
    with torch.tpu.amp.autocast(dtype=torch.float16):
        assert (a @ a).dtype == torch.float16
    assert (a @ a).dtype == torch.float32


def test_grad_scaler():
    p = torch.nn.Parameter(torch.ones(2, device="tpu"))
    opt = torch.optim.SGD([p], lr=0.5)
    scaler = torch.tpu.amp.GradScaler(init_scale=8.0)
    scaler.scale(p.sum()).backward()
    assert p.grad.tolist() == [8, 8]
    scaler.step(opt)
    scaler.update()
    assert p.tolist() == [0.5, 0.5]
    opt.zero_grad()
    scaler.scale((p * float("inf")).sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert p.tolist() == [0.5, 0.5] and scaler.get_scale() == 4.0


# Processes


def test_a_forked_child_gets_an_error():
    torch.ones(1, device="tpu").item()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, device="tpu")
            said = "no error"
        except RuntimeError as e:
            said = str(e)
        os.write(write, f"{torch.tpu._is_in_bad_fork()} {said}".encode())
        os._exit(0)
    os.close(write)
    said = os.read(read, 10_000).decode()
    os.waitpid(pid, 0)
    assert said.startswith("True ") and "fork" in said and "spawn" in said


def test_a_child_forked_before_the_first_use_can_use_the_device(python):
    code = """
import os, torch
pid = os.fork()
if pid == 0:
    print(torch.ones(3, device="tpu").sum().item(), flush=True)
    os._exit(0)
print(os.waitpid(pid, 0)[1], torch.ones(2, device="tpu").sum().item())
"""
    assert python(code).stdout == "3.0\n0 2.0\n"


# Printing


def plain(text: str) -> list[str]:
    """Without the device, which may also move the line breaks."""
    return re.sub(r",\s+device='tpu:0'", "", text).split()


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.arange(6, device=d).view(2, 3),
        lambda d: torch.tensor(3.5, device=d),
        lambda d: torch.empty(0, 3, device=d),
        lambda d: torch.linspace(-1e-9, 1e9, 7, device=d),
        lambda d: torch.tensor([True, False], device=d),
        lambda d: torch.tensor([1 + 2j, -3j], device=d),
        lambda d: torch.ones(2, device=d, requires_grad=True) * 2,
        lambda d: torch.nn.Parameter(torch.ones(2, device=d)),
        lambda d: torch.arange(5000, device=d).view(50, 100),
        lambda d: torch.zeros(2, 3, device=d, dtype=torch.float16),
        lambda d: torch.full((2,), float("nan"), device=d),
    ],
)
def test_repr_is_what_the_cpu_prints(make):
    here, there = repr(make("cpu")), repr(make("tpu"))
    assert "device='tpu:0'" in there
    assert plain(there) == plain(here)


def test_large_tensors_are_cut_before_they_are_copied():
    # 64 MiB; only the corners may travel.
    x = torch.arange(1 << 24, device="tpu", dtype=torch.float32).view(1 << 12, 1 << 12)
    torch.tpu.reset_metrics()
    text = repr(x)
    assert torch.tpu.metrics()["bytes_d2h"] < 1 << 16
    expected = repr(torch.arange(1 << 24, dtype=torch.float32).view(1 << 12, 1 << 12))
    assert plain(text) == plain(expected)


REPLACED = {
    "torch.Tensor.__dlpack__",
    "torch.Tensor.__dlpack_device__",
    "torch._functorch.apis._chunked_vmap",
    "torch._functorch.vmap._chunked_vmap",
    "torch._tensor_str._tensor_str",
    "torch.autograd.graph.save_on_cpu.__init__",
    "torch.distributed.destroy_process_group",
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.distributed.distributed_c10d.destroy_process_group",
    "torch.from_dlpack",
    "torch.nn.modules.module.Module.zero_grad",
    "torch.optim.optimizer.Optimizer.zero_grad",
    "torch.utils.dlpack.from_dlpack",
}


def test_nothing_else_in_torch_is_replaced():
    """Functions of ours in modules and classes of torch, wherever PyTorch has them."""
    ours = str(Path(oxitorch.__file__).parent)

    def is_ours(f):
        return type(f) is FunctionType and f.__code__.co_filename.startswith(ours)

    found = set()
    modules = {n: m for n, m in sys.modules.items() if n == "torch" or (n.startswith("torch.") and ".tpu" not in n)}
    for name, module in modules.items():
        holders = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
        for holder in (module, *holders):
            where = name if holder is module else f"{name}.{holder.__qualname__}"
            functions = {k: v for k, v in vars(holder).items() if type(v) is FunctionType}
            # Also behind wrappers of PyTorch's; what Dynamo has compiled is none of its functions.
            functions = {k: v for k, v in functions.items() if not k.startswith("__compiled_fn")}
            own = {k: inspect.unwrap(v, stop=is_ours) for k, v in functions.items()}
            found |= {f"{where}.{k}" for k, v in own.items() if is_ours(v)}
    # Once Dynamo is imported, the first by PyTorch's own function for it.
    with_dynamo = {
        "torch._dynamo.backends.registry._default_backend",
        "torch.nn.attention.flex_attention._validate_device",
    }
    assert found - with_dynamo == REPLACED
