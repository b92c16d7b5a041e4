//! From a window of recorded ops to an executable: module text, compile options, compiler threads.

use crate::cached::{Build, CacheOptions, Loaded, Programs};
use crate::error::{Error, ErrorKind};
use crate::graphs::{Graphs, Source};
use crate::inst::Inst;
use crate::metrics::Metrics;
use oxitorch_cache as cache;
use oxitorch_hlo::{ArgAttr, Builder, DType, TensorType, Value};
use oxitorch_pjrt as pjrt;
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// In operand codes: the value is output number `code & !PRODUCED` of the window, not one of its inputs.
pub(crate) const PRODUCED: u32 = 1 << 31;

/// A closed window, ready to be lowered.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) insts: Vec<&'static Inst>,
    /// The operands of all instances, one after another: input number, or [`PRODUCED`] and output number.
    pub(crate) operands: Vec<u32>,
    pub(crate) inputs: Vec<TensorType>,
    /// Inputs that nothing can see any more.
    pub(crate) donated: SmallVec<[u32; 4]>,
    /// Number of the user's compiler options.
    pub(crate) options: u32,
    /// Outputs, counted over all instances, that are results.
    pub(crate) live: SmallVec<[u32; 8]>,
    /// Where the ops come from.
    pub(crate) source: Source,
}

/// A program: known from the moment it is needed, executable when the compiler is done.
#[derive(Debug)]
pub(crate) struct Program {
    /// Results that are values.
    pub(crate) outputs: usize,
    pub(crate) donated: SmallVec<[u32; 4]>,
    /// What the results after those (0-d pred, false is an error) check.
    pub(crate) checks: Vec<(ErrorKind, String)>,
    /// The ops in it, for messages.
    pub(crate) name: String,
    /// What running it took.
    pub(crate) ran: Ran,
    /// Set when the compiler is done. The executable belongs to the cache, which may let go of it.
    executable: OnceLock<Mutex<Result<Weak<Loaded>, Error>>>,
    /// From what it is made again then.
    task: OnceLock<(Weak<Compiler>, Task)>,
}

/// How often a program ran, and how long.
#[derive(Debug, Default)]
pub(crate) struct Ran {
    pub(crate) launches: AtomicU64,
    pub(crate) device_ns: AtomicU64,
}

impl Ran {
    /// Once more, for so long.
    pub(crate) fn add(&self, time: Duration) {
        self.launches.fetch_add(1, Relaxed);
        self.device_ns.fetch_add(time.as_nanos() as u64, Relaxed);
    }
}

impl Program {
    pub(crate) fn new(graph: &Graph) -> Arc<Program> {
        Arc::new(Program {
            outputs: graph.live.len(),
            donated: graph.donated.clone(),
            checks: graph.insts.iter().flat_map(|i| i.checks.iter().cloned()).collect(),
            name: graph.name(),
            ran: Ran::default(),
            executable: OnceLock::new(),
            task: OnceLock::new(),
        })
    }

    /// Whether the compiler is done.
    pub(crate) fn is_done(&self) -> bool {
        self.executable.get().is_some()
    }

    /// Whether [`Program::executable`] gives it without waiting.
    pub(crate) fn is_at_hand(&self) -> bool {
        let known = self.executable.get().and_then(Mutex::try_lock);
        known.is_some_and(|place| place.as_ref().map_or(true, |held| held.strong_count() > 0))
    }

    /// Waits for the compiler. An executable that the cache has let go of is loaded or compiled again, here and now.
    pub(crate) fn executable(&self) -> Result<Arc<Loaded>, Error> {
        let mut place = self.executable.wait().lock();
        let held = place.as_ref().map_err(Error::clone)?;
        if let Some(loaded) = held.upgrade() {
            loaded.touch();
            return Ok(loaded);
        }
        let again = self.task.get().and_then(|(compiler, task)| Some((compiler.upgrade()?, task)));
        let (compiler, task) = again.ok_or_else(closed)?;
        let loaded = compiler.compile(&self.name, task)?;
        *place = Ok(Arc::downgrade(&loaded));
        Ok(loaded)
    }

    /// Called once, by whoever compiled it.
    fn set(&self, executable: Result<Weak<Loaded>, Error>) {
        // Set once: tasks are submitted once.
        let _ = self.executable.set(Mutex::new(executable));
    }
}

