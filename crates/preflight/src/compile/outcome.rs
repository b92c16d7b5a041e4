//! What became of programs that were compiled.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::hardware::ici::Sent;

/// How much work the compiler puts into a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    #[default]
    /// XLA's optimization level O0: seconds instead of minutes
    Fast,
    /// What a run on the device uses in the end
    Full,
}

/// What the user asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Asked {
    /// Fast, and full for programs that need about what there is
    #[default]
    Auto,
    /// XLA's optimization level O0: seconds instead of minutes
    Fast,
    /// What a run on the device uses in the end
    Full,
}

/// What became of a program.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) id: String,
    pub(crate) compile_s: f64,
    /// The compiler's message, if it made nothing.
    pub(crate) error: Option<String>,
    /// Whether that is because the device has too little memory.
    pub(crate) out_of_memory: bool,
    pub(crate) memory: Option<Memory>,
    pub(crate) effort: Effort,
    /// What it said in fast mode, if this is full effort after that.
    #[serde(skip)]
    pub(crate) fast: Option<Memory>,
    /// The compiler's estimates.
    pub(crate) flops: Option<f64>,
    pub(crate) bytes_accessed: Option<f64>,
    /// What devices send each other, if the program is split.
    pub(crate) collectives: Option<Vec<Sent>>,
    /// Where the memory is, if the compiler wrote it.
    pub(crate) at_peak: Option<AtPeak>,
}

/// Memory of a program on one device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Memory {
    pub(crate) arguments: u64,
    pub(crate) outputs: u64,
    /// Of the outputs, what is in the memory of arguments.
    pub(crate) aliased: u64,
    pub(crate) temporaries: u64,
    /// What it keeps in the memory of the host: arguments, outputs and temporaries. No part of the others.
    #[serde(default)]
    pub(crate) host: u64,
    /// The program itself.
    pub(crate) code: u64,
    /// All of that together, but the code.
    pub(crate) peak: u64,
}

/// Where a buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BufferPlace {
    /// In the memory of this argument, which an output may overwrite.
    Argument(u32),
    Output,
    Temporary,
}

/// A value that is alive at the peak.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Buffer {
    pub(crate) place: BufferPlace,
    /// The instruction that makes it.
    pub(crate) name: String,
    /// As XLA writes it, with its layout: `f32[8,128]{1,0:T(8,128)}`.
    pub(crate) shape: String,
    /// With padding.
    pub(crate) bytes: u64,
    /// The recorded op that makes it.
    pub(crate) op: Option<u32>,
    /// The last recorded op that reads it.
    pub(crate) last_reader: Option<u32>,
}

/// The memory of a program when most of it is in use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct AtPeak {
    /// The largest, largest first.
    pub(crate) buffers: Vec<Buffer>,
    /// Bytes of the others.
    pub(crate) rest_bytes: u64,
    /// What temporaries need besides, as they do not lie without gaps.
    pub(crate) gaps_bytes: u64,
    /// As XLA assigned it; code is not in it.
    pub(crate) memory: Memory,
}
