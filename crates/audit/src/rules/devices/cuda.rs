//! What of PyTorch's own names CUDA.

use ruff_python_ast::Expr;
use ruff_text_size::{Ranged, TextRange, TextSize};

use crate::python::{Call, Compared, Hit, Model};
use crate::rule::Effort::{Edit, None as Nothing, Rework, Think};
use crate::rule::Example::{File, Py};
use crate::rule::Runs::Unchanged;
use crate::rule::Severity::{Error, Note};
use crate::rule::{Rule, When};

/// Functions and classes of `torch.cuda` that `torch.tpu` has under the same name; a test compares the list with both.
pub const MIRRORED: &[&str] = &[
    "Event",
    "Stream",
    "StreamContext",
    "can_device_access_peer",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
];

/// Adds the edit from `torch.cuda.NAME` to `torch.tpu.NAME`, where there is such a name.
pub(crate) fn renamed(path: &str, range: TextRange, source: &str, hit: Hit) -> Hit {
    let Some(name) = path.strip_prefix("torch.cuda.") else { return hit };
    let is_mirrored = MIRRORED.contains(&name.split('.').next().unwrap_or(name));
    if !is_mirrored || !source.starts_with("torch.cuda.") {
        return hit;
    }
    let cuda = TextRange::at(range.start() + TextSize::new(6), TextSize::new(4));
    hit.edit(cuda, "tpu")
}

fn cuda_method(call: &Call<'_, '_>) -> Option<Hit> {
    let Expr::Attribute(f) = &*call.call.func else { return None };
    // A module `cuda` of something else is no method.
    if !call.path.is_empty() || call.model.root(&f.value).is_some_and(|r| !r.starts_with("torch")) {
        return None;
    }
    Some(call.hit()?.edit(f.attr.range(), "tpu"))
}

/// Whether a text is the name of a CUDA device.
fn is_cuda(text: &str) -> bool {
    text == "cuda" || text.strip_prefix("cuda:").is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()))
}

fn cuda_string(text: &str, expr: &Expr, model: &Model<'_>) -> Option<Hit> {
    let formatted = matches!(expr, Expr::FString(_));
    let other = model.compared() == Compared::Other;
    if other || !is_cuda(text) || (formatted && text != "cuda:") {
        return None;
    }
    let at = model.source(expr.range()).find("cuda")?;
    let cuda = TextRange::at(expr.start() + TextSize::new(at as u32), TextSize::new(4));
    let hit = Hit::at(expr);
    // What a comparison asks, or a table has as a key, may be meant as it is.
    Some(if model.names_device() { hit.edit(cuda, "tpu") } else { hit })
}

fn is_cuda_attribute(expr: &Expr, model: &Model<'_>) -> Option<Hit> {
    let Expr::Attribute(attribute) = expr else { return None };
    let plain =
        model.path(expr).is_none() && !matches!(&*attribute.value, Expr::Name(n) if n.id.as_str() == "self");
    (plain && model.uses_torch()).then(|| Hit::at(expr))
}

fn default_tensor_type(call: &Call<'_, '_>) -> Option<Hit> {
    let argument = call.first()?;
    call.model.source(argument.range()).contains("cuda").then(|| call.hit()).flatten()
}

