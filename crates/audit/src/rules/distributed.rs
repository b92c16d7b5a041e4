//! Several processes: backends, launchers, and libraries that shard.

use ruff_python_ast::{Expr, Stmt};
use ruff_text_size::{Ranged, TextRange, TextSize};

use crate::python::{Call, Compared, Hit, Model, is_true, last, text};
use crate::rule::Effort::{Edit, None as Nothing, Rework, Think};
use crate::rule::Example::{File, Py};
use crate::rule::Runs::Unchanged;
use crate::rule::Severity::{Error, Note};
use crate::rule::{Family, Rule, When};

/// `"nccl"` becomes `"cpu:gloo,tpu:tpu"`.
fn nccl_group(call: &Call<'_, '_>) -> Option<Hit> {
    let backend = call.argument("backend", 0)?;
    nccl(backend, call)
}

fn nccl(backend: &Expr, call: &Call<'_, '_>) -> Option<Hit> {
    let name = text(backend)?;
    if !name.contains("nccl") {
        return None;
    }
    let group = last(&call.call.func).is_some_and(|n| n == "init_process_group" || n == "new_group");
    Some(if group { for_device(backend, call.model) } else { Hit::at(backend) })
}

/// The edit of a string to the backends of the host and of the device.
fn for_device(backend: &Expr, model: &Model<'_>) -> Hit {
    let hit = Hit::at(backend);
    // Between plain quotes.
    let plain = text(backend).is_some_and(|t| model.source(backend.range()).len() == t.len() + 2);
    if !plain {
        return hit;
    }
    let inner = TextRange::new(backend.start() + TextSize::new(1), backend.end() - TextSize::new(1));
    hit.edit(inner, "cpu:gloo,tpu:tpu")
}

/// A name for a backend that is given `"nccl"`.
fn nccl_name(stmt: &Stmt, model: &Model<'_>) -> Option<Hit> {
    let Stmt::Assign(assign) = stmt else { return None };
    let backend =
        assign.targets.iter().any(|t| last(t).is_some_and(|n| n.to_ascii_lowercase().ends_with("backend")));
    let is = |e: &Expr| text(e) == Some("nccl");
    let found = match &*assign.value {
        Expr::If(either) => [&either.body, &either.orelse].into_iter().find(|e| is(e)).map(|e| &**e),
        value => Some(value).filter(|e| is(e)),
    };
    found.filter(|_| backend && model.uses_torch()).map(|e| for_device(e, model))
}

/// Collectives in which every rank has to take part.
const COLLECTIVES: &[&str] = &[
    "torch.distributed.barrier",
    "torch.distributed.all_reduce",
    "torch.distributed.broadcast",
    "torch.distributed.all_gather",
    "torch.distributed.reduce",
    "torch.distributed.all_gather_object",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.all_gather_into_tensor",
    "torch.distributed.reduce_scatter",
    "torch.distributed.reduce_scatter_tensor",
    "torch.distributed.all_to_all",
    "torch.distributed.gather",
    "torch.distributed.scatter",
    "torch.distributed.gather_object",
    "torch.distributed.monitored_barrier",
    "torch.distributed.new_group",
];

fn on_one_rank(call: &Call<'_, '_>) -> Option<Hit> {
    let met = call.path.ends_with("barrier") && call.model.others_wait();
    // Who is in a group of one's own is not known.
    let grouped = call.keyword("group").is_some_and(|g| !g.is_none_literal_expr());
    (!met && !grouped && call.model.on_one_rank()).then(|| call.hit()).flatten()
}

fn wraps_model(call: &Call<'_, '_>) -> Option<Hit> {
    call.hit()
}

fn spawn(call: &Call<'_, '_>) -> Option<Hit> {
    call.hit()
}

