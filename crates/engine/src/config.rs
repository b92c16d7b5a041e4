//! What the engine is told at start, and the switches that may change while it runs.

use oxitorch_aten::{Checks, Config, MatmulPrecision, TargetOptions};
use oxitorch_hlo::DType;
use oxitorch_pjrt::Platform;

/// How ops become programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Ops are collected and run as larger programs; Python runs ahead of the device.
    #[default]
    Fused,
    /// One op at a time; Python runs ahead of the device.
    Strict,
    /// One op at a time, waiting after each; indices are checked, and NaN if asked for.
    Debug,
}

impl Mode {
    /// In declaration order.
    pub const ALL: [Mode; 3] = [Mode::Fused, Mode::Strict, Mode::Debug];

    /// By its lower-case name.
    pub fn parse(name: &str) -> Option<Mode> {
        Mode::ALL.into_iter().find(|m| m.name() == name)
    }

    /// Its lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Fused => "fused",
            Mode::Strict => "strict",
            Mode::Debug => "debug",
        }
    }
}

/// Bounds of what is recorded before it is launched, in fused mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Ops.
    pub ops: usize,
    /// Bytes of all results of those ops, needed or not.
    pub bytes: u64,
    /// Bytes of those results that XLA does not fuse into what reads them.
    pub kept: u64,
    /// Bytes that are on the device for the window alone: of inputs that nobody sees any more and that no result replaces.
    pub held: u64,
}

impl Limits {
    /// The default for a device with so much memory.
    ///
    /// The CPU plugin asks the system for a program's temporary memory at each launch, of which most is at hand as it was
    /// freed before (`pjrt::Plugin::keep_blocks`); a larger window would be in memory twice for little
    /// (docs/performance.md).
    ///
    /// Elsewhere the step of an optimizer alone has results of up to four times the memory: some ten of the size of the
    /// parameters, where these, the gradients and the state fill it. They are not there at once, and a window that ends
    /// among them would keep them.
    pub(crate) fn of(platform: Platform, memory: u64) -> Limits {
        let (bytes, kept, held) = match platform {
            Platform::Cpu => (memory, 256 << 20, 16 << 20),
            _ => (memory.saturating_mul(8), memory, memory / 16),
        };
        Limits { ops: 10_000, bytes, kept, held }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits { ops: 10_000, bytes: u64::MAX, kept: u64::MAX, held: u64::MAX }
    }
}

/// How much a device remembers of what it has recorded. Beyond it, what was not used lately is forgotten, and learned again
/// when it comes again; executables come from the cache then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// Sequences of ops that have programs.
    pub programs: usize,
    /// Ops for different shapes, dtypes and attributes. A step of a large model has some hundreds.
    pub ops: usize,
}

impl Default for Remembered {
    fn default() -> Self {
        Remembered { programs: 8192, ops: 1 << 16 }
    }
}

/// What a platform's compiler wants of lowerings.
pub fn target_options(platform: Platform) -> TargetOptions {
    match platform {
        Platform::Cpu => TargetOptions::CPU,
        Platform::Cuda => TargetOptions::CUDA,
        Platform::Tpu => TargetOptions::TPU,
    }
}

/// Everything besides arguments that shapes a lowering.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lowering {
    /// What the op table looks at.
    pub config: Config,
    /// Whether float results are checked for NaN and infinity.
    pub nan_trap: bool,
}

/// Switches; a copy is taken with every op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switches {
    /// How ops become programs.
    pub mode: Mode,
    /// In debug mode: stop at the first NaN or infinity.
    pub nan_trap: bool,
    /// Precision of float32 matrix products and convolutions.
    pub matmul: MatmulPrecision,
    /// `torch.get_default_dtype()`.
    pub default_dtype: DType,
    /// Compiler options, by the number that [`Engine::compiler_options`](crate::Engine::compiler_options) gave; 0 is none.
    pub compiler_options: u32,
}

impl Default for Switches {
    fn default() -> Self {
        Switches {
            mode: Mode::default(),
            nan_trap: false,
            matmul: MatmulPrecision::Highest,
            default_dtype: DType::F32,
            compiler_options: 0,
        }
    }
}

impl Switches {
    /// The engine's own ones as one number: those that PyTorch keeps are asked for with every op.
    pub(crate) fn pack(&self) -> u64 {
        u64::from(self.compiler_options) << 32 | u64::from(self.nan_trap) << 8 | self.mode as u64
    }

    /// The inverse of [`Switches::pack`].
    pub(crate) fn unpack(word: u64) -> Switches {
        Switches {
            mode: Mode::ALL[(word & 0xff) as usize],
            nan_trap: word >> 8 & 1 != 0,
            compiler_options: (word >> 32) as u32,
            ..Switches::default()
        }
    }

    /// What they add to the key of a call: everything that [`Switches::lowering`] looks at.
    pub(crate) fn word(&self) -> u64 {
        let debug = self.mode == Mode::Debug;
        let matmul = self.matmul as u64;
        matmul | u64::from(debug) << 4 | u64::from(self.nan_trap) << 5 | (self.default_dtype as u64) << 8
    }

    /// The lowering that they ask for, for a compiler that wants this.
    pub(crate) fn lowering(&self, target: TargetOptions) -> Lowering {
        let debug = self.mode == Mode::Debug;
        let config = Config {
            default_dtype: self.default_dtype,
            matmul: self.matmul,
            checks: if debug { Checks::All } else { Checks::Asserts },
            target,
        };
        Lowering { config, nan_trap: debug && self.nan_trap }
    }
}
