//! Devices that are not there: programs are recorded, cut and given inputs to overwrite as for devices of that kind, and
//! nothing is compiled or computed. Values have types and no data; who reads one gets a number that was chosen before.
//!
//! What was asked of such a device is kept by training step, so that somebody else can compile the programs ahead of
//! time and say what the steps would take.

use crate::error::{Error, Result};
use crate::events;
use crate::executor::{Asked, Executor, GroupTask, Launch, Old, Pad, Written};
use crate::explain::Explainer;
use crate::graphs::Recorded;
use crate::lanes::Turn;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::program::{Compiler, Program};
use crate::roles::{Ends, Roles};
use crate::site::{Site, describe};
use crate::spread::Sharded;
use crate::target::AbsentDevice;
use crate::undonated::Undonated;
use crate::value::{Slot, State, Value};
use oxitorch_capture::{
    self as capture, Beside, Capture, Exchanged, FellBack, GroupCall, Modules, Moved, Role,
};
use oxitorch_hlo::{DType, TensorType};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A device that is not there, and what was asked of it.
#[derive(Debug)]
pub struct Absent {
    device: AbsentDevice,
    /// Without a bound.
    memory: &'static Memory,
    metrics: Arc<Metrics>,
    /// Whether somebody wanted to know its name or memory: then what was asked of it may depend on that.
    described: AtomicBool,
    log: Mutex<Log>,
}

/// What was asked of the device. Steps are counted from 0; what comes before the first is part of it.
#[derive(Debug, Default)]
struct Log {
    /// Steps that have ended.
    steps: u64,
    /// Steps of each optimizer.
    optimizers: FxHashMap<u64, u64>,
    /// The optimizer whose step is still to be launched.
    waiting: Option<u64>,
    /// Whether somebody else says when a step ends, and optimizers do not.
    marked: bool,
    programs: Vec<Runs>,
    /// Number and bytes of the reads of a line in a step.
    reads: BTreeMap<(u64, u32), (u64, u64)>,
    /// Number and bytes of the copies to the device.
    writes: BTreeMap<(u64, u32), (u64, u64)>,
    /// Number of the ops of a line in a step that ran on the CPU.
    fallbacks: BTreeMap<(u64, u32, String), u64>,
    /// The step and line of each collective.
    exchanges: Vec<(u64, Site, Asked)>,
    /// Those of several processes.
    group_calls: Vec<(Site, GroupCall)>,
    roles: Roles,
    undonated: Undonated,
}

/// The launches of one program.
#[derive(Debug)]
struct Runs {
    program: Arc<Program>,
    /// Step and launches in it.
    launches: Vec<(u64, u64)>,
    /// The most bytes that were in use besides its inputs when it was launched.
    beside: u64,
    /// The Python lines that made its inputs, at the first launch.
    inputs: Vec<Site>,
    /// What went in and came out, at the last launch.
    ends: Ends,
    /// The tensors that `beside` is of.
    tensors_beside: Vec<Beside>,
}

/// Copies from the host of so many bytes are kept: they are lengths, indices and flags, and scripts read them back, as
/// `DistributedDataParallel` does with the shapes of all parameters.
const KEPT: usize = 1 << 20;

impl Absent {
    /// A device of which nothing was asked yet.
    pub(crate) fn new(device: AbsentDevice, memory: &'static Memory, metrics: Arc<Metrics>) -> Absent {
        let log = Log { marked: device.marked, ..Log::default() };
        Absent { device, memory, metrics, described: AtomicBool::new(false), log: Mutex::new(log) }
    }

    /// The program wants to know the device's name or memory.
    pub fn describe(&self) {
        self.described.store(true, Relaxed);
    }

    /// Says what the value of a storage is for: a role and a name.
    pub fn label(&self, slot: &Slot, role: Role, name: &str) {
        slot.look(|value| self.log.lock().roles.label(value, role, name));
    }