pub(crate) static FAMILY: Family = Family {
    prefix: "DST",
    name: "distributed",
    about: "Several processes: backends, launchers, collectives, libraries that shard.",
    rules: &[
        Rule {
            id: "DST001",
            name: "nccl backend",
            severity: Error,
            sentence: "`{}` asks for NCCL, which needs GPUs.",
            fix: "Leave the backend out, or write \"cpu:gloo,tpu:tpu\", which serves tensors of the CPU too.",
            explanation: "`init_process_group()` without a backend gives a group for tensors of the device.",
            effort: Edit,
            when: &[
                When::Call(
                    &["torch.distributed.init_process_group", "torch.distributed.new_group"],
                    nccl_group,
                ),
                When::Keyword(
                    &["dist_backend", "ddp_backend", "process_group_backend", "distributed_backend"],
                    nccl,
                ),
                When::Statement(nccl_name),
                When::Argument(|a| a.strip_prefix("--").is_some_and(|a| a.ends_with("backend=nccl"))),
                When::Setting(|key, value| key.ends_with("backend") && value == "nccl"),
                When::Keyword(&["default"], |value, call| {
                    let option = call
                        .call
                        .arguments
                        .args
                        .iter()
                        .any(|a| text(a).is_some_and(|t| t.ends_with("backend")));
                    let free = call.keyword("choices").is_none();
                    (option && text(value) == Some("nccl"))
                        .then(|| if free { for_device(value, call.model) } else { Hit::at(value) })
                }),
            ],
            bad: &[
                Py("import torch\nbackend = 'nccl' if torch.tpu.is_available() else 'gloo'\n"),
                Py("import torch.distributed as dist\ndist.init_process_group('nccl')\n"),
                Py("import torch\ntorch.distributed.init_process_group(backend=\"nccl\", rank=0)\n"),
                File("config.yaml", "dist_backend: nccl\n"),
                File("run.sh", "python train.py --dist-backend=nccl\n"),
            ],
            good: &[Py("import torch.distributed as dist\ndist.init_process_group()\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DST002",
            name: "NCCL settings",
            severity: Note,
            sentence: "`{}` is read by NCCL and has no effect on the device.",
            fix: "Remove it; `oxitorch ranks` shows what the processes are about.",
            explanation: "The flight recorder and the timeout of a group are PyTorch's own and work.",
            runs: Unchanged(
                "import os\nos.environ['NCCL_DEBUG'] = 'INFO'\nassert torch.ones(2, device='tpu').sum().item() == 2",
            ),
            effort: Nothing,
            when: &[When::Variable(&["NCCL_*", "TORCH_NCCL_*"])],
            bad: &[
                Py("import os, torch\nos.environ['NCCL_DEBUG'] = 'INFO'\n"),
                File("run.sh", "export NCCL_IB_DISABLE=1\n"),
                File("job.yaml", "env:\n  NCCL_DEBUG: INFO\n"),
            ],
            good: &[Py("import os, torch\nos.environ['GLOO_SOCKET_IFNAME'] = 'eth0'\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DST003",
            name: "processes that the script starts",
            severity: Note,
            sentence: "`{}` starts processes from the script.",
            fix: "Start the script with `torchrun`; a process then knows its place before it takes a device.",
            explanation: "A process that was forked after the device was used cannot use it. With `spawn` it works; on a TPU a launcher that has taken the chips keeps them from its children.",
            runs: Unchanged("import torch.multiprocessing as mp\nmp.spawn(torch.tpu.set_device, nprocs=1)"),
            when: &[When::Call(
                &[
                    "torch.multiprocessing.spawn",
                    "torch.multiprocessing.start_processes",
                    "torch.multiprocessing.spawn.spawn",
                ],
                spawn,
            )],
            bad: &[Py("import torch.multiprocessing as mp\ndef f(rank):\n    pass\nmp.spawn(f, nprocs=8)\n")],
            good: &[Py("import torch.multiprocessing as mp\nq = mp.Queue()\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DST004",
            name: "collective on one rank",
            severity: Error,
            sentence: "`{}` is a collective, and only one rank comes here; the others never join.",
            fix: "Call it on all ranks, and let one rank print or save what came of it.",
            explanation: "A collective waits for all ranks of its group. With NCCL this hangs until the timeout; oxitorch raises what each rank is about. The pattern in which other ranks wait at a barrier of their own in another branch is not reported.",
            effort: Edit,
            when: &[When::Call(COLLECTIVES, on_one_rank)],
            bad: &[Py(
                "import torch.distributed as dist\ndef save(rank):\n    if rank == 0:\n        dist.all_reduce(1)\n",
            )],
            good: &[
                Py(
                    "import torch.distributed as dist\ndef save(rank):\n    dist.barrier()\n    if rank == 0:\n        print('saved')\n    if rank != 0:\n        dist.barrier()\n",
                ),
                Py(
                    "import torch.distributed as dist\ndef f(rank, x, pair):\n    if rank == 0:\n        dist.all_reduce(x, group=pair)\n",
                ),
                Py(
                    "import torch.distributed as dist\ndef first(rank):\n    if rank not in [-1, 0]:\n        dist.barrier()\n    yield\n    if rank == 0:\n        dist.barrier()\n",
                ),
                Py(
                    "import torch.distributed as dist\ndef load():\n    if dist.get_rank() != 0:\n        dist.barrier()\n    data = read()\n    if dist.get_rank() == 0:\n        dist.barrier()\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "DST005",
            name: "FSDP1",
            severity: Note,
            sentence: "`{}` is the first version of FSDP.",
            fix: "Use `torch.distributed.fsdp.fully_shard`, which shards parameter by parameter.",
            explanation: "FSDP1 works on the device and PyTorch no longer develops it. Its checkpoints are other than those of FSDP2.",
            runs: Unchanged(
                "import os, torch.distributed as dist\nos.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', MASTER_ADDR='localhost', MASTER_PORT='0')\ndist.init_process_group()\ntry:\n    from torch.nn.parallel import DistributedDataParallel as DDP\n    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n    m = FSDP(torch.nn.Linear(2, 2).to('tpu'), device_id=torch.device('tpu', 0), use_orig_params=True)\n    y = m(torch.ones(1, 2, device='tpu'))\n    y.sum().backward()\n    assert y.shape == (1, 2)\nfinally:\n    dist.destroy_process_group()",
            ),
            effort: Think,
            when: &[When::Name(&[
                "torch.distributed.fsdp.FullyShardedDataParallel",
                "torch.distributed.fsdp.fully_sharded_data_parallel.*",
            ])],
            bad: &[Py("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n")],
            good: &[Py("from torch.distributed.fsdp import fully_shard\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DST006",
            name: "DeepSpeed",
            severity: Error,
            sentence: "`{}` is DeepSpeed, whose engine and kernels are CUDA's.",
            fix: "Use `fully_shard` (ZeRO-3), `ZeroRedundancyOptimizer` (ZeRO-1) and `torch.autocast`; with the Trainer of transformers `fsdp=\"full_shard auto_wrap\"`.",
            explanation: "What its JSON configures is, in PyTorch: `zero_optimization.stage` the sharding, `fp16` and `bf16` autocast, `gradient_clipping` `clip_grad_norm_`, `offload_*` the offload of `fully_shard`.",
            effort: Rework,
            when: &[
                When::Name(&["deepspeed.*"]),
                When::Package(&["deepspeed*"]),
                When::Command(&["deepspeed"]),
                When::Setting(|key, value| {
                    key == "zero_optimization"
                        || (key == "distributed_type" && value == "DEEPSPEED")
                        || key == "deepspeed_config"
                        || (key == "deepspeed" && !value.is_empty())
                }),
                When::Argument(|a| {
                    a == "--deepspeed" || a.starts_with("--deepspeed=") || a == "--deepspeed_config"
                }),
                When::Keyword(&["deepspeed"], |value, call| {
                    (last(&call.call.func).is_some_and(|n| n.ends_with("Arguments"))
                        && !value.is_none_literal_expr())
                    .then(|| Hit::at(value))
                }),
            ],
            bad: &[
                Py("import deepspeed\nengine = deepspeed.initialize()\n"),
                File("ds_config.json", "{\n  \"zero_optimization\": {\"stage\": 3}\n}\n"),
                File("run.sh", "deepspeed train.py\n"),
                File("requirements.txt", "deepspeed==0.14\n"),
            ],
            good: &[
                Py("from torch.distributed.fsdp import fully_shard\n"),
                File("run.sh", "torchrun train.py\n"),
                File("a.json", "{\"stage\": 3}\n"),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "DST007",
            name: "Megatron",
            severity: Error,
            sentence: "`{}` is Megatron, whose layers and communication are CUDA's.",
            fix: "Use DTensor's plans of tensor parallel (`parallelize_module`), `fully_shard` and `torch.distributed.pipelining`, as TorchTitan does.",
            explanation: "docs/libraries.md says what of TorchTitan was tried.",
            effort: Rework,
            when: &[
                When::Name(&["megatron.*", "megatron_core.*", "nemo.*"]),
                When::Package(&["megatron*", "nemo-toolkit*"]),
                When::Argument(|a| {
                    matches!(
                        a,
                        "--tensor-model-parallel-size"
                            | "--pipeline-model-parallel-size"
                            | "--use-distributed-optimizer"
                    )
                }),
            ],
            bad: &[
                Py("from megatron.core import mpu\n"),
                File("run.sh", "torchrun pretrain.py --tensor-model-parallel-size 2\n"),
            ],
            good: &[Py("from torch.distributed.tensor.parallel import parallelize_module\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DST008",
            name: "find_unused_parameters",
            severity: Note,
            sentence: "`{}` walks the graph of each step in Python's thread.",
            fix: "Leave it out if all parameters are used, or say `static_graph=True`.",
            explanation: "It works; the walk is time in which nothing is recorded.",
            runs: Unchanged(
                "import os, torch.distributed as dist\nos.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', MASTER_ADDR='localhost', MASTER_PORT='0')\ndist.init_process_group()\ntry:\n    from torch.nn.parallel import DistributedDataParallel as DDP\n    m = DDP(torch.nn.Linear(2, 2).to('tpu'), find_unused_parameters=True)\n    m(torch.ones(1, 2, device='tpu')).sum().backward()\n    assert m.module.bias.grad.tolist() == [1.0, 1.0]\nfinally:\n    dist.destroy_process_group()",
            ),
            effort: Edit,
            when: &[
                When::Keyword(&["find_unused_parameters", "ddp_find_unused_parameters"], |value, _| {
                    is_true(value).then(|| Hit::at(value).named("find_unused_parameters=True"))
                }),
                When::Setting(|key, value| {
                    key.ends_with("find_unused_parameters") && matches!(value, "true" | "True")
                }),
            ],
            bad: &[Py(
                "from torch.nn.parallel import DistributedDataParallel as DDP\ndef f(m):\n    return DDP(m, find_unused_parameters=True)\n",
            )],
            good: &[Py(
                "from torch.nn.parallel import DistributedDataParallel as DDP\ndef f(m):\n    return DDP(m, static_graph=True)\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "DST009",
            name: "DataParallel",
            severity: Error,
            sentence: "`{}` splits each batch over the GPUs of one process, in threads.",
            fix: "Use `DistributedDataParallel` with a process for each device.",
            explanation: "`nn.DataParallel` copies the model to CUDA devices in each step; without them it runs the module as it is, on one device.",
            effort: Think,
            when: &[When::Call(
                &[
                    "torch.nn.DataParallel",
                    "torch.nn.parallel.DataParallel",
                    "torch.nn.parallel.data_parallel",
                    "torch.nn.parallel.data_parallel.DataParallel",
                ],
                wraps_model,
            )],
            bad: &[Py("import torch.nn as nn\nm = nn.DataParallel(nn.Linear(2, 2))\n")],
            good: &[Py(
                "import torch\nm = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "DST010",
            name: "launcher of GPUs",
            severity: Error,
            sentence: "`{}` is a launcher that is deprecated or counts GPUs.",
            fix: "Use `torchrun --nproc_per_node=N`, with N the number of devices.",
            explanation: "`python -m torch.distributed.launch` passes `--local-rank` to the script, where torchrun sets `LOCAL_RANK`. With `--nproc_per_node=gpu` the launcher asks CUDA.",
            effort: Edit,
            when: &[
                When::Command(&["torch.distributed.launch", "horovodrun"]),
                When::Argument(|a| {
                    matches!(
                        a,
                        "--nproc_per_node=gpu"
                            | "--nproc-per-node=gpu"
                            | "--multi_gpu"
                            | "--num_gpus"
                            | "--num-gpus"
                    )
                }),
            ],
            bad: &[
                File("run.sh", "python -m torch.distributed.launch --nproc_per_node=8 train.py\n"),
                File("run.sh", "torchrun --nproc_per_node=gpu train.py\n"),
            ],
            good: &[File("run.sh", "torchrun --nproc_per_node=8 train.py\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DST011",
            name: "Horovod and other libraries",
            severity: Error,
            sentence: "`{}` has communication of its own, for GPUs.",
            fix: "Use `torch.distributed`, which has all of it: DDP, `fully_shard`, tensor parallel, pipelining.",
            explanation: "Horovod, BytePS, FairScale and Colossal-AI wrap optimizers and modules; what they add is in PyTorch by now.",
            effort: Rework,
            when: &[
                When::Name(&["horovod.*", "byteps.*", "fairscale.*", "colossalai.*", "bagua.*", "oslo.*"]),
                When::Package(&["horovod", "byteps", "fairscale", "colossalai", "bagua*"]),
            ],
            bad: &[Py("import horovod.torch as hvd\n"), File("requirements.txt", "fairscale\n")],
            good: &[Py("import torch.distributed as dist\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DST012",
            name: "question for the backend",
            severity: Error,
            sentence: "`{}` asks for NCCL, which the device does not use.",
            fix: "Ask what matters: the device of the tensors (`x.device.type`), or `torch.distributed.is_initialized()`.",
            explanation: "The other branch is mostly gloo's: it moves tensors to the CPU, which works and is slow.",
            effort: Edit,
            when: &[
                When::Call(&["torch.distributed.is_nccl_available"], |call| call.hit()),
                When::Text(|text, expr, model| {
                    (text == "nccl"
                        && matches!(model.compared(), Compared::Device | Compared::Other)
                        && model.imports("torch"))
                    .then(|| Hit::at(expr))
                }),
            ],
            bad: &[
                Py("import torch.distributed as dist\nif dist.get_backend() == 'nccl':\n    pass\n"),
                Py("import torch\nok = torch.distributed.is_nccl_available()\n"),
            ],
            good: &[Py("import torch.distributed as dist\nif dist.is_initialized():\n    pass\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DST013",
            name: "GPUs in a configuration",
            severity: Error,
            sentence: "`{}` asks a library for GPUs.",
            fix: "Say \"auto\" or leave it out; oxitorch is chosen by itself.",
            explanation: "Lightning's `accelerator=\"gpu\"` raises without a GPU, and so do `gpus=` of its old versions.",
            effort: Edit,
            when: &[
                When::Keyword(&["accelerator"], |value, call| {
                    (last(&call.call.func).is_some_and(|n| n == "Trainer" || n == "Fabric")
                        && matches!(text(value), Some("gpu" | "cuda")))
                    .then(|| Hit::at(value))
                }),
                When::Keyword(&["gpus"], |value, call| {
                    (last(&call.call.func) == Some("Trainer") && !value.is_none_literal_expr())
                        .then(|| Hit::at(value).named("gpus"))
                }),
                When::Setting(|key, value| {
                    (key == "accelerator" && matches!(value, "gpu" | "cuda"))
                        || (key == "distributed_type" && value == "MULTI_GPU")
                }),
                When::Argument(|a| matches!(a, "--accelerator=gpu" | "--trainer.accelerator=gpu")),
            ],
            bad: &[
                Py("import lightning\nt = lightning.Trainer(accelerator='gpu', devices=8)\n"),
                File("config.yaml", "trainer:\n  accelerator: gpu\n"),
            ],
            good: &[
                Py("import lightning\nt = lightning.Trainer(accelerator='auto')\n"),
                File("config.yaml", "trainer:\n  accelerator: auto\n"),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "DST014",
            name: "buffers that are broadcast",
            severity: Note,
            sentence: "`{}` uses the statistics of one process, or sends them in each step.",
            fix: "Use `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` if batches are small, and `broadcast_buffers=False` if not.",
            explanation: "DDP broadcasts the buffers of all BatchNorms before each forward.",
            runs: Unchanged(
                "import os, torch.distributed as dist\nos.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', MASTER_ADDR='localhost', MASTER_PORT='0')\ndist.init_process_group()\ntry:\n    from torch.nn.parallel import DistributedDataParallel as DDP\n    m = DDP(torch.nn.BatchNorm1d(2).to('tpu'), broadcast_buffers=True)\n    m(torch.rand(4, 2, device='tpu')).sum().backward()\n    assert m.module.num_batches_tracked.item() == 1\nfinally:\n    dist.destroy_process_group()",
            ),
            effort: Nothing,
            when: &[When::Keyword(&["broadcast_buffers"], |value, call| {
                (is_true(value)
                    && last(&call.call.func)
                        .is_some_and(|n| n.ends_with("DDP") || n.ends_with("DataParallel")))
                .then(|| Hit::at(value).named("broadcast_buffers=True"))
            })],
            bad: &[Py(
                "from torch.nn.parallel import DistributedDataParallel as DDP\ndef f(m):\n    return DDP(m, broadcast_buffers=True)\n",
            )],
            good: &[Py(
                "from torch.nn.parallel import DistributedDataParallel as DDP\ndef f(m):\n    return DDP(m)\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "DST015",
            name: "NCCL's process group",
            severity: Error,
            sentence: "`{}` is NCCL's, and groups of the device have another.",
            fix: "Leave the options out: `init_process_group` and `new_group` take a timeout without them.",
            explanation: "Its options choose streams and communicators of NCCL.",
            effort: Edit,
            when: &[When::Name(&[
                "torch.distributed.ProcessGroupNCCL",
                "torch.distributed.ProcessGroupNCCL.*",
                "torch._C._distributed_c10d.ProcessGroupNCCL",
            ])],
            bad: &[Py("import torch.distributed as dist\noptions = dist.ProcessGroupNCCL.Options()\n")],
            good: &[Py("import torch.distributed as dist\ngroup = dist.new_group()\n")],
            ..Rule::BASE
        },
    ],
};
