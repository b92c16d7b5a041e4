//! Executables: programs loaded on devices, and launching them.

use std::fmt;
use std::ops::Deref;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, OnceLock};

use oxitorch_pjrt_sys as sys;
use smallvec::SmallVec;
use sys::Args;

use crate::api::{Api, call, destroy, non_null, null_output, slice};
use crate::buffer::{Buffer, Home};
use crate::client::Client;
use crate::compiled::{self, Compiled};
use crate::device::Device;
use crate::element::BufferType;
use crate::envelope;
use crate::error::{Error, Result, compile_failed, err};
use crate::event::Event;
use crate::options::{CompileOptions, Program};
use crate::platform::Platform;

/// A program loaded on the devices that it was compiled for. Dereferences to `Compiled`.
pub struct Executable {
    ptr: NonNull<sys::PJRT_LoadedExecutable>,
    compiled: Compiled,
    /// The client and the types of the results.
    home: Arc<Home>,
    params: Option<Box<[BufferType]>>,
    /// Indices of its devices, in the order of `execute_sharded`'s lists.
    devices: SmallVec<[usize; 1]>,
    portable: bool,
    temp_bytes: OnceLock<u64>,
}

// SAFETY: PJRT loaded executables may be launched, asked and destroyed from any thread.
unsafe impl Send for Executable {}
// SAFETY: as above; no method changes the Rust value.
unsafe impl Sync for Executable {}

/// How to launch.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExecuteArgs<'a> {
    /// For a portable executable: where to run; elsewhere it may only repeat the executable's own device.
    pub device: Option<&'a Device>,
    /// Arguments, by position, that are not given away although the program may reuse their memory.
    pub non_donatable: &'a [i64],
}

impl Client {
    /// Compiles a program for the devices that the options name.
    pub fn compile(self: &Arc<Self>, program: &Program<'_>, options: &CompileOptions) -> Result<Executable> {
        program.check(self.platform())?;
        let encoded = options.encode(self)?;
        let c_program = program.to_c();
        let mut args = Args::<sys::PJRT_Client_Compile_Args>::new();
        args.client = self.ptr();
        args.program = &c_program;
        args.compile_options = encoded.as_ptr().cast();
        args.compile_options_size = encoded.len();
        // SAFETY: client, program and options live through the call.
        unsafe { call!(self.api(), PJRT_Client_Compile, args) }.map_err(compile_failed)?;
        let ptr = non_null("PJRT_Client_Compile", args.executable)?;
        // SAFETY: a new executable of this client, now owned.
        unsafe { Executable::from_raw(self.clone(), ptr, options.params_of(program), options.portable) }
    }

    /// Loads what `Compiled::serialize` gave, by the same plugin on the same kind of machine. Of the options, those count
    /// that the executable needs to know beside its bytes: parameter types and whether it is portable. Of a client of several
    /// processes all count: the bytes may be those of another process, with its devices.
    pub fn deserialize(self: &Arc<Self>, bytes: &[u8], options: &CompileOptions) -> Result<Executable> {
        let bytes = envelope::unwrap(self.api(), bytes)?;
        let mut args = Args::<sys::PJRT_Executable_DeserializeAndLoad_Args>::new();
        args.client = self.ptr();
        args.serialized_executable = bytes.as_ptr().cast();
        args.serialized_executable_size = bytes.len();
        let spans = self.device_ids().len() > self.devices().len();
        let encoded = if spans { options.encode(self)? } else { Vec::new() };
        if spans {
            args.overridden_serialized_compile_options = encoded.as_ptr().cast();
            args.overridden_serialized_compile_options_size = encoded.len();
        }
        // SAFETY: the client is live, and bytes and options live through the call.
        unsafe { call!(self.api(), PJRT_Executable_DeserializeAndLoad, args) }?;
        let ptr = non_null("PJRT_Executable_DeserializeAndLoad", args.loaded_executable)?;
        // SAFETY: a new executable of this client, now owned.
        let loaded = unsafe {
            Executable::from_raw(self.clone(), ptr, options.param_types.clone(), options.portable)
        }?;
        if spans && !options.portable && loaded.devices().len() == 0 {
            return Err(Error::BadSerialized { reason: "it is for devices of another process".into() });
        }
        Ok(loaded)
    }
}

type Pointers = SmallVec<[*mut sys::PJRT_Buffer; 16]>;

