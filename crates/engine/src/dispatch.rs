//! One ATen call: from PyTorch's arguments to recorded instances and PyTorch's results.

use crate::arguments::{Item, Next, Operands, item, with_strides};
use crate::call::{ArgRef, Call, Meta, Output, Outputs, Return, key_word};
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Refusal};
use crate::events;
use crate::inst::{Format, Inst, Kind, Out, refusal};
use crate::masks;
use crate::shared::Shared;
use crate::stream::Stream;
use crate::tensor::{Place, TensorRef};
use crate::value::{Held, Slot, Value};
use crate::view::{Offsets, dense_order};
use crate::window::Window;
use oxitorch_aten::args::Number;
use oxitorch_aten::lower::Dest;
use oxitorch_aten::numbers::Numbers;
use oxitorch_aten::{self as aten, Arg, Form, ParamKind, Source, Write};
use oxitorch_capture::Reason;
use smallvec::SmallVec;
use std::fmt::Write as _;
use std::sync::Arc;

/// Why a tensor holds no scalars for the entries of a list.
fn packed_scalars(rank: usize) -> String {
    format!("Expected packed scalar Tensor to be of dimension 1. Got {rank} instead.")
}

/// Why a list does not go with one of `n` tensors.
fn other_length(list: &ArgRef<'_>, n: usize, len: usize) -> String {
    match list {
        ArgRef::Tensors(_) => format!("Tensor lists must have the same number of tensors, got {n} and {len}"),
        ArgRef::Tensor(_) => {
            format!("Expected length of scalars to match input of length {n} but got {len} instead.")
        }
        _ => "Tensor list must have same number of elements as scalar list.".to_owned(),
    }
}

impl Engine {
    /// Runs one ATen call on a device.
    pub fn dispatch(&self, call: &Call<'_, '_>, out: &mut Outputs) -> Result<(), Refusal> {
        let stream = self.stream(call.device as usize)?;
        stream.metrics().count(&stream.metrics().ops);
        let result = match call.attempt(stream, out) {
            Err(Refusal::Fallback(_)) if masks::any(call) => masks::expand(stream, call, out),
            result => result,
        };
        result.map_err(|r| call.explain(r))
    }
}

