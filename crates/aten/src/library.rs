//! Calls of torch's own CPU kernels from inside a program, for what they do much faster than compiled code: a
//! `custom_call` of the host function [`FUNCTION`] that names an ATen overload and spells out its arguments.
//!
//! A lowering asks [`Ctx::is_for_library`], and goes on as usual if it is not. Operands are handed over as strided views
//! of what there is in memory, so that nothing is copied for a transpose or a slice.

use crate::context::{Ctx, MatmulPrecision};
use oxitorch_hlo::{CustomCall, DType, Dims, TensorType, Value};
use std::fmt::Write;

/// The target of the custom calls.
pub const TARGET: &str = "oxitorch.host_call";
/// The host function that carries a call to torch.
pub const FUNCTION: &str = "aten";
/// The attribute with the overload: `mm.out`.
pub const OP: &str = "op";
/// The attribute with the arguments and results, as [`Word`]s.
pub const CALL: &str = "call";

/// What the words of [`CALL`] mean. Each argument is one of these with what follows it; then come the number of results
/// and each of them, as a `NONE` or as a `TENSOR` whose first word is its place among the results.
pub mod word {
    /// Nothing, or an undefined tensor.
    pub const NONE: i64 = 0;
    /// Operand, number of dimensions, sizes, strides, offset.
    pub const TENSOR: i64 = 1;
    /// A 0-d operand, float64 or int64, of which the value is taken.
    pub const NUMBER: i64 = 2;
    /// The integer.
    pub const INT: i64 = 3;
    /// The bits of a float64.
    pub const FLOAT: i64 = 4;
    /// 0 or 1.
    pub const BOOL: i64 = 5;
    /// Their number, and the integers.
    pub const INTS: i64 = 7;
    /// Their number, and zeros and ones.
    pub const BOOLS: i64 = 9;
    /// Their number, and bytes.
    pub const STR: i64 = 10;
    /// Before the results.
    pub const RESULTS: i64 = -1;
    /// Before everything else, where the call may be made in parts: the number of elements of which each part has a
    /// multiple, how many arguments and results there are, and of each the dimension that is cut, [`WHOLE`] or [`SUMMED`].
    pub const PARTS: i64 = -2;
    /// All parts take the whole.
    pub const WHOLE: i64 = -1;
    /// A result that is the sum of what the parts give.
    pub const SUMMED: i64 = -2;
}

/// Floating-point operations from which a product or a convolution is worth a call. A call costs some microseconds, and
/// what it reads and writes cannot be fused with what is around it.
const WORTH: i64 = 1 << 23;

/// Elements from which a function of each is worth a call.
const WORTH_ELEMENTS: i64 = 1 << 14;

/// What kernels of functions take.
pub const FLOATS: [DType; 2] = [DType::F32, DType::F64];
/// What kernels that compare or add up take.
pub const NUMBERS: [DType; 4] = [DType::F32, DType::F64, DType::S32, DType::S64];