impl Executable {
    /// # Safety
    /// `ptr` is a live executable of `client`, and becomes this value's.
    pub(crate) unsafe fn from_raw(
        client: Arc<Client>,
        ptr: NonNull<sys::PJRT_LoadedExecutable>,
        params: Option<Vec<BufferType>>,
        portable: bool,
    ) -> Result<Executable> {
        let api = *client.api();
        let owned = Loaded { api, ptr };
        // SAFETY: live by the caller's promise.
        let compiled = unsafe { compiled::of_loaded(api, ptr) }?;
        let mut args = Args::<sys::PJRT_LoadedExecutable_AddressableDevices_Args>::new();
        args.executable = ptr.as_ptr();
        // SAFETY: the executable is live and owns the list.
        let list = unsafe {
            call!(&api, PJRT_LoadedExecutable_AddressableDevices, args)?;
            slice(args.addressable_devices, args.num_addressable_devices)
        };
        let index_of =
            |d: &*mut sys::PJRT_Device| client.devices().iter().position(|known| known.ptr.as_ptr() == *d);
        let devices = list.iter().map(index_of).collect::<Option<_>>();
        let devices =
            devices.ok_or_else(|| err::incompatible("an executable is on a device that its client lacks"))?;
        let home = Home::many(client, compiled.output_types()?)?;
        let params = params.map(Vec::into_boxed_slice);
        std::mem::forget(owned);
        Ok(Executable { ptr, compiled, home, params, devices, portable, temp_bytes: OnceLock::new() })
    }

    fn api(&self) -> &Api {
        self.client().api()
    }

    /// The client it lives in.
    pub fn client(&self) -> &Arc<Client> {
        self.home.client()
    }

    /// What can be asked of the program.
    pub fn compiled(&self) -> &Compiled {
        &self.compiled
    }

    /// Bytes that it needs besides arguments and results while it runs; 0 where the plugin does not say.
    pub fn temp_bytes(&self) -> u64 {
        let ask = || self.compiled.memory_stats().ok().and_then(|s| u64::try_from(s.temp).ok()).unwrap_or(0);
        *self.temp_bytes.get_or_init(ask)
    }

    /// The types of the results on one device.
    pub fn outputs(&self) -> impl ExactSizeIterator<Item = &BufferType> {
        self.home.types()
    }

    /// The types of the parameters on one device, if they are known.
    pub fn params(&self) -> Option<&[BufferType]> {
        self.params.as_deref()
    }