    /// What the host reads from a value that nobody has computed.
    fn fill(&self, dtype: DType, out: &mut [u8]) {
        let element = number(dtype, self.device.reads_as);
        if element.iter().all(|b| *b == 0) {
            out.fill(0);
        } else {
            out.chunks_mut(element.len()).for_each(|o| o.copy_from_slice(&element[..o.len()]));
        }
    }

    /// Does to values and memory what a launch does.
    fn take(&self, log: &mut Log, launch: &Launch) {
        launch.program.donated.iter().for_each(|&i| _ = launch.inputs[i as usize].donate());
        for (place, value) in (0..).zip(&launch.outputs) {
            if !launch.program.offloaded.contains(&place) {
                self.memory.charge(value.bytes(), &value.charge);
            }
            *value.state.lock() = State::Absent(None);
        }
        log.roles.made(&launch.outputs, log.steps);
    }

    /// An op of this line runs on the CPU.
    pub(crate) fn fell_back(&self, op: &str, site: Site) {
        let mut log = self.log.lock();
        let step = log.steps;
        *log.fallbacks.entry((step, site.0, op.to_owned())).or_default() += 1;
    }

    /// An optimizer has made a step; whether it is launched, or will be.
    pub fn stepped(&self, optimizer: u64, launched: bool) {
        let mut log = self.log.lock();
        match launched {
            true => log.stepped(optimizer),
            false => log.waiting = Some(optimizer),
        }
    }

    /// A step ends here, whatever optimizers do from now on.
    pub fn marked(&self) {
        let mut log = self.log.lock();
        log.steps += 1;
        log.marked = true;
    }

    /// Whether the next step of an optimizer may be the last that is of interest.
    pub(crate) fn is_in_last_step(&self) -> bool {
        self.log.lock().steps + 1 >= self.device.steps
    }

    /// Whether as many steps have ended as are of interest.
    pub fn is_over(&self) -> bool {
        self.log.lock().steps >= self.device.steps
    }

    /// All of it, and the text of each program by its id.
    pub(crate) fn captured(&self, compiler: &Compiler, explainer: &Explainer) -> (Capture, Modules) {
        let log = self.log.lock();
        let recorded = log.programs.iter().filter_map(|runs| {
            let recorded = compiler.recorded(&runs.program)?;
            let (program, text) = log.program(runs, recorded);
            let program = capture::Program { why: explainer.of(&runs.program), ..program };
            Some((program, text))
        });
        let (programs, texts): (Vec<_>, Vec<_>) = recorded.unzip();
        let modules = programs.iter().map(|p| p.id.clone()).zip(texts).collect();
        let fell_back = |((step, site, op), count): (&(u64, u32, String), &u64)| FellBack {
            step: *step,
            line: describe(Site(*site)),
            op: op.clone(),
            count: *count,
        };
        let capture = Capture {
            described: self.described.load(Relaxed),
            steps: log.steps,
            programs,
            reads: moved(&log.reads),
            writes: moved(&log.writes),
            fallbacks: log.fallbacks.iter().map(fell_back).collect(),
            exchanges: log.exchanges.iter().map(exchanged).collect(),
            group_calls: log.group_calls.iter().map(group_call).collect(),
            resident_peak_bytes: self.memory.bytes().peak,
            ..Capture::default()
        };
        (capture, modules)
    }
}

impl Executor for Absent {
    fn stepped(&self) {
        let mut log = self.log.lock();
        if let Some(optimizer) = log.waiting.take() {
            log.stepped(optimizer);
        }
    }

