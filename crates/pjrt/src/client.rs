//! A client: the devices of one plugin, and what can be made on them.

use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use oxitorch_pjrt_sys as sys;
use parking_lot::Mutex;
use sys::Args;

use crate::api::{Api, call, count_failed_destroy, non_null, null_output, slice, slot, text};
use crate::buffer::{Buffer, Home};
use crate::device::Device;
use crate::element::{BufferType, ElementType};
use crate::error::{Code, Error, Result, err};
use crate::event::Event;
use crate::executable::Executable;
use crate::key_values::{self, Shared};
use crate::options::{ClientOptions, CompileOptions, Program};
use crate::platform::Platform;
use crate::plugin::Plugin;
use crate::{envelope, named_value, signals};

/// The devices of a plugin that this process uses. Buffers and executables keep their client alive.
pub struct Client {
    plugin: &'static Plugin,
    ptr: NonNull<sys::PJRT_Client>,
    /// Tells clients apart in checks.
    id: u64,
    devices: Vec<Device>,
    /// Ids of all devices of the job.
    device_ids: Vec<i32>,
    platform_name: String,
    platform_version: String,
    process_index: i32,
    /// What the plugin may ask until the client is destroyed.
    store: Option<Shared>,
    /// Held while a program is launched on several devices, so that all of them see launches in the same order.
    pub(crate) launch: Mutex<()>,
}

// SAFETY: PJRT clients are documented as thread-safe; the other fields are plain values.
unsafe impl Send for Client {}
// SAFETY: as above.
unsafe impl Sync for Client {}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Client {
    /// Starts a client. `Error::NoDevice` means that the plugin works and its hardware is absent.
    pub fn new(plugin: &'static Plugin, options: &ClientOptions) -> Result<Arc<Client>> {
        let given = options.checked(plugin.platform())?;
        let c_options: Vec<_> = given.iter().map(|(name, value)| named_value::to_c(name, value)).collect();
        let mut args = Args::<sys::PJRT_Client_Create_Args>::new();
        args.create_options = c_options.as_ptr();
        args.num_options = c_options.len();
        let store = options.processes.as_ref().map(|p| Shared::new(p.store.clone()));
        if let Some(store) = &store {
            key_values::offer(store, &mut args);
        }
        let api = plugin.api();
        // SAFETY: the options live through the call, and the store as long as the client.
        signals::preserved(|| unsafe { call!(api, PJRT_Client_Create, args) })
            .map_err(|e| no_device(plugin.platform(), e))?;
        let ptr = non_null("PJRT_Client_Create", args.client)?;
        let mut client = Client {
            plugin,
            ptr,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            devices: Vec::new(),
            device_ids: Vec::new(),
            platform_name: String::new(),
            platform_version: String::new(),
            process_index: 0,
            store,
            launch: Mutex::new(()),
        };
        client.read_facts()?;
        if client.devices.is_empty() {
            let message = "the plugin started and has no device for this process".into();
            return Err(Error::NoDevice { platform: plugin.platform(), message });
        }
        Ok(Arc::new(client))
    }

    fn read_facts(&mut self) -> Result<()> {
        let api = self.plugin.api();
        let mut name = Args::<sys::PJRT_Client_PlatformName_Args>::new();
        let mut version = Args::<sys::PJRT_Client_PlatformVersion_Args>::new();
        let mut process = Args::<sys::PJRT_Client_ProcessIndex_Args>::new();
        let mut devices = Args::<sys::PJRT_Client_AddressableDevices_Args>::new();
        name.client = self.ptr.as_ptr();
        version.client = self.ptr.as_ptr();
        process.client = self.ptr.as_ptr();
        devices.client = self.ptr.as_ptr();
        // SAFETY: the client is live and owns the strings and the device list.
        unsafe {
            call!(api, PJRT_Client_PlatformName, name)?;
            call!(api, PJRT_Client_PlatformVersion, version)?;
            call!(api, PJRT_Client_ProcessIndex, process)?;
            call!(api, PJRT_Client_AddressableDevices, devices)?;
            self.platform_name = text(name.platform_name, name.platform_name_size);
            self.platform_version = text(version.platform_version, version.platform_version_size);
            self.process_index = process.process_index;
            let list = slice(devices.addressable_devices, devices.num_addressable_devices);
            for (index, &device) in list.iter().enumerate() {
                let device = non_null("PJRT_Client_AddressableDevices", device)?;
                self.devices.push(Device::new(*api, device, self.id, index)?);
            }
        }
        self.device_ids = self.read_device_ids()?;
        Ok(())
    }

