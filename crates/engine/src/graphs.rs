//! The programs of a process, to be looked at: where they come from, what they cost, what the compiler made of them.

use crate::explain::tensor;
use crate::flush::Reason;
use crate::ops::OpRef;
use crate::program::{Compiler, Graph, Program};
use crate::site::{Site, describe};
use oxitorch_aten::dtype::torch_name;
use oxitorch_hlo::{Location, Module, PrintOptions, TensorType};
use oxitorch_pjrt as pjrt;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use std::{fs, io};

/// Where an executable came from first, and how long that took.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin {
    /// The compiler.
    Compiled(Duration),
    /// A cache folder.
    Loaded(Duration),
}

/// Where the ops of a graph come from.
#[derive(Debug, Default)]
pub(crate) struct Source {
    /// Why the window ended, and where.
    pub(crate) cut: Option<(Reason, Site)>,
    /// Whether it is a part of a window that varies: it may never come again.
    pub(crate) varies: bool,
    /// Set when the executable is there, unless another program of this process has it.
    pub(crate) origin: OnceLock<Origin>,
}

/// Programs that can be looked at: the latest ones, as a program that was forgotten can be made again.
const MAX_GRAPHS: usize = 4096;

/// The latest programs in the order in which they came.
#[derive(Debug, Default)]
struct Latest {
    /// The number of the first, counted from the start of the process.
    first: usize,
    programs: VecDeque<Arc<Program>>,
}

/// The programs of a process.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    latest: Mutex<Latest>,
    /// Where each is written when it is compiled.
    folder: OnceLock<PathBuf>,
    /// What was written, for when the counts are known.
    written: Mutex<Vec<(Arc<Program>, Value)>>,
}

/// Digits of a program's name; the cache shows as many.
const DIGITS: usize = 12;

impl Graphs {
    /// Writes each program into this folder from now on.
    pub(crate) fn keep_in(&self, folder: &Path) {
        self.folder.get_or_init(|| folder.to_owned());
    }

    pub(crate) fn add(&self, program: &Arc<Program>) {
        let mut latest = self.latest.lock();
        if latest.programs.len() == MAX_GRAPHS {
            latest.programs.pop_front();
            latest.first += 1;
        }
        latest.programs.push_back(program.clone());
    }

    /// The programs from this number on, with their numbers.
    fn numbered(&self, from: usize) -> Vec<(usize, Arc<Program>)> {
        let latest = self.latest.lock();
        let gone = from.saturating_sub(latest.first);
        (latest.first..).zip(latest.programs.iter().cloned()).skip(gone).collect()
    }

    /// The program with this number, if it is not too long ago.
    pub(crate) fn get(&self, number: usize) -> Option<Arc<Program>> {
        let latest = self.latest.lock();
        latest.programs.get(number.checked_sub(latest.first)?).cloned()
    }

    /// A program has its executable, or has failed to get it.
    pub(crate) fn compiled(&self, compiler: &Compiler, program: &Program) {
        let Some(folder) = self.folder.get() else { return };
        let Some(program) =
            self.latest.lock().programs.iter().find(|p| std::ptr::eq(&***p, program)).cloned()
        else {
            return;
        };
        let Some(shown) = compiler.show(&program) else { return };
        if let Err(e) = shown.write(folder) {
            compiler.programs().warn(&format!("cannot write a program into {}: {e}", folder.display()));
            return;
        }
        self.written.lock().push((program, shown.facts));
    }

    /// Writes again how often the programs ran.
    pub(crate) fn finish(&self) {
        let Some(folder) = self.folder.get() else { return };
        for (program, mut facts) in std::mem::take(&mut *self.written.lock()) {
            if let Some(facts) = facts.as_object_mut() {
                facts.extend(usage(&program));
            }
            // What could be written once can be read as it is.
            let _ = write_facts(folder, &facts);
        }
    }
}

/// A program with all that is known of it.
#[derive(Clone, Debug)]
pub struct Shown {
    /// What fits into a table: id, name, ops with their lines, types, times, cost, memory.
    pub facts: Value,
    /// The program as it went to the compiler.
    pub stablehlo: String,
    /// The program as it came from there, if the plugin gives it in a form that can be shown.
    pub optimized: Option<String>,
}

impl Shown {
    fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let id = self.facts["id"].as_str().unwrap_or("program");
        fs::write(folder.join(format!("{id}.mlir")), &self.stablehlo)?;
        if let Some(text) = &self.optimized {
            fs::write(folder.join(format!("{id}.hlo")), text)?;
        }
        write_facts(folder, &self.facts)
    }
}

