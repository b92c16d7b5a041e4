//! Running a row: the context that lowerings work in, and the door they are called through.

use crate::args::{Alpha, Arg, FromArg, Offset, Param, Rng, Scalar, Tensor};
use crate::domain::Operand;
use crate::dtype::{self, Category, can_cast, category};
use crate::error::{self, Error, ErrorKind, Result, runtime};
use crate::promote::result_type;
use crate::table::{OpId, Promote, Row, Rule, row};
use crate::target::TargetOptions;
use oxitorch_hlo::{self as hlo, Axes, Builder, DType, Dims, Direction, TensorType, Value};
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;

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
    /// Which checks of values (index bounds and the like) to emit into [`Lowered::checks`].
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

/// What a lowering produced.
#[derive(Clone, Debug)]
pub struct Lowered {
    /// Schema order, lists flattened. For rows that write to arguments: the new value of each written tensor in order,
    /// then the returns that are no alias.
    pub outputs: Vec<Option<Value>>,
    /// Philox counter blocks of 128 bits that were used; the generator's offset advances by as many.
    pub rng_blocks: u64,
    /// Conditions to verify after the program ran.
    pub checks: Vec<Check>,
}

/// Where a result goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Dest {
    /// A new tensor: as the row gives it.
    New,
    /// An `out=` tensor of this dtype and the result's size.
    Cast(DType),
    /// An `out=` tensor of this dtype and another size; it gets the result's size and strides.
    Resized(DType),
    /// The same for an op that only counts elements: where they are as many, the shape stays too.
    Refill(TensorType),
    /// An argument that is overwritten: dtype and shape stay.
    Into(TensorType),
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
    fn new(
        row: &'static Row,
        builder: &'a Builder,
        config: &'a Config,
        operands: &'a [Value],
        offsets: &'a [Offset],
    ) -> Self {
        let (rng_blocks, checks) = (Cell::new(0), RefCell::default());
        Ctx { builder, operands, offsets, config, op: row.name, products: row.products, rng_blocks, checks }
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
            let (rng_blocks, checks) = (Cell::new(0), RefCell::default());
            let (operands_of_row, offsets) = (&[], &[]);
            let config = &config;
            let c =
                Ctx { builder, operands: operands_of_row, offsets, config, op, products, rng_blocks, checks };
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

/// What a lowering function may return.
pub trait IntoOutputs {
    /// The outputs in schema order.
    fn into_outputs(self) -> Result<Vec<Option<Value>>>;
}

impl IntoOutputs for Value {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(vec![Some(self)])
    }
}

impl IntoOutputs for Vec<Value> {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(self.into_iter().map(Some).collect())
    }
}

impl IntoOutputs for Vec<Option<Value>> {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(self)
    }
}

impl IntoOutputs for (Value, Value) {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(vec![Some(self.0), Some(self.1)])
    }
}

impl IntoOutputs for (Value, Value, Value) {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(vec![Some(self.0), Some(self.1), Some(self.2)])
    }
}

impl IntoOutputs for (Option<Value>, Option<Value>) {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(vec![self.0, self.1])
    }
}

impl IntoOutputs for (Option<Value>, Option<Value>, Option<Value>) {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        Ok(vec![self.0, self.1, self.2])
    }
}

impl<T: IntoOutputs> IntoOutputs for Result<T> {
    fn into_outputs(self) -> Result<Vec<Option<Value>>> {
        self?.into_outputs()
    }
}

/// A lowering function with its parameter types erased.
pub trait Lowering: Sync {
    /// Calls the function.
    fn lower(&self, c: &Ctx, args: &[Arg]) -> Result<Vec<Option<Value>>>;
    /// What it takes.
    fn params(&self) -> &'static [Param];
}

/// Wraps any `fn(&Ctx, A, B, ..) -> R`, so that rows can name plain functions (the handler trick of axum and bevy).
pub struct Handler<Sig, T>(T, PhantomData<fn(Sig)>);

impl<Sig, T> Handler<Sig, T> {
    /// Wraps a function.
    pub const fn new(f: T) -> Self {
        Handler(f, PhantomData)
    }
}

