//! Data: loaders, workers, and copies to the device.

use ruff_python_ast::Expr;

use crate::python::{Call, Hit, is_true, last, text};
use crate::rule::Effort::{Edit, None as Nothing, Rework};
use crate::rule::Example::{File, Py};
use crate::rule::Runs::Unchanged;
use crate::rule::Severity::{Error, Note};
use crate::rule::{Family, Rule, When};

fn no_workers(call: &Call<'_, '_>) -> Option<Hit> {
    let trains = call.argument("shuffle", 2).is_some_and(is_true);
    let workers = call.argument("num_workers", 5);
    let none = workers.is_none_or(|w| call.model.number(w) == Some(0));
    (trains && none && !call.model.is_test() && !call.takes_any() && call.model.trains())
        .then(|| call.hit())
        .flatten()
}

fn moved_in_dataset(call: &Call<'_, '_>) -> Option<Hit> {
    if !call.model.in_dataset() || !call.model.uses_torch() || !call.path.is_empty() {
        return None;
    }
    let name = last(&call.call.func)?;
    let moves = match name {
        "cuda" | "tpu" => true,
        "to" => {
            let first = call.first().or(call.keyword("device"))?;
            let named = last(first).is_some_and(|n| n.to_ascii_lowercase().contains("device"));
            named || text(first).is_some_and(|t| t.starts_with("cuda") || t.starts_with("tpu"))
        }
        _ => false,
    };
    moves.then(|| call.hit()).flatten()
}

fn device_keyword(value: &Expr, call: &Call<'_, '_>) -> Option<Hit> {
    let named = text(value).is_some_and(|t| t.starts_with("cuda"));
    (named && last(&call.call.func).is_some_and(|n| n.ends_with("DataLoader"))).then(|| Hit::at(value))
}