    /// Its devices, in the order of `execute_sharded`'s lists; of a portable executable the default one, or none.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = &Device> {
        self.devices.iter().map(|&i| &self.client().devices()[i])
    }

    /// Launches a program of one device. It returns when the launch is queued, which for small programs on the CPU
    /// platform is when it has run. Arguments that the program may reuse are deleted unless `non_donatable` has them.
    pub fn execute(&self, args: &[&Buffer], how: &ExecuteArgs<'_>) -> Result<Vec<Buffer>> {
        let mut out = Vec::with_capacity(self.home.types().len());
        self.launch_one(args, how, &mut out, None)?;
        Ok(out)
    }

    /// As `execute`, and the results are appended to `out`.
    pub fn execute_into(&self, args: &[&Buffer], how: &ExecuteArgs<'_>, out: &mut Vec<Buffer>) -> Result<()> {
        self.launch_one(args, how, out, None)
    }

    /// As `execute`, with an event that happens when the program has run: for programs without results, and for timing.
    pub fn execute_with_event(
        &self,
        args: &[&Buffer],
        how: &ExecuteArgs<'_>,
    ) -> Result<(Vec<Buffer>, Event)> {
        let mut out = Vec::with_capacity(self.home.types().len());
        let mut event = null_mut();
        self.launch_one(args, how, &mut out, Some(&mut event))?;
        Ok((out, Event::from_raw(*self.api(), event, Some(self.client().clone()))))
    }

    /// Launches a program on all its devices at once: one list of arguments for each, in the order of `devices`, and one
    /// list of results from each. Launching fewer would leave the others' collectives waiting until the plugin aborts.
    pub fn execute_sharded(&self, args: &[&[&Buffer]], non_donatable: &[i64]) -> Result<Vec<Vec<Buffer>>> {
        self.launch_all(args, non_donatable, None)
    }

    /// As `execute_sharded`, with an event for each device that happens when it has run the program.
    pub fn execute_sharded_with_events(
        &self,
        args: &[&[&Buffer]],
        non_donatable: &[i64],
    ) -> Result<(Vec<Vec<Buffer>>, Vec<Event>)> {
        let mut events = vec![null_mut(); self.devices.len()];
        let results = self.launch_all(args, non_donatable, Some(&mut events))?;
        let event = |e| Event::from_raw(*self.api(), e, Some(self.client().clone()));
        Ok((results, events.into_iter().map(event).collect()))
    }

    /// `events` has a place for each device.
    fn launch_all(
        &self,
        args: &[&[&Buffer]],
        non_donatable: &[i64],
        events: Option<&mut [*mut sys::PJRT_Event]>,
    ) -> Result<Vec<Vec<Buffer>>> {
        self.check_shards(args, non_donatable)?;
        let lists: SmallVec<[Pointers; 8]> =
            args.iter().map(|l| l.iter().map(|b| b.ptr()).collect()).collect();
        let argument_lists: SmallVec<[_; 8]> = lists.iter().map(|l| l.as_ptr()).collect();
        let outputs = self.home.types().len();
        let mut results: SmallVec<[Pointers; 8]> =
            lists.iter().map(|_| SmallVec::from_elem(null_mut(), outputs)).collect();
        let output_lists: SmallVec<[_; 8]> = results.iter_mut().map(|l| l.as_mut_ptr()).collect();
        let mut options = execute_options(non_donatable);
        let mut c = Args::<sys::PJRT_LoadedExecutable_Execute_Args>::new();
        c.executable = self.ptr.as_ptr();
        c.options = options.as_mut_ptr();
        c.argument_lists = argument_lists.as_ptr();
        c.num_devices = lists.len();
        c.num_args = args[0].len();
        c.output_lists = output_lists.as_ptr();
        c.device_complete_events = events.map_or(null_mut(), |e| e.as_mut_ptr());
        {
            let _in_order = self.client().launch.lock();
            self.check_not_deleted(args)?;
            // SAFETY: as in `launch_one`, for each device.
            unsafe { call!(self.api(), PJRT_LoadedExecutable_Execute, c) }?;
        }
        let shards = results.iter().zip(&self.devices).map(|(list, &device)| {
            let mut shard = Vec::with_capacity(outputs);
            self.take_results(list, device, &mut shard).map(|()| shard)
        });
        let shards: Vec<Result<_>> = shards.collect(); // all of them, so that every result has an owner
        shards.into_iter().collect()
    }

    /// What could make one device fail to start while the others wait for it.
    fn check_shards(&self, args: &[&[&Buffer]], non_donatable: &[i64]) -> Result<()> {
        let want = self.devices.len();
        if args.len() != want || want == 0 {
            return Err(err::invalid(format!(
                "execute_sharded: the program spans {want} devices, got arguments for {}",
                args.len()
            )));
        }
        for (list, &device) in args.iter().zip(&self.devices) {
            if list.len() != args[0].len() {
                let (a, b) = (args[0].len(), list.len());
                return Err(err::invalid(format!(
                    "execute_sharded: {a} arguments on one device, {b} on another"
                )));
            }
            self.check_args(list, device)?;
            check_indices(non_donatable, list.len())?;
        }
        self.check_not_deleted(args)?;
        if want > 1 && self.client().platform() == Platform::Cpu {
            // A value that failed to compute would start no program on its device; the others would wait for it.
            for arg in args.iter().flat_map(|list| list.iter()) {
                arg.wait()?;
            }
        }
        Ok(())
    }

    fn check_not_deleted(&self, args: &[&[&Buffer]]) -> Result<()> {
        for (list, device) in args.iter().zip(&self.devices) {
            for (i, arg) in list.iter().enumerate() {
                if arg.is_deleted()? {
                    return Err(Error::Deleted {
                        what: format!("execute_sharded: argument {i} on device {device}"),
                    });
                }
            }
        }
        Ok(())
    }

    fn launch_one(
        &self,
        args: &[&Buffer],
        how: &ExecuteArgs<'_>,
        out: &mut Vec<Buffer>,
        event: Option<&mut *mut sys::PJRT_Event>,
    ) -> Result<()> {
        let device = self.target(how.device)?;
        self.check_args(args, device)?;
        check_indices(how.non_donatable, args.len())?;
        let pointers: Pointers = args.iter().map(|b| b.ptr()).collect();
        let mut results: Pointers = SmallVec::from_elem(null_mut(), self.home.types().len());
        let argument_list = pointers.as_ptr();
        let output_list = results.as_mut_ptr();
        let mut options = execute_options(how.non_donatable);
        let mut c = Args::<sys::PJRT_LoadedExecutable_Execute_Args>::new();
        c.executable = self.ptr.as_ptr();
        c.options = options.as_mut_ptr();
        c.argument_lists = &argument_list;
        c.num_devices = 1;
        c.num_args = pointers.len();
        c.output_lists = &output_list;
        c.device_complete_events = event.map_or(null_mut(), |e| e as *mut _);
        if self.portable {
            c.execute_device = self.client().devices()[device].ptr.as_ptr();
        }
        // SAFETY: all lists live through the call and have the lengths that are said; the buffers are live, of this
        // client and of the recorded types.
        unsafe { call!(self.api(), PJRT_LoadedExecutable_Execute, c) }.map_err(|e| explain(args, e))?;
        self.take_results(&results, device, out)
    }

    /// The index of the device that a single-device launch runs on.
    fn target(&self, asked: Option<&Device>) -> Result<usize> {
        if let Some(device) = asked {
            self.client().check_device(device)?;
        }
        if self.portable {
            return Ok(asked.map_or_else(|| self.devices.first().copied().unwrap_or(0), Device::index));
        }
        let &[own] = &self.devices[..] else {
            return Err(err::invalid(format!(
                "execute: the program spans {} devices and must be launched on all of them",
                self.devices.len()
            )));
        };
        match asked {
            Some(device) if device.index() != own => Err(err::invalid(format!(
                "execute: the program was compiled for device {own}, not for device {}",
                device.index()
            ))),
            _ => Ok(own),
        }
    }

    /// Plugins check the number and sizes of arguments at most; a wrong type would be read as if it were right.
    fn check_args(&self, args: &[&Buffer], device: usize) -> Result<()> {
        if let Some(params) = &self.params {
            if params.len() != args.len() {
                let (want, got) = (params.len(), args.len());
                return Err(err::invalid(format!("execute: the program takes {want} arguments, got {got}")));
            }
            for (i, (param, arg)) in params.iter().zip(args).enumerate() {
                if arg.ty() != param {
                    return Err(err::invalid(format!(
                        "execute: argument {i} must be {param}, got {}",
                        arg.ty()
                    )));
                }
            }
        }
        let client = self.client().id();
        for (i, arg) in args.iter().enumerate() {
            if arg.client().id() != client {
                return Err(err::invalid(format!("execute: argument {i} belongs to another client")));
            }
            if arg.device_index() != device {
                return Err(err::invalid(format!(
                    "execute: argument {i} is on device {}, the program runs on device {device}",
                    arg.device_index()
                )));
            }
        }
        Ok(())
    }

    fn take_results(
        &self,
        results: &[*mut sys::PJRT_Buffer],
        device: usize,
        out: &mut Vec<Buffer>,
    ) -> Result<()> {
        let start = out.len();
        // All of them, so that every result has an owner even if one is missing.
        let owned = |(i, ptr)| Some(Buffer::from_raw(NonNull::new(ptr)?, self.home.clone(), i, device));
        out.extend(results.iter().copied().enumerate().filter_map(owned));
        if out.len() - start == results.len() {
            return Ok(());
        }
        out.truncate(start);
        Err(null_output("PJRT_LoadedExecutable_Execute"))
    }
}

