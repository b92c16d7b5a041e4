//! `oxitorch preflight`: does a script's step fit a slice, and how fast could it be there, without the slice.
//!
//! The script runs in a process of its own, on a device that is not there (the engine's `Absent`), and leaves its
//! programs (script.rs); the plugin compiles them in another one for each slice (aot.rs); the rest is arithmetic (work.rs,
//! verdict.rs) and its presentation (text.rs).

mod advice;
mod annotate;
pub(crate) mod aot;
mod budget;
mod buffers;
mod capture;
mod checks;
pub(crate) mod cuda;
mod dumps;
mod effort;
mod fit;
pub(crate) mod folder;
mod gpus;
mod html;
mod ici;
mod notes;
mod padding;
mod parallel;
mod prices;
mod progress;
mod remat;
mod rules;
mod script;
mod session;
mod slices;
mod text;
mod verdict;
mod work;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anstyle::AnsiColor;
use anyhow::{Context, bail};
use clap::{Args, Parser};
use oxitorch_pjrt::{DiscoverOptions, Found, Platform, discover};
use serde::Serialize;

use crate::facts::Facts;
use crate::machine;
use budget::Limit;
use effort::Asked;
use fit::{Bounds, Fit};
use parallel::Parallel;
use prices::Prices;
use session::{Place, Session, Variant};
use slices::Slice;
use verdict::{Judged, Verdict};

/// The version of the JSON.
const VERSION: u32 = 1;

/// Steps if nobody says how many: the first allocates what optimizers keep, from the second on they are alike.
const STEPS: u64 = 3;

/// The command with its script.
#[derive(Args)]
pub(crate) struct Preflight {
    #[command(flatten)]
    options: Options,
    /// A Python script with its arguments, or -m and a module; options from the first --slice on are this command's
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "SCRIPT")]
    script: Vec<String>,
}

#[derive(Args, Clone, Debug, Default)]
struct Options {
    /// What to compile for, for instance v5e-1, v6e-8, v5e:2x4, trillium, cuda:h200, cuda:h100-8, cpu; may be given several
    /// times
    #[arg(long = "slice", value_name = "NAME")]
    slices: Vec<String>,
    /// Training steps to capture [default: 3]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Write the report as JSON into this file; - is stdout
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report as one page of HTML into this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// How much work the compiler does [default: auto]
    #[arg(long, value_enum)]
    effort: Option<Asked>,
    /// What the script reads where it asks for a computed value [default: 0]
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    host_value: Option<f64>,
    /// How the step is split over the chips: dp, fsdp, auto (the better of both), or a file of patterns (.toml)
    #[arg(long, value_name = "HOW")]
    parallel: Option<Parallel>,
    /// What it may take at most, else the exit status is 1, for instance hbm=90%,graphs=2,syncs=0,fallbacks=0,step_ms=80
    #[arg(long, value_name = "LIMITS", value_delimiter = ',')]
    budget: Vec<Limit>,
    /// Look for the largest batch that fits: batch=--batch-size is the script's option, batch='size={}' how it is written,
    /// batch alone what the script marks with oxitorch.preflight.batch(...); remat: which blocks to checkpoint
    #[arg(long, value_name = "WHAT")]
    fit: Option<Fit>,
    /// What batches are to be multiples of [default: 1 up to 64, 8 above]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    fit_multiple: Option<u64>,
    /// Batches that are tried for a slice at most [default: 24]
    #[arg(long, value_name = "N")]
    fit_tries: Option<usize>,
    /// Minutes after which no other batch is tried [default: 60]
    #[arg(long, value_name = "N")]
    fit_minutes: Option<u64>,
    /// Minutes in which advice for a step that does not fit is followed, to see what it saves; 0: none is [default: 1]
    #[arg(long, value_name = "N")]
    advice_minutes: Option<u64>,
    /// Prices of chips, as TOML: [v5e] or [h200], and usd_per_chip_hour = 1.2 under it
    #[arg(long, value_name = "FILE")]
    prices: Option<PathBuf>,
    /// Steps of the whole training, to say what it costs
    #[arg(long, value_name = "N")]
    run_steps: Option<u64>,
}

/// Options behind the script.
#[derive(Parser)]
#[command(name = "oxitorch preflight SCRIPT", no_binary_name = true)]
struct Behind {
    #[command(flatten)]
    options: Options,
}

