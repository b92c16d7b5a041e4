//! What happened, as profilers take it: flat, with names, and in the time of the wall clock.

use crate::events::{Heard, Span, What};
use crate::site::{Site, describe};
use rustc_hash::FxHashMap;
use std::sync::OnceLock;
use std::time::{Instant, UNIX_EPOCH};

static RUNNING: OnceLock<fn() -> u64> = OnceLock::new();

/// Installs what says in which operation or range of the front end a launch happens. The first call wins.
pub fn set_running(f: fn() -> u64) {
    RUNNING.get_or_init(|| f);
}

/// What it says now.
pub(crate) fn running() -> u64 {
    RUNNING.get().map_or(0, |f| f())
}

/// What took time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeenKind {
    /// The host put a window together and queued its program.
    Launch,
    /// The host compiled or loaded a program.
    Compile,
    /// The host waited for the device.
    Wait,
    /// The host copied to the device or from it, or exchanged with other processes.
    Copy,
    /// The device ran a program.
    Program,
}

/// Something that took time.
#[derive(Clone, Debug)]
pub struct Seen {
    /// What it was.
    pub kind: SeenKind,
    /// For people and statistics: begins with `oxitorch::` on the host, and is the program's on the device.
    pub name: String,
    /// The Python line; empty if there is none.
    pub line: String,
    /// The device.
    pub device: u16,
    /// The operating system's number of the thread that did it.
    pub thread: i32,
    /// Since 1970.
    pub start_ns: i64,
    /// Since 1970.
    pub end_ns: i64,
    /// Equal for a launch and its program; 0 elsewhere.
    pub window: u64,
    /// For a launch and its program: what the front end said of the moment of the launch; 0 elsewhere.
    pub launched_in: u64,
    /// Of a copy; -1 elsewhere.
    pub bytes: i64,
}

impl Heard {
    /// Everything, in the order in which it ended.
    pub fn seen(&self) -> Vec<Seen> {
        let mut seen: Vec<Seen> = self.spans.iter().filter_map(|span| self.see(span)).collect();
        let launches = seen.iter().filter(|s| s.kind == SeenKind::Launch);
        let launched_in: FxHashMap<u64, u64> = launches.map(|s| (s.window, s.launched_in)).collect();
        for program in seen.iter_mut().filter(|s| s.kind == SeenKind::Program) {
            program.launched_in = launched_in.get(&program.window).copied().unwrap_or(0);
        }
        seen
    }

    fn see(&self, span: &Span) -> Option<Seen> {
        let origin = self.wall.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as i64);
        // What began before is cut off.
        let ns = |t: Instant| origin + t.saturating_duration_since(self.start).as_nanos() as i64;
        let line = |site: Site| describe(site).unwrap_or_default();
        let seen = |kind, name: String| Seen {
            kind,
            name,
            line: String::new(),
            device: 0,
            thread: span.thread,
            start_ns: ns(span.start),
            end_ns: ns(span.end),
            window: 0,
            launched_in: 0,
            bytes: -1,
        };
        use SeenKind as K;
        Some(match &span.what {
            What::Window { device, number, program, ended, cut, launched_in, .. } => Seen {
                launched_in: *launched_in,
                start_ns: ns(*cut),
                line: line(ended.site),
                device: *device,
                window: *number,
                ..seen(K::Launch, format!("oxitorch::launch {program}"))
            },
            What::Wait { site } => Seen { line: line(*site), ..seen(K::Wait, "oxitorch::wait".into()) },
            What::ToDevice { device, bytes, site } => Seen {
                line: line(*site),
                device: *device,
                bytes: *bytes as i64,
                ..seen(K::Copy, "oxitorch::copy_to_device".into())
            },
            What::ToHost { device, bytes, site } => Seen {
                line: line(*site),
                device: *device,
                bytes: *bytes as i64,
                ..seen(K::Copy, "oxitorch::copy_to_host".into())
            },
            What::Collective { device, about, bytes, site, .. } => Seen {
                line: line(*site),
                device: *device,
                bytes: *bytes as i64,
                ..seen(K::Copy, format!("oxitorch::{}", about.name))
            },
            What::Compile { program } => seen(K::Compile, format!("oxitorch::compile {program}")),
            What::Load { program } => seen(K::Compile, format!("oxitorch::load {program}")),
            // The device has nothing to do then, and the compiler is seen at work.
            What::Stall { .. } => return None,
            What::Execute { device, number, program, .. } => {
                Seen { device: *device, window: *number, ..seen(K::Program, program.clone()) }
            }
        })
    }
}
