//! Control flow that depends on values of the device.

use ruff_python_ast::{Expr, Stmt};

use crate::python::{Call, Hit, Kind, Model, last};
use crate::rule::Example::Py;
use crate::rule::Runs::Unchanged;
use crate::rule::Severity::Note;
use crate::rule::{Family, Rule, When};

/// Tests for NaN have a rule of their own.
fn is_nan_test(expr: &Expr) -> bool {
    let Expr::Call(call) = expr else { return false };
    let nan = |n: &str| matches!(n, "isnan" | "isinf" | "isfinite");
    last(&call.func).is_some_and(nan)
        || matches!(&*call.func, Expr::Attribute(f) if is_nan_test(&f.value))
        || call.arguments.args.iter().any(is_nan_test)
}

/// Comparisons by `torch.equal` have one too.
fn tensor_truth(expr: &Expr, model: &Model<'_>) -> Option<Hit> {
    (model.kind(expr) == Kind::Tensor && !is_nan_test(expr)).then(|| Hit::at(expr))
}

fn is_while(stmt: &Stmt, model: &Model<'_>) -> Option<Hit> {
    let Stmt::While(stmt) = stmt else { return None };
    if model.in_dataset_class() {
        return None;
    }
    tensor_truth(&stmt.test, model)
}

fn branch(expr: &Expr, model: &Model<'_>) -> Option<Hit> {
    (model.in_step() || model.in_autograd_function()).then(|| tensor_truth(expr, model)).flatten()
}

fn over_tensor(stmt: &Stmt, model: &Model<'_>) -> Option<Hit> {
    let Stmt::For(stmt) = stmt else { return None };
    (model.kind(&stmt.iter) == Kind::Tensor && model.in_step()).then(|| Hit::at(&*stmt.iter))
}

/// Whether a number is read from a tensor somewhere in an expression.
fn reads(expr: &Expr, model: &Model<'_>) -> bool {
    match expr {
        Expr::Call(call) => {
            let item = matches!(&*call.func, Expr::Attribute(f) if f.attr.as_str() == "item" && model.kind(&f.value) != Kind::Numpy);
            item || model.kind(expr) == Kind::Tensor || call.arguments.args.iter().any(|a| reads(a, model))
        }
        Expr::BinOp(op) => reads(&op.left, model) || reads(&op.right, model),
        other => model.kind(other) == Kind::Tensor,
    }
}

fn counted_by_tensor(stmt: &Stmt, model: &Model<'_>) -> Option<Hit> {
    let Stmt::For(stmt) = stmt else { return None };
    let Expr::Call(call) = &*stmt.iter else { return None };
    let range = matches!(&*call.func, Expr::Name(n) if n.id.as_str() == "range");
    let read = range && model.uses_torch() && call.arguments.args.iter().any(|a| reads(a, model));
    (read && (model.in_step() || model.in_forward())).then(|| Hit::at(&*stmt.iter))
}

fn of_python(call: &Call<'_, '_>) -> Option<Hit> {
    let is = call.call.arguments.args.iter().any(|a| call.model.kind(a) == Kind::Tensor);
    (is && call.model.in_step()).then(|| call.hit()).flatten()
}

