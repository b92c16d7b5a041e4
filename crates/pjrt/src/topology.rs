//! Topologies: devices that need not be there, to compile for.

use std::ptr::NonNull;

use oxitorch_pjrt_sys as sys;
use sys::Args;

use crate::api::{call, destroy, non_null, slice, slot, text};
use crate::client_options;
use crate::compiled::Compiled;
use crate::device::DeviceDescription;
use crate::error::{Result, compile_failed, err};
use crate::named_value::{self, Attributes, NamedValue};
use crate::options::{CompileOptions, Program};
use crate::platform::Platform;
use crate::plugin::Plugin;
use crate::signals;

/// A set of devices to compile for, for instance libtpu's `v5e:2x4`. No hardware is needed.
pub struct Topology {
    plugin: &'static Plugin,
    ptr: NonNull<sys::PJRT_TopologyDescription>,
    devices: Vec<DeviceDescription>,
}

// SAFETY: a PJRT topology description is immutable.
unsafe impl Send for Topology {}
// SAFETY: as above.
unsafe impl Sync for Topology {}

impl Topology {
    /// A topology by the plugin's name for it. libtpu: `v5e:2x4`, `v5p:2x2x1`, `v6e:4x4`, `tpu7x:2x2x1` and so on, with
    /// options `chips_per_host_bounds`, `num_slices`, `wrap`; CUDA: any name, with options `target_config`, `topology`.
    pub fn new(plugin: &'static Plugin, name: &str, options: &[(String, NamedValue)]) -> Result<Topology> {
        client_options::check_kinds(options)?;
        if plugin.platform() == Platform::Tpu {
            check_tpu_name(name)?;
        }
        let c_options: Vec<_> = options.iter().map(|(name, value)| named_value::to_c(name, value)).collect();
        let mut args = Args::<sys::PJRT_TopologyDescription_Create_Args>::new();
        args.topology_name = name.as_ptr().cast();
        args.topology_name_size = name.len();
        args.create_options = c_options.as_ptr();
        args.num_options = c_options.len();
        // SAFETY: name and options live through the call.
        signals::preserved(|| unsafe { call!(plugin.api(), PJRT_TopologyDescription_Create, args) })?;
        let ptr = non_null("PJRT_TopologyDescription_Create", args.topology)?;
        let mut topology = Topology { plugin, ptr, devices: Vec::new() };
        topology.devices = topology.read_devices()?;
        Ok(topology)
    }

    fn read_devices(&self) -> Result<Vec<DeviceDescription>> {
        let api = self.plugin.api();
        let mut args = Args::<sys::PJRT_TopologyDescription_GetDeviceDescriptions_Args>::new();
        args.topology = self.ptr.as_ptr();
        // SAFETY: the topology is live and owns the descriptions, which are copied.
        unsafe {
            call!(api, PJRT_TopologyDescription_GetDeviceDescriptions, args)?;
            let list = slice(args.descriptions, args.num_descriptions);
            list.iter().map(|&d| DeviceDescription::read(api, d)).collect()
        }
    }

    /// Its devices.
    pub fn devices(&self) -> &[DeviceDescription] {
        &self.devices
    }

    /// The plugin's name for the platform, and its version.
    pub fn platform(&self) -> Result<(String, String)> {
        let mut name = Args::<sys::PJRT_TopologyDescription_PlatformName_Args>::new();
        let mut version = Args::<sys::PJRT_TopologyDescription_PlatformVersion_Args>::new();
        name.topology = self.ptr.as_ptr();
        version.topology = self.ptr.as_ptr();
        // SAFETY: the topology is live and owns the texts, which are copied.
        unsafe {
            call!(self.plugin.api(), PJRT_TopologyDescription_PlatformName, name)?;
            call!(self.plugin.api(), PJRT_TopologyDescription_PlatformVersion, version)?;
            let name = text(name.platform_name, name.platform_name_size);
            Ok((name, text(version.platform_version, version.platform_version_size)))
        }
    }

