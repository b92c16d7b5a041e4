//! torch's scalar types: codes, names and categories.

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
