//! Sums by a loop of the host: over all of an image but its channels, of the batch together or of each sample, and over the
//! rows of a layer norm.

use crate::context::Ctx;
use crate::library::{FLOATS, TARGET, channels_last, is_channels_last};
use oxitorch_hlo::{CustomCall, Dims, TensorType, Value};

/// The host function that takes mean and biased variance.
pub const STATISTICS: &str = "channel_statistics";
/// The host function that sums gradients, and their products with the normalised image. Its operands are the image, the
/// gradient, the mean and the inverse deviation.
pub const GRADIENT_SUMS: &str = "channel_gradient_sums";
/// The host function that sums the gradients of a layer norm. Its operands are the gradient and the input \[rows, width\], mean
/// and inverse deviation of each row and the weight. It gives for each row the sum of the gradient times the weight, and of
/// that times the normalised input, and for each column the same without the weight.
pub const ROW_GRADIENT_SUMS: &str = "row_gradient_sums";

/// How many numbers are worth a call: compiled sums over all dimensions but one in the middle take an order longer.
const WORTH: i64 = 1 << 17;

/// How many numbers that lie side by side are worth a sum of their own.
const RUN: i64 = 8;

/// How many numbers there have to be in a row of a layer norm: compiled code is as fast with many short ones.
const WIDTH: i64 = 128;

/// Whether sums over this are worth a call.
pub(super) fn is_for_host(c: &Ctx, image: Value) -> bool {
    c.is_worth_a_call(image, &FLOATS, WORTH)
}

fn samples_and_channels(c: &Ctx, image: Value) -> (i64, i64) {
    let shape = c.shape(image);
    (shape[0], shape[1])
}

/// Of each channel: \[channels\]; `more` are values of that shape.
pub(super) fn of_batch(c: &Ctx, function: &str, images: &[Value], more: &[Value]) -> Option<[Value; 2]> {
    let image = *images.first().filter(|&&image| is_for_host(c, image))?;
    let (n, channels) = samples_and_channels(c, image);
    let places = c.numel(image) / channels;
    let (dims, images) = match is_channels_last(c, image) {
        true => ([1, places, channels, 1], last(c, images)),
        false => ([1, n, channels, places / n], images.to_vec()),
    };
    call(c, function, &dims, &images, more, &[channels])
}

/// Of each sample and channel: \[n, channels\]; `more` are values of that shape.
pub(super) fn of_samples(c: &Ctx, function: &str, images: &[Value], more: &[Value]) -> Option<[Value; 2]> {
    let image = *images.first().filter(|&&image| is_for_host(c, image))?;
    let (n, channels) = samples_and_channels(c, image);
    let places = c.numel(image) / (n * channels);
    let (dims, images) = match is_channels_last(c, image) {
        true => ([n, places, channels, 1], last(c, images)),
        false => ([n, 1, channels, places], images.to_vec()),
    };
    (places >= RUN).then(|| call(c, function, &dims, &images, more, &[n, channels]))?
}

/// Mean and biased variance of groups of channels of each sample: \[n, groups\].
pub(super) fn statistics_of_groups(c: &Ctx, image: Value, groups: i64) -> Option<[Value; 2]> {
    if !is_for_host(c, image) {
        return None;
    }
    let (n, channels) = samples_and_channels(c, image);
    if is_channels_last(c, image) {
        let [mean, variance] = of_samples(c, STATISTICS, &[image], &[])?;
        let group = |v: Value| c.reshape(v, &[n, groups, channels / groups]);
        let average = |v: Value| super::reductions::plain_mean(c, v, &[2]);
        let (means, variances) = (group(mean), group(variance));
        let mean = average(means);
        let apart = c.subtract(means, c.broadcast_in_dim(mean, &c.shape(means), &[0, 1]));
        return Some([mean, average(c.add(variances, c.multiply(apart, apart)))]);
    }
    let run = c.numel(image) / (n * groups);
    (run >= RUN).then(|| call(c, STATISTICS, &[n, 1, groups, run], &[image], &[], &[n, groups]))?
}

/// Mean and biased variance of each row of so many numbers: \[rows\].
pub(super) fn statistics_of_rows(c: &Ctx, x: Value, width: i64) -> Option<[Value; 2]> {
    if !is_for_host(c, x) || width < WIDTH {
        return None;
    }
    let rows = c.numel(x) / width;
    call(c, STATISTICS, &[rows, 1, 1, width], &[x], &[], &[rows])
}

/// What [`ROW_GRADIENT_SUMS`] gives for gradient and input, mean and inverse deviation of the rows, and the weight.
pub(super) fn sums_of_rows(
    c: &Ctx,
    [gradient, input]: [Value; 2],
    of_rows: [Value; 2],
    weight: Value,
) -> Option<[Value; 4]> {
    let width = c.numel(weight);
    if !is_for_host(c, input) || width < WIDTH {
        return None;
    }
    let rows = c.numel(input) / width;
    let flat = |v: Value, shape: &[i64]| c.reshape(v, shape);
    let [gradient, input] = [gradient, input].map(|v| flat(v, &[rows, width]));
    let [mean, inverse] = of_rows.map(|v| flat(v, &[rows]));
    let results = [rows, rows, width, width].map(|n| TensorType::new(c.dtype(input), [n].as_slice()));
    let operands = [gradient, input, mean, inverse, flat(weight, &[width])];
    c.custom_call(&operands, &results, host_call(ROW_GRADIENT_SUMS)).try_into().ok()
}

fn host_call(function: &str) -> CustomCall {
    let config = format!("fn = \"{function}\"");
    CustomCall { target: TARGET.into(), backend_config: config, ..CustomCall::default() }
}

/// As they are in memory.
fn last(c: &Ctx, images: &[Value]) -> Vec<Value> {
    images.iter().map(|&image| c.transpose(image, &channels_last(c.rank(image)))).collect()
}

fn call(
    c: &Ctx,
    function: &str,
    dims: &[i64],
    images: &[Value],
    more: &[Value],
    result: &[i64],
) -> Option<[Value; 2]> {
    let flat: Dims = [result.iter().product()].into_iter().collect();
    let of_images = images.iter().map(|&image| c.reshape(image, dims));
    let operands: Vec<Value> = of_images.chain(more.iter().map(|&v| c.reshape(v, &flat))).collect();
    let ty = TensorType::new(c.dtype(images[0]), flat);
    let found: [Value; 2] =
        c.custom_call(&operands, &[ty.clone(), ty], host_call(function)).try_into().ok()?;
    Some(found.map(|v| c.reshape(v, result)))
}
