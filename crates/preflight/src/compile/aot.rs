//! Compiling captured programs for devices that are not there, in a process of its own: a plugin may abort, take a
//! gigabyte or an hour, and is ended by ending its process.
//!
//! The child ([`compile`]) writes one line of JSON for each program; the parent ([`Compiling`]) reads them as they come.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use oxitorch_capture::{Capture, CompilerOption};
use oxitorch_pjrt::{
    Client, ClientOptions, CompileOptions, Compiled, Costs, EffortLevel, Error, LoadOptions, NamedValue,
    OptionValue, Platform, Plugin, Program, Topology,
};
use serde::{Deserialize, Serialize};

use super::annotate::annotate;
use super::outcome::{Effort, Memory, Outcome};
use super::{cuda, dumps};
use crate::Environment;
use crate::hardware::ici::Sent;
use crate::split::Plan;

/// What the child is to do.
#[derive(Args, Clone, Debug)]
pub struct Work {
    /// cpu, cuda or tpu
    platform: String,
    /// The plugin's library
    library: PathBuf,
    /// The folder of captured programs
    folder: PathBuf,
    /// The plugin's name of the topology
    #[arg(long)]
    topology: Option<String>,
    #[arg(long, value_enum, default_value = "fast")]
    effort: Effort,
    /// A file that says how the programs are split over the devices
    #[arg(long)]
    plan: Option<PathBuf>,
    /// A program that is compiled, by its id; may be given several times [default: all]
    #[arg(long, value_name = "ID")]
    only: Vec<String>,
    /// End when stdin does, which is when the parent has ended
    #[arg(long)]
    attached: bool,
    /// Where XLA writes what it makes of the memory
    #[arg(long)]
    dumps: Option<PathBuf>,
}

impl Work {
    fn is_for_gpus(&self) -> bool {
        self.platform == Platform::Cuda.name()
    }
}

/// Each line of the child's stdout that begins with this is one of [`Said`]; plugins write there as well.
const MARK: &str = "oxitorch-aot ";

/// What the child says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Said {
    /// First: what it compiles for.
    Device {
        /// The name of the devices' kind.
        kind: String,
        /// How many there are.
        count: usize,
        /// What a program may use of a device's memory.
        memory_bytes: Option<i64>,
        /// The plugin's version, as it says it.
        version: String,
    },
    /// It has begun with a program.
    Begun(String),
    /// A program was compiled, or could not be.
    Done(Box<Outcome>),
    /// There is no device to compile for.
    Failed(String),
}

/// In the child: compiles all programs of a folder.
pub fn compile(work: &Work) -> anyhow::Result<()> {
    if work.attached {
        std::thread::spawn(end_with_parent);
    }
    let compiler = match Compiler::new(work) {
        Ok(compiler) => compiler,
        Err(e) => return say(&Said::Failed(format!("{e:#}"))),
    };
    say(&compiler.describe(work.is_for_gpus())?)?;
    let plan: Option<Plan> = match &work.plan {
        Some(file) => Some(serde_json::from_slice(&fs::read(file)?)?),
        None => None,
    };
    let mut all = programs(&work.folder)?;
    all.retain(|p| work.only.is_empty() || work.only.contains(&p.id));
    let queue = Mutex::new(all.into_iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || -> anyhow::Result<()> {
        while let Some(program) = next() {
            compile_one(&compiler, program, work, plan.as_ref())?;
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(THREADS));
    std::thread::scope(|scope| {
        let thread = || std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, run);
        let running: Vec<_> = (0..threads).map(|_| thread()).collect::<std::io::Result<_>>()?;
        let panicked = |_| Err(anyhow::anyhow!("the compiler panicked; please report this"));
        running.into_iter().try_for_each(|t| t.join().unwrap_or_else(panicked))
    })
}

/// A compiler does not notice for minutes that nobody listens any more.
#[expect(clippy::disallowed_methods, reason = "threads that compile cannot be asked to end")]
fn end_with_parent() {
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink()); // an error is an end, too
    std::process::exit(1);
}

/// Programs that are compiled at once: each may take gigabytes.
const THREADS: usize = 4;

