//! The arena: values, ops, blocks, constants, and the attributes that ops carry.
//!
//! Everything is addressed by `u32` indices. An op's result types live with its result values; an op never repeats them
//! in its attributes, so `reshape` is just [`Op::Reshape`] and its target shape is the type of its result.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;

use crate::error::Error;
use crate::sharding::{Mesh, ReplicaGroups, Sharding};
use crate::types::{DType, DTypeSet, Dims, TensorType};

/// One SSA value of a [`Builder`](crate::Builder); a plain index, meaningless to any other builder.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Value(pub(crate) u32);

pub(crate) type OpId = u32;
pub(crate) type BlockId = u32;

/// The function body.
pub(crate) const ROOT: BlockId = 0;
/// The block of values that have no place of their own: constants and poison, visible everywhere.
pub(crate) const NOWHERE: BlockId = u32::MAX;

/// How an elementwise op's result element type follows from its operand's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ResultKind {
    Same,
    Real,
    Pred,
}

pub(crate) struct ElementwiseRow {
    pub(crate) name: &'static str,
    pub(crate) accepts: DTypeSet,
    pub(crate) result: ResultKind,
}

macro_rules! elementwise_table {
    ($(#[$meta:meta])* $table:ident: $Enum:ident { $($Variant:ident $name:literal $accepts:ident $result:ident)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[allow(missing_docs)] // the names are StableHLO's own
        pub enum $Enum { $($Variant),* }

        static $table: &[ElementwiseRow] = &[
            $(ElementwiseRow { name: $name, accepts: DTypeSet::$accepts, result: ResultKind::$result }),*
        ];

        impl $Enum {
            /// Every op of this table, in declaration order.
            pub fn all() -> &'static [$Enum] {
                &[$($Enum::$Variant),*]
            }

            /// The op's full name, dialect included.
            pub fn name(self) -> &'static str {
                self.row().name
            }

            pub(crate) fn row(self) -> &'static ElementwiseRow {
                &$table[self as usize]
            }

            /// Whether the op is defined for this element type.
            pub fn accepts(self, dtype: DType) -> bool {
                self.row().accepts.has(dtype)
            }
        }
    };
}

elementwise_table! {
    /// The elementwise ops of one operand.
    UNARY: Unary {
        Abs "stablehlo.abs" SIGNED_NUMBER Real
        Cbrt "stablehlo.cbrt" FLOAT Same
        Ceil "stablehlo.ceil" FLOAT Same
        Cosine "stablehlo.cosine" FLOAT_COMPLEX Same
        CountLeadingZeros "stablehlo.count_leading_zeros" INT Same
        Exponential "stablehlo.exponential" FLOAT_COMPLEX Same
        ExponentialMinusOne "stablehlo.exponential_minus_one" FLOAT_COMPLEX Same
        Floor "stablehlo.floor" FLOAT Same
        Imag "stablehlo.imag" FLOAT_COMPLEX Real
        IsFinite "stablehlo.is_finite" FLOAT Pred
        Log "stablehlo.log" FLOAT_COMPLEX Same
        LogPlusOne "stablehlo.log_plus_one" FLOAT_COMPLEX Same
        Logistic "stablehlo.logistic" FLOAT_COMPLEX Same
        Negate "stablehlo.negate" NUMBER Same
        Not "stablehlo.not" PRED_INT Same
        Popcnt "stablehlo.popcnt" INT Same
        Real "stablehlo.real" FLOAT_COMPLEX Real
        RoundNearestAfz "stablehlo.round_nearest_afz" FLOAT Same
        RoundNearestEven "stablehlo.round_nearest_even" FLOAT Same
        Rsqrt "stablehlo.rsqrt" FLOAT_COMPLEX Same
        Sign "stablehlo.sign" SIGNED_NUMBER Same
        Sine "stablehlo.sine" FLOAT_COMPLEX Same
        Sqrt "stablehlo.sqrt" FLOAT_COMPLEX Same
        Tan "stablehlo.tan" FLOAT_COMPLEX Same
        Tanh "stablehlo.tanh" FLOAT_COMPLEX Same
        Acos "chlo.acos" FLOAT_COMPLEX Same
        Acosh "chlo.acosh" FLOAT_COMPLEX Same
        Asin "chlo.asin" FLOAT_COMPLEX Same
        Asinh "chlo.asinh" FLOAT_COMPLEX Same
        Atan "chlo.atan" FLOAT_COMPLEX Same
        Atanh "chlo.atanh" FLOAT_COMPLEX Same
        BesselI1e "chlo.bessel_i1e" WIDE_FLOAT Same
        Cosh "chlo.cosh" FLOAT_COMPLEX Same
        Digamma "chlo.digamma" WIDE_FLOAT Same
        Erf "chlo.erf" WIDE_FLOAT Same
        ErfInv "chlo.erf_inv" WIDE_FLOAT Same
        Erfc "chlo.erfc" WIDE_FLOAT Same
        Lgamma "chlo.lgamma" WIDE_FLOAT Same
        Sinh "chlo.sinh" FLOAT_COMPLEX Same
    }
}

