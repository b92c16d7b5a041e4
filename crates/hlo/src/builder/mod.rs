//! The builder's core: parameters, scopes, the one place where ops are pushed, and `finish`.
//! The op methods are in the files beside this one, by family.

mod chlo;
mod collective;
mod constant;
mod contract;
mod control;
mod elementwise;
mod fold;
mod index;
mod order;
mod overwrite;
mod reduce;
mod shape;
mod slices;
mod strided;
mod unfold;

pub(crate) use constant::decode_f8;
pub use strided::Strided;

use std::cell::RefCell;

use smallvec::SmallVec;

use crate::error::Error;
use crate::infer::{Broken, RegionSig, Sig, Types, infer};
use crate::ir::*;
use crate::types::{DType, Dims, TensorType};

/// Builds one function of StableHLO ops. Every method takes `&self`, so calls nest: `b.add(b.multiply(x, y), z)`.
///
/// Nothing here panics on a bad program. The first mistake is kept, [`Builder::error`] shows it, [`Builder::finish`]
/// returns it, and the op at fault yields a poison value of a plausible type so that building can go on.
/// Ops that would change nothing (a reshape to the same shape, a convert to the same type, ...) return their operand.
pub struct Builder {
    inner: RefCell<Inner>,
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let inner = self.inner.borrow();
        f.debug_struct("Builder")
            .field("name", &inner.name)
            .field("arena", &inner.arena)
            .finish_non_exhaustive()
    }
}

struct Inner {
    arena: Arena,
    name: String,
    /// Blocks being filled, innermost last; never empty.
    open: SmallVec<[BlockId; 4]>,
    error: Option<Error>,
    /// What new ops get as their location; 0 is none.
    location: u32,
    /// Whether narrow floats are moved as integers.
    narrow_as_integers: bool,
    /// Whether what is written is computed before where it may be of the places that are written.
    keeps_writes_apart: bool,
    orders_by_values: bool,
    /// Whether ops that follow the transpose of a channels-last tensor go before it.
    keeps_memory_order: bool,
    prefers_channels_last: bool,
    /// See [`Builder::vectorize_reductions`].
    vectorizes_reductions: bool,
    /// See [`Builder::expand_log_plus_one`].
    expands_log_plus_one: bool,
    has_host_memory: bool,
    /// Whether a module for other sizes is to be made of this one.
    is_outline: bool,
    deferred: Vec<Lower>,
}

/// Makes the results of a [deferred](Builder::deferred) computation, of its operands and of which places are in use along the
/// axes that it wants to know that of (pred, 1-d; nothing where all are).
pub type Lower = Box<dyn Fn(&Builder, &[Value], &[Option<Value>]) -> Vec<Value> + Send + Sync>;

/// The results of a pushed op: consecutive values.
#[derive(Clone, Copy, Debug)]
struct Results {
    first: u32,
    count: u32,
}

impl Results {
    fn values(self) -> Vec<Value> {
        (self.first..self.first + self.count).map(Value).collect()
    }
}

impl Default for Builder {
    fn default() -> Self {
        Self::new()
    }
}

impl Builder {
    /// An empty function in a module called `main`.
    pub fn new() -> Self {
        let root = Block { captures: true, ..Block::default() };
        let arena = Arena { blocks: vec![root], ..Arena::default() };
        let open = SmallVec::from_elem(ROOT, 1);
        let name = "main".into();
        let (narrow_as_integers, keeps_writes_apart, orders_by_values) = (false, false, false);
        let inner = Inner {
            arena,
            name,
            open,
            error: None,
            location: 0,
            narrow_as_integers,
            keeps_writes_apart,
            orders_by_values,
            keeps_memory_order: false,
            prefers_channels_last: false,
            vectorizes_reductions: false,
            expands_log_plus_one: false,
            has_host_memory: false,
            is_outline: false,
            deferred: Vec::new(),
        };
        Self { inner: RefCell::new(inner) }
    }

    /// Whether ops that move elements and compute nothing take floats of 8 and 16 bits as integers. For compilers that
    /// compute in wider floats and go through them there too, which changes what a NaN carries.
    pub fn move_narrow_as_integers(&self, on: bool) {
        self.inner.borrow_mut().narrow_as_integers = on;
    }

    /// Whether a module for all sizes up to these is to be made of it ([`Module::bounded`]): then lowerings call nothing
    /// that computes with a whole tensor and cannot be told how much of it is used.
    pub fn set_outline(&self, on: bool) {
        self.inner.borrow_mut().is_outline = on;
    }

