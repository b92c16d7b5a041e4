//! What each op does with dimensions that vary.

use super::layout::{self, Dim, Three, each};
use super::{Bounding, Laid, Result};
use crate::ir::*;
use crate::types::{DType, Dims, TensorType};

const DIFFERS: &str = "what is computed depends on the size";

/// A slice is masked before it is taken where that is not more than so many times as much: others are taken of the same.
const MOST_MASKED: i64 = 4;

/// An op at the bound and in the samples.
#[derive(Clone, Copy)]
pub(super) struct Pair<'a> {
    pub(super) p: &'a OpData,
    pub(super) s: &'a OpData,
    pub(super) o: &'a OpData,
    /// Types of the first result.
    pub(super) bound: &'a TensorType,
    pub(super) sample: &'a TensorType,
    pub(super) other: &'a TensorType,
}

impl Pair<'_> {
    /// A dimension of the result whose used places come first.
    pub(super) fn dim(&self, d: usize) -> Dim {
        Dim::prefix(self.size(d))
    }

    /// The size of a dimension of the result.
    fn size(&self, d: usize) -> Three {
        self.shapes().map(|shape| shape[d])
    }

    fn shapes(&self) -> [&Dims; 3] {
        [&self.bound.shape, &self.sample.shape, &self.other.shape]
    }

    /// The results, and what they are in the samples.
    pub(super) fn results(&self) -> impl Iterator<Item = (Value, (Value, Value))> + use<'_> {
        self.p.result_values().zip(self.s.result_values().zip(self.o.result_values()))
    }

    pub(super) fn regions(&self) -> impl Iterator<Item = [BlockId; 3]> + use<'_> {
        let of = |(&p, (&s, &o)): (&BlockId, (&BlockId, &BlockId))| [p, s, o];
        self.p.regions.iter().zip(self.s.regions.iter().zip(&self.o.regions)).map(of)
    }
}