elementwise_table! {
    /// The elementwise ops of two operands of one type.
    BINARY: Binary {
        Add "stablehlo.add" ANY Same
        And "stablehlo.and" PRED_INT Same
        Atan2 "stablehlo.atan2" FLOAT_COMPLEX Same
        Divide "stablehlo.divide" NUMBER Same
        Maximum "stablehlo.maximum" REAL Same
        Minimum "stablehlo.minimum" REAL Same
        Multiply "stablehlo.multiply" ANY Same
        Or "stablehlo.or" PRED_INT Same
        Power "stablehlo.power" NUMBER Same
        Remainder "stablehlo.remainder" REAL_NUMBER Same
        ShiftLeft "stablehlo.shift_left" INT Same
        ShiftRightArithmetic "stablehlo.shift_right_arithmetic" INT Same
        ShiftRightLogical "stablehlo.shift_right_logical" INT Same
        Subtract "stablehlo.subtract" NUMBER Same
        Xor "stablehlo.xor" PRED_INT Same
        NextAfter "chlo.next_after" WIDE_FLOAT Same
        Polygamma "chlo.polygamma" WIDE_FLOAT Same
        Zeta "chlo.zeta" WIDE_FLOAT Same
    }
}

/// Which relation `compare` tests.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)] // the names are StableHLO's own
pub enum Direction {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

impl Direction {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Direction::Eq => "EQ",
            Direction::Ne => "NE",
            Direction::Lt => "LT",
            Direction::Le => "LE",
            Direction::Gt => "GT",
            Direction::Ge => "GE",
        }
    }
}

/// How `compare` orders its operands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CompareKind {
    /// The element type's own order: IEEE for floats (NaN differs from everything), unsigned for `Pred`.
    Natural,
    /// The total order of floats: -NaN < -inf < ... < -0 < +0 < ... < inf < NaN.
    TotalOrder,
}

/// How exactly an accelerator computes a dot or a convolution of `F32` operands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Precision {
    /// As fast as the hardware likes; on TPU one bf16 pass.
    #[default]
    Default,
    /// More passes than `Default`; on TPU three bf16 passes.
    High,
    /// True float32.
    Highest,
}

impl Precision {
    /// StableHLO's name.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Default => "DEFAULT",
            Precision::High => "HIGH",
            Precision::Highest => "HIGHEST",
        }
    }
}

/// Dimension numbers of `dot_general`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
#[allow(missing_docs)] // the names are StableHLO's own
pub struct DotDims {
    pub lhs_batching: Dims,
    pub rhs_batching: Dims,
    pub lhs_contracting: Dims,
    pub rhs_contracting: Dims,
}

