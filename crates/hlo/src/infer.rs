//! Result types of every op, from its operands, attributes and regions. The builder and the verifier both come here, so
//! a rule is stated once. Rules follow the StableHLO specification's constraints; a broken one is a sentence.

use smallvec::{SmallVec, smallvec};

use crate::ir::*;
use crate::sharding::ReplicaGroups;
use crate::types::{DType, DTypeSet, Dims, TensorType};

pub(crate) type Types = SmallVec<[TensorType; 1]>;
type Result<T = Types> = std::result::Result<T, Broken>;

/// A broken constraint, as a sentence.
#[derive(Clone, Debug)]
pub(crate) enum Broken {
    /// One on element types.
    ElementType(String),
    /// Any other.
    Other(String),
}

impl Broken {
    /// The sentence.
    pub(crate) fn into_reason(self) -> String {
        let (Broken::ElementType(reason) | Broken::Other(reason)) = self;
        reason
    }
}

/// Argument and return types of one region.
#[derive(Clone, Debug, Default)]
pub(crate) struct RegionSig {
    pub(crate) args: SmallVec<[TensorType; 2]>,
    pub(crate) returns: SmallVec<[TensorType; 2]>,
}

/// Everything that inference may look at. `requested` is the result type for ops that state one (`reshape`, `convert`).
pub(crate) struct Sig<'a> {
    pub(crate) op: &'a Op,
    pub(crate) operands: &'a [&'a TensorType],
    pub(crate) requested: &'a [TensorType],
    pub(crate) regions: &'a [RegionSig],
}

macro_rules! ensure {
    ($cond:expr, $($fmt:tt)+) => { if !$cond { return Err(Broken::Other(format!($($fmt)+))); } };
}

/// The same for a constraint on element types.
macro_rules! ensure_types {
    ($cond:expr, $($fmt:tt)+) => { if !$cond { return Err(Broken::ElementType(format!($($fmt)+))); } };
}

/// The result types of an op, or the reason why it is wrong.
pub(crate) fn infer(s: &Sig<'_>) -> Result {
    let types = result_types(s)?;
    for t in &types {
        ensure!(t.is_representable(), "the result {t} is too large");
    }
    Ok(types)
}

fn result_types(s: &Sig<'_>) -> Result {
    if let Some(n) = arity(s.op) {
        ensure!(s.operands.len() == n, "takes {n} operands, got {}", s.operands.len());
    }
    for t in s.requested {
        ensure!(t.shape.iter().all(|&d| d >= 0), "result type {t} has a negative size");
    }
    match s.op {
        Op::Unary(u) => unary(*u, s.operands[0]),
        Op::Binary(b) => binary(*b, s.operands),
        Op::Compare(direction, kind) => compare(*direction, *kind, s.operands),
        Op::Select => select(s.operands),
        Op::Clamp => clamp(s.operands),
        Op::Complex => complex(s.operands),
        Op::Convert => convert(s.operands[0], requested(s)?),
        Op::BitcastConvert => bitcast_convert(s.operands[0], requested(s)?),
        Op::ReducePrecision { exponent_bits, mantissa_bits } => {
            reduce_precision(s.operands[0], *exponent_bits, *mantissa_bits)
        }
        Op::Iota(dim) => iota(requested(s)?, *dim),
        Op::BroadcastInDim(dims) => broadcast_in_dim(s.operands[0], requested(s)?, dims),
        Op::Reshape => reshape(s.operands[0], requested(s)?),
        Op::Transpose(perm) => transpose(s.operands[0], perm),
        Op::Slice(bounds) => slice(s.operands[0], bounds),
        Op::Pad(config) => pad(s.operands[0], s.operands[1], config),
        Op::Concatenate(dim) => concatenate(s.operands, *dim),
        Op::Reverse(dims) => reverse(s.operands[0], dims),
        Op::DynamicSlice(sizes) => dynamic_slice(s.operands, sizes),
        Op::DynamicUpdateSlice => dynamic_update_slice(s.operands),
        Op::DotGeneral(dot) => dot_general(s.operands[0], s.operands[1], &dot.0, s.requested),
        Op::Convolution(conv) => convolution(s.operands[0], s.operands[1], conv),
        Op::Cholesky { .. } => cholesky(s.operands[0]),
        Op::TriangularSolve(flags) => triangular_solve(s.operands[0], s.operands[1], flags),
        Op::Fft(kind, length) => fft(s.operands[0], *kind, length),
        Op::Gather(attrs, _) => gather(s.operands[0], s.operands[1], &attrs.0, &attrs.1),
        Op::Scatter(dims, _) => scatter(s, dims),
        Op::Reduce(dims) => reduce(s, dims),
        Op::ReduceWindow(window) => reduce_window(s, window),
        Op::SelectAndScatter(window) => select_and_scatter(s, window),
        Op::Sort { dimension, .. } => sort(s, *dimension),
        Op::TopK(k) => top_k(s.operands[0], *k),
        Op::While => while_(s),
        Op::If => branches(s, DType::Pred, 2),
        Op::Case => branches(s, DType::S32, 1),
        Op::AnnotateDevicePlacement(_) => one(s.operands[0].clone()),
        Op::OptimizationBarrier => Ok(s.operands.iter().map(|&t| t.clone()).collect()),
        Op::RngBitGenerator(algorithm) => rng_bit_generator(s.operands[0], requested(s)?, *algorithm),
        Op::CustomCall(call) => custom_call(s, call),
        Op::Deferred(_) => Ok(s.requested.iter().cloned().collect()),
        Op::Collective(c) => collective(s, c.0, &c.1),
        Op::CollectivePermute(pairs) => collective_permute(s.operands[0], pairs),
        Op::ShardingConstraint(_) => one(s.operands[0].clone()),
    }
}

