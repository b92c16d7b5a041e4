//! A PJRT plugin whose client spans processes: XLA's CPU plugin, which has no such clients, with a few functions of its
//! table replaced.
//!
//! The client of each process has the devices of all, of which it shows its own as addressable. What the processes must
//! know of each other goes through the key-value callbacks, as with plugins for hardware. A program of devices of several
//! processes is compiled by XLA in each of them; at a launch each process sends the arguments of its devices, runs the
//! program on all devices, and gives the results of its own. So programs compute what they say, collectives too.
//!
//! What real plugins say is said: a process that does not come in time, one that counts other processes, and one that
//! launches another program are errors. There is one client in a process at a time.
//!
//! Safety of the whole file: the functions are called through the PJRT C API, whose contract is that argument structs are
//! readable and writable up to `struct_size` and hold live objects of the plugin.

use std::collections::{HashMap, HashSet};
use std::ffi::{c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use oxitorch_pjrt_sys as sys;
use parking_lot::Mutex;
use sys::{Args, CStruct};

/// What the plugin is.
#[derive(Clone, Debug)]
pub struct Config {
    /// The library of XLA's CPU plugin.
    pub cpu_plugin: PathBuf,
    /// Devices of this process.
    pub devices: usize,
    /// How long the others are waited for.
    pub patience: Duration,
}

type Status = *mut sys::PJRT_Error;
type Outcome = Result<(), Status>;

struct Plugin {
    config: Config,
    /// XLA's table.
    real: &'static sys::PJRT_Api,
}

// SAFETY: the table is immutable static data of a library that is never unloaded.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

/// The client, and what it knows of the job.
struct Job {
    client: *mut sys::PJRT_Client,
    /// Its addressable devices, which live as long as XLA's client.
    own: &'static [*mut sys::PJRT_Device],
    store: Store,
    process: usize,
    /// The first device of each process, and the number of all.
    starts: Vec<usize>,
    /// Launches by the devices of their program.
    launches: HashMap<Vec<i32>, u64>,
}

// SAFETY: the pointers are to objects of a thread-safe plugin.
unsafe impl Send for Job {}

static PLUGIN: OnceLock<Plugin> = OnceLock::new();
static JOB: Mutex<Option<Job>> = Mutex::new(None);
/// Errors that XLA has not made.
static ERRORS: LazyLock<Mutex<HashSet<usize>>> = LazyLock::new(Default::default);

/// The plugin's table, which lives for ever; a process has one configuration, that of its first call.
///
/// # Errors
/// If XLA's plugin cannot be loaded.
pub fn table(config: Config) -> Result<*const sys::PJRT_Api, String> {
    static TABLE: OnceLock<usize> = OnceLock::new();
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    if let Some(&table) = TABLE.get() {
        return Ok(table as *const sys::PJRT_Api);
    }
    let real = load(&config.cpu_plugin)?;
    PLUGIN.get_or_init(|| Plugin { config, real });
    // XLA's table may be shorter than the bindings'; what is behind it stays empty.
    let mut own: Box<sys::PJRT_Api> = Box::new(
        // SAFETY: zeros are an empty table.
        unsafe { std::mem::zeroed() },
    );
    let size = real.struct_size.min(size_of::<sys::PJRT_Api>());
    // SAFETY: both have so many bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(real).cast::<u8>(), (&raw mut *own).cast(), size)
    };
    own.struct_size = size;
    replace(&mut own);
    Ok(*TABLE.get_or_init(|| Box::into_raw(own) as usize) as *const sys::PJRT_Api)
}

fn load(path: &Path) -> Result<&'static sys::PJRT_Api, String> {
    // SAFETY: loading runs the library's initialisers; that it is a PJRT plugin is what the caller says.
    let library = unsafe { libloading::Library::new(path) }.map_err(|e| e.to_string())?;
    let library: &'static libloading::Library = Box::leak(Box::new(library));
    // SAFETY: the symbol's type is fixed by the PJRT headers, and the table is static.
    unsafe {
        let get = library.get::<sys::GetPjrtApi>(b"GetPjrtApi\0").map_err(|e| e.to_string())?;
        get().as_ref().ok_or_else(|| "`GetPjrtApi` gives nothing".to_owned())
    }
}

