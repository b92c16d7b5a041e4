//! What lowerings work in: a builder with torch's rules around it.

use crate::args::{Alpha, Offset, Rng, Scalar, Tensor};
use crate::dtype::{self, Category, category};
use crate::error::{self, ErrorKind, Result, runtime};
use crate::promote::result_type;
use crate::target::TargetOptions;
use oxitorch_hlo::{self as hlo, Axes, Builder, DType, Dims, TensorType, Value};
use std::cell::{Cell, RefCell};

/// `torch.get_float32_matmul_precision()`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MatmulPrecision {
    /// float32 all the way.
    #[default]
    Highest,
    /// Three bfloat16 passes or better.
    High,
    /// Whatever is fastest.
    Default,
}

/// Checks of values that a lowering emits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Checks {
    /// None.
    #[default]
    None,
    /// Those that PyTorch's CUDA kernels assert, where they cost next to nothing.
    Asserts,
    /// All.
    All,
}

/// Checking so many values takes microseconds.
const FEW: i64 = 1 << 16;
/// Where an op moves so many elements for each value, checking the value costs little beside it.
const MUCH: i64 = 16;

/// What a lowering may depend on besides its arguments; part of every program key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// `torch.get_default_dtype()`.
    pub default_dtype: DType,
    /// Precision of float32 matrix products and convolutions.
    pub matmul: MatmulPrecision,
    /// Which checks of values (index bounds and the like) to emit.
    pub checks: Checks,
    /// What the platform's compiler wants.
    pub target: TargetOptions,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            default_dtype: DType::F32,
            matmul: MatmulPrecision::Highest,
            checks: Checks::None,
            target: TargetOptions::NONE,
        }
    }
}

/// A condition on values that torch on the CPU would have raised for.
#[derive(Clone, Debug)]
pub struct Check {
    /// 0-d pred: false is an error.
    pub ok: Value,
    /// The class to raise.
    pub error: ErrorKind,
    /// What to say.
    pub message: String,
}

/// The context of one lowering: a builder with torch's rules around it.
pub struct Ctx<'a> {
    builder: &'a Builder,
    operands: &'a [Value],
    offsets: &'a [Offset],
    /// What the lowering may depend on besides its arguments.
    pub config: &'a Config,
    /// The row's name, for messages.
    pub op: &'static str,
    products: bool,
    rng_blocks: Cell<u64>,
    checks: RefCell<Vec<Check>>,
}

impl std::ops::Deref for Ctx<'_> {
    type Target = Builder;
    fn deref(&self) -> &Builder {
        self.builder
    }
}

impl<'a> Ctx<'a> {
    /// The context of a row by this name; see [`Row::products`](crate::Row::products).
    pub(crate) fn new(
        op: &'static str,
        products: bool,
        builder: &'a Builder,
        config: &'a Config,
        operands: &'a [Value],
        offsets: &'a [Offset],
    ) -> Self {
        let (rng_blocks, checks) = (Cell::new(0), RefCell::default());
        Ctx { builder, operands, offsets, config, op, products, rng_blocks, checks }
    }

    /// What the lowering took and asked for: Philox blocks, and conditions.
    pub(crate) fn taken(self) -> (u64, Vec<Check>) {
        (self.rng_blocks.get(), self.checks.into_inner())
    }

    /// Leaves a computation open in an outline, where how it is done follows from sizes: `lower` is called when these are
    /// known, with the operands and with which places of the axes that want to know it are in use. Nothing elsewhere.
    /// Two of one name, which are lowered with one configuration, do the same with the same operands.
    pub(crate) fn deferred(
        &self,
        name: String,
        operands: &[Value],
        results: &[TensorType],
        axes: Axes,
        lower: impl Fn(&Ctx, &[Value], &[Option<Value>]) -> Result<Vec<Value>> + Send + Sync + 'static,
    ) -> Option<Vec<Value>> {
        if !self.builder.is_outline() {
            return None;
        }
        let (op, products, config) = (self.op, self.products, self.config.clone());
        let lower = move |builder: &Builder, operands: &[Value], used: &[Option<Value>]| {
            let c = Ctx::new(op, products, builder, &config, &[], &[]);
            lower(&c, operands, used).unwrap_or_else(|e| {
                builder.fail(hlo::Error::Op { op: "deferred", operands: Vec::new(), reason: e.to_string() });
                Vec::new()
            })
        };
        Some(self.builder.deferred(name, operands, results, axes, Box::new(lower)))
    }