/// How many operands an op takes, where that is fixed.
fn arity(op: &Op) -> Option<usize> {
    Some(match op {
        Op::Iota(_) => 0,
        Op::Unary(_)
        | Op::Convert
        | Op::BitcastConvert
        | Op::ReducePrecision { .. }
        | Op::BroadcastInDim(_)
        | Op::Reshape
        | Op::Transpose(_)
        | Op::Slice(_)
        | Op::Reverse(_)
        | Op::Cholesky { .. }
        | Op::Fft(..)
        | Op::TopK(_)
        | Op::If
        | Op::Case
        | Op::RngBitGenerator(_)
        | Op::Collective(_)
        | Op::CollectivePermute(_)
        | Op::AnnotateDevicePlacement(_)
        | Op::ShardingConstraint(_) => 1,
        Op::Binary(_)
        | Op::Compare(..)
        | Op::Complex
        | Op::Pad(_)
        | Op::DotGeneral(_)
        | Op::Convolution(_)
        | Op::TriangularSolve(_)
        | Op::Gather(..) => 2,
        Op::Select | Op::Clamp | Op::SelectAndScatter(_) => 3,
        Op::Concatenate(_)
        | Op::DynamicSlice(_)
        | Op::DynamicUpdateSlice
        | Op::Scatter(..)
        | Op::Reduce(_)
        | Op::ReduceWindow(_)
        | Op::Sort { .. }
        | Op::While
        | Op::OptimizationBarrier
        | Op::CustomCall(_)
        | Op::Deferred(_) => return None,
    })
}

// ---- shared checks

fn requested<'a>(s: &'a Sig<'_>) -> Result<&'a TensorType> {
    s.requested.first().ok_or_else(|| Broken::Other("needs a result type".to_owned()))
}

fn one(t: TensorType) -> Result {
    Ok(smallvec![t])
}

fn accepts(set: DTypeSet, t: &TensorType) -> Result<()> {
    ensure_types!(set.has(t.dtype), "element type must be one of {set}, got {}", t.dtype);
    Ok(())
}

fn dim_in_range(dim: i64, rank: usize, what: &str) -> Result<usize> {
    ensure!(dim >= 0 && (dim as usize) < rank, "{what} {dim} is out of range for rank {rank}");
    Ok(dim as usize)
}

/// All in range and no two alike.
fn unique_dims(dims: &[i64], rank: usize, what: &str) -> Result<()> {
    for (i, &d) in dims.iter().enumerate() {
        dim_in_range(d, rank, what)?;
        ensure!(!dims[..i].contains(&d), "{what} {d} appears twice");
    }
    Ok(())
}

fn ascending(dims: &[i64], what: &str) -> Result<()> {
    ensure!(dims.windows(2).all(|w| w[0] < w[1]), "{what} {dims:?} must be ascending");
    Ok(())
}

fn same_len(got: usize, want: usize, what: &str) -> Result<()> {
    ensure!(got == want, "{what} must have {want} entries, got {got}");
    Ok(())
}

/// Sizes without the dimensions named, in order.
fn without(shape: &[i64], dims: &[i64]) -> Dims {
    shape.iter().enumerate().filter(|(i, _)| !dims.contains(&(*i as i64))).map(|(_, &d)| d).collect()
}

/// Overflow shows up as an error, never as a wrapped size.
fn checked(size: Option<i64>) -> Result<i64> {
    size.ok_or_else(|| Broken::Other("a size overflows 64 bits".to_owned()))
}

/// Size of a dimension after interior dilation: `n` elements with `step - 1` holes between them.
fn dilated(n: i64, step: i64) -> Option<i64> {
    if n == 0 { Some(0) } else { (n - 1).checked_mul(step)?.checked_add(1) }
}

/// Number of positions of a dilated window over a dilated and padded dimension.
fn window_count(
    n: i64,
    base_dilation: i64,
    (low, high): (i64, i64),
    window: i64,
    window_dilation: i64,
    stride: i64,
) -> Result<i64> {
    ensure!(window >= 0, "window size {window} is negative");
    ensure!(stride >= 1, "stride {stride} must be at least 1");
    ensure!(base_dilation >= 1 && window_dilation >= 1, "dilations must be at least 1");
    let base = checked(dilated(n, base_dilation).and_then(|x| x.checked_add(low)?.checked_add(high)))?;
    let window = checked(dilated(window, window_dilation))?;
    Ok(if base <= 0 || window > base { 0 } else { (base - window) / stride + 1 })
}

fn pair_of_scalars(region: &RegionSig, dtypes: &[DType], what: &str) -> Result<()> {
    let n = dtypes.len();
    let fits = region.args.len() == 2 * n
        && region.args.iter().zip(dtypes.iter().chain(dtypes)).all(|(a, &d)| a.rank() == 0 && a.dtype == d);
    ensure_types!(fits, "{what} must take {n} + {n} scalars of the operands' element types");
    Ok(())
}

/// A reducer takes accumulators and elements, all scalars, and returns the accumulators.
fn reducer(s: &Sig<'_>, dtypes: &[DType]) -> Result<()> {
    same_len(s.regions.len(), 1, "regions")?;
    let region = &s.regions[0];
    pair_of_scalars(region, dtypes, "the reducer")?;
    let fits = region.returns.len() == dtypes.len()
        && region.returns.iter().zip(dtypes).all(|(r, &d)| r.rank() == 0 && r.dtype == d);
    ensure!(fits, "the reducer returns ({}), expected one scalar per operand", list(&region.returns));
    Ok(())
}

