use crate::args::{Alpha, Tensor};
use crate::context::{Ctx, MatmulPrecision};
use crate::dtype::{Category, category, scalar_name};
use crate::error::{Result, not_implemented, runtime};
use crate::families::pointwise_binary::check_factor;
use crate::library::{Item, Outcome, Parts};
use crate::out::OutDtype;
use crate::row::Row;
use crate::{Layout, op};
use oxitorch_hlo::{Axes, DType, Dims, DotDims, Precision, TensorType, Value};

/// The rows of this family.
pub static ROWS: &[Row] = &[
    op!("mm", mm).products(),
    op!("mm.dtype", mm_dtype).products(),
    op!("bmm", bmm).products(),
    op!("bmm.dtype", bmm_dtype).products(),
    op!("addmm", addmm).products(),
    op!("addmm.dtype", |c: &Ctx, x: Value, l: Value, r: Value, out: DType, beta: Alpha, alpha: Alpha| {
        multipliable(c, "mat1", l, r)?;
        accumulate_folded(c, c.to(x, out), c.to(mm_acc(c, l, r)?, out), beta, alpha)
    })
    .products(),
    op!("_addmm_activation", addmm_activation).products(),
    op!("addmv", addmv).products(),
    op!("mv", mv).products(),
    op!("addr", addr).iterated().layout(Layout::LikeFirst).products().out_dtype(OutDtype::Castable),
    op!("baddbmm", baddbmm).products(),
    op!("baddbmm.dtype", |c: &Ctx, x: Value, l: Value, r: Value, out: DType, beta: Alpha, alpha: Alpha| {
        accumulate(c, c.to(x, out), c.to(bmm_acc(c, l, r)?, out), beta, alpha)
    })
    .products(),
    op!("addbmm", addbmm).products(),
    op!("dot", dot).products(),
    op!("vdot", vdot).products(),
    op!("_int_mm", int_mm).products(),
    op!("linear_backward", linear_backward).products(),
];

/// What sums of products of this dtype are kept in: one rounding at the end, and integers wrap only once.
pub(super) fn accumulator(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 | DType::F8E4M3FN | DType::F8E5M2 => DType::F32,
        DType::S8 | DType::S16 => DType::S32,
        DType::U8 | DType::U16 => DType::U32,
        other => other,
    }
}

/// The precision that the user asked for; only float32 operands have a choice.
pub(super) fn precision(c: &Ctx, dtype: DType) -> Precision {
    match (dtype, c.matmul_precision()) {
        (DType::F32 | DType::C64, MatmulPrecision::High) => Precision::High,
        (DType::F32 | DType::C64, MatmulPrecision::Default) => Precision::Default,
        (DType::F32 | DType::F64 | DType::C64 | DType::C128, _) => Precision::Highest,
        _ => Precision::Default,
    }
}

/// A product of two tensors of one dtype, in its accumulator.
pub(super) fn contract(c: &Ctx, l: Value, r: Value, dims: DotDims) -> Value {
    deferred_product(c, l, r, &dims)
        .or_else(|| library_product(c, l, r, &dims))
        .unwrap_or_else(|| compiled(c, l, r, &dims))
}

/// Left open in an outline if the library may do it.
fn deferred_product(c: &Ctx, l: Value, r: Value, dims: &DotDims) -> Option<Value> {
    let dtype = c.dtype(l);
    if !c.is_outline() || c.dtype(r) != dtype || !c.may_be_for_library(dtype) {
        return None;
    }
    let (axes, shape) = (axes(c, l, r, dims), Matrices::of(c, l, r, dims).result);
    let (name, dims) = (format!("product {dims:?}"), dims.clone());
    let made = c.deferred(name, &[l, r], &[TensorType::new(dtype, shape)], axes, move |c, x, _| {
        Ok(vec![contract(c, x[0], x[1], dims.clone())])
    });
    made?.first().copied()
}

