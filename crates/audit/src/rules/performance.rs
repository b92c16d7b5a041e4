//! Performance: sizes and loops that fit TPUs badly.

use ruff_python_ast::{Expr, Stmt};
use ruff_text_size::Ranged;

use crate::python::{Call, Hit, Kind, Model, is_false, is_true, last};
use crate::rule::Effort::{Edit, None as Nothing, Rework};
use crate::rule::Example::Py;
use crate::rule::Runs::Unchanged;
use crate::rule::Severity::Note;
use crate::rule::{Family, Rule, When};

/// Heads of a width below that of the matrix unit.
fn narrow(call: &Call<'_, '_>, heads: i64, width: i64) -> Option<Hit> {
    // A small width altogether is a test's.
    let narrow = heads > 0 && (1..128).contains(&width) && heads * width >= 256;
    narrow.then(|| call.hit().map(|h| h.named(format!("{heads} heads of {width}")))).flatten()
}

fn narrow_heads(call: &Call<'_, '_>) -> Option<Hit> {
    let names = if call.path.ends_with("MultiheadAttention") {
        ["embed_dim", "num_heads"]
    } else {
        ["d_model", "nhead"]
    };
    let number = |i: usize| call.model.number(call.argument(names[i], i)?);
    let (width, heads) = (number(0)?, number(1)?);
    narrow(call, heads, width / heads.max(1))
}

/// Numbers of heads and their width in configurations of transformers.
fn narrow_config(call: &Call<'_, '_>) -> Option<Hit> {
    let number = |names: &[&str]| names.iter().find_map(|n| call.model.number(call.keyword(n)?));
    let heads = number(&["num_attention_heads", "n_head", "num_heads", "n_heads"])?;
    let width = number(&["head_dim"])
        .or_else(|| Some(number(&["hidden_size", "n_embd", "d_model", "dim"])? / heads.max(1)))?;
    let config = last(&call.call.func).is_some_and(|n| n.ends_with("Config") || n.ends_with("Args"));
    if config { narrow(call, heads, width) } else { None }
}

fn odd_vocabulary(call: &Call<'_, '_>) -> Option<Hit> {
    let rows = call.model.number(call.argument("num_embeddings", 0)?)?;
    (rows > 1024 && rows % 128 != 0).then(|| call.hit().map(|h| h.named(format!("{rows} rows")))).flatten()
}

fn odd_vocabulary_config(value: &Expr, call: &Call<'_, '_>) -> Option<Hit> {
    let rows = call.model.number(value)?;
    (rows > 1024 && rows % 128 != 0).then(|| Hit::at(value).named(format!("{rows} rows")))
}

fn tiny_batch(call: &Call<'_, '_>) -> Option<Hit> {
    let size = call.argument("batch_size", 1)?;
    let trains = call.argument("shuffle", 2).is_some_and(is_true);
    let n = call.model.number(size)?;
    (trains && !call.model.is_test() && (1..8).contains(&n))
        .then(|| call.hit().map(|h| h.named(format!("batch_size={n}"))))
        .flatten()
}

fn channels_last(value: &Expr, call: &Call<'_, '_>) -> Option<Hit> {
    matches!(call.model.path(value).as_deref(), Some("torch.channels_last" | "torch.channels_last_3d"))
        .then(|| Hit::at(value))
}

/// A loop of a forward that takes a part of a tensor in each round.
fn time_loop(stmt: &Stmt, model: &Model<'_>) -> Option<Hit> {
    let Stmt::For(stmt) = stmt else { return None };
    let (Expr::Name(t), Expr::Call(range)) = (&*stmt.target, &*stmt.iter) else { return None };
    let counts = matches!(&*range.func, Expr::Name(n) if n.id.as_str() == "range");
    let slices = |body: &[Stmt]| body.iter().any(|s| takes_step(s, t.id.as_str(), model));
    // What each layer has of its own, such as its cache, is a list.
    let layers =
        range.arguments.args.iter().any(|e| {
            last(e).is_some_and(|n| ["layer", "block", "depth", "stage"].iter().any(|w| n.contains(w)))
        });
    let layers = layers || stmt.body.iter().any(|s| takes_own(model.source(s.range()), t.id.as_str()));
    (counts && !layers && model.in_forward() && slices(&stmt.body)).then(|| Hit::at(range))
}

