"""The pages of operations and of PyTorch's own tests are what their generators write."""

import pytest
import torch
from conformance import ops
from pytorch_tests import page


def test_the_page_of_operations_is_current():
    version = torch.__version__.split("+")[0]
    results, ahead, page = ops.files(version)
    source, entries = ops.parse(results.read_text())
    if f"torch {version}," not in source:
        pytest.skip(f"the page is of {source}, this is torch {version}")
    assert page.read_text() == ops.page(source, entries, ops.kept_ahead(ahead)), "run `python -m tests.conformance.ops`"
    if page.name == "ops.md":
        assert ops.headline(entries) in (ops.ROOT / "README.md").read_text()


def test_the_page_of_pytorchs_tests_is_current():
    origin, results = page.read()
    assert page.PAGE.read_text() == page.text(origin, results), "run `python -m tests.pytorch_tests.page`"
    _, unexplained, stale = page.explained(results)
    assert not unexplained and not stale