/// The plugin, which is there when one of its functions is called.
fn plugin() -> &'static Plugin {
    PLUGIN.get().expect("the table was made")
}

/// Calls a function of XLA's plugin; an error is for who called this one.
macro_rules! real {
    ($slot:ident, $args:expr) => {{
        let function =
            plugin().real.$slot.ok_or_else(|| error(12, concat!("XLA has no ", stringify!($slot))))?;
        let status = function($args);
        if status.is_null() { Ok(()) } else { Err(status) }
    }};
}

/// Declares the functions that are not XLA's.
macro_rules! functions {
    ($($slot:ident($args:ident: $ty:ident) $body:block)*) => {
        fn replace(table: &mut sys::PJRT_Api) {
            table.PJRT_Error_Destroy = Some(error_destroy);
            table.PJRT_Error_Message = Some(error_message);
            table.PJRT_Error_GetCode = Some(error_code);
            $(table.$slot = Some($slot);)*
        }
        $(
            #[allow(non_snake_case, reason = "named like its slot")]
            unsafe extern "C" fn $slot($args: *mut sys::$ty) -> Status {
                #[allow(clippy::redundant_closure_call, reason = "bodies leave early with `?`")]
                // SAFETY: see the file's documentation.
                let outcome: Outcome = (|| unsafe { $body })();
                outcome.err().unwrap_or(null_mut())
            }
        )*
    };
}

functions! {
    PJRT_Client_Create(args: PJRT_Client_Create_Args) { create(&mut *args) }
    PJRT_Client_Destroy(args: PJRT_Client_Destroy_Args) {
        JOB.lock().take_if(|job| job.client == (*args).client);
        real!(PJRT_Client_Destroy, args)
    }
    PJRT_Client_ProcessIndex(args: PJRT_Client_ProcessIndex_Args) {
        (*args).process_index = with_job(|job| job.process)? as i32;
        Ok(())
    }
    PJRT_Client_AddressableDevices(args: PJRT_Client_AddressableDevices_Args) {
        let own = with_job(|job| job.own)?;
        ((*args).addressable_devices, (*args).num_addressable_devices) = (own.as_ptr(), own.len());
        Ok(())
    }
    PJRT_DeviceDescription_ProcessIndex(args: PJRT_DeviceDescription_ProcessIndex_Args) {
        let id = id_of((*args).device_description)? as usize;
        (*args).process_index = with_job(|job| job.process_of(id))? as i32;
        Ok(())
    }
    PJRT_LoadedExecutable_AddressableDevices(args: PJRT_LoadedExecutable_AddressableDevices_Args) {
        let own = with_job(|job| job.own)?;
        let devices = devices_of((*args).executable)?.iter().copied().filter(|d| own.contains(d));
        let devices: &'static [_] = Vec::leak(devices.collect());
        ((*args).addressable_devices, (*args).num_addressable_devices) = (devices.as_ptr(), devices.len());
        Ok(())
    }
    PJRT_LoadedExecutable_Execute(args: PJRT_LoadedExecutable_Execute_Args) { execute(&mut *args) }
}

// ---------------------------------------------------------------- errors

struct Error {
    code: u32,
    message: String,
}

fn error(code: u32, message: impl Into<String>) -> Status {
    let error: *mut Error = Box::into_raw(Box::new(Error { code, message: message.into() }));
    ERRORS.lock().insert(error as usize);
    error.cast()
}

/// An error, if it is one of these and not XLA's.
fn own_error<'a>(error: *const sys::PJRT_Error) -> Option<&'a Error> {
    // SAFETY: an error in the list lives until it is destroyed.
    ERRORS.lock().contains(&(error as usize)).then(|| unsafe { &*error.cast::<Error>() })
}

unsafe extern "C" fn error_destroy(args: *mut sys::PJRT_Error_Destroy_Args) {
    // SAFETY: see the file's documentation.
    unsafe {
        if ERRORS.lock().remove(&((*args).error as usize)) {
            drop(Box::from_raw((*args).error.cast::<Error>()));
        } else if let Some(destroy) = plugin().real.PJRT_Error_Destroy {
            destroy(args);
        }
    }
}