impl DotDims {
    /// Dimension numbers from slices, in StableHLO's order: batching pair, then contracting pair.
    pub fn new(
        lhs_batching: &[i64],
        rhs_batching: &[i64],
        lhs_contracting: &[i64],
        rhs_contracting: &[i64],
    ) -> Self {
        Self {
            lhs_batching: Dims::from_slice(lhs_batching),
            rhs_batching: Dims::from_slice(rhs_batching),
            lhs_contracting: Dims::from_slice(lhs_contracting),
            rhs_contracting: Dims::from_slice(rhs_contracting),
        }
    }

    /// `[.., m, k] x [.., k, n]` where `rank` counts the shared leading batch dimensions too.
    pub fn matmul(rank: usize) -> Self {
        let batch: Dims = (0..rank.saturating_sub(2) as i64).collect();
        let (m, k) = (rank as i64 - 2, rank as i64 - 1);
        Self::new(&batch, &batch, &[k], &[m])
    }
}

/// Which dimension of each operand of a convolution means what.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)] // the names are StableHLO's own
pub struct ConvDims {
    pub input_batch: i64,
    pub input_feature: i64,
    pub input_spatial: Dims,
    pub kernel_input_feature: i64,
    pub kernel_output_feature: i64,
    pub kernel_spatial: Dims,
    pub output_batch: i64,
    pub output_feature: i64,
    pub output_spatial: Dims,
}

impl ConvDims {
    /// PyTorch's layout: input and output `[batch, feature, spatial..]`, kernel `[out, in, spatial..]`.
    pub fn torch(spatial_rank: usize) -> Self {
        let spatial: Dims = (2..2 + spatial_rank as i64).collect();
        Self {
            input_batch: 0,
            input_feature: 1,
            input_spatial: spatial.clone(),
            kernel_output_feature: 0,
            kernel_input_feature: 1,
            kernel_spatial: spatial.clone(),
            output_batch: 0,
            output_feature: 1,
            output_spatial: spatial,
        }
    }
}

/// Low and high padding of one dimension; negative padding removes elements.
pub type Padding = SmallVec<[(i64, i64); 4]>;

/// Everything about a convolution but its operands. Start from [`Convolution::new`] and set what differs.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Convolution {
    /// Dimension numbers.
    pub dims: ConvDims,
    /// Window strides, one per spatial dimension.
    pub strides: Dims,
    /// Padding of the input's spatial dimensions, after `lhs_dilation`.
    pub padding: Padding,
    /// Distance between input elements (transposed convolution uses the stride here).
    pub lhs_dilation: Dims,
    /// Distance between kernel elements (PyTorch's `dilation`).
    pub rhs_dilation: Dims,
    /// Which kernel dimensions are read backwards.
    pub reversal: SmallVec<[bool; 4]>,
    /// Groups over features (PyTorch's `groups`).
    pub feature_group_count: i64,
    /// Groups over the batch (used by the gradient of a grouped convolution).
    pub batch_group_count: i64,
    /// Precision of both operands.
    pub precision: Precision,
    /// Element type of the result, where it is not the operands'.
    pub out_dtype: Option<DType>,
}

impl Convolution {
    /// PyTorch's layout, stride and dilation 1, no padding, no groups, default precision.
    pub fn new(spatial_rank: usize) -> Self {
        Self {
            dims: ConvDims::torch(spatial_rank),
            strides: Dims::from_elem(1, spatial_rank),
            padding: Padding::from_elem((0, 0), spatial_rank),
            lhs_dilation: Dims::from_elem(1, spatial_rank),
            rhs_dilation: Dims::from_elem(1, spatial_rank),
            reversal: SmallVec::from_elem(false, spatial_rank),
            feature_group_count: 1,
            batch_group_count: 1,
            precision: Precision::Default,
            out_dtype: None,
        }
    }
}

/// A sliding window over every dimension of an operand (`reduce_window`, `select_and_scatter`).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Window {
    /// Window sizes.
    pub dims: Dims,
    /// Window strides.
    pub strides: Dims,
    /// Distance between operand elements (`select_and_scatter` has none of this).
    pub base_dilations: Dims,
    /// Distance between the elements of a window (`select_and_scatter` has none of this).
    pub window_dilations: Dims,
    /// Padding, after `base_dilations`.
    pub padding: Padding,
}

