//! From a window of recorded ops to an executable: module text, compile options, compiler threads.

use crate::buffers::element;
use crate::cached::{Build, CacheOptions, Loaded, Programs};
use crate::effort::{Effort, FUSION_EMITTERS, Policy, is_small};
use crate::error::Error;
use crate::graph::{Check, Graph, Task};
use crate::metrics::Metrics;
use crate::site::Site;
use crate::spread::Spread;
use crate::target::Target;
use oxitorch_cache as cache;
use oxitorch_pjrt as pjrt;
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// A program: known from the moment it is needed, executable when the compiler is done.
#[derive(Debug)]
pub(crate) struct Program {
    /// Results that are values.
    pub(crate) outputs: usize,
    pub(crate) donated: SmallVec<[u32; 4]>,
    /// Results that are kept in the memory of the host.
    pub(crate) offloaded: SmallVec<[u32; 4]>,
    /// Inputs that come from there.
    pub(crate) reloaded: SmallVec<[u32; 4]>,
    /// If it is one of several devices.
    pub(crate) spread: Option<Arc<Spread>>,
    /// What it checks. If that is anything, one result more (0-d s32) is the number of the first check that fails, or -1.
    pub(crate) checks: Vec<Check>,
    /// Whether it may fail when it runs, because of the values that it is given.
    pub(crate) may_fail: bool,
    /// Whether it has run when its launch returns.
    pub(crate) prompt: Prompt,
    /// The ops in it, for messages.
    pub(crate) name: String,
    /// What running it took.
    pub(crate) ran: Ran,
    /// Whether the user was told that its ops run one by one.
    pub(crate) told: AtomicBool,
    /// Set when the compiler is done. The executable belongs to the cache, which may let go of it.
    executable: OnceLock<Mutex<Executable>>,
    /// From what it is made again then.
    task: OnceLock<(Weak<Compiler>, Task)>,
}

/// Whether a program has run when its launch returns, if its inputs are there. The CPU plugin decides that for each
/// executable by what it costs, and says so only through the event of a launch, which costs a fifth of a small one: it is
/// asked for a few times.
#[derive(Debug, Default)]
pub(crate) struct Prompt(AtomicU8);

impl Prompt {
    /// So many times in a row are no chance: where another thread runs it, that thread has yet to wake up.
    const SURE: u8 = 8;
    const LATE: u8 = u8::MAX;

    /// Whether that is known.
    pub(crate) fn is_sure(&self) -> bool {
        self.0.load(Relaxed) == Self::SURE
    }

    /// It had run, or not.
    pub(crate) fn learn(&self, over: bool) {
        match self.0.load(Relaxed) {
            n if over && n < Self::SURE => self.0.store(n + 1, Relaxed),
            _ if !over => self.0.store(Self::LATE, Relaxed),
            _ => {}
        }
    }
}

/// How often a program was launched, and how long it ran: the end of a run may be noted after its results were read.
#[derive(Debug, Default)]
pub(crate) struct Ran {
    pub(crate) launches: AtomicU64,
    pub(crate) device_ns: AtomicU64,
}

impl Ran {
    /// It was launched once more.
    pub(crate) fn launch(&self) {
        self.launches.fetch_add(1, Relaxed);
    }

    /// A run has ended that took so long.
    pub(crate) fn end(&self, time: Duration) {
        self.device_ns.fetch_add(time.as_nanos() as u64, Relaxed);
    }
}

/// What the compiler made.
#[derive(Debug)]
struct Executable {
    loaded: Result<Weak<Loaded>, Error>,
    effort: Effort,
    /// How often it was asked for, while it is a quick version.
    launches: u32,
    /// How often it was asked for in vain.
    refused: u32,
}

impl Executable {
    fn new(loaded: Result<(Arc<Loaded>, Effort), Error>) -> Executable {
        let effort = loaded.as_ref().map_or(Effort::Full, |(_, effort)| *effort);
        Executable { loaded: loaded.map(|(l, _)| Arc::downgrade(&l)), effort, launches: 0, refused: 0 }
    }
}

