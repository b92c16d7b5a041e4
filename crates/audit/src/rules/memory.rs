//! Memory: what looks below tensors, or asks the allocator.

use ruff_python_ast::{Expr, Operator, Stmt};

use crate::python::{Call, Compared, Hit, Model, is_true};
use crate::rule::Effort::{Edit, None as Nothing, Rework};
use crate::rule::Example::{File, Py};
use crate::rule::Runs::Unchanged;
use crate::rule::Severity::{Error, Note};
use crate::rule::{Family, Rule, When};

fn of_tensor(call: &Call<'_, '_>) -> Option<Hit> {
    call.model.uses_torch().then(|| call.perhaps_tensor()).flatten()?;
    call.hit()
}

/// An address that is more than compared, a key or shown.
fn address(call: &Call<'_, '_>) -> Option<Hit> {
    (call.model.compared() == Compared::No).then(|| of_tensor(call)).flatten()
}

fn of_sure_tensor(call: &Call<'_, '_>) -> Option<Hit> {
    call.tensor()?;
    call.hit()
}

/// Sums of losses that keep their graphs.
fn keeps_graph(stmt: &Stmt, model: &Model<'_>) -> Option<Hit> {
    let Stmt::AugAssign(assign) = stmt else { return None };
    let (Expr::Name(sum), Expr::Name(value)) = (&*assign.target, &*assign.value) else { return None };
    let loss = model.is_loss(value.id.as_str()) && !model.is_loss(sum.id.as_str());
    let older = model.is_older_than_loop(sum.id.as_str());
    (assign.op == Operator::Add && loss && older && model.in_training_loop()).then(|| Hit::at(stmt))
}

fn collect_in_loop(call: &Call<'_, '_>) -> Option<Hit> {
    (call.model.in_step() && call.model.trains()).then(|| call.hit()).flatten()
}

