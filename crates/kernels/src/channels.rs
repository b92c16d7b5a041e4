//! Sums over all of an image but its channels: compiled code goes through the image once for each sum, and PyTorch's kernels
//! wake up threads of their own for it.
//!
//! An image is \[outer, channels, inner\]: with its channels last, `inner` is 1.

use crate::UNKNOWN;
use oxitorch_aten::families::batch_norm::{GRADIENT_SUMS, STATISTICS};
use oxitorch_pjrt::{self as pjrt, ElementType, HostCall, HostElement, HostError, HostThreads};
use parking_lot::Mutex;
use std::ops::{AddAssign, Div, Mul, Range, Sub};

/// Sums that are in registers.
const BLOCK: usize = 32;
/// Numbers that are in the nearest cache while they are gone through twice.
const NEAR: usize = 1 << 12;
/// Numbers that are worth a thread.
const PER_THREAD: usize = 1 << 14;

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

trait Float:
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

/// Operand: the image; results: mean and biased variance \[channels\].
fn statistics<T: Float>(call: &mut HostCall<'_>) -> Result<(), HostError> {
    let ([image], [mean, variance]) = (&call.args[..], &mut call.results[..]) else {
        return Err(UNKNOWN.into());
    };
    let results = mean.values_mut::<T>().zip(variance.values_mut::<T>());
    let dims = &image.dims;
    let (Some(image), Some((mean, variance))) = (image.values::<T>(), results) else {
        return Err(UNKNOWN.into());
    };
    let shape = Shape::of(dims).filter(|shape| [mean.len(), variance.len()] == [shape.channels; 2]);
    let shape = shape.ok_or(UNKNOWN)?;
    let mut all = Moments::none(shape.channels);
    for part in shape.share(&call.threads, |range| Moments::of(&image[range], &shape)) {
        all.add(&part);
    }
    mean.copy_from_slice(&all.mean);
    variance.iter_mut().zip(&all.squares).for_each(|(v, &squares)| *v = squares / T::of(all.count));
    Ok(())
}

/// Operands: the image and the gradient of the output, the mean and the inverse deviation \[channels\];
/// results \[channels\]: the sum of the gradient, and the sum of its product with the normalised image.
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
    let shape = Shape::of(dims).filter(|s| lens == [s.channels; 4] && gradient.len() == image.len());
    let shape = shape.ok_or(UNKNOWN)?;
    sum.fill(T::default());
    slope.fill(T::default());
    let of = |range: Range<usize>| Slopes::of(&gradient[range.clone()], &image[range], mean, &shape);
    for part in shape.share(&call.threads, of) {
        add(sum, &part.sums);
        add(slope, &part.products);
    }
    slope.iter_mut().zip(inverse).for_each(|(slope, &inverse)| *slope = *slope * inverse);
    Ok(())
}

struct Shape {
    outer: usize,
    channels: usize,
    inner: usize,
}

impl Shape {
    fn of(dims: &[i64]) -> Option<Shape> {
        let &[outer, channels, inner] = dims else { return None };
        let [outer, channels, inner] = [outer, channels, inner].map(|n| n as usize);
        (channels > 0 && inner > 0).then_some(Shape { outer, channels, inner })
    }

    /// What `of` gives for the numbers of each part, in their order.
    fn share<P: Send + Default>(
        &self,
        threads: &HostThreads,
        of: impl Fn(Range<usize>) -> P + Sync,
    ) -> Vec<P> {
        let parts = self.parts(threads.count());
        let found: Vec<Mutex<P>> = (0..parts).map(|_| Mutex::default()).collect();
        threads.share(parts, &|i| *found[i].lock() = of(self.cut(parts, i)));
        found.into_iter().map(Mutex::into_inner).collect()
    }

    fn parts(&self, threads: usize) -> usize {
        (self.outer * self.channels * self.inner / PER_THREAD).min(self.outer).clamp(1, threads.max(1))
    }

    /// The numbers of part `i`.
    fn cut(&self, parts: usize, i: usize) -> Range<usize> {
        let start = |i: usize| self.outer * i / parts * self.channels * self.inner;
        start(i)..start(i + 1)
    }

    /// The channel of each run of numbers of one, and where the run is in these.
    fn runs(&self, numbers: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let (channels, inner) = (self.channels, self.inner);
        (0..numbers / inner).map(move |i| (i % channels, i * inner..(i + 1) * inner))
    }
}

