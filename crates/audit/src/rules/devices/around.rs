//! What is around a program: its installation, its machine, its compiler.

use crate::python::{Call, Hit};
use crate::rule::Effort::{Edit, None as Nothing, Think};
use crate::rule::Example::{File, Py};
use crate::rule::Runs::Unchanged;
use crate::rule::Severity::{Error, Note, Warning};
use crate::rule::{Rule, When};

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

/// Rules by number.
pub(super) const RULES: &[Rule] = &[
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
        when: &[When::Call(&["torch.compile"], compile_options), When::Name(&["torch._inductor.config.*"])],
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
];
