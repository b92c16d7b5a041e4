//! The script, run on a device that is not there, and its programs compiled.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use oxitorch_pjrt::Platform;

use super::aot::{Compiling, Effort, Interrupted, Outcome, Said};
use super::capture::Capture;
use super::effort::{self, Asked};
use super::parallel::{Plan, Strategy};
use super::progress::{Ticker, elapsed, say};
use super::remat::{Blocks, Policy};
use super::session::Place;
use super::slices::Slice;
use super::verdict::{Judged, Verdict};
use crate::facts::Facts;
use crate::report::{duration, many};

/// The runs of a script that are needed for some slices.
pub(crate) struct Runs<'a> {
    script: Vec<String>,
    /// With the memory of their devices.
    slices: Vec<(&'a Slice, u64)>,
    call: Call,
    facts: &'a Facts,
    /// By the kind of the devices and their memory.
    known: BTreeMap<(&'static str, u64), Run>,
}

impl<'a> Runs<'a> {
    pub(crate) fn new(
        script: Vec<String>,
        slices: impl Iterator<Item = (&'a Slice, u64)>,
        call: Call,
        facts: &'a Facts,
    ) -> Runs<'a> {
        Runs { script, slices: slices.collect(), call, facts, known: BTreeMap::new() }
    }

    /// The run for a slice. What the script asks of the smallest memory it asks of a larger one as well, unless something
    /// depended on the device.
    pub(crate) fn of(&mut self, slice: &Slice, memory: u64) -> anyhow::Result<&Run> {
        let alike = self.slices.iter().filter(|(s, _)| s.platform() == slice.platform());
        let (first, least) = alike.min_by_key(|(_, m)| *m).map_or((slice, memory), |(s, m)| (*s, *m));
        let mut key = self.make(first, least)?;
        if self.known[&key].depends_on_device() {
            key = self.make(slice, memory)?;
        }
        Ok(&self.known[&key])
    }

    fn make(&mut self, slice: &Slice, memory: u64) -> anyhow::Result<(&'static str, u64)> {
        let key = (kind(slice), memory);
        if let Entry::Vacant(place) = self.known.entry(key) {
            place.insert(Run::new(&self.script, slice, memory, self.call, self.facts)?);
        }
        Ok(key)
    }
}

/// What the script is told.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) steps: u64,
    /// What it reads where nothing was computed.
    pub(crate) value: f64,
    /// The batch that is to be taken where it marks it.
    pub(crate) batch: Option<u64>,
    /// What is to be computed again.
    pub(crate) remat: Option<Policy>,
    /// Whether it is to compute in bfloat16 where `torch.autocast` does.
    pub(crate) autocast: bool,
}

/// What a script tells of itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    /// The batch that it marks.
    pub(crate) batch: Option<u64>,
    /// What it could compute again.
    pub(crate) blocks: Option<Blocks>,
}

/// The module that stands for a function: `oxitorch.preflight` was called.
const AS_SCRIPT: &str = "oxitorch._as_script";

/// How the devices of a slice call themselves.
fn kind(slice: &Slice) -> &'static str {
    slice.chip().map_or("XLA:CPU", |c| c.kind)
}

/// A run of the script on a device that is not there.
pub(crate) struct Run {
    folder: tempfile::TempDir,
    capture: Option<Capture>,
    /// What went wrong, if it did.
    failure: Option<String>,
    /// Whether that was Ctrl-C.
    pub(crate) interrupted: bool,
    pub(crate) told: Told,
    took: Duration,
}

impl Run {
    pub(crate) fn new(
        script: &[String],
        slice: &Slice,
        memory: u64,
        Call { steps, value, batch, remat, autocast }: Call,
        facts: &Facts,
    ) -> anyhow::Result<Run> {
        let folder = tempfile::Builder::new().prefix("oxitorch-preflight-").tempdir()?;
        let device = serde_json::json!({
            "platform": slice.platform().name(),
            "kind": kind(slice),
            "memory_bytes": memory,
            "steps": steps,
            "reads_as": value,
            "batch": batch,
            "remat": remat.map(Policy::name),
            "autocast": autocast,
        });
        fs::write(folder.path().join("device.json"), device.to_string())?;
        let name = script
            .iter()
            .find(|a| *a != "-m")
            .map_or("", |a| if a == AS_SCRIPT { "the function" } else { a });
        say(&format!("running {name} without a device, {}", many(steps, "step")));
        let start = Instant::now();
        let status = Command::new(&facts.executable)
            .args(script)
            .env("OXITORCH_PREFLIGHT", folder.path())
            .env("PYTHONUNBUFFERED", "1") // so that what it prints comes in its place
            .stdout(Stdio::from(std::io::stderr()))
            .status()
            .with_context(|| format!("cannot run {}", facts.executable.display()))?;
        let mut capture = match fs::read(folder.path().join("capture.json")) {
            Ok(json) => Some(serde_json::from_slice::<Capture>(&json).context("the capture cannot be read")?),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(e).context("the capture cannot be read"),
        };
        let failure = failure(capture.as_ref(), status, steps);
        let interrupted = failure.is_some() && was_interrupted(status);
        if let Some(capture) = &capture {
            let programs = many(capture.programs.len() as u64, "program");
            let steps = many(capture.steps, "step");
            say(&format!("{steps}, {programs} in {}", duration(start.elapsed())));
        }
        let file = |name: &str| fs::read_to_string(folder.path().join(name)).ok();
        let told = Told {
            batch: file("batch").and_then(|n| n.trim().parse().ok()),
            blocks: file("remat").and_then(|json| serde_json::from_str(&json).ok()),
        };
        if let Some(capture) = &mut capture {
            capture.marked_batch = told.batch;
        }
        Ok(Run { folder, capture, failure, interrupted, told, took: start.elapsed() })
    }