fn predicate(region: &RegionSig, what: &str) -> Result<()> {
    let fits = region.returns.len() == 1 && region.returns[0] == TensorType::scalar(DType::Pred);
    ensure!(fits, "{what} must return one tensor<i1>, returns ({})", list(&region.returns));
    Ok(())
}

fn list(types: &[TensorType]) -> String {
    types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

// ---- elementwise

fn elementwise(row: &ElementwiseRow, t: &TensorType) -> Result {
    accepts(row.accepts, t)?;
    one(match row.result {
        ResultKind::Same => t.clone(),
        ResultKind::Real => t.with_dtype(t.dtype.real()),
        ResultKind::Pred => t.with_dtype(DType::Pred),
    })
}

fn unary(op: Unary, t: &TensorType) -> Result {
    elementwise(op.row(), t)
}

fn binary(op: Binary, ts: &[&TensorType]) -> Result {
    ensure!(ts[0] == ts[1], "operands must have the same type");
    elementwise(op.row(), ts[0])
}

fn compare(direction: Direction, kind: CompareKind, ts: &[&TensorType]) -> Result {
    ensure!(ts[0] == ts[1], "operands must have the same type");
    let ordered = !matches!(direction, Direction::Eq | Direction::Ne);
    ensure!(!(ordered && ts[0].dtype.is_complex()), "complex numbers have no order");
    ensure!(kind == CompareKind::Natural || ts[0].dtype.is_float(), "a total order needs floats");
    one(ts[0].with_dtype(DType::Pred))
}

fn select(ts: &[&TensorType]) -> Result {
    ensure!(ts[0].dtype == DType::Pred, "the predicate must be i1");
    ensure!(ts[1] == ts[2], "both branches must have the same type");
    ensure!(
        ts[0].rank() == 0 || ts[0].shape == ts[1].shape,
        "the predicate must be a scalar or have the branches' shape"
    );
    one(ts[1].clone())
}

fn clamp(ts: &[&TensorType]) -> Result {
    let (min, x, max) = (ts[0], ts[1], ts[2]);
    accepts(DTypeSet::REAL_NUMBER, x)?;
    for bound in [min, max] {
        ensure_types!(bound.dtype == x.dtype, "bounds must have the operand's element type");
        ensure!(
            bound.rank() == 0 || bound.shape == x.shape,
            "bounds must be scalars or have the operand's shape"
        );
    }
    one(x.clone())
}

fn complex(ts: &[&TensorType]) -> Result {
    ensure!(ts[0] == ts[1], "operands must have the same type");
    ensure!(matches!(ts[0].dtype, DType::F32 | DType::F64), "parts must be f32 or f64");
    one(ts[0].with_dtype(ts[0].dtype.complex()))
}

fn convert(x: &TensorType, want: &TensorType) -> Result {
    ensure!(x.shape == want.shape, "cannot change the shape to {want}");
    one(want.clone())
}

fn bitcast_convert(x: &TensorType, want: &TensorType) -> Result {
    let (from, to) = (x.dtype.bits(), want.dtype.bits());
    ensure!(
        x.dtype.is_complex() == want.dtype.is_complex(),
        "cannot reinterpret between complex and real ({want})"
    );
    let fits = if from == to {
        x.shape == want.shape
    } else if from > to {
        want.shape
            .split_last()
            .is_some_and(|(&last, rest)| rest == &x.shape[..] && last == i64::from(from / to))
    } else {
        x.shape
            .split_last()
            .is_some_and(|(&last, rest)| rest == &want.shape[..] && last == i64::from(to / from))
    };
    ensure!(fits, "cannot be reinterpreted as {want}");
    one(want.clone())
}

fn reduce_precision(x: &TensorType, exponent_bits: u32, mantissa_bits: u32) -> Result {
    accepts(DTypeSet::FLOAT, x)?;
    ensure!(exponent_bits >= 1, "exponent_bits must be at least 1");
    ensure!(exponent_bits <= 11 && mantissa_bits <= 52, "wider than f64");
    one(x.clone())
}

// ---- shape

fn iota(want: &TensorType, dim: i64) -> Result {
    ensure!(want.dtype != DType::Pred, "cannot count in i1");
    dim_in_range(dim, want.rank(), "iota dimension")?;
    one(want.clone())
}

fn broadcast_in_dim(x: &TensorType, want: &TensorType, dims: &[i64]) -> Result {
    ensure_types!(x.dtype == want.dtype, "cannot change the element type to {}", want.dtype);
    same_len(dims.len(), x.rank(), "broadcast_dimensions")?;
    unique_dims(dims, want.rank(), "broadcast dimension")?;
    for (&size, &d) in x.shape.iter().zip(dims) {
        let to = want.shape[d as usize];
        ensure!(size == 1 || size == to, "size {size} cannot become {to} in dimension {d} of {want}");
    }
    one(want.clone())
}

fn reshape(x: &TensorType, want: &TensorType) -> Result {
    ensure_types!(x.dtype == want.dtype, "cannot change the element type to {}", want.dtype);
    ensure!(x.numel() == want.numel(), "{} elements do not fit {want}", x.numel());
    one(want.clone())
}

fn transpose(x: &TensorType, perm: &[i64]) -> Result {
    same_len(perm.len(), x.rank(), "permutation")?;
    unique_dims(perm, x.rank(), "permutation entry")?;
    one(x.with_shape(perm.iter().map(|&p| x.shape[p as usize]).collect::<Dims>()))
}

fn slice(x: &TensorType, b: &SliceBounds) -> Result {
    for (dims, what) in [(&b.start, "start_indices"), (&b.limit, "limit_indices"), (&b.strides, "strides")] {
        same_len(dims.len(), x.rank(), what)?;
    }
    let mut shape = Dims::new();
    for (i, &size) in x.shape.iter().enumerate() {
        let (start, limit, stride) = (b.start[i], b.limit[i], b.strides[i]);
        ensure!(stride >= 1, "stride {stride} must be at least 1");
        ensure!(
            0 <= start && start <= limit && limit <= size,
            "bounds {start}:{limit} do not fit dimension {i} of size {size}"
        );
        shape.push((limit - start).div_euclid(stride) + i64::from((limit - start) % stride != 0));
    }
    one(x.with_shape(shape))
}

fn pad(x: &TensorType, value: &TensorType, c: &PadConfig) -> Result {
    ensure!(
        value.rank() == 0 && value.dtype == x.dtype,
        "the padding value must be a scalar of type {}",
        x.dtype
    );
    for (dims, what) in [(&c.low, "low"), (&c.high, "high"), (&c.interior, "interior")] {
        same_len(dims.len(), x.rank(), what)?;
    }
    let mut shape = Dims::new();
    for (i, &size) in x.shape.iter().enumerate() {
        ensure!(c.interior[i] >= 0, "interior padding {} is negative", c.interior[i]);
        let step = checked(c.interior[i].checked_add(1))?;
        let padded = dilated(size, step).and_then(|n| n.checked_add(c.low[i])?.checked_add(c.high[i]));
        let padded = checked(padded)?;
        ensure!(padded >= 0, "dimension {i} would have size {padded}");
        shape.push(padded);
    }
    one(x.with_shape(shape))
}

fn concatenate(ts: &[&TensorType], dim: i64) -> Result {
    ensure!(!ts.is_empty(), "needs at least one operand");
    let first = ts[0];
    let at = dim_in_range(dim, first.rank(), "dimension")?;
    let mut total = 0i64;
    for (i, t) in ts.iter().enumerate() {
        ensure_types!(t.dtype == first.dtype, "operand {i} has another element type than operand 0");
        ensure!(t.rank() == first.rank(), "operand {i} has another rank than operand 0");
        let agree = (0..t.rank()).all(|d| d == at || t.shape[d] == first.shape[d]);
        ensure!(agree, "operand {i} differs from operand 0 outside of dimension {dim}");
        total = checked(total.checked_add(t.shape[at]))?;
    }
    let mut shape = first.shape.clone();
    shape[at] = total;
    one(first.with_shape(shape))
}

fn reverse(x: &TensorType, dims: &[i64]) -> Result {
    unique_dims(dims, x.rank(), "dimension")?;
    one(x.clone())
}

/// Start indices of the dynamic ops: one integer scalar per dimension, all of one type.
fn start_indices(indices: &[&TensorType], rank: usize) -> Result<()> {
    same_len(indices.len(), rank, "start indices")?;
    for t in indices {
        ensure!(t.rank() == 0 && t.dtype.is_integral(), "start indices must be integer scalars, got {t}");
        ensure_types!(t.dtype == indices[0].dtype, "start indices must have one element type");
    }
    Ok(())
}

fn dynamic_slice(ts: &[&TensorType], sizes: &[i64]) -> Result {
    let (x, indices) = ts.split_first().ok_or_else(|| Broken::Other("needs an operand".to_owned()))?;
    start_indices(indices, x.rank())?;
    same_len(sizes.len(), x.rank(), "slice_sizes")?;
    for (i, (&size, &of)) in sizes.iter().zip(&x.shape).enumerate() {
        ensure!(0 <= size && size <= of, "slice size {size} does not fit dimension {i} of size {of}");
    }
    one(x.with_shape(sizes))
}

fn dynamic_update_slice(ts: &[&TensorType]) -> Result {
    ensure!(ts.len() >= 2, "needs an operand and an update");
    let (x, update) = (ts[0], ts[1]);
    ensure_types!(x.dtype == update.dtype, "the update must have the operand's element type");
    same_len(update.rank(), x.rank(), "the update's shape")?;
    for (i, (&size, &of)) in update.shape.iter().zip(&x.shape).enumerate() {
        ensure!(size <= of, "update size {size} does not fit dimension {i} of size {of}");
    }
    start_indices(&ts[2..], x.rank())?;
    one(x.clone())
}

// ---- contraction

/// `requested[0]` states the result's element type when it is not the operands'.
fn dot_general(l: &TensorType, r: &TensorType, d: &DotDims, requested: &[TensorType]) -> Result {
    let dtype = match requested.first() {
        Some(want) => want.dtype,
        None => l.dtype,
    };
    ensure_types!(
        l.dtype == r.dtype || !requested.is_empty(),
        "operands must have one element type or the result type be stated"
    );
    ensure!(l.dtype.is_complex() == r.dtype.is_complex(), "complex and real operands cannot be mixed");
    ensure!(
        l.dtype.class() == dtype.class() || l.dtype == DType::Pred,
        "cannot accumulate {} in {dtype}",
        l.dtype
    );
    same_len(d.rhs_batching.len(), d.lhs_batching.len(), "rhs_batching_dimensions")?;
    same_len(d.rhs_contracting.len(), d.lhs_contracting.len(), "rhs_contracting_dimensions")?;
    let lhs: Dims = d.lhs_batching.iter().chain(&d.lhs_contracting).copied().collect();
    let rhs: Dims = d.rhs_batching.iter().chain(&d.rhs_contracting).copied().collect();
    unique_dims(&lhs, l.rank(), "lhs dimension")?;
    unique_dims(&rhs, r.rank(), "rhs dimension")?;
    for (&a, &b) in lhs.iter().zip(&rhs) {
        let (n, m) = (l.shape[a as usize], r.shape[b as usize]);
        ensure!(n == m, "lhs dimension {a} of size {n} meets rhs dimension {b} of size {m}");
    }
    let batch = d.lhs_batching.iter().map(|&i| l.shape[i as usize]);
    let shape: Dims = batch.chain(without(&l.shape, &lhs)).chain(without(&r.shape, &rhs)).collect();
    one(TensorType::new(dtype, shape))
}

fn convolution(x: &TensorType, k: &TensorType, c: &Convolution) -> Result {
    let n = c.dims.input_spatial.len();
    same_len(x.rank(), n + 2, "the input's shape")?;
    same_len(k.rank(), n + 2, "the kernel's shape")?;
    conv_dims(&c.dims, n)?;
    let lens =
        [c.strides.len(), c.padding.len(), c.lhs_dilation.len(), c.rhs_dilation.len(), c.reversal.len()];
    ensure!(lens.iter().all(|&l| l == n), "strides, padding, dilations and reversal must have {n} entries");
    ensure_types!(
        x.dtype == k.dtype || c.out_dtype.is_some(),
        "operands must have one element type or the result type be stated"
    );
    accepts(DTypeSet::NUMBER, x)?;
    let (batch, out_features) = conv_groups(x, k, c)?;
    let mut shape = Dims::from_elem(0, n + 2);
    shape[c.dims.output_batch as usize] = batch;
    shape[c.dims.output_feature as usize] = out_features;
    for i in 0..n {
        let size = x.shape[c.dims.input_spatial[i] as usize];
        let window = k.shape[c.dims.kernel_spatial[i] as usize];
        shape[c.dims.output_spatial[i] as usize] =
            window_count(size, c.lhs_dilation[i], c.padding[i], window, c.rhs_dilation[i], c.strides[i])?;
    }
    one(TensorType::new(c.out_dtype.unwrap_or(x.dtype), shape))
}

fn conv_dims(d: &ConvDims, n: usize) -> Result<()> {
    let check = |a: i64, b: i64, spatial: &[i64], what: &str| {
        same_len(spatial.len(), n, what)?;
        let all: Dims = [a, b].iter().chain(spatial).copied().collect();
        unique_dims(&all, n + 2, what)
    };
    check(d.input_batch, d.input_feature, &d.input_spatial, "input dimension")?;
    check(d.kernel_input_feature, d.kernel_output_feature, &d.kernel_spatial, "kernel dimension")?;
    check(d.output_batch, d.output_feature, &d.output_spatial, "output dimension")
}

/// Checks the group counts and returns the output's batch and feature sizes.
fn conv_groups(x: &TensorType, k: &TensorType, c: &Convolution) -> Result<(i64, i64)> {
    let (groups, batch_groups) = (c.feature_group_count, c.batch_group_count);
    ensure!(groups >= 1 && batch_groups >= 1, "group counts must be at least 1");
    ensure!(
        groups == 1 || batch_groups == 1,
        "feature_group_count and batch_group_count cannot both be above 1"
    );
    let batch = x.shape[c.dims.input_batch as usize];
    let features = x.shape[c.dims.input_feature as usize];
    let kernel_in = k.shape[c.dims.kernel_input_feature as usize];
    let kernel_out = k.shape[c.dims.kernel_output_feature as usize];
    ensure!(batch % batch_groups == 0, "batch {batch} is not divisible by batch_group_count {batch_groups}");
    ensure!(
        features % groups == 0,
        "{features} input features are not divisible by feature_group_count {groups}"
    );
    ensure!(
        features / groups == kernel_in,
        "{features} input features in {groups} groups do not fit a kernel of {kernel_in} input features"
    );
    ensure!(
        kernel_out % groups == 0 && kernel_out % batch_groups == 0,
        "{kernel_out} output features are not divisible by the group count"
    );
    Ok((batch / batch_groups, kernel_out))
}

/// The last two dimensions form square matrices.
fn square(a: &TensorType) -> Result<()> {
    accepts(DTypeSet::FLOAT_COMPLEX, a)?;
    let n = a.rank();
    ensure!(n >= 2 && a.shape[n - 1] == a.shape[n - 2], "the last two dimensions must be equal");
    Ok(())
}

fn cholesky(a: &TensorType) -> Result {
    square(a)?;
    one(a.clone())
}

fn triangular_solve(a: &TensorType, b: &TensorType, flags: &TriangularSolve) -> Result {
    square(a)?;
    ensure_types!(a.dtype == b.dtype && a.rank() == b.rank(), "operands must have one element type and rank");
    let n = a.rank();
    ensure!(a.shape[..n - 2] == b.shape[..n - 2], "batch dimensions must agree");
    let side = if flags.left_side { n - 2 } else { n - 1 };
    ensure!(b.shape[side] == a.shape[n - 1], "dimension {side} of b must have size {}", a.shape[n - 1]);
    one(b.clone())
}

fn fft(x: &TensorType, kind: FftType, length: &[i64]) -> Result {
    let n = length.len();
    ensure!(
        (1..=3).contains(&n) && n <= x.rank(),
        "fft_length must have 1 to 3 entries and no more than the rank"
    );
    ensure!(length.iter().all(|&l| l >= 0), "fft_length {length:?} is negative");
    let real = matches!(kind, FftType::Rfft);
    ensure_types!(
        if real { matches!(x.dtype, DType::F32 | DType::F64) } else { x.dtype.is_complex() },
        "{} of element type {} is not defined",
        kind.name(),
        x.dtype
    );
    let inner = x.rank() - n;
    let half = |l: i64| if l == 0 { 0 } else { l / 2 + 1 };
    for (i, &l) in length.iter().enumerate() {
        let want = if kind == FftType::Irfft && i + 1 == n { half(l) } else { l };
        let got = x.shape[inner + i];
        ensure!(got == want, "dimension {} must have size {want}, got {got}", inner + i);
    }
    let mut shape = x.shape.clone();
    let last = x.rank() - 1;
    let dtype = match kind {
        FftType::Fft | FftType::Ifft => x.dtype,
        FftType::Rfft => {
            shape[last] = half(length[n - 1]);
            x.dtype.complex()
        }
        FftType::Irfft => {
            shape[last] = length[n - 1];
            x.dtype.real()
        }
    };
    one(TensorType::new(dtype, shape))
}

// ---- index

/// Size of the index vector, and the shape of the indices without it.
fn index_shape(indices: &TensorType, index_vector_dim: i64) -> Result<(i64, Dims)> {
    ensure!(indices.dtype.is_integral(), "indices must be integers, got {}", indices.dtype);
    let rank = indices.rank() as i64;
    ensure!((0..=rank).contains(&index_vector_dim), "index_vector_dim {index_vector_dim} is out of range");
    let size = if index_vector_dim == rank { 1 } else { indices.shape[index_vector_dim as usize] };
    Ok((size, without(&indices.shape, &[index_vector_dim])))
}

/// The batching dimensions of an indexed operand and of its indices come in pairs of one size.
fn batching_pairs(
    x: &TensorType,
    dims: &[i64],
    indices: &TensorType,
    index_dims: &[i64],
    vector: i64,
) -> Result<()> {
    same_len(index_dims.len(), dims.len(), "the indices' batching dimensions")?;
    unique_dims(index_dims, indices.rank(), "batching dimension of the indices")?;
    for (&d, &i) in dims.iter().zip(index_dims) {
        ensure!(i != vector, "batching dimension {i} of the indices is index_vector_dim");
        let (n, m) = (x.shape[d as usize], indices.shape[i as usize]);
        ensure!(n == m, "batching dimension {d} of size {n} meets dimension {i} of the indices of size {m}");
    }
    Ok(())
}

fn gather(x: &TensorType, indices: &TensorType, d: &GatherDims, sizes: &[i64]) -> Result {
    let (vector, batch) = index_shape(indices, d.index_vector_dim)?;
    same_len(sizes.len(), x.rank(), "slice_sizes")?;
    same_len(d.start_index_map.len(), vector.max(0) as usize, "start_index_map")?;
    let removed: Dims = d.collapsed_slice_dims.iter().chain(&d.operand_batching_dims).copied().collect();
    unique_dims(&removed, x.rank(), "collapsed or batching dimension")?;
    ascending(&d.collapsed_slice_dims, "collapsed_slice_dims")?;
    ascending(&d.operand_batching_dims, "operand_batching_dims")?;
    ascending(&d.offset_dims, "offset_dims")?;
    let indexed: Dims = d.start_index_map.iter().chain(&d.operand_batching_dims).copied().collect();
    unique_dims(&indexed, x.rank(), "start_index_map or batching dimension")?;
    for (i, (&size, &of)) in sizes.iter().zip(&x.shape).enumerate() {
        ensure!(0 <= size && size <= of, "slice size {size} does not fit dimension {i} of size {of}");
    }
    for &i in &removed {
        ensure!(
            sizes[i as usize] <= 1,
            "slice size {} of removed dimension {i} must be at most 1",
            sizes[i as usize]
        );
    }
    batching_pairs(x, &d.operand_batching_dims, indices, &d.start_indices_batching_dims, d.index_vector_dim)?;
    let offsets = without(sizes, &removed);
    same_len(d.offset_dims.len(), offsets.len(), "offset_dims")?;
    let rank = batch.len() + offsets.len();
    unique_dims(&d.offset_dims, rank, "offset dimension")?;
    let (mut batch, mut offsets) = (batch.into_iter(), offsets.into_iter());
    let shape: Dims = (0..rank as i64)
        .filter_map(|i| if d.offset_dims.contains(&i) { offsets.next() } else { batch.next() })
        .collect();
    one(x.with_shape(shape))
}

fn scatter(s: &Sig<'_>, d: &ScatterDims) -> Result {
    ensure!(s.operands.len() >= 3 && s.operands.len() % 2 == 1, "takes n inputs, the indices and n updates");
    let n = s.operands.len() / 2;
    let (inputs, indices, updates) = (&s.operands[..n], s.operands[n], &s.operands[n + 1..]);
    let (x, update) = (inputs[0], updates[0]);
    for i in 0..n {
        ensure!(inputs[i].shape == x.shape, "inputs must have one shape");
        ensure!(updates[i].shape == update.shape, "updates must have one shape");
        ensure_types!(inputs[i].dtype == updates[i].dtype, "update {i} must have its input's element type");
    }
    scatter_dims(x, indices, update, d)?;
    let dtypes: SmallVec<[DType; 2]> = inputs.iter().map(|t| t.dtype).collect();
    reducer(s, &dtypes)?;
    Ok(inputs.iter().map(|&t| t.clone()).collect())
}

fn scatter_dims(x: &TensorType, indices: &TensorType, update: &TensorType, d: &ScatterDims) -> Result<()> {
    let (vector, batch) = index_shape(indices, d.index_vector_dim)?;
    same_len(d.scatter_dims_to_operand_dims.len(), vector.max(0) as usize, "scatter_dims_to_operand_dims")?;
    let removed: Dims = d.inserted_window_dims.iter().chain(&d.input_batching_dims).copied().collect();
    unique_dims(&removed, x.rank(), "inserted or batching dimension")?;
    ascending(&d.inserted_window_dims, "inserted_window_dims")?;
    ascending(&d.input_batching_dims, "input_batching_dims")?;
    ascending(&d.update_window_dims, "update_window_dims")?;
    let indexed: Dims =
        d.scatter_dims_to_operand_dims.iter().chain(&d.input_batching_dims).copied().collect();
    unique_dims(&indexed, x.rank(), "scatter_dims_to_operand_dims or batching dimension")?;
    batching_pairs(x, &d.input_batching_dims, indices, &d.scatter_indices_batching_dims, d.index_vector_dim)?;
    same_len(update.rank(), batch.len() + d.update_window_dims.len(), "the updates' shape")?;
    unique_dims(&d.update_window_dims, update.rank(), "update window dimension")?;
    same_len(
        d.update_window_dims.len() + removed.len(),
        x.rank(),
        "window, inserted and batching dimensions",
    )?;
    let limits = without(&x.shape, &removed);
    let (mut batch, mut limits) = (batch.into_iter(), limits.into_iter());
    for (i, &size) in update.shape.iter().enumerate() {
        if d.update_window_dims.contains(&(i as i64)) {
            let of = limits.next().unwrap_or(0);
            ensure!(size <= of, "window size {size} of update dimension {i} exceeds the input's {of}");
        } else {
            let of = batch.next().unwrap_or(0);
            ensure!(size == of, "update dimension {i} has size {size}, the indices have {of}");
        }
    }
    Ok(())
}

fn top_k(x: &TensorType, k: i64) -> Result {
    let last = *x.shape.last().ok_or_else(|| Broken::Other("needs at least one dimension".to_owned()))?;
    accepts(DTypeSet::INT.or(DTypeSet::FLOAT), x)?;
    ensure!(0 <= k && k <= last, "k = {k} does not fit the last dimension of size {last}");
    let mut shape = x.shape.clone();
    shape[x.rank() - 1] = k;
    Ok(smallvec![x.with_shape(shape.clone()), TensorType::new(DType::S32, shape)])
}

// ---- reductions and windows

/// Splits operands into equally many inputs and initial values, and checks them.
fn inputs_and_inits<'a>(s: &Sig<'a>) -> Result<(&'a [&'a TensorType], SmallVec<[DType; 2]>)> {
    let n = s.operands.len() / 2;
    ensure!(n >= 1 && s.operands.len() == 2 * n, "takes as many initial values as inputs, and at least one");
    let (inputs, inits) = s.operands.split_at(n);
    for (i, (x, init)) in inputs.iter().zip(inits).enumerate() {
        ensure!(x.shape == inputs[0].shape, "inputs must have one shape");
        ensure!(
            init.rank() == 0 && init.dtype == x.dtype,
            "initial value {i} must be a scalar of type {}",
            x.dtype
        );
    }
    let dtypes = inputs.iter().map(|t| t.dtype).collect();
    Ok((inputs, dtypes))
}

