//! Sums over all of an image but its channels, or of each sample's: compiled code goes through the image once for each sum,
//! and PyTorch's kernels wake up threads of their own for it.
//!
//! An image is \[samples, outer, channels, inner\]: with its channels last, `inner` is 1. A result is \[samples * channels\].

use crate::{UNKNOWN, cut};
use oxitorch_aten::families::channels::{GRADIENT_SUMS, STATISTICS};
use oxitorch_pjrt::{self as pjrt, ElementType, HostCall, HostElement, HostError, HostThreads};
use parking_lot::Mutex;
use std::ops::{AddAssign, Div, Mul, Range, Sub};

/// Sums that are in registers.
const BLOCK: usize = 32;
/// Numbers that are in the nearest cache while they are gone through twice.
const NEAR: usize = 1 << 12;

pub(super) fn register(plugin: &pjrt::Plugin) -> pjrt::Result<()> {
    plugin.register_host_fn(STATISTICS, |call| match call.results.first().map(|r| r.dtype) {
        Some(ElementType::F32) => statistics::<f32>(call),
        Some(ElementType::F64) => statistics::<f64>(call),
        other => Err(format!("{STATISTICS}: a result of {other:?}").into()),
    })?;
    plugin.register_host_fn(GRADIENT_SUMS, |call| match call.results.first().map(|r| r.dtype) {
        Some(ElementType::F32) => gradient_sums::<f32>(call),
        Some(ElementType::F64) => gradient_sums::<f64>(call),
        other => Err(format!("{GRADIENT_SUMS}: a result of {other:?}").into()),
    })
}

pub(super) trait Float:
    HostElement + Default + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + AddAssign + Send + Sync
{
    fn of(n: usize) -> Self;
}

impl Float for f32 {
    fn of(n: usize) -> f32 {
        n as f32
    }
}

impl Float for f64 {
    fn of(n: usize) -> f64 {
        n as f64
    }
}

/// Operand: the image; results: mean and biased variance.
fn statistics<T: Float>(call: &mut HostCall<'_>) -> Result<(), HostError> {
    let ([image], [mean, variance]) = (&call.args[..], &mut call.results[..]) else {
        return Err(UNKNOWN.into());
    };
    let results = mean.values_mut::<T>().zip(variance.values_mut::<T>());
    let dims = &image.dims;
    let (Some(image), Some((mean, variance))) = (image.values::<T>(), results) else {
        return Err(UNKNOWN.into());
    };
    let shape = Shape::of(dims).filter(|shape| [mean.len(), variance.len()] == [shape.results(); 2]);
    let shape = shape.ok_or(UNKNOWN)?;
    mean.fill(T::default());
    variance.fill(T::default());
    for (part, found) in shape.share(&call.threads, |part| shape.moments(image, part)) {
        let of = shape.results_of(&part);
        let (count, more) = (part.rows.start * shape.inner, part.rows.len() * shape.inner);
        merge_all((&mut mean[of.clone()], &mut variance[of]), count, (&found.0, &found.1), more);
    }
    let count = T::of(shape.outer * shape.inner);
    variance.iter_mut().for_each(|v| *v = *v / count);
    Ok(())
}

/// Operands: the image and the gradient of the output; the mean and the inverse deviation.
/// Results: the sum of the gradient, and the sum of its product with the normalised image.
fn gradient_sums<T: Float>(call: &mut HostCall<'_>) -> Result<(), HostError> {
    let ([image, gradient, mean, inverse], [sum, slope]) = (&call.args[..], &mut call.results[..]) else {
        return Err(UNKNOWN.into());
    };
    let dims = &image.dims;
    let images = gradient.values::<T>().zip(image.values::<T>());
    let of_channels = mean.values::<T>().zip(inverse.values::<T>());
    let results = sum.values_mut::<T>().zip(slope.values_mut::<T>());
    let (Some((gradient, image)), Some((mean, inverse)), Some((sum, slope))) = (images, of_channels, results)
    else {
        return Err(UNKNOWN.into());
    };
    let lens = [mean.len(), inverse.len(), sum.len(), slope.len()];
    let shape = Shape::of(dims).filter(|s| lens == [s.results(); 4] && gradient.len() == image.len());
    let shape = shape.ok_or(UNKNOWN)?;
    sum.fill(T::default());
    slope.fill(T::default());
    for (part, found) in shape.share(&call.threads, |part| shape.slopes(gradient, image, mean, part)) {
        let of = shape.results_of(&part);
        add(&mut sum[of.clone()], &found.0);
        add(&mut slope[of], &found.1);
    }
    slope.iter_mut().zip(inverse).for_each(|(slope, &inverse)| *slope = *slope * inverse);
    Ok(())
}

