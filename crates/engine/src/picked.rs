//! The elements of a strided view, picked out of host memory.

use crate::bulk;
use crate::view::View;
use oxitorch_hlo::{DType, Dims};
use smallvec::SmallVec;

/// A dimension: how many elements, and the bytes between them.
type Dim = (usize, isize);

/// Copies the elements of a view in row-major order: `bytes` begin with the storage, strides and offset count elements of
/// `item` bytes.
pub(crate) fn copy(bytes: &[u8], item: usize, sizes: &[i64], strides: &[i64], offset: i64, out: &mut [u8]) {
    let dims = sizes.iter().zip(strides).map(|(&n, &s)| (n as usize, s as isize * item as isize));
    let mut outer: SmallVec<[Dim; 6]> = SmallVec::new();
    let mut dims: SmallVec<[Dim; 6]> = dims.filter(|&(n, _)| n != 1).collect();
    // What lies side by side is copied at once.
    let mut run = item;
    while let Some(&(n, step)) = dims.last().filter(|d| d.1 == run as isize) {
        run *= n;
        dims.pop();
        debug_assert!(step > 0);
    }
    outer.append(&mut dims);
    let mut out = out.chunks_exact_mut(run.max(1));
    copy_runs(bytes, offset as isize * item as isize, &outer, run, &mut out);
}

fn copy_runs(
    bytes: &[u8],
    at: isize,
    dims: &[Dim],
    run: usize,
    out: &mut std::slice::ChunksExactMut<'_, u8>,
) {
    match dims {
        [] => out.by_ref().take(1).for_each(|to| bulk::copy(&bytes[at as usize..][..run], to)),
        [(n, step)] => {
            for (i, to) in out.by_ref().take(*n).enumerate() {
                to.copy_from_slice(&bytes[(at + i as isize * step) as usize..][..run]);
            }
        }
        [(n, step), inner @ ..] => {
            (0..*n).for_each(|i| copy_runs(bytes, at + i as isize * step, inner, run, out));
        }
    }
}

/// Copies the elements of a view to the first places of a larger row-major tensor of this shape, and `fill`, an element,
/// to all others.
pub(crate) fn padded(bytes: &[u8], item: usize, view: &View, (shape, fill): (&[i64], &[u8]), out: &mut [u8]) {
    // From the first dimension that grows on, rows are apart.
    let Some(inner) = view.sizes.iter().zip(shape).rposition(|(n, m)| n != m) else {
        return copy(bytes, item, &view.sizes, &view.strides, view.offset, out);
    };
    let (step, whole) = (view.strides[inner], shape[inner]);
    let rest = (&view.sizes[inner + 1..], &view.strides[inner + 1..]);
    let sizes: Dims = std::iter::once(view.sizes[inner]).chain(rest.0.iter().copied()).collect();
    let strides: Dims = std::iter::once(step).chain(rest.1.iter().copied()).collect();
    let place = item * rest.0.iter().product::<i64>() as usize;
    let used = place * view.sizes[inner] as usize;
    let row = place * whole as usize;
    let outer = (&view.sizes[..inner], &view.strides[..inner]);
    for (number, out) in out.chunks_exact_mut(row.max(1)).enumerate() {
        let (mut left, mut offset, mut is_used) = (number as i64, view.offset, used > 0);
        for (d, &m) in shape[..inner].iter().enumerate().rev() {
            let at = left % m;
            left /= m;
            is_used &= at < outer.0[d];
            offset += at * outer.1[d];
        }
        let (own, behind) = out.split_at_mut(if is_used { used } else { 0 });
        if is_used {
            copy(bytes, item, &sizes, &strides, offset, own);
        }
        behind.chunks_exact_mut(item).for_each(|to| to.copy_from_slice(fill));
    }
}