/// The dimensions of a product.
fn axes(c: &Ctx, l: Value, r: Value, dims: &DotDims) -> Axes {
    let (mut letters, ranks) = ('a'..='z', [c.rank(l), c.rank(r)]);
    let mut operands = ranks.map(|n| vec!['?'; n]);
    let [left, right] = &mut operands;
    let (mut batch, mut mixed) = (String::new(), String::new());
    let pairs = |a: &Dims, b: &Dims| a.iter().copied().zip(b.iter().copied()).collect::<Vec<_>>();
    let batching = pairs(&dims.lhs_batching, &dims.rhs_batching);
    let contracting = pairs(&dims.lhs_contracting, &dims.rhs_contracting);
    for (list, names) in [(batching, &mut batch), (contracting, &mut mixed)] {
        for (a, b) in list {
            let letter = letters.next().unwrap_or('?');
            (left[a as usize], right[b as usize]) = (letter, letter);
            names.push(letter);
        }
    }
    let mut result = batch;
    for own in [left, right] {
        for place in own.iter_mut().filter(|place| **place == '?') {
            *place = letters.next().unwrap_or('?');
            result.push(*place);
        }
    }
    let operands = operands.map(|own| own.into_iter().collect()).into();
    Axes { operands, results: vec![result], mixed, ..Axes::default() }
}

/// The same by the compiler's own code, whatever its size.
pub(super) fn compiled(c: &Ctx, l: Value, r: Value, dims: &DotDims) -> Value {
    let dtype = c.dtype(l);
    let out = accumulator(dtype);
    if c.config.target.fence_bf16_dots && dtype == DType::BF16 {
        return fenced_dot(c, l, r, dims);
    }
    if c.config.target.int64_as_pairs && matches!(dtype, DType::S64 | DType::U64) {
        return summed_dot(c, l, r, dims);
    }
    if c.config.target.int8_in_fours && dtype == DType::S8 {
        let terms: i64 = sizes(&c.shape(l), &dims.lhs_contracting).iter().product();
        if terms % 4 != 0 {
            return c.dot_general(c.to(l, out), c.to(r, out), dims, Precision::Default, None);
        }
    }
    c.dot_general(l, r, dims, precision(c, dtype), (out != dtype).then_some(out))
}

/// The sizes of these dimensions of a tensor.
fn sizes(shape: &[i64], dims: &[i64]) -> Vec<i64> {
    dims.iter().map(|&d| shape[d as usize]).collect()
}

/// The dimensions of one operand that are neither batch nor contracted.
fn free(shape: &[i64], batch: &[i64], contracting: &[i64]) -> Vec<i64> {
    (0..shape.len() as i64).filter(|d| !batch.contains(d) && !contracting.contains(d)).collect()
}

/// A contraction as a product of `count` matrices of `m` by `k` with others of `k` by `n`.
struct Matrices {
    count: i64,
    m: i64,
    k: i64,
    n: i64,
    /// The dimensions of each operand in this order: batch, rows, columns.
    orders: [Vec<i64>; 2],
    /// The shape of the contraction.
    result: Vec<i64>,
}

impl Matrices {
    fn of(c: &Ctx, l: Value, r: Value, dims: &DotDims) -> Matrices {
        let (left, right) = (c.shape(l), c.shape(r));
        let rows = free(&left, &dims.lhs_batching, &dims.lhs_contracting);
        let columns = free(&right, &dims.rhs_batching, &dims.rhs_contracting);
        let [batch, m, k, n] = [
            sizes(&left, &dims.lhs_batching),
            sizes(&left, &rows),
            sizes(&left, &dims.lhs_contracting),
            sizes(&right, &columns),
        ];
        let numel = |part: &[i64]| part.iter().product();
        Matrices {
            count: numel(&batch),
            m: numel(&m),
            k: numel(&k),
            n: numel(&n),
            orders: [
                [dims.lhs_batching.as_slice(), &rows, &dims.lhs_contracting].concat(),
                [dims.rhs_batching.as_slice(), &dims.rhs_contracting, &columns].concat(),
            ],
            result: [batch, m, n].concat(),
        }
    }