    /// Whether that is so.
    pub fn is_outline(&self) -> bool {
        self.inner.borrow().is_outline
    }

    /// Sets the module's symbol name (shown by profilers); characters outside `[A-Za-z0-9_]` become `_`.
    pub fn set_name(&self, name: &str) {
        let clean = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
        let mut name: String = name.chars().map(clean).collect();
        if !name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
            name.insert(0, '_');
        }
        self.inner.borrow_mut().name = name;
    }

    /// Sets the number of the location that the ops pushed from now on carry; `None` clears it. Who prints the module may
    /// say what it stands for.
    pub fn set_location(&self, number: Option<u32>) {
        self.inner.borrow_mut().location = number.map_or(0, |n| n + 1);
    }

    /// The next parameter of the function.
    pub fn param(&self, ty: TensorType) -> Value {
        let mut inner = self.inner.borrow_mut();
        if !ty.is_representable() {
            let reason =
                "a parameter's sizes must be positive or zero, and together not too large".to_owned();
            inner.fail(Error::Op { op: "func.func", operands: vec![ty.clone()], reason });
        }
        let index = inner.arena.params.len() as u32;
        let v = inner.new_value(ty, Def::Param(index), ROOT);
        inner.arena.params.push(v);
        v
    }

    /// Gives parameter `v` an attribute, for instance [`ArgAttr::Donor`].
    pub fn param_attr(&self, v: Value, attr: ArgAttr) {
        let mut inner = self.inner.borrow_mut();
        match inner.arena.values.get(v.0 as usize).map(|d| d.def) {
            Some(Def::Param(index)) => {
                if let ArgAttr::Sharding(sharding) = &attr
                    && let Err(error) = inner.arena.check_sharding(sharding, inner.arena.ty(v))
                {
                    return inner.fail(error);
                }
                add_param_attr(&mut inner.arena, index as usize, attr);
            }
            _ => {
                let params = inner.arena.params.len();
                inner.fail(Error::NoSuchParam { index: v.0 as usize, params });
            }
        }
    }

    /// The type of a value.
    pub fn ty(&self, v: Value) -> TensorType {
        match self.inner.borrow().arena.values.get(v.0 as usize) {
            Some(data) => data.ty.clone(),
            None => TensorType::scalar(DType::F32),
        }
    }

    /// The element type of a value.
    pub fn dtype(&self, v: Value) -> DType {
        self.inner.borrow().arena.values.get(v.0 as usize).map_or(DType::F32, |d| d.ty.dtype)
    }

    /// The sizes of a value.
    pub fn shape(&self, v: Value) -> Dims {
        self.inner.borrow().arena.values.get(v.0 as usize).map_or_else(Dims::new, |d| d.ty.shape.clone())
    }

    /// The size of dimension `dim`; 1 where there is no such dimension.
    pub fn dim(&self, v: Value, dim: usize) -> i64 {
        let inner = self.inner.borrow();
        inner.arena.values.get(v.0 as usize).and_then(|d| d.ty.shape.get(dim).copied()).unwrap_or(1)
    }

    /// The number of dimensions of a value.
    pub fn rank(&self, v: Value) -> usize {
        self.inner.borrow().arena.values.get(v.0 as usize).map_or(0, |d| d.ty.rank())
    }

    /// The number of elements of a value.
    pub fn numel(&self, v: Value) -> i64 {
        self.inner.borrow().arena.values.get(v.0 as usize).map_or(1, |d| d.ty.numel())
    }

    /// The first mistake so far.
    pub fn error(&self) -> Option<Error> {
        self.inner.borrow().error.clone()
    }

    /// Records a mistake found by the caller, unless there is one already.
    pub fn fail(&self, error: Error) {
        self.inner.borrow_mut().fail(error);
    }

    /// What was [deferred](Builder::deferred) so far, in its order.
    pub(crate) fn take_deferred(&self) -> Vec<Lower> {
        std::mem::take(&mut self.inner.borrow_mut().deferred)
    }

    /// Ends the function with these results.
    pub fn finish(self, outputs: &[Value]) -> Result<Module, Error> {
        let outputs: Vec<Value> = outputs.iter().map(|&v| self.result(v)).collect();
        let mut inner = self.inner.into_inner();
        for (index, &v) in outputs.iter().enumerate() {
            if let Err(reason) = inner.visible(v) {
                inner.fail(Error::Output { index, reason });
            }
        }
        match inner.error {
            Some(error) => Err(error),
            None => Ok(Module {
                name: inner.name,
                arena: inner.arena,
                outputs,
                output_shardings: Vec::new(),
                host_outputs: Vec::new(),
            }),
        }
    }

    // ---- for the op families

    /// The integer type as which elements of this type are moved, if that is another.
    fn moved_as(&self, dtype: DType) -> Option<DType> {
        let on = self.inner.borrow().narrow_as_integers && dtype.is_float();
        match dtype.bits() {
            8 if on => Some(DType::U8),
            16 if on => Some(DType::U16),
            _ => None,
        }
    }

    /// Pushes an op with one result whose operands number `moved` are its elements, and are not computed with.
    fn moving(&self, op: Op, operands: &[Value], moved: std::ops::Range<usize>) -> Value {
        let dtype = operands.get(moved.start).map_or(DType::F32, |&v| self.dtype(v));
        let Some(bits) = self.moved_as(dtype) else { return self.op(op, operands) };
        let mut operands: SmallVec<[Value; 4]> = SmallVec::from_slice(operands);
        for v in operands.iter_mut().take(moved.end).skip(moved.start).filter(|v| self.dtype(**v) == dtype) {
            *v = self.as_bits(*v, bits);
        }
        self.bitcast_convert(self.op(op, &operands), dtype)
    }

    /// A value as integers of the same bits. What reshaped, transposed or repeated it does so with the integers: these
    /// ops are not [`Builder::moving`], as a product that follows one would have its operand copied.
    fn as_bits(&self, x: Value, bits: DType) -> Value {
        let Some((op, before)) = self.rearranged(x) else { return self.bitcast_convert(x, bits) };
        let before = self.as_bits(before, bits);
        self.op_as(op, &[before], TensorType::new(bits, self.shape(x)))
    }

    /// The op that reshaped, transposed or repeated a value, and what it took.
    pub(crate) fn rearranged(&self, x: Value) -> Option<(Op, Value)> {
        let inner = self.inner.borrow();
        let Def::Op(id) = inner.arena.values.get(x.0 as usize)?.def else { return None };
        let op = &inner.arena.ops[id as usize];
        let rearranges = matches!(op.op, Op::Reshape | Op::Transpose(_) | Op::BroadcastInDim(_));
        Some((op.op.clone(), *op.operands.first()?)).filter(|_| rearranges)
    }

    /// A result of the function. One that was only moved on its way from the parameters is moved as integers.
    fn result(&self, x: Value) -> Value {
        let dtype = self.dtype(x);
        let (Some(bits), Some((_, mut from))) = (self.moved_as(dtype), self.rearranged(x)) else { return x };
        while let Some((_, before)) = self.rearranged(from) {
            from = before;
        }
        let is_param = || {
            let inner = self.inner.borrow();
            inner.arena.values.get(from.0 as usize).is_some_and(|v| matches!(v.def, Def::Param(_)))
        };
        let was_moved = is_param() || self.bitcast_from(from, bits).is_some();
        if was_moved { self.bitcast_convert(self.as_bits(x, bits), dtype) } else { x }
    }

    /// Pushes an op with one result.
    fn op(&self, op: Op, operands: &[Value]) -> Value {
        if let Some(v) = self.before_transposes(&op, operands, None) {
            return v;
        }
        Value(self.inner.borrow_mut().push(op, operands, &[], &[]).first)
    }

    /// Pushes an op with one result whose type is stated.
    fn op_as(&self, op: Op, operands: &[Value], ty: TensorType) -> Value {
        if let Some(v) = self.before_transposes(&op, operands, Some(&ty)) {
            return v;
        }
        Value(self.inner.borrow_mut().push(op, operands, std::slice::from_ref(&ty), &[]).first)
    }

    /// Pushes an op with any number of results, stated types and regions.
    fn op_full(&self, op: Op, operands: &[Value], requested: &[TensorType], regions: &[BlockId]) -> Results {
        self.inner.borrow_mut().push(op, operands, requested, regions)
    }

    /// Fills a new block by running `body` on its arguments. `captures` says whether it may use outer values.
    fn region<R: IntoIterator<Item = Value>>(
        &self,
        args: impl IntoIterator<Item = TensorType>,
        captures: bool,
        body: impl FnOnce(&[Value]) -> R,
    ) -> BlockId {
        // Collected first: the caller's iterator may ask this builder for types.
        let args: SmallVec<[TensorType; 4]> = args.into_iter().collect();
        let (block, args) = self.inner.borrow_mut().open_block(args, captures);
        let returns: SmallVec<[Value; 2]> = body(&args).into_iter().collect();
        self.inner.borrow_mut().close_block(block, returns);
        block
    }

    // ---- for modules that are made of others

    /// Pushes an op that another module has.
    pub(crate) fn copied(
        &self,
        op: Op,
        operands: &[Value],
        requested: &[TensorType],
        regions: &[BlockId],
    ) -> Vec<Value> {
        self.op_full(op, operands, requested, regions).values()
    }

    /// Begins a region; everything goes there until it is closed.
    pub(crate) fn open_region(&self, args: &[TensorType], captures: bool) -> (BlockId, SmallVec<[Value; 4]>) {
        self.inner.borrow_mut().open_block(args.iter().cloned().collect(), captures)
    }

    /// Ends it.
    pub(crate) fn close_region(&self, block: BlockId, returns: Vec<Value>) {
        self.inner.borrow_mut().close_block(block, returns.into());
    }

    /// A parameter has another type than was said, which what was made of it allows.
    pub(crate) fn set_type(&self, param: Value, ty: TensorType) {
        self.inner.borrow_mut().arena.values[param.0 as usize].ty = ty;
    }

    /// Records that `op` cannot be applied to `operands`, and returns poison of type `ty`.
    fn refuse(&self, op: &'static str, operands: &[Value], reason: String, ty: TensorType) -> Value {
        let types = operands.iter().map(|&v| self.ty(v)).collect();
        let mut inner = self.inner.borrow_mut();
        inner.fail(Error::Op { op, operands: types, reason });
        inner.new_value(ty, Def::Poison, NOWHERE)
    }
}

