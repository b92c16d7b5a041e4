use super::activations::normal_cdf;
use super::matmul::{accumulator, contract, matmul};
use super::softmax::{expand_mask, softmax_of};
use crate::args::{Scalar, Tensor};
use crate::context::Ctx;
use crate::error::{Result, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, Dims, DotDims, Value};

/// The rows of this family: what `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call in evaluation.
pub static ROWS: &[Row] = &[
    op!("_native_multi_head_attention", multi_head_attention).products(),
    op!("_transformer_encoder_layer_fwd", encoder_layer).products(),
    op!("_transform_bias_rescale_qkv", transform_bias_rescale_qkv).products(),
];

/// `x @ weight.T + bias`, rounded once.
fn linear(c: &Ctx, x: Value, weight: Value, bias: Option<Value>) -> Value {
    let last = c.rank(x) as i64 - 1;
    let mut y = contract(c, x, weight, DotDims::new(&[], &[], &[last], &[1]));
    if let Some(bias) = bias {
        let shape = c.shape(y);
        y = c.add(y, c.broadcast_in_dim(c.to(bias, c.dtype(y)), &shape, &[last]));
    }
    c.to(y, c.dtype(x))
}

/// Projection weights and sizes of a multi-head attention.
struct Heads {
    weight: Value,
    bias: Value,
    out_weight: Value,
    out_bias: Value,
    width: i64,
    count: i64,
}

impl Heads {
    fn check(&self, c: &Ctx, inputs: [(&str, Value); 3]) -> Result<()> {
        for (name, x) in inputs {
            if c.rank(x) != 3 {
                return Err(runtime(format!("expected 3-D `{name}`, got {}-D tensor", c.rank(x))));
            }
        }
        let [query, key, value] = inputs.map(|(_, x)| c.shape(x));
        let d = self.width;
        if query[2] != d {
            let text = format!("passed-in embed_dim {d} didn't match last dim of query {}", query[2]);
            return Err(runtime(text));
        }
        if query != key || key != value {
            return Err(runtime("expected `query`/`key`/`value` shapes to match"));
        }
        if c.shape(self.weight).as_slice() != [3 * d, d] || c.shape(self.bias).as_slice() != [3 * d] {
            return Err(runtime("expected `qkv_weight` of shape [3 * embed_dim, embed_dim] and its bias"));
        }
        if self.count <= 0 || d % self.count != 0 {
            return Err(runtime("`embed_dim` must divide evenly by `num_heads`"));
        }
        Ok(())
    }

    /// Query, key and value side by side: `[batch, length, 3 * width]`.
    fn project(&self, c: &Ctx, [query, key, value]: [Value; 3]) -> Value {
        if query == key && key == value {
            return linear(c, query, self.weight, None);
        }
        let part = |x: Value, i: i64| {
            linear(c, x, c.slice_dim(self.weight, 0, i * self.width, (i + 1) * self.width, 1), None)
        };
        c.concatenate(&[part(query, 0), part(key, 1), part(value, 2)], 2)
    }

    /// The attention's output and its probabilities, one matrix for each head.
    fn attend(
        &self,
        c: &Ctx,
        inputs: [Value; 3],
        mask: Option<Tensor>,
        mask_type: Option<i64>,
    ) -> Result<(Value, Value)> {
        let shape = c.shape(inputs[0]);
        let (q, k, v) = transform_bias_rescale_qkv(c, self.project(c, inputs), self.bias, self.count)?;
        let mut scores = matmul(c, q, c.transpose_last2(k));
        if let Some(mask) = mask {
            let mask = Tensor { value: c.to(mask.value, DType::Pred), dtype: DType::Pred, ..mask };
            let mask = expand_mask(c, &c.shape(scores), mask, mask_type)?;
            scores = c.select(mask, c.like(scores, f64::NEG_INFINITY), scores);
        }
        let p = c.to(softmax_of(c, scores, &[3]), c.dtype(q));
        let context = c.to(matmul(c, p, v), c.dtype(q));
        let joined = c.reshape(c.transpose(context, &[0, 2, 1, 3]), &shape);
        Ok((linear(c, joined, self.out_weight, Some(self.out_bias)), p))
    }
}

#[allow(clippy::too_many_arguments)] // the schema's
fn multi_head_attention(
    c: &Ctx,
    query: Value,
    key: Value,
    value: Value,
    width: i64,
    count: i64,
    weight: Value,
    bias: Value,
    out_weight: Value,
    out_bias: Value,
    mask: Option<Tensor>,
    need_weights: bool,
    average_weights: bool,
    mask_type: Option<i64>,
) -> Result<(Option<Value>, Option<Value>)> {
    let heads = Heads { weight, bias, out_weight, out_bias, width, count };
    heads.check(c, [("query", query), ("key", key), ("value", value)])?;
    if c.numel(query) == 0 {
        return Ok((Some(query), None));
    }
    let (out, p) = heads.attend(c, [query, key, value], mask, mask_type)?;
    let average = || {
        let sum = c.reduce_sum(c.to(p, accumulator(c.dtype(p))), &[1]);
        c.to(c.divide(sum, c.like(sum, count as f64)), c.dtype(p))
    };
    let weights = if average_weights { average() } else { p };
    Ok((Some(out), need_weights.then_some(weights)))
}

