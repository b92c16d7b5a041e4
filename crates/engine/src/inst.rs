//! Op instances: an op with the types of its operands and its attributes, lowered once to learn what it returns.
//!
//! Instances are interned, so that recording the same op again costs one hash and one comparison, and a window of ops is
//! identified by the instances' numbers.

mod control;
pub(crate) use control::{Body, Code, Control, Flow, Input};

use crate::collective::Exchange;
use crate::config::{Lowering, Remembered};
use crate::error::{Error, ErrorKind, Refusal};
use crate::shared::Shared;
use crate::spread::Sharded;
use crate::strided::row_major;
use crate::view::{self, Offsets, Shape, View, dense_order};
use oxitorch_aten::args::Offset;
use oxitorch_aten::lower::Dest;
use oxitorch_aten::{self as aten, Arg, Layout, OpId, ParamKind, TensorArg};
use oxitorch_hlo::{Builder, DType, Dims, MemorySpace, Module, Sharding, TensorType, Value};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use std::borrow::Borrow;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// What an instance computes, and from what: equal kinds are one instance.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A row of the op table. The arguments hold the types of the operands.
    Row { op: OpId, args: Vec<Arg>, dests: SmallVec<[Dest; 1]>, format: Format, lowering: Lowering },
    /// The elements of a view of a storage's value.
    Read { base: TensorType, shape: Shape },
    /// A storage's value with a view of it overwritten by operand 1.
    Write { base: TensorType, shape: Shape },
    /// A tensor that covers its storage, with its dimensions in the storage's order.
    Store { from: TensorType, order: Dims },
    /// A tensor in another dtype.
    Cast { from: TensorType, to: DType },
    /// A value of its own with the same elements.
    Copy(TensorType),
    /// A value behind a barrier, and behind another value if there is one: see `fence.rs`.
    Fence { ty: TensorType, after: Option<TensorType>, firmly: bool },
    /// A value of the host, on the device again, and no sooner than another value: see `fence.rs`.
    Reload { ty: TensorType, after: TensorType },
    /// Zeros, as a storage holds that nobody wrote.
    Zeros(TensorType),
    /// A value as another type over the same bytes, cut or filled with zeros.
    Resize { from: TensorType, to: TensorType },
    /// A value, cut so over the devices of a mesh.
    Reshard { from: TensorType, to: Arc<Sharding> },
    /// What the members of groups of devices do together: a program of its own.
    Collective(Arc<Exchange>),
    /// A loop, or one of two branches.
    Control(Arc<Control>),
}

/// The strides that a `memory_format=` argument asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Format {
    /// Those of the row's layout.
    #[default]
    Preserve,
    /// Row-major.
    Contiguous,
    /// Dimension 1 fastest.
    ChannelsLast,
}

impl Format {
    /// From the code of a `c10::MemoryFormat`.
    pub(crate) fn from_code(code: i64) -> Format {
        match code {
            0 => Format::Contiguous,
            2 | 3 => Format::ChannelsLast,
            _ => Format::Preserve,
        }
    }
}

impl Kind {
    /// The shape of the view that is read or written.
    pub(crate) fn shape(&self) -> Option<&Shape> {
        match self {
            Kind::Read { shape, .. } | Kind::Write { shape, .. } => Some(shape),
            _ => None,
        }
    }

    /// The types of the operands.
    fn operands(&self) -> Vec<TensorType> {
        match self {
            Kind::Row { args, .. } => row_operands(args),
            Kind::Read { base, .. } => vec![base.clone()],
            Kind::Write { base, shape } => vec![base.clone(), shape.ty()],
            Kind::Store { from, .. }
            | Kind::Cast { from, .. }
            | Kind::Resize { from, .. }
            | Kind::Reshard { from, .. } => vec![from.clone()],
            Kind::Collective(exchange) => vec![exchange.ty.clone()],
            Kind::Control(control) => control.operands.clone(),
            Kind::Copy(ty) => vec![ty.clone()],
            Kind::Fence { ty, after, .. } => std::iter::once(ty).chain(after).cloned().collect(),
            Kind::Reload { ty, after } => vec![ty.clone(), after.clone()],
            Kind::Zeros(_) => Vec::new(),
        }
    }

    /// How many offsets it takes.
    fn offsets(&self) -> usize {
        match self {
            Kind::Row { args, .. } => {
                let count = |a: &Arg| match a {
                    Arg::Offset(_) => 1,
                    Arg::Offsets(_, n) => *n as usize,
                    _ => 0,
                };
                args.iter().map(count).sum()
            }
            Kind::Read { shape, .. } | Kind::Write { shape, .. } => shape.offsets(),
            Kind::Control(control) => control.insts().map(|inst| inst.offsets).sum(),
            _ => 0,
        }
    }
}