pub(crate) static FAMILY: Family = Family {
    prefix: "DAT",
    name: "data",
    about: "Loaders, their workers, and what copies batches to the device.",
    rules: &[
        Rule {
            id: "DAT001",
            name: "memory pinned for CUDA",
            severity: Error,
            sentence: "`{}` pins memory for CUDA.",
            fix: "Leave it out, or name \"tpu\".",
            explanation: "`pin_memory=True` alone follows the device that is there and may stay.",
            effort: Edit,
            when: &[
                When::Keyword(&["pin_memory_device"], device_keyword),
                When::Method(&["pin_memory"], |call| {
                    call.first()
                        .and_then(text)
                        .is_some_and(|t| t.starts_with("cuda"))
                        .then(|| call.hit())
                        .flatten()
                }),
            ],
            bad: &[Py(
                "from torch.utils.data import DataLoader\nl = DataLoader([], pin_memory_device='cuda')\n",
            )],
            good: &[Py("from torch.utils.data import DataLoader\nl = DataLoader([], pin_memory=True)\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DAT002",
            name: "loader without workers",
            severity: Note,
            sentence: "`{}` makes batches in the thread that records, so the device waits for them.",
            fix: "Pass `num_workers`, as many as there are cores to spare, and `persistent_workers=True`.",
            explanation: "Where samples are in memory already it makes no difference. `torch.tpu.metrics_summary()` says how much of a step was input.",
            runs: Unchanged(
                "from torch.utils.data import DataLoader, TensorDataset\nloader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, shuffle=True)\nassert sum(x.to('tpu').sum().item() for x, in loader) == 6",
            ),
            effort: Edit,
            when: &[When::Call(&["torch.utils.data.DataLoader"], no_workers)],
            bad: &[Py(
                "from torch.utils.data import DataLoader\ndef f(d, model, opt):\n    loader = DataLoader(d, batch_size=8, shuffle=True, drop_last=True)\n    for x in loader:\n        model(x).sum().backward()\n        opt.step()\n",
            )],
            good: &[Py(
                "from torch.utils.data import DataLoader\nl = DataLoader([], batch_size=8, shuffle=True, num_workers=4, drop_last=True)\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "DAT003",
            name: "device within a dataset",
            sentence: "`{}` moves data to the device where it is read, which worker processes cannot do.",
            fix: "Return CPU tensors, and move the batch once in the loop.",
            explanation: "Workers are forked or spawned processes, in which the device cannot be used; and a copy of a sample costs as much as one of a batch.",
            runs: Unchanged(
                "class D(torch.utils.data.Dataset):\n    def __len__(self):\n        return 2\n    def __getitem__(self, i):\n        return torch.tensor(i).to('tpu')\nassert sum(x.sum().item() for x in torch.utils.data.DataLoader(D(), batch_size=2)) == 1",
            ),
            when: &[When::Method(&["cuda", "tpu", "to"], moved_in_dataset)],
            bad: &[Py(
                "import torch\nclass D(torch.utils.data.Dataset):\n    def __getitem__(self, i):\n        return torch.ones(2).to(self.device)\n",
            )],
            good: &[Py(
                "import torch\nclass D(torch.utils.data.Dataset):\n    def __getitem__(self, i):\n        return torch.ones(2).to(torch.float32)\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "DAT004",
            name: "DALI",
            severity: Error,
            sentence: "`{}` is NVIDIA's DALI, which decodes and augments on GPUs.",
            fix: "Use `torch.utils.data.DataLoader` with workers, and torchvision's transforms (v2).",
            explanation: "The host of a TPU slice has many cores for it.",
            effort: Rework,
            when: &[When::Name(&["nvidia.dali.*"]), When::Package(&["nvidia-dali*"])],
            bad: &[
                Py("from nvidia.dali import pipeline_def\n"),
                File("requirements.txt", "nvidia-dali-cuda120\n"),
            ],
            good: &[Py("import torchvision.transforms.v2 as T\nimport torch\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DAT005",
            name: "prefetcher with streams",
            severity: Note,
            sentence: "`{}` keeps memory for a CUDA stream.",
            fix: "Remove the prefetcher: a copy to the device waits for nobody, and the step before runs meanwhile.",
            explanation: "`record_stream` tells CUDA's allocator who uses a tensor. Here a buffer lives as long as programs that read it.",
            runs: Unchanged(
                "x = torch.ones(2, device='tpu')\nx.record_stream(torch.tpu.current_stream())\nassert x.sum().item() == 2",
            ),
            effort: Nothing,
            when: &[When::Method(&["record_stream"], |call| {
                call.model.uses_torch().then(|| call.hit()).flatten()
            })],
            bad: &[Py("import torch\ndef f(x, s):\n    x.record_stream(s)\n")],
            good: &[Py("import torch\ndef f(x):\n    x.record('stream')\n")],
            ..Rule::BASE
        },
        Rule {
            id: "DAT006",
            name: "random size of samples",
            severity: Note,
            sentence: "`{}` draws a random size for each sample, which a batch then pads or cuts.",
            fix: "Crop to one size (`RandomResizedCrop`) at the end of the transforms.",
            explanation: "Samples of many sizes make batches of many shapes, unless all are cut to one size.",
            runs: Unchanged(
                "import torchvision.transforms.v2 as T\nx = T.RandomShortestSize(min_size=[4, 6])(torch.zeros(3, 8, 8))\nassert min(x.to('tpu').shape[1:]) in (4, 6)",
            ),
            effort: Edit,
            when: &[When::Call(
                &[
                    "torchvision.transforms.v2.RandomShortestSize",
                    "torchvision.transforms.v2.RandomResize",
                    "torchvision.transforms.v2.ScaleJitter",
                ],
                |call| call.hit(),
            )],
            bad: &[Py(
                "import torchvision.transforms.v2 as T\nimport torch\nt = T.RandomShortestSize(min_size=[480, 512])\n",
            )],
            good: &[Py(
                "import torchvision.transforms.v2 as T\nimport torch\nt = T.RandomResizedCrop(224)\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "DAT007",
            name: "tensor per element",
            sentence: "`{}` makes a tensor on the device of Python's numbers in each step.",
            fix: "Make it once before the loop, or of a NumPy array or a tensor of the batch.",
            explanation: "Each is a copy to the device of its own. What changes from step to step by a rule is computed there: `torch.arange`.",
            runs: Unchanged("assert torch.tensor([1, 2], device='tpu').sum().item() == 3"),
            severity: Note,
            effort: Edit,
            when: &[When::Call(&["torch.tensor", "torch.as_tensor"], |call| {
                let listed = matches!(call.first()?, Expr::List(l) if !l.elts.is_empty())
                    || matches!(call.first()?, Expr::ListComp(_));
                let there = call.keyword("device").is_some();
                (listed && there && call.model.in_step()).then(|| call.hit()).flatten()
            })],
            bad: &[Py(
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x * torch.tensor([1.0, 2.0], device=x.device)\n",
            )],
            good: &[Py("import torch\nw = torch.tensor([1.0, 2.0], device='tpu')\n")],
            ..Rule::BASE
        },
    ],
};