    fn read_device_ids(&self) -> Result<Vec<i32>> {
        let api = self.plugin.api();
        let mut all = Args::<sys::PJRT_Client_Devices_Args>::new();
        all.client = self.ptr.as_ptr();
        // SAFETY: the client is live and owns the list; its devices live as long as it does, and own their descriptions.
        unsafe {
            call!(api, PJRT_Client_Devices, all)?;
            let id = |&device: &*mut sys::PJRT_Device| {
                let mut description = Args::<sys::PJRT_Device_GetDescription_Args>::new();
                let mut id = Args::<sys::PJRT_DeviceDescription_Id_Args>::new();
                description.device = non_null("PJRT_Client_Devices", device)?.as_ptr();
                call!(api, PJRT_Device_GetDescription, description)?;
                id.device_description = description.device_description;
                call!(api, PJRT_DeviceDescription_Id, id)?;
                Ok(id.id)
            };
            slice(all.devices, all.num_devices).iter().map(id).collect()
        }
    }

    /// The plugin it runs on.
    pub fn plugin(&self) -> &'static Plugin {
        self.plugin
    }

    /// The plugin's platform.
    pub fn platform(&self) -> Platform {
        self.plugin.platform()
    }

    /// The plugin's own name for the platform, for instance `cpu`.
    pub fn platform_name(&self) -> &str {
        &self.platform_name
    }

    /// The plugin's version text; part of what decides whether a serialized executable fits.
    pub fn platform_version(&self) -> &str {
        &self.platform_version
    }

    /// This process's number in a job of several.
    pub fn process_index(&self) -> i32 {
        self.process_index
    }

    /// The devices that this process can run on.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The global ids of all devices of the job: those of this process, and those of others.
    pub fn device_ids(&self) -> &[i32] {
        &self.device_ids
    }

    pub(crate) fn api(&self) -> &Api {
        self.plugin.api()
    }

    pub(crate) fn ptr(&self) -> *mut sys::PJRT_Client {
        self.ptr.as_ptr()
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn check_device(&self, device: &Device) -> Result<()> {
        if device.client == self.id {
            return Ok(());
        }
        Err(err::invalid(format!("{device:?} belongs to another client")))
    }

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
        let spans = self.device_ids.len() > self.devices.len();
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

    /// Copies dense row-major bytes to a device. The copy of `data` is done when this returns.
    pub fn buffer_from_host(
        self: &Arc<Self>,
        data: &[u8],
        dtype: ElementType,
        dims: &[i64],
        device: &Device,
    ) -> Result<Buffer> {
        let home = self.new_home(data.len(), dtype, dims, device)?;
        let semantics = sys::PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
        // SAFETY: `data` has the bytes that the type says, and the semantics end with the call.
        let (buffer, _done) = unsafe { self.upload(data.as_ptr(), home, device, semantics) }?;
        Ok(buffer)
    }

    /// Makes a buffer of dense row-major bytes that `owner` holds, without copying where the platform can (the CPU
    /// platform, if the bytes are aligned to 64). `owner` is dropped when the device needs the bytes no more. The bytes
    /// must not change until then; the buffer is never donated.
    pub fn buffer_from_owner<O>(
        self: &Arc<Self>,
        owner: O,
        dtype: ElementType,
        dims: &[i64],
        device: &Device,
    ) -> Result<Buffer>
    where
        O: AsRef<[u8]> + Send + 'static,
    {
        let owner = Box::new(owner);
        let data = (*owner).as_ref();
        let home = self.new_home(data.len(), dtype, dims, device)?;
        let semantics = sys::PJRT_HostBufferSemantics_kImmutableZeroCopy;
        // SAFETY: `data` has the bytes that the type says; `owner` keeps them until the event says that they are free.
        let (buffer, done) = unsafe { self.upload(data.as_ptr(), home, device, semantics) }?;
        if done.is_null() {
            std::mem::forget(owner); // the device may read it for ever
            return Err(null_output("PJRT_Client_BufferFromHostBuffer"));
        }
        // Leaked rather than dropped if the plugin cannot say when it is done.
        let owner = ManuallyDrop::new(owner);
        done.on_ready(move |_| drop(ManuallyDrop::into_inner(owner)))?;
        Ok(buffer)
    }

    /// Makes a buffer in the host's memory and has `fill` write its bytes, dense and row-major. Before that they are
    /// whatever was there. Unlike memory of an owner it may be donated. Nothing, and `fill` is not called, where the
    /// device has memory of its own or the plugin makes no such buffers.
    pub fn buffer_filled(
        self: &Arc<Self>,
        dtype: ElementType,
        dims: &[i64],
        device: &Device,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Option<Buffer>> {
        let home = self.home_of(dtype, dims, device)?;
        if !home.is_host_memory(0) {
            return Ok(None);
        }
        let Some(mut buffer) = self.uninitialized_buffer(home, device)? else { return Ok(None) };
        fill(&mut buffer.bytes_mut()?);
        Ok(Some(buffer))
    }

    /// A buffer with any bytes, if the plugin makes such: nobody else may see it before it is written.
    fn uninitialized_buffer(&self, home: Arc<Home>, device: &Device) -> Result<Option<Buffer>> {
        let mut args = Args::<sys::PJRT_Client_CreateUninitializedBuffer_Args>::new();
        args.client = self.ptr();
        args.shape_dims = home.ty(0).dims.as_ptr();
        args.shape_num_dims = home.ty(0).dims.len();
        args.shape_element_type = home.ty(0).dtype.code();
        args.device = device.ptr.as_ptr();
        // SAFETY: client and device are live, the dimensions live through the call.
        match unsafe { call!(self.api(), PJRT_Client_CreateUninitializedBuffer, args) } {
            Err(Error::Unsupported { .. } | Error::Status { code: Code::UNIMPLEMENTED, .. }) => Ok(None),
            Err(e) => Err(e),
            Ok(()) => {
                let ptr = non_null("PJRT_Client_CreateUninitializedBuffer", args.buffer)?;
                Ok(Some(Buffer::from_raw(ptr, home, 0, device.index())))
            }
        }
    }

    fn home_of(self: &Arc<Self>, dtype: ElementType, dims: &[i64], device: &Device) -> Result<Arc<Home>> {
        self.check_device(device)?;
        Home::one(self.clone(), BufferType::new(dtype, dims))
    }

    fn new_home(
        self: &Arc<Self>,
        given: usize,
        dtype: ElementType,
        dims: &[i64],
        device: &Device,
    ) -> Result<Arc<Home>> {
        let home = self.home_of(dtype, dims, device)?;
        let bytes = home.bytes(0);
        if given != bytes {
            let ty = home.ty(0);
            return Err(err::invalid(format!("buffer_from_host: {ty} has {bytes} bytes, got {given}")));
        }
        Ok(home)
    }

    /// # Safety
    /// `data` has the bytes of `home`'s type, and lives as long as the semantics ask.
    unsafe fn upload(
        &self,
        data: *const u8,
        home: Arc<Home>,
        device: &Device,
        semantics: sys::PJRT_HostBufferSemantics,
    ) -> Result<(Buffer, Event)> {
        // An empty slice dangles; some plugins look at the address even then.
        static NOTHING: [u64; 8] = [0; 8];
        let data: *const c_void = if home.bytes(0) == 0 { NOTHING.as_ptr().cast() } else { data.cast() };
        let ty = home.ty(0);
        let mut args = Args::<sys::PJRT_Client_BufferFromHostBuffer_Args>::new();
        args.client = self.ptr();
        args.data = data;
        args.type_ = ty.dtype.code();
        args.dims = ty.dims.as_ptr();
        args.num_dims = ty.dims.len();
        args.host_buffer_semantics = semantics;
        args.device = device.ptr.as_ptr();
        // SAFETY: passed on to the caller; the dimensions live through the call.
        unsafe { call!(self.api(), PJRT_Client_BufferFromHostBuffer, args) }?;
        // The event outlives no client: whoever waits on it holds the buffer or is called back by the plugin.
        let done = Event::from_raw(*self.api(), args.done_with_host_buffer, None);
        let ptr = non_null("PJRT_Client_BufferFromHostBuffer", args.buffer)?;
        Ok((Buffer::from_raw(ptr, home, 0, device.index()), done))
    }

    /// A buffer over memory that is on the device already. `on_delete` is called when the buffer is gone.
    ///
    /// # Safety
    /// `address` is device memory of `device` with the bytes of a dense row-major value of this type, and stays valid
    /// until `on_delete` is called.
    pub unsafe fn view_of_device_memory(
        self: &Arc<Self>,
        address: usize,
        ty: BufferType,
        device: &Device,
        on_delete: impl FnOnce() + Send + 'static,
    ) -> Result<Buffer> {
        self.check_device(device)?;
        if address == 0 {
            return Err(err::invalid("view_of_device_memory: null address"));
        }
        let home = Home::one(self.clone(), ty)?;
        let create = slot!(self.api(), PJRT_Client_CreateViewOfDeviceBuffer)?;
        // Never null: plugins call it without looking.
        let callback = Box::into_raw(Box::new(Box::new(on_delete) as Box<dyn FnOnce() + Send>));
        let mut args = Args::<sys::PJRT_Client_CreateViewOfDeviceBuffer_Args>::new();
        args.client = self.ptr();
        args.device_buffer_ptr = address as *mut c_void;
        args.dims = home.ty(0).dims.as_ptr();
        args.num_dims = home.ty(0).dims.len();
        args.element_type = home.ty(0).dtype.code();
        args.device = device.ptr.as_ptr();
        args.on_delete_callback = Some(run_on_delete);
        args.on_delete_callback_arg = callback.cast();
        // SAFETY: the memory is the caller's promise; the plugin calls the callback once, with the box.
        let error = unsafe { create(args.as_mut_ptr()) };
        if !error.is_null() {
            // A plugin that fails has not kept the callback.
            // SAFETY: the box is still ours.
            drop(unsafe { Box::from_raw(callback) });
            return Err(self.api().take_error("PJRT_Client_CreateViewOfDeviceBuffer", error));
        }
        let ptr = non_null("PJRT_Client_CreateViewOfDeviceBuffer", args.buffer)?;
        Ok(Buffer::from_raw(ptr, home, 0, device.index()))
    }
}

unsafe extern "C" fn run_on_delete(_address: *mut c_void, user_arg: *mut c_void) {
    // SAFETY: `user_arg` is the box that `view_of_device_memory` leaked, given back exactly once.
    let callback = unsafe { Box::from_raw(user_arg.cast::<Box<dyn FnOnce() + Send>>()) };
    // A panic must not cross into C; the panic hook has printed it.
    let _ = catch_unwind(AssertUnwindSafe(callback));
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut args = Args::<sys::PJRT_Client_Destroy_Args>::new();
        args.client = self.ptr.as_ptr();
        // SAFETY: buffers, executables and events hold an `Arc` of this client, so none is left.
        if unsafe { call!(self.plugin.api(), PJRT_Client_Destroy, args) }.is_err() {
            count_failed_destroy();
            std::mem::forget(self.store.take()); // a client that is left may ask it for ever
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client({}, {} devices)", self.platform_name, self.devices.len())
    }
}

/// What plugins say where their hardware is absent: libtpu `NOT_FOUND` "No jellyfish device found", CUDA
/// `FAILED_PRECONDITION` "No visible GPU devices".
fn no_device(platform: Platform, error: Error) -> Error {
    match error {
        Error::Status { code: Code::NOT_FOUND, message, .. } => Error::NoDevice { platform, message },
        Error::Status { code: Code::FAILED_PRECONDITION, message, .. } if platform == Platform::Cuda => {
            Error::NoDevice { platform, message }
        }
        other => other,
    }
}

pub(crate) fn compile_failed(error: Error) -> Error {
    match error {
        Error::Status { code, message, .. } => Error::CompileFailed { code, message },
        other => other,
    }
}
