//! Call sites: the Python stack of an op, interned to a number, always on.
//!
//! The own thread's interpreter frames are read without the GIL: nobody else changes them while this thread is inside an
//! op. Only the chain of (code, instruction) pointers is hashed; lines are looked up once, when a chain is first seen.
//! Frame layouts are private to each Python version; they are checked against the public API at start, and a version that
//! is not in the table (or does not check) uses the public API, under the GIL.
//!
//! Ops of a backward pass are shown at the line of the forward op, found by the number of its autograd node. They run in a
//! thread without Python frames, or behind the frames of who called `backward()`; these end with PyTorch's call of
//! autograd's engine. Frames in front of it may be a library's, where that has an `autograd.Function`.

use crate::abi::Shim;
use crate::gil;
use oxitorch_engine::Site;
use parking_lot::{Mutex, RwLock};
use pyo3::ffi;
use pyo3::prelude::*;
use rustc_hash::{FxHashMap, FxHasher};
use std::cell::Cell;
use std::hash::{Hash, Hasher};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Offsets into CPython's private structures, in bytes.
#[derive(Clone, Copy, Debug)]
struct Layout {
    version: (u8, u8),
    /// In `PyThreadState`: to the frame, or to the structure that holds it.
    thread: usize,
    /// In that structure, if there is one.
    frame: Option<usize>,
    code: usize,
    previous: usize,
    instruction: usize,
}

/// Read off CPython's headers (`pycore_frame.h`, `pystate.h`).
const LAYOUTS: &[Layout] = &[
    Layout { version: (3, 11), thread: 56, frame: Some(8), code: 32, previous: 48, instruction: 56 },
    Layout { version: (3, 12), thread: 56, frame: Some(0), code: 0, previous: 8, instruction: 56 },
    Layout { version: (3, 13), thread: 72, frame: None, code: 0, previous: 8, instruction: 56 },
];

/// Frames of a stack that tell sites apart.
const DEPTH: usize = 48;
/// Autograd nodes whose sites are remembered for their backward.
const SEQUENCES: usize = 1 << 16;

#[derive(Default)]
struct Table {
    by_hash: FxHashMap<u64, u32>,
    lines: Vec<Line>,
}

/// The line of a stack.
#[derive(Default)]
struct Line {
    /// `file:line in function` of the user's innermost frame.
    text: Option<String>,
    of: Of,
}

/// Whose frames a stack has, in front of autograd's engine if that is in it.
#[derive(Clone, Copy, Default, PartialEq)]
enum Of {
    /// The user's.
    User,
    /// A library's alone.
    #[default]
    Library,
    /// The engine's, in the thread of who called it.
    Engine,
}

static TABLE: RwLock<Option<Table>> = RwLock::new(None);
static LAYOUT: OnceLock<Option<Layout>> = OnceLock::new();
static SHIM: OnceLock<&'static Shim> = OnceLock::new();
/// Folders whose frames are not the user's.
static LIBRARIES: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// Stacks that a thread remembers without a lock; a power of two.
const RECENTS: usize = 512;
thread_local! {
    /// The line of the graph's operation that this thread plays.
    static PLAYED: Cell<Site> = const { Cell::new(Site(0)) };
    static RECENT: [Cell<(u64, Place)>; RECENTS] = const { [const { Cell::new((0, Place::NONE)) }; RECENTS] };
}
static FORWARD: [AtomicU64; SEQUENCES] = [const { AtomicU64::new(0) }; SEQUENCES];

/// Chooses how frames are read. `libraries`: folders whose frames are passed over.
pub(crate) fn start(py: Python<'_>, libraries: Vec<String>) {
    *LIBRARIES.lock() = libraries;
    let v = py.version_info();
    let known = LAYOUTS.iter().find(|l| l.version == (v.major, v.minor)).copied();
    LAYOUT.get_or_init(|| known.filter(|l| agrees(py, l)));
    TABLE.write().get_or_insert_with(Table::default);
    oxitorch_engine::set_resolver(describe);
}

