"""docs/ops.md is what its generator writes."""

import pytest
import torch
from conformance import ops


def test_the_page_of_operations_is_current():
    source, entries = ops.parse(ops.RESULTS.read_text())
    version = torch.__version__.split("+")[0]
    if f"torch {version}," not in source:
        pytest.skip(f"the page is of {source}, this is torch {version}")
    assert ops.PAGE.read_text() == ops.page(source, entries), "run `python -m tests.conformance.ops`"
    assert ops.headline(entries) in (ops.ROOT / "README.md").read_text()
