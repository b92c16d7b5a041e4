use crate::args::Integers;
use crate::context::Ctx;
use crate::error::{ErrorKind, Result, not_implemented, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{Builder, DType, DotDims, Precision, TensorType, Value};

/// The rows of this family: connectionist temporal classification, a loop over time forward and one backward.
pub static ROWS: &[Row] = &[
    op!("_ctc_loss", loss_of_lists),
    op!("_ctc_loss.Tensor", loss).takes_host_tensor(),
    op!("_ctc_loss_backward", gradient_of_lists),
    op!("_ctc_loss_backward.Tensor", gradient).takes_host_tensor(),
];

/// The labels with a blank before, between and after them, and what follows from them. `L` is twice the most labels that
/// there can be, and one more.
struct Trellis {
    batch: i64,
    time: i64,
    classes: i64,
    /// s32 `[batch, L]`: the class at each place.
    labels: Value,
    /// Whether a path may come from two places before: pred `[batch, L]`.
    skips: Value,
    /// s32 `[batch]`
    input: Value,
    /// s32 `[batch]`
    target: Value,
    /// `[time, batch, L]`: log probabilities of the classes.
    log: Value,
}

fn minus_infinity(c: &Builder, x: Value) -> Value {
    c.full(c.scalar_f64(c.dtype(x), f64::NEG_INFINITY), &c.shape(x))
}

impl Trellis {
    fn new(c: &Ctx, log: Value, targets: Value, input: Value, target: Value, blank: i64) -> Result<Self> {
        let &[time, batch, classes] = c.shape(log).as_slice() else {
            return Err(runtime(format!(
                "Expected tensor to have 3 dimensions, but got {} (while checking arguments for ctc_loss_cpu)",
                c.rank(log)
            )));
        };
        if !matches!(c.dtype(log), DType::F32 | DType::F64) {
            return Err(not_implemented("ctc_loss_cpu", c.dtype(log)));
        }
        if !(0..classes).contains(&blank) {
            return Err(runtime("blank must be in label range"));
        }
        if c.shape(input)[..] != [batch] {
            return Err(runtime("input_lengths must be of size batch_size"));
        }
        if c.shape(target)[..] != [batch] {
            return Err(runtime("target_lengths must be of size batch_size"));
        }
        let (input, target) = (c.to(input, DType::S32), c.to(target, DType::S32));
        let targets = c.to(targets, DType::S32);
        let (most, table) = padded(c, targets, target, batch, time)?;
        let limit = |what: &str, x: Value, most: i64| {
            c.assert(
                ErrorKind::Runtime,
                format!("Expected {what}_lengths to have value at most {most}"),
                || c.all(c.le(x, c.full(c.scalar_i64(DType::S32, most), &[batch]))),
            );
        };
        limit("input", input, time);
        limit("target", target, c.shape(targets).last().copied().unwrap_or(0));
        let places = 2 * most + 1;
        let blanks = |n: i64| c.full(c.scalar_i64(DType::S32, blank), &[batch, n, 1]);
        let pairs = c.concatenate(&[blanks(most), c.reshape(table, &[batch, most, 1])], 2);
        let labels = c.reshape(pairs, &[batch, 2 * most]);
        let labels = c.concatenate(&[labels, c.reshape(blanks(1), &[batch, 1])], 1);
        let before = c.slice_dim(labels, 1, 0, (places - 2).max(0), 1);
        let before = c.pad_dim(before, c.scalar_i64(DType::S32, blank), 1, places.min(2), 0);
        let odd = c.iota_dim(labels, DType::S32, 1);
        let odd = c.eq(c.and(odd, c.ones_like(odd)), c.ones_like(odd));
        let skips = c.and(
            c.and(odd, c.ge(c.iota_dim(labels, DType::S32, 1), c.full_like(labels, 2.0))),
            c.ne(labels, before),
        );
        let index = c.broadcast_in_dim(labels, &[time, batch, places], &[1, 2]);
        let log = c.take_along_dim(log, index, 2);
        Ok(Trellis { batch, time, classes, labels, skips, input, target, log })
    }

    fn places(&self, c: &Ctx) -> i64 {
        c.shape(self.labels)[1]
    }

    /// Place numbers, and the number of the last blank of each sequence: s32 `[batch, L]`.
    fn ends(&self, c: &Ctx) -> (Value, Value) {
        let shape = c.shape(self.labels);
        let two = c.full(c.scalar_i64(DType::S32, 2), &[self.batch]);
        let end = c.broadcast_in_dim(c.multiply(self.target, two), &shape, &[0]);
        (c.iota_dim(self.labels, DType::S32, 1), end)
    }
}

/// The labels of each sequence, s32 `[batch, most]`, with anything after its last. No path has more labels than steps.
fn padded(c: &Ctx, targets: Value, lengths: Value, batch: i64, time: i64) -> Result<(i64, Value)> {
    match *c.shape(targets).as_slice() {
        [all] => {
            let most = all.min(time);
            let shape = [batch, most];
            if all == 0 {
                return Ok((0, c.full(c.scalar_i64(DType::S32, 0), &shape)));
            }
            // Where each sequence starts is the sum of the lengths before it.
            let row = c.iota(TensorType::new(DType::S32, [batch, batch].as_slice()), 0);
            let column = c.iota(TensorType::new(DType::S32, [batch, batch].as_slice()), 1);
            let each = c.broadcast_in_dim(lengths, &[batch, batch], &[1]);
            let start = c.reduce_sum(c.select(c.lt(column, row), each, c.zeros_like(each)), &[1]);
            let within = c.iota(TensorType::new(DType::S32, shape.as_slice()), 1);
            let place = c.add(c.broadcast_in_dim(start, &shape, &[0]), within);
            Ok((most, c.take_dim(targets, place, 0)))
        }
        [rows, columns] if rows == batch => {
            let most = columns.min(time);
            Ok((most, c.slice_dim(targets, 1, 0, most, 1)))
        }
        ref shape => Err(runtime(format!(
            "Expected tensor to have size {batch} at dimension 0, but got size {} for argument #2 'targets' (while \
             checking arguments for ctc_loss_cpu)",
            shape.first().copied().unwrap_or(0)
        ))),
    }
}

/// `log(sum(exp(x)))` of three, where all may be minus infinity.
fn add_logs(b: &Builder, xs: [Value; 3]) -> Value {
    let most = b.maximum(b.maximum(xs[0], xs[1]), xs[2]);
    let nothing = b.eq(most, minus_infinity(b, most));
    let base = b.select(nothing, b.zeros_like(most), most);
    let part = |x: Value| b.exponential(b.subtract(x, base));
    b.add(b.log(b.add(b.add(part(xs[0]), part(xs[1])), part(xs[2]))), base)
}

/// `x` moved along its last dimension by `n` places, towards the end if positive; minus infinity comes in.
fn moved(b: &Builder, x: Value, n: i64) -> Value {
    let (rank, shape) = (b.rank(x) as i64, b.shape(x));
    let size = shape[rank as usize - 1];
    let nothing = b.scalar_f64(b.dtype(x), f64::NEG_INFINITY);
    let n = n.clamp(-size, size);
    b.pad_dim(x, nothing, rank - 1, n, -n)
}

/// One time step `[batch, L]` of `[time, batch, L]`.
fn step(b: &Builder, x: Value, t: Value) -> Value {
    let shape = b.shape(x);
    let zero = b.scalar_i64(DType::S32, 0);
    b.reshape(b.dynamic_slice(x, &[t, zero, zero], &[1, shape[1], shape[2]]), &shape[1..])
}

fn store(b: &Builder, x: Value, t: Value, new: Value) -> Value {
    let shape = b.shape(x);
    let zero = b.scalar_i64(DType::S32, 0);
    b.dynamic_update_slice(x, b.reshape(new, &[1, shape[1], shape[2]]), &[t, zero, zero])
}

impl Trellis {
    /// Log probabilities of all beginnings of paths: `[time, batch, L]`.
    fn forward(&self, c: &Ctx) -> Value {
        let start = minus_infinity(c, self.log);
        let (place, end) = self.ends(c);
        let log0 = step(c, self.log, c.scalar_i64(DType::S32, 0));
        let first = c.and(c.le(place, c.ones_like(place)), c.le(place, end));
        let first = c.select(first, log0, minus_infinity(c, log0));
        let start = store(c, start, c.scalar_i64(DType::S32, 0), first);
        let limit = c.scalar_i64(DType::S32, self.time);
        let out = c.for_loop(c.scalar_i64(DType::S32, 1), limit, &[start, first], |b, t, state| {
            let old = state[1];
            let two = b.select(self.skips, moved(b, old, 2), minus_infinity(b, old));
            let new = b.add(add_logs(b, [old, moved(b, old, 1), two]), step(b, self.log, t));
            vec![store(b, state[0], t, new), new]
        });
        out[0]
    }

    /// Log probabilities of all ends of paths, from the last step of each sequence on.
    fn backward(&self, c: &Ctx) -> Value {
        let (place, end) = self.ends(c);
        let last = c.or(c.eq(place, end), c.eq(place, c.subtract(end, c.ones_like(end))));
        let inside = c.le(place, end);
        // Whether a path may go two places on is whether the one there may come from here.
        let skips = c.pad_dim(
            self.skips,
            c.constant(TensorType::scalar(DType::Pred), 0.0),
            1,
            -self.places(c).min(2),
            self.places(c).min(2),
        );
        let nothing = minus_infinity(c, step(c, self.log, c.scalar_i64(DType::S32, 0)));
        let limit = c.scalar_i64(DType::S32, self.time);
        let start = [minus_infinity(c, self.log), nothing];
        let out = c.for_loop(c.scalar_i64(DType::S32, 0), limit, &start, |b, i, state| {
            let t = b.subtract(b.scalar_i64(DType::S32, self.time - 1), i);
            let old = state[1];
            let two = b.select(skips, moved(b, old, -2), nothing);
            let sum = add_logs(b, [old, moved(b, old, -1), two]);
            let at = b.broadcast_in_dim(self.input, &b.shape(old), &[0]);
            let next = b.full(b.add(t, b.scalar_i64(DType::S32, 1)), &b.shape(old));
            let here = b.select(b.eq(next, at), b.select(last, b.zeros_like(old), nothing), sum);
            let new = b.add(here, step(b, self.log, t));
            let new = b.select(b.and(inside, b.le(next, at)), new, nothing);
            vec![store(b, state[0], t, new), new]
        });
        out[0]
    }

    /// The negative log likelihood of each sequence.
    fn likelihood(&self, c: &Ctx, alpha: Value) -> Value {
        let last = c.subtract(self.input, c.ones_like(self.input));
        let at = c.broadcast_in_dim(last, &c.shape(alpha), &[1]);
        let now = c.eq(c.iota_dim(alpha, DType::S32, 0), at);
        let ends = c.reduce_max(c.select(now, alpha, minus_infinity(c, alpha)), &[0]);
        let (place, end) = self.ends(c);
        let is_end = c.or(c.eq(place, end), c.eq(place, c.subtract(end, c.ones_like(end))));
        let ends = c.select(is_end, ends, minus_infinity(c, ends));
        let most = c.reduce_max(ends, &[1]);
        let nothing = c.eq(most, minus_infinity(c, most));
        let base = c.select(nothing, c.zeros_like(most), most);
        let parts = c.exponential(c.subtract(ends, c.broadcast_in_dim(base, &c.shape(ends), &[0])));
        let sum = c.add(c.log(c.reduce_sum(parts, &[1])), base);
        // Nothing is all there is to say in no time.
        let zero = c.zeros_like(self.input);
        let silent = c.and(c.eq(self.input, zero), c.eq(self.target, zero));
        c.select(silent, c.zeros_like(sum), c.negate(sum))
    }
}

fn loss_of_lists(
    c: &Ctx,
    log: Value,
    targets: Value,
    input: Integers,
    target: Integers,
    blank: i64,
    zero_infinity: bool,
) -> Result<(Value, Value)> {
    loss(c, log, targets, input.0, target.0, blank, zero_infinity)
}

fn loss(
    c: &Ctx,
    log: Value,
    targets: Value,
    input: Value,
    target: Value,
    blank: i64,
    _zero_infinity: bool,
) -> Result<(Value, Value)> {
    let trellis = Trellis::new(c, log, targets, input, target, blank)?;
    if trellis.time == 0 || trellis.batch == 0 {
        return Err(runtime("ctc_loss: log_probs has no elements"));
    }
    let alpha = trellis.forward(c);
    Ok((trellis.likelihood(c, alpha), c.transpose(alpha, &[1, 0, 2])))
}

#[allow(clippy::too_many_arguments)] // the schema's
fn gradient_of_lists(
    c: &Ctx,
    grad: Value,
    log: Value,
    targets: Value,
    input: Integers,
    target: Integers,
    likelihood: Value,
    alpha: Value,
    blank: i64,
    zero_infinity: bool,
) -> Result<Value> {
    gradient(c, grad, log, targets, input.0, target.0, likelihood, alpha, blank, zero_infinity)
}

#[allow(clippy::too_many_arguments)] // the schema's
fn gradient(
    c: &Ctx,
    grad: Value,
    log: Value,
    targets: Value,
    input: Value,
    target: Value,
    likelihood: Value,
    alpha: Value,
    blank: i64,
    zero_infinity: bool,
) -> Result<Value> {
    let t = Trellis::new(c, log, targets, input, target, blank)?;
    let shape = c.shape(log);
    let both = c.add(c.transpose(alpha, &[1, 0, 2]), t.backward(c));
    // How likely it is to be at each place at each time, given the labels; both parts count the step itself.
    let spread = |x: Value| c.broadcast_in_dim(x, &c.shape(both), &[1]);
    let share = c.exponential(c.add(c.subtract(both, t.log), spread(likelihood)));
    let share = c.select(c.eq(both, minus_infinity(c, both)), c.zeros_like(both), share);
    let each = [t.batch, t.places(c), t.classes];
    let class = c.iota(TensorType::new(DType::S32, each.as_slice()), 2);
    let is_class = c.eq(c.broadcast_in_dim(t.labels, &each, &[0, 1]), class);
    let dims = DotDims::new(&[1], &[0], &[2], &[1]);
    let sums = c.dot_general(share, c.to(is_class, c.dtype(log)), &dims, Precision::Highest, None);
    let wide = |x: Value| c.broadcast_in_dim(x, &shape, &[1]);
    let change = c.multiply(c.subtract(c.exponential(log), c.transpose(sums, &[1, 0, 2])), wide(grad));
    let infinite = c.eq(likelihood, c.full_like(likelihood, f64::INFINITY));
    let what = if zero_infinity { 0.0 } else { f64::NAN };
    let change = c.select(wide(infinite), c.full_like(change, what), change);
    let inside = c.lt(c.iota_dim(log, DType::S32, 0), wide(t.input));
    Ok(c.select(inside, change, c.zeros_like(change)))
}
