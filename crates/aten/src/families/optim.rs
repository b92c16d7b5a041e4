use crate::args::{Scalar, Tensor};
use crate::context::Ctx;
use crate::dtype::opmath;
use crate::error::{Result, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, Value};

/// The rows of this family. All of them overwrite: results are the new values of the written lists, one list after another.
pub static ROWS: &[Row] = &[
    op!("_fused_adam_", |c: &Ctx,
                         p: Vec<Tensor>,
                         g: Vec<Tensor>,
                         m: Vec<Tensor>,
                         v: Vec<Tensor>,
                         top: Vec<Tensor>,
                         steps: Vec<Tensor>,
                         lr: Scalar,
                         beta1: Scalar,
                         beta2: Scalar,
                         decay: Scalar,
                         eps: Scalar,
                         amsgrad: bool,
                         maximize: bool,
                         scale: Option<Tensor>,
                         inf: Option<Tensor>| {
        let numbers = Adam { lr: lr.value, beta1, beta2, decay, eps, decoupled: false };
        adam(c, &numbers, amsgrad, [p, g, m, v, top], &steps, &Common { maximize, scale, inf })
    }),
    op!("_fused_adam_.tensor_lr", |c: &Ctx,
                                   p: Vec<Tensor>,
                                   g: Vec<Tensor>,
                                   m: Vec<Tensor>,
                                   v: Vec<Tensor>,
                                   top: Vec<Tensor>,
                                   steps: Vec<Tensor>,
                                   lr: Value,
                                   beta1: Scalar,
                                   beta2: Scalar,
                                   decay: Scalar,
                                   eps: Scalar,
                                   amsgrad: bool,
                                   maximize: bool,
                                   scale: Option<Tensor>,
                                   inf: Option<Tensor>| {
        let numbers = Adam { lr, beta1, beta2, decay, eps, decoupled: false };
        adam(c, &numbers, amsgrad, [p, g, m, v, top], &steps, &Common { maximize, scale, inf })
    })
    .takes_host_tensor(),
    op!("_fused_adamw_", |c: &Ctx,
                          p: Vec<Tensor>,
                          g: Vec<Tensor>,
                          m: Vec<Tensor>,
                          v: Vec<Tensor>,
                          top: Vec<Tensor>,
                          steps: Vec<Tensor>,
                          lr: Scalar,
                          beta1: Scalar,
                          beta2: Scalar,
                          decay: Scalar,
                          eps: Scalar,
                          amsgrad: bool,
                          maximize: bool,
                          scale: Option<Tensor>,
                          inf: Option<Tensor>| {
        let numbers = Adam { lr: lr.value, beta1, beta2, decay, eps, decoupled: true };
        adam(c, &numbers, amsgrad, [p, g, m, v, top], &steps, &Common { maximize, scale, inf })
    }),
    op!("_fused_adamw_.tensor_lr", |c: &Ctx,
                                    p: Vec<Tensor>,
                                    g: Vec<Tensor>,
                                    m: Vec<Tensor>,
                                    v: Vec<Tensor>,
                                    top: Vec<Tensor>,
                                    steps: Vec<Tensor>,
                                    lr: Value,
                                    beta1: Scalar,
                                    beta2: Scalar,
                                    decay: Scalar,
                                    eps: Scalar,
                                    amsgrad: bool,
                                    maximize: bool,
                                    scale: Option<Tensor>,
                                    inf: Option<Tensor>| {
        let numbers = Adam { lr, beta1, beta2, decay, eps, decoupled: true };
        adam(c, &numbers, amsgrad, [p, g, m, v, top], &steps, &Common { maximize, scale, inf })
    })
    .takes_host_tensor(),
    op!("_fused_sgd_", |c: &Ctx,
                        p: Vec<Tensor>,
                        g: Vec<Tensor>,
                        momenta: Vec<Tensor>,
                        decay: Scalar,
                        momentum: Scalar,
                        lr: Scalar,
                        dampening: Scalar,
                        nesterov: bool,
                        maximize: bool,
                        first: bool,
                        scale: Option<Tensor>,
                        inf: Option<Tensor>| {
        let numbers = Sgd { lr: lr.value, decay, momentum, dampening, nesterov, first };
        sgd(c, &numbers, [p, g, momenta], &Common { maximize, scale, inf })
    }),
    op!("_fused_sgd_.tensor_lr", |c: &Ctx,
                                  p: Vec<Tensor>,
                                  g: Vec<Tensor>,
                                  momenta: Vec<Tensor>,
                                  decay: Scalar,
                                  momentum: Scalar,
                                  lr: Value,
                                  dampening: Scalar,
                                  nesterov: bool,
                                  maximize: bool,
                                  first: bool,
                                  scale: Option<Tensor>,
                                  inf: Option<Tensor>| {
        let numbers = Sgd { lr, decay, momentum, dampening, nesterov, first };
        sgd(c, &numbers, [p, g, momenta], &Common { maximize, scale, inf })
    })
    .takes_host_tensor(),
    op!("_fused_adagrad_", |c: &Ctx,
                            p: Vec<Tensor>,
                            g: Vec<Tensor>,
                            sums: Vec<Tensor>,
                            steps: Vec<Tensor>,
                            lr: Scalar,
                            lr_decay: Scalar,
                            decay: Scalar,
                            eps: Scalar,
                            maximize: bool,
                            scale: Option<Tensor>,
                            inf: Option<Tensor>| {
        let kept: Vec<Value> = steps.iter().map(|t| t.value).collect();
        let numbers = Adagrad { lr: lr.value, lr_decay, decay, eps };
        let mut out = adagrad(c, &numbers, [p, g, sums], &steps, &Common { maximize, scale, inf })?;
        out.extend(kept);
        Ok::<_, crate::Error>(out)
    }),
    op!("_fused_adagrad_.tensor_lr", |c: &Ctx,
                                      p: Vec<Tensor>,
                                      g: Vec<Tensor>,
                                      sums: Vec<Tensor>,
                                      steps: Vec<Tensor>,
                                      lr: Value,
                                      lr_decay: Scalar,
                                      decay: Scalar,
                                      eps: Scalar,
                                      maximize: bool,
                                      scale: Option<Tensor>,
                                      inf: Option<Tensor>| {
        let numbers = Adagrad { lr, lr_decay, decay, eps };
        adagrad(c, &numbers, [p, g, sums], &steps, &Common { maximize, scale, inf })
    })
    .takes_host_tensor(),
    op!("_amp_foreach_non_finite_check_and_unscale_", unscale),
    op!("_amp_update_scale_", update_scale),
];