/// The types of a row's operands, in the order of their numbers.
fn row_operands(args: &[Arg]) -> Vec<TensorType> {
    let mut types: Vec<(u32, TensorType)> = Vec::new();
    for arg in args {
        match arg {
            Arg::Tensor(t) => types.push((t.operand, t.ty.clone())),
            Arg::Tensors(list) => types.extend(list.iter().flatten().map(|t| (t.operand, t.ty.clone()))),
            Arg::Scalar(s) => types.push((s.operand, TensorType::scalar(s.kind.dtype()))),
            Arg::Rng(operand) => types.push((*operand, TensorType::new(DType::U64, Dims::from_elem(2, 1)))),
            _ => {}
        }
    }
    types.sort_by_key(|(operand, _)| *operand);
    types.into_iter().map(|(_, ty)| ty).collect()
}

/// A result of an instance.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Out {
    /// As the op gives it.
    pub(crate) ty: TensorType,
    /// Strides of the tensor that PyTorch will see.
    pub(crate) strides: Dims,
    /// Whether those are row-major.
    pub(crate) contiguous: bool,
    /// As the storage holds it: `ty` with the dimensions in the order of their strides.
    pub(crate) stored: TensorType,
    /// Size of that.
    pub(crate) bytes: u64,
    /// That order, unless it is the identity.
    pub(crate) order: Option<Dims>,
    /// The operand that it is, unchanged.
    pub(crate) same_as: Option<u32>,
    /// How it is cut over a mesh.
    pub(crate) sharding: Sharded,
}

impl Out {
    pub(crate) fn new(ty: TensorType, strides: Option<Dims>) -> Out {
        let strides = strides.unwrap_or_else(|| row_major(&ty.shape));
        let permuted = |o: &Dims| ty.numel() > 0 && o.windows(2).any(|w| w[0] > w[1]);
        let order = dense_order(&ty.shape, &strides).filter(permuted);
        let stored = match &order {
            Some(o) => TensorType::new(ty.dtype, o.iter().map(|&d| ty.shape[d as usize]).collect::<Dims>()),
            None => ty.clone(),
        };
        let contiguous = strides == row_major(&ty.shape);
        let bytes = stored.bytes().max(0) as u64;
        Out { ty, strides, contiguous, stored, bytes, order, same_as: None, sharding: None }
    }
}

/// An interned op instance.
#[derive(Debug)]
pub(crate) struct Inst {
    /// Its number; equal numbers are equal instances.
    pub(crate) id: u32,
    pub(crate) kind: Kind,
    /// How many offsets it takes.
    pub(crate) offsets: usize,
    /// Those that are recorded: without the [unused](Inst::is_unused) ones.
    pub(crate) operands: Vec<TensorType>,
    /// Operands that the lowering looks at the type of, and no more: by number.
    unused: Vec<u32>,
    /// Bits of the row's parameters that are such operands.
    unused_params: u64,
    /// Whether the operands of a call need more than to be taken, which is rare.
    pub(crate) careful: bool,
    /// Whether there is one result, which has to be computed, and nothing else.
    plain: bool,
    /// Whether it is to come behind what is computed before it; see `fence.rs`.
    pub(crate) waits: bool,
    pub(crate) outputs: SmallVec<[Option<Shared<Out>>; 1]>,
    /// Size of those.
    pub(crate) bytes: u64,
    /// Size of those that XLA does not fuse into what reads them.
    pub(crate) kept: u64,
    /// Philox blocks that one execution uses.
    pub(crate) rng_blocks: u64,
    /// What can be wrong with values, in the order in which the checks are emitted.
    pub(crate) checks: Vec<(ErrorKind, String)>,
    identity: bool,
    /// When it was looked for last; see [`Instances::clock`].
    used: AtomicU32,
}

/// What lowering an instance gave.
pub(crate) struct Emitted {
    /// As the storages hold them.
    pub(crate) outputs: Vec<Option<Value>>,
    pub(crate) checks: Vec<Value>,
    rng_blocks: u64,
    messages: Vec<(ErrorKind, String)>,
}