pub(crate) static FAMILY: Family = Family {
    prefix: "MEM",
    name: "memory",
    about: "What looks below tensors, at storages and addresses, or steers an allocator.",
    rules: &[
        Rule {
            id: "MEM001",
            name: "as_strided",
            severity: Note,
            sentence: "`{}` reads by strides, which XLA does not have: it may become a gather.",
            fix: "Say it with `unfold`, `view`, `expand`, `diagonal` or slices, which are free.",
            explanation: "The result and its aliasing are exactly PyTorch's. Strides that are those of slices, transposes and reshapes cost nothing.",
            runs: Unchanged(
                "x = torch.arange(6.0, device='tpu')\ny = x.as_strided((2, 2), (1, 2))\nassert y.tolist() == [[0.0, 2.0], [1.0, 3.0]]\ny.add_(1)\nassert x.tolist() == [1.0, 2.0, 3.0, 4.0, 4.0, 5.0]",
            ),
            when: &[
                When::Call(&["torch.as_strided"], |call| call.hit()),
                When::Method(&["as_strided", "as_strided_"], of_tensor),
            ],
            bad: &[Py("import torch\ndef f(x):\n    return x.as_strided((2, 2), (1, 1))\n")],
            good: &[
                Py("import torch\nimport numpy as np\ny = np.lib.stride_tricks.as_strided(np.ones(3))\n"),
                Py("import torch\ndef f(x):\n    return x.unfold(0, 2, 1)\n"),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "MEM002",
            name: "storage",
            severity: Note,
            sentence: "`{}` takes the memory below a tensor; its bytes are not where Python could read them.",
            fix: "Work with tensors; for sizes there is `x.untyped_storage().nbytes()`, to compare memory `x.untyped_storage()._cdata`.",
            explanation: "Size, identity and `resize_` of a storage work. What reads bytes copies to the host.",
            runs: Unchanged(
                "x = torch.ones(4, device='tpu')\nassert x.untyped_storage().nbytes() == 16 and x.view(2, 2).untyped_storage()._cdata == x.untyped_storage()._cdata",
            ),
            effort: Nothing,
            when: &[When::Method(&["storage", "untyped_storage", "_typed_storage"], of_tensor)],
            bad: &[Py("import torch\ndef f(x):\n    return x.storage().size()\n")],
            good: &[Py("import torch\nx = torch.ones(2).numel()\n")],
            ..Rule::BASE
        },
        Rule {
            id: "MEM003",
            name: "resize_ and set_",
            severity: Note,
            sentence: "`{}` changes the memory of a tensor in place.",
            fix: "Make a new tensor; what nobody sees any more is given to the next result by itself.",
            explanation: "It works as in PyTorch, also for FSDP's flat parameters.",
            runs: Unchanged(
                "x = torch.ones(2, device='tpu')\nx.resize_(3).fill_(2)\nassert x.tolist() == [2.0, 2.0, 2.0]",
            ),
            effort: Nothing,
            when: &[When::Method(&["resize_", "resize_as_", "set_"], of_sure_tensor)],
            bad: &[Py("import torch\nx = torch.ones(2)\nx.resize_(4)\n")],
            good: &[Py("import torch\ndef f(image):\n    return image.resize((2, 2))\n")],
            ..Rule::BASE
        },
        Rule {
            id: "MEM004",
            name: "data_ptr",
            severity: Error,
            sentence: "`{}` is an address; of the device's memory it is a name and nothing to read from.",
            fix: "To tell whether two tensors share memory, compare `x.untyped_storage()._cdata`; kernels that want an address are CUDA's and have to be replaced.",
            explanation: "Values are immutable buffers that XLA places. What `data_ptr()` gives is the same for tensors of the same memory and different for others, so comparing it and using it as a key works, and is not reported.",
            effort: Rework,
            when: &[When::Method(&["data_ptr"], address)],
            bad: &[
                Py("import torch\ndef f(x):\n    return x.data_ptr()\n"),
                Py("import ctypes, torch\ndef f(x, kernel):\n    kernel(ctypes.c_void_p(x.data_ptr()))\n"),
            ],
            good: &[
                Py("import torch\ndef f(x):\n    return x.untyped_storage()._cdata\n"),
                Py("import torch\ndef f(x, y):\n    return x.data_ptr() == y.data_ptr()\n"),
                Py(
                    "import torch\ndef f(xs):\n    seen, of = set(), {}\n    for x in xs:\n        seen.add(x.data_ptr())\n        of[x.data_ptr()] = x\n    return len({x.data_ptr() for x in xs}), {x.data_ptr(): x for x in xs}\n",
                ),
            ],
            ..Rule::BASE
        },
        Rule {
            id: "MEM005",
            name: "CUDA allocator settings",
            severity: Note,
            sentence: "`{}` steers CUDA's caching allocator and has no effect on the device.",
            fix: "Remove it; XLA plans the memory of a program when it compiles. `oxitorch preflight` says what a step needs.",
            explanation: "There is no fragmentation within a program, whose buffers are laid out by the compiler.",
            runs: Unchanged(
                "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'\nassert torch.ones(2, device='tpu').sum().item() == 2",
            ),
            effort: Nothing,
            when: &[When::Variable(&[
                "PYTORCH_CUDA_ALLOC_CONF",
                "PYTORCH_NO_CUDA_MEMORY_CACHING",
                "PYTORCH_ALLOC_CONF",
            ])],
            bad: &[
                Py(
                    "import os\nimport torch\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'\n",
                ),
                File("run.sh", "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128\n"),
            ],
            good: &[Py("import os\nimport torch\nos.environ['X'] = 'PYTORCH'\n")],
            ..Rule::BASE
        },
        Rule {
            id: "MEM006",
            name: "sum of losses with their graphs",
            sentence: "`{}` keeps the graph of every step's loss, and with it its activations.",
            fix: "Add `loss.detach()`.",
            explanation: "The sum is a tensor with a gradient, so nothing that the losses were computed from can be freed until it goes. `.item()` helps too, and waits in each step.",
            runs: Unchanged(
                "p = torch.ones(2, device='tpu', requires_grad=True)\ntotal = 0\nfor _ in range(3):\n    loss = (p * 2).sum()\n    loss.backward()\n    total += loss\nassert total.item() == 12",
            ),
            effort: Edit,
            when: &[When::Statement(keeps_graph)],
            bad: &[Py(
                "import torch\ndef train(loader, model, opt):\n    total = 0\n    for x in loader:\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        total += loss\n",
            )],
            good: &[Py(
                "import torch\ndef train(loader, model, opt):\n    total = 0\n    for x in loader:\n        loss = model(x).sum()\n        loss.backward()\n        opt.step()\n        total += loss.detach()\n",
            )],
            ..Rule::BASE
        },
        Rule {
            id: "MEM007",
            name: "retain_graph",
            severity: Note,
            sentence: "`{}` keeps all activations after the backward.",
            fix: "Add the losses and go backward once.",
            explanation: "Two backward passes over one graph compute its shared part twice as well.",
            runs: Unchanged(
                "p = torch.ones(2, device='tpu', requires_grad=True)\nloss = (p * 2).sum()\nloss.backward(retain_graph=True)\nloss.backward()\nassert p.grad.tolist() == [4.0, 4.0]",
            ),
            when: &[When::Keyword(&["retain_graph"], |value, _| {
                is_true(value).then(|| Hit::at(value).named("retain_graph=True"))
            })],
            bad: &[Py("import torch\ndef f(loss):\n    loss.backward(retain_graph=True)\n")],
            good: &[Py("import torch\ndef f(loss):\n    loss.backward()\n")],
            ..Rule::BASE
        },
        Rule {
            id: "MEM008",
            name: "garbage collection in the loop",
            severity: Note,
            sentence: "`{}` walks all of Python's objects in each step.",
            fix: "Remove it; tensors go when their last name goes.",
            explanation: "It is written beside `empty_cache` against fragmentation, which there is not.",
            runs: Unchanged("import gc\ngc.collect()\nassert torch.ones(2, device='tpu').sum().item() == 2"),
            effort: Edit,
            when: &[When::Call(&["gc.collect"], collect_in_loop)],
            bad: &[Py(
                "import gc, torch\ndef train(loader, model, opt):\n    for x in loader:\n        model(x).sum().backward()\n        opt.step()\n        gc.collect()\n",
            )],
            good: &[Py("import gc, torch\ngc.collect()\n")],
            ..Rule::BASE
        },
        Rule {
            id: "MEM009",
            name: "tensor shared between processes",
            severity: Note,
            sentence: "`{}` shares memory between processes, which tensors of the device cannot.",
            fix: "Share CPU tensors, and copy to the device in each process.",
            explanation: "Of a model that is on the CPU still it works; the device has no memory that two processes see.",
            runs: Unchanged("x = torch.ones(2).share_memory_()\nassert x.to('tpu').sum().item() == 2"),
            when: &[When::Method(&["share_memory_", "share_memory"], |call| {
                call.model.uses_torch().then(|| call.hit()).flatten()
            })],
            bad: &[Py("import torch\nmodel = torch.nn.Linear(2, 2)\nmodel.share_memory()\n")],
            good: &[Py("import torch\nx = torch.ones(2).contiguous()\n")],
            ..Rule::BASE
        },
    ],
};