unsafe extern "C" fn error_message(args: *mut sys::PJRT_Error_Message_Args) {
    // SAFETY: see the file's documentation.
    unsafe {
        match own_error((*args).error) {
            Some(own) => {
                ((*args).message, (*args).message_size) = (own.message.as_ptr().cast(), own.message.len());
            }
            None => plugin().real.PJRT_Error_Message.into_iter().for_each(|message| message(args)),
        }
    }
}

unsafe extern "C" fn error_code(args: *mut sys::PJRT_Error_GetCode_Args) -> Status {
    // SAFETY: see the file's documentation.
    unsafe {
        match (own_error((*args).error), plugin().real.PJRT_Error_GetCode) {
            (Some(own), _) => (*args).code = own.code,
            (None, Some(code)) => return code(args),
            (None, None) => {}
        }
    }
    null_mut()
}

/// The store's callbacks make their errors by this.
unsafe extern "C" fn store_error(code: sys::PJRT_Error_Code, message: *const c_char, size: usize) -> Status {
    // SAFETY: see the file's documentation.
    let message = unsafe { std::slice::from_raw_parts(message.cast::<u8>(), size) };
    error(code, String::from_utf8_lossy(message))
}

// ---------------------------------------------------------------- the store

/// The store of the job, as the plugin was told of it.
#[derive(Clone, Copy)]
struct Store(sys::PJRT_Client_Create_Args);

// SAFETY: the callbacks may be called by any thread until the client is destroyed.
unsafe impl Send for Store {}

impl Store {
    fn put(&self, key: &str, value: &[u8]) -> Outcome {
        let put = self.0.kv_put_callback.ok_or_else(|| error(9, "there is no store"))?;
        let mut make: sys::PJRT_CallbackError = Some(store_error);
        let mut args = sys::PJRT_KeyValuePutCallback_Args::sized();
        (args.key, args.key_size) = (key.as_ptr().cast(), key.len());
        (args.value, args.value_size) = (value.as_ptr().cast(), value.len());
        (args.callback_error, args.user_arg) = (&raw mut make, self.0.kv_put_user_arg);
        // SAFETY: key and value live through the call.
        let status = unsafe { put(&raw mut args) };
        if status.is_null() { Ok(()) } else { Err(status) }
    }

    /// Waits for a value.
    fn get(&self, key: &str) -> Result<Vec<u8>, Status> {
        let get = self.0.kv_get_callback.ok_or_else(|| error(9, "there is no store"))?;
        let mut make: sys::PJRT_CallbackError = Some(store_error);
        let mut args = sys::PJRT_KeyValueGetCallback_Args::sized();
        (args.key, args.key_size) = (key.as_ptr().cast(), key.len());
        args.timeout_in_ms = plugin().config.patience.as_millis() as c_int;
        (args.callback_error, args.user_arg) = (&raw mut make, self.0.kv_get_user_arg);
        // SAFETY: the key lives through the call; the value is copied before it is given back.
        unsafe {
            let status = get(&raw mut args);
            if !status.is_null() {
                return Err(status);
            }
            let value = std::slice::from_raw_parts(args.value.cast::<u8>(), args.value_size).to_vec();
            args.value_deleter_callback.into_iter().for_each(|free| free(args.value));
            Ok(value)
        }
    }
}

// ---------------------------------------------------------------- the client

impl Job {
    fn process_of(&self, device: usize) -> usize {
        self.starts.partition_point(|&start| start <= device) - 1
    }
}

fn with_job<T>(look: impl FnOnce(&mut Job) -> T) -> Result<T, Status> {
    JOB.lock().as_mut().map(look).ok_or_else(|| error(9, "there is no client"))
}