fn reduce(s: &Sig<'_>, dims: &[i64]) -> Result {
    let (inputs, dtypes) = inputs_and_inits(s)?;
    unique_dims(dims, inputs[0].rank(), "dimension")?;
    reducer(s, &dtypes)?;
    let shape = without(&inputs[0].shape, dims);
    Ok(inputs.iter().map(|t| t.with_shape(shape.clone())).collect())
}

fn window_shape(x: &TensorType, w: &Window) -> Result<Dims> {
    let n = x.rank();
    let lens =
        [w.dims.len(), w.strides.len(), w.base_dilations.len(), w.window_dilations.len(), w.padding.len()];
    ensure!(lens.iter().all(|&l| l == n), "every window attribute must have {n} entries");
    let size = |i: usize| {
        window_count(
            x.shape[i],
            w.base_dilations[i],
            w.padding[i],
            w.dims[i],
            w.window_dilations[i],
            w.strides[i],
        )
    };
    (0..n).map(size).collect()
}

fn reduce_window(s: &Sig<'_>, w: &Window) -> Result {
    let (inputs, dtypes) = inputs_and_inits(s)?;
    let shape = window_shape(inputs[0], w)?;
    ensure!(w.dims.iter().all(|&d| d >= 1), "window sizes must be at least 1");
    reducer(s, &dtypes)?;
    Ok(inputs.iter().map(|t| t.with_shape(shape.clone())).collect())
}

