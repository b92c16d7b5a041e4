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

mod collective;
mod contract;
mod control;
mod elementwise;
mod index;
mod reduce;
mod shape;

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
        Op::Unary(u) => elementwise::unary(*u, s.operands[0]),
        Op::Binary(b) => elementwise::binary(*b, s.operands),
        Op::Compare(direction, kind) => elementwise::compare(*direction, *kind, s.operands),
        Op::Select => elementwise::select(s.operands),
        Op::Clamp => elementwise::clamp(s.operands),
        Op::Complex => elementwise::complex(s.operands),
        Op::Convert => elementwise::convert(s.operands[0], requested(s)?),
        Op::BitcastConvert => elementwise::bitcast_convert(s.operands[0], requested(s)?),
        Op::ReducePrecision { exponent_bits, mantissa_bits } => {
            elementwise::reduce_precision(s.operands[0], *exponent_bits, *mantissa_bits)
        }
        Op::Iota(dim) => shape::iota(requested(s)?, *dim),
        Op::BroadcastInDim(dims) => shape::broadcast_in_dim(s.operands[0], requested(s)?, dims),
        Op::Reshape => shape::reshape(s.operands[0], requested(s)?),
        Op::Transpose(perm) => shape::transpose(s.operands[0], perm),
        Op::Slice(bounds) => shape::slice(s.operands[0], bounds),
        Op::Pad(config) => shape::pad(s.operands[0], s.operands[1], config),
        Op::Concatenate(dim) => shape::concatenate(s.operands, *dim),
        Op::Reverse(dims) => shape::reverse(s.operands[0], dims),
        Op::DynamicSlice(sizes) => shape::dynamic_slice(s.operands, sizes),
        Op::DynamicUpdateSlice => shape::dynamic_update_slice(s.operands),
        Op::DotGeneral(dot) => contract::dot_general(s.operands[0], s.operands[1], &dot.0, s.requested),
        Op::Convolution(conv) => contract::convolution(s.operands[0], s.operands[1], conv),
        Op::Cholesky { .. } => contract::cholesky(s.operands[0]),
        Op::TriangularSolve(flags) => contract::triangular_solve(s.operands[0], s.operands[1], flags),
        Op::Fft(kind, length) => contract::fft(s.operands[0], *kind, length),
        Op::Gather(attrs, _) => index::gather(s.operands[0], s.operands[1], &attrs.0, &attrs.1),
        Op::Scatter(dims, _) => index::scatter(s, dims),
        Op::Reduce(dims) => reduce::reduce(s, dims),
        Op::ReduceWindow(window) => reduce::reduce_window(s, window),
        Op::SelectAndScatter(window) => reduce::select_and_scatter(s, window),
        Op::Sort { dimension, .. } => reduce::sort(s, *dimension),
        Op::TopK(k) => index::top_k(s.operands[0], *k),
        Op::While => control::while_(s),
        Op::If => control::branches(s, DType::Pred, 2),
        Op::Case => control::branches(s, DType::S32, 1),
        Op::AnnotateDevicePlacement(_) => one(s.operands[0].clone()),
        Op::OptimizationBarrier => Ok(s.operands.iter().map(|&t| t.clone()).collect()),
        Op::RngBitGenerator(algorithm) => {
            control::rng_bit_generator(s.operands[0], requested(s)?, *algorithm)
        }
        Op::CustomCall(call) => control::custom_call(s, call),
        Op::Deferred(_) => Ok(s.requested.iter().cloned().collect()),
        Op::Collective(c) => collective::collective(s, c.0, &c.1),
        Op::CollectivePermute(pairs) => collective::collective_permute(s.operands[0], pairs),
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
