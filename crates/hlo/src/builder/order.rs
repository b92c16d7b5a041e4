//! Ops in the order that channels-last images have in memory.
//!
//! Such an image is a row-major `[N, H, W, C]` that a transpose shows as `[N, C, H, W]`. A compiler that chooses layouts
//! moves the transpose out of the way by itself. XLA's for CPUs keeps everything row-major and would read all of the image
//! in strides, so here what follows a transpose goes before it, as far as the next one, which undoes it.

use smallvec::SmallVec;

use super::{Builder, Inner};
use crate::ir::{Constant, Def, Op, PadConfig, SliceBounds, Value, Window};
use crate::types::{Dims, TensorType};

/// How many ops back a value is looked at for whether no image is in it.
const DEPTH: u32 = 8;

impl Builder {
    /// Whether ops that follow the transpose of a channels-last tensor go before it: see the module's text. For compilers
    /// that keep such ops row-major.
    pub fn keep_memory_order(&self, on: bool) {
        self.inner.borrow_mut().keeps_memory_order = on;
    }

    /// Whether kernels that are faster with channels-last images are to be given such, as images that are turned round at the
    /// program's boundary are fewer than those that stay within.
    pub fn prefer_channels_last(&self, on: bool) {
        self.inner.borrow_mut().prefers_channels_last = on;
    }

    /// Whether that was said.
    pub fn prefers_channels_last(&self) -> bool {
        self.inner.borrow().prefers_channels_last
    }

    fn keeps_memory_order(&self) -> bool {
        self.inner.borrow().keeps_memory_order
    }

    /// An op with one result, by what was transposed to give its operands.
    pub(super) fn before_transposes(
        &self,
        op: &Op,
        operands: &[Value],
        ty: Option<&TensorType>,
    ) -> Option<Value> {
        if !self.keeps_memory_order() {
            return None;
        }
        let Some((order, _)) = operands.iter().find_map(|&x| self.channels_last(x)) else {
            return self.on_scalars(op, operands, ty);
        };
        let op = moved(op, &order, ty)?;
        let operands = self.all_before(operands, &order)?;
        let result = match ty {
            Some(ty) => self.op_as(op, &operands, TensorType::new(ty.dtype, stored(&ty.shape, &order))),
            None => self.op(op, &operands),
        };
        Some(self.transpose(result, &order))
    }

    /// An elementwise op whose operands are each one number everywhere, on the numbers: so its result has no order either.
    fn on_scalars(&self, op: &Op, operands: &[Value], ty: Option<&TensorType>) -> Option<Value> {
        let shape = self.shape(*operands.first()?);
        let constants = operands.iter().all(|&x| self.scalar_of_splat(x).is_some());
        if !is_elementwise(op) || shape.is_empty() || constants {
            return None;
        }
        let scalars: Option<SmallVec<[Value; 3]>> =
            operands.iter().map(|&x| self.scalar_everywhere(x)).collect();
        let result = match ty {
            Some(ty) => self.op_as(op.clone(), &scalars?, TensorType::scalar(ty.dtype)),
            None => self.op(op.clone(), &scalars?),
        };
        Some(self.full(result, &shape))
    }

    /// The dimensions and operands of a reduction in the order before the transposes, if all operands have one; and how the
    /// results have to be transposed.
    pub(super) fn reduced_before(
        &self,
        dims: &[i64],
        xs: &[Value],
    ) -> Option<(Dims, SmallVec<[Value; 3]>, Dims)> {
        let (order, xs) = self.transposed_alike(xs)?;
        let moved = places(dims, &order)?;
        // What is left, in the order of memory, and the place there of each dimension that the result has.
        let left: Dims = (0..order.len() as i64).filter(|d| !moved.contains(d)).collect();
        let place = |d: &i64| left.iter().position(|l| l == d).map(|i| i as i64);
        let results: Dims = order.iter().filter(|d| !moved.contains(d)).filter_map(place).collect();
        Some((moved, xs, results))
    }

    /// The window and operands of a reduction of windows, the same way; with the order of the results.
    pub(super) fn windowed_before(
        &self,
        window: &Window,
        xs: &[Value],
    ) -> Option<(Window, SmallVec<[Value; 3]>, Dims)> {
        let (order, xs) = self.transposed_alike(xs)?;
        let window = Window {
            dims: stored(&window.dims, &order),
            strides: stored(&window.strides, &order),
            base_dilations: stored(&window.base_dilations, &order),
            window_dilations: stored(&window.window_dilations, &order),
            padding: inverse(&order).iter().map(|&d| window.padding[d as usize]).collect(),
        };
        Some((window, xs, order))
    }