    /// Precision of float32 matrix products and convolutions. Callers know it only for rows that say `products()`.
    pub fn matmul_precision(&self) -> MatmulPrecision {
        debug_assert!(self.products, "the row of {} must say `.products()`", self.op);
        self.config.matmul
    }

    pub(crate) fn operand(&self, i: u32) -> Result<Value> {
        let missing = || runtime(format!("operand {i} of {} is not there", self.operands.len()));
        self.operands.get(i as usize).copied().ok_or_else(missing)
    }

    pub(crate) fn offset(&self, i: u32) -> Result<Offset> {
        let missing = || runtime(format!("offset {i} of {} is not there", self.offsets.len()));
        self.offsets.get(i as usize).copied().ok_or_else(missing)
    }

    /// Says that the program must not be trusted unless `ok` (0-d pred) holds. For what only the CPU looks at.
    pub fn check(&self, error: ErrorKind, message: impl Into<String>, ok: impl FnOnce() -> Value) {
        if self.config.checks == Checks::All {
            self.push_check(error, message, ok());
        }
    }

    /// The same for what PyTorch's CUDA kernels assert, and for what costs as little.
    pub fn assert(&self, error: ErrorKind, message: impl Into<String>, ok: impl FnOnce() -> Value) {
        if self.config.checks != Checks::None {
            self.push_check(error, message, ok());
        }
    }

    /// The same beside an op that does so much, in elements moved, for each of the values that are looked at. Where it does
    /// little for many, the assertion would take a good part of its time.
    pub fn assert_beside(
        &self,
        (values, each): (Value, i64),
        error: ErrorKind,
        message: impl Into<String>,
        ok: impl FnOnce() -> Value,
    ) {
        if self.numel(values) <= FEW || each >= MUCH {
            self.assert(error, message, ok)
        } else {
            self.check(error, message, ok)
        }
    }

    fn push_check(&self, error: ErrorKind, message: impl Into<String>, ok: Value) {
        self.checks.borrow_mut().push(Check { ok, error, message: message.into() });
    }

    /// Whether all elements of a pred tensor hold, as a 0-d pred.
    pub fn all(&self, x: Value) -> Value {
        self.reduce_all(x, &all_dims(self, x))
    }

    /// Whether any element of a pred tensor holds, as a 0-d pred.
    pub fn any(&self, x: Value) -> Value {
        self.reduce_any(x, &all_dims(self, x))
    }

    /// Reduces one tensor over `dims` (which go away) with a binary operation.
    pub fn reduce1(
        &self,
        x: Value,
        init: Value,
        dims: &[i64],
        f: impl Fn(&Builder, Value, Value) -> Value,
    ) -> Value {
        if dims.is_empty() {
            return x;
        }
        self.reduce(&[x], &[init], dims, |b, x, y| vec![f(b, x[0], y[0])])[0]
    }

    /// Takes `n` Philox blocks: returns the generator state u64\[2\] at which they start.
    pub fn rng_take(&self, rng: Rng, blocks: u64) -> Value {
        let used = self.rng_blocks.replace(self.rng_blocks.get() + blocks);
        if used == 0 {
            return rng.0;
        }
        let step = self.concatenate(&[self.rng_word(0), self.rng_word(used)], 0);
        self.add(rng.0, step)
    }

    fn rng_word(&self, x: u64) -> Value {
        self.full(self.scalar_i64(DType::U64, x as i64), &[1])
    }