impl Inst {
    /// The name for messages and for programs.
    pub(crate) fn name(&self) -> &'static str {
        match &self.kind {
            Kind::Row { op, .. } => aten::row(*op).name,
            Kind::Read { .. } => "view",
            Kind::Write { .. } => "copy_into_view",
            Kind::Store { .. } | Kind::Cast { .. } | Kind::Copy(_) => "copy",
            Kind::Fence { .. } => "optimization_barrier",
            Kind::Reload { .. } => "oxitorch::_reload",
            Kind::Zeros(_) => "empty",
            Kind::Resize { .. } => "resize",
            Kind::Reshard { .. } => "reshard",
            Kind::Collective(exchange) => exchange.what.name(),
            Kind::Control(control) => control.name,
        }
    }

    /// Its results.
    pub(crate) fn results(&self) -> impl Iterator<Item = Option<&Out>> {
        self.outputs.iter().map(|o| o.as_deref())
    }

    /// Whether it may fail when it runs: a kernel of torch's that may find no solution.
    pub(crate) fn may_fail(&self) -> bool {
        match &self.kind {
            Kind::Row { op, lowering, .. } => lowering.config.target.library && aten::row(*op).may_fail,
            Kind::Control(control) => control.insts().any(|inst| inst.may_fail()),
            _ => false,
        }
    }

    /// If it does nothing but take its operand to another memory space.
    pub(crate) fn memory(&self) -> Option<MemorySpace> {
        match &self.kind {
            Kind::Row { op, .. } => aten::row(*op).memory,
            Kind::Reload { .. } => Some(MemorySpace::Device),
            _ => None,
        }
    }

    /// Whether every result is an operand, so that nothing has to be computed.
    pub(crate) fn is_identity(&self) -> bool {
        self.identity
    }

    /// Whether the value of this parameter of the row does not matter: what `fill_` overwrites, for example.
    pub(crate) fn is_unused(&self, param: usize) -> bool {
        self.unused_params >> param & 1 == 1
    }

    /// Whether a call needs nothing but its operands recorded, and gives one new tensor.
    pub(crate) fn is_plain(&self) -> bool {
        self.plain
    }

    /// Whether it overwrites a view of its first operand.
    pub(crate) fn is_write(&self) -> bool {
        matches!(self.kind, Kind::Write { .. })
    }

    /// What its offsets say where in, if they say where a view of its first operand begins: the dtype and the stride of
    /// each dimension.
    pub(crate) fn along(&self) -> impl Iterator<Item = (DType, i64)> {
        self.kind.shape().into_iter().flat_map(|shape| shape.along().map(|stride| (shape.ty().dtype, stride)))
    }

    /// Lowers the instance on these operands, with these offsets.
    pub(crate) fn emit(
        &self,
        b: &Builder,
        operands: &[Value],
        offsets: &[Offset],
    ) -> Result<Emitted, aten::Error> {
        let mut all = operands.to_vec();
        if !self.unused.is_empty() {
            let types = self.kind.operands();
            for &i in &self.unused {
                let ty = &types[i as usize];
                all.insert(i as usize, b.full(b.scalar_f64(ty.dtype, 0.0), &ty.shape));
            }
        }
        let mut e = emit(&self.kind, b, &all, offsets)?;
        for (v, out) in e.outputs.iter_mut().zip(&self.outputs) {
            if let (Some(v), Some(order)) = (v, out.as_ref().and_then(|o| o.order.as_ref())) {
                *v = b.transpose(*v, order);
            }
        }
        Ok(e)
    }
}

fn emit(kind: &Kind, b: &Builder, operands: &[Value], offsets: &[Offset]) -> Result<Emitted, aten::Error> {
    let value = match kind {
        Kind::Row { op, args, dests, lowering, .. } => {
            return emit_row(b, *op, args, dests, lowering, operands, offsets);
        }
        Kind::Read { shape, .. } => shape.read(b, operands[0], offsets),
        Kind::Write { shape, .. } => shape.write(b, operands[0], operands[1], offsets),
        Kind::Store { order, .. } => b.transpose(operands[0], order),
        Kind::Cast { to, .. } => aten::lower::cast(b, operands[0], *to),
        Kind::Copy(_) => b.optimization_barrier(&operands[..1])[0],
        Kind::Fence { firmly: true, after: Some(_), .. } => b.after(operands[0], operands[1]),
        Kind::Fence { .. } => b.optimization_barrier(operands)[0],
        Kind::Reload { .. } => {
            let behind = b.optimization_barrier(operands)[0];
            b.annotate_device_placement(behind, MemorySpace::Device)
        }
        Kind::Zeros(ty) => b.full(b.scalar_f64(ty.dtype, 0.0), &ty.shape),
        Kind::Resize { to, .. } => resize(b, operands[0], to),
        Kind::Reshard { to, .. } => {
            b.set_mesh(to.mesh()); // of the program, or of one that is made to learn the result
            b.sharding_constraint(operands[0], to)
        }
        Kind::Collective(exchange) => exchange.emit(b, operands[0])?,
        Kind::Control(control) => {
            let emitted = control.emit(b, operands, offsets)?;
            return no_mistake(b).map(|()| emitted);
        }
    };
    no_mistake(b)?;
    Ok(Emitted { outputs: vec![Some(value)], checks: Vec::new(), rng_blocks: 0, messages: Vec::new() })
}

fn no_mistake(b: &Builder) -> Result<(), aten::Error> {
    b.error().map_or(Ok(()), |e| Err(aten::Error::Runtime(e.to_string())))
}

fn emit_row(
    b: &Builder,
    op: OpId,
    args: &[Arg],
    dests: &[Dest],
    lowering: &Lowering,
    operands: &[Value],
    offsets: &[Offset],
) -> Result<Emitted, aten::Error> {
    let lowered = aten::lower_into(op, b, &lowering.config, args, operands, offsets, dests)?;
    let mut checks: Vec<Value> = lowered.checks.iter().map(|c| c.ok).collect();
    let mut messages: Vec<_> = lowered.checks.into_iter().map(|c| (c.error.into(), c.message)).collect();
    if lowering.nan_trap {
        for v in lowered.outputs.iter().flatten().filter(|&&v| b.dtype(v).is_float()) {
            let dims: Dims = (0..b.rank(*v) as i64).collect();
            checks.push(b.reduce_all(b.is_finite(*v), &dims));
            messages.push((ErrorKind::Runtime, "the result holds NaN or infinity (NaN trap)".to_owned()));
        }
    }
    Ok(Emitted { outputs: lowered.outputs, checks, rng_blocks: lowered.rng_blocks, messages })
}

