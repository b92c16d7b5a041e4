//! Element types and the type of a buffer: element type and dimensions.

use std::fmt;

use oxitorch_pjrt_sys as sys;
use smallvec::SmallVec;

use crate::error::{Error, Result, err};

/// Dimensions of a buffer, outermost first.
pub type Dims = SmallVec<[i64; 6]>;

macro_rules! element_types {
    ($($(#[$doc:meta])* $name:ident = $code:ident, $text:literal, $bits:literal;)*) => {
        /// The type of one element, by the names that StableHLO and XLA use.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        #[repr(u8)]
        pub enum ElementType {
            $($(#[$doc])* $name = sys::$code as u8,)*
        }

        impl ElementType {
            /// Every element type.
            pub const ALL: &'static [ElementType] = &[$(ElementType::$name,)*];

            /// The name in XLA's own spelling, for instance `f32`, `pred`, `u8`.
            pub const fn name(self) -> &'static str {
                match self { $(ElementType::$name => $text,)* }
            }

            /// Bits of one element's value.
            pub const fn bits(self) -> usize {
                match self { $(ElementType::$name => $bits,)* }
            }

            /// The element type with this `PJRT_Buffer_Type` code.
            pub const fn from_code(code: u32) -> Option<ElementType> {
                match code { $(sys::$code => Some(ElementType::$name),)* _ => None }
            }
        }
    };
}

element_types! {
    /// Truth value, one byte.
    Pred = PJRT_Buffer_Type_PRED, "pred", 8;
    /// Signed 8 bit.
    S8 = PJRT_Buffer_Type_S8, "s8", 8;
    /// Signed 16 bit.
    S16 = PJRT_Buffer_Type_S16, "s16", 16;
    /// Signed 32 bit.
    S32 = PJRT_Buffer_Type_S32, "s32", 32;
    /// Signed 64 bit.
    S64 = PJRT_Buffer_Type_S64, "s64", 64;
    /// Unsigned 8 bit.
    U8 = PJRT_Buffer_Type_U8, "u8", 8;
    /// Unsigned 16 bit.
    U16 = PJRT_Buffer_Type_U16, "u16", 16;
    /// Unsigned 32 bit.
    U32 = PJRT_Buffer_Type_U32, "u32", 32;
    /// Unsigned 64 bit.
    U64 = PJRT_Buffer_Type_U64, "u64", 64;
    /// IEEE half.
    F16 = PJRT_Buffer_Type_F16, "f16", 16;
    /// IEEE single.
    F32 = PJRT_Buffer_Type_F32, "f32", 32;
    /// IEEE double.
    F64 = PJRT_Buffer_Type_F64, "f64", 64;
    /// The upper half of an IEEE single.
    Bf16 = PJRT_Buffer_Type_BF16, "bf16", 16;
    /// Two IEEE singles.
    C64 = PJRT_Buffer_Type_C64, "c64", 64;
    /// Two IEEE doubles.
    C128 = PJRT_Buffer_Type_C128, "c128", 128;
    /// 8-bit float, 5 bits of exponent.
    F8E5M2 = PJRT_Buffer_Type_F8E5M2, "f8e5m2", 8;
    /// 8-bit float, 4 bits of exponent, no infinity.
    F8E4M3FN = PJRT_Buffer_Type_F8E4M3FN, "f8e4m3fn", 8;
    /// 8-bit float, bias 11, one NaN, no negative zero.
    F8E4M3B11FNUZ = PJRT_Buffer_Type_F8E4M3B11FNUZ, "f8e4m3b11fnuz", 8;
    /// 8-bit float, one NaN, no negative zero.
    F8E5M2FNUZ = PJRT_Buffer_Type_F8E5M2FNUZ, "f8e5m2fnuz", 8;
    /// 8-bit float, one NaN, no negative zero.
    F8E4M3FNUZ = PJRT_Buffer_Type_F8E4M3FNUZ, "f8e4m3fnuz", 8;
    /// Signed 4 bit; one byte each on the host.
    S4 = PJRT_Buffer_Type_S4, "s4", 4;
    /// Unsigned 4 bit; one byte each on the host.
    U4 = PJRT_Buffer_Type_U4, "u4", 4;
    /// Signed 2 bit; one byte each on the host.
    S2 = PJRT_Buffer_Type_S2, "s2", 2;
    /// Unsigned 2 bit; one byte each on the host.
    U2 = PJRT_Buffer_Type_U2, "u2", 2;
    /// An ordering token; no data.
    Token = PJRT_Buffer_Type_TOKEN, "token", 0;
    /// 8-bit IEEE-like float, 4 bits of exponent.
    F8E4M3 = PJRT_Buffer_Type_F8E4M3, "f8e4m3", 8;
    /// 8-bit IEEE-like float, 3 bits of exponent.
    F8E3M4 = PJRT_Buffer_Type_F8E3M4, "f8e3m4", 8;
    /// 8-bit power of two, no sign, no zero.
    F8E8M0FNU = PJRT_Buffer_Type_F8E8M0FNU, "f8e8m0fnu", 8;
    /// 4-bit float; one byte each on the host.
    F4E2M1FN = PJRT_Buffer_Type_F4E2M1FN, "f4e2m1fn", 4;
}

impl ElementType {
    /// The `PJRT_Buffer_Type` code.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// Bytes of one element in host memory; types under 8 bits take a byte each, a token none.
    pub const fn host_bytes(self) -> usize {
        self.bits().div_ceil(8)
    }
}

impl From<ElementType> for u32 {
    fn from(t: ElementType) -> u32 {
        t.code()
    }
}

impl TryFrom<u32> for ElementType {
    type Error = Error;
    fn try_from(code: u32) -> Result<ElementType> {
        ElementType::from_code(code).ok_or_else(|| err::invalid(format!("unknown element type code {code}")))
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The type of a buffer: what one device holds of one value.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct BufferType {
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions; for bounded dynamic dimensions the bounds.
    pub dims: Dims,
}

impl BufferType {
    /// A type from its parts.
    pub fn new(dtype: ElementType, dims: impl Into<Dims>) -> Self {
        Self { dtype, dims: dims.into() }
    }

    /// Bytes of the dense row-major value on the host; an error if a dimension is negative or the product overflows.
    pub fn checked_bytes(&self) -> Result<usize> {
        checked_bytes(self.dtype, &self.dims)
    }
}

impl fmt::Display for BufferType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, d) in self.dims.iter().enumerate() {
            write!(f, "{}{d}", if i == 0 { "" } else { "," })?;
        }
        f.write_str("]")
    }
}

pub(crate) fn checked_bytes(dtype: ElementType, dims: &[i64]) -> Result<usize> {
    let mut count = 1i64;
    let mut empty = false;
    for &d in dims {
        if d < 0 {
            return Err(err::invalid(format!("negative dimension in shape {dims:?}")));
        }
        empty |= d == 0;
        // Zero-sized dimensions are multiplied last, so that [2^40, 2^40, 0] is empty and not an overflow.
        count = count.checked_mul(d.max(1)).ok_or_else(|| err::too_large(dims))?;
    }
    let bytes = count.checked_mul(dtype.host_bytes() as i64).ok_or_else(|| err::too_large(dims))?;
    Ok(if empty { 0 } else { bytes as usize })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_go_both_ways() {
        for &t in ElementType::ALL {
            assert_eq!(ElementType::try_from(u32::from(t)).unwrap(), t);
        }
        assert_eq!(
            (ElementType::Pred.code(), ElementType::F32.code(), ElementType::F4E2M1FN.code()),
            (1, 11, 29)
        );
        assert!(ElementType::from_code(0).is_none() && ElementType::from_code(99).is_none());
    }

    #[test]
    fn bytes_are_checked() {
        let bytes = |dims: &[i64]| BufferType::new(ElementType::F32, dims).checked_bytes();
        assert_eq!(bytes(&[]).unwrap(), 4);
        assert_eq!(bytes(&[2, 3]).unwrap(), 24);
        assert_eq!(bytes(&[1 << 30, 0, 1 << 30]).unwrap(), 0);
        assert!(bytes(&[-1]).is_err());
        assert!(bytes(&[1 << 40, 1 << 40]).is_err());
        assert!(bytes(&[i64::MAX]).is_err());
        assert_eq!(BufferType::new(ElementType::S4, [3i64].as_slice()).checked_bytes().unwrap(), 3);
    }
}
