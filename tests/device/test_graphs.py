"""Programs of this process: what they are made of, cost, and what the compiler made of them."""

import json
import os

import pytest
import torch
from support import DEVICE, NewGraphs

pytestmark = pytest.mark.usefixtures("fused")


def run(size):
    a = torch.ones(size, 24, device=DEVICE)
    new = NewGraphs()
    for _ in range(2):
        b = a @ a.mT
        c = b.tanh() + 1
        c.sum().item()
        torch.tpu.synchronize()
    return new.take()


def test_a_program_says_what_it_is():
    graph, *_ = run(13)
    assert [op["op"] for op in graph.ops][-4:] == ["mm", "tanh", "add.Tensor", "sum"]
    lines = [op["line"] for op in graph.ops]
    assert all(line.startswith(__file__) for line in lines) and len({*lines}) >= 3
    assert graph.ops[-3]["results"] == ["float32[13, 13]"]
    assert graph.inputs[0] == "float32[13, 24]" and graph.ended_by == "read" and ".py:" in graph.ended_at
    assert "float32[]" in graph.outputs and len(graph.id) == 12 and graph.first_line == lines[0]
    assert graph.launches >= 1 and graph.device_s > 0
    assert graph.origin in ("compiled", "loaded") and graph.compile_s > 0
    assert graph.id in repr(graph) and f"{len(graph.ops)} ops" in repr(graph)


def test_what_the_compiler_says_of_it():
    graph, *_ = run(17)
    assert "stablehlo.dot_general" in graph.stablehlo and "tensor<17x24xf32>" in graph.stablehlo
    assert graph.optimized_hlo.startswith("HloModule") and "ENTRY %" in graph.optimized_hlo
    assert "f32[17,24]" in graph.optimized_hlo
    assert graph.cost["flops"] >= 2 * 17 * 17 * 24
    memory = graph.memory_bytes
    assert memory["arguments"] >= 17 * 24 * 4 and memory["outputs"] >= 4 and memory["temporaries"] >= 0


def test_it_is_the_entry_of_the_cache():
    graph, *_ = run(19)
    folder = os.path.join(os.environ["OXITORCH_CACHE_DIR"], "programs")
    names = {name for _, _, files in os.walk(folder) for name in files}
    assert any(name.startswith(graph.id) for name in names)


def test_weights_that_are_overwritten_are_donated():
    w = torch.ones(40, 40, device=DEVICE)
    new = NewGraphs()
    w.mul_(2).add_(1)
    (graph,) = new.take()
    assert [graph.inputs[i] for i in graph.donated] == ["float32[40, 40]"]
    assert "input_output_alias" in graph.optimized_hlo and graph.memory_bytes["aliased"] == 40 * 40 * 4


CODE = """
import torch
x = torch.ones(3, 5, device="tpu")
(x.exp() * 2).tolist()
import os
os._exit(1)
"""


def test_programs_are_there_when_the_process_dies(start_python, tmp_path):
    folder = tmp_path / "graphs"
    code = CODE.replace("import os", "torch.tpu.graphs()[-1].cost; import os, time; time.sleep(0.5)")
    assert start_python(code, timeout=120, OXITORCH_GRAPHS=str(folder)).returncode == 1
    names = sorted(p.name for p in folder.iterdir())
    facts = [json.loads((folder / n).read_text()) for n in names if n.endswith(".json")]
    assert facts and {n.rsplit(".", 1)[1] for n in names} == {"json", "mlir", "hlo"}
    assert any(op["op"] == "exp" for g in facts for op in g["ops"])


def test_a_folder_that_cannot_be_written_is_a_warning(start_python, tmp_path):
    (tmp_path / "file").write_text("")
    code = CODE.replace("os._exit(1)", "torch.tpu.synchronize()")
    done = start_python(code, timeout=120, OXITORCH_GRAPHS=str(tmp_path / "file" / "x"))
    assert done.returncode == 0 and "cannot write a program into" in done.stderr
