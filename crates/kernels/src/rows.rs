//! The sums of a layer norm's gradients: along each row and down each column, in one go through gradient and input. Compiled
//! code takes a loop for each, and adds up rows one number after another.

use crate::channels::{Float, add, total};
use crate::{UNKNOWN, cut};
use oxitorch_aten::families::channels::ROW_GRADIENT_SUMS;
use oxitorch_pjrt::{self as pjrt, ElementType, HostCall, HostError};
use parking_lot::Mutex;
use std::ops::Range;

/// Sums that are in registers: half of those of channels, as there are two of each.
const BLOCK: usize = 16;

/// Rows whose numbers are added up one after another, down a column.
const ROWS: usize = 64;

pub(super) fn register(plugin: &pjrt::Plugin) -> pjrt::Result<()> {
    plugin.register_host_fn(ROW_GRADIENT_SUMS, |call| match call.results.first().map(|r| r.dtype) {
        Some(ElementType::F32) => gradient_sums::<f32>(call),
        Some(ElementType::F64) => gradient_sums::<f64>(call),
        other => Err(format!("{ROW_GRADIENT_SUMS}: a result of {other:?}").into()),
    })
}

/// Operands: gradient and input \[rows, width\], mean and inverse deviation \[rows\], weight \[width\].
/// Results: for each row the sum of the gradient times the weight, and of that times the normalised input; for each column the
/// sum of the gradient, and of that times the normalised input.
fn gradient_sums<T: Float>(call: &mut HostCall<'_>) -> Result<(), HostError> {
    let ([gradient, input, mean, inverse, weight], [sum, slope, bias, scale]) =
        (&call.args[..], &mut call.results[..])
    else {
        return Err(UNKNOWN.into());
    };
    let operands = [gradient, input, mean, inverse, weight].map(|arg| arg.values::<T>());
    let [Some(gradient), Some(input), Some(mean), Some(inverse), Some(weight)] = operands else {
        return Err(UNKNOWN.into());
    };
    let results = [sum, slope, bias, scale].map(|result| result.values_mut::<T>());
    let [Some(mut sum), Some(mut slope), Some(bias), Some(scale)] = results else {
        return Err(UNKNOWN.into());
    };
    let (rows, width) = (mean.len(), weight.len());
    let of_rows = [inverse.len(), sum.len(), slope.len()] == [rows; 3];
    let of_columns = [bias.len(), scale.len()] == [width; 2];
    let fits = [gradient.len(), input.len()] == [rows * width; 2];
    if !of_rows || !of_columns || !fits || width == 0 {
        return Err(UNKNOWN.into());
    }
    let norm = Norm { gradient, input, mean, inverse, weight };
    let mut parts = Vec::new();
    for (rows, _) in cut(rows * width, rows, 1, call.threads.count()) {
        let (own_sum, rest) = sum.split_at_mut(rows.len());
        let (own_slope, more) = slope.split_at_mut(rows.len());
        (sum, slope) = (rest, more);
        parts.push(Mutex::new((rows, own_sum, own_slope, Columns::none(width))));
    }
    call.threads.share(parts.len(), &|i| {
        let (rows, sum, slope, columns) = &mut *parts[i].lock();
        norm.sums(rows.clone(), sum, slope, columns);
    });
    bias.fill(T::default());
    scale.fill(T::default());
    for part in parts {
        let (.., columns) = part.into_inner();
        add(bias, &columns.sums);
        add(scale, &columns.products);
    }
    Ok(())
}

struct Norm<'a, T> {
    gradient: &'a [T],
    input: &'a [T],
    mean: &'a [T],
    inverse: &'a [T],
    weight: &'a [T],
}

/// Of each column, the sum of the gradient and of its product with the normalised input.
struct Columns<T> {
    sums: Vec<T>,
    products: Vec<T>,
}

impl<T: Float> Columns<T> {
    fn none(width: usize) -> Columns<T> {
        Columns { sums: vec![T::default(); width], products: vec![T::default(); width] }
    }
}

impl<T: Float> Norm<'_, T> {
    fn sums(&self, rows: Range<usize>, sum: &mut [T], slope: &mut [T], columns: &mut Columns<T>) {
        let width = self.weight.len();
        let first = rows.start;
        for start in rows.clone().step_by(ROWS) {
            let mut few = Columns::none(width);
            for row in start..rows.end.min(start + ROWS) {
                let at = row * width..(row + 1) * width;
                let (gradient, input) = (&self.gradient[at.clone()], &self.input[at]);
                (sum[row - first], slope[row - first]) =
                    along(gradient, input, self.weight, (self.mean[row], self.inverse[row]), &mut few);
            }
            add(&mut columns.sums, &few.sums);
            add(&mut columns.products, &few.products);
        }
    }
}