impl Inner {
    fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
    }

    fn new_value(&mut self, mut ty: TensorType, def: Def, block: BlockId) -> Value {
        // Only what failed already can have one; arithmetic on sizes relies on there being none.
        ty.shape.iter_mut().for_each(|d| *d = (*d).max(0));
        let v = Value(self.arena.values.len() as u32);
        let constant = matches!(def, Def::Constant(_)) || ty.numel() == 0;
        self.arena.values.push(ValueData { ty, def, block, constant });
        v
    }

    /// Whether an op pushed now may use `v`.
    fn visible(&self, v: Value) -> Result<(), &'static str> {
        let Some(data) = self.arena.values.get(v.0 as usize) else {
            return Err("belongs to another builder");
        };
        if data.block == NOWHERE {
            return Ok(());
        }
        for &block in self.open.iter().rev() {
            if block == data.block {
                return Ok(());
            }
            if !self.arena.blocks[block as usize].captures {
                return Err("is defined outside of a region that may only use its arguments and constants");
            }
        }
        Err("is used outside of the region that defines it")
    }

    fn push(&mut self, op: Op, operands: &[Value], requested: &[TensorType], regions: &[BlockId]) -> Results {
        let mut operands: SmallVec<[Value; 3]> = SmallVec::from_slice(operands);
        for index in 0..operands.len() {
            if let Err(reason) = self.visible(operands[index]) {
                self.fail(Error::Operand { op: op.name(), index, reason });
                let ty = self.arena.values.get(operands[index].0 as usize).map(|d| d.ty.clone());
                let ty = ty.unwrap_or_else(|| TensorType::scalar(DType::F32));
                operands[index] = self.new_value(ty, Def::Poison, NOWHERE);
            }
        }
        match self.infer(&op, &operands, requested, regions) {
            Ok(results) => self.place(op, operands, results, regions),
            Err(failed) => {
                let (error, plausible) = *failed;
                self.fail(error);
                self.new_values(plausible, Def::Poison, NOWHERE)
            }
        }
    }

    /// Result types, or the error together with types to go on with.
    fn infer(
        &self,
        op: &Op,
        operands: &[Value],
        requested: &[TensorType],
        regions: &[BlockId],
    ) -> Result<Types, Box<(Error, Types)>> {
        let sigs: SmallVec<[RegionSig; 2]> = regions.iter().map(|&r| region_sig(&self.arena, r)).collect();
        let types: SmallVec<[&TensorType; 4]> = operands.iter().map(|&v| self.arena.ty(v)).collect();
        infer(&Sig { op, operands: &types, requested, regions: &sigs }).map_err(|broken| {
            let (name, operands) = (op.name(), types.iter().map(|&t| t.clone()).collect());
            let error = match broken {
                Broken::ElementType(reason) => Error::ElementType { op: name, operands, reason },
                Broken::Other(reason) => Error::Op { op: name, operands, reason },
            };
            Box::new((error, plausible(op, &types, requested, &sigs)))
        })
    }

    /// Adds a checked op to the innermost open block.
    fn place(
        &mut self,
        op: Op,
        operands: SmallVec<[Value; 3]>,
        types: Types,
        regions: &[BlockId],
    ) -> Results {
        let id = self.arena.ops.len() as OpId;
        let block = self.current();
        let results = self.new_values(types, Def::Op(id), block);
        if self.makes_constants(&op, &operands) {
            let all = results.first as usize..(results.first + results.count) as usize;
            self.arena.values[all].iter_mut().for_each(|v| v.constant = true);
        }
        self.arena.ops.push(OpData {
            op,
            operands,
            first_result: results.first,
            results: results.count,
            regions: SmallVec::from_slice(regions),
            location: self.location,
        });
        self.arena.blocks[block as usize].ops.push(id);
        results
    }

    fn new_values(&mut self, types: Types, def: Def, block: BlockId) -> Results {
        let results = Results { first: self.arena.values.len() as u32, count: types.len() as u32 };
        for ty in types {
            self.new_value(ty, def, block);
        }
        results
    }

    fn current(&self) -> BlockId {
        self.open.last().copied().unwrap_or(ROOT)
    }

    fn open_block(
        &mut self,
        args: SmallVec<[TensorType; 4]>,
        captures: bool,
    ) -> (BlockId, SmallVec<[Value; 4]>) {
        let block = self.arena.blocks.len() as BlockId;
        let args: SmallVec<[Value; 4]> =
            args.into_iter().map(|ty| self.new_value(ty, Def::BlockArg, block)).collect();
        self.arena.blocks.push(Block { args: args.clone(), captures, ..Block::default() });
        self.open.push(block);
        (block, args)
    }

    fn close_block(&mut self, block: BlockId, mut returns: SmallVec<[Value; 2]>) {
        for (index, v) in returns.iter_mut().enumerate() {
            if let Err(reason) = self.visible(*v) {
                self.fail(Error::Operand { op: "stablehlo.return", index, reason });
                *v = self.new_value(TensorType::scalar(DType::F32), Def::Poison, NOWHERE);
            }
        }
        self.arena.blocks[block as usize].returns = returns;
        self.open.retain(|b| *b != block);
    }
}

