//! A window that fails as a whole, op by op: what depends on the op that fails, fails with that op's name and line, and
//! everything else is computed.

use crate::buffers::{Buffers, execute};
use crate::error::{self, Error, Result};
use crate::graph::{Given, Graph, Source, Task, failed_check};
use crate::inst::Inst;
use crate::ops::{OpRef, Ops, PRODUCED};
use crate::program::Compiler;
use crate::site::Site;
use crate::spread::Spread;
use oxitorch_pjrt as pjrt;
use std::sync::Arc;

/// A value, or why there is none.
pub(crate) type Got = Result<Buffers>;

/// What running op by op gave.
#[derive(Default)]
pub(crate) struct Isolated {
    /// The results of the window.
    pub(crate) outputs: Vec<Got>,
    /// The first check that failed, and the Python line of its op.
    pub(crate) check: Option<(Error, Site)>,
    /// Programs that were launched.
    pub(crate) launches: u64,
}

/// Runs the ops of a graph one by one on its inputs. `may_run` is asked before each about the bytes of its results.
pub(crate) fn run(
    compiler: &Compiler,
    task: &Task,
    inputs: Vec<Got>,
    may_run: impl Fn(u64) -> Result<()>,
) -> Isolated {
    let graph = &*task.graph;
    let mut values = Values { uses: uses(graph), produced: Vec::new(), held: 0 };
    let mut out = Isolated::default();
    for op in graph.ops.iter() {
        let (inst, own, site) = (op.inst, op.operands, op.site);
        let value = |&code: &u32| match code & PRODUCED {
            0 => inputs[code as usize].clone(),
            _ => values.get(code & !PRODUCED, inst.name()),
        };
        let mut single = single(graph, &op);
        // Offsets that the program was given come last.
        let offsets = inputs.last().filter(|_| !single.given.is_empty()).cloned();
        let args = own.iter().map(value).chain(offsets).collect::<Result<Vec<_>>>();
        let results = args.and_then(|args| {
            single.spread = spread(graph, &single, &args)?;
            let single = Task { graph: Arc::new(single), device: task.device };
            let results = may_run(values.held + inst.bytes).and_then(|()| one(compiler, &single, &args));
            out.launches += u64::from(results.is_ok());
            results.map_err(|e| e.at(site))
        });
        for &code in own.iter().filter(|&&code| code & PRODUCED != 0) {
            values.used(code & !PRODUCED);
        }
        match results {
            Ok(buffers) => {
                let mut buffers = buffers.into_iter();
                let mut next = || buffers.next().map(Ok);
                inst.outputs.iter().for_each(|o| values.push(o.as_ref().and_then(|_| next())));
                let failed = buffers.next().and_then(|first| failed(inst, &first));
                out.check = out.check.or(failed.map(|e| (e, site)));
            }
            Err(e) => inst.outputs.iter().for_each(|_| values.push(Some(Err(e.clone())))),
        }
    }
    out.outputs = graph.live.iter().map(|&i| values.get(i, "a result")).collect();
    out
}

/// The results of ops, for as long as they are wanted.
struct Values {
    /// How often each is still wanted.
    uses: Vec<u32>,
    produced: Vec<Option<Got>>,
    /// Bytes of those.
    held: u64,
}

impl Values {
    fn push(&mut self, value: Option<Got>) {
        let wanted = self.uses[self.produced.len()] > 0;
        let value = value.filter(|_| wanted);
        self.held += bytes(&value);
        self.produced.push(value);
    }

    fn get(&self, i: u32, name: &str) -> Got {
        let missing = || Err(Error::runtime(format!("{name}: an operand has no value; please report this")));
        self.produced[i as usize].clone().unwrap_or_else(missing)
    }

    /// It was used once; after the last time its memory is let go.
    fn used(&mut self, i: u32) {
        let i = i as usize;
        self.uses[i] -= 1;
        if self.uses[i] == 0 {
            self.held -= bytes(&self.produced[i].take());
        }
    }
}

fn bytes(value: &Option<Got>) -> u64 {
    value.as_ref().and_then(|v| v.as_ref().ok()).map_or(0, Buffers::size_bytes)
}

/// How often each result is wanted.
fn uses(graph: &Graph) -> Vec<u32> {
    let mut uses = vec![0; graph.ops.results()];
    let operands =
        graph.ops.operands.iter().filter(|&code| code & PRODUCED != 0).map(|code| code & !PRODUCED);
    operands.chain(graph.live.iter().copied()).for_each(|i| uses[i as usize] += 1);
    uses
}

/// The graph of one op, with all its results.
fn single(graph: &Graph, op: &OpRef<'_>) -> Graph {
    let inst = op.inst;
    let mut ops = Ops::default();
    ops.push(op, 0..inst.operands.len() as u32);
    let (first, last) = (op.first_offset as u32, (op.first_offset + inst.offsets) as u32);
    let own = |g: &&Given| (first..last).contains(&g.place);
    let given = graph.given.iter().filter(own).map(|g| Given { place: g.place - first, ..*g });
    let given: Box<[Given]> = given.collect();
    let offsets = graph.inputs.last().filter(|_| !given.is_empty()).cloned();
    Graph {
        ops,
        inputs: inst.operands.iter().cloned().chain(offsets).collect(),
        given,
        donated: Default::default(),
        options: graph.options,
        spread: None,
        live: (0..inst.outputs.len() as u32).filter(|&o| inst.outputs[o as usize].is_some()).collect(),
        source: Source::default(),
        sample: None,
    }
}

/// How one op of a graph of several devices is spread over them: what comes in is cut as it is.
fn spread(graph: &Graph, single: &Graph, args: &[Buffers]) -> Result<Option<Arc<Spread>>> {
    let Some(whole) = &graph.spread else { return Ok(None) };
    let inputs =
        single.inputs.iter().zip(args).map(|(ty, arg)| (ty.clone(), arg.sharding().clone())).collect();
    let outputs = single.ops.insts[0].outputs.iter().flatten().map(|out| out.sharding.clone()).collect();
    Spread::new(&whole.devices, whole.how, inputs, outputs).map(Some)
}

/// The check of an op that has failed, by its number.
fn failed(inst: &Inst, first: &Buffers) -> Option<Error> {
    match failed_check(first) {
        Ok(failed) => inst.checks.get(failed?).map(|(kind, message)| Error::new(*kind, message)),
        Err(e) => Some(error::device(inst.name(), &e)),
    }
}

/// Runs one op to its end.
fn one(
    compiler: &Compiler,
    task: &Task,
    args: &[Buffers],
) -> Result<impl IntoIterator<Item = Buffers> + use<>> {
    let name = task.graph.ops.insts[0].name();
    let (loaded, _) = compiler.compile(name, task)?;
    let failed = |e: pjrt::Error| error::device(name, &e);
    let (spread, device) = (task.graph.spread.as_deref(), task.device as usize);
    let (results, _) = execute(&loaded, spread, device, args, &[], false).map_err(failed)?;
    results.iter().try_for_each(Buffers::wait).map_err(failed)?;
    Ok(results)
}