/// Names the deleted argument if there is one: plugins do not say which it is.
#[cold]
fn explain(args: &[&Buffer], error: Error) -> Error {
    match args.iter().position(|a| matches!(a.is_deleted(), Ok(true))) {
        Some(i) => Error::Deleted { what: format!("execute: argument {i}") },
        None => error,
    }
}

fn check_indices(indices: &[i64], count: usize) -> Result<()> {
    match indices.iter().find(|&&i| usize::try_from(i).map_or(true, |i| i >= count)) {
        Some(i) => Err(err::invalid(format!("execute: non-donatable index {i} of {count} arguments"))),
        None => Ok(()),
    }
}

fn execute_options(non_donatable: &[i64]) -> Args<sys::PJRT_ExecuteOptions> {
    let mut options = Args::<sys::PJRT_ExecuteOptions>::new();
    options.non_donatable_input_indices = non_donatable.as_ptr();
    options.num_non_donatable_input_indices = non_donatable.len();
    options
}

/// Destroys the C object of an `Executable`.
struct Loaded {
    api: Api,
    ptr: NonNull<sys::PJRT_LoadedExecutable>,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let mut args = Args::<sys::PJRT_LoadedExecutable_Destroy_Args>::new();
        args.executable = self.ptr.as_ptr();
        // SAFETY: the executable is ours and not used after this.
        unsafe { destroy!(&self.api, PJRT_LoadedExecutable_Destroy, args) };
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        drop(Loaded { api: *self.api(), ptr: self.ptr });
    }
}

impl Deref for Executable {
    type Target = Compiled;
    fn deref(&self) -> &Compiled {
        &self.compiled
    }
}

impl fmt::Debug for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Executable({} results, {} devices)", self.home.types().len(), self.devices.len())
    }
}