/// The number of this process and of all: from options, as CUDA's plugin has them, or from the environment, as libtpu.
///
/// # Safety
/// See the file's documentation.
#[expect(clippy::disallowed_methods, reason = "libtpu reads the environment")]
unsafe fn place(args: &sys::PJRT_Client_Create_Args) -> (usize, usize) {
    let option = |wanted: &str| {
        (0..args.num_options).find_map(|i| {
            // SAFETY: passed on to the caller.
            unsafe {
                let option = &*args.create_options.add(i);
                let name = std::slice::from_raw_parts(option.name.cast::<u8>(), option.name_size);
                (name == wanted.as_bytes()).then_some(option.__bindgen_anon_1.int64_value as usize)
            }
        })
    };
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let addresses = variable("TPU_PROCESS_ADDRESSES").split(',').count();
    let process = option("node_id").or_else(|| variable("CLOUD_TPU_TASK_ID").parse().ok());
    (process.unwrap_or(0), option("num_nodes").unwrap_or(addresses))
}

/// # Safety
/// See the file's documentation.
unsafe fn create(args: &mut sys::PJRT_Client_Create_Args) -> Outcome {
    let mut job = JOB.lock();
    if job.is_some() {
        return Err(error(6, "this process has a client already"));
    }
    // SAFETY: passed on to the caller.
    let (process, count) = unsafe { place(args) };
    let store = Store(*args);
    let starts = meet(&store, process, count)?;
    let all = starts[count];
    const NAME: &str = "cpu_device_count";
    let mut option = sys::PJRT_NamedValue::sized();
    (option.name, option.name_size) = (NAME.as_ptr().cast(), NAME.len());
    (option.type_, option.value_size) = (sys::PJRT_NamedValue_kInt64, 1);
    option.__bindgen_anon_1.int64_value = all as i64;
    let mut own = Args::<sys::PJRT_Client_Create_Args>::new();
    (own.create_options, own.num_options) = (&raw const option, 1);
    let mut devices = Args::<sys::PJRT_Client_Devices_Args>::new();
    // SAFETY: the option lives through the call; the list lives as long as the client.
    let own = unsafe {
        real!(PJRT_Client_Create, own.as_mut_ptr())?;
        (args.client, devices.client) = (own.client, own.client);
        real!(PJRT_Client_Devices, devices.as_mut_ptr())?;
        &std::slice::from_raw_parts(devices.devices, devices.num_devices)
            [starts[process]..starts[process + 1]]
    };
    *job = Some(Job { client: args.client, own, store, process, starts, launches: HashMap::new() });
    Ok(())
}

/// Tells the others of this process and waits for them; the first device of each, and the number of all.
fn meet(store: &Store, process: usize, count: usize) -> Result<Vec<usize>, Status> {
    let devices = plugin().config.devices;
    if count == 1 {
        return Ok(vec![0, devices]);
    }
    if process >= count {
        return Err(error(3, format!("node_id {process} of {count} nodes")));
    }
    store.put(&format!("client/{process}"), format!("{count} {devices}").as_bytes())?;
    let mut starts = vec![0];
    for other in 0..count {
        let said = String::from_utf8_lossy(&store.get(&format!("client/{other}"))?).into_owned();
        let mut numbers = said.split(' ').map(|n| n.parse::<usize>().unwrap_or(0));
        let (counted, devices) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if counted != count {
            return Err(error(
                3,
                format!("process {other} counts {counted} nodes, process {process} {count}"),
            ));
        }
        starts.push(starts[other] + devices);
    }
    Ok(starts)
}

/// # Safety
/// See the file's documentation.
unsafe fn id_of(description: *mut sys::PJRT_DeviceDescription) -> Result<i32, Status> {
    let mut id = Args::<sys::PJRT_DeviceDescription_Id_Args>::new();
    id.device_description = description;
    // SAFETY: passed on to the caller.
    unsafe { real!(PJRT_DeviceDescription_Id, id.as_mut_ptr()) }?;
    Ok(id.id)
}

/// The devices of a program, of all processes.
///
/// # Safety
/// See the file's documentation.
unsafe fn devices_of(
    executable: *mut sys::PJRT_LoadedExecutable,
) -> Result<&'static [*mut sys::PJRT_Device], Status> {
    let mut all = Args::<sys::PJRT_LoadedExecutable_AddressableDevices_Args>::new();
    all.executable = executable;
    // SAFETY: passed on to the caller; the list lives as long as the executable.
    unsafe {
        real!(PJRT_LoadedExecutable_AddressableDevices, all.as_mut_ptr())?;
        Ok(std::slice::from_raw_parts(all.addressable_devices, all.num_addressable_devices))
    }
}