impl Graph {
    /// The ops by name, views left out unless there is nothing else.
    pub(crate) fn name(&self) -> String {
        let ops: Vec<&str> = self.insts.iter().map(|i| i.name()).collect();
        let real: Vec<&str> =
            ops.iter().copied().filter(|n| *n != "view" && *n != "copy_into_view").collect();
        let names = if real.is_empty() { &ops } else { &real };
        match names.as_slice() {
            [one] => (*one).to_owned(),
            [first, .., last] => format!("{first}..{last}"),
            [] => "empty".to_owned(),
        }
    }

    /// The module that computes the window.
    pub(crate) fn module(&self) -> Result<String, Error> {
        let b = Builder::new();
        b.set_name(&self.name());
        let inputs: Vec<Value> = self.inputs.iter().map(|ty| b.param(ty.clone())).collect();
        for &i in &self.donated {
            b.param_attr(inputs[i as usize], ArgAttr::Donor);
        }
        let mut produced: Vec<Option<Value>> = Vec::new();
        let mut checks: Vec<Value> = Vec::new();
        let mut codes = self.operands.iter();
        for inst in &self.insts {
            let operands: Option<Vec<Value>> = codes
                .by_ref()
                .take(inst.operands.len())
                .map(|&c| {
                    if c & PRODUCED == 0 {
                        Some(inputs[c as usize])
                    } else {
                        produced[(c & !PRODUCED) as usize]
                    }
                })
                .collect();
            let operands = operands
                .ok_or_else(|| Error::runtime(format!("{}: an operand has no value", inst.name())))?;
            let emitted =
                inst.emit(&b, &operands).map_err(|e| Error::runtime(format!("{}: {e}", inst.name())))?;
            produced.extend(emitted.outputs);
            checks.extend(emitted.checks);
        }
        let mut outputs: Vec<Value> = self.live.iter().filter_map(|&i| produced[i as usize]).collect();
        outputs.extend(checks);
        let module = b.finish(&outputs).map_err(|e| Error::runtime(e.to_string()))?;
        Ok(module.to_text())
    }
}

/// The plugin's name for an element type.
pub(crate) fn element(dtype: DType) -> pjrt::ElementType {
    use pjrt::ElementType as E;
    match dtype {
        DType::Pred => E::Pred,
        DType::S8 => E::S8,
        DType::S16 => E::S16,
        DType::S32 => E::S32,
        DType::S64 => E::S64,
        DType::U8 => E::U8,
        DType::U16 => E::U16,
        DType::U32 => E::U32,
        DType::U64 => E::U64,
        DType::F8E4M3FN => E::F8E4M3FN,
        DType::F8E5M2 => E::F8E5M2,
        DType::F16 => E::F16,
        DType::BF16 => E::Bf16,
        DType::F32 => E::F32,
        DType::F64 => E::F64,
        DType::C64 => E::C64,
        DType::C128 => E::C128,
    }
}

/// From what a program is made.
#[derive(Clone, Debug)]
struct Task {
    graph: Arc<Graph>,
    device: i64,
}

fn closed() -> Error {
    Error::runtime("the tpu device is closed")
}

#[derive(Default)]
struct Tasks {
    queue: VecDeque<Arc<Program>>,
    /// Tasks that a thread works on.
    running: usize,
    /// No thread takes tasks any more: whoever submits one compiles it.
    closed: bool,
}

/// The compiler threads of one client.
pub(crate) struct Compiler {
    own: Weak<Compiler>,
    client: Arc<pjrt::Client>,
    programs: Programs,
    metrics: Arc<Metrics>,
    tasks: Mutex<Tasks>,
    wake: Condvar,
    /// The user's compiler options, by number; 0 is none.
    user_options: Mutex<Vec<UserOptions>>,
    /// All programs, for who looks at them.
    pub(crate) graphs: Graphs,
}

/// XLA options by name.
pub type UserOptions = Vec<(String, pjrt::OptionValue)>;

impl Compiler {
    /// Starts `threads` compiler threads.
    pub(crate) fn start(
        client: Arc<pjrt::Client>,
        metrics: Arc<Metrics>,
        threads: usize,
        cache: &CacheOptions,
    ) -> Arc<Compiler> {
        let compiler = Arc::new_cyclic(|own| Compiler {
            own: own.clone(),
            programs: Programs::new(client.clone(), cache),
            client,
            metrics,
            tasks: Mutex::default(),
            wake: Condvar::new(),
            user_options: Mutex::new(vec![Vec::new()]),
            graphs: Graphs::default(),
        });
        for i in 0..threads.max(1) {
            let own = compiler.clone();
            let thread = std::thread::Builder::new().name(format!("oxi-compile-{i}"));
            // A process that cannot have a thread compiles in the threads that ask; see `submit`.
            if thread.spawn(move || own.run()).is_err() && i == 0 {
                compiler.tasks.lock().closed = true;
            }
        }
        compiler
    }

