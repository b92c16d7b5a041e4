//! Element types and tensor types.

use std::fmt;

use smallvec::SmallVec;

/// Sizes, dimension numbers or strides; up to six of them live without an allocation.
pub type Dims = SmallVec<[i64; 6]>;

/// The element type of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs)] // the names are StableHLO's own
pub enum DType {
    Pred,
    S8,
    S16,
    S32,
    S64,
    U8,
    U16,
    U32,
    U64,
    F8E4M3FN,
    F8E5M2,
    F16,
    BF16,
    F32,
    F64,
    C64,
    C128,
}

/// What there is to know about one element type; `ROWS` holds one per variant, in order.
struct Row {
    dtype: DType,
    name: &'static str,
    torch_name: &'static str,
    size_bytes: usize,
    bits: u32,
    set: DTypeSet,
}

const fn row(dtype: DType, names: [&'static str; 2], size_bytes: usize, bits: u32, set: DTypeSet) -> Row {
    let [name, torch_name] = names;
    Row { dtype, name, torch_name, size_bytes, bits, set }
}

static ROWS: [Row; 17] = [
    row(DType::Pred, ["i1", "bool"], 1, 1, DTypeSet::PRED),
    row(DType::S8, ["i8", "int8"], 1, 8, DTypeSet::SIGNED),
    row(DType::S16, ["i16", "int16"], 2, 16, DTypeSet::SIGNED),
    row(DType::S32, ["i32", "int32"], 4, 32, DTypeSet::SIGNED),
    row(DType::S64, ["i64", "int64"], 8, 64, DTypeSet::SIGNED),
    row(DType::U8, ["ui8", "uint8"], 1, 8, DTypeSet::UNSIGNED),
    row(DType::U16, ["ui16", "uint16"], 2, 16, DTypeSet::UNSIGNED),
    row(DType::U32, ["ui32", "uint32"], 4, 32, DTypeSet::UNSIGNED),
    row(DType::U64, ["ui64", "uint64"], 8, 64, DTypeSet::UNSIGNED),
    row(DType::F8E4M3FN, ["f8E4M3FN", "float8_e4m3fn"], 1, 8, DTypeSet::FLOAT8),
    row(DType::F8E5M2, ["f8E5M2", "float8_e5m2"], 1, 8, DTypeSet::FLOAT8),
    row(DType::F16, ["f16", "float16"], 2, 16, DTypeSet::WIDE_FLOAT),
    row(DType::BF16, ["bf16", "bfloat16"], 2, 16, DTypeSet::WIDE_FLOAT),
    row(DType::F32, ["f32", "float32"], 4, 32, DTypeSet::WIDE_FLOAT),
    row(DType::F64, ["f64", "float64"], 8, 64, DTypeSet::WIDE_FLOAT),
    row(DType::C64, ["complex<f32>", "complex64"], 8, 64, DTypeSet::COMPLEX),
    row(DType::C128, ["complex<f64>", "complex128"], 16, 128, DTypeSet::COMPLEX),
];

impl DType {
    /// Every element type, in declaration order.
    pub fn all() -> impl Iterator<Item = DType> {
        ROWS.iter().map(|r| r.dtype)
    }

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// Bytes of one element in a buffer (a `Pred` takes a whole byte).
    pub fn size_bytes(self) -> usize {
        self.row().size_bytes
    }

    /// Bits of one element as StableHLO counts them (1 for `Pred`); `bitcast_convert` compares these.
    pub fn bits(self) -> u32 {
        self.row().bits
    }

    /// The spelling inside `tensor<...>`: `f32`, `i1`, `ui8`, `complex<f32>`.
    pub fn hlo_name(self) -> &'static str {
        self.row().name
    }

    /// PyTorch's name, without the module: `float32`, `bool`.
    pub fn torch_name(self) -> &'static str {
        self.row().torch_name
    }

    /// The element type that PyTorch calls so.
    pub fn from_torch_name(name: &str) -> Option<DType> {
        ROWS.iter().find(|r| r.torch_name == name).map(|r| r.dtype)
    }

    /// The class this element type belongs to.
    pub(crate) fn class(self) -> DTypeSet {
        self.row().set
    }

    /// A real floating point type, 8 bits and up.
    pub fn is_float(self) -> bool {
        DTypeSet::FLOAT.has(self)
    }

    /// A signed or unsigned integer; `Pred` is not one.
    pub fn is_integral(self) -> bool {
        DTypeSet::INT.has(self)
    }

    /// Can hold a negative number: signed integers, floats and complex.
    pub fn is_signed(self) -> bool {
        DTypeSet::SIGNED_NUMBER.has(self)
    }

    /// `C64` or `C128`.
    pub fn is_complex(self) -> bool {
        DTypeSet::COMPLEX.has(self)
    }

    /// The type of the real part: `C64` gives `F32`, `C128` gives `F64`, every other type itself.
    pub fn real(self) -> DType {
        match self {
            DType::C64 => DType::F32,
            DType::C128 => DType::F64,
            other => other,
        }
    }

    /// The complex type whose parts can hold this type: `F64` gives `C128`, complex types themselves, the rest `C64`.
    pub fn complex(self) -> DType {
        match self {
            DType::F64 | DType::C128 => DType::C128,
            _ => DType::C64,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.hlo_name())
    }
}

/// A set of element type classes, for stating what an op accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DTypeSet(u8);