/// An argument of a call.
#[derive(Clone, Copy)]
pub enum Item<'a> {
    /// Nothing.
    None,
    /// A tensor.
    Tensor(Value),
    /// A tensor whose last dimension must be dense.
    Rows(Value),
    /// A tensor that must be row-major.
    Dense(Value),
    /// An image, channels last.
    ChannelsLast(Value),
    /// A number that the program is given, a float64 or an int64.
    Number(Value),
    /// An integer attribute.
    Int(i64),
    /// A float attribute.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// A list of integers.
    Ints(&'a [i64]),
    /// A list of flags.
    Bools(&'a [bool]),
    /// A string.
    Str(&'a str),
}

/// How a call is made in parts, each of which some thread takes: those of a program do not wake up others for it.
pub struct Parts<'a> {
    /// The dimension of each argument that is cut; [`word::WHOLE`] where all parts take the whole.
    pub args: &'a [i64],
    /// The same of each result, or [`word::SUMMED`].
    pub results: &'a [i64],
    /// Each part has a multiple of so many elements, where it is not the last.
    pub step: i64,
}

/// The dimension of a tensor of this shape by which a call is cut in parts: the first of those with enough elements for
/// many threads, or else the largest.
fn widest(shape: &[i64], dims: impl Iterator<Item = usize>) -> Option<usize> {
    const MANY: i64 = 64;
    dims.max_by_key(|&d| (shape[d].min(MANY), std::cmp::Reverse(d)))
}

/// The same where the call goes along `dim`.
pub fn beside(shape: &[i64], dim: usize) -> Option<usize> {
    widest(shape, (0..shape.len()).filter(|&d| d != dim))
}

/// A result of a call: a dense tensor of this type, whose dimensions lie in memory in this order, slowest first.
pub struct Outcome {
    /// Its type.
    pub ty: TensorType,
    /// The order; empty is row-major.
    pub order: Dims,
}

impl Outcome {
    /// A row-major result.
    pub fn row_major(ty: TensorType) -> Outcome {
        Outcome { ty, order: Dims::new() }
    }

    /// Matrices that lie in memory column by column.
    pub fn column_major(ty: TensorType) -> Outcome {
        let mut order: Dims = (0..ty.shape.len() as i64).collect();
        if let [.., row, column] = order.as_mut_slice() {
            std::mem::swap(row, column);
        }
        Outcome { ty, order }
    }

    /// A result of torch's kernels that keep to the memory format of one of these: channels-last if it is.
    pub fn like(c: &Ctx, ty: TensorType, formats: &[Value]) -> Outcome {
        if ty.shape.len() < 3 || !formats.iter().any(|&v| is_channels_last(c, v)) {
            return Outcome::row_major(ty);
        }
        Outcome::channels_last(ty)
    }

    fn stored(&self) -> TensorType {
        let sizes = self.order.iter().map(|&d| self.ty.shape[d as usize]);
        if self.order.is_empty() {
            self.ty.clone()
        } else {
            TensorType::new(self.ty.dtype, sizes.collect::<Dims>())
        }
    }

    /// From the stored order to that of the dimensions.
    fn restore(&self) -> Dims {
        inverse(&self.order)
    }

    /// A result that is channels last.
    pub fn channels_last(ty: TensorType) -> Outcome {
        Outcome { order: channels_last(ty.shape.len()), ty }
    }
}

/// The dimensions of a channels-last image, slowest first.
pub fn channels_last(rank: usize) -> Dims {
    [0].into_iter().chain(2..rank as i64).chain([1]).collect()
}

/// What puts dimensions in this order back.
pub fn inverse(order: &Dims) -> Dims {
    let mut back: Dims = order.clone();
    for (i, &d) in order.iter().enumerate() {
        back[d as usize] = i as i64;
    }
    back
}

/// The steps of a tensor that is dense in memory in these sizes, and has its dimensions at these places; empty: in their order.
fn strides(stored: &[i64], places: &[i64]) -> Dims {
    let mut steps = Dims::from_elem(1, stored.len());
    for d in (1..stored.len()).rev() {
        steps[d - 1] = steps[d] * stored[d].max(1);
    }
    if places.is_empty() { steps } else { places.iter().map(|&i| steps[i as usize]).collect() }
}

/// Whether an image has its channels last in memory, and nothing between its elements; what has one channel, or one place,
/// has no format.
pub fn is_channels_last(c: &Ctx, image: Value) -> bool {
    let shape = c.shape(image);
    let strides = c.strided(image).strides;
    let mut next = 1;
    let order = [1].into_iter().chain((2..shape.len()).rev()).chain([0]);
    shape.len() > 2
        && shape[1] > 1
        && shape[2..].iter().any(|&n| n > 1)
        && order.into_iter().all(|d| {
            let fits = shape[d] == 1 || strides[d] == next;
            next *= shape[d];
            fits
        })
}

impl Ctx<'_> {
    /// Whether the library does something of this dtype, with so many floating-point operations.
    pub fn is_for_library(&self, dtype: DType, operations: i64) -> bool {
        self.may_be_for_library(dtype) && !self.is_outline() && operations >= WORTH
    }

    /// Whether the library does something of this dtype if it is large: an outline leaves it open.
    pub fn may_be_for_library(&self, dtype: DType) -> bool {
        self.config.target.library
            && matches!(dtype, DType::F32 | DType::F64)
            && self.matmul_precision() == MatmulPrecision::Highest
    }

    /// Whether a kernel of the host takes `x`, which has one of these types, and so many elements that a call is worth what it
    /// costs.
    pub fn is_worth_a_call(&self, x: Value, types: &[DType], elements: i64) -> bool {
        let can = self.config.target.library && !self.is_outline();
        can && types.contains(&self.dtype(x)) && self.numel(x) >= elements
    }

    /// A function of each element, of operands of one type, by an ATen overload that writes to what it is given; `more` are
    /// its further arguments. Nothing where that is not worth it.
    pub fn call_pointwise(&self, op: &str, operands: &[Value], more: &[Item<'_>]) -> Option<Value> {
        let first = *operands.first()?;
        if !self.is_worth_a_call(first, &FLOATS, WORTH_ELEMENTS) {
            return None;
        }
        let ty = self.ty(first);
        let result = Outcome::like(self, ty.clone(), operands);
        let cut = widest(&ty.shape, 0..ty.shape.len())? as i64;
        let args: Vec<_> = operands.iter().map(|&v| Item::Tensor(v)).chain(more.iter().copied()).collect();
        let cuts: Vec<i64> =
            (0..args.len()).map(|i| if i < operands.len() { cut } else { word::WHOLE }).collect();
        let parts = Parts { args: &cuts, results: &[cut], step: 1 };
        self.call_library_in_parts(op, &args, &[Some(result)], Some(&parts)).first().copied()?
    }

    /// Calls an ATen overload on the host. The caller has checked everything that the lowering checks.
    pub fn call_library(
        &self,
        op: &str,
        args: &[Item<'_>],
        results: &[Option<Outcome>],
    ) -> Vec<Option<Value>> {
        self.call_library_in_parts(op, args, results, None)
    }

    /// The same; in parts, if that gives what the whole gives, but for the rounding of sums.
    pub fn call_library_in_parts(
        &self,
        op: &str,
        args: &[Item<'_>],
        results: &[Option<Outcome>],
        parts: Option<&Parts<'_>>,
    ) -> Vec<Option<Value>> {
        let mut call = Call { c: self, operands: Vec::new(), words: Vec::new() };
        if let Some(p) = parts {
            call.words.extend([word::PARTS, p.step, (p.args.len() + p.results.len()) as i64]);
            call.words.extend(p.args.iter().chain(p.results));
        }
        args.iter().for_each(|arg| call.arg(arg));
        call.results(results);
        let types: Vec<TensorType> = results.iter().flatten().map(Outcome::stored).collect();
        let mut config = format!("{CALL} = array<i64: ");
        for (i, word) in call.words.iter().enumerate() {
            // Writing to a string does not fail.
            let _ = write!(config, "{}{word}", if i == 0 { "" } else { ", " });
        }
        let _ = write!(config, ">, fn = \"{FUNCTION}\", {OP} = \"{op}\"");
        let custom = CustomCall { target: TARGET.into(), backend_config: config, ..CustomCall::default() };
        let mut values = self.custom_call(&call.operands, &types, custom).into_iter();
        let restore = |outcome: &Outcome, v| {
            if outcome.order.is_empty() { v } else { self.transpose(v, &outcome.restore()) }
        };
        results.iter().map(|r| r.as_ref().and_then(|r| values.next().map(|v| restore(r, v)))).collect()
    }
}

struct Call<'a, 'b> {
    c: &'a Ctx<'b>,
    operands: Vec<Value>,
    words: Vec<i64>,
}

impl Call<'_, '_> {
    fn operand(&mut self, v: Value) {
        let known = self.operands.iter().position(|&o| o == v);
        let place = known.unwrap_or_else(|| {
            self.operands.push(v);
            self.operands.len() - 1
        });
        self.words.push(place as i64);
    }

    fn list(&mut self, kind: i64, list: impl ExactSizeIterator<Item = i64>) {
        self.words.extend([kind, list.len() as i64]);
        self.words.extend(list);
    }

    fn arg(&mut self, arg: &Item<'_>) {
        match *arg {
            Item::None => self.words.push(word::NONE),
            Item::Tensor(v) | Item::Rows(v) | Item::Dense(v) => {
                let mut view = self.c.strided(v);
                let steps = view.strides.last().is_some_and(|&s| s != 1);
                if matches!(arg, Item::Dense(_)) || matches!(arg, Item::Rows(_)) && steps {
                    view = self.c.unviewed(v);
                }
                let shape = self.c.shape(v);
                self.words.push(word::TENSOR);
                self.operand(view.base);
                self.words.push(shape.len() as i64);
                self.words.extend_from_slice(&shape);
                self.words.extend_from_slice(&view.strides);
                self.words.push(view.offset);
            }
            Item::ChannelsLast(v) => {
                let last = channels_last(self.c.rank(v));
                let stored = self.c.transpose(v, &last);
                self.words.push(word::TENSOR);
                self.operand(stored);
                self.words.push(last.len() as i64);
                self.words.extend_from_slice(&self.c.shape(v));
                self.words.extend_from_slice(&strides(&self.c.shape(stored), &inverse(&last)));
                self.words.push(0);
            }
            Item::Number(v) => {
                self.words.push(word::NUMBER);
                self.operand(v);
            }
            Item::Int(i) => self.words.extend([word::INT, i]),
            Item::Float(x) => self.words.extend([word::FLOAT, x.to_bits() as i64]),
            Item::Bool(b) => self.words.extend([word::BOOL, b.into()]),
            Item::Ints(list) => self.list(word::INTS, list.iter().copied()),
            Item::Bools(list) => self.list(word::BOOLS, list.iter().map(|&b| b.into())),
            Item::Str(text) => self.list(word::STR, text.bytes().map(i64::from)),
        }
    }

    fn results(&mut self, results: &[Option<Outcome>]) {
        self.words.extend([word::RESULTS, results.len() as i64]);
        let mut place = 0;
        for result in results {
            let Some(outcome) = result else {
                self.words.push(word::NONE);
                continue;
            };
            let stored = outcome.stored().shape;
            let back = outcome.restore();
            let steps = strides(&stored, &back);
            self.words.extend([word::TENSOR, place, stored.len() as i64]);
            self.words.extend_from_slice(&outcome.ty.shape);
            self.words.extend_from_slice(&steps);
            self.words.push(0);
            place += 1;
        }
    }
}
