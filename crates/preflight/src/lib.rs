//! Does a script's step fit a slice, and how fast could it be there, without the slice.
//!
//! [`run`] is all of it. The folders are its layers, each on those before it: `hardware` (chips and slices), `split` (a
//! program over several chips), `compile` (in processes of their own), `memory` (tensors, buffers, padding), `record` (the
//! script on a device that is not there), `answer` (all that is said, as data), `judge`, `session` (a script in variants,
//! each once), `search` and `show`. A test holds their order.

mod answer;
pub mod compile;
mod environment;
mod hardware;
mod judge;
mod memory;
mod progress;
mod record;
mod search;
mod session;
mod show;
mod split;
mod verdict;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use oxitorch_pjrt::{DiscoverOptions, Found, discover};

pub use answer::Report;
pub use compile::Asked;
pub use environment::Environment;
pub use judge::Limit;
pub use record::Argument;
pub use search::fit::Fit;
pub use split::Parallel;

use answer::Judged;
use compile::plugin;
use hardware::Slice;
use judge::budget;
use judge::prices::{self, Prices};
use record::Processes;
use search::fit::Bounds;
use search::{checks, fit, remat};
use session::{Session, Target, Variant};

/// The version of the JSON.
const VERSION: u32 = 1;

/// Steps if nobody says how many: the first allocates what optimizers keep, from the second on they are alike.
const STEPS: u64 = 3;

/// What is plausible: each rank of a group is kept for each of its collectives.
const MOST_PROCESSES: u64 = 1 << 16;

/// The exit status of what keeps a report from being made.
pub const UNKNOWN: i32 = 2;

/// What is asked for.
#[derive(Args, Clone, Debug, Default)]
pub struct Options {
    /// What to compile for, for instance v5e-1, v6e-8, v5e:2x4, trillium, cuda:h200, cuda:h100-8, cpu; may be given several
    /// times
    #[arg(long = "slice", value_name = "NAME")]
    pub slices: Vec<String>,
    /// Training steps to capture [default: 3]
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// How much work the compiler does [default: auto]
    #[arg(long, value_enum)]
    pub effort: Option<Asked>,
    /// What the script reads where it asks for a computed value [default: 0]
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub host_value: Option<f64>,
    /// How the step is split over the chips: dp, fsdp, auto (the better of both), or a file of patterns (.toml)
    #[arg(long, value_name = "HOW")]
    pub parallel: Option<Parallel>,
    /// Processes of a script that uses torch.distributed, of which the first is run [default: one for each device of the
    /// slice]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MOST_PROCESSES))]
    pub processes: Option<u64>,
    /// What it may take at most, else the exit status is 1, for instance hbm=90%,graphs=2,syncs=0,fallbacks=0,step_ms=80
    #[arg(long, value_name = "LIMITS", value_delimiter = ',')]
    pub budget: Vec<Limit>,
    /// Look for the largest batch that fits: batch=--batch-size is the script's option, batch='size={}' how it is written,
    /// batch alone what the script marks with oxitorch.preflight.batch(...); remat: which blocks to checkpoint
    #[arg(long, value_name = "WHAT")]
    pub fit: Option<Fit>,
    /// What batches are to be multiples of [default: 1 up to 64, 8 above]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub fit_multiple: Option<u64>,
    /// Batches that are tried for a slice at most [default: 24]
    #[arg(long, value_name = "N")]
    pub fit_tries: Option<usize>,
    /// Minutes after which no other batch is tried [default: 60]
    #[arg(long, value_name = "N")]
    pub fit_minutes: Option<u64>,
    /// Minutes in which advice for a step that does not fit is followed, to see what it saves; 0: none is [default: 1]
    #[arg(long, value_name = "N")]
    pub advice_minutes: Option<u64>,
    /// Prices of chips, as TOML: [v5e] or [h200], and usd_per_chip_hour = 1.2 under it
    #[arg(long, value_name = "FILE")]
    pub prices: Option<PathBuf>,
    /// Steps of the whole training, to say what it costs
    #[arg(long, value_name = "N")]
    pub run_steps: Option<u64>,
}

impl Options {
    /// These, and where they say nothing the others.
    pub fn or(mut self, others: Options) -> Options {
        let mut budget = others.budget;
        budget.append(&mut self.budget);
        Options {
            slices: if self.slices.is_empty() { others.slices } else { self.slices },
            steps: self.steps.or(others.steps),
            effort: self.effort.or(others.effort),
            host_value: self.host_value.or(others.host_value),
            parallel: self.parallel.or(others.parallel),
            processes: self.processes.or(others.processes),
            budget,
            fit: self.fit.or(others.fit),
            fit_multiple: self.fit_multiple.or(others.fit_multiple),
            fit_tries: self.fit_tries.or(others.fit_tries),
            fit_minutes: self.fit_minutes.or(others.fit_minutes),
            advice_minutes: self.advice_minutes.or(others.advice_minutes),
            prices: self.prices.or(others.prices),
            run_steps: self.run_steps.or(others.run_steps),
        }
    }

