//! One program for all sizes up to a bound.
//!
//! A module that was made for the bound is compared with a sample: what the same ops gave at a smaller size. Dimensions,
//! attributes and constants that are equal in both are what they are; those that differ are numbers that the new module is
//! given when it runs. It is the module of the bound, in which the elements beyond the size in use are computed like the
//! others and left out wherever an op would mix them with those in use: a sum takes zeros for them, a sort puts them last.
//!
//! Where the elements in use lie is known of each dimension (`layout.rs`): first of all as a rule, and four times so many
//! every bound, say, where a dimension of size 4 was merged with it.
//! What is done for each op is in `rules.rs`.
//!
//! A number that follows from the size may be by chance at the bound what it is in a sample: it is a constant then, and the
//! module is for fewer sizes than that of another sample. So a second sample may be compared besides: what differs in
//! either is a number. If the module is the same as of the first sample alone, that one is right for the second, too.

mod control;
mod deferred;
mod fourier;
mod layout;
mod region;
mod rules;
mod windows;

use crate::builder::{Builder, Lower};
use crate::error::Error;
use crate::ir::*;
use crate::types::{DType, Dims, TensorType};
use layout::{Dim, Factor, Factors, Layout, Three, each, merged, prefixes, threes};
use rustc_hash::{FxHashMap, FxHashSet};

/// A module for all sizes up to a bound.
#[derive(Debug)]
pub struct Bounded {
    /// The module. Its last parameter is the vector of the numbers (s64).
    pub module: Module,
    /// What the numbers are at the bound, and in the sample; one that nothing takes if nothing varies.
    pub numbers: Vec<(i64, i64)>,
}

/// A module of which one for all sizes up to its own can be made.
pub struct Outline {
    module: Module,
    deferred: Vec<Lower>,
    vectorizes_reductions: bool,
}

impl std::fmt::Debug for Outline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outline").field("module", &self.module).finish_non_exhaustive()
    }
}

/// The dimensions that lie one after another in some memory, slowest first: the size at the bound, and in the sample.
pub type InMemory = Vec<(i64, i64)>;

/// What is compared with a bound: the same ops at a smaller size. Of parameters and results the dimensions may be given that
/// lie one after another in their memory, which they need not be cut into.
#[derive(Clone, Copy, Debug)]
pub struct Sampled<'a> {
    /// The module at that size.
    pub outline: &'a Outline,
    /// Of each parameter.
    pub params: &'a [Option<InMemory>],
    /// Of each result.
    pub results: &'a [Option<InMemory>],
}

/// Why there is no module for all sizes up to a bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unbounded {
    /// Name of the op that cannot be bounded.
    pub op: &'static str,
    /// The number of its location, if it was given one.
    pub location: Option<u32>,
    /// The reason, as a sentence without its end.
    pub reason: String,
}

type Result<T, E = String> = std::result::Result<T, E>;

/// Elements of a constant that a program is given as numbers, as they depend on the size.
const MOST_IN_TABLE: i64 = 1 << 16;

/// A value of the new module, and how it lies.
#[derive(Clone, Debug)]
struct Laid {
    v: Value,
    layout: Layout,
}

/// Values of the module for the bound, with the dimensions along which they are zero where they are not in use.
type Zeroed = FxHashMap<Value, Vec<usize>>;

/// A value as another one, seen otherwise.
#[derive(Clone, Debug)]
struct View {
    from: Laid,
    /// Its own.
    layout: Layout,
    /// How it is made of that.
    op: Op,
}

impl Laid {
    fn varies(&self) -> bool {
        self.layout.iter().any(Dim::varies)
    }
}

impl Outline {
    /// Ends a function that [was to be](Builder::set_outline) an outline.
    ///
    /// # Errors
    /// As [`Builder::finish`].
    pub fn finish(b: Builder, outputs: &[Value]) -> Result<Outline, Error> {
        let (deferred, vectorizes_reductions) = (b.take_deferred(), b.vectorizes_reductions());
        Ok(Outline { module: b.finish(outputs)?, deferred, vectorizes_reductions })
    }

