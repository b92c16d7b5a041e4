//! How much work the compiler puts into a program, and when.
//!
//! A program that nobody has compiled before stops everything that needs it. So one whose compiling would take long is
//! compiled quickly first, and with all effort on a thread of its own once it was launched again: a loop goes on, and
//! its programs become faster by themselves. A program that runs once, as the first step of a training loop does, is
//! never compiled with all effort.

use crate::graph::Graph;
use oxitorch_pjrt::{CompileOptions, EffortLevel, OptionValue, Platform};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// How much work the compiler puts into a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Enough to run it.
    Quick,
    /// All that it can.
    Full,
}

/// When programs are compiled quickly first.
#[derive(Debug)]
pub(crate) struct Policy {
    platform: Platform,
    on: AtomicBool,
    /// Whether results must not depend on when a compiler is done.
    deterministic: fn() -> bool,
}

impl Policy {
    pub(crate) fn new(platform: Platform, on: bool, deterministic: fn() -> bool) -> Policy {
        Policy { platform, on: AtomicBool::new(on), deterministic }
    }

    /// Whether it was asked for.
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Relaxed)
    }

    /// Asks for it, or not any more.
    pub(crate) fn set(&self, on: bool) {
        self.on.store(on, Relaxed);
    }

    /// Whether results must not depend on when a compiler is done.
    pub(crate) fn is_deterministic(&self) -> bool {
        (self.deterministic)()
    }

    /// Whether programs may be compiled quickly now.
    pub(crate) fn allows_quick(&self) -> bool {
        self.is_on() && !self.is_deterministic()
    }

    /// The effort for a program that nobody has compiled yet.
    pub(crate) fn first(&self, graph: &Graph) -> Effort {
        // Whoever chose options of their own measures those.
        if graph.options == 0 && saves(self.platform, graph) && self.allows_quick() {
            Effort::Quick
        } else {
            Effort::Full
        }
    }

    /// A quickly compiled program is worth all effort when it is launched for this time. One of few ops gains microseconds
    /// in a launch.
    pub(crate) fn worth_it(graph: &Graph) -> u32 {
        if graph.ops.len() < FEW { 100 } else { 2 }
    }

    /// Turns the options for all effort into those for a quick version.
    pub(crate) fn hurry(&self, options: &mut CompileOptions) {
        match self.platform {
            Platform::Cpu => {
                options.overrides.retain(|(name, _)| name != FUSION_EMITTERS);
                options.overrides.push((FUSION_EMITTERS.to_owned(), OptionValue::Bool(false)));
                options.overrides.push((LEVEL.0.to_owned(), OptionValue::Int(LEVEL.1)));
                options.overrides.push((SPLIT_COUNT.to_owned(), OptionValue::Int(1)));
                if let Some((name, isa)) = MAX_ISA {
                    options.overrides.push((name.to_owned(), OptionValue::String(isa.to_owned())));
                }
            }
            _ => options.optimization_level = Some(EffortLevel::O0),
        }
    }

    /// Keeps the compiler out of the threads that programs run in, where it has some of its own there.
    pub(crate) fn stand_back(&self, options: &mut CompileOptions) {
        if self.platform == Platform::Cpu {
            options.overrides.push((SPLIT_COUNT.to_owned(), OptionValue::Int(1)));
        }
    }
}

/// XLA's newer way to generate code for fused loops: makes faster code, and takes longer from a few ops on.
pub(crate) const FUSION_EMITTERS: &str = "xla_cpu_use_fusion_emitters";

/// Whether the older way is better for a program. One of few ops compiles in half of the time so, and runs as fast, but for
/// results that are written over their operands: there the older way has no vectors, so they have to be small.
pub(crate) fn is_small(graph: &Graph) -> bool {
    graph.ops.len() <= SMALL && bytes(graph) <= LITTLE
}

/// How many ops, and bytes of results.
const SMALL: usize = 4;
const LITTLE: u64 = 1 << 14;

/// What all ops give.
fn bytes(graph: &Graph) -> u64 {
    graph.ops.insts.iter().fold(0, |sum: u64, i| sum.saturating_add(i.bytes))
}

/// Into how many parts XLA cuts a program to make machine code of them in the threads that programs run in. Each part
/// costs some time for itself, and the code is the same.
pub(crate) const SPLIT_COUNT: &str = "xla_cpu_parallel_codegen_split_count";

// A value that several loops of a program read may be computed in each of them, and has to be the same value. At level 0 LLVM
// has two ways to make instructions, and only one of them rounds a product and a sum once where the processor can. So
// processors must not do that there, or, where they cannot be told, the level is another one.

/// LLVM's optimization level for a quick version.
const LEVEL: (&str, i64) = ("xla_backend_optimization_level", if MAX_ISA.is_some() { 0 } else { 1 });

/// Instructions without such sums of products.
const MAX_ISA: Option<(&str, &str)> =
    if cfg!(target_arch = "x86_64") { Some(("xla_cpu_max_isa", "AVX")) } else { None };

/// Programs of fewer ops are compiled before anybody notices, if they do not go on to change.
const FEW: usize = 32;
/// On the cpu platform a quick compile saves a millisecond for each op, or more, and the quick version takes half a
/// nanosecond longer for each byte of results; it runs about three times before the better one is there. Measured, see
/// docs/performance.md.
const BYTES_PER_OP: u64 = 1_000_000 * 2 / 3;

/// Whether results are there earlier with a quick version.
fn saves(platform: Platform, graph: &Graph) -> bool {
    let ops = graph.ops.len();
    if ops < FEW && !graph.source.varies {
        return false;
    }
    match platform {
        Platform::Cpu => bytes(graph) / BYTES_PER_OP < ops as u64,
        // Programs take from seconds to minutes there.
        Platform::Tpu => true,
        Platform::Cuda => false,
    }
}
