"""The pages of operations and of PyTorch's own tests are what their generators write; which entries an op has."""

import fnmatch

import pytest
import torch
from conformance import __main__ as conformance
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


def statuses(file):
    """What is kept of each unit."""
    words = {"+": "pass", "-": "fail", "~": "skip", "!": "cpu"}
    _, entries = kept.read(file)
    found = {}
    for entry, of_entry in entries.items():
        for where, sign, dtype, question in kept.units(of_entry):
            found[f"{where}/{entry}/{dtype}/{question}".removeprefix("/")] = words[sign]
    return found


@pytest.mark.parametrize("file, exceptions", [("results.txt", "exceptions.toml"), ("aot.txt", "aot.toml")])
def test_what_may_fail_is_what_failed(file, exceptions):
    kept_there, expected = statuses(kept.HERE / file), conformance.exceptions(exceptions)
    assert len(kept_there) > 5000
    assert conformance.contradictions(kept_there, expected, exceptions) == []
    assert {p for p in expected if not fnmatch.filter(kept_there, p)} == set(), "no unit has such a name"


def test_each_unit_that_a_pattern_names_has_to_fail():
    expected = {"op/a/*": "why"}

    def found(**statuses):
        units = {f"op/{name.replace('_', '/')}": status for name, status in statuses.items()}
        return conformance.contradictions(units, expected, "x.toml")

    assert found(a_1="fail", a_2="fail", a_3="skip", b_1="pass", b_2="cpu") == []
    assert found(a_1="fail", a_2="pass") == ["op/a/2: is right, though x.toml has it as op/a/*"]
    assert found(a_1="skip", a_2="skip") == ["op/a/*: has nothing to check, though x.toml has it"]
    for status in ("crash", "hang", "broken"):
        assert found(a_1="fail", a_2=status) == [f"op/a/2: {status}"]
    assert found(a_1="fail", b_1="fail") == ["op/b/1: fail"]


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


def test_classes_of_pytorchs_tests_that_were_run_again_replace_what_was_known_of_them():
    def run(every, *tests):
        return page.summary(
            {t: {"file": "a/b", "test": t, "every": every, "status": "pass"} for t in tests}, "some day"
        ).split("\n", 1)[1]

    sample, whole = (
        run(2, *(f"OfOps.test_{i}_tpu_int8" for i in (1, 2)), "Of.test_1"),
        run(1, "OfTPU.test_1", "OfTPU.test_2"),
    )
    assert sample == "a/b every 2\n  Of.test_1 +\n  OfOps.test_1 +_int8\n"
    both = page.with_classes_of(whole, sample)
    assert both == "a/b every 2 whole Of\n  Of.test_1 +\n  Of.test_2 +\n  OfOps.test_1 +_int8\n"
    found = page.parse(f"\n{both}")["a/b"]
    assert found.tests == {"Of.test_1": "+", "Of.test_2": "+", "OfOps.test_1_int8": "+"}
    assert page.sample(found) == " (1 of 2, by a checksum of the name; Of whole)"
    assert page.with_classes_of(run(1, "Of.test_3"), both) == both.replace(
        "  Of.test_1 +\n  Of.test_2 +", "  Of.test_3 +"
    )


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