/// As many numbers as are near, in whole rows.
fn near(channels: usize) -> usize {
    (NEAR / channels).max(1) * channels
}

fn add<T: AddAssign + Copy>(to: &mut [T], more: &[T]) {
    to.iter_mut().zip(more).for_each(|(to, &more)| *to += more);
}

/// Of each channel: the sum of the gradient, and of its product with what the image is above its mean.
#[derive(Default)]
struct Slopes<T> {
    sums: Vec<T>,
    products: Vec<T>,
}

impl<T: Float> Slopes<T> {
    fn of(gradient: &[T], image: &[T], mean: &[T], shape: &Shape) -> Slopes<T> {
        let channels = mean.len();
        let mut found = Slopes { sums: vec![T::default(); channels], products: vec![T::default(); channels] };
        if shape.inner > 1 {
            for (c, run) in shape.runs(image.len()) {
                let (gradient, image) = (&gradient[run.clone()], &image[run]);
                found.sums[c] += sum(gradient, gradient, |g, _| g);
                found.products[c] += sum(gradient, image, |g, x| g * (x - mean[c]));
            }
            return found;
        }
        let near = near(channels);
        for (gradient, image) in gradient.chunks(near).zip(image.chunks(near)) {
            for at in (0..channels).step_by(BLOCK) {
                found.add(gradient, image, mean, at);
            }
        }
        found
    }

    /// Of a block of channels that begins with `at`.
    fn add(&mut self, gradient: &[T], image: &[T], mean: &[T], at: usize) {
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
        add(&mut self.sums[at..], &sums);
        add(&mut self.products[at..], &products);
    }
}

/// Of each channel: its mean, and the sum of the squares of what is above it.
#[derive(Default)]
struct Moments<T> {
    /// Of how many numbers.
    count: usize,
    mean: Vec<T>,
    squares: Vec<T>,
}

impl<T: Float> Moments<T> {
    fn none(channels: usize) -> Moments<T> {
        Moments { count: 0, mean: vec![T::default(); channels], squares: vec![T::default(); channels] }
    }

    fn of(image: &[T], shape: &Shape) -> Moments<T> {
        let mut found = Moments::none(shape.channels);
        if shape.inner > 1 {
            let mut one = Moments::none(shape.channels);
            one.count = shape.inner;
            for (c, run) in shape.runs(image.len()) {
                (one.mean[c], one.squares[c]) = moments(&image[run]);
                if c + 1 == shape.channels {
                    found.add(&one);
                }
            }
            return found;
        }
        for block in image.chunks(near(shape.channels)) {
            found.add(&Moments::of_few(block, shape.channels));
        }
        found
    }

    /// Of a few rows: twice through them.
    fn of_few(block: &[T], channels: usize) -> Moments<T> {
        let mut found = Moments::none(channels);
        found.count = block.len() / channels;
        for at in (0..channels).step_by(BLOCK) {
            let mut sums = [T::default(); BLOCK];
            each(block, channels, at, |c, x| sums[c] += x);
            let mean = sums.map(|s| s / T::of(found.count));
            let mut squares = [T::default(); BLOCK];
            each(block, channels, at, |c, x| {
                let above = x - mean[c];
                squares[c] += above * above;
            });
            let some = at..channels.min(at + BLOCK);
            found.mean[some.clone()].copy_from_slice(&mean[..some.len()]);
            found.squares[some.clone()].copy_from_slice(&squares[..some.len()]);
        }
        found
    }

    fn add(&mut self, more: &Moments<T>) {
        if more.count == 0 {
            return;
        }
        let count = self.count + more.count;
        let here = self.mean.iter_mut().zip(&mut self.squares);
        for ((mean, squares), (&m, &s)) in here.zip(more.mean.iter().zip(&more.squares)) {
            merge((mean, squares), self.count, (m, s), more.count);
        }
        self.count = count;
    }
}