struct Shape {
    samples: usize,
    outer: usize,
    channels: usize,
    inner: usize,
}

/// Samples, and rows of each: all of several samples, or some of one.
#[derive(Clone)]
struct Part {
    samples: Range<usize>,
    rows: Range<usize>,
}

/// Two numbers of each sample and channel of a part.
type Found<T> = (Vec<T>, Vec<T>);

impl Shape {
    fn of(dims: &[i64]) -> Option<Shape> {
        let &[samples, outer, channels, inner] = dims else { return None };
        let [samples, outer, channels, inner] = [samples, outer, channels, inner].map(|n| n as usize);
        if channels == 0 || inner == 0 {
            return None;
        }
        // A channel whose numbers lie side by side is a sample of its own.
        Some(match outer {
            1 => Shape { samples: samples * channels, outer, channels: 1, inner },
            _ => Shape { samples, outer, channels, inner },
        })
    }

    fn results(&self) -> usize {
        self.samples * self.channels
    }

    /// Numbers in a row.
    fn row(&self) -> usize {
        self.channels * self.inner
    }

    fn results_of(&self, part: &Part) -> Range<usize> {
        part.samples.start * self.channels..part.samples.end * self.channels
    }

    /// What `of` gives for each part, in their order.
    fn share<P: Send + Default>(
        &self,
        threads: &HostThreads,
        of: impl Fn(&Part) -> P + Sync,
    ) -> impl Iterator<Item = (Part, P)> {
        let parts = self.parts(threads.count());
        let found: Vec<Mutex<P>> = parts.iter().map(|_| Mutex::default()).collect();
        threads.share(parts.len(), &|i| *found[i].lock() = of(&parts[i]));
        parts.into_iter().zip(found.into_iter().map(Mutex::into_inner))
    }

    fn parts(&self, threads: usize) -> Vec<Part> {
        let parts = cut(self.samples * self.outer * self.row(), self.samples, self.outer, threads);
        parts.into_iter().map(|(samples, rows)| Part { samples, rows }).collect()
    }

    /// The numbers of each sample that are in the part.
    fn pieces<'a, T>(&self, image: &'a [T], part: &Part) -> impl Iterator<Item = &'a [T]> {
        let (rows, row, outer) = (part.rows.clone(), self.row(), self.outer);
        part.samples
            .clone()
            .map(move |s| &image[(s * outer + rows.start) * row..(s * outer + rows.end) * row])
    }

    /// Mean and sum of squares above it.
    fn moments<T: Float>(&self, image: &[T], part: &Part) -> Found<T> {
        let results = self.results_of(part).len();
        let mut found = (vec![T::default(); results], vec![T::default(); results]);
        let of_samples = found.0.chunks_exact_mut(self.channels).zip(found.1.chunks_exact_mut(self.channels));
        for (image, (mean, squares)) in self.pieces(image, part).zip(of_samples) {
            if self.inner > 1 {
                for (i, row) in image.chunks_exact(self.row()).enumerate() {
                    for (c, run) in row.chunks_exact(self.inner).enumerate() {
                        merge((&mut mean[c], &mut squares[c]), i * self.inner, moments(run), self.inner);
                    }
                }
                continue;
            }
            let near = near(self.channels);
            for (i, block) in image.chunks(near).enumerate() {
                let count = i * near / self.channels;
                for at in (0..self.channels).step_by(BLOCK) {
                    add_few((mean, squares), count, block, at);
                }
            }
        }
        found
    }

    /// The sum of the gradient, and of its product with what the image is above its mean.
    fn slopes<T: Float>(&self, gradient: &[T], image: &[T], mean: &[T], part: &Part) -> Found<T> {
        let results = self.results_of(part);
        let mut found = (vec![T::default(); results.len()], vec![T::default(); results.len()]);
        let of_samples = found.0.chunks_exact_mut(self.channels).zip(found.1.chunks_exact_mut(self.channels));
        let images = self.pieces(gradient, part).zip(self.pieces(image, part));
        let means = mean[results].chunks_exact(self.channels);
        for (((gradient, image), mean), (sums, products)) in images.zip(means).zip(of_samples) {
            if self.inner > 1 {
                let runs = gradient.chunks_exact(self.inner).zip(image.chunks_exact(self.inner));
                for (i, (gradient, image)) in runs.enumerate() {
                    let c = i % self.channels;
                    for (gradient, image) in gradient.chunks(NEAR).zip(image.chunks(NEAR)) {
                        sums[c] += sum(gradient, gradient, |g, _| g);
                        products[c] += sum(gradient, image, |g, x| g * (x - mean[c]));
                    }
                }
                continue;
            }
            let near = near(self.channels);
            for (gradient, image) in gradient.chunks(near).zip(image.chunks(near)) {
                for at in (0..self.channels).step_by(BLOCK) {
                    add_slopes((sums, products), gradient, image, mean, at);
                }
            }
        }
        found
    }
}