    /// Does what a launch does to values and memory, and computes nothing.
    fn launch(&self, launch: Launch, _: bool) {
        self.metrics.count(&self.metrics.launches);
        let memory = self.memory;
        let size = |v: &Arc<Value>| {
            // What was offloaded is not on the device.
            if matches!(*v.state.lock(), State::Absent(_)) && v.charge.is_held() { v.bytes() } else { 0 }
        };
        let sizes: Vec<u64> = launch.inputs.iter().map(size).collect();
        let arguments: u64 = sizes.iter().sum();
        let beside = memory.bytes().current.saturating_sub(arguments);
        let mut ends = Ends::new(&launch.inputs, &launch.outputs);
        let mut log = self.log.lock();
        let step = log.steps;
        ends.step = step;
        log.undonated.launched(&launch, &sizes, step);
        let known = log.programs.iter().rposition(|r| Arc::ptr_eq(&r.program, &launch.program));
        let most = known.is_none_or(|i| log.programs[i].beside < beside);
        let named = if most { log.roles.beside(&launch.inputs, step) } else { Vec::new() };
        self.take(&mut log, &launch);
        let Some(known) = known else {
            let inputs = launch.inputs.iter().map(|v| v.site).collect();
            let program = launch.program.clone();
            let launches = vec![(step, 1)];
            log.programs.push(Runs { program, launches, beside, inputs, ends, tensors_beside: named });
            return;
        };
        let runs = &mut log.programs[known];
        runs.ends = ends;
        if most {
            (runs.beside, runs.tensors_beside) = (beside, named);
        }
        match runs.launches.last_mut() {
            Some((last, n)) if *last == step => *n += 1,
            _ => runs.launches.push((step, 1)),
        }
    }

    /// Keeps what was asked for. Its program is not one of a single device, so it is none of those that are captured.
    fn collective(&self, launch: Launch, asked: Asked) {
        launch.agreement.iter().for_each(|a| a.work.finish(Ok(())));
        let mut log = self.log.lock();
        let step = log.steps;
        log.exchanges.push((step, launch.first, asked));
        self.take(&mut log, &launch);
    }

    /// Runs a task whose data are known, with a group in which this process is alone; of others it keeps what was asked
    /// for.
    fn task(&self, mut recorded: GroupTask, _: Turn) {
        let made = match made(&mut recorded) {
            Ok(made) => made,
            Err(why) => return recorded.fail(&Error::runtime(why).at(recorded.site)),
        };
        let mut log = self.log.lock();
        let (step, call) = (log.steps, asked(&recorded, log.steps));
        log.group_calls.push((recorded.site, call));
        let results: Vec<Arc<Value>> = recorded.results().cloned().collect();
        for (written, known) in recorded.writes.iter().flatten().zip(made) {
            if let Old::Taken(old) = &written.old {
                old.donate();
            }
            self.memory.charge(written.value.bytes(), &written.value.charge);
            *written.value.state.lock() = State::Absent(known);
        }
        log.roles.made(&results, step);
        drop(log);
        recorded.work.finish(Ok(()));
    }

    fn pad(&self, pad: Pad) {
        let mut log = self.log.lock();
        let step = log.steps;
        self.memory.charge(pad.to.bytes(), &pad.to.charge);
        *pad.to.state.lock() = State::Absent(None);
        log.roles.uploaded(&pad.to, step);
    }

    fn upload(&self, ty: TensorType, _: Sharded, bytes: &[u8], _: bool) -> Result<Arc<Value>> {
        let site = events::current();
        let mut log = self.log.lock();
        let step = log.steps;
        let (n, sum) = log.writes.entry((step, site.0)).or_default();
        *n += 1;
        *sum += bytes.len() as u64;
        let state = State::Absent((bytes.len() <= KEPT).then(|| bytes.into()));
        let value = Value::uploaded(ty, state, site);
        log.roles.uploaded(&value, step);
        Ok(value)
    }

    fn read_absent(&self, value: &Arc<Value>, known: Option<&[u8]>, out: &mut [u8]) -> Result<()> {
        let site = events::current();
        let mut log = self.log.lock();
        let step = log.steps;
        log.undonated.used(value);
        let (n, sum) = log.reads.entry((step, site.0)).or_default();
        *n += 1;
        *sum += out.len() as u64;
        match known {
            Some(bytes) => out.copy_from_slice(bytes),
            None => self.fill(value.ty.dtype, out),
        }
        Ok(())
    }
}

impl Log {
    /// An optimizer has made a step. A training step ends when each has made one; where one of them makes none for long,
    /// as soon as another has made two more than that.
    fn stepped(&mut self, optimizer: u64) {
        if self.marked {
            return;
        }
        *self.optimizers.entry(optimizer).or_default() += 1;
        let least = self.optimizers.values().min().copied().unwrap_or(0);
        let most = self.optimizers.values().max().copied().unwrap_or(0);
        self.steps = self.steps.max(least).max(most.saturating_sub(2));
    }

