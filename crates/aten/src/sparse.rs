//! Which of PyTorch's kernels for sparse tensors also serve the device.
//!
//! A sparse tensor is a few strided ones (indices and values) with a shape. Where PyTorch has one kernel for its CPU and
//! CUDA (`native_functions.yaml`), that kernel reads no memory: it calls ops on the parts, which are the device's. These
//! are listed here; a test compares them with the file. What is not listed is Python's (`_sparse.py`).

/// What PyTorch calls the layout of the tensor that decides which kernel is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// `torch.strided`: the ops that make sparse tensors.
    Strided,
    /// `torch.sparse_coo`.
    Coo,
    /// `torch.sparse_csr`, `csc`, `bsr` and `bsc`.
    Compressed,
}

/// Pointwise ops that keep zero zero: with their `out` and in-place overloads.
const POINTWISE: &str = "
    abs asin asinh atan atanh ceil conj_physical deg2rad erf erfinv expm1 floor frac isinf isnan
    isneginf isposinf log1p neg rad2deg relu round sgn sign signbit sin sinh sqrt tan tanh
    threshold_backward trunc
";

/// Ops on strided tensors that make sparse ones.
const STRIDED: &str = "
    _embedding_bag_backward
    _to_sparse _to_sparse.sparse_dim _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr
";

/// Checks of strided indices that are read on the host.
const CHECKS: &str = "_validate_compressed_sparse_indices";

const COO: &str = "
    _coalesced_ _dimI _dimV _indices _nnz _sparse_broadcast_to _sparse_coo_tensor_with_dims
    _sparse_coo_tensor_with_dims_and_tensors _to_dense _to_sparse _to_sparse.sparse_dim
    _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr _values add.Tensor add_.Tensor any
    cat clone copy_ copy_sparse_to_sparse_ dense_dim div.Tensor div.Tensor_mode div.out div.out_mode
    div_.Tensor div_.Tensor_mode empty.memory_format empty_like floor_divide floor_divide.out
    floor_divide_.Tensor indices is_coalesced linalg_vector_norm mm mm.out mul.Tensor mul_.Tensor mv
    nan_to_num nan_to_num.out nan_to_num_ narrow_copy native_norm native_norm.ScalarOpt_dim_dtype
    norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype permute pow.Tensor_Scalar pow.Tensor_Scalar_out
    resize_as_sparse_ sparse_dim sparse_resize_ sparse_resize_and_clear_ sub.Tensor sub.out
    sub_.Tensor sum sum.dim_IntList unsqueeze values view_as_complex view_as_real zero_ zeros.out
";

const COMPRESSED: &str = "
    _conj_physical _nnz _to_dense _to_sparse _to_sparse.sparse_dim add.Tensor add_.Tensor angle
    angle.out ccol_indices clone col_indices copy_ crow_indices dense_dim empty.memory_format
    empty_like fill_.Scalar mul.Scalar mul.Tensor mul.out mul_.Scalar mul_.Tensor normal_ resize_
    resize_as_sparse_ row_indices select.int select_copy.int sparse_dim sum sum.dim_IntList values
    zero_
";

/// The lists: names in alphabetical order, each once.
pub const LISTS: [&str; 4] = [POINTWISE, STRIDED, COO, COMPRESSED];

/// Who serves an op on sparse tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Server {
    /// PyTorch's kernel for the CPU.
    Shared,
    /// A function in Python, which may send it on to the CPU.
    Python,
}

/// Who serves an overload of `aten` ("add.out") that PyTorch has a kernel of for this layout on the CPU; None if it is
/// no op on sparse tensors.
pub fn server(layout: Layout, overload: &str) -> Option<Server> {
    let has = |list: &str, name| list.split_whitespace().any(|listed| listed == name);
    let listed = match layout {
        Layout::Strided if has(STRIDED, overload) => return Some(Server::Shared),
        Layout::Strided => return has(CHECKS, overload).then_some(Server::Python),
        Layout::Coo => COO,
        Layout::Compressed => COMPRESSED,
    };
    let base = overload.split('.').next().unwrap_or(overload);
    let shared = has(listed, overload) || has(POINTWISE, base.strip_suffix('_').unwrap_or(base));
    Some(if shared { Server::Shared } else { Server::Python })
}