/// Backward ops find their line from now on.
pub(crate) fn set_shim(shim: &'static Shim) {
    SHIM.get_or_init(|| shim);
}

/// Whether the raw reading gives the code object that the public API gives.
fn agrees(py: Python<'_>, layout: &Layout) -> bool {
    let _ = py;
    // SAFETY: the GIL is held; the frame is borrowed from the running interpreter.
    let public = unsafe {
        let frame = ffi::PyEval_GetFrame();
        if frame.is_null() {
            return false;
        }
        let code = ffi::PyFrame_GetCode(frame);
        ffi::Py_DECREF(code.cast());
        code as usize
    };
    // SAFETY: this thread's state; offsets stay inside structures that are larger in every release of this version.
    let raw = unsafe { top_frame(layout).map(|f| read(f + layout.code)) };
    raw == Some(public)
}

/// # Safety
/// `address` must be readable.
unsafe fn read(address: usize) -> usize {
    // SAFETY: by the caller's promise.
    unsafe { (address as *const usize).read() }
}

/// The innermost interpreter frame of this thread.
///
/// # Safety
/// `layout` must be that of the running interpreter.
unsafe fn top_frame(layout: &Layout) -> Option<usize> {
    // SAFETY: needs no GIL; null for a thread that Python does not know.
    let thread = unsafe { ffi::PyGILState_GetThisThreadState() } as usize;
    if thread == 0 {
        return None;
    }
    // SAFETY: by the caller's promise.
    let holder = unsafe { read(thread + layout.thread) };
    let frame = match layout.frame {
        Some(_) if holder == 0 => 0,
        // SAFETY: as above.
        Some(offset) => unsafe { read(holder + offset) },
        None => holder,
    };
    (frame != 0).then_some(frame)
}

/// A hash of the stack, 0 if there is none.
///
/// # Safety
/// `layout` must be that of the running interpreter.
unsafe fn stack_hash(layout: &Layout) -> u64 {
    // SAFETY: by the caller's promise.
    let Some(mut frame) = (unsafe { top_frame(layout) }) else { return 0 };
    let mut hash = 0u64;
    for _ in 0..DEPTH {
        // SAFETY: frames of this thread do not change while it is here.
        let (code, instruction, previous) = unsafe {
            (read(frame + layout.code), read(frame + layout.instruction), read(frame + layout.previous))
        };
        hash = (hash.rotate_left(5) ^ code as u64 ^ (instruction as u64).rotate_left(32))
            .wrapping_mul(0x517c_c1b7_2722_0a95);
        if previous == 0 {
            break;
        }
        frame = previous;
    }
    hash | 1
}

/// The site of the op that this thread runs now.
pub(crate) fn here() -> Site {
    let played = PLAYED.get();
    if played != Site(0) {
        return played;
    }
    let hash = match LAYOUT.get() {
        // SAFETY: the layout was checked against this interpreter.
        Some(Some(layout)) => unsafe { stack_hash(layout) },
        Some(None) => return gil::with(slow),
        None => return Site::default(),
    };
    if hash == 0 {
        return backward();
    }
    let place = RECENT.with(|recent| {
        let entry = &recent[hash as usize >> 1 & (RECENTS - 1)];
        let (tag, place) = entry.get();
        if tag == hash {
            return place;
        }
        let place = find(hash);
        entry.set((hash, place));
        place
    });
    place.or_forward()
}

/// What is known of a stack.
#[derive(Clone, Copy)]
struct Place {
    site: Site,
    of: Of,
}

impl Place {
    const NONE: Place = Place { site: Site(0), of: Of::Library };

    /// The site of the op that runs there: that of its forward, if it is of a backward and no frame is the user's.
    fn or_forward(self) -> Site {
        let forward = if self.of == Of::User { Site::default() } else { backward() };
        // What the engine does itself has no line in a thread of its own either: one for all that it adds up would look like
        // a loop that comes round.
        if forward != Site::default() || self.of == Of::Engine {
            return forward;
        }
        remember(self.site);
        self.site
    }
}

