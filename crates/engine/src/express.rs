//! The short way of a call, for what most calls are: a functional op of one result that was seen before, on whole tensors
//! of the device, numbers, and lists of integers.
//!
//! It makes the same key as the long way (`Call::attempt`), and records the same. Whatever is out of the ordinary, a view,
//! a window that is over, an op that is new, it leaves to the long way before anything is recorded.

use crate::arguments::{encode_number, encode_offsets, encode_tensor, number, with_strides};
use crate::call::{Meta, Op};
use crate::config::{Mode, Switches};
use crate::engine::Engine;
use crate::error::Refusal;
use crate::inst::{Inst, Key};
use crate::shared::Shared;
use crate::site::Site;
use crate::value::Slot;
use crate::view::Offsets;
use crate::window::{Operand, Window};
use oxitorch_aten::args::{Number, is_operand};
use oxitorch_aten::numbers::Numbers;
use oxitorch_aten::{self as aten, ParamKind};
use oxitorch_hlo::DType;
use smallvec::SmallVec;

/// An argument that may go the short way. A form of its own beside [`ArgRef`](crate::ArgRef), since it fits into
/// registers: with that one a call takes a sixth more instructions.
#[derive(Clone, Copy, Debug)]
pub enum Plain<'a> {
    /// `None`
    None,
    /// A row-major tensor at the beginning of its storage.
    Tensor {
        /// The storage.
        slot: &'a Slot,
        /// Element type.
        dtype: DType,
        /// Sizes.
        sizes: &'a [i64],
        /// Strides in elements.
        strides: &'a [i64],
    },
    /// A 0-d tensor in host memory.
    Host {
        /// Element type.
        dtype: DType,
        /// Its one element.
        bytes: &'a [u8],
        /// Whether it is a Python number that PyTorch wrapped.
        wrapped: bool,
    },
    /// A number, or anything that travels as one.
    Number(Number),
    /// `int[]`
    Ints(&'a [i64]),
}

/// A call that may go the short way.
#[derive(Clone, Copy)]
pub struct Express<'c> {
    /// Ordinal of the device that runs it.
    pub device: u16,
    /// The overload.
    pub op: &'c Op,
    /// The Python line.
    pub site: Site,
    /// The switches at this moment.
    pub switches: Switches,
}

type Operands = SmallVec<[Operand; 4]>;

impl Engine {
    /// Runs a call the short way; `None` if it has to go the long one. `args` gives its arguments by schema position, and
    /// `None` for one that cannot go the short way.
    #[inline]
    pub fn express<'a>(
        &self,
        call: &Express<'_>,
        args: impl Iterator<Item = Option<Plain<'a>>> + Clone,
    ) -> Option<Result<(Slot, Meta), Refusal>> {
        if !call.op.is_plain() || call.switches.mode == Mode::Debug || !call.takes_numbers(args.clone()) {
            return None;
        }
        let stream = self.stream(call.device as usize).ok()?;
        let mut w = stream.lock(call.site);
        if call.switches.mode == Mode::Fused && w.is_over(call.site, &call.switches).is_some() {
            return None;
        }
        let mut key = w.new_key(std::ptr::from_ref(call.op) as u64);
        let (mut operands, mut offsets) = (Operands::new(), Offsets::new());
        let found = call.find(args, &mut w, &mut key, &mut operands, &mut offsets);
        w.keep_key(key);
        let inst = found?;
        stream.refuse_huge(&inst).ok()?;
        w.thread.options = call.switches.compiler_options;
        let (value, out) = w.record_plain(&inst, operands, &offsets)?;
        let slot = Slot::with(out.bytes as usize, call.device, value);
        let meta = Meta::new(out);
        let ended = stream.end_call(&mut w, call.switches.mode);
        drop(w);
        if let Err(e) = ended.and_then(|()| stream.after_op(call.switches.mode)) {
            return Some(Err(e.into()));
        }
        stream.metrics().count(&stream.metrics().ops);
        Some(Ok((slot, meta)))
    }
}

impl Express<'_> {
    /// Whether the row takes the numbers of the call; what is wrong with them, the long way says.
    #[inline]
    fn takes_numbers<'a>(&self, args: impl Iterator<Item = Option<Plain<'a>>>) -> bool {
        let Some(check) = aten::row(self.op.row_id()).check_numbers else { return true };
        let (mut by_param, mut first): (SmallVec<[Option<Number>; 8]>, _) = (SmallVec::new(), None);
        for arg in args {
            let number = match arg {
                Some(Plain::Number(n)) => Some(n),
                Some(Plain::Host { dtype, bytes, .. }) => {
                    first = first.or(Some(dtype));
                    Number::read(dtype, bytes)
                }
                Some(Plain::Tensor { dtype, .. }) => {
                    first = first.or(Some(dtype));
                    None
                }
                Some(Plain::None | Plain::Ints(_)) => None,
                None => return false,
            };
            by_param.push(number);
        }
        check(&Numbers { by_param: &by_param, text: None, dtype: first }).is_ok()
    }

    /// The instance that the call led to before, its operands and its offsets.
    #[inline]
    fn find<'a>(
        &self,
        args: impl Iterator<Item = Option<Plain<'a>>>,
        w: &mut Window,
        key: &mut Key,
        operands: &mut Operands,
        offsets: &mut Offsets,
    ) -> Option<Shared<Inst>> {
        let row = aten::row(self.op.row_id());
        let strided = with_strides(row);
        key.word(self.op.key_word(&self.switches));
        for (arg, param) in args.zip(row.params()) {
            match arg? {
                Plain::None => key.word(0),
                Plain::Tensor { slot, dtype, sizes, strides } => {
                    if slot.device != self.device {
                        return None;
                    }
                    operands.push(w.whole(slot, dtype, sizes)?);
                    encode_tensor(dtype, false, sizes, strided.then_some(strides), key);
                }
                Plain::Host { dtype, bytes, wrapped } => {
                    operands.push(Operand::Value(w.host_number(dtype, bytes, wrapped)));
                    encode_tensor(dtype, wrapped, &[], None, key);
                }
                Plain::Number(Number::Int(n)) if param.kind == ParamKind::Offset => {
                    encode_offsets(1, key);
                    offsets.push(n);
                }
                Plain::Ints(v) if param.kind == ParamKind::Offsets => {
                    encode_offsets(v.len(), key);
                    offsets.extend_from_slice(v);
                }
                Plain::Number(n) => {
                    let operand = is_operand(param.kind, n);
                    encode_number(n, operand, key);
                    if operand {
                        operands.push(Operand::Value(number(w, n)));
                    }
                }
                Plain::Ints(v) => key.list(6, v),
            }
        }
        w.known(key).filter(|inst| inst.is_plain())
    }
}
