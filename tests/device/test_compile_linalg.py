"""Graphs of `torch.compile` with decompositions of which PyTorch asks on the host whether they were found: the program asserts
it, and the graph is played once."""

import pytest
import torch
from support import DEVICE, assert_same


def regular(a):
    return a @ a.mT + torch.eye(4, device=a.device)


def lu(a):
    factors, pivots = torch.linalg.lu_factor(a)
    return factors, torch.linalg.lu_solve(factors, pivots, a + 1)


def likelihood(a):
    normal = torch.distributions.MultivariateNormal(torch.zeros_like(a[..., 0]), covariance_matrix=regular(a))
    return normal.log_prob(a[..., 1])


FOUND = {
    "cholesky": lambda a: torch.linalg.cholesky(regular(a)),
    "inv": lambda a: torch.linalg.inv(regular(a)),
    "solve": lambda a: torch.linalg.solve(regular(a), a),
    "several": lambda a: torch.linalg.inv(regular(a)) @ torch.linalg.cholesky(regular(a) + 1),
    "lu": lu,
    "likelihood": likelihood,
}


@pytest.mark.parametrize("shape", [(4, 4), (3, 4, 4)], ids=str)
@pytest.mark.parametrize("name", FOUND)
def test_a_graph_with_a_decomposition_is_played_once(name, shape, fused):
    torch.compiler.reset()
    torch.manual_seed(0)
    f = FOUND[name]
    compiled = torch.compile(f, backend="tpu")
    before = torch.tpu.metrics()
    for _ in range(4):
        a = torch.randn(shape)
        got, want = compiled(a.to(DEVICE)), f(a)
        for g, w in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
            assert_same(g, w, strides=False, rtol=1e-4, atol=1e-4)
    after = torch.tpu.metrics()
    assert (after["plays"] - before["plays"], after["replays"] - before["replays"]) == (1, 3)


def test_gradients_of_decompositions_are_replayed(fused):
    torch.compiler.reset()
    f = FOUND["several"]
    compiled = torch.compile(f, backend="tpu")
    before = torch.tpu.metrics()
    for seed in range(3):
        torch.manual_seed(seed)
        a = torch.randn(4, 4)
        grads = []
        for run, own in ((f, a.clone().requires_grad_()), (compiled, a.to(DEVICE).requires_grad_())):
            run(own).square().sum().backward()
            grads.append(own.grad)
        assert_same(grads[1], grads[0], strides=False, rtol=1e-3, atol=1e-3)
    after = torch.tpu.metrics()
    assert (after["plays"] - before["plays"], after["replays"] - before["replays"]) == (2, 4)


BAD = {
    "cholesky": (torch.linalg.cholesky, -torch.eye(3), torch.linalg.LinAlgError),
    "inv": (torch.linalg.inv, torch.zeros(3, 3), torch.linalg.LinAlgError),
    "solve": (lambda a: torch.linalg.solve(a, a), torch.zeros(3, 3), torch.linalg.LinAlgError),
    "lu": (lu, torch.zeros(3, 3), RuntimeError),
}


@pytest.mark.parametrize("name", BAD)
def test_what_has_no_solution_raises_what_pytorch_raises(name, fused):
    torch.compiler.reset()
    f, bad, error = BAD[name]
    compiled = torch.compile(f, backend="tpu")
    good = (torch.eye(bad.shape[0]) * 2).to(DEVICE)
    for _ in range(2):
        compiled(good)
        torch.tpu.synchronize()
        with pytest.raises(error, match="could not be completed|is singular|is zero"):
            result = compiled(bad.to(DEVICE))
            (result[0] if isinstance(result, tuple) else result).sum().item()
