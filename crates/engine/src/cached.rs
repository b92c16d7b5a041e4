//! Compiled programs in the cache: what they depend on, how they are written and read.

use crate::effort::SPLIT_COUNT;
use crate::error::{self, Error};
use crate::graph::{Graph, Origin};
use crate::metrics::Metrics;
use crate::target::Target;
use oxitorch_cache::{self as cache, Cache, Held, Key, Maker};
use oxitorch_hlo::PLACEMENT_TARGET;
use oxitorch_pjrt as pjrt;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// An executable that the cache holds.
pub(crate) type Loaded = Held<pjrt::Executable>;

/// Programs that a process keeps loaded if nothing is said.
pub const MAX_LOADED: usize = 4096;
/// Bytes of programs that a process keeps loaded if nothing is said: 1 GiB.
pub const MAX_LOADED_BYTES: u64 = 1 << 30;

/// Where compiled programs are kept.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// This machine's cache folder; none: programs live as long as the process.
    pub disk: Option<PathBuf>,
    /// What programs in that folder may have together, in bytes.
    pub disk_bytes: u64,
    /// What several machines share, if there is anything.
    pub shared: Option<cache::Shared>,
    /// How long to wait for another process that compiles the same program.
    pub wait: Duration,
    /// Programs that the process keeps loaded.
    pub max_loaded: usize,
    /// Bytes of programs that the process keeps loaded.
    pub max_loaded_bytes: u64,
    /// Compiler options that say where something is on this machine: the executable does not depend on them.
    pub places: Vec<(String, pjrt::OptionValue)>,
    /// Variables that the plugin's compiler reads, with their values.
    pub environment: Vec<(String, String)>,
    /// Told once about what keeps a folder from being used.
    pub warn: fn(&str),
}

impl Default for CacheOptions {
    fn default() -> Self {
        CacheOptions {
            disk: None,
            disk_bytes: cache::DISK_BYTES,
            shared: None,
            wait: cache::WAIT,
            max_loaded: MAX_LOADED,
            max_loaded_bytes: MAX_LOADED_BYTES,
            places: Vec::new(),
            environment: Vec::new(),
            warn: |_| (),
        }
    }
}

/// The compiled programs of one client.
pub(crate) struct Programs {
    target: Target,
    cache: Cache<pjrt::Executable>,
    options: CacheOptions,
    /// What all programs of this process depend on; made when the first is compiled.
    base: OnceLock<Key>,
    closed: AtomicBool,
    /// Since 1970.
    started_ms: u64,
    stored: OnceLock<Vec<cache::Listed>>,
}

/// Entries of the cache folder that a program is compared with: reading thousands more takes seconds.
const MAX_COMPARED: usize = 2048;

impl Programs {
    pub(crate) fn new(target: Target, options: &CacheOptions) -> Programs {
        let warn = options.warn;
        let config = cache::Config {
            memory: cache::Limits { count: options.max_loaded, bytes: options.max_loaded_bytes },
            disk: options.disk.clone(),
            disk_bytes: options.disk_bytes,
            shared: options.shared.clone(),
            wait: options.wait,
            warn: Arc::new(warn),
            ..cache::Config::default()
        };
        Programs {
            target,
            cache: Cache::new(&config),
            options: options.clone(),
            base: OnceLock::new(),
            closed: AtomicBool::new(false),
            started_ms: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64,
            stored: OnceLock::new(),
        }
    }

    /// The entries of the nearest cache folder that this process did not make, those used last.
    pub(crate) fn stored(&self) -> &[cache::Listed] {
        self.stored.get_or_init(|| {
            let mut entries = self.cache.entries(MAX_COMPARED);
            entries.retain(|e| e.meta.created_ms < self.started_ms);
            entries
        })
    }

