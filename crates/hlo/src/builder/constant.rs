//! Constants. They have no place in a block: every block that uses one gets its own copy when printed, so regions may use
//! constants made anywhere. Splats are interned.

use smallvec::SmallVec;

use super::{Builder, Inner};
use crate::ir::{Constant, Def, NOWHERE, Value};
use crate::types::{DType, TensorType};

type Bytes = SmallVec<[u8; 16]>;

impl Builder {
    /// A scalar of any element type, rounded to nearest even for floats, saturating for integers, `!= 0` for `Pred`.
    pub fn scalar_f64(&self, dtype: DType, value: f64) -> Value {
        self.splat(TensorType::scalar(dtype), encode_f64(dtype, value))
    }

    /// A scalar of any element type from an integer; integer types wrap, floats round, `Pred` is `!= 0`.
    pub fn scalar_i64(&self, dtype: DType, value: i64) -> Value {
        self.splat(TensorType::scalar(dtype), encode_i64(dtype, value))
    }

    /// A `Pred` scalar.
    pub fn scalar_bool(&self, value: bool) -> Value {
        self.scalar_i64(DType::Pred, i64::from(value))
    }

    /// A scalar with an imaginary part, which real types drop.
    pub fn scalar_c(&self, dtype: DType, re: f64, im: f64) -> Value {
        if !dtype.is_complex() {
            return self.scalar_f64(dtype, re);
        }
        let mut bytes = encode_f64(dtype.real(), re);
        bytes.extend(encode_f64(dtype.real(), im));
        self.splat(TensorType::scalar(dtype), bytes)
    }

    /// A constant from the bytes of its elements: row-major, little-endian, one byte (0 or 1) for a `Pred`.
    pub fn dense(&self, ty: TensorType, bytes: Vec<u8>) -> Value {
        let size = ty.dtype.size_bytes();
        if !ty.is_representable() || ty.bytes() != bytes.len() as i64 {
            let reason = format!("{} bytes given, the type has {}", bytes.len(), ty.bytes());
            return self.refuse("stablehlo.constant", &[], reason, ty);
        }
        if ty.dtype == DType::Pred && bytes.iter().any(|&b| b > 1) {
            let reason = "an i1 element must be 0 or 1".to_owned();
            return self.refuse("stablehlo.constant", &[], reason, ty);
        }
        if !bytes.is_empty() && bytes.chunks_exact(size).all(|c| c == &bytes[..size]) {
            return self.splat(ty, Bytes::from_slice(&bytes[..size]));
        }
        self.inner.borrow_mut().constant(ty, Constant::Dense(bytes))
    }

    /// A vector of integers as any element type (wrapping, rounding for floats).
    pub fn vector_i64(&self, dtype: DType, values: &[i64]) -> Value {
        let bytes = values.iter().flat_map(|&v| encode_i64(dtype, v)).collect();
        self.dense(TensorType::new(dtype, [values.len() as i64].as_slice()), bytes)
    }

    /// A vector of floats as any element type.
    pub fn vector_f64(&self, dtype: DType, values: &[f64]) -> Value {
        let bytes = values.iter().flat_map(|&v| encode_f64(dtype, v)).collect();
        self.dense(TensorType::new(dtype, [values.len() as i64].as_slice()), bytes)
    }

    /// Every element of `ty` is `value`, converted as [`Builder::scalar_f64`] does.
    pub fn constant(&self, ty: TensorType, value: f64) -> Value {
        let bytes = encode_f64(ty.dtype, value);
        self.splat(ty, bytes)
    }

    /// A scalar value spread over `shape`: `broadcast_in_dim` with no dimensions.
    pub fn full(&self, scalar: Value, shape: &[i64]) -> Value {
        self.broadcast_in_dim(scalar, shape, &[])
    }

    /// A constant of `x`'s type.
    pub fn full_like(&self, x: Value, value: f64) -> Value {
        self.constant(self.ty(x), value)
    }

    /// Zeros of `x`'s type.
    pub fn zeros_like(&self, x: Value) -> Value {
        self.full_like(x, 0.0)
    }

    /// Ones of `x`'s type.
    pub fn ones_like(&self, x: Value) -> Value {
        self.full_like(x, 1.0)
    }

    /// A scalar constant of `x`'s element type.
    pub fn scalar_like(&self, x: Value, value: f64) -> Value {
        self.scalar_f64(self.dtype(x), value)
    }

    /// The scalar that loses every maximum: -inf, the lowest integer, false. Complex types have none.
    pub fn min_value(&self, dtype: DType) -> Value {
        self.extreme(dtype, f64::NEG_INFINITY)
    }

    /// The scalar that loses every minimum: inf, the highest integer, true. Complex types have none.
    pub fn max_value(&self, dtype: DType) -> Value {
        self.extreme(dtype, f64::INFINITY)
    }

