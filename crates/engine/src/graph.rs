//! A window of recorded ops as one program, before anybody compiles it: its ops, its inputs and results, its module.

use crate::buffers::Buffers;
use crate::ending::Ended;
use crate::error::{Error, ErrorKind};
use crate::images;
use crate::inst::Inst;
use crate::ops::{Ops, PRODUCED};
use crate::shared::Shared;
use crate::site::Site;
use crate::spread::{How, Sharded, Spread};
use oxitorch_aten::args::Offset;
use oxitorch_aten::library;
use oxitorch_hlo::{
    ArgAttr, Builder, DType, InMemory, MemorySpace, Module, Outline, Sharding, TensorType, Unbounded, Value,
};
use oxitorch_pjrt as pjrt;
use smallvec::SmallVec;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Ops to be lowered as one program.
#[derive(Clone, Debug)]
pub(crate) struct Graph {
    pub(crate) ops: Ops,
    /// The types of the inputs. If offsets are [given](Graph::given), they are one more input at the end.
    pub(crate) inputs: Vec<TensorType>,
    /// The offsets that the program is given at its launch, by their places.
    pub(crate) given: Box<[Given]>,
    /// Inputs that nothing can see any more.
    pub(crate) donated: SmallVec<[u32; 4]>,
    /// Number of the user's compiler options.
    pub(crate) options: u32,
    /// Outputs, counted over all instances, that are results.
    pub(crate) live: SmallVec<[u32; 8]>,
    /// Of a program of several devices.
    pub(crate) spread: Option<Arc<Spread>>,
    /// Where the ops come from.
    pub(crate) source: Source,
    /// The same ops at another size, if this is a program for all sizes up to its own. Then the last input is the numbers
    /// that follow from the size.
    pub(crate) sample: Option<Arc<Sample>>,
}

/// A graph at another size.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) graph: Graph,
    /// How inputs and results lie in memory, where that is known.
    pub(crate) inputs: Vec<Option<InMemory>>,
    pub(crate) results: Vec<Option<InMemory>>,
}

/// An offset that a program is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Given {
    /// Its place among those of the ops.
    pub(crate) place: u32,
    /// Which of the program's numbers it is, but for `more`: offsets that keep their distance are one number.
    pub(crate) number: u32,
    /// By how much it is more than that number.
    pub(crate) more: i64,
}

/// Where an executable came from first, and how long that took.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin {
    /// The compiler.
    Compiled(Duration),
    /// A cache folder.
    Loaded(Duration),
}

/// Where the ops of a graph come from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    /// Why the window ended, and where.
    pub(crate) ended: Option<Ended>,
    /// Whether it is a part of a window that varies: it may never come again.
    pub(crate) varies: bool,
    /// Set when the executable is there, unless another program of this process has it.
    pub(crate) origin: OnceLock<Origin>,
}

/// A check of values.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    /// The error if it fails.
    pub(crate) kind: ErrorKind,
    pub(crate) message: String,
    /// Which op checks it.
    pub(crate) op: u32,
    /// The op's Python line.
    pub(crate) site: Site,
}

/// From what a program is made.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub(crate) graph: Arc<Graph>,
    pub(crate) device: i64,
}

impl Graph {
    /// The ops by name, views left out unless there is nothing else.
    pub(crate) fn name(&self) -> String {
        let ops: Vec<&str> = self.ops.insts.iter().map(|i| i.name()).collect();
        let real: Vec<&str> =
            ops.iter().copied().filter(|n| *n != "view" && *n != "copy_into_view").collect();
        let names = if real.is_empty() { &ops } else { &real };
        match names.as_slice() {
            [one] => (*one).to_owned(),
            [first, .., last] => format!("{first}..{last}"),
            [] => "empty".to_owned(),
        }
    }

    /// The graph of ops that take these inputs, and offsets as `given`: of one device, which overwrites nothing.
    pub(crate) fn plain(
        ops: Ops,
        mut inputs: Vec<TensorType>,
        given: Box<[Given]>,
        live: &[u32],
        options: u32,
    ) -> Graph {
        if !given.is_empty() {
            inputs.push(TensorType::new(DType::S64, [given.len() as i64].as_slice()));
        }
        let (donated, live) = (SmallVec::new(), live.into());
        let (spread, source, sample) = (None, Source::default(), None);
        Graph { ops, inputs, given, donated, options, live, spread, source, sample }
    }