    /// A dimension counted from the front; 0-d tensors have one dimension here, as in torch.
    pub fn dim(&self, dim: i64, rank: usize) -> Result<usize> {
        let n = (rank as i64).max(1);
        if !(-n..n).contains(&dim) {
            return Err(error::dim_range(dim, rank));
        }
        Ok(dim.rem_euclid(n) as usize)
    }

    /// Dimensions counted from the front, each at most once; none given means all.
    pub fn dims(&self, dims: &[i64], rank: usize) -> Result<Dims> {
        if dims.is_empty() {
            return Ok((0..rank as i64).collect());
        }
        // `at::dim_list_to_bitset`
        if rank > 64 {
            return Err(runtime("only tensors with up to 64 dims are supported"));
        }
        let mut out = Dims::new();
        for &d in dims {
            let d = self.dim(d, rank)? as i64;
            if out.contains(&d) {
                return Err(runtime(format!("dim {d} appears multiple times in the list of dims")));
            }
            out.push(d);
        }
        out.retain(|d| *d < rank as i64);
        out.sort_unstable();
        Ok(out)
    }

    /// `at::result_type`.
    pub fn result_type(&self, tensors: &[Tensor]) -> Result<DType> {
        result_type(tensors, self.config.default_dtype)
    }

    /// `at::result_type`, with the default dtype in place of bool and integers.
    pub fn float_result_type(&self, tensors: &[Tensor]) -> Result<DType> {
        self.result_type(tensors).map(|t| self.float_of(t))
    }

    /// The dtype that a float function gives for this one.
    pub fn float_of(&self, dtype: DType) -> DType {
        if category(dtype) <= Category::Int { self.config.default_dtype } else { dtype }
    }

    /// The shape that several shapes broadcast to.
    pub fn broadcast_shapes(&self, shapes: &[Dims]) -> Result<Dims> {
        broadcast_shapes(shapes)
    }

    /// Expands to `shape` by torch's rule (dimensions are aligned at the end).
    pub fn expand(&self, x: Value, shape: &[i64]) -> Result<Value> {
        let from = self.shape(x);
        if from.as_slice() == shape {
            return Ok(x);
        }
        let skip = shape.len().checked_sub(from.len()).ok_or_else(|| error::expand(&from, shape))?;
        if from.iter().zip(&shape[skip..]).any(|(&a, &b)| a != b && a != 1) {
            return Err(error::expand(&from, shape));
        }
        // StableHLO does not stretch size 1 when it is also reshaped away; it does in place.
        let dims: Dims = (skip as i64..shape.len() as i64).collect();
        Ok(self.broadcast_in_dim(x, shape, &dims))
    }

    /// Converts and expands tensors to one dtype and their common shape.
    pub fn align<const N: usize>(&self, xs: [Value; N], dtype: DType) -> Result<[Value; N]> {
        let shape = broadcast_shapes(&xs.map(|x| self.shape(x)))?;
        let mut out = xs;
        for x in &mut out {
            *x = self.expand(self.to(*x, dtype), &shape)?;
        }
        Ok(out)
    }

    /// Converts as a C cast does: integers wrap, floats truncate toward zero, complex drops its imaginary part.
    pub fn to(&self, x: Value, to: DType) -> Value {
        if self.config.target.bf16_dot_results
            && (self.dtype(x), to) == (DType::F32, DType::BF16)
            && let Some(rounded) = self.rounded_product(x).filter(|y| self.dtype(*y) == to)
        {
            return rounded;
        }
        cast(self, x, to)
    }

    /// A runtime number as a 0-d value of this dtype.
    pub fn number(&self, s: Scalar, dtype: DType) -> Value {
        self.to(s.value, dtype)
    }

    /// The distance from 1 to the next number of float32 or float64, as this platform's compiler keeps it.
    pub fn epsilon(&self, dtype: DType) -> f64 {
        match dtype {
            // Of the two float32 that it is kept as, each has 24 bits; the last ones are lost in products.
            DType::F64 if self.config.target.int64_as_pairs => 2f64.powi(-44),
            DType::F64 => f64::EPSILON,
            _ => f32::EPSILON.into(),
        }
    }

