//! Numbers, strings and constant data as MLIR spells them.

use crate::builder::decode_f8;
use crate::ir::Constant;
use crate::types::{DType, TensorType};

pub(crate) fn push_int(out: &mut String, v: i64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    let mut rest = v.unsigned_abs();
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    if v < 0 {
        out.push('-');
    }
    out.extend(digits[at..].iter().map(|&d| d as char));
}

fn push_hex(out: &mut String, bytes: impl Iterator<Item = u8>) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for b in bytes {
        out.push(DIGITS[usize::from(b >> 4)] as char);
        out.push(DIGITS[usize::from(b & 15)] as char);
    }
}

/// A quoted MLIR string.
pub(crate) fn push_string(out: &mut String, text: &str) {
    out.push('"');
    for b in text.bytes() {
        match b {
            b'"' | b'\\' | 0..0x20 | 0x7f.. => {
                out.push('\\');
                push_hex(out, std::iter::once(b));
            }
            _ => out.push(b as char),
        }
    }
    out.push('"');
}

/// What stands inside `dense<>`.
pub(crate) fn push_elements(out: &mut String, ty: &TensorType, data: &Constant) {
    match data {
        _ if ty.numel() == 0 => (),
        Constant::Splat(bytes) => push_element(out, ty.dtype, bytes),
        // MLIR packs i1 in hex differently from version to version; words are unambiguous.
        Constant::Dense(bytes) if ty.dtype == DType::Pred => push_nested_bools(out, &ty.shape, bytes),
        Constant::Dense(bytes) => {
            out.reserve(bytes.len() * 2 + 8);
            out.push_str("\"0x");
            push_hex(out, bytes.iter().copied());
            out.push('"');
        }
    }
}

fn push_nested_bools(out: &mut String, shape: &[i64], bytes: &[u8]) {
    let Some((&n, inner)) = shape.split_first() else {
        return out.push_str(if bytes.first() == Some(&1) { "true" } else { "false" });
    };
    out.push('[');
    for (i, part) in bytes.chunks(bytes.len() / n.max(1) as usize).enumerate() {
        out.push_str(if i > 0 { ", " } else { "" });
        push_nested_bools(out, inner, part);
    }
    out.push(']');
}

fn push_element(out: &mut String, dtype: DType, bytes: &[u8]) {
    match dtype {
        DType::Pred => out.push_str(if bytes[0] != 0 { "true" } else { "false" }),
        DType::C64 | DType::C128 => {
            let (re, im) = bytes.split_at(bytes.len() / 2);
            out.push('(');
            push_float(out, dtype.real(), re);
            out.push_str(", ");
            push_float(out, dtype.real(), im);
            out.push(')');
        }
        _ if dtype.is_float() => push_float(out, dtype, bytes),
        _ => push_integer(out, dtype, bytes),
    }
}

fn push_integer(out: &mut String, dtype: DType, bytes: &[u8]) {
    let negative = dtype.is_signed() && bytes.last().is_some_and(|b| b & 0x80 != 0);
    let mut wide = if negative { [0xff; 8] } else { [0; 8] };
    wide[..bytes.len()].copy_from_slice(bytes);
    if dtype == DType::U64 {
        out.push_str(&u64::from_le_bytes(wide).to_string());
    } else {
        push_int(out, i64::from_le_bytes(wide));
    }
}

/// A decimal where the reader, which goes through f64, gets these very bits back; else the bits in hex.
fn push_float(out: &mut String, dtype: DType, bytes: &[u8]) {
    let exact = match dtype {
        DType::F32 => {
            let v = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            decimal(f64::from(v), format!("{v:?}"), |back| (back as f32).to_bits() == v.to_bits())
        }
        DType::F64 => {
            let mut b = [0; 8];
            b.copy_from_slice(bytes);
            let v = f64::from_le_bytes(b);
            decimal(v, format!("{v:?}"), |back| back.to_bits() == v.to_bits())
        }
        DType::F16 => {
            let v = half::f16::from_le_bytes([bytes[0], bytes[1]]);
            decimal(v.to_f64(), format!("{:?}", v.to_f64()), |back| back == v.to_f64())
        }
        DType::BF16 => {
            let v = half::bf16::from_le_bytes([bytes[0], bytes[1]]);
            decimal(v.to_f64(), format!("{:?}", v.to_f64()), |back| back == v.to_f64())
        }
        _ => {
            let (exponent, finite) = if dtype == DType::F8E5M2 { (5, 0x7b) } else { (4, 0x7e) };
            let code = bytes[0] & 0x7f;
            let v = decode_f8(code, exponent) * if bytes[0] & 0x80 != 0 { -1.0 } else { 1.0 };
            decimal(v, format!("{v:?}"), |_| code <= finite)
        }
    };
    match exact {
        Some(text) => out.push_str(&text),
        None => {
            out.push_str("0x");
            push_hex(out, bytes.iter().rev().copied());
        }
    }
}

/// `text` with the point that MLIR wants, if it is short and `same` accepts what it reads back as.
fn decimal(v: f64, text: String, same: impl Fn(f64) -> bool) -> Option<String> {
    // Longer ones are no more readable than hex, and 17 digits are the most that f64 needs.
    if !v.is_finite() || text.len() > 24 || !text.parse().is_ok_and(same) {
        return None;
    }
    if text.contains('.') {
        return Some(text);
    }
    Some(match text.split_once('e') {
        Some((mantissa, exponent)) => format!("{mantissa}.0e{exponent}"),
        None => format!("{text}.0"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_print_like_std() {
        for v in [0, 7, -1, 10, i64::MIN, i64::MAX, 1234567890] {
            let mut out = String::new();
            push_int(&mut out, v);
            assert_eq!(out, v.to_string());
        }
    }

    #[test]
    fn floats_print_exactly_or_in_hex() {
        let print = |dtype: DType, bytes: &[u8]| {
            let mut out = String::new();
            push_float(&mut out, dtype, bytes);
            out
        };
        assert_eq!(print(DType::F32, &0.1f32.to_le_bytes()), "0.1");
        assert_eq!(print(DType::F32, &1e-20f32.to_le_bytes()), "1.0e-20");
        assert_eq!(print(DType::F32, &(-0.0f32).to_le_bytes()), "-0.0");
        assert_eq!(print(DType::F32, &f32::NAN.to_le_bytes()), "0x7FC00000");
        assert_eq!(print(DType::F64, &f64::NEG_INFINITY.to_le_bytes()), "0xFFF0000000000000");
        assert_eq!(print(DType::BF16, &half::bf16::from_f32(1.5).to_le_bytes()), "1.5");
        assert_eq!(print(DType::F8E4M3FN, &[0x7e]), "448.0");
        assert_eq!(print(DType::F8E4M3FN, &[0xff]), "0xFF");
        assert_eq!(print(DType::F8E5M2, &[0x7c]), "0x7C");
    }

    #[test]
    fn strings_are_escaped() {
        let mut out = String::new();
        push_string(&mut out, "a\"b\\\n\u{e9}");
        assert_eq!(out, r#""a\22b\5C\0A\C3\A9""#);
    }
}