fn select_and_scatter(s: &Sig<'_>, w: &Window) -> Result {
    let (x, source, init) = (s.operands[0], s.operands[1], s.operands[2]);
    let plain = |dims: &Dims| dims.iter().all(|&d| d == 1);
    ensure!(plain(&w.base_dilations) && plain(&w.window_dilations), "dilated windows are not supported");
    let shape = window_shape(x, w)?;
    ensure!(w.dims.iter().all(|&d| d >= 1), "window sizes must be at least 1");
    ensure!(source.shape == shape, "the source must have the windows' shape {shape:?}");
    ensure_types!(source.dtype == x.dtype, "the source must have the operand's element type");
    ensure!(
        init.rank() == 0 && init.dtype == x.dtype,
        "the initial value must be a scalar of type {}",
        x.dtype
    );
    same_len(s.regions.len(), 2, "regions")?;
    for region in s.regions {
        pair_of_scalars(region, &[x.dtype], "select and scatter")?;
    }
    predicate(&s.regions[0], "select")?;
    let returns = &s.regions[1].returns;
    let fits = returns.len() == 1 && returns[0] == TensorType::scalar(x.dtype);
    ensure!(fits, "scatter must return one scalar of type {}, returns ({})", x.dtype, list(returns));
    one(x.clone())
}

