//! The programs of a process, to be looked at: where they come from, what they cost, what the compiler made of them.

use crate::graph::{Graph, Origin};
use crate::inst::{Inst, Out};
use crate::ops::OpRef;
use crate::program::{Compiler, Program, Watch};
use crate::shared::Shared;
use crate::site::describe;
use oxitorch_capture::{
    self as capture, CompilerOption, Cost, Graph as Told, MemoryBytes, Reason, TensorType,
};
use oxitorch_hlo::{Location, Module, PrintOptions, TensorType as HloType};
use oxitorch_pjrt as pjrt;
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::{fs, io};

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
    written: Mutex<Vec<(Arc<Program>, Told)>>,
}

/// Digits of a program's name; the cache shows as many.
const DIGITS: usize = 12;

impl Graphs {
    /// Writes each program into this folder from now on.
    pub(crate) fn keep_in(&self, folder: &Path) {
        self.folder.get_or_init(|| folder.to_owned());
    }

    /// The latest programs from this number on, without what their executables say.
    pub(crate) fn list(&self, compiler: &Compiler, from: usize) -> Vec<Told> {
        let described = |(number, program): (usize, Arc<Program>)| {
            let (id, _, graph) = compiler.described(&program)?;
            Some(Told { number: Some(number), ..told(graph, &program, id) })
        };
        self.numbered(from).into_iter().filter_map(described).collect()
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

    /// The number of a program, if it is not too long ago.
    pub(crate) fn number(&self, program: &Arc<Program>) -> Option<usize> {
        let latest = self.latest.lock();
        let at = latest.programs.iter().rposition(|p| Arc::ptr_eq(p, program))?;
        Some(latest.first + at)
    }

    /// Writes again how often the programs ran.
    pub(crate) fn finish(&self) {
        let Some(folder) = self.folder.get() else { return };
        for (program, mut graph) in std::mem::take(&mut *self.written.lock()) {
            (graph.launches, graph.device_s) = usage(&program);
            // What could be written once can be read as it is.
            let _ = graph.write(folder);
        }
    }
}

impl Watch for Graphs {
    fn submitted(&self, program: &Arc<Program>) {
        let mut latest = self.latest.lock();
        if latest.programs.len() == MAX_GRAPHS {
            latest.programs.pop_front();
            latest.first += 1;
        }
        latest.programs.push_back(program.clone());
    }

    fn compiled(&self, compiler: &Compiler, program: &Program) {
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
        self.written.lock().push((program, shown.graph));
    }
}

/// A program with all that is known of it.
#[derive(Clone, Debug)]
pub struct Shown {
    /// What fits into a table: id, name, ops with their lines, types, times, cost, memory.
    pub graph: Told,
    /// The program as it went to the compiler.
    pub stablehlo: String,
    /// The program as it came from there, if the plugin gives it in a form that can be shown.
    pub optimized: Option<String>,
}

impl Shown {
    fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let id = &self.graph.id;
        fs::write(folder.join(format!("{id}.mlir")), &self.stablehlo)?;
        if let Some(text) = &self.optimized {
            fs::write(folder.join(format!("{id}.hlo")), text)?;
        }
        self.graph.write(folder)
    }
}

/// A program that was recorded and is not compiled.
pub(crate) struct Recorded {
    /// Without what its launches say.
    pub(crate) program: capture::Program,
    /// As it goes to the compiler, with where each op comes from.
    pub(crate) text: String,
}

/// Launches, and seconds that they took on the device.
fn usage(program: &Program) -> (u64, f64) {
    (program.ran.launches.load(Relaxed), program.ran.device_ns.load(Relaxed) as f64 * 1e-9)
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

/// The operations of a graph.
fn ops(graph: &Graph) -> Vec<capture::Op> {
    let op = |op: OpRef<'_>| capture::Op {
        op: op.inst.name().to_owned(),
        results: op.inst.outputs.iter().map(|o| o.as_ref().map(|o| (&o.ty).into())).collect(),
        line: describe(op.site),
        backward: op.site.is_of_backward(),
    };
    graph.ops.iter().map(op).collect()
}

/// A result of a graph that stays visible.
struct Output {
    /// The op that makes it, by its place.
    op: usize,
    /// As its users see it; none for a number that checks others.
    ty: Option<TensorType>,
    /// What it takes on the device.
    bytes: u64,
}

/// The results of a graph that stay visible.
fn outputs(graph: &Graph) -> Vec<Output> {
    let of = |(op, inst): (usize, &Shared<Inst>)| -> Vec<Output> {
        let one = |o: &Option<Shared<Out>>| Output {
            op,
            ty: o.as_ref().map(|o| (&o.ty).into()),
            bytes: o.as_ref().map_or(0, |o| o.stored.bytes().max(0) as u64),
        };
        inst.outputs.iter().map(one).collect()
    };
    let mut all: Vec<Option<Output>> = graph.ops.insts.iter().enumerate().flat_map(of).map(Some).collect();
    graph.live.iter().filter_map(|&i| all.get_mut(i as usize)?.take()).collect()
}

/// What is known of a graph without its executable.
fn told(graph: &Graph, program: &Program, id: String) -> Told {
    let ops = ops(graph);
    let (from, seconds) = match graph.source.origin.get() {
        Some(Origin::Compiled(time)) => (capture::Origin::Compiled, time.as_secs_f64()),
        Some(Origin::Loaded(time)) => (capture::Origin::Loaded, time.as_secs_f64()),
        None if program.is_done() => (capture::Origin::Memory, 0.0),
        None => (capture::Origin::Pending, 0.0),
    };
    let (launches, device_s) = usage(program);
    let (ended_by, ended_by_collective, ended_at) = ended(graph);
    Told {
        id,
        name: program.name.clone(),
        first_line: first_line(&ops),
        ended_by,
        ended_by_collective,
        ended_at,
        from,
        compile_s: seconds,
        inputs: graph.inputs.iter().map(TensorType::from).collect(),
        outputs: outputs(graph).into_iter().map(|o| o.ty).collect(),
        donated: graph.donated.to_vec(),
        ops,
        launches,
        device_s,
        cost: BTreeMap::new(),
        memory_bytes: None,
        number: None,
    }
}

