//! Devices of a client.

use std::fmt;
use std::ptr::NonNull;

use oxitorch_pjrt_sys as sys;
use sys::Args;

use crate::api::{Api, call, text};
use crate::error::{Error, Result};
use crate::value::{self, Attributes};

/// A device that a client of this process can run on.
pub struct Device {
    pub(crate) api: Api,
    pub(crate) ptr: NonNull<sys::PJRT_Device>,
    /// Which client it belongs to.
    pub(crate) client: u64,
    index: usize,
    about: DeviceDescription,
}

// SAFETY: a PJRT device is immutable and lives as long as its client, whose `Client` owns this value.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// What a device is; also the devices of a topology, which are not there.
#[derive(Clone, Debug)]
pub struct DeviceDescription {
    /// The global id, unique among all processes of a job.
    pub id: i32,
    /// The process that can run on it.
    pub process_index: i32,
    /// The vendor's name, for instance `TPU v5 lite` or `cpu`.
    pub kind: String,
    /// A line for people.
    pub text: String,
    /// Coordinates, memory limits and the like, by the plugin's names.
    pub attributes: Attributes,
}

/// Memory use of a device, in bytes, as far as the plugin counts it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryStats {
    /// In use now.
    pub in_use: i64,
    /// The most that was ever in use.
    pub peak_in_use: Option<i64>,
    /// All that may be used.
    pub limit: Option<i64>,
    /// Set aside.
    pub reserved: Option<i64>,
    /// The largest block that is free.
    pub largest_free_block: Option<i64>,
    /// The largest allocation ever.
    pub largest_alloc: Option<i64>,
    /// Number of allocations.
    pub allocs: Option<i64>,
}

impl Device {
    /// # Safety
    /// `ptr` is a live addressable device of the client numbered `client`.
    pub(crate) unsafe fn new(
        api: Api,
        ptr: NonNull<sys::PJRT_Device>,
        client: u64,
        index: usize,
    ) -> Result<Device> {
        let mut args = Args::<sys::PJRT_Device_GetDescription_Args>::new();
        args.device = ptr.as_ptr();
        // SAFETY: the device is live, and so is its description.
        let about = unsafe {
            call!(&api, PJRT_Device_GetDescription, args)?;
            DeviceDescription::read(&api, args.device_description)?
        };
        Ok(Device { api, ptr, client, index, about })
    }

    /// Its position in `Client::devices`.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The global id.
    pub fn id(&self) -> i32 {
        self.about.id
    }

    /// The vendor's name, for instance `TPU v5 lite` or `cpu`.
    pub fn kind(&self) -> &str {
        &self.about.kind
    }

    /// What it is.
    pub fn description(&self) -> &DeviceDescription {
        &self.about
    }

    /// Memory use; `None` where the plugin does not count it (the CPU plugin).
    pub fn memory_stats(&self) -> Result<Option<MemoryStats>> {
        let mut a = Args::<sys::PJRT_Device_MemoryStats_Args>::new();
        a.device = self.ptr.as_ptr();
        // SAFETY: the device is live.
        match unsafe { call!(&self.api, PJRT_Device_MemoryStats, a) } {
            Ok(()) => {}
            Err(Error::Unsupported { .. }) => return Ok(None),
            Err(e) if e.code() == Some(crate::error::Code::UNIMPLEMENTED) => return Ok(None),
            Err(e) => return Err(e),
        }
        let given = |set: bool, value: i64| set.then_some(value);
        Ok(Some(MemoryStats {
            in_use: a.bytes_in_use,
            peak_in_use: given(a.peak_bytes_in_use_is_set, a.peak_bytes_in_use),
            limit: given(a.bytes_limit_is_set, a.bytes_limit),
            reserved: given(a.bytes_reserved_is_set, a.bytes_reserved),
            largest_free_block: given(a.largest_free_block_bytes_is_set, a.largest_free_block_bytes),
            largest_alloc: given(a.largest_alloc_size_is_set, a.largest_alloc_size),
            allocs: given(a.num_allocs_is_set, a.num_allocs),
        }))
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {})", self.about.id, self.about.kind)
    }
}

impl DeviceDescription {
    /// # Safety
    /// `ptr` is a live description.
    pub(crate) unsafe fn read(api: &Api, ptr: *mut sys::PJRT_DeviceDescription) -> Result<DeviceDescription> {
        let mut id = Args::<sys::PJRT_DeviceDescription_Id_Args>::new();
        let mut process = Args::<sys::PJRT_DeviceDescription_ProcessIndex_Args>::new();
        let mut kind = Args::<sys::PJRT_DeviceDescription_Kind_Args>::new();
        let mut line = Args::<sys::PJRT_DeviceDescription_DebugString_Args>::new();
        let mut attributes = Args::<sys::PJRT_DeviceDescription_Attributes_Args>::new();
        id.device_description = ptr;
        process.device_description = ptr;
        kind.device_description = ptr;
        line.device_description = ptr;
        attributes.device_description = ptr;
        // SAFETY: the description is live and owns the strings and values, which are copied.
        unsafe {
            call!(api, PJRT_DeviceDescription_Id, id)?;
            call!(api, PJRT_DeviceDescription_ProcessIndex, process)?;
            call!(api, PJRT_DeviceDescription_Kind, kind)?;
            call!(api, PJRT_DeviceDescription_DebugString, line)?;
            call!(api, PJRT_DeviceDescription_Attributes, attributes)?;
            Ok(DeviceDescription {
                id: id.id,
                process_index: process.process_index,
                kind: text(kind.device_kind, kind.device_kind_size),
                text: text(line.debug_string, line.debug_string_size),
                attributes: value::from_c(attributes.attributes, attributes.num_attributes),
            })
        }
    }

    /// The device's memory in bytes, where the plugin says it (TPU topologies).
    pub fn memory_limit_bytes(&self) -> Option<i64> {
        self.attributes.get("device_memory_bytes_limit").and_then(value::Value::as_int)
    }
}
