"""The environment variables of oxitorch, each declared in exactly one row.

`docs/environment.md` and `oxitorch env` are made from this table. Only Python (here) and the command line read the
environment; everything below takes values.
"""

import json
import os
import re
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Var:
    """One environment variable.

    kind is one of: "choice" (one of `choices`), "int" (at least `minimum`), "ints" (several, each once), "fraction"
    (above 0, at most 1), "bool" (0 or 1), "size" (in bytes), "path", "place" (a path or a URL), "text".
    """

    name: str
    kind: str
    default: str
    since: str
    doc: str
    choices: tuple[str, ...] = ()
    minimum: int = 0

    def read(self, environ=os.environ) -> Any:
        """The parsed value, or None where the variable is unset or empty; ValueError names the variable otherwise."""
        text = environ.get(self.name, "").strip()
        if not text:
            return None
        if self.kind == "choice":
            if text.lower() not in self.choices:
                raise ValueError(f"{self.name}={text}: expected one of {', '.join(self.choices)}")
            return text.lower()
        if self.kind == "int":
            if not text.isdecimal() or int(text) < self.minimum:
                raise ValueError(f"{self.name}={text}: expected a whole number of at least {self.minimum}")
            return int(text)
        if self.kind == "ints":
            parts = [part.strip() for part in text.split(",")]
            if not all(part.isdecimal() for part in parts) or len({int(part) for part in parts}) < len(parts):
                raise ValueError(f"{self.name}={text}: expected different whole numbers, such as 0,2")
            return [int(part) for part in parts]
        if self.kind == "fraction":
            if not re.fullmatch(r"\d*\.?\d+", text) or not 0 < float(text) <= 1:
                raise ValueError(f"{self.name}={text}: expected a number above 0 and at most 1")
            return float(text)
        if self.kind == "size":
            return self._size(text)
        if self.kind == "bool":
            known = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
            if text.lower() not in known:
                raise ValueError(f"{self.name}={text}: expected 0 or 1")
            return known[text.lower()]
        return text

    def _size(self, text: str) -> int:
        parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.lower())
        if parts is None:
            raise ValueError(f"{self.name}={text}: expected a size such as 500M or 5G")
        return int(float(parts[1]) * 1024 ** " kmgt".index(parts[2] or " "))

    def values(self) -> str:
        """What may be assigned, for people."""
        return {
            "choice": ", ".join(f"`{c}`" for c in self.choices),
            "int": f"a whole number, at least {self.minimum}",
            "ints": "whole numbers with commas between them, each once",
            "fraction": "a number above 0, at most 1",
            "bool": "`0` or `1`",
            "size": "bytes, with `K`, `M`, `G` or `T` for multiples of 1024",
            "path": "a path",
            "place": "a path or a URL",
            "text": "text",
        }[self.kind]