impl Window {
    /// A window of these sizes with stride and dilation 1 and no padding.
    pub fn new(dims: &[i64]) -> Self {
        let n = dims.len();
        Self {
            dims: Dims::from_slice(dims),
            strides: Dims::from_elem(1, n),
            base_dilations: Dims::from_elem(1, n),
            window_dilations: Dims::from_elem(1, n),
            padding: Padding::from_elem((0, 0), n),
        }
    }
}

/// Dimension numbers of `gather`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
#[allow(missing_docs)] // the names are StableHLO's own
pub struct GatherDims {
    pub offset_dims: Dims,
    pub collapsed_slice_dims: Dims,
    pub operand_batching_dims: Dims,
    pub start_indices_batching_dims: Dims,
    pub start_index_map: Dims,
    pub index_vector_dim: i64,
}

/// Dimension numbers of `scatter`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
#[allow(missing_docs)] // the names are StableHLO's own
pub struct ScatterDims {
    pub update_window_dims: Dims,
    pub inserted_window_dims: Dims,
    pub input_batching_dims: Dims,
    pub scatter_indices_batching_dims: Dims,
    pub scatter_dims_to_operand_dims: Dims,
    pub index_vector_dim: i64,
}

/// Promises about the indices of a `scatter`; a broken promise is undefined behaviour on the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct ScatterFlags {
    /// The indices come in ascending order.
    pub indices_are_sorted: bool,
    /// No two updates hit one element.
    pub unique_indices: bool,
}

/// Which discrete Fourier transform `fft` computes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FftType {
    /// Complex to complex, forward.
    Fft,
    /// Complex to complex, inverse (scaled by 1/n).
    Ifft,
    /// Real to the non-redundant half of the spectrum.
    Rfft,
    /// The inverse of `Rfft`.
    Irfft,
}

impl FftType {
    pub(crate) fn name(self) -> &'static str {
        match self {
            FftType::Fft => "FFT",
            FftType::Ifft => "IFFT",
            FftType::Rfft => "RFFT",
            FftType::Irfft => "IRFFT",
        }
    }
}

/// The generator behind `rng_bit_generator`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RngAlgorithm {
    /// Whatever the platform likes.
    Default,
    /// ThreeFry 2x32; state `tensor<2xui64>`.
    ThreeFry,
    /// Philox 4x32-10; state `tensor<2xui64>` or `tensor<3xui64>`.
    Philox,
}

impl RngAlgorithm {
    pub(crate) fn name(self) -> &'static str {
        match self {
            RngAlgorithm::Default => "DEFAULT",
            RngAlgorithm::ThreeFry => "THREE_FRY",
            RngAlgorithm::Philox => "PHILOX",
        }
    }
}

/// What `triangular_solve` does with its matrix.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Transpose {
    /// Use it as it is.
    No,
    /// Transpose it.
    Yes,
    /// Transpose and conjugate it.
    Adjoint,
}

impl Transpose {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transpose::No => "NO_TRANSPOSE",
            Transpose::Yes => "TRANSPOSE",
            Transpose::Adjoint => "ADJOINT",
        }
    }
}

/// Flags of `triangular_solve`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TriangularSolve {
    /// Solve `op(a) x = b` if true, `x op(a) = b` if false.
    pub left_side: bool,
    /// Read the lower triangle of `a`.
    pub lower: bool,
    /// Take the diagonal of `a` as ones.
    pub unit_diagonal: bool,
    /// The `op` on `a`.
    pub transpose_a: Transpose,
}