impl DTypeSet {
    pub(crate) const PRED: Self = Self(1);
    pub(crate) const SIGNED: Self = Self(2);
    pub(crate) const UNSIGNED: Self = Self(4);
    pub(crate) const FLOAT8: Self = Self(8);
    /// Floats of 16 bits and more.
    pub(crate) const WIDE_FLOAT: Self = Self(16);
    pub(crate) const COMPLEX: Self = Self(32);
    pub(crate) const INT: Self = Self::SIGNED.or(Self::UNSIGNED);
    pub(crate) const FLOAT: Self = Self::FLOAT8.or(Self::WIDE_FLOAT);
    pub(crate) const FLOAT_COMPLEX: Self = Self::FLOAT.or(Self::COMPLEX);
    pub(crate) const PRED_INT: Self = Self::PRED.or(Self::INT);
    pub(crate) const SIGNED_NUMBER: Self = Self::SIGNED.or(Self::FLOAT_COMPLEX);
    pub(crate) const NUMBER: Self = Self::INT.or(Self::FLOAT_COMPLEX);
    pub(crate) const REAL_NUMBER: Self = Self::INT.or(Self::FLOAT);
    pub(crate) const REAL: Self = Self::PRED_INT.or(Self::FLOAT);
    pub(crate) const ANY: Self = Self::REAL.or(Self::COMPLEX);

    pub(crate) const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn has(self, dtype: DType) -> bool {
        self.0 & dtype.class().0 != 0
    }
}

impl fmt::Display for DTypeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (Self::PRED, "i1"),
            (Self::SIGNED, "signed integer"),
            (Self::UNSIGNED, "unsigned integer"),
            (Self::FLOAT8, "8-bit float"),
            (Self::WIDE_FLOAT, "float"),
            (Self::COMPLEX, "complex"),
        ];
        let mut first = true;
        for (set, name) in names {
            if self.0 & set.0 != 0 {
                f.write_str(if first { "" } else { ", " })?;
                f.write_str(name)?;
                first = false;
            }
        }
        Ok(())
    }
}

/// A ranked tensor type with static sizes; size zero is legal in every dimension.
#[derive(PartialEq, Eq, Hash, Debug)]
pub struct TensorType {
    /// The element type.
    pub dtype: DType,
    /// Sizes, outermost first; empty for a scalar.
    pub shape: Dims,
}

impl Clone for TensorType {
    // By memcpy: `SmallVec::clone` goes element by element, and types are cloned with every op that is recorded.
    fn clone(&self) -> Self {
        Self { dtype: self.dtype, shape: Dims::from_slice(&self.shape) }
    }
}

impl TensorType {
    /// A tensor type from its parts.
    pub fn new(dtype: DType, shape: impl Into<Dims>) -> Self {
        Self { dtype, shape: shape.into() }
    }

    /// A 0-d tensor type.
    pub fn scalar(dtype: DType) -> Self {
        Self { dtype, shape: Dims::new() }
    }

    /// Same shape, other element type.
    pub fn with_dtype(&self, dtype: DType) -> Self {
        Self { dtype, shape: self.shape.clone() }
    }

    /// Same element type, other shape.
    pub fn with_shape(&self, shape: impl Into<Dims>) -> Self {
        Self { dtype: self.dtype, shape: shape.into() }
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Number of elements; saturates instead of overflowing, and is 0 when a size is 0 (or, in a broken type, negative).
    pub fn numel(&self) -> i64 {
        if self.shape.iter().any(|&d| d <= 0) {
            return 0;
        }
        self.shape.iter().fold(1, |n, &d| n.saturating_mul(d))
    }

    /// Whether plugins can work with a tensor of this size, be it only inside of a program. XLA multiplies sizes (those
    /// beside a zero, too) in 64 bits and aborts the process on overflow; the margin is for types that it widens.
    pub fn is_representable(&self) -> bool {
        const MAX_BYTES: i64 = 1 << 56;
        let bytes = self.dtype.size_bytes() as i64;
        let fits = |n: i64| n.checked_mul(bytes).is_some_and(|b| b <= MAX_BYTES);
        self.shape.iter().try_fold(1i64, |n, &d| n.checked_mul(d.max(1))).is_some_and(fits)
            && self.shape.iter().all(|&d| d >= 0)
    }

    /// Bytes of the elements, without padding; saturates.
    pub fn bytes(&self) -> i64 {
        self.numel().saturating_mul(self.dtype.size_bytes() as i64)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensor<")?;
        for d in &self.shape {
            write!(f, "{d}x")?;
        }
        write!(f, "{}>", self.dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_declaration_order() {
        for (i, row) in ROWS.iter().enumerate() {
            assert_eq!(row.dtype as usize, i);
        }
        assert_eq!(DType::C128 as usize + 1, ROWS.len());
    }

    #[test]
    fn sizes_saturate_and_zero_wins() {
        assert_eq!(TensorType::new(DType::F32, vec![i64::MAX, 2]).numel(), i64::MAX);
        assert_eq!(TensorType::new(DType::F32, vec![i64::MAX, 2, 0]).numel(), 0);
        assert_eq!(TensorType::scalar(DType::C128).bytes(), 16);
        assert_eq!(TensorType::new(DType::BF16, vec![2, 3]).to_string(), "tensor<2x3xbf16>");
    }
}
