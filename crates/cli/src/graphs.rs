//! `oxitorch graphs`: the programs that a run has captured.

use std::cmp::Reverse;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anstyle::{AnsiColor, Style};
use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use oxitorch_capture::{Cost, Graph, Op, Origin, Reason, TensorType};
use oxitorch_format::{amount, bytes, cut, duration, many, short};

use crate::facts::Facts;
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

/// Whether its id begins with this, or its name, an op or a line has it.
fn mentions(g: &Graph, text: &str) -> bool {
    let in_op = |o: &Op| o.op.contains(text) || o.line.as_ref().is_some_and(|l| l.contains(text));
    g.id.starts_with(text) || g.name.contains(text) || g.ops.iter().any(in_op)
}

/// The bytes of its temporaries, as far as they are known.
fn temporaries(g: &Graph) -> u64 {
    g.memory_bytes.map_or(0, |m| m.temporaries.max(0) as u64)
}

/// Runs a subcommand; what it says and the exit status.
pub(crate) fn run(which: &Which, what: Option<Do>, facts: &Facts) -> anyhow::Result<(String, i32)> {
    let folder = which.folder(facts);
    let what = what.unwrap_or(Do::Ls { text: None, sort: Sort::Time, json: false });
    let text = match what {
        Do::Ls { text, sort, json } => {
            let mut found = read(&folder)?;
            found.retain(|g| text.as_ref().is_none_or(|t| mentions(g, t)));
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

fn read(folder: &Path) -> anyhow::Result<Vec<Graph>> {
    if !folder.is_dir() {
        bail!(
            "no captured programs in {} (capture some with `oxitorch graphs record SCRIPT`)",
            folder.display()
        );
    }
    Ok(Graph::read_all(folder)?)
}

fn find(folder: &Path, id: &str) -> anyhow::Result<Graph> {
    let mut found = read(folder)?;
    found.retain(|g| g.id.starts_with(id));
    match found.len() {
        0 => bail!("no program whose id begins with {id} in {}", folder.display()),
        1 => Ok(found.remove(0)),
        n => bail!("{n} programs have ids that begin with {id}: say more of it"),
    }
}

impl Sort {
    fn apply(self, graphs: &mut [Graph]) {
        let micros = |s: f64| (s * 1e6) as u64;
        graphs.sort_by_key(|g| {
            let by = match self {
                Sort::Time => micros(g.device_s),
                Sort::Launches => g.launches,
                Sort::Compile => micros(g.compile_s),
                Sort::Ops => g.ops.len() as u64,
                Sort::Memory => temporaries(g),
            };
            (Reverse(by), g.id.clone())
        });
    }
}

fn seconds(s: f64) -> String {
    duration(std::time::Duration::from_secs_f64(s.max(0.0)))
}

fn table(graphs: &[Graph]) -> String {
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
        let style = if g.from == Origin::Compiled { AnsiColor::Yellow.on_default() } else { Style::new() };
        let flops = g.cost.get("flops").and_then(Cost::number);
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
            bytes(temporaries(g)),
            g.name,
            g.first_line.as_deref().map_or("", short),
        );
    }
    out
}

/// The program as it went to the compiler, or as it came from there; nothing if the plugin did not give it.
fn program(folder: &Path, graph: &Graph, extension: &str) -> Option<String> {
    fs::read_to_string(folder.join(format!("{}.{extension}", graph.id))).ok()
}

fn whole(folder: &Path, graph: &Graph) -> anyhow::Result<String> {
    let mut value = serde_json::to_value(graph)?;
    value["stablehlo"] = program(folder, graph, "mlir").into();
    value["optimized_hlo"] = program(folder, graph, "hlo").into();
    Ok(serde_json::to_string_pretty(&value)? + "\n")
}

/// How a part is shown.
type Show = fn(&Path, &Graph) -> String;

fn show(folder: &Path, g: &Graph, only: &[Part]) -> anyhow::Result<String> {
    let name = AnsiColor::Cyan.on_default();
    let dim = Style::new().dimmed();
    let wants = |part| only.is_empty() || only.contains(&part);
    let mut out = String::new();
    if only.is_empty() {
        let _ = writeln!(out, "{name}{}{name:#} {dim}{}{dim:#}", g.name, g.id);
        let ended = g.ended_by.map_or("-", Reason::name);
        let at = g.ended_at.as_deref().map_or(String::new(), |l| format!(" at {l}"));
        let which = g.ended_by_collective.as_deref().map_or(String::new(), |c| format!(" {c}"));
        let _ = writeln!(out, "  {}, ended by: {ended}{which}{at}", many(g.ops.len() as u64, "op"));
        let _ = writeln!(out, "  {} in {}", g.from.name(), seconds(g.compile_s));
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
fn ops(_: &Path, g: &Graph) -> String {
    let dim = Style::new().dimmed();
    let mut out = String::new();
    let mut last = None;
    for (i, op) in g.ops.iter().enumerate() {
        let line = op.line.as_deref().unwrap_or("an unknown line");
        if last.replace(line) != Some(line) {
            let _ = writeln!(out, "  {dim}{line}{dim:#}");
        }
        let results: Vec<String> = op.results.iter().map(shown).collect();
        let _ = writeln!(out, "  {:>6}  {:32} {}", i + 1, op.op, results.join(", "));
    }
    out
}

fn shown(ty: &Option<TensorType>) -> String {
    ty.as_ref().map_or_else(|| "-".to_owned(), TensorType::to_string)
}

fn types(_: &Path, g: &Graph) -> String {
    let mut out = String::new();
    for (i, ty) in g.inputs.iter().enumerate() {
        let given = if g.donated.contains(&(i as u32)) { "  overwritten" } else { "" };
        let _ = writeln!(out, "  input {i:>4}  {ty}{given}");
    }
    for (i, ty) in g.outputs.iter().enumerate() {
        let _ = writeln!(out, "  output {i:>3}  {}", shown(ty));
    }
    out
}

fn cost(_: &Path, g: &Graph) -> String {
    let mut out = String::new();
    // Names with braces are of single operands.
    for (name, value) in g.cost.iter().filter(|(name, _)| !name.contains('{')) {
        let value = match value {
            Cost::Text(text) => text.clone(),
            number => amount(number.number().unwrap_or_default()),
        };
        let _ = writeln!(out, "  {:24} {value:>10}", cut(name, 24));
    }
    out
}

fn memory(_: &Path, g: &Graph) -> String {
    let mut out = String::new();
    let Some(m) = g.memory_bytes else { return out };
    let parts = [
        ("aliased", m.aliased),
        ("arguments", m.arguments),
        ("code", m.code),
        ("host temporaries", m.host_temporaries),
        ("outputs", m.outputs),
        ("peak", m.peak),
        ("temporaries", m.temporaries),
    ];
    for (name, n) in
        parts.into_iter().filter(|(name, n)| *n > 0 || !matches!(*name, "peak" | "host temporaries"))
    {
        let _ = writeln!(out, "  {name:16} {:>12}", bytes(n.max(0) as u64));
    }
    out
}

fn text(folder: &Path, g: &Graph, extension: &str) -> String {
    let missing = || "  the plugin did not give it\n".to_owned();
    program(folder, g, extension).map_or_else(missing, |t| t.trim_end().to_owned() + "\n")
}
