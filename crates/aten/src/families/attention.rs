use super::matmul::{accumulator, contract};
use super::philox;
use super::pooling::same_shape;
use crate::args::{Arg, ParamKind, Rate, Rng, Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::shape_text;
use crate::error::{Result, runtime, unsupported};
use crate::library::{Item, Outcome, Parts};
use crate::op;
use crate::params::FromArg;
use crate::row::{Layout, Row};
use oxitorch_hlo::{Axes, Builder, DType, Dims, DotDims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("_scaled_dot_product_fused_attention_overrideable", forward)
        .products()
        .layout(Layout::InOrderOfFirst)
        .check_numbers(|n| {
            n.require(
                4,
                |p| (0.0..=1.0).contains(&p),
                |p| format!("dropout probability has to be between 0 and 1, but got {p}"),
            )
        }),
    op!("_scaled_dot_product_fused_attention_overrideable_backward", backward)
        .products()
        .layout(Layout::LikeFollowing),
    // What PyTorch calls for tensors of the CPU; only direct calls come here. The CPU's kernel reads beyond operands whose
    // sizes do not fit.
    op!("_scaled_dot_product_flash_attention_for_cpu", for_cpu).products().layout(Layout::Attention),
    op!("_scaled_dot_product_flash_attention_for_cpu_backward", for_cpu_backward)
        .products()
        .layout(Layout::HeadsLast),
];

/// A tensor that autograd may hand over undefined although the schema does not say so.
struct Undefinable(Option<Value>);

impl FromArg for Undefinable {
    const KIND: ParamKind = ParamKind::OptTensor;
    fn accepts(ty: &str) -> bool {
        ty == "Tensor"
    }
    fn from_arg(c: &Ctx, arg: &Arg) -> Result<Self> {
        Ok(Undefinable(Option::<Tensor>::from_arg(c, arg)?.map(|t| t.value)))
    }
}

/// Sizes of one attention: several query heads may share one key head.
struct Attention {
    batch: i64,
    heads: i64,
    key_heads: i64,
    queries: i64,
    keys: i64,
    width: i64,
    value_width: i64,
    dtype: DType,
    /// What scores and probabilities are computed in.
    acc: DType,
    /// Of a block of the queries, where it starts: a 0-d S32, and how many there are in all.
    block: Option<(Value, i64)>,
}

/// What is done to the scores: a bias, whether keys behind a query are left out, and what they are multiplied with, which by
/// default is the inverse root of the width.
#[derive(Clone, Copy)]
struct Scores {
    bias: Option<Value>,
    causal: bool,
    scale: Option<Value>,
}

/// Bytes of scores on a device above which queries are taken in blocks.
const MUCH: i64 = 512 << 20;

/// Those of a block, about.
const BLOCK: i64 = 256 << 20;

/// Queries in a block at least, and what their number is a multiple of: the rows that hardware multiplies at once.
const BLOCK_ROWS: i64 = 128;

impl Attention {
    fn new(c: &Ctx, q: Value, k: Value, v: Value) -> Result<Attention> {
        let shapes = [c.shape(q), c.shape(k), c.shape(v)];
        let fail = || {
            let [q, k, v] = shapes.each_ref().map(|s| shape_text(s));
            runtime(format!("query, key and value do not fit together: {q}, {k}, {v}"))
        };
        let (&[b, h, l, e], &[bk, hk, s, ek], &[bv, hv, sv, value_width]) =
            (shapes[0].as_slice(), shapes[1].as_slice(), shapes[2].as_slice())
        else {
            return Err(fail());
        };
        let fits = b == bk && b == bv && hk == hv && s == sv && e == ek && (h == hk || hk > 0 && h % hk == 0);
        if !fits {
            return Err(fail());
        }
        let dtype = c.dtype(q);
        if !dtype.is_float() || c.dtype(k) != dtype || c.dtype(v) != dtype {
            return Err(unsupported("attention of these dtypes"));
        }
        Ok(Attention {
            batch: b,
            heads: h,
            key_heads: hk,
            queries: l,
            keys: s,
            width: e,
            value_width,
            dtype,
            acc: accumulator(dtype),
            block: None,
        })
    }

    /// Checks what a backward is given of the output and its rows.
    fn check_results(&self, c: &Ctx, [grad, out, logsumexp]: [Value; 3]) -> Result<()> {
        let output = [self.batch, self.heads, self.queries, self.value_width];
        same_shape(&output, &c.shape(grad))?;
        same_shape(&output, &c.shape(out))?;
        same_shape(&output[..3], &c.shape(logsumexp))
    }

    fn scores_shape(&self) -> [i64; 4] {
        [self.batch, self.heads, self.queries, self.keys]
    }

    /// Whether torch's own kernel computes it, which knows no shared key heads, and one width.
    fn is_for_library(&self, c: &Ctx) -> bool {
        let sizes = [self.batch, self.heads, self.queries, self.keys, self.width];
        let operations = sizes.iter().fold(4i64, |all, &n| all.saturating_mul(n));
        self.is_known() && c.is_for_library(self.dtype, operations)
    }

    fn is_known(&self) -> bool {
        self.heads == self.key_heads && self.width == self.value_width
    }

    /// Whether how it is computed is left open in an outline.
    fn may_be_deferred(&self, c: &Ctx) -> bool {
        c.config.target.attention_in_blocks || self.is_known() && c.may_be_for_library(self.dtype)
    }

    /// What its dimensions are where the tensors that it takes, and those that it gives, have so many: batch, heads, those of
    /// keys, the places of queries and keys, and the widths. What keys are in use is not seen from zeros.
    fn axes(operands: &[&str], results: &[&str]) -> Axes {
        let owned = |list: &[&str]| list.iter().map(|&s| s.to_owned()).collect();
        let (mixed, first, used) = ("qkef".to_owned(), "qk".to_owned(), "qk".to_owned());
        Axes { operands: owned(operands), results: owned(results), mixed, first, used, ..Axes::default() }
    }

    /// A result of the library with the shape of a query or key tensor: it puts the heads of one place side by side.
    fn heads_last(&self, length: i64) -> Option<Outcome> {
        let ty = TensorType::new(self.dtype, vec![self.batch, self.heads, length, self.width]);
        Some(Outcome { ty, order: Dims::from_slice(&[0, 2, 1, 3]) })
    }

    /// Output and log-sum-exp.
    fn library_forward(
        &self,
        c: &Ctx,
        qkv: [Value; 3],
        bias: Option<Value>,
        causal: bool,
        scale: Option<Value>,
    ) -> Option<[Value; 2]> {
        let mut args: Vec<Item<'_>> = qkv.map(Item::Rows).into();
        args.extend([Item::Float(0.0), Item::Bool(causal), bias.map_or(Item::None, Item::Rows)]);
        args.push(scale.map_or(Item::None, Item::Number));
        let rows = TensorType::new(self.acc, vec![self.batch, self.heads, self.queries]);
        let logsumexp = Outcome { ty: rows, order: Dims::from_slice(&[0, 2, 1]) };
        let results = [self.heads_last(self.queries), Some(logsumexp)];
        let parts = Parts { args: &[0, 0, 0, -1, -1, -1, -1], results: &[0, 0], step: 1 };
        let op = "_scaled_dot_product_flash_attention_for_cpu";
        let y = c.call_library_in_parts(op, &args, &results, Some(&parts));
        Some([y[0]?, y[1]?])
    }

    fn library_backward(
        &self,
        c: &Ctx,
        tensors: [Value; 6],
        bias: Option<Value>,
        causal: bool,
        scale: Option<Value>,
    ) -> Vec<Option<Value>> {
        let mut args: Vec<Item<'_>> = tensors.map(Item::Rows).into();
        args.extend([Item::Float(0.0), Item::Bool(causal), bias.map_or(Item::None, Item::Rows)]);
        args.push(scale.map_or(Item::None, Item::Number));
        let results = [self.queries, self.keys, self.keys].map(|n| self.heads_last(n));
        let parts = Parts { args: &[0, 0, 0, 0, 0, 0, -1, -1, -1, -1], results: &[0, 0, 0], step: 1 };
        let op = "_scaled_dot_product_flash_attention_for_cpu_backward";
        c.call_library_in_parts(op, &args, &results, Some(&parts))
    }

    /// Query rows of all heads that share a key head, one below the other.
    fn stacked(&self, c: &Ctx, x: Value) -> Value {
        let shape = c.shape(x);
        let rows = if self.key_heads == 0 { 0 } else { self.heads / self.key_heads * self.queries };
        c.reshape(x, &[self.batch, self.key_heads, rows, shape[3]])
    }

    /// The opposite of [`Attention::stacked`].
    fn unstacked(&self, c: &Ctx, x: Value) -> Value {
        let shape = c.shape(x);
        c.reshape(x, &[self.batch, self.heads, self.queries, shape[3]])
    }

    /// `x @ y.T` for the query rows of `x`.
    fn times_transposed(&self, c: &Ctx, x: Value, y: Value) -> Value {
        let dims = DotDims::new(&[0, 1], &[0, 1], &[3], &[3]);
        self.unstacked(c, contract(c, self.stacked(c, x), y, dims))
    }

    /// `p @ y` for scores-shaped `p`, which is rounded to the dtype of the inputs first.
    fn times(&self, c: &Ctx, p: Value, y: Value) -> Value {
        let dims = DotDims::new(&[0, 1], &[0, 1], &[3], &[2]);
        self.unstacked(c, contract(c, self.stacked(c, c.to(p, self.dtype)), y, dims))
    }

    /// `p.T @ x`: sums over the query rows, of all heads that share a key head.
    fn transposed_times(&self, c: &Ctx, p: Value, x: Value) -> Value {
        let dims = DotDims::new(&[0, 1], &[0, 1], &[2], &[2]);
        contract(c, self.stacked(c, c.to(p, self.dtype)), self.stacked(c, x), dims)
    }

    /// The factor of the scores as a 0-d value.
    fn scale(&self, c: &Ctx, scale: Option<Value>) -> Value {
        match scale {
            Some(s) => c.to(s, self.acc),
            None => c.scalar_f64(self.acc, 1.0 / (self.width as f64).sqrt()),
        }
    }

    /// Scaled, biased and masked scores.
    fn scores(&self, c: &Ctx, [q, k]: [Value; 2], how: Scores, scale: Value) -> Result<Value> {
        let shape = self.scores_shape();
        let mut s = c.multiply(self.times_transposed(c, q, k), c.full(scale, &shape));
        if let Some(b) = how.bias {
            s = c.add(s, c.to(c.expand(b, &shape)?, self.acc));
        }
        if how.causal {
            let ty = TensorType::new(DType::S32, shape.as_slice());
            let query = match self.block {
                Some((start, _)) => c.add(c.iota(ty.clone(), 2), c.full(start, &shape)),
                None => c.iota(ty.clone(), 2),
            };
            let past = c.ge(query, c.iota(ty, 3));
            s = c.select(past, s, c.full(c.scalar_f64(self.acc, f64::NEG_INFINITY), &shape));
        }
        Ok(s)
    }

    /// How many queries are taken at once, if not all.
    fn rows_of_a_block(&self, c: &Ctx) -> Option<i64> {
        let sizes = [self.batch, self.heads, self.keys];
        let row = sizes.iter().fold(self.acc.size_bytes() as i64, |all, &n| all.saturating_mul(n));
        // What is recorded once for all sizes has no loop whose length follows from one of them.
        let at_once = !c.config.target.attention_in_blocks || c.is_outline();
        if at_once || self.queries.saturating_mul(row) / c.devices() <= MUCH {
            return None;
        }
        // What is split over devices is so by batch and heads.
        let most = (BLOCK.saturating_mul(c.devices()) / row).max(BLOCK_ROWS);
        let rows = div_ceil(div_ceil(self.queries, div_ceil(self.queries, most)), BLOCK_ROWS) * BLOCK_ROWS;
        (rows < self.queries).then_some(rows)
    }

    fn by_row(&self, c: &Ctx, x: Value) -> Value {
        c.broadcast_in_dim(x, &self.scores_shape(), &[0, 1, 2])
    }

    /// Zeros behind dimension `dim` of a tensor that has it by query, so that it is blocks of so many rows.
    fn padded(&self, c: &Ctx, x: Value, dim: i64, rows: i64) -> Value {
        let more = div_ceil(self.queries, rows) * rows - self.queries;
        if more == 0 { x } else { c.pad_dim(x, c.scalar_f64(c.dtype(x), 0.0), dim, 0, more) }
    }

    /// A bias in the same way, if it differs by query.
    fn padded_bias(&self, c: &Ctx, bias: Option<Value>, rows: i64) -> Option<(Value, bool)> {
        let bias = bias?;
        let dim = c.rank(bias) as i64 - 2;
        let by_query = dim >= 0 && c.shape(bias)[dim as usize] == self.queries;
        Some((if by_query { self.padded(c, bias, dim, rows) } else { bias }, by_query))
    }

    /// What a block of queries has of such a tensor.
    fn part(&self, c: &Ctx, x: Value, dim: i64, start: Value) -> Value {
        let mut shape = c.shape(x);
        shape[dim as usize] = self.queries;
        c.dynamic_slice(x, &starts(c, x, dim, start), &shape)
    }

    fn part_of_bias(&self, c: &Ctx, bias: Option<(Value, bool)>, start: Value) -> Option<Value> {
        let (bias, by_query) = bias?;
        Some(if by_query { self.part(c, bias, c.rank(bias) as i64 - 2, start) } else { bias })
    }

    /// Takes the queries in blocks of so many rows: `each` gets the attention of one, where it starts, and the values that
    /// the block before has left, and leaves them for the next.
    fn in_blocks(
        &self,
        c: &Ctx,
        rows: i64,
        inits: &[Value],
        each: impl FnOnce(&Attention, Value, &[Value]) -> Result<Vec<Value>>,
    ) -> Result<Vec<Value>> {
        let number = |n: i64| c.scalar_i64(DType::S32, n);
        let mut failed = Ok(());
        let body = |_: &Builder, i: Value, held: &[Value]| {
            let start = c.multiply(i, number(rows));
            let block = Attention { queries: rows, block: Some((start, self.queries)), ..*self };
            each(&block, start, held).unwrap_or_else(|e| {
                failed = Err(e);
                held.to_vec()
            })
        };
        let made = c.for_loop(number(0), number(div_ceil(self.queries, rows)), inits, body);
        failed.map(|()| made)
    }

    /// Philox blocks that [`Attention::dropout`] takes.
    fn dropout_blocks(&self) -> u64 {
        philox::blocks(&TensorType::new(DType::U32, self.scores_shape().as_slice()))
    }

    /// What dropout multiplies the probabilities with: 0, or 1 / (1 - p).
    fn dropout(&self, c: &Ctx, state: Value, p: Scalar) -> Value {
        let shape = self.scores_shape();
        let (start, queries) = self.block.unzip();
        let whole = [self.batch, self.heads, queries.unwrap_or(self.queries), self.keys];
        let mut place = philox::place(c, &shape, &whole);
        if let Some(start) = start {
            let first = c.multiply(c.to(start, c.dtype(place)), c.scalar_i64(c.dtype(place), self.keys));
            place = c.add(place, c.full(first, &shape));
        }
        let random = philox::bits_at(c, state, DType::U32, place);
        let p = c.number(p, DType::F64);
        let number = |x: f64| c.scalar_f64(DType::F64, x);
        let most = f64::from(u32::MAX);
        let threshold = c.clamp(number(0.0), c.multiply(p, number(most + 1.0)), number(most));
        let keep = c.ge(random, c.full(c.to(threshold, DType::U32), &shape));
        let share = c.subtract(number(1.0), p);
        let factor = c.select(c.gt(share, number(0.0)), c.divide(number(1.0), share), number(0.0));
        let kept = c.full(c.to(factor, self.acc), &shape);
        c.select(keep, kept, c.zeros_like(kept))
    }
}

/// `query, key and value` have four dimensions. Rows without a key to look at give zeros.
///
/// Returns, after output and logsumexp, what the backward needs to draw the same dropout again: seed and offset as the
/// 64-bit words of the generator's state. Sequence offsets are for nested tensors, and the debug mask is never made: there
/// are none, as PyTorch's meta function has it.
#[allow(clippy::too_many_arguments)] // the schema's
fn forward(
    c: &Ctx,
    q: Value,
    k: Value,
    v: Value,
    bias: Option<Value>,
    dropout: Rate,
    causal: bool,
    _debug_mask: bool,
    scale: Option<Scalar>,
    rng: Rng,
) -> Result<Vec<Option<Value>>> {
    let a = Attention::new(c, q, k, v)?;
    let state = c.bitcast_convert(rng.0, DType::S64);
    let word = |i: i64| c.index_dim(state, 0, i);
    let scale = scale.map(|s| c.number(s, DType::F64));
    let drawn = match dropout {
        Rate::Of(rate) => Some((c.rng_take(rng, a.dropout_blocks()), rate)),
        Rate::Zero => None,
    };
    let drop = |a: &Attention, p: Value| match drawn {
        Some((state, rate)) => c.multiply(p, a.dropout(c, state, rate)),
        None => p,
    };
    let plain = bias.is_none() && matches!(dropout, Rate::Zero);
    let deferred = plain.then(|| deferred_forward(c, &a, [q, k, v], causal, scale)).flatten();
    let library =
        |plain: bool| plain.then(|| attend_by_library(c, &a, [q, k, v], None, causal, scale)).flatten();
    let [output, logsumexp] = match deferred.or_else(|| library(plain)) {
        Some(found) => found,
        None => attend(c, &a, [q, k, v], Scores { bias, causal, scale }, drop)?,
    };
    let (seed, offset) = (word(0), word(1));
    Ok(vec![Some(output), Some(logsumexp), None, None, None, None, Some(seed), Some(offset), None])
}

/// The sizes of an attention as the CPU's kernel takes it: without dropout, and with one number of heads and one width.
fn checked_for_cpu(c: &Ctx, qkv: [Value; 3], dropout: Rate, mask: Option<Value>) -> Result<Attention> {
    let fail = |text: &str| Err(runtime(format!("scaled_dot_product_attention_flash_attention: {text}")));
    if qkv.iter().any(|&x| c.rank(x) != 4) {
        return fail("Accept only 4 dims inputs shape of {B, H, T, K}");
    }
    if !matches!(dropout, Rate::Zero) {
        return fail("Currently do not support dropout > 0");
    }
    let a = Attention::new(c, qkv[0], qkv[1], qkv[2])?;
    if !a.is_known() {
        return fail("Q/K/V should have the same head size");
    }
    match mask.map(|m| (c.dtype(m), c.rank(m))) {
        Some((dtype, _)) if dtype != a.dtype && dtype != DType::F32 => {
            fail("Attention mask type should be the same as query's or float")
        }
        Some((_, rank)) if rank != 2 && rank != 4 => fail("Attention mask dim in {2, 4}"),
        _ => Ok(a),
    }
}

#[allow(clippy::too_many_arguments)] // the schema's
fn for_cpu(
    c: &Ctx,
    q: Value,
    k: Value,
    v: Value,
    dropout: Rate,
    causal: bool,
    mask: Option<Value>,
    scale: Option<Scalar>,
) -> Result<(Value, Value)> {
    let a = checked_for_cpu(c, [q, k, v], dropout, mask)?;
    let scale = scale.map(|s| c.number(s, DType::F64));
    let library = match mask {
        None => attend_by_library(c, &a, [q, k, v], None, causal, scale),
        Some(_) => None,
    };
    let [output, logsumexp] = match library {
        Some(found) => found,
        None => attend(c, &a, [q, k, v], Scores { bias: mask, causal, scale }, |_, p| p)?,
    };
    Ok((output, logsumexp))
}

#[allow(clippy::too_many_arguments)] // the schema's
fn for_cpu_backward(
    c: &Ctx,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    logsumexp: Value,
    dropout: Rate,
    causal: bool,
    mask: Option<Value>,
    scale: Option<Scalar>,
) -> Result<(Value, Value, Value)> {
    let a = checked_for_cpu(c, [q, k, v], dropout, mask)?;
    a.check_results(c, [grad, out, logsumexp])?;
    let scale = scale.map(|s| c.number(s, DType::F64));
    let tensors = [grad, q, k, v, out, logsumexp];
    let ([dq, dk, dv], _) = gradients(c, &a, tensors, Scores { bias: mask, causal, scale }, false, |_| None)?;
    Ok((dq, dk, dv))
}

/// Output and log-sum-exp by torch's own kernel, where that is worth it.
fn attend_by_library(
    c: &Ctx,
    a: &Attention,
    qkv: [Value; 3],
    bias: Option<Value>,
    causal: bool,
    scale: Option<Value>,
) -> Option<[Value; 2]> {
    if a.is_for_library(c) { a.library_forward(c, qkv, bias, causal, scale) } else { None }
}

/// Output and log-sum-exp; `drop` does dropout to probabilities.
fn attend(
    c: &Ctx,
    a: &Attention,
    [q, k, v]: [Value; 3],
    how: Scores,
    drop: impl FnOnce(&Attention, Value) -> Value,
) -> Result<[Value; 2]> {
    let Some(rows) = a.rows_of_a_block(c) else {
        return attend_at_once(c, a, [q, k, v], how, drop);
    };
    let (q, bias) = (a.padded(c, q, 2, rows), a.padded_bias(c, how.bias, rows));
    let shape = [a.batch, a.heads, c.shape(q)[2], a.value_width];
    let zeros = |dtype, shape: &[i64]| c.full(c.scalar_f64(dtype, 0.0), shape);
    let inits = [zeros(a.dtype, &shape), zeros(a.acc, &shape[..3])];
    let made = a.in_blocks(c, rows, &inits, |a, start, held| {
        let how = Scores { bias: a.part_of_bias(c, bias, start), ..how };
        let made = attend_at_once(c, a, [a.part(c, q, 2, start), k, v], how, drop)?;
        let put = |(&x, y)| c.dynamic_update_slice(x, y, &starts(c, x, 2, start));
        Ok(held.iter().zip(made).map(put).collect())
    })?;
    Ok([0, 1].map(|i| c.slice_dim(made[i], 2, 0, a.queries, 1)))
}

fn attend_at_once(
    c: &Ctx,
    a: &Attention,
    [q, k, v]: [Value; 3],
    how: Scores,
    drop: impl FnOnce(&Attention, Value) -> Value,
) -> Result<[Value; 2]> {
    let scores = a.scores(c, [q, k], how, a.scale(c, how.scale))?;
    let highest = c.reduce_max_of_numbers(scores, &[3]);
    let infinite = c.eq(highest, c.like(highest, f64::NEG_INFINITY));
    let highest = c.select(infinite, c.zeros_like(highest), highest);
    let exp = c.exponential(c.subtract(scores, a.by_row(c, highest)));
    let sum = c.reduce_sum(exp, &[3]);
    let empty = c.eq(sum, c.zeros_like(sum));
    let divisor = c.select(empty, c.ones_like(sum), sum);
    let p = drop(a, c.divide(exp, a.by_row(c, divisor)));
    let output = c.to(a.times(c, p, v), a.dtype);
    // An infinite logsumexp turns every probability of an empty row into zero again in the backward.
    let logsumexp = c.add(c.log(divisor), highest);
    let logsumexp = c.select(empty, c.like(logsumexp, f64::INFINITY), logsumexp);
    Ok([output, logsumexp])
}

/// What is added to scores where some keys are not in use: nothing if no query in use sees them.
fn unused_keys(c: &Ctx, a: &Attention, used: &[Option<Value>], causal: bool) -> Option<Value> {
    let &[queries, Some(keys)] = used else { return None };
    if causal && queries == Some(keys) {
        return None; // as many queries as keys, and none sees what is behind it
    }
    let shape = [1, 1, 1, a.keys];
    let mask = c.reshape(keys, &shape);
    let zero = c.full(c.scalar_f64(a.acc, 0.0), &shape);
    Some(c.select(mask, zero, c.like(zero, f64::NEG_INFINITY)))
}

/// The forward, left open in an outline if the library may do it.
fn deferred_forward(
    c: &Ctx,
    a: &Attention,
    [q, k, v]: [Value; 3],
    causal: bool,
    scale: Option<Value>,
) -> Option<[Value; 2]> {
    if !a.may_be_deferred(c) {
        return None;
    }
    let axes =
        Attention::axes(&["bhqe", "bgke", "bgkf", ""][..3 + usize::from(scale.is_some())], &["bhqf", "bhq"]);
    let operands: Vec<Value> = [q, k, v].into_iter().chain(scale).collect();
    let shape = [a.batch, a.heads, a.queries, a.value_width];
    let results = [TensorType::new(a.dtype, shape.as_slice()), TensorType::new(a.acc, &shape[..3])];
    let lower = move |c: &Ctx, x: &[Value], used: &[Option<Value>]| {
        let (qkv, scale) = ([x[0], x[1], x[2]], x.get(3).copied());
        let a = Attention::new(c, x[0], x[1], x[2])?;
        let bias = unused_keys(c, &a, used, causal);
        match attend_by_library(c, &a, qkv, bias, causal, scale) {
            Some(made) => Ok(made.into()),
            None => attend(c, &a, qkv, Scores { bias, causal, scale }, |_, p| p).map(Into::into),
        }
    };
    let made = c.deferred(format!("attention, causal: {causal}"), &operands, &results, axes, lower)?;
    made.try_into().ok()
}

#[allow(clippy::too_many_arguments)] // the schema's
fn backward(
    c: &Ctx,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    bias: Undefinable,
    mask: Vec<bool>,
    out: Value,
    logsumexp: Value,
    _cum_seq_q: Undefinable,
    _cum_seq_k: Undefinable,
    _max_q: i64,
    _max_k: i64,
    dropout: Rate,
    causal: bool,
    seed: Undefinable,
    offset: Undefinable,
    scale: Option<Scalar>,
) -> Result<Vec<Option<Value>>> {
    let &[want_q, want_k, want_v, want_bias] = mask.as_slice() else {
        return Err(runtime("grad_input_mask must have 4 entries"));
    };
    let a = Attention::new(c, q, k, v)?;
    a.check_results(c, [grad, out, logsumexp])?;
    let (tensors, scale) = ([grad, q, k, v, out, logsumexp], scale.map(|s| c.number(s, DType::F64)));
    if bias.0.is_none() && matches!(dropout, Rate::Zero) {
        let found = deferred_backward(c, &a, tensors, causal, scale);
        if let Some(mut gradients) =
            found.or_else(|| gradients_by_library(c, &a, tensors, None, causal, scale))
        {
            gradients.iter_mut().zip(&mask).for_each(|(g, wanted)| *g = g.filter(|_| *wanted));
            gradients.push(None);
            return Ok(gradients);
        }
    }
    let drawn = match (dropout, seed.0, offset.0) {
        (Rate::Zero, ..) => None,
        (Rate::Of(rate), Some(seed), Some(offset)) => Some((seed, offset, rate)),
        _ => return Err(runtime("the backward of attention with dropout needs its seed and offset")),
    };
    let drawn = drawn.map(|(seed, offset, rate)| {
        let words = [seed, offset].map(|w| c.reshape(w, &[1]));
        (c.bitcast_convert(c.concatenate(&words, 0), DType::U64), rate)
    });
    let factor = |a: &Attention| drawn.map(|(state, rate)| a.dropout(c, state, rate));
    let whole = want_bias && bias.0.is_some();
    let ([dq, dk, dv], ds) =
        gradients(c, &a, tensors, Scores { bias: bias.0, causal, scale }, whole, factor)?;
    Ok(vec![
        Some(dq).filter(|_| want_q),
        Some(dk).filter(|_| want_k),
        Some(dv).filter(|_| want_v),
        bias.0.zip(ds).filter(|_| whole).map(|(b, ds)| c.to(sum_to(c, ds, &c.shape(b)), c.dtype(b))),
    ])
}

/// The gradients of query, key and value by torch's own kernel, where that is worth it.
fn gradients_by_library(
    c: &Ctx,
    a: &Attention,
    tensors: [Value; 6],
    bias: Option<Value>,
    causal: bool,
    scale: Option<Value>,
) -> Option<Vec<Option<Value>>> {
    a.is_for_library(c).then(|| a.library_backward(c, tensors, bias, causal, scale))
}

/// The gradients of query, key, value, and, if all are wanted as a `whole`, of the scores before they were scaled. `factor`
/// gives what dropout multiplied with.
fn gradients(
    c: &Ctx,
    a: &Attention,
    [grad, q, k, v, out, logsumexp]: [Value; 6],
    how: Scores,
    whole: bool,
    factor: impl FnOnce(&Attention) -> Option<Value>,
) -> Result<([Value; 3], Option<Value>)> {
    // The barrier lets the scores be computed only once the gradient is there, so that none are kept from the forward.
    let [grad, k] = match c.config.target.recompute_scores {
        true => c.optimization_barrier(&[grad, k]).try_into().unwrap_or([grad, k]),
        false => [grad, k],
    };
    let round = |x: Value| c.to(x, a.dtype);
    let Some(rows) = a.rows_of_a_block(c).filter(|_| !whole) else {
        let [dq, dk, dv, ds] = gradients_at_once(c, a, [grad, q, k, v, out, logsumexp], how, factor)?;
        return Ok(([dq, dk, dv].map(round), Some(ds)));
    };
    let by_query = [grad, q, out, logsumexp].map(|x| a.padded(c, x, 2, rows));
    let bias = a.padded_bias(c, how.bias, rows);
    let zeros = |dtype, like: Value| c.full(c.scalar_f64(dtype, 0.0), &c.shape(like));
    let inits = [zeros(a.dtype, by_query[1]), zeros(a.acc, k), zeros(a.acc, v)];
    let made = a.in_blocks(c, rows, &inits, |a, start, held| {
        let [grad, q, out, logsumexp] = by_query.map(|x| a.part(c, x, 2, start));
        let how = Scores { bias: a.part_of_bias(c, bias, start), ..how };
        let [dq, dk, dv, _] = gradients_at_once(c, a, [grad, q, k, v, out, logsumexp], how, factor)?;
        let dq = c.dynamic_update_slice(held[0], round(dq), &starts(c, held[0], 2, start));
        Ok(vec![dq, c.add(held[1], c.to(dk, a.acc)), c.add(held[2], c.to(dv, a.acc))])
    })?;
    let dq = c.slice_dim(made[0], 2, 0, a.queries, 1);
    Ok(([dq, round(made[1]), round(made[2])], None))
}

/// As [`gradients`], not rounded to the dtype of the inputs.
fn gradients_at_once(
    c: &Ctx,
    a: &Attention,
    [grad, q, k, v, out, logsumexp]: [Value; 6],
    how: Scores,
    factor: impl FnOnce(&Attention) -> Option<Value>,
) -> Result<[Value; 4]> {
    let scale = a.scale(c, how.scale);
    let scores = a.scores(c, [q, k], how, scale)?;
    let p = c.exponential(c.subtract(scores, a.by_row(c, c.to(logsumexp, a.acc))));
    let factor = factor(a);
    let dropped = |x: Value| factor.map_or(x, |f| c.multiply(x, f));
    let grad = c.to(grad, a.dtype);
    // sum(p * dp) by row is the same as sum(out * grad), which is smaller.
    let products = c.multiply(c.to(out, a.acc), c.to(grad, a.acc));
    let mean = a.by_row(c, c.reduce_sum(products, &[3]));
    let dp = dropped(a.times_transposed(c, grad, v));
    let ds = c.multiply(p, c.subtract(dp, mean));
    let scaled = c.multiply(ds, c.full(scale, &a.scores_shape()));
    Ok([a.times(c, scaled, k), a.transposed_times(c, scaled, q), a.transposed_times(c, dropped(p), grad), ds])
}

/// The backward, left open in an outline if the library may do it.
fn deferred_backward(
    c: &Ctx,
    a: &Attention,
    tensors: [Value; 6],
    causal: bool,
    scale: Option<Value>,
) -> Option<Vec<Option<Value>>> {
    if !a.may_be_deferred(c) {
        return None;
    }
    let labels = ["bhqf", "bhqe", "bgke", "bgkf", "bhqf", "bhq", ""];
    let axes = Attention::axes(&labels[..6 + usize::from(scale.is_some())], &["bhqe", "bgke", "bgkf"]);
    let operands: Vec<Value> = tensors.into_iter().chain(scale).collect();
    let types = [tensors[1], tensors[2], tensors[3]].map(|x| c.ty(x));
    let lower = move |c: &Ctx, x: &[Value], used: &[Option<Value>]| {
        let &[grad, q, k, v, out, logsumexp, ref scale @ ..] = x else {
            return Err(runtime("the backward of attention takes six tensors"));
        };
        let (a, scale) = (Attention::new(c, q, k, v)?, scale.first().copied());
        let (tensors, bias) = ([grad, q, k, v, out, logsumexp], unused_keys(c, &a, used, causal));
        match gradients_by_library(c, &a, tensors, bias, causal, scale) {
            Some(made) => Ok(made.into_iter().flatten().collect()),
            None => {
                let how = Scores { bias, causal, scale };
                gradients(c, &a, tensors, how, false, |_| None).map(|(made, _)| made.into())
            }
        }
    };
    let name = format!("backward of attention, causal: {causal}");
    let made = c.deferred(name, &operands, &types, axes, lower)?;
    Some(made.into_iter().map(Some).collect())
}

fn div_ceil(x: i64, y: i64) -> i64 {
    (x + y - 1) / y
}

/// The start of a slice that begins at `start` of one dimension.
fn starts(c: &Ctx, x: Value, dim: i64, start: Value) -> Vec<Value> {
    (0..c.rank(x) as i64).map(|d| if d == dim { start } else { c.scalar_i64(DType::S32, 0) }).collect()
}

/// Sums over the dimensions that `shape` was expanded in.
fn sum_to(c: &Ctx, x: Value, shape: &[i64]) -> Value {
    let from = c.shape(x);
    let new = from.len() - shape.len();
    let stretched = |&d: &usize| d < new || shape[d - new] == 1 && from[d] != 1;
    let dims: Dims = (0..from.len()).filter(stretched).map(|d| d as i64).collect();
    c.reshape(c.reduce_sum(x, &dims), shape)
}