/// What all fused optimizers share.
struct Common {
    maximize: bool,
    /// The gradients are multiplied by this one; they are divided and written back.
    scale: Option<Tensor>,
    /// 1 if some gradient is not finite: then nothing is updated.
    inf: Option<Tensor>,
}

/// The numbers of one parameter's update, spread to its shape in its opmath dtype.
struct Update<'a, 'b> {
    c: &'a Ctx<'b>,
    dtype: DType,
    high: DType,
    shape: oxitorch_hlo::Dims,
}

impl<'a, 'b> Update<'a, 'b> {
    fn new(c: &'a Ctx<'b>, param: Tensor) -> Self {
        Update { c, dtype: param.dtype, high: opmath(param.dtype), shape: c.shape(param.value) }
    }

    /// A tensor in opmath.
    fn up(&self, t: Tensor) -> Value {
        self.c.to(t.value, self.high)
    }

    /// A number, computed in float64, rounded to opmath and spread.
    fn spread(&self, x: Value) -> Value {
        let scalar = self.c.reshape(self.c.to(x, self.high), &[]);
        self.c.full(scalar, &self.shape)
    }

    fn number(&self, s: Scalar) -> Value {
        self.spread(s.value)
    }

    /// The new value in the dtype of the old one, which stays where a gradient was not finite.
    fn down(&self, common: &Common, old: Tensor, new: Value) -> Value {
        let new = self.c.to(new, old.dtype);
        match common.inf {
            None => new,
            Some(inf) => {
                let found = self.c.reshape(self.c.to(inf.value, DType::Pred), &[]);
                self.c.select(self.c.full(found, &self.c.shape(old.value)), old.value, new)
            }
        }
    }

    /// The gradient as written back, and as used.
    fn gradient(&self, common: &Common, g: Tensor) -> (Value, Value) {
        let mut v = self.up(g);
        let mut kept = g.value;
        if let Some(scale) = common.scale {
            v = self.c.divide(v, self.spread(scale.value));
            kept = self.down(common, g, v);
        }
        (kept, if common.maximize { self.c.negate(v) } else { v })
    }
}