PLATFORM = Var(
    "OXITORCH_PLATFORM",
    "choice",
    "the first of tpu, cuda, cpu that has a device",
    "0.1",
    "Which PJRT plugin runs the work. The device is called `tpu` on all of them.",
    choices=("cpu", "cuda", "tpu"),
)
CPU_DEVICES = Var(
    "OXITORCH_CPU_DEVICES",
    "int",
    "LOCAL_WORLD_SIZE, which torchrun sets, else 1",
    "0.1",
    "How many virtual devices the cpu platform shows, to try multi-device programs on one machine.",
    minimum=1,
)
CUDA_DEVICES = Var(
    "OXITORCH_CUDA_DEVICES",
    "ints",
    "all that the driver shows",
    "0.1",
    "Which GPUs the process takes, by the driver's numbers; they are `tpu:0`, `tpu:1` and so on in this order.",
)
CUDA_MEMORY_FRACTION = Var(
    "OXITORCH_CUDA_MEMORY_FRACTION",
    "fraction",
    "0.75",
    "0.1",
    "The part of each GPU's memory that the process may take.",
)
CUDA_PREALLOCATE = Var(
    "OXITORCH_CUDA_PREALLOCATE",
    "bool",
    "1",
    "0.1",
    "Whether it takes that memory at the start, so that nobody else can and it does not come to lie in pieces.",
)
START_TIMEOUT = Var(
    "OXITORCH_START_TIMEOUT",
    "int",
    "600",
    "0.1",
    "After so many seconds a TPU that does not start is an error. One of several hosts starts when all of them are "
    "there; after 30 s a warning says what it waits for.",
    minimum=1,
)
EAGER_MODE = Var(
    "OXITORCH_EAGER_MODE",
    "choice",
    "fused",
    "0.1",
    "The eager mode a process starts in; `torch.tpu.eager_mode` changes it later.",
    choices=("fused", "strict", "debug"),
)
WINDOW_OPS = Var(
    "OXITORCH_WINDOW_OPS",
    "int",
    "10000",
    "0.1",
    "In fused mode, launch what was recorded when it has so many operations; see `torch.tpu.set_window`.",
    minimum=1,
)
WINDOW_BYTES = Var(
    "OXITORCH_WINDOW_BYTES",
    "int",
    "the memory of the device on the cpu platform, eight times that elsewhere",
    "0.1",
    "In fused mode, launch what was recorded when the results of its operations, needed or not, have so many bytes.",
    minimum=1,
)
WINDOW_KEPT_BYTES = Var(
    "OXITORCH_WINDOW_KEPT_BYTES",
    "int",
    "256 MiB on the cpu platform, the memory of the device elsewhere",
    "0.1",
    "In fused mode, launch what was recorded when those results that are not fused into what reads them (of matrix "
    "products, convolutions, reductions) have so many bytes; see `torch.tpu.set_window`.",
    minimum=1,
)
EXPLAIN = Var(
    "OXITORCH_EXPLAIN",
    "bool",
    "0",
    "0.1",
    "Print to stderr why each new program is needed: what differs from the one before that is most like it.",
)
MAX_GRAPHS = Var(
    "OXITORCH_MAX_GRAPHS",
    "int",
    "any number",
    "0.1",
    "Raise when a process needs more programs than this; see `torch.tpu.max_graphs`.",
    minimum=0,
)
GRAPHS = Var(
    "OXITORCH_GRAPHS",
    "path",
    "none",
    "0.1",
    "Write each program into this folder when it is compiled or loaded: its operations with their Python lines, "
    "StableHLO, optimized HLO, cost and memory. `oxitorch graphs` shows them; see `docs/tools.md`.",
)
TRACE = Var(
    "OXITORCH_TRACE",
    "path",
    "none",
    "0.1",
    "Write a timeline of the process into this file when it ends, compressed if the name ends with `.gz`; `%p` in it "
    "is the number of the process, `%r` its rank. `oxitorch trace run` sets it; see `docs/tools.md`.",
)
RANKS = Var(
    "OXITORCH_RANKS",
    "path",
    "`oxitorch-ranks-<user>` in the folder for temporary files",
    "0.1",
    "The folder in which each process of `torch.distributed` keeps its latest collectives, for `oxitorch ranks`; `off` "
    "keeps none.",
)
PREFLIGHT = Var(
    "OXITORCH_PREFLIGHT",
    "path",
    "none",
    "0.1",
    "Compute nothing, for the device that the file `device.json` in this folder describes, and write the programs that "
    "it would run into the folder. `oxitorch preflight` sets it; see `docs/preflight.md`.",
)
FALLBACK = Var(
    "OXITORCH_FALLBACK",
    "choice",
    "warn",
    "0.1",
    "What happens at an op that has no lowering: `warn` runs it on the CPU, warns once per op and counts it in "
    "`torch.tpu.metrics()`; `error` raises.",
    choices=("warn", "error"),
)
NAN_TRAP = Var(
    "OXITORCH_NAN_TRAP",
    "bool",
    "0",
    "0.1",
    "In debug mode, raise at the first op whose result holds a NaN or an infinity that its inputs did not hold.",
)
LIBRARY = Var(
    "OXITORCH_LIBRARY",
    "choice",
    "auto",
    "0.1",
    "On the cpu platform, let programs call PyTorch's own kernels for large matrix products, convolutions and "
    "attention of float32 and float64: `auto` where they are faster on this processor, `1` wherever they can, `0` "
    "nowhere.",
    choices=("auto", "1", "0"),
)
MEMORY_CACHING = Var(
    "OXITORCH_MEMORY_CACHING",
    "bool",
    "1",
    "0.1",
    "On the cpu platform, keep blocks of 256 KiB and more that programs free for the next program, as the system "
    "clears each page of a new one; `torch.tpu.empty_cache()` gives them back.",
)
LOWER_FOR = Var(
    "OXITORCH_LOWER_FOR",
    "choice",
    "the platform that runs",
    "0.1",
    "For tests: lower operations as for this platform, whichever runs them, so that what only TPUs or GPUs get can be "
    "run on a CPU.",
    choices=("cpu", "cuda", "tpu"),
)
COMPILE_THREADS = Var(
    "OXITORCH_COMPILE_THREADS",
    "int",
    "as many as there are cores",
    "0.1",
    "How many programs may be compiled at the same time.",
    minimum=1,
)
BACKGROUND_COMPILE = Var(
    "OXITORCH_BACKGROUND_COMPILE",
    "bool",
    "1",
    "0.1",
    "Whether a program that takes long to compile runs in a quickly compiled version until the better one is there. "
    "`0`, or `torch.use_deterministic_algorithms(True)`, makes results the same in each run.",
)
SHIM = Var(
    "OXITORCH_SHIM",
    "path",
    "the package, then the cache folder, then a build",
    "0.1",
    "A shim library to load instead of searching or building one (`oxitorch shim build` makes them).",
)
CACHE_DIR = Var(
    "OXITORCH_CACHE_DIR",
    "path",
    "`$XDG_CACHE_HOME/oxitorch`, else `~/.cache/oxitorch`",
    "0.1",
    "The folder that holds built shims and compiled programs. Whoever can write to it can run code as you.",
)
CACHE = Var(
    "OXITORCH_CACHE",
    "choice",
    "on",
    "0.1",
    "Whether compiled programs are kept on the disk for other processes; `docs/caching.md` says how.",
    choices=("on", "off"),
)
CACHE_SIZE = Var(
    "OXITORCH_CACHE_SIZE",
    "size",
    "5G",
    "0.1",
    "What compiled programs may have together on the disk; those used least lately are removed.",
)
CACHE_SHARED = Var(
    "OXITORCH_CACHE_SHARED",
    "place",
    "none",
    "0.1",
    "A second place of compiled programs that several machines share: one compiles and the others wait for it. A "
    "folder, for instance on a network file system, or a prefix of an object store, such as `s3://bucket/prefix`, "
    "`gs://`, `az://` or `https://`; `docs/caching.md` says how.",
)
CACHE_WAIT = Var(
    "OXITORCH_CACHE_WAIT",
    "int",
    "600",
    "0.1",
    "The longest time, in seconds, to wait for another process that compiles the same program.",
)
LOADED_PROGRAMS = Var(
    "OXITORCH_LOADED_PROGRAMS",
    "int",
    "4096",
    "0.1",
    "How many compiled programs a process keeps loaded; those used least lately are loaded or compiled again when they "
    "are wanted.",
    minimum=1,
)
LOADED_SIZE = Var(
    "OXITORCH_LOADED_SIZE",
    "size",
    "1G",
    "0.1",
    "What compiled programs that a process keeps loaded may have together in memory, as far as it can be estimated.",
)
KNOWN_PROGRAMS = Var(
    "OXITORCH_KNOWN_PROGRAMS",
    "int",
    "8192",
    "0.1",
    "For how many sequences of operations a device remembers the programs; those used least lately are put together "
    "again when they come again, and loaded.",
    minimum=2,
)
KNOWN_OPS = Var(
    "OXITORCH_KNOWN_OPS",
    "int",
    "65536",
    "0.1",
    "How many operations a device remembers, each with its shapes, dtypes and attributes; those used least lately are "
    "learned again when they come again, and what they are part of counts as a new program.",
    minimum=2,
)