/// A call of a function that the platform provides.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct CustomCall {
    /// Name of the registered target.
    pub target: String,
    /// Attributes of a typed FFI handler as the inside of an MLIR dictionary, for instance `axis = 1 : i64`.
    pub backend_config: String,
    /// Keep the call though nobody uses its results.
    pub has_side_effect: bool,
    /// Result `.0` shares its buffer with operand `.1`.
    pub output_operand_aliases: SmallVec<[(i64, i64); 2]>,
}

/// Where a value is kept: the memory spaces of XLA that a program may name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MemorySpace {
    /// The device's own.
    Device,
    /// The host's, of pages that the device reads and writes itself.
    PinnedHost,
}

impl MemorySpace {
    /// Its kind, as XLA and PJRT name it.
    pub fn kind(self) -> &'static str {
        match self {
            MemorySpace::Device => "device",
            MemorySpace::PinnedHost => "pinned_host",
        }
    }
}

/// What XLA calls the custom call by which a value goes to a memory space: its compilers know it, and nobody registers it.
pub const PLACEMENT_TARGET: &str = "annotate_device_placement";

/// A computation whose form follows from sizes: one op of an outline, until a module for all sizes is made of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Deferred {
    /// What it computes. Two of one name do the same with the same operands.
    pub(crate) name: String,
    pub(crate) axes: Axes,
    /// Its number among those of the builder.
    pub(crate) number: u32,
}

/// The dimensions of what a [deferred](crate::Builder::deferred) computation takes and gives, a letter each, as in an
/// einsum. A dimension of a result that no operand has follows from others in a way that nobody needs to know.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Axes {
    /// Of each operand.
    pub operands: Vec<String>,
    /// Of each result.
    pub results: Vec<String>,
    /// Those along which it mixes elements: what an operand does not use has to be zero there.
    pub mixed: String,
    /// Those along which the places in use have to come first.
    pub first: String,
    /// Those of which it wants to know which places are in use.
    pub used: String,
    /// Those that may not vary: how many there are says what it does.
    pub fixed: String,
}

/// A slice's bounds; kept behind a box because they are large.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct SliceBounds {
    pub(crate) start: Dims,
    pub(crate) limit: Dims,
    pub(crate) strides: Dims,
}

/// A pad's configuration; low and high may be negative.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct PadConfig {
    pub(crate) low: Dims,
    pub(crate) high: Dims,
    pub(crate) interior: Dims,
}

/// What the members of each group send each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Collective {
    AllReduce,
    /// Along this dimension.
    AllGather(i64),
    /// Along this dimension.
    ReduceScatter(i64),
    AllToAll {
        split: i64,
        concat: i64,
    },
}

/// An op and its attributes. Operands, regions and result types are beside it in the arena.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Op {
    Unary(Unary),
    Binary(Binary),
    Compare(Direction, CompareKind),
    Select,
    Clamp,
    Complex,
    Convert,
    BitcastConvert,
    ReducePrecision {
        exponent_bits: u32,
        mantissa_bits: u32,
    },
    Iota(i64),
    BroadcastInDim(Dims),
    Reshape,
    Transpose(Dims),
    Slice(Box<SliceBounds>),
    Pad(Box<PadConfig>),
    Concatenate(i64),
    Reverse(Dims),
    DynamicSlice(Dims),
    DynamicUpdateSlice,
    DotGeneral(Box<(DotDims, Precision)>),
    Convolution(Box<Convolution>),
    Cholesky {
        lower: bool,
    },
    TriangularSolve(TriangularSolve),
    Fft(FftType, Dims),
    Gather(Box<(GatherDims, Dims)>, bool),
    Scatter(Box<ScatterDims>, ScatterFlags),
    Reduce(Dims),
    ReduceWindow(Box<Window>),
    SelectAndScatter(Box<Window>),
    Sort {
        dimension: i64,
        is_stable: bool,
    },
    TopK(i64),
    While,
    If,
    Case,
    OptimizationBarrier,
    AnnotateDevicePlacement(MemorySpace),
    RngBitGenerator(RngAlgorithm),
    CustomCall(Box<CustomCall>),
    Deferred(Box<Deferred>),
    Collective(Box<(Collective, ReplicaGroups)>),
    /// From and to which replica.
    CollectivePermute(Vec<(i64, i64)>),
    ShardingConstraint(Arc<Sharding>),
}