    /// Compiles nothing any more and waits for no other process.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.cache.close();
    }

    /// An error once they are closed.
    fn check_open(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::SeqCst) {
            Err(Error::runtime("the tpu device is closed"))
        } else {
            Ok(())
        }
    }

    /// Tells the user about what does not work.
    pub(crate) fn warn(&self, text: &str) {
        (self.options.warn)(text);
    }

    pub(crate) fn stats(&self) -> &cache::Stats {
        self.cache.stats()
    }

    /// The executable of a program: from this process, a cache folder, or the compiler.
    pub(crate) fn get(&self, build: &Build<'_>) -> Result<Arc<Loaded>, Error> {
        let (loaded, source) = self.cache.get_or_make(&self.key_of(build), build)?;
        if source == cache::Source::Memory {
            build.metrics.count(&build.metrics.cache_hits);
        }
        Ok(loaded)
    }

    /// The executable of a program, if it need not be compiled.
    pub(crate) fn find(&self, build: &Build<'_>) -> Option<Arc<Loaded>> {
        let (loaded, source) = self.cache.find(&self.key_of(build), build)?;
        if source == cache::Source::Memory {
            build.metrics.count(&build.metrics.cache_hits);
        }
        Some(loaded)
    }

    /// Lets go of a program that has been replaced.
    pub(crate) fn forget(&self, build: &Build<'_>) {
        self.cache.memory().forget(&self.key_of(build));
    }

    fn key_of(&self, build: &Build<'_>) -> Key {
        let mut options = build.options.clone();
        if build.background {
            // So that it is the program that others compile in the foreground.
            options.overrides.retain(|(name, _)| name != SPLIT_COUNT);
        }
        self.key(&build.text, &options)
    }

    /// Everything that the executable depends on.
    pub(crate) fn key(&self, text: &str, options: &pjrt::CompileOptions) -> Key {
        let base = self.base.get_or_init(|| self.base());
        // The types of parameters are in the module.
        let options = pjrt::CompileOptions { param_types: None, ..options.clone() };
        let key =
            base.clone().with("module", text.as_bytes()).with("options", format!("{options:?}").as_bytes());
        let (true, Target::Client(client)) = (self.cache.is_persistent(), &self.target) else { return key };
        key.with("devices", describe_devices(client, options.portable).as_bytes())
    }

    fn base(&self) -> Key {
        let key = Key::new().with("oxitorch", env!("CARGO_PKG_VERSION").as_bytes());
        let (true, Target::Client(client)) = (self.cache.is_persistent(), &self.target) else {
            return key; // the rest does not change while the process lives
        };
        let plugin = client.plugin();
        let path = plugin.path();
        // A plugin that cannot be read is known by what it says of itself and by its path alone.
        let digest = cache::file_digest(path, self.options.disk.as_deref())
            .unwrap_or_else(|_| path.display().to_string());
        let (major, minor) = plugin.api_version();
        let key = key
            .with("plugin", format!("PJRT {major}.{minor} {digest}").as_bytes())
            .with("platform", format!("{} {}", client.platform_name(), client.platform_version()).as_bytes())
            .with("environment", format!("{:?}", self.options.environment).as_bytes());
        if client.platform() == pjrt::Platform::Cpu {
            let (model, features) = processor();
            return key.with("cpu", model.as_bytes()).with("cpu features", features.as_bytes());
        }
        key
    }
}

/// Kinds and number; executables are bound to the number through their device assignment, unless they run anywhere:
/// then the ranks of a machine share them, of which each has a device of its own.
fn describe_devices(client: &pjrt::Client, portable: bool) -> String {
    let mut kinds: Vec<&str> = client.devices().iter().map(|d| d.kind()).collect();
    kinds.dedup();
    let kinds = kinds.join(", ");
    match (client.devices().len(), client.device_ids().len()) {
        _ if portable => kinds,
        (here, all) if here == all => format!("{here} x {kinds}"),
        (here, all) => format!("{here} of {all} x {kinds}"),
    }
}

