//! Precision: number types and switches that are CUDA's.

use ruff_python_ast::Expr;

use crate::python::{Call, Hit, Model, is_true, makes_tensor, text};
use crate::rule::Effort::{Edit, None as Nothing};
use crate::rule::Example::{File, Py};
use crate::rule::Runs::Unchanged;
use crate::rule::Severity::{Error, Note};
use crate::rule::{Family, Rule, When};
use ruff_text_size::{Ranged, TextRange};

/// `torch.cuda.amp.autocast(` becomes `torch.amp.autocast("tpu", `, where the whole name stands there.
fn cuda_amp(call: &Call<'_, '_>) -> Option<Hit> {
    let hit = call.hit()?;
    let source = call.model.source(call.call.func.range());
    let Some(name) = source.strip_prefix("torch.cuda.amp.") else { return Some(hit) };
    // A first argument by position is `enabled` there, and the device here.
    if !call.call.arguments.args.is_empty() || call.takes_any() {
        return Some(hit);
    }
    let open = call.call.arguments.range().start();
    let range = TextRange::new(call.call.func.start(), open + ruff_text_size::TextSize::new(1));
    let comma = if call.call.arguments.is_empty() { "" } else { ", " };
    Some(hit.edit(range, format!("torch.amp.{name}(\"tpu\"{comma}")))
}

fn is_half(expr: &Expr, model: &Model<'_>) -> bool {
    matches!(model.path(expr).as_deref(), Some("torch.float16" | "torch.half"))
}

fn half_autocast(call: &Call<'_, '_>) -> Option<Hit> {
    let dtype = call.argument("dtype", 1).or(call.keyword("dtype"))?;
    is_half(dtype, call.model).then(|| call.hit()).flatten()
}

fn half_dtype(value: &Expr, call: &Call<'_, '_>) -> Option<Hit> {
    let casts = matches!(crate::python::last(&call.call.func), Some("autocast"));
    // Weights that are read to be converted stay on the host.
    let host = call.keyword("device_map").is_some_and(|m| match m {
        Expr::Dict(d) => d.items.iter().all(|i| text(&i.value) == Some("cpu")),
        other => text(other) == Some("cpu"),
    });
    (!casts && !host && is_half(value, call.model)).then(|| Hit::at(value))
}

fn is_double(expr: &Expr, model: &Model<'_>) -> bool {
    matches!(model.path(expr).as_deref(), Some("torch.float64" | "torch.double"))
}

fn double_dtype(value: &Expr, call: &Call<'_, '_>) -> Option<Hit> {
    // What is made without a device is made on the host.
    let there = call.keyword("device").is_some() || call.takes_any();
    (is_double(value, call.model) && (there || !makes_tensor(call.path))).then(|| Hit::at(value))
}

/// `to(torch.float64)` of what is or could be a tensor.
fn to_double(call: &Call<'_, '_>) -> Option<Hit> {
    call.first().filter(|e| is_double(e, call.model))?;
    call.perhaps_tensor().and(call.hit())
}

fn number_method(call: &Call<'_, '_>) -> Option<Hit> {
    let plain = call.call.arguments.is_empty() && call.model.uses_torch();
    plain.then(|| call.perhaps_tensor()).flatten()?;
    call.hit()
}

/// A model that is made half, by name or by what it is.
fn half_model(call: &Call<'_, '_>) -> Option<Hit> {
    use crate::python::Kind;
    let receiver = call.receiver()?;
    let plain = call.call.arguments.is_empty() && call.model.uses_torch();
    let may = matches!(
        call.model.kind(receiver),
        Kind::Unknown | Kind::Tensor | Kind::Maybe | Kind::Layer | Kind::Module
    );
    // Rounded to float16 and made float32 again.
    let back = call.model.text[call.call.end().to_usize()..].starts_with(".float()");
    (plain && may && !back && call.model.path(receiver).is_none()).then(|| call.hit()).flatten()
}

fn default_double(call: &Call<'_, '_>) -> Option<Hit> {
    let double = |e: &Expr| is_double(e, call.model) || text(e) == Some("torch.DoubleTensor");
    call.first().is_some_and(double).then(|| call.hit()).flatten()
}