    /// Whether one side is a vector.
    fn has_vector(&self) -> bool {
        self.m == 1 || self.n == 1
    }

    /// Whether the compiler's own product spends more on bringing a matrix into the order of its kernel than the kernel
    /// takes: a large matrix lies in memory the other way round, and few rows or columns are multiplied with it.
    fn transposes_much(&self, c: &Ctx, operands: [Value; 2]) -> bool {
        let sides = [([self.m, self.k], self.n), ([self.k, self.n], self.m)];
        operands.into_iter().zip(&self.orders).zip(sides).any(|((x, order), ([rows, columns], others))| {
            let transposed = c.transpose(x, order);
            let Some(&stride) = c.strided(transposed).strides.last() else { return false };
            let size = rows * columns;
            let is_alone = self.count == 1 && size >= LARGE;
            let is_long = size >= VERY_LARGE && others < FEW
                || is_alone && (others <= VERY_FEW || stride % CLASHING == 0 && others <= MANY);
            is_long && stride != 1
        })
    }

    /// The shape of such matrices, or of the one.
    fn shape(&self, rows: i64, columns: i64) -> Dims {
        let shape = [self.count, rows, columns];
        Dims::from_slice(if self.count == 1 { &shape[1..] } else { &shape })
    }
}

/// Rows or columns of which a part of a product has a multiple: a vector of AVX-512. The kernels take blocks of 48, but
/// parts of the same size matter more: of 512 rows two threads would get 288 and 224.
const PART: i64 = 16;

/// Elements of a matrix that takes longer to transpose than a call does, and rows or columns of another, with which a product
/// takes longer; and the same where the other is all but a vector. Measured with Eigen's kernels for AVX-512.
const VERY_LARGE: i64 = 1 << 19;
const FEW: i64 = 384;
const LARGE: i64 = 1 << 16;
const VERY_FEW: i64 = 32;

/// Elements between those of a column, where they push each other out of the cache, so that more rows do not make up for it.
const CLASHING: i64 = 512;
const MANY: i64 = 1024;

/// The same as a product of matrices, or of batches of them, by torch's own kernel where that is worth it.
fn library_product(c: &Ctx, l: Value, r: Value, dims: &DotDims) -> Option<Value> {
    let p = Matrices::of(c, l, r, dims);
    let operations = [p.count, p.m, p.k, p.n].iter().fold(2i64, |all, &n| all.saturating_mul(n));
    let dtype = c.dtype(l);
    if c.dtype(r) != dtype || c.is_outline() || !c.may_be_for_library(dtype) {
        return None;
    }
    let transposes = p.transposes_much(c, [l, r]);
    // Of products with a vector, the compiler has no good code for those of a matrix that is the other way round.
    let worth = if p.has_vector() {
        p.n == 1 && transposes
    } else {
        transposes || c.is_for_library(dtype, operations)
    };
    if !worth || c.config.target.own_products && dtype == DType::F32 && !transposes {
        return None;
    }
    let a = c.reshape(c.transpose(l, &p.orders[0]), &p.shape(p.m, p.k));
    let b = c.reshape(c.transpose(r, &p.orders[1]), &p.shape(p.k, p.n));
    let op = if p.count == 1 { "mm.out" } else { "bmm.out" };
    let result = Outcome::row_major(TensorType::new(dtype, p.shape(p.m, p.n)));
    let (args, results) = match op {
        "bmm.out" => ([0, 0], [0]),
        _ if p.m >= p.n => ([0, -1], [0]),
        _ => ([-1, 1], [1]),
    };
    let step = if p.count == 1 { PART } else { 1 };
    let parts = Parts { args: &args, results: &results, step };
    let items = [Item::Tensor(a), Item::Tensor(b)];
    let y = c.call_library_in_parts(op, &items, &[Some(result)], Some(&parts));
    Some(c.reshape(y[0]?, &p.result))
}

