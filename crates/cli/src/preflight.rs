//! `oxitorch preflight`: does a script's step fit a slice, and how fast could it be there, without the slice.
//!
//! The script runs in a process of its own, on a device that is not there (the engine's `Absent`), and leaves its
//! programs; the plugin compiles them in another one for each slice; the rest is arithmetic (verdict.rs).

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anstyle::{AnsiColor, Style};
use anyhow::{Context, bail};
use clap::{Args, Parser};
use oxitorch_pjrt::{DiscoverOptions, Found, Platform, discover};
use serde::Serialize;

use crate::aot::{Compiling, Effort, Outcome, Said};
use crate::facts::Facts;
use crate::graphs::{amount, short};
use crate::machine;
use crate::report::{bytes, cut, duration, many};
use crate::slices::Slice;
use crate::verdict::{Capture, Judged, Judgement, Verdict, Work};

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
    /// What to compile for, for instance v5e-1, v6e-8, v5e:2x4, trillium, cpu; may be given several times
    #[arg(long = "slice", value_name = "NAME")]
    slices: Vec<String>,
    /// Training steps to capture [default: 3]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Write the report as JSON into this file; - is stdout
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// How much work the compiler does: fast, or full as a run on the device has it in the end [default: fast]
    #[arg(long, value_enum)]
    effort: Option<Effort>,
    /// What the script reads where it asks for a computed value [default: 0]
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    host_value: Option<f64>,
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
        options.effort = behind.effort.or(options.effort);
        options.host_value = behind.host_value.or(options.host_value);
        Ok((options, script))
    }
}

/// The report, as JSON.
#[derive(Serialize)]
struct Report {
    version: u32,
    oxitorch: &'static str,
    script: Vec<String>,
    steps: u64,
    effort: Effort,
    elapsed_s: f64,
    slices: Vec<Judged>,
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
    let of = |status: i32| slices.iter().any(|s| s.verdict.status() == status);
    [1, 2].into_iter().find(|&s| of(s)).unwrap_or(0)
}

fn report(options: &Options, script: Vec<String>, facts: &Facts, start: Instant) -> anyhow::Result<Report> {
    if options.slices.is_empty() {
        bail!("which slice? Say for instance --slice v5e-1");
    }
    let slices: Vec<Slice> = options.slices.iter().map(|s| Slice::parse(s)).collect::<anyhow::Result<_>>()?;
    let found = discover(&DiscoverOptions { python_paths: facts.site_dirs.clone(), ..Default::default() });
    let plugins: Vec<&Found> =
        slices.iter().map(|s| plugin(&found, s.platform())).collect::<anyhow::Result<_>>()?;
    let steps = options.steps.unwrap_or(STEPS).max(1);
    let effort = options.effort.unwrap_or(Effort::Fast);
    let mut captures: BTreeMap<(Platform, u64), Run> = BTreeMap::new();
    let mut judged = Vec::new();
    for (slice, plugin) in slices.iter().zip(plugins) {
        let memory = match slice.chip() {
            Some(chip) => chip.device_memory,
            None => machine::memory().context("the memory of this machine is not known")?.0,
        };
        // Where windows are cut depends on the memory, so each size has programs of its own.
        let run = match captures.entry((slice.platform(), memory)) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(place) => {
                let value = options.host_value.unwrap_or(0.0);
                place.insert(Run::new(&script, slice, memory, (steps, value), facts)?)
            }
        };
        judged.push(run.judge(slice, memory, plugin, effort, facts));
    }
    Ok(Report {
        version: VERSION,
        oxitorch: env!("CARGO_PKG_VERSION"),
        script,
        steps,
        effort,
        elapsed_s: start.elapsed().as_secs_f64(),
        slices: judged,
    })
}

fn plugin(found: &[Found], platform: Platform) -> anyhow::Result<&Found> {
    let missing = || {
        let package = platform.package();
        format!("{package} is not installed, and it is what compiles for a {platform}: pip install {package}")
    };
    found.iter().find(|f| f.platform == platform).with_context(missing)
}

/// Says on stderr what goes on: stdout is for the report.
fn say(text: &str) {
    let dim = Style::new().dimmed();
    anstream::eprintln!("{dim}preflight: {text}{dim:#}");
}

/// A run of the script on a device that is not there.
struct Run {
    folder: tempfile::TempDir,
    capture: Option<Capture>,
    /// What went wrong, if it did.
    failure: Option<String>,
}