impl Preflight {
    /// The options, and the script without those that stand behind it.
    fn split(self) -> Result<(Options, Vec<String>), clap::Error> {
        let (mut options, mut script) = (self.options, self.script);
        let is_slice = |a: &String| a == "--slice" || a.starts_with("--slice=");
        let Some(at) = script.iter().position(is_slice).filter(|_| options.slices.is_empty()) else {
            return Ok((options, script));
        };
        let behind = Behind::try_parse_from(script.split_off(at))?.options;
        options.slices = behind.slices;
        options.steps = behind.steps.or(options.steps);
        options.json = behind.json.or(options.json);
        options.html = behind.html.or(options.html);
        options.effort = behind.effort.or(options.effort);
        options.budget.extend(behind.budget);
        options.fit = behind.fit.or(options.fit);
        options.fit_multiple = behind.fit_multiple.or(options.fit_multiple);
        options.fit_tries = behind.fit_tries.or(options.fit_tries);
        options.fit_minutes = behind.fit_minutes.or(options.fit_minutes);
        options.advice_minutes = behind.advice_minutes.or(options.advice_minutes);
        options.parallel = behind.parallel.or(options.parallel);
        options.host_value = behind.host_value.or(options.host_value);
        options.prices = behind.prices.or(options.prices);
        options.run_steps = behind.run_steps.or(options.run_steps);
        Ok((options, script))
    }
}