fn resize(b: &Builder, x: Value, ty: &TensorType) -> Value {
    let flat = view::flat(b, x, ty.dtype);
    let (have, want) = (b.dim(flat, 0), ty.numel());
    let zero = b.scalar_f64(ty.dtype, 0.0);
    let cut = b.slice_dim(flat, 0, 0, have.min(want), 1);
    b.reshape(b.pad_dim(cut, zero, 0, 0, (want - have).max(0)), &ty.shape)
}

/// Strides with dimension 1 fastest and the others in their order.
fn channels_last(shape: &[i64]) -> Dims {
    let order = std::iter::once(1).chain((2..shape.len()).rev()).chain(std::iter::once(0));
    let mut strides = Dims::from_elem(1, shape.len());
    let mut step = 1;
    for d in order.filter(|&d| d < shape.len()) {
        strides[d] = step;
        step *= shape[d].max(1);
    }
    strides
}

/// Whether a tensor suggests that results be channels last: `is_channels_last_strides_2d` and `_3d` of c10.
fn suggests_channels_last(sizes: &[i64], strides: &[i64]) -> bool {
    let rank = sizes.len();
    if !matches!(rank, 4 | 5) || strides[1] == 0 {
        return false;
    }
    let mut least = 0;
    for d in std::iter::once(1).chain((2..rank).rev()).chain(std::iter::once(0)) {
        // Of the layouts that a tensor with sizes of 1 may have, row-major comes first.
        let ambiguous = d == 0 && least == strides[1];
        if sizes[d] == 0 || strides[d] < least || ambiguous {
            return false;
        }
        least = strides[d] * sizes[d].max(1);
    }
    true
}

/// Strides with the last two dimensions swapped; a column has at least this stride.
fn column_major(shape: &[i64], least: i64) -> Option<Dims> {
    let (rows, columns) = (shape.len().checked_sub(2)?, shape.len() - 1);
    let mut strides = row_major(shape);
    (strides[rows], strides[columns]) = (1, shape[rows].max(least));
    Some(strides)
}

/// `empty_like`: the strides of a dense tensor, else dense ones in the order of its dimensions.
fn like((sizes, strides): (&Dims, &Dims), shape: &[i64]) -> Option<Dims> {
    let same = sizes.as_slice() == shape && dense_order(sizes, strides).is_some();
    if same { Some(strides.clone()) } else { pointwise_strides(&[(sizes, strides)], shape) }
}

/// The strides of an op's result `i` after the layout rule of its row, `None` for row-major.
fn result_strides(layout: Layout, i: usize, args: &[Arg], shape: &[i64]) -> Option<Dims> {
    let tensors = || {
        args.iter().filter_map(|a| match a {
            Arg::Tensor(t) => Some((&t.ty.shape, &t.strides)),
            _ => None,
        })
    };
    let channels =
        |t: &TensorArg| t.strides.len() == shape.len() && suggests_channels_last(&t.ty.shape, &t.strides);
    let complex = |a: &Arg| matches!(a, Arg::Tensor(t) if t.ty.dtype.is_complex());
    match layout {
        Layout::Contiguous => None,
        Layout::LikeFirst => like(tensors().next()?, shape),
        Layout::LikeFollowing => like(tensors().nth(i + 1)?, shape),
        Layout::InOrderOfFirst if i > 0 => None,
        Layout::InOrderOfFirst => {
            let (sizes, strides) = tensors().next()?;
            if sizes.as_slice() == shape {
                return like((sizes, strides), shape);
            }
            // What is expanded comes first.
            let place = |d: i64| match strides[d as usize] {
                0 => i64::MAX,
                step => step,
            };
            let mut order: Dims = (0..strides.len() as i64).collect();
            order.sort_by_key(|&d| std::cmp::Reverse(place(d)));
            (strides.len() == shape.len()).then(|| strides_in_order(shape, &order))
        }
        Layout::RealPointwise if args.iter().any(complex) => None,
        Layout::Pointwise | Layout::RealPointwise => pointwise_strides(&tensors().collect::<Vec<_>>(), shape),
        Layout::ChannelsLast => {
            let last = args.iter().any(|a| match a {
                Arg::Tensor(t) => channels(t),
                Arg::Tensors(list) => !list.is_empty() && list.iter().flatten().all(channels),
                _ => false,
            });
            last.then(|| channels_last(shape))
        }
        Layout::Indexed => match args {
            [Arg::Tensor(x), Arg::Tensors(indices), ..] => indexed_strides(x, indices, shape),
            _ => None,
        },
        Layout::Matrices if tensors().next()?.0.len() != shape.len() => None,
        Layout::Matrices => column_major(shape, 1),
        Layout::Solution => {
            let left = args.iter().find_map(|a| if let Arg::Bool(left) = a { Some(*left) } else { None });
            if left? { column_major(shape, 1) } else { None }
        }
        Layout::SolutionAndMatrices if i == 0 => result_strides(Layout::Solution, i, args, shape),
        Layout::SolutionAndMatrices => result_strides(Layout::Matrices, i, args, shape),
        Layout::Transformed => transformed_strides(args, shape),
        Layout::Slices => {
            // The last argument is the count.
            let given = &args[..args.len().saturating_sub(1)];
            let dim = given.iter().find_map(|a| if let Arg::Int(dim) = a { Some(*dim) } else { None })?;
            let rank = tensors().next()?.0.len();
            (rank == shape.len()).then(|| outermost(shape, dim.rem_euclid(rank.max(1) as i64) as usize))
        }
        // `nonzero` of nothing has columns 0 apart.
        Layout::ColumnMajor => column_major(shape, 0),
    }
}

