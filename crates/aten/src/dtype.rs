//! torch's scalar types: codes, names, categories and the promotion lattice.

use crate::error::{Result, runtime};
use oxitorch_hlo::DType;

/// Dtype, torch's `ScalarType` code, its C++ name.
const DTYPES: &[(DType, i64, &str)] = &[
    (DType::U8, 0, "Byte"),
    (DType::S8, 1, "Char"),
    (DType::S16, 2, "Short"),
    (DType::S32, 3, "Int"),
    (DType::S64, 4, "Long"),
    (DType::F16, 5, "Half"),
    (DType::F32, 6, "Float"),
    (DType::F64, 7, "Double"),
    (DType::C64, 9, "ComplexFloat"),
    (DType::C128, 10, "ComplexDouble"),
    (DType::Pred, 11, "Bool"),
    (DType::BF16, 15, "BFloat16"),
    (DType::F8E5M2, 23, "Float8_e5m2"),
    (DType::F8E4M3FN, 24, "Float8_e4m3fn"),
    (DType::U16, 27, "UInt16"),
    (DType::U32, 28, "UInt32"),
    (DType::U64, 29, "UInt64"),
];

/// By `ScalarType` code and by dtype: ops are recorded through these.
const BY_CODE: [Option<DType>; 32] = {
    let mut table = [None; 32];
    let mut i = 0;
    while i < DTYPES.len() {
        table[DTYPES[i].1 as usize] = Some(DTYPES[i].0);
        i += 1;
    }
    table
};
const ENTRIES: [u8; 32] = {
    let mut table = [6; 32];
    let mut i = 0;
    while i < DTYPES.len() {
        table[DTYPES[i].0 as usize] = i as u8;
        i += 1;
    }
    table
};

fn entry(dtype: DType) -> &'static (DType, i64, &'static str) {
    &DTYPES[ENTRIES[dtype as usize] as usize]
}

/// The dtype of a `ScalarType` code, if the device has it (complex32, quantised and sub-byte types are not there).
pub fn from_code(code: i64) -> Option<DType> {
    BY_CODE.get(usize::try_from(code).ok()?).copied().flatten()
}

/// The code of the dtype as which the device keeps elements of a dtype with so many bytes: itself, or an integer of that
/// size, which copies and views move as they are. Quantised dtypes need more than their elements and are not kept.
pub fn kept_as(code: i64, bytes: usize) -> Option<i64> {
    const QUANTISED: &[i64] = &[12, 13, 14, 16, 17];
    if from_code(code).is_some() {
        return Some(code);
    }
    let same_size = match bytes {
        1 => DType::U8,
        2 => DType::U16,
        4 => DType::U32,
        8 => DType::U64,
        _ => return None,
    };
    (!QUANTISED.contains(&code)).then(|| self::code(same_size))
}

/// torch's `ScalarType` code.
pub fn code(dtype: DType) -> i64 {
    entry(dtype).1
}

/// The C++ name: `Float`.
pub fn scalar_name(dtype: DType) -> &'static str {
    entry(dtype).2
}

/// The C++ type, as `caffe2::TypeMeta` prints it: `unsigned char`, `c10::Half`.
pub fn cpp_name(dtype: DType) -> &'static str {
    match dtype {
        DType::Pred => "bool",
        DType::U8 => "unsigned char",
        DType::S8 => "signed char",
        DType::S16 => "short",
        DType::S32 => "int",
        DType::S64 => "long",
        DType::U16 => "unsigned short",
        DType::U32 => "unsigned int",
        DType::U64 => "unsigned long",
        DType::F16 => "c10::Half",
        DType::BF16 => "c10::BFloat16",
        DType::F32 => "float",
        DType::F64 => "double",
        DType::C64 => "c10::complex<float>",
        DType::C128 => "c10::complex<double>",
        DType::F8E4M3FN => "c10::Float8_e4m3fn",
        DType::F8E5M2 => "c10::Float8_e5m2",
    }
}

/// Every dtype that torch and the device share.
pub fn all() -> impl Iterator<Item = DType> {
    DTYPES.iter().map(|e| e.0)
}

/// A shape as torch prints it: `[2, 3]`.
pub fn shape_text(shape: &[i64]) -> String {
    format!("{shape:?}")
}

/// bool < integer < floating point < complex.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Category {
    /// `torch.bool`
    Bool,
    /// All integers
    Int,
    /// All floating point types
    Float,
    /// complex64 and complex128
    Complex,
}

/// The category of a dtype.
pub fn category(dtype: DType) -> Category {
    if dtype == DType::Pred {
        Category::Bool
    } else if dtype.is_complex() {
        Category::Complex
    } else if dtype.is_float() {
        Category::Float
    } else {
        Category::Int
    }
}

/// uint16, uint32, uint64: torch has them without arithmetic promotion.
fn barebones(dtype: DType) -> bool {
    matches!(dtype, DType::U16 | DType::U32 | DType::U64)
}

fn float8(dtype: DType) -> bool {
    matches!(dtype, DType::F8E4M3FN | DType::F8E5M2)
}

/// `c10::promoteTypes`.
pub fn promote(a: DType, b: DType) -> Result<DType> {
    if a == b {
        return Ok(a);
    }
    let refuse = |what: &str| {
        let (a, b) = (scalar_name(a), scalar_name(b));
        runtime(format!("Promotion for {what} is not supported, attempted to promote {a} and {b}"))
    };
    if float8(a) || float8(b) {
        return Err(refuse("Float8 Types"));
    }
    if barebones(a) || barebones(b) {
        return match (a.is_float(), b.is_float()) {
            (true, _) => Ok(a),
            (_, true) => Ok(b),
            _ => Err(refuse("uint16, uint32, uint64 types")),
        };
    }
    let (low, high) = if category(a) <= category(b) { (a, b) } else { (b, a) };
    Ok(match (category(low), category(high)) {
        (Category::Int, Category::Int) => promote_int(low, high),
        (Category::Float, Category::Float) => promote_float(low, high),
        (Category::Float, Category::Complex) if low == DType::F64 => DType::C128,
        (Category::Complex, Category::Complex) => DType::C128,
        _ => high,
    })
}

/// uint8 with a signed type of its size needs the next size; otherwise the wider one wins.
fn promote_int(a: DType, b: DType) -> DType {
    match (a, b) {
        (DType::U8, DType::S8) | (DType::S8, DType::U8) => DType::S16,
        _ if a.size_bytes() > b.size_bytes() => a,
        _ => b,
    }
}

fn promote_float(a: DType, b: DType) -> DType {
    match (a, b) {
        (DType::F16, DType::BF16) | (DType::BF16, DType::F16) => DType::F32,
        _ if a.size_bytes() > b.size_bytes() => a,
        _ => b,
    }
}

/// `c10::canCast`: whether a result of dtype `from` may be stored into `to`.
pub fn can_cast(from: DType, to: DType) -> bool {
    let (from, to) = (category(from), category(to));
    !(from == Category::Complex && to != Category::Complex
        || from == Category::Float && matches!(to, Category::Int | Category::Bool)
        || from != Category::Bool && to == Category::Bool)
}

/// `at::opmath_type`: what arithmetic in this dtype is carried out in.
pub fn opmath(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 | DType::F8E4M3FN | DType::F8E5M2 => DType::F32,
        other => other,
    }
}

/// The accumulation type of sums on the CPU: float32 for reduced floats, int64 for integers.
pub fn acc_type(dtype: DType) -> DType {
    match category(dtype) {
        Category::Bool | Category::Int => DType::S64,
        _ => opmath(dtype),
    }
}