impl Run {
    fn new(
        script: &[String],
        slice: &Slice,
        memory: u64,
        (steps, value): (u64, f64),
        facts: &Facts,
    ) -> anyhow::Result<Run> {
        let folder = tempfile::Builder::new().prefix("oxitorch-preflight-").tempdir()?;
        let device = serde_json::json!({
            "platform": slice.platform().name(),
            "kind": slice.chip().map_or("XLA:CPU", |c| c.kind),
            "memory_bytes": memory,
            "steps": steps,
            "reads_as": value,
        });
        fs::write(folder.path().join("device.json"), device.to_string())?;
        say(&format!("running {} without a device, {}", script[0], many(steps, "step")));
        let start = Instant::now();
        let status = Command::new(&facts.executable)
            .args(script)
            .env("OXITORCH_PREFLIGHT", folder.path())
            .env("PYTHONUNBUFFERED", "1") // so that what it prints comes in its place
            .stdout(Stdio::from(std::io::stderr()))
            .status()
            .with_context(|| format!("cannot run {}", facts.executable.display()))?;
        let capture = match fs::read(folder.path().join("capture.json")) {
            Ok(json) => Some(serde_json::from_slice::<Capture>(&json).context("the capture cannot be read")?),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(e).context("the capture cannot be read"),
        };
        let failure = failure(capture.as_ref(), status, steps);
        if let Some(capture) = &capture {
            let programs = many(capture.programs.len() as u64, "program");
            let steps = many(capture.steps, "step");
            say(&format!("{steps}, {programs} in {}", duration(start.elapsed())));
        }
        Ok(Run { folder, capture, failure })
    }