// ---------------------------------------------------------------- launches

/// An argument as it is sent.
struct Sent {
    ty: sys::PJRT_Buffer_Type,
    dims: Vec<i64>,
    bytes: Vec<u8>,
}

/// Buffers that were made for devices of others.
#[derive(Default)]
struct Foreign(Vec<*mut sys::PJRT_Buffer>);

impl Drop for Foreign {
    fn drop(&mut self) {
        for &buffer in &self.0 {
            let mut args = Args::<sys::PJRT_Buffer_Destroy_Args>::new();
            args.buffer = buffer;
            if let (false, Some(destroy)) = (buffer.is_null(), plugin().real.PJRT_Buffer_Destroy) {
                // SAFETY: it is live, and nobody else has it. It cannot fail.
                unsafe { destroy(args.as_mut_ptr()) };
            }
        }
    }
}

/// # Safety
/// See the file's documentation.
unsafe fn execute(args: &mut sys::PJRT_LoadedExecutable_Execute_Args) -> Outcome {
    // SAFETY: passed on to the caller; the lists have the lengths that the arguments say.
    unsafe {
        let devices = devices_of(args.executable)?;
        if devices.len() == args.num_devices {
            return real!(PJRT_LoadedExecutable_Execute, args); // all are here
        }
        let own = with_job(|job| job.own)?;
        let mut lists = (0..args.num_devices).map(|d| {
            let list = *args.argument_lists.add(d);
            if args.num_args == 0 { &[][..] } else { std::slice::from_raw_parts(list, args.num_args) }
        });
        let mut sent = exchange(args.executable, devices, lists.clone())?.into_iter();
        // A list of arguments and one of results for each device, in XLA's order.
        let (mut foreign, mut arguments) = (Foreign::default(), Vec::new());
        for &device in devices {
            arguments.push(match own.contains(&device) {
                true => lists.next().unwrap_or_default().to_vec(),
                false => {
                    let put = |sent: Sent| upload(device, &sent).inspect(|b| foreign.0.push(*b));
                    sent.next().unwrap_or_default().into_iter().map(put).collect::<Result<Vec<_>, _>>()?
                }
            });
        }
        let outputs = count_outputs(args.executable)?;
        let mut results = vec![vec![null_mut::<sys::PJRT_Buffer>(); outputs]; devices.len()];
        let mut events = vec![null_mut::<sys::PJRT_Event>(); devices.len()];
        let argument_lists: Vec<_> = arguments.iter().map(|list| list.as_ptr()).collect();
        let output_lists: Vec<_> = results.iter_mut().map(|list| list.as_mut_ptr()).collect();
        let mut whole = Args::<sys::PJRT_LoadedExecutable_Execute_Args>::new();
        (whole.executable, whole.options) = (args.executable, args.options);
        (whole.argument_lists, whole.num_args) = (argument_lists.as_ptr(), args.num_args);
        (whole.output_lists, whole.num_devices) = (output_lists.as_ptr(), devices.len());
        whole.device_complete_events = events.as_mut_ptr();
        real!(PJRT_LoadedExecutable_Execute, whole.as_mut_ptr())?;
        let mut place = 0;
        for ((device, results), event) in devices.iter().zip(results).zip(events) {
            let is_own = own.contains(device);
            if is_own {
                std::ptr::copy_nonoverlapping(results.as_ptr(), *args.output_lists.add(place), outputs);
                if !args.device_complete_events.is_null() {
                    *args.device_complete_events.add(place) = event;
                }
                place += 1;
            } else {
                foreign.0.extend(results);
            }
            if !is_own || args.device_complete_events.is_null() {
                finish(event)?;
            }
        }
        Ok(())
    }
}