    /// What is known of a program from its launches, with what is known without them.
    fn program(&self, runs: &Runs, recorded: Recorded) -> (capture::Program, String) {
        let Recorded { mut program, text } = recorded;
        let (inputs, outputs) = self.roles.of_ends(&runs.ends);
        for ((input, label), &site) in program.inputs.iter_mut().zip(inputs).zip(&runs.inputs) {
            (input.label, input.line) = (label, describe(site));
        }
        for (output, label) in program.outputs.iter_mut().zip(outputs) {
            output.label = label;
        }
        let program = capture::Program {
            launches: runs.launches.clone(),
            beside_bytes: runs.beside,
            tensors_beside: runs.tensors_beside.clone(),
            undonated: self.undonated.of(&runs.program, self.steps),
            ..program
        };
        (program, text)
    }
}

/// Copies by step and line.
fn moved(all: &BTreeMap<(u64, u32), (u64, u64)>) -> Vec<Moved> {
    let one = |(&(step, site), &(count, bytes)): (&(u64, u32), &(u64, u64))| Moved {
        step,
        line: describe(Site(site)),
        count,
        bytes,
    };
    all.iter().map(one).collect()
}

/// A collective of a step and line.
fn exchanged((step, site, asked): &(u64, Site, Asked)) -> Exchanged {
    let exchange = &asked.exchange;
    Exchanged {
        step: *step,
        line: describe(*site),
        collective: exchange.what.clone(),
        groups: asked.groups.to_vec(),
        number: asked.number,
        r#type: (&exchange.ty).into(),
        bytes: exchange.ty.bytes().max(0) as u64,
    }
}

/// What a task is, for the capture; the line is added when all is written.
fn asked(task: &GroupTask, step: u64) -> GroupCall {
    let bytes = |values: &mut dyn Iterator<Item = &Arc<Value>>| values.map(|v| v.bytes()).sum::<u64>();
    let first = task.reads.iter().flatten().chain(task.results()).next();
    GroupCall {
        step,
        line: None,
        backward: task.site.is_of_backward(),
        name: task.work.about().name.to_owned(),
        ranks: task.work.about().group.ranks.to_vec(),
        r#type: first.map(|v| (&v.ty).into()),
        bytes: bytes(&mut task.reads.iter().flatten()).max(bytes(&mut task.results())),
    }
}

fn group_call((site, call): &(Site, GroupCall)) -> GroupCall {
    GroupCall { line: describe(*site), ..call.clone() }
}

/// The bytes of a value, if the script itself has put them there.
fn known(value: &Value) -> Option<Box<[u8]>> {
    match &*value.state.lock() {
        State::Absent(bytes) => bytes.clone(),
        State::Host(bytes) => Some(bytes[..].into()),
        _ => None,
    }
}

/// The bytes of each result of a task, where all is known that goes in.
fn made(recorded: &mut GroupTask) -> Result<Vec<Option<Box<[u8]>>>, String> {
    let unknown = recorded.writes.iter().flatten().map(|_| None).collect();
    let read = |v: &Option<Arc<Value>>| v.as_ref().map_or_else(|| Some(Box::default()), |v| known(v));
    let written = |w: &Option<Written>| match w.as_ref().map(|w| (&w.old, w.value.bytes())) {
        None => Some(Box::default()),
        Some((_, bytes)) if bytes > KEPT as u64 => None,
        Some((Old::Nothing, bytes)) => Some(vec![0; bytes as usize].into()),
        Some((Old::Taken(old) | Old::Copied(old), _)) => known(old),
    };
    // Where nothing goes in, it comes from another rank.
    let in_place = recorded.writes.iter().flatten().any(|w| !matches!(w.old, Old::Nothing));
    if recorded.reads.iter().flatten().next().is_none() && !in_place {
        return Ok(unknown);
    }
    let Some(reads) = recorded.reads.iter().map(read).collect::<Option<Vec<_>>>() else { return Ok(unknown) };
    let Some(mut writes) = recorded.writes.iter().map(written).collect::<Option<Vec<_>>>() else {
        return Ok(unknown);
    };
    let reads: Vec<&[u8]> = reads.iter().map(|b| &**b).collect();
    recorded.task.run(&reads, &mut writes.iter_mut().map(|b| &mut **b).collect::<Vec<_>>(), recorded.site)?;
    let is_there = recorded.writes.iter().map(Option::is_some);
    Ok(writes.into_iter().zip(is_there).filter(|(_, there)| *there).map(|(b, _)| Some(b)).collect())
}