    /// The module of which this is the one for the bound: for the size of the sample and all others, as far as these two
    /// say.
    ///
    /// # Errors
    /// An op for which no rule is known, or of which the two modules differ in more than sizes.
    pub fn bounded(
        &self,
        sample: &Outline,
        params: &[Option<InMemory>],
        results: &[Option<InMemory>],
    ) -> Result<Bounded, Unbounded> {
        let sample = Sampled { outline: sample, params, results };
        self.of_samples(sample, sample)
    }

    /// The module for two samples, for each of which there [is one](Self::bounded). The numbers are those at the bound, and
    /// in the second sample.
    ///
    /// # Errors
    /// As for one sample, and where the two do not fit together.
    pub fn of_samples(&self, sample: Sampled<'_>, other: Sampled<'_>) -> Result<Bounded, Unbounded> {
        // Once to see what takes zeros where it is not in use, and once more with these in place from the start.
        let (made, zeroed) = self.compared(sample, other, &Zeroed::default())?;
        if zeroed.is_empty() {
            return Ok(made);
        }
        Ok(self.compared(sample, other, &zeroed)?.0)
    }

    /// Whether a sample has the same ops.
    fn alike(&self, sample: &Outline) -> Result<(), Unbounded> {
        let (own, sample) = (&self.module, &sample.module);
        let (bound, other) = (&own.arena, &sample.arena);
        let ops = (&bound.blocks[ROOT as usize].ops, &other.blocks[ROOT as usize].ops);
        let kind = |arena: &Arena, id: OpId| std::mem::discriminant(&arena.ops[id as usize].op);
        let differs = |&(&p, &s): &(&OpId, &OpId)| kind(bound, p) != kind(other, s);
        let first = ops.0.iter().zip(ops.1).find(differs).map(|(p, _)| *p);
        let first = first.or(ops.0.get(ops.1.len()).copied());
        if first.is_some()
            || ops.0.len() != ops.1.len()
            || bound.params.len() != other.params.len()
            || own.outputs.len() != sample.outputs.len()
        {
            let reason = "what is computed depends on the size";
            let op = first.map(|id| &bound.ops[id as usize]);
            let of = |op: &OpData| Unbounded {
                op: op.op.name(),
                location: op.location.checked_sub(1),
                reason: reason.into(),
            };
            return Err(op.map_or_else(|| whole(reason), of));
        }
        Ok(())
    }