/// Dense strides with these dimensions, outermost first.
fn strides_in_order(shape: &[i64], order: &[i64]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    let mut step = 1;
    for &d in order.iter().rev() {
        strides[d as usize] = step;
        step *= shape[d as usize].max(1);
    }
    strides
}

/// Row-major strides but for one dimension, which comes first.
fn outermost(shape: &[i64], dim: usize) -> Dims {
    let rest = (0..shape.len() as i64).filter(|&d| d != dim as i64);
    let order: Dims = std::iter::once(dim as i64).take(shape.len()).chain(rest).collect();
    strides_in_order(shape, &order)
}

/// `_exec_fft` of SpectralOps.cpp: dimensions that are transformed come last, the largest stride first, except that the
/// halved one of a real transform is the innermost. Back to real numbers it goes in two steps.
fn transformed_strides(args: &[Arg], shape: &[i64]) -> Option<Dims> {
    let [Arg::Tensor(x), Arg::Ints(dims), _, last, ..] = args else { return None };
    let rank = shape.len() as i64;
    let dims: Dims = dims.iter().map(|d| d.rem_euclid(rank.max(1))).collect();
    if dims.is_empty() || x.strides.len() != shape.len() {
        return Some(x.strides.clone()).filter(|_| dense_order(&x.ty.shape, &x.strides).is_some());
    }
    let real_result = matches!(last, Arg::Int(_));
    if real_result && dims.len() > 1 {
        let (halved, others) = dims.split_last()?;
        let between = transform_order(&x.strides, others, false);
        let between = strides_in_order(&x.ty.shape, &between);
        return Some(strides_in_order(shape, &transform_order(&between, &[*halved], true)));
    }
    let halves = !x.ty.dtype.is_complex();
    Some(strides_in_order(shape, &transform_order(&x.strides, &dims, halves)))
}

fn transform_order(strides: &[i64], dims: &[i64], keep_last: bool) -> Dims {
    let by_stride = |order: &mut [i64]| order.sort_by_key(|&d| std::cmp::Reverse(strides[d as usize]));
    let mut order: Dims = (0..strides.len() as i64).filter(|d| !dims.contains(d)).collect();
    by_stride(&mut order);
    let mut inner = Dims::from_slice(dims);
    let sorted = inner.len() - usize::from(keep_last);
    by_stride(&mut inner[..sorted]);
    order.extend(inner);
    order
}

/// TensorIterator's rule (`reorder_dimensions` and `allocate_or_resize_outputs`): dimensions are sorted, fastest first, by
/// the operands' strides, the first operand that decides wins, and the result is dense in that order.
fn pointwise_strides(operands: &[(&Dims, &Dims)], shape: &[i64]) -> Option<Dims> {
    let rank = shape.len();
    // A contiguous operand of the full shape settles it, and so do operands that all have the same dense strides.
    let mut full = operands.iter().filter(|(sizes, _)| sizes.as_slice() == shape);
    if operands.iter().all(|(sizes, _)| sizes.as_slice() == shape) {
        let (sizes, first) = full.next()?;
        if full.all(|(_, s)| s == first) && dense_order(sizes, first).is_some() {
            return Some((*first).clone());
        }
    }
    let broadcast: Vec<Dims> =
        operands.iter().map(|(sizes, strides)| broadcast_strides(sizes, strides, rank)).collect();
    Some(sorted_strides(&broadcast, shape))
}

/// Dense strides in the order that these strides of the operands ask for, the first operand first.
fn sorted_strides(operands: &[Dims], shape: &[i64]) -> Dims {
    let rank = shape.len();
    let mut order: Dims = (0..rank as i64).rev().collect();
    let compare = |a: i64, z: i64| -> i32 {
        for strides in operands {
            let (sa, sz) = (strides[a as usize], strides[z as usize]);
            if sa == 0 || sz == 0 {
                continue;
            }
            if sa != sz {
                return if sa < sz { -1 } else { 1 };
            }
            if shape[a as usize] > shape[z as usize] {
                return 1;
            }
        }
        0
    };
    // The insertion sort of TensorIterator, which tolerates ambiguous comparisons.
    for i in 1..rank {
        let mut at = i;
        for other in (0..i).rev() {
            match compare(order[other], order[at]) {
                1 => {
                    order.swap(other, at);
                    at = other;
                }
                -1 => break,
                _ => {}
            }
        }
    }
    let mut strides = Dims::from_elem(0, rank);
    let mut step = 1;
    for &d in &order {
        strides[d as usize] = step;
        step *= shape[d as usize].max(1);
    }
    strides
}

