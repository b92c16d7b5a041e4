"""Views and in-place operations have exactly PyTorch's aliasing, and their gradients."""

import pytest
import torch

# ---------------------------------------------------------------- named cases


def test_writes_through_a_slice_show_in_the_base(device):
    a = torch.zeros(6, device=device)
    b = a[2:4]
    b.add_(3)
    assert a.tolist() == [0, 0, 3, 3, 0, 0]
    a[3] = 7
    assert b.tolist() == [3, 7]


def test_reads_before_a_write_keep_their_values(device):
    a = torch.arange(4.0, device=device)
    b, c = a * 2, a.clone()
    a.zero_()
    assert b.tolist() == [0, 2, 4, 6] and c.tolist() == [0, 1, 2, 3] and a.tolist() == [0, 0, 0, 0]


def test_buckets_as_ddp_makes_them(device):
    """One flat buffer, a view for each gradient; gradients are written, the bucket is reduced, the views show it."""
    shapes = [(4, 3), (3,), (2, 2, 2)]
    bucket = torch.zeros(sum(torch.Size(s).numel() for s in shapes), device=device)
    views, at = [], 0
    for s in shapes:
        n = torch.Size(s).numel()
        views.append(bucket.narrow(0, at, n).view(s))
        at += n
    for i, v in enumerate(views):
        v.copy_(torch.full(v.shape, i + 1.0, device=device))
    bucket.div_(2)
    assert [v.flatten()[0].item() for v in views] == [0.5, 1, 1.5]
    views[1].mul_(10)
    assert bucket[12:15].tolist() == [10, 10, 10]
    assert bucket.sum().item() == 12 * 0.5 + 3 * 10 + 8 * 1.5


def test_gradients_accumulate_into_bucket_views(device):
    lin = torch.nn.Linear(3, 2).to(device)
    bucket = torch.zeros(8, device=device)
    lin.weight.grad, lin.bias.grad = bucket[:6].view(2, 3), bucket[6:]
    before = bucket.data_ptr()
    for _ in range(2):
        lin(torch.ones(4, 3, device=device)).sum().backward()
    assert lin.weight.grad.data_ptr() == before
    assert bucket.tolist() == [8.0] * 8


def test_flat_parameters(device):
    """As FSDP keeps them: the module's parameters are views of one flat parameter, which the optimizer steps."""
    flat = torch.nn.Parameter(torch.arange(8.0, device=device))
    weight, bias = flat[:6].view(2, 3), flat[6:]
    x = torch.ones(4, 3, device=device)
    torch.nn.functional.linear(x, weight, bias).sum().backward()
    assert flat.grad.tolist() == [4.0] * 8
    torch.optim.SGD([flat], lr=0.5).step()
    assert weight.tolist() == [[-2, -1, 0], [1, 2, 3]] and bias.tolist() == [4, 5]


@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizer_on_views(device, foreach):
    base = torch.ones(3, 4, device=device)
    params = [base[0], base.t()[1][1:]]
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    torch.optim.SGD(params, lr=0.25, foreach=foreach).step()
    assert base.tolist() == [[0.5] * 4, [1, 0.5, 1, 1], [1, 0.5, 1, 1]]


def test_overlapping_windows(device):
    a = torch.arange(6.0, device=device)
    w = a.as_strided((4, 3), (1, 1))
    assert w.sum(1).tolist() == [3, 6, 9, 12]
    a[2] = 100
    assert w[:3, :].tolist() == [[0, 1, 100], [1, 100, 3], [100, 3, 4]]
    w.fill_(5)
    assert a.tolist() == [5] * 6
    w[1] = torch.tensor([1.0, 2.0, 3.0], device=device)
    assert a.tolist() == [5, 1, 2, 3, 5, 5]


def test_as_strided_ignores_the_view_it_is_called_on(device):
    a = torch.arange(12.0, device=device)
    b = a[6:].as_strided((2, 2), (4, 1), 1)
    assert b.tolist() == [[1, 2], [5, 6]]
    assert a[6:].as_strided((2,), (1,)).tolist() == [6, 7]


def test_chained_views_in_odd_order(device):
    a = torch.arange(24.0, device=device).view(2, 3, 4)
    v = a.permute(2, 0, 1)[1:3].transpose(1, 2)[:, 1:, :]
    v.mul_(-1)
    expected = torch.arange(24.0).view(2, 3, 4)
    expected[:, 1:, 1:3] *= -1
    assert a.cpu().equal(expected)


def test_flip_and_negative_steps_are_copies(device):
    a = torch.arange(4.0, device=device)
    b = a.flip(0)
    b[0] = 9
    assert a.tolist() == [0, 1, 2, 3] and b.tolist() == [9, 2, 1, 0]


def test_split_and_unbind_alias(device):
    a = torch.zeros(4, 2, device=device)
    for i, row in enumerate(a.unbind()):
        row.fill_(i)
    for part in a.split([1, 3]):
        part[0, 0] = 9
    assert a.tolist() == [[9, 0], [9, 1], [2, 2], [3, 3]]


def test_reshape_aliases_when_it_can(device):
    a = torch.zeros(2, 3, device=device)
    a.reshape(6)[0] = 1
    a.t().reshape(6)[1] = 5  # a copy
    a.ravel()[1] = 2
    assert a.tolist() == [[1, 2, 0], [0, 0, 0]]