    fn extreme(&self, dtype: DType, infinity: f64) -> Value {
        match dtype {
            DType::C64 | DType::C128 => {
                let reason = format!("{dtype} has no order");
                self.refuse("stablehlo.constant", &[], reason, TensorType::scalar(dtype))
            }
            // No infinity in this type: its largest finite value stands in.
            DType::F8E4M3FN => self.scalar_f64(dtype, 448f64.copysign(infinity)),
            DType::Pred => self.scalar_bool(infinity > 0.0),
            // Integers saturate.
            _ => self.scalar_f64(dtype, infinity),
        }
    }

    /// A constant of one element, given by its bytes.
    pub(crate) fn splat(&self, ty: TensorType, bytes: Bytes) -> Value {
        if !ty.is_representable() {
            return self.refuse(
                "stablehlo.constant",
                &[],
                format!("{ty} has a negative size or is too large"),
                ty,
            );
        }
        self.inner.borrow_mut().splat(ty, bytes)
    }

    /// The scalar constant `x` as a constant of another shape; `None` if `x` is no constant.
    pub(super) fn splat_of(&self, x: Value, shape: &[i64]) -> Option<Value> {
        let mut inner = self.inner.borrow_mut();
        let data = inner.arena.values.get(x.0 as usize)?;
        let Def::Constant(id) = data.def else { return None };
        let Constant::Splat(bytes) = &inner.arena.constants[id as usize] else { return None };
        let (ty, bytes) = (data.ty.with_shape(shape), bytes.clone());
        if !ty.is_representable() {
            return None;
        }
        Some(inner.splat(ty, bytes))
    }
}

impl Builder {
    /// The bytes of the element of such a constant.
    pub(crate) fn constant_bytes(&self, v: Value) -> Option<Bytes> {
        let inner = self.inner.borrow();
        let Def::Constant(id) = inner.arena.values.get(v.0 as usize)?.def else { return None };
        match &inner.arena.constants[id as usize] {
            Constant::Splat(bytes) => Some(bytes.clone()),
            Constant::Dense(_) => None,
        }
    }
}

impl Inner {
    fn splat(&mut self, ty: TensorType, bytes: Bytes) -> Value {
        let key = (ty, bytes);
        if let Some(&v) = self.arena.splats.get(&key) {
            return v;
        }
        let v = self.constant(key.0.clone(), Constant::Splat(key.1.clone()));
        self.arena.splats.insert(key, v);
        v
    }

    fn constant(&mut self, ty: TensorType, data: Constant) -> Value {
        let id = self.arena.constants.len() as u32;
        self.arena.constants.push(data);
        self.new_value(ty, Def::Constant(id), NOWHERE)
    }
}

fn encode_f64(dtype: DType, v: f64) -> Bytes {
    // Saturating `as` casts for integers; NaN becomes 0 there.
    match dtype {
        DType::Pred => Bytes::from_slice(&[u8::from(v != 0.0)]),
        DType::S8 => Bytes::from_slice(&(v as i8).to_le_bytes()),
        DType::S16 => Bytes::from_slice(&(v as i16).to_le_bytes()),
        DType::S32 => Bytes::from_slice(&(v as i32).to_le_bytes()),
        DType::S64 => Bytes::from_slice(&(v as i64).to_le_bytes()),
        DType::U8 => Bytes::from_slice(&(v as u8).to_le_bytes()),
        DType::U16 => Bytes::from_slice(&(v as u16).to_le_bytes()),
        DType::U32 => Bytes::from_slice(&(v as u32).to_le_bytes()),
        DType::U64 => Bytes::from_slice(&(v as u64).to_le_bytes()),
        DType::F8E4M3FN => Bytes::from_slice(&[encode_f8(v, 4, 448.0, 0x7f)]),
        DType::F8E5M2 => Bytes::from_slice(&[encode_f8(v, 5, f64::INFINITY, 0x7e)]),
        DType::F16 => Bytes::from_slice(&half::f16::from_f64(v).to_le_bytes()),
        DType::BF16 => Bytes::from_slice(&half::bf16::from_f64(v).to_le_bytes()),
        DType::F32 => Bytes::from_slice(&(v as f32).to_le_bytes()),
        DType::F64 => Bytes::from_slice(&v.to_le_bytes()),
        DType::C64 | DType::C128 => {
            let mut bytes = encode_f64(dtype.real(), v);
            bytes.extend(encode_f64(dtype.real(), 0.0));
            bytes
        }
    }
}

fn encode_i64(dtype: DType, v: i64) -> Bytes {
    match dtype {
        DType::Pred => Bytes::from_slice(&[u8::from(v != 0)]),
        _ if dtype.is_integral() => Bytes::from_slice(&v.to_le_bytes()[..dtype.size_bytes()]),
        // One rounding, not two: i64 to f32 goes directly.
        DType::F32 => Bytes::from_slice(&(v as f32).to_le_bytes()),
        _ => encode_f64(dtype, v as f64),
    }
}