impl Program {
    pub(crate) fn new(graph: &Graph) -> Arc<Program> {
        Arc::new(Program {
            outputs: graph.live.len(),
            donated: graph.donated.clone(),
            offloaded: graph.offloaded(),
            reloaded: graph.reloaded(),
            spread: graph.spread.clone(),
            checks: graph.checks(),
            may_fail: graph.ops.insts.iter().any(|i| i.may_fail()),
            prompt: Prompt::default(),
            name: graph.name(),
            ran: Ran::default(),
            told: AtomicBool::new(false),
            executable: OnceLock::new(),
            task: OnceLock::new(),
        })
    }

    /// What it checks when its ops are of these lines, where they are not those of which it was made.
    pub(crate) fn checks_at(&self, sites: &[Site], shown: impl Fn(Site) -> Site) -> Option<Arc<[Check]>> {
        let at = |check: &Check| sites.get(check.op as usize).map_or(check.site, |&site| shown(site));
        let is_elsewhere = self.checks.iter().any(|check| at(check) != check.site);
        is_elsewhere.then(|| self.checks.iter().map(|c| Check { site: at(c), ..c.clone() }).collect())
    }

    /// A program of no ops.
    #[cfg(test)]
    pub(crate) fn of_nothing() -> Program {
        Program {
            outputs: 0,
            donated: SmallVec::new(),
            offloaded: SmallVec::new(),
            reloaded: SmallVec::new(),
            spread: None,
            checks: Vec::new(),
            may_fail: false,
            prompt: Prompt::default(),
            name: String::new(),
            ran: Ran::default(),
            told: AtomicBool::new(false),
            executable: OnceLock::new(),
            task: OnceLock::new(),
        }
    }

    /// Whether the compiler is done.
    pub(crate) fn is_done(&self) -> bool {
        self.executable.get().is_some()
    }

    /// Whether [`Program::executable`] gives it without waiting.
    pub(crate) fn is_at_hand(&self) -> bool {
        let known = self.executable.get().and_then(Mutex::try_lock);
        known.is_some_and(|place| place.loaded.as_ref().is_ok_and(|held| held.strong_count() > 0))
    }

    /// Waits for the compiler. An executable that the cache has let go of is loaded or compiled again, here and now; a
    /// quick version that is launched again is replaced as soon as a better one is there. What could not be compiled is
    /// compiled once more when it is launched again: the compiler may have wanted for memory. Then its error stays.
    pub(crate) fn executable(self: &Arc<Self>) -> Result<Arc<Loaded>, Error> {
        let mut place = self.executable.wait().lock();
        if let Err(e) = &place.loaded {
            let e = e.clone();
            place.refused = place.refused.saturating_add(1);
            return if place.refused == 2 { self.make_again(&mut place) } else { Err(e) };
        }
        let usable = place.effort == Effort::Full || self.may_be_quick(&mut place);
        self.have(&mut place, usable)
    }

    /// What [`Program::executable`] gives, to be looked at.
    pub(crate) fn shown(&self) -> Result<Arc<Loaded>, Error> {
        self.have(&mut self.executable.wait().lock(), true)
    }

    fn have(&self, place: &mut Executable, usable: bool) -> Result<Arc<Loaded>, Error> {
        let held = place.loaded.as_ref().map_err(Error::clone)?.upgrade();
        if let Some(loaded) = held.filter(|_| usable) {
            loaded.touch();
            return Ok(loaded);
        }
        self.make_again(place)
    }

    fn make_again(&self, place: &mut Executable) -> Result<Arc<Loaded>, Error> {
        let (compiler, task) = self.task().ok_or_else(closed)?;
        let (loaded, effort) = compiler.compile_apart(&self.name, task)?;
        place.loaded = Ok(Arc::downgrade(&loaded));
        place.effort = effort;
        Ok(loaded)
    }

