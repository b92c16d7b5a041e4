//! The engine: a client, a stream per device, and the switches.

use crate::absent::Absent;
use crate::cached::CacheOptions;
use crate::config::{Limits, Remembered, Switches};
use crate::effort::Policy;
use crate::error::{Error, Refusal, Result};
use crate::events::{Heard, Listener};
use crate::explain::{Bounds, Explainer};
use crate::graphs::{Graphs, Shown};
use crate::lanes::Lanes;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::program::{Compiler, UserOptions};
use crate::recipe::{Prepared, Recipe};
use crate::site::Site;
use crate::spread::{Devices, Place};
use crate::stream::Stream;
use crate::target::Target;
use crate::work::Interrupt;
use oxitorch_aten::TargetOptions;
use oxitorch_cache as cache;
use oxitorch_capture::{Capture, Graph, Modules, Reason};
use oxitorch_hlo::Mesh;
use oxitorch_pjrt as pjrt;
use parking_lot::Mutex;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

/// What an engine is started with.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads that compile; 0 means one per core.
    pub compile_threads: usize,
    /// Where compiled programs are kept.
    pub cache: CacheOptions,
    /// The folder into which each program is written, to be looked at.
    pub graphs: Option<PathBuf>,
    /// Whether what takes long to compile is compiled quickly first, and better while that runs.
    pub background_compile: bool,
    /// Whether results must not depend on when a compiler is done.
    pub deterministic: fn() -> bool,
    /// What the platform's compiler wants of lowerings. Those that call torch's kernels want the host functions of that name
    /// registered with the plugin.
    pub target: TargetOptions,
    /// Called about ten times a second while something waits for the device.
    pub interrupt: Interrupt,
    /// If the user sees other devices than those of the client.
    pub numbered: Option<Numbered>,
    /// How many devices the user sees at least: those that the client does not have are its own once more, with a stream and
    /// an account of memory each. Of other processes' devices there are none then.
    pub at_least: usize,
}

/// Devices as a user sees them who runs a process for each device of a machine: there are those of all processes, of which
/// this one has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbered {
    /// How many there are.
    pub count: usize,
    /// The number of the own one, or the first of these.
    pub first: usize,
}

/// Runs ops on the devices of one target.
pub struct Engine {
    target: Target,
    numbered: Numbered,
    /// How many devices this process can use; behind their streams are those of meshes.
    own: usize,
    streams: Vec<Stream>,
    metrics: Arc<Metrics>,
    /// Packed, as they are read with every op.
    switches: AtomicU64,
    closed: AtomicBool,
    /// The thread that closed it.
    closer: Mutex<Option<ThreadId>>,
    compiler: Arc<Compiler>,
    explainer: Arc<Explainer>,
    graphs: Arc<Graphs>,
    /// The device, if it is not there.
    absent: Option<Arc<Absent>>,
}