/// A product as multiplications and a sum, which compilers fuse, so that the factors multiplied are never in memory.
fn summed_dot(c: &Ctx, l: Value, r: Value, dims: &DotDims) -> Value {
    let p = Matrices::of(c, l, r, dims);
    let all = [p.count, p.m, p.k, p.n];
    let a = c.reshape(c.transpose(l, &p.orders[0]), &[p.count, p.m, p.k]);
    let b = c.reshape(c.transpose(r, &p.orders[1]), &[p.count, p.k, p.n]);
    let a = c.broadcast_in_dim(a, &all, &[0, 1, 2]);
    let b = c.broadcast_in_dim(b, &all, &[0, 2, 3]);
    c.reshape(c.reduce_sum(c.multiply(a, b), &[2]), &p.result)
}

/// A product of bfloat16 tensors in float32, as one of matrices (or batches of them) that are row-major and stay so.
fn fenced_dot(c: &Ctx, l: Value, r: Value, dims: &DotDims) -> Value {
    let p = Matrices::of(c, l, r, dims);
    if p.has_vector() {
        // Products with a vector do not go to the library, and a copy of the matrix would cost more than they do.
        return c.dot_general(l, r, dims, Precision::Default, Some(DType::F32));
    }
    // Flat behind the fence, or the compiler would remember a layout.
    let flat = |x: Value, order: &[i64]| c.reshape(c.transpose(x, order), &[c.numel(x)]);
    let fenced = c.optimization_barrier(&[flat(l, &p.orders[0]), flat(r, &p.orders[1])]);
    let a = c.reshape(fenced[0], &p.shape(p.m, p.k));
    let b = c.reshape(fenced[1], &p.shape(p.k, p.n));
    c.reshape(c.matmul(a, b, Precision::Default, Some(DType::F32)), &p.result)
}

/// `l @ r` over the last two dimensions, any dimensions before them are a batch; in the accumulator.
pub(super) fn matmul(c: &Ctx, l: Value, r: Value) -> Value {
    contract(c, l, r, DotDims::matmul(c.rank(l)))
}

/// The same where all that is done with it is to round it to the operands' dtype.
fn rounded_matmul(c: &Ctx, l: Value, r: Value) -> Value {
    if is_rounded(c, l) {
        return c.dot_general(l, r, &DotDims::matmul(c.rank(l)), Precision::Default, None);
    }
    c.to(matmul(c, l, r), c.dtype(l))
}

/// Whether a product with this operand is rounded by who does it.
fn is_rounded(c: &Ctx, l: Value) -> bool {
    c.config.target.dots_in_16_bits && matches!(c.dtype(l), DType::BF16 | DType::F16)
}

fn arithmetic(kernel: &str, dtype: DType) -> Result<()> {
    let refused = matches!(dtype, DType::Pred | DType::U16 | DType::U32 | DType::U64);
    if refused { Err(not_implemented(kernel, dtype)) } else { Ok(()) }
}

fn matrix(c: &Ctx, name: &str, x: Value) -> Result<[i64; 2]> {
    match c.shape(x).as_slice() {
        &[n, m] => Ok([n, m]),
        shape => Err(runtime(format!("{name} must be a matrix, got {}-D tensor", shape.len()))),
    }
}

fn batch(c: &Ctx, name: &str, x: Value) -> Result<[i64; 3]> {
    match c.shape(x).as_slice() {
        &[b, n, m] => Ok([b, n, m]),
        _ => Err(runtime(format!("{name} must be a 3D tensor"))),
    }
}

/// `torch` spells dtypes in lower case in some kernels: `float`, `double`, `long int`.
fn cpp_name(dtype: DType) -> String {
    match dtype {
        DType::S64 => "long".into(),
        DType::U8 => "unsigned char".into(),
        DType::S8 => "signed char".into(),
        DType::F16 => "c10::Half".into(),
        DType::BF16 => "c10::BFloat16".into(),
        DType::C64 => "c10::complex<float>".into(),
        DType::C128 => "c10::complex<double>".into(),
        other => scalar_name(other).to_lowercase(),
    }
}