/// Sends the arguments of the own devices, and waits for those of the others: a list for each of their devices.
///
/// # Safety
/// See the file's documentation.
unsafe fn exchange<'a>(
    executable: *mut sys::PJRT_LoadedExecutable,
    devices: &[*mut sys::PJRT_Device],
    lists: impl Iterator<Item = &'a [*mut sys::PJRT_Buffer]>,
) -> Result<Vec<Vec<Sent>>, Status> {
    // SAFETY: passed on to the caller.
    unsafe {
        let ids = devices.iter().map(|&d| id_of(description_of(d)?)).collect::<Result<Vec<i32>, Status>>()?;
        let (process, number, store, processes) = with_job(|job| {
            let number = job.launches.entry(ids.clone()).or_default();
            *number += 1;
            let number = *number;
            let processes: Vec<usize> = ids.iter().map(|&id| job.process_of(id as usize)).collect();
            (job.process, number, job.store, processes)
        })?;
        let program = fingerprint(executable)?;
        let mut message = Vec::new();
        pack(&mut message, &program);
        for list in lists {
            for &buffer in list {
                let sent = download(buffer)?;
                pack(&mut message, &sent.ty.to_le_bytes());
                pack(&mut message, &sent.dims.iter().flat_map(|d| d.to_le_bytes()).collect::<Vec<_>>());
                pack(&mut message, &sent.bytes);
            }
        }
        let key = |process: usize| format!("launch/{ids:?}/{number}/{process}");
        store.put(&key(process), &message)?;
        let mut all = Vec::new();
        let mut others: Vec<usize> = processes.iter().copied().filter(|&p| p != process).collect();
        others.dedup();
        for other in others {
            let message = store.get(&key(other))?;
            let mut rest = &message[..];
            if unpack(&mut rest) != program {
                let words = format!(
                    "processes {process} and {other} launch different programs, number {number} of devices {ids:?}"
                );
                return Err(error(13, words));
            }
            let count = processes.iter().filter(|&&p| p == other).count();
            let mut sent = Vec::new();
            while !rest.is_empty() {
                let ty = u32::from_le_bytes(unpack(&mut rest).try_into().unwrap_or_default());
                let dims =
                    unpack(&mut rest).chunks(8).map(|c| i64::from_le_bytes(c.try_into().unwrap_or_default()));
                let dims = dims.collect();
                sent.push(Sent { ty, dims, bytes: unpack(&mut rest).to_vec() });
            }
            let each = sent.len() / count;
            let mut sent = sent.into_iter();
            all.extend((0..count).map(|_| sent.by_ref().take(each).collect::<Vec<_>>()));
        }
        Ok(all)
    }
}

fn pack(message: &mut Vec<u8>, part: &[u8]) {
    message.extend((part.len() as u64).to_le_bytes());
    message.extend(part);
}

fn unpack<'a>(rest: &mut &'a [u8]) -> &'a [u8] {
    let (len, tail) = rest.split_at(8.min(rest.len()));
    let len = u64::from_le_bytes(len.try_into().unwrap_or_default()) as usize;
    let (part, tail) = tail.split_at(len.min(tail.len()));
    *rest = tail;
    part
}

/// # Safety
/// See the file's documentation.
unsafe fn description_of(device: *mut sys::PJRT_Device) -> Result<*mut sys::PJRT_DeviceDescription, Status> {
    let mut args = Args::<sys::PJRT_Device_GetDescription_Args>::new();
    args.device = device;
    // SAFETY: passed on to the caller.
    unsafe { real!(PJRT_Device_GetDescription, args.as_mut_ptr()) }?;
    Ok(args.device_description)
}

/// What tells programs apart.
///
/// # Safety
/// See the file's documentation.
unsafe fn fingerprint(executable: *mut sys::PJRT_LoadedExecutable) -> Result<Vec<u8>, Status> {
    // SAFETY: passed on to the caller; the text is copied before the executable goes.
    unsafe {
        with_executable(executable, |executable| {
            let mut args = Args::<sys::PJRT_Executable_Fingerprint_Args>::new();
            args.executable = executable;
            real!(PJRT_Executable_Fingerprint, args.as_mut_ptr())?;
            let (text, size) = (args.executable_fingerprint.cast::<u8>(), args.executable_fingerprint_size);
            Ok(std::slice::from_raw_parts(text, size).to_vec())
        })
    }
}

