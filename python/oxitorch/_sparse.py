"""Operations on sparse tensors of the device, where PyTorch's own kernels do not serve (see `sparse.h`).

A sparse tensor is a few strided tensors of the device, its parts, with a shape. The functions here compute with the
parts by PyTorch's operations. An operation that has no function here runs on the CPU, is counted and warned of.

Names: `indices` are (sparse dimensions, nnz) and `values` (nnz, *dense dimensions), as in `torch.sparse_coo_tensor`;
a "key" is the place of an element among the sparse dimensions, in row-major order, (nnz,).
"""

import contextlib
import functools
import math
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

from oxitorch import _activate
from oxitorch._lines import warn
from oxitorch._overload import overload

_aten = torch.ops.aten
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_ROWS = (torch.sparse_csr, torch.sparse_bsr)  # what is compressed: rows, else columns

_functions: dict[str, Callable] = {}

_library = torch.library.Library("oxitorch", "FRAGMENT")
_library.define("_spmm(Tensor rows, Tensor columns, Tensor values, Tensor dense, int size) -> Tensor")
torch.ops.oxitorch._bind("oxitorch")


class _NotHere(Exception):
    """The function does not take such arguments."""


def run(name: str, args: list) -> list:
    """Runs an overload ("aten::add.out") with all arguments of its schema, in order; returns the results."""
    op = overload(name)
    # A number in place of a tensor comes as one.
    args = [
        torch.tensor(a) if str(p.type) == "Tensor" and isinstance(a, (bool, int, float, complex)) else a
        for p, a in zip(op._schema.arguments, args, strict=True)
    ]
    function = _functions.get(name.removeprefix("aten::"))
    results = None
    if function is not None:
        with contextlib.suppress(_NotHere):
            results = function(*args)
    if results is None:
        results = _on_the_cpu(name, op, args)
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _serves(*names: str):
    def register(function):
        _functions.update(dict.fromkeys(names, function))
        return function

    return register


def _on_the_cpu(name: str, op, args: list):
    if op.namespace == "c10d":  # its schemas do not say what they write
        raise NotImplementedError(
            f"{name}: process groups of the device take no sparse tensors\nhint: convert them with .to_dense() before"
        )
    tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    layouts = sorted({str(t.layout) for t in tensors if t.layout != torch.strided})
    on_host = [pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, a) for a in args]
    positional, named = [], {}
    for parameter, value in zip(op._schema.arguments, on_host, strict=True):
        if parameter.kwarg_only:
            named[parameter.name] = value
        else:
            positional.append(value)
    try:
        results = op(*positional, **named)
    except NotImplementedError:
        raise NotImplementedError(
            f"{name} is not available for tensors with the layout {' and '.join(layouts)}, on the CPU neither\n"
            "hint: convert them with .to_dense() before"
        ) from None
    warning = _activate.core().fall_back(name)
    if warning is not None:
        warn(warning)
    given = {}
    for parameter, value, host in zip(op._schema.arguments, args, on_host, strict=True):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            for out, result in zip(pytree.tree_leaves(value), pytree.tree_leaves(host), strict=True):
                _assign(out, result)
                given[id(result)] = out
    device = next(t.device for t in tensors if t.device.type != "cpu")
    return pytree.tree_map_only(torch.Tensor, lambda t: given[id(t)] if id(t) in given else t.to(device), results)