/// XLA walks through chains of ops by recursion. Only what is used of it takes memory.
const STACK_BYTES: usize = 64 << 20;

fn compile_one(
    compiler: &Compiler,
    program: oxitorch_capture::Program,
    work: &Work,
    plan: Option<&Plan>,
) -> anyhow::Result<()> {
    say(&Said::Begun(program.id.clone()))?;
    let start = Instant::now();
    let mut text = fs::read_to_string(work.folder.join(format!("{}.mlir", program.id)))?;
    let mut options = compile_options(&program, work.effort);
    if work.is_for_gpus() {
        options.overrides.extend(cuda::overrides());
    }
    if let Some((plan, splits)) = plan.and_then(|plan| Some((plan, plan.of(&program.id)?))) {
        let annotated = annotate(&text, &plan.mesh, splits)?;
        text = annotated.text;
        options.partitions = plan.mesh.devices() as usize;
        (options.spmd, options.shardy) = (true, true);
        (options.open_params, options.open_outputs) = (annotated.open_params, annotated.open_outputs);
    }
    if work.dumps.is_some() {
        text = dumps::named(&text, &program.id);
    }
    let quicker = (cuda::QUICKER.to_owned(), OptionValue::Bool(false));
    options.overrides.extend(work.is_for_gpus().then_some(quicker));
    let mut made = compiler.make(text.as_bytes(), &options, program.product_flops());
    // A plugin that does not know the option refuses it with the status code of every wrong argument, and names it.
    if made.as_ref().is_err_and(|e| e.to_string().contains(cuda::QUICKER)) {
        options.overrides.pop();
        made = compiler.make(text.as_bytes(), &options, program.product_flops());
    }
    let mut outcome = match made {
        Ok(outcome) => outcome,
        Err(e) => Outcome {
            out_of_memory: matches!(e, Error::OutOfMemory { .. }) || is_full(&e.to_string()),
            error: Some(e.to_string()),
            ..Outcome::default()
        },
    };
    outcome.compile_s = start.elapsed().as_secs_f64();
    if let Some(folder) = &work.dumps {
        outcome.at_peak = dumps::read(folder, &program.id, folder.starts_with(&work.folder));
    }
    if outcome.out_of_memory {
        outcome.memory = outcome.at_peak.as_ref().map(|p| p.memory);
    }
    (outcome.id, outcome.effort) = (program.id, work.effort);
    say(&Said::Done(Box::new(outcome)))
}

/// libtpu's code for a program that needs more memory than there is.
fn is_full(message: &str) -> bool {
    message.contains("E1000")
        || message.contains("RESOURCE_EXHAUSTED")
        || message.contains("Ran out of memory")
}

fn say(what: &Said) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{}", serde_json::to_string(what)?)?;
    Ok(out.flush()?)
}

/// The programs of a folder, each once.
pub(super) fn programs(folder: &Path) -> anyhow::Result<Vec<oxitorch_capture::Program>> {
    let mut programs: Vec<oxitorch_capture::Program> = Vec::new();
    for p in Capture::read(folder)?.programs {
        if programs.iter().all(|known| known.id != p.id) {
            programs.push(p);
        }
    }
    Ok(programs)
}

/// The options that the program was recorded with, and those of the effort.
fn compile_options(program: &oxitorch_capture::Program, effort: Effort) -> CompileOptions {
    let value = |v: &CompilerOption| match v {
        CompilerOption::Bool(v) => OptionValue::Bool(*v),
        CompilerOption::Int(v) => OptionValue::Int(*v),
        CompilerOption::Float(v) => OptionValue::Double(*v),
        CompilerOption::Text(v) => OptionValue::String(v.clone()),
    };
    CompileOptions {
        overrides: program.options.iter().map(|(name, v)| (name.clone(), value(v))).collect(),
        optimization_level: (effort == Effort::Fast).then_some(EffortLevel::O0),
        ..CompileOptions::default()
    }
}

/// What compiles.
enum Compiler {
    /// For devices that are not there.
    Topology(Topology),
    /// For the processor of this machine.
    Client(std::sync::Arc<Client>),
}