macro_rules! lowering {
    ($($a:ident)*) => {
        impl<T, R, $($a),*> Lowering for Handler<($($a,)*), T>
        where
            T: Fn(&Ctx, $($a),*) -> R + Sync,
            R: IntoOutputs,
            $($a: FromArg),*
        {
            #[allow(non_snake_case)]
            fn lower(&self, c: &Ctx, args: &[Arg]) -> Result<Vec<Option<Value>>> {
                let [$($a),*] = args else {
                    return Err(arity(self.params().len(), args.len()));
                };
                (self.0)(c, $($a::from_arg(c, $a)?),*).into_outputs()
            }
            fn params(&self) -> &'static [Param] {
                const { &[$(Param::of::<$a>()),*] }
            }
        }
    };
}

macro_rules! lowerings {
    ($first:ident $($rest:ident)*) => {
        lowering!($first $($rest)*);
        lowerings!($($rest)*);
    };
    () => {};
}
lowerings!(A B C D E F G H I J K L M N O P Q S U V);

fn arity(want: usize, got: usize) -> Error {
    runtime(format!("expected {want} arguments, got {got}"))
}

/// Lowers one recorded op.
pub fn lower(
    op: OpId,
    b: &Builder,
    config: &Config,
    args: &[Arg],
    operands: &[Value],
    offsets: &[Offset],
) -> Result<Lowered> {
    lower_into(op, b, config, args, operands, offsets, &[])
}

/// Lowers one recorded op whose results go to these places (missing entries are new tensors).
pub fn lower_into(
    op: OpId,
    b: &Builder,
    config: &Config,
    args: &[Arg],
    operands: &[Value],
    offsets: &[Offset],
    dests: &[Dest],
) -> Result<Lowered> {
    let row = row(op);
    let c = Ctx::new(row, b, config, operands, offsets);
    let cast = |d: &Dest| match d {
        Dest::Cast(dtype) | Dest::Resized(dtype) => Some(*dtype),
        Dest::Refill(ty) => Some(ty.dtype),
        _ => None,
    };
    let computed_in = |dtype| row.out_dtypes().computed_in(row.params(), args, dtype);
    let computed = dests.iter().find_map(cast).and_then(computed_in);
    let into = dests.iter().find_map(|d| if let Dest::Into(ty) = d { Some(ty.dtype) } else { None });
    // Rows without a check may take tensors of dtypes that have nothing in common, such as indices.
    let dtype = if row.check_dtype.is_some() { promoted(&c, args)? } else { None };
    check_dtype(row, dtype, into)?;
    let mut outputs = run(row, &c, computed.as_deref().unwrap_or(args))?;
    if dtype.is_none() {
        check_dtype(row, outputs.first().copied().flatten().map(|v| c.dtype(v)), into)?;
    }
    for (out, dest) in outputs.iter_mut().zip(dests) {
        *out = out.map(|v| deliver(row, &c, v, dest)).transpose()?;
    }
    if let Some(e) = b.error() {
        return Err(misfit(row, &e, args));
    }
    Ok(Lowered { outputs, rng_blocks: c.rng_blocks.get(), checks: c.checks.into_inner() })
}

/// Asks a row about the dtype of its tensors; of its result, if it takes none.
fn check_dtype(row: &Row, dtype: Option<DType>, into: Option<DType>) -> Result<()> {
    let (Some(check), Some(dtype)) = (row.check_dtype, dtype) else { return Ok(()) };
    match into {
        Some(to) if !can_cast(dtype, to) => Err(error::cast(dtype, to)),
        _ => check(Operand { op: row.base(), dtype, in_place: into.is_some() }),
    }
}

/// The dtype that the tensors among the arguments promote to.
fn promoted(c: &Ctx, args: &[Arg]) -> Result<Option<DType>> {
    let tensors = args.iter().filter(|a| matches!(a, Arg::Tensor(_)));
    let tensors: Vec<Tensor> = tensors.map(|a| Tensor::from_arg(c, a)).collect::<Result<_>>()?;
    if tensors.is_empty() { Ok(None) } else { c.result_type(&tensors).map(Some) }
}

/// An op that StableHLO does not have for an element type is one that torch has no kernel for.
fn misfit(row: &Row, e: &oxitorch_hlo::Error, args: &[Arg]) -> Error {
    let dtype = args.iter().find_map(|a| match a {
        Arg::Tensor(t) => Some(t.ty.dtype),
        Arg::Tensors(l) => l.iter().flatten().next().map(|t| t.ty.dtype),
        _ => None,
    });
    match (e, dtype) {
        (oxitorch_hlo::Error::ElementType { .. }, Some(dtype)) => error::not_implemented(row.base(), dtype),
        _ => runtime(e.to_string()),
    }
}