/// Adds mean and squares of some numbers to those of others.
///
/// Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
fn merge<T: Float>(to: (&mut T, &mut T), count: usize, more: (T, T), more_count: usize) {
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
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<BLOCK>(), b.as_chunks::<BLOCK>());
    let mut sums = [T::default(); BLOCK];
    for (a, b) in a.iter().zip(b) {
        (0..BLOCK).for_each(|i| sums[i] += f(a[i], b[i]));
    }
    let mut all = T::default();
    sums.into_iter().chain(a_rest.iter().zip(b_rest).map(|(&a, &b)| f(a, b))).for_each(|s| all += s);
    all
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
    fn image(rows: usize, channels: usize) -> Vec<f32> {
        (0..rows * channels).map(|i| 1000.0 + (i * 7919 % 1013) as f32 / 100.0).collect()
    }

    const SHAPES: [[i64; 3]; 11] = [
        [1, 1, 1],
        [3, 5, 1],
        [200, 31, 1],
        [129, 32, 1],
        [64, 33, 1],
        [500, 100, 1],
        [2, 300, 1],
        [3, 2, 7],
        [4, 5, 32],
        [2, 3, 5000],
        [1, 1, 100],
    ];

    fn column(image: &[f32], shape: &Shape, c: usize) -> Vec<f64> {
        let inner = shape.inner;
        let own = image.iter().enumerate().filter(|(i, _)| i / inner % shape.channels == c);
        own.map(|(_, &x)| f64::from(x)).collect()
    }

    fn mean_of(column: &[f64]) -> f64 {
        column.iter().sum::<f64>() / column.len() as f64
    }

    #[test]
    fn moments_of_parts_are_those_of_the_whole() {
        for dims in SHAPES {
            let shape = Shape::of(&dims).unwrap();
            let image = image(shape.outer * shape.inner, shape.channels);
            for parts in [1, 2, 3] {
                let mut all = Moments::none(shape.channels);
                (0..parts).for_each(|i| all.add(&Moments::of(&image[shape.cut(parts, i)], &shape)));
                assert_eq!(all.count, shape.outer * shape.inner);
                for c in 0..shape.channels {
                    let column = column(&image, &shape, c);
                    let mean = mean_of(&column);
                    let squares: f64 = column.iter().map(|x| (x - mean).powi(2)).sum();
                    assert!((f64::from(all.mean[c]) / mean - 1.0).abs() < 1e-6, "mean of {dims:?}");
                    let apart = (f64::from(all.squares[c]) - squares).abs();
                    assert!(apart <= 1e-4 * squares + 1e-6, "squares of {dims:?}: {apart}");
                }
            }
        }
    }

    #[test]
    fn numbers_whose_squares_are_too_large_have_moments() {
        for dims in SHAPES {
            let shape = Shape::of(&dims).unwrap();
            let image = vec![1e20; shape.outer * shape.channels * shape.inner];
            let mut all = Moments::none(shape.channels);
            all.add(&Moments::<f32>::of(&image, &shape));
            assert!(all.mean.iter().all(|m| (m / 1e20 - 1.0).abs() < 1e-5), "{dims:?}: {:?}", all.mean);
            assert!(all.squares.iter().all(|s| s.is_finite()), "{dims:?}: {:?}", all.squares);
        }
    }

    #[test]
    fn slopes_are_sums_over_each_channel() {
        for dims in SHAPES {
            let shape = Shape::of(&dims).unwrap();
            let image = image(shape.outer * shape.inner, shape.channels);
            let gradient: Vec<f32> = image.iter().map(|x| (x * 37.0).sin()).collect();
            let mean = |c| mean_of(&column(&image, &shape, c)) as f32;
            let means: Vec<f32> = (0..shape.channels).map(mean).collect();
            let found = Slopes::of(&gradient, &image, &means, &shape);
            for (c, &mean) in means.iter().enumerate() {
                let (g, x) = (column(&gradient, &shape, c), column(&image, &shape, c));
                let products = g.iter().zip(&x).map(|(g, x)| g * (x - f64::from(mean)));
                assert!((f64::from(found.sums[c]) - g.iter().sum::<f64>()).abs() < 1e-3, "{dims:?}");
                assert!((f64::from(found.products[c]) - products.sum::<f64>()).abs() < 1e-2, "{dims:?}");
            }
        }
    }

    #[test]
    fn parts_cover_all_numbers_once() {
        assert!(Shape::of(&[5, 0, 1]).is_none() && Shape::of(&[5, 2]).is_none());
        for (dims, threads) in [([0, 3, 1], 4), ([1, 3, 1], 4), ([1 << 16, 3, 1], 4), ([7, 9, 1 << 13], 16)] {
            let shape = Shape::of(&dims).unwrap();
            let parts = shape.parts(threads);
            assert!((1..=threads).contains(&parts));
            let covered: Vec<usize> = (0..parts).flat_map(|i| shape.cut(parts, i)).collect();
            assert_eq!(covered, (0..dims.iter().product::<i64>() as usize).collect::<Vec<_>>());
        }
    }
}