thread_local! {
    /// Of the latest op of a backward in this thread whose forward is known.
    static LATEST: Cell<Site> = const { Cell::new(Site(0)) };
}

/// The site of what is done now. A hook of autograd's, which gathers parameters or reduces gradients, is a library's alone:
/// it is that of the node for which it runs, or else of the op before it.
pub(crate) fn near() -> Site {
    let site = here();
    if has_line(site) {
        return site;
    }
    let known = |near: &Site| *near != Site::default();
    [backward(), LATEST.get()].into_iter().find(known).unwrap_or(site)
}

/// What is known of a stack, which may be new.
#[cold]
fn find(hash: u64) -> Place {
    known(hash).unwrap_or_else(|| gil::with(|py| intern(py, hash)))
}

fn known(hash: u64) -> Option<Place> {
    let table = TABLE.read();
    let table = table.as_ref()?;
    let site = *table.by_hash.get(&hash)?;
    Some(Place { site: Site(site), of: table.lines[site as usize - 1].of })
}

/// Without a known frame layout: the innermost frame alone, by the public API.
fn slow(py: Python<'_>) -> Site {
    // SAFETY: the GIL is held; the frame is borrowed and used at once.
    let hash = unsafe {
        let frame = ffi::PyEval_GetFrame();
        if frame.is_null() {
            return backward();
        }
        let code = ffi::PyFrame_GetCode(frame);
        ffi::Py_DECREF(code.cast());
        (code as u64).wrapping_mul(0x517c_c1b7_2722_0a95) ^ ffi::PyFrame_GetLineNumber(frame) as u64 | 1
    };
    known(hash).unwrap_or_else(|| intern(py, hash)).or_forward()
}

/// Gives a stack a number and looks its user line up.
fn intern(py: Python<'_>, hash: u64) -> Place {
    let line = user_line(py);
    let of = line.of;
    Place { site: Site(number(hash, line)), of }
}

fn number(hash: u64, line: Line) -> u32 {
    let mut table = TABLE.write();
    let table = table.get_or_insert_with(Table::default);
    if let Some(&id) = table.by_hash.get(&hash) {
        return id;
    }
    table.lines.push(line);
    let id = table.lines.len() as u32; // 0 is "unknown"
    table.by_hash.insert(hash, id);
    id
}

/// The function by which PyTorch calls autograd's engine.
const CALLS_ENGINE: &str = "_engine_run_backward";

/// The line of the innermost frame that is not a library's. Keeps the code objects of the stack alive, so that their
/// addresses go on to mean the same code.
fn user_line(py: Python<'_>) -> Line {
    // SAFETY: the GIL is held; null without a frame.
    let top = unsafe { ffi::PyEval_GetFrame() };
    // SAFETY: a borrowed frame object, or null.
    let mut frame = unsafe { Bound::from_borrowed_ptr_or_opt(py, top.cast()) };
    let mut found = Line::default();
    for _ in 0..DEPTH {
        let Some(f) = frame else { break };
        let Ok((code, file, function)) = code_of(&f) else { return Line::default() };
        std::mem::forget(code);
        if found.text.is_none() && is_user(&file) {
            let line: usize = f.getattr("f_lineno").and_then(|n| n.extract()).unwrap_or(0);
            found.text = Some(format!("{file}:{line} in {function}"));
            if found.of == Of::Library {
                found.of = Of::User;
            }
        } else if found.text.is_none() && function == CALLS_ENGINE {
            found.of = Of::Engine;
        }
        frame = f.getattr("f_back").ok().filter(|b| !b.is_none());
    }
    found
}

/// A frame's code, with its file and its function. It cannot fail short of a broken interpreter; a site without a line is
/// then the answer.
fn code_of<'py>(frame: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, String, String)> {
    let code = frame.getattr("f_code")?;
    let (file, function) = (code.getattr("co_filename")?.extract()?, code.getattr("co_name")?.extract()?);
    Ok((code, file, function))
}