    /// The module, in which these values are zero where they are not in use, and all values that some op takes so.
    fn compared(
        &self,
        first: Sampled<'_>,
        second: Sampled<'_>,
        zeroed: &Zeroed,
    ) -> Result<(Bounded, Zeroed), Unbounded> {
        self.alike(first.outline)?;
        self.alike(second.outline)?;
        let (own, samples) = (&self.module, [&first.outline.module, &second.outline.module]);
        let (bound, [sample, other]) = (&own.arena, samples.map(|m| &m.arena));
        if bound.mesh.is_some() {
            return Err(whole("it is split over several devices"));
        }
        let b = Builder::new();
        b.set_name(&own.name);
        b.vectorize_reductions(self.vectorizes_reductions);
        let mut bounding = Bounding {
            bound,
            sample,
            other,
            deferred: &self.deferred,
            b,
            laid: FxHashMap::default(),
            pairs: FxHashMap::default(),
            numbers: Vec::new(),
            numbered: FxHashMap::default(),
            tables: FxHashMap::default(),
            vector: None,
            known: Known::default(),
            wanted: FxHashSet::default(),
            early: zeroed,
            scopes: Vec::new(),
        };
        let mut laid = Vec::new();
        for (i, (&p, (&s, &o))) in
            bound.params.iter().zip(sample.params.iter().zip(&other.params)).enumerate()
        {
            let v = bounding.b.param(bound.ty(p).clone());
            for attr in bound.param_attrs.get(i).into_iter().flatten() {
                bounding.b.param_attr(v, attr.clone());
            }
            let mut layout = bounding.default(p, s, o).map_err(|reason| whole(&reason))?;
            if let Some(dims) = in_both(first.params, second.params, i)?
                && layout.iter().any(Dim::varies)
                && !bound.ty(p).shape.contains(&0)
            {
                let split =
                    layout::split(&dims, [bound.ty(p), sample.ty(s), other.ty(o)].map(|ty| &ty.shape));
                let split =
                    split.ok_or_else(|| whole("an argument lies in memory otherwise than it is taken"))?;
                layout = split.into_iter().map(|factors| Dim { factors, even: false }).collect();
            }
            laid.push((p, (s, o), Laid { v, layout }));
        }
        // The vector has its length in the end.
        let vector = bounding.b.param(TensorType::new(DType::S64, [i64::from(i32::MAX)].as_slice()));
        bounding.vector = Some(vector);
        for (p, s, laid) in laid {
            bounding.know(p, s, laid);
        }
        let live = own.live();
        let [ops, of_sample, of_other] = [bound, sample, other].map(|arena| &arena.blocks[ROOT as usize].ops);
        for (&p, (&s, &o)) in ops.iter().zip(of_sample.iter().zip(of_other)) {
            if !live[p as usize] {
                continue;
            }
            let (p, s, o) = (&bound.ops[p as usize], &sample.ops[s as usize], &other.ops[o as usize]);
            bounding.b.set_location(p.location.checked_sub(1));
            let done = bounding.op(p, s, o).and_then(|()| match bounding.b.error() {
                Some(error) => Err(error.to_string()),
                None => Ok(()),
            });
            done.map_err(|reason| Unbounded {
                op: p.op.name(),
                location: p.location.checked_sub(1),
                reason,
            })?;
        }
        bounding.b.set_location(None);
        let mut outputs = Vec::new();
        let pairs = samples[0].outputs.iter().zip(&samples[1].outputs);
        for (i, (&p, (&s, &o))) in own.outputs.iter().zip(pairs).enumerate() {
            let dims = in_both(first.results, second.results, i)?;
            let out = bounding.operand(p, s, Some(o)).and_then(|x| match &dims {
                Some(dims) => bounding.in_memory(x, dims),
                None => bounding.prefixed(x, |_| true).map(|x| x.v),
            });
            outputs.push(out.map_err(|reason| whole(&reason))?);
        }
        let zeroed = bounding.takes_zeros();
        let Bounding { b, numbers, .. } = bounding;
        let numbers: Vec<(i64, i64)> = numbers.into_iter().map(|[bound, _, own]| (bound, own)).collect();
        let numbers = if numbers.is_empty() { vec![(0, 0)] } else { numbers };
        b.set_type(vector, TensorType::new(DType::S64, [numbers.len() as i64].as_slice()));
        let module = b.finish(&outputs).map_err(|e| whole(&e.to_string()))?;
        Ok((Bounded { module, numbers }, zeroed))
    }
}

fn whole(reason: &str) -> Unbounded {
    Unbounded { op: "func.func", location: None, reason: reason.into() }
}

/// How a parameter or result lies in memory in both samples.
fn in_both(
    first: &[Option<InMemory>],
    second: &[Option<InMemory>],
    i: usize,
) -> Result<Option<Factors>, Unbounded> {
    let of = |list: &[Option<InMemory>]| list.get(i).cloned().flatten();
    match (of(first), of(second)) {
        (None, None) => Ok(None),
        (Some(a), Some(b)) if a.iter().map(|d| d.0).eq(b.iter().map(|d| d.0)) => {
            let dims = a.iter().zip(&b).map(|(a, b)| Factor::of([a.0, a.1, b.1]));
            Ok(Some(merged(dims)))
        }
        _ => Err(whole("it lies in memory in another way at another size")),
    }
}

struct Bounding<'a> {
    bound: &'a Arena,
    sample: &'a Arena,
    /// The same again, if it is compared with one sample.
    other: &'a Arena,
    /// What the outline left open.
    deferred: &'a [Lower],
    b: Builder,
    /// By the values of the module for the bound.
    laid: FxHashMap<Value, Laid>,
    /// Their values in the samples.
    pairs: FxHashMap<Value, (Value, Value)>,
    numbers: Vec<Three>,
    /// Where single ones are among them, and where those of constants begin.
    numbered: FxHashMap<Three, usize>,
    tables: FxHashMap<[u32; 3], usize>,
    vector: Option<Value>,
    known: Known,
    /// What is taken with zeros where it is not in use.
    wanted: FxHashSet<(Value, Vec<Option<Factors>>)>,
    /// What is zero where it is not in use from the start.
    early: &'a Zeroed,
    /// The values of the regions that are being copied, outermost first.
    scopes: Vec<FxHashMap<Value, (Value, Value)>>,
}