/// Normalises the last dimension.
fn layer_norm(c: &Ctx, x: Value, eps: Scalar, weight: Value, bias: Value) -> Value {
    let (dtype, shape) = (c.dtype(x), c.shape(x));
    let x = c.to(x, accumulator(dtype));
    let last = [shape.len() as i64 - 1];
    let leading: Dims = (0..last[0]).collect();
    let wide = |v: Value| c.broadcast_in_dim(v, &shape, &leading);
    let along = |v: Value| c.broadcast_in_dim(c.to(v, c.dtype(x)), &shape, &last);
    let mean = |v: Value| {
        let sum = c.reduce_sum(v, &last);
        c.divide(sum, c.like(sum, shape[last[0] as usize] as f64))
    };
    let centered = c.subtract(x, wide(mean(x)));
    let variance = mean(c.multiply(centered, centered));
    let eps = c.number_like(eps, c.dtype(x), &c.shape(variance));
    let normal = c.multiply(centered, wide(c.rsqrt(c.add(variance, eps))));
    c.to(c.add(c.multiply(normal, along(weight)), along(bias)), dtype)
}

/// Self-attention and two linear layers, each with a residual and a norm before or after it.
#[allow(clippy::too_many_arguments)] // the schema's
fn encoder_layer(
    c: &Ctx,
    src: Value,
    width: i64,
    count: i64,
    weight: Value,
    bias: Value,
    out_weight: Value,
    out_bias: Value,
    use_gelu: bool,
    norm_first: bool,
    eps: Scalar,
    norm_weight_1: Value,
    norm_bias_1: Value,
    norm_weight_2: Value,
    norm_bias_2: Value,
    ffn_weight_1: Value,
    ffn_bias_1: Value,
    ffn_weight_2: Value,
    ffn_bias_2: Value,
    mask: Option<Tensor>,
    mask_type: Option<i64>,
) -> Result<Value> {
    if c.numel(src) == 0 {
        return Ok(src);
    }
    let [first, second] = [ffn_weight_1, ffn_weight_2].map(|w| c.shape(w));
    let fits =
        matches!((&first[..], &second[..]), (&[n, from], &[to, m]) if n == m && from == width && to == width);
    if !fits || c.shape(ffn_bias_1)[..] != first[..1] || c.shape(ffn_bias_2)[..] != second[..1] {
        return Err(runtime(format!(
            "expected linear layers from {width} features and back to them, with a bias each, but got weights of shape \
             {first:?} and {second:?}"
        )));
    }
    let heads = Heads { weight, bias, out_weight, out_bias, width, count };
    let attention = |x: Value| {
        heads.check(c, [("query", x), ("key", x), ("value", x)])?;
        heads.attend(c, [x, x, x], mask, mask_type).map(|(out, _)| out)
    };
    let feed = |x: Value| {
        let y = linear(c, x, ffn_weight_1, Some(ffn_bias_1));
        let y = if use_gelu {
            c.in_opmath(y, |y| c.multiply(y, normal_cdf(c, y)))
        } else {
            c.maximum(y, c.zeros_like(y))
        };
        linear(c, y, ffn_weight_2, Some(ffn_bias_2))
    };
    let norm_1 = |x: Value| layer_norm(c, x, eps, norm_weight_1, norm_bias_1);
    let norm_2 = |x: Value| layer_norm(c, x, eps, norm_weight_2, norm_bias_2);
    if norm_first {
        let x = c.add(attention(norm_1(src))?, src);
        return Ok(c.add(feed(norm_2(x)), x));
    }
    let x = norm_1(c.add(attention(src)?, src));
    Ok(norm_2(c.add(feed(x), x)))
}

/// `[b, t, 3 * d]` plus bias to query (scaled), key and value, each `[b, heads, t, d / heads]`.
fn transform_bias_rescale_qkv(c: &Ctx, qkv: Value, bias: Value, heads: i64) -> Result<(Value, Value, Value)> {
    let &[b, t, total] = c.shape(qkv).as_slice() else {
        return Err(runtime(format!("expected 3-D `qkv`, got {}-D tensor", c.rank(qkv))));
    };
    let d = total / 3;
    if heads <= 0 || d % heads != 0 || d * 3 != total {
        return Err(runtime(format!("num_head {heads} does not divide {d}")));
    }
    let dtype = c.dtype(qkv);
    let acc = accumulator(dtype);
    let sum = c.add(c.to(qkv, acc), c.to(c.expand(bias, &[b, t, total])?, acc));
    let split = c.transpose(c.reshape(sum, &[b, t, 3, heads, d / heads]), &[2, 0, 3, 1, 4]);
    let part = |i: i64| c.index_dim(split, 0, i);
    let query = part(0);
    let query = c.multiply(query, c.like(query, 1.0 / ((d / heads) as f64).sqrt()));
    Ok((c.to(query, dtype), c.to(part(1), dtype), c.to(part(2), dtype)))
}