    /// The program of this graph for all sizes up to its own: it takes so many numbers that follow from the size besides.
    pub(crate) fn for_sizes(&self, numbers: usize, sample: Graph) -> Graph {
        let numbers = TensorType::new(DType::S64, [numbers as i64].as_slice());
        let sample = Sample { graph: sample, inputs: Vec::new(), results: Vec::new() };
        Graph {
            ops: self.ops.clone(),
            inputs: self.inputs.iter().cloned().chain([numbers]).collect(),
            given: self.given.clone(),
            donated: SmallVec::new(),
            options: self.options,
            live: self.live.clone(),
            spread: None,
            source: Source::default(),
            sample: Some(Arc::new(sample)),
        }
    }

    /// The types of its results, as storages hold them.
    pub(crate) fn results(&self) -> Vec<TensorType> {
        let all: Vec<Option<&TensorType>> = self
            .ops
            .insts
            .iter()
            .flat_map(|inst| inst.results().map(|out| out.map(|out| &out.stored)))
            .collect();
        self.live.iter().filter_map(|&i| all[i as usize].cloned()).collect()
    }

    /// What is checked in it.
    pub(crate) fn checks(&self) -> Vec<Check> {
        let of = |(op, (inst, &site)): (u32, (&Shared<Inst>, &Site))| {
            let check = move |(kind, message): &(ErrorKind, String)| Check {
                kind: *kind,
                message: message.clone(),
                op,
                site,
            };
            inst.checks.iter().map(check).collect::<Vec<_>>()
        };
        (0..).zip(self.ops.insts.iter().zip(&self.ops.sites)).flat_map(of).collect()
    }

    /// The results that are kept in the memory of the host, by their places among the results. The devices of a mesh keep
    /// their own.
    pub(crate) fn offloaded(&self) -> SmallVec<[u32; 4]> {
        let is_kept = |inst: &Inst| inst.memory() == Some(MemorySpace::PinnedHost);
        if self.spread.is_some() || !self.ops.insts.iter().any(|inst| is_kept(inst)) {
            return SmallVec::new();
        }
        let made: Vec<bool> =
            self.ops.iter().flat_map(|op| op.results().map(move |_| is_kept(op.inst))).collect();
        (0..).zip(&self.live).filter(|(_, at)| made[**at as usize]).map(|(place, _)| place).collect()
    }