fn deliver(row: &Row, c: &Ctx, v: Value, dest: &Dest) -> Result<Value> {
    match dest {
        Dest::New => Ok(v),
        Dest::Cast(dtype) | Dest::Resized(dtype) => {
            row.out_dtypes().check(row.base(), c.dtype(v), *dtype)?;
            Ok(c.to(v, *dtype))
        }
        Dest::Refill(ty) => {
            row.out_dtypes().check(row.base(), c.dtype(v), ty.dtype)?;
            let v = c.to(v, ty.dtype);
            Ok(if c.numel(v) == ty.numel() { c.reshape(v, &ty.shape) } else { v })
        }
        Dest::Into(ty) if !can_cast(c.dtype(v), ty.dtype) => Err(error::cast(c.dtype(v), ty.dtype)),
        Dest::Into(ty) if c.shape(v) != ty.shape => Err(error::in_place_shape(&ty.shape, &c.shape(v))),
        Dest::Into(ty) => Ok(c.to(v, ty.dtype)),
    }
}

fn run(row: &Row, c: &Ctx, args: &[Arg]) -> Result<Vec<Option<Value>>> {
    match (&row.rule, args) {
        (Rule::Unary(p, f), [x]) => unary(c, *p, *f, Tensor::from_arg(c, x)?).into_outputs(),
        (Rule::Binary(p, f), [x, y]) => {
            binary(c, *p, *f, Tensor::from_arg(c, x)?, Tensor::from_arg(c, y)?).into_outputs()
        }
        (Rule::Compare(dir), [x, y]) => {
            compare(c, *dir, Tensor::from_arg(c, x)?, Tensor::from_arg(c, y)?).into_outputs()
        }
        (Rule::CompareScalar(dir), [x, y]) => {
            compare(c, *dir, Tensor::from_arg(c, x)?, Scalar::from_arg(c, y)?.tensor()).into_outputs()
        }
        (Rule::Custom(f), args) => f.lower(c, args),
        (rule, args) => Err(arity(rule.params().len(), args.len())),
    }
}

/// One operand: converted by the promotion kind, computed, converted back.
pub fn unary(c: &Ctx, p: Promote, f: fn(&Builder, Value) -> Value, x: Tensor) -> Result<Value> {
    Ok(match p {
        Promote::Same => f(c, x.value),
        Promote::Opmath => c.in_opmath(x.value, |x| f(c, x)),
        Promote::Float => {
            let x = c.to(x.value, c.float_of(x.dtype));
            c.in_opmath(x, |x| f(c, x))
        }
        Promote::KeepInt if x.dtype == DType::Pred => return Err(error::not_implemented(c.op, x.dtype)),
        Promote::KeepInt if category(x.dtype) == Category::Int => x.value,
        Promote::KeepInt => c.in_opmath(x.value, |x| f(c, x)),
    })
}

/// Two operands: promoted, broadcast, computed in opmath where the dtype is a reduced float.
pub fn binary(
    c: &Ctx,
    p: Promote,
    f: fn(&Builder, Value, Value) -> Value,
    x: Tensor,
    y: Tensor,
) -> Result<Value> {
    let dtype = match p {
        Promote::Float => c.float_result_type(&[x, y])?,
        _ => c.result_type(&[x, y])?,
    };
    let compute = if p == Promote::Same { dtype } else { dtype::opmath(dtype) };
    let [a, b] = c.align([x.value, y.value], compute)?;
    Ok(c.to(f(c, a, b), dtype))
}

/// A comparison in the promoted dtype.
pub fn compare(c: &Ctx, dir: Direction, x: Tensor, y: Tensor) -> Result<Value> {
    let dtype = c.result_type(&[x, y])?;
    if dtype.is_complex() && !matches!(dir, Direction::Eq | Direction::Ne) {
        let kernel = c.op.split('.').next().unwrap_or(c.op);
        return Err(error::not_implemented(&format!("{kernel}_cpu"), dtype));
    }
    let [a, b] = c.align([x.value, y.value], dtype)?;
    Ok(c.compare(a, b, dir))
}