/// Rounds to an 8-bit float with `exponent` bits, ties to even. What exceeds `max` becomes NaN (code `nan`), except that
/// an infinite `max` means the type has infinities.
fn encode_f8(v: f64, exponent: u32, max: f64, nan: u8) -> u8 {
    let sign = if v.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = v.abs();
    if v.is_nan() {
        return sign | nan;
    }
    let mantissa = 7 - exponent;
    let infinity = 0x7f - ((1u8 << mantissa) - 1);
    let last = if max.is_infinite() { infinity - 1 } else { 0x7e };
    // Codes ascend with their values, so the nearest one is beside the largest that is not above.
    let below = (0..=last).rev().find(|&c| decode_f8(c, exponent) <= magnitude).unwrap_or(0);
    let (low, high) = (decode_f8(below, exponent), decode_f8(below + 1, exponent));
    let up = match (magnitude - low).partial_cmp(&(high - magnitude)) {
        Some(std::cmp::Ordering::Less) => false,
        Some(std::cmp::Ordering::Equal) => below % 2 == 1,
        _ => true,
    };
    sign | if magnitude > high && below == last { below + 1 } else { below + u8::from(up) }
}

/// The value of a non-negative 8-bit float code as if the type had no infinities and no NaN.
pub(crate) fn decode_f8(code: u8, exponent: u32) -> f64 {
    let mantissa = 7 - exponent;
    let bias = (1i32 << (exponent - 1)) - 1;
    let (e, m) = (i32::from(code >> mantissa), f64::from(code & ((1 << mantissa) - 1)));
    let scale = f64::from(1u32 << mantissa);
    if e == 0 { m / scale * 2f64.powi(1 - bias) } else { (1.0 + m / scale) * 2f64.powi(e - bias) }
}

impl Builder {
    /// Whether `v` is a constant that is zero everywhere, as far as it is seen (for choosing a cheaper lowering).
    pub fn is_zeros(&self, v: Value) -> bool {
        self.constant_bytes(v).is_some_and(|bytes| bytes.iter().all(|&b| b == 0))
    }

    /// The value of an integer or `Pred` splat constant, if `v` is one (for choosing a cheaper lowering).
    pub fn constant_i64(&self, v: Value) -> Option<i64> {
        self.inner.borrow().arena.constant_i64(v)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f8_rounds_to_nearest_even() {
        // Values from the OCP 8-bit float definition: largest, smallest normal, smallest subnormal.
        for (v, code) in [(448.0, 0x7e), (2f64.powi(-6), 0x08), (2f64.powi(-9), 0x01), (0.0, 0), (-1.0, 0xb8)]
        {
            assert_eq!(encode_f64(DType::F8E4M3FN, v)[0], code, "{v}");
        }
        for (v, code) in
            [(57344.0, 0x7b), (2f64.powi(-14), 0x04), (2f64.powi(-16), 0x01), (1e9, 0x7c), (-1.0, 0xbc)]
        {
            assert_eq!(encode_f64(DType::F8E5M2, v)[0], code, "{v}");
        }
        assert_eq!(encode_f64(DType::F8E4M3FN, 1e9)[0], 0x7f, "overflow is NaN");
        assert_eq!(encode_f64(DType::F8E4M3FN, f64::INFINITY)[0], 0x7f);
        assert_eq!(encode_f64(DType::F8E5M2, f64::NEG_INFINITY)[0], 0xfc);
        assert_eq!(encode_f64(DType::F8E4M3FN, 1.0625)[0], 0x38, "tie to even");
        assert_eq!(encode_f64(DType::F8E4M3FN, 1.1875)[0], 0x3a, "tie to even");
    }

    #[test]
    fn f8_decode_inverts_encode() {
        for code in 0..0x7f {
            assert_eq!(encode_f64(DType::F8E4M3FN, decode_f8(code, 4))[0], code);
        }
        for code in 0..=0x7b {
            assert_eq!(encode_f64(DType::F8E5M2, decode_f8(code, 5))[0], code);
        }
    }

    #[test]
    fn integers_saturate_from_floats_and_wrap_from_integers() {
        assert_eq!(encode_f64(DType::S8, 300.0)[..], [127]);
        assert_eq!(encode_f64(DType::U8, f64::NEG_INFINITY)[..], [0]);
        assert_eq!(encode_i64(DType::U8, -1)[..], [255]);
        assert_eq!(encode_i64(DType::F32, 16777217)[..], 16777216f32.to_le_bytes());
    }

    #[test]
    fn constant_i64_reads_back() {
        let b = Builder::new();
        for dtype in DType::all().filter(|d| d.is_integral()) {
            let want = if dtype.is_signed() { -5 } else { 5 };
            assert_eq!(b.constant_i64(b.scalar_i64(dtype, want)), Some(want));
        }
        assert_eq!(b.constant_i64(b.scalar_bool(true)), Some(1));
        assert_eq!(b.constant_i64(b.scalar_f64(DType::F32, 1.0)), None);
    }
}
