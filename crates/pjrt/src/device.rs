//! Devices of a client.

use std::fmt;
use std::ptr::NonNull;

use oxitorch_pjrt_sys as sys;
use sys::Args;

use crate::api::{Api, call, non_null, slice, text};
use crate::error::{Code, Error, Result};
use crate::named_value::{self, Attributes};

/// A device that a client of this process can run on.
pub struct Device {
    pub(crate) api: Api,
    pub(crate) ptr: NonNull<sys::PJRT_Device>,
    /// Which client it belongs to.
    pub(crate) client: u64,
    index: usize,
    about: DeviceDescription,
    memories: Vec<Memory>,
}

// SAFETY: a PJRT device is immutable and lives as long as its client, whose `Client` owns this value.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// A memory that devices can address, for instance `device` or `pinned_host`.
pub struct Memory {
    pub(crate) ptr: NonNull<sys::PJRT_Memory>,
    /// Its number in the client.
    pub id: i32,
    /// Its kind, by the plugin's name.
    pub kind: String,
}

// SAFETY: a PJRT memory is immutable and lives as long as its client, whose `Client` owns this value.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// # Safety
    /// `device` is live.
    unsafe fn of_device(api: &Api, device: NonNull<sys::PJRT_Device>) -> Result<Vec<Memory>> {
        let mut all = Args::<sys::PJRT_Device_AddressableMemories_Args>::new();
        let mut default = Args::<sys::PJRT_Device_DefaultMemory_Args>::new();
        all.device = device.as_ptr();
        default.device = device.as_ptr();
        // SAFETY: the device is live and owns the list; memories live as long as the client. A plugin may have no
        // default memory, which leaves the pointer null.
        let mut pointers = unsafe {
            call!(api, PJRT_Device_AddressableMemories, all)?;
            match call!(api, PJRT_Device_DefaultMemory, default) {
                Err(e) if e.code() != Some(Code::UNIMPLEMENTED) => return Err(e),
                _ => {}
            }
            slice(all.memories, all.num_memories).to_vec()
        };
        pointers.sort_by_key(|&p| p != default.memory);
        // SAFETY: memories of a live client.
        pointers.into_iter().map(|p| unsafe { Memory::read(api, p) }).collect()
    }

    /// # Safety
    /// `ptr` is null or a live memory.
    unsafe fn read(api: &Api, ptr: *mut sys::PJRT_Memory) -> Result<Memory> {
        let ptr = non_null("PJRT_Device_AddressableMemories", ptr)?;
        let mut id = Args::<sys::PJRT_Memory_Id_Args>::new();
        let mut kind = Args::<sys::PJRT_Memory_Kind_Args>::new();
        id.memory = ptr.as_ptr();
        kind.memory = ptr.as_ptr();
        // SAFETY: the memory is live and owns the text, which is copied.
        unsafe {
            call!(api, PJRT_Memory_Id, id)?;
            call!(api, PJRT_Memory_Kind, kind)?;
            Ok(Memory { ptr, id: id.id, kind: text(kind.kind, kind.kind_size) })
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({}, {})", self.id, self.kind)
    }
}

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
        // SAFETY: as above.
        let memories = unsafe { Memory::of_device(&api, ptr) }?;
        Ok(Device { api, ptr, client, index, about, memories })
    }

    /// The memories that it can address, its own first if the plugin says which that is.
    pub fn memories(&self) -> &[Memory] {
        &self.memories
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
            Err(e) if e.code() == Some(Code::UNIMPLEMENTED) => return Ok(None),
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
                attributes: named_value::from_c(attributes.attributes, attributes.num_attributes),
            })
        }
    }

    /// The device's memory in bytes, where the plugin says it (TPU topologies).
    pub fn memory_limit_bytes(&self) -> Option<i64> {
        self.attributes.get("device_memory_bytes_limit").and_then(named_value::NamedValue::as_int)
    }
}