    /// What the plugin says about it.
    pub fn attributes(&self) -> Result<Attributes> {
        let mut args = Args::<sys::PJRT_TopologyDescription_Attributes_Args>::new();
        args.topology = self.ptr.as_ptr();
        // SAFETY: the topology is live and owns the attributes, which are copied.
        unsafe {
            call!(self.plugin.api(), PJRT_TopologyDescription_Attributes, args)?;
            Ok(named_value::from_c(args.attributes, args.num_attributes))
        }
    }

    /// Bytes that say which topology this is; part of a cache key.
    pub fn serialize(&self) -> Result<Vec<u8>> {
        let mut args = Args::<sys::PJRT_TopologyDescription_Serialize_Args>::new();
        args.topology = self.ptr.as_ptr();
        // SAFETY: the topology is live; the bytes are copied before the deleter that came with them runs.
        unsafe {
            call!(self.plugin.api(), PJRT_TopologyDescription_Serialize, args)?;
            let bytes = slice(args.serialized_bytes.cast::<u8>(), args.serialized_bytes_size).to_vec();
            if let Some(delete) = args.serialized_topology_deleter {
                delete(args.serialized_topology);
            }
            Ok(bytes)
        }
    }

    /// Compiles a program for these devices, ahead of time: for those that the options name by their ids, or for the first.
    /// An ordinal does not count here.
    pub fn compile(&self, program: &Program<'_>, options: &CompileOptions) -> Result<Compiled> {
        program.check(self.plugin.platform())?;
        let ids: Vec<i32> = self.devices.iter().map(|d| d.id).collect();
        let encoded = options.encode_for_topology(&ids, self.plugin.platform())?;
        let c_program = program.to_c();
        let compile = slot!(self.plugin.api(), PJRT_Compile)?;
        let mut args = Args::<sys::PJRT_Compile_Args>::new();
        args.topology = self.ptr.as_ptr();
        args.program = &c_program;
        args.compile_options = encoded.as_ptr().cast();
        args.compile_options_size = encoded.len();
        // SAFETY: topology, program and options live through the call; no client is passed.
        let error = unsafe { compile(args.as_mut_ptr()) };
        if !error.is_null() {
            return Err(compile_failed(self.plugin.api().take_error("PJRT_Compile", error)));
        }
        let ptr = non_null("PJRT_Compile", args.executable)?;
        // SAFETY: a new executable, now owned.
        Ok(unsafe { Compiled::from_raw(*self.plugin.api(), ptr) })
    }
}

/// More chips than any slice has along all its axes together.
const MAX_CHIPS: u64 = 1 << 20;

/// libtpu refuses most wrong names by itself, but divides by a size of 0, and an empty name means a slice of its choice.
fn check_tpu_name(name: &str) -> Result<()> {
    let wrong =
        |why: &str| err::invalid(format!("topology `{name}`: {why}; expected for instance `v5e:2x4`"));
    let (_, sizes) = name.split_once([':', '=', '_']).ok_or_else(|| wrong("no sizes"))?;
    let sizes = sizes.trim_end_matches("_twisted").trim_end_matches("_untwisted");
    let mut chips = 1u64;
    for size in sizes.split('x') {
        let size: u64 = size.parse().map_err(|_| wrong("a size is no number"))?;
        chips = chips.saturating_mul(size);
    }
    match chips {
        0 => Err(wrong("a size is 0")),
        n if n > MAX_CHIPS => Err(wrong("too many chips")),
        _ => Ok(()),
    }
}

impl Drop for Topology {
    fn drop(&mut self) {
        let mut args = Args::<sys::PJRT_TopologyDescription_Destroy_Args>::new();
        args.topology = self.ptr.as_ptr();
        // SAFETY: the topology is ours and not used after this.
        unsafe { destroy!(self.plugin.api(), PJRT_TopologyDescription_Destroy, args) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_libtpu_cannot_survive_are_refused() {
        for good in ["v5e:2x4", "v4:2x2x1", "v4:4x4x8_twisted", "v5p=2x2x1"] {
            assert!(check_tpu_name(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "v5e",
            "v5e:",
            "v5e:0x0",
            "v5e:2x0",
            "v5e:2xx",
            "v5e:100000x100000",
            "v5e:99999999999999999999",
        ] {
            assert!(check_tpu_name(bad).is_err(), "{bad}");
        }
    }
}