fn is_user(file: &str) -> bool {
    // The latter is code that PyTorch generated from a graph.
    let generated = file.starts_with("<frozen") || file.starts_with("<eval_with_key>");
    !generated && !LIBRARIES.lock().iter().any(|dir| file.starts_with(dir.as_str()))
}

/// Where the site of an autograd node is kept, and how it is marked there: never by 0.
fn node_place(node: u64) -> (&'static AtomicU64, u64) {
    // Neighbours stay neighbours; threads begin at different places.
    let place = node.wrapping_add((node >> 40).wrapping_mul(0x9e37)) as usize % SEQUENCES;
    (&FORWARD[place], node.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 | 1)
}

/// Notes the site for the backward of the autograd node that was made last.
fn remember(site: Site) {
    let Some(shim) = SHIM.get() else { return };
    // SAFETY: thread-local counters of PyTorch.
    let node = unsafe { (shim.last_node)() };
    if node == 0 {
        return;
    }
    let (entry, tag) = node_place(node);
    // The first op after the node was made is the one that made it.
    if entry.load(Relaxed) >> 32 != tag {
        entry.store(tag << 32 | u64::from(site.0), Relaxed);
    }
}

/// A line and its backward are different places in a program, or a backward would look like a loop that comes round.
const OF_BACKWARD: u32 = Site::OF_BACKWARD;

/// Whether a backward ran in a thread of autograd's.
static BACKWARD: AtomicBool = AtomicBool::new(false);

/// At exit, without the GIL: autograd's thread may still want it to put the last backward away, and Python aborts a C++
/// thread that asks for it later.
pub(crate) fn let_backward_end() {
    if BACKWARD.load(Relaxed) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Until it is called with 0, the ops of this thread are of that site; see [`of_trace`]. Gives the one before.
pub(crate) fn play(site: u32) -> u32 {
    PLAYED.replace(Site(site)).0
}

/// The site of a traceback's text: its innermost line that is not a library's; 0 if there is none. An op of the backward
/// is shown at the line of its forward.
pub(crate) fn of_trace(trace: &str, of_backward: bool) -> u32 {
    let mut frames = trace.lines().filter_map(|line| {
        let (file, rest) = line.trim().strip_prefix("File \"")?.split_once("\", line ")?;
        let (line, function) = rest.split_once(", in ")?;
        is_user(file).then(|| format!("{file}:{line} in {function}"))
    });
    let Some(line) = frames.next_back() else { return 0 };
    let mut hasher = FxHasher::default();
    line.hash(&mut hasher);
    let id = number(hasher.finish() & !1, Line { text: Some(line), of: Of::User }); // hashes of stacks are odd
    if of_backward { id | OF_BACKWARD } else { id }
}

/// The site of the forward op whose backward this thread runs.
fn backward() -> Site {
    let Some(shim) = SHIM.get() else { return Site::default() };
    // SAFETY: reads the thread's current autograd node.
    let node = unsafe { (shim.running_node)() };
    if node == 0 {
        return Site::default();
    }
    BACKWARD.store(true, Relaxed);
    let (entry, tag) = node_place(node);
    let entry = entry.load(Relaxed);
    if entry >> 32 != tag {
        return Site::default();
    }
    let site = Site(entry as u32 | OF_BACKWARD);
    LATEST.set(site);
    remember(site); // for the backward of this backward
    site
}

fn describe(site: Site) -> Option<String> {
    look(site, |line| line.text.clone())
}

/// Whether a site has a line that is no library's.
fn has_line(site: Site) -> bool {
    look(site, |line| line.text.as_ref().map(drop)).is_some()
}

fn look<T>(site: Site, f: impl FnOnce(&Line) -> Option<T>) -> Option<T> {
    let table = TABLE.read();
    f(table.as_ref()?.lines.get((site.0 & !OF_BACKWARD).checked_sub(1)? as usize)?)
}
