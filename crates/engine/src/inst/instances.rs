//! The instances of a stream, interned; a new one is lowered once to learn its results.

use super::emit::emit;
use super::strides::{channels_last, result_strides};
use super::{Format, Inst, Key, Kind, Out};
use crate::config::Remembered;
use crate::error::{Error, Refusal};
use crate::shared::Shared;
use crate::view::{Offsets, Shape, View};
use oxitorch_aten::args::Offset;
use oxitorch_aten::lower::Dest;
use oxitorch_aten::{self as aten, Arg, ParamKind};
use oxitorch_hlo::{Builder, DType, MemorySpace, Module, TensorType, Value};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use std::borrow::Borrow;
use std::hash::{Hash, Hasher};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

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
        self.by_key.get(key.words()).map(|inst| self.used(inst))
    }

    /// The instance of a kind, to be found by the key from now on.
    pub(crate) fn learn(&mut self, key: &Key, kind: Kind) -> Result<Shared<Inst>, Refusal> {
        let inst = self.get(kind)?;
        self.by_key.insert(key.words().into(), inst.clone());
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
        let candidates = self.views.get(key.words());
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
        self.views.entry(key.words().into()).or_default().push(inst.clone());
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
            only_asserts: match &kind {
                Kind::Row { op, .. } => aten::row(*op).only_asserts,
                Kind::Control(control) => control.insts().any(|inst| inst.only_asserts),
                _ => false,
            },
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
pub(super) fn any_offsets(kind: &Kind, b: &Builder) -> Vec<Offset> {
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
