//! Recurrent layers: one direction of one layer as a loop over its steps.
//!
//! What does not depend on the states is no part of the loop: the products of all inputs with their weights come in as
//! `gates`, and the gradients of weights are products of what the loop of the backward leaves.
//! Each step of the forward saves its derivatives, so that a step of the backward only multiplies them with gradients.
//!
//! Sequences are `[steps, batch, ..]`. Packed ones (of `pack_sequence`, with the number of samples of each step) are
//! `[rows, ..]`, and a step takes `batch` rows from its first on; those that belong to the next steps are left alone.
//! What is made of them has `batch` rows more, so that the last step has as many.
//! There may be more rows and steps than the samples have: the loop goes over the steps that have any, and rows behind
//! theirs are zero in all that is made. So one program serves all lengths up to that of the padded batch.

use super::matmul::compiled;
use crate::context::Ctx;
use crate::dtype::{opmath, scalar_name, shape_text};
use crate::error::{Result, runtime};
use crate::op;
use crate::row::Row;
use oxitorch_hlo::{DType, Dims, DotDims, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("oxitorch::_rnn_layer", layer).products(),
    op!("oxitorch::_rnn_layer_backward", layer_backward).products(),
];

/// What a step computes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cell {
    Lstm,
    Gru,
    Tanh,
    Relu,
}

impl Cell {
    /// By the name of PyTorch's function for the whole net.
    fn named(name: &str) -> Result<Cell> {
        match name {
            "lstm" => Ok(Cell::Lstm),
            "gru" => Ok(Cell::Gru),
            "rnn_tanh" => Ok(Cell::Tanh),
            "rnn_relu" => Ok(Cell::Relu),
            _ => Err(runtime(format!("_rnn_layer: expected lstm, gru, rnn_tanh or rnn_relu, got {name}"))),
        }
    }

    /// How many gates lie side by side.
    fn gates(self) -> i64 {
        match self {
            Cell::Lstm => 4,
            Cell::Gru => 3,
            Cell::Tanh | Cell::Relu => 1,
        }
    }

    /// How many derivatives a step saves.
    fn derivatives(self) -> i64 {
        match self {
            Cell::Lstm => 6,
            Cell::Gru => 5,
            Cell::Tanh | Cell::Relu => 1,
        }
    }
}

/// The steps of a layer, and how its sequences lie in memory.
pub(super) struct Steps<'a, 'b> {
    c: &'a Ctx<'b>,
    count: i64,
    batch: i64,
    /// The number of samples of each step, s32 `[count]`, and how many rows there are.
    packed: Option<(Value, i64)>,
    reverse: bool,
}

/// One step.
pub(super) struct Step {
    pub number: Value,
    /// Its number, or the first of its rows.
    start: Value,
    /// Which samples have this step, pred `[batch]`; none if all have.
    live: Option<Value>,
}

impl<'a, 'b> Steps<'a, 'b> {
    /// Of sequences with these leading dimensions: steps and batch, or rows.
    pub(super) fn new(
        c: &'a Ctx<'b>,
        leading: &[i64],
        batch: i64,
        batch_sizes: Option<Value>,
        reverse: bool,
    ) -> Result<Self> {
        let fits = match (batch_sizes, leading) {
            (None, &[count, n]) if n == batch => Some((count, None)),
            (Some(sizes), &[rows]) if c.rank(sizes) == 1 => {
                Some((c.numel(sizes), Some((c.to(sizes, DType::S32), rows))))
            }
            _ => None,
        };
        let text = || {
            format!(
                "_rnn_layer: sequences of {} and states of {batch} samples do not fit",
                shape_text(leading)
            )
        };
        let (count, packed) = fits.ok_or_else(|| runtime(text()))?;
        Ok(Steps { c, count, batch, packed, reverse })
    }

    pub(super) fn number(&self, n: i64) -> Value {
        self.c.scalar_i64(DType::S32, n)
    }

