//! A loaded plugin library.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use oxitorch_pjrt_sys as sys;
use parking_lot::Mutex;
use sys::Args;

use crate::api::{Api, call};
use crate::error::{Error, Result};
use crate::named_value::{self, Attributes};
use crate::platform::Platform;
use crate::{flags, signals};

/// A loaded plugin. Libraries are never unloaded, so there is one of these for each path and it lives for ever.
pub struct Plugin {
    api: Api,
    path: PathBuf,
    attributes: Attributes,
    /// Whether the target of host functions is registered.
    pub(crate) host_calls: Mutex<bool>,
}

/// What to do before a plugin library is loaded.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Environment variables to set where the process does not have them: plugins read them while they load.
    /// Setting them is only sound while no other thread reads the environment through C; load early.
    pub env: Vec<(String, String)>,
}

impl LoadOptions {
    /// What `platform` needs. `without_hardware` is for ahead-of-time compilation: libtpu then neither asks a metadata
    /// server nor takes the lock that lets one process at a time have the chips.
    pub fn for_platform(platform: Platform, without_hardware: bool) -> LoadOptions {
        let mut env = Vec::new();
        let mut set = |name: &str, value: &str| env.push((name.to_string(), value.to_string()));
        if platform == Platform::Tpu && without_hardware {
            set("TPU_SKIP_MDS_QUERY", "1");
            set("ALLOW_MULTIPLE_LIBTPU_LOAD", "1");
        }
        // XLA tells of its devices and of each program that it compiles.
        if platform != Platform::Tpu {
            set("TF_CPP_MIN_LOG_LEVEL", "1");
        }
        LoadOptions { env }
    }
}

static LOADED: LazyLock<Mutex<HashMap<PathBuf, &'static Plugin>>> = LazyLock::new(Default::default);

impl Plugin {
    /// Loads and initialises the plugin library at `path`, or gives the one loaded from there before.
    pub fn load(platform: Platform, path: &Path, options: &LoadOptions) -> Result<&'static Plugin> {
        let refused = |reason: String| Error::Load { path: path.to_path_buf(), reason };
        let real = path.canonicalize().map_err(|e| refused(e.to_string()))?;
        let mut loaded = LOADED.lock();
        if let Some(plugin) = loaded.get(&real) {
            return if plugin.platform() == platform {
                Ok(plugin)
            } else {
                Err(refused(format!("it is loaded already as the plugin for `{}`", plugin.platform())))
            };
        }
        for (name, value) in &options.env {
            if std::env::var_os(name).is_none() {
                // SAFETY: the documentation of `LoadOptions::env` hands the condition on to the caller.
                unsafe { std::env::set_var(name, value) };
            }
        }
        flags::check(&real, std::env::var_os("XLA_FLAGS").unwrap_or_default())?;
        let plugin = signals::preserved(|| {
            // SAFETY: loading runs the library's initialisers; that it is a PJRT plugin is what the caller asked for.
            let library = unsafe { libloading::Library::new(&real) }.map_err(|e| refused(e.to_string()))?;
            // The library stays for the life of the process: threads of the plugin run in it.
            let library: &'static libloading::Library = Box::leak(Box::new(library));
            // SAFETY: the symbol's type is fixed by the PJRT headers.
            let get = unsafe { library.get::<sys::GetPjrtApi>(b"GetPjrtApi\0") };
            let get = get.map_err(|_| refused("it exports no `GetPjrtApi`: not a PJRT plugin".into()))?;
            // SAFETY: `GetPjrtApi` takes nothing and returns a static table.
            unsafe { Plugin::from_api(platform, get(), &real) }
        })?;
        loaded.insert(real, plugin);
        Ok(plugin)
    }

    /// Initialises a plugin from its function table: for plugins that are linked in, such as a test's.
    ///
    /// # Safety
    /// `table` is null or a `PJRT_Api` that honours the headers and is never freed.
    pub unsafe fn from_api(
        platform: Platform,
        table: *const sys::PJRT_Api,
        path: &Path,
    ) -> Result<&'static Plugin> {
        // SAFETY: passed on to the caller.
        let api = unsafe { Api::new(table, platform) }?;
        let mut init = Args::<sys::PJRT_Plugin_Initialize_Args>::new();
        // SAFETY: no arguments.
        unsafe { call!(&api, PJRT_Plugin_Initialize, init) }?;
        let mut args = Args::<sys::PJRT_Plugin_Attributes_Args>::new();
        // SAFETY: no arguments; the attributes are static.
        let attributes = unsafe {
            match call!(&api, PJRT_Plugin_Attributes, args) {
                Ok(()) => named_value::from_c(args.attributes, args.num_attributes),
                Err(Error::Unsupported { .. }) => Attributes::new(),
                Err(e) => return Err(e),
            }
        };
        Ok(Box::leak(Box::new(Plugin {
            api,
            path: path.to_path_buf(),
            attributes,
            host_calls: Mutex::new(false),
        })))
    }

    /// The platform it was loaded for.
    pub fn platform(&self) -> Platform {
        self.api.platform()
    }

    /// The library's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version of the C API that it speaks.
    pub fn api_version(&self) -> (i32, i32) {
        self.api.version()
    }

    /// What it says about itself, for instance `stablehlo_current_version`.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// The names of its extensions.
    pub fn extensions(&self) -> Vec<Extension> {
        self.api.extensions().map(|(kind, _)| Extension(kind)).collect()
    }

    pub(crate) fn api(&self) -> &Api {
        &self.api
    }
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.api_version();
        write!(f, "Plugin({}, {}, PJRT API {major}.{minor})", self.platform(), self.path.display())
    }
}

/// A kind of extension of the C API, by its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extension(pub u32);

impl fmt::Display for Extension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            sys::PJRT_Extension_Type_Gpu_Custom_Call => "Gpu_Custom_Call",
            sys::PJRT_Extension_Type_Profiler => "Profiler",
            sys::PJRT_Extension_Type_Custom_Partitioner => "Custom_Partitioner",
            sys::PJRT_Extension_Type_Stream => "Stream",
            sys::PJRT_Extension_Type_Layouts => "Layouts",
            sys::PJRT_Extension_Type_FFI => "FFI",
            sys::PJRT_Extension_Type_MemoryDescriptions => "MemoryDescriptions",
            sys::PJRT_Extension_Type_Triton => "Triton",
            sys::PJRT_Extension_Type_RawBuffer => "RawBuffer",
            sys::PJRT_Extension_Type_PhaseCompile => "PhaseCompile",
            sys::PJRT_Extension_Type_CrossHostTransfers => "CrossHostTransfers",
            sys::PJRT_Extension_Type_ExecutableMetadata => "ExecutableMetadata",
            sys::PJRT_Extension_Type_Callback => "Callback",
            sys::PJRT_Extension_Type_HostAllocator => "HostAllocator",
            sys::PJRT_Extension_Type_TpuTopology => "TpuTopology",
            sys::PJRT_Extension_Type_TpuExecutable => "TpuExecutable",
            sys::PJRT_Extension_Type_Megascale => "Megascale",
            other => return write!(f, "extension {other}"),
        };
        f.write_str(name)
    }
}