/// Values of the new module that were made and may be needed again, of the region that is being made and those around it.
#[derive(Clone, Default)]
struct Known {
    /// The numbers that were taken from the vector.
    given: FxHashMap<Three, Value>,
    /// Which places of a dimension are used.
    masks: FxHashMap<Factors, Value>,
    masked: FxHashMap<(Value, Vec<Option<Factors>>, Value), Value>,
    /// The dimensions of values along which they are zero where they are not in use.
    zeros: FxHashMap<Value, Vec<Option<Factors>>>,
    /// Values that are others seen otherwise: what is masked is what they are views of, which is in memory.
    views: FxHashMap<Value, View>,
}

impl Bounding<'_> {
    fn know(&mut self, p: Value, samples: (Value, Value), mut laid: Laid) {
        self.pairs.insert(p, samples);
        if let Some(dims) = self.early.get(&p) {
            // All that takes it takes the same, instead of a copy each for those that mix it and those that do not.
            laid.v = self.zeroed(&laid, dims);
            self.note_zeros(p, &laid);
        }
        self.laid.insert(p, laid);
    }

    /// The values that some op takes with zeros where they are not in use.
    fn takes_zeros(&self) -> Zeroed {
        let mut known: Vec<(&Value, &Laid)> = self.laid.iter().collect();
        known.sort_unstable_by_key(|(p, _)| p.0);
        let mut of = FxHashMap::default();
        for (p, laid) in known {
            of.entry(laid.v).or_insert((*p, laid));
        }
        let mut zeroed = Zeroed::default();
        for (v, key) in &self.wanted {
            // Of what is the same along a dimension any layout is right, and would not be.
            let Some((p, laid)) = of.get(v).filter(|(_, laid)| laid.layout.iter().all(|d| !d.even)) else {
                continue;
            };
            let dims = zeroed.entry(*p).or_default();
            for d in (0..key.len()).filter(|&d| key[d].as_ref() == Some(&laid.layout[d].factors)) {
                if !dims.contains(&d) {
                    dims.push(d);
                }
            }
        }
        zeroed
    }

    /// The layout of a value whose used places come first.
    fn default(&self, p: Value, s: Value, o: Value) -> Result<Layout> {
        let p = self.bound.ty(p);
        let samples = [self.sample.ty(s), self.other.ty(o)];
        for s in samples {
            if p.dtype != s.dtype || p.rank() != s.rank() {
                return Err("what is computed depends on the size".into());
            }
            if p.shape.iter().zip(&s.shape).any(|(p, s)| s > p || (p != s && *s == 0)) {
                return Err("a size that varies is larger than the bound, or zero".into());
            }
        }
        Ok(prefixes([p, samples[0], samples[1]].map(|ty| &ty.shape)))
    }

    /// An operand in the new module. Within a region that is the same at all sizes nothing is asked of the other sample.
    fn operand(&mut self, p: Value, s: Value, o: Option<Value>) -> Result<Laid> {
        let constant = |arena: &Arena, v: Value| match arena.values[v.0 as usize].def {
            Def::Constant(id) => Some(id),
            _ => None,
        };
        let ids = (constant(self.bound, p), constant(self.sample, s));
        let (Some(p_id), Some(s_id)) = ids else {
            return match self.pairs.get(&p) {
                Some(pair) if pair.0 == s && o.is_none_or(|o| pair.1 == o) => Ok(self.laid[&p].clone()),
                _ => Err("what it is computed from depends on the size".into()),
            };
        };
        let bound = &self.bound.constants[p_id as usize];
        let sample = &self.sample.constants[s_id as usize];
        let Some(o) = o else {
            let layout =
                prefixes([self.bound.ty(p), self.sample.ty(s), self.sample.ty(s)].map(|ty| &ty.shape));
            return match bound == sample {
                true => Ok(Laid { v: self.constant(p, bound), layout }),
                false => Err("a region depends on the size".into()),
            };
        };
        let Some(o_id) = constant(self.other, o) else {
            return Err("what it is computed from depends on the size".into());
        };
        let other = &self.other.constants[o_id as usize];
        let mut layout = self.default(p, s, o)?;
        let ty = self.bound.ty(p).clone();
        let is_same = bound == sample && bound == other;
        let v = match (bound, sample, other) {
            (Constant::Splat(a), Constant::Splat(b), Constant::Splat(c)) => {
                layout = layout.iter().map(|d| Dim { even: true, ..d.clone() }).collect();
                if is_same {
                    self.b.splat(ty, a.clone())
                } else {
                    let scalar = self.scalar(ty.dtype, [a, b, c])?;
                    self.b.full(scalar, &ty.shape)
                }
            }
            (Constant::Dense(a), ..) if is_same => self.b.dense(ty, a.clone()),
            _ => self.table([p_id, s_id, o_id], &ty, &layout)?,
        };
        Ok(Laid { v, layout })
    }

    /// A constant that is the same at all sizes.
    fn constant(&self, p: Value, of: &Constant) -> Value {
        let ty = self.bound.ty(p).clone();
        match of {
            Constant::Splat(bytes) => self.b.splat(ty, bytes.clone()),
            Constant::Dense(bytes) => self.b.dense(ty, bytes.clone()),
        }
    }

    /// A constant of many elements that differ: they are numbers, each.
    fn table(&mut self, ids: [u32; 3], ty: &TensorType, layout: &[Dim]) -> Result<Value> {
        let numel = layout.iter().map(Dim::size).product::<i64>();
        if ty.dtype.is_complex() || numel > MOST_IN_TABLE {
            return Err("a table of constants depends on the size".into());
        }
        let at = match self.tables.get(&ids) {
            Some(&known) => known,
            None => {
                let at = self.numbers.len();
                let arenas = [self.bound, self.sample, self.other];
                let of: [&Constant; 3] = std::array::from_fn(|i| &arenas[i].constants[ids[i] as usize]);
                for place in 0..numel {
                    let bound = of[0].number(ty.dtype, place);
                    let in_sample = |i: usize| {
                        // Where it is in the smaller one, if it is.
                        let (mut rest, mut own, mut step) = (place, Some(0), 1);
                        for dim in layout.iter().rev() {
                            let at = rest % dim.size();
                            rest /= dim.size();
                            own = own.filter(|_| at < dim.sizes()[i]).map(|before| before + at * step);
                            step *= dim.sizes()[i];
                        }
                        own.map_or(bound, |own| of[i].number(ty.dtype, own))
                    };
                    self.numbers.push([bound, in_sample(1), in_sample(2)]);
                }
                self.tables.insert(ids, at);
                at
            }
        };
        let Some(all) = self.vector else { return Err("a table of constants depends on the size".into()) };
        let numbers = self.b.slice_dim(all, 0, at as i64, at as i64 + numel, 1);
        Ok(self.b.reshape(self.typed(numbers, ty.dtype), &ty.shape))
    }

    /// Numbers as what they stand for.
    fn typed(&self, n: Value, dtype: DType) -> Value {
        if !dtype.is_float() {
            return self.b.convert(n, dtype);
        }
        let bits = match dtype.size_bytes() {
            1 => DType::S8,
            2 => DType::S16,
            4 => DType::S32,
            _ => DType::S64,
        };
        self.b.bitcast_convert(self.b.convert(n, bits), dtype)
    }

    /// A scalar whose bytes differ.
    fn scalar(&mut self, dtype: DType, bytes: [&[u8]; 3]) -> Result<Value> {
        if dtype.is_complex() {
            let part = dtype.real();
            let half = part.size_bytes();
            let re = self.scalar(part, bytes.map(|own| &own[..half]))?;
            let im = self.scalar(part, bytes.map(|own| &own[half..]))?;
            return Ok(self.b.complex(re, im));
        }
        if dtype == DType::Pred {
            return Err(format!("a constant of type {dtype} depends on the size"));
        }
        let n = self.number(bytes.map(|own| wide(dtype, own)));
        Ok(self.typed(n, dtype))
    }

    /// A number (0-d s64).
    fn number(&mut self, of: Three) -> Value {
        if !layout::varies(of) {
            return self.b.scalar_i64(DType::S64, of[0]);
        }
        if let Some(&known) = self.known.given.get(&of) {
            return known;
        }
        let Some(all) = self.vector else { return self.b.scalar_i64(DType::S64, of[0]) };
        let numbers = &mut self.numbers;
        let at = *self.numbered.entry(of).or_insert_with(|| {
            numbers.push(of);
            numbers.len() - 1
        });
        let n = self.b.index_dim(all, 0, at as i64);
        self.known.given.insert(of, n);
        n
    }

    /// Which places of a dimension are used (pred, 1-d).
    fn mask(&mut self, dim: &Dim) -> Value {
        if let Some(&known) = self.known.masks.get(&dim.factors) {
            return known;
        }
        let size = dim.size();
        let ty = TensorType::new(index_type(size), [size].as_slice());
        let place = self.b.iota(ty.clone(), 0);
        let mut mask = None;
        let mut inside = size;
        for &f in dim.factors.iter().filter(|_| size > 0) {
            inside /= f.size;
            if !f.varies() {
                continue;
            }
            let at = self.coordinate(place, size, f.size, inside);
            let used = self.number(f.three());
            let used = self.b.full(self.b.convert(used, ty.dtype), &ty.shape);
            let own = self.b.lt(at, used);
            mask = Some(mask.map_or(own, |m| self.b.and(m, own)));
        }
        let mask = mask.unwrap_or_else(|| self.b.full(self.b.scalar_bool(true), &ty.shape));
        self.known.masks.insert(dim.factors.clone(), mask);
        mask
    }

    /// The place within a factor of `n` places, with `inside` elements each, of places among `all`.
    fn coordinate(&self, place: Value, all: i64, n: i64, inside: i64) -> Value {
        let (b, ty) = (&self.b, self.b.ty(place));
        let constant = |x: i64| b.full(b.scalar_i64(ty.dtype, x), &ty.shape);
        let at = if inside == 1 { place } else { b.divide(place, constant(inside)) };
        if n * inside == all { at } else { b.remainder(at, constant(n)) }
    }

    /// A value with `fill` (0-d) in the places that are not used, in some of its dimensions.
    fn masked(&mut self, x: &Laid, dims: &[usize], fill: Value) -> Value {
        let of = |d: usize| x.layout[d].varies() && dims.contains(&d);
        let key: Vec<Option<Factors>> =
            (0..x.layout.len()).map(|d| of(d).then(|| x.layout[d].factors.clone())).collect();
        let is_done =
            |known: &[Option<Factors>]| key.iter().zip(known).all(|(own, had)| own.is_none() || own == had);
        let had = self.known.zeros.get(&x.v).is_some_and(|known| is_done(known) && self.is_zero(fill));
        if had || key.iter().all(Option::is_none) {
            return x.v;
        }
        if self.is_zero(fill) {
            self.wanted.insert((x.v, key.clone()));
        }
        let key = (x.v, key, fill);
        if let Some(&known) = self.known.masked.get(&key) {
            return known;
        }
        if let Some(v) = self.masked_before(x, dims, fill) {
            self.known.masked.insert(key, v);
            return v;
        }
        let shape = self.b.shape(x.v);
        let mut mask: Option<Value> = None;
        for d in (0..x.layout.len()).filter(|&d| of(d)) {
            let own = self.mask(&x.layout[d]);
            let own = self.b.broadcast_in_dim(own, &shape, &[d as i64]);
            mask = Some(mask.map_or(own, |m| self.b.and(m, own)));
        }
        let Some(mask) = mask else { return x.v };
        let v = self.b.select(mask, x.v, self.b.full(fill, &shape));
        self.known.masked.insert(key, v);
        v
    }

    /// The same of a view, made of what it is a view of.
    fn masked_before(&mut self, x: &Laid, dims: &[usize], fill: Value) -> Option<Value> {
        if let Some((Op::Transpose(order), from)) = self.b.rearranged(x.v) {
            let mut layout = x.layout.clone();
            for (own, &d) in x.layout.iter().zip(&order) {
                layout[d as usize] = own.clone();
            }
            let dims: Vec<usize> = dims.iter().map(|&d| order[d] as usize).collect();
            let before = self.masked(&Laid { v: from, layout }, &dims, fill);
            return Some(if before == from { x.v } else { self.b.transpose(before, &order) });
        }
        let View { from, layout, op } = self.known.views.get(&x.v)?.clone();
        if layout != x.layout {
            return None;
        }
        let all: Vec<usize> = (0..from.layout.len()).collect();
        let before = self.masked(&from, &all, fill);
        if before == from.v {
            return Some(x.v);
        }
        Some(self.b.copied(op, &[before], &[self.b.ty(x.v)], &[])[0])
    }

    /// Notes that a value is another one, seen otherwise, with the same places in use.
    fn is_view(&mut self, x: &Laid, from: &Laid, op: Op) {
        if x.v != from.v && x.varies() {
            self.known.views.insert(x.v, View { from: from.clone(), layout: x.layout.clone(), op });
        }
    }

    /// A value with zeros in the places that are not used in these dimensions.
    fn zeroed(&mut self, x: &Laid, dims: &[usize]) -> Value {
        let zero = self.b.scalar_i64(self.b.dtype(x.v), 0);
        self.masked(x, dims, zero)
    }

    /// Notes that a value, which is early to be zero where it is not in use, is so.
    fn note_zeros(&mut self, p: Value, x: &Laid) {
        let Some(dims) = self.early.get(&p) else { return };
        let key = x.layout.iter().enumerate().map(|(d, dim)| dims.contains(&d).then(|| dim.factors.clone()));
        self.known.zeros.insert(x.v, key.collect());
    }

    fn is_zero(&self, scalar: Value) -> bool {
        self.b.constant_bytes(scalar).is_some_and(|bytes| bytes.iter().all(|&byte| byte == 0))
    }

    /// For each of the places `to`, which of the places `from` has the same element (1-d).
    fn places(&mut self, from: &[Factor], to: &[Factor]) -> Value {
        let product = |factors: &[Factor]| factors.iter().map(|f| f.size).product::<i64>();
        let (all, most) = (product(to), product(to).max(product(from)));
        let ty = TensorType::new(index_type(most), [all].as_slice());
        let place = self.b.iota(ty.clone(), 0);
        // The number of the element among those in use.
        let mut rank = self.b.full(self.b.scalar_i64(ty.dtype, 0), &ty.shape);
        let mut inside = all;
        for &f in to {
            inside /= f.size;
            let at = self.coordinate(place, all, f.size, inside);
            let used = self.number(f.three());
            let used = self.b.full(self.b.convert(used, ty.dtype), &ty.shape);
            rank = self.b.add(self.b.multiply(rank, used), at);
        }
        let mut found = self.b.full(self.b.scalar_i64(ty.dtype, 0), &ty.shape);
        let mut inside = 1;
        for (i, &f) in from.iter().enumerate().rev() {
            let used = self.number(f.three());
            let used = self.b.full(self.b.convert(used, ty.dtype), &ty.shape);
            let at = if i == 0 { rank } else { self.b.remainder(rank, used) };
            rank = self.b.divide(rank, used);
            let step = self.b.full(self.b.scalar_i64(ty.dtype, inside), &ty.shape);
            found = self.b.add(found, self.b.multiply(at, step));
            inside *= f.size;
        }
        found
    }

    /// The same value in another layout of dimension `d`.
    fn relaid(&mut self, x: Laid, d: usize, to: &Dim) -> Result<Laid> {
        let own = &x.layout[d];
        if own.factors == to.factors || own.even || own.size() == 0 {
            let mut layout = x.layout;
            layout[d].factors = to.factors.clone();
            return Ok(Laid { v: x.v, layout });
        }
        if own.sizes() != to.sizes() {
            return Err("sizes that vary do not fit together".into());
        }
        let index = self.places(&own.factors, &to.factors);
        let v = self.b.take_dim(x.v, index, d as i64);
        let mut layout = x.layout;
        layout[d].factors = to.factors.clone();
        Ok(Laid { v, layout })
    }

    /// The same value with the used places first in some dimensions.
    fn prefixed(&mut self, mut x: Laid, which: impl Fn(usize) -> bool) -> Result<Laid> {
        for d in (0..x.layout.len()).filter(|&d| which(d)) {
            if !x.layout[d].is_prefix() {
                let to = x.layout[d].to_prefix();
                x = self.relaid(x, d, &to)?;
            }
        }
        Ok(x)
    }

    /// A value with its elements where those of a tensor with such dimensions are.
    fn in_memory(&mut self, x: Laid, to: &Factors) -> Result<Value> {
        let own = merged(x.layout.iter().flat_map(|d| d.factors.iter().copied()));
        if own == *to || x.layout.iter().all(|d| d.even) || x.layout.iter().any(|d| d.size() == 0) {
            return Ok(x.v);
        }
        let count = |list: &[Factor]| list.iter().fold([1; 3], |all, f| each(all, f.three(), |a, b| a * b));
        if count(&own) != count(to) {
            return Err("a result lies in memory otherwise than it is made".into());
        }
        let shape = self.b.shape(x.v);
        let index = self.places(&own, to);
        let found = self.b.take_dim(self.b.reshape(x.v, &[count(&own)[0]]), index, 0);
        Ok(self.b.reshape(found, &shape))
    }

    /// Values of one shape, laid alike.
    fn alike(&mut self, mut xs: Vec<Laid>) -> Result<Vec<Laid>> {
        for d in 0..xs.first().map_or(0, |x| x.layout.len()) {
            let firm = xs.iter().find(|x| !x.layout[d].even).unwrap_or(&xs[0]).layout[d].clone();
            for x in &mut xs {
                *x = self.relaid(x.clone(), d, &firm)?;
            }
        }
        Ok(xs)
    }

    /// Two values of which these dimensions are laid alike.
    fn paired(&mut self, (a, da): (Laid, usize), (b, db): (Laid, usize)) -> Result<(Laid, Laid)> {
        if a.layout[da].even {
            let to = b.layout[db].clone();
            return Ok((self.relaid(a, da, &to)?, b));
        }
        let to = a.layout[da].clone();
        Ok((a, self.relaid(b, db, &to)?))
    }

    /// A reshape to these sizes.
    fn reshaped(&mut self, x: Laid, shapes: [&Dims; 3]) -> Result<Laid> {
        let bound = shapes[0];
        if x.layout.iter().all(|d| d.even) || bound.contains(&0) {
            let layout = threes(shapes).map(Dim::even).collect();
            return Ok(Laid { v: self.b.reshape(x.v, bound), layout });
        }
        let flat = merged(x.layout.iter().flat_map(|d| d.factors.iter().copied()));
        if let Some(dims) = layout::split(&flat, shapes) {
            let layout = dims.into_iter().map(|factors| Dim { factors, even: false }).collect();
            let made = Laid { v: self.b.reshape(x.v, bound), layout };
            self.is_view(&made, &x, Op::Reshape);
            return Ok(made);
        }
        let layout = prefixes(shapes);
        let to = merged(layout.iter().flat_map(|d| d.factors.iter().copied()));
        let all: i64 = bound.iter().product();
        let index = self.places(&flat, &to);
        let v = self.b.take_dim(self.b.reshape(x.v, &[all]), index, 0);
        Ok(Laid { v: self.b.reshape(v, bound), layout })
    }
}

impl Constant {
    /// An element, as [`wide`] gives it.
    fn number(&self, dtype: DType, at: i64) -> i64 {
        let item = dtype.size_bytes();
        match self {
            Constant::Splat(bytes) => wide(dtype, bytes),
            Constant::Dense(bytes) => wide(dtype, &bytes[at as usize * item..][..item]),
        }
    }
}

/// The number with these bytes; of a float, its bits.
fn wide(dtype: DType, bytes: &[u8]) -> i64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    let n = i64::from_le_bytes(all);
    let unused = 64 - 8 * bytes.len() as u32;
    if dtype.is_signed() { n << unused >> unused } else { n }
}

/// What numbers places among so many.
fn index_type(places: i64) -> DType {
    if places <= i64::from(i32::MAX) { DType::S32 } else { DType::S64 }
}
