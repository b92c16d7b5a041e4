"""What goes into compiled graphs and comes out of them: views, writes, sizes and numbers that vary, values of the host."""

import pytest
import torch
from compile_support import assert_close, compiled, counts, fresh_dynamo, mlp, pair  # noqa: F401 (a fixture)
from support import DEVICE, assert_same, to_device
from torch import nn


def test_graph_breaks(mode):
    def f(x):
        y = x * 2
        torch._dynamo.graph_break()
        if y.sum() > 0:
            return y + 1
        return y - 1

    g = compiled(f)
    for sign in (1, -1, 1):
        x = sign * torch.ones(3)
        assert_close(g(to_device(x)), f(x))


def test_input_mutation(mode):
    def f(x, y):
        x.add_(1)
        y[1:] = x[:-1]
        return x * y

    g = compiled(f, fullgraph=True)
    x, y = torch.randn(4), torch.randn(4)
    a, z = to_device(x), to_device(y)
    for _ in range(3):
        expected, actual = f(x, y), g(a, z)
        assert_close(actual, expected)
        assert_close(a, x)
        assert_close(z, y)


def test_mutation_through_a_view():
    def f(x):
        x[0].mul_(2)
        return x.sum()

    g = compiled(f, fullgraph=True)
    base = torch.randn(4, 3)
    moved = to_device(base)
    for _ in range(3):
        expected = f(base[1:3])
        assert_close(g(moved[1:3]), expected)
        assert_close(moved, base)


def test_results_that_are_views():
    def f(x):
        y = x * 2
        return y, y.t(), y[1:, ::2], x[0], x

    g = compiled(f, fullgraph=True)
    x = torch.randn(4, 6)
    moved = to_device(x)
    for _ in range(3):
        for i, (actual, expected) in enumerate(zip(g(moved), f(x), strict=True)):
            assert_same(actual, expected, f"result {i}", rtol=1e-6, atol=1e-6)
            assert actual.storage_offset() == expected.storage_offset()
    y, t, *_, whole = g(moved)
    y.zero_()
    assert t.cpu().abs().sum() == 0
    assert whole is moved


def test_results_share_storage_and_writes_show():
    def f(x):
        y = x + 1
        return y, y.view(-1)

    g = compiled(f, fullgraph=True)
    for _ in range(3):
        y, flat = g(torch.zeros(2, 2, device=DEVICE))
        flat[3] = 7
        assert y.tolist() == [[1, 1], [1, 7]]


def test_inputs_of_other_layouts(mode):
    def f(x):
        return (x * 2).sum(0) + x[0]

    g = compiled(f, dynamic=False)
    x = torch.randn(4, 4)
    for make in (lambda t: t, torch.t, lambda t: t[:, 1:], lambda t: t[1:], lambda t: t[2:3].expand(4, 4), lambda t: t):
        assert_close(g(make(to_device(x))), f(make(x)))


def test_two_arguments_of_one_storage():
    def f(x, y):
        x.add_(y)
        return x * 2

    g = compiled(f)
    for _ in range(2):
        base, other = torch.arange(6.0), torch.ones(3)
        moved = to_device(base)
        assert_close(g(moved[:3], moved[3:]), f(base[:3], base[3:]))
        assert_close(moved, base)
        assert_close(g(moved[:3], to_device(other)), f(base[:3], other))
        assert_close(moved, base)


def test_static_shapes():
    def f(x):
        return x.softmax(-1)

    g = compiled(f, dynamic=False)
    for n in (3, 5, 3, 7, 5):
        x = torch.randn(2, n)
        assert_close(g(to_device(x)), f(x))


def test_shapes_that_become_dynamic():
    def f(x):
        return (x * x.shape[0]).sum() + torch.arange(x.shape[0], device=x.device).sum()

    g = compiled(f)
    for n in (3, 5, 8, 5, 9, 9):
        x = torch.randn(n)
        assert_close(g(to_device(x)), f(x))


def test_sizes_that_depend_on_values():
    def f(x):
        return x[x > 0].sum() + x.nonzero().sum()

    g = compiled(f)
    for _ in range(4):
        x = torch.randn(20)
        assert_close(g(to_device(x)), f(x))


def test_host_values_are_not_constants():
    def f(x, scale):
        return x * scale

    g = compiled(f)
    for i in range(4):
        scale = torch.tensor(float(i))
        assert_close(g(torch.ones(3, device=DEVICE), scale), torch.ones(3) * i)


def test_numbers_that_change():
    def f(x, n):
        return x * n

    g = compiled(f)
    for n in (1.5, 2.5, 3.5, 1.5):
        assert_close(g(torch.ones(3, device=DEVICE), n), torch.ones(3) * n)


def test_arguments_with_one_value_are_told_apart_later():
    g = compiled(lambda x, y: x * 2 + y)
    x = torch.randn(4, device=DEVICE)
    y = x.clone()  # shares the value until one of them is written
    assert_close(g(x, y), x.cpu() * 3)
    y.add_(1)
    for _ in range(2):
        assert_close(g(x, y), x.cpu() * 3 + 1)


def test_an_argument_that_holds_a_number_of_the_graph():
    g = compiled(lambda x, y: x * 3.0 + y)
    x = torch.ones(2, device=DEVICE)
    for number in (3.0, 4.0, 5.0):
        y = torch.full((), number, device=DEVICE)
        assert_close(g(x, y), torch.full((2,), 3 + number))


