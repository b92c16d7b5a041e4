//! Counters of what the engine did.

use crate::events::{Events, What};
use crate::flight::Flight;
use crate::timing::Split;
use oxitorch_capture::Reason;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Upper ends of the buckets of [`Metrics::compile_times`], in milliseconds; the last bucket has none.
pub const COMPILE_BUCKETS_MS: [u64; 10] = [10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000];

/// Collectives of one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collectives {
    /// How many are done, or have failed.
    pub count: u64,
    /// Bytes of what they read, or of what they wrote if that is more.
    pub bytes: u64,
    /// From when this process began with them until they were done. Those of several groups run at once.
    pub time: Duration,
    /// Of that, the time in which a launch or Python waited for them. The rest was beside something else.
    pub waited: Duration,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What happened since the start or the last reset.
        #[derive(Debug, Default)]
        pub struct Metrics {
            $($(#[$doc])* pub $name: AtomicU64,)*
            /// Windows that ended, by [`Reason`](crate::Reason).
            pub flushes: [AtomicU64; Reason::ALL.len()],
            fallbacks: Mutex<BTreeMap<String, u64>>,
            collectives: Mutex<BTreeMap<String, Collectives>>,
            compile_buckets: [AtomicU64; COMPILE_BUCKETS_MS.len() + 1],
            pub(crate) events: Events,
            pub(crate) flight: Flight,
        }

        impl Metrics {
            /// Every counter with its name, in declaration order.
            pub fn counters(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Relaxed)),)*]
            }

            /// Sets everything to zero.
            pub fn reset(&self) {
                $(self.$name.store(0, Relaxed);)*
                self.flushes.iter().for_each(|n| n.store(0, Relaxed));
                self.compile_buckets.iter().for_each(|n| n.store(0, Relaxed));
                self.fallbacks.lock().clear();
                self.collectives.lock().clear();
            }
        }
    };
}

counters! {
    /// ATen ops that were dispatched.
    ops,
    /// Programs that were put together from recorded ops.
    programs,
    /// Windows that had been seen before: their programs were there.
    window_hits,
    /// Windows that are launched in parts, since parts of them are known or repeat, or since those of their line are always new.
    splits,
    /// Programs that went to the compiler.
    compiles,
    /// Time in the compiler, all threads together, in microseconds.
    compile_us,
    /// Programs that were compiled again with more effort while a quick version ran.
    background_compiles,
    /// Time in the compiler for those, in microseconds.
    background_compile_us,
    /// Quick versions that were replaced.
    swaps,
    /// Programs that another process had compiled.
    loads,
    /// Time to load those, all threads together, in microseconds.
    load_us,
    /// Programs whose text this process had compiled or loaded before.
    cache_hits,
    /// Programs that were launched.
    launches,
    /// Calls of torch's own kernels by programs.
    library_calls,
    /// Launches that failed as a whole and were run op by op.
    isolations,
    /// Argument buffers that were given to a program for its results.
    donations,
    /// Bytes of those.
    bytes_donated,
    /// Values that were copied to the host for the device's memory.
    offloads,
    /// Bytes of those.
    bytes_offloaded,
    /// Such values that were copied back.
    reloads,
    /// Bytes of those.
    bytes_reloaded,
    /// Recipes that were made of compiled graphs.
    recipes,
    /// Calls of compiled graphs that recorded by a recipe.
    replays,
    /// Calls of compiled graphs that ran op by op.
    plays,
    /// Tensors that were padded beside programs.
    pads,
    /// Copies from the host.
    transfers_h2d,
    /// Bytes of those.
    bytes_h2d,
    /// Copies to the host.
    transfers_d2h,
    /// Bytes of those.
    bytes_d2h,
}

impl Metrics {
    /// Adds one.
    pub(crate) fn count(&self, counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }

