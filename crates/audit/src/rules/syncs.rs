//! Waits: what makes Python wait for the device in each step.

use ruff_python_ast::{Expr, Operator, Stmt};

use crate::python::{Call, Hit, Kind, Model, is_true, last};
use crate::rule::Effort::Edit;
use crate::rule::Example::{File, Py};
use crate::rule::Runs::Unchanged;
use crate::rule::Severity::Note;
use crate::rule::{Family, Rule, When};

/// A method without arguments, in each step, of what is or could be a tensor.
fn read_in_step(call: &Call<'_, '_>) -> Option<Hit> {
    let plain = call.call.arguments.args.is_empty();
    // What a test has read a branch may read again.
    let again = call.model.was_asked(call.call);
    (plain && !again && call.model.uses_torch() && call.model.in_step())
        .then(|| call.perhaps_tensor())
        .flatten()?;
    call.hit()
}

/// The same of what surely is a tensor.
fn surely_read_in_step(call: &Call<'_, '_>) -> Option<Hit> {
    call.model.in_step().then(|| call.tensor()).flatten()?;
    call.hit()
}

/// `.cpu().numpy()` is reported as the copy that it is.
fn numpy_in_step(call: &Call<'_, '_>) -> Option<Hit> {
    let copied = |e: &Expr| matches!(e, Expr::Call(c) if matches!(&*c.func, Expr::Attribute(f) if f.attr.as_str() == "cpu"));
    // In code for GPUs PyTorch takes `.numpy()` of a tensor on the host alone.
    let host = call.model.text.contains("cuda");
    if host || call.receiver().is_some_and(copied) { None } else { read_in_step(call) }
}

fn to_number(call: &Call<'_, '_>) -> Option<Hit> {
    let is = |e: &Expr| call.model.kind(e) == Kind::Tensor;
    let [argument] = &*call.call.arguments.args else { return None };
    (call.model.in_step() && is(argument)).then(|| call.hit()).flatten()
}

/// Whether a tensor is printed: as an argument, or in a formatted string.
fn shows_tensor(call: &Call<'_, '_>) -> bool {
    let model = call.model;
    let is = |e: &Expr| model.kind(e) == Kind::Tensor;
    call.call.arguments.args.iter().any(|a| match a {
        Expr::FString(f) => {
            f.value.elements().filter_map(|e| e.as_interpolation()).any(|e| is(&e.expression))
        }
        other => is(other),
    })
}

fn shown_in_step(call: &Call<'_, '_>) -> Option<Hit> {
    (call.model.in_step() && shows_tensor(call)).then(|| call.hit()).flatten()
}

/// A text that is made of a tensor and kept: `line = "%g" % loss`.
fn formatted_in_step(stmt: &Stmt, model: &Model<'_>) -> Option<Hit> {
    let Stmt::Assign(assign) = stmt else { return None };
    let is = |e: &Expr| model.kind(e) == Kind::Tensor;
    let value = &*assign.value;
    let shows = match value {
        Expr::BinOp(op) if op.op == Operator::Mod && is_text(&op.left) => match &*op.right {
            Expr::Tuple(t) => t.elts.iter().any(|e| match e {
                Expr::Starred(s) => is(&s.value),
                other => is(other),
            }),
            other => is(other),
        },
        Expr::FString(f) => {
            f.value.elements().filter_map(|e| e.as_interpolation()).any(|e| is(&e.expression))
        }
        _ => false,
    };
    (shows && model.in_step()).then(|| Hit::at(value))
}

/// Whether an expression is a string that stands there, or several.
fn is_text(expr: &Expr) -> bool {
    match expr {
        Expr::StringLiteral(_) => true,
        Expr::BinOp(op) => is_text(&op.left),
        _ => false,
    }
}

fn logged_in_step(call: &Call<'_, '_>) -> Option<Hit> {
    let logs = call.receiver().and_then(last).is_some_and(|n| {
        let n = n.to_ascii_lowercase();
        n.contains("log") || n == "accelerator"
    });
    (logs && call.model.in_step() && shows_tensor(call)).then(|| call.hit()).flatten()
}