/// Why a graph ended, by which collective if one is the reason, and where.
fn ended(graph: &Graph) -> (Option<Reason>, Option<String>, Option<String>) {
    let ended = graph.source.ended.as_ref();
    let collective = ended.and_then(|e| e.collective.clone());
    (ended.map(|e| e.reason), collective, ended.and_then(|e| describe(e.site)))
}

fn first_line(ops: &[capture::Op]) -> Option<String> {
    ops.iter().find_map(|o| o.line.clone())
}

/// The matrix products and convolutions of a graph, those of one line that are alike together.
fn products(graph: &Graph, module: &Module) -> Vec<capture::Products> {
    let mut found: Vec<capture::Products> = Vec::new();
    for p in module.products() {
        let at = p.location.map(|i| i as usize);
        let one = capture::Products {
            dtype: p.dtype,
            precision: p.precision,
            batch: p.batch,
            m: p.m,
            n: p.n,
            k: p.k,
            op: at.and_then(|i| graph.ops.insts.get(i)).map(|inst| inst.name().to_owned()),
            line: at.and_then(|i| graph.ops.sites.get(i)).and_then(|&site| describe(site)),
            count: p.times,
            flops: p.flops(),
        };
        let alike = |known: &&mut capture::Products| {
            **known == capture::Products { count: known.count, flops: known.flops, ..one.clone() }
        };
        match found.iter_mut().find(alike) {
            Some(known) => {
                known.count += one.count;
                known.flops += one.flops;
            }
            None => found.push(one),
        }
    }
    found
}

/// Numbers that the plugin says of a program. One that does not say leaves them out.
fn costs(executable: &pjrt::Executable) -> (BTreeMap<String, Cost>, Option<MemoryBytes>) {
    let cost = |v: &pjrt::NamedValue| match v {
        pjrt::NamedValue::Float(x) if x.is_finite() => Cost::Float(*x),
        pjrt::NamedValue::Int(x) => Cost::Int(*x),
        other => Cost::Text(other.to_string()),
    };
    let memory = executable.memory_stats().ok().map(|m| MemoryBytes {
        arguments: m.argument,
        outputs: m.output,
        aliased: m.alias,
        temporaries: m.temp,
        host_temporaries: m.host_temp,
        peak: m.peak,
        code: m.generated_code,
    });
    let costs = executable.cost_analysis().unwrap_or_default();
    (costs.iter().map(|(name, v)| (name.clone(), cost(v))).collect(), memory)
}

/// The compiler's options by name.
fn options(overrides: &[(String, pjrt::OptionValue)]) -> BTreeMap<String, CompilerOption> {
    let option = |v: &pjrt::OptionValue| match v {
        pjrt::OptionValue::String(v) => CompilerOption::Text(v.clone()),
        pjrt::OptionValue::Bool(v) => CompilerOption::Bool(*v),
        pjrt::OptionValue::Int(v) => CompilerOption::Int(*v),
        pjrt::OptionValue::Double(v) => CompilerOption::Float(*v),
    };
    overrides.iter().map(|(name, v)| (name.clone(), option(v))).collect()
}

impl Compiler {
    /// A program's id and text, and the graph that it was made from.
    fn described<'p>(&self, program: &'p Program) -> Option<(String, String, &'p Graph)> {
        let (graph, text, key) = self.made_from(program)?;
        let digits: String = key.digest().iter().map(|b| format!("{b:02x}")).collect();
        Some((digits[..DIGITS].to_owned(), text, graph))
    }

    /// All that is known of a program; waits for its executable. Nothing if it has none.
    pub(crate) fn show(&self, program: &Program) -> Option<Shown> {
        let loaded = program.shown().ok()?;
        let (id, stablehlo, graph) = self.described(program)?;
        let (cost, memory_bytes) = costs(&loaded);
        let graph = Told { cost, memory_bytes, ..told(graph, program, id) };
        let optimized = loaded.optimized_program().ok().and_then(|p| p.text());
        Some(Shown { graph, stablehlo, optimized })
    }

    /// A program that was recorded and is not compiled: with the compiler's options, and how it is called by.
    pub(crate) fn recorded(&self, program: &Program) -> Option<Recorded> {
        let (id, ..) = self.described(program)?;
        let (_, task) = program.task()?;
        let graph = &task.graph;
        let module = graph.built(self.target.platform()).ok()?;
        let text = module.to_text_with(PrintOptions { locations: &locations(graph) });
        let input = |(i, ty): (usize, &HloType)| capture::Input {
            donated: graph.donated.contains(&(i as u32)),
            ..capture::Input::new(ty.into(), ty.bytes().max(0) as u64)
        };
        let output = |o: Output| capture::Output::new(o.ty, o.bytes, o.op);
        let ops = ops(graph);
        let (ended_by, ended_by_collective, ended_at) = ended(graph);
        let program = capture::Program {
            id,
            name: program.name.clone(),
            first_line: first_line(&ops),
            ended_by,
            ended_by_collective,
            ended_at,
            ops,
            inputs: graph.inputs.iter().enumerate().map(input).collect(),
            outputs: outputs(graph).into_iter().map(output).collect(),
            products: products(graph, &module),
            options: options(&self.options(task).overrides),
            ..capture::Program::default()
        };
        Some(Recorded { program, text })
    }
}