    /// Runs `body` for each step in its turn, on values that it gives back.
    pub(super) fn run(
        &self,
        inits: &[Value],
        body: impl FnOnce(&Step, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let (c, zero, one) = (self.c, self.number(0), self.number(1));
        let place = |limit: Value, i: Value| {
            if self.reverse { c.subtract(c.subtract(limit, one), i) } else { i }
        };
        let Some((sizes, _)) = self.packed else {
            let limit = self.number(self.count);
            return c.for_loop(zero, limit, inits, |_, i, s| {
                let number = place(limit, i);
                body(&Step { number, start: number, live: None }, s)
            });
        };
        let limit = c.reduce_sum(c.to(c.gt(sizes, c.zeros_like(sizes)), DType::S32), &[0]);
        // The first row behind those of the steps so far, or, backwards, the first of these.
        let edge = if self.reverse { c.reduce_sum(sizes, &[0]) } else { zero };
        let all: Vec<Value> = [edge].iter().chain(inits).copied().collect();
        let done = c.for_loop(zero, limit, &all, |_, i, s| {
            let number = place(limit, i);
            let size = c.reshape(c.dynamic_slice(sizes, &[number], &[1]), &[]);
            let (start, edge) = if self.reverse {
                let first = c.subtract(s[0], size);
                (first, first)
            } else {
                (s[0], c.add(s[0], size))
            };
            let sample = c.iota(TensorType::new(DType::S32, [self.batch].as_slice()), 0);
            let live = c.lt(sample, c.full(size, &[self.batch]));
            [vec![edge], body(&Step { number, start, live: Some(live) }, &s[1..])].concat()
        });
        done[1..].to_vec()
    }

    /// Where a step's part of a sequence begins, `column` elements into its rows, and its sizes.
    fn part(&self, step: &Step, column: i64, width: i64) -> (Vec<Value>, Vec<i64>) {
        let (zero, column) = (self.number(0), self.number(column));
        match self.packed {
            None => (vec![step.start, zero, column], vec![1, self.batch, width]),
            Some(_) => (vec![step.start, column], vec![self.batch, width]),
        }
    }

    /// So many columns of a step, `[batch, width]`.
    fn columns(&self, x: Value, step: &Step, column: i64, width: i64) -> Value {
        let (start, sizes) = self.part(step, column, width);
        self.c.reshape(self.c.dynamic_slice(x, &start, &sizes), &[self.batch, width])
    }

    /// A step of a sequence, `[batch, width]`.
    pub(super) fn read(&self, x: Value, step: &Step) -> Value {
        let width = self.width(x);
        self.columns(x, step, 0, width)
    }

    /// The sequence with this as the step.
    pub(super) fn write(&self, x: Value, step: &Step, new: Value) -> Value {
        let (start, sizes) = self.part(step, 0, self.width(x));
        let new = match step.live {
            Some(_) => self.keep(step, new, self.read(x, step)),
            None => new,
        };
        self.c.overwrite(x, self.c.reshape(new, &sizes), &start)
    }

    /// `new` for the samples that have this step, `old` for the others.
    pub(super) fn keep(&self, step: &Step, new: Value, old: Value) -> Value {
        let Some(live) = step.live else { return new };
        self.c.select(self.c.broadcast_in_dim(live, &self.c.shape(new), &[0]), new, old)
    }

    fn width(&self, x: Value) -> i64 {
        self.c.shape(x).last().copied().unwrap_or(1)
    }

    /// A sequence of zeros.
    pub(super) fn zeros(&self, dtype: DType, width: i64) -> Value {
        let leading = match self.packed {
            None => vec![self.count, self.batch],
            Some((_, rows)) => vec![rows + self.batch],
        };
        self.c.full(self.c.scalar_f64(dtype, 0.0), &[leading, vec![width]].concat())
    }

    /// With as many rows as a step may take from each.
    pub(super) fn padded(&self, x: Value) -> Value {
        match self.packed {
            None => x,
            Some(_) => self.c.pad_dim(x, self.c.scalar_f64(self.c.dtype(x), 0.0), 0, 0, self.batch),
        }
    }

    /// Without the rows that no step has.
    pub(super) fn cut(&self, x: Value) -> Value {
        match self.packed {
            None => x,
            Some((_, rows)) => self.c.slice_dim(x, 0, 0, rows, 1),
        }
    }
}

/// Sizes and dtypes of a layer.
struct Sizes {
    cell: Cell,
    batch: i64,
    /// Of its gates.
    hidden: i64,
    /// Of its output, which may be projected.
    width: i64,
    dtype: DType,
    acc: DType,
}

impl Sizes {
    /// From a state `[batch, width]` and the weights, which are checked.
    fn new(
        c: &Ctx,
        cell: Cell,
        state: Value,
        w_hh: Value,
        w_hr: Option<Value>,
        others: &[(&str, Option<Value>)],
    ) -> Result<Sizes> {
        let (state_shape, w_shape, dtype) = (c.shape(state), c.shape(w_hh), c.dtype(state));
        let (&[batch, width], &[rows, _]) = (state_shape.as_slice(), w_shape.as_slice()) else {
            return Err(runtime("_rnn_layer: expected 2-D states and weights"));
        };
        let hidden = rows / cell.gates();
        let sizes = Sizes { cell, batch, hidden, width, dtype, acc: opmath(dtype) };
        sizes.expect(c, "w_hh", w_hh, &[sizes.side_by_side(), width])?;
        if let Some(w) = w_hr {
            sizes.expect(c, "w_hr", w, &[width, hidden])?;
        } else if width != hidden {
            return Err(runtime(format!("_rnn_layer: expected states of {hidden} elements, got {width}")));
        }
        for (name, other) in others {
            let wrong = other.map(|v| c.dtype(v)).filter(|d| *d != dtype);
            if let Some(wrong) = wrong {
                let (want, got) = (scalar_name(dtype), scalar_name(wrong));
                return Err(runtime(format!("_rnn_layer: expected {name} of type {want}, got {got}")));
            }
        }
        Ok(sizes)
    }

