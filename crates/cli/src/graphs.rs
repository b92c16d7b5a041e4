//! `oxitorch graphs`: the programs that a run has captured.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anstyle::{AnsiColor, Style};
use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::facts::Facts;
use crate::report::{bytes, cut, duration, many};
use crate::script;

/// The folder if nothing else says one.
const FOLDER: &str = "oxitorch-graphs";

/// Which folder.
#[derive(Args)]
pub(crate) struct Which {
    /// The folder of captured programs [default: OXITORCH_GRAPHS, else oxitorch-graphs]
    #[arg(long, value_name = "DIR", global = true)]
    dir: Option<PathBuf>,
}

#[derive(Subcommand)]
pub(crate) enum Do {
    /// List the programs
    Ls {
        /// Only those whose id, name, ops or lines have this in them
        text: Option<String>,
        /// What comes first
        #[arg(long, value_enum, default_value = "time")]
        sort: Sort,
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Show a program: its operations with their Python lines, cost, memory, StableHLO, optimized HLO
    Show {
        /// The beginning of its id
        id: String,
        /// Show only these parts
        #[arg(long, value_enum, value_delimiter = ',')]
        only: Vec<Part>,
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Run a script and capture its programs
    ///
    /// The exit status is the script's. Programs are written as they are compiled, so they are there if it fails.
    Record {
        /// A Python script with its arguments, or -m and a module
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "SCRIPT")]
        script: Vec<String>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Sort {
    /// Time on the device, all launches together
    Time,
    /// Launches
    Launches,
    /// Time that compiling took
    Compile,
    /// Operations
    Ops,
    /// Memory of temporaries
    Memory,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Operations with their Python lines
    Ops,
    /// Types of inputs and outputs
    Types,
    /// The compiler's estimates
    Cost,
    /// What it needs
    Memory,
    /// As it went to the compiler
    Stablehlo,
    /// As it came from the compiler
    Hlo,
}

/// An operation.
#[derive(Deserialize, Serialize)]
struct Op {
    op: String,
    results: Vec<Option<String>>,
    line: Option<String>,
}

/// A captured program, as the engine writes it.
#[derive(Deserialize, Serialize)]
struct Captured {
    id: String,
    name: String,
    first_line: Option<String>,
    ended_by: Option<String>,
    ended_at: Option<String>,
    from: String,
    compile_s: f64,
    inputs: Vec<String>,
    outputs: Vec<Option<String>>,
    donated: Vec<u32>,
    ops: Vec<Op>,
    launches: u64,
    device_s: f64,
    #[serde(default)]
    cost: BTreeMap<String, serde_json::Value>,
    #[serde(default)]
    memory_bytes: BTreeMap<String, i64>,
}

impl Captured {
    fn mentions(&self, text: &str) -> bool {
        let in_op = |o: &Op| o.op.contains(text) || o.line.as_ref().is_some_and(|l| l.contains(text));
        self.id.starts_with(text) || self.name.contains(text) || self.ops.iter().any(in_op)
    }

    fn memory(&self, what: &str) -> u64 {
        self.memory_bytes.get(what).copied().unwrap_or(0).max(0) as u64
    }
}

/// Runs a subcommand; what it says and the exit status.
pub(crate) fn run(which: &Which, what: Option<Do>, facts: &Facts) -> anyhow::Result<(String, i32)> {
    let folder = which.folder(facts);
    let what = what.unwrap_or(Do::Ls { text: None, sort: Sort::Time, json: false });
    let text = match what {
        Do::Ls { text, sort, json } => {
            let mut found = read(&folder)?;
            found.retain(|g| text.as_ref().is_none_or(|t| g.mentions(t)));
            sort.apply(&mut found);
            if json { serde_json::to_string_pretty(&found)? + "\n" } else { table(&found) }
        }
        Do::Show { id, only, json } => {
            let graph = find(&folder, &id)?;
            if json { whole(&folder, &graph)? } else { show(&folder, &graph, &only)? }
        }
        Do::Record { script } => {
            fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
            let folder = std::path::absolute(&folder)?;
            let status = script::run(&script, &[("OXITORCH_GRAPHS", folder.as_os_str())], facts)?;
            let n = read(&folder)?.len();
            let name = AnsiColor::Cyan.on_default();
            let dim = Style::new().dimmed();
            anstream::eprintln!(
                "{name}{}{name:#}: {} {dim}→ oxitorch graphs --dir {}{dim:#}",
                folder.display(),
                many(n as u64, "program"),
                folder.display()
            );
            return Ok((String::new(), status));
        }
    };
    Ok((text, 0))
}

impl Which {
    fn folder(&self, facts: &Facts) -> PathBuf {
        let set = facts.env.iter().find(|v| v.name == "OXITORCH_GRAPHS").and_then(|v| v.value.as_ref());
        self.dir.clone().or_else(|| set.map(PathBuf::from)).unwrap_or_else(|| FOLDER.into())
    }
}

fn read(folder: &Path) -> anyhow::Result<Vec<Captured>> {
    let unusable = || {
        format!(
            "no captured programs in {} (capture some with `oxitorch graphs record SCRIPT`)",
            folder.display()
        )
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(unusable)? {
        let path = entry?.path();
        let is_fact = path.extension().is_some_and(|e| e == "json");
        if is_fact && !path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.')) {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let graph = serde_json::from_str(&text);
            found.push(graph.with_context(|| format!("{} is no captured program", path.display()))?);
        }
    }
    Ok(found)
}

fn find(folder: &Path, id: &str) -> anyhow::Result<Captured> {
    let mut found = read(folder)?;
    found.retain(|g| g.id.starts_with(id));
    match found.len() {
        0 => bail!("no program whose id begins with {id} in {}", folder.display()),
        1 => Ok(found.remove(0)),
        n => bail!("{n} programs have ids that begin with {id}: say more of it"),
    }
}

impl Sort {
    fn apply(self, graphs: &mut [Captured]) {
        let micros = |s: f64| (s * 1e6) as u64;
        graphs.sort_by_key(|g| {
            let by = match self {
                Sort::Time => micros(g.device_s),
                Sort::Launches => g.launches,
                Sort::Compile => micros(g.compile_s),
                Sort::Ops => g.ops.len() as u64,
                Sort::Memory => g.memory("temporaries"),
            };
            (Reverse(by), g.id.clone())
        });
    }
}

fn seconds(s: f64) -> String {
    duration(std::time::Duration::from_secs_f64(s.max(0.0)))
}

/// 1234567 -> "1.2 M".
pub(crate) fn amount(n: f64) -> String {
    let units = ["", " k", " M", " G", " T", " P"];
    let unit = if n >= 1000.0 { ((n.log10() / 3.0) as usize).min(units.len() - 1) } else { 0 };
    let n = n / 1000f64.powi(unit as i32);
    if unit == 0 { format!("{n:.0}") } else { format!("{n:.1}{}", units[unit]) }
}

/// `train.py:8` of `/home/me/train.py:8 in step`.
pub(crate) fn short(line: &str) -> &str {
    let place = line.split(" in ").next().unwrap_or(line);
    place.rsplit('/').next().unwrap_or(place)
}

fn table(graphs: &[Captured]) -> String {
    let bold = Style::new().bold();
    let dim = Style::new().dimmed();
    let name = AnsiColor::Cyan.on_default();
    let total: f64 = graphs.iter().map(|g| g.device_s).sum();
    let mut out = format!(
        "{bold}{:12}  {:>6}  {:>9}  {:>8}  {:>9}  {:>5}  {:>9}  {:>10}  program{bold:#}\n",
        "id", "ops", "compile", "launches", "device", "share", "flops", "temporary"
    );
    for g in graphs {
        // What had to be compiled cost time; what was there did not.
        let style = if g.from == "compiled" { AnsiColor::Yellow.on_default() } else { Style::new() };
        let flops = g.cost.get("flops").and_then(serde_json::Value::as_f64);
        let _ = writeln!(
            out,
            "{:12}  {:>6}  {style}{:>9}{style:#}  {:>8}  {:>9}  {:>4.0}%  {:>9}  {:>10}  {name}{}{name:#} {dim}{}{dim:#}",
            g.id,
            g.ops.len(),
            seconds(g.compile_s),
            g.launches,
            seconds(g.device_s),
            100.0 * g.device_s / total.max(f64::MIN_POSITIVE),
            flops.map_or_else(|| "-".to_owned(), amount),
            bytes(g.memory("temporaries")),
            g.name,
            g.first_line.as_deref().map_or("", short),
        );
    }
    out
}

/// The program as it went to the compiler, or as it came from there; nothing if the plugin did not give it.
fn program(folder: &Path, graph: &Captured, extension: &str) -> Option<String> {
    fs::read_to_string(folder.join(format!("{}.{extension}", graph.id))).ok()
}

fn whole(folder: &Path, graph: &Captured) -> anyhow::Result<String> {
    let mut value = serde_json::to_value(graph)?;
    value["stablehlo"] = program(folder, graph, "mlir").into();
    value["optimized_hlo"] = program(folder, graph, "hlo").into();
    Ok(serde_json::to_string_pretty(&value)? + "\n")
}

/// How a part is shown.
type Show = fn(&Path, &Captured) -> String;

fn show(folder: &Path, g: &Captured, only: &[Part]) -> anyhow::Result<String> {
    let name = AnsiColor::Cyan.on_default();
    let dim = Style::new().dimmed();
    let wants = |part| only.is_empty() || only.contains(&part);
    let mut out = String::new();
    if only.is_empty() {
        let _ = writeln!(out, "{name}{}{name:#} {dim}{}{dim:#}", g.name, g.id);
        let ended = g.ended_by.as_deref().unwrap_or("-");
        let at = g.ended_at.as_deref().map_or(String::new(), |l| format!(" at {l}"));
        let _ = writeln!(out, "  {}, ended by: {ended}{at}", many(g.ops.len() as u64, "op"));
        let _ = writeln!(out, "  {} in {}", g.from, seconds(g.compile_s));
        let _ =
            writeln!(out, "  launched {}, {} on the device", many(g.launches, "time"), seconds(g.device_s));
    }
    let parts: [(Part, &str, Show); 6] = [
        (Part::Ops, "operations", ops),
        (Part::Types, "inputs and outputs", types),
        (Part::Cost, "cost, as the compiler estimates it", cost),
        (Part::Memory, "memory", memory),
        (Part::Stablehlo, "StableHLO", |folder, g| text(folder, g, "mlir")),
        (Part::Hlo, "optimized HLO", |folder, g| text(folder, g, "hlo")),
    ];
    for (part, title, show) in parts.into_iter().filter(|(part, ..)| wants(*part)) {
        if only.len() != 1 {
            let bold = Style::new().bold();
            let _ = writeln!(out, "\n{bold}{title}{bold:#}");
        } else if matches!(part, Part::Stablehlo | Part::Hlo) && program(folder, g, extension(part)).is_none()
        {
            bail!("the plugin did not give the {title} of this program");
        }
        out += &show(folder, g);
    }
    Ok(out)
}

fn extension(part: Part) -> &'static str {
    if part == Part::Stablehlo { "mlir" } else { "hlo" }
}

/// Operations by number, with the Python line where it changes.
fn ops(_: &Path, g: &Captured) -> String {
    let dim = Style::new().dimmed();
    let mut out = String::new();
    let mut last = None;
    for (i, op) in g.ops.iter().enumerate() {
        let line = op.line.as_deref().unwrap_or("an unknown line");
        if last.replace(line) != Some(line) {
            let _ = writeln!(out, "  {dim}{line}{dim:#}");
        }
        let results: Vec<&str> = op.results.iter().map(|r| r.as_deref().unwrap_or("-")).collect();
        let _ = writeln!(out, "  {:>6}  {:32} {}", i + 1, op.op, results.join(", "));
    }
    out
}

fn types(_: &Path, g: &Captured) -> String {
    let mut out = String::new();
    for (i, ty) in g.inputs.iter().enumerate() {
        let given = if g.donated.contains(&(i as u32)) { "  overwritten" } else { "" };
        let _ = writeln!(out, "  input {i:>4}  {ty}{given}");
    }
    for (i, ty) in g.outputs.iter().enumerate() {
        let _ = writeln!(out, "  output {i:>3}  {}", ty.as_deref().unwrap_or("-"));
    }
    out
}

fn cost(_: &Path, g: &Captured) -> String {
    let mut out = String::new();
    // Names with braces are of single operands.
    for (name, value) in g.cost.iter().filter(|(name, _)| !name.contains('{')) {
        let value = value.as_f64().map_or_else(|| value.to_string(), amount);
        let _ = writeln!(out, "  {:24} {value:>10}", cut(name, 24));
    }
    out
}

fn memory(_: &Path, g: &Captured) -> String {
    let mut out = String::new();
    for (name, &n) in &g.memory_bytes {
        if !(name == "peak" && n == 0) {
            let _ = writeln!(out, "  {name:12} {:>12}", bytes(n.max(0) as u64));
        }
    }
    out
}

fn text(folder: &Path, g: &Captured, extension: &str) -> String {
    let missing = || "  the plugin did not give it\n".to_owned();
    program(folder, g, extension).map_or_else(missing, |t| t.trim_end().to_owned() + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_short() {
        assert_eq!([0.0, 999.0, 1000.0, 2.5e6, 3e12].map(amount), ["0", "999", "1.0 k", "2.5 M", "3.0 T"]);
    }

    #[test]
    fn lines_are_short() {
        assert_eq!(short("/home/me/train.py:8 in step"), "train.py:8");
        assert_eq!(short("train.py:8"), "train.py:8");
    }
}
