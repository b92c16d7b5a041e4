//! A PJRT plugin inside the test process, for what a real plugin does only when something is wrong with it: an old or
//! short function table, empty slots, missing extensions, failing calls, objects that are never destroyed.
//!
//! ```no_run
//! use oxitorch_testkit::fake_plugin::FakePlugin;
//! let fake = FakePlugin::new().devices(2).without("PJRT_Buffer_UnsafePointer");
//! fake.fail("PJRT_Client_Compile", 8, "no room");
//! let table = fake.table(); // for `oxitorch_pjrt::Plugin::from_api`
//! ```
//!
//! Programs are any bytes; words in them say what the fake compiler makes: `output=f32[2,3]` a result (in order),
//! `donate=0` an argument that is taken over. Of StableHLO text the types of `@main` say it, of which each device has the
//! part that Shardy's shardings say. A result is zeros, or the bytes of the first argument of its size.
//! Calls are checked as real plugins check them: an argument struct smaller than the plugin's own is refused.

mod calls;
mod objects;

use std::collections::BTreeMap;

use oxitorch_pjrt_sys as sys;
use parking_lot::{Condvar, Mutex, MutexGuard};

/// The fake plugin. There is one in a process at a time: making a second waits for the first to be dropped.
pub struct FakePlugin {
    table: sys::PJRT_Api,
    _only: MutexGuard<'static, ()>,
}

/// What the C functions see; they have no argument for it.
struct State {
    devices: usize,
    /// Devices of other processes.
    elsewhere: usize,
    struct_growth: usize,
    /// Function name to status code and message.
    failures: BTreeMap<String, (u32, String)>,
    /// The same for one call, after so many that work.
    next_failures: BTreeMap<String, (usize, (u32, String))>,
    /// Programs with one of these words in them do not compile.
    refused: Vec<String>,
    /// If set, values fail to compute: their events carry this.
    failed_values: Option<(u32, String)>,
    /// The same for what this device computes.
    failed_device: Option<(i32, (u32, String))>,
    /// Whether what is launched does not end; see [`FakePlugin::hold`].
    held: bool,
    /// Buffers take a multiple of so many bytes on the device; 0 for what they have.
    tile: usize,
    calls: BTreeMap<&'static str, usize>,
    /// The serialized options of each compile.
    compile_options: Vec<Vec<u8>>,
    /// The text of each program that was compiled.
    programs: Vec<String>,
    live: BTreeMap<&'static str, i64>,
}

static ONLY: Mutex<()> = Mutex::new(());
static STATE: Mutex<State> = Mutex::new(State::new());
/// What is held goes on.
static RELEASED: Condvar = Condvar::new();

impl State {
    const fn new() -> State {
        State {
            devices: 1,
            elsewhere: 0,
            struct_growth: 0,
            failures: BTreeMap::new(),
            next_failures: BTreeMap::new(),
            refused: Vec::new(),
            failed_values: None,
            failed_device: None,
            held: false,
            tile: 0,
            calls: BTreeMap::new(),
            compile_options: Vec::new(),
            programs: Vec::new(),
            live: BTreeMap::new(),
        }
    }
}

impl FakePlugin {
    /// A plugin of the bindings' own API version, with every function that the fake has and one device.
    #[expect(clippy::new_without_default, reason = "making one takes a lock and resets the process's fake")]
    pub fn new() -> FakePlugin {
        let only = ONLY.lock();
        *STATE.lock() = State::new();
        FakePlugin { table: calls::table(), _only: only }
    }