pub(crate) static FAMILY: Family = Family {
    prefix: "PRE",
    name: "precision",
    about: "Number types and switches: float16 with its scaler, TF32, float64, integers of 64 bits.",
    rules: &[
        Rule {
            id: "PRE001",
            name: "torch.cuda.amp",
            severity: Error,
            sentence: "`{}` is CUDA's mixed precision and turns itself off where there is no GPU.",
            fix: "Write `torch.amp.autocast(\"tpu\", dtype=torch.bfloat16)` and `torch.amp.GradScaler(\"tpu\")`.",
            explanation: "Nothing fails: the model trains in float32, with a warning. The device computes in bfloat16 for autocast unless it is told another type.",
            effort: Edit,
            when: &[
                When::Call(&["torch.cuda.amp.autocast", "torch.cuda.amp.GradScaler"], cuda_amp),
                When::Name(&[
                    "torch.cuda.amp.custom_fwd",
                    "torch.cuda.amp.custom_bwd",
                    "torch.cuda.amp.autocast_mode.*",
                    "torch.cuda.amp.grad_scaler.*",
                ]),
            ],
            bad: &[
                Py("import torch\nwith torch.cuda.amp.autocast():\n    pass\n"),
                Py("from torch.cuda.amp import GradScaler, autocast\nscaler = GradScaler()\n"),
                Py("import torch\ns = torch.cuda.amp.GradScaler(enabled=False)\n"),
            ],
            good: &[Py("import torch\nwith torch.amp.autocast('tpu'):\n    pass\n")],
            ..Rule::BASE
        },
        Rule {
            id: "PRE002",
            name: "autocast to float16",
            sentence: "`{}` computes in float16, where TPUs compute in bfloat16.",
            fix: "Take `dtype=torch.bfloat16` and leave the GradScaler out.",
            explanation: "bfloat16 has float32's range, so nothing underflows and nothing needs to be scaled. float16 works, correctly, and is not what the matrix unit multiplies.",
            runs: Unchanged(
                "with torch.autocast('tpu', dtype=torch.float16):\n    y = torch.ones(2, 2, device='tpu') @ torch.ones(2, 2, device='tpu')\nassert y.dtype == torch.float16 and y.sum().item() == 8",
            ),
            effort: Edit,
            when: &[When::Call(
                &[
                    "torch.autocast",
                    "torch.amp.autocast",
                    "torch.cuda.amp.autocast",
                    "torch.amp.autocast_mode.autocast",
                ],
                half_autocast,
            )],
            bad: &[Py("import torch\nwith torch.autocast('tpu', dtype=torch.float16):\n    pass\n")],
            good: &[Py("import torch\nwith torch.autocast('tpu', dtype=torch.bfloat16):\n    pass\n")],
            ..Rule::BASE
        },
        Rule {
            id: "PRE003",
            name: "GradScaler",
            severity: Note,
            sentence: "`{}` is for float16; with bfloat16 nothing needs to be scaled.",
            fix: "Leave it out with bfloat16: `enabled=False`, or `loss.backward()` and `optimizer.step()` alone.",
            explanation: "It works on the device. With bfloat16 it costs a look at all gradients in each step.",
            runs: Unchanged(
                "s = torch.amp.GradScaler('tpu')\np = torch.nn.Parameter(torch.ones(2, device='tpu'))\no = torch.optim.SGD([p], lr=0.5)\ns.scale((p * 1).sum()).backward()\ns.step(o)\ns.update()\nassert p.tolist() == [0.5, 0.5]",
            ),
            effort: Edit,
            when: &[When::Call(&["torch.amp.GradScaler", "torch.amp.grad_scaler.GradScaler"], |call| {
                let host = call.argument("device", 0).and_then(text) == Some("cpu");
                // Who asks for float16 first, or says whether it is enabled, knows.
                let asked = call.keyword("enabled").is_some_and(|e| !is_true(e)) || call.model.for_half();
                if host || asked { None } else { call.hit() }
            })],
            bad: &[
                Py("import torch\nscaler = torch.amp.GradScaler('tpu')\n"),
                Py("from torch.amp import GradScaler\ns = GradScaler()\n"),
            ],
            good: &[
                Py("import torch\nscaler = torch.amp.GradScaler('tpu', enabled=dtype == 'float16')\n"),
                Py("import torch\nscaler = torch.amp.GradScaler() if dtype == torch.float16 else None\n"),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "PRE004",
            name: "TF32",
            severity: Note,
            sentence: "`{}` switches TF32, which is a type of NVIDIA's matrix units.",
            fix: "Say `torch.set_float32_matmul_precision(\"high\")`, which the device follows.",
            explanation: "`\"highest\"` is float32 in full, `\"high\"` and `\"medium\"` are sums of products of bfloat16.",
            runs: Unchanged(
                "torch.backends.cuda.matmul.allow_tf32 = True\ntorch.backends.cudnn.allow_tf32 = True\nassert (torch.ones(2, 2, device='tpu') @ torch.ones(2, 2, device='tpu')).sum().item() == 8",
            ),
            effort: Edit,
            when: &[When::Name(&[
                "torch.backends.cuda.matmul.allow_tf32",
                "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
                "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
                "torch.backends.cuda.matmul.fp32_precision",
            ])],
            bad: &[Py("import torch\ntorch.backends.cuda.matmul.allow_tf32 = True\n")],
            good: &[Py("import torch\ntorch.set_float32_matmul_precision('high')\n")],
            ..Rule::BASE
        },
        Rule {
            id: "PRE005",
            name: "float64",
            sentence: "`{}` is float64, which TPUs compute in software, many times slower.",
            fix: "Use float32, or compute what needs the digits on the CPU.",
            explanation: "Sums of many numbers are better kept as sums of sums in float32. Constants and single numbers do not matter.",
            runs: Unchanged(
                "x = torch.ones(2, dtype=torch.float64, device='tpu')\nassert x.double().sum().item() == 2",
            ),
            when: &[
                When::Keyword(&["dtype"], double_dtype),
                When::Method(&["double"], number_method),
                When::Method(&["to"], to_double),
            ],
            bad: &[
                Py("import torch\nx = torch.zeros(2, dtype=torch.float64, device='tpu')\n"),
                Py("import torch\ndef f(x):\n    return x.sum(dtype=torch.float64)\n"),
                Py("import torch\ndef f(x):\n    return x.double()\n"),
                Py("import torch\ndef f(x):\n    return x.to(torch.float64)\n"),
            ],
            good: &[
                Py("import torch\nx = torch.zeros(2, dtype=torch.float32, device='tpu')\n"),
                Py("import torch\nbetas = torch.linspace(0, 1, 1000, dtype=torch.float64)\n"),
                Py("import numpy as np\nimport torch\nx = np.zeros(2, dtype=np.float64)\n"),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "PRE006",
            name: "float64 by default",
            sentence: "`{}` makes every new tensor float64.",
            fix: "Leave float32 as the default.",
            explanation: "Then all of the model is computed in software on TPUs.",
            runs: Unchanged(
                "torch.set_default_dtype(torch.float64)\ntry:\n    assert torch.ones(2, device='tpu').dtype == torch.float64\nfinally:\n    torch.set_default_dtype(torch.float32)",
            ),
            when: &[When::Call(
                &["torch.set_default_dtype", "torch.set_default_tensor_type"],
                default_double,
            )],
            bad: &[Py("import torch\ntorch.set_default_dtype(torch.float64)\n")],
            good: &[Py("import torch\ntorch.set_default_dtype(torch.float32)\n")],
            ..Rule::BASE
        },
        Rule {
            id: "PRE007",
            name: "float16 parameters",
            sentence: "`{}` makes values float16, where TPUs compute in bfloat16.",
            fix: "Use `.bfloat16()` or `dtype=torch.bfloat16`.",
            explanation: "float16 overflows at 65504 and needs a scaler; bfloat16 has float32's range.",
            runs: Unchanged(
                "x = torch.ones(2, device='tpu').half()\nassert x.dtype == torch.float16 and x.sum().item() == 2",
            ),
            effort: Edit,
            when: &[
                When::Method(&["half"], half_model),
                When::Keyword(&["dtype", "torch_dtype"], half_dtype),
            ],
            bad: &[
                Py("import torch\ndef f(model):\n    return model.half()\n"),
                Py(
                    "import torch, transformers\nm = transformers.AutoModel.from_pretrained('x', torch_dtype=torch.float16)\n",
                ),
            ],
            good: &[
                Py("import torch\ndef f(model):\n    return model.bfloat16()\n"),
                Py("import torch\ndef f(model):\n    model.half().float()\n"),
                Py(
                    "import torch, transformers\nm = transformers.AutoModel.from_pretrained('x', torch_dtype=torch.float16, device_map={'': 'cpu'})\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "PRE008",
            name: "fp16 in a configuration",
            sentence: "`{}` asks for float16, where TPUs compute in bfloat16.",
            fix: "Ask for bf16.",
            explanation: "The Trainer of transformers, Accelerate, Lightning and many scripts have a switch for each.",
            runs: Unchanged(
                "with torch.autocast('tpu', dtype=torch.float16):\n    y = torch.ones(2, 2, device='tpu') @ torch.ones(2, 2, device='tpu')\nassert y.sum().item() == 8",
            ),
            effort: Edit,
            when: &[
                When::Keyword(&["fp16"], |value, _| {
                    is_true(value).then(|| Hit::at(value).named("fp16=True"))
                }),
                When::Keyword(&["mixed_precision", "precision"], |value, call| {
                    let half = matches!(text(value)?, "fp16" | "16-mixed" | "16-true" | "16");
                    (half && !call.path.is_empty()).then(|| Hit::at(value))
                }),
                When::Setting(|key, value| {
                    (key == "fp16" && matches!(value, "true" | "True"))
                        || (key == "mixed_precision" && value == "fp16")
                        || (key == "precision" && value.starts_with("16-"))
                }),
                When::Argument(|a| {
                    matches!(
                        a,
                        "--fp16" | "--mixed_precision=fp16" | "--fp16=True" | "--half" | "--fp16=true"
                    )
                }),
            ],
            bad: &[
                Py("import transformers\na = transformers.TrainingArguments('x', fp16=True)\n"),
                Py("from accelerate import Accelerator\na = Accelerator(mixed_precision='fp16')\n"),
                File("config.yaml", "mixed_precision: fp16\n"),
                File("run.sh", "python train.py --fp16 --lr 1\n"),
            ],
            good: &[
                Py("import transformers\na = transformers.TrainingArguments('x', bf16=True)\n"),
                File("config.yaml", "mixed_precision: bf16\n"),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "PRE009",
            name: "complex128",
            severity: Note,
            sentence: "`{}` is complex numbers of float64, which TPUs do not compute.",
            fix: "Use complex64.",
            explanation: "What compilers for TPUs refuse runs on the CPU, with a warning.",
            runs: Unchanged(
                "x = torch.ones(2, dtype=torch.complex128, device='tpu')\nassert (x * x).sum().item() == 2",
            ),
            effort: Edit,
            when: &[When::Name(&["torch.complex128", "torch.cdouble"])],
            bad: &[Py("import torch\nx = torch.zeros(2, dtype=torch.complex128)\n")],
            good: &[Py("import torch\nx = torch.zeros(2, dtype=torch.complex64)\n")],
            ..Rule::BASE
        },
        Rule {
            id: "PRE010",
            name: "integers of 64 bits in forward",
            severity: Note,
            sentence: "`{}` makes integers of 64 bits, which TPUs compute as pairs of 32.",
            fix: "Use `torch.int32` for masks, positions and counts; indices and targets may stay int64.",
            explanation: "Single conversions do not matter; arithmetic on large int64 tensors takes several times as long.",
            runs: Unchanged(
                "x = torch.ones(2, device='tpu').long()\nassert x.dtype == torch.int64 and x.sum().item() == 2",
            ),
            effort: Nothing,
            when: &[When::Method(&["long"], |call| {
                (call.model.in_forward() && call.tensor().is_some()).then(|| call.hit()).flatten()
            })],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return (x > 0).long().cumsum(0)\n",
            )],
            good: &[Py("import torch\nx = torch.ones(2).long()\n")],
            ..Rule::BASE
        },
        Rule {
            id: "PRE011",
            name: "GPUs decide about bfloat16",
            severity: Error,
            sentence: "`{}` asks a GPU whether there is bfloat16.",
            fix: "Take bfloat16: every platform of oxitorch computes it.",
            explanation: "The answer without a GPU is an error or false, and then the script takes float16 and a scaler.",
            effort: Edit,
            when: &[When::Name(&[
                "transformers.utils.is_torch_bf16_gpu_available",
                "transformers.is_torch_bf16_available",
                "transformers.utils.is_torch_bf16_available",
            ])],
            bad: &[Py("from transformers.utils import is_torch_bf16_gpu_available\n")],
            good: &[Py("import torch\ndtype = torch.bfloat16\n")],
            ..Rule::BASE
        },
    ],
};