    fn expect(&self, c: &Ctx, name: &str, x: Value, shape: &[i64]) -> Result<()> {
        if c.shape(x).as_slice() == shape && c.dtype(x) == self.dtype {
            return Ok(());
        }
        let (want, got) = (shape_text(shape), shape_text(&c.shape(x)));
        let (dtype, other) = (scalar_name(self.dtype), scalar_name(c.dtype(x)));
        Err(runtime(format!("_rnn_layer: expected {name} to be {dtype}{want}, got {other}{got}")))
    }

    /// The width of all gates.
    fn side_by_side(&self) -> i64 {
        self.cell.gates() * self.hidden
    }

    /// The width of all derivatives.
    fn derivatives(&self) -> i64 {
        self.cell.derivatives() * self.hidden
    }

    /// Gate number `k`.
    fn gate(&self, c: &Ctx, gates: Value, k: i64) -> Value {
        c.slice_dim(gates, 1, k * self.hidden, (k + 1) * self.hidden, 1)
    }
}

fn one_minus(c: &Ctx, x: Value) -> Value {
    c.subtract(c.ones_like(x), x)
}

/// The derivative of the logistic function, from its value.
fn logistic_slope(c: &Ctx, y: Value) -> Value {
    c.multiply(y, one_minus(c, y))
}

/// The derivative of tanh, from its value.
fn tanh_slope(c: &Ctx, y: Value) -> Value {
    one_minus(c, c.multiply(y, y))
}

/// What a step computed.
struct Computed {
    h: Value,
    c: Option<Value>,
    derivatives: Vec<Value>,
}

/// A step from what the input and the state give to the gates, and from the states.
fn compute(c: &Ctx, s: &Sizes, input: Value, hidden: Value, h: Value, cell: Option<Value>) -> Computed {
    let sum = c.add(input, hidden);
    match (s.cell, cell) {
        (Cell::Lstm, Some(cell)) => {
            // Of all gates, as XLA's code for processors then computes it once, and not for each of h and c.
            let all = c.logistic(sum);
            let [i, f, o] = [0, 1, 3].map(|k| s.gate(c, all, k));
            let g = c.tanh(s.gate(c, sum, 2));
            let new = c.add(c.multiply(f, cell), c.multiply(i, g));
            let y = c.tanh(new);
            // Of the cell by h; of the input, forget and cell gates and the old cell by the cell; of the output gate by h.
            let derivatives = vec![
                c.multiply(o, tanh_slope(c, y)),
                c.multiply(g, logistic_slope(c, i)),
                c.multiply(cell, logistic_slope(c, f)),
                c.multiply(i, tanh_slope(c, g)),
                f,
                c.multiply(y, logistic_slope(c, o)),
            ];
            Computed { h: c.multiply(o, y), c: Some(new), derivatives }
        }
        (Cell::Gru, _) => {
            let [reset, update] = [0, 1].map(|k| c.logistic(s.gate(c, sum, k)));
            let of_state = s.gate(c, hidden, 2);
            let new = c.tanh(c.add(s.gate(c, input, 2), c.multiply(reset, of_state)));
            let change = c.subtract(h, new);
            let by_new = c.multiply(one_minus(c, update), tanh_slope(c, new));
            // By h: of the reset, update and new gates, of what the state gives to the new gate, and of the old state.
            let derivatives = vec![
                c.multiply(c.multiply(by_new, of_state), logistic_slope(c, reset)),
                c.multiply(change, logistic_slope(c, update)),
                by_new,
                c.multiply(by_new, reset),
                update,
            ];
            Computed { h: c.add(new, c.multiply(update, change)), c: None, derivatives }
        }
        (Cell::Relu, _) => {
            let h = c.maximum(sum, c.zeros_like(sum));
            Computed { h, c: None, derivatives: vec![h] }
        }
        (Cell::Tanh | Cell::Lstm, _) => {
            let h = c.tanh(sum);
            Computed { h, c: None, derivatives: vec![tanh_slope(c, h)] }
        }
    }
}

/// Gradients of a step.
struct Gradients {
    /// Of what the input gives to the gates.
    gates: Value,
    /// Of what the state gives to them, if that is another.
    hidden: Option<Value>,
    /// Of the state where it is used as it is.
    h: Option<Value>,
    c: Option<Value>,
}

/// From the derivatives of a step and the gradients of its states.
fn differentiate(c: &Ctx, s: &Sizes, d: &[Value], dh: Value, dc: Option<Value>) -> Gradients {
    match (s.cell, d) {
        (Cell::Lstm, &[cell, input, forget, new, old, output]) => {
            let by_h = c.multiply(dh, cell);
            let dc = dc.map_or(by_h, |dc| c.add(dc, by_h));
            let [i, f, g] = [input, forget, new].map(|x| c.multiply(dc, x));
            let gates = c.concatenate(&[i, f, g, c.multiply(dh, output)], 1);
            Gradients { gates, hidden: None, h: None, c: Some(c.multiply(dc, old)) }
        }
        (Cell::Gru, &[reset, update, new, of_state, old]) => {
            let [r, z, n, m, h] = [reset, update, new, of_state, old].map(|x| c.multiply(dh, x));
            let (gates, hidden) = (c.concatenate(&[r, z, n], 1), c.concatenate(&[r, z, m], 1));
            Gradients { gates, hidden: Some(hidden), h: Some(h), c: None }
        }
        (Cell::Relu, &[h, ..]) => {
            let zero = c.zeros_like(h);
            Gradients { gates: c.select(c.le(h, zero), zero, dh), hidden: None, h: None, c: None }
        }
        (_, d) => Gradients { gates: c.multiply(dh, d[0]), hidden: None, h: None, c: None },
    }
}

/// `x @ w`; with `w` transposed in memory before the loop it is the product that compilers are good at.
fn product(c: &Ctx, x: Value, w: Value) -> Value {
    compiled(c, x, w, &DotDims::matmul(2))
}

/// A direction of a layer: output, last states, and for the backward derivatives, states before each step and, if the
/// output is projected, the output before.
#[allow(clippy::too_many_arguments)] // the schema's
fn layer(
    c: &Ctx,
    cell: String,
    gates: Value,
    batch_sizes: Option<Value>,
    hx: Value,
    cx: Option<Value>,
    w_hh: Value,
    b_hh: Option<Value>,
    w_hr: Option<Value>,
    reverse: bool,
) -> Result<Vec<Option<Value>>> {
    let cell = Cell::named(&cell)?;
    if (cell == Cell::Lstm) != cx.is_some() {
        return Err(runtime("_rnn_layer: a cell state is the LSTM's"));
    }
    let s = Sizes::new(c, cell, hx, w_hh, w_hr, &[("gates", Some(gates))])?;
    let shape = c.shape(gates);
    let (&wide, leading) = shape.split_last().ok_or_else(|| runtime("_rnn_layer: expected a sequence"))?;
    let batch = s.batch;
    let steps = Steps::new(c, leading, batch, batch_sizes, reverse)?;
    s.expect(c, "gates", gates, &[leading, &[s.side_by_side()]].concat())?;
    if let Some(cx) = cx {
        s.expect(c, "cx", cx, &[batch, s.hidden])?;
    }
    if let Some(b) = b_hh {
        s.expect(c, "b_hh", b, &[wide])?;
    }

    let gates = steps.padded(gates);
    let (w, projection) = (c.transpose(w_hh, &[1, 0]), w_hr.map(|w| c.transpose(w, &[1, 0])));
    let bias = b_hh.map(|b| c.broadcast_in_dim(c.to(b, s.acc), &[batch, wide], &[1]));
    let saved = s.derivatives() + if w_hr.is_some() { s.hidden } else { 0 } + s.width;
    let mut inits = vec![steps.zeros(s.dtype, s.width), steps.zeros(s.dtype, saved), hx];
    inits.extend(cx);
    let done = steps.run(&inits, |step, state| {
        let (output, saved, h, cell) = (state[0], state[1], state[2], state.get(3).copied());
        let wide = |x| c.to(x, s.acc);
        let round = |x| c.to(x, s.dtype);
        let mut hidden = product(c, h, w);
        if let Some(bias) = bias {
            hidden = c.add(hidden, bias);
        }
        let new = compute(c, &s, wide(steps.read(gates, step)), hidden, wide(h), cell.map(wide));
        let raw = round(new.h);
        let next = projection.map_or(raw, |w| round(product(c, raw, w)));
        let mut pieces: Vec<Value> = new.derivatives.into_iter().map(round).collect();
        pieces.extend(projection.map(|_| raw));
        pieces.push(h);
        let mut results = vec![
            steps.write(output, step, next),
            steps.write(saved, step, c.concatenate(&pieces, 1)),
            steps.keep(step, next, h),
        ];
        results.extend(cell.zip(new.c).map(|(old, new)| steps.keep(step, round(new), old)));
        results
    });
    Ok(vec![Some(steps.cut(done[0])), Some(done[2]), done.get(3).copied(), Some(done[1])])
}

/// Gradients of what the input gives to the gates, of the states, of what the state gives to the gates (if that is another)
/// and of the output (if it is projected; with what later steps have of it).
#[allow(clippy::too_many_arguments)] // the schema's
fn layer_backward(
    c: &Ctx,
    cell: String,
    grad_output: Option<Value>,
    grad_hy: Value,
    grad_cy: Option<Value>,
    saved: Value,
    batch_sizes: Option<Value>,
    w_hh: Value,
    w_hr: Option<Value>,
    reverse: bool,
) -> Result<Vec<Option<Value>>> {
    let cell = Cell::named(&cell)?;
    let others = [("saved", Some(saved)), ("grad_output", grad_output), ("grad_cy", grad_cy)];
    let s = Sizes::new(c, cell, grad_hy, w_hh, w_hr, &others)?;
    let (shape, batch) = (c.shape(saved), s.batch);
    let mut leading: Dims = shape.iter().take(shape.len().saturating_sub(1)).copied().collect();
    if batch_sizes.is_some() {
        leading.iter_mut().for_each(|rows| *rows -= batch);
    }
    let steps = Steps::new(c, &leading, batch, batch_sizes, !reverse)?;
    if let Some(grad) = grad_output {
        s.expect(c, "grad_output", grad, &[&leading, [s.width].as_slice()].concat())?;
    }
    if let Some(grad) = grad_cy {
        s.expect(c, "grad_cy", grad, &[batch, s.hidden])?;
    }

    let grad_output = grad_output.map(|g| steps.padded(g));
    let wide = |x| c.to(x, s.acc);
    let round = |x| c.to(x, s.dtype);
    let mut inits = vec![wide(grad_hy), steps.zeros(s.dtype, s.side_by_side())];
    // What some cells have besides, in this order.
    let (has_c, has_hidden) = (cell == Cell::Lstm, cell == Cell::Gru);
    let no_c = || c.full(c.scalar_f64(s.acc, 0.0), &[batch, s.hidden]);
    inits.extend(has_c.then(|| grad_cy.map_or_else(no_c, wide)));
    inits.extend(has_hidden.then(|| steps.zeros(s.dtype, s.side_by_side())));
    inits.extend(w_hr.map(|_| steps.zeros(s.dtype, s.width)));
    let done = steps.run(&inits, |step, state| {
        let mut rest = state[2..].iter().copied();
        let (dh, gates) = (state[0], state[1]);
        let dc = has_c.then(|| rest.next()).flatten();
        let hidden = has_hidden.then(|| rest.next()).flatten();
        let outputs = rest.next();

        let of_output = grad_output.map(|g| wide(steps.read(g, step)));
        let all = of_output.map_or(dh, |g| c.add(dh, g));
        let raw = w_hr.map_or(all, |w| product(c, round(all), w));
        let derivatives: Vec<Value> = (0..cell.derivatives())
            .map(|k| wide(steps.columns(saved, step, k * s.hidden, s.hidden)))
            .collect();
        let found = differentiate(c, &s, &derivatives, raw, dc);
        let new_gates = round(found.gates);
        let new_hidden = found.hidden.map(round);
        let through = product(c, new_hidden.unwrap_or(new_gates), w_hh);
        let next = found.h.map_or(through, |h| c.add(through, h));
        let mut results = vec![steps.keep(step, next, dh), steps.write(gates, step, new_gates)];
        results.extend(dc.zip(found.c).map(|(old, new)| steps.keep(step, new, old)));
        results.extend(hidden.zip(new_hidden).map(|(x, new)| steps.write(x, step, new)));
        results.extend(outputs.map(|x| steps.write(x, step, round(all))));
        results
    });
    let mut rest = done[2..].iter().copied();
    let dc = has_c.then(|| rest.next()).flatten();
    let hidden = has_hidden.then(|| rest.next()).flatten();
    Ok(vec![
        Some(steps.cut(done[1])),
        Some(round(done[0])),
        dc.map(round),
        hidden.map(|x| steps.cut(x)),
        rest.next().map(|x| steps.cut(x)),
    ])
}