impl<'a> Call<'_, 'a> {
    /// An error with op, arguments and Python line.
    pub fn explain(&self, refusal: Refusal) -> Refusal {
        let Refusal::Error(e) = refusal else { return refusal };
        if e.is_placed() || e.kind == ErrorKind::Interrupted {
            return e.into();
        }
        let mut text = format!("{}\n  in {}(", e.message, aten::qualified(&self.op.name));
        for (i, arg) in self.args.iter().enumerate() {
            if i > 0 {
                text.push_str(", ");
            }
            describe(&mut text, arg);
        }
        text.push(')');
        Error::new(e.kind, text).at(self.site).into()
    }

    /// Records the call, launches it, and waits as the mode asks.
    pub(crate) fn attempt(&self, stream: &Stream, out: &mut Outputs) -> Result<(), Refusal> {
        if self.size.is_none() {
            let size = match (self.op.row.counted_by, self.op.row.sized_by) {
                (Some(count), _) => {
                    let items: Result<SmallVec<[Item<'_, '_>; 6]>, Refusal> =
                        self.op.binding.params.iter().map(|source| item(self, source, 0)).collect();
                    Some(ask_numbers(&items?, count)?)
                }
                (None, Some(row)) => Some(self.result_size(stream, row)?),
                (None, None) => None,
            };
            if size.is_some() {
                return Call { size, ..*self }.attempt(stream, out);
            }
        }
        let mode = self.switches.mode;
        let mut w = stream.lock(self.site);
        stream.make_room(&mut w, self.site, &self.switches)?;
        self.run(stream, &mut w, out)?;
        stream.end_call(&mut w, mode)?;
        drop(w);
        stream.after_op(mode)?;
        Ok(())
    }

    /// For results whose size depends on values: runs the row that tells it, and waits.
    fn result_size(&self, stream: &Stream, row: &str) -> Result<i64, Refusal> {
        let missing = || Error::runtime(format!("no row `{row}`; please report this"));
        let op = aten::find(row).ok_or_else(missing)?;
        let held = {
            let mut w = stream.lock(self.site);
            w.leave("a size that depends on values")?;
            let results = self.run_row(stream, &mut w, op, None, &[])?;
            let held = Held::new(results.first()?);
            stream.flush(&mut w, Reason::Read)?;
            held
        };
        let mut bytes = [0; 8];
        events::here(self.site);
        stream.fetch(held.value(), &mut bytes)?;
        let size = i64::from_le_bytes(bytes);
        let most = self.most();
        stream.lock(self.site).counts.read(self.site, size, if most < size { i64::MAX } else { most });
        Ok(size)
    }

    /// How large a result may be whose size depends on values: most of these are as large as an argument, at most.
    fn most(&self) -> i64 {
        let numel = |a: &ArgRef<'_>| match a {
            ArgRef::Tensor(t) => t.numel(),
            _ => 0,
        };
        self.args.iter().map(numel).max().unwrap_or(0)
    }

    fn run(&self, stream: &Stream, w: &mut Window, out: &mut Outputs) -> Result<(), Refusal> {
        match &self.op.binding.form {
            Form::Functional => self.functional(stream, w, out),
            Form::InPlace(at) => {
                self.written(*at)?;
                let value = self.run_row(stream, w, self.op.binding.op, None, &[self.dest_into(*at)?])?;
                self.write(w, *at, value.first()?)?;
                out.push(Output::Arg(*at));
                Ok(())
            }
            Form::Out(positions) => self.out(stream, w, positions, out),
            Form::Mutating(positions) => self.mutating(stream, w, positions, out),
            Form::Foreach(write) => self.foreach(stream, w, *write, out),
        }
    }

    fn functional(&self, stream: &Stream, w: &mut Window, out: &mut Outputs) -> Result<(), Refusal> {
        let mut results = self.run_row(stream, w, self.op.binding.op, None, &[])?;
        if self.op.returns == [Return::List] {
            out.push(Output::List(results.len()));
        }
        (0..results.len()).for_each(|i| out.push(results.new_tensor(i, stream.device)));
        Ok(())
    }

    fn out(
        &self,
        stream: &Stream,
        w: &mut Window,
        positions: &[usize],
        outputs: &mut Outputs,
    ) -> Result<(), Refusal> {
        let mut dests: SmallVec<[Dest; 1]> = SmallVec::new();
        for p in self.op.binding.overwritten() {
            let defined = matches!(&self.args[p], ArgRef::Tensor(t) if t.is_defined());
            dests.push(if defined { self.dest_into(p)? } else { Dest::New });
        }
        let first = dests.len();
        for &p in positions {
            self.written(p)?;
            let out = self.tensor(p)?;
            let by_numel = self.op.row.out_by_numel;
            dests.push(if by_numel { Dest::Refill(out.ty()?) } else { Dest::Cast(out.dtype()?) });
        }
        let mut results = self.run_row(stream, w, self.op.binding.op, None, &dests)?;
        for (i, p) in self.op.binding.overwritten().enumerate() {
            if let (Dest::Into(_), (Some(value), _)) = (&dests[i], results.get(i)) {
                self.write(w, p, value)?;
            }
        }
        for (i, &p) in positions.iter().enumerate() {
            let tensor = self.tensor(p)?;
            let (Some(value), Some(out)) = results.get(first + i) else {
                outputs.push(Output::Arg(p));
                continue;
            };
            if out.ty.shape.as_slice() == tensor.sizes {
                self.write(w, p, value)?;
                outputs.push(Output::Arg(p));
            } else if let Output::New(slot, meta) = results.new_tensor(first + i, stream.device) {
                self.resizable(p, &meta.ty().shape)?;
                outputs.push(Output::Resized { arg: p, slot, meta });
            }
        }
        Ok(())
    }

    fn mutating(
        &self,
        stream: &Stream,
        w: &mut Window,
        positions: &[usize],
        outputs: &mut Outputs,
    ) -> Result<(), Refusal> {
        let mut places: Vec<TensorRef<'_>> = Vec::new();
        for &p in positions {
            match &self.args[p] {
                ArgRef::Tensors(list) => places.extend(list.iter().cloned()),
                ArgRef::Tensor(t) if t.is_defined() => places.push(t.clone()),
                _ => places.push(TensorRef {
                    place: Place::Undefined,
                    dtype: None,
                    sizes: &[],
                    strides: &[],
                    offset: 0,
                    contiguous: true,
                    wrapped: false,
                    device: 0,
                    conj: false,
                    neg: false,
                }),
            }
        }
        let mut dests: SmallVec<[Dest; 1]> = SmallVec::new();
        for t in &places {
            dests.push(if t.is_defined() { Dest::Into(t.ty()?) } else { Dest::New });
        }
        let mut results = self.run_row(stream, w, self.op.binding.op, None, &dests)?;
        for (i, t) in places.iter().enumerate().filter(|(_, t)| t.is_defined()) {
            if let (Some(value), _) = results.get(i) {
                w.write(self.target(t)?, t, value)?;
            }
        }
        let mut next = places.len();
        for r in &self.op.returns {
            match r {
                Return::Arg(p) => outputs.push(Output::Arg(*p)),
                Return::New | Return::List => {
                    outputs.push(results.new_tensor(next, stream.device));
                    next += 1;
                }
            }
        }
        Ok(())
    }

    fn foreach(
        &self,
        stream: &Stream,
        w: &mut Window,
        write: Write,
        outputs: &mut Outputs,
    ) -> Result<(), Refusal> {
        let n = self.list_len()?;
        if write == Write::New {
            outputs.push(Output::List(n));
        }
        for k in 0..n {
            match write {
                Write::New => {
                    let mut results = self.run_row(stream, w, self.op.binding.op, Some(k), &[])?;
                    outputs.push(results.new_tensor(0, stream.device));
                }
                Write::Into(p) => {
                    let ArgRef::Tensors(list) = &self.args[p] else { return Err(self.no_list(p)) };
                    let target = list.get(k).ok_or_else(|| self.no_list(p))?;
                    self.written_each(target, p, k)?;
                    let results =
                        self.run_row(stream, w, self.op.binding.op, Some(k), &[Dest::Into(target.ty()?)])?;
                    w.write(self.target(target)?, target, results.first()?)?;
                }
            }
            // Without windows one program per element: elements of one shape share it.
            stream.end_call(w, self.switches.mode)?;
        }
        Ok(())
    }

    pub(crate) fn no_list(&self, p: usize) -> Refusal {
        Error::runtime(format!("expected a list of tensors as argument {p}")).into()
    }

    /// The common length of the lists that a foreach op walks.
    fn list_len(&self) -> Result<usize, Refusal> {
        let mut common: Option<usize> = None;
        for source in &self.op.binding.params {
            let (Source::Each(p) | Source::EachOfTensor(p)) = source else { continue };
            let len = match &self.args[*p] {
                ArgRef::Tensors(l) => l.len(),
                ArgRef::Numbers(l) => l.len(),
                ArgRef::Floats(l) => l.len(),
                ArgRef::Ints(l) => l.len(),
                ArgRef::Tensor(t) => match t.sizes {
                    [n] => *n as usize,
                    sizes => return Err(Error::runtime(packed_scalars(sizes.len())).into()),
                },
                _ => return Err(self.no_list(*p)),
            };
            match common {
                Some(n) if n != len => {
                    return Err(Error::runtime(other_length(&self.args[*p], n, len)).into());
                }
                _ => common = Some(len),
            }
        }
        Ok(common.unwrap_or(0))
    }

    pub(crate) fn tensor(&self, p: usize) -> Result<&TensorRef<'a>, Refusal> {
        match &self.args[p] {
            ArgRef::Tensor(t) => Ok(t),
            _ => Err(Error::runtime(format!("argument {p} must be a tensor")).into()),
        }
    }

    /// Refuses what PyTorch refuses: a destination that shows one place twice, or that overlaps an operand.
    fn written(&self, p: usize) -> Result<(), Refusal> {
        let (row, written) = (self.op.row, self.tensor(p)?);
        if !row.fills {
            refuse_overlap(written)?;
        }
        if row.iterated && !row.fills {
            for arg in self.args.iter().enumerate().filter(|(i, _)| *i != p).map(|(_, arg)| arg) {
                if let ArgRef::Tensor(read) = arg {
                    refuse_overlap_with(written, read, true)?;
                }
            }
        }
        if let Some(message) = row.outs_apart
            && let Form::Out(outs) = &self.op.binding.form
        {
            for &other in outs.iter().filter(|&&other| other != p) {
                if refuse_overlap_with(written, self.tensor(other)?, false).is_err() {
                    return Err(Error::new(ErrorKind::Value, message).into());
                }
            }
        }
        row.apart.iter().try_for_each(|&param| match self.op.binding.params.get(param) {
            Some(Source::Arg(at)) => match &self.args[*at] {
                ArgRef::Tensor(read) => refuse_overlap_with(written, read, false),
                ArgRef::Tensors(list) => {
                    list.iter().try_for_each(|read| refuse_overlap_with(written, read, false))
                }
                _ => Ok(()),
            },
            _ => Ok(()),
        })
    }

    /// The same for a tensor of a list, where the op runs on each.
    fn written_each(&self, written: &TensorRef<'_>, p: usize, k: usize) -> Result<(), Refusal> {
        if self.op.row.fills {
            return Ok(());
        }
        refuse_overlap(written)?;
        for arg in self.args.iter().enumerate().filter(|(i, _)| *i != p).map(|(_, arg)| arg) {
            if let ArgRef::Tensors(list) = arg
                && let Some(read) = list.get(k)
            {
                refuse_overlap_with(written, read, true)?;
            }
        }
        Ok(())
    }

    /// A destination that is also an operand keeps its shape, as in `TensorIteratorBase::mark_resize_outputs`.
    fn resizable(&self, p: usize, shape: &[i64]) -> Result<(), Refusal> {
        let out = self.tensor(p)?;
        let is_out = |t: &TensorRef<'_>| match (t.place, out.place) {
            (Place::Device(a), Place::Device(b)) => {
                std::ptr::eq(a, b) && (t.offset, t.sizes, t.strides) == (out.offset, out.sizes, out.strides)
            }
            _ => false,
        };
        let others = self.args.iter().enumerate().filter(|(i, _)| *i != p);
        let read = |arg: &ArgRef<'_>| matches!(arg, ArgRef::Tensor(t) if is_out(t));
        if self.op.row.layout == aten::Layout::Pointwise && others.into_iter().any(|(_, arg)| read(arg)) {
            return Err(refusal(aten::error::in_place_shape(out.sizes, shape)));
        }
        Ok(())
    }

    fn dest_into(&self, p: usize) -> Result<Dest, Refusal> {
        Ok(Dest::Into(self.tensor(p)?.ty()?))
    }

    fn write(&self, w: &mut Window, p: usize, value: Arc<Value>) -> Result<(), Refusal> {
        let t = self.tensor(p)?;
        w.write(self.target(t)?, t, value)
    }

    /// The storage of a tensor that is written: it must be on the call's device.
    fn target(&self, t: &TensorRef<'a>) -> Result<&'a Slot, Refusal> {
        match t.place {
            Place::Device(slot) if slot.device == self.device => Ok(slot),
            _ => Err(self.mixed_devices(t)),
        }
    }

    pub(crate) fn mixed_devices(&self, t: &TensorRef<'_>) -> Refusal {
        let other =
            if matches!(t.place, Place::Host(_)) { "cpu".to_owned() } else { format!("tpu:{}", t.device) };
        let message = format!(
            "Expected all tensors to be on the same device, but found at least two devices, tpu:{} and {other}!",
            self.device
        );
        Error::runtime(message).into()
    }

    /// Records a row once, on the current element of the lists.
    fn run_row(
        &self,
        stream: &Stream,
        w: &mut Window,
        op: aten::OpId,
        element: Option<usize>,
        dests: &[Dest],
    ) -> Result<Results, Refusal> {
        let (row, sources) = (aten::row(op), self.op.binding.params.as_slice());
        let (params, strided) = (row.params(), with_strides(row));
        let format = match self.op.format.map(|p| &self.args[p]) {
            Some(ArgRef::Number(Number::Int(code))) => Format::from_code(*code),
            _ => Format::Preserve,
        };
        let mut items: SmallVec<[Item<'_, 'a>; 6]> = SmallVec::new();
        let mut key = w.new_key(std::ptr::from_ref(self.op) as u64);
        key.word(key_word(op, format, &self.switches));
        for (source, param) in sources.iter().zip(params) {
            let item = item(self, source, element.unwrap_or(0))?;
            item.encode(param.kind, strided, &mut key)?;
            items.push(item);
        }
        if let Some(check) = row.check_numbers {
            ask_numbers(&items, check)?;
        }
        for dest in dests {
            key.dest(dest);
        }
        let mut offsets = Offsets::new();
        items.iter().zip(params).for_each(|(item, param)| item.offsets(param.kind, &mut offsets));
        let mut place = |args: &[Arg]| row.place_offsets.map_or(Ok(()), |place| place(args, &mut offsets));
        let inst = match w.known(&key) {
            Some(inst) => {
                if let Kind::Row { args, .. } = &inst.kind {
                    place(args).map_err(refusal)?;
                }
                inst
            }
            None => {
                let mut next = Next::default();
                let mut args = Vec::with_capacity(items.len());
                for (item, param) in items.iter().zip(params) {
                    args.push(item.arg(param.kind, strided, &mut next)?);
                }
                place(&args).map_err(refusal)?;
                let lowering = self.switches.lowering(stream.wanted);
                w.learn(&key, Kind::Row { op, args, dests: dests.into(), format, lowering })?
            }
        };
        w.keep_key(key);
        if let Some(dests) = self.resized(&inst, dests) {
            return self.run_row(stream, w, op, element, &dests);
        }
        stream.refuse_huge(&inst)?;
        let mut operands = Operands::default();
        if inst.careful {
            self.careful_operands(stream, w, &inst, &items, params, &mut operands)?;
        } else {
            for (item, param) in items.iter().zip(params) {
                item.operands(self, stream, w, param.kind, &mut operands)?;
            }
        }
        if let Some((place, generator)) = operands.rng {
            let state = (self.rng)(generator, inst.rng_blocks);
            operands.values[place] = w.random(state, (generator, inst.rng_blocks));
        }
        let outputs = w.record(&inst, operands.values, &offsets);
        Ok(Results { inst, outputs })
    }

    /// The places anew if an `out=` tensor turns out to have another size than its result.
    fn resized(&self, inst: &Inst, dests: &[Dest]) -> Option<SmallVec<[Dest; 1]>> {
        let Form::Out(positions) = &self.op.binding.form else { return None };
        let first = dests.len().checked_sub(positions.len())?;
        let place = |i: usize| match (&dests[i], inst.outputs.get(i)) {
            (Dest::Cast(dtype), Some(Some(out))) => {
                let tensor = self.tensor(positions[i.checked_sub(first)?]).ok()?;
                let with_strides = || self.op.row.gives_out_strides(tensor.sizes.contains(&0));
                (tensor.sizes != out.ty.shape.as_slice() && with_strides()).then_some(Dest::Resized(*dtype))
            }
            _ => None,
        };
        let any = (first..dests.len()).any(|i| place(i).is_some());
        any.then(|| dests.iter().enumerate().map(|(i, d)| place(i).unwrap_or_else(|| d.clone())).collect())
    }

    /// The operands without those whose values do not matter: they need not be there yet, and may have failed. Factors
    /// must fit the result.
    fn careful_operands(
        &self,
        stream: &Stream,
        w: &mut Window,
        inst: &Inst,
        items: &[Item<'_, 'a>],
        params: &[aten::params::Param],
        operands: &mut Operands,
    ) -> Result<(), Refusal> {
        for (i, (item, param)) in items.iter().zip(params).enumerate() {
            match item {
                Item::Tensor(t) if inst.is_unused(i) => {
                    self.expect_here(t)?;
                    continue;
                }
                Item::Number(n) if param.kind == ParamKind::Alpha && matches!(items[0], Item::Tensor(_)) => {
                    if let Some(Some(out)) = inst.outputs.first() {
                        aten::numbers::fits(*n, aten::dtype::opmath(out.ty.dtype)).map_err(refusal)?;
                    }
                }
                _ => {}
            }
            item.operands(self, stream, w, param.kind, operands)?;
        }
        Ok(())
    }

    /// Refuses an operand of another device.
    fn expect_here(&self, t: &TensorRef<'a>) -> Result<(), Refusal> {
        match t.place {
            Place::Host(_) if t.sizes.is_empty() => Ok(()),
            _ => self.target(t).map(|_| ()),
        }
    }
}