fn multipliable(c: &Ctx, first: &str, l: Value, r: Value) -> Result<()> {
    let ([n, k], [k2, m]) = (matrix(c, first, l)?, matrix(c, "mat2", r)?);
    if k != k2 {
        return Err(runtime(format!("mat1 and mat2 shapes cannot be multiplied ({n}x{k} and {k2}x{m})")));
    }
    Ok(())
}

/// `l @ r` of matrices, with the rows of the result as the dimensions that they were folded from. A gradient of weights has
/// two such matrices, and contracts their rows.
fn product(c: &Ctx, l: Value, r: Value) -> Value {
    if !c.config.target.keep_row_dims {
        return matmul(c, l, r);
    }
    if let Some(rows) = c.folded_rows(l) {
        let last = rows.len() as i64;
        return contract(c, c.unfold_rows(l, &rows), r, DotDims::new(&[], &[], &[last], &[0]));
    }
    if let Some(x) = c.transposed_matrix(l)
        && let Some(rows) = c.folded_rows(x)
        && c.folded_rows(r).as_ref() == Some(&rows)
    {
        let all: Dims = (0..rows.len() as i64).collect();
        return contract(
            c,
            c.unfold_rows(x, &rows),
            c.unfold_rows(r, &rows),
            DotDims::new(&[], &[], &all, &all),
        );
    }
    matmul(c, l, r)
}

/// A product with its rows folded again.
fn folded(c: &Ctx, product: Value) -> Value {
    let shape = c.shape(product);
    let (columns, rows) = shape.split_last().unwrap_or((&1, &[]));
    c.reshape(product, &[rows.iter().product(), *columns])
}

fn check_mm(c: &Ctx, l: Value, r: Value) -> Result<()> {
    multipliable(c, "self", l, r)?;
    let (a, b) = (c.dtype(l), c.dtype(r));
    if a != b {
        let (a, b) = (cpp_name(a), cpp_name(b));
        return Err(runtime(format!("expected m1 and m2 to have the same dtype, but got: {a} != {b}")));
    }
    arithmetic("addmm_impl_cpu_", a)
}

fn mm_acc(c: &Ctx, l: Value, r: Value) -> Result<Value> {
    check_mm(c, l, r)?;
    Ok(product(c, l, r))
}

fn mm(c: &Ctx, l: Value, r: Value) -> Result<Value> {
    check_mm(c, l, r)?;
    if is_rounded(c, l) {
        return Ok(rounded_matmul(c, l, r));
    }
    Ok(folded(c, c.to(product(c, l, r), c.dtype(l))))
}

fn mm_dtype(c: &Ctx, l: Value, r: Value, out: DType) -> Result<Value> {
    Ok(folded(c, c.to(mm_acc(c, l, r)?, out)))
}

fn check_bmm(c: &Ctx, l: Value, r: Value) -> Result<()> {
    let ([b, _, k], [b2, k2, _]) = (batch(c, "batch1", l)?, batch(c, "batch2", r)?);
    if (b, k) != (b2, k2) {
        return Err(runtime(format!(
            "Expected size for first two dimensions of batch2 tensor to be: [{b}, {k}] but got: [{b2}, {k2}]."
        )));
    }
    let (a, b) = (c.dtype(l), c.dtype(r));
    if a != b {
        let (a, b) = (scalar_name(a), scalar_name(b));
        return Err(runtime(format!("expected scalar type {a} but found {b}")));
    }
    arithmetic("baddbmm_with_gemm", a)
}

fn bmm_acc(c: &Ctx, l: Value, r: Value) -> Result<Value> {
    check_bmm(c, l, r)?;
    Ok(matmul(c, l, r))
}

fn bmm(c: &Ctx, l: Value, r: Value) -> Result<Value> {
    check_bmm(c, l, r)?;
    Ok(rounded_matmul(c, l, r))
}

