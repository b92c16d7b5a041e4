//! A client: the devices of one plugin, and what can be made on them.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use oxitorch_pjrt_sys as sys;
use parking_lot::Mutex;
use sys::Args;

use crate::api::{Api, call, destroy, non_null, slice, text};
use crate::buffer::{Buffer, Home};
use crate::device::Device;
use crate::element::{BufferType, ElementType};
use crate::error::{Code, Error, Result, err};
use crate::event::Event;
use crate::executable::Executable;
use crate::options::{ClientOptions, CompileOptions, Program};
use crate::platform::Platform;
use crate::plugin::Plugin;
use crate::{signals, value};

/// The devices of a plugin that this process uses. Buffers and executables keep their client alive.
pub struct Client {
    plugin: &'static Plugin,
    ptr: NonNull<sys::PJRT_Client>,
    /// Tells clients apart in checks.
    id: u64,
    devices: Vec<Device>,
    platform_name: String,
    platform_version: String,
    process_index: i32,
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
        let c_options: Vec<_> = given.iter().map(|(name, value)| value::to_c(name, value)).collect();
        let mut args = Args::<sys::PJRT_Client_Create_Args>::new();
        args.create_options = c_options.as_ptr();
        args.num_options = c_options.len();
        let api = plugin.api();
        // SAFETY: the options live through the call; callbacks are absent.
        signals::preserved(|| unsafe { call!(api, PJRT_Client_Create, args) })
            .map_err(|e| no_device(plugin.platform(), e))?;
        let ptr = non_null("PJRT_Client_Create", args.client)?;
        let mut client = Client {
            plugin,
            ptr,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            devices: Vec::new(),
            platform_name: String::new(),
            platform_version: String::new(),
            process_index: 0,
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
        Ok(())
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
        unsafe { Executable::from_raw(self.clone(), ptr, options) }
    }

    /// Copies dense row-major bytes to a device. The copy of `data` is done when this returns.
    pub fn buffer_from_host(
        self: &Arc<Self>,
        data: &[u8],
        dtype: ElementType,
        dims: &[i64],
        device: &Device,
    ) -> Result<Buffer> {
        self.check_device(device)?;
        let home = Home::one(self.clone(), BufferType::new(dtype, dims))?;
        let bytes = home.bytes(0);
        if data.len() != bytes {
            let ty = home.ty(0);
            return Err(err::invalid(format!(
                "buffer_from_host: {ty} has {bytes} bytes, got {}",
                data.len()
            )));
        }
        // An empty slice dangles; some plugins look at the address even then.
        static NOTHING: [u64; 8] = [0; 8];
        let data: *const c_void = if bytes == 0 { NOTHING.as_ptr().cast() } else { data.as_ptr().cast() };
        let mut args = Args::<sys::PJRT_Client_BufferFromHostBuffer_Args>::new();
        args.client = self.ptr();
        args.data = data;
        args.type_ = dtype.code();
        args.dims = dims.as_ptr();
        args.num_dims = dims.len();
        args.host_buffer_semantics = sys::PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
        args.device = device.ptr.as_ptr();
        // SAFETY: `data` has the bytes that type and dimensions say, and is not needed after the call.
        unsafe { call!(self.api(), PJRT_Client_BufferFromHostBuffer, args) }?;
        drop(Event::from_raw(*self.api(), args.done_with_host_buffer, None));
        let ptr = non_null("PJRT_Client_BufferFromHostBuffer", args.buffer)?;
        Ok(Buffer::from_raw(ptr, home, 0, device.index()))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut args = Args::<sys::PJRT_Client_Destroy_Args>::new();
        args.client = self.ptr.as_ptr();
        // SAFETY: buffers, executables and events hold an `Arc` of this client, so none is left.
        unsafe { destroy!(self.plugin.api(), PJRT_Client_Destroy, args) };
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
