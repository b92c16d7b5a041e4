//! Shapes that vary: each new shape is a program to compile.

use ruff_python_ast::{Expr, Stmt, UnaryOp};
use ruff_text_size::Ranged;

use crate::python::{Call, Hit, Kind, Model, is_false, is_true, last, text};
use crate::rule::Effort::Edit;
use crate::rule::Example::{File, Py};
use crate::rule::Runs::Unchanged;
use crate::rule::Severity::Note;
use crate::rule::{Family, Rule, When};

fn no_drop_last(call: &Call<'_, '_>) -> Option<Hit> {
    let shuffled = call.argument("shuffle", 2).is_some_and(is_true);
    let batches = call.keyword("batch_sampler").is_some()
        || call.argument("batch_size", 1).is_some_and(Expr::is_none_literal_expr);
    let dropped = call.argument("drop_last", 8);
    // Of batches of one none is smaller.
    let one = call.argument("batch_size", 1).is_some_and(|b| call.model.number(b) == Some(1));
    (shuffled
        && !one
        && !call.model.is_test()
        && !batches
        && !call.takes_any()
        && dropped.is_none_or(is_false))
    .then(|| call.hit())
    .flatten()
}

fn tensor_method(call: &Call<'_, '_>) -> Option<Hit> {
    let step = call.model.in_step();
    let sure = call.receiver().is_some_and(|r| call.model.kind(r) == Kind::Tensor);
    (step && (sure || call.tensor().is_some())).then(|| call.hit()).flatten()
}

fn in_step(call: &Call<'_, '_>) -> Option<Hit> {
    // What is on the host waits for nothing.
    let host = call.first().is_some_and(|e| matches!(call.model.kind(e), Kind::Host | Kind::Numpy));
    (!host && call.model.in_step()).then(|| call.hit()).flatten()
}

fn where_alone(call: &Call<'_, '_>) -> Option<Hit> {
    let alone = call.call.arguments.args.len() == 1 && call.call.arguments.keywords.is_empty();
    if alone { in_step(call) } else { None }
}

/// Whether an expression is surely a mask: a comparison, or its negation, of tensors.
fn is_mask(expr: &Expr, model: &Model<'_>) -> bool {
    match expr {
        Expr::Compare(_) => model.kind(expr).has_tensor_methods(),
        Expr::UnaryOp(op) if op.op == UnaryOp::Invert => model.kind(&op.operand) == Kind::Tensor,
        Expr::BinOp(op) => {
            matches!(op.op, ruff_python_ast::Operator::BitAnd | ruff_python_ast::Operator::BitOr)
                && (is_mask(&op.left, model) || is_mask(&op.right, model))
        }
        Expr::Name(n) => n.id.as_str().ends_with("mask") && model.kind(expr) == Kind::Tensor,
        _ => false,
    }
}

fn by_mask(expr: &Expr, model: &Model<'_>) -> Option<Hit> {
    let Expr::Subscript(index) = expr else { return None };
    let read = matches!(index.ctx, ruff_python_ast::ExprContext::Load);
    (read && model.in_step() && is_mask(&index.slice, model) && model.kind(&index.value).has_tensor_methods())
        .then(|| Hit::at(expr))
}

fn grows(stmt: &Stmt, model: &Model<'_>) -> Option<Hit> {
    let Stmt::Assign(assign) = stmt else { return None };
    let (Expr::Call(call), [Expr::Name(target)]) = (&*assign.value, &*assign.targets) else { return None };
    let joins = model.path(&call.func).is_some_and(|p| {
        matches!(
            p.as_str(),
            "torch.cat" | "torch.concat" | "torch.hstack" | "torch.vstack" | "torch.concatenate"
        )
    });
    let parts = match call.arguments.args.first()? {
        Expr::List(l) => &l.elts,
        Expr::Tuple(t) => &t.elts,
        _ => return None,
    };
    let itself = parts.iter().any(|p| matches!(p, Expr::Name(n) if n.id == target.id));
    let name = target.id.as_str();
    // What is made anew between is no sequence that grows.
    // In a forward the rounds are layers or parts of a batch, as many in each step.
    let grows = model.is_older_than_loop(name)
        && !model.is_assigned_again(name)
        && !model.in_forward()
        && !model.in_dataset_class();
    (joins && itself && grows).then(|| Hit::at(call))
}