    /// Compiles what was captured for a slice, and judges it.
    fn judge(&self, slice: &Slice, memory: u64, plugin: &Found, effort: Effort, facts: &Facts) -> Judged {
        let mut judged = Judged::unknown(slice, self.failure.clone().unwrap_or_default());
        let Some(capture) = &self.capture else { return judged };
        judged.limit_bytes = Some(memory);
        let mut outcomes = Vec::new();
        let failed = self.compile(slice, plugin, effort, facts, &mut judged, &mut outcomes);
        judged.judge(slice.chip(), capture, &outcomes);
        if let Err(e) = failed {
            let done = format!("{} of {}", outcomes.len(), many(self.distinct() as u64, "program"));
            judged.verdict = Verdict::Unknown;
            judged.reason = Some(format!("{e:#}; {done} compiled until then"));
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
        slice: &Slice,
        plugin: &Found,
        effort: Effort,
        facts: &Facts,
        judged: &mut Judged,
        outcomes: &mut Vec<Outcome>,
    ) -> anyhow::Result<()> {
        let what = (slice.platform(), plugin.path.as_path());
        let mut child = Compiling::start(facts, what, slice.topology(), effort, self.folder.path())?;
        let (all, mut begun) = (self.distinct(), 0);
        let names = self.capture.iter().flat_map(|c| &c.programs);
        let describe = |id: &str| {
            names
                .clone()
                .find(|p| p.id == id)
                .map_or_else(String::new, |p| format!("{}, {}", p.name, many(p.ops.len() as u64, "op")))
        };
        while let Some(said) = child.next()? {
            match said {
                Said::Device { kind, memory_bytes, version, .. } => {
                    judged.device = kind;
                    judged.compiler = version;
                    let known = memory_bytes.and_then(|b| u64::try_from(b).ok());
                    judged.limit_bytes = known.or(judged.limit_bytes);
                }
                Said::Begun(id) => {
                    begun += 1;
                    say(&format!("compiling {begun} of {all} for {}: {}", slice.name, describe(&id)));
                }
                Said::Done(outcome) => {
                    let took = duration(Duration::from_secs_f64(outcome.compile_s));
                    outcomes.push(*outcome);
                    if let Some(o) = outcomes.last() {
                        let (n, what) = (outcomes.len(), if o.error.is_some() { "failed" } else { "done" });
                        say(&format!("{n} of {all} {what} in {took}: {}", describe(&o.id)));
                    }
                }
                Said::Failed(why) => bail!(why),
            }
        }
        Ok(())
    }
}

/// Why a run of the script tells too little, if it does.
fn failure(capture: Option<&Capture>, status: ExitStatus, steps: u64) -> Option<String> {
    let how = match (status.code(), status.signal()) {
        (_, Some(2)) | (Some(130), _) => "was interrupted".to_owned(),
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

impl Report {
    fn text(&self) -> String {
        let bold = Style::new().bold();
        let mut out = String::new();
        for slice in &self.slices {
            let _ = writeln!(out, "{bold}{}{bold:#}  {}", slice.slice, place(slice));
            out += &slice_text(slice);
            out.push('\n');
        }
        if self.slices.len() > 1 {
            out += &table(&self.slices);
        }
        let dim = Style::new().dimmed();
        let took = duration(Duration::from_secs_f64(self.elapsed_s));
        let effort = match self.effort {
            Effort::Fast => "compiled with little effort; --effort full is what a run has in the end",
            Effort::Full => "compiled with full effort",
        };
        let _ = writeln!(out, "{dim}{took}; {effort}{dim:#}");
        out
    }
}

fn place(s: &Judged) -> String {
    let topology = s.topology.as_ref().map_or(String::new(), |t| format!(", topology {t}"));
    let chips = match s.chips {
        1 => "1 chip".to_owned(),
        n => format!("{} of {n} chips: the script uses one device", s.chips_used),
    };
    format!("{}{topology}, {chips}", s.device)
}

fn mark(verdict: Verdict) -> (&'static str, Style, &'static str) {
    match verdict {
        Verdict::Fits => ("✓", AnsiColor::Green.on_default().bold(), "fits"),
        Verdict::FitsBarely => {
            ("!", AnsiColor::Yellow.on_default().bold(), "fits with less than 5 % to spare")
        }
        Verdict::DoesNotFit => ("✗", AnsiColor::Red.on_default().bold(), "does not fit"),
        Verdict::Unknown => ("?", AnsiColor::Yellow.on_default().bold(), "could not tell"),
    }
}

fn slice_text(s: &Judged) -> String {
    let dim = Style::new().dimmed();
    let (sign, style, words) = mark(s.verdict);
    let mut out = format!("  {style}{sign} {words}{style:#}");
    if let (Some(need), Some(limit)) = (s.need_bytes, s.limit_bytes) {
        let share = 100.0 * need as f64 / limit as f64;
        let least = if s.verdict == Verdict::DoesNotFit { "at least " } else { "" };
        let _ = write!(out, ": {least}{} of {} ({share:.1} %)", bytes(need), bytes(limit));
    }
    out.push('\n');
    if let Some(why) = s.reason.as_ref().filter(|w| !w.is_empty()) {
        why.lines().for_each(|l| _ = writeln!(out, "    {l}"));
    }
    if s.verdict.status() == 0 && s.platform == "tpu" {
        let _ = writeln!(out, "    {dim}what the run time keeps for itself on a chip is not in this{dim:#}");
    }
    out += &largest(s);
    out += &step(s);
    out += &programs(&s.programs);
    out += &host(s);
    out
}

/// The memory of the program that needs most.
fn largest(s: &Judged) -> String {
    let Some(p) = s.programs.iter().max_by_key(|p| p.need_bytes) else { return String::new() };
    let Some(m) = p.memory_bytes else { return String::new() };
    let bold = Style::new().bold();
    let mut out = format!("\n  {bold}memory of one chip{bold:#} while {} runs\n", p.name);
    let code: u64 = p.need_bytes.unwrap_or(0).saturating_sub(p.beside_bytes + m.peak);
    let rows = [
        ("arguments", m.arguments, ""),
        ("outputs", m.outputs, ""),
        ("aliased", m.aliased, "outputs in the memory of arguments"),
        ("temporaries", m.temporaries, ""),
        ("peak", m.peak, "of those together"),
        ("besides", p.beside_bytes, "other tensors that are alive then"),
        ("programs", code, "the machine code of all programs"),
    ];
    for (name, n, what) in rows {
        let line = format!("    {:>10}  {name:12} {what}", bytes(n));
        let _ = writeln!(out, "{}", line.trim_end());
    }
    let _ = writeln!(out, "\n  {bold}its largest arguments and outputs{bold:#}");
    for t in p.tensors.iter().take(SHOWN) {
        let line = t.line.as_deref().map_or("an unknown line", short);
        let op = t.op.as_ref().map_or(String::new(), |o| format!(" {o}"));
        let given = if t.overwritten { ", overwritten" } else { "" };
        let _ = writeln!(out, "    {:>10}  {:8} {}, {line}{op}{given}", bytes(t.bytes), t.role, t.r#type);
    }
    out
}

/// Tensors that are listed.
const SHOWN: usize = 8;

fn time(s: f64) -> String {
    match s {
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

fn step(s: &Judged) -> String {
    let Some(step) = &s.step else { return String::new() };
    let bold = Style::new().bold();
    let mut out = format!("\n  {bold}a step{bold:#}\n");
    let Work { flops, product_flops, bytes_accessed, intensity, .. } = step.work;
    let launches = many(step.launches, "launch").replace("launchs", "launches");
    let _ = writeln!(out, "    {launches} of {}", many(step.programs, "program"));
    if bytes_accessed > 0.0 {
        let (flops, products) = (amount(flops), amount(product_flops));
        let _ = writeln!(out, "    {flops}FLOP, of which {products}FLOP in products and convolutions");
        let moved = bytes(bytes_accessed as u64);
        let _ = writeln!(out, "    {moved} to and from memory, {intensity:.1} FLOP per byte");
    }
    if let (Some(t), Some(mxu), Some(hbm)) = (step.work.roofline_s, step.work.mxu_s, step.work.hbm_s) {
        let bound = if step.work.bound == Some("mxu") { "the matrix unit" } else { "memory bandwidth" };
        let (mxu, hbm) = (time(mxu), time(hbm));
        let _ = writeln!(out, "    at least {}: bound by {bound} (products {mxu}, memory {hbm})", time(t));
    }
    if let Some(share) = step.work.mfu_ceiling {
        let _ = writeln!(out, "    at most {:.1} % of the chip's bfloat16 peak", 100.0 * share);
    }
    out
}

/// Programs that are listed.
const LISTED: usize = 20;

fn programs(all: &[Judgement]) -> String {
    let (bold, dim, name) = (Style::new().bold(), Style::new().dimmed(), AnsiColor::Cyan.on_default());
    let mut out = format!(
        "\n  {bold}{:8}  {:>5}  {:>8}  {:>10}  {:>10}  {:>9}  {:>7}  program{bold:#}\n",
        "id", "ops", "launches", "memory", "temporary", "at least", "compile"
    );
    for p in all.iter().take(LISTED) {
        let (_, style, _) = mark(p.verdict);
        let least = p.work.as_ref().and_then(|w| w.roofline_s).map_or_else(|| "-".to_owned(), time);
        let need = p.need_bytes.map_or_else(|| "-".to_owned(), bytes);
        let temporaries = p.memory_bytes.map_or_else(|| "-".to_owned(), |m| bytes(m.temporaries));
        let compile = duration(Duration::from_secs_f64(p.compile_s));
        let line = p.first_line.as_deref().map_or("", short);
        let _ = writeln!(
            out,
            "  {style}{:8}{style:#}  {:>5}  {:>8}  {need:>10}  {temporaries:>10}  {least:>9}  {compile:>7}  {name}{}{name:#} {dim}{line}{dim:#}",
            cut(&p.id, 8).trim_end_matches('.'),
            p.ops,
            p.launches,
            p.name,
        );
    }
    if all.len() > LISTED {
        let _ = writeln!(out, "  and {} more", all.len() - LISTED);
    }
    out
}

/// What goes between host and device in the last step, and what the CPU did.
fn host(s: &Judged) -> String {
    let bold = Style::new().bold();
    let reads: u64 = s.host_reads.iter().map(|m| m.count).sum();
    let mut out = format!("\n  {bold}{}{bold:#} in the last step\n", many(reads, "host read"));
    for m in &s.host_reads {
        let line = m.line.as_deref().unwrap_or("an unknown line");
        let _ = writeln!(out, "    {:>4} x  {}, {}", m.count, short(line), bytes(m.bytes));
    }
    if !s.fallbacks.is_empty() {
        let _ = writeln!(out, "  {bold}operations that ran on the CPU{bold:#}, in all steps");
    }
    for f in &s.fallbacks {
        let line = f.line.as_deref().unwrap_or("an unknown line");
        let _ = writeln!(out, "    {:>4} x  {} {}", f.count, f.op, short(line));
    }
    out
}

/// Several slices side by side.
fn table(slices: &[Judged]) -> String {
    let bold = Style::new().bold();
    let mut out =
        format!("{bold}{:14}  {:>10}  {:>10}  {:>9}{bold:#}\n", "slice", "memory", "limit", "at least");
    for s in slices {
        let size = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), bytes);
        let least = s.step.as_ref().and_then(|t| t.work.roofline_s).map_or_else(|| "-".to_owned(), time);
        let (_, style, words) = mark(s.verdict);
        let (need, limit) = (size(s.need_bytes), size(s.limit_bytes));
        let _ = writeln!(out, "{:14}  {need:>10}  {limit:>10}  {least:>9}  {style}{words}{style:#}", s.slice);
    }
    out.push('\n');
    out
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
