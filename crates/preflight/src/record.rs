//! The script, run on a device that is not there.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use oxitorch_capture::Capture;
use oxitorch_format::{duration, many};
use serde::{Deserialize, Serialize};

use crate::Environment;
use crate::hardware::Slice;
use crate::progress::say;

/// The runs of a script that are needed for some slices.
pub(crate) struct Runs<'a> {
    script: Vec<String>,
    /// With the memory of their devices.
    slices: Vec<(&'a Slice, u64)>,
    call: Call,
    environment: &'a Environment,
    known: BTreeMap<Key, Run>,
}

/// The kind of the devices, their memory, and how many processes the script is told to be one of.
type Key = (&'static str, u64, Option<u64>);

impl<'a> Runs<'a> {
    pub(crate) fn new(
        script: Vec<String>,
        slices: impl Iterator<Item = (&'a Slice, u64)>,
        call: Call,
        environment: &'a Environment,
    ) -> Runs<'a> {
        Runs { script, slices: slices.collect(), call, environment, known: BTreeMap::new() }
    }

    /// The run for a slice. What the script asks of the smallest memory it asks of a larger one as well, unless something
    /// depended on the device; and what it does as one of many processes it does as one of fewer, unless it makes a group
    /// of them.
    pub(crate) fn of(&mut self, slice: &Slice, memory: u64) -> anyhow::Result<&Run> {
        let (of, alike) = (self.call.processes, |s: &Slice| s.platform() == slice.platform());
        let slices = self.slices.iter().filter(|(s, _)| alike(s));
        let (first, least) =
            slices.clone().min_by_key(|(_, m)| *m).map_or((slice, memory), |(s, m)| (*s, *m));
        let most = slices.map(|(s, _)| of.on(s)).max().unwrap_or_else(|| of.on(slice));
        let mut key = self.make(first, least, most)?;
        if self.known[&key].told.processes.is_some() {
            // A slice of one device beside others: the script has shown that it wants to be told.
            key = self.make(slice, memory, most.and_then(|_| of.on(slice).or(Some(1))))?;
        } else if self.known[&key].depends_on_device() {
            key = self.make(slice, memory, most)?;
        }
        Ok(&self.known[&key])
    }

    fn make(&mut self, slice: &Slice, memory: u64, processes: Option<u64>) -> anyhow::Result<Key> {
        let key = (kind(slice), memory, processes);
        if let Entry::Vacant(place) = self.known.entry(key) {
            let place_of = (slice, memory, processes);
            place.insert(Run::new(&self.script, place_of, self.call, self.environment)?);
        }
        Ok(key)
    }
}

/// How a script is told its batch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Argument {
    /// `--batch-size 8` or `--batch-size=8`.
    Option(String),
    /// What stands before the number and behind it.
    Template(String, String),
}

impl Argument {
    /// The batch that the script's arguments say.
    pub(crate) fn of(&self, script: &[String]) -> Option<u64> {
        let at = self.find(script)?;
        match self {
            Argument::Option(name) => match script[at].strip_prefix(name.as_str())?.strip_prefix('=') {
                Some(value) => value.parse().ok(),
                None => script.get(at + 1)?.parse().ok(),
            },
            Argument::Template(before, behind) => {
                script[at].strip_prefix(before.as_str())?.strip_suffix(behind.as_str())?.parse().ok()
            }
        }
    }

    /// The last place where it stands, as the last one counts. The script itself is no argument.
    fn find(&self, script: &[String]) -> Option<usize> {
        let is = |a: &String| match self {
            Argument::Option(name) => {
                a.strip_prefix(name.as_str()).is_some_and(|r| r.is_empty() || r.starts_with('='))
            }
            Argument::Template(before, behind) => a
                .strip_prefix(before.as_str())
                .and_then(|r| r.strip_suffix(behind.as_str()))
                .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit())),
        };
        script.iter().enumerate().skip(1).rev().find(|(_, a)| is(a)).map(|(i, _)| i)
    }

    /// The arguments with another batch.
    pub(crate) fn set(&self, script: &[String], batch: u64) -> Vec<String> {
        let mut out = script.to_vec();
        match (self, self.find(script)) {
            (Argument::Option(name), Some(at)) if out[at].len() > name.len() => {
                out[at] = format!("{name}={batch}")
            }
            (Argument::Option(_), Some(at)) if at + 1 < out.len() => out[at + 1] = batch.to_string(),
            (Argument::Option(name), _) => out.extend([name.clone(), batch.to_string()]),
            (Argument::Template(before, behind), Some(at)) => out[at] = format!("{before}{batch}{behind}"),
            (Argument::Template(before, behind), None) => out.push(format!("{before}{batch}{behind}")),
        }
        out
    }
}