/// The rule for `x[indices]`: the tensor takes part with a stride of 0 in the indexed dimensions, which stand where the
/// first of them was, or in front if others lie between them.
fn indexed_strides(x: &TensorArg, indices: &[Option<TensorArg>], shape: &[i64]) -> Option<Dims> {
    if indices.iter().flatten().any(|i| matches!(i.ty.dtype, DType::Pred | DType::U8)) {
        return None;
    }
    let indexed = |d: usize| indices.get(d).is_some_and(Option::is_some);
    let first = (0..x.strides.len()).find(|&d| indexed(d))?;
    let last = (0..x.strides.len()).rfind(|&d| indexed(d))?;
    let before = if (first..=last).all(indexed) { first } else { 0 };
    let rank = indices.iter().flatten().map(|i| i.strides.len()).max()?;
    let free: Dims = (0..x.strides.len()).filter(|&d| !indexed(d)).map(|d| x.strides[d]).collect();
    if free.len() + rank != shape.len() {
        return None;
    }
    let (head, tail) = free.split_at(before);
    let mut operands = vec![Dims::from_slice(&[head, &vec![0; rank], tail].concat())];
    for i in indices.iter().flatten() {
        // An index tensor has a size of 1 in the other dimensions; its stride counts where the result has that size too.
        let stride = |d: usize, s: i64| if shape[d] == 1 { s } else { 0 };
        let head = (0..before).map(|d| stride(d, i.ty.numel()));
        let tail = (before + rank..shape.len()).map(|d| stride(d, 1));
        operands.push(head.chain(broadcast_strides(&i.ty.shape, &i.strides, rank)).chain(tail).collect());
    }
    Some(sorted_strides(&operands, shape))
}

/// Strides aligned to a result of this rank, 0 where the operand is broadcast.
fn broadcast_strides(sizes: &[i64], strides: &[i64], rank: usize) -> Dims {
    let mut out = Dims::from_elem(0, rank);
    let skip = rank.saturating_sub(sizes.len());
    for d in 0..sizes.len().min(rank) {
        if sizes[d] != 1 {
            out[skip + d] = strides[d];
        }
    }
    out
}

/// The instances of a stream: the first half of what there may be for ever, and of the others those that were looked for
/// last.
#[derive(Debug)]
pub(crate) struct Instances {
    by_kind: FxHashSet<ByKind>,
    /// Calls seen before, by a key that is cheap to make. Several keys may lead to one instance.
    by_key: FxHashMap<Box<[i64]>, Shared<Inst>>,
    /// Reads and writes of views seen before, by everything but their offsets. Views of one key may lie in the grid of
    /// their storage or across it, which are instances of their own.
    views: FxHashMap<Box<[i64]>, SmallVec<[Shared<Inst>; 1]>>,
    /// The number of the next one.
    next: u32,
    /// Counts windows.
    clock: u32,
    /// How many there may be.
    pub(crate) most: usize,
}

/// An instance that is found by its kind.
#[derive(Debug)]
struct ByKind(Shared<Inst>);

impl Borrow<Kind> for ByKind {
    fn borrow(&self) -> &Kind {
        &self.0.kind
    }
}

impl Hash for ByKind {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.kind.hash(state);
    }
}

impl PartialEq for ByKind {
    fn eq(&self, other: &ByKind) -> bool {
        self.0.kind == other.0.kind
    }
}

impl Eq for ByKind {}

impl Default for Instances {
    fn default() -> Instances {
        Instances {
            by_kind: FxHashSet::default(),
            by_key: FxHashMap::default(),
            views: FxHashMap::default(),
            next: 0,
            clock: 0,
            most: Remembered::default().ops,
        }
    }
}

/// What is done to a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

impl Instances {
    /// The instance that a call led to before.
    pub(crate) fn known(&self, key: &Key) -> Option<Shared<Inst>> {
        self.by_key.get(key.0.as_slice()).map(|inst| self.used(inst))
    }

    /// The instance of a kind, to be found by the key from now on.
    pub(crate) fn learn(&mut self, key: &Key, kind: Kind) -> Result<Shared<Inst>, Refusal> {
        let inst = self.get(kind)?;
        self.by_key.insert(key.0.as_slice().into(), inst.clone());
        Ok(inst)
    }

    /// A window has ended.
    pub(crate) fn tick(&mut self) {
        self.clock = self.clock.wrapping_add(1);
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.by_kind.len()
    }

    fn used(&self, inst: &Shared<Inst>) -> Shared<Inst> {
        if let Shared::Counted(inst) = inst {
            inst.used.store(self.clock, Relaxed);
        }
        inst.clone()
    }

    /// Forgets counted ones that were not looked for since a time that half of them are older than. Those of the open
    /// window stay.
    fn forget_half(&mut self) {
        let clock = self.clock;
        let age = |inst: &Shared<Inst>| match inst {
            Shared::Kept(_) => None,
            Shared::Counted(inst) => Some(clock.wrapping_sub(inst.used.load(Relaxed))),
        };
        let mut ages: Vec<u32> = self.by_kind.iter().filter_map(|k| age(&k.0)).collect();
        let middle = ages.len() / 2;
        if ages.is_empty() {
            return;
        }
        let median = (*ages.select_nth_unstable(middle).1).max(1);
        let stays = |inst: &Shared<Inst>| age(inst).is_none_or(|age| age < median);
        self.by_key.retain(|_, inst| stays(inst));
        self.views.retain(|_, all| {
            all.retain(|inst| stays(inst));
            !all.is_empty()
        });
        self.by_kind.retain(|k| stays(&k.0));
    }