/// Whether a text has `self.NAME[t]`, one of several layers.
fn takes_own(text: &str, t: &str) -> bool {
    text.match_indices(&format!("[{t}]")).any(|(at, _)| {
        let name = text[..at].trim_end_matches(|c: char| c.is_alphanumeric() || matches!(c, '_' | '.'));
        text[name.len()..at].starts_with("self.")
    })
}

/// `x[:, t]` or `x[t]` of a tensor in an assignment.
fn takes_step(stmt: &Stmt, t: &str, model: &Model<'_>) -> bool {
    let Stmt::Assign(assign) = stmt else { return false };
    contains(&assign.value, &mut |e| match e {
        Expr::Subscript(s) if model.kind(&s.value).has_tensor_methods() => match &*s.slice {
            Expr::Name(n) => n.id.as_str() == t,
            Expr::Tuple(tuple) => tuple.elts.iter().any(|e| matches!(e, Expr::Name(n) if n.id.as_str() == t)),
            _ => false,
        },
        _ => false,
    })
}

/// Whether a part of an expression is what a function looks for.
fn contains(expr: &Expr, is: &mut dyn FnMut(&Expr) -> bool) -> bool {
    use ruff_python_ast::visitor::{Visitor, walk_expr};
    struct Look<'f> {
        is: &'f mut dyn FnMut(&Expr) -> bool,
        found: bool,
    }
    impl<'a> Visitor<'a> for Look<'_> {
        fn visit_expr(&mut self, expr: &'a Expr) {
            self.found = self.found || (self.is)(expr);
            if !self.found {
                walk_expr(self, expr);
            }
        }
    }
    let mut look = Look { is, found: false };
    look.visit_expr(expr);
    look.found
}

/// Loops over parameters that change each.
fn parameter_loop(stmt: &Stmt, model: &Model<'_>) -> Option<Hit> {
    let Stmt::For(stmt) = stmt else { return None };
    let over = contains(
        &stmt.iter,
        &mut |e| matches!(e, Expr::Call(c) if matches!(last(&c.func), Some("parameters" | "named_parameters"))),
    );
    // What a step does to parameters has a second sequence, or their gradients; copies and scales of parameters alone
    // are how a model begins.
    let pairs = matches!(&*stmt.iter, Expr::Call(c) if last(&c.func) == Some("zip"));
    let updates = model.in_step() || pairs || model.source(stmt.range).contains(".grad");
    let writes = stmt.body.iter().any(|s| match s {
        Stmt::Expr(e) => contains(&e.value, &mut |e| {
            matches!(e, Expr::Call(c) if matches!(&*c.func, Expr::Attribute(f) if matches!(f.attr.as_str(), "mul_" | "add_" | "sub_" | "addcdiv_" | "lerp_" | "addcmul_")))
        }),
        Stmt::Assign(a) => a.targets.iter().any(|t| matches!(t, Expr::Attribute(f) if f.attr.as_str() == "data")),
        Stmt::AugAssign(a) => matches!(&*a.target, Expr::Attribute(f) if f.attr.as_str() == "data"),
        _ => false,
    });
    (over && writes && updates && model.uses_torch()).then(|| Hit::at(&*stmt.iter))
}

fn optimizer_option(value: &Expr, call: &Call<'_, '_>, name: &str, is: fn(&Expr) -> bool) -> Option<Hit> {
    let optimizer =
        call.path.starts_with("torch.optim.") || call.path.ends_with("AdamW") || call.path.ends_with("SGD");
    (optimizer && is(value)).then(|| Hit::at(value).named(name))
}

/// `x[i] = ...` in a loop of `forward`.
fn element_writes(stmt: &Stmt, model: &Model<'_>) -> Option<Hit> {
    let Stmt::Assign(assign) = stmt else { return None };
    let [Expr::Subscript(target)] = &*assign.targets else { return None };
    let counts = matches!(&*target.slice, Expr::Name(_))
        || matches!(&*target.slice, Expr::Tuple(t) if t.elts.iter().all(|e| matches!(e, Expr::Name(_))));
    (counts && model.in_forward() && model.in_loop() && model.kind(&target.value) == Kind::Tensor)
        .then(|| Hit::at(stmt))
}