/// Rules by number.
pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "DEV001",
        name: "cuda() method",
        severity: Error,
        sentence: "`{}` moves to a CUDA device, which is not there.",
        fix: "Write `.tpu()`, or `.to(device)` with a device that the script chooses once.",
        explanation: "`Tensor.tpu()` and `Module.tpu()` take the same arguments as `cuda()`: an index, `non_blocking`, `memory_format`. A script that is to run on GPUs too asks `torch.accelerator.current_accelerator()` once and uses `.to(device)` everywhere.",
        effort: Edit,
        when: &[When::Method(&["cuda"], cuda_method)],
        bad: &[
            Py("import torch\nx = torch.ones(3).cuda()\n"),
            Py("import torch\nmodel = torch.nn.Linear(2, 2)\nmodel.cuda(0)\n"),
            Py("def f(batch):\n    return batch['x'].cuda(non_blocking=True)\nimport torch\n"),
        ],
        good: &[
            Py("import torch\nx = torch.ones(3).to('tpu')\n"),
            Py("from numba import cuda\nimport torch\nimport lib\nlib.x.cuda()\n"),
        ],
        ..Rule::BASE
    },
    Rule {
        id: "DEV002",
        name: "cuda device string",
        severity: Error,
        sentence: "`{}` names a CUDA device, which is not there.",
        fix: "Write \"tpu\", or `torch.accelerator.current_accelerator()` where the script runs elsewhere too.",
        explanation: "The device of oxitorch is called `tpu` on every platform, also where XLA runs on a GPU or on the CPU. `\"cuda:1\"` is `\"tpu:1\"`. `--fix` changes strings that go to a parameter or a name for a device; it leaves what is compared with `x.device.type`, and keys of tables, which may be meant as they are.",
        effort: Edit,
        when: &[When::Text(cuda_string)],
        bad: &[
            Py("import torch\ndevice = torch.device('cuda')\n"),
            Py("import torch\nx = torch.ones(2, device=\"cuda:0\")\n"),
            Py("import torch\ndef f(i):\n    return f'cuda:{i}'\n"),
            Py("import torch\nx = torch.ones(2)\nif x.device.type == 'cuda':\n    pass\n"),
        ],
        good: &[
            Py("import torch\ndevice = torch.device('tpu')\n"),
            Py("import torch\nname = 'cuda toolkit'\n"),
            Py("\"cuda\"\nimport torch\n"),
        ],
        ..Rule::BASE
    },
    Rule {
        id: "DEV003",
        name: "torch.cuda.is_available",
        severity: Error,
        sentence: "`{}` sees GPUs alone, so the script does what it does without a device.",
        fix: "Ask `torch.tpu.is_available()`, or `torch.accelerator.is_available()` for any device.",
        explanation: "This is the most expensive line of a migration, because nothing fails: `device = \"cuda\" if torch.cuda.is_available() else \"cpu\"` trains on the host.",
        effort: Edit,
        when: &[When::Name(&["torch.cuda.is_available", "torch.cuda.device_count"])],
        // Kernels of CUDA ask for a GPU, and are findings of their own.
        unless: |model| model.for_kernels,
        bad: &[
            Py("import torch\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\n"),
            Py("from torch.cuda import is_available\n"),
            Py("import torch\nn = torch.cuda.device_count()\n"),
        ],
        good: &[
            Py("import torch\nx = torch.tpu.is_available()\n"),
            Py(
                "import torch\nfrom torch.utils.cpp_extension import CUDAExtension\nif torch.cuda.is_available():\n    modules = [CUDAExtension('ops', ['ops.cu'])]\n",
            ),
        ],
        ..Rule::BASE
    },
    Rule {
        id: "DEV004",
        name: "torch.cuda with a counterpart",
        severity: Error,
        sentence: "`{}` speaks of CUDA, and has a counterpart of the same name in `torch.tpu`.",
        fix: "Write `torch.tpu` for `torch.cuda`.",
        explanation: "`torch.tpu` has the functions of `torch.cuda` for devices, memory, random numbers, streams and events, with the same arguments and results. Without a GPU, some of `torch.cuda`'s raise (`synchronize`, `get_device_name`), and others do nothing (`empty_cache`, `manual_seed_all`) or say zero (`memory_allocated`), which is worse for numbers that are logged.",
        effort: Edit,
        when: &[When::Name(&[
            "torch.cuda.current_device",
            "torch.cuda.device",
            "torch.cuda.device_of",
            "torch.cuda.empty_cache",
            "torch.cuda.get_device_capability",
            "torch.cuda.get_device_name",
            "torch.cuda.get_device_properties",
            "torch.cuda.get_rng_state",
            "torch.cuda.get_rng_state_all",
            "torch.cuda.init",
            "torch.cuda.initial_seed",
            "torch.cuda.is_bf16_supported",
            "torch.cuda.is_initialized",
            "torch.cuda.manual_seed",
            "torch.cuda.manual_seed_all",
            "torch.cuda.max_memory_allocated",
            "torch.cuda.max_memory_reserved",
            "torch.cuda.mem_get_info",
            "torch.cuda.memory_allocated",
            "torch.cuda.memory_reserved",
            "torch.cuda.memory_stats",
            "torch.cuda.memory_summary",
            "torch.cuda.reset_peak_memory_stats",
            "torch.cuda.reset_max_memory_allocated",
            "torch.cuda.seed",
            "torch.cuda.seed_all",
            "torch.cuda.set_per_process_memory_fraction",
            "torch.cuda.set_rng_state",
            "torch.cuda.set_rng_state_all",
            "torch.cuda.synchronize",
            "torch.cuda.memory_stats_as_nested_dict",
            "torch.cuda.can_device_access_peer",
            "torch.cuda.set_device",
        ])],
        bad: &[
            Py("import torch\ntorch.cuda.manual_seed_all(0)\n"),
            Py("import torch\nprint(torch.cuda.max_memory_allocated() / 2**30)\n"),
            Py("from torch import cuda\ncuda.synchronize()\n"),
            Py("import torch.cuda as tc\ntc.empty_cache()\n"),
        ],
        good: &[Py("import torch\ntorch.tpu.synchronize()\n"), Py("import torch\ntorch.manual_seed(0)\n")],
        ..Rule::BASE
    },
    Rule {
        id: "DEV005",
        name: "CUDA streams and events",
        severity: Error,
        sentence: "`{}` makes or takes a stream or an event of CUDA.",
        fix: "Take `torch.tpu.Stream`, `torch.tpu.Event` and `torch.tpu.stream`, or leave the streams out: the device runs behind Python anyway.",
        explanation: "Streams and events of `torch.tpu` do what CUDA's do, and an event's time is the device's. But most code that overlaps copies with computing needs none: operations are recorded, copies to the device wait for nobody, and a program runs when what it reads is there.",
        effort: Think,
        when: &[When::Name(&[
            "torch.cuda.Stream",
            "torch.cuda.Event",
            "torch.cuda.stream",
            "torch.cuda.StreamContext",
            "torch.cuda.current_stream",
            "torch.cuda.default_stream",
            "torch.cuda.set_stream",
            "torch.cuda.ExternalStream",
            "torch.cuda.streams.*",
        ])],
        bad: &[
            Py("import torch\ns = torch.cuda.Stream()\nwith torch.cuda.stream(s):\n    pass\n"),
            Py("import torch\nstart = torch.cuda.Event(enable_timing=True)\n"),
        ],
        good: &[Py("import torch\ns = torch.tpu.Stream()\n")],
        ..Rule::BASE
    },
    Rule {
        id: "DEV006",
        name: "CUDA graphs",
        severity: Error,
        sentence: "`{}` captures a CUDA graph.",
        fix: "Remove it: a step becomes few programs by itself, and `torch.tpu.jit` makes one of it.",
        explanation: "CUDA graphs save the time of launches. oxitorch records operations and launches programs of many, and `torch.tpu.jit` makes a whole step, with backward and optimizer, one launch. Static input buffers and warm-up iterations are not needed either.",
        effort: Rework,
        when: &[When::Name(&[
            "torch.cuda.CUDAGraph",
            "torch.cuda.graph",
            "torch.cuda.make_graphed_callables",
            "torch.cuda.graphs.*",
            "torch.cuda.graph_pool_handle",
            "torch.cuda.is_current_stream_capturing",
        ])],
        bad: &[
            Py("import torch\ng = torch.cuda.CUDAGraph()\n"),
            Py("import torch\nwith torch.cuda.graph(object()):\n    pass\n"),
        ],
        good: &[Py("import torch\ng = torch.tpu.jit(lambda x: x)\n")],
        ..Rule::BASE
    },
    Rule {
        id: "DEV007",
        name: "torch.cuda without a counterpart",
        severity: Error,
        sentence: "`{}` is CUDA's own and has no counterpart.",
        fix: "Remove it, or put it behind a test for CUDA.",
        explanation: "Allocators, IPC, NVTX, NVRTC, clocks and power of a GPU, peer access by hand: there is nothing to be said about them on another device. Ranges for a timeline are `torch.profiler.record_function`; what memory is used for is in `torch.tpu.memory_stats()` and in `oxitorch preflight`.",
        effort: Think,
        when: &[When::Name(&[
            "torch.cuda.nvtx.*",
            "torch.cuda.profiler.*",
            "torch.cuda.comm.*",
            "torch.cuda.nccl.*",
            "torch.cuda.ipc_collect",
            "torch.cuda.utilization",
            "torch.cuda.temperature",
            "torch.cuda.power_draw",
            "torch.cuda.clock_rate",
            "torch.cuda.memory_usage",
            "torch.cuda.list_gpu_processes",
            "torch.cuda.get_arch_list",
            "torch.cuda.get_gencode_flags",
            "torch.cuda.memory_snapshot",
            "torch.cuda.memory.*",
            "torch.cuda.caching_allocator_alloc",
            "torch.cuda.caching_allocator_delete",
            "torch.cuda.change_current_allocator",
            "torch.cuda.CUDAPluggableAllocator",
            "torch.cuda.MemPool",
            "torch.cuda.use_mem_pool",
            "torch.cuda.jiterator.*",
            "torch.cuda.tunable.*",
            "torch.cuda.gds.*",
            "torch.cuda.set_sync_debug_mode",
            "torch.cuda.get_sync_debug_mode",
            "torch.cuda.cudart",
            "torch.cuda.check_error",
            "torch.cuda.max_memory_cached",
            "torch.cuda.memory_cached",
            "torch.cuda.current_blas_handle",
            "torch.cuda.reset_max_memory_cached",
            "torch.cuda.cublas.*",
        ])],
        bad: &[
            Py("import torch\ntorch.cuda.nvtx.range_push('step')\n"),
            Py("import torch.cuda.nvtx as nvtx\n"),
            Py("import torch\ntorch.cuda.memory._record_memory_history()\n"),
        ],
        good: &[Py("import torch\nwith torch.profiler.record_function('step'):\n    pass\n")],
        ..Rule::BASE
    },
    Rule {
        id: "DEV008",
        name: "CUDA tensor types",
        severity: Error,
        sentence: "`{}` is a type of CUDA tensors.",
        fix: "Make tensors with `device=` and `dtype=`; for a default there is `torch.set_default_device(\"tpu\")`.",
        explanation: "`torch.cuda.FloatTensor` and its like are a way of writing from before `torch.device`. `torch.tpu` has none of them.",
        effort: Edit,
        when: &[
            When::Name(&[
                "torch.cuda.FloatTensor",
                "torch.cuda.DoubleTensor",
                "torch.cuda.HalfTensor",
                "torch.cuda.LongTensor",
                "torch.cuda.IntTensor",
                "torch.cuda.ByteTensor",
                "torch.cuda.BoolTensor",
                "torch.cuda.ShortTensor",
                "torch.cuda.CharTensor",
                "torch.cuda.BFloat16Tensor",
            ]),
            When::Call(&["torch.set_default_tensor_type"], default_tensor_type),
        ],
        bad: &[
            Py("import torch\nx = torch.cuda.FloatTensor(3)\n"),
            Py("import torch\ntorch.set_default_tensor_type('torch.cuda.FloatTensor')\n"),
        ],
        good: &[Py(
            "import torch\nx = torch.FloatTensor(3)\ntorch.set_default_tensor_type('torch.DoubleTensor')\n",
        )],
        ..Rule::BASE
    },
    Rule {
        id: "DEV009",
        name: "is_cuda",
        severity: Error,
        sentence: "`{}` is false for tensors of the device, so the code goes another way or refuses them.",
        fix: "Ask `x.device.type == \"tpu\"`, or whether it is not on the CPU: `x.device.type != \"cpu\"`.",
        explanation: "Nothing fails: code that checks `is_cuda` takes its slow path, or refuses its input.",
        effort: Edit,
        when: &[When::Attribute(&["is_cuda"], is_cuda_attribute)],
        bad: &[Py("import torch\ndef f(x):\n    if x.is_cuda:\n        return x\n")],
        good: &[
            Py("import torch\ndef f(x):\n    return x.device.type == 'tpu'\n"),
            Py("def f(x):\n    return x.is_cuda  # no torch, nvidia\n"),
        ],
        ..Rule::BASE
    },
    Rule {
        id: "DEV010",
        name: "choice of GPUs by the environment",
        severity: Error,
        sentence: "`{}` chooses GPUs and has no effect on the device.",
        fix: "Remove it; which device a process takes is said by `torch.tpu.set_device`, or by the launcher.",
        explanation: "`CUDA_VISIBLE_DEVICES` chooses GPUs for a process. With oxitorch on a GPU it is heeded by XLA's plugin.",
        effort: Edit,
        when: &[When::Variable(&["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"])],
        bad: &[
            Py("import os\nimport torch\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\n"),
            File("run.sh", "#!/bin/sh\nCUDA_VISIBLE_DEVICES=0,1 python train.py\n"),
            File("job.yaml", "env:\n  - name: CUDA_VISIBLE_DEVICES\n    value: \"0\"\n"),
        ],
        good: &[
            Py("import os\nimport torch\nos.environ['OMP_NUM_THREADS'] = '1'\n"),
            File("run.sh", "# CUDA_VISIBLE_DEVICES=0\nexport OXITORCH_PLATFORM=tpu\n"),
        ],
        ..Rule::BASE
    },
    Rule {
        id: "DEV011",
        name: "cuDNN and cuBLAS settings",
        severity: Note,
        sentence: "`{}` is a setting of a CUDA library and changes nothing on the device.",
        fix: "Leave it or remove it. Deterministic results are `torch.use_deterministic_algorithms(True)`, precision is `torch.set_float32_matmul_precision`.",
        explanation: "XLA chooses algorithms when it compiles, and the same program gives the same result, so that `cudnn.benchmark` and `cudnn.deterministic` have nothing to do.",
        runs: Unchanged(
            "torch.backends.cudnn.benchmark = True\ntorch.backends.cudnn.deterministic = True\nx = torch.randn(1, 1, 4, 4, device='tpu')\nw = torch.ones(1, 1, 3, 3, device='tpu')\nassert torch.allclose(torch.conv2d(x, w).cpu(), torch.conv2d(x.cpu(), w.cpu()), atol=1e-5)",
        ),
        effort: Nothing,
        when: &[When::Name(&[
            "torch.backends.cudnn.*",
            "torch.backends.cuda.sdp_kernel",
            "torch.backends.cuda.enable_flash_sdp",
            "torch.backends.cuda.enable_mem_efficient_sdp",
            "torch.backends.cuda.enable_math_sdp",
            "torch.backends.cuda.cufft_plan_cache.*",
            "torch.backends.cuda.preferred_linalg_library",
        ])],
        bad: &[
            Py("import torch\ntorch.backends.cudnn.benchmark = True\n"),
            Py("import torch.backends.cudnn as cudnn\ncudnn.deterministic = True\n"),
        ],
        good: &[Py("import torch\ntorch.use_deterministic_algorithms(True)\n")],
        ..Rule::BASE
    },
];