    fn parsed_slices(&self) -> anyhow::Result<Vec<Slice>> {
        if self.slices.is_empty() {
            bail!("which slice? Say for instance --slice v5e-1");
        }
        self.slices.iter().map(|s| Slice::parse(s)).collect()
    }

    fn processes(&self) -> anyhow::Result<Processes> {
        Ok(match (self.processes, &self.parallel) {
            (Some(_), Some(_)) => {
                bail!("--parallel splits the step of one process: it does not go with --processes")
            }
            (Some(n), None) => Processes::Asked(n),
            (None, Some(_)) => Processes::Split,
            (None, None) => Processes::OfSlice,
        })
    }

    /// How long to look for the largest batch on so many devices, which a batch is split over.
    fn bounds(&self, devices: u64) -> Bounds {
        Bounds {
            multiple: self.fit_multiple.or(self.parallel.as_ref().map(|_| devices).filter(|n| *n > 1)),
            tries: self.fit_tries.unwrap_or(24),
            time: minutes(self.fit_minutes, 60),
        }
    }
}

/// So many minutes, or what is taken if nobody says how many.
fn minutes(asked: Option<u64>, default: u64) -> Duration {
    Duration::from_secs(asked.unwrap_or(default).saturating_mul(60))
}

/// The slices with their memory, and the plugins that compile for them.
fn targets<'a>(
    slices: &'a [Slice],
    found: &'a [Found],
    environment: &Environment,
) -> anyhow::Result<Vec<Target<'a>>> {
    let memory = |slice: &Slice| match slice.chip() {
        Some(chip) => Ok(chip.device_memory),
        None => environment.memory.context("the memory of this machine is not known"),
    };
    let target = |slice: &'a Slice| {
        let plugin = plugin(found, slice.platform(), environment)?;
        Ok(Target { slice, memory: memory(slice)?, plugin })
    };
    slices.iter().map(target).collect()
}

/// What is to be known of a slice.
fn found_out<'a>(session: &mut Session<'a>, target: Target<'a>, options: &Options) -> anyhow::Result<Judged> {
    match &options.fit {
        None => {
            let (mut judged, told) = session.judge(target, &Variant::default())?;
            checks::check(session, target, (&mut judged, &told), minutes(options.advice_minutes, 1))?;
            Ok(judged)
        }
        Some(Fit::Remat) => remat::search(session, target),
        Some(Fit::Batch(argument)) => {
            fit::batch(session, argument.as_ref(), options.bounds(target.slice.devices()), target)
        }
    }
}

/// Runs a script without the devices that it asks for, compiles its programs for each slice, and judges them.
///
/// # Errors
///
/// If the options contradict each other or name what is not there, or if something is not installed.
pub fn run(options: &Options, script: Vec<String>, environment: &Environment) -> anyhow::Result<Report> {
    let start = Instant::now();
    let slices = options.parsed_slices()?;
    let prices = options.prices.as_deref().map_or_else(|| Ok(Prices::default()), Prices::read)?;
    let found =
        discover(&DiscoverOptions { python_paths: environment.site_dirs.clone(), ..Default::default() });
    let targets = targets(&slices, &found, environment)?;
    let steps = options.steps.unwrap_or(STEPS).max(1);
    let effort = options.effort.unwrap_or_default();
    let mut session = Session {
        script: &script,
        targets: targets.clone(),
        call: (steps, options.host_value.unwrap_or(0.0)),
        effort,
        budget: &options.budget,
        parallel: options.parallel.as_ref(),
        processes: options.processes()?,
        environment,
        runs: BTreeMap::new(),
    };
    let mut judged = Vec::new();
    for target in targets {
        if judged.iter().any(|j: &Judged| j.interrupted) {
            let reason = "interrupted before it was its turn".to_owned();
            judged.push(Judged { interrupted: true, ..Judged::unknown(target.slice, reason) });
            continue;
        }
        let mut found = found_out(&mut session, target, options)?;
        found.budget = budget::hold(&options.budget, &found);
        found.price = prices.of(target.slice, found.least_s(), options.run_steps);
        judged.push(found);
    }
    prices::rank(&mut judged);
    Ok(Report {
        version: VERSION,
        oxitorch: env!("CARGO_PKG_VERSION"),
        script,
        steps,
        run_steps: options.run_steps,
        effort,
        elapsed_s: start.elapsed().as_secs_f64(),
        slices: judged,
    })
}