impl Op {
    /// Whether the result needs no memory of its own: each element takes a few operations on a few elements of the
    /// operands, or it is an operand that is partly overwritten.
    pub(crate) fn is_fusible(&self) -> bool {
        self.is_elementwise()
            || matches!(
                self,
                Op::Iota(_)
                    | Op::BroadcastInDim(_)
                    | Op::Reshape
                    | Op::Transpose(_)
                    | Op::Slice(_)
                    | Op::Pad(_)
                    | Op::Concatenate(_)
                    | Op::Reverse(_)
                    | Op::DynamicSlice(_)
                    | Op::DynamicUpdateSlice
                    | Op::Scatter(..)
            )
    }

    /// Whether each element of the result is computed from those at its place in the operands, or from scalars.
    pub(crate) fn is_elementwise(&self) -> bool {
        matches!(
            self,
            Op::Unary(_)
                | Op::Binary(_)
                | Op::Compare(..)
                | Op::Select
                | Op::Clamp
                | Op::Complex
                | Op::Convert
                | Op::BitcastConvert
                | Op::ReducePrecision { .. }
        )
    }

    /// The op's full name, dialect included.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Op::Unary(u) => u.name(),
            Op::Binary(b) => b.name(),
            Op::Compare(..) => "stablehlo.compare",
            Op::Select => "stablehlo.select",
            Op::Clamp => "stablehlo.clamp",
            Op::Complex => "stablehlo.complex",
            Op::Convert => "stablehlo.convert",
            Op::BitcastConvert => "stablehlo.bitcast_convert",
            Op::ReducePrecision { .. } => "stablehlo.reduce_precision",
            Op::Iota(_) => "stablehlo.iota",
            Op::BroadcastInDim(_) => "stablehlo.broadcast_in_dim",
            Op::Reshape => "stablehlo.reshape",
            Op::Transpose(_) => "stablehlo.transpose",
            Op::Slice(_) => "stablehlo.slice",
            Op::Pad(_) => "stablehlo.pad",
            Op::Concatenate(_) => "stablehlo.concatenate",
            Op::Reverse(_) => "stablehlo.reverse",
            Op::DynamicSlice(_) => "stablehlo.dynamic_slice",
            Op::DynamicUpdateSlice => "stablehlo.dynamic_update_slice",
            Op::DotGeneral(_) => "stablehlo.dot_general",
            Op::Convolution(_) => "stablehlo.convolution",
            Op::Cholesky { .. } => "stablehlo.cholesky",
            Op::TriangularSolve(_) => "stablehlo.triangular_solve",
            Op::Fft(..) => "stablehlo.fft",
            Op::Gather(..) => "stablehlo.gather",
            Op::Scatter(..) => "stablehlo.scatter",
            Op::Reduce(_) => "stablehlo.reduce",
            Op::ReduceWindow(_) => "stablehlo.reduce_window",
            Op::SelectAndScatter(_) => "stablehlo.select_and_scatter",
            Op::Sort { .. } => "stablehlo.sort",
            Op::TopK(_) => "chlo.top_k",
            Op::While => "stablehlo.while",
            Op::If => "stablehlo.if",
            Op::Case => "stablehlo.case",
            Op::OptimizationBarrier => "stablehlo.optimization_barrier",
            Op::AnnotateDevicePlacement(_) => "stablehlo.custom_call",
            Op::RngBitGenerator(_) => "stablehlo.rng_bit_generator",
            Op::CustomCall(_) => "stablehlo.custom_call",
            Op::Deferred(_) => "deferred",
            Op::Collective(c) => match c.0 {
                Collective::AllReduce => "stablehlo.all_reduce",
                Collective::AllGather(_) => "stablehlo.all_gather",
                Collective::ReduceScatter(_) => "stablehlo.reduce_scatter",
                Collective::AllToAll { .. } => "stablehlo.all_to_all",
            },
            Op::CollectivePermute(_) => "stablehlo.collective_permute",
            Op::ShardingConstraint(_) => "sdy.sharding_constraint",
        }
    }

    /// Must stay though its results are unused.
    pub(crate) fn has_side_effect(&self) -> bool {
        matches!(self, Op::CustomCall(c) if c.has_side_effect)
    }

    /// Regions of this op may read values defined outside (StableHLO isolates the others, but for constants).
    pub(crate) fn regions_capture(&self) -> bool {
        matches!(self, Op::While | Op::If | Op::Case)
    }
}

