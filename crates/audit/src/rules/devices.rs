//! Devices: what names a GPU or CUDA.

use ruff_python_ast::Expr;
use ruff_text_size::{Ranged, TextRange, TextSize};

use crate::python::{Call, Compared, Hit, Model};
use crate::rule::Effort::{Edit, None as Nothing, Port, Rework, Think};
use crate::rule::Example::{File, Py};
use crate::rule::Runs::Unchanged;
use crate::rule::Severity::{Error, Note, Warning};
use crate::rule::{Family, Rule, When};

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

/// An option that is switched on, shown with its name.
fn true_option(value: &Expr, call: &Call<'_, '_>) -> Option<Hit> {
    let option = call.call.arguments.keywords.iter().find(|k| k.value.range() == value.range())?;
    let shown = call.model.source(option.range());
    crate::python::is_true(value).then(|| Hit::at(value).named(shown))
}

fn build_cuda(call: &Call<'_, '_>) -> Option<Hit> {
    let text = call.model.source(call.call.range());
    (call.path.ends_with("CUDAExtension")
        || text.contains(".cu\"")
        || text.contains(".cu'")
        || text.contains("cuda_sources"))
    .then(|| call.hit())
    .flatten()
}

fn build_cpp(call: &Call<'_, '_>) -> Option<Hit> {
    if build_cuda(call).is_some() { None } else { call.hit() }
}

fn compile_backend(call: &Call<'_, '_>) -> Option<Hit> {
    let backend = call.keyword("backend").and_then(crate::python::text)?;
    matches!(backend, "inductor" | "cudagraphs" | "tensorrt" | "torch_tensorrt").then(|| call.hit()).flatten()
}

fn compile_mode(call: &Call<'_, '_>) -> Option<Hit> {
    (call.keyword("backend").is_none() && call.keyword("mode").is_some()).then(|| call.hit()).flatten()
}

fn compile_options(call: &Call<'_, '_>) -> Option<Hit> {
    call.keyword("options").filter(|o| !o.is_none_literal_expr()).and(call.hit())
}

fn default_tensor_type(call: &Call<'_, '_>) -> Option<Hit> {
    let argument = call.first()?;
    call.model.source(argument.range()).contains("cuda").then(|| call.hit()).flatten()
}

/// Packages whose kernels are CUDA's and that have no rule of their own.
const CUDA_PACKAGES: &[&str] = &[
    "cupy.*",
    "cudf.*",
    "cuml.*",
    "cugraph.*",
    "pycuda.*",
    "numba.cuda.*",
    "tensorrt.*",
    "torch_tensorrt.*",
    "transformer_engine.*",
    "mamba_ssm.*",
    "causal_conv1d.*",
    "spconv.*",
    "MinkowskiEngine.*",
    "tinycudann.*",
    "nvdiffrast.*",
    "natten.*",
    "pytorch3d.*",
    "kaolin.*",
    "fused_dense_lib.*",
    "rotary_emb.*",
    "dropout_layer_norm.*",
    "flashinfer.*",
    "exllamav2.*",
    "auto_gptq.*",
    "awq.*",
    "quanto_cuda.*",
    "lightseq.*",
    "torchsparse.*",
    "cuda.bindings.*",
    "cutlass.*",
    "pyarrow.cuda.*",
    "fbgemm_gpu.*",
    "torchrec.*",
    "liger_kernel.*",
    "unsloth.*",
    "fla.*",
    "torch_scatter.*",
    "torch_sparse.*",
    "torch_cluster.*",
    "torch_spline_conv.*",
    "dgl.*",
];

const CUDA_REQUIREMENTS: &[&str] = &[
    "cupy",
    "cupy-cuda*",
    "cudf*",
    "cuml*",
    "cugraph*",
    "pycuda",
    "tensorrt*",
    "torch-tensorrt",
    "transformer-engine*",
    "mamba-ssm",
    "causal-conv1d",
    "spconv*",
    "minkowskiengine",
    "tinycudann",
    "nvdiffrast",
    "natten",
    "pytorch3d",
    "kaolin",
    "flashinfer*",
    "exllamav2",
    "auto-gptq",
    "autoawq*",
    "lightseq",
    "torchsparse",
    "cuda-python",
    "nvidia-cutlass*",
    "fbgemm-gpu*",
    "torchrec*",
    "liger-kernel",
    "unsloth*",
    "flash-linear-attention",
    "torch-scatter",
    "torch-sparse",
    "torch-cluster",
    "torch-spline-conv",
    "dgl*",
    "onnxruntime-gpu",
    "faiss-gpu*",
    "tensorflow-gpu",
    "numba-cuda",
];