fn sort(s: &Sig<'_>, dim: i64) -> Result {
    ensure!(!s.operands.is_empty(), "needs at least one operand");
    let x = s.operands[0];
    ensure!(s.operands.iter().all(|t| t.shape == x.shape), "operands must have one shape");
    dim_in_range(dim, x.rank(), "dimension")?;
    same_len(s.regions.len(), 1, "regions")?;
    let fits = s.regions[0].args.len() == 2 * s.operands.len()
        && s.operands.iter().enumerate().all(|(i, t)| {
            let scalar = TensorType::scalar(t.dtype);
            s.regions[0].args[2 * i] == scalar && s.regions[0].args[2 * i + 1] == scalar
        });
    ensure!(fits, "the comparator must take a pair of scalars for each operand");
    predicate(&s.regions[0], "the comparator")?;
    Ok(s.operands.iter().map(|&t| t.clone()).collect())
}

// ---- control

fn while_(s: &Sig<'_>) -> Result {
    same_len(s.regions.len(), 2, "regions")?;
    for region in s.regions {
        let fits = region.args.iter().eq(s.operands.iter().copied());
        ensure!(fits, "condition and body must take the loop's values");
    }
    predicate(&s.regions[0], "the condition")?;
    let body = &s.regions[1].returns;
    ensure!(
        body.iter().eq(s.operands.iter().copied()),
        "the body returns ({}), expected the loop's types",
        list(body)
    );
    Ok(s.operands.iter().map(|&t| t.clone()).collect())
}