/// Asks a row about the numbers of a call: as operands they are out of a program's sight.
fn ask_numbers<T>(
    items: &[Item<'_, '_>],
    f: fn(&Numbers<'_>) -> Result<T, aten::Error>,
) -> Result<T, Refusal> {
    let number = |i: &Item<'_, '_>| match i {
        Item::Number(n) => Some(*n),
        Item::Tensor(TensorRef { place: Place::Host(bytes), dtype: Some(dtype), sizes: [], .. }) => {
            Number::read(*dtype, bytes)
        }
        _ => None,
    };
    let by_param: SmallVec<[Option<Number>; 8]> = items.iter().map(number).collect();
    let text = items.iter().find_map(|i| if let Item::Str(s) = i { Some(*s) } else { None });
    let dtype = items.iter().find_map(|i| if let Item::Tensor(t) = i { t.dtype } else { None });
    f(&Numbers { by_param: &by_param, text, dtype }).map_err(refusal)
}

/// `at::assert_no_internal_overlap`
fn refuse_overlap(t: &TensorRef<'_>) -> Result<(), Refusal> {
    let expanded = t.sizes.iter().zip(t.strides).any(|(&n, &s)| n > 1 && s == 0);
    if expanded && t.sizes.iter().all(|&n| n > 0) {
        let message = "unsupported operation: more than one element of the written-to tensor refers to a single memory \
                       location. Please clone() the tensor before performing the operation.";
        return Err(Error::runtime(message).into());
    }
    Ok(())
}

/// `at::assert_no_overlap`: two dense views of one storage that share elements. `same` allows two that are the same, as
/// `at::assert_no_partial_overlap` does.
fn refuse_overlap_with(written: &TensorRef<'_>, read: &TensorRef<'_>, same: bool) -> Result<(), Refusal> {
    let (Place::Device(a), Place::Device(b)) = (written.place, read.place) else { return Ok(()) };
    if !std::ptr::eq(a, b) || written.sizes.contains(&0) || read.sizes.contains(&0) {
        return Ok(());
    }
    let range = |t: &TensorRef<'_>| -> Option<(i64, i64)> {
        dense_order(t.sizes, t.strides)?;
        let item = t.dtype?.size_bytes() as i64;
        let numel: i64 = t.sizes.iter().product();
        Some((t.offset * item, (t.offset + numel) * item))
    };
    let (Some((a0, a1)), Some((b0, b1))) = (range(written), range(read)) else { return Ok(()) };
    let same = same && (a0, a1) == (b0, b1) && written.strides == read.strides;
    if !same && a0 < b1 && b0 < a1 {
        let message = "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single \
                       memory location. Please clone() the tensor before performing the operation.";
        return Err(Error::runtime(message).into());
    }
    Ok(())
}

