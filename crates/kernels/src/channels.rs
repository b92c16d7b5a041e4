//! Sums over all of an image but its channels, which lie next to each other in memory: compiled code goes through the image
//! once for each sum, and PyTorch's kernels wake up threads of their own for it.

use crate::UNKNOWN;
use oxitorch_aten::families::batch_norm::{GRADIENT_SUMS, STATISTICS};
use oxitorch_pjrt::{self as pjrt, ElementType, HostCall, HostElement, HostError, HostThreads};
use parking_lot::Mutex;
use std::ops::{AddAssign, Div, Mul, Range, Sub};

/// Channels whose sums are in registers.
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

/// Operand: the image \[..., channels\]; results: mean and biased variance \[channels\].
fn statistics<T: Float>(call: &mut HostCall<'_>) -> Result<(), HostError> {
    let ([image], [mean, variance]) = (&call.args[..], &mut call.results[..]) else {
        return Err(UNKNOWN.into());
    };
    let results = mean.values_mut::<T>().zip(variance.values_mut::<T>());
    let (Some(image), Some((mean, variance))) = (image.values::<T>(), results) else {
        return Err(UNKNOWN.into());
    };
    let rows = Rows::new(image.len(), mean.len()).filter(|_| mean.len() == variance.len());
    let rows = rows.ok_or(UNKNOWN)?;
    let mut all = Moments::none(rows.channels);
    for part in rows.share(&call.threads, |range| Moments::of(&image[range], rows.channels)) {
        all.add(&part);
    }
    mean.copy_from_slice(&all.mean);
    variance.iter_mut().zip(&all.squares).for_each(|(v, &squares)| *v = squares / T::of(all.rows));
    Ok(())
}

/// Operands: the image and the gradient of the output \[..., channels\], the mean and the inverse deviation \[channels\];
/// results \[channels\]: the sum of the gradient, and the sum of its product with the normalised image.
fn gradient_sums<T: Float>(call: &mut HostCall<'_>) -> Result<(), HostError> {
    let ([image, gradient, mean, inverse], [sum, slope]) = (&call.args[..], &mut call.results[..]) else {
        return Err(UNKNOWN.into());
    };
    let images = gradient.values::<T>().zip(image.values::<T>());
    let of_channels = mean.values::<T>().zip(inverse.values::<T>());
    let results = sum.values_mut::<T>().zip(slope.values_mut::<T>());
    let (Some((gradient, image)), Some((mean, inverse)), Some((sum, slope))) = (images, of_channels, results)
    else {
        return Err(UNKNOWN.into());
    };
    let fits = [inverse.len(), sum.len(), slope.len()] == [mean.len(); 3] && gradient.len() == image.len();
    let rows = Rows::new(image.len(), mean.len()).filter(|_| fits).ok_or(UNKNOWN)?;
    sum.fill(T::default());
    slope.fill(T::default());
    let of = |range: Range<usize>| Slopes::of(&gradient[range.clone()], &image[range], mean);
    for part in rows.share(&call.threads, of) {
        add(sum, &part.sums);
        add(slope, &part.products);
    }
    slope.iter_mut().zip(inverse).for_each(|(slope, &inverse)| *slope = *slope * inverse);
    Ok(())
}

/// The rows of an image, of so many channels each.
struct Rows {
    rows: usize,
    channels: usize,
}

impl Rows {
    fn new(numbers: usize, channels: usize) -> Option<Rows> {
        (channels > 0 && numbers.is_multiple_of(channels))
            .then(|| Rows { rows: numbers / channels, channels })
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
        (self.rows * self.channels / PER_THREAD).min(self.rows).clamp(1, threads.max(1))
    }