fn bmm_dtype(c: &Ctx, l: Value, r: Value, out: DType) -> Result<Value> {
    Ok(c.to(bmm_acc(c, l, r)?, out))
}

/// `beta * x + alpha * product`, rounded once to the dtype of `x`; a `beta` of zero hides NaN and inf in `x`.
fn accumulate(c: &Ctx, x: Value, product: Value, beta: Alpha, alpha: Alpha) -> Result<Value> {
    let (dtype, acc, shape) = (c.dtype(x), c.dtype(product), c.shape(product));
    let mut y = c.to(c.expand(x, &shape)?, acc);
    if let Alpha::Times(s) = beta {
        let beta = c.number(s, acc);
        let zero = c.zeros_like(y);
        let is_zero = c.eq(beta, c.zeros_like(beta));
        y = c.select(is_zero, zero, c.multiply(y, c.full(beta, &shape)));
    }
    Ok(c.to(c.add(c.times(product, alpha), y), dtype))
}

/// The same for a product of matrices, perhaps with unfolded rows.
fn accumulate_folded(c: &Ctx, x: Value, product: Value, beta: Alpha, alpha: Alpha) -> Result<Value> {
    let shape = c.shape(product);
    let (columns, rows) = shape.split_last().unwrap_or((&1, &[]));
    // One that is the same for all rows fits any.
    let x = match c.shape(x).as_slice() {
        _ if rows.len() == 1 => x,
        [] | [_] => x,
        [1, n] => c.reshape(x, &[*n]),
        _ => c.reshape(c.expand(x, &[rows.iter().product(), *columns])?, &shape),
    };
    Ok(folded(c, accumulate(c, x, product, beta, alpha)?))
}

fn same_dtypes(c: &Ctx, x: Value, l: Value, r: Value) -> Result<()> {
    for (name, v) in [("self", x), ("mat1", l)] {
        let (a, b) = (scalar_name(c.dtype(v)), scalar_name(c.dtype(r)));
        if a != b {
            return Err(runtime(format!("{name} and mat2 must have the same dtype, but got {a} and {b}")));
        }
    }
    Ok(())
}

fn addmm(c: &Ctx, x: Value, l: Value, r: Value, beta: Alpha, alpha: Alpha) -> Result<Value> {
    same_dtypes(c, x, l, r)?;
    multipliable(c, "mat1", l, r)?;
    arithmetic("addmm_impl_cpu_", c.dtype(l))?;
    if let (true, Alpha::One, Alpha::One) = (is_rounded(c, l), beta, alpha) {
        // The library adds it before it rounds.
        let y = rounded_matmul(c, l, r);
        return Ok(c.add(y, c.expand(x, &c.shape(y))?));
    }
    accumulate_folded(c, x, product(c, l, r), beta, alpha)
}

fn addmm_activation(
    c: &Ctx,
    x: Value,
    l: Value,
    r: Value,
    beta: Alpha,
    alpha: Alpha,
    use_gelu: bool,
) -> Result<Value> {
    let y = addmm(c, x, l, r, beta, alpha)?;
    if !use_gelu {
        return Ok(c.maximum(y, c.zeros_like(y)));
    }
    Ok(c.in_opmath(y, |y| {
        let half = c.multiply(y, c.like(y, 0.5));
        let erf = c.erf(c.multiply(y, c.like(y, std::f64::consts::FRAC_1_SQRT_2)));
        c.multiply(half, c.add(c.like(y, 1.0), erf))
    }))
}

fn matrix_vector(c: &Ctx, m: Value, v: Value) -> Value {
    contract(c, m, v, DotDims::new(&[], &[], &[1], &[0]))
}