/// Whole or not at all: other processes may write the same program.
fn write_facts(folder: &Path, facts: &Value) -> io::Result<()> {
    let id = facts["id"].as_str().unwrap_or("program");
    let temporary = folder.join(format!(".{id}.{}", std::process::id()));
    fs::write(&temporary, serde_json::to_string_pretty(facts)?)?;
    fs::rename(temporary, folder.join(format!("{id}.json")))
}

/// A program that was captured and is not compiled.
pub(crate) struct Captured {
    pub(crate) facts: Map<String, Value>,
    /// As it goes to the compiler, with where each op comes from.
    pub(crate) text: String,
}

fn usage(program: &Program) -> Map<String, Value> {
    let mut out = Map::new();
    out.insert("launches".into(), program.ran.launches.load(Relaxed).into());
    out.insert("device_s".into(), (program.ran.device_ns.load(Relaxed) as f64 * 1e-9).into());
    out
}

/// Where the ops of a graph come from, for what the compiler makes of them: `aten::mm#17` is the 18th op.
fn locations(graph: &Graph) -> Vec<Location> {
    let place = |op: OpRef<'_>| {
        let site = describe(op.site);
        // `file:line in function`
        let line =
            site.as_deref().and_then(|s| s.rsplit_once(" in ").map_or(Some(s), |(place, _)| Some(place)));
        let line =
            line.and_then(|s| s.rsplit_once(':')).and_then(|(f, n)| Some((f.to_owned(), n.parse().ok()?)));
        Location { name: format!("{}#{}", oxitorch_aten::qualified(op.inst.name()), op.at), line }
    };
    graph.ops.iter().map(place).collect()
}

/// What is known of a graph without its executable.
fn facts(graph: &Graph, program: &Program, id: String) -> Map<String, Value> {
    let mut results = Vec::new();
    let mut ops = Vec::new();
    for op in graph.ops.iter() {
        let types: Vec<Option<String>> =
            op.inst.outputs.iter().map(|o| o.as_ref().map(|o| tensor(&o.ty))).collect();
        let (line, backward) = (describe(op.site), op.site.is_of_backward());
        ops.push(json!({ "op": op.inst.name(), "results": types, "line": line, "backward": backward }));
        results.extend(types);
    }
    let outputs: Vec<&Option<String>> = graph.live.iter().filter_map(|&i| results.get(i as usize)).collect();
    let (origin, seconds) = match graph.source.origin.get() {
        Some(Origin::Compiled(time)) => ("compiled", time.as_secs_f64()),
        Some(Origin::Loaded(time)) => ("loaded", time.as_secs_f64()),
        None if program.is_done() => ("memory", 0.0),
        None => ("pending", 0.0),
    };
    let mut out = Map::new();
    let mut set = |name: &str, value: Value| _ = out.insert(name.into(), value);
    set("id", id.into());
    set("name", program.name.clone().into());
    set("first_line", ops.iter().find_map(|o| o["line"].as_str()).into());
    set("ended_by", graph.source.cut.map(|(reason, _)| reason.name()).into());
    set("ended_at", graph.source.cut.and_then(|(_, site)| describe(site)).into());
    set("from", origin.into());
    set("compile_s", seconds.into());
    set("inputs", graph.inputs.iter().map(tensor).collect::<Vec<_>>().into());
    set("outputs", json!(outputs));
    set("donated", graph.donated.to_vec().into());
    set("ops", ops.into());
    out.extend(usage(program));
    out
}

/// The matrix products and convolutions of a graph, those of one line that are alike together.
fn products(graph: &Graph, module: &Module) -> Vec<Value> {
    let mut found: Vec<(Map<String, Value>, u64)> = Vec::new();
    let mut places: FxHashMap<String, usize> = FxHashMap::default();
    for p in module.products() {
        let at = p.location.map(|i| i as usize);
        let op = at.and_then(|i| graph.ops.insts.get(i)).map(|inst| inst.name());
        let line = at.and_then(|i| graph.ops.sites.get(i)).and_then(|&site| describe(site));
        let facts = json!({
            "dtype": torch_name(p.dtype).trim_start_matches("torch."),
            "precision": p.precision.name(),
            "batch": p.batch,
            "m": p.m,
            "n": p.n,
            "k": p.k,
            "op": op,
            "line": line,
            "flops": p.flops(),
        });
        let place = *places.entry(facts.to_string()).or_insert(found.len());
        match found.get_mut(place) {
            Some((_, count)) => *count += 1,
            None => found.extend(facts.as_object().map(|f| (f.clone(), 1))),
        }
    }
    let whole = |(mut facts, count): (Map<String, Value>, u64)| {
        if let Some(flops) = facts["flops"].as_f64() {
            facts.insert("flops".into(), json!(flops * count as f64));
        }
        facts.insert("count".into(), count.into());
        facts.into()
    };
    found.into_iter().map(whole).collect()
}