    /// The compiler worked on this program since `start`.
    pub(crate) fn compiled(&self, program: &str, start: Instant) {
        let time = start.elapsed();
        self.compiles.fetch_add(1, Relaxed);
        self.compile_us.fetch_add(time.as_micros() as u64, Relaxed);
        let bucket = COMPILE_BUCKETS_MS.iter().position(|&ms| time.as_millis() <= u128::from(ms));
        self.compile_buckets[bucket.unwrap_or(COMPILE_BUCKETS_MS.len())].fetch_add(1, Relaxed);
        self.events.add(start, || What::Compile { program: program.to_owned() });
    }

    /// As [`Metrics::compiled`], while a quick version runs.
    pub(crate) fn improved(&self, program: &str, start: Instant) {
        self.background_compiles.fetch_add(1, Relaxed);
        self.background_compile_us.fetch_add(start.elapsed().as_micros() as u64, Relaxed);
        self.events.add(start, || What::Compile { program: program.to_owned() });
    }

    /// This program, which was compiled elsewhere, was loaded since `start`.
    pub(crate) fn loaded(&self, program: &str, start: Instant) {
        self.loads.fetch_add(1, Relaxed);
        self.load_us.fetch_add(start.elapsed().as_micros() as u64, Relaxed);
        self.events.add(start, || What::Load { program: program.to_owned() });
    }

    /// Compiles by their time: how many are in each bucket of [`COMPILE_BUCKETS_MS`], and how many above all.
    pub fn compile_times(&self) -> Vec<u64> {
        self.compile_buckets.iter().map(|n| n.load(Relaxed)).collect()
    }

    /// A collective took so long.
    pub(crate) fn collective(&self, name: &str, bytes: u64, time: Duration) {
        let mut all = self.collectives.lock();
        let of = all.entry(name.to_owned()).or_default();
        *of = Collectives { count: of.count + 1, bytes: of.bytes + bytes, time: of.time + time, ..*of };
    }

    /// Something waited for a collective.
    pub(crate) fn waited_for(&self, name: &str, time: Duration) {
        self.collectives.lock().entry(name.to_owned()).or_default().waited += time;
    }

    /// Collectives by name.
    pub fn collectives(&self) -> BTreeMap<String, Collectives> {
        self.collectives.lock().clone()
    }

    pub(crate) fn to_device(&self, bytes: usize) {
        self.transfers_h2d.fetch_add(1, Relaxed);
        self.bytes_h2d.fetch_add(bytes as u64, Relaxed);
    }

    pub(crate) fn to_host(&self, bytes: usize) {
        self.transfers_d2h.fetch_add(1, Relaxed);
        self.bytes_d2h.fetch_add(bytes as u64, Relaxed);
    }

    /// Counts a compiled graph that runs op by op.
    pub fn play(&self) {
        self.count(&self.plays);
    }

    /// Counts an op that ran on the CPU; returns how often it has by now.
    pub fn fallback(&self, op: &str) -> u64 {
        let mut all = self.fallbacks.lock();
        match all.get_mut(op) {
            Some(n) => {
                *n += 1;
                *n
            }
            None => {
                all.insert(op.to_owned(), 1);
                1
            }
        }
    }

    /// Windows that ended, by reason; those that happened.
    pub fn flushes(&self) -> BTreeMap<&'static str, u64> {
        let counts = Reason::ALL.iter().map(|r| (r.name(), self.flushes[*r as usize].load(Relaxed)));
        counts.filter(|(_, n)| *n > 0).collect()
    }

    /// Ops that ran on the CPU, by name.
    pub fn fallbacks(&self) -> BTreeMap<String, u64> {
        self.fallbacks.lock().clone()
    }
}

/// One device at one moment.
#[derive(Clone, Copy, Debug)]
pub struct DeviceReport {
    /// Where its time went.
    pub split: Split,
    /// Launches that wait for it or run.
    pub queued_launches: u64,
    /// Ops in those.
    pub queued_ops: u64,
    /// Bytes in use.
    pub memory: u64,
    /// Bytes in use at most, since the last reset of the peak.
    pub memory_peak: u64,
    /// Bytes that it has.
    pub memory_limit: u64,
    /// Sequences of ops whose programs are remembered.
    pub known_programs: usize,
    /// Ops for different shapes, dtypes and attributes that are remembered.
    pub known_ops: usize,
}