def test_views_of_other_dtypes(device):
    a = torch.ones(4, device=device)
    b = a.view(torch.int32)
    b[0] = 0x40000000
    assert a.tolist() == [2, 1, 1, 1]
    c = a.view(torch.uint8)
    c[4:8] = 0
    assert a.tolist() == [2, 0, 1, 1]
    d = a.view(torch.float64)
    d[1] = 0
    assert a.tolist() == [2, 0, 0, 0]
    z = a.view(torch.complex64)
    z[0] = 1 + 3j
    assert a.tolist() == [1, 3, 0, 0]
    torch.view_as_real(z)[0, 1] = 4
    assert a.tolist() == [1, 4, 0, 0]


def test_real_and_imag_are_views(device):
    z = torch.zeros(3, dtype=torch.complex64, device=device)
    z.real.copy_(torch.arange(3.0, device=device))
    z.imag[1:].fill_(5)
    assert z.tolist() == [0, 1 + 5j, 2 + 5j]
    assert z.real.stride() == (2,) and z.imag.storage_offset() == 1


def test_conj_and_neg_are_lazy_views(device):
    z = torch.tensor([1 + 2j, 3 - 1j], device=device)
    c = z.conj()
    assert c.is_conj() and c.tolist() == [1 - 2j, 3 + 1j]
    z[0] = 5j
    assert c.tolist() == [-5j, 3 + 1j]
    c.add_(1j)  # writes the conjugate back
    assert z.tolist() == [4j, 3 - 2j]
    n = c.imag
    assert n.is_neg() and n.tolist() == [-4, 2]
    assert (n * 2).tolist() == [-8, 4]
    assert (c @ z).item() == pytest.approx(4j.conjugate() * 4j + (3 + 2j) * (3 - 2j))


def test_writes_through_conj_and_neg_views(device):
    z = torch.tensor([1 + 2j, 3 - 1j], device=device)
    c = z.conj()
    c.copy_(torch.tensor([1j, 2j]))  # from the host
    assert z.tolist() == [-1j, -2j]
    c.copy_(torch.tensor([3j, 4j], device=device))
    assert z.tolist() == [-3j, -4j]
    c[0] = 7j
    assert z.tolist() == [-7j, -4j]
    c.copy_(c.clone().conj())
    assert z.tolist() == [7j, 4j]
    torch.add(z, 1j, out=c)
    assert z.tolist() == [-8j, -5j] and c.tolist() == [8j, 5j]
    c.fill_(1 + 1j)
    assert z.tolist() == [1 - 1j, 1 - 1j]
    z.conj().imag.add_(1)
    assert z.tolist() == [1 - 2j, 1 - 2j]
    z.conj().imag.zero_()
    assert z.tolist() == [1, 1]
    torch._neg_view(z.real).mul_(torch.tensor([2.0, 3.0], device=device))
    assert z.tolist() == [2, 3]


def test_views_of_other_dtypes_one_after_another(device):
    x = torch.arange(8, dtype=torch.int32, device=device)
    with torch.tpu.set_eager_mode("fused"):
        x.view(torch.int16)[0] = 7
        x.view(torch.uint8)[5] = 1
        x.view(torch.int64)[3] = -1
        x.view(torch.float16)[9] = 1.0  # 0x3c00, the upper half of element 4
        b = x.view(2, 4).view(torch.int64).view(torch.uint8)
        c = x.view(torch.complex64)
        assert x.tolist() == [7, 257, 2, 3, 4 + (0x3C00 << 16), 5, -1, -1]
        assert b.shape == (2, 16) and b[0, :6].tolist() == [7, 0, 0, 0, 1, 1]
        assert torch.view_as_real(c).view(torch.int32).flatten().tolist() == x.tolist()


# ---------------------------------------------------------------- autograd through views


def test_backward_through_views(device):
    x = torch.arange(6.0, device=device, requires_grad=True)
    v = x.view(2, 3).t()[1:]
    (v * torch.tensor([[1.0, 2], [3, 4]], device=device)).sum().backward()
    assert x.grad.tolist() == [0, 1, 3, 0, 2, 4]


def test_backward_after_in_place_on_a_view(device):
    x = torch.ones(4, device=device, requires_grad=True)
    y = x * 2
    y[1:3].mul_(3)
    z = y.view(2, 2)
    z[0].add_(1)
    (y * torch.arange(4.0, device=device)).sum().backward()
    assert y.tolist() == [3, 7, 6, 2]
    assert x.grad.tolist() == [0, 6, 12, 6]


def test_backward_with_as_strided_expand_unfold_diagonal(device):
    x = torch.arange(9.0, device=device, requires_grad=True)
    m = x.view(3, 3)
    loss = m.diagonal().sum() + x.as_strided((3, 2), (1, 1)).sum() + x.unfold(0, 3, 3).sum() + x[:1].expand(5).sum()
    loss.backward()
    assert x.grad.tolist() == [1 + 1 + 1 + 5, 2 + 1, 2 + 1, 1 + 1, 2, 1, 1, 1, 2]


def test_saved_tensors_notice_in_place(device):
    x = torch.ones(3, device=device, requires_grad=True)
    y = x.exp()
    y[0] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_leaves_refuse_in_place(device):
    x = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x[1:].mul_(2)
    with torch.no_grad():
        x[1:].mul_(2)
    assert x.tolist() == [1, 2, 2]


def test_versions_and_bases(device):
    a = torch.zeros(4, device=device)
    b = a[1:]
    b.add_(1)
    a.mul_(2)
    assert a._version == b._version == 2 and b._base is a and b._is_view()