    /// The permutation of the first that was transposed, and all in the order before it.
    fn transposed_alike(&self, xs: &[Value]) -> Option<(Dims, SmallVec<[Value; 3]>)> {
        if !self.keeps_memory_order() {
            return None;
        }
        let (order, _) = xs.iter().find_map(|&x| self.channels_last(x))?;
        let xs = self.all_before(xs, &order)?;
        Some((order, xs))
    }

    /// Operands in the order before a transpose, if all of them can be had so without turning an image round.
    fn all_before(&self, xs: &[Value], order: &Dims) -> Option<SmallVec<[Value; 3]>> {
        let can = xs.iter().all(|&x| self.has_before(x, order) || self.inner.borrow().has_no_order(x, DEPTH));
        can.then(|| xs.iter().map(|&x| self.before(x, order)).collect())
    }

    fn has_before(&self, x: Value, order: &Dims) -> bool {
        self.rank(x) == 0 || self.channels_last(x).is_some_and(|(own, _)| own == *order)
    }

    /// A transpose of a transpose, as one.
    pub(super) fn transposed_before(&self, x: Value, permutation: &[i64]) -> Option<(Value, Dims)> {
        if !self.keeps_memory_order() {
            return None;
        }
        let inner = self.inner.borrow();
        let (Op::Transpose(first), [before]) = inner.made_by(x)? else { return None };
        inner.visible(*before).ok()?;
        places(permutation, first).map(|both| (*before, both))
    }

    /// What was reshaped to give `x`.
    pub(super) fn reshaped_before(&self, x: Value) -> Option<Value> {
        if !self.keeps_memory_order() {
            return None;
        }
        let inner = self.inner.borrow();
        let (Op::Reshape, [before]) = inner.made_by(x)? else { return None };
        inner.visible(*before).ok().map(|()| *before)
    }

    /// The permutation and the operand of the transpose that shows a channels-last tensor in its logical order.
    fn channels_last(&self, x: Value) -> Option<(Dims, Value)> {
        let inner = self.inner.borrow();
        let (Op::Transpose(order), [before]) = inner.made_by(x)? else { return None };
        let rank = order.len() as i64;
        let is_one = rank >= 3 && order.iter().copied().eq([0, rank - 1].into_iter().chain(1..rank - 1));
        (is_one && inner.visible(*before).is_ok()).then(|| (order.clone(), *before))
    }

    /// A value of which that was found out.
    fn before(&self, x: Value, order: &Dims) -> Value {
        if self.rank(x) == 0 {
            return x;
        }
        if let Some((_, before)) = self.channels_last(x).filter(|(own, _)| own == order) {
            return before;
        }
        let TensorType { dtype, shape } = self.ty(x);
        let shape = stored(&shape, order);
        if let Some(scalar) = self.scalar_everywhere(x) {
            return self.full(scalar, &shape);
        }
        let (op, operands) = {
            let inner = self.inner.borrow();
            let Some((op, operands)) = inner.made_by(x) else { return x };
            (op.clone(), SmallVec::<[Value; 3]>::from_slice(operands))
        };
        match op {
            Op::BroadcastInDim(dims) => {
                self.broadcast_sorted(operands[0], &shape, &places(&dims, order).unwrap_or(dims))
            }
            Op::Iota(dim) => self.iota(TensorType::new(dtype, shape), order[dim as usize]),
            _ => {
                let operands: SmallVec<[Value; 3]> =
                    operands.iter().map(|&x| self.before(x, order)).collect();
                self.op_as(op, &operands, TensorType::new(dtype, shape))
            }
        }
    }

    /// A broadcast along dimensions in any order: what is broadcast is brought into that of the result first.
    fn broadcast_sorted(&self, x: Value, shape: &[i64], dims: &Dims) -> Value {
        let mut order: Dims = (0..dims.len() as i64).collect();
        order.sort_by_key(|&i| dims[i as usize]);
        let sorted: Dims = order.iter().map(|&i| dims[i as usize]).collect();
        self.broadcast_in_dim(self.transpose(x, &order), shape, &sorted)
    }