def test_numbers_on_the_host():
    def f(x, scale, table, step):
        step += 1
        return x * scale + table.to(x.device)[1] + torch.tensor([1.0, 2.0], device=x.device) / step, scale * 2

    g = compiled(f, fullgraph=True)
    x = torch.randn(2)
    moved = to_device(x)
    step, here = torch.zeros(()), torch.zeros(())
    for i in range(4):
        if i == 2:
            torch.tpu.reset_metrics()
        scale, table = torch.tensor(1.5 + i), torch.randn(3, 2)
        (actual, on_host), (expected, doubled) = g(moved, scale, table, step), f(x, scale, table, here)
        assert_close(actual, expected)
        assert torch.equal(on_host, doubled)
        assert step.item() == here.item() == i + 1
    assert counts()["replays"] == 2
    assert counts()["plays"] == 0


def counted(x, a, b):
    a += 1
    b.mul_(2)


def one_after_the_other(x, a, b):
    a += b
    b += 1


def also_given(x, a, b):
    n = a + 1
    a.copy_(n)
    return n


def also_written_elsewhere(x, a, b):
    n = a + 1
    a.copy_(n)
    b.copy_(n * 2)


def also_on_the_device(x, a, b):
    n = a * 2
    a.copy_(n)
    return x * n


def before_and_after(x, a, b):
    y = x * a
    a += 1
    return y + a


def of_another_dtype(x, a, b):
    a.copy_(a.double() * 1.5)
    b.copy_((b > 1) + 1)


def lists(x, a, b):
    n = torch._foreach_add([a, b], 1)
    a.copy_(n[0])
    b.copy_(n[1])


def in_thirds(x, a, b):
    n = torch._foreach_mul([a, b], 1 / 3)
    a.copy_(n[0])
    b.copy_(n[1])


def beyond_what_fits(x, a, b):
    n = torch._foreach_mul([a, b], 1e300)
    a.copy_(n[0])
    b.copy_(n[1])


def crossed(x, a, b):
    n = torch._foreach_add([a, b], 1)
    a.copy_(n[1])
    b.copy_(n[0])


def half_of_it(x, a, b):
    n = torch._foreach_mul([a, b], 3)
    a.copy_(n[0])
    return n[1]


def one_twice(x, a, b):
    n = torch._foreach_add([a, a], 1)
    a.copy_(n[1])


HOST_WRITES = [counted, one_after_the_other, also_given, also_written_elsewhere, also_on_the_device, before_and_after]
HOST_WRITES += [of_another_dtype, lists, in_thirds, beyond_what_fits, crossed, half_of_it, one_twice]


@pytest.mark.parametrize("f", HOST_WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_on_the_host(f, dtype):
    def with_result(x, a, b):
        found = f(x, a, b)
        return x + 1 if found is None else found

    g, x = compiled(with_result, fullgraph=True), torch.randn(3)
    moved = to_device(x)
    here, expected = ([torch.tensor(n, dtype=dtype) for n in (1.5, 2)] for _ in range(2))
    for _ in range(3):
        versions = [t._version for t in here]
        torch.testing.assert_close(g(moved, *here).cpu(), with_result(x, *expected))
        assert [t.item() for t in here] == [t.item() for t in expected]
        changed = [t._version > v for t, v in zip(here, versions, strict=True)]
        assert changed == [t._version > 0 for t in expected]


def test_step_counts_are_moved_on_in_one_operation():
    parameters = [nn.Parameter(torch.randn(2, device=DEVICE)) for _ in range(3)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(parameters)
    step = compiled(optimizer.step)
    for _ in range(4):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = [e.name for e in profile.events()]
    assert names.count("aten::_foreach_add_") == 1
    assert not {"aten::copy_", "aten::_foreach_add", "aten::scalar_tensor"} & {*names}
    assert [optimizer.state[p]["step"].item() for p in parameters] == [5, 5, 5]


def test_indices_on_the_host():
    g = compiled(lambda x, i: x[i] * 2, fullgraph=True)
    x = torch.randn(5, 3)
    torch.tpu.reset_metrics()
    for places in ([0, 2], [4, 1], [3, 3]):
        i = torch.tensor(places)
        assert_close(g(to_device(x), i), x[i] * 2)
    assert counts()["replays"] == 2


def test_dynamic_shapes_are_accepted():
    cpu, device = pair(mlp)
    g = compiled(device, dynamic=True)
    for n in (3, 5, 3):
        x = torch.randn(n, 12)
        assert_close(g(to_device(x)), cpu(x))


@pytest.mark.parametrize("train", [True, False])
def test_sizes_are_symbolic_while_attention_is_chosen(train):
    cpu, device = pair(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(train))
    g = compiled(device, dynamic=True)
    for batch, length in ((2, 5), (2, 9), (3, 17), (2, 5)):
        x, mask = torch.randn(batch, length, 16), torch.ones(length, length).triu(1) > 0
        with torch.set_grad_enabled(train):
            expected, actual = cpu(x, src_mask=mask), g(to_device(x), src_mask=to_device(mask))
        assert_close(actual, expected)
        if train:
            expected.sum().backward()
            actual.sum().backward()
    for a, b in zip(device.parameters() if train else (), cpu.parameters() if train else (), strict=True):
        assert_close(a.grad, b.grad)
