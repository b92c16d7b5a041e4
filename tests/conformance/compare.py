"""What is equal: values within tolerance, dtypes, shapes and strides."""

import torch
from torch.utils import _pytree as pytree

# (rtol, atol). PyTorch's comparison of its CUDA backend with the CPU (`TestCommon.test_compare_cpu`) allows 1e-3 in
# float32. For the 16-bit types: two units in the last place.
TOLERANCE = {
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
    torch.float32: (1e-4, 1e-4),
    torch.complex64: (1e-4, 1e-4),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-3),
}


def leaves(value) -> list:
    """All tensors and numbers in nested containers, in order."""
    return pytree.tree_leaves(value)


def strides(t: torch.Tensor) -> list[int | None]:
    """Strides, without those that no element depends on."""
    return [s if n > 1 else None for n, s in zip(t.shape, t.stride(), strict=True)] if t.numel() > 1 else []


def differences(got, want, *, values: bool = True) -> list[tuple[str, str]]:
    """(kind, text) for each way in which a result differs from the CPU's; none if they are equal."""
    got, want = leaves(got), leaves(want)
    if len(got) != len(want):
        return [("count", f"{len(got)} results instead of {len(want)}")]
    return [d for g, w in zip(got, want, strict=True) for d in difference(g, w, values)]


def difference(got, want, values: bool) -> list[tuple[str, str]]:
    """As `differences`, of one result."""
    if not isinstance(want, torch.Tensor):
        same = type(got) is type(want) and (got == want or got != got or not values)
        return [] if same else [("value", f"{got!r} instead of {want!r}")]
    if not isinstance(got, torch.Tensor):
        return [("type", f"{type(got).__name__} instead of a tensor")]
    for kind in ("layout", "dtype", "shape"):
        if getattr(got, kind) != getattr(want, kind):
            return [(kind, f"{getattr(got, kind)} instead of {getattr(want, kind)}")]
    if want.layout != torch.strided:
        return []
    found = []
    if strides(got) != strides(want):
        found.append(("strides", f"{got.stride()} instead of {want.stride()} for {tuple(want.shape)}"))
    if values:
        rtol, atol = TOLERANCE.get(want.dtype, (0, 0))
        try:
            torch.testing.assert_close(
                got.detach().cpu(), want.detach(), rtol=rtol, atol=atol, equal_nan=True, check_stride=False
            )
        except AssertionError as e:
            found.append(("value", " ".join(str(e).split())[:200]))
    return found


def wide(value):
    """The same in float64 and complex128, wherever there are tensors or dtypes of less."""
    wider = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
    wider |= dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64)

    def widen(x):
        if isinstance(x, torch.dtype):
            return wider.get(x, x)
        if isinstance(x, torch.Tensor) and x.dtype in wider:
            return x.detach().to(wider[x.dtype]).requires_grad_(x.requires_grad)
        return x

    return pytree.tree_map(widen, value)


def as_good(got, want, truth, times: float = 1) -> bool:
    """Whether results are what float64 gives within tolerance, or no further from it in the mean square than the CPU's,
    so many times."""
    return all(nearer(*one, times) for one in zip(leaves(got), leaves(want), leaves(truth), strict=True))


def nearer(got, want, truth, times: float) -> bool:
    if not isinstance(want, torch.Tensor) or not (want.is_floating_point() or want.is_complex()):
        return not difference(got, want, True)
    rtol, atol = TOLERANCE[want.dtype]
    truth = truth.to(want.dtype).to(truth.dtype)  # which may be infinite there
    got, want = (x.detach().cpu().to(truth.dtype) for x in (got, want))
    if torch.allclose(got, truth, rtol=rtol, atol=atol, equal_nan=True):
        return True
    finite = truth.isfinite()
    if not torch.equal(got.isfinite(), want.isfinite()) or not torch.equal(want.isfinite(), finite):
        return False
    distance = [(x - truth)[finite].abs().square().sum() for x in (got, want)]
    return bool(distance[0] <= distance[1] * times**2 * 1.01)
