//! Fourier transforms of a length that varies.
//!
//! The roots of unity that a transform takes are those of its length, so that no transform of the bound gives those of
//! smaller sizes. Bluestein's algorithm ("A linear filtering approach to the computation of discrete Fourier transform",
//! 1970) makes a convolution of it: with `w(j) = e^(i pi j^2 / n)`, `j k = (j^2 + k^2 - (k - j)^2) / 2` gives
//! `y(k) = w(k) sum_j (x(j) w(j)) conj(w(k - j))`. The convolution is as long as the bound wants it, whatever `n` is.

use super::layout::{Dim, Three};
use super::rules::Pair;
use super::{Bounding, Laid, Result};
use crate::ir::*;
use crate::types::{DType, TensorType};

/// Squares of places have to fit 64 bits.
const MOST_PLACES: i64 = 1 << 30;

impl Bounding<'_> {
    pub(super) fn fft(&mut self, pair: Pair<'_>, x: Laid, kind: FftType, n: Three) -> Result<Laid> {
        let Some(last) =
            x.layout.len().checked_sub(1).filter(|_| n[0] <= MOST_PLACES && n[1] > 0 && n[2] > 0)
        else {
            return Err("no rule is known for a transform of this size".into());
        };
        let mut x = self.prefixed(x, |d| d == last)?;
        x.v = self.zeroed(&x, &[last]);
        let out = pair.bound.shape[last];
        let have = x.layout[last].size();
        let n = self.number(n);
        let to_real = kind == FftType::Irfft;
        let mut v = x.v;
        if to_real {
            v = self.twice_but_ends(v, n);
        } else if !self.b.dtype(v).is_complex() {
            v = self.b.complex(v, self.b.zeros_like(v));
        }
        let forward = matches!(kind, FftType::Fft | FftType::Rfft);
        let mut y = self.chirp_transform(v, (have, out), n, if forward { -1.0 } else { 1.0 });
        if to_real {
            y = self.b.real(y);
        }
        if !forward {
            let dtype = self.b.dtype(y).real();
            let by = self.b.divide(self.b.scalar_f64(dtype, 1.0), self.b.convert(n, dtype));
            y = self.times(y, by);
        }
        let mut layout: Vec<Dim> = x.layout.into_iter().map(|d| Dim { even: false, ..d }).collect();
        layout[last] = pair.dim(last);
        Ok(Laid { v: y, layout })
    }

    /// A value times a real scalar.
    fn times(&self, x: Value, by: Value) -> Value {
        let b = &self.b;
        let by = if b.dtype(x).is_complex() { b.complex(by, b.zeros_like(by)) } else { by };
        b.multiply(x, b.full(by, &b.shape(x)))
    }

    /// The half of a spectrum of which the other half is the mirror image, as a whole that has the same real part: all but
    /// the first element, and the middle one of an even `n`, are there twice.
    fn twice_but_ends(&self, x: Value, n: Value) -> Value {
        let b = &self.b;
        let shape = b.shape(x);
        let last = shape.len() - 1;
        let ty = TensorType::new(DType::S64, [shape[last]].as_slice());
        let place = b.iota(ty.clone(), 0);
        let constant = |k: i64| b.full(b.scalar_i64(DType::S64, k), &ty.shape);
        let once = b.or(b.eq(place, constant(0)), b.eq(b.multiply(place, constant(2)), b.full(n, &ty.shape)));
        let real = b.dtype(x).real();
        let number = |k: f64| b.full(b.scalar_f64(real, k), &ty.shape);
        let times = b.select(once, number(1.0), number(2.0));
        let times = b.broadcast_in_dim(b.complex(times, b.zeros_like(times)), &shape, &[last as i64]);
        b.multiply(x, times)
    }

    /// `e^(sign 2 pi i j k / n)` summed over the elements `j`, for `out` places `k`, along the last dimension.
    fn chirp_transform(&self, x: Value, (have, out): (i64, i64), n: Value, sign: f64) -> Value {
        let b = &self.b;
        let mut shape = b.shape(x);
        let last = shape.len() as i64 - 1;
        let dtype = b.dtype(x).real();
        // As many places as the convolution needs so that it does not come round.
        let length = (have + out).max(2) as u64;
        let length = length.next_power_of_two() as i64;
        let zero = b.scalar_i64(b.dtype(x), 0);
        let over = |w: Value, shape: &[i64]| b.broadcast_in_dim(w, shape, &[last]);
        let places = b.iota(TensorType::new(DType::S64, [length].as_slice()), 0);
        let chirp = |at: Value| self.chirp(at, n, dtype, sign);
        let w = chirp(places);
        let own = |size: i64| b.slice_dim(w, 0, 0, size, 1);
        let left = b.multiply(x, over(own(have), &shape));
        let left = b.pad_dim(left, zero, last, 0, length - have);
        // Places before the first one are those at the end.
        let constant = |k: i64| b.full(b.scalar_i64(DType::S64, k), &[length]);
        let before = b.subtract(constant(length), places);
        let distance = b.select(b.lt(places, constant(out)), places, before);
        let right = self.chirp(distance, n, dtype, -sign);
        shape[last as usize] = length;
        let spectrum = |v: Value| b.fft(v, FftType::Fft, &[length]);
        let product = b.multiply(spectrum(left), over(spectrum(right), &shape));
        let sums = b.slice_dim(b.fft(product, FftType::Ifft, &[length]), last, 0, out, 1);
        shape[last as usize] = out;
        b.multiply(sums, over(own(out), &shape))
    }

    /// `e^(sign i pi j^2 / n)` of places `j`. The angle is that of the remainder, which is exact.
    fn chirp(&self, places: Value, n: Value, dtype: DType, sign: f64) -> Value {
        let b = &self.b;
        let shape = b.shape(places);
        let wide = |v: Value| b.full(v, &shape);
        let twice = b.add(n, n);
        let rest = b.remainder(b.multiply(places, places), wide(twice));
        let rest = b.select(b.ge(rest, wide(n)), b.subtract(rest, wide(twice)), rest);
        let turns = b.divide(b.convert(rest, dtype), wide(b.convert(n, dtype)));
        let angle = b.multiply(turns, wide(b.scalar_f64(dtype, sign * std::f64::consts::PI)));
        b.complex(b.cosine(angle), b.sine(angle))
    }
}