/// As many numbers as are near, in whole rows.
fn near(channels: usize) -> usize {
    (NEAR / channels).max(1) * channels
}

pub(super) fn add<T: AddAssign + Copy>(to: &mut [T], more: &[T]) {
    to.iter_mut().zip(more).for_each(|(to, &more)| *to += more);
}

/// Adds those of a block of channels that begins with `at`.
fn add_slopes<T: Float>(to: (&mut [T], &mut [T]), gradient: &[T], image: &[T], mean: &[T], at: usize) {
    let channels = mean.len();
    let (mut sums, mut products) = ([T::default(); BLOCK], [T::default(); BLOCK]);
    let mut one = |c: usize, g: T, x: T, mean: T| {
        sums[c] += g;
        products[c] += g * (x - mean);
    };
    let whole = mean[at..].first_chunk::<BLOCK>();
    for (gradient, image) in gradient.chunks_exact(channels).zip(image.chunks_exact(channels)) {
        let (gradient, image) = (&gradient[at..], &image[at..]);
        match (gradient.first_chunk::<BLOCK>(), image.first_chunk::<BLOCK>(), whole) {
            (Some(g), Some(x), Some(mean)) => (0..BLOCK).for_each(|c| one(c, g[c], x[c], mean[c])),
            _ => (0..channels - at).for_each(|c| one(c, gradient[c], image[c], mean[at + c])),
        }
    }
    add(&mut to.0[at..], &sums);
    add(&mut to.1[at..], &products);
}

/// Adds the moments of a few rows to those of `count` before, of a block of channels that begins with `at`: twice through
/// the rows.
fn add_few<T: Float>(to: (&mut [T], &mut [T]), count: usize, block: &[T], at: usize) {
    let channels = to.0.len();
    let rows = block.len() / channels;
    let mut sums = [T::default(); BLOCK];
    each(block, channels, at, |c, x| sums[c] += x);
    let mean = sums.map(|s| s / T::of(rows));
    let mut squares = [T::default(); BLOCK];
    each(block, channels, at, |c, x| {
        let above = x - mean[c];
        squares[c] += above * above;
    });
    merge_all((&mut to.0[at..], &mut to.1[at..]), count, (&mean, &squares), rows);
}

fn merge_all<T: Float>(to: (&mut [T], &mut [T]), count: usize, more: (&[T], &[T]), more_count: usize) {
    let more = more.0.iter().zip(more.1);
    for ((mean, squares), (&m, &s)) in to.0.iter_mut().zip(to.1).zip(more) {
        merge((mean, squares), count, (m, s), more_count);
    }
}

/// Adds mean and squares of some numbers to those of others.
///
/// Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
fn merge<T: Float>(to: (&mut T, &mut T), count: usize, more: (T, T), more_count: usize) {
    if more_count == 0 {
        return;
    }
    let share = T::of(more_count) / T::of(count + more_count);
    let apart = more.0 - *to.0;
    *to.0 += apart * share;
    *to.1 += more.1;
    // The square itself may be too large where the first numbers are added, to none.
    *to.1 += apart * (apart * (T::of(count) * share));
}

/// The mean of these numbers, and the sum of the squares of what is above it.
fn moments<T: Float>(run: &[T]) -> (T, T) {
    let (mut mean, mut squares) = (T::default(), T::default());
    for (i, piece) in run.chunks(NEAR).enumerate() {
        let own = sum(piece, piece, |x, _| x) / T::of(piece.len());
        let above = sum(piece, piece, |x, _| (x - own) * (x - own));
        merge((&mut mean, &mut squares), i * NEAR, (own, above), piece.len());
    }
    (mean, squares)
}

