//! Results of a call in parts that are the sum of what the parts give: the gradient of a weight, of which each part sees some
//! of the images.

use crate::abi::Tensor;
use oxitorch_aten::{DType, dtype};
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ops::AddAssign;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Where each part writes them: the first where the sum is wanted, and each other in memory of its own.
pub(crate) struct Sums {
    results: Vec<Sum>,
}

struct Sum {
    result: Tensor,
    /// What the parts but the first write, one after another: so many words each.
    own: Vec<UnsafeCell<u64>>,
    words: usize,
}

// SAFETY: a result lies in the program's buffers, which live through the call, and each part is given a place of its own.
unsafe impl Sync for Sums {}

/// How many bytes a dense tensor of floats has; `None` for another element type.
pub(crate) fn bytes(tensor: &Tensor) -> Option<usize> {
    let size = [(DType::F32, 4), (DType::F64, 8)].into_iter().find(|(d, _)| code(*d) == tensor.dtype)?.1;
    Some(count(tensor) * size)
}

fn code(dtype: DType) -> i16 {
    dtype::code(dtype) as i16
}

fn count(tensor: &Tensor) -> usize {
    tensor.sizes().iter().product::<i64>() as usize
}

impl Sums {
    /// For these results, dense tensors of floats; `None` for others.
    pub(crate) fn new(results: impl Iterator<Item = Tensor>, parts: usize) -> Option<Sums> {
        let sum = |result: Tensor| {
            let words = bytes(&result)?.div_ceil(size_of::<u64>());
            let own = (0..words * parts.saturating_sub(1)).map(|_| UnsafeCell::new(0)).collect();
            Some(Sum { result, own, words })
        };
        Some(Sums { results: results.map(sum).collect::<Option<_>>()? })
    }

    /// How much memory the parts but the first have.
    pub(crate) fn bytes(&self) -> usize {
        self.results.iter().map(|sum| sum.own.len() * size_of::<u64>()).sum()
    }

    /// Where part `i` writes each.
    pub(crate) fn of(&self, i: usize) -> impl Iterator<Item = Tensor> {
        self.results.iter().map(move |sum| match i.checked_sub(1) {
            None => sum.result,
            Some(part) => Tensor { host: sum.part(part), offset: 0, ..sum.result },
        })
    }

    /// Adds what the other parts have to that of the first, when all are done.
    pub(crate) fn add(self) {
        for sum in &self.results {
            // SAFETY: the type is the result's.
            unsafe { if sum.result.dtype == code(DType::F32) { sum.add::<f32>() } else { sum.add::<f64>() } }
        }
    }
}

impl Sum {
    fn part(&self, part: usize) -> *const c_void {
        self.own[part * self.words..].as_ptr().cast()
    }

    /// # Safety
    /// The result's elements are of this type, and nobody writes any more.
    unsafe fn add<T: Copy + AddAssign>(&self) {
        let count = count(&self.result);
        let at = self.result.host.cast::<T>().cast_mut();
        // SAFETY: the result is dense, and the reader has checked that it lies within its buffer.
        let sum = unsafe { from_raw_parts_mut(at.add(self.result.offset as usize), count) };
        for part in 0..self.own.len() / self.words.max(1) {
            // SAFETY: as many elements as the result has, zeros where a part wrote none.
            let own = unsafe { from_raw_parts(self.part(part).cast::<T>(), count) };
            sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += *own);
        }
    }
}