    /// Whether it could not be compiled.
    pub(crate) fn is_broken(&self) -> bool {
        self.executable.get().is_some_and(|place| place.lock().loaded.is_err())
    }

    /// From what it is made, and by whom.
    pub(crate) fn task(&self) -> Option<(Arc<Compiler>, &Task)> {
        let (compiler, task) = self.task.get()?;
        Some((compiler.upgrade()?, task))
    }

    /// Whether the quick version will do; asks for a better one when that is worth it.
    fn may_be_quick(self: &Arc<Self>, place: &mut Executable) -> bool {
        let Some((compiler, task)) = self.task() else { return true };
        if !compiler.policy.allows_quick() {
            return false; // the caller replaces it now
        }
        place.launches = place.launches.saturating_add(1);
        if place.launches == Policy::worth_it(&task.graph) {
            compiler.improve(self.clone());
        }
        true
    }

    /// Called once, by whoever compiled it.
    fn set(&self, executable: Result<(Arc<Loaded>, Effort), Error>) {
        // Set once: tasks are submitted once.
        let _ = self.executable.set(Mutex::new(Executable::new(executable)));
    }

    /// Replaces the quick version.
    fn swap(&self, better: &Arc<Loaded>) {
        let mut place = self.executable.wait().lock();
        place.loaded = Ok(Arc::downgrade(better));
        place.effort = Effort::Full;
    }
}

fn closed() -> Error {
    Error::runtime("the tpu device is closed")
}

#[derive(Default)]
struct Tasks {
    queue: VecDeque<Arc<Program>>,
    /// Programs that run in a quick version and are worth a better one.
    quick: VecDeque<Arc<Program>>,
    /// Whether a thread makes those.
    improver: bool,
    /// Tasks that a thread works on.
    running: usize,
    /// No thread takes tasks any more: whoever submits one compiles it.
    closed: bool,
}

/// A thread that compiles. XLA and LLVM walk through chains of ops by recursion: 2 MiB, as threads have, end before 10,000
/// ops do.
fn thread(name: String) -> std::thread::Builder {
    std::thread::Builder::new().name(name).stack_size(STACK_BYTES)
}

/// A thread trims the heap when it has compiled for so long: that takes some percent of this time, and what compiling left
/// there may be 100 MiB.
const TRIM_AFTER: Duration = Duration::from_millis(250);

/// Only what is used of it takes memory.
const STACK_BYTES: usize = 64 << 20;

/// Who looks at the programs of a compiler.
pub(crate) trait Watch: Send + Sync {
    /// A program is known.
    fn submitted(&self, program: &Arc<Program>);

    /// It has its executable, or has failed to get it.
    fn compiled(&self, compiler: &Compiler, program: &Program);
}

/// The compiler threads of one client.
pub(crate) struct Compiler {
    own: Weak<Compiler>,
    pub(crate) target: Target,
    programs: Programs,
    metrics: Arc<Metrics>,
    tasks: Mutex<Tasks>,
    wake: Condvar,
    /// The user's compiler options, by number; 0 is none.
    user_options: Mutex<Vec<UserOptions>>,
    /// Who looks at its programs.
    watch: Arc<dyn Watch>,
    pub(crate) policy: Policy,
    /// Whether it is printed what the cache folder had instead of a program.
    prints: AtomicBool,
}

/// XLA options by name.
pub type UserOptions = Vec<(String, pjrt::OptionValue)>;

