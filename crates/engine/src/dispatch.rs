//! One ATen call: from PyTorch's arguments to recorded instances and PyTorch's results.

use crate::config::{Lowering, Switches};
use crate::engine::Engine;
use crate::masks;
use crate::error::{Error, ErrorKind, Refusal};
use crate::inst::{Format, Inst, Kind, Out};
use crate::site::Site;
use crate::stream::{Stream, Window};
use crate::tensor::{Place, TensorRef};
use crate::value::{Held, Slot, State, Value};
use crate::view::dense_order;
use oxitorch_aten::args::{Number, number_arg};
use oxitorch_aten::lower::Dest;
use oxitorch_aten::{self as aten, Arg, Binding, Form, NumKind, ParamKind, Schema, ScalarArg, Source, TensorArg, Write};
use oxitorch_hlo::{DType, Dims, TensorType};
use smallvec::SmallVec;
use std::fmt::Write as _;
use std::sync::Arc;

/// An argument as PyTorch hands it over; borrowed for the call.
#[derive(Clone, Debug)]
pub enum ArgRef<'a> {
    /// `None`
    None,
    /// `Tensor`
    Tensor(TensorRef<'a>),
    /// `Tensor[]` and `Tensor?[]`
    Tensors(Vec<TensorRef<'a>>),
    /// A number, or anything that travels as one (dtype codes, layouts, bool)
    Number(Number),
    /// `int[]`
    Ints(&'a [i64]),
    /// `float[]`
    Floats(&'a [f64]),
    /// `bool[]`, as 0 and 1
    Bools(&'a [i64]),
    /// `Scalar[]`
    Numbers(Vec<Number>),
    /// `str`
    Str(&'a str),
    /// A generator, by the front end's handle
    Generator(usize),
    /// Something that no row takes
    Other,
}

/// A result as PyTorch needs it.
#[derive(Debug)]
pub enum Output {
    /// A new tensor.
    New {
        /// Its storage.
        slot: Slot,
        /// dtype and sizes.
        ty: TensorType,
        /// Strides in elements.
        strides: Dims,
    },
    /// The argument at this position.
    Arg(usize),
    /// An entry of the list argument at this position.
    ArgItem(usize, usize),
    /// The argument at this position, to be resized to this new tensor and overwritten by it.
    Resized {
        /// The argument.
        arg: usize,
        /// The new tensor's storage.
        slot: Slot,
        /// Its dtype and sizes.
        ty: TensorType,
        /// Its strides.
        strides: Dims,
    },
    /// An undefined tensor.
    Undefined,
    /// So many of the next outputs form a list.
    List(usize),
}

/// Reserves Philox blocks of a generator (`None`: the device's default one): gives seed and offset.
pub type Rng<'a> = &'a dyn Fn(Option<usize>, u64) -> (u64, u64);

/// An overload that the engine serves.
pub struct Op {
    /// `add.out`
    pub name: String,
    binding: Binding,
    row: &'static aten::Row,
    returns: Vec<Return>,
    /// Whether host tensors of any size may stand in its `Tensor?[]` lists, as index tensors may.
    host_lists: bool,
    /// Position of a `memory_format=` argument.
    format: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Return {
    /// A tensor of the row.
    New,
    /// A list of all the row's tensors.
    List,
    /// The argument at this position.
    Arg(usize),
}

impl Op {
    /// Binds an overload to a row.
    pub fn bind(schema: &Schema) -> Option<Op> {
        let binding = aten::bind(schema)?;
        let returns = schema.returns.iter().map(|r| {
            let same = |a: &aten::Argument| r.alias.is_some() && a.alias == r.alias;
            match schema.args.iter().position(same) {
                Some(i) => Return::Arg(i),
                None if r.ty.ends_with("[]") => Return::List,
                None => Return::New,
            }
        });
        let returns = returns.collect();
        let format = schema.args.iter().position(|a| a.ty == "MemoryFormat?");
        let host_lists = schema.args.iter().any(|a| a.ty == "Tensor?[]");
        Some(Op { name: schema.name(), row: aten::row(binding.op), binding, returns, host_lists, format })
    }
}

impl Op {
    /// Whether it takes a list of index tensors.
    pub(crate) fn takes_indices(&self) -> bool {
        self.host_lists
    }
}

/// One run of a row.
struct Run<'c, 'a> {
    call: &'c Call<'c, 'a>,
    /// For foreach forms: which element of the lists.
    element: Option<usize>,
    operands: SmallVec<[Arc<Value>; 6]>,
    args: Vec<Arg>,
    rng: Option<(u32, Option<usize>)>,
}

/// A call in progress.
pub struct Call<'c, 'a> {
    /// The overload.
    pub op: &'c Op,
    /// Its arguments, by schema position.
    pub args: &'c [ArgRef<'a>],
    /// Where random numbers come from.
    pub rng: Rng<'c>,
    /// The Python line.
    pub site: Site,
    /// The switches at this moment.
    pub switches: Switches,
    /// The size of a result that depends on values, once it is known; callers leave it out.
    pub size: Option<i64>,
}

/// The results of a call.
pub type Outputs = SmallVec<[Output; 2]>;

impl Engine {
    /// Runs one ATen call on a device.
    pub fn dispatch(&self, device: usize, call: &Call<'_, '_>) -> Result<Outputs, Refusal> {
        let stream = self.stream(device)?;
        stream.metrics().count(&stream.metrics().ops);
        let result = match call.attempt(stream) {
            Err(Refusal::Fallback(_)) if masks::any(call) => masks::expand(stream, call),
            result => result,
        };
        result.map_err(|r| match r {
            Refusal::Error(e) => Refusal::Error(call.explain(e)),
            fallback => fallback,
        })
    }
}

impl<'a> Call<'_, 'a> {
    /// The error with op, arguments and Python line.
    fn explain(&self, e: Error) -> Error {
        if e.kind == ErrorKind::OutOfMemory {
            return e;
        }
        let mut text = format!("{}\n  in aten::{}(", e.message, self.op.name);
        for (i, arg) in self.args.iter().enumerate() {
            if i > 0 {
                text.push_str(", ");
            }
            describe(&mut text, arg);
        }
        text.push(')');
        Error::new(e.kind, text).at(self.site)
    }

    /// Records the call, launches it, and waits as the mode asks.
    pub(crate) fn attempt(&self, stream: &Stream) -> Result<Outputs, Refusal> {
        let size = self.op.row.sized_by.map(|row| self.result_size(stream, row)).transpose()?;
        let sized = Call { size, ..*self };
        let mut w = stream.lock();
        let outputs = sized.run(stream, &mut w)?;
        let pending = stream.flush(&mut w, self.site)?;
        drop(w);
        stream.after_op(&self.switches, pending)?;
        Ok(outputs)
    }

    /// For results whose size depends on values: runs the row that tells it, and waits.
    fn result_size(&self, stream: &Stream, row: &str) -> Result<i64, Refusal> {
        let missing = || Error::runtime(format!("no row `{row}`; please report this"));
        let op = aten::find(row).ok_or_else(missing)?;
        let held = {
            let mut w = stream.lock();
            let results = self.run_row(stream, &mut w, op, None, &[])?;
            let held = Held::new(results.first()?);
            stream.flush(&mut w, self.site)?;
            held
        };
        let mut bytes = [0; 8];
        stream.fetch(held.value(), &mut bytes)?;
        Ok(i64::from_le_bytes(bytes))
    }

    fn run(&self, stream: &Stream, w: &mut Window) -> Result<Outputs, Refusal> {
        match &self.op.binding.form {
            Form::Functional => self.functional(stream, w),
            Form::InPlace(at) => {
                self.written(*at)?;
                let value = self.run_row(stream, w, self.op.binding.op, None, &[self.into_arg(*at)?])?;
                self.write(w, *at, value.first()?)?;
                Ok(SmallVec::from_iter([Output::Arg(*at)]))
            }
            Form::Out(positions) => self.out(stream, w, positions),
            Form::Mutating(positions) => self.mutating(stream, w, positions),
            Form::Foreach(write) => self.foreach(stream, w, *write),
        }
    }

    fn functional(&self, stream: &Stream, w: &mut Window) -> Result<Outputs, Refusal> {
        let results = self.run_row(stream, w, self.op.binding.op, None, &[])?;
        let mut outputs = Outputs::new();
        if self.op.returns == [Return::List] {
            outputs.push(Output::List(results.len()));
        }
        outputs.extend((0..results.len()).map(|i| results.new_tensor(i, stream.device)));
        Ok(outputs)
    }

    fn out(&self, stream: &Stream, w: &mut Window, positions: &[usize]) -> Result<Outputs, Refusal> {
        let mut dests: SmallVec<[Dest; 1]> = SmallVec::new();
        for &p in positions {
            self.written(p)?;
            dests.push(Dest::Cast(self.tensor(p)?.dtype()?));
        }
        let results = self.run_row(stream, w, self.op.binding.op, None, &dests)?;
        let mut outputs = Outputs::new();
        for (i, &p) in positions.iter().enumerate() {
            let tensor = self.tensor(p)?;
            let (Some(value), Some(out)) = results.get(i) else {
                outputs.push(Output::Arg(p));
                continue;
            };
            if out.ty.shape.as_slice() == tensor.sizes {
                self.write(w, p, value)?;
                outputs.push(Output::Arg(p));
            } else if let Output::New { slot, ty, strides } = results.new_tensor(i, stream.device) {
                outputs.push(Output::Resized { arg: p, slot, ty, strides });
            }
        }
        Ok(outputs)
    }

    fn mutating(&self, stream: &Stream, w: &mut Window, positions: &[usize]) -> Result<Outputs, Refusal> {
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
        let results = self.run_row(stream, w, self.op.binding.op, None, &dests)?;
        for (i, t) in places.iter().enumerate().filter(|(_, t)| t.is_defined()) {
            if let (Some(value), _) = results.get(i) {
                let (slot, view) = t.device_view()?;
                w.write(slot, &view, value)?;
            }
        }
        let mut next = places.len();
        let mut outputs = Outputs::new();
        for r in &self.op.returns {
            match r {
                Return::Arg(p) => outputs.push(Output::Arg(*p)),
                Return::New | Return::List => {
                    outputs.push(results.new_tensor(next, stream.device));
                    next += 1;
                }
            }
        }
        Ok(outputs)
    }

    fn foreach(&self, stream: &Stream, w: &mut Window, write: Write) -> Result<Outputs, Refusal> {
        let n = self.list_len()?;
        let mut outputs = Outputs::new();
        if write == Write::New {
            outputs.push(Output::List(n));
        }
        for k in 0..n {
            match write {
                Write::New => {
                    let results = self.run_row(stream, w, self.op.binding.op, Some(k), &[])?;
                    outputs.push(results.new_tensor(0, stream.device));
                }
                Write::Into(p) => {
                    let ArgRef::Tensors(list) = &self.args[p] else { return Err(self.no_list(p)) };
                    let target = list.get(k).ok_or_else(|| self.no_list(p))?;
                    refuse_overlap(target)?;
                    let results = self.run_row(stream, w, self.op.binding.op, Some(k), &[Dest::Into(target.ty()?)])?;
                    let (slot, view) = target.device_view()?;
                    let value = results.first()?;
                    w.write(slot, &view, value)?;
                }
            }
            // One program per element: elements of one shape share it.
            stream.flush(w, self.site)?;
        }
        Ok(outputs)
    }

    fn no_list(&self, p: usize) -> Refusal {
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
                ArgRef::Tensor(t) => t.sizes.first().copied().unwrap_or(0) as usize,
                _ => return Err(self.no_list(*p)),
            };
            match common {
                Some(n) if n != len => {
                    let message = format!("Tensor lists must have the same number of tensors, got {n} and {len}");
                    return Err(Error::runtime(message).into());
                }
                _ => common = Some(len),
            }
        }
        Ok(common.unwrap_or(0))
    }

    fn tensor(&self, p: usize) -> Result<&TensorRef<'a>, Refusal> {
        match &self.args[p] {
            ArgRef::Tensor(t) => Ok(t),
            _ => Err(Error::runtime(format!("argument {p} must be a tensor")).into()),
        }
    }

    /// Refuses what PyTorch refuses: a destination that shows one place twice, or that overlaps an operand in part.
    fn written(&self, p: usize) -> Result<(), Refusal> {
        let written = self.tensor(p)?;
        if FILLS.contains(&self.op.row.base()) {
            return Ok(());
        }
        refuse_overlap(written)?;
        if self.op.row.layout == aten::Layout::Pointwise {
            for (i, arg) in self.args.iter().enumerate() {
                if let ArgRef::Tensor(read) = arg
                    && i != p
                {
                    refuse_partial_overlap(written, read)?;
                }
            }
        }
        Ok(())
    }

    fn into_arg(&self, p: usize) -> Result<Dest, Refusal> {
        Ok(Dest::Into(self.tensor(p)?.ty()?))
    }

    fn write(&self, w: &mut Window, p: usize, value: Arc<Value>) -> Result<(), Refusal> {
        let t = self.tensor(p)?;
        if !matches!(t.place, Place::Device(_)) {
            return Err(self.mixed_devices(t));
        }
        let (slot, view) = t.device_view()?;
        w.write(slot, &view, value)
    }

    fn mixed_devices(&self, t: &TensorRef<'_>) -> Refusal {
        let other = if matches!(t.place, Place::Host(_)) { "cpu".to_owned() } else { format!("tpu:{}", t.device) };
        let message = format!(
            "Expected all tensors to be on the same device, but found at least two devices, tpu:{} and {other}!",
            self.first_device()
        );
        Error::runtime(message).into()
    }

    fn first_device(&self) -> i32 {
        let mut all = self.args.iter().flat_map(|a| match a {
            ArgRef::Tensor(t) => std::slice::from_ref(t),
            ArgRef::Tensors(l) => l.as_slice(),
            _ => &[],
        });
        all.find(|t| matches!(t.place, Place::Device(_))).map_or(0, |t| t.device)
    }

    /// Records the row once.
    fn run_row(
        &self,
        stream: &Stream,
        w: &mut Window,
        op: aten::OpId,
        element: Option<usize>,
        dests: &[Dest],
    ) -> Result<Results, Refusal> {
        let mut run =
            Run { call: self, element, operands: SmallVec::new(), args: Vec::new(), rng: None };
        for (param, source) in aten::row(op).params().iter().zip(&self.op.binding.params) {
            let arg = run.argument(stream, w, param.kind, source)?;
            run.args.push(arg);
        }
        let lowering: Lowering = self.switches.lowering();
        let format = match self.op.format.map(|p| &self.args[p]) {
            Some(ArgRef::Number(Number::Int(code))) => Format::from_code(*code),
            _ => Format::Preserve,
        };
        let kind = Kind::Row { op, args: run.args, dests: dests.into(), format, lowering };
        let inst = w.instance(kind)?;
        if let Some((operand, generator)) = run.rng {
            let (seed, offset) = (self.rng)(generator, inst.rng_blocks);
            let bytes: Vec<u8> = [seed, offset].iter().flat_map(|x| x.to_le_bytes()).collect();
            let ty = TensorType::new(DType::U64, [2].as_slice());
            run.operands[operand as usize] = Value::new(ty, State::Host(bytes.into()), None);
        }
        let recorded = w.append(inst, &run.operands);
        Ok(Results { inst: recorded.inst, outputs: recorded.outputs })
    }
}

/// Ops that may write one value to many places at once, as on PyTorch's other devices.
const FILLS: &[&str] = &["fill", "zero", "masked_fill", "index_put", "_index_put_impl_"];

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

/// `at::assert_no_partial_overlap`: two dense views of one storage that share some elements, but are not the same.
fn refuse_partial_overlap(written: &TensorRef<'_>, read: &TensorRef<'_>) -> Result<(), Refusal> {
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
    let same = (a0, a1) == (b0, b1) && written.strides == read.strides;
    if !same && a0 < b1 && b0 < a1 {
        let message = "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single \
                       memory location. Please clone() the tensor before performing the operation.";
        return Err(Error::runtime(message).into());
    }
    Ok(())
}

/// The results of a recorded row.
struct Results {
    inst: Arc<Inst>,
    outputs: SmallVec<[Option<Arc<Value>>; 1]>,
}

impl Results {
    fn len(&self) -> usize {
        self.outputs.len()
    }

    fn get(&self, i: usize) -> (Option<Arc<Value>>, Option<&Out>) {
        let out = self.inst.outputs.get(i).and_then(|o| o.as_ref());
        (self.outputs.get(i).cloned().flatten(), out)
    }

    /// The first result.
    fn first(&self) -> Result<Arc<Value>, Refusal> {
        let missing = || Error::runtime(format!("{}: no result; please report this", self.inst.name()));
        Ok(self.outputs.first().cloned().flatten().ok_or_else(missing)?)
    }

    fn new_tensor(&self, i: usize, device: u16) -> Output {
        match self.get(i) {
            (Some(value), Some(out)) => {
                let slot = Slot::with(out.stored.bytes().max(0) as usize, device, value);
                Output::New { slot, ty: out.ty.clone(), strides: out.strides.clone() }
            }
            _ => Output::Undefined,
        }
    }
}

impl<'a> Run<'_, 'a> {
    fn argument(&mut self, stream: &Stream, w: &mut Window, kind: ParamKind, source: &Source) -> Result<Arg, Refusal> {
        let call = self.call;
        match source {
            Source::Fixed(arg) => Ok(arg.clone()),
            Source::Size => Ok(call.size.map_or(Arg::None, Arg::Int)),
            Source::Rng(position) => {
                let generator = position.and_then(|p| match &call.args[p] {
                    ArgRef::Generator(handle) => Some(*handle),
                    _ => None,
                });
                let operand = self.operands.len() as u32;
                self.rng = Some((operand, generator));
                // Replaced once the number of blocks is known.
                self.operands.push(w.number(DType::U64, &[]));
                Ok(Arg::Rng(operand))
            }
            Source::Arg(p) => self.convert(stream, w, kind, &call.args[*p]),
            Source::Each(p) => {
                let k = self.element.unwrap_or(0);
                let element = match &call.args[*p] {
                    ArgRef::Tensors(l) => ArgRef::Tensor(l[k].clone()),
                    ArgRef::Numbers(l) => ArgRef::Number(l[k]),
                    ArgRef::Floats(l) => ArgRef::Number(Number::Float(l[k])),
                    ArgRef::Ints(l) => ArgRef::Number(Number::Int(l[k])),
                    _ => return Err(call.no_list(*p)),
                };
                self.convert(stream, w, kind, &element)
            }
            Source::EachOfTensor(p) => {
                let t = call.tensor(*p)?;
                self.element_of(w, t)
            }
        }
    }

    /// The current element of a 1-d tensor, as a number.
    fn element_of(&mut self, w: &mut Window, t: &TensorRef<'_>) -> Result<Arg, Refusal> {
        let k = self.element.unwrap_or(0) as i64;
        let (dtype, step) = (t.dtype()?, t.strides.first().copied().unwrap_or(1));
        let mut one = t.clone();
        one.sizes = &[];
        one.strides = &[];
        one.contiguous = true;
        if let Place::Host(bytes) = t.place {
            let item = dtype.size_bytes();
            one.place = Place::Host(&bytes[(k * step) as usize * item..][..item]);
        } else {
            one.offset += k * step;
            one.contiguous = false;
        }
        let value = self.value(w, &one)?;
        Ok(Arg::Scalar(ScalarArg { operand: self.push(value), kind: num_kind(dtype) }))
    }

    fn push(&mut self, value: Arc<Value>) -> u32 {
        self.operands.push(value);
        self.operands.len() as u32 - 1
    }

    fn convert(
        &mut self,
        stream: &Stream,
        w: &mut Window,
        kind: ParamKind,
        arg: &ArgRef<'_>,
    ) -> Result<Arg, Refusal> {
        Ok(match arg {
            ArgRef::None => Arg::None,
            ArgRef::Tensor(t) if !t.is_defined() => Arg::None,
            ArgRef::Tensor(t) => Arg::Tensor(self.tensor(w, t)?),
            ArgRef::Tensors(list) => {
                let mut args = Vec::with_capacity(list.len());
                for t in list {
                    args.push(if t.is_defined() { Some(self.list_entry(stream, w, t)?) } else { None });
                }
                Arg::Tensors(args)
            }
            ArgRef::Number(n) => match number_arg(kind, *n) {
                Some(arg) => arg,
                None => self.scalar(w, *n),
            },
            ArgRef::Ints(v) => Arg::Ints(Dims::from_slice(v)),
            ArgRef::Floats(v) => Arg::Floats(v.iter().map(|&x| x.into()).collect()),
            ArgRef::Bools(v) => Arg::Bools(v.iter().map(|&x| x != 0).collect()),
            ArgRef::Str(s) => Arg::Str((*s).to_owned()),
            ArgRef::Numbers(_) | ArgRef::Generator(_) | ArgRef::Other => {
                return Err(Refusal::Fallback("an argument of a type that no row takes".to_owned()));
            }
        })
    }

    fn scalar(&mut self, w: &mut Window, n: Number) -> Arg {
        let (kind, bytes): (NumKind, SmallVec<[u8; 16]>) = match n {
            Number::Bool(x) => (NumKind::Bool, SmallVec::from_slice(&[u8::from(x)])),
            Number::Int(x) => (NumKind::Int, SmallVec::from_slice(&x.to_le_bytes())),
            Number::Float(x) => (NumKind::Float, SmallVec::from_slice(&x.to_le_bytes())),
            Number::Complex(re, im) => {
                let mut bytes = SmallVec::from_slice(&re.to_le_bytes());
                bytes.extend_from_slice(&im.to_le_bytes());
                (NumKind::Complex, bytes)
            }
        };
        let value = w.number(kind.dtype(), &bytes);
        Arg::Scalar(ScalarArg { operand: self.push(value), kind })
    }

    fn tensor(&mut self, w: &mut Window, t: &TensorRef<'_>) -> Result<TensorArg, Refusal> {
        let value = self.value(w, t)?;
        Ok(TensorArg { operand: self.push(value), ty: t.ty()?, wrapped: t.wrapped, strides: self.strides(t) })
    }

    /// Strides are part of an instance only where its layout looks at them.
    fn strides(&self, t: &TensorRef<'_>) -> Dims {
        if self.call.op.row.layout == aten::Layout::Contiguous { Dims::new() } else { Dims::from_slice(t.strides) }
    }

    /// An entry of a list; index lists may hold host tensors, as with PyTorch's other devices.
    fn list_entry(&mut self, stream: &Stream, w: &mut Window, t: &TensorRef<'_>) -> Result<TensorArg, Refusal> {
        if matches!(t.place, Place::Host(_)) && self.call.op.host_lists && !t.sizes.is_empty() {
            let bytes = t.host_bytes().ok_or_else(|| Error::runtime("an index tensor without elements"))?;
            let value = stream.upload(t.ty()?, &bytes)?;
            return Ok(TensorArg { operand: self.push(value), ty: t.ty()?, wrapped: false, strides: Dims::new() });
        }
        self.tensor(w, t)
    }

    fn value(&self, w: &mut Window, t: &TensorRef<'_>) -> Result<Arc<Value>, Refusal> {
        match t.place {
            Place::Device(slot) => {
                if i32::from(slot.device) != self.call.first_device() {
                    return Err(self.call.mixed_devices(t));
                }
                let (slot, view) = t.device_view()?;
                w.read(slot, &view, t.contiguous)
            }
            Place::Host(bytes) if t.sizes.is_empty() => {
                let dtype = t.dtype()?;
                Ok(w.number(dtype, &bytes[..dtype.size_bytes()]))
            }
            _ => Err(self.call.mixed_devices(t)),
        }
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