impl Options {
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

/// The report, as JSON.
#[derive(Serialize)]
struct Report {
    version: u32,
    oxitorch: &'static str,
    script: Vec<String>,
    steps: u64,
    /// Steps of the whole training.
    run_steps: Option<u64>,
    effort: Asked,
    elapsed_s: f64,
    slices: Vec<Judged>,
}

impl Report {
    /// The slices, the cheapest that fits first.
    fn ranked(&self) -> Vec<&Judged> {
        let mut slices: Vec<&Judged> = self.slices.iter().collect();
        slices.sort_by_key(|s| s.rank);
        slices
    }
}

/// Runs the command; what it prints and the exit status. What is wrong with the arguments has status 2, as has all that
/// keeps it from a verdict.
pub(crate) fn run(preflight: Preflight, facts: &Facts) -> anyhow::Result<(String, i32)> {
    let start = Instant::now();
    let (options, script) = match preflight.split() {
        Ok(parts) => parts,
        Err(e) => {
            let _ = e.print();
            return Ok((String::new(), e.exit_code()));
        }
    };
    let report = match report(&options, script, facts, start) {
        Ok(report) => report,
        Err(e) => {
            let red = AnsiColor::Red.on_default().bold();
            anstream::eprintln!("{red}error{red:#}: {e:#}");
            return Ok((String::new(), Verdict::Unknown.status()));
        }
    };
    let status = status(&report.slices);
    if let Some(file) = &options.html {
        fs::write(file, report.html()?).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let json = serde_json::to_string_pretty(&report)? + "\n";
    match &options.json {
        Some(file) if file == Path::new("-") => return Ok((json, status)),
        Some(file) => fs::write(file, json).with_context(|| format!("cannot write {}", file.display()))?,
        None => {}
    }
    Ok((report.text(), status))
}

/// The exit status for several slices: 1 if something does not fit, else 2 if something is not known.
fn status(slices: &[Judged]) -> i32 {
    let of = |status: i32| slices.iter().any(|s| s.status() == status);
    [1, 2].into_iter().find(|&s| of(s)).unwrap_or(0)
}

fn report(options: &Options, script: Vec<String>, facts: &Facts, start: Instant) -> anyhow::Result<Report> {
    if options.slices.is_empty() {
        bail!("which slice? Say for instance --slice v5e-1");
    }
    let slices: Vec<Slice> = options.slices.iter().map(|s| Slice::parse(s)).collect::<anyhow::Result<_>>()?;
    let prices = options.prices.as_deref().map_or_else(|| Ok(Prices::default()), Prices::read)?;
    let found = discover(&DiscoverOptions { python_paths: facts.site_dirs.clone(), ..Default::default() });
    let plugins: Vec<&Found> =
        slices.iter().map(|s| plugin(&found, s.platform(), facts)).collect::<anyhow::Result<_>>()?;
    let steps = options.steps.unwrap_or(STEPS).max(1);
    let effort = options.effort.unwrap_or_default();
    let memory_of = |slice: &Slice| match slice.chip() {
        Some(chip) => Ok(chip.device_memory),
        None => machine::memory().map(|m| m.0).context("the memory of this machine is not known"),
    };
    let place =
        |(slice, plugin)| -> anyhow::Result<Place> { Ok(Place { slice, memory: memory_of(slice)?, plugin }) };
    let places: Vec<Place> = slices.iter().zip(plugins).map(place).collect::<anyhow::Result<_>>()?;
    let call = (steps, options.host_value.unwrap_or(0.0));
    let runs = BTreeMap::new();
    let (parallel, budget) = (options.parallel.as_ref(), options.budget.as_slice());
    let mut session =
        Session { script: &script, places: places.clone(), call, effort, budget, parallel, facts, runs };
    let mut judged = Vec::new();
    for place in places {
        if judged.iter().any(|j: &Judged| j.interrupted) {
            let reason = "interrupted before it was its turn".to_owned();
            judged.push(Judged { interrupted: true, ..Judged::unknown(place.slice, reason) });
            continue;
        }
        let mut found = match &options.fit {
            None => {
                let (mut judged, told) = session.judge(place, &Variant::default())?;
                checks::check(&mut session, place, (&mut judged, &told), minutes(options.advice_minutes, 1))?;
                judged
            }
            Some(Fit::Remat) => remat::search(&mut session, place)?,
            Some(Fit::Batch(argument)) => {
                fit::batch(&mut session, argument.as_ref(), options.bounds(place.slice.devices()), place)?
            }
        };
        found.budget = budget::hold(&options.budget, &found);
        found.price = prices.of(place.slice, found.least_s(), options.run_steps);
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

/// What compiles for a platform; an error says what to install.
fn plugin<'f>(found: &'f [Found], platform: Platform, facts: &Facts) -> anyhow::Result<&'f Found> {
    let plugin = found.iter().find(|f| f.platform == platform);
    let gpus = platform == Platform::Cuda;
    let tools = gpus.then(|| cuda::missing(plugin, &facts.site_dirs)).flatten();
    match (plugin, tools) {
        (Some(plugin), None) => Ok(plugin),
        (Some(_), Some(tools)) => {
            bail!(
                "ptxas and libdevice, with which XLA makes code for GPUs, are not installed: pip install {tools}"
            )
        }
        (None, tools) => {
            let (package, what) = (platform.package(), if gpus { "GPUs" } else { "a TPU" });
            let tools = tools.map_or(String::new(), |t| format!(" {t}"));
            bail!(
                "{package} is not installed, and it is what compiles for {what}: pip install {package}{tools}"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(args: &[&str]) -> (Options, Vec<String>) {
        #[derive(Parser)]
        struct Whole {
            #[command(flatten)]
            preflight: Preflight,
        }
        let whole = Whole::try_parse_from(std::iter::once(&"oxitorch").chain(args)).unwrap();
        whole.preflight.split().unwrap()
    }

    #[test]
    fn options_stand_before_the_script_or_behind_it() {
        let script = ["train.py", "--steps", "600"];
        let (options, rest) = split(&["--slice", "v5e-1", "--steps", "2", "train.py", "--steps", "600"]);
        assert_eq!(
            (options.slices, options.steps, rest),
            (vec!["v5e-1".to_owned()], Some(2), script.map(String::from).to_vec())
        );
        let (options, rest) =
            split(&["train.py", "--steps", "600", "--slice", "v5e-1", "--slice=v6e-1", "--steps", "4"]);
        assert_eq!(options.slices, ["v5e-1", "v6e-1"]);
        assert_eq!((options.steps, rest), (Some(4), script.map(String::from).to_vec()));
        // A script may have an option of that name.
        let (options, rest) = split(&["--slice", "cpu", "train.py", "--slice", "3"]);
        assert_eq!(
            (options.slices, rest),
            (vec!["cpu".to_owned()], ["train.py", "--slice", "3"].map(String::from).to_vec())
        );
    }

    #[test]
    fn what_does_not_fit_counts_more_than_what_is_not_known() {
        let judged = |verdict| {
            let slice = Slice::parse("v5e-1").unwrap();
            Judged { verdict, ..Judged::unknown(&slice, String::new()) }
        };
        for (verdicts, expected) in [
            (&[Verdict::Fits, Verdict::FitsBarely][..], 0),
            (&[Verdict::Fits, Verdict::Unknown], 2),
            (&[Verdict::Unknown, Verdict::DoesNotFit, Verdict::Fits], 1),
        ] {
            let slices: Vec<Judged> = verdicts.iter().map(|v| judged(*v)).collect();
            assert_eq!(status(&slices), expected);
        }
    }
}