impl Bounding<'_> {
    pub(super) fn op(&mut self, p: &OpData, s: &OpData, o: &OpData) -> Result<()> {
        let is_like = |s: &OpData| {
            let same_kind = std::mem::discriminant(&p.op) == std::mem::discriminant(&s.op);
            same_kind && p.operands.len() == s.operands.len() && p.results == s.results
        };
        if !is_like(s) || !is_like(o) || (p.op == s.op && p.op != o.op) {
            return Err(DIFFERS.into());
        }
        let (bound, sample, other) = (self.bound, self.sample, self.other);
        let mut args = Vec::new();
        for (&a, (&b, &c)) in p.operands.iter().zip(s.operands.iter().zip(&o.operands)) {
            args.push(self.operand(a, b, Some(c))?);
        }
        let results = || p.result_values().zip(s.result_values().zip(o.result_values()));
        let mut same = p.op == s.op && !args.iter().any(Laid::varies);
        for (a, (b, c)) in results() {
            same &= !self.default(a, b, c)?.iter().any(Dim::varies);
        }
        let Some((first, (b, c))) = results().next() else {
            return Err("it has no result".into());
        };
        let pair = Pair { p, s, o, bound: bound.ty(first), sample: sample.ty(b), other: other.ty(c) };
        let are_zeroed = self.zero_before(first, &p.op, &mut args);
        let made = match &p.op {
            Op::Deferred(d) if p.op == s.op => self.deferred(pair, args, d)?,
            Op::While => self.repeated(pair, args)?,
            Op::If | Op::Case => self.branched(pair, args)?,
            _ if same => self.unchanged(pair, args)?,
            _ => self.varying(pair, args)?,
        };
        for ((a, (b, c)), laid) in results().zip(made) {
            let shapes = [bound.ty(a), sample.ty(b), other.ty(c)].map(|ty| &ty.shape);
            if !laid.layout.iter().map(Dim::sizes).eq(layout::threes(shapes)) {
                return Err("its sizes do not follow from those of its operands".into());
            }
            if are_zeroed {
                self.note_zeros(a, &laid);
            }
            self.know(a, (b, c), laid);
        }
        Ok(())
    }

    /// Puts the zeros that are wanted of an elementwise op into its operands if it makes zeros of these: a compiler that
    /// fuses a selection into each of its consumers would do what is before it for each of them.
    fn zero_before(&mut self, result: Value, op: &Op, args: &mut [Laid]) -> bool {
        use Binary::{Add, And, Maximum, Minimum, Multiply, Or, Subtract};
        let keeps_zero = matches!(op, Op::Binary(Add | And | Maximum | Minimum | Multiply | Or | Subtract));
        let Some(dims) = self.early.get(&result).filter(|_| keeps_zero) else { return false };
        let is_own = |x: &Laid| dims.iter().all(|&d| x.layout.get(d).is_some_and(|dim| !dim.even));
        let are_alike = args[0].layout == args[1].layout && args.iter().all(is_own);
        if are_alike {
            args.iter_mut().for_each(|x| x.v = self.zeroed(x, dims));
        }
        are_alike
    }

    /// An op of which nothing varies.
    fn unchanged(&mut self, pair: Pair<'_>, args: Vec<Laid>) -> Result<Vec<Laid>> {
        let (Pair { p, s, .. }, bound) = (pair, self.bound);
        let mut regions = Vec::new();
        for (&a, &b) in p.regions.iter().zip(&s.regions) {
            regions.push(self.region(a, b)?);
        }
        let types: Vec<TensorType> = p.result_values().map(|v| bound.ty(v).clone()).collect();
        let operands: Vec<Value> = args.iter().map(|x| x.v).collect();
        let even = matches!(p.op, Op::BroadcastInDim(_)) || p.op.is_elementwise();
        let even = even && args.iter().all(|x| x.layout.iter().all(|d| d.even));
        let made = self.b.copied(p.op.clone(), &operands, &types, &regions);
        let laid = |(v, a): (Value, Value)| {
            let mut layout = layout::prefixes([&bound.ty(a).shape; 3]);
            layout.iter_mut().for_each(|d| d.even = even);
            Laid { v, layout }
        };
        Ok(made.into_iter().zip(p.result_values()).map(laid).collect())
    }

    fn varying(&mut self, pair: Pair<'_>, args: Vec<Laid>) -> Result<Vec<Laid>> {
        let Pair { p, s, o, bound, .. } = pair;
        let one = |x: Laid| Ok(vec![x]);
        match (&p.op, &s.op) {
            (Op::Convert | Op::Unary(_) | Op::Binary(_) | Op::Compare(..) | Op::Complex, _)
            | (Op::Select | Op::Clamp | Op::ReducePrecision { .. }, _)
                if p.op == s.op =>
            {
                one(self.elementwise(pair, args)?)
            }
            (Op::BitcastConvert, _) => one(self.bits(pair, &args[0])?),
            (Op::OptimizationBarrier, _) => {
                let values: Vec<Value> = args.iter().map(|x| x.v).collect();
                let made = self.b.optimization_barrier(&values);
                let laid = |(v, x): (Value, Laid)| Laid { v, layout: x.layout };
                Ok(made.into_iter().zip(args).map(laid).collect())
            }
            (Op::Iota(d), Op::Iota(e)) if d == e => {
                let v = self.b.iota(bound.clone(), *d);
                let of = |i: usize| Dim { even: i as i64 != *d, ..pair.dim(i) };
                one(Laid { v, layout: (0..bound.rank()).map(of).collect() })
            }
            (Op::BroadcastInDim(to), Op::BroadcastInDim(also)) if to == also => {
                one(self.broadcast(pair, &args[0], to))
            }
            (Op::Reshape, _) => one(self.reshaped(args[0].clone(), pair.shapes())?),
            (Op::Transpose(order), Op::Transpose(also)) if order == also => {
                let layout = order.iter().map(|&d| args[0].layout[d as usize].clone()).collect();
                one(Laid { v: self.b.transpose(args[0].v, order), layout })
            }
            (Op::Slice(a), Op::Slice(b)) => {
                let Op::Slice(c) = &o.op else { return Err(DIFFERS.into()) };
                one(self.slice(pair, args[0].clone(), [a, b, c])?)
            }
            (Op::Pad(a), Op::Pad(b)) => {
                let Op::Pad(c) = &o.op else { return Err(DIFFERS.into()) };
                one(self.pad(pair, args, [a, b, c])?)
            }
            (Op::Concatenate(d), Op::Concatenate(e)) if d == e => {
                one(self.concatenate(pair, args, *d as usize)?)
            }
            (Op::Reverse(dims), Op::Reverse(also)) if dims == also => {
                one(self.reverse(args[0].clone(), dims)?)
            }
            (Op::DynamicSlice(_), Op::DynamicSlice(_)) => one(self.dynamic_slice(pair, args)?),
            (Op::DynamicUpdateSlice, _) => one(self.dynamic_update_slice(args)?),
            (Op::DotGeneral(a), Op::DotGeneral(b)) if a == b => one(self.dot(pair, args, &a.0)?),
            (Op::Convolution(a), Op::Convolution(b)) => one(self.convolution(pair, args, a, b)?),
            (Op::Gather(a, sorted), Op::Gather(b, _)) if a.0 == b.0 => {
                let Op::Gather(c, _) = &o.op else { return Err(DIFFERS.into()) };
                one(self.gather(pair, args, &a.0, [&a.1, &b.1, &c.1], *sorted)?)
            }
            (Op::Scatter(dims, flags), Op::Scatter(also, _)) if dims == also => {
                self.scatter(pair, args, dims, *flags)
            }
            (Op::Reduce(dims), Op::Reduce(also)) if dims == also => self.reduce(pair, args, dims),
            (Op::ReduceWindow(a), Op::ReduceWindow(b)) => self.reduce_window(pair, args, a, b),
            (Op::SelectAndScatter(a), Op::SelectAndScatter(b)) if a == b => {
                one(self.select_and_scatter(pair, args, a)?)
            }
            (Op::Sort { dimension, is_stable }, _) if p.op == s.op => {
                self.sort(pair, args, *dimension as usize, *is_stable)
            }
            (Op::TopK(_), Op::TopK(_)) if p.op != s.op || args[0].layout.last().is_some_and(Dim::varies) => {
                let last = args[0].layout.len() - 1;
                let mut x = self.prefixed(args[0].clone(), |d| d == last)?;
                // Of equal elements the first ones are taken, and of as many as there are, if that is fewer, the largest.
                let lowest = self.b.min_value(self.b.dtype(x.v));
                x.v = self.masked(&x, &[last], lowest);
                x.layout[last] = Dim::prefix([x.layout[last].size(); 3]);
                let mut made = self.over_the_last(pair, vec![x], 1)?;
                made.iter_mut().for_each(|x| x.layout[last] = pair.dim(last));
                Ok(made)
            }
            (Op::TopK(_), _) | (Op::Cholesky { .. }, _) | (Op::Fft(..), _) if p.op == s.op => {
                let last = match &p.op {
                    Op::Cholesky { .. } => 2,
                    Op::Fft(_, length) => length.len(),
                    _ => 1,
                };
                self.over_the_last(pair, args, last)
            }
            (Op::Fft(kind, n), Op::Fft(_, m)) if n.len() == 1 && m.len() == 1 => {
                let Op::Fft(_, k) = &o.op else { return Err(DIFFERS.into()) };
                let other = k.first().copied().unwrap_or(0);
                one(self.fft(pair, args[0].clone(), *kind, [n[0], m[0], other])?)
            }
            (Op::TriangularSolve(how), _) if p.op == s.op => {
                one(self.triangular_solve(pair, args, how.left_side)?)
            }
            (Op::CustomCall(call), _) => Err(format!("{} is called for all of it", call.target)),
            _ => Err("no rule is known for it where sizes vary".into()),
        }
    }

    fn elementwise(&mut self, pair: Pair<'_>, args: Vec<Laid>) -> Result<Laid> {
        let rank = pair.bound.rank();
        let mut whole: Vec<Laid> = args.iter().filter(|x| x.layout.len() == rank).cloned().collect();
        whole = self.alike(whole)?;
        let mut layout = whole[0].layout.clone();
        for (d, dim) in layout.iter_mut().enumerate() {
            dim.even = whole.iter().all(|x| x.layout[d].even);
        }
        let mut laid = whole.iter();
        let all = args.iter().map(|x| if x.layout.len() == rank { laid.next() } else { Some(x) });
        let operands: Vec<Value> = all.flatten().map(|x| x.v).collect();
        let made = self.b.copied(pair.p.op.clone(), &operands, std::slice::from_ref(pair.bound), &[]);
        Ok(Laid { v: made[0], layout })
    }

    fn bits(&mut self, pair: Pair<'_>, x: &Laid) -> Result<Laid> {
        let (rank, own) = (pair.bound.rank(), x.layout.len());
        let mut layout = x.layout.clone();
        if own > rank {
            if layout.pop().is_some_and(|d| d.varies()) {
                return Err("the bits of what varies".into());
            }
        } else if own < rank {
            layout.push(pair.dim(own));
        }
        Ok(Laid { v: self.b.bitcast_convert(x.v, pair.bound.dtype), layout })
    }

    fn broadcast(&mut self, pair: Pair<'_>, x: &Laid, to: &Dims) -> Laid {
        let of = |d: usize| {
            let from = to.iter().position(|&t| t as usize == d).map(|i| &x.layout[i]);
            match from {
                Some(own) if own.size() == pair.bound.shape[d] => own.clone(),
                _ => Dim { even: true, ..pair.dim(d) },
            }
        };
        let layout = (0..pair.bound.rank()).map(of).collect();
        Laid { v: self.b.broadcast_in_dim(x.v, &pair.bound.shape, to), layout }
    }

    fn slice(&mut self, pair: Pair<'_>, x: Laid, all: [&SliceBounds; 3]) -> Result<Laid> {
        let a = all[0];
        if all.iter().any(|b| a.strides != b.strides) {
            return Err("the stride of a slice depends on the size".into());
        }
        let rank = x.layout.len();
        let sizes: Vec<Three> = x.layout.iter().map(Dim::sizes).collect();
        let starts = |d: usize| all.map(|b| b.start[d]);
        let is_whole =
            |d: usize| starts(d) == [0; 3] && a.strides[d] == 1 && all.map(|b| b.limit[d]) == sizes[d];
        let x = self.prefixed(x, |d| !is_whole(d))?;
        let (mut start, mut limit) = (a.start.clone(), a.limit.clone());
        let mut moved = false;
        for d in 0..rank {
            if !layout::varies(starts(d)) {
                continue;
            }
            if a.strides[d] != 1 || starts(d).iter().any(|own| *own > a.start[d]) {
                return Err("the start of a slice depends on the size".into());
            }
            (start[d], limit[d], moved) = (0, sizes[d][0], true);
        }
        let mut v = self.b.slice(x.v, &start, &limit, &a.strides);
        if moved {
            let starts: Vec<Value> = (0..rank)
                .map(|d| match layout::varies(starts(d)) {
                    false => self.b.scalar_i64(DType::S64, 0),
                    true => self.number(starts(d)),
                })
                .collect();
            v = self.b.dynamic_slice(v, &starts, &pair.bound.shape);
        }
        let of = |d: usize| match is_whole(d) {
            true => x.layout[d].clone(),
            false => Dim { even: x.layout[d].even, ..pair.dim(d) },
        };
        let made = Laid { v, layout: (0..rank).map(of).collect() };
        let large = self.b.numel(x.v) > MOST_MASKED * self.b.numel(v);
        // What a size is cut from has places in use that the slice has not.
        let is_firm = |d: usize| !x.layout[d].varies() && !made.layout[d].varies();
        if !moved && !large && (0..rank).all(|d| is_whole(d) || is_firm(d)) {
            self.is_view(&made, &x, Op::Slice(Box::new(a.clone())));
        }
        Ok(made)
    }

    fn pad(&mut self, pair: Pair<'_>, args: Vec<Laid>, all: [&PadConfig; 3]) -> Result<Laid> {
        let a = all[0];
        let [x, fill] = args.as_slice() else { return Err("it takes two operands".into()) };
        if all.iter().any(|b| a.interior != b.interior) {
            return Err("how far elements are apart depends on the size".into());
        }
        let rank = x.layout.len();
        let low = |d: usize| all.map(|c| c.low[d]);
        let moves = |d: usize| layout::varies(low(d));
        for d in (0..rank).filter(|&d| moves(d)) {
            let is_cut = all.iter().any(|c| c.low[d] < 0 || c.high[d] < 0);
            if is_cut || low(d).iter().any(|own| a.low[d] < *own) || a.interior[d] != 0 {
                return Err("where padding begins depends on the size".into());
            }
        }
        let is_whole = |d: usize| a.low[d] == 0 && all.iter().all(|c| c.high[d] == 0) && a.interior[d] == 0;
        let x = self.prefixed(x.clone(), |d| !is_whole(d))?;
        let padded: Vec<usize> = (0..rank).filter(|&d| !is_whole(d)).collect();
        let v = self.masked(&x, &padded, fill.v);
        let still = |edge: &Dims| (0..rank).map(|d| if moves(d) { 0 } else { edge[d] }).collect::<Dims>();
        let mut v = self.b.pad(v, fill.v, &still(&a.low), &still(&a.high), &a.interior);
        if (0..rank).any(moves) {
            let start: Vec<Value> = (0..rank)
                .map(|d| match moves(d) {
                    true => self.number(low(d)),
                    false => self.b.scalar_i64(DType::S64, 0),
                })
                .collect();
            v = self.b.dynamic_update_slice(self.b.full(fill.v, &pair.bound.shape), v, &start);
        }
        let of = |d: usize| if is_whole(d) { x.layout[d].clone() } else { pair.dim(d) };
        Ok(Laid { v, layout: (0..rank).map(of).collect() })
    }

    fn concatenate(&mut self, pair: Pair<'_>, args: Vec<Laid>, d: usize) -> Result<Laid> {
        let mut xs = Vec::new();
        for x in args {
            xs.push(self.prefixed(x, |i| i == d)?);
        }
        for i in (0..pair.bound.rank()).filter(|&i| i != d) {
            let firm = xs.iter().find(|x| !x.layout[i].even).unwrap_or(&xs[0]).layout[i].clone();
            for x in &mut xs {
                *x = self.relaid(x.clone(), i, &firm)?;
            }
        }
        let mut layout = xs[0].layout.clone();
        layout[d] = pair.dim(d);
        for (i, dim) in layout.iter_mut().enumerate().filter(|(i, _)| *i != d) {
            dim.even = xs.iter().all(|x| x.layout[i].even);
        }
        let values: Vec<Value> = xs.iter().map(|x| x.v).collect();
        if !xs[..xs.len() - 1].iter().any(|x| x.layout[d].varies()) {
            return Ok(Laid { v: self.b.concatenate(&values, d as i64), layout });
        }
        // Each begins where the used places of the one before end, and overwrites what is behind.
        let zero = self.b.scalar_i64(pair.bound.dtype, 0);
        let mut before = xs[0].layout[d].sizes();
        let mut v = self.b.pad_dim(values[0], zero, d as i64, 0, pair.bound.shape[d] - before[0]);
        for (x, &value) in xs.iter().zip(&values).skip(1) {
            let mut start = vec![self.b.scalar_i64(DType::S64, 0); pair.bound.rank()];
            start[d] = self.number(before);
            v = self.b.dynamic_update_slice(v, value, &start);
            before = each(before, x.layout[d].sizes(), |a, b| a + b);
        }
        Ok(Laid { v, layout })
    }

    fn reverse(&mut self, x: Laid, dims: &Dims) -> Result<Laid> {
        let x = self.prefixed(x, |d| dims.contains(&(d as i64)))?;
        let mut v = self.b.reverse(x.v, dims);
        let shape = self.b.shape(v);
        let zero = self.b.scalar_i64(self.b.dtype(v), 0);
        for &d in dims {
            let (dim, d) = (x.layout[d as usize].clone(), d as usize);
            if dim.varies() && !dim.even {
                // The used places are the last ones now.
                let longer = self.b.pad_dim(v, zero, d as i64, 0, dim.size());
                let mut start = vec![self.b.scalar_i64(DType::S64, 0); shape.len()];
                start[d] = self.number(dim.sizes().map(|used| dim.size() - used));
                v = self.b.dynamic_slice(longer, &start, &shape);
            }
        }
        Ok(Laid { v, layout: x.layout })
    }

    fn dynamic_slice(&mut self, pair: Pair<'_>, mut args: Vec<Laid>) -> Result<Laid> {
        let mut starts = args.split_off(1);
        let is_whole = |x: &Laid, d: usize| x.layout[d].sizes() == pair.size(d);
        let x = args.remove(0);
        let whole: Vec<bool> = (0..x.layout.len()).map(|d| is_whole(&x, d)).collect();
        let x = self.prefixed(x, |d| !whole[d])?;
        let mut v = x.v;
        let moves = |d: usize| x.layout[d].varies() || pair.dim(d).varies();
        for d in (0..whole.len()).filter(|&d| !whole[d] && moves(d)) {
            let (have, take) = (&x.layout[d], pair.dim(d));
            // The last start at which the slice fits.
            let last = self.number(each(have.sizes(), take.sizes(), |a, b| a - b));
            let own = &mut starts[d];
            own.v = self.b.minimum(own.v, self.b.convert(last, self.b.dtype(own.v)));
            let zero = self.b.scalar_i64(self.b.dtype(v), 0);
            // What is taken beyond the size in use may lie behind the end.
            v = self.b.pad_dim(v, zero, d as i64, 0, if take.varies() { take.size() } else { 0 });
        }
        let starts: Vec<Value> = starts.iter().map(|x| x.v).collect();
        let v = self.b.dynamic_slice(v, &starts, &pair.bound.shape);
        let of = |d: usize| if whole[d] { x.layout[d].clone() } else { pair.dim(d) };
        Ok(Laid { v, layout: (0..whole.len()).map(of).collect() })
    }

    fn dynamic_update_slice(&mut self, mut args: Vec<Laid>) -> Result<Laid> {
        let mut starts = args.split_off(2);
        let update = args.remove(1);
        let mut x = args.remove(0);
        let mut update = update;
        let mut parts = Vec::new();
        for (d, start) in starts.iter_mut().enumerate() {
            let (own, new) = (x.layout[d].clone(), update.layout[d].clone());
            if own.sizes() == new.sizes() {
                (x, update) = self.paired((x, d), (update, d))?;
                continue;
            }
            if new.varies() {
                update = self.prefixed(update, |i| i == d)?;
                parts.push(d);
            }
            if own.varies() || new.varies() {
                x = self.prefixed(x, |i| i == d)?;
                let last = self.number(each(own.sizes(), new.sizes(), |a, b| a - b));
                start.v = self.b.minimum(start.v, self.b.convert(last, self.b.dtype(start.v)));
            }
        }
        let starts: Vec<Value> = starts.iter().map(|x| x.v).collect();
        let v = self.overwritten(&x, &update, &starts, &parts);
        let even = |d: &Dim| Dim { even: false, ..d.clone() };
        Ok(Laid { v, layout: x.layout.iter().map(even).collect() })
    }

    /// A value with others from a place on. In the dimensions `parts` only those in use are written: what is behind them
    /// stays.
    fn overwritten(&mut self, x: &Laid, update: &Laid, starts: &[Value], parts: &[usize]) -> Value {
        let (shape, sizes) = (self.b.shape(x.v), self.b.shape(update.v));
        let zero = self.b.scalar_i64(self.b.dtype(x.v), 0);
        let mut longer = x.v;
        let mut mask: Option<Value> = None;
        for &d in parts {
            longer = self.b.pad_dim(longer, zero, d as i64, 0, sizes[d]);
            let own = self.mask(&update.layout[d]);
            let own = self.b.broadcast_in_dim(own, &sizes, &[d as i64]);
            mask = Some(mask.map_or(own, |m| self.b.and(m, own)));
        }
        let Some(mask) = mask else { return self.b.dynamic_update_slice(x.v, update.v, starts) };
        let before = self.b.dynamic_slice(longer, starts, &sizes);
        let new = self.b.select(mask, update.v, before);
        let written = self.b.dynamic_update_slice(longer, new, starts);
        self.b.slice(written, &vec![0; shape.len()], &shape, &vec![1; shape.len()])
    }

    fn dot(&mut self, pair: Pair<'_>, mut args: Vec<Laid>, dims: &DotDims) -> Result<Laid> {
        let (mut right, mut left) = (args.remove(1), args.remove(0));
        let batching = dims.lhs_batching.iter().zip(&dims.rhs_batching);
        let contracting = dims.lhs_contracting.iter().zip(&dims.rhs_contracting);
        for (&l, &r) in batching.chain(contracting) {
            (left, right) = self.paired((left, l as usize), (right, r as usize))?;
        }
        let places = |list: &Dims| list.iter().map(|&d| d as usize).collect::<Vec<_>>();
        let operands = [
            self.zeroed(&left, &places(&dims.lhs_contracting)),
            self.zeroed(&right, &places(&dims.rhs_contracting)),
        ];
        let mut layout: Vec<Dim> =
            dims.lhs_batching.iter().map(|&d| left.layout[d as usize].clone()).collect();
        for (x, batching, contracting) in [
            (&left, &dims.lhs_batching, &dims.lhs_contracting),
            (&right, &dims.rhs_batching, &dims.rhs_contracting),
        ] {
            let free = |d: &usize| !batching.contains(&(*d as i64)) && !contracting.contains(&(*d as i64));
            layout.extend((0..x.layout.len()).filter(free).map(|d| x.layout[d].clone()));
        }
        layout.iter_mut().for_each(|d| d.even = false);
        let ty = TensorType::scalar(pair.bound.dtype);
        let v = self.b.copied(pair.p.op.clone(), &operands, &[ty], &[])[0];
        Ok(Laid { v, layout })
    }

    fn gather(
        &mut self,
        pair: Pair<'_>,
        mut args: Vec<Laid>,
        dims: &GatherDims,
        sizes: [&Dims; 3],
        sorted: bool,
    ) -> Result<Laid> {
        let (mut index, mut x) = (args.remove(1), args.remove(0));
        let vector = dims.index_vector_dim as usize;
        for (&own, &other) in dims.operand_batching_dims.iter().zip(&dims.start_indices_batching_dims) {
            (x, index) = self.paired((x, own as usize), (index, other as usize))?;
        }
        let batched = |d: usize| dims.operand_batching_dims.contains(&(d as i64));
        let taken = |d: usize| sizes.map(|own| own[d]);
        let is_whole = |x: &Laid, d: usize| x.layout[d].sizes() == taken(d);
        let indexed = |x: &Laid, d: usize| !batched(d) && !is_whole(x, d);
        let rank = x.layout.len();
        let which: Vec<bool> = (0..rank).map(|d| indexed(&x, d)).collect();
        x = self.prefixed(x, |d| which[d])?;
        if (0..rank).any(|d| which[d] && layout::varies(taken(d))) {
            return Err("how much is taken depends on the size".into());
        }
        let last = |d: i64| each(x.layout[d as usize].sizes(), taken(d as usize), |a, b| a - b);
        let limits: Vec<Three> = dims.start_index_map.iter().map(|&d| last(d)).collect();
        if limits.iter().any(|&limit| layout::varies(limit)) {
            index.v = self.limited(&index, vector, &limits);
        }
        let v = self.b.gather(x.v, index.v, dims, sizes[0], sorted);
        let mut own = (0..rank).filter(|d| !batched(*d) && !dims.collapsed_slice_dims.contains(&(*d as i64)));
        let mut others = (0..index.layout.len()).filter(|&d| d != vector);
        let mut layout = Vec::new();
        for d in 0..pair.bound.rank() {
            let dim = if dims.offset_dims.contains(&(d as i64)) {
                let from = own.next().ok_or("a gather of another rank")?;
                if which[from] { pair.dim(d) } else { x.layout[from].clone() }
            } else {
                index.layout[others.next().ok_or("a gather of another rank")?].clone()
            };
            layout.push(Dim { even: false, ..dim });
        }
        Ok(Laid { v, layout })
    }

    /// Indices that are at most these.
    fn limited(&mut self, index: &Laid, vector: usize, limits: &[Three]) -> Value {
        let shape = self.b.shape(index.v);
        let dtype = self.b.dtype(index.v);
        let numbers: Vec<Value> = limits
            .iter()
            .map(|&limit| {
                let n = self.number(limit);
                self.b.reshape(self.b.convert(n, dtype), &[1])
            })
            .collect();
        let all = self.b.concatenate(&numbers, 0);
        let most = match vector < shape.len() {
            true => self.b.broadcast_in_dim(all, &shape, &[vector as i64]),
            false => self.b.full(self.b.reshape(all, &[]), &shape),
        };
        self.b.minimum(index.v, most)
    }

    fn scatter(
        &mut self,
        pair: Pair<'_>,
        mut args: Vec<Laid>,
        dims: &ScatterDims,
        flags: ScatterFlags,
    ) -> Result<Vec<Laid>> {
        let count = args.len() / 2;
        let mut updates = args.split_off(count + 1);
        let mut index = args.remove(count);
        let mut xs = self.alike(args)?;
        let rank = xs[0].layout.len();
        let vector = dims.index_vector_dim as usize;
        let is = |list: &Dims, d: usize| list.contains(&(d as i64));
        for x in &mut xs {
            let laid = self.prefixed(x.clone(), |d| {
                is(&dims.scatter_dims_to_operand_dims, d) || is(&dims.inserted_window_dims, d)
            })?;
            *x = laid;
            // What is written may differ from place to place.
            x.layout.iter_mut().for_each(|d| d.even = false);
        }
        let batching = dims.input_batching_dims.iter().zip(&dims.scatter_indices_batching_dims);
        for (&own, &other) in batching {
            let to = xs[0].layout[own as usize].clone();
            index = self.relaid(index, other as usize, &to)?;
        }
        let windows: Vec<usize> = (0..rank)
            .filter(|&d| !is(&dims.inserted_window_dims, d) && !is(&dims.input_batching_dims, d))
            .collect();
        let places: Vec<usize> = (0..index.layout.len()).filter(|&d| d != vector).collect();
        for update in &mut updates {
            let (mut window, mut place) = (windows.iter(), places.iter());
            for d in 0..update.layout.len() {
                if is(&dims.update_window_dims, d) {
                    let own = *window.next().ok_or("a scatter of another rank")?;
                    let (to, new) = (xs[0].layout[own].clone(), &update.layout[d]);
                    if to.sizes() == new.sizes() {
                        *update = self.relaid(update.clone(), d, &to)?;
                    } else if to.varies() || new.varies() {
                        return Err("how much is written depends on the size".into());
                    }
                } else {
                    let at = *place.next().ok_or("a scatter of another rank")?;
                    let own = update.clone();
                    let (new, laid) = self.paired((index, at), (own, d))?;
                    (index, *update) = (new, laid);
                }
            }
        }
        // The layouts of the indices may have changed with later updates.
        for update in &mut updates {
            let mut place = places.iter();
            for d in (0..update.layout.len()).filter(|&d| !is(&dims.update_window_dims, d)) {
                let at = *place.next().ok_or("a scatter of another rank")?;
                *update = self.relaid(update.clone(), d, &index.layout[at].clone())?;
            }
        }
        let dtype = self.b.dtype(index.v);
        let nowhere = match dtype.is_signed() {
            true => self.b.scalar_i64(dtype, -1),
            false => self.b.max_value(dtype),
        };
        let mask = places.iter().any(|&d| index.layout[d].varies());
        let flags = if mask { ScatterFlags::default() } else { flags };
        let at = self.masked(&index, &places, nowhere);
        let region = self.region(pair.p.regions[0], pair.s.regions[0])?;
        let values = |list: &[Laid]| list.iter().map(|x| x.v).collect::<Vec<_>>();
        let operands: Vec<Value> = [values(&xs), vec![at], values(&updates)].concat();
        let made = self.b.copied(Op::Scatter(Box::new(dims.clone()), flags), &operands, &[], &[region]);
        Ok(made.into_iter().zip(xs).map(|(v, x)| Laid { v, layout: x.layout }).collect())
    }

    fn reduce(&mut self, pair: Pair<'_>, mut args: Vec<Laid>, dims: &Dims) -> Result<Vec<Laid>> {
        let starts = args.split_off(args.len() / 2);
        let xs = self.alike(args)?;
        let over: Vec<usize> = dims.iter().map(|&d| d as usize).collect();
        let made = self.reduced(pair, &xs, &starts, &over)?;
        let rest = (0..xs[0].layout.len()).filter(|d| !over.contains(d));
        let layout: Vec<Dim> = rest
            .map(|d| Dim { even: xs.iter().all(|x| x.layout[d].even), ..xs[0].layout[d].clone() })
            .collect();
        Ok(made.into_iter().map(|v| Laid { v, layout: layout.clone() }).collect())
    }

    /// The values of a reduction over these dimensions, or over windows of them: what is not used is what it begins with.
    pub(super) fn reduced(
        &mut self,
        pair: Pair<'_>,
        xs: &[Laid],
        starts: &[Laid],
        over: &[usize],
    ) -> Result<Vec<Value>> {
        let mixes = over.iter().any(|&d| xs[0].layout[d].varies());
        if mixes && !self.ignores_start(pair.p.regions[0], &pair.p.operands[xs.len()..]) {
            return Err("a reduction that counts what it begins with".into());
        }
        let mut operands: Vec<Value> =
            xs.iter().zip(starts).map(|(x, start)| self.masked(x, over, start.v)).collect();
        operands.extend(starts.iter().map(|x| x.v));
        if let (Op::Reduce(dims), [x, start], Some(op)) =
            (&pair.p.op, &operands[..], self.only_op(pair.p.regions[0]))
            && self.b.vectorizes_reductions()
            && self.ignores_start(pair.p.regions[0], &pair.p.operands[1..])
        {
            return Ok(vec![self.b.reduce_with(op, *x, *start, dims)]);
        }
        let region = self.region(pair.p.regions[0], pair.s.regions[0])?;
        Ok(self.b.copied(pair.p.op.clone(), &operands, &[], &[region]))
    }

    fn sort(&mut self, pair: Pair<'_>, args: Vec<Laid>, d: usize, is_stable: bool) -> Result<Vec<Laid>> {
        let xs = self.alike(args)?;
        let dim = xs[0].layout[d].clone();
        let mut values: Vec<Value> = xs.iter().map(|x| x.v).collect();
        let (p, s) = (pair.p.regions[0], pair.s.regions[0]);
        let shape = self.b.shape(values[0]);
        let mut types: Vec<TensorType> = Vec::new();
        for &v in &values {
            types.extend(std::iter::repeat_n(TensorType::scalar(self.b.dtype(v)), 2));
        }
        let last = types.len();
        if dim.varies() {
            let used = self.mask(&dim);
            values.push(self.b.broadcast_in_dim(self.b.not(used), &shape, &[d as i64]));
            types.extend(std::iter::repeat_n(TensorType::scalar(DType::Pred), 2));
        }
        let (block, args) = self.b.open_region(&types, false);
        let done = self.body(p, s, &args[..last]);
        let mut before = done.clone().unwrap_or_default();
        if let (Some(first), true) = (before.first_mut(), dim.varies()) {
            // What is not used comes last.
            let (left, right) = (args[last], args[last + 1]);
            *first = self.b.select(self.b.ne(left, right), right, *first);
        }
        self.b.close_region(block, before);
        done?;
        let op = Op::Sort { dimension: d as i64, is_stable };
        let made = self.b.copied(op, &values, &[], &[block]);
        let laid = |(v, x): (Value, &Laid)| {
            let mut layout: Vec<Dim> = x.layout.iter().map(|d| Dim { even: false, ..d.clone() }).collect();
            layout[d] = dim.to_prefix();
            layout[d].even = false;
            Laid { v, layout }
        };
        Ok(made.into_iter().zip(&xs).map(laid).collect())
    }

    /// Systems of equations: how many matrices and right sides there are may vary, and not how many equations.
    fn triangular_solve(&mut self, pair: Pair<'_>, mut args: Vec<Laid>, is_left: bool) -> Result<Laid> {
        let (mut right, mut a) = (args.remove(1), args.remove(0));
        let batch = right.layout.len().saturating_sub(2);
        let equations = if is_left { batch } else { batch + 1 };
        if a.layout[batch..].iter().any(Dim::varies) || right.layout[equations].varies() {
            return Err("how many equations there are depends on the size".into());
        }
        for d in 0..batch {
            (a, right) = self.paired((a, d), (right, d))?;
        }
        let v = self.b.copied(pair.p.op.clone(), &[a.v, right.v], &[], &[])[0];
        Ok(Laid { v, layout: right.layout.into_iter().map(|d| Dim { even: false, ..d }).collect() })
    }

    /// An op that does the same for each element of all dimensions but the last ones.
    fn over_the_last(&mut self, pair: Pair<'_>, args: Vec<Laid>, last: usize) -> Result<Vec<Laid>> {
        let x = &args[0];
        let first = x.layout.len().saturating_sub(last);
        if x.layout[first..].iter().any(Dim::varies) {
            return Err("no rule is known for it where sizes vary".into());
        }
        let made = self.b.copied(pair.p.op.clone(), &[x.v], &[], &[]);
        let laid = |v: Value| {
            let mut layout = x.layout.clone();
            let shape = self.b.shape(v);
            for d in first..shape.len() {
                layout[d] = Dim::prefix([shape[d]; 3]);
            }
            layout.iter_mut().for_each(|d| d.even = false);
            Laid { v, layout }
        };
        Ok(made.into_iter().map(laid).collect())
    }
}
