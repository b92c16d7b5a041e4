//! Views that go along the dimensions of their storage's value, perhaps in steps: every other column of a matrix.
//!
//! They are slices with strides, and writes to them selections. Where the strides of a view nest it is a box of a grid too
//! (`view.rs`), but that depends on sizes: `x[:, ::2]` is one if there is an even number of columns. Others are taken so.

use oxitorch_hlo::{Builder, Dims, Value};

/// For each dimension of the storage's value which places of it are shown.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Steps {
    dims: Vec<Step>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    start: i64,
    size: i64,
    /// How far the places are apart.
    step: i64,
    /// The view's dimension, unless one place is shown.
    dim: Option<usize>,
}

impl Step {
    /// One past the last place.
    fn limit(&self) -> i64 {
        self.start + (self.size - 1) * self.step + 1
    }
}

impl Steps {
    /// How a view with these sizes, strides and offset goes along the dimensions of a value of this shape, if it does.
    pub(crate) fn along(shape: &[i64], sizes: &[i64], strides: &[i64], offset: i64) -> Option<Steps> {
        let own = row_major(shape);
        let mut rest = offset;
        let mut dims: Vec<Step> = Vec::with_capacity(shape.len());
        for &stride in &own {
            dims.push(Step { start: rest / stride, size: 1, step: 1, dim: None });
            rest %= stride;
        }
        for d in (0..sizes.len()).filter(|&d| sizes[d] != 1 && strides[d] != 0) {
            // The outermost dimension that it is a multiple of, of those with more than one place.
            let at = (0..shape.len()).find(|&e| shape[e] > 1 && strides[d] % own[e] == 0)?;
            if dims[at].dim.is_some() {
                return None;
            }
            dims[at] = Step { size: sizes[d], step: strides[d] / own[at], dim: Some(d), ..dims[at] };
        }
        // One place of a dimension is shown as a dimension, too, where it may be: where its size varies, there are more at
        // another.
        for d in (0..sizes.len()).rev().filter(|&d| sizes[d] == 1) {
            let at = (0..shape.len()).rev().find(|&e| dims[e].dim.is_none() && strides[d] == own[e]);
            at.into_iter().for_each(|at| dims[at].dim = Some(d));
        }
        let fits = |(s, &n): (&Step, &i64)| s.step > 0 && s.limit() <= n;
        dims.iter().zip(shape).all(fits).then_some(Steps { dims })
    }

    /// Whether they are rather steps that somebody wrote than sizes.
    pub(crate) fn are_small(&self) -> bool {
        self.dims.iter().all(|s| s.step <= 3)
    }

    fn each(&self, of: impl Fn(&Step) -> i64) -> Dims {
        self.dims.iter().map(of).collect()
    }

    /// The view's dimensions in the order of the storage's.
    fn order(&self) -> Vec<usize> {
        self.dims.iter().filter_map(|s| s.dim).collect()
    }

    /// The elements of the view, which has these sizes.
    pub(crate) fn read(&self, b: &Builder, base: Value, sizes: &[i64]) -> Value {
        let part = b.slice(base, &self.each(|s| s.start), &self.each(Step::limit), &self.each(|s| s.step));
        let order = self.order();
        let part = b.reshape(part, &order.iter().map(|&d| sizes[d]).collect::<Dims>());
        let mut sorted: Vec<usize> = (0..order.len()).collect();
        sorted.sort_by_key(|&i| order[i]);
        let part = b.transpose(part, &sorted.iter().map(|&i| i as i64).collect::<Dims>());
        let dims: Dims = sorted.iter().map(|&i| order[i] as i64).collect();
        b.broadcast_in_dim(part, sizes, &dims)
    }

    /// The storage's value after the view, of which no two places are one, was overwritten.
    pub(crate) fn write(&self, b: &Builder, base: Value, update: Value) -> Value {
        let (shape, sizes) = (b.shape(base), b.shape(update));
        let ones: Dims = (0..sizes.len() as i64).filter(|&d| sizes[d as usize] == 1).collect();
        let position = |d: usize| d as i64 - ones.iter().filter(|&&o| o < d as i64).count() as i64;
        let more = self.order().into_iter().filter(|&d| sizes[d] != 1);
        let order: Dims = more.map(position).collect();
        let part = b.transpose(b.squeeze(update, &ones), &order);
        let part = b.reshape(part, &self.each(|s| s.size));
        let high: Dims = self.dims.iter().zip(&shape).map(|(s, n)| n - s.limit()).collect();
        let spread = |x: Value| {
            let nothing = b.scalar_f64(b.dtype(x), 0.0);
            b.pad(x, nothing, &self.each(|s| s.start), &high, &self.each(|s| s.step - 1))
        };
        let written = b.full(b.scalar_bool(true), &self.each(|s| s.size));
        b.select(spread(written), spread(part), base)
    }
}

/// Row-major strides.
pub(crate) fn row_major(shape: &[i64]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for d in (0..shape.len().saturating_sub(1)).rev() {
        strides[d] = strides[d + 1] * shape[d + 1].max(1);
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_along_the_dimensions_of_a_value() {
        let check = |shape: &[i64], sizes: &[i64], strides: &[i64], offset: i64, expected: Option<&[_]>| {
            let found = Steps::along(shape, sizes, strides, offset);
            let dims: Option<Vec<_>> =
                found.map(|s| s.dims.iter().map(|s| (s.start, s.size, s.step, s.dim)).collect());
            assert_eq!(dims.as_deref(), expected, "{sizes:?} in steps of {strides:?} of {shape:?}");
        };
        // x[:, 1::2] and its transpose, of 3 x 9.
        check(&[3, 9], &[3, 4], &[9, 2], 1, Some(&[(0, 3, 1, Some(0)), (1, 4, 2, Some(1))]));
        check(&[3, 9], &[4, 3], &[2, 9], 1, Some(&[(0, 3, 1, Some(1)), (1, 4, 2, Some(0))]));
        // x[1, ::3], expanded.
        check(&[3, 9], &[2, 3], &[0, 3], 9, Some(&[(1, 1, 1, None), (0, 3, 3, Some(1))]));
        // x[:, 4:5], and x[:1, 4:5] with a dimension in front.
        check(&[3, 9], &[3, 1], &[9, 1], 4, Some(&[(0, 3, 1, Some(0)), (4, 1, 1, Some(1))]));
        check(&[3, 9], &[1, 1, 1], &[27, 9, 1], 4, Some(&[(0, 1, 1, Some(1)), (4, 1, 1, Some(2))]));
        // A diagonal, windows, and a row that goes on in the next.
        check(&[3, 3], &[3], &[4], 0, None);
        check(&[3, 9], &[3, 4, 3], &[9, 2, 1], 0, None);
        check(&[3, 9], &[12], &[1], 3, None);
    }
}