    /// The scalar that a value is everywhere, if it is seen.
    fn scalar_everywhere(&self, x: Value) -> Option<Value> {
        if let Some(scalar) = self.scalar_of_splat(x) {
            return Some(scalar);
        }
        let inner = self.inner.borrow();
        let (Op::BroadcastInDim(_), [source]) = inner.made_by(x)? else { return None };
        (inner.arena.ty(*source).rank() == 0 && inner.visible(*source).is_ok()).then_some(*source)
    }

    /// The scalar of a constant that is one number everywhere.
    fn scalar_of_splat(&self, x: Value) -> Option<Value> {
        let (dtype, bytes) = {
            let inner = self.inner.borrow();
            let data = inner.arena.values.get(x.0 as usize)?;
            let Def::Constant(id) = data.def else { return None };
            let Constant::Splat(bytes) = &inner.arena.constants[id as usize] else { return None };
            (data.ty.dtype, bytes.clone())
        };
        Some(self.splat(TensorType::scalar(dtype), bytes))
    }
}

impl Inner {
    /// Whether a value is made of positions and of what is repeated, so that it is made again in another order at no cost.
    fn has_no_order(&self, x: Value, depth: u32) -> bool {
        let data = &self.arena.values[x.0 as usize];
        if let Def::Constant(id) = data.def {
            return data.ty.rank() == 0 || matches!(self.arena.constants[id as usize], Constant::Splat(_));
        }
        match self.made_by(x) {
            Some((Op::Iota(_), _)) => true,
            Some((Op::BroadcastInDim(_), [from])) => {
                self.visible(*from).is_ok() && self.arena.ty(*from).numel() < data.ty.numel()
            }
            Some((op, operands)) if is_elementwise(op) && depth > 0 => {
                operands.iter().all(|&x| self.has_no_order(x, depth - 1))
            }
            _ => data.ty.rank() == 0 && self.visible(x).is_ok(),
        }
    }
}

/// Whether each element of the result is made of the elements at its place.
fn is_elementwise(op: &Op) -> bool {
    let same_width = matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Complex | Op::Compare(..) | Op::Convert);
    same_width || matches!(op, Op::Select | Op::Clamp | Op::ReducePrecision { .. })
}

/// The op as it is before a transpose, if it can go there: what it says of dimensions is in their order.
fn moved(op: &Op, order: &Dims, ty: Option<&TensorType>) -> Option<Op> {
    Some(match op {
        Op::Slice(s) => Op::Slice(Box::new(SliceBounds {
            start: stored(&s.start, order),
            limit: stored(&s.limit, order),
            strides: stored(&s.strides, order),
        })),
        Op::Pad(p) => Op::Pad(Box::new(PadConfig {
            low: stored(&p.low, order),
            high: stored(&p.high, order),
            interior: stored(&p.interior, order),
        })),
        Op::Concatenate(dim) => Op::Concatenate(*places(&[*dim], order)?.first()?),
        Op::Reverse(dims) => Op::Reverse(places(dims, order)?),
        // Of the same width, so that there are as many dimensions.
        Op::BitcastConvert if ty.is_some_and(|ty| ty.rank() == order.len()) => op.clone(),
        _ if is_elementwise(op) => op.clone(),
        _ => return None,
    })
}

/// Where dimensions are before a transpose; `None` if there are no such dimensions.
fn places(dims: &[i64], order: &Dims) -> Option<Dims> {
    dims.iter().map(|&d| order.get(usize::try_from(d).ok()?).copied()).collect()
}

/// What is said of each dimension, in the order before a transpose.
fn stored(of_dims: &Dims, order: &Dims) -> Dims {
    inverse(order).iter().map(|&d| of_dims.get(d as usize).copied().unwrap_or(0)).collect()
}