def _assign(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Gives a tensor the size, the parts and the values of another one with its layout."""
    if out is result:
        return out
    if out.layout != result.layout:
        raise RuntimeError(f"out: expected a tensor with the layout {result.layout}, but got {out.layout}")
    if out.layout == torch.strided:
        if out.shape != result.shape:
            out.resize_(result.shape)
    elif out.layout == torch.sparse_coo:
        _aten.sparse_resize_and_clear_(out, result.shape, result.sparse_dim(), result.dense_dim())
        return _aten.copy_sparse_to_sparse_(out, result.to(out.dtype))
    else:
        _aten.resize_as_sparse_(out, result)
    return out.copy_(result)


# ---------------------------------------------------------------- parts


def _coo(indices, values, size, is_coalesced: bool) -> torch.Tensor:
    return _aten._sparse_coo_tensor_unsafe(indices, values, size, is_coalesced=is_coalesced)


def _like(sparse, values, *, is_coalesced: bool | None = None) -> torch.Tensor:
    """A COO tensor with the indices of another one."""
    coalesced = sparse.is_coalesced() if is_coalesced is None else is_coalesced
    return _coo(sparse._indices(), values, sparse.shape, coalesced)


def _keys(indices, sizes) -> torch.Tensor:
    if len(sizes) == 0:
        return torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    return functools.reduce(lambda keys, d: keys * sizes[d] + indices[d], range(1, len(sizes)), indices[0])


def _keys_of(sparse) -> torch.Tensor:
    return _keys(sparse._indices(), sparse.shape[: sparse.sparse_dim()])


def _indices_of(keys, sizes) -> torch.Tensor:
    indices: list[torch.Tensor] = []
    for size in reversed(sizes):
        indices.insert(0, keys % size)
        keys = keys // size
    return torch.stack(indices) if indices else keys.new_empty((0, len(keys)))


def _rows(strided, sparse) -> torch.Tensor:
    """A strided tensor of a sparse one's size as (keys, *dense dimensions), a view where that can be."""
    n = sparse.sparse_dim()
    return strided.reshape(math.prod(strided.shape[:n]), *strided.shape[n:])


def _column(values, to) -> torch.Tensor:
    """A value for each element, (nnz,), with dimensions of size 1 that fit `to`."""
    return values.reshape(-1, *[1] * (to.ndim - 1))


def _find(keys, among) -> tuple[torch.Tensor, torch.Tensor]:
    """Where keys stand among others, which are sorted; and which of them do (the places of the rest mean nothing)."""
    if len(among) == 0:
        return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
    places = torch.searchsorted(among, keys).clamp(max=len(among) - 1)
    return places, among[places] == keys


def _parts(matrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The row, the column and the value of each element of a sparse matrix."""
    if matrix.layout == torch.sparse_coo:
        if matrix.sparse_dim() != 2 or matrix.dense_dim() != 0:
            raise RuntimeError(
                f"expected a matrix with 2 sparse and no dense dimensions, got {matrix.sparse_dim()} and "
                f"{matrix.dense_dim()}"
            )
        rows, columns = matrix._indices().unbind()
        return rows, columns, matrix._values()
    if matrix.layout not in (torch.sparse_csr, torch.sparse_csc) or matrix.ndim != 2:
        raise _NotHere
    by_rows = matrix.layout in _ROWS
    compressed = matrix.crow_indices() if by_rows else matrix.ccol_indices()
    plain = matrix.col_indices() if by_rows else matrix.row_indices()
    rows, columns = torch._convert_indices_from_csr_to_coo(compressed, plain, transpose=not by_rows).unbind()
    return rows, columns, matrix.values()


# ---------------------------------------------------------------- COO


@_serves("_coalesce")
def _coalesce(self):
    if self._nnz() < 2:
        return self.clone()._coalesced_(True)
    sizes, values = self.shape[: self.sparse_dim()], self._values()
    keys, places = torch.unique(_keys_of(self), return_inverse=True)
    summed = values.new_zeros((len(keys), *values.shape[1:])).index_add_(0, places, values)
    return _coo(_indices_of(keys, sizes), summed, self.shape, is_coalesced=True)


@_serves("add.out")
def _add_out(self, other, alpha, out):
    if self.layout == torch.strided and other.layout != torch.strided:
        return _add_to_strided(self, other, alpha, out)
    if self.layout in _COMPRESSED or other.layout in _COMPRESSED:
        if self.layout != other.layout or self.layout not in (torch.sparse_csr, torch.sparse_csc):
            raise _NotHere
        total = torch.add(self.to_sparse_coo(), other.to_sparse_coo(), alpha=alpha)
        return _assign(out, total.coalesce().to_sparse(layout=self.layout).to(out.dtype))
    if other.layout != torch.sparse_coo:
        raise NotImplementedError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    if self.shape != other.shape:
        raise RuntimeError(
            f"add: expected sizes of 'self' and 'other' to match, but {list(self.shape)} != {list(other.shape)}"
        )
    dtype = _common_dtype("add", self, other, out)
    if other._nnz() == 0:
        return _assign(out, self.to(dtype))
    if self._nnz() == 0:
        return _assign(out, _like(other, other._values().to(dtype) * alpha))
    if self.sparse_dim() != other.sparse_dim():
        raise RuntimeError(
            f"add: expected 'self' and 'other' to have same density, but 'self' has {self.sparse_dim()} sparse "
            f"dimensions while 'other' has {other.sparse_dim()} sparse dimensions"
        )
    added = other._values().to(dtype)
    indices = torch.cat([self._indices(), other._indices()], 1)
    values = torch.cat([self._values().to(dtype), added if alpha == 1 else added * alpha])
    total = _coo(indices, values, self.shape, is_coalesced=False)
    return _assign(out, total.coalesce() if self.is_coalesced() and other.is_coalesced() else total)


def _add_to_strided(self, other, alpha, out):
    if self.shape != other.shape:
        raise RuntimeError(
            f"add: expected 'self' and 'other' to have same size, but self has size {list(self.shape)} while other has "
            f"size {list(other.shape)} (FYI: dense-sparse addition does not currently support broadcasting)"
        )
    dtype = _common_dtype("add", self, other, out)
    if other.layout in _COMPRESSED:
        other = other.to_sparse_coo()
    if self is out and self.dtype == dtype and self.is_contiguous():
        total = self
    else:
        total = self.to(dtype).clone(memory_format=torch.contiguous_format)
    if total.numel() > 0:  # of no element is no key
        _rows(total, other).index_add_(0, _keys_of(other), other._values().to(dtype), alpha=alpha)
    return _assign(out, total)


def _common_dtype(op: str, self, other, out) -> torch.dtype:
    dtype = torch.promote_types(self.dtype, other.dtype)
    if not torch.can_cast(dtype, out.dtype):
        raise RuntimeError(f"Can't convert result type {dtype} to output {out.dtype} in {op} operation")
    return dtype


@_serves("mul.out")
def _mul_out(self, other, out):
    dtype = torch.result_type(self, other)
    if not torch.can_cast(dtype, out.dtype):
        raise RuntimeError(f"Can't convert result type {dtype} to output {out.dtype} in mul operation")
    if self.layout == torch.strided:
        self, other = other, self
    if self.layout != torch.sparse_coo or other.layout not in (torch.sparse_coo, torch.strided):
        raise _NotHere
    if other.layout == torch.strided:
        return _assign(out, _mul_by_strided(self, other).to(out.dtype))
    if self.shape != other.shape or self.sparse_dim() != other.sparse_dim():
        raise _NotHere
    self, other = self.coalesce(), other.coalesce()
    places, found = _find(_keys_of(self), _keys_of(other))
    kept = found.nonzero().squeeze(1)
    values = self._values()[kept] * other._values()[places[kept]]
    return _assign(out, _coo(self._indices()[:, kept], values, self.shape, is_coalesced=True).to(out.dtype))


def _mul_by_strided(sparse, strided):
    if strided.ndim > sparse.ndim:
        raise _NotHere
    values = sparse._values()
    if strided.ndim <= sparse.dense_dim():
        return _like(sparse, values * strided)
    if strided.numel() == 1:
        return _like(sparse, values * strided.reshape(()))
    if torch.broadcast_shapes(strided.shape, sparse.shape) != sparse.shape:
        raise _NotHere
    # Its dimensions are the last ones of the sparse tensor. Where they meet sparse ones, size 1 has one place.
    first = sparse.ndim - strided.ndim
    places = tuple(
        sparse._indices()[first + d] if strided.shape[d] != 1 else 0 for d in range(sparse.sparse_dim() - first)
    )
    return _like(sparse, values * strided[places])


@_serves("sparse_mask")
def _sparse_mask(self, mask):
    if mask.layout != torch.sparse_coo:
        return _compressed_mask(self, mask)
    if self.shape != mask.shape:
        raise RuntimeError(
            f"sparse_mask(): operands have incompatible sizes; self has size {list(self.shape)} but mask has size "
            f"{list(mask.shape)}"
        )
    if self is mask:
        return self
    if self.layout == torch.sparse_coo:
        return _sparse_mask_projection(self, mask, False)
    if self.layout != torch.strided:
        raise _NotHere
    return _like(mask.clone(), _rows(self, mask)[_keys_of(mask)])


@_serves("_sparse_mask_projection")
def _sparse_mask_projection(self, mask, accumulate_matches):
    if self.sparse_dim() != mask.sparse_dim() or self.layout != mask.layout or mask.layout != torch.sparse_coo:
        raise _NotHere
    whole = self.coalesce()
    places, found = _find(_keys_of(mask), _keys_of(whole))
    values = whole._values()
    if len(values) == 0:
        kept = values.new_zeros((len(places), *values.shape[1:]))
    else:
        kept = torch.where(_column(found, values), values[places], 0)
    return _like(mask.clone(), kept)


def _compressed_mask(self, mask):
    if self.layout != torch.strided or mask.layout not in (torch.sparse_csr, torch.sparse_csc) or mask.ndim != 2:
        raise _NotHere
    rows, columns, _ = _parts(mask)
    return _compressed_like(mask, self[rows, columns])


@_serves("index_select")
def _index_select(self, dim, index):
    if self.layout != torch.sparse_coo:
        raise _NotHere
    if self.ndim == 0:
        raise IndexError("index_select() cannot be applied to a 0-dim tensor.")
    dim = range(self.ndim)[dim]
    if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
        raise IndexError("index_select(): Argument index must be 1-D and of an integer dtype")
    size = [*self.shape[:dim], len(index), *self.shape[dim + 1 :]]
    n = self.sparse_dim()
    if dim >= n:
        values = self._values().index_select(dim - n + 1, index)
        return _coo(self._indices(), values, size, self.is_coalesced())
    index = torch.where(index < 0, index + self.shape[dim], index).to(torch.int64)
    wrong = (index < 0) | (index >= self.shape[dim])
    if wrong.any():
        raise IndexError(f"index_select(): index contains a number that is out of range for size {self.shape[dim]}")
    # The elements in the order of this dimension: those of one index follow each other.
    at, order = self._indices()[dim].sort(stable=True)
    first, end = torch.searchsorted(at, index), torch.searchsorted(at, index, right=True)
    counts = end - first
    new = torch.repeat_interleave(torch.arange(len(index), device=index.device), counts)
    within = torch.arange(len(new), device=index.device) - (counts.cumsum(0) - counts)[new]
    taken = order[first[new] + within]
    indices = self._indices()[:, taken]
    indices[dim] = new
    return _coo(indices, self._values()[taken], size, is_coalesced=False)


@_serves("_sparse_sum_backward")
def _sparse_sum_backward(grad, self, dim):
    whole = self.coalesce()
    n, values = whole.sparse_dim(), whole._values()
    dims = {range(whole.ndim)[d] for d in dim}
    kept = [d for d in range(n) if d not in dims]
    summed = sorted(d - n for d in dims if d >= n)
    given = grad if not kept else grad.coalesce()._values()
    for d in summed:
        given = given.unsqueeze(d if not kept else d + 1)
    if not kept or len(kept) == n:
        gradient = given.expand(values.shape).clone(memory_format=torch.contiguous_format)
    else:
        grad = grad.coalesce()
        places, found = _find(_keys(whole._indices()[kept], [whole.shape[d] for d in kept]), _keys_of(grad))
        if len(given) == 0:
            gradient = torch.zeros_like(values)
        else:
            gradient = torch.where(_column(found, values), given[places].expand(values.shape), 0)
    return _like(whole.clone(), gradient, is_coalesced=True)


# ---------------------------------------------------------------- products


def _product(sparse, strided) -> torch.Tensor:
    """A sparse (m, k) with a strided (k, n) matrix: a strided (m, n) one."""
    if sparse.shape[1] != strided.shape[0]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({sparse.shape[0]}x{sparse.shape[1]} and "
            f"{strided.shape[0]}x{strided.shape[1]})"
        )
    if sparse.dtype != strided.dtype:
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {sparse.dtype} != {strided.dtype}")
    rows, columns, values = _parts(sparse)
    return torch.ops.oxitorch._spmm(rows, columns, values, strided, sparse.shape[0])


@_serves("mm")
def _mm(self, mat2):
    if mat2.layout == torch.strided:
        return _product(self, mat2)
    if self.layout == torch.strided:
        return _product(mat2.t(), self.t()).t()
    raise _NotHere


@_serves("mm.out")
def _mm_out(self, mat2, out):
    return _assign(out, _mm(self, mat2))


@_serves("addmm")
def _addmm(self, mat1, mat2, beta=1, alpha=1):
    if self.layout != torch.strided:
        raise _NotHere
    product = _mm(mat1, mat2)
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    return product + (self if beta == 1 else self * beta).expand(product.shape)


@_serves("addmm.out")
def _addmm_out(self, mat1, mat2, beta, alpha, out):
    return _assign(out, _addmm(self, mat1, mat2, beta, alpha))


@_serves("addmm_")
def _addmm_(self, mat1, mat2, beta, alpha):
    return self.copy_(_addmm(self, mat1, mat2, beta, alpha))


@_serves("addmv.out")
def _addmv_out(self, mat, vec, beta, alpha, out):
    if mat.layout not in _COMPRESSED or vec.layout != torch.strided:
        raise _NotHere
    product = _product(mat, vec.unsqueeze(1)).squeeze(1) * alpha
    return _assign(out, product if beta == 0 else product + self * beta)


@_serves("bmm")
def _bmm(self, mat2):
    if self.layout != torch.sparse_coo or mat2.layout != torch.strided:
        raise _NotHere
    if self.sparse_dim() != 3 or self.dense_dim() != 0 or mat2.ndim != 3:
        raise RuntimeError("bmm: expected a tensor with 3 sparse dimensions and a strided one with 3 dimensions")
    if self.shape[0] != mat2.shape[0] or self.shape[2] != mat2.shape[1]:
        raise RuntimeError(f"bmm: sizes {list(self.shape)} and {list(mat2.shape)} do not fit")
    batches, m, k = self.shape
    batch, rows, columns = self._indices().unbind()
    stacked = mat2.reshape(batches * k, mat2.shape[2])
    found = torch.ops.oxitorch._spmm(batch * m + rows, batch * k + columns, self._values(), stacked, batches * m)
    return found.reshape(batches, m, mat2.shape[2])


@_serves("bmm.out")
def _bmm_out(self, mat2, out):
    return _assign(out, _bmm(self, mat2))


# ---------------------------------------------------------------- compressed


def _compressed_like(matrix, values) -> torch.Tensor:
    """A CSR or CSC matrix with the indices of another one."""
    by_rows = matrix.layout in _ROWS
    compressed = matrix.crow_indices() if by_rows else matrix.ccol_indices()
    plain = matrix.col_indices() if by_rows else matrix.row_indices()
    return _aten._sparse_compressed_tensor_unsafe(
        compressed.clone(),
        plain.clone(),
        values,
        matrix.shape,
        dtype=values.dtype,
        layout=matrix.layout,
        device=values.device,
    )


@_serves("_to_sparse_csr")
def _to_sparse_csr(self, dense_dim=None):
    return _converted(self, torch.sparse_csr)


@_serves("_to_sparse_csc")
def _to_sparse_csc(self, dense_dim=None):
    return _converted(self, torch.sparse_csc)


def _converted(matrix, layout):
    # PyTorch's kernel for this calls a function that only its own devices have.
    if matrix.layout == layout:
        return matrix.clone()
    if matrix.layout not in (torch.sparse_csr, torch.sparse_csc):
        raise _NotHere
    return matrix.to_sparse_coo().to_sparse(layout=layout)


@_serves("_sparse_mm_reduce_impl")
def _sparse_mm_reduce_impl(self, other, reduce):
    """`torch.sparse.mm` with a reduction: also which element each result is of, nnz where a row has none."""
    if self.layout != torch.sparse_csr or self.ndim != 2:
        raise _NotHere
    if reduce in ("sum", "mean"):
        total = _product(self, other)
        return (total if reduce == "sum" else total / _row_counts(self, total)), other.new_empty(0, dtype=torch.int64)
    if reduce not in ("amax", "amin"):
        raise _NotHere
    rows, columns, values = _parts(self)
    shape, nnz = (self.shape[0], other.shape[1]), len(values)
    each = other[columns] * values.unsqueeze(1)
    out = other.new_zeros(shape).index_reduce_(0, rows, each, reduce, include_self=False)
    places = torch.arange(nnz, device=other.device).unsqueeze(1)
    places = torch.where(each == out[rows], places, nnz)
    of = torch.full(shape, nnz, device=other.device).index_reduce_(0, rows, places, "amin")
    return out, of


@_serves("_sparse_mm_reduce_impl_backward")
def _sparse_mm_reduce_impl_backward(self, grad_out, weight, reduce, arg_out, output_mask):
    rows, columns, values = _parts(self)
    of_values = of_other = None
    if reduce in ("sum", "mean"):
        grad = grad_out if reduce == "sum" else grad_out / _row_counts(self, grad_out)
        if output_mask[0]:
            of_values = (grad[rows] * weight[columns]).sum(1)
        if output_mask[1]:
            of_other = torch.ops.oxitorch._spmm(columns, rows, values, grad, self.shape[1])
    elif len(values) == 0:
        of_values, of_other = torch.zeros_like(values), torch.zeros_like(weight)
    else:
        grad = torch.where(arg_out < len(values), grad_out, 0)
        element = arg_out.clamp(max=len(values) - 1)
        column = columns[element]
        if output_mask[0]:
            parts = (grad * weight.gather(0, column)).flatten()
            of_values = torch.zeros_like(values).index_add_(0, element.flatten(), parts)
        if output_mask[1]:
            of_other = torch.zeros_like(weight).scatter_add_(0, column, grad * values[element])
    return _compressed_like(self, of_values) if output_mask[0] else None, of_other if output_mask[1] else None


def _row_counts(matrix, like) -> torch.Tensor:
    """How many elements each row of a CSR matrix has, at least 1, as a column of a dtype."""
    return matrix.crow_indices().diff().clamp(min=1).unsqueeze(1).to(like.dtype)


@_serves("_validate_compressed_sparse_indices")
def _validate_compressed_sparse_indices(is_crow, compressed_idx, plain_idx, cdim, dim, nnz):
    _aten._validate_compressed_sparse_indices(is_crow, compressed_idx.cpu(), plain_idx.cpu(), cdim, dim, nnz)
    return []


@_serves("sparse_sampled_addmm")
def _sparse_sampled_addmm(self, mat1, mat2, beta=1, alpha=1):
    if (
        self.layout != torch.sparse_csr
        or self.ndim != 2
        or mat1.layout != torch.strided
        or mat2.layout != torch.strided
    ):
        raise _NotHere
    if mat1.shape[1] != mat2.shape[0] or (mat1.shape[0], mat2.shape[1]) != self.shape:
        raise RuntimeError(
            f"sparse_sampled_addmm: sizes {list(mat1.shape)} and {list(mat2.shape)} do not fit {list(self.shape)}"
        )
    rows, columns, values = _parts(self)
    products = (mat1[rows] * mat2.t()[columns]).sum(1) * alpha
    return _compressed_like(self, products if beta == 0 else products + values * beta)


@_serves("sparse_sampled_addmm.out")
def _sparse_sampled_addmm_out(self, mat1, mat2, beta, alpha, out):
    return _assign(out, _sparse_sampled_addmm(self, mat1, mat2, beta, alpha))