fn branches(s: &Sig<'_>, selector: DType, at_least: usize) -> Result {
    ensure!(*s.operands[0] == TensorType::scalar(selector), "the selector must be a tensor<{selector}>");
    ensure!(s.regions.len() >= at_least, "needs at least {at_least} branches");
    let first = &s.regions[0].returns;
    for (i, region) in s.regions.iter().enumerate() {
        ensure!(region.args.is_empty(), "branches take no arguments");
        ensure!(
            region.returns == *first,
            "branch {i} returns ({}), branch 0 ({})",
            list(&region.returns),
            list(first)
        );
    }
    Ok(first.iter().cloned().collect())
}

fn rng_bit_generator(state: &TensorType, want: &TensorType, algorithm: RngAlgorithm) -> Result {
    ensure!(state.dtype == DType::U64 && state.rank() == 1, "the state must be a vector of ui64");
    let n = state.shape[0];
    let fits = match algorithm {
        RngAlgorithm::Default => true,
        RngAlgorithm::ThreeFry => n == 2,
        RngAlgorithm::Philox => n == 2 || n == 3,
    };
    ensure!(fits, "{} does not work with a state of {n} words", algorithm.name());
    ensure!(DTypeSet::UNSIGNED.has(want.dtype), "generates unsigned integers, not {}", want.dtype);
    Ok(smallvec![state.clone(), want.clone()])
}