impl Compiler {
    fn new(work: &Work) -> anyhow::Result<Compiler> {
        let platform: Platform = work.platform.parse()?;
        let plugin = Plugin::load(platform, &work.library, &LoadOptions::for_platform(platform, true))?;
        Ok(match &work.topology {
            Some(name) if platform == Platform::Cuda => {
                Compiler::Topology(Topology::new(plugin, name, &cuda::topology_options(name)?)?)
            }
            Some(name) => Compiler::Topology(Topology::new(plugin, name, &[])?),
            None => Compiler::Client(Client::new(plugin, &ClientOptions::default())?),
        })
    }

    fn describe(&self, gpus: bool) -> anyhow::Result<Said> {
        Ok(match self {
            Compiler::Topology(topology) => {
                let devices = topology.devices();
                let first = devices.first().context("a topology without devices")?;
                Said::Device {
                    kind: first.kind.clone(),
                    count: devices.len(),
                    // Of a GPU a plugin repeats what it was told of the whole.
                    memory_bytes: first.memory_limit_bytes().filter(|_| !gpus),
                    version: topology.platform()?.1,
                }
            }
            Compiler::Client(client) => Said::Device {
                kind: client.devices()[0].kind().to_owned(),
                count: client.devices().len(),
                memory_bytes: None,
                version: client.platform_version().to_owned(),
            },
        })
    }

    /// A program whose products take so many operations, on all devices together.
    fn make(&self, text: &[u8], options: &CompileOptions, products: f64) -> Result<Outcome, Error> {
        let program = Program::mlir(text);
        match self {
            Compiler::Topology(topology) => {
                let compiled = topology.compile(&program, options)?;
                let mut outcome = measure(&compiled)?;
                let optimized = compiled.optimized_program()?;
                if let Some(Costs { all, once }) = optimized.costs() {
                    let flops = Some(all.flops + products / options.partitions as f64);
                    match outcome.bytes_accessed {
                        None => (outcome.flops, outcome.bytes_accessed) = (flops, Some(all.bytes)),
                        // libtpu counts a loop as one round of it.
                        Some(bytes) if all != once => {
                            outcome.flops = flops;
                            outcome.bytes_accessed = Some(bytes + all.bytes - once.bytes);
                        }
                        Some(_) => {}
                    }
                }
                if options.partitions > 1 {
                    let all = optimized.collectives();
                    outcome.collectives = all.map(|all| all.into_iter().map(Sent::from).collect());
                }
                Ok(outcome)
            }
            Compiler::Client(client) => measure(client.compile(&program, options)?.compiled()),
        }
    }
}

/// What is known of a program. Without a cost analysis there is no estimate, which the report shows as not known; without
/// its memory there is no verdict.
fn measure(compiled: &Compiled) -> Result<Outcome, Error> {
    let cost = compiled.cost_analysis().unwrap_or_default();
    let number = |name: &str| match cost.get(name) {
        Some(NamedValue::Float(x)) => Some(f64::from(*x)).filter(|x| *x >= 0.0),
        Some(NamedValue::Int(n)) => Some(*n as f64),
        // What is zero is left out: a program that only fills memory has no operations.
        None if !cost.is_empty() => Some(0.0),
        _ => None,
    };
    let m = compiled.memory_stats()?;
    let bytes = |n: i64| n.max(0) as u64;
    let all = bytes(m.argument) + bytes(m.output) + bytes(m.temp);
    let memory = Memory {
        arguments: bytes(m.argument),
        outputs: bytes(m.output),
        aliased: bytes(m.alias),
        temporaries: bytes(m.temp),
        host: bytes(m.host_argument) + bytes(m.host_output) + bytes(m.host_temp),
        code: bytes(m.generated_code),
        // The plugins' own peak is of another kind: it leaves out the gaps between temporaries, which are one allocation,
        // and libtpu's counts what lies in the chip's vector memory (VMEM).
        peak: all.saturating_sub(bytes(m.alias)),
    };
    let (flops, bytes_accessed) = (number("flops"), number("bytes accessed"));
    Ok(Outcome { memory: Some(memory), flops, bytes_accessed, ..Outcome::default() })
}