    /// The functions of its table, but for those that say what an error is.
    pub fn functions() -> &'static [&'static str] {
        calls::NAMES
    }

    /// The number of devices of its clients.
    pub fn devices(self, count: usize) -> Self {
        STATE.lock().devices = count;
        self
    }

    /// So many devices more of the job, which belong to other processes.
    pub fn elsewhere(self, count: usize) -> Self {
        STATE.lock().elsewhere = count;
        self
    }

    /// Reports another API version.
    pub fn version(mut self, major: i32, minor: i32) -> Self {
        self.table.pjrt_api_version.major_version = major;
        self.table.pjrt_api_version.minor_version = minor;
        self
    }

    /// Puts null into a slot.
    ///
    /// # Panics
    /// If the fake has no such function.
    pub fn without(mut self, slot: &str) -> Self {
        assert!(calls::clear(&mut self.table, slot), "the fake has no function `{slot}`");
        self
    }

    /// Ends the table before a slot: `struct_size` says that it is not there. The memory behind is filled with garbage,
    /// so that reading past the end calls nonsense instead of passing by luck.
    ///
    /// # Panics
    /// If the fake has no such function.
    pub fn ending_before(mut self, slot: &str) -> Self {
        let size = calls::offset(slot).unwrap_or_else(|| panic!("the fake has no function `{slot}`"));
        self.table.struct_size = size;
        self
    }

    /// Says any size of the table.
    pub fn struct_size(mut self, size: usize) -> Self {
        self.table.struct_size = size;
        self
    }

    /// Expects argument structs that many bytes larger than the bindings': a plugin newer than they are.
    pub fn newer_structs(self, bytes: usize) -> Self {
        STATE.lock().struct_growth = bytes;
        self
    }

    /// Makes a function fail from now on.
    pub fn fail(&self, function: &str, code: u32, message: &str) {
        STATE.lock().failures.insert(function.into(), (code, message.into()));
    }

    /// Makes the next call of a function fail.
    pub fn fail_once(&self, function: &str, code: u32, message: &str) {
        self.fail_after(0, function, code, message);
    }

    /// Makes one call of a function fail, after so many that work.
    pub fn fail_after(&self, calls: usize, function: &str, code: u32, message: &str) {
        STATE.lock().next_failures.insert(function.into(), (calls, (code, message.into())));
    }

    /// Lets a function work again.
    pub fn heal(&self, function: &str) {
        STATE.lock().failures.remove(function);
    }

    /// From now on programs with this word in them do not compile.
    pub fn refuse(&self, word: &str) {
        STATE.lock().refused.push(word.into());
    }

    /// From now on values fail to compute: executions are accepted, and the error comes with the value's event.
    pub fn fail_values(&self, code: u32, message: &str) {
        STATE.lock().failed_values = Some((code, message.into()));
    }

    /// From now on what one device runs fails, after it was accepted, as with [`FakePlugin::fail_values`].
    pub fn fail_on_device(&self, id: i32, code: u32, message: &str) {
        STATE.lock().failed_device = Some((id, (code, message.into())));
    }

    /// From now on values compute, whatever was said before.
    pub fn heal_values(&self) {
        STATE.lock().failed_device = None;
        STATE.lock().failed_values = None;
    }

    /// Buffers take a multiple of so many bytes on the device.
    pub fn tile(self, bytes: usize) -> Self {
        STATE.lock().tile = bytes;
        self
    }

    /// Lets what is launched from now on, and what was, run until [`FakePlugin::release`].
    pub fn hold(&self) {
        STATE.lock().held = true;
    }

    /// Lets everything end that was launched.
    pub fn release(&self) {
        STATE.lock().held = false;
        RELEASED.notify_all();
        calls::call_back();
    }

    /// How often a function was called.
    pub fn calls(&self, function: &str) -> usize {
        STATE.lock().calls.get(function).copied().unwrap_or(0)
    }

    /// Whether each program was compiled with an option of this name, in the order of compiles.
    pub fn compiled_with(&self, option: &str) -> Vec<bool> {
        let has = |bytes: &Vec<u8>| bytes.windows(option.len()).any(|w| w == option.as_bytes());
        STATE.lock().compile_options.iter().map(has).collect()
    }

    /// The text of each program, in the order of compiles; those that it refused too.
    pub fn programs(&self) -> Vec<String> {
        STATE.lock().programs.clone()
    }

    /// Objects that were made and not destroyed, by kind. A kind is absent when all are gone; negative is a double
    /// destruction.
    pub fn live(&self) -> BTreeMap<&'static str, i64> {
        STATE.lock().live.iter().filter(|(_, n)| **n != 0).map(|(k, n)| (*k, *n)).collect()
    }

    /// The function table, which lives for ever. Slots past `struct_size` hold garbage.
    pub fn table(&self) -> *const sys::PJRT_Api {
        let size = self.table.struct_size.clamp(size_of::<usize>(), size_of::<sys::PJRT_Api>());
        let words = size_of::<sys::PJRT_Api>() / size_of::<usize>();
        let leaked: &'static mut [usize] = Box::leak(vec![0x0bad_0bad_usize; words].into_boxed_slice());
        let target = leaked.as_mut_ptr().cast::<u8>();
        // SAFETY: both are at least `size` bytes and do not overlap.
        unsafe { std::ptr::copy_nonoverlapping((&raw const self.table).cast::<u8>(), target, size) };
        target.cast()
    }
}