/// Where a value comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Def {
    Param(u32),
    BlockArg,
    Constant(u32),
    Op(OpId),
    /// Stands for the result of an op that failed inference; never printed.
    Poison,
}

#[derive(Clone, Debug)]
pub(crate) struct ValueData {
    pub(crate) ty: TensorType,
    pub(crate) def: Def,
    pub(crate) block: BlockId,
    /// Whether a compiler may find it to be a constant.
    pub(crate) constant: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct OpData {
    pub(crate) op: Op,
    pub(crate) operands: SmallVec<[Value; 3]>,
    /// Results are the values `first_result .. first_result + results`.
    pub(crate) first_result: u32,
    pub(crate) results: u32,
    pub(crate) regions: SmallVec<[BlockId; 1]>,
    /// Its number plus one; 0 is none.
    pub(crate) location: u32,
}

impl OpData {
    pub(crate) fn result_values(&self) -> impl Iterator<Item = Value> + use<> {
        (self.first_result..self.first_result + self.results).map(Value)
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Block {
    pub(crate) args: SmallVec<[Value; 4]>,
    pub(crate) ops: Vec<OpId>,
    pub(crate) returns: SmallVec<[Value; 2]>,
    /// Whether ops inside may use values of the enclosing blocks.
    pub(crate) captures: bool,
}

/// Little-endian element bytes of a constant; a splat holds one element.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Constant {
    Splat(SmallVec<[u8; 16]>),
    Dense(Vec<u8>),
}

/// An attribute of a parameter of the main function.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum ArgAttr {
    /// The caller gives the buffer away: `jax.buffer_donor = true`.
    Donor,
    /// The buffer becomes output number N: `tf.aliasing_output = N : i32`.
    AliasingOutput(i32),
    /// It comes cut so: `sdy.sharding = ...`.
    Sharding(Arc<Sharding>),
    /// It comes in this memory space: `mhlo.memory_kind = ...`.
    Memory(MemorySpace),
    /// Any other attribute, as MLIR text `name = value`.
    Other(String),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Arena {
    pub(crate) values: Vec<ValueData>,
    pub(crate) ops: Vec<OpData>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) constants: Vec<Constant>,
    pub(crate) splats: FxHashMap<(TensorType, SmallVec<[u8; 16]>), Value>,
    pub(crate) params: Vec<Value>,
    /// Indexed by parameter number; shorter than `params` where the rest has none.
    pub(crate) param_attrs: Vec<Vec<ArgAttr>>,
    /// Over which its values are cut.
    pub(crate) mesh: Option<Arc<Mesh>>,
}

impl Arena {
    pub(crate) fn ty(&self, v: Value) -> &TensorType {
        &self.values[v.0 as usize].ty
    }

    /// The op whose result a value is, and what it takes.
    pub(crate) fn made_by(&self, v: Value) -> Option<(&Op, &[Value])> {
        match self.values.get(v.0 as usize)?.def {
            Def::Op(id) => self.ops.get(id as usize).map(|data| (&data.op, data.operands.as_slice())),
            _ => None,
        }
    }