    /// Whether another memory or kind of device could have led to other programs.
    fn depends_on_device(&self) -> bool {
        self.capture.as_ref().is_some_and(Capture::depends_on_device)
    }

    /// Compiles what was captured for a slice, and judges it.
    pub(crate) fn judge(
        &self,
        place: Place,
        (asked, lines): &(Asked, Vec<u64>),
        strategy: Option<&Strategy>,
        facts: &Facts,
    ) -> Judged {
        let Place { slice, memory, .. } = place;
        let mut judged = Judged::unknown(slice, self.failure.clone().unwrap_or_default());
        judged.interrupted = self.interrupted;
        let Some(capture) = &self.capture else { return judged };
        judged.limit_bytes = Some(memory);
        let plan = match strategy.map(|s| Plan::new(capture, s, slice.devices())).transpose() {
            Ok(plan) => plan,
            Err(why) => return Judged { reason: Some(why), ..judged },
        };
        if let Some(plan) = &plan {
            judged.chips_used = slice.chips;
            judged.parallel = Some(plan.told.clone());
        }
        let mut outcomes = Vec::new();
        let on_one = plan.as_ref().map(|plan| plan.on_one_device(capture));
        let capture = on_one.as_ref().unwrap_or(capture);
        let mut compile = |effort, only: &[String], judged: &mut Judged| {
            let failed = self.compile(place, (effort, only), plan.as_ref(), facts, judged, &mut outcomes);
            judged.judge(slice.chip(), capture, &outcomes);
            failed
        };
        let start = Instant::now();
        let mut failed = compile(asked.first(), &[], &mut judged);
        judged.took = self.took + start.elapsed();
        let mut is_near = false;
        // For GPUs it compiles alike.
        if *asked == Asked::Auto && slice.platform() != Platform::Cuda && failed.is_ok() {
            let near = effort::undecided(&judged, lines);
            is_near = !near.is_empty();
            if is_near {
                say(&format!(
                    "{} near the limit: again with full effort",
                    many(near.len() as u64, "program")
                ));
                failed = compile(Effort::Full, &near, &mut judged);
            }
        }
        if let Err(e) = failed {
            let done = format!("{} of {}", outcomes.len(), many(self.distinct() as u64, "program"));
            // What does not fit does not fit with the rest.
            if is_near || judged.verdict != Verdict::DoesNotFit {
                judged.verdict = Verdict::Unknown;
                judged.reason = None;
            }
            let found = judged.reason.take().map_or(String::new(), |r| format!("{r}\n"));
            judged.reason = Some(format!("{found}{e:#}; {done} compiled until then"));
        } else if let (Some(why), true) = (&self.failure, judged.verdict != Verdict::DoesNotFit) {
            judged.verdict = Verdict::Unknown;
            judged.reason = Some(why.clone());
        }
        judged
    }

    /// Programs that are not the same.
    fn distinct(&self) -> usize {
        let ids = self.capture.iter().flat_map(|c| &c.programs).map(|p| &p.id);
        ids.collect::<std::collections::BTreeSet<_>>().len()
    }

    fn compile(
        &self,
        Place { slice, plugin, .. }: Place,
        work: (Effort, &[String]),
        plan: Option<&Plan>,
        facts: &Facts,
        judged: &mut Judged,
        outcomes: &mut Vec<Outcome>,
    ) -> anyhow::Result<()> {
        let what = (slice.platform(), plugin.path.as_path());
        let folder = self.folder.path();
        let file = match plan {
            Some(plan) => {
                let file = folder.join(format!("plan-{}.json", plan.told.strategy));
                fs::write(&file, serde_json::to_vec(plan)?)?;
                Some(file)
            }
            None => None,
        };
        let mut child =
            Compiling::start(facts, what, slice.topology(), (folder, true), file.as_deref(), work)?;
        let all = if work.1.is_empty() { self.distinct() } else { work.1.len() };
        let mut n = 0;
        let ticker = Ticker::start("compiling", format!(" for {}", slice.name), all);
        let names = self.capture.iter().flat_map(|c| &c.programs);
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
}

/// Whether Ctrl-C ended it.
fn was_interrupted(status: ExitStatus) -> bool {
    status.signal() == Some(2) || status.code() == Some(130)
}

/// Why a run of the script tells too little, if it does.
fn failure(capture: Option<&Capture>, status: ExitStatus, steps: u64) -> Option<String> {
    let how = match (status.code(), status.signal()) {
        _ if was_interrupted(status) => "was interrupted".to_owned(),
        (_, Some(signal)) => format!("was killed by signal {signal}"),
        (code, None) => format!("ended with status {}", code.unwrap_or(1)),
    };
    match capture {
        None if status.success() => {
            Some("the script did not use the device: does it say device=\"tpu\"?".to_owned())
        }
        None => Some(format!("the script {how}")),
        Some(c) if !status.success() && c.steps < steps => {
            Some(format!("the script {how} after {}", many(c.steps, "step")))
        }
        Some(_) => None,
    }
}