    /// The inputs that come in the memory of the host: what is offloaded is read by being reloaded, and not otherwise.
    pub(crate) fn reloaded(&self) -> SmallVec<[u32; 4]> {
        if self.spread.is_some() {
            return SmallVec::new();
        }
        let reloads = self.ops.iter().filter(|op| op.inst.memory() == Some(MemorySpace::Device));
        let mut found: SmallVec<[u32; 4]> = reloads
            .filter_map(|op| op.operands.first())
            .copied()
            .filter(|code| code & PRODUCED == 0)
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// The text of the module that computes the window.
    pub(crate) fn module(&self, platform: pjrt::Platform) -> Result<String, Error> {
        Ok(self.built(platform)?.to_text())
    }

    /// The module that computes the window; the location of what is made of an instance is its number.
    pub(crate) fn built(&self, platform: pjrt::Platform) -> Result<Module, Error> {
        let Some(sample) = &self.sample else { return self.lowered(platform) };
        let made = self.outline(platform)?.bounded(
            &sample.graph.outline(platform)?,
            &sample.inputs,
            &sample.results,
        );
        let mut module = made.map_err(|e| self.unbounded(&e).0)?.module;
        module.pair_donors();
        Ok(module)
    }

    /// The module of which one for all sizes up to the graph's own can be made.
    pub(crate) fn outline(&self, platform: pjrt::Platform) -> Result<Outline, Error> {
        // Behind the inputs are the numbers.
        let own = self.inputs.len() - usize::from(self.sample.is_some());
        let b = Builder::new();
        b.set_outline(true);
        let outputs = self.emit(&b, &self.inputs[..own], platform)?;
        Outline::finish(b, &outputs).map_err(|e| Error::runtime(e.to_string()))
    }

    /// Why it cannot be made: with the op and its line.
    pub(crate) fn unbounded(&self, e: &Unbounded) -> (Error, Site) {
        let at = e.location.map(|at| at as usize);
        let inst = at.and_then(|at| self.ops.insts.get(at));
        let site = at.and_then(|at| self.ops.sites.get(at)).copied().unwrap_or_default();
        let Some(inst) = inst else { return (Error::runtime(e.reason.clone()), site) };
        (Error::runtime(format!("{} ({}): {}", inst.name(), e.op, e.reason)), site)
    }

    /// The first op that another graph has not at its place, or the other one's if that has more: its name and line.
    pub(crate) fn differs(&self, other: &Graph) -> Option<(&'static str, Site)> {
        let ops = |graph: &Graph| -> Vec<(&'static str, Site)> {
            graph.ops.insts.iter().map(|inst| inst.name()).zip(graph.ops.sites.iter().copied()).collect()
        };
        let (own, others) = (ops(self), ops(other));
        let first = own.iter().zip(&others).position(|(a, b)| a.0 != b.0);
        let first = first.unwrap_or(own.len().min(others.len()));
        own.get(first).or(others.get(first)).copied()
    }

    fn lowered(&self, platform: pjrt::Platform) -> Result<Module, Error> {
        let b = Builder::new();
        let outputs = self.emit(&b, &self.inputs, platform)?;
        let failed = |e: oxitorch_hlo::Error| Error::runtime(e.to_string());
        let mut module = b.finish(&outputs).map_err(failed)?;
        if self.uses_host_memory(platform) {
            self.offloaded().iter().try_for_each(|&i| module.leave_on_host(i as usize)).map_err(failed)?;
        }
        if let Some(spread) = self.split() {
            // Behind the results are checks: numbers.
            let own = spread.outputs.iter().chain(std::iter::repeat(&None));
            let shardings: Vec<Arc<Sharding>> =
                own.take(outputs.len()).map(|own: &Sharded| spread.sharding(own)).collect();
            module.set_output_shardings(shardings).map_err(failed)?;
        }
        module.pair_donors();
        if platform == pjrt::Platform::Cpu {
            module.read_before_overwriting(library::TARGET);
        }
        Ok(module)
    }

    /// Whether values may be in the platform's memory on the host.
    fn uses_host_memory(&self, platform: pjrt::Platform) -> bool {
        has_host_memory(platform) && self.spread.is_none()
    }

    /// If the compiler splits it over several devices.
    pub(crate) fn split(&self) -> Option<&Spread> {
        self.spread.as_deref().filter(|s| s.how == How::Partitions)
    }

    /// The ops for inputs of these types; gives the results.
    fn emit(&self, b: &Builder, types: &[TensorType], platform: pjrt::Platform) -> Result<Vec<Value>, Error> {
        // XLA's CPU compiler takes bfloat16 through float32 wherever it goes; others move it as it is.
        b.move_narrow_as_integers(platform == pjrt::Platform::Cpu);
        b.keep_writes_apart(platform == pjrt::Platform::Cpu);
        b.order_by_values(platform == pjrt::Platform::Cpu);
        b.keep_memory_order(platform == pjrt::Platform::Cpu);
        b.expand_log_plus_one(platform == pjrt::Platform::Cpu);
        // Slices of a tensor that is split over devices are on some of them.
        b.vectorize_reductions(platform == pjrt::Platform::Cpu && self.split().is_none());
        b.prefer_channels_last(
            platform == pjrt::Platform::Cpu && images::stay_within(&self.ops, &self.inputs, &self.live),
        );
        let on_host = self.uses_host_memory(platform);
        b.set_name(&self.name());
        let inputs: Vec<Value> = types.iter().map(|ty| b.param(ty.clone())).collect();
        let reloaded = if on_host { self.reloaded() } else { SmallVec::new() };
        for &i in &reloaded {
            b.param_attr(inputs[i as usize], ArgAttr::Memory(MemorySpace::PinnedHost));
        }
        for i in self.donated.iter().filter(|i| !reloaded.contains(i)) {
            b.param_attr(inputs[*i as usize], ArgAttr::Donor);
        }
        if let Some(spread) = self.split() {
            b.set_mesh(&spread.devices.mesh);
            for (&v, own) in inputs.iter().zip(&spread.inputs) {
                b.param_attr(v, ArgAttr::Sharding(spread.sharding(own)));
            }
        }
        let offsets = self.offsets(b, &inputs);
        let mut produced: Vec<Option<Value>> = Vec::new();
        let mut checks: Vec<Value> = Vec::new();
        // Results on the host. One that is back on the device in the same program never leaves it: XLA would copy it out and
        // back at once, and need the memory of both (docs/memory.md).
        let mut on_host_now: Vec<bool> = Vec::new();
        for op in self.ops.iter() {
            let inst = op.inst;
            let moves = match inst.memory() {
                Some(MemorySpace::PinnedHost) => op.results().any(|at| self.live.contains(&(at as u32))),
                Some(MemorySpace::Device) => op
                    .operands
                    .first()
                    .is_some_and(|&code| code & PRODUCED == 0 || on_host_now[(code & !PRODUCED) as usize]),
                None => false,
            };
            b.use_host_memory(on_host && moves);
            on_host_now.extend(op.results().map(|_| moves && inst.memory() == Some(MemorySpace::PinnedHost)));
            b.set_location(Some(op.at as u32));
            let value = |&c: &u32| match c & PRODUCED {
                0 => Some(inputs[c as usize]),
                _ => produced[(c & !PRODUCED) as usize],
            };
            let operands: Option<Vec<Value>> = op.operands.iter().map(value).collect();
            let operands = operands
                .ok_or_else(|| Error::runtime(format!("{}: an operand has no value", inst.name())))?;
            let offsets = &offsets[op.first_offset..][..op.offsets.len()];
            let emitted = inst
                .emit(b, &operands, offsets)
                .map_err(|e| Error::runtime(format!("{}: {e}", inst.name())))?;
            produced.extend(emitted.outputs);
            checks.extend(emitted.checks);
        }
        let mut outputs: Vec<Value> = self.live.iter().filter_map(|&i| produced[i as usize]).collect();
        outputs.extend(first_failed(b, &checks));
        Ok(outputs)
    }

    /// The offsets of all ops: constants, but for those that the program is given.
    fn offsets(&self, b: &Builder, inputs: &[Value]) -> Vec<Offset> {
        let mut offsets: Vec<Offset> = self.ops.offsets.iter().map(|&n| Offset::Known(n)).collect();
        let (Some(&all), false) = (inputs.last(), self.given.is_empty()) else { return offsets };
        let mut numbers: Vec<Option<Value>> = vec![None; b.dim(all, 0) as usize];
        for g in &self.given {
            let number = &mut numbers[g.number as usize];
            let number = *number.get_or_insert_with(|| b.index_dim(all, 0, i64::from(g.number)));
            let more = || b.add(number, b.scalar_i64(DType::S64, g.more));
            offsets[g.place as usize] = Offset::Given(if g.more == 0 { number } else { more() });
        }
        offsets
    }
}

/// Whether the programs of a platform have a memory space of the host's. Where the device's memory is the host's, they do not.
pub(crate) fn has_host_memory(platform: pjrt::Platform) -> bool {
    platform != pjrt::Platform::Cpu
}

/// The number of the first of these (0-d pred) that is false, or -1; nothing if there are none.
fn first_failed(b: &Builder, checks: &[Value]) -> Option<Value> {
    let number = |n: i64| b.scalar_i64(DType::S32, n);
    let numbered = checks.iter().enumerate().rev();
    let first = |later, (n, &ok): (usize, &Value)| b.select(ok, later, number(n as i64));
    (!checks.is_empty()).then(|| numbered.fold(number(-1), first))
}

/// What that said: the number, if a check has failed. Waits for the device.
pub(crate) fn failed_check(first: &Buffers) -> pjrt::Result<Option<usize>> {
    let mut number = [0; 4];
    first.to_host(&TensorType::scalar(DType::S32), &mut number)?;
    Ok(usize::try_from(i32::from_le_bytes(number)).ok())
}