fn pads_to_longest(value: &Expr, call: &Call<'_, '_>) -> Option<Hit> {
    let tokens = last(&call.call.func)
        .is_some_and(|n| n.to_ascii_lowercase().contains("token") || n == "pad" || n == "batch_encode_plus")
        || call.path.starts_with("transformers.DataCollator");
    let longest = is_true(value) || text(value) == Some("longest");
    let rounded = call.keyword("pad_to_multiple_of").is_some();
    // Of one text there is nothing to pad.
    let one = matches!(call.first(), Some(Expr::Name(n)) if {
        let name = n.id.as_str();
        call.model.elements.contains(&name) && !name.contains("batch") && !name.ends_with('s')
    });
    (tokens && longest && !rounded && !one).then(|| call.hit()).flatten()
}

fn slice_by_value(expr: &Expr, model: &Model<'_>) -> Option<Hit> {
    let Expr::Subscript(index) = expr else { return None };
    let reads = |e: &Expr| match e {
        Expr::Call(c) if matches!(&*c.func, Expr::Attribute(f) if f.attr.as_str() == "item") => true,
        other => model.kind(other) == Kind::Tensor,
    };
    // From a value to that value and so many more is always as long.
    let cut = |e: &Expr| {
        let Expr::Slice(s) = e else { return false };
        s.upper.as_deref().is_some_and(reads) != s.lower.as_deref().is_some_and(reads)
    };
    let any = match &*index.slice {
        Expr::Tuple(t) => t.elts.iter().any(cut),
        other => cut(other),
    };
    (any && model.in_step() && model.kind(&index.value).has_tensor_methods()).then(|| Hit::at(expr))
}

fn varying_size(call: &Call<'_, '_>) -> Option<Hit> {
    // What torchvision resizes is an image on the host, of which a part of one size is taken then.
    let follows = call.path.starts_with("torch.");
    let random = |e: &Expr| {
        let source = call.model.source(e.range());
        ["random.", "randint", "choice("].iter().any(|w| source.contains(w))
            || follows && call.model.is_random(e)
    };
    let named = call.call.arguments.keywords.iter();
    let named = named.filter(|k| k.arg.as_ref().is_some_and(|a| a == "size" || a == "scale_factor"));
    let arguments = call.call.arguments.args.iter().skip(1).take(2).chain(named.map(|k| &k.value));
    arguments.into_iter().any(random).then(|| call.hit()).flatten()
}

