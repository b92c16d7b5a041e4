//! Control flow, barriers, random bits and custom calls.

use super::{Builder, Lower};
use crate::ir::{Axes, CustomCall, Deferred, MemorySpace, Op, RngAlgorithm, Value};
use crate::types::{DType, TensorType};

impl Builder {
    /// `stablehlo.while`: runs `body` on the loop's values as long as `cond` (a scalar `Pred`) holds. Both may use outer
    /// values. Returns the last values, as many as `inits`.
    pub fn while_(
        &self,
        inits: &[Value],
        cond: impl FnOnce(&Builder, &[Value]) -> Value,
        body: impl FnOnce(&Builder, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let types: Vec<TensorType> = inits.iter().map(|&v| self.ty(v)).collect();
        let cond = self.region(types.clone(), true, |a| [cond(self, a)]);
        let body = self.region(types, true, |a| body(self, a));
        self.op_full(Op::While, inits, &[], &[cond, body]).values()
    }

    /// A loop over `i` in `start..limit` (integer scalars of one type): `body` gets (builder, i, values) and returns the
    /// new values.
    pub fn for_loop(
        &self,
        start: Value,
        limit: Value,
        inits: &[Value],
        body: impl FnOnce(&Builder, Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let all: Vec<Value> = [start].iter().chain(inits).copied().collect();
        let out = self.while_(
            &all,
            |b, a| b.lt(a[0], limit),
            |b, a| {
                let mut next = vec![b.add(a[0], b.scalar_i64(b.dtype(a[0]), 1))];
                next.extend(body(b, a[0], &a[1..]));
                next
            },
        );
        out[1..].to_vec()
    }

    /// `stablehlo.if` on a scalar `Pred`. Both branches may use outer values and return the same types.
    pub fn if_(
        &self,
        pred: Value,
        on_true: impl FnOnce(&Builder) -> Vec<Value>,
        on_false: impl FnOnce(&Builder) -> Vec<Value>,
    ) -> Vec<Value> {
        let on_true = self.region([], true, |_| on_true(self));
        let on_false = self.region([], true, |_| on_false(self));
        self.op_full(Op::If, &[pred], &[], &[on_true, on_false]).values()
    }

    /// `stablehlo.case` on a scalar `S32`: `branch` is called once for each of `0..count` and returns that branch's results,
    /// of the same types every time. An index out of range takes the last branch. Branches may use outer values.
    pub fn case(
        &self,
        index: Value,
        count: usize,
        mut branch: impl FnMut(&Builder, usize) -> Vec<Value>,
    ) -> Vec<Value> {
        let regions: Vec<_> = (0..count).map(|i| self.region([], true, |_| branch(self, i))).collect();
        self.op_full(Op::Case, &[index], &[], &regions).values()
    }

    /// `stablehlo.optimization_barrier`: the same values, which the compiler may neither move across nor recompute.
    pub fn optimization_barrier(&self, xs: &[Value]) -> Vec<Value> {
        self.op_full(Op::OptimizationBarrier, xs, &[], &[]).values()
    }

    /// Whether programs may keep values in the memory of the host: for compilers that know that memory space.
    pub fn use_host_memory(&self, on: bool) {
        self.inner.borrow_mut().has_host_memory = on;
    }

    /// XLA's `annotate_device_placement`: the same value, kept in this memory space. What is computed of a value on the host
    /// has to come through such a call back to the device. Without [host memory](Builder::use_host_memory) a barrier.
    pub fn annotate_device_placement(&self, x: Value, memory: MemorySpace) -> Value {
        if !self.inner.borrow().has_host_memory {
            return self.optimization_barrier(&[x])[0];
        }
        self.op(Op::AnnotateDevicePlacement(memory), &[x])
    }

    /// Whether the order of [`Builder::after`] is in the values themselves: for compilers that forget barriers before they
    /// choose an order.
    pub fn order_by_values(&self, on: bool) {
        self.inner.borrow_mut().orders_by_values = on;
    }

    /// `x`, which the compiler takes for another value, and has no sooner than `after`.
    pub fn after(&self, x: Value, after: Value) -> Value {
        let values = self.optimization_barrier(&[x, after]);
        let (x, after) = (values[0], values[1]);
        if !self.inner.borrow().orders_by_values || self.numel(after) == 0 {
            return x;
        }
        let rank = self.rank(after);
        let (start, limit) = (vec![0; rank], vec![1; rank]);
        let first = self.reshape(self.slice(after, &start, &limit, &limit), &[]);
        let first = if self.dtype(first).is_complex() { self.real(first) } else { first };
        let n = self.bitcast_convert(self.convert(first, DType::F32), DType::U32);
        let one = self.scalar_i64(DType::U32, 1);
        // One of two neighbours is even, which no compiler of these looks for.
        let is_odd = self.and(self.multiply(n, self.add(n, one)), one);
        let yes = self.eq(is_odd, self.scalar_i64(DType::U32, 0));
        self.select(self.full(yes, &self.shape(x)), x, self.zeros_like(x))
    }

    /// `stablehlo.rng_bit_generator`: the new state and `ty` full of random bits: any integer or float type, the latter as
    /// raw bits. State: a `ui64` vector, of 2 for ThreeFry, of 2 or 3 for Philox.
    pub fn rng_bit_generator(&self, state: Value, ty: TensorType, algorithm: RngAlgorithm) -> (Value, Value) {
        // XLA returns the unsigned type whatever was asked for.
        let unsigned = match ty.dtype.bits() {
            8 => DType::U8,
            16 => DType::U16,
            32 => DType::U32,
            64 if !ty.dtype.is_complex() => DType::U64,
            _ => ty.dtype, // refused by inference
        };
        let r = self.op_full(Op::RngBitGenerator(algorithm), &[state], &[ty.with_dtype(unsigned)], &[]);
        (Value(r.first), self.bitcast_convert(Value(r.first + 1), ty.dtype))
    }

    /// `stablehlo.custom_call` of a typed FFI handler that returns these types.
    pub fn custom_call(&self, operands: &[Value], results: &[TensorType], call: CustomCall) -> Vec<Value> {
        self.op_full(Op::CustomCall(Box::new(call)), operands, results, &[]).values()
    }

    /// A computation that gives these types, for an [outline](Builder::is_outline) alone: its ops are made when a module
    /// for all sizes is. Two of one `name` do the same with the same operands.
    pub fn deferred(
        &self,
        name: String,
        operands: &[Value],
        results: &[TensorType],
        axes: Axes,
        lower: Lower,
    ) -> Vec<Value> {
        let number = {
            let deferred = &mut self.inner.borrow_mut().deferred;
            deferred.push(lower);
            deferred.len() as u32 - 1
        };
        let op = Op::Deferred(Box::new(Deferred { name, axes, number }));
        self.op_full(op, operands, results, &[]).values()
    }
}
