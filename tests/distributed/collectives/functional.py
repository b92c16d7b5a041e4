"""Functional collectives, and compiled ones."""

import torch
import torch.distributed as dist

from tests.distributed.collectives.data import data, rank, same, size
from tests.distributed.ranks import IS_TORCH_2_11, case


@case
def functional():
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    x = data(4 * size(), 2, device="tpu").requires_grad_()
    same(funcol.all_reduce(x, "sum", group), sum(data(4 * size(), 2, of=r) for r in range(size())))
    same(funcol.all_reduce(x, "avg", group), sum(data(4 * size(), 2, of=r) for r in range(size())) / size())
    each = [data(4 * size(), 2, of=r) for r in range(size())]
    same(funcol.all_gather_tensor(x, 0, group), torch.cat(each))
    if not IS_TORCH_2_11:  # which gives the operation a tensor that is not contiguous
        same(funcol.all_gather_tensor(x, 1, group), torch.cat(each, 1))
    same(funcol.reduce_scatter_tensor(x, "sum", 0, group), sum(each).chunk(size())[rank()])
    same(funcol.broadcast(x, 0, group), each[0])
    splits = [4] * size()
    out = funcol.all_to_all_single_autograd(x, splits, splits, group)
    same(out, torch.cat([e.chunk(size())[rank()] for e in each]))
    (out.sum() * (rank() + 1)).backward()
    same(x.grad, torch.cat([torch.full((4, 2), r + 1.0) for r in range(size())]))
    y = data(4, 2, device="tpu").requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(y, 0, group)
    one = torch.ones((), device="tpu").expand_as(gathered)
    gathered.backward(one.contiguous() if IS_TORCH_2_11 else one)  # as above
    same(y.grad, torch.full((4, 2), float(size())))


@case
def functional_lists_and_forms_in_place():
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    shapes = [(2 * size(), 3), (size(), 2)]
    each = [[data(*shape, of=r) for r in range(size())] for shape in shapes]
    xs = [data(*shape, device="tpu") for shape in shapes]
    for got, all_of in zip(funcol.all_reduce_coalesced(xs, "sum", group), each, strict=True):
        same(got, sum(all_of))
    for got, all_of in zip(funcol.all_gather_into_tensor_coalesced(xs, group), each, strict=True):
        same(got, torch.cat(all_of))
    for got, all_of in zip(funcol.reduce_scatter_tensor_coalesced(xs, "sum", [0, 0], group), each, strict=True):
        same(got, sum(all_of).chunk(size())[rank()])
    x, all_of = xs[0], each[0]
    wanted = sum(all_of).t().contiguous().view(3, size(), 2)[:, rank()].t()
    same(funcol.reduce_scatter_tensor(x.t().contiguous(), "sum", 1, group), wanted.t())
    following = [(r + 1) % size() for r in range(size())]
    same(funcol.permute_tensor(x.view(-1), following, group), all_of[rank() - 1].view(-1))
    # What is not waited for is a tensor that waits where it is used.
    y = funcol.all_reduce(x, "max", group)
    same(y + 1, torch.stack(all_of).amax(0) + 1)
    same(funcol.wait_tensor(y), torch.stack(all_of).amax(0))
    y = x.clone()
    assert funcol.all_reduce_inplace(y, "sum", group) is y
    same(y, sum(all_of))
    out = torch.empty(2 * size() * size(), 3, device="tpu")
    funcol.all_gather_tensor_inplace(out, x, group)
    same(out, torch.cat(all_of))
    out = torch.empty(2, 3, device="tpu")
    funcol.reduce_scatter_tensor_inplace(out, x, "sum", group)
    same(out, sum(all_of).chunk(size())[rank()])
    out = torch.empty_like(x)
    funcol.all_to_all_inplace(out, x, group=group)
    same(out, torch.cat([e.chunk(size())[rank()] for e in all_of]))


@case
def functional_with_gradients():
    """Each rank weights its result by its number and one, and sums."""
    import torch.distributed._functional_collectives as funcol

    group, weights = dist.group.WORLD, [r + 1.0 for r in range(size())]
    of_chunks = torch.cat([torch.full((2, 3), w) for w in weights])
    of_all = torch.full((2 * size(), 3), sum(weights))
    forms = {
        "reduce_scatter": (lambda x: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group), of_chunks),
        "all_gather": (lambda x: funcol.all_gather_tensor_autograd(x, 0, group), of_all),
        "all_to_all": (lambda x: funcol.all_to_all_single_autograd(x, None, None, group), of_chunks),
    }
    if torch._C._dispatch_has_kernel_for_dispatch_key("_c10d_functional::all_reduce", "Autograd"):
        forms["all_reduce"] = (lambda x: funcol.all_reduce(x, "sum", group), of_all)
    for name, (form, wanted) in forms.items():
        x = data(2 * size(), 3, device="tpu").requires_grad_()
        (form(x) * weights[rank()]).sum().backward()
        torch.testing.assert_close(x.grad.cpu(), wanted, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@case
def compiled():
    """Collectives in a graph: functional ones, those of c10d which PyTorch makes functional, and their gradients."""
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD

    def forward(x):
        y = x * 2
        dist.all_reduce(y)
        parts = torch.empty(size() * y.shape[0], *y.shape[1:], device=y.device)
        dist.all_gather_into_tensor(parts, y + dist.get_rank())
        mine = funcol.reduce_scatter_tensor(parts, "sum", 0, group)
        return mine * 3, funcol.all_gather_tensor(mine, 0, group).relu()

    total = sum(data(4, 3, of=r) for r in range(size())) * 2
    parts = torch.cat([total + r for r in range(size())]) * size()
    f = torch.compile(forward, backend="tpu", fullgraph=True)
    for _ in range(2):
        mine, all_of = f(data(4, 3, device="tpu"))
        same(mine, (total + rank()) * size() * 3)
        same(all_of, parts)

    @torch.compile(backend="tpu", fullgraph=True)
    def loss(x):
        y = funcol.all_gather_tensor_autograd(x * 2, 0, group)
        return (funcol.reduce_scatter_tensor_autograd(y.square(), "sum", 0, group) * (dist.get_rank() + 1)).sum()

    x = data(4, 3, device="tpu").requires_grad_()
    loss(x).backward()
    # All have all parts, of each the sum over ranks goes to one: 4 x^2 n, by its weight; n ranks give a gradient.
    same(x.grad, 8 * data(4, 3) * size() * (rank() + 1))
