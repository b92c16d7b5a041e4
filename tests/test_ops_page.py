"""The pages of operations and of PyTorch's own tests are what their generators write; which entries an op has."""

import pytest
import torch
from conformance import kept, ops, units
from pytorch_tests import page


def test_the_page_of_operations_is_current():
    version = torch.__version__.split("+")[0]
    results, aot, page = kept.files(version)
    source, entries = kept.parse(results.read_text())
    if f"torch {version}," not in source:
        pytest.skip(f"the page is of {source}, this is torch {version}")
    assert page.read_text() == ops.page(source, entries, kept.read(aot)), "run `python -m tests.conformance.ops`"
    if page.name == "ops.md":
        assert ops.headline(entries) in (kept.ROOT / "README.md").read_text()


def test_units_that_were_run_again_replace_what_was_known_of_them():
    entries = {"op/mm": ["+float32/forward", "!aten::mm", "v5e-1-float32/forward", "v5e-1+float32/grad"]}
    kept.put_in(entries, {"op/mm": ["v5e-1+float32/forward"]})
    assert sorted(entries["op/mm"]) == ["!aten::mm", "+float32/forward", "v5e-1+float32/forward", "v5e-1+float32/grad"]
    kept.put_in(entries, {"op/mm": ["-float32/forward"]})
    assert sorted(entries["op/mm"]) == ["-float32/forward", "v5e-1+float32/forward", "v5e-1+float32/grad"]


def test_the_page_of_pytorchs_tests_is_current():
    origin, results = page.read()
    assert page.PAGE.read_text() == page.text(origin, results), "run `python -m tests.pytorch_tests.page`"
    _, unexplained, stale = page.explained(results)
    assert not unexplained and not stale


@pytest.mark.parametrize(
    ("op", "some"),
    [
        ("add.Tensor", ["op/add", "foreach/_foreach_add"]),
        ("relu", ["op/nn.functional.relu"]),
        ("max_pool2d_with_indices_backward", ["op/nn.functional.max_pool2d"]),
        ("_softmax", ["op/softmax", "op/softmax:with_dtype"]),
        ("native_layer_norm", ["op/nn.functional.layer_norm", "op/native_layer_norm"]),
        ("silu_backward", ["op/nn.functional.silu"]),
        ("_linalg_svd", ["op/linalg.svd"]),
        ("constant_pad_nd", ["op/nn.functional.pad:constant"]),
        ("torchvision::nms", []),
    ],
)
def test_the_entries_of_an_op(op, some):
    found = units.entries_of(op)
    assert set(some) <= set(found) and len(found) < 10 and bool(found) == bool(some)