    /// The number of these options; equal options have equal numbers.
    pub(crate) fn options_number(&self, options: UserOptions) -> u32 {
        let mut all = self.user_options.lock();
        let known = all.iter().position(|o| *o == options);
        known.unwrap_or_else(|| {
            all.push(options);
            all.len() - 1
        }) as u32
    }

    /// The compiled programs.
    pub(crate) fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Queues a program.
    pub(crate) fn submit(&self, graph: Graph, program: Arc<Program>, device: i64) {
        // Set once: a program is submitted once.
        let _ = program.task.set((self.own.clone(), Task { graph: Arc::new(graph), device }));
        self.graphs.add(&program);
        let mut tasks = self.tasks.lock();
        if tasks.closed {
            drop(tasks);
            return self.finish(&program);
        }
        tasks.queue.push_back(program);
        drop(tasks);
        self.wake.notify_one();
    }

    fn run(&self) {
        loop {
            let mut tasks = self.tasks.lock();
            let program = loop {
                match tasks.queue.pop_front() {
                    Some(program) => break program,
                    None if tasks.closed => return,
                    None => self.wake.wait(&mut tasks),
                }
            };
            tasks.running += 1;
            drop(tasks);
            self.finish(&program);
            self.tasks.lock().running -= 1;
            self.wake.notify_all();
        }
    }

    /// Drops what is queued and waits for what is being compiled: a plugin must not be left at work when its process ends.
    pub(crate) fn close(&self) {
        self.programs.close();
        let mut tasks = self.tasks.lock();
        tasks.closed = true;
        for program in tasks.queue.drain(..) {
            program.set(Err(closed()));
        }
        self.wake.notify_all();
        while tasks.running > 0 {
            self.wake.wait(&mut tasks);
        }
    }

    fn finish(&self, program: &Program) {
        let Some((_, task)) = program.task.get() else { return };
        // A panic in a lowering must not leave the launch thread waiting for ever.
        let compile = || self.compile(&program.name, task).map(|loaded| Arc::downgrade(&loaded));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(compile));
        program.set(result.unwrap_or_else(|_| {
            Err(Error::runtime(format!("{}: the compiler thread panicked; please report this", program.name)))
        }));
        self.graphs.compiled(self, program);
    }

    /// From what a program is made: its graph, the module's text, and what its executable depends on.
    pub(crate) fn made_from<'p>(&self, program: &'p Program) -> Option<(&'p Graph, String, cache::Key)> {
        let (_, task) = program.task.get()?;
        let text = task.graph.module().ok()?;
        let key = self.programs.key(&text, &self.options(task));
        Some((&task.graph, text, key))
    }

    fn compile(&self, name: &str, task: &Task) -> Result<Arc<Loaded>, Error> {
        let text = task.graph.module()?;
        let options = self.options(task);
        let build = Build {
            programs: &self.programs,
            metrics: &self.metrics,
            graph: &task.graph,
            name,
            text,
            options,
        };
        self.programs.get(&build)
    }

    fn options(&self, task: &Task) -> pjrt::CompileOptions {
        let types =
            task.graph.inputs.iter().map(|t| pjrt::BufferType::new(element(t.dtype), t.shape.clone()));
        let mut options = pjrt::CompileOptions {
            device_ordinal: Some(task.device),
            param_types: Some(types.collect()),
            ..pjrt::CompileOptions::default()
        };
        let flag = |name: &str, value: bool| (name.to_owned(), pjrt::OptionValue::Bool(value));
        // XLA may otherwise keep more precision than the program says, and results would depend on fusion.
        options.overrides.push(flag("xla_allow_excess_precision", false));
        if self.client.platform() == pjrt::Platform::Cpu {
            // The fast forms lose a NaN in the second operand of maximum and minimum.
            options.overrides.push(flag("xla_cpu_enable_fast_min_max", false));
            if task.graph.insts.len() <= SMALL {
                // Halves the time of a one-op compile at equal run speed.
                options.overrides.push(flag("xla_cpu_use_fusion_emitters", false));
            }
        }
        let user = self.user_options.lock()[task.graph.options as usize].clone();
        options.overrides.retain(|(name, _)| user.iter().all(|(n, _)| n != name));
        options.overrides.extend(user);
        options
    }
}

/// Programs of so few ops compile with the options for small ones.
const SMALL: usize = 4;