fn custom_call(s: &Sig<'_>, call: &CustomCall) -> Result {
    ensure!(!call.target.is_empty(), "needs a target name");
    for &(output, operand) in &call.output_operand_aliases {
        let (Some(r), Some(&o)) = (s.requested.get(output as usize), s.operands.get(operand as usize)) else {
            let reason = format!("alias of output {output} and operand {operand} is out of range");
            return Err(Broken::Other(reason));
        };
        ensure!(r == o, "output {output} cannot share the buffer of operand {operand}: types differ");
    }
    Ok(s.requested.iter().cloned().collect())
}

// ---- several devices

fn collective(s: &Sig<'_>, what: Collective, groups: &ReplicaGroups) -> Result {
    let (x, members) = (s.operands[0], groups.size() as i64);
    match what {
        Collective::AllReduce | Collective::ReduceScatter(_) => reducer(s, &[x.dtype])?,
        Collective::AllGather(_) | Collective::AllToAll { .. } => same_len(s.regions.len(), 0, "regions")?,
    }
    let mut ty = x.clone();
    if let Collective::ReduceScatter(dim) | Collective::AllToAll { split: dim, .. } = what {
        let dim = dim_in_range(dim, x.rank(), "dimension")?;
        let size = ty.shape[dim];
        ensure!(size % members == 0, "dimension {dim} of size {size} has no {members} equal parts");
        ty.shape[dim] = size / members;
    }
    if let Collective::AllGather(dim) | Collective::AllToAll { concat: dim, .. } = what {
        let dim = dim_in_range(dim, x.rank(), "dimension")?;
        ty.shape[dim] = checked(ty.shape[dim].checked_mul(members))?;
    }
    one(ty)
}

fn collective_permute(x: &TensorType, pairs: &[(i64, i64)]) -> Result {
    for (i, (from, to)) in pairs.iter().enumerate() {
        ensure!(*from >= 0 && *to >= 0, "replicas {from} and {to}: they are counted from 0");
        let is_new = !pairs[..i].iter().any(|(f, t)| f == from || t == to);
        ensure!(is_new, "a replica sends and is sent to once, and {from} to {to} is not the first");
    }
    one(x.clone())
}