    /// The numbers of part `i`.
    fn cut(&self, parts: usize, i: usize) -> Range<usize> {
        self.rows * i / parts * self.channels..self.rows * (i + 1) / parts * self.channels
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
    fn of(gradient: &[T], image: &[T], mean: &[T]) -> Slopes<T> {
        let channels = mean.len();
        let mut found = Slopes { sums: vec![T::default(); channels], products: vec![T::default(); channels] };
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
    rows: usize,
    mean: Vec<T>,
    squares: Vec<T>,
}

impl<T: Float> Moments<T> {
    fn none(channels: usize) -> Moments<T> {
        Moments { rows: 0, mean: vec![T::default(); channels], squares: vec![T::default(); channels] }
    }

    fn of(image: &[T], channels: usize) -> Moments<T> {
        let mut found = Moments::none(channels);
        for block in image.chunks(near(channels)) {
            found.add(&Moments::of_few(block, channels));
        }
        found
    }

    /// Of a few rows: twice through them.
    fn of_few(block: &[T], channels: usize) -> Moments<T> {
        let mut found = Moments::none(channels);
        found.rows = block.len() / channels;
        for at in (0..channels).step_by(BLOCK) {
            let mut sums = [T::default(); BLOCK];
            each(block, channels, at, |c, x| sums[c] += x);
            let mean = sums.map(|s| s / T::of(found.rows));
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

    /// Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    fn add(&mut self, more: &Moments<T>) {
        if more.rows == 0 {
            return;
        }
        let rows = self.rows + more.rows;
        let share = T::of(more.rows) / T::of(rows);
        let weight = T::of(self.rows) * share;
        let here = self.mean.iter_mut().zip(&mut self.squares);
        for ((mean, squares), (&m, &s)) in here.zip(more.mean.iter().zip(&more.squares)) {
            let apart = m - *mean;
            *mean += apart * share;
            *squares += s;
            *squares += apart * apart * weight;
        }
        self.rows = rows;
    }
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

    fn column(image: &[f32], channels: usize, c: usize) -> Vec<f64> {
        image.iter().skip(c).step_by(channels).map(|&x| f64::from(x)).collect()
    }

    fn mean_of(column: &[f64]) -> f64 {
        column.iter().sum::<f64>() / column.len() as f64
    }

    #[test]
    fn moments_of_parts_are_those_of_the_whole() {
        for (rows, channels) in [(1, 1), (3, 5), (200, 31), (129, 32), (64, 33), (500, 100), (2, 5000)] {
            let image = image(rows, channels);
            let whole = Rows::new(image.len(), channels).unwrap();
            for parts in [1, 2, 3] {
                let mut all = Moments::none(channels);
                (0..parts).for_each(|i| all.add(&Moments::of(&image[whole.cut(parts, i)], channels)));
                assert_eq!(all.rows, rows);
                for c in 0..channels {
                    let column = column(&image, channels, c);
                    let mean = mean_of(&column);
                    let squares: f64 = column.iter().map(|x| (x - mean).powi(2)).sum();
                    assert!(
                        (f64::from(all.mean[c]) / mean - 1.0).abs() < 1e-6,
                        "mean of {rows} x {channels}"
                    );
                    let apart = (f64::from(all.squares[c]) - squares).abs();
                    assert!(apart <= 1e-4 * squares + 1e-6, "squares of {rows} x {channels}: {apart}");
                }
            }
        }
    }

    #[test]
    fn slopes_are_sums_over_each_channel() {
        for (rows, channels) in [(1, 1), (3, 5), (200, 31), (129, 32), (64, 33), (2, 5000)] {
            let image = image(rows, channels);
            let gradient: Vec<f32> = image.iter().map(|x| (x * 37.0).sin()).collect();
            let means: Vec<f32> =
                (0..channels).map(|c| mean_of(&column(&image, channels, c)) as f32).collect();
            let found = Slopes::of(&gradient, &image, &means);
            for (c, &mean) in means.iter().enumerate() {
                let (g, x) = (column(&gradient, channels, c), column(&image, channels, c));
                let products = g.iter().zip(&x).map(|(g, x)| g * (x - f64::from(mean)));
                assert!((f64::from(found.sums[c]) - g.iter().sum::<f64>()).abs() < 1e-4);
                assert!((f64::from(found.products[c]) - products.sum::<f64>()).abs() < 1e-2);
            }
        }
    }

    #[test]
    fn parts_cover_all_numbers_once() {
        assert!(Rows::new(5, 0).is_none() && Rows::new(5, 2).is_none());
        for (rows, channels, threads) in [(0, 3, 4), (1, 3, 4), (1 << 16, 3, 4), (7, 1 << 16, 16)] {
            let all = Rows::new(rows * channels, channels).unwrap();
            let parts = all.parts(threads);
            assert!((1..=threads).contains(&parts));
            let covered: Vec<usize> = (0..parts).flat_map(|i| all.cut(parts, i)).collect();
            assert_eq!(covered, (0..rows * channels).collect::<Vec<_>>());
        }
    }
}