pub(crate) static FAMILY: Family = Family {
    prefix: "CTL",
    name: "control flow",
    about: "Branches and loops that ask values of the device. They run as they are, and each waits and ends a program; under `torch.compile` each breaks the graph.",
    rules: &[
        Rule {
            id: "CTL001",
            name: "branch on a tensor",
            sentence: "`{}` is a tensor whose value Python asks for, which waits for the device in each step.",
            fix: "Compute both and choose with `torch.where`, or use `torch.cond` where one is expensive.",
            explanation: "What is asked in `forward` is asked in each step. Conditions on shapes, dtypes, `None` and flags cost nothing and are not reported.",
            runs: Unchanged("x = torch.ones(2, device='tpu')\ny = 1 if x.sum() > 1 else 0\nassert y == 1"),
            when: &[When::Truth(|e, m| {
                if is_nan_test(e) {
                    None
                } else {
                    branch(e, m).filter(|_| {
                        !matches!(m.statement(), crate::python::Around::While | crate::python::Around::Assert)
                    })
                }
            })],
            bad: &[
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        if x.sum() > 0:\n            return x\n        return -x\n",
                ),
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x, mask):\n        if x is not None and not mask.any():\n            return x\n",
                ),
            ],
            good: &[
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x, mask=None):\n        if mask is not None and x.shape[0] > 1 and self.training and x.dim() == 2:\n            return x\n        return torch.where(x > 0, x, -x)\n",
                ),
                Py(
                    "import torch\nclass Flip(torch.nn.Module):\n    def forward(self, x):\n        if torch.rand(1) < self.p or torch.randint(0, 5, (1,)) > 3:\n            return x.flip(-1)\n        return x\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "CTL002",
            name: "loop until a tensor says so",
            sentence: "`while {}` waits for the device in each round.",
            fix: "Run a fixed number of rounds with a mask, look every so many rounds, or use `torch._higher_order_ops.while_loop`.",
            explanation: "A loop of the device needs no Python between its rounds.",
            runs: Unchanged(
                "x = torch.tensor(1.0, device='tpu')\nwhile x < 8:\n    x = x * 2\nassert x.item() == 8",
            ),
            when: &[When::Statement(is_while)],
            bad: &[Py(
                "import torch\ndef f(x):\n    error = torch.ones(())\n    while error > 1e-3:\n        error = error / 2\n",
            )],
            good: &[
                Py("import torch\ndef f(n):\n    while n > 0:\n        n -= 1\n"),
                Py(
                    "import torch\nclass Masked(torch.utils.data.Dataset):\n    def add(self, n):\n        length = torch.cumsum(torch.ones(3), 0)\n        while length[-1] < n:\n            length = length * 2\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "CTL003",
            name: "loop over the rows of a tensor",
            sentence: "`for ... in {}` takes a tensor apart in Python, row by row.",
            fix: "Compute on the whole tensor, or with `torch.vmap`.",
            explanation: "Each round is recorded anew: a window of n rows has n times the operations, and another n is another program.",
            runs: Unchanged("assert [r.sum().item() for r in torch.ones(2, 3, device='tpu')] == [3.0, 3.0]"),
            when: &[When::Statement(over_tensor)],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x: torch.Tensor):\n        for row in x:\n            print(row.shape)\n        return x\n",
            )],
            good: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        for layer in self.layers:\n            x = layer(x)\n        return x\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "CTL004",
            name: "loop as often as a tensor says",
            sentence: "`{}` reads a number of the device to count rounds.",
            fix: "Run to the largest number with a mask.",
            explanation: "It waits, and the number of rounds is part of the program: each is another one.",
            runs: Unchanged("n = torch.tensor(3, device='tpu')\nassert len(range(n.item())) == 3"),
            when: &[When::Statement(counted_by_tensor)],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x, lengths):\n        for t in range(lengths.max().item()):\n            x = x + 1\n        return x\n",
            )],
            good: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        for t in range(x.shape[1]):\n            x = x + 1\n        return x\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "CTL005",
            name: "assertion on a tensor",
            sentence: "`assert {}` waits for the device in each step.",
            fix: "Use `torch._assert_async`, which is looked at with the program's results, or run with `python -O`.",
            explanation: "What `_assert_async` finds is raised where something waits.",
            runs: Unchanged("x = torch.ones(2, device='tpu')\nassert (x > 0).all()"),
            when: &[When::Truth(|e, m| {
                branch(e, m).filter(|_| m.statement() == crate::python::Around::Assert)
            })],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        assert x.min() >= 0\n        return x\n",
            )],
            good: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        assert x.shape[-1] == 3\n        return x\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "CTL006",
            name: "Python's function of tensors",
            sentence: "`{}` compares tensors in Python, which waits for the device in each step.",
            fix: "Use `torch.maximum`, `torch.minimum`, `torch.sort`, `torch.any`, `torch.all`.",
            explanation: "`max(a, b)` of two tensors asks for the truth of `b > a`.",
            runs: Unchanged(
                "a, b = torch.tensor(1.0, device='tpu'), torch.tensor(2.0, device='tpu')\nassert max(a, b).item() == 2",
            ),
            when: &[When::Call(&["max", "min", "sorted", "any", "all"], of_python)],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x / max(x.norm(), 1e-6)\n",
            )],
            good: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x / max(x.shape[0], 1)\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "CTL007",
            name: "generation stops by a tensor",
            severity: Note,
            sentence: "`{}` ends a loop by a value of the device, so each round waits.",
            fix: "Look every so many rounds, and cut what is too long afterwards.",
            explanation: "Autoregressive generation asks after each token whether all sequences are done.",
            runs: Unchanged(
                "done = torch.zeros(2, dtype=torch.bool, device='tpu')\nfor i in range(3):\n    done |= True\n    if done.all():\n        break\nassert i == 0",
            ),
            when: &[When::Statement(|stmt, model| {
                let Stmt::If(stmt) = stmt else { return None };
                let breaks = stmt.body.iter().any(|s| matches!(s, Stmt::Break(_)));
                (breaks && model.in_loop() && !model.in_step())
                    .then(|| tensor_truth(&stmt.test, model))
                    .flatten()
            })],
            bad: &[Py(
                "import torch\ndef generate(model, n):\n    done = torch.zeros(2, dtype=torch.bool)\n    for i in range(n):\n        if done.all():\n            break\n",
            )],
            good: &[Py(
                "import torch\ndef generate(model, n):\n    for i in range(n):\n        if i > 3:\n            break\n",
            )],
            ..Rule::BASE
        },
    ],
};