TABLE: tuple[Var, ...] = (
    PLATFORM,
    CPU_DEVICES,
    CUDA_DEVICES,
    CUDA_MEMORY_FRACTION,
    CUDA_PREALLOCATE,
    START_TIMEOUT,
    EAGER_MODE,
    WINDOW_OPS,
    WINDOW_BYTES,
    WINDOW_KEPT_BYTES,
    EXPLAIN,
    MAX_GRAPHS,
    GRAPHS,
    TRACE,
    RANKS,
    PREFLIGHT,
    FALLBACK,
    NAN_TRAP,
    LIBRARY,
    MEMORY_CACHING,
    LOWER_FOR,
    COMPILE_THREADS,
    BACKGROUND_COMPILE,
    SHIM,
    CACHE_DIR,
    CACHE,
    CACHE_SIZE,
    CACHE_SHARED,
    CACHE_WAIT,
    LOADED_PROGRAMS,
    LOADED_SIZE,
    KNOWN_PROGRAMS,
    KNOWN_OPS,
)

# What object stores are told: how to reach them, and who asks.
STORES = ("AWS_", "AZURE_", "GOOGLE_")

# Read by oxitorch, defined by somebody else.
FOREIGN: tuple[tuple[str, str], ...] = (
    (
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "PyTorch's: `0` keeps `import torch` from loading oxitorch; `import oxitorch` after it still does.",
    ),
    (
        "ACCELERATE_TORCH_DEVICE",
        "Accelerate's: the device that it uses, whatever a program says; see `docs/libraries.md`.",
    ),
    ("CXX", "The C++ compiler that builds the shim; default `g++`, then `c++`, then `clang++`."),
    ("XDG_CACHE_HOME", "The parent of the cache folder; default `~/.cache`."),
    ("XLA_FLAGS", "XLA's options; compiled programs depend on it."),
    ("LIBTPU_INIT_ARGS", "libtpu's options; compiled programs depend on it."),
    ("TPU_WORKER_HOSTNAMES", "libtpu's: the hosts of a TPU, which are named where it does not start."),
    (
        "TPU_PROCESS_ADDRESSES",
        "The same for processes that share a TPU; `init_process_group()` sets it, see `docs/distributed.md`.",
    ),
    ("LOCAL_RANK, LOCAL_WORLD_SIZE", "torchrun's: which of the machine's devices is that of this process."),
    ("CUDA_VISIBLE_DEVICES", "CUDA's: where it names one GPU, a process of several takes that."),
    ("MEGASCALE_*", "The same for slices that work together."),
    (
        "TORCH_FR_BUFFER_SIZE, TORCH_NCCL_TRACE_BUFFER_SIZE",
        "PyTorch's: how many collectives its flight recorder keeps; set, it records those of the device too, see "
        "`docs/distributed.md`.",
    ),
    (
        "NPROC",
        "How many threads the cpu platform computes with, else one for each core, or for each that is a process's "
        "share where `LOCAL_WORLD_SIZE` says that several run on the machine; compiled programs depend on it.",
    ),
    *(
        (f"{prefix}*", "Where an object store is and who asks it, if `OXITORCH_CACHE_SHARED` is one.")
        for prefix in STORES
    ),
)