/// A 0-d float64 value of a number or of a one-element tensor.
fn f64_of(c: &Ctx, x: Value) -> Value {
    c.reshape(c.to(x, DType::F64), &[])
}

fn one(c: &Ctx) -> Value {
    c.scalar_f64(DType::F64, 1.0)
}

fn same_length(lists: &[&[Tensor]]) -> Result<()> {
    if lists.windows(2).all(|w| w[0].len() == w[1].len()) {
        return Ok(());
    }
    Err(runtime("Tensor lists must have the same number of tensors"))
}

fn concat<const N: usize>(lists: [Vec<Value>; N]) -> Vec<Value> {
    lists.into_iter().flatten().collect()
}

struct Adam {
    lr: Value,
    beta1: Scalar,
    beta2: Scalar,
    decay: Scalar,
    eps: Scalar,
    /// Weight decay acts on the weight (AdamW) rather than on the gradient.
    decoupled: bool,
}

/// Lists: parameters, gradients, first and second moments, largest second moments.
fn adam(
    c: &Ctx,
    n: &Adam,
    amsgrad: bool,
    lists: [Vec<Tensor>; 5],
    steps: &[Tensor],
    common: &Common,
) -> Result<Vec<Value>> {
    let [p, g, m, v, top] = &lists;
    same_length(&[p, g, m, v, steps])?;
    if amsgrad {
        same_length(&[p, top])?;
    }
    let mut out: [Vec<Value>; 5] = Default::default();
    for i in 0..p.len() {
        let u = Update::new(c, p[i]);
        let (kept, mut grad) = u.gradient(common, g[i]);
        let mut param = u.up(p[i]);
        let decay = u.number(n.decay);
        if n.decoupled {
            param = c.subtract(param, c.multiply(c.multiply(u.spread(n.lr), decay), param));
        } else {
            grad = c.add(grad, c.multiply(param, decay));
        }
        let keep1 = u.spread(c.subtract(one(c), f64_of(c, n.beta1.value)));
        let keep2 = u.spread(c.subtract(one(c), f64_of(c, n.beta2.value)));
        let first = u.up(m[i]);
        let first = c.add(first, c.multiply(keep1, c.subtract(grad, first)));
        let second =
            c.add(c.multiply(u.up(v[i]), u.number(n.beta2)), c.multiply(keep2, c.multiply(grad, grad)));

        let step = f64_of(c, steps[i].value);
        let correction = |beta: Scalar| c.subtract(one(c), c.power(f64_of(c, beta.value), step));
        let rate = u.spread(c.divide(f64_of(c, n.lr), correction(n.beta1)));
        let root = u.spread(c.sqrt(correction(n.beta2)));
        let mut largest = second;
        if amsgrad {
            largest = c.maximum(u.up(top[i]), second);
            out[4].push(u.down(common, top[i], largest));
        }
        let denominator = c.add(c.divide(c.sqrt(largest), root), u.number(n.eps));
        param = c.subtract(param, c.divide(c.multiply(rate, first), denominator));

        out[0].push(u.down(common, p[i], param));
        out[1].push(kept);
        out[2].push(u.down(common, m[i], first));
        out[3].push(u.down(common, v[i], second));
    }
    if !amsgrad {
        out[4] = top.iter().map(|t| t.value).collect();
    }
    Ok(concat(out))
}

struct Sgd {
    lr: Value,
    decay: Scalar,
    momentum: Scalar,
    dampening: Scalar,
    nesterov: bool,
    first: bool,
}

