//! A script that is run in variants, each once, and judged on slices.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::bail;
use oxitorch_format::{duration, many};
use oxitorch_pjrt::{Found, Platform};

use crate::Environment;
use crate::answer::Judged;
use crate::compile::{Asked, Compiling, Effort, Interrupted, Outcome, Said};
use crate::hardware::Slice;
use crate::judge::processes::processes;
use crate::judge::{Limit, budget, judge, undecided};
use crate::progress::{Ticker, elapsed, say};
use crate::record::{self, Argument, Call, Policy, Run, Runs, ScriptFacts};
use crate::split::{Parallel, Plan, Strategy, Tried};
use crate::verdict::Verdict;

/// How the script is run, if not as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Variant {
    /// How it is told another batch, if not by its mark, and the batch.
    pub(crate) batch: Option<(Option<Argument>, u64)>,
    /// What it computes again in its backward pass.
    pub(crate) remat: Option<Policy>,
    /// Whether it computes in bfloat16 where `torch.autocast` does.
    pub(crate) autocast: bool,
}

/// A slice, the memory of its devices, and what compiles for it.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) slice: &'a Slice,
    pub(crate) memory: u64,
    pub(crate) plugin: &'a Found,
}

/// The script, and what is known of it.
pub(crate) struct Session<'a> {
    pub(crate) script: &'a [String],
    pub(crate) targets: Vec<Target<'a>>,
    /// Steps, and what is read where nothing was computed.
    pub(crate) call: (u64, f64),
    pub(crate) effort: Asked,
    pub(crate) budget: &'a [Limit],
    pub(crate) parallel: Option<&'a Parallel>,
    pub(crate) processes: record::Processes,
    pub(crate) environment: &'a Environment,
    pub(crate) runs: BTreeMap<Variant, Runs<'a>>,
}

impl<'a> Session<'a> {
    /// Runs the script, if it was not run so before, and judges it on a slice. Gives what it tells of itself besides.
    pub(crate) fn judge(
        &mut self,
        target: Target<'_>,
        variant: &Variant,
    ) -> anyhow::Result<(Judged, ScriptFacts)> {
        let how = (self.effort, self.parallel);
        self.judge_so(target, variant, how)
    }

    /// The same with another effort, and split in another way.
    pub(crate) fn judge_so(
        &mut self,
        target: Target<'_>,
        variant: &Variant,
        (effort, parallel): (Asked, Option<&Parallel>),
    ) -> anyhow::Result<(Judged, ScriptFacts)> {
        let Session { script, targets, call, processes, environment, .. } = self;
        let runs = self.runs.entry(variant.clone()).or_insert_with(|| {
            let (script, batch) = match &variant.batch {
                Some((Some(argument), n)) => (argument.set(script, *n), None),
                Some((None, n)) => (script.to_vec(), Some(*n)),
                None => (script.to_vec(), None),
            };
            let slices = targets.iter().map(|p| (p.slice, p.memory));
            let call = Call {
                steps: call.0,
                value: call.1,
                batch,
                remat: variant.remat,
                autocast: variant.autocast,
                processes: *processes,
            };
            Runs::new(script, slices, call, environment)
        });
        let Target { slice, memory, .. } = target;
        let run = runs.of(slice, memory)?;
        let strategies = Parallel::strategies(parallel, slice.devices())?;
        let effort = (effort, budget::memory(self.budget, memory));
        let one = |s: Option<&Strategy>| judge_run(run, target, &effort, s, self.environment);
        Ok((best(&strategies, one), run.told.clone()))
    }
}

/// Judges a slice with what the user asks for: of several strategies the one with the best verdict, and of those that
/// fit, the one whose step takes the least time.
fn best(strategies: &[Strategy], mut judge: impl FnMut(Option<&Strategy>) -> Judged) -> Judged {
    let mut all: Vec<Judged> = Vec::new();
    for strategy in strategies {
        if !all.iter().any(|j| j.interrupted) {
            all.push(judge(Some(strategy)));
        }
    }
    if all.is_empty() {
        return judge(None);
    }
    let rank = |v: Verdict| match v {
        Verdict::Fits => 0,
        Verdict::FitsBarely => 1,
        Verdict::DoesNotFit => 2,
        Verdict::Unknown => 3,
    };
    let time = |j: &Judged| j.step.as_ref().and_then(|s| s.work.roofline_s).unwrap_or(f64::INFINITY);
    let tried: Vec<Tried> = all
        .iter()
        .zip(strategies)
        .map(|(j, strategy)| Tried {
            strategy: strategy.name(),
            verdict: j.verdict,
            need_bytes: j.need_bytes,
            roofline_s: j.step.as_ref().and_then(|s| s.work.roofline_s),
        })
        .collect();
    all.sort_by(|a, b| rank(a.verdict).cmp(&rank(b.verdict)).then(time(a).total_cmp(&time(b)))); // stable
    let mut best = all.swap_remove(0);
    best.interrupted |= all.iter().any(|j| j.interrupted);
    if let Some(told) = best.parallel.as_mut().filter(|_| tried.len() > 1) {
        told.tried = tried;
    }
    best
}