impl Compiler {
    /// Starts `threads` compiler threads.
    pub(crate) fn start(
        target: Target,
        metrics: Arc<Metrics>,
        threads: usize,
        cache: &CacheOptions,
        policy: Policy,
        watch: Arc<dyn Watch>,
    ) -> Arc<Compiler> {
        let compiler = Arc::new_cyclic(|own| Compiler {
            own: own.clone(),
            programs: Programs::new(target.clone(), cache),
            target,
            metrics,
            tasks: Mutex::default(),
            wake: Condvar::new(),
            user_options: Mutex::new(vec![Vec::new()]),
            watch,
            policy,
            prints: AtomicBool::new(false),
        });
        for i in 0..threads.max(1) {
            let own = compiler.clone();
            let thread = thread(format!("oxi-compile-{i}"));
            // A process that cannot have a thread compiles in the threads that ask; see `submit`.
            if thread.spawn(move || own.run(|t| &mut t.queue, Compiler::finish)).is_err() && i == 0 {
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

    /// The number of these options and what makes results the same in each run, if that is asked for and the platform does
    /// not do so anyway: on GPUs scatters and some kernels of libraries add up in the order in which threads come.
    pub(crate) fn in_force(&self, number: u32) -> u32 {
        if self.target.platform() != pjrt::Platform::Cuda || !self.policy.is_deterministic() {
            return number;
        }
        let mut options = self.user_options.lock()[number as usize].clone();
        if options.iter().any(|(name, _)| name == DETERMINISTIC) {
            return number; // the user's word
        }
        options.push((DETERMINISTIC.to_owned(), pjrt::OptionValue::Bool(true)));
        self.options_number(options)
    }

    /// The compiled programs.
    pub(crate) fn programs(&self) -> &Programs {
        &self.programs
    }

    /// Whether it is printed what the cache folder had instead of a program.
    pub(crate) fn print_misses(&self, on: bool) {
        self.prints.store(on, Relaxed);
    }

    /// Queues a program.
    pub(crate) fn submit(&self, graph: Graph, program: Arc<Program>, device: i64) {
        // Set once: a program is submitted once.
        let _ = program.task.set((self.own.clone(), Task { graph: Arc::new(graph), device }));
        self.watch.submitted(&program);
        if let Err(e) = self.target.client() {
            return program.set(Err(e));
        }
        let mut tasks = self.tasks.lock();
        if tasks.closed {
            drop(tasks);
            return self.finish(&program);
        }
        tasks.queue.push_back(program);
        drop(tasks);
        self.wake.notify_all();
    }

    /// Makes a better version of a program that runs in a quick one.
    fn improve(&self, program: Arc<Program>) {
        let mut tasks = self.tasks.lock();
        if tasks.closed {
            return;
        }
        if !tasks.improver {
            let Some(own) = self.own.upgrade() else { return };
            let thread = thread("oxi-improve".to_owned());
            // A process that cannot have a thread keeps the quick versions.
            tasks.improver = thread.spawn(move || own.run(|t| &mut t.quick, Compiler::replace)).is_ok();
        }
        tasks.quick.push_back(program);
        drop(tasks);
        self.wake.notify_all();
    }

    /// A thread that does the tasks of a queue.
    fn run(&self, queue: fn(&mut Tasks) -> &mut VecDeque<Arc<Program>>, work: fn(&Compiler, &Program)) {
        let mut worked = Duration::ZERO; // since the heap was trimmed
        loop {
            let mut tasks = self.tasks.lock();
            let program = loop {
                match queue(&mut tasks).pop_front() {
                    Some(program) => break program,
                    None if tasks.closed => return,
                    None => self.wake.wait(&mut tasks),
                }
            };
            tasks.running += 1;
            drop(tasks);
            let started = Instant::now();
            work(self, &program);
            worked += started.elapsed();
            if worked >= TRIM_AFTER {
                pjrt::trim_heap();
                worked = Duration::ZERO;
            }
            self.tasks.lock().running -= 1;
            self.wake.notify_all();
        }
    }

    /// Drops what is queued and waits for what is being compiled: a plugin must not be left at work when its process ends.
    pub(crate) fn close(&self) {
        self.tasks.lock().closed = true; // first, so that nobody calls what the cache then refuses a failure
        self.programs.close();
        let mut tasks = self.tasks.lock();
        for program in tasks.queue.drain(..) {
            program.set(Err(closed()));
        }
        tasks.quick.clear();
        self.wake.notify_all();
        while tasks.running > 0 {
            self.wake.wait(&mut tasks);
        }
    }

    fn finish(&self, program: &Program) {
        let Some((_, task)) = program.task.get() else { return };
        // A panic in a lowering must not leave the launch thread waiting for ever.
        let compile = || self.compile(&program.name, task);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(compile));
        program.set(result.unwrap_or_else(|_| {
            Err(Error::runtime(format!("{}: the compiler thread panicked; please report this", program.name)))
        }));
        if self.prints.load(Relaxed)
            && let Some(missed) = self.missed(program, self.stored())
        {
            eprintln!("oxitorch: {}: {missed}", program.name);
        }
        self.watch.compiled(self, program);
    }

    /// From what a program is made: its graph, the module's text, and what its executable depends on.
    pub(crate) fn made_from<'p>(&self, program: &'p Program) -> Option<(&'p Graph, String, cache::Key)> {
        let (_, task) = program.task.get()?;
        let text = task.graph.module(self.target.platform()).ok()?;
        let key = self.programs.key(&text, &self.options(task));
        Some((&task.graph, text, key))
    }

    /// The best version that is there, or else the one that is made first.
    pub(crate) fn compile(&self, name: &str, task: &Task) -> Result<(Arc<Loaded>, Effort), Error> {
        let text: Arc<str> = task.graph.module(self.target.platform())?.into();
        let full = self.build(name, task, text.clone(), Effort::Full);
        if self.policy.first(&task.graph) == Effort::Quick {
            if let Some(loaded) = self.programs.find(&full) {
                return Ok((loaded, Effort::Full));
            }
            // What cannot be compiled quickly may still be compiled.
            if let Ok(loaded) = self.programs.get(&self.build(name, task, text, Effort::Quick)) {
                return Ok((loaded, Effort::Quick));
            }
        }
        Ok((self.programs.get(&full)?, Effort::Full))
    }

    /// As [`Compiler::compile`], for callers whose stack may be too small for that.
    fn compile_apart(&self, name: &str, task: &Task) -> Result<(Arc<Loaded>, Effort), Error> {
        std::thread::scope(|scope| {
            let apart = thread("oxi-compile".to_owned()).spawn_scoped(scope, || self.compile(name, task));
            let apart = apart.map_err(|e| Error::runtime(format!("{name}: cannot start a thread: {e}")))?;
            let panicked = || Error::runtime(format!("{name}: the compiler panicked; please report this"));
            apart.join().unwrap_or_else(|_| Err(panicked()))
        })
    }

    /// Puts a version made with all effort in the place of a quick one.
    fn replace(&self, program: &Program) {
        let Some((_, task)) = program.task.get() else { return };
        let compile = || -> Result<(), Error> {
            let text: Arc<str> = task.graph.module(self.target.platform())?.into();
            let mut full = self.build(&program.name, task, text.clone(), Effort::Full);
            full.background = true;
            self.policy.stand_back(&mut full.options);
            let loaded = self.programs.get(&full)?;
            program.swap(&loaded);
            self.metrics.count(&self.metrics.swaps);
            self.watch.compiled(self, program);
            self.programs.forget(&self.build(&program.name, task, text, Effort::Quick));
            Ok(())
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(compile));
        let failed = |why: &str| {
            let name = &program.name;
            self.programs.warn(&format!("{name}: only the quick version could be compiled: {why}"));
        };
        match result {
            Ok(Err(_)) if self.tasks.lock().closed => {}
            Ok(Err(e)) => failed(&e.message),
            Err(_) => failed("the compiler thread panicked; please report this"),
            Ok(Ok(())) => {}
        }
    }

    pub(crate) fn build<'a>(
        &'a self,
        name: &'a str,
        task: &'a Task,
        text: Arc<str>,
        effort: Effort,
    ) -> Build<'a> {
        let mut options = self.options(task);
        if effort == Effort::Quick {
            self.policy.hurry(&mut options);
        }
        Build {
            programs: &self.programs,
            metrics: &self.metrics,
            graph: &task.graph,
            name,
            text,
            options,
            background: false,
        }
    }

    /// Those for all effort.
    pub(crate) fn options(&self, task: &Task) -> pjrt::CompileOptions {
        let spread = task.graph.spread.as_deref();
        let types = spread.map_or(&task.graph.inputs, |s| &s.params);
        let types = types.iter().map(|t| pjrt::BufferType::new(element(t.dtype), t.shape.clone()));
        let mut options =
            pjrt::CompileOptions { param_types: Some(types.collect()), ..pjrt::CompileOptions::default() };
        match spread {
            Some(spread) => spread.assign(&mut options),
            None if self.target.platform() == pjrt::Platform::Cpu => options.portable = true,
            None => options.device_ordinal = Some(task.device),
        }
        let flag = |name: &str, value: bool| (name.to_owned(), pjrt::OptionValue::Bool(value));
        // XLA may otherwise keep more precision than the program says, and results would depend on fusion.
        options.overrides.push(flag("xla_allow_excess_precision", false));
        let passes = pjrt::OptionValue::String(RESHAPE_MOVER.to_owned());
        options.overrides.push((DISABLED_PASSES.to_owned(), passes));
        if self.target.platform() == pjrt::Platform::Cpu {
            // Not `xla_cpu_copy_insertion_use_region_analysis`: it spares copies of weights, but lets a step overwrite
            // some of them before their last use.
            // The fast forms lose a NaN in the second operand of maximum and minimum.
            options.overrides.push(flag("xla_cpu_enable_fast_min_max", false));
            if task.graph.split().is_none() {
                // It loses NaN too, and gets what is written for it: `hlo/builder/slices.rs`.
                let what = pjrt::OptionValue::String(REDUCTIONS.to_owned());
                options.overrides.push((LIBRARY_FUSIONS.to_owned(), what));
            }
            if is_small(&task.graph) {
                options.overrides.push(flag(FUSION_EMITTERS, false));
            }
        }
        if let Target::Client(client) = &self.target
            && client.platform() == pjrt::Platform::Cuda
            && client.device_ids().len() > client.devices().len()
        {
            // Processes compile different programs, each when it needs it, and load what another has compiled.
            options.overrides.push(flag("xla_gpu_shard_autotuning", false));
        }
        let user = self.user_options.lock()[task.graph.options as usize].clone();
        options.overrides.retain(|(name, _)| user.iter().all(|(n, _)| n != name));
        options.overrides.extend(user);
        if let Some((_, pjrt::OptionValue::String(passes))) =
            options.overrides.iter_mut().find(|(name, _)| name == DISABLED_PASSES)
            && !passes.split(',').any(|pass| pass == RESHAPE_MOVER)
        {
            *passes = format!("{passes},{RESHAPE_MOVER}"); // the user's, and ours
        }
        options
    }
}

/// The option that turns passes of XLA off, and the pass that is off in every program: it gives the operands of an
/// elementwise op different layouts, which XLA forgets where it computes constants, and their elements change places.
const DISABLED_PASSES: &str = "xla_disable_hlo_passes";
const RESHAPE_MOVER: &str = "reshape-mover";

/// The option that says what XLA's library for CPUs (YNNPACK) computes; and that it does reductions, along rows of float32.
const LIBRARY_FUSIONS: &str = "xla_cpu_experimental_ynn_fusion_type";
const REDUCTIONS: &str = "LIBRARY_FUSION_TYPE_REDUCE";

/// The option with which programs for GPUs give the same in each run.
const DETERMINISTIC: &str = "xla_gpu_deterministic_ops";