/// Numbers that the plugin says of a program.
fn costs(executable: &pjrt::Executable) -> Map<String, Value> {
    let number = |v: &pjrt::Value| match v {
        pjrt::Value::Float(x) => json!(x),
        pjrt::Value::Int(x) => json!(x),
        other => json!(other.to_string()),
    };
    // A plugin that does not say leaves these out.
    let cost: Map<String, Value> = executable
        .cost_analysis()
        .unwrap_or_default()
        .iter()
        .map(|(name, v)| (name.clone(), number(v)))
        .collect();
    let mut out = Map::new();
    out.insert("cost".into(), cost.into());
    if let Ok(m) = executable.memory_stats() {
        let bytes = json!({
            "arguments": m.argument,
            "outputs": m.output,
            "aliased": m.alias,
            "temporaries": m.temp,
            "peak": m.peak,
            "code": m.generated_code,
        });
        out.insert("memory_bytes".into(), bytes);
    }
    out
}

impl Compiler {
    /// What is known of a program before it is compiled.
    fn describe(&self, program: &Program) -> Option<(Map<String, Value>, String)> {
        let (graph, text, key) = self.made_from(program)?;
        let digits: String = key.digest().iter().map(|b| format!("{b:02x}")).collect();
        Some((facts(graph, program, digits[..DIGITS].to_owned()), text))
    }

    /// All that is known of a program; waits for its executable. Nothing if it has none.
    pub(crate) fn show(&self, program: &Program) -> Option<Shown> {
        let loaded = program.shown().ok()?;
        let (mut facts, stablehlo) = self.describe(program)?;
        facts.extend(costs(&loaded));
        let optimized = loaded.optimized_program().ok().and_then(|p| p.text());
        Some(Shown { facts: facts.into(), stablehlo, optimized })
    }

    /// A program that was captured and is not compiled: with the compiler's options, and how it is called by.
    pub(crate) fn captured(&self, program: &Program) -> Option<Captured> {
        let (mut facts, _) = self.describe(program)?;
        let (_, task) = program.task()?;
        let module = task.graph.built(self.target.platform()).ok()?;
        let text = module.to_text_with(PrintOptions { locations: &locations(&task.graph) });
        let options = self.options(task).overrides;
        let value = |v: &pjrt::OptionValue| match v {
            pjrt::OptionValue::String(v) => json!(v),
            pjrt::OptionValue::Bool(v) => json!(v),
            pjrt::OptionValue::Int(v) => json!(v),
            pjrt::OptionValue::Double(v) => json!(v),
        };
        let options: Map<String, Value> = options.iter().map(|(name, v)| (name.clone(), value(v))).collect();
        facts.insert("options".into(), options.into());
        facts.insert("products".into(), products(&task.graph, &module).into());
        let bytes = |ty: &TensorType| ty.bytes().max(0);
        facts.insert("input_bytes".into(), task.graph.inputs.iter().map(bytes).collect::<Vec<_>>().into());
        // Bytes of each result, and the op that makes it.
        let mut results = Vec::new();
        for (i, inst) in task.graph.ops.insts.iter().enumerate() {
            results.extend(inst.outputs.iter().map(|o| (o.as_ref().map_or(0, |o| bytes(&o.stored)), i)));
        }
        let (sizes, makers): (Vec<i64>, Vec<usize>) =
            task.graph.live.iter().map(|&i| results[i as usize]).unzip();
        facts.insert("output_bytes".into(), sizes.into());
        facts.insert("output_ops".into(), makers.into());
        Some(Captured { facts, text })
    }

    /// The latest programs from this number on, without what their executables say.
    pub(crate) fn list(&self, from: usize) -> Vec<Value> {
        let described = |(number, program): (usize, Arc<Program>)| {
            let (mut facts, _) = self.describe(&program)?;
            facts.insert("number".into(), number.into());
            Some(facts.into())
        };
        self.graphs.numbered(from).into_iter().filter_map(described).collect()
    }
}