pub(crate) fn region_sig(arena: &Arena, block: BlockId) -> RegionSig {
    let block = &arena.blocks[block as usize];
    let types = |vs: &[Value]| vs.iter().map(|&v| arena.ty(v).clone()).collect();
    RegionSig { args: types(&block.args), returns: types(&block.returns) }
}

/// Types for the results of an op that failed: as many as it would have, shaped like what it was given.
fn plausible(op: &Op, operands: &[&TensorType], requested: &[TensorType], regions: &[RegionSig]) -> Types {
    let scalar = TensorType::scalar(DType::F32);
    let first = || operands.first().map_or_else(|| scalar.clone(), |&t| t.clone());
    let leading = |n: usize| operands.iter().take(n.max(1)).map(|&t| t.clone()).collect::<Types>();
    let types: Types = match op {
        Op::RngBitGenerator(_) => [first()].into_iter().chain(requested.iter().cloned()).collect(),
        Op::DotGeneral(_) => requested.iter().map(|t| first().with_dtype(t.dtype)).collect(),
        _ if !requested.is_empty() => requested.iter().cloned().collect(),
        Op::CustomCall(_) | Op::Deferred(_) => return Types::new(),
        Op::Compare(..) => [first().with_dtype(DType::Pred)].into_iter().collect(),
        Op::Select | Op::Clamp => operands.get(1).map(|&t| t.clone()).into_iter().collect(),
        Op::TopK(_) => [first(), first().with_dtype(DType::S32)].into_iter().collect(),
        Op::Scatter(..) | Op::Reduce(_) | Op::ReduceWindow(_) => leading(operands.len() / 2),
        Op::Sort { .. } | Op::While | Op::OptimizationBarrier => leading(operands.len()),
        Op::If | Op::Case => regions.iter().take(1).flat_map(|r| r.returns.iter().cloned()).collect(),
        _ => [first()].into_iter().collect(),
    };
    if types.is_empty() { [scalar].into_iter().collect() } else { types }
}