pub(crate) static FAMILY: Family = Family {
    prefix: "DEV",
    name: "devices",
    about: "What names a GPU or CUDA: devices, `torch.cuda`, libraries of CUDA kernels, extensions.",
    rules: &[
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
            good: &[
                Py("import torch\ntorch.tpu.synchronize()\n"),
                Py("import torch\ntorch.manual_seed(0)\n"),
            ],
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
        Rule {
            id: "DEV012",
            name: "NVML and nvidia-smi",
            severity: Error,
            sentence: "`{}` asks NVIDIA's driver, which is not there.",
            fix: "Ask `torch.tpu.memory_stats()`, `torch.tpu.mem_get_info()` and `torch.tpu.metrics_summary()`.",
            explanation: "Memory, and what a step was bound by, are in the metrics of oxitorch, also for Prometheus (`torch.tpu.metrics_text()`).",
            effort: Think,
            when: &[
                When::Name(&["pynvml.*", "nvidia_smi.*", "py3nvml.*", "GPUtil.*", "gpustat.*"]),
                When::Package(&["pynvml", "nvidia-ml-py*", "py3nvml", "gputil", "gpustat", "nvitop"]),
                When::Command(&["nvidia-smi", "nsys", "ncu"]),
            ],
            bad: &[
                Py("import pynvml\npynvml.nvmlInit()\n"),
                File("requirements.txt", "torch\npynvml==11.5\n"),
                File("run.sh", "nvidia-smi\npython train.py\n"),
            ],
            good: &[Py("import torch\ntorch.tpu.memory_stats()\n"), File("run.sh", "echo nvidia-smi\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DEV013",
            name: "apex",
            severity: Error,
            sentence: "`{}` is NVIDIA's apex, whose kernels are CUDA's.",
            fix: "PyTorch has it all: `torch.autocast` for `amp`, `torch.optim.AdamW` for `FusedAdam`, `nn.LayerNorm` for `FusedLayerNorm`, `nn.SyncBatchNorm`.",
            explanation: "What apex fuses by hand is fused by XLA: an optimizer's step becomes one program with `torch.optim`, and a LayerNorm is part of the program around it.",
            effort: Rework,
            when: &[When::Name(&["apex.*"]), When::Package(&["apex", "nvidia-apex"])],
            bad: &[
                Py("from apex import amp\nfrom apex.optimizers import FusedAdam\n"),
                File("requirements.txt", "apex\n"),
            ],
            good: &[Py("import torch\nopt = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DEV014",
            name: "flash-attn",
            severity: Error,
            sentence: "`{}` is flash-attn, whose kernels are CUDA's.",
            fix: "Use `torch.nn.functional.scaled_dot_product_attention`; for transformers `attn_implementation=\"sdpa\"`.",
            explanation: "`scaled_dot_product_attention` keeps no matrix of scores for the backward on the device either. Sequences of several lengths in one row (`flash_attn_varlen_func`) are a mask, or rows of one length from `oxitorch.data`.",
            effort: Rework,
            when: &[
                When::Name(&[
                    "flash_attn.*",
                    "flash_attn_interface.*",
                    "flash_attn_2_cuda.*",
                    "hopper.flash_attn_interface.*",
                ]),
                When::Package(&["flash-attn", "flash_attn"]),
                When::Keyword(&["attn_implementation", "_attn_implementation"], |value, call| {
                    crate::python::text(value)
                        .is_some_and(|t| t.starts_with("flash_attention"))
                        .then(|| Hit::at(value))
                        .filter(|_| !call.path.starts_with('.'))
                }),
                When::Keyword(&["use_flash_attention_2"], true_option),
            ],
            bad: &[
                Py("from flash_attn import flash_attn_func\n"),
                Py(
                    "import transformers\nm = transformers.AutoModel.from_pretrained('x', attn_implementation='flash_attention_2')\n",
                ),
                File("requirements.txt", "flash-attn>=2.5  # fast\n"),
            ],
            good: &[
                Py(
                    "import transformers\nm = transformers.AutoModel.from_pretrained('x', attn_implementation='sdpa')\n",
                ),
                File("requirements.txt", "# flash-attn\ntorch\n"),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "DEV015",
            name: "xformers",
            severity: Error,
            sentence: "`{}` is xformers, whose kernels are CUDA's.",
            fix: "Use `torch.nn.functional.scaled_dot_product_attention`, and of diffusers leave `enable_xformers_memory_efficient_attention()` out.",
            explanation: "`memory_efficient_attention(q, k, v)` has heads in the third dimension, `scaled_dot_product_attention` in the second: transpose dimensions 1 and 2 before and after.",
            effort: Rework,
            when: &[
                When::Name(&["xformers.*"]),
                When::Package(&["xformers"]),
                When::Method(&["enable_xformers_memory_efficient_attention"], |call| call.hit()),
            ],
            bad: &[
                Py("import xformers.ops as xops\n"),
                File("requirements.txt", "xformers\n"),
                Py("import torch\ndef f(pipe):\n    pipe.enable_xformers_memory_efficient_attention()\n"),
                File("conda.yaml", "channels:\n  - xformers\ndependencies:\n  - xformers\n"),
            ],
            good: &[
                File("conda.yaml", "channels:\n  - xformers\ndependencies:\n  - pytorch\n"),
                Py("import torch.nn.functional as F\ny = F.scaled_dot_product_attention\n"),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "DEV016",
            name: "bitsandbytes",
            severity: Error,
            sentence: "`{}` is bitsandbytes, whose kernels are CUDA's.",
            fix: "Quantized weights are torchao's (`quantize_` with `Int8WeightOnlyConfig`); optimizers with 8-bit state are `torchao.optim`'s, or `torch.optim`'s with state in full.",
            explanation: "docs/libraries.md says which of torchao's configurations were tried on the device.",
            effort: Rework,
            when: &[
                When::Name(&["bitsandbytes.*", "transformers.BitsAndBytesConfig"]),
                When::Package(&["bitsandbytes*"]),
                When::Keyword(&["load_in_8bit", "load_in_4bit"], true_option),
            ],
            bad: &[
                Py("import bitsandbytes as bnb\n"),
                File("requirements.txt", "bitsandbytes\n"),
                Py(
                    "import transformers\nm = transformers.AutoModel.from_pretrained('x', load_in_8bit=True)\n",
                ),
            ],
            good: &[Py("from torchao.quantization import quantize_\nimport torch\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DEV017",
            name: "Triton kernel",
            severity: Error,
            sentence: "`{}`: Triton compiles for GPUs alone.",
            fix: "Write the operation in PyTorch and let XLA fuse it.",
            explanation: "Most Triton kernels fuse what PyTorch's eager mode launches one by one: norms, activations, losses, optimizers. XLA fuses those. What is left is a kernel with a schedule of its own, which is Pallas on TPUs.",
            effort: Port,
            when: &[
                When::Name(&[
                    "triton.*",
                    "torch.library.triton_op",
                    "torch._inductor.runtime.triton_helpers.*",
                ]),
                When::Package(&["triton", "pytorch-triton*", "triton-nightly"]),
            ],
            bad: &[
                Py("import triton\nimport triton.language as tl\n\n@triton.jit\ndef kernel(x):\n    pass\n"),
                File("requirements.txt", "triton==3.0\n"),
            ],
            good: &[Py("import torch\n\n@torch.jit.script\ndef kernel(x):\n    return x\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DEV018",
            name: "CUDA extension is built",
            severity: Error,
            sentence: "`{}` builds CUDA sources.",
            fix: "Replace the extension's operations by PyTorch's; keep its build behind a test for CUDA.",
            explanation: "The kernels themselves are found as DEV019.",
            effort: Think,
            when: &[
                When::Call(
                    &[
                        "torch.utils.cpp_extension.CUDAExtension",
                        "torch.utils.cpp_extension.load",
                        "torch.utils.cpp_extension.load_inline",
                    ],
                    build_cuda,
                ),
                When::Command(&["nvcc"]),
            ],
            bad: &[
                Py(
                    "from torch.utils.cpp_extension import CUDAExtension\next = CUDAExtension('x', ['a.cu'])\n",
                ),
                Py(
                    "from torch.utils.cpp_extension import load\nm = load(name='x', sources=['a.cpp', 'k.cu'])\n",
                ),
                File("make.sh", "nvcc -c -o kernel.cu.o kernel.cu\n"),
            ],
            good: &[Py(
                "from torch.utils.cpp_extension import CppExtension\next = CppExtension('x', ['a.cpp'])\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "DEV019",
            name: "CUDA kernel",
            severity: Error,
            sentence: "`{}`: a CUDA kernel has to be written in PyTorch or as a Pallas kernel.",
            fix: "Write what it computes in PyTorch and measure; XLA fuses element-wise operations, reductions and what surrounds them.",
            explanation: "One finding for each `__global__` function.",
            effort: Port,
            when: &[When::Line(|line| line.contains("__global__"))],
            bad: &[File("k.cu", "__global__ void add(float* x) {\n}\n")],
            good: &[File("k.cpp", "// __global__ void add(float* x)\nint main() {}\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DEV020",
            name: "C++ that includes CUDA",
            severity: Error,
            sentence: "`{}`: this source is built against CUDA.",
            fix: "Leave it out of the build where there is no CUDA, and give its operations a form in PyTorch.",
            explanation: "Includes of the CUDA runtime, its libraries, and PyTorch's CUDA headers.",
            effort: Think,
            when: &[When::Line(|line| {
                line.trim_start().strip_prefix('#').is_some_and(|l| l.trim_start().starts_with("include"))
                    && [
                        "cuda_runtime",
                        "<cuda.h",
                        "cuda_fp16",
                        "cuda_bf16",
                        "ATen/cuda",
                        "c10/cuda",
                        "cublas",
                        "cudnn",
                        "cub/",
                        "thrust/",
                        "cutlass/",
                        "nccl.h",
                        "nvrtc",
                        "curand",
                        "cusparse",
                        "THC/",
                    ]
                    .iter()
                    .any(|w| line.contains(w))
            })],
            bad: &[
                File("a.cpp", "#include <torch/extension.h>\n#include <c10/cuda/CUDAGuard.h>\n"),
                File("k.cu", "#include <cuda_runtime.h>\n"),
            ],
            good: &[File("a.cpp", "#include <vector>\n// #include <cuda_runtime.h>\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DEV021",
            name: "C++ operations",
            severity: Error,
            sentence: "`{}`: operations of a C++ extension have kernels for the CPU or CUDA, not for the device.",
            fix: "Give the operation a composite form in PyTorch (`torch.library`), or run it on CPU tensors.",
            explanation: "An operation that an extension registers for the CPU raises for tensors of the device. Where it calls ATen operations alone, register it as `CompositeImplicitAutograd`, and it works on every device.",
            effort: Rework,
            when: &[
                When::Call(
                    &[
                        "torch.utils.cpp_extension.CppExtension",
                        "torch.utils.cpp_extension.load",
                        "torch.utils.cpp_extension.load_inline",
                    ],
                    build_cpp,
                ),
                When::Line(|line| {
                    ["PYBIND11_MODULE(", "TORCH_LIBRARY(", "TORCH_LIBRARY_IMPL("]
                        .iter()
                        .any(|w| line.trim_start().starts_with(w))
                }),
            ],
            bad: &[
                Py(
                    "from torch.utils.cpp_extension import CppExtension\next = CppExtension('x', ['a.cpp'])\n",
                ),
                File(
                    "a.cpp",
                    "#include <torch/extension.h>\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n}\n",
                ),
            ],
            good: &[
                Py("from setuptools import Extension\next = Extension('x', ['a.c'])\nimport torch\n"),
                File("a.cpp", "int main() { return 0; }\n"),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "DEV022",
            name: "package with CUDA kernels",
            severity: Error,
            sentence: "`{}`: this package's kernels are for CUDA, and at most for the CPU too.",
            fix: "Use what PyTorch has for it, or keep it on CPU tensors where the package has a CPU path.",
            explanation: "For graphs `torch_scatter` is `Tensor.scatter_reduce`; for state space models there are forms with `torch.cumsum` and scans; for serving there is `oxitorch`'s export.",
            effort: Rework,
            when: &[When::Name(CUDA_PACKAGES), When::Package(CUDA_REQUIREMENTS)],
            bad: &[
                Py("import cupy as cp\n"),
                Py("from mamba_ssm import Mamba\n"),
                File("requirements.txt", "torch-scatter\n"),
            ],
            good: &[Py("import numpy as np\nimport torch\n"), File("requirements.txt", "numpy\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DEV023",
            name: "PyTorch for CUDA is required",
            severity: Warning,
            sentence: "`{}` asks for PyTorch with CUDA or for NVIDIA's libraries, gigabytes that the device does not need.",
            fix: "Install PyTorch from its index for the CPU (`--index-url https://download.pytorch.org/whl/cpu`), and `oxitorch[tpu]`.",
            explanation: "oxitorch runs with either build of PyTorch.",
            runs: Unchanged("assert torch.ones(2, device='tpu').sum().item() == 2"),
            effort: Edit,
            when: &[
                When::Package(&[
                    "nvidia-cublas*",
                    "nvidia-cuda-*",
                    "nvidia-cudnn*",
                    "nvidia-nccl*",
                    "nvidia-cufft*",
                    "nvidia-curand*",
                    "nvidia-cusolver*",
                    "nvidia-cusparse*",
                    "nvidia-nvtx*",
                    "nvidia-nvjitlink*",
                    "cudatoolkit",
                    "pytorch-cuda",
                    "cuda-toolkit",
                    "nvidia-cusparselt*",
                ]),
                When::Argument(|a| {
                    a.contains("download.pytorch.org/whl/cu") || (a.contains("+cu1") && a.contains("torch"))
                }),
            ],
            bad: &[
                File("requirements.txt", "--extra-index-url https://download.pytorch.org/whl/cu118\ntorch\n"),
                File("requirements.txt", "torch==2.1.0+cu118\n"),
                File("environment.yml", "dependencies:\n  - pytorch-cuda=11.8\n"),
                File("setup.sh", "pip install torch --index-url https://download.pytorch.org/whl/cu121\n"),
            ],
            good: &[File("requirements.txt", "torch==2.11\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DEV024",
            name: "container or node for GPUs",
            severity: Error,
            sentence: "`{}` asks for a machine or an image with NVIDIA GPUs.",
            fix: "Take an image with Python alone, and of Kubernetes the resource `google.com/tpu`.",
            explanation: "Images with CUDA work and are gigabytes larger; a request for `nvidia.com/gpu` is never granted on a node with TPUs.",
            effort: Think,
            when: &[
                When::Setting(|key, value| {
                    key.starts_with("nvidia.com/gpu")
                        || (key == "driver" && value == "nvidia")
                        || (key == "runtime" && value == "nvidia")
                        || ((key == "image" || key == "FROM")
                            && (value.contains("nvidia/cuda")
                                || value.contains("nvcr.io")
                                || (value.contains("pytorch/pytorch") && value.contains("cuda"))))
                }),
                When::Argument(|a| {
                    a == "--gpus"
                        || a.starts_with("--gpus=")
                        || a.starts_with("--gres=gpu")
                        || a.starts_with("--gpus-per-node")
                        || a == "--runtime=nvidia"
                }),
            ],
            bad: &[
                File("Dockerfile", "FROM nvidia/cuda:12.1.0-devel\nRUN pip install torch\n"),
                File("job.yaml", "resources:\n  limits:\n    nvidia.com/gpu: 8\n"),
                File("run.sh", "docker run --gpus all image\n"),
                File("job.sh", "#!/bin/bash\n#SBATCH --gres=gpu:8\npython train.py\n"),
                File("job.sh", "#!/bin/bash\nsrun --gpus=8 python train.py\n"),
            ],
            good: &[
                File("run.sh", "#!/bin/bash\npython -u train.py --name a --gpus 0 --lr 0.1\n"),
                File("Dockerfile", "FROM python:3.12\n"),
                File("job.yaml", "resources:\n  limits:\n    google.com/tpu: 8\n"),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "DEV025",
            name: "compiler backend for GPUs",
            severity: Error,
            sentence: "`{}` names a backend of `torch.compile` that has no code for the device.",
            fix: "Leave `backend` out, or write `backend=\"tpu\"`.",
            explanation: "Without a name the default backend looks at each graph: those with tensors of the device go to `\"tpu\"`, all others to inductor.",
            effort: Edit,
            when: &[When::Call(&["torch.compile"], compile_backend)],
            bad: &[Py("import torch\nm = torch.compile(torch.nn.Linear(2, 2), backend='inductor')\n")],
            good: &[Py("import torch\nm = torch.compile(torch.nn.Linear(2, 2))\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DEV026",
            name: "mode of torch.compile",
            severity: Note,
            sentence: "`{}`: `mode` is inductor's and changes nothing on the device.",
            fix: "Leave it.",
            explanation: "`reduce-overhead` is CUDA graphs and `max-autotune` is Triton's search; XLA has one level of effort.",
            runs: Unchanged(
                "f = torch.compile(lambda x: x * 2 + 1, mode='max-autotune')\nassert f(torch.ones(3, device='tpu')).tolist() == [3.0, 3.0, 3.0]",
            ),
            effort: Nothing,
            when: &[When::Call(&["torch.compile"], compile_mode)],
            bad: &[Py("import torch\nm = torch.compile(torch.nn.Linear(2, 2), mode='reduce-overhead')\n")],
            good: &[Py("import torch\nm = torch.compile(torch.nn.Linear(2, 2), fullgraph=True)\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DEV027",
            name: "options of inductor",
            severity: Error,
            sentence: "`{}` passes options of inductor, which the backend of the device refuses.",
            fix: "Leave them out; XLA's are set with `torch.tpu.compiler.custom_compiler_options`.",
            explanation: "The same goes for `torch._inductor.config`, which the device does not read.",
            effort: Edit,
            when: &[
                When::Call(&["torch.compile"], compile_options),
                When::Name(&["torch._inductor.config.*"]),
            ],
            bad: &[
                Py(
                    "import torch\nm = torch.compile(torch.nn.Linear(2, 2), options={'triton.cudagraphs': True})\n",
                ),
                Py("import torch._inductor.config\ntorch._inductor.config.triton.cudagraphs = True\n"),
            ],
            good: &[Py("import torch\nm = torch.compile(torch.nn.Linear(2, 2), dynamic=False)\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DEV028",
            name: "CUDA settings by the environment",
            severity: Note,
            sentence: "`{}` is read by CUDA and has no effect on the device.",
            fix: "Leave it or remove it; to have errors at their line there is `OXITORCH_EAGER_MODE=debug`.",
            explanation: "What is read by CUDA's compiler and libraries is read by nobody here.",
            runs: Unchanged(
                "import os\nos.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'\nassert torch.ones(2, device='tpu').sum().item() == 2",
            ),
            effort: Nothing,
            when: &[When::Variable(&[
                "CUDA_LAUNCH_BLOCKING",
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "CUBLAS_WORKSPACE_CONFIG",
                "NVIDIA_TF32_OVERRIDE",
                "TORCH_CUDA_ARCH_LIST",
                "CUDA_HOME",
                "CUDNN_*",
                "TORCH_USE_CUDA_DSA",
            ])],
            bad: &[
                Py("import os\nimport torch\nos.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'\n"),
                File("run.sh", "export CUDA_LAUNCH_BLOCKING=1\n"),
            ],
            good: &[Py("import os\nimport torch\nos.environ['OMP_NUM_THREADS'] = '1'\n")],
            ..Rule::BASE
        },
    ],
};