/// What code compiled for this host's processor depends on: its model with how many cores work is split for, and its
/// features.
fn processor() -> (String, String) {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let first = text.split("\n\n").next().unwrap_or_default();
    let field = |name: &str| {
        let line = first.lines().find(|l| l.split(':').next().is_some_and(|n| n.trim() == name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    // x86-64 says the first words, aarch64 the others.
    let names =
        ["model name", "cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant"];
    let model: Vec<String> = names.iter().filter_map(|n| field(n)).collect();
    let cores = std::thread::available_parallelism().map_or(0, |n| n.get());
    let model = format!("{} {}, {cores} cores", std::env::consts::ARCH, model.join(" "));
    (model, field("flags").or_else(|| field("Features")).unwrap_or_default())
}

/// One program, ready to be compiled.
pub(crate) struct Build<'a> {
    pub(crate) programs: &'a Programs,
    pub(crate) metrics: &'a Metrics,
    pub(crate) graph: &'a Graph,
    pub(crate) name: &'a str,
    pub(crate) text: Arc<str>,
    pub(crate) options: pjrt::CompileOptions,
    /// Whether a quick version runs meanwhile.
    pub(crate) background: bool,
}

/// Notes longer than this are cut: they are read by people.
const NOTE: usize = 1000;

/// Bytes of a program after which the heap is trimmed: reading one of 1.4 MB leaves 50 MiB free there, in the part of the
/// thread that reads, and the next one may be read by another. Giving it back takes 3 ms.
const LARGE: usize = 512 << 10;

impl Maker for Build<'_> {
    type Value = pjrt::Executable;
    type Error = Error;

    fn describe(&self) -> (String, Vec<(String, String)>) {
        let join = |words: Vec<String>| {
            let text = words.join(", ");
            match text.char_indices().nth(NOTE) {
                Some((end, _)) => format!("{}...", &text[..end]),
                None => text,
            }
        };
        let ops = self.graph.ops.insts.iter().map(|i| i.name().to_owned()).collect();
        let inputs = self.options.param_types.iter().flatten().map(pjrt::BufferType::to_string).collect();
        let count = |n: usize| n.to_string();
        let notes = [
            ("ops", join(ops)),
            ("op count", count(self.graph.ops.len())),
            ("inputs", join(inputs)),
            ("outputs", count(self.graph.live.len())),
            ("donated", format!("{:?}", self.graph.donated)),
            ("platform", self.programs.target.platform().name().to_owned()),
        ];
        (self.name.to_owned(), notes.map(|(name, text)| (name.to_owned(), text)).into())
    }

    fn load(&self, payload: &[u8]) -> Result<(pjrt::Executable, u64), String> {
        let start = Instant::now();
        let executable = self
            .programs
            .target
            .client()
            .map_err(|e| e.to_string())?
            .deserialize(payload, &self.options)
            .map_err(|e| e.to_string())?;
        if payload.len() >= LARGE {
            pjrt::trim_heap();
        }
        self.metrics.loaded(self.name, start);
        let _ = self.graph.source.origin.set(Origin::Loaded(start.elapsed())); // the first is kept
        let size = size(&executable, payload.len());
        Ok((executable, size))
    }

    fn make(&self) -> Result<(pjrt::Executable, u64), Error> {
        self.programs.check_open()?;
        let start = Instant::now();
        let client = self.programs.target.client()?;
        let mut options = self.options.clone();
        options.overrides.extend_from_slice(&self.programs.options.places);
        let result = client.compile(&pjrt::Program::mlir(self.text.as_bytes()), &options);
        if self.background {
            self.metrics.improved(self.name, start);
        } else {
            self.metrics.compiled(self.name, start);
            let _ = self.graph.source.origin.set(Origin::Compiled(start.elapsed())); // the first is kept
        }
        let executable = result.map_err(|e| {
            let said = matches!(e, pjrt::Error::CompileFailed { .. });
            let what = if said { "" } else { ": compilation failed" };
            error::device(&format!("{}{what}", self.name), &e)
        })?;
        let size = size(&executable, self.text.len());
        Ok((executable, size))
    }

    fn save(&self, executable: &pjrt::Executable) -> Option<Vec<u8>> {
        // A plugin that cannot serialize has programs that live as long as the process.
        executable.serialize().ok()
    }

    /// A custom call may go to a handler that only this process has registered. Every process that runs our programs has
    /// the one for host functions, whose names are in the programs; and where values are kept, compilers know.
    fn is_portable(&self) -> bool {
        let calls_of = |target: &str| self.text.matches(&format!("call_target_name = \"{target}\"")).count();
        let known = calls_of(pjrt::HOST_CALL_TARGET) + calls_of(PLACEMENT_TARGET);
        self.text.matches("stablehlo.custom_call").count() == known
    }
}

/// Bytes that an executable has in this process. The plugin for CPUs does not say; with its code, its relocations and its
/// descriptions a program was seen to have 40 KiB at least and about 20 times the bytes of its text or serialized form.
fn size(executable: &pjrt::Executable, form: usize) -> u64 {
    let code = executable.code_bytes().ok().and_then(|b| u64::try_from(b).ok()).unwrap_or(0);
    code.max((64 << 10) + 20 * form as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_processor_has_a_model_and_features() {
        let (model, features) = processor();
        assert!(model.starts_with(std::env::consts::ARCH) && model.ends_with(" cores"), "{model}");
        assert!(features.split(' ').count() > 3, "{features}");
    }
}