impl Engine {
    /// Starts the threads of an engine.
    pub fn start(target: Target, options: &Options) -> Result<Engine> {
        let metrics = Arc::new(Metrics::default());
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = if options.compile_threads == 0 { cores } else { options.compile_threads };
        let policy = Policy::new(target.platform(), options.background_compile, options.deterministic);
        let graphs = Arc::new(Graphs::default());
        if let Some(folder) = &options.graphs {
            graphs.keep_in(folder);
        }
        let (cache, watch) = (&options.cache, graphs.clone());
        let compiler = Compiler::start(target.clone(), metrics.clone(), threads, cache, policy, watch);
        let memory: fn(&Target) -> &'static Memory = |target| match target {
            Target::Client(client) => memory_of(client),
            Target::Absent(device) => Memory::boundless(device.memory),
        };
        let bounds = if target.is_present() { Bounds::RUNNING } else { Bounds::CAPTURING };
        let there = target.device_count();
        let own = if options.numbered.is_some() { there } else { there.max(options.at_least) };
        let numbered = options.numbered.unwrap_or(Numbered { count: own, first: 0 });
        if numbered.first + own > numbered.count {
            let words =
                format!("{own} device(s) from tpu:{} on are not among {}", numbered.first, numbered.count);
            return Err(Error::runtime(words));
        }
        let (mut absent, lanes) = (None, Lanes::default());
        let explainer = Arc::new(Explainer::new(bounds));
        let mut stream = |place: usize| {
            let memory = memory(&target);
            let (target, compiler, explainer) = (target.clone(), compiler.clone(), explainer.clone());
            let pretended = match &target {
                Target::Client(_) => None,
                Target::Absent(device) => {
                    Some(Arc::new(Absent::new(device.clone(), memory, metrics.clone())))
                }
            };
            let interrupt = options.interrupt;
            let (number, at) = (numbered.first + place, place % there);
            let place = Place { number, at, devices: None, lanes: lanes.clone() };
            let stream = Stream::new(target, place, compiler, explainer, memory, metrics.clone(), interrupt)?;
            let stream = stream.lowering_for(options.target);
            let Some(pretended) = pretended else { return Ok(stream) };
            absent = Some(pretended.clone());
            Ok(stream.on(pretended))
        };
        let streams: std::io::Result<Vec<Stream>> = (0..own).map(&mut stream).collect();
        let streams = streams.map_err(|e| Error::runtime(format!("cannot start the launch thread: {e}")))?;
        Ok(Engine {
            target,
            numbered,
            own,
            streams,
            metrics,
            switches: AtomicU64::new(Switches::default().pack()),
            closed: AtomicBool::new(false),
            closer: Mutex::default(),
            compiler,
            explainer,
            graphs,
            absent,
        })
    }

    /// What ops are recorded for.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The device, if it is not there.
    pub fn absent(&self) -> Option<&Absent> {
        self.absent.as_deref()
    }

    /// What was asked so far of a device that is not there, and the StableHLO of each program by its id; what was recorded
    /// is cut off first.
    pub fn captured(&self, site: Site) -> Result<Option<(Capture, Modules)>> {
        let (Some(absent), Some(stream)) = (&self.absent, self.streams.first()) else {
            return Ok(None);
        };
        stream.cut(Reason::Wait, site)?;
        Ok(Some(absent.captured(&self.compiler, &self.explainer)))
    }

    /// An op of this line runs on the CPU.
    pub fn fell_back(&self, op: &str, site: Site) {
        self.metrics.fallback(op);
        if let Some(absent) = &self.absent {
            absent.fell_back(op, site);
        }
    }

    /// How many devices there are for the user; some may be those of other processes.
    pub fn device_count(&self) -> usize {
        self.numbered.count
    }

    /// The devices that this process can use, by their numbers.
    pub fn own_devices(&self) -> Range<usize> {
        self.numbered.first..self.numbered.first + self.own
    }

    /// Which of the client's devices one of these is.
    pub fn place_of(&self, device: usize) -> usize {
        device.saturating_sub(self.numbered.first) % self.target.device_count()
    }

    /// Makes a stream of several devices, which then run programs together; gives its number, which is what their values
    /// and calls have for a device.
    pub fn add_mesh(&mut self, mesh: Mesh, devices: &[usize]) -> Result<usize> {
        let devices = Arc::new(Devices::new(self.target.client()?, mesh, devices)?);
        let number = self.numbered.first + self.streams.len();
        if number > usize::from(u16::MAX) {
            return Err(Error::runtime("there are too many meshes"));
        }
        let memory: Vec<&'static Memory> = devices.at.iter().map(|&i| self.streams[i].memory()).collect();
        let stream = self.streams[0].of_mesh(number, devices, Memory::of_mesh(&memory));
        let stream = stream.map_err(|e| Error::runtime(format!("cannot start the launch thread: {e}")))?;
        self.streams.push(stream);
        Ok(number)
    }

    /// The stream of a device; an error if there is none, or if the process is ending.
    pub fn stream(&self, device: usize) -> Result<&Stream, Refusal> {
        if self.closed.load(Ordering::Relaxed) {
            self.linger();
            return Err(Error::runtime("the interpreter is shutting down: the tpu device is closed").into());
        }
        let own = device.checked_sub(self.numbered.first).and_then(|at| self.streams.get(at));
        Ok(own.ok_or_else(|| self.missing(device))?)
    }

    fn missing(&self, device: usize) -> Error {
        let n = self.numbered.count;
        if device >= n {
            return Error::no_device(device, n);
        }
        let own = self.numbered.first;
        Error::runtime(format!(
            "tpu:{device} is the device of another process, and this one has tpu:{own}\n\
             hint: torch.tpu.set_device({own}), which is LOCAL_RANK under torchrun"
        ))
    }

    /// What happened so far.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// What the cache of compiled programs did so far.
    pub fn cache(&self) -> &cache::Stats {
        self.compiler.programs().stats()
    }

    /// Makes all counters start again at zero.
    pub fn reset_metrics(&self) {
        self.metrics.reset();
        self.cache().reset();
        self.streams.iter().for_each(Stream::reset_split);
    }

    /// Keeps what happens from now on, for [`Engine::heard`].
    pub fn listen(&self) -> Listener {
        let listener = self.metrics.events.listen();
        self.streams.iter().for_each(Stream::stamp);
        listener
    }

    /// What happened since; what is queued is launched and waited for first.
    pub fn heard(&self, listener: Listener, site: Site) -> Heard {
        for s in &self.streams {
            // A wait that is interrupted makes the timeline end early. Failures belong to who reads their values.
            let _ = s.rest(site);
        }
        self.heard_so_far(listener)
    }

    /// What happened since, without what is queued.
    pub fn heard_so_far(&self, listener: Listener) -> Heard {
        self.metrics.events.stop(listener)
    }

    /// What is known of the latest programs from this number on without their executables, in the order in which they came.
    pub fn graphs(&self, from: usize) -> Vec<Graph> {
        self.graphs.list(&self.compiler, from)
    }

    /// Makes the programs of a recipe that is a function, without a call; gives their numbers among those of the process, and
    /// the collectives between them in words; none where it computes nothing, or where another thread records into the same
    /// window.
    pub fn prepare(
        &self,
        device: usize,
        recipe: &Recipe,
        site: Site,
        switches: &Switches,
    ) -> Result<Vec<Prepared<usize>>, Refusal> {
        let steps = self.stream(device)?.prepare(recipe, site, switches)?;
        let step = |step| match step {
            Prepared::Program(program) => self.graphs.number(&program).map(Prepared::Program),
            Prepared::Collective(words) => Some(Prepared::Collective(words)),
        };
        Ok(steps.into_iter().filter_map(step).collect())
    }

    /// Says something of the next program of this thread, where it is explained.
    pub fn remark(&self, text: String) {
        self.explainer.remark(text);
    }

    /// Says something of all programs of this thread, where they are explained: until `None` ends what it said last.
    pub fn within(&self, text: Option<String>) {
        match text {
            Some(text) => self.explainer.enter(text),
            None => self.explainer.leave(),
        }
    }

    /// See [`Stream::bounded`].
    pub fn bounded(
        &self,
        device: usize,
        (bound, sample): (&Recipe, &Recipe),
        at_bound: bool,
        site: Site,
        switches: &Switches,
    ) -> Result<Result<Recipe, String>, Refusal> {
        self.stream(device)?.bounded(bound, sample, at_bound, site, switches)
    }

    /// All that is known of the program with this number; waits for its executable. Nothing if it has none.
    pub fn graph(&self, number: usize) -> Option<Shown> {
        let program = self.graphs.get(number)?;
        self.compiler.show(&program)
    }

    /// The switches.
    pub fn switches(&self) -> Switches {
        Switches::unpack(self.switches.load(Ordering::Relaxed))
    }

    /// Changes switches; what was recorded before is launched first.
    pub fn set_switches(&self, change: impl Fn(&mut Switches)) {
        let changed = |word| {
            let mut switches = Switches::unpack(word);
            change(&mut switches);
            Some(switches.pack())
        };
        // The closure always gives a value.
        let _ = self.switches.fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed);
    }

    /// Launches what was recorded on every device.
    pub fn cut(&self, reason: Reason, site: Site) -> Result<()> {
        self.streams.iter().try_for_each(|s| s.cut(reason, site))
    }

    /// What a function recorded that was noted is launched; see [`Stream::launch_noted`].
    pub fn launch_noted(&self, site: Site) -> Result<()> {
        self.streams.iter().try_for_each(|s| s.launch_noted(site))
    }

    /// An optimizer, which is told from others by its number, has made its step: what was recorded on every device is
    /// launched. If the script may drop the gradients that happens once it has, or before whatever else it does; then they
    /// are no results of the step's program. `did`: it has done that before. Gives whether it waits for that.
    pub fn step(&self, optimizer: u64, (may_drop, did): (bool, bool), site: Site) -> Result<bool> {
        // Behind the last step that is of interest the script is to end.
        let may_drop = may_drop && (did || self.absent().is_none_or(|absent| !absent.is_in_last_step()));
        let mut waits = false;
        for stream in &self.streams {
            waits |= stream.step(may_drop, site)?;
        }
        if let Some(absent) = self.absent() {
            absent.stepped(optimizer, !waits);
        }
        Ok(waits)
    }

    /// The script has dropped gradients: a step of the running thread that waits for that is launched. Gives whether there
    /// was one.
    pub fn dropped_gradients(&self, site: Site) -> Result<bool> {
        let mut waited = false;
        for stream in &self.streams {
            waited |= stream.dropped_gradients(site)?;
        }
        Ok(waited)
    }

    /// Why each program was made, oldest first; the last 1000.
    pub fn explanations(&self) -> Vec<String> {
        self.explainer.texts(&self.compiler)
    }

    /// Notes that a loop or branch of this line is recorded round by round, for what its body needs.
    pub fn played(&self, name: &str, site: Site, why: &str) {
        self.explainer.played(name, site, why);
    }

    /// Whether that is printed to stderr as it comes.
    pub fn print_explanations(&self, on: bool) {
        self.explainer.print(on);
        self.compiler.print_misses(on);
    }

    /// Makes every program after so many more an error; `None`: none. Gives what was left of the bound before.
    pub fn allow_programs(&self, more: Option<u64>) -> Option<u64> {
        self.explainer.allow(more)
    }

    /// This thread plays no compiled graph any more.
    pub fn unwatch(&self) -> Result<()> {
        let mode = self.switches().mode;
        self.streams.iter().try_for_each(|s| s.unwatch(mode).map(drop))
    }

    /// Bounds of what is recorded before it is launched in fused mode, as in [`Limits`]; `None` is the default: 10,000
    /// ops, results as large as the device's memory, and 256 MiB of results that are not fused on the CPU platform.
    pub fn set_window(&self, ops: Option<usize>, bytes: Option<u64>, kept: Option<u64>) {
        for s in &self.streams {
            let default = s.default_limits();
            s.set_limits(Limits {
                ops: ops.unwrap_or(default.ops),
                bytes: bytes.unwrap_or(default.bytes),
                kept: kept.unwrap_or(default.kept),
                held: default.held,
            });
        }
    }

    /// Bounds what each device remembers of what it has recorded.
    pub fn remember(&self, most: Remembered) {
        self.streams.iter().for_each(|s| s.remember(most));
    }

    /// The bounds of what is recorded.
    pub fn window(&self) -> Limits {
        self.streams.first().map_or_else(Limits::default, Stream::limits)
    }

    /// Whether what takes long to compile is compiled quickly first, and better while that runs.
    pub fn background_compile(&self) -> bool {
        self.compiler.policy.is_on()
    }

    /// Asks for that, or not any more: then quick versions are replaced before they run again.
    pub fn set_background_compile(&self, on: bool) {
        self.compiler.policy.set(on);
    }

    /// The number of these XLA options, for [`Switches::compiler_options`].
    pub fn compiler_options(&self, options: UserOptions) -> u32 {
        self.compiler.options_number(options)
    }

    /// Lets queued programs wait, or go on: measures what recording alone costs.
    pub fn hold_launches(&self, on: bool) {
        self.streams.iter().for_each(|s| s.hold(on));
    }

    /// Holds up a daemon thread that outlived its program, before it hears of the end: Python ends it when it next wants
    /// the GIL, without a word.
    pub fn linger(&self) {
        if self.closed.load(Ordering::Relaxed) && *self.closer.lock() != Some(std::thread::current().id()) {
            std::thread::sleep(Duration::from_secs(5));
        }
    }

    /// Keeps the latest collectives of this process in a file, of which `head` is the first line, in JSON. `oxitorch ranks`
    /// reads it.
    pub fn record_flight(&self, path: &std::path::Path, head: &str) -> std::io::Result<()> {
        self.metrics.flight.open(path, head)
    }

    /// Waits for what runs and ends the threads; later calls are errors.
    pub fn close(&self) {
        *self.closer.lock() = Some(std::thread::current().id());
        if !self.closed.swap(true, Ordering::SeqCst) {
            self.streams.iter().for_each(Stream::discard);
            self.compiler.close();
            // After the compiler's threads, which write programs too.
            self.graphs.finish();
            self.streams.iter().for_each(Stream::stop);
        }
    }
}

/// What of the host's memory tensors on the CPU platform may use if nobody says otherwise. There is nothing between the
/// last byte and the end of the process: Linux promises memory that it does not have, and kills who touches it. The rest
/// is for Python, tensors on the CPU, compilers and other processes.
const OF_THE_HOST: f64 = 0.8;

/// The memory of a device. The CPU platform shares the host's.
fn memory_of(client: &Arc<pjrt::Client>) -> &'static Memory {
    let device = client.devices().first();
    let known = device.and_then(|d| d.memory_stats().ok().flatten()).and_then(|s| s.limit).filter(|&b| b > 0);
    if let Some(bytes) = known {
        return Memory::new(bytes as u64);
    }
    let memory = Memory::new(host_memory());
    memory.set_fraction(OF_THE_HOST);
    memory
}

/// The host's memory in bytes, or what the process's control group may use.
fn host_memory() -> u64 {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let total = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find(|l| l.starts_with("MemTotal:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    let total = total.map_or(u64::MAX, |kib| kib.saturating_mul(1024));
    let group = read("/sys/fs/cgroup/memory.max").and_then(|t| t.trim().parse::<u64>().ok());
    total.min(group.unwrap_or(u64::MAX))
}