fn addmv(c: &Ctx, x: Value, m: Value, v: Value, beta: Alpha, alpha: Alpha) -> Result<Value> {
    let (xs, ms, vs) = (c.shape(x), c.shape(m), c.shape(v));
    let (&[rows, columns], &[length], true) = (ms.as_slice(), vs.as_slice(), xs.len() <= 1) else {
        let ranks = (xs.len(), ms.len(), vs.len());
        let text = format!("vector + matrix @ vector expected, got {}, {}, {}", ranks.0, ranks.1, ranks.2);
        return Err(runtime(text));
    };
    let size = c.numel(x);
    if columns != length || (size != rows && size != 1) {
        let text = format!("size mismatch, got input ({size}), mat ({rows}x{columns}), vec ({length})");
        return Err(runtime(text));
    }
    let names = [x, m, v].map(|t| scalar_name(c.dtype(t)));
    if names[0] != names[1] || names[1] != names[2] {
        let [a, b, d] = names;
        let text = format!("addmv input tensors must have the same dtype, but got {a}, {b}, and {d}");
        return Err(runtime(text));
    }
    arithmetic("addmv_impl_cpu", c.dtype(m))?;
    accumulate(c, x, matrix_vector(c, m, v), beta, alpha)
}

fn mv(c: &Ctx, m: Value, v: Value) -> Result<Value> {
    let (ms, vs) = (c.shape(m), c.shape(v));
    let (&[rows, columns], &[length]) = (ms.as_slice(), vs.as_slice()) else {
        let text = format!("vector + matrix @ vector expected, got 1, {}, {}", ms.len(), vs.len());
        return Err(runtime(text));
    };
    if columns != length {
        let text = format!("size mismatch, got input ({rows}), mat ({rows}x{columns}), vec ({length})");
        return Err(runtime(text));
    }
    let (a, b) = (scalar_name(c.dtype(m)), scalar_name(c.dtype(v)));
    if a != b {
        let text = format!("addmv input tensors must have the same dtype, but got {a}, {a}, and {b}");
        return Err(runtime(text));
    }
    arithmetic("addmv_impl_cpu", c.dtype(m))?;
    Ok(c.to(matrix_vector(c, m, v), c.dtype(m)))
}

fn addr(c: &Ctx, x: Tensor, u: Tensor, v: Tensor, beta: Alpha, alpha: Alpha) -> Result<Value> {
    for (name, t) in [("vec1", u), ("vec2", v)] {
        if t.rank != 1 {
            return Err(runtime(format!("addr: Expected 1-D argument {name}, but got {}-D", t.rank)));
        }
    }
    let dtype = c.result_type(&[x, u, v])?;
    check_factor(dtype, "beta", beta)?;
    check_factor(dtype, "alpha", alpha)?;
    let shape = [c.numel(u.value), c.numel(v.value)];
    if category(dtype) == Category::Bool {
        return Err(crate::error::unsupported("addr of bool"));
    }
    let acc = accumulator(dtype);
    let rows = c.broadcast_in_dim(c.to(u.value, acc), &shape, &[0]);
    let columns = c.broadcast_in_dim(c.to(v.value, acc), &shape, &[1]);
    accumulate(c, c.to(x.value, dtype), c.multiply(rows, columns), beta, alpha)
}

fn baddbmm(c: &Ctx, x: Value, l: Value, r: Value, beta: Alpha, alpha: Alpha) -> Result<Value> {
    let product = bmm_acc(c, l, r)?;
    if c.dtype(x) != c.dtype(l) {
        let (a, b) = (cpp_name(c.dtype(x)), cpp_name(c.dtype(l)));
        let text = format!("Input dtypes must be the same, got: input {a}, batch1: {b}, batch2: {b}");
        return Err(runtime(text));
    }
    accumulate(c, x, product, beta, alpha)
}