/// Negates elements.
pub(crate) fn negate(dtype: DType, bytes: &mut [u8]) {
    if dtype.is_complex() || dtype.is_float() {
        let part = dtype.real().size_bytes();
        return bytes.chunks_exact_mut(part).for_each(flip_sign);
    }
    for element in bytes.chunks_exact_mut(dtype.size_bytes()) {
        let mut carry = true;
        for byte in element {
            (*byte, carry) = (!*byte).overflowing_add(u8::from(carry));
        }
    }
}

/// Conjugates complex elements.
pub(crate) fn conjugate(dtype: DType, bytes: &mut [u8]) {
    if dtype.is_complex() {
        let part = dtype.real().size_bytes();
        bytes.chunks_exact_mut(part).skip(1).step_by(2).for_each(flip_sign);
    }
}

/// Of one little-endian float.
fn flip_sign(float: &mut [u8]) {
    if let Some(last) = float.last_mut() {
        *last ^= 0x80;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picked(sizes: &[i64], strides: &[i64], offset: i64) -> Vec<u16> {
        let storage: Vec<u8> = (0..24u16).flat_map(u16::to_le_bytes).collect();
        let mut out = vec![0; sizes.iter().product::<i64>() as usize * 2];
        copy(&storage, 2, sizes, strides, offset, &mut out);
        out.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
    }

    #[test]
    fn elements_come_in_the_views_order() {
        assert_eq!(picked(&[2, 3], &[6, 1], 1), [1, 2, 3, 7, 8, 9]);
        assert_eq!(picked(&[3, 2], &[1, 6], 1), [1, 7, 2, 8, 3, 9]);
        assert_eq!(picked(&[2, 2], &[0, 5], 4), [4, 9, 4, 9]);
        assert_eq!(picked(&[], &[], 7), [7]);
        assert_eq!(picked(&[2, 1, 2], &[12, 99, 1], 0), [0, 1, 12, 13]);
        assert_eq!(picked(&[4, 6], &[6, 1], 0), (0..24).collect::<Vec<_>>());
    }

    #[test]
    fn elements_come_first_in_a_larger_tensor() {
        let storage: Vec<u8> = (0..24u16).flat_map(u16::to_le_bytes).collect();
        let check = |sizes: &[i64], strides: &[i64], shape: &[i64], expected: &[u16]| {
            let view = View {
                dtype: DType::U16,
                sizes: sizes.into(),
                strides: strides.into(),
                offset: 1,
                conj: false,
                neg: false,
            };
            let mut out = vec![0; expected.len() * 2];
            padded(&storage, 2, &view, (shape, &99u16.to_le_bytes()), &mut out);
            let found: Vec<u16> = out.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
            assert_eq!(found, expected, "{sizes:?} in {shape:?}");
        };
        check(&[2, 2], &[6, 1], &[2, 3], &[1, 2, 99, 7, 8, 99]);
        check(&[2, 2], &[1, 6], &[3, 2], &[1, 7, 2, 8, 99, 99]);
        check(&[1, 2], &[6, 1], &[2, 3], &[1, 2, 99, 99, 99, 99]);
        check(&[2, 1, 2], &[6, 3, 1], &[2, 2, 2], &[1, 2, 99, 99, 7, 8, 99, 99]);
        check(&[2, 2], &[6, 1], &[2, 2], &[1, 2, 7, 8]);
        check(&[0], &[1], &[2], &[99, 99]);
    }

    #[test]
    fn signs() {
        let mut ints = (-2i32).to_le_bytes();
        negate(DType::S32, &mut ints);
        assert_eq!(i32::from_le_bytes(ints), 2);
        let mut zero = 0i16.to_le_bytes();
        negate(DType::S16, &mut zero);
        assert_eq!(zero, [0, 0]);
        let mut pair = [1f32.to_le_bytes(), 2f32.to_le_bytes()].concat();
        conjugate(DType::C64, &mut pair);
        assert_eq!(pair, [1f32.to_le_bytes(), (-2f32).to_le_bytes()].concat());
    }
}