/// Whether a value has a tensor in it, or a number that was read from one.
fn has_tensor(model: &Model<'_>, expr: &Expr) -> bool {
    match expr {
        Expr::Dict(dict) => dict.items.iter().any(|i| has_tensor(model, &i.value)),
        Expr::Call(call) => {
            let reads = matches!(&*call.func, Expr::Attribute(f) if f.attr.as_str() == "item");
            reads
                || model.kind(expr) == Kind::Tensor
                || call.arguments.args.iter().any(|a| has_tensor(model, a))
        }
        Expr::FString(f) => {
            f.value.elements().filter_map(|e| e.as_interpolation()).any(|e| has_tensor(model, &e.expression))
        }
        other => model.kind(other) == Kind::Tensor,
    }
}

fn reported_in_step(call: &Call<'_, '_>) -> Option<Hit> {
    let all = call.call.arguments.args.iter().chain(call.call.arguments.keywords.iter().map(|k| &k.value));
    let has = all.into_iter().any(|e| has_tensor(call.model, e));
    (call.model.in_step() && has).then(|| call.hit()).flatten()
}

fn nan_guard(expr: &Expr, model: &Model<'_>) -> Option<Hit> {
    if !model.uses_torch() {
        return None;
    }
    let mut at = expr;
    // `.any()`, `.all()`, `.item()` around it.
    while let Expr::Call(call) = at {
        if let Some(path) = model.path(&call.func) {
            let tests = matches!(path.as_str(), "torch.isnan" | "torch.isinf" | "torch.isfinite")
                || (matches!(
                    path.as_str(),
                    "math.isnan" | "math.isfinite" | "math.isinf" | "numpy.isnan" | "numpy.isfinite"
                ) && call.arguments.args.iter().any(|a| has_tensor(model, a)));
            return (tests && model.in_step()).then(|| Hit::at(expr));
        }
        let Expr::Attribute(f) = &*call.func else { return None };
        if matches!(f.attr.as_str(), "isnan" | "isinf" | "isfinite") {
            return model.in_step().then(|| Hit::at(expr));
        }
        at = &f.value;
    }
    None
}

fn synchronize(call: &Call<'_, '_>) -> Option<Hit> {
    call.model.in_step().then(|| call.hit()).flatten()
}