    /// The instance that reads or writes this view of a value, and its offsets.
    pub(crate) fn view(
        &mut self,
        access: Access,
        base: &TensorType,
        view: &View,
        mut key: Key,
    ) -> Result<(Shared<Inst>, Offsets, Key), Refusal> {
        key.ty(access as u64, base);
        key.word(u64::from(view.conj) | u64::from(view.neg) << 1 | (view.dtype as u64) << 8);
        key.list(0, &view.sizes);
        key.ints(&view.strides);
        let candidates = self.views.get(key.0.as_slice());
        let placed = |inst: &Shared<Inst>| Some((self.used(inst), inst.kind.shape()?.place(view.offset)?));
        if let Some((inst, offsets)) = candidates.and_then(|all| all.iter().find_map(placed)) {
            return Ok((inst, offsets, key));
        }
        let (base, shape) = (base.clone(), Shape::of(view, base));
        let missing = || Error::runtime("a view has no place in its grid; please report this");
        let offsets = shape.place(view.offset).ok_or_else(missing)?;
        let inst = self.get(match access {
            Access::Read => Kind::Read { base, shape },
            Access::Write => Kind::Write { base, shape },
        })?;
        self.views.entry(key.0.as_slice().into()).or_default().push(inst.clone());
        Ok((inst, offsets, key))
    }

    /// The instance of a kind; a new one is lowered on a scratch builder to learn its results.
    pub(crate) fn get(&mut self, kind: Kind) -> Result<Shared<Inst>, Refusal> {
        if let Some(ByKind(inst)) = self.by_kind.get(&kind) {
            return Ok(self.used(inst));
        }
        let for_ever = (self.next as usize) < self.most / 2;
        if self.by_kind.len() >= self.most {
            self.forget_half();
        }
        let b = Builder::new();
        let operands = kind.operands();
        let values: Vec<Value> = operands.iter().map(|ty| b.param(ty.clone())).collect();
        let offsets = any_offsets(&kind, &b);
        let emitted = emit(&kind, &b, &values, &offsets).map_err(refusal)?;
        let outputs = emitted.outputs.iter().enumerate();
        let mut outputs: SmallVec<[Option<Out>; 1]> =
            outputs.map(|(i, v)| v.map(|v| out(&kind, i, &b, v, &values))).collect();
        let unchanged = |o: &Option<Out>| o.as_ref().is_none_or(|o| o.same_as.is_some());
        let identity = emitted.messages.is_empty() && outputs.iter().all(unchanged);
        let results: Vec<Value> = emitted.outputs.iter().flatten().chain(&emitted.checks).copied().collect();
        let module = b.finish(&results).ok();
        // Checks read the operands beside what is computed.
        let computed = results.len() - emitted.checks.len();
        let is_fused = module.as_ref().is_some_and(|m| m.is_fusible(computed));
        let (unused, unused_params) = module.map_or_else(Default::default, |m| unused(&kind, &m));
        for same in outputs.iter_mut().flatten().filter_map(|o| o.same_as.as_mut()) {
            *same -= unused.iter().filter(|&u| u < same).count() as u32;
        }
        let operands = operands.into_iter().enumerate();
        let operands = operands.filter(|(i, _)| !unused.contains(&(*i as u32))).map(|(_, ty)| ty).collect();
        let factor = |kind: &Kind| match kind {
            Kind::Row { op, args, .. } => {
                let params = aten::row(*op).params().iter().zip(args);
                params.into_iter().any(|(p, a)| p.kind == ParamKind::Alpha && matches!(a, Arg::Scalar(_)))
            }
            _ => false,
        };
        let bytes = outputs.iter().flatten().map(|o| o.bytes).fold(0, u64::saturating_add);
        let bytes = if matches!(kind, Kind::Fence { .. }) { 0 } else { bytes }; // in the memory of its operand
        let careful = unused_params != 0 || factor(&kind);
        let one = matches!(outputs.as_slice(), [Some(_)]);
        let inst = Inst {
            bytes,
            kept: if is_fused { 0 } else { bytes },
            careful,
            plain: one && !careful && !identity && emitted.rng_blocks == 0,
            waits: matches!(&kind, Kind::Row { op, .. } if aten::row(*op).memory == Some(MemorySpace::Device)),
            unused,
            unused_params,
            id: self.next,
            offsets: offsets.len(),
            operands,
            outputs: outputs.into_iter().map(|o| o.map(|o| Shared::new(o, for_ever))).collect(),
            rng_blocks: emitted.rng_blocks,
            checks: emitted.messages,
            kind,
            identity,
            used: AtomicU32::new(self.clock),
        };
        let inst = Shared::new(inst, for_ever);
        self.next += 1;
        self.by_kind.insert(ByKind(inst.clone()));
        Ok(inst)
    }
}