def cache_dir() -> str:
    """The folder for files that can be made again."""
    chosen = CACHE_DIR.read()
    if chosen:
        return os.path.expanduser(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "oxitorch")


# Of these, what plugins' compilers read.
COMPILER = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC")


def caches() -> bool:
    """Whether compiled programs are kept on the disk. Not where XLA is to write down what it compiles."""
    return CACHE.read() != "off" and "--xla_dump" not in os.environ.get("XLA_FLAGS", "")


def _cache_shared() -> str | None:
    """What machines share: a URL, or the path of a folder."""
    place = CACHE_SHARED.read() if caches() else None
    return place if place is None or "://" in place else os.path.abspath(os.path.expanduser(place))


def _preflight() -> dict[str, Any]:
    """The device that is not there, and where to write what it would run; workers of the script write nothing."""
    folder = PREFLIGHT.read()
    if folder is None:
        return {}
    import multiprocessing  # here, as the command line imports this module

    with open(os.path.join(folder, "device.json"), encoding="utf-8") as f:
        return {"absent": json.load(f), "capture": None if multiprocessing.parent_process() else folder}


def site_dirs() -> list[str]:
    """The folders in which plugin packages are looked for: the import path, in its order."""
    paths = [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    return list(dict.fromkeys(p for p in paths if p))


def tpu_hosts(environ=os.environ) -> list[str]:
    """What libtpu is told of other hosts that a TPU has, for people: without these it starts alone."""
    found = []
    for names, number in (("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"), ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID")):
        others = [name for name in environ.get(names, "").split(",") if name]
        if len(others) > 1:
            mine = environ.get(number)
            this = f", this is number {mine}" if mine else f", and {number} does not say which of them this is"
            found.append(f"{names} has {len(others)}{this}: {', '.join(others)}")
    if environ.get("MEGASCALE_NUM_SLICES", "1") != "1":
        where = environ.get("MEGASCALE_COORDINATOR_ADDRESS", "an address that is not set")
        mine = environ.get("MEGASCALE_SLICE_ID", "not set")
        found.append(f"{environ['MEGASCALE_NUM_SLICES']} slices meet at {where}, MEGASCALE_SLICE_ID is {mine}")
    return found


def local_world_size() -> int:
    """How many processes of this machine torchrun started: `set_device(LOCAL_RANK)` is to work in each of them."""
    return max(1, _number("LOCAL_WORLD_SIZE") or 1)


def is_of_torchrun() -> bool:
    """Whether a launcher says how many processes it started on this machine."""
    return _number("LOCAL_WORLD_SIZE") is not None


def child() -> int:
    """Which of its parent's processes of `multiprocessing` this is, from one on; 0: none, or a launcher counts them."""
    import multiprocessing  # here, as the command line imports this module

    identity = multiprocessing.current_process()._identity
    return identity[-1] if identity and not is_of_torchrun() else 0


def rank() -> int | None:
    """Which of the processes that torchrun started this is."""
    return _number("RANK")


def restart() -> int:
    """How often torchrun has started these processes again; 0 where they are on several machines, which count alone."""
    alone = _number("LOCAL_WORLD_SIZE") == _number("WORLD_SIZE")
    return (_number("TORCHELASTIC_RESTART_COUNT") or 0) if alone else 0


def run_name() -> str:
    """What the processes of one run of torchrun have in common."""
    words = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    return "-".join(w for w in words if w) or "run"


def ranks_folder() -> str | None:
    """Where processes keep their latest collectives; None where they keep none."""
    asked = RANKS.read()
    if asked is not None and asked.lower() in ("off", "0"):
        return None
    return os.path.expanduser(asked) if asked else os.path.join(tempfile.gettempdir(), f"oxitorch-ranks-{os.getuid()}")


def records_flight() -> bool:
    """Whether the device's own flight recorder is the only one: nobody has asked for PyTorch's."""
    asked = any(os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
    return not asked and ranks_folder() is not None


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None


def _visible(*names: str) -> int | None:
    """How many devices the first of these variables that is set leaves to this process."""
    text = next((os.environ[name] for name in names if name in os.environ), None)
    return None if text is None else len([part for part in text.split(",") if part.strip()])


def core_config() -> dict[str, Any]:
    """What the environment says, as the core takes it (without the shim and the site folders)."""
    return {
        **_preflight(),
        "platform": PLATFORM.read(),
        "cpu_devices": CPU_DEVICES.read(),
        "processes": local_world_size(),
        "cuda_visible_devices": CUDA_DEVICES.read(),
        "visible_tpus": _visible("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"),
        "visible_gpus": _visible("CUDA_VISIBLE_DEVICES"),
        "cuda_memory_fraction": CUDA_MEMORY_FRACTION.read(),
        "cuda_preallocate": CUDA_PREALLOCATE.read(),
        "start_timeout": START_TIMEOUT.read(),
        "tpu_hosts": tpu_hosts(),
        "eager_mode": EAGER_MODE.read() or "fused",
        "window_ops": WINDOW_OPS.read(),
        "window_bytes": WINDOW_BYTES.read(),
        "window_kept_bytes": WINDOW_KEPT_BYTES.read(),
        "explain": EXPLAIN.read() or False,
        "max_graphs": MAX_GRAPHS.read(),
        "graphs": os.path.abspath(os.path.expanduser(GRAPHS.read())) if GRAPHS.read() else None,
        "trace": TRACE.read() is not None,
        "fallback": FALLBACK.read() or "warn",
        "nan_trap": NAN_TRAP.read() or False,
        "library": LIBRARY.read(),
        "memory_caching": MEMORY_CACHING.read(),
        "lower_for": LOWER_FOR.read(),
        "compile_threads": COMPILE_THREADS.read(),
        "background_compile": BACKGROUND_COMPILE.read(),
        "cache_dir": cache_dir() if caches() else None,
        "cache_bytes": CACHE_SIZE.read(),
        "cache_shared": _cache_shared(),
        "cache_shared_settings": [(name, value) for name, value in os.environ.items() if name.startswith(STORES)],
        "cache_wait_s": CACHE_WAIT.read(),
        "loaded_programs": LOADED_PROGRAMS.read(),
        "loaded_bytes": LOADED_SIZE.read(),
        "known_programs": KNOWN_PROGRAMS.read(),
        "known_ops": KNOWN_OPS.read(),
        "compiler_environment": [(name, os.environ[name]) for name in COMPILER if os.environ.get(name)],
    }


def markdown() -> str:
    """`docs/environment.md`."""
    out = [
        "<!-- generated by `python -m oxitorch._env`; edit python/oxitorch/_env.py -->",
        "# Environment variables",
        "",
        "They are read once, when the device is registered with PyTorch.",
        "A value that cannot be understood is an error that names the variable, not a default.",
        "`oxitorch env` prints this table with the values of the current shell.",
        "",
    ]
    for v in TABLE:
        out += [
            f"## `{v.name}`",
            "",
            v.doc,
            "",
            f"- values: {v.values()}",
            f"- default: {v.default}",
            f"- since: {v.since}",
            "",
        ]
    out += ["## Variables of others that oxitorch reads", ""]
    out += [f"- `{name}`: {doc}" for name, doc in FOREIGN]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