/// # Safety
/// See the file's documentation.
unsafe fn count_outputs(executable: *mut sys::PJRT_LoadedExecutable) -> Result<usize, Status> {
    // SAFETY: passed on to the caller.
    unsafe {
        with_executable(executable, |executable| {
            let mut args = Args::<sys::PJRT_Executable_NumOutputs_Args>::new();
            args.executable = executable;
            real!(PJRT_Executable_NumOutputs, args.as_mut_ptr())?;
            Ok(args.num_outputs)
        })
    }
}

/// # Safety
/// See the file's documentation.
unsafe fn with_executable<T>(
    loaded: *mut sys::PJRT_LoadedExecutable,
    look: impl FnOnce(*mut sys::PJRT_Executable) -> Result<T, Status>,
) -> Result<T, Status> {
    let mut args = Args::<sys::PJRT_LoadedExecutable_GetExecutable_Args>::new();
    args.loaded_executable = loaded;
    let mut destroy = Args::<sys::PJRT_Executable_Destroy_Args>::new();
    // SAFETY: passed on to the caller.
    unsafe {
        real!(PJRT_LoadedExecutable_GetExecutable, args.as_mut_ptr())?;
        let found = look(args.executable);
        destroy.executable = args.executable;
        real!(PJRT_Executable_Destroy, destroy.as_mut_ptr())?;
        found
    }
}

/// # Safety
/// See the file's documentation.
unsafe fn download(buffer: *mut sys::PJRT_Buffer) -> Result<Sent, Status> {
    let mut ty = Args::<sys::PJRT_Buffer_ElementType_Args>::new();
    let mut dims = Args::<sys::PJRT_Buffer_Dimensions_Args>::new();
    let mut copy = Args::<sys::PJRT_Buffer_ToHostBuffer_Args>::new();
    (ty.buffer, dims.buffer, copy.src) = (buffer, buffer, buffer);
    // SAFETY: passed on to the caller; the first call says how many bytes the second one writes.
    unsafe {
        real!(PJRT_Buffer_ElementType, ty.as_mut_ptr())?;
        real!(PJRT_Buffer_Dimensions, dims.as_mut_ptr())?;
        real!(PJRT_Buffer_ToHostBuffer, copy.as_mut_ptr())?;
        let mut bytes = vec![0; copy.dst_size];
        copy.dst = bytes.as_mut_ptr().cast();
        real!(PJRT_Buffer_ToHostBuffer, copy.as_mut_ptr())?;
        finish(copy.event)?;
        let dims =
            if dims.num_dims == 0 { &[] } else { std::slice::from_raw_parts(dims.dims, dims.num_dims) };
        Ok(Sent { ty: ty.type_, dims: dims.to_vec(), bytes })
    }
}

/// # Safety
/// See the file's documentation.
unsafe fn upload(device: *mut sys::PJRT_Device, sent: &Sent) -> Result<*mut sys::PJRT_Buffer, Status> {
    let mut args = Args::<sys::PJRT_Client_BufferFromHostBuffer_Args>::new();
    args.client = with_job(|job| job.client)?;
    (args.data, args.type_) = (sent.bytes.as_ptr().cast(), sent.ty);
    (args.dims, args.num_dims) = (sent.dims.as_ptr(), sent.dims.len());
    args.host_buffer_semantics = sys::PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
    args.device = device;
    // SAFETY: passed on to the caller; bytes and dimensions live through the call.
    unsafe {
        real!(PJRT_Client_BufferFromHostBuffer, args.as_mut_ptr())?;
        finish(args.done_with_host_buffer)?;
    }
    Ok(args.buffer)
}

/// Waits for an event, and destroys it.
///
/// # Safety
/// See the file's documentation.
unsafe fn finish(event: *mut sys::PJRT_Event) -> Outcome {
    if event.is_null() {
        return Ok(());
    }
    let mut wait = Args::<sys::PJRT_Event_Await_Args>::new();
    let mut destroy = Args::<sys::PJRT_Event_Destroy_Args>::new();
    (wait.event, destroy.event) = (event, event);
    // SAFETY: passed on to the caller.
    unsafe {
        let outcome = real!(PJRT_Event_Await, wait.as_mut_ptr());
        real!(PJRT_Event_Destroy, destroy.as_mut_ptr())?;
        outcome
    }
}