/// The results of a recorded row.
struct Results {
    inst: Shared<Inst>,
    outputs: SmallVec<[Option<Arc<Value>>; 1]>,
}

impl Results {
    fn len(&self) -> usize {
        self.outputs.len()
    }

    fn get(&self, i: usize) -> (Option<Arc<Value>>, Option<&Out>) {
        let out = self.inst.outputs.get(i).and_then(|o| o.as_deref());
        (self.outputs.get(i).cloned().flatten(), out)
    }

    /// The first result.
    fn first(&self) -> Result<Arc<Value>, Refusal> {
        let missing = || Error::runtime(format!("{}: no result; please report this", self.inst.name()));
        Ok(self.outputs.first().cloned().flatten().ok_or_else(missing)?)
    }

    /// Result `i` as a tensor of its own; once.
    fn new_tensor(&mut self, i: usize, device: u16) -> Output {
        match (self.outputs[i].take(), &self.inst.outputs[i]) {
            (Some(value), Some(out)) => {
                let slot = Slot::with(out.bytes as usize, device, value);
                Output::New(slot, Meta::new(out))
            }
            _ => Output::Undefined,
        }
    }
}

/// An argument as error messages show it.
fn describe(text: &mut String, arg: &ArgRef<'_>) {
    let list = |text: &mut String, items: &dyn Fn(&mut String, usize), n: usize| {
        text.push('[');
        for i in 0..n.min(4) {
            if i > 0 {
                text.push_str(", ");
            }
            items(text, i);
        }
        text.push_str(if n > 4 { ", ...]" } else { "]" });
    };
    let number = |n: &Number| match n {
        Number::Bool(x) => if *x { "True" } else { "False" }.to_owned(),
        Number::Int(x) => x.to_string(),
        Number::Float(x) => x.to_string(),
        Number::Complex(re, im) => format!("({re}{im:+}j)"),
    };
    // Writing to a String does not fail.
    let _ = match arg {
        ArgRef::None => write!(text, "None"),
        ArgRef::Tensor(t) => write!(text, "{t}"),
        ArgRef::Tensors(l) => {
            list(text, &|s, i| s.push_str(&l[i].to_string()), l.len());
            Ok(())
        }
        ArgRef::Number(n) => write!(text, "{}", number(n)),
        ArgRef::Numbers(l) => {
            list(text, &|s, i| s.push_str(&number(&l[i])), l.len());
            Ok(())
        }
        ArgRef::Ints(v) => write!(text, "{v:?}"),
        ArgRef::Floats(v) => write!(text, "{v:?}"),
        ArgRef::Bools(v) => write!(text, "{:?}", v.iter().map(|&x| x != 0).collect::<Vec<_>>()),
        ArgRef::Str(s) => write!(text, "'{s}'"),
        ArgRef::Generator(_) => write!(text, "generator"),
        ArgRef::Other => write!(text, "?"),
    };
}