/// Offsets of which nothing is known. What a view shows is the same kind of thing wherever it begins.
fn any_offsets(kind: &Kind, b: &Builder) -> Vec<Offset> {
    if let Kind::Control(control) = kind {
        return control.any_offsets(b);
    }
    let any = |_| match kind {
        Kind::Row { .. } => Offset::Given(b.param(TensorType::scalar(DType::S64))),
        _ => Offset::Known(0),
    };
    (0..kind.offsets()).map(any).collect()
}

/// The tensor operands of a row that no result depends on: their numbers, in order, and the bits of their parameters.
fn unused(kind: &Kind, module: &Module) -> (Vec<u32>, u64) {
    let mut found = (Vec::new(), 0);
    let Kind::Row { args, .. } = kind else { return found };
    let used = module.used_params();
    for (param, arg) in args.iter().enumerate().take(64) {
        if let Arg::Tensor(t) = arg
            && !used[t.operand as usize]
        {
            found.0.push(t.operand);
            found.1 |= 1 << param;
        }
    }
    found.0.sort_unstable();
    found
}

fn out(kind: &Kind, i: usize, b: &Builder, value: Value, operands: &[Value]) -> Out {
    let ty = b.ty(value);
    let strides = match kind {
        // What overwrites an existing tensor has that tensor's strides.
        Kind::Row { dests, .. }
            if dests.get(i).is_some_and(|d| !matches!(d, Dest::New | Dest::Resized(_))) =>
        {
            None
        }
        Kind::Row { format: Format::Contiguous, .. } => None,
        Kind::Row { format: Format::ChannelsLast, .. } => Some(channels_last(&ty.shape)),
        Kind::Row { op, args, .. } => result_strides(aten::row(*op).layout, i, args, &ty.shape),
        _ => None,
    };
    let out = Out::new(ty, strides);
    let same_as = operands.iter().position(|&o| o == value).filter(|_| out.order.is_none());
    let sharding = match kind {
        Kind::Reshard { to, .. } => Some(to.clone()).filter(|to| !to.is_replicated()),
        _ => None,
    };
    Out { same_as: same_as.map(|i| i as u32), sharding, ..out }
}

pub(crate) fn refusal(e: aten::Error) -> Refusal {
    match e {
        aten::Error::Unsupported(why) => Refusal::Fallback(why),
        e => Refusal::Error(Error::new(e.kind().into(), e.to_string())),
    }
}

/// A call as words: op, types and attributes.
#[derive(Debug, Default)]
pub(crate) struct Key(Vec<i64>);

impl Key {
    /// A key that begins with a word, in the memory of an old one.
    pub(crate) fn anew(mut self, word: u64) -> Key {
        self.0.clear();
        self.0.push(word as i64);
        self
    }

    /// Its words.
    pub(crate) fn words(&self) -> &[i64] {
        &self.0
    }

    /// Adds a word.
    pub(crate) fn word(&mut self, word: u64) {
        self.0.push(word as i64);
    }

    /// Adds a list of integers under a tag.
    pub(crate) fn list(&mut self, tag: u64, ints: &[i64]) {
        self.word(tag | (ints.len() as u64) << 8);
        self.ints(ints);
    }

    /// Adds integers; their number must already be in the key.
    pub(crate) fn ints(&mut self, ints: &[i64]) {
        self.0.extend_from_slice(ints);
    }

    fn ty(&mut self, tag: u64, ty: &TensorType) {
        self.word(tag | (ty.dtype as u64) << 8 | (ty.shape.len() as u64) << 16);
        self.ints(&ty.shape);
    }

    /// Adds where a result goes.
    pub(crate) fn dest(&mut self, dest: &Dest) {
        match dest {
            Dest::New => self.word(1),
            Dest::Cast(dtype) => self.word(2 | (*dtype as u64) << 8),
            Dest::Into(ty) => self.ty(3, ty),
            Dest::Refill(ty) => self.ty(4, ty),
            Dest::Resized(dtype) => self.word(5 | (*dtype as u64) << 8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_take_the_operands_strides() {
        let d = |x: &[i64]| Dims::from_slice(x);
        let (shape, t) = (d(&[3, 2]), d(&[1, 3]));
        assert_eq!(pointwise_strides(&[(&shape, &t), (&shape, &t)], &[3, 2]), Some(t.clone()));
        // A transposed and a row-major operand: the first decides.
        assert_eq!(pointwise_strides(&[(&shape, &t), (&shape, &d(&[2, 1]))], &[3, 2]), Some(t));
        // Broadcast against a vector.
        assert_eq!(
            pointwise_strides(&[(&d(&[2]), &d(&[1])), (&shape, &d(&[1, 3]))], &[3, 2]),
            Some(d(&[1, 3]))
        );
    }

    #[test]
    fn a_permuted_result_is_stored_in_its_order() {
        let out = Out::new(TensorType::new(DType::F32, vec![2, 3]), Some(Dims::from_slice(&[1, 2])));
        assert_eq!(out.stored.shape.as_slice(), [3, 2]);
        assert_eq!(out.order.as_deref(), Some(&[1, 0][..]));
    }
}