/// Of what `f` gives for these numbers.
fn sum<T: Float>(a: &[T], b: &[T], f: impl Fn(T, T) -> T) -> T {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks(), b.as_chunks());
    let mut sums = sums(a, b, &f);
    sums.iter_mut().zip(a_rest.iter().zip(b_rest)).for_each(|(sum, (&a, &b))| *sum += f(a, b));
    total(sums)
}

/// A function of its own, as the sums are in memory, and not in registers, where one is taken by its number.
#[inline(never)]
fn sums<T: Float>(a: &[[T; BLOCK]], b: &[[T; BLOCK]], f: &impl Fn(T, T) -> T) -> [T; BLOCK] {
    let mut sums = [T::default(); BLOCK];
    for (a, b) in a.iter().zip(b) {
        (0..BLOCK).for_each(|i| sums[i] += f(a[i], b[i]));
    }
    sums
}

/// The sum of a power of two of numbers, in pairs: none waits for all before it.
pub(super) fn total<T: Float, const N: usize>(mut sums: [T; N]) -> T {
    let mut half = N / 2;
    while half > 0 {
        for i in 0..half {
            let other = sums[i + half];
            sums[i] += other;
        }
        half /= 2;
    }
    sums[0]
}

/// Of each row, a block of channels that begins with `at`: the number of each in the block, and its value.
#[inline(always)]
fn each<T: Float>(block: &[T], channels: usize, at: usize, mut f: impl FnMut(usize, T)) {
    for row in block.chunks_exact(channels) {
        match row[at..].first_chunk::<BLOCK>() {
            Some(some) => (0..BLOCK).for_each(|c| f(c, some[c])),
            None => row[at..].iter().enumerate().for_each(|(c, &x)| f(c, x)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Far from zero, where squares that are summed up without the mean lose what differs.
    fn image(shape: &Shape) -> Vec<f32> {
        let numbers = shape.samples * shape.outer * shape.row();
        (0..numbers).map(|i| 1000.0 + (i * 7919 % 1013) as f32 / 100.0).collect()
    }

    const SHAPES: [[i64; 4]; 16] = [
        [1, 1, 1, 1],
        [1, 3, 5, 1],
        [1, 200, 31, 1],
        [1, 129, 32, 1],
        [1, 64, 33, 1],
        [1, 500, 100, 1],
        [1, 2, 300, 1],
        [1, 3, 2, 7],
        [1, 4, 5, 32],
        [1, 2, 3, 5000],
        [1, 1, 1, 100],
        [1, 1, 6, 100],
        [5, 1, 3, 9],
        [3, 4, 2, 40],
        [3, 70, 33, 1],
        [4, 1, 7, 1],
    ];

    /// The whole; and pieces of the samples, and of the rows of each.
    fn partitions(shape: &Shape) -> [Vec<Part>; 3] {
        let (samples, outer) = (0..shape.samples, shape.outer);
        let rows = |rows: &[usize]| -> Vec<Part> {
            let rows = rows.windows(2).map(|ends| ends[0]..ends[1]);
            let of = |s: usize| rows.clone().map(move |rows| Part { samples: s..s + 1, rows });
            samples.clone().flat_map(of).collect()
        };
        let some = [0..1, 1..shape.samples].map(|samples| Part { samples, rows: 0..outer });
        [rows(&[0, outer]), rows(&[0, outer / 3, outer / 2, outer]), some.to_vec()]
    }

    fn column(image: &[f32], shape: &Shape, sample: usize, c: usize) -> Vec<f64> {
        let (row, inner) = (shape.row(), shape.inner);
        let of_sample = image.chunks_exact(shape.outer * row).nth(sample).unwrap();
        of_sample
            .iter()
            .enumerate()
            .filter(|(i, _)| i / inner % shape.channels == c)
            .map(|(_, &x)| f64::from(x))
            .collect()
    }

    /// Each sample and channel of the shapes, with the number of its results.
    fn all_of(shape: &Shape) -> impl Iterator<Item = (usize, usize, usize)> {
        let channels = shape.channels;
        (0..shape.results()).map(move |i| (i, i / channels, i % channels))
    }

    fn mean_of(column: &[f64]) -> f64 {
        column.iter().sum::<f64>() / column.len() as f64
    }

    fn moments_of(shape: &Shape, image: &[f32], parts: &[Part]) -> Found<f32> {
        let mut all = (vec![0.0; shape.results()], vec![0.0; shape.results()]);
        for part in parts {
            let (of, found) = (shape.results_of(part), shape.moments(image, part));
            let (count, more) = (part.rows.start * shape.inner, part.rows.len() * shape.inner);
            merge_all((&mut all.0[of.clone()], &mut all.1[of]), count, (&found.0, &found.1), more);
        }
        all
    }

    #[test]
    fn moments_of_parts_are_those_of_the_whole() {
        for dims in SHAPES {
            let shape = Shape::of(&dims).unwrap();
            let image = image(&shape);
            for parts in partitions(&shape) {
                let (means, all_squares) = moments_of(&shape, &image, &parts);
                for (i, sample, c) in all_of(&shape) {
                    let column = column(&image, &shape, sample, c);
                    let mean = mean_of(&column);
                    let squares: f64 = column.iter().map(|x| (x - mean).powi(2)).sum();
                    assert!((f64::from(means[i]) / mean - 1.0).abs() < 1e-6, "mean of {dims:?}");
                    let apart = (f64::from(all_squares[i]) - squares).abs();
                    assert!(apart <= 1e-4 * squares + 1e-6, "squares of {dims:?}: {apart}");
                }
            }
        }
    }

    #[test]
    fn numbers_whose_squares_are_too_large_have_moments() {
        for dims in SHAPES {
            let shape = Shape::of(&dims).unwrap();
            let image = vec![1e20; shape.samples * shape.outer * shape.row()];
            let (mean, squares) = moments_of(&shape, &image, &partitions(&shape)[0]);
            assert!(mean.iter().all(|m| (m / 1e20 - 1.0).abs() < 1e-5), "{dims:?}: {mean:?}");
            assert!(squares.iter().all(|s| s.is_finite()), "{dims:?}: {squares:?}");
        }
    }

    #[test]
    fn slopes_are_sums_over_each_channel() {
        for dims in SHAPES {
            let shape = Shape::of(&dims).unwrap();
            let image = image(&shape);
            let gradient: Vec<f32> = image.iter().map(|x| (x * 37.0).sin()).collect();
            let mean = |(_, sample, c)| mean_of(&column(&image, &shape, sample, c)) as f32;
            let means: Vec<f32> = all_of(&shape).map(mean).collect();
            for parts in partitions(&shape) {
                let mut found = (vec![0.0; shape.results()], vec![0.0; shape.results()]);
                for part in &parts {
                    let (sums, products) = shape.slopes(&gradient, &image, &means, part);
                    add(&mut found.0[shape.results_of(part)], &sums);
                    add(&mut found.1[shape.results_of(part)], &products);
                }
                for (i, sample, c) in all_of(&shape) {
                    let (g, x) = (column(&gradient, &shape, sample, c), column(&image, &shape, sample, c));
                    let products = g.iter().zip(&x).map(|(g, x)| g * (x - f64::from(means[i])));
                    assert!((f64::from(found.0[i]) - g.iter().sum::<f64>()).abs() < 1e-3, "{dims:?}");
                    assert!((f64::from(found.1[i]) - products.sum::<f64>()).abs() < 1e-2, "{dims:?}");
                }
            }
        }
    }

    #[test]
    fn parts_cover_all_numbers_once() {
        assert!(Shape::of(&[1, 5, 0, 1]).is_none() && Shape::of(&[5, 2, 1]).is_none());
        let large = [[1, 1 << 16, 3, 1], [1, 7, 9, 1 << 13], [1, 1, 9, 1 << 13], [40, 90, 31, 1]];
        for (dims, threads) in
            large.map(|dims| (dims, 16)).into_iter().chain([([1, 0, 3, 1], 4), ([0, 1, 3, 1], 4)])
        {
            let shape = Shape::of(&dims).unwrap();
            let parts = shape.parts(threads);
            assert!(parts.len() < 2 * threads);
            let all: Vec<usize> = (0..dims.iter().product::<i64>() as usize).collect();
            let covered = parts.iter().flat_map(|part| shape.pieces(&all, part)).flatten().copied();
            assert_eq!(covered.collect::<Vec<_>>(), all);
        }
    }
}