/// The sums of one row, whose numbers are added to those of the columns.
fn along<T: Float>(
    gradient: &[T],
    input: &[T],
    weight: &[T],
    (mean, inverse): (T, T),
    columns: &mut Columns<T>,
) -> (T, T) {
    let one = |(g, x, w): (T, T, T)| {
        let (normalized, scaled) = ((x - mean) * inverse, g * w);
        [scaled, scaled * normalized, g, g * normalized]
    };
    let (gradient, g_rest) = gradient.as_chunks();
    let (input, x_rest) = input.as_chunks();
    let (weight, w_rest) = weight.as_chunks();
    let (biases, bias_rest) = columns.sums.as_chunks_mut();
    let (scales, scale_rest) = columns.products.as_chunks_mut();
    let (mut sums, mut slopes) = blocks((gradient, input, weight), (biases, scales), &one);
    let rest = g_rest.iter().zip(x_rest).zip(w_rest).zip(bias_rest.iter_mut().zip(scale_rest));
    for ((((&g, &x), &w), (bias, scale)), (sum, slope)) in rest.zip(sums.iter_mut().zip(&mut slopes)) {
        let all = one((g, x, w));
        *sum += all[0];
        *slope += all[1];
        *bias += all[2];
        *scale += all[3];
    }
    (total(sums), total(slopes))
}

type Blocks<'a, T> = &'a [[T; BLOCK]];

/// A function of its own, as the sums are in memory, and not in registers, where one is taken by its number.
#[inline(never)]
fn blocks<T: Float>(
    (gradient, input, weight): (Blocks<'_, T>, Blocks<'_, T>, Blocks<'_, T>),
    (biases, scales): (&mut [[T; BLOCK]], &mut [[T; BLOCK]]),
    one: &impl Fn((T, T, T)) -> [T; 4],
) -> ([T; BLOCK], [T; BLOCK]) {
    let (mut sums, mut slopes) = ([T::default(); BLOCK], [T::default(); BLOCK]);
    for (((g, x), w), (bias, scale)) in
        gradient.iter().zip(input).zip(weight).zip(biases.iter_mut().zip(scales))
    {
        for i in 0..BLOCK {
            let all = one((g[i], x[i], w[i]));
            sums[i] += all[0];
            slopes[i] += all[1];
            bias[i] += all[2];
            scale[i] += all[3];
        }
    }
    (sums, slopes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_parts_are_those_of_the_whole() {
        for (rows, width) in [(1, 1), (3, 31), (70, 32), (200, 100), (5, 3000)] {
            let number = |i: usize| ((i * 7919 % 1013) as f64 / 500.0 - 1.0) as f32;
            let some = |n: usize, from: usize| -> Vec<f32> { (from..from + n).map(number).collect() };
            let (gradient, input) = (some(rows * width, 5), some(rows * width, 77));
            let (mean, inverse, weight) = (some(rows, 1), some(rows, 9), some(width, 3));
            let norm =
                Norm { gradient: &gradient, input: &input, mean: &mean, inverse: &inverse, weight: &weight };
            let mut want = (vec![0.0; rows], vec![0.0; rows], vec![0.0; width], vec![0.0; width]);
            for i in 0..rows * width {
                let (row, column) = (i / width, i % width);
                let [g, x, m, r, w] =
                    [gradient[i], input[i], mean[row], inverse[row], weight[column]].map(f64::from);
                let normalized = (x - m) * r;
                want.0[row] += g * w;
                want.1[row] += g * w * normalized;
                want.2[column] += g;
                want.3[column] += g * normalized;
            }
            for middle in [0, rows / 2, rows] {
                let (mut sum, mut slope) = (vec![0.0; rows], vec![0.0; rows]);
                let mut columns = Columns::none(width);
                for part in [0..middle, middle..rows] {
                    norm.sums(part.clone(), &mut sum[part.clone()], &mut slope[part], &mut columns);
                }
                for (got, want) in
                    [(sum, &want.0), (slope, &want.1), (columns.sums, &want.2), (columns.products, &want.3)]
                {
                    for (&got, want) in got.iter().zip(want) {
                        assert!((f64::from(got) - want).abs() < 1e-3, "{rows} {width}: {got}, not {want}");
                    }
                }
            }
        }
    }
}