/// The bytes of a number; what the type cannot hold is cut as `as` does.
fn number(dtype: DType, x: f64) -> Vec<u8> {
    let bits = (x as f32).to_bits();
    match dtype {
        DType::Pred => vec![u8::from(x != 0.0)],
        DType::S8 => (x as i8).to_le_bytes().into(),
        DType::S16 => (x as i16).to_le_bytes().into(),
        DType::S32 => (x as i32).to_le_bytes().into(),
        DType::S64 => (x as i64).to_le_bytes().into(),
        DType::U8 => (x as u8).to_le_bytes().into(),
        DType::U16 => (x as u16).to_le_bytes().into(),
        DType::U32 => (x as u32).to_le_bytes().into(),
        DType::U64 => (x as u64).to_le_bytes().into(),
        DType::BF16 => ((bits >> 16) as u16).to_le_bytes().into(),
        DType::F16 => half::f16::from_f64(x).to_le_bytes().into(),
        DType::F32 => (x as f32).to_le_bytes().into(),
        DType::F64 => x.to_le_bytes().into(),
        DType::C64 => [(x as f32).to_le_bytes(), [0; 4]].concat(),
        DType::C128 => [x.to_le_bytes(), [0; 8]].concat(),
        // No host code looks at single numbers of these.
        DType::F8E4M3FN | DType::F8E5M2 => vec![0],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oxitorch_pjrt::Platform;

    fn absent(steps: u64) -> Absent {
        let device = AbsentDevice {
            platform: Platform::Tpu,
            kind: "TPU v0".to_owned(),
            memory: 1 << 30,
            reads_as: 2.0,
            steps,
            marked: false,
        };
        Absent::new(device, Memory::boundless(1 << 30), Arc::default())
    }

    #[test]
    fn a_step_ends_when_every_optimizer_has_made_one() {
        let one = absent(2);
        one.stepped(7, true);
        assert!(!one.is_over());
        one.stepped(7, true);
        assert!(one.is_over());

        let two = absent(2);
        for (optimizer, over) in [(1, false), (2, false), (1, false), (2, true)] {
            two.stepped(optimizer, true);
            assert_eq!(two.is_over(), over, "{optimizer}");
        }
    }

    #[test]
    fn marks_count_more_than_optimizers() {
        let a = absent(2);
        a.marked();
        (0..4).for_each(|_| a.stepped(1, true));
        assert!(!a.is_over());
        a.marked();
        assert!(a.is_over());
    }

    #[test]
    fn an_optimizer_that_rests_does_not_hold_the_others_up() {
        let a = absent(2);
        a.stepped(1, true); // of a warm-up, and never again
        let steps = (1..10).find(|_| {
            a.stepped(2, true);
            a.is_over()
        });
        assert_eq!(steps, Some(4));
    }

    #[test]
    fn reads_give_the_number() {
        let mut out = [0; 8];
        absent(1).fill(DType::F32, &mut out);
        assert_eq!(out, [2f32.to_le_bytes(), 2f32.to_le_bytes()].concat()[..]);
        absent(1).fill(DType::BF16, &mut out[..2]);
        assert_eq!(out[..2], half::bf16::from_f32(2.0).to_le_bytes());
        absent(1).fill(DType::Pred, &mut out[..1]);
        assert_eq!(out[0], 1);
    }
}
