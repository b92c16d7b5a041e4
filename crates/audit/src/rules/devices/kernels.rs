//! Libraries of CUDA kernels, and extensions that bring their own.

use ruff_python_ast::Expr;
use ruff_text_size::Ranged;

use crate::python::{Call, Hit};
use crate::rule::Effort::{Port, Rework, Think};
use crate::rule::Example::{File, Py};
use crate::rule::Severity::Error;
use crate::rule::{Rule, When};

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

/// Rules by number.
pub(super) const RULES: &[Rule] = &[
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
            Py("import transformers\nm = transformers.AutoModel.from_pretrained('x', load_in_8bit=True)\n"),
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
            When::Name(&["triton.*", "torch.library.triton_op", "torch._inductor.runtime.triton_helpers.*"]),
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
            Py("from torch.utils.cpp_extension import CUDAExtension\next = CUDAExtension('x', ['a.cu'])\n"),
            Py("from torch.utils.cpp_extension import load\nm = load(name='x', sources=['a.cpp', 'k.cu'])\n"),
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
            Py("from torch.utils.cpp_extension import CppExtension\next = CppExtension('x', ['a.cpp'])\n"),
            File("a.cpp", "#include <torch/extension.h>\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n}\n"),
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
];