    /// A runtime number as a tensor of this dtype and shape.
    pub fn number_like(&self, s: Scalar, dtype: DType, shape: &[i64]) -> Value {
        self.full(self.number(s, dtype), shape)
    }

    /// `x * alpha`, in the dtype of `x`.
    pub fn times(&self, x: Value, alpha: Alpha) -> Value {
        match alpha {
            Alpha::One => x,
            Alpha::Times(s) => {
                let shape = self.shape(x);
                self.multiply(x, self.number_like(s, self.dtype(x), &shape))
            }
        }
    }

    /// A constant of the dtype and shape of `x`.
    pub fn like(&self, x: Value, number: f64) -> Value {
        self.full_like(x, number)
    }

    /// Runs `f` on `x` in its opmath dtype and rounds the result to the dtype of `x`.
    pub fn in_opmath(&self, x: Value, f: impl FnOnce(Value) -> Value) -> Value {
        let dtype = self.dtype(x);
        self.to(f(self.to(x, dtype::opmath(dtype))), dtype)
    }
}

fn all_dims(b: &Builder, x: Value) -> Dims {
    (0..b.rank(x) as i64).collect()
}

/// Converts as a C cast does: integers wrap, floats truncate toward zero, complex drops its imaginary part.
pub fn cast(b: &Builder, x: Value, to: DType) -> Value {
    let from = b.dtype(x);
    if from == to {
        return x;
    }
    if to == DType::Pred {
        let zero = b.zeros_like(x);
        return b.ne(x, zero);
    }
    let x = if from.is_complex() && !to.is_complex() { b.real(x) } else { x };
    // XLA saturates floats into narrow integers; C goes through int and wraps.
    if b.dtype(x).is_float() && to.is_integral() && to.size_bytes() < 4 {
        return b.convert(b.convert(x, DType::S32), to);
    }
    match to {
        DType::F8E4M3FN => to_float8(b, x, to, 3, -6, Some(448.0)),
        DType::F8E5M2 => to_float8(b, x, to, 2, -14, None),
        _ => b.convert(x, to),
    }
}

/// Rounds once: to `bits` bits behind the first, and below `2^least` to the spacing that numbers have there. XLA would round
/// to float16 before, and gives no particular number for those that are too large. What is beyond `largest` becomes that,
/// as in PyTorch.
fn to_float8(b: &Builder, x: Value, to: DType, bits: u32, least: i32, largest: Option<f64>) -> Value {
    if matches!(b.dtype(x), DType::F8E4M3FN | DType::F8E5M2) && largest.is_none() {
        return b.convert(x, to); // float16 holds all of it, so that it is rounded once
    }
    let x = b.convert(x, DType::F32);
    let number = |v: f64| b.full_like(x, v);
    let spacing = f64::from(least - bits as i32).exp2();
    let small = b.multiply(b.round_nearest_even(b.multiply(x, number(1.0 / spacing))), number(spacing));
    let is_small = b.lt(b.abs(x), number(f64::from(least).exp2()));
    let mut y = b.select(is_small, small, b.reduce_precision(x, 8, bits));
    if let Some(largest) = largest {
        let cut = b.clamp(number(-largest), y, number(largest));
        y = b.select(b.is_nan(x), x, cut);
    }
    b.convert(y, to)
}

/// The shape that several shapes broadcast to, or torch's error.
pub fn broadcast_shapes(shapes: &[Dims]) -> Result<Dims> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut out = Dims::from_elem(1, rank);
    for shape in shapes {
        let skip = rank - shape.len();
        // From the end, as torch names the last dimension that does not fit.
        for (i, &size) in shape.iter().enumerate().rev() {
            let have = &mut out[skip + i];
            if *have == 1 {
                *have = size;
            } else if size != 1 && size != *have {
                return Err(error::size_mismatch(*have, size, skip + i));
            }
        }
    }
    Ok(out)
}