/// Lists: parameters, gradients, momentum buffers (none without momentum).
fn sgd(c: &Ctx, n: &Sgd, lists: [Vec<Tensor>; 3], common: &Common) -> Result<Vec<Value>> {
    let [p, g, buffers] = &lists;
    same_length(&[p, g])?;
    if !buffers.is_empty() {
        same_length(&[p, buffers])?;
    }
    let mut out: [Vec<Value>; 3] = Default::default();
    for i in 0..p.len() {
        let u = Update::new(c, p[i]);
        let (kept, grad) = u.gradient(common, g[i]);
        let param = u.up(p[i]);
        let mut grad = c.add(grad, c.multiply(param, u.number(n.decay)));
        if let Some(&buffer) = buffers.get(i) {
            let momentum = u.number(n.momentum);
            let new = if n.first {
                grad
            } else {
                let keep = u.spread(c.subtract(one(c), f64_of(c, n.dampening.value)));
                c.add(c.multiply(u.up(buffer), momentum), c.multiply(grad, keep))
            };
            grad = if n.nesterov { c.add(grad, c.multiply(new, momentum)) } else { new };
            out[2].push(u.down(common, buffer, new));
        }
        out[0].push(u.down(common, p[i], c.subtract(param, c.multiply(u.spread(n.lr), grad))));
        out[1].push(kept);
    }
    Ok(concat(out))
}

struct Adagrad {
    lr: Value,
    lr_decay: Scalar,
    decay: Scalar,
    eps: Scalar,
}

/// Lists: parameters, gradients, sums of squares.
fn adagrad(
    c: &Ctx,
    n: &Adagrad,
    lists: [Vec<Tensor>; 3],
    steps: &[Tensor],
    common: &Common,
) -> Result<Vec<Value>> {
    let [p, g, sums] = &lists;
    same_length(&[p, g, sums, steps])?;
    let mut out: [Vec<Value>; 3] = Default::default();
    for i in 0..p.len() {
        let u = Update::new(c, p[i]);
        let (kept, grad) = u.gradient(common, g[i]);
        let param = u.up(p[i]);
        let grad = c.add(grad, c.multiply(param, u.number(n.decay)));
        let age = c.subtract(f64_of(c, steps[i].value), one(c));
        let slowed = c.add(one(c), c.multiply(age, f64_of(c, n.lr_decay.value)));
        let rate = u.spread(c.divide(f64_of(c, n.lr), slowed));
        let sum = c.add(u.up(sums[i]), c.multiply(grad, grad));
        let denominator = c.add(c.sqrt(sum), u.number(n.eps));
        let param = c.subtract(param, c.divide(c.multiply(rate, grad), denominator));
        out[0].push(u.down(common, p[i], param));
        out[1].push(kept);
        out[2].push(u.down(common, sums[i], sum));
    }
    Ok(concat(out))
}

/// The gradients times the inverse scale; `found_inf` becomes 1 where one of them is not finite.
fn unscale(c: &Ctx, grads: Vec<Tensor>, found_inf: Tensor, inv_scale: Value) -> Result<Vec<Value>> {
    let mut out = Vec::new();
    let mut found = c.reshape(c.to(found_inf.value, DType::Pred), &[]);
    for g in grads {
        let u = Update::new(c, g);
        let v = u.up(g);
        found = c.or(found, c.any(c.not(c.is_finite(v))));
        let scale = u.spread(inv_scale);
        // A scale of 1 leaves infinities alone either way; the product is the same.
        out.push(c.to(c.multiply(v, scale), u.dtype));
    }
    let shape = c.shape(found_inf.value);
    out.push(c.reshape(c.to(found, found_inf.dtype), &shape));
    Ok(out)
}

/// The scale shrinks after an overflow and grows after `interval` steps without one. All three have one element, in any shape.
fn update_scale(
    c: &Ctx,
    scale: Tensor,
    tracker: Tensor,
    found_inf: Tensor,
    growth: Scalar,
    backoff: Scalar,
    interval: i64,
) -> (Value, Value) {
    let (scale, tracker) = (scale.value, tracker.value);
    let at = |v, x: Value| c.reshape(v, &c.shape(x));
    let found = at(c.to(found_inf.value, DType::Pred), scale);
    let times = |s| c.multiply(scale, c.number_like(s, c.dtype(scale), &c.shape(scale)));
    let next = c.add(tracker, c.ones_like(tracker));
    let full = c.eq(next, c.like(tracker, interval as f64));
    let grown = times(growth);
    let grown = c.select(c.is_finite(grown), grown, scale);
    let kept = c.select(at(full, scale), grown, scale);
    let zero = c.zeros_like(tracker);
    let new_scale = c.select(found, times(backoff), kept);
    let new_tracker = c.select(at(found, tracker), zero, c.select(full, zero, next));
    (new_scale, new_tracker)
}