/// Where each dimension goes by a permutation.
fn inverse(order: &Dims) -> Dims {
    let mut back = order.clone();
    for (i, &d) in order.iter().enumerate() {
        back[d as usize] = i as i64;
    }
    back
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Binary;
    use crate::types::DType;

    /// The text of a program of one channels-last image `[2, 3, 4, 5]`, by a builder that keeps its order.
    fn program(make: impl FnOnce(&Builder, Value) -> Value) -> String {
        let b = Builder::new();
        b.keep_memory_order(true);
        let stored = b.param(TensorType::new(DType::F32, vec![2, 4, 5, 3]));
        let image = b.transpose(stored, &[0, 3, 1, 2]);
        let y = make(&b, image);
        b.finish(&[y]).expect("a program").to_text()
    }

    fn back(b: &Builder, y: Value) -> Value {
        b.transpose(y, &[0, 2, 3, 1])
    }

    #[test]
    fn what_works_on_an_image_is_before_its_transpose() {
        let window = |dims: [i64; 4], strides: [i64; 4]| Window {
            strides: Dims::from_slice(&strides),
            ..Window::new(&dims)
        };
        type Make = Box<dyn Fn(&Builder, Value) -> Value>;
        let cases: Vec<(&str, Make)> = vec![
            ("unary", Box::new(|b, x| back(b, b.tanh(x)))),
            ("constant", Box::new(|b, x| back(b, b.multiply(x, b.full_like(x, 2.0))))),
            ("two images", Box::new(|b, x| back(b, b.add(b.exponential(x), x)))),
            (
                "number",
                Box::new(|b, x| {
                    let n = b.param(TensorType::scalar(DType::F32));
                    back(b, b.add(x, b.abs(b.full(n, &b.shape(x)))))
                }),
            ),
            (
                "per channel",
                Box::new(|b, x| {
                    let w = b.param(TensorType::new(DType::F32, vec![3]));
                    back(b, b.multiply(x, b.broadcast_in_dim(w, &b.shape(x), &[1])))
                }),
            ),
            ("chosen", Box::new(|b, x| back(b, b.select(b.gt(x, b.zeros_like(x)), x, b.negate(x))))),
            ("other type", Box::new(|b, x| back(b, b.convert(x, DType::BF16)))),
            ("sum of all but channels", Box::new(|b, x| b.reduce_sum(x, &[0, 2, 3]))),
            ("slice", Box::new(|b, x| back(b, b.slice_dim(x, 1, 1, 3, 1)))),
            ("pad", Box::new(|b, x| back(b, b.pad_dim(x, b.scalar_f64(DType::F32, 0.0), 2, 1, 2)))),
            ("concatenate", Box::new(|b, x| back(b, b.concatenate(&[x, b.negate(x)], 1)))),
            ("reverse", Box::new(|b, x| back(b, b.reverse(x, &[3])))),
            (
                "window",
                Box::new(move |b, x| {
                    let lowest = b.min_value(DType::F32);
                    let window = window([1, 1, 2, 3], [1, 1, 2, 1]);
                    back(b, b.reduce_window_with(Binary::Maximum, x, lowest, &window))
                }),
            ),
        ];
        for (name, make) in cases {
            let text = program(make);
            assert!(!text.contains("transpose"), "{name}:\n{text}");
        }
    }

    #[test]
    fn types_stay_what_they_were() {
        for dims in [&[1i64][..], &[2, 3], &[0, 2], &[0, 1, 2, 3]] {
            let b = Builder::new();
            b.keep_memory_order(true);
            let x = b.transpose(b.param(TensorType::new(DType::F32, vec![2, 4, 5, 3])), &[0, 3, 1, 2]);
            let left: Vec<i64> =
                (0..4).filter(|d| !dims.contains(d)).map(|d| b.shape(x)[d as usize]).collect();
            assert_eq!(b.shape(b.reduce_sum(x, dims)).as_slice(), left.as_slice(), "of {dims:?}");
            assert_eq!(b.shape(b.slice_dim(x, 3, 0, 2, 1)).as_slice(), [2, 3, 4, 2]);
            assert_eq!(b.shape(b.compare(x, x, crate::ir::Direction::Lt)).as_slice(), [2, 3, 4, 5]);
        }
    }

    #[test]
    fn images_in_two_orders_meet_in_the_logical_one() {
        let text = program(|b, x| {
            let y = b.param(TensorType::new(DType::F32, vec![2, 3, 4, 5]));
            b.add(x, y)
        });
        assert_eq!(text.matches("stablehlo.transpose").count(), 1, "{text}");
    }

    #[test]
    fn other_transposes_stay_where_they_are() {
        let b = Builder::new();
        b.keep_memory_order(true);
        let x = b.transpose(b.param(TensorType::new(DType::F32, vec![4, 5])), &[1, 0]);
        let y = b.tanh(x);
        assert!(b.rearranged(y).is_none());
    }
}
