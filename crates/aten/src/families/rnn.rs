use crate::context::Ctx;
use crate::dtype::{opmath, scalar_name, shape_text};
use crate::error::{Result, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, Value};

/// The rows of this family. Layers and sequences are composites over these cells; what a workspace holds is known to
/// the cell and its backward alone.
pub static ROWS: &[Row] = &[
    op!("_thnn_fused_lstm_cell", lstm_cell),
    op!("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward),
    op!("_thnn_fused_gru_cell", gru_cell),
    op!("_thnn_fused_gru_cell_backward", gru_cell_backward),
];

/// A batch of states, and the dtype that their arithmetic is done in.
struct Cell {
    batch: i64,
    hidden: i64,
    dtype: DType,
    acc: DType,
}

impl Cell {
    /// From a state `[batch, hidden]` and the tensors that must hold `gates` times as much.
    fn new(c: &Ctx, name: &str, state: Value, gates: i64, wide: &[Value]) -> Result<Cell> {
        let &[batch, hidden] = c.shape(state).as_slice() else {
            return Err(runtime(format!(
                "{name}: expected a 2-D state, got {}",
                shape_text(&c.shape(state))
            )));
        };
        let dtype = c.dtype(state);
        for &v in wide {
            if c.shape(v).as_slice() != [batch, gates * hidden] {
                return Err(runtime(format!(
                    "{name}: expected gates of shape [{batch}, {}], got {}",
                    gates * hidden,
                    shape_text(&c.shape(v))
                )));
            }
            if c.dtype(v) != dtype {
                let (a, b) = (scalar_name(dtype), scalar_name(c.dtype(v)));
                return Err(runtime(format!("{name}: expected gates of type {a}, got {b}")));
            }
        }
        Ok(Cell { batch, hidden, dtype, acc: opmath(dtype) })
    }

    fn wide(&self, c: &Ctx, x: Value) -> Value {
        c.to(x, self.acc)
    }

    fn round(&self, c: &Ctx, x: Value) -> Value {
        c.to(x, self.dtype)
    }

    /// Gates plus a bias that every sample shares.
    fn biased(&self, c: &Ctx, gates: Value, bias: Option<Value>) -> Result<Value> {
        let gates = self.wide(c, gates);
        let Some(bias) = bias else { return Ok(gates) };
        Ok(c.add(gates, c.expand(self.wide(c, bias), &c.shape(gates))?))
    }

    /// Gate number `i` of tensors that hold several side by side.
    fn gate(&self, c: &Ctx, gates: Value, i: i64) -> Value {
        c.slice(gates, &[0, i * self.hidden], &[self.batch, (i + 1) * self.hidden], &[1, 1])
    }

    /// The gradient of a bias: the sum over the batch.
    fn bias_gradient(&self, c: &Ctx, gates: Value, has_bias: bool) -> Option<Value> {
        has_bias.then(|| self.round(c, c.reduce_sum(gates, &[0])))
    }
}

fn one_minus(c: &Ctx, x: Value) -> Value {
    c.subtract(c.ones_like(x), x)
}

/// The derivative of the logistic function, from its value.
fn sigmoid_slope(c: &Ctx, y: Value) -> Value {
    c.multiply(y, one_minus(c, y))
}

/// The derivative of tanh, from its value.
fn tanh_slope(c: &Ctx, y: Value) -> Value {
    one_minus(c, c.multiply(y, y))
}

fn lstm_cell(
    c: &Ctx,
    input_gates: Value,
    hidden_gates: Value,
    cx: Value,
    input_bias: Option<Value>,
    hidden_bias: Option<Value>,
) -> Result<(Value, Value, Value)> {
    let s = Cell::new(c, "_thnn_fused_lstm_cell", cx, 4, &[input_gates, hidden_gates])?;
    let gates = c.add(s.biased(c, input_gates, input_bias)?, s.biased(c, hidden_gates, hidden_bias)?);
    let [i, f, o] = [0, 1, 3].map(|k| c.logistic(s.gate(c, gates, k)));
    let g = c.tanh(s.gate(c, gates, 2));
    let cy = c.add(c.multiply(f, s.wide(c, cx)), c.multiply(i, g));
    let hy = c.multiply(o, c.tanh(cy));
    let workspace = c.concatenate(&[i, f, g, o], 1);
    Ok((s.round(c, hy), s.round(c, cy), s.round(c, workspace)))
}

fn lstm_cell_backward(
    c: &Ctx,
    grad_hy: Option<Value>,
    grad_cy: Option<Value>,
    cx: Value,
    cy: Value,
    workspace: Value,
    has_bias: bool,
) -> Result<(Option<Value>, Option<Value>, Option<Value>)> {
    if grad_hy.is_none() && grad_cy.is_none() {
        return Ok((None, None, None));
    }
    let s = Cell::new(c, "_thnn_fused_lstm_cell_backward", cx, 4, &[workspace])?;
    let gates = s.wide(c, workspace);
    let [i, f, g, o] = [0, 1, 2, 3].map(|k| s.gate(c, gates, k));
    let (cx, tanh_cy) = (s.wide(c, cx), c.tanh(s.wide(c, cy)));
    let zero = c.zeros_like(cx);
    let (dh, dc) = (grad_hy.map_or(zero, |v| s.wide(c, v)), grad_cy.map_or(zero, |v| s.wide(c, v)));
    let dc = c.add(c.multiply(c.multiply(dh, o), tanh_slope(c, tanh_cy)), dc);
    let di = c.multiply(c.multiply(dc, g), sigmoid_slope(c, i));
    let df = c.multiply(c.multiply(dc, cx), sigmoid_slope(c, f));
    let dg = c.multiply(c.multiply(dc, i), tanh_slope(c, g));
    let d_o = c.multiply(c.multiply(dh, tanh_cy), sigmoid_slope(c, o));
    let d_gates = c.concatenate(&[di, df, dg, d_o], 1);
    let d_cx = c.multiply(dc, f);
    Ok((Some(s.round(c, d_gates)), Some(s.round(c, d_cx)), s.bias_gradient(c, d_gates, has_bias)))
}

/// Gates side by side: reset, update, new. The workspace holds their values, the state, and the hidden part of new.
fn gru_cell(
    c: &Ctx,
    input_gates: Value,
    hidden_gates: Value,
    hx: Value,
    input_bias: Option<Value>,
    hidden_bias: Option<Value>,
) -> Result<(Value, Value)> {
    let s = Cell::new(c, "_thnn_fused_gru_cell", hx, 3, &[input_gates, hidden_gates])?;
    let input = s.biased(c, input_gates, input_bias)?;
    let hidden = s.biased(c, hidden_gates, hidden_bias)?;
    let both = |k: i64| c.add(s.gate(c, input, k), s.gate(c, hidden, k));
    let (reset, update) = (c.logistic(both(0)), c.logistic(both(1)));
    let hidden_new = s.gate(c, hidden, 2);
    let new = c.tanh(c.add(s.gate(c, input, 2), c.multiply(reset, hidden_new)));
    let hx = s.wide(c, hx);
    let hy = c.add(new, c.multiply(update, c.subtract(hx, new)));
    let workspace = c.concatenate(&[reset, update, new, hx, hidden_new], 1);
    Ok((s.round(c, hy), s.round(c, workspace)))
}

fn gru_cell_backward(
    c: &Ctx,
    grad_hy: Value,
    workspace: Value,
    has_bias: bool,
) -> Result<Vec<Option<Value>>> {
    let s = Cell::new(c, "_thnn_fused_gru_cell_backward", grad_hy, 5, &[workspace])?;
    let saved = s.wide(c, workspace);
    let [reset, update, new, hx, hidden_new] = [0, 1, 2, 3, 4].map(|k| s.gate(c, saved, k));
    let grad = s.wide(c, grad_hy);
    let d_new = c.multiply(c.multiply(grad, one_minus(c, update)), tanh_slope(c, new));
    let d_update = c.multiply(c.multiply(grad, c.subtract(hx, new)), sigmoid_slope(c, update));
    let d_reset = c.multiply(c.multiply(d_new, hidden_new), sigmoid_slope(c, reset));
    let d_input = c.concatenate(&[d_reset, d_update, d_new], 1);
    let d_hidden = c.concatenate(&[d_reset, d_update, c.multiply(d_new, reset)], 1);
    Ok(vec![
        Some(s.round(c, d_input)),
        Some(s.round(c, d_hidden)),
        Some(s.round(c, c.multiply(grad, update))),
        s.bias_gradient(c, d_input, has_bias),
        s.bias_gradient(c, d_hidden, has_bias),
    ])
}