    /// The value of an integer or `Pred` splat constant, if `v` is one.
    pub(crate) fn constant_i64(&self, v: Value) -> Option<i64> {
        let data = self.values.get(v.0 as usize)?;
        let Def::Constant(id) = data.def else { return None };
        let Constant::Splat(bytes) = &self.constants[id as usize] else { return None };
        if !data.ty.dtype.is_integral() && data.ty.dtype != DType::Pred {
            return None;
        }
        let negative = data.ty.dtype.is_signed() && bytes.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = if negative { [0xff; 8] } else { [0; 8] };
        wide[..bytes.len()].copy_from_slice(bytes);
        Some(i64::from_le_bytes(wide))
    }

    /// An error if a value of this type cannot be cut so in this program.
    pub(crate) fn check_sharding(&self, sharding: &Sharding, ty: &TensorType) -> Result<(), Error> {
        if self.mesh.as_ref() != Some(sharding.mesh()) {
            let reason = format!("the sharding {sharding} is over another mesh than the program");
            return Err(Error::Sharding { reason });
        }
        sharding.local(ty).map(drop)
    }

    /// How a parameter comes cut.
    pub(crate) fn param_sharding(&self, index: usize) -> Option<&Arc<Sharding>> {
        self.param_attrs.get(index)?.iter().find_map(|attr| match attr {
            ArgAttr::Sharding(sharding) => Some(sharding),
            _ => None,
        })
    }
}

/// A finished program: one public function, ready to print.
#[derive(Clone, Debug)]
pub struct Module {
    pub(crate) name: String,
    pub(crate) arena: Arena,
    pub(crate) outputs: Vec<Value>,
    /// How they are cut; empty where that is not said.
    pub(crate) output_shardings: Vec<Arc<Sharding>>,
    /// Those that are left in the memory of the host.
    pub(crate) host_outputs: Vec<usize>,
}

impl Module {
    /// The module's symbol name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Types of the parameters, in order. A parameter stays though nothing uses it.
    pub fn param_types(&self) -> impl ExactSizeIterator<Item = &TensorType> {
        self.arena.params.iter().map(|&v| self.arena.ty(v))
    }

    /// Types of the results, in order.
    pub fn output_types(&self) -> impl ExactSizeIterator<Item = &TensorType> {
        self.outputs.iter().map(|&v| self.arena.ty(v))
    }

    /// Says how each output is cut over the program's mesh.
    pub fn set_output_shardings(&mut self, shardings: Vec<Arc<Sharding>>) -> Result<(), Error> {
        if shardings.len() != self.outputs.len() {
            let (have, want) = (shardings.len(), self.outputs.len());
            return Err(Error::Sharding { reason: format!("{have} shardings for {want} outputs") });
        }
        let fits = |(s, &v): (&Arc<Sharding>, &Value)| self.arena.check_sharding(s, self.arena.ty(v));
        shardings.iter().zip(&self.outputs).try_for_each(fits)?;
        self.output_shardings = shardings;
        Ok(())
    }

    /// Leaves an output in the memory of the host: it has to come from
    /// [`annotate_device_placement`](crate::Builder::annotate_device_placement).
    pub fn leave_on_host(&mut self, output: usize) -> Result<(), Error> {
        if output >= self.outputs.len() {
            return Err(Error::NoSuchOutput { index: output, outputs: self.outputs.len() });
        }
        self.host_outputs.push(output);
        Ok(())
    }

    /// Adds an attribute to parameter `index`, for donation decided after building.
    pub fn set_param_attr(&mut self, index: usize, attr: ArgAttr) -> Result<(), Error> {
        if index >= self.arena.params.len() {
            return Err(Error::NoSuchParam { index, params: self.arena.params.len() });
        }
        add_param_attr(&mut self.arena, index, attr);
        Ok(())
    }
}

pub(crate) fn add_param_attr(arena: &mut Arena, index: usize, attr: ArgAttr) {
    if arena.param_attrs.len() <= index {
        arena.param_attrs.resize(index + 1, Vec::new());
    }
    if !arena.param_attrs[index].contains(&attr) {
        arena.param_attrs[index].push(attr);
    }
}