/// The sum over the batch of the products: batch and inner dimension are contracted together.
fn addbmm(c: &Ctx, x: Value, l: Value, r: Value, beta: Alpha, alpha: Alpha) -> Result<Value> {
    let ([b, n, k], [b2, k2, m]) = (batch(c, "batch1", l)?, batch(c, "batch2", r)?);
    if b != b2 {
        let text = format!("batch1 and batch2 must have same number of batches, got {b} and {b2}");
        return Err(runtime(text));
    }
    if k != k2 {
        return Err(runtime(format!("Incompatible matrix sizes for bmm ({n}x{k} and {k2}x{m})")));
    }
    same_dtypes(c, x, l, r)?;
    arithmetic("addmm_impl_cpu_", c.dtype(l))?;
    let product = contract(c, l, r, DotDims::new(&[], &[], &[0, 2], &[0, 1]));
    accumulate(c, x, product, beta, alpha)
}

fn dot(c: &Ctx, x: Value, y: Value) -> Result<Value> {
    let (a, b) = (c.shape(x), c.shape(y));
    if a.len() != 1 || b.len() != 1 {
        return Err(runtime(format!("1D tensors expected, but got {}D and {}D tensors", a.len(), b.len())));
    }
    let (s, t) = (scalar_name(c.dtype(x)), scalar_name(c.dtype(y)));
    if s != t {
        let text = format!("dot : expected both vectors to have same dtype, but found {s} and {t}");
        return Err(runtime(text));
    }
    let (n, m) = (a[0], b[0]);
    if n != m {
        return Err(runtime(format!(
            "inconsistent tensor size, expected tensor [{n}] and src [{m}] to have the same number of elements, \
             but got {n} and {m} elements respectively"
        )));
    }
    arithmetic("dot", c.dtype(x))?;
    Ok(c.to(contract(c, x, y, DotDims::new(&[], &[], &[0], &[0])), c.dtype(x)))
}

/// The complex conjugate; real tensors are their own.
pub(super) fn conj(c: &Ctx, x: Value) -> Value {
    if c.dtype(x).is_complex() { c.complex(c.real(x), c.negate(c.imag(x))) } else { x }
}

fn vdot(c: &Ctx, x: Value, y: Value) -> Result<Value> {
    dot(c, conj(c, x), y)
}

fn int_mm(c: &Ctx, l: Value, r: Value) -> Result<Value> {
    multipliable(c, "self", l, r)?;
    let (a, b) = (c.dtype(l), c.dtype(r));
    if !matches!(a, DType::S8 | DType::U8) {
        let text = format!("int_mm_out_cpu: Expected self dtype to be int8 or uint8 but got {}", cpp_name(a));
        return Err(runtime(text));
    }
    if b != DType::S8 {
        let text = format!("int_mm_out_cpu: Expected mat2 dtype to be of type int8 but got {}", cpp_name(b));
        return Err(runtime(text));
    }
    let dims = DotDims::new(&[], &[], &[1], &[0]);
    if a == DType::S8 {
        return Ok(contract(c, l, r, dims));
    }
    Ok(contract(c, c.to(l, DType::S32), c.to(r, DType::S32), dims))
}

/// Gradients of `x @ w.T + b` for `x` of any rank.
fn linear_backward(
    c: &Ctx,
    x: Value,
    grad: Value,
    weight: Value,
    mask: Vec<bool>,
) -> Result<(Option<Value>, Option<Value>, Option<Value>)> {
    let &[want_x, want_w, want_b] = mask.as_slice() else {
        return Err(runtime("linear_backward: output_mask must have 3 entries"));
    };
    let (dtype, last) = (c.dtype(grad), c.rank(grad) as i64 - 1);
    let rows: Vec<i64> = (0..last).collect();
    let dx = || contract(c, grad, weight, DotDims::new(&[], &[], &[last], &[0]));
    let dw = || contract(c, grad, x, DotDims::new(&[], &[], &rows, &rows));
    let db = || {
        let acc = c.to(grad, accumulator(dtype));
        c.reduce1(acc, c.scalar_i64(c.dtype(acc), 0), &rows, |b, x, y| b.add(x, y))
    };
    let round = |v: Value| c.to(v, dtype);
    Ok((want_x.then(|| round(dx())), want_w.then(|| round(dw())), want_b.then(|| round(db()))))
}
