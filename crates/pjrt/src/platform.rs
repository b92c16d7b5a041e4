//! Platforms, and the plugin that runs each.

use std::fmt;

/// A kind of hardware that a plugin drives, best first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Platform {
    /// Google TPU, through `libtpu`.
    Tpu,
    /// NVIDIA GPU.
    Cuda,
    /// The host's processor.
    Cpu,
}

impl Platform {
    /// Every platform, in the order of preference.
    pub const ALL: [Platform; 3] = [Platform::Tpu, Platform::Cuda, Platform::Cpu];

    /// The name that users write.
    pub const fn name(self) -> &'static str {
        match self {
            Platform::Tpu => "tpu",
            Platform::Cuda => "cuda",
            Platform::Cpu => "cpu",
        }
    }

    /// The package that brings the plugin.
    pub const fn package(self) -> &'static str {
        match self {
            Platform::Tpu => "libtpu",
            Platform::Cuda => "jax-cuda13-pjrt",
            Platform::Cpu => "xla-cpu-pjrt",
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
