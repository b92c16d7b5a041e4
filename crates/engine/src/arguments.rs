//! The arguments of one run of a row: as words of a key, as operands, and (the first time) as the op table wants them.
//!
//! The three walks go over the same [`Item`]s in the same order, so that an operand's number is its place in that order.

use crate::call::{ArgRef, Call};
use crate::error::{Error, Refusal, Result};
use crate::inst::Key;
use crate::stream::Stream;
use crate::tensor::{Place, TensorRef};
use crate::value::Value;
use crate::view::Offsets;
use crate::window::Window;
use oxitorch_aten::args::{Number, is_operand, number_arg};
use oxitorch_aten::{self as aten, Arg, NumKind, ParamKind, ScalarArg, Source, TensorArg};
use oxitorch_hlo::{DType, Dims, TensorType};
use smallvec::SmallVec;
use std::sync::Arc;

/// What one parameter of the row gets.
#[derive(Clone, Copy)]
pub(crate) enum Item<'x, 'a> {
    None,
    Tensor(&'x TensorRef<'a>),
    /// Element `k` of a 1-d tensor, as a number.
    Element(&'x TensorRef<'a>, i64),
    List(&'x [TensorRef<'a>]),
    Number(Number),
    Ints(&'x [i64]),
    Floats(&'x [f64]),
    Bools(&'x [i64]),
    Str(&'x str),
    Fixed(&'x Arg),
    /// A generator by the front end's handle; `None` is the device's default one.
    Rng(Option<usize>),
}

/// The operands of a run. The generator's state takes its place once it is known how much of it is used.
#[derive(Default)]
pub(crate) struct Operands {
    pub(crate) values: SmallVec<[Arc<Value>; 6]>,
    pub(crate) rng: Option<(usize, Option<usize>)>,
}

/// What a source stands for in this call; `k` is the current place in the lists of a foreach op.
pub(crate) fn item<'x, 'a>(
    call: &'x Call<'x, 'a>,
    source: &'x Source,
    k: usize,
) -> Result<Item<'x, 'a>, Refusal> {
    Ok(match source {
        Source::Fixed(arg) => Item::Fixed(arg),
        Source::Size => call.size.map_or(Item::None, |n| Item::Number(Number::Int(n))),
        Source::Rng(position) => Item::Rng(position.and_then(|p| match &call.args[p] {
            ArgRef::Generator(handle) => Some(*handle),
            _ => None,
        })),
        Source::EachOfTensor(p) => Item::Element(call.tensor(*p)?, k as i64),
        Source::Arg(p) => Item::of(&call.args[*p])?,
        Source::Each(p) => match &call.args[*p] {
            ArgRef::Tensors(l) if l[k].is_defined() => Item::Tensor(&l[k]),
            ArgRef::Tensors(_) => Item::None,
            ArgRef::Numbers(l) => Item::Number(l[k]),
            ArgRef::Floats(l) => Item::Number(Number::Float(l[k])),
            ArgRef::Ints(l) => Item::Number(Number::Int(l[k])),
            _ => return Err(call.no_list(*p)),
        },
    })
}

impl<'x, 'a> Item<'x, 'a> {
    /// What a parameter gets that takes an argument as it is.
    #[inline]
    pub(crate) fn of(arg: &'x ArgRef<'a>) -> Result<Self, Refusal> {
        Ok(match arg {
            ArgRef::None => Item::None,
            ArgRef::Tensor(t) if !t.is_defined() => Item::None,
            ArgRef::Tensor(t) => Item::Tensor(t),
            ArgRef::Tensors(l) => Item::List(l),
            ArgRef::Number(n) => Item::Number(*n),
            ArgRef::Ints(v) => Item::Ints(v),
            ArgRef::Floats(v) => Item::Floats(v),
            ArgRef::Bools(v) => Item::Bools(v),
            ArgRef::Str(s) => Item::Str(s),
            ArgRef::Numbers(_) | ArgRef::Generator(_) | ArgRef::Other => {
                return Err(Refusal::Fallback("an argument of a type that no row takes".to_owned()));
            }
        })
    }

    /// Adds what shapes the program to a key: types, attributes, which numbers are operands, but no value of those.
    pub(crate) fn encode(&self, kind: ParamKind, with_strides: bool, key: &mut Key) -> Result<(), Refusal> {
        match self {
            Item::None => key.word(0),
            Item::Tensor(t) => encode(t, with_strides, key)?,
            Item::Element(t, _) => key.word(4 | (num_kind(t.dtype()?) as u64) << 8),
            Item::List(l) => {
                key.word(3 | (l.len() as u64) << 8);
                for t in *l {
                    if t.is_defined() { encode(t, with_strides, key)? } else { key.word(0) }
                }
            }
            Item::Number(Number::Int(_)) if kind == ParamKind::Offset => encode_offsets(1, key),
            Item::Ints(v) if kind == ParamKind::Offsets => encode_offsets(v.len(), key),
            Item::Number(n) => encode_number(*n, is_operand(kind, *n), key),
            Item::Ints(v) if kind == ParamKind::Numbers => key.word(12 | (v.len() as u64) << 8),
            Item::Floats(v) if kind == ParamKind::Numbers => key.word(14 | (v.len() as u64) << 8),
            Item::Ints(v) => key.list(6, v),
            Item::Floats(v) => {
                key.word(7 | (v.len() as u64) << 8);
                v.iter().for_each(|x| key.word(x.to_bits()));
            }
            Item::Bools(v) => key.list(8, v),
            Item::Str(s) => {
                key.word(9 | (s.len() as u64) << 8);
                s.bytes().for_each(|b| key.word(u64::from(b)));
            }
            Item::Fixed(_) => key.word(10), // the same in every call of the overload
            Item::Rng(_) => key.word(11),
        }
        Ok(())
    }

    /// Adds its offsets.
    pub(crate) fn offsets(&self, kind: ParamKind, out: &mut Offsets) {
        match self {
            Item::Number(Number::Int(n)) if kind == ParamKind::Offset => out.push(*n),
            Item::Ints(v) if kind == ParamKind::Offsets => out.extend_from_slice(v),
            _ => {}
        }
    }

    /// Adds its operands; views are read, which may record.
    pub(crate) fn operands(
        &self,
        call: &Call<'_, 'a>,
        stream: &Stream,
        w: &mut Window,
        kind: ParamKind,
        out: &mut Operands,
    ) -> Result<(), Refusal> {
        match self {
            Item::Tensor(t) if call.op.takes_host_tensor() => {
                out.values.push(index_value(call, stream, w, t)?)
            }
            Item::Tensor(t) => out.values.push(value(call, w, t)?),
            Item::Element(t, k) => {
                let number = value(call, w, &element(t, *k)?)?;
                // Instances differ by the kind of a number alone, which has one dtype.
                out.values.push(w.cast(number, num_kind(t.dtype()?).dtype())?);
            }
            Item::List(l) => {
                for t in l.iter().filter(|t| t.is_defined()) {
                    let indices = call.op.takes_indices();
                    out.values.push(if indices {
                        index_value(call, stream, w, t)?
                    } else {
                        value(call, w, t)?
                    });
                }
            }
            Item::Number(n) if is_operand(kind, *n) => out.values.push(number(w, *n)),
            Item::Ints(v) if kind == ParamKind::Numbers => {
                let bytes = v.iter().flat_map(|n| n.to_le_bytes()).collect();
                out.values.push(w.list_of_numbers(&list(DType::S64, v), bytes));
            }
            Item::Floats(v) if kind == ParamKind::Numbers => {
                let bytes = v.iter().flat_map(|n| n.to_le_bytes()).collect();
                out.values.push(w.list_of_numbers(&list(DType::F64, v), bytes));
            }
            Item::Rng(generator) => {
                out.rng = Some((out.values.len(), *generator));
                out.values.push(w.number(DType::U64, &[]));
            }
            _ => {}
        }
        Ok(())
    }

    /// As the op table takes it.
    pub(crate) fn arg(&self, kind: ParamKind, with_strides: bool, next: &mut Next) -> Result<Arg, Refusal> {
        let Next { operand, offset } = next;
        let mut operand = || take(operand, 1);
        let mut tensor = |t: &TensorRef<'_>| -> Result<TensorArg, Refusal> {
            let strides = if with_strides { Dims::from_slice(t.strides) } else { Dims::new() };
            Ok(TensorArg { operand: operand(), ty: t.ty()?, wrapped: t.wrapped, strides })
        };
        Ok(match self {
            Item::None => Arg::None,
            Item::Tensor(t) => Arg::Tensor(tensor(t)?),
            Item::Element(t, _) => Arg::Scalar(ScalarArg { kind: num_kind(t.dtype()?), operand: operand() }),
            Item::List(l) => {
                let entry = |t: &TensorRef<'_>| if t.is_defined() { tensor(t).map(Some) } else { Ok(None) };
                Arg::Tensors(l.iter().map(entry).collect::<Result<_, Refusal>>()?)
            }
            Item::Number(Number::Int(_)) if kind == ParamKind::Offset => Arg::Offset(take(offset, 1)),
            Item::Ints(v) if kind == ParamKind::Offsets => {
                Arg::Offsets(take(offset, v.len() as u32), v.len() as u32)
            }
            Item::Number(n) => match number_arg(kind, *n) {
                Some(arg) => arg,
                None => Arg::Scalar(ScalarArg { kind: number_kind(*n), operand: operand() }),
            },
            Item::Ints(v) if kind == ParamKind::Numbers => {
                list_arg(operand(), list(DType::S64, v), with_strides)
            }
            Item::Floats(v) if kind == ParamKind::Numbers => {
                list_arg(operand(), list(DType::F64, v), with_strides)
            }
            Item::Ints(v) => Arg::Ints(Dims::from_slice(v)),
            Item::Floats(v) => Arg::Floats(v.iter().map(|&x| x.into()).collect()),
            Item::Bools(v) => Arg::Bools(v.iter().map(|&x| x != 0).collect()),
            Item::Str(s) => Arg::Str((*s).to_owned()),
            Item::Fixed(arg) => (*arg).clone(),
            Item::Rng(_) => Arg::Rng(operand()),
        })
    }
}

/// The numbers of the next operand and the next offset.
#[derive(Default)]
pub(crate) struct Next {
    operand: u32,
    offset: u32,
}

fn take(next: &mut u32, n: u32) -> u32 {
    *next += n;
    *next - n
}

/// Adds offsets to a key: their values are not part of it.
pub(crate) fn encode_offsets(n: usize, key: &mut Key) {
    key.word(13 | (n as u64) << 8);
}

/// The type of a list of numbers that is an operand.
fn list<T>(dtype: DType, list: &[T]) -> TensorType {
    TensorType::new(dtype, [list.len() as i64].as_slice())
}

fn list_arg(operand: u32, ty: TensorType, with_strides: bool) -> Arg {
    let strides = if with_strides { Dims::from_slice(&[1]) } else { Dims::new() };
    Arg::Tensor(TensorArg { operand, ty, wrapped: false, strides })
}

fn encode(t: &TensorRef<'_>, with_strides: bool, key: &mut Key) -> Result<(), Refusal> {
    encode_tensor(t.dtype()?, t.wrapped, t.sizes, with_strides.then_some(t.strides), key);
    Ok(())
}

/// Adds a tensor to a key, with its strides where they matter.
pub(crate) fn encode_tensor(
    dtype: DType,
    wrapped: bool,
    sizes: &[i64],
    strides: Option<&[i64]>,
    key: &mut Key,
) {
    key.word(1 | u64::from(wrapped) << 8 | (dtype as u64) << 16 | (sizes.len() as u64) << 32);
    key.ints(sizes);
    if let Some(strides) = strides {
        key.ints(strides);
    }
}

/// Adds a number to a key: its value only if it is no operand.
pub(crate) fn encode_number(n: Number, is_operand: bool, key: &mut Key) {
    let kind = number_kind(n) as u64;
    if is_operand {
        return key.word(4 | kind << 8);
    }
    key.word(5 | kind << 8);
    match n {
        Number::Bool(x) => key.word(u64::from(x)),
        Number::Int(x) => key.word(x as u64),
        Number::Float(x) => key.word(x.to_bits()),
        Number::Complex(re, im) => {
            key.word(re.to_bits());
            key.word(im.to_bits());
        }
    }
}

/// The value that a tensor shows.
fn value(call: &Call<'_, '_>, w: &mut Window, t: &TensorRef<'_>) -> Result<Arc<Value>, Refusal> {
    match t.place {
        Place::Device(slot) if slot.device == call.device => w.read(slot, t),
        Place::Host(bytes) if t.sizes.is_empty() => Ok(w.host_number(t.dtype()?, bytes, t.wrapped)),
        _ => Err(call.mixed_devices(t)),
    }
}

/// The value of an index or of an entry of a list of them, which may be in host memory.
fn index_value(
    call: &Call<'_, '_>,
    stream: &Stream,
    w: &mut Window,
    t: &TensorRef<'_>,
) -> Result<Arc<Value>, Refusal> {
    let place = match t.place {
        Place::Host(place) if !t.sizes.is_empty() => place,
        _ => return value(call, w, t),
    };
    let bytes = t.host_bytes().ok_or_else(|| Error::runtime("an index tensor without elements"))?;
    let value = stream.upload(t.ty()?, &bytes)?;
    w.note_upload(&value, place);
    Ok(value)
}

/// Element `k` of a 1-d tensor as a 0-d one.
fn element<'a>(t: &TensorRef<'a>, k: i64) -> Result<TensorRef<'a>, Refusal> {
    let step = k * t.strides.first().copied().unwrap_or(1);
    let mut one = TensorRef { sizes: &[], strides: &[], contiguous: true, ..t.clone() };
    match t.place {
        Place::Host(bytes) => {
            let item = t.dtype()?.size_bytes();
            one.place = Place::Host(&bytes[step as usize * item..][..item]);
        }
        _ => one.offset += step,
    }
    Ok(one)
}

/// A number as a 0-d operand.
pub(crate) fn number(w: &mut Window, n: Number) -> Arc<Value> {
    let dtype = number_kind(n).dtype();
    match n {
        Number::Bool(x) => w.number(dtype, &[u8::from(x)]),
        Number::Int(x) => w.number(dtype, &x.to_le_bytes()),
        Number::Float(x) => w.number(dtype, &x.to_le_bytes()),
        Number::Complex(re, im) => {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&re.to_le_bytes());
            bytes[8..].copy_from_slice(&im.to_le_bytes());
            w.number(dtype, &bytes)
        }
    }
}

fn number_kind(n: Number) -> NumKind {
    match n {
        Number::Bool(_) => NumKind::Bool,
        Number::Int(_) => NumKind::Int,
        Number::Float(_) => NumKind::Float,
        Number::Complex(..) => NumKind::Complex,
    }
}

fn num_kind(dtype: DType) -> NumKind {
    match dtype {
        DType::Pred => NumKind::Bool,
        d if d.is_complex() => NumKind::Complex,
        d if d.is_float() => NumKind::Float,
        _ => NumKind::Int,
    }
}

/// Whether strides are part of an instance: only where the layout looks at them.
pub(crate) fn with_strides(row: &aten::Row) -> bool {
    row.layout != aten::Layout::Contiguous
}