pub(crate) static FAMILY: Family = Family {
    prefix: "PER",
    name: "performance",
    about: "Sizes and loops that fit the matrix unit or a compiler badly. All of it runs as it is.",
    rules: &[
        Rule {
            id: "PER001",
            name: "narrow attention heads",
            severity: Note,
            sentence: "`{}` fill a part of the matrix unit, which is 128 wide (256 from v6e on).",
            fix: "Choose half as many heads of 128, if the model is yours to choose.",
            explanation: "With heads of 64 the products of attention take as long as with 128. A model that is loaded has the heads that it has.",
            runs: Unchanged(
                "m = torch.nn.MultiheadAttention(128, 2, batch_first=True).to('tpu')\nx = torch.ones(1, 2, 128, device='tpu')\nassert m(x, x, x)[0].shape == (1, 2, 128)",
            ),
            effort: Nothing,
            when: &[
                When::Call(
                    &[
                        "torch.nn.MultiheadAttention",
                        "torch.nn.TransformerEncoderLayer",
                        "torch.nn.TransformerDecoderLayer",
                    ],
                    narrow_heads,
                ),
                When::Keyword(&["num_attention_heads", "n_head", "num_heads", "n_heads"], |_, call| {
                    narrow_config(call)
                }),
            ],
            bad: &[
                Py("import torch\nm = torch.nn.MultiheadAttention(768, 12)\n"),
                Py("import transformers\nc = transformers.GPT2Config(n_embd=768, n_head=12)\n"),
            ],
            good: &[Py("import torch\nm = torch.nn.MultiheadAttention(768, 6)\n")],
            ..Rule::BASE
        },
        Rule {
            id: "PER002",
            name: "odd vocabulary",
            severity: Note,
            sentence: "`{}` are padded to a multiple of 128 in each product with the vocabulary.",
            fix: "Round the vocabulary up to a multiple of 128: 50257 to 50304.",
            explanation: "What is added is never a target, so the loss is the same after some steps. Tables that are cut over chips want a multiple of 128 times the chips.",
            runs: Unchanged(
                "e = torch.nn.Embedding(1025, 2).to('tpu')\nassert e(torch.tensor([1024], device='tpu')).shape == (1, 2)",
            ),
            effort: Edit,
            when: &[
                When::Call(&["torch.nn.Embedding"], odd_vocabulary),
                When::Keyword(&["vocab_size"], odd_vocabulary_config),
            ],
            bad: &[
                Py("import torch\ne = torch.nn.Embedding(50257, 768)\n"),
                Py("import transformers\nc = transformers.GPT2Config(vocab_size=50257)\n"),
            ],
            good: &[Py("import torch\ne = torch.nn.Embedding(50304, 768)\nf = torch.nn.Embedding(10, 4)\n")],
            ..Rule::BASE
        },
        Rule {
            id: "PER003",
            name: "tiny batch",
            severity: Note,
            sentence: "`{}` leaves most rows of the matrix unit empty, unless sequences or images are large.",
            fix: "Take larger batches; `oxitorch preflight --fit batch` finds the largest that fits.",
            explanation: "Rows of a product are batch times positions; below 128 the unit is padded.",
            runs: Unchanged(
                "assert torch.nn.Linear(2, 2).to('tpu')(torch.ones(1, 2, device='tpu')).shape == (1, 2)",
            ),
            effort: Edit,
            when: &[When::Call(&["torch.utils.data.DataLoader"], tiny_batch)],
            bad: &[Py(
                "from torch.utils.data import DataLoader\nl = DataLoader([], batch_size=2, shuffle=True, drop_last=True)\n",
            )],
            good: &[Py(
                "from torch.utils.data import DataLoader\nl = DataLoader([], batch_size=256, shuffle=True, drop_last=True)\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "PER004",
            name: "channels last",
            severity: Note,
            sentence: "`{}` is a layout for cuDNN; XLA lays arrays out itself.",
            fix: "Leave it or remove it.",
            explanation: "Strides are kept as PyTorch wants them, and what a program computes has the compiler's layout anyway.",
            runs: Unchanged(
                "x = torch.randn(1, 2, 3, 3, device='tpu').to(memory_format=torch.channels_last)\nassert x.is_contiguous(memory_format=torch.channels_last)",
            ),
            effort: Nothing,
            when: &[When::Keyword(&["memory_format"], channels_last)],
            bad: &[Py("import torch\ndef f(m):\n    return m.to(memory_format=torch.channels_last)\n")],
            good: &[Py(
                "import torch\ndef f(m):\n    return m.contiguous(memory_format=torch.contiguous_format)\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "PER005",
            name: "loop over parts of a tensor",
            sentence: "`{}` goes over parts of a tensor in Python, so a program has each of them.",
            fix: "For time steps use `nn.LSTM`, `nn.GRU` or `nn.RNN`, which are loops of the device, or `torch._higher_order_ops.scan` for a cell of your own; for the elements of a batch, operations on all of it.",
            explanation: "Compile time grows with the length, and another length is another program.",
            runs: Unchanged(
                "c = torch.nn.GRUCell(1, 1).to('tpu')\nx = torch.ones(2, 3, 1, device='tpu')\nh = torch.zeros(2, 1, device='tpu')\nfor t in range(x.shape[1]):\n    h = c(x[:, t], h)\nassert h.shape == (2, 1)",
            ),
            effort: Rework,
            when: &[When::Statement(time_loop)],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x, h):\n        for t in range(x.size(1)):\n            h = self.cell(x[:, t], h)\n        return h\n",
            )],
            good: &[
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        for i in range(3):\n            x = self.layers[i](x)\n        return x\n",
                ),
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        for i in range(self.branches):\n            x[i] = self.nets[i](x[i])\n        return x\n",
                ),
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x, past):\n        for i in range(self.config.num_hidden_layers):\n            kv = past[i]\n            x = self.layers[i](x, kv)\n        return x\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "PER006",
            name: "loop over parameters",
            severity: Note,
            sentence: "`{}` changes parameters one by one in Python.",
            fix: "Use `torch._foreach_add_`, `torch._foreach_mul_` and `torch._foreach_lerp_` on lists, or an optimizer of `torch.optim`; for averages `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`.",
            explanation: "All of it becomes one program either way; what costs is recording an operation for each parameter in Python.",
            runs: Unchanged(
                "m = torch.nn.Linear(2, 2).to('tpu')\nwith torch.no_grad():\n    for p in m.parameters():\n        p.mul_(0).add_(1)\nassert m.bias.tolist() == [1.0, 1.0]",
            ),
            when: &[When::Statement(parameter_loop)],
            bad: &[Py(
                "import torch\ndef ema(model, shadow):\n    for p, s in zip(model.parameters(), shadow.parameters()):\n        s.data.mul_(0.9).add_(p.data)\n",
            )],
            good: &[
                Py(
                    "import torch\ndef count(model):\n    n = 0\n    for p in model.parameters():\n        n += p.numel()\n",
                ),
                Py(
                    "import torch\ndef scale(model):\n    for p in model.parameters():\n        p.detach().mul_(0.5)\n",
                ),
                Py(
                    "import torch\ndef same(model, ema):\n    for p, q in zip(model.parameters(), ema.parameters()):\n        q.data.copy_(p.data)\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "PER007",
            name: "foreach=False",
            severity: Note,
            sentence: "`{}` makes the optimizer go over parameters one by one.",
            fix: "Leave it out.",
            explanation: "Recording an operation for each parameter takes Python longer. Where a part of the parameters are DTensors, it is needed.",
            runs: Unchanged(
                "p = torch.nn.Parameter(torch.ones(2, device='tpu'))\no = torch.optim.SGD([p], lr=0.5, foreach=False)\np.sum().backward()\no.step()\nassert p.tolist() == [0.5, 0.5]",
            ),
            effort: Edit,
            when: &[When::Keyword(&["foreach"], |value, call| {
                optimizer_option(value, call, "foreach=False", is_false)
            })],
            bad: &[Py("import torch\no = torch.optim.Adam([], foreach=False)\n")],
            good: &[Py("import torch\no = torch.optim.Adam([])\n")],
            ..Rule::BASE
        },
        Rule {
            id: "PER008",
            name: "element by element",
            sentence: "`{}` writes a tensor element by element in Python.",
            fix: "Compute it on whole tensors: `torch.arange` and comparisons for masks, `scatter` or an index for writes, `torch.vmap` for a function of a row.",
            explanation: "Each write is an operation of its own.",
            runs: Unchanged(
                "x = torch.zeros(3, device='tpu')\nfor i in range(3):\n    x[i] = i\nassert x.tolist() == [0.0, 1.0, 2.0]",
            ),
            when: &[When::Statement(element_writes)],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        y = torch.zeros(4)\n        for i in range(4):\n            y[i] = x[i].sum()\n        return y\n",
            )],
            good: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        y = torch.zeros(4)\n        y[0] = 1\n        return y\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "PER009",
            name: "TorchScript",
            severity: Note,
            sentence: "`{}` compiles with TorchScript, which fuses for CUDA and the CPU alone.",
            fix: "Remove it, or use `torch.compile` or `torch.tpu.jit`.",
            explanation: "A scripted function runs on the device operation by operation, as in eager mode. PyTorch no longer develops TorchScript.",
            runs: Unchanged(
                "import warnings\nwarnings.simplefilter('ignore')\nm = torch.nn.Linear(2, 2).to('tpu')\nx = torch.ones(1, 2, device='tpu')\nassert torch.allclose(torch.jit.trace(m, x)(x), m(x)) and torch.allclose(torch.jit.script(m)(x), m(x))",
            ),
            effort: Edit,
            when: &[
                When::Call(&["torch.jit.script", "torch.jit.trace", "torch.jit.trace_module"], |call| {
                    call.hit()
                }),
                When::Name(&["torch.jit.script", "torch.jit.script_method"]),
            ],
            bad: &[
                Py("import torch\n@torch.jit.script\ndef f(x):\n    return x\n"),
                Py("import torch\nf = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))\n"),
            ],
            good: &[Py("import torch\nf = torch.compile(torch.nn.Linear(2, 2))\n")],
            ..Rule::BASE
        },
        Rule {
            id: "PER010",
            name: "gradients set to zero",
            severity: Note,
            sentence: "`{}` fills gradients with zeros and adds to them.",
            fix: "Leave it out: gradients that are `None` are not read.",
            explanation: "It keeps the memory of all gradients over the forward.",
            runs: Unchanged(
                "p = torch.nn.Parameter(torch.ones(2, device='tpu'))\no = torch.optim.SGD([p], lr=0.5)\np.sum().backward()\no.zero_grad(set_to_none=False)\nassert p.grad.tolist() == [0.0, 0.0]",
            ),
            effort: Edit,
            when: &[When::Keyword(&["set_to_none"], |value, call| {
                (is_false(value) && last(&call.call.func) == Some("zero_grad"))
                    .then(|| Hit::at(value).named("set_to_none=False"))
            })],
            bad: &[Py("import torch\ndef f(opt):\n    opt.zero_grad(set_to_none=False)\n")],
            good: &[Py("import torch\ndef f(opt):\n    opt.zero_grad()\n")],
            ..Rule::BASE
        },
        Rule {
            id: "PER011",
            name: "fused=True",
            severity: Note,
            sentence: "`{}` asks for CUDA's fused kernel.",
            fix: "Leave it out; the step becomes one program anyway.",
            explanation: "Devices other than CUDA and the CPU may refuse `fused=True`.",
            runs: Unchanged(
                "p = torch.nn.Parameter(torch.ones(2, device='tpu'))\no = torch.optim.AdamW([p], lr=0.5, fused=True)\np.sum().backward()\no.step()\nassert p.grad.tolist() == [1.0, 1.0] and p[0].item() != 1",
            ),
            effort: Edit,
            when: &[When::Keyword(&["fused"], |value, call| {
                optimizer_option(value, call, "fused=True", is_true)
            })],
            bad: &[Py("import torch\no = torch.optim.AdamW([], fused=True)\n")],
            good: &[Py("import torch\no = torch.optim.AdamW([])\n")],
            ..Rule::BASE
        },
    ],
};