/// What is computed again in the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Policy {
    None,
    /// All blocks, but results of products are kept.
    Products,
    /// Every second block.
    Half,
    All,
    /// All blocks, and what they take is kept on the host.
    Offload,
}

impl Policy {
    /// In words.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Policy::None => "no block",
            Policy::Products => "every block, products kept",
            Policy::Half => "every second block",
            Policy::All => "every block",
            Policy::Offload => "every block, inputs on host",
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Policy::None => "none",
            Policy::Products => "products",
            Policy::Half => "half",
            Policy::All => "all",
            Policy::Offload => "offload",
        }
    }
}

/// The blocks that the script has, as it says.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Blocks {
    pub(crate) blocks: u64,
    pub(crate) classes: Vec<String>,
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
    pub(crate) processes: Processes,
}

/// How many processes a script is told to be the first of, in the variables of `torchrun`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Processes {
    /// One for each device of a slice that has several.
    OfSlice,
    /// So many.
    Asked(u64),
    /// It is told nothing: one process is split over the devices.
    Split,
}

impl Processes {
    /// How many they are on a slice; none: the script is told nothing.
    fn on(self, slice: &Slice) -> Option<u64> {
        match self {
            Processes::OfSlice => Some(slice.devices()).filter(|n| *n > 1),
            Processes::Asked(n) => Some(n),
            Processes::Split => None,
        }
    }
}

/// What `torchrun` would tell the first of so many processes on one machine. Nobody listens at the address.
fn torchrun(processes: u64) -> [(&'static str, String); 6] {
    let all = processes.to_string();
    [
        ("RANK", "0".to_owned()),
        ("LOCAL_RANK", "0".to_owned()),
        ("WORLD_SIZE", all.clone()),
        ("LOCAL_WORLD_SIZE", all),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", "29500".to_owned()),
    ]
}

/// What a script tells of itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScriptFacts {
    /// The batch that it marks.
    pub(crate) batch: Option<u64>,
    /// What it could compute again.
    pub(crate) blocks: Option<Blocks>,
    /// The processes of the group that it makes.
    pub(crate) processes: Option<u64>,
}

/// The module that stands for a function: `oxitorch.preflight` was called.
const AS_SCRIPT: &str = "oxitorch._as_script";

/// How the devices of a slice call themselves.
fn kind(slice: &Slice) -> &'static str {
    slice.chip().map_or("XLA:CPU", |c| c.kind)
}

/// A run of the script on a device that is not there.
pub(crate) struct Run {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) capture: Option<Capture>,
    /// What went wrong, if it did.
    pub(crate) failure: Option<String>,
    /// Whether that was Ctrl-C.
    pub(crate) interrupted: bool,
    pub(crate) told: ScriptFacts,
    pub(crate) took: Duration,
}

impl Run {
    pub(crate) fn new(
        script: &[String],
        (slice, memory, processes): (&Slice, u64, Option<u64>),
        Call { steps, value, batch, remat, autocast, .. }: Call,
        environment: &Environment,
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
        let status = Command::new(&environment.executable)
            .args(script)
            .env("OXITORCH_PREFLIGHT", folder.path())
            .env("PYTHONUNBUFFERED", "1") // so that what it prints comes in its place
            .envs(processes.into_iter().flat_map(torchrun))
            .stdout(Stdio::from(std::io::stderr()))
            .status()
            .with_context(|| format!("cannot run {}", environment.executable.display()))?;
        let capture = Capture::is_in(folder.path()).then(|| Capture::read(folder.path())).transpose()?;
        let failure = failure(capture.as_ref(), status, steps);
        let interrupted = failure.is_some() && was_interrupted(status);
        if let Some(capture) = &capture {
            let programs = many(capture.programs.len() as u64, "program");
            let steps = many(capture.steps, "step");
            say(&format!("{steps}, {programs} in {}", duration(start.elapsed())));
        }
        let file = |name: &str| fs::read_to_string(folder.path().join(name)).ok();
        let told = ScriptFacts {
            batch: file("batch").and_then(|n| n.trim().parse().ok()),
            blocks: file("remat").and_then(|json| serde_json::from_str(&json).ok()),
            processes: file("processes").and_then(|n| n.trim().parse().ok()),
        };
        Ok(Run { folder, capture, failure, interrupted, told, took: start.elapsed() })
    }

    /// Whether another memory or kind of device could have led to other programs.
    fn depends_on_device(&self) -> bool {
        self.capture.as_ref().is_some_and(Capture::depends_on_device)
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