/// Ctrl-C ended the child.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// A child at work; ended when dropped.
pub(crate) struct Compiling {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    stderr: Option<JoinHandle<String>>,
}

impl Compiling {
    /// Starts a child. With `dumps` XLA writes what it makes of the memory.
    pub(crate) fn start(
        environment: &Environment,
        (platform, library): (Platform, &Path),
        topology: Option<&str>,
        (folder, dumps): (&Path, bool),
        plan: Option<&Path>,
        (effort, only): (Effort, &[String]),
    ) -> anyhow::Result<Compiling> {
        let mut command = Command::new(&environment.executable);
        command.args(["-m", "oxitorch", "aot", platform.name()]).arg(library).arg(folder);
        command.args(topology.map(|t| format!("--topology={t}")));
        if let Some(plan) = plan {
            command.arg("--plan").arg(plan);
        }
        command.arg(if effort == Effort::Fast { "--effort=fast" } else { "--effort=full" });
        command.args(only.iter().map(|id| format!("--only={id}")));
        let mut flags = cuda::own_flags();
        if dumps {
            let (with_dumps, to) = dumps::flags(&flags, folder);
            flags = with_dumps;
            command.arg("--dumps").arg(to);
        }
        let flags = match platform {
            Platform::Cuda => cuda::flags(&flags, &environment.site_dirs, folder)?,
            _ => flags,
        };
        command
            .env("XLA_FLAGS", flags)
            .arg("--attached")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start the compiler's process")?;
        let (Some(out), Some(mut err)) = (child.stdout.take(), child.stderr.take()) else {
            bail!("a child without pipes")
        };
        let stderr = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = err.read_to_end(&mut bytes); // what could be read is shown
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Ok(Compiling { child, lines: BufReader::new(out).lines(), stderr: Some(stderr) })
    }

    /// What it says next; nothing when it has ended well.
    pub(crate) fn next(&mut self) -> anyhow::Result<Option<Said>> {
        for line in self.lines.by_ref() {
            if let Some(json) = line?.strip_prefix(MARK) {
                return Ok(Some(serde_json::from_str(json)?));
            }
        }
        let status = self.child.wait()?;
        if status.success() {
            return Ok(None);
        }
        if status.signal() == Some(2) {
            bail!(Interrupted);
        }
        let said = self.stderr.take().and_then(|t| t.join().ok()).unwrap_or_default();
        bail!("the compiler's process ended ({status}): {}", last_words(&said))
    }
}

/// Why a process ended, by what it wrote: the check that failed, if it says one, as traces come behind it; else its last
/// line.
fn last_words(said: &str) -> &str {
    let is_fatal = |l: &&str| l.starts_with('F') && l[1..].starts_with(|c: char| c.is_ascii_digit());
    let last = || said.lines().rev().find(|l| !l.trim().is_empty());
    said.lines().find(is_fatal).or_else(last).unwrap_or("nothing on stderr").trim()
}

impl Drop for Compiling {
    fn drop(&mut self) {
        let _ = self.child.kill(); // an error: it has ended
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_said() {
        let outcome = Outcome { id: "ab".into(), flops: Some(2.0), ..Outcome::default() };
        let text = serde_json::to_string(&Said::Done(Box::new(outcome))).unwrap();
        assert!(
            matches!(serde_json::from_str(&text), Ok(Said::Done(o)) if o.id == "ab" && o.flops == Some(2.0))
        );
    }

    #[test]
    fn the_check_that_failed_is_said_and_not_the_trace_behind_it() {
        let said = "I0000 a\nF0000 00:00:1.5 4 a.cc:7] Check failed: x\n*** trace:\n  @ 0x1 main\n";
        assert_eq!(last_words(said), "F0000 00:00:1.5 4 a.cc:7] Check failed: x");
        assert_eq!(last_words("Failed it did\n  end \n\n"), "end");
        assert_eq!(last_words(""), "nothing on stderr");
    }

    #[test]
    fn libtpu_is_out_of_memory_by_its_code() {
        assert!(is_full("E1000: CompileTimeHbmOom: Ran out of memory in memory space hbm"));
        assert!(!is_full("E0101: unknown option"));
    }
}