pub(crate) static FAMILY: Family = Family {
    prefix: "SHP",
    name: "shapes",
    about: "Shapes that vary or depend on values. Each new shape is a program to compile, and a size that depends on a value has to be read first.",
    rules: &[
        Rule {
            id: "SHP001",
            name: "loader without drop_last",
            sentence: "The last batch of `{}` may be smaller, which is another shape to compile.",
            fix: "Pass `drop_last=True` for training; for evaluation pad the last batch.",
            explanation: "One short batch at the end of each epoch compiles forward, backward and optimizer again, once. `--fix` leaves it alone, since it changes which samples are seen. Loaders that do not shuffle are taken for evaluation and not reported.",
            runs: Unchanged(
                "from torch.utils.data import DataLoader, TensorDataset\nloader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2, shuffle=True)\nassert sum(x.to('tpu').sum().item() for x, in loader) == 10",
            ),
            effort: Edit,
            when: &[When::Call(&["torch.utils.data.DataLoader"], no_drop_last)],
            bad: &[
                Py(
                    "from torch.utils.data import DataLoader\ndef f(d):\n    return DataLoader(d, batch_size=8, shuffle=True)\n",
                ),
                Py("import torch\nl = torch.utils.data.DataLoader([], 4, True)\n"),
            ],
            good: &[
                Py(
                    "from torch.utils.data import DataLoader\ndef f(d, **k):\n    a = DataLoader(d, batch_size=8, shuffle=True, drop_last=True)\n    b = DataLoader(d, batch_size=8)\n    c = DataLoader(d, batch_size=1, shuffle=True)\n    return DataLoader(d, shuffle=True, **k)\n",
                ),
                File(
                    "tests/test_train.py",
                    "from torch.utils.data import DataLoader\ndef test(d):\n    return DataLoader(d, batch_size=16, shuffle=True)\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "SHP002",
            name: "nonzero",
            sentence: "`{}` has as many rows as values say, so it waits, and each number of rows is a program.",
            fix: "Use the mask itself: `torch.where(mask, a, b)`, or a product with it; `torch.nonzero_static` for a size that is chosen.",
            explanation: "`torch.where(mask)` with one argument is the same operation.",
            runs: Unchanged(
                "x = torch.tensor([0, 2, 0, 3], device='tpu')\nassert x.nonzero().tolist() == [[1], [3]] and torch.where(x)[0].tolist() == [1, 3]",
            ),
            when: &[
                When::Call(&["torch.nonzero", "torch.argwhere"], in_step),
                When::Call(&["torch.where"], where_alone),
                When::Method(&["nonzero", "argwhere"], tensor_method),
            ],
            bad: &[
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x[torch.nonzero(x > 0)]\n",
                ),
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        i, j = torch.where(x > 0)\n        return i\n",
                ),
            ],
            good: &[
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return torch.where(x > 0, x, 0)\n",
                ),
                Py("import torch\ny = torch.nonzero(torch.ones(2))\n"),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "SHP003",
            name: "boolean index",
            sentence: "`{}` takes as many elements as the mask has, so it waits, and each number is a program.",
            fix: "Keep the shape: `torch.where(mask, x, 0)`, `masked_fill`, or a loss with weights or `ignore_index`.",
            explanation: "A mean over a mask is `(x * mask).sum() / mask.sum()`. Writing through a mask (`x[mask] = 0`) keeps the shape and is not reported.",
            runs: Unchanged("x = torch.arange(4, device='tpu')\nassert x[x > 1].tolist() == [2, 3]"),
            when: &[When::Index(by_mask)],
            bad: &[
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x[x > 0]\n",
                ),
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, x: torch.Tensor, y: torch.Tensor):\n        mask = y.ne(0)\n        return x[mask].sum()\n",
                ),
            ],
            good: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x, i):\n        x[x > 0] = 0\n        return x[i] + x[:, 0]\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "SHP004",
            name: "unique",
            sentence: "`{}` gives as many elements as differ, so it waits, and each number is a program.",
            fix: "Sort and mark what differs from its neighbour, or do it on the host with the data.",
            explanation: "`torch.bincount` without `minlength`, and with a larger value than before, is the same.",
            runs: Unchanged("assert torch.tensor([3, 1, 3], device='tpu').unique().tolist() == [1, 3]"),
            when: &[
                When::Call(&["torch.unique", "torch.unique_consecutive", "torch.bincount"], in_step),
                When::Method(&["unique", "unique_consecutive", "bincount"], tensor_method),
            ],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return torch.unique(x).shape[0]\n",
            )],
            good: &[
                Py("import torch\nn = torch.unique(torch.ones(2))\n"),
                Py(
                    "import torch\nclass M(torch.nn.Module):\n    def forward(self, xs):\n        return torch.unique(torch.tensor([x.shape[0] for x in xs]))\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "SHP005",
            name: "masked_select",
            sentence: "`{}` takes as many elements as the mask has, so it waits, and each number is a program.",
            fix: "Keep the shape: `torch.where(mask, x, 0)`, and divide sums by `mask.sum()`.",
            explanation: "The same as a boolean index.",
            runs: Unchanged(
                "x = torch.arange(4, device='tpu')\nassert torch.masked_select(x, x > 1).tolist() == [2, 3]",
            ),
            when: &[
                When::Call(&["torch.masked_select"], in_step),
                When::Method(&["masked_select"], tensor_method),
            ],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x.masked_select(x > 0)\n",
            )],
            good: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x.masked_fill(x > 0, 0)\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "SHP006",
            name: "tensor that grows",
            sentence: "`{}` makes a longer tensor in each round, and each length is a program.",
            fix: "Allocate it once at its full length and write slices (`out[:, t] = x`), or collect a list and join it once.",
            explanation: "Writing at another place is no new program in oxitorch: where a slice begins is a number that the program takes.",
            runs: Unchanged(
                "x = torch.zeros(1, device='tpu')\nfor i in range(3):\n    x = torch.cat([x, x[-1:] + 1])\nassert x.tolist() == [0.0, 1.0, 2.0, 3.0]",
            ),
            when: &[When::Statement(grows)],
            bad: &[Py(
                "import torch\ndef generate(x, n):\n    for _ in range(n):\n        x = torch.cat((x, x[:, -1:]), dim=1)\n    return x\n",
            )],
            good: &[Py(
                "import torch\ndef f(parts):\n    for p in parts:\n        x = torch.cat([p, p])\n    x = torch.cat([x, x])\n    return x\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "SHP007",
            name: "padding to the longest",
            sentence: "`{}` pads to the longest of each batch, so each length is a program.",
            fix: "Pad to few lengths: `pad_to_multiple_of=128`, `padding=\"max_length\"`, or `oxitorch.data.bucketize` and `pad_collate`.",
            explanation: "docs/varying-shapes.md has what it costs and how to choose lengths with the least padding.",
            runs: Unchanged(
                "from torch.nn.utils.rnn import pad_sequence\nx = pad_sequence([torch.ones(2), torch.ones(3)], batch_first=True).to('tpu')\nassert x.sum().item() == 5",
            ),
            when: &[
                When::Keyword(&["padding"], pads_to_longest),
                When::Call(&["torch.nn.utils.rnn.pad_sequence"], |call| {
                    (call.model.in_step() || call.model.in_dataset()).then(|| call.hit()).flatten()
                }),
                When::Call(
                    &[
                        "transformers.DataCollatorWithPadding",
                        "transformers.DataCollatorForSeq2Seq",
                        "transformers.DataCollatorForLanguageModeling",
                    ],
                    |call| {
                        let fixed =
                            call.keyword("pad_to_multiple_of").is_some_and(|v| !v.is_none_literal_expr())
                                || call.keyword("padding").is_some();
                        (!fixed).then(|| call.hit()).flatten()
                    },
                ),
            ],
            bad: &[
                Py(
                    "import transformers\ndef f(tokenizer, texts):\n    return tokenizer(texts, padding=True, return_tensors='pt')\n",
                ),
                Py(
                    "import transformers\ndef f(tokenizer, batches):\n    return [tokenizer(batch, padding=True) for batch in batches]\n",
                ),
                Py(
                    "from torch.nn.utils.rnn import pad_sequence\ndef collate(batch):\n    return pad_sequence(batch)\n",
                ),
            ],
            good: &[
                Py(
                    "import transformers\ndef f(tokenizer, texts):\n    return tokenizer(texts, padding='max_length', max_length=128)\n",
                ),
                Py(
                    "import transformers\ndef f(tokenizer, texts):\n    return [tokenizer(text, padding='longest') for text in texts]\n",
                ),
                Py("import torch\nc = torch.nn.Conv2d(1, 1, 3, padding=True)\n"),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "SHP008",
            name: "slice whose length is a value",
            sentence: "`{}` has a length that is read from the device, so it waits, and each length is a program.",
            fix: "Keep the full length and mask what is behind.",
            explanation: "Where a slice begins may vary for free, if its length stays.",
            runs: Unchanged(
                "x = torch.arange(4, device='tpu')\nn = torch.tensor(2, device='tpu')\nassert x[:n.item()].tolist() == [0, 1]",
            ),
            when: &[When::Index(slice_by_value)],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x, n):\n        return x[:, :n.max()]\n",
            )],
            good: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x[:, :x.shape[0]]\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "SHP009",
            name: "packed sequences",
            sentence: "`{}` has as many rows of data as each batch has elements: what computes with them is a program for each number.",
            fix: "Give `pad_packed_sequence` the length of the padded batch, `total_length`, pad batches to a few lengths, and compute with padded tensors.",
            explanation: "Packing, `nn.LSTM`, `nn.GRU`, `nn.RNN` and padding again are the same programs for all lengths in a padded batch of one size.",
            runs: Unchanged(
                "from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence\nx = torch.ones(2, 3, 1, device='tpu')\np = pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)\nassert pad_packed_sequence(p, batch_first=True)[0].sum().item() == 5",
            ),
            when: &[When::Call(
                &["torch.nn.utils.rnn.pack_padded_sequence", "torch.nn.utils.rnn.pack_sequence"],
                |call| call.hit(),
            )],
            bad: &[Py(
                "from torch.nn.utils.rnn import pack_padded_sequence\ndef f(x, n):\n    return pack_padded_sequence(x, n)\n",
            )],
            good: &[Py("import torch\nlstm = torch.nn.LSTM(2, 2)\n")],
            ..Rule::BASE
        },
        Rule {
            id: "SHP010",
            name: "resolution that varies",
            sentence: "`{}` makes images of another size each time, and each size is a program.",
            fix: "Choose from few sizes: `oxitorch.data.resolution_buckets`.",
            explanation: "Training with several scales compiles once for each scale; with any scale it never stops.",
            runs: Unchanged(
                "x = torch.ones(1, 1, 4, 4, device='tpu')\nassert torch.nn.functional.interpolate(x, size=(6, 6)).sum().item() == 36",
            ),
            when: &[When::Call(
                &["torch.nn.functional.interpolate", "torchvision.transforms.functional.resize"],
                varying_size,
            )],
            bad: &[
                Py(
                    "import random\nimport torch.nn.functional as F\ndef f(x):\n    return F.interpolate(x, size=random.choice([224, 256]))\n",
                ),
                Py(
                    "import random\nimport torch.nn.functional as F\ndef f(x):\n    s = random.randrange(320, 640)\n    s = s / max(x.shape[2:])\n    size = [int(n * s) for n in x.shape[2:]]\n    return F.interpolate(x, size=size)\n",
                ),
            ],
            good: &[
                Py(
                    "import torch.nn.functional as F\ndef f(x):\n    return F.interpolate(x, size=(224, 224))\n",
                ),
                Py(
                    "import numpy as np\nimport torch.nn.functional as F\ndef f(x):\n    y = np.random.rand(4, 4)\n    h, w = y.shape\n    return F.interpolate(x, size=(h, w))\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "SHP011",
            name: "cache of keys and values that grows",
            sentence: "`{}`: keys and values are one longer with each token, and each length is a program.",
            fix: "Use a static cache: `cache_implementation=\"static\"` of `generate`, or a buffer of the full length that is written at its position.",
            explanation: "With a static cache generation compiles nothing from its third token on.",
            runs: Unchanged(
                "from transformers import DynamicCache\nx = torch.ones(1, 1, 2, 4, device='tpu')\ncache = DynamicCache()\ncache.update(x, x, 0)\nassert cache.update(x, x, 0)[0].shape == (1, 1, 4, 4)",
            ),
            when: &[
                When::Name(&["transformers.DynamicCache", "transformers.cache_utils.DynamicCache"]),
                When::Call(&["torch.cat", "torch.concat"], |call| {
                    let source = call.model.source(call.first()?.range());
                    [
                        "past_key",
                        "past_value",
                        "layer_past",
                        "k_cache",
                        "v_cache",
                        "past_kv",
                        "cache_k",
                        "cache_v",
                    ]
                    .iter()
                    .any(|w| source.contains(w))
                    .then(|| call.hit())
                    .flatten()
                }),
            ],
            bad: &[
                Py("import torch\ndef f(past_key, k):\n    return torch.cat((past_key, k), dim=-2)\n"),
                Py("from transformers import DynamicCache\n"),
            ],
            good: &[Py("import torch\ndef f(k, v):\n    return torch.cat((k, v), dim=-2)\n")],
            ..Rule::BASE
        },
        Rule {
            id: "SHP012",
            name: "generation with a dynamic cache",
            severity: Note,
            sentence: "`{}` generates with a cache that grows, unless it is told otherwise.",
            fix: "Pass `cache_implementation=\"static\"`.",
            explanation: "transformers' default is a dynamic cache, whose length is another in each step.",
            runs: Unchanged(
                "import transformers\nc = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=None)\nm = transformers.GPT2LMHeadModel(c).to('tpu')\nassert m.generate(torch.zeros(1, 2, dtype=torch.long, device='tpu'), max_new_tokens=1).shape == (1, 3)",
            ),
            effort: Edit,
            when: &[When::Method(&["generate"], |call| {
                let asks = call
                    .keyword("max_new_tokens")
                    .or(call.keyword("max_length"))
                    .or(call.keyword("do_sample"))
                    .is_some();
                let fixed = call.keyword("cache_implementation").is_some()
                    || call.keyword("past_key_values").is_some()
                    || call.keyword("use_cache").is_some_and(is_false);
                (asks && !fixed && !call.takes_any() && call.model.imports("transformers"))
                    .then(|| call.hit())
                    .flatten()
            })],
            bad: &[Py(
                "import transformers\ndef f(model, x):\n    return model.generate(x, max_new_tokens=20)\n",
            )],
            good: &[Py(
                "import transformers\ndef f(model, x):\n    return model.generate(x, max_new_tokens=20, cache_implementation='static')\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "SHP013",
            name: "repeats that are values",
            sentence: "`{}` is as long as the values of a tensor add up to, so it waits, and each length is a program.",
            fix: "Pass `output_size`, if it is known and stays; or a number of repeats.",
            explanation: "With a Python number the length follows from shapes.",
            runs: Unchanged(
                "x = torch.arange(2, device='tpu')\nassert torch.repeat_interleave(x, torch.tensor([1, 2], device='tpu')).tolist() == [0, 1, 1]",
            ),
            when: &[When::Call(&["torch.repeat_interleave"], |call| {
                let values = call.argument("repeats", 1).is_some_and(|e| call.model.kind(e) == Kind::Tensor);
                (values && call.keyword("output_size").is_none()).then(|| call.hit()).flatten()
            })],
            bad: &[Py(
                "import torch\ndef f(x, n: torch.Tensor):\n    return torch.repeat_interleave(x, n)\n",
            )],
            good: &[Py("import torch\ndef f(x):\n    return torch.repeat_interleave(x, 2, dim=0)\n")],
            ..Rule::BASE
        },
        Rule {
            id: "SHP014",
            name: "boxes after suppression",
            severity: Note,
            sentence: "`{}` keeps as many boxes as overlap little, so what follows has a size of its own each time.",
            fix: "Keep a fixed number of boxes with `topk`, and mask the rest.",
            explanation: "The operation itself runs on the device; what it returns has to be counted.",
            runs: Unchanged(
                "import torchvision\nb = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]], device='tpu')\nassert torchvision.ops.nms(b, torch.tensor([1.0, 0.5], device='tpu'), 0.5).tolist() == [0]",
            ),
            when: &[When::Call(
                &[
                    "torchvision.ops.nms",
                    "torchvision.ops.batched_nms",
                    "torchvision.ops.boxes.nms",
                    "torchvision.ops.boxes.batched_nms",
                ],
                |call| call.hit(),
            )],
            bad: &[Py("from torchvision.ops import nms\ndef f(b, s):\n    return nms(b, s, 0.5)\n")],
            good: &[Py("import torchvision\nt = torchvision.ops.box_iou\n")],
            ..Rule::BASE
        },
    ],
};