/// Compiles what was captured for a slice, and judges it.
fn judge_run(
    run: &Run,
    target: Target,
    (asked, lines): &(Asked, Vec<u64>),
    strategy: Option<&Strategy>,
    environment: &Environment,
) -> Judged {
    let Target { slice, memory, .. } = target;
    let mut judged = Judged::unknown(slice, run.failure.clone().unwrap_or_default());
    judged.interrupted = run.interrupted;
    let Some(capture) = &run.capture else { return judged };
    judged.limit_bytes = Some(memory);
    let plan = match strategy.map(|s| Plan::new(capture, run.told.batch, s, slice.devices())).transpose() {
        Ok(plan) => plan,
        Err(why) => return Judged { reason: Some(why), ..judged },
    };
    if let Some(plan) = &plan {
        judged.chips_used = slice.chips;
        judged.parallel = Some(plan.told.clone());
    }
    if let Some(count) = run.told.processes {
        if slice.place.is_some() && count > slice.devices() {
            let devices = many(slice.devices(), "device");
            let why = format!("the script makes a group of {count} processes, and the slice has {devices}");
            return Judged { reason: Some(why), ..judged };
        }
        judged.chips_used = slice.chips_of(count);
        judged.processes = Some(processes(count, capture, slice));
    }
    let mut outcomes = Vec::new();
    let on_one = plan.as_ref().map(|plan| plan.on_one_device(capture));
    let capture = on_one.as_ref().unwrap_or(capture);
    let mut compiled = |effort, only: &[String], judged: &mut Judged| {
        let failed = compile(run, target, (effort, only), plan.as_ref(), environment, judged, &mut outcomes);
        judge(judged, slice.chip(), capture, &outcomes);
        failed
    };
    let start = Instant::now();
    let mut failed = compiled(asked.first(), &[], &mut judged);
    judged.took = run.took + start.elapsed();
    let mut is_near = false;
    // For GPUs it compiles alike.
    if *asked == Asked::Auto && slice.platform() != Platform::Cuda && failed.is_ok() {
        let near = undecided(&judged, lines);
        is_near = !near.is_empty();
        if is_near {
            say(&format!("{} near the limit: again with full effort", many(near.len() as u64, "program")));
            failed = compiled(Effort::Full, &near, &mut judged);
        }
    }
    if let Err(e) = failed {
        let done = format!("{} of {}", outcomes.len(), many(distinct(run) as u64, "program"));
        // What does not fit does not fit with the rest.
        if is_near || judged.verdict != Verdict::DoesNotFit {
            judged.verdict = Verdict::Unknown;
            judged.reason = None;
        }
        let found = judged.reason.take().map_or(String::new(), |r| format!("{r}\n"));
        judged.reason = Some(format!("{found}{e:#}; {done} compiled until then"));
    } else if let (Some(why), true) = (&run.failure, judged.verdict != Verdict::DoesNotFit) {
        judged.verdict = Verdict::Unknown;
        judged.reason = Some(why.clone());
    }
    judged
}

/// Programs that are not the same.
fn distinct(run: &Run) -> usize {
    let ids = run.capture.iter().flat_map(|c| &c.programs).map(|p| &p.id);
    ids.collect::<std::collections::BTreeSet<_>>().len()
}

fn compile(
    run: &Run,
    Target { slice, plugin, .. }: Target,
    work: (Effort, &[String]),
    plan: Option<&Plan>,
    environment: &Environment,
    judged: &mut Judged,
    outcomes: &mut Vec<Outcome>,
) -> anyhow::Result<()> {
    let what = (slice.platform(), plugin.path.as_path());
    let folder = run.folder.path();
    let file = match plan {
        Some(plan) => {
            let file = folder.join(format!("plan-{}.json", plan.told.strategy));
            fs::write(&file, serde_json::to_vec(plan)?)?;
            Some(file)
        }
        None => None,
    };
    let mut child =
        Compiling::start(environment, what, slice.topology(), (folder, true), file.as_deref(), work)?;
    let all = if work.1.is_empty() { distinct(run) } else { work.1.len() };
    let mut n = 0;
    let ticker = Ticker::start("compiling", format!(" for {}", slice.name), all);
    let names = run.capture.iter().flat_map(|c| &c.programs);
    let describe = |id: &str| {
        names
            .clone()
            .find(|p| p.id == id)
            .map_or_else(String::new, |p| format!("{}, {}", p.name, many(p.ops.len() as u64, "op")))
    };
    loop {
        let said = match child.next() {
            Ok(Some(said)) => said,
            Ok(None) => return Ok(()),
            Err(e) if e.is::<Interrupted>() => {
                judged.interrupted = true;
                let at = ticker.running().join(" and ");
                let at = if at.is_empty() { at } else { format!(", at {at}") };
                bail!("interrupted after {} of compiling{at}", elapsed(ticker.elapsed()));
            }
            Err(e) => return Err(e),
        };
        match said {
            Said::Device { kind, memory_bytes, version, .. } => {
                judged.device = kind;
                // The plugin for GPUs says which GPU instead.
                judged.compiler = match (slice.platform(), &plugin.package, &plugin.version) {
                    (Platform::Cuda, Some(package), Some(version)) => format!("{package} {version}"),
                    _ => version,
                };
                let known = memory_bytes.and_then(|b| u64::try_from(b).ok());
                judged.limit_bytes = known.or(judged.limit_bytes);
            }
            Said::Begun(id) => ticker.begun(&id, describe(&id)),
            Said::Done(mut outcome) => {
                let sent = outcome.collectives.iter_mut().flatten();
                sent.for_each(|c| *c = c.timed(slice));
                ticker.ended(&outcome.id);
                let took = duration(Duration::from_secs_f64(outcome.compile_s));
                let what = if outcome.error.is_some() { "failed" } else { "done" };
                n += 1;
                say(&format!("{n} of {all} {what} in {took}: {}", describe(&outcome.id)));
                match outcomes.iter_mut().find(|o| o.id == outcome.id) {
                    Some(known) => {
                        outcome.fast = known.memory;
                        *known = *outcome;
                    }
                    None => outcomes.push(*outcome),
                }
            }
            Said::Failed(why) => bail!(why),
        }
    }
}