pub(crate) static FAMILY: Family = Family {
    prefix: "SYN",
    name: "waits",
    about: "What makes Python wait for the device in each step. It runs as it is; but what waits keeps Python from recording the next step meanwhile, and ends a program.",
    rules: &[
        Rule {
            id: "SYN001",
            name: "item() in the loop",
            sentence: "`{}` waits for the device in each step.",
            fix: "Keep the tensor (`loss.detach()`), and read it every hundred steps.",
            explanation: "Python runs ahead of the device and records the next step while this one runs. A read ends that: the device is idle until Python has recorded again. Sums are kept on the device: `total += loss.detach()`, and one `.item()` for each epoch.",
            runs: Unchanged("x = torch.ones(3, device='tpu')\nassert x.sum().item() == 3"),
            when: &[When::Method(&["item"], read_in_step)],
            bad: &[
                Py(
                    "import torch\ndef train(loader, model, opt):\n    total = 0\n    for x, y in loader:\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        total += loss.item()\n",
                ),
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x * x.max().item()\n",
                ),
            ],
            good: &[
                Py(
                    "import torch\ndef train(loader, model, opt):\n    for i, x in enumerate(loader):\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        if i % 100 == 0:\n            print(loss.item())\n",
                ),
                Py("import torch\nx = torch.ones(1).item()\n"),
                Py(
                    "import torch\ndef train(loader, model, opt, bad):\n    for x in loader:\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        if bad:\n            raise ValueError(f'{loss.item()}')\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "SYN002",
            name: "tolist() in the loop",
            sentence: "`{}` waits for the device in each step.",
            fix: "Keep tensors on the device, and read them after the loop, together.",
            explanation: "`torch.cat(all).tolist()` behind the loop reads once.",
            runs: Unchanged("assert torch.arange(3, device='tpu').tolist() == [0, 1, 2]"),
            when: &[When::Method(&["tolist"], read_in_step)],
            bad: &[Py(
                "import torch\ndef evaluate(loader, model):\n    out = []\n    for x in loader:\n        out += model(x).argmax(-1).tolist()\n",
            )],
            good: &[Py(
                "import torch\ndef evaluate(loader, model):\n    out = []\n    for x in loader:\n        out.append(model(x).argmax(-1))\n    return torch.cat(out).tolist()\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "SYN003",
            name: "cpu() in the loop",
            sentence: "`{}` copies to the host and waits in each step.",
            fix: "Keep tensors on the device, and copy them after the loop, together.",
            explanation: "If the results of all batches do not fit the device, copy those of several batches at once.",
            runs: Unchanged("assert torch.ones(2, device='tpu').cpu().device.type == 'cpu'"),
            when: &[When::Method(&["cpu"], read_in_step)],
            bad: &[Py(
                "import torch\ndef evaluate(loader, model):\n    out = []\n    for x in loader:\n        out.append(model(x).detach().cpu())\n",
            )],
            good: &[Py("import torch\nmodel = torch.nn.Linear(2, 2)\nmodel.cpu()\n")],
            ..Rule::BASE
        },
        Rule {
            id: "SYN004",
            name: "numpy() in the loop",
            sentence: "`{}` reads the tensor on the host in each step.",
            fix: "Compute it with PyTorch on the device, and read the result after the loop.",
            explanation: "`.numpy()` is of a CPU tensor, so the copy before it has waited already; what NumPy computes then is not in the step's program.",
            runs: Unchanged("assert torch.ones(2, device='tpu').cpu().numpy().sum() == 2"),
            when: &[When::Method(&["numpy"], numpy_in_step)],
            bad: &[Py(
                "import torch\ndef evaluate(loader, model):\n    for x in loader:\n        y = model(x).detach().numpy()\n",
            )],
            good: &[
                Py("import torch\ny = torch.ones(2).numpy()\n"),
                Py(
                    "import torch\ndef evaluate(loader, model):\n    for x, y in loader:\n        good = model(x.cuda()).cpu() == y.numpy()\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "SYN005",
            name: "number of a tensor",
            sentence: "`{}` of a tensor waits for the device in each step.",
            fix: "Keep the tensor, and read it every hundred steps.",
            explanation: "`float(x)`, `int(x)`, `bool(x)` and `round(x)` read the value as `.item()` does.",
            runs: Unchanged(
                "x = torch.tensor(2.5, device='tpu')\nassert float(x) == 2.5 and int(x) == 2 and bool(x)",
            ),
            when: &[When::Call(&["float", "int", "bool"], to_number)],
            bad: &[Py(
                "import torch\ndef train(loader, model, opt):\n    total = 0.0\n    for x in loader:\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        total += float(loss)\n",
            )],
            good: &[Py(
                "import torch\ndef train(loader, model, opt):\n    for x in loader:\n        n = int(x.shape[0])\n        model(x).sum().backward()\n        opt.step()\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "SYN006",
            name: "tensor is printed in the loop",
            sentence: "`{}` shows a tensor, which waits for the device in each step.",
            fix: "Print every hundred steps, or what was read for the log anyway.",
            explanation: "Formatting a tensor reads all of it that is shown.",
            runs: Unchanged("assert '2' in str(torch.full((2,), 2, device='tpu'))"),
            effort: Edit,
            when: &[When::Call(&["print"], shown_in_step), When::Statement(formatted_in_step)],
            bad: &[
                Py(
                    "import torch\ndef train(loader, model, opt):\n    for x in loader:\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        print(f'loss {loss}')\n",
                ),
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        print(x.mean())\n        return x\n",
                ),
                Py(
                    "import torch\ndef train(loader, model, opt, bar):\n    for x in loader:\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        line = '%10.4g' * 2 % (0, loss)\n        bar.set_description(line)\n",
                ),
                Py(
                    "import torch\ndef train(loader, model, opt, bar):\n    mean = torch.zeros(4, device='tpu')\n    for x in loader:\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        mean = mean + loss.detach()\n        bar.text = ('%10s' + '%10.4g' * 4) % ('x', *mean)\n",
                ),
            ],
            good: &[
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        print(x.shape)\n        return x\n",
                ),
                Py("import torch\nprint(torch.ones(2))\n"),
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        y = x.sum() % 3\n        name = 'size %d' % x.shape[0]\n        return y\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "SYN007",
            name: "tensor is logged in the loop",
            sentence: "`{}` formats a tensor, which waits for the device in each step.",
            fix: "Log every hundred steps.",
            explanation: "A logger formats its arguments when the level is enabled, and then the tensor is read.",
            runs: Unchanged(
                "import logging\nlogging.getLogger('x').warning('%s', torch.ones(2, device='tpu'))",
            ),
            effort: Edit,
            when: &[When::Method(&["info", "debug", "warning"], logged_in_step)],
            bad: &[Py(
                "import torch, logging\nlogger = logging.getLogger()\ndef train(loader, model, opt):\n    for x in loader:\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        logger.info(f'loss {loss}')\n",
            )],
            good: &[Py("import torch, logging\nlogger = logging.getLogger()\nlogger.info(torch.ones(2))\n")],
            ..Rule::BASE
        },
        Rule {
            id: "SYN008",
            name: "progress bar shows a tensor",
            sentence: "`{}` shows a value of the device in each step.",
            fix: "Set it every hundred steps; the bar itself costs nothing.",
            explanation: "tqdm refreshes its text a few times a second, but its arguments are read in each step.",
            runs: Unchanged(
                "from tqdm import tqdm\nx = torch.ones((), device='tpu')\nbar = tqdm(range(1), disable=True)\nbar.set_postfix(loss=x.item())",
            ),
            effort: Edit,
            when: &[When::Method(
                &["set_postfix", "set_description", "set_postfix_str", "set_description_str"],
                reported_in_step,
            )],
            bad: &[Py(
                "import torch\nfrom tqdm import tqdm\ndef train(loader, model, opt):\n    bar = tqdm(loader)\n    for x in tqdm(loader):\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        bar.set_postfix(loss=loss.item())\n",
            )],
            good: &[Py(
                "import torch\ndef train(loader, bar, model, opt):\n    for i, x in enumerate(loader):\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        if i % 10 == 0:\n            bar.set_postfix(loss=loss.item())\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "SYN009",
            name: "metrics are sent in each step",
            sentence: "`{}` sends a value of the device in each step.",
            fix: "Send every hundred steps, several values at once.",
            explanation: "W&B, TensorBoard, MLflow, Neptune and Comet read what they are given at once.",
            runs: Unchanged("x = torch.ones((), device='tpu')\nassert {'loss': x.item()}['loss'] == 1.0"),
            effort: Edit,
            when: &[
                When::Call(
                    &["wandb.log", "mlflow.log_metric", "mlflow.log_metrics", "swanlab.log"],
                    reported_in_step,
                ),
                When::Method(
                    &["add_scalar", "add_scalars", "add_histogram", "log_metric", "log_metrics"],
                    reported_in_step,
                ),
            ],
            bad: &[
                Py(
                    "import torch, wandb\ndef train(loader, model, opt):\n    for x in loader:\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        wandb.log({'loss': loss.item()})\n",
                ),
                Py(
                    "import torch\ndef train(loader, model, opt, writer):\n    for i, x in enumerate(loader):\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        writer.add_scalar('loss', loss, i)\n",
                ),
            ],
            good: &[Py(
                "import torch, wandb\ndef train(loader, model, opt):\n    for i, x in enumerate(loader):\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n    wandb.log({'loss': loss.item()})\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "SYN010",
            name: "guard against NaN",
            sentence: "`{}` is asked by Python, which waits for the device in each step.",
            fix: "Look every hundred steps, or let the device skip the step: `torch.where(finite, update, 0)`; to find the cause, `torch.tpu.set_nan_trap`.",
            explanation: "GradScaler skips steps with an overflow without Python. A trap in debug mode names the operation and the line that made the first NaN.",
            runs: Unchanged(
                "x = torch.tensor([1.0, float('nan')], device='tpu')\nassert torch.isnan(x).any()",
            ),
            when: &[When::Truth(nan_guard)],
            bad: &[
                Py(
                    "import torch\ndef train(loader, model, opt):\n    for x in loader:\n        loss = model(x).sum()\n        if torch.isnan(loss).any():\n            continue\n        loss.backward()\n        opt.step()\n",
                ),
                Py(
                    "import torch, math\ndef train(loader, model, opt):\n    for x in loader:\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        assert math.isfinite(loss.item())\n",
                ),
            ],
            good: &[
                Py("import torch\nx = torch.ones(2)\nassert not torch.isnan(x).any()\n"),
                Py(
                    "import torch\nimport numpy as np\ndef train(loader, model, opt):\n    for x in loader:\n        def step():\n            loss = model(x).sum()\n            loss.backward()\n            opt.step()\n            return float(loss), 1\n        loss, one = timed(step)\n        assert not np.isnan(loss)\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "SYN011",
            name: "error_if_nonfinite",
            sentence: "`{}` makes clipping read the norm in each step.",
            fix: "Leave it out, and look at the norm that is returned every hundred steps.",
            explanation: "Without it the norm stays on the device.",
            runs: Unchanged(
                "p = torch.nn.Parameter(torch.ones(2, device='tpu'))\n(p * 2).sum().backward()\nn = torch.nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)\nassert abs(n.item() - 8 ** 0.5) < 1e-5",
            ),
            effort: Edit,
            when: &[When::Keyword(&["error_if_nonfinite"], |value, _| {
                is_true(value).then(|| Hit::at(value).named("error_if_nonfinite=True"))
            })],
            bad: &[Py("import torch\ntorch.nn.utils.clip_grad_norm_([], 1.0, error_if_nonfinite=True)\n")],
            good: &[Py("import torch\ntorch.nn.utils.clip_grad_norm_([], 1.0)\n")],
            ..Rule::BASE
        },
        Rule {
            id: "SYN012",
            name: "synchronize in the loop",
            sentence: "`{}` waits for the device in each step.",
            fix: "Remove it; for times use events, or a measurement over many steps.",
            explanation: "What it is for on CUDA is mostly measuring. `torch.tpu.metrics_summary()` says where the time goes without it.",
            runs: Unchanged("torch.accelerator.synchronize()\ntorch.tpu.synchronize()"),
            effort: Edit,
            when: &[When::Call(
                &[
                    "torch.cuda.synchronize",
                    "torch.tpu.synchronize",
                    "torch.accelerator.synchronize",
                    "torch_xla.sync",
                    "torch_xla.core.xla_model.mark_step",
                ],
                synchronize,
            )],
            bad: &[Py(
                "import torch\ndef train(loader, model, opt):\n    for x in loader:\n        model(x).sum().backward()\n        opt.step()\n        torch.accelerator.synchronize()\n",
            )],
            good: &[Py("import torch\ntorch.accelerator.synchronize()\n")],
            ..Rule::BASE
        },
        Rule {
            id: "SYN013",
            name: "comparison of tensors by Python",
            sentence: "`{}` gives Python a bool, which waits for the device in each step.",
            fix: "Leave it to tests; in the step compare with `torch.eq(a, b).all()`, which stays on the device.",
            explanation: "`torch.equal` and `torch.allclose` return Python's bool.",
            runs: Unchanged(
                "x = torch.ones(2, device='tpu')\nassert torch.equal(x, x.clone()) and torch.allclose(x, x + 1e-9)",
            ),
            when: &[When::Call(&["torch.equal", "torch.allclose"], synchronize)],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        if torch.equal(x, x):\n            return x\n",
            )],
            good: &[
                Py("import torch\nassert torch.allclose(torch.ones(1), torch.ones(1))\n"),
                File(
                    "tests/test_model.py",
                    "import torch\ndef check(model, x):\n    model(x).sum().backward()\n    assert torch.allclose(x.grad, torch.ones(1))\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "SYN014",
            name: "anomaly detection",
            sentence: "`{}` looks at each gradient in Python, and waits for each.",
            fix: "Use it to find a defect alone; `torch.tpu.set_nan_trap` names the operation too.",
            explanation: "With anomaly detection the backward reads whether each gradient is finite.",
            runs: Unchanged(
                "with torch.autograd.set_detect_anomaly(True):\n    x = torch.ones(2, device='tpu', requires_grad=True)\n    (x * 2).sum().backward()\nassert x.grad.tolist() == [2.0, 2.0]",
            ),
            effort: Edit,
            when: &[
                When::Call(&["torch.autograd.set_detect_anomaly"], |call| {
                    call.first().or(call.keyword("mode")).is_some_and(is_true).then(|| call.hit()).flatten()
                }),
                When::Call(&["torch.autograd.detect_anomaly"], |call| call.hit()),
                When::Keyword(&["detect_anomaly"], |value, call| {
                    (is_true(value) && last(&call.call.func) == Some("Trainer"))
                        .then(|| Hit::at(value).named("detect_anomaly=True"))
                }),
            ],
            bad: &[
                Py("import torch\ntorch.autograd.set_detect_anomaly(True)\n"),
                Py("import lightning\nt = lightning.Trainer(detect_anomaly=True)\n"),
            ],
            good: &[Py("import torch\ntorch.autograd.set_detect_anomaly(False)\n")],
            ..Rule::BASE
        },
        Rule {
            id: "SYN015",
            name: "NumPy of a tensor",
            sentence: "`{}` takes a tensor to NumPy, which reads it on the host in each step.",
            fix: "Use PyTorch's function of the same name.",
            explanation: "NumPy converts what it is given; for a tensor of the device that is a copy to the host, or an error where the tensor wants a gradient.",
            runs: Unchanged(
                "import numpy as np\nassert np.mean(torch.ones(4, device='tpu').cpu().numpy()) == 1",
            ),
            when: &[When::Call(
                &[
                    "numpy.mean",
                    "numpy.sum",
                    "numpy.array",
                    "numpy.asarray",
                    "numpy.max",
                    "numpy.min",
                    "numpy.argmax",
                    "numpy.stack",
                    "numpy.concatenate",
                    "numpy.sqrt",
                    "numpy.exp",
                    "numpy.log",
                    "numpy.std",
                ],
                |call| {
                    let is = call.first().is_some_and(|a| call.model.kind(a) == Kind::Tensor);
                    (is && call.model.in_step()).then(|| call.hit()).flatten()
                },
            )],
            bad: &[Py(
                "import numpy as np, torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x * np.mean(x.sum(0))\n",
            )],
            good: &[Py(
                "import numpy as np, torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x * np.mean(x.shape)\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "SYN016",
            name: "copy to the host by to()",
            sentence: "`{}` copies to the host and waits in each step.",
            fix: "Keep tensors on the device, and copy them after the loop, together.",
            explanation: "The same as `.cpu()`.",
            runs: Unchanged("assert torch.ones(2, device='tpu').to('cpu').tolist() == [1.0, 1.0]"),
            when: &[When::Method(&["to"], |call| {
                let cpu = call.first().and_then(crate::python::text) == Some("cpu")
                    || call.keyword("device").and_then(crate::python::text) == Some("cpu");
                if cpu { surely_read_in_step(call) } else { None }
            })],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x.sum().to('cpu')\n",
            )],
            good: &[Py("import torch\nx = torch.ones(2).to('cpu')\n")],
            ..Rule::BASE
        },
        Rule {
            id: "SYN017",
            name: "checkpoint in each step",
            sentence: "`{}` writes a checkpoint in each step, and waits for all of it.",
            fix: "Save every so many steps, or with `torch.distributed.checkpoint.async_save`.",
            explanation: "Saving reads every parameter on the host.",
            runs: Unchanged(
                "import io\nf = io.BytesIO()\ntorch.save(torch.ones(2, device='tpu'), f)\nf.seek(0)\nassert torch.load(f, map_location='cpu').tolist() == [1.0, 1.0]",
            ),
            severity: Note,
            when: &[When::Call(&["torch.save"], |call| {
                (call.model.in_step()
                    && !call.model.in_forward()
                    && call.model.trains()
                    && call.model.in_training_loop())
                .then(|| call.hit())
                .flatten()
            })],
            bad: &[Py(
                "import torch\ndef train(loader, model, opt):\n    for x in loader:\n        model(x).sum().backward()\n        opt.step()\n        torch.save(model.state_dict(), 'x.pt')\n",
            )],
            good: &[Py(
                "import torch\ndef train(loader, model, opt):\n    for i, x in enumerate(loader):\n        model(x).sum().backward()\n        opt.step()\n        if i % 1000 == 0:\n            torch.save(model.state_dict(), 'x.pt')\n",
            )],
            ..Rule::BASE
        },
    ],
};
