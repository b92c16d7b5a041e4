//! A client: the devices of one plugin. What makes buffers on them is in `upload.rs`, what makes executables in
//! `executable.rs`.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use oxitorch_pjrt_sys as sys;
use parking_lot::Mutex;
use sys::Args;

use crate::api::{Api, call, count_failed_destroy, non_null, slice, text};
use crate::client_options::ClientOptions;
use crate::device::Device;
use crate::error::{Code, Error, Result, err};
use crate::key_values::{self, Shared};
use crate::platform::Platform;
use crate::plugin::Plugin;
use crate::{named_value, signals};

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
