//! Options of clients.

use crate::error::{Result, err};
use crate::key_values::Processes;
use crate::named_value::NamedValue;
use crate::platform::Platform;

/// Options of a client.
#[derive(Clone, Debug, Default)]
pub struct ClientOptions {
    /// CPU platform: number of virtual devices; 1 if not given.
    pub cpu_devices: Option<usize>,
    /// Other options by the plugin's names.
    pub extra: Vec<(String, NamedValue)>,
    /// Of a job of several processes, whose devices are to be those of one client. The CPU platform has no such clients.
    pub processes: Option<Processes>,
}

/// More virtual devices than this are refused: each has its own threads.
const MAX_CPU_DEVICES: usize = 1024;

/// The kinds of the options that plugins know, of clients and topologies. A value of another kind makes the CPU plugin abort.
const KNOWN_OPTIONS: &[(&str, &str)] = &[
    ("cpu_device_count", "int64"),
    ("platform_name", "string"),
    ("allocator", "string"),
    ("memory_fraction", "float"),
    ("preallocate", "bool"),
    ("collective_memory_size", "int64"),
    ("visible_devices", "list of int64"),
    ("node_id", "int64"),
    ("num_nodes", "int64"),
    ("should_stage_host_to_device_transfers", "bool"),
    ("abort_collectives_on_failure", "bool"),
    ("use_tfrt_gpu_client", "bool"),
    ("enable_mock_nccl", "bool"),
    ("mock_gpu_topology", "string"),
    ("partition_index", "int64"),
    ("ml_framework_name", "string"),
    ("ml_framework_version", "string"),
    ("max_inflight_computations", "int64"),
    ("chips_per_host_bounds", "list of int64"),
    ("num_slices", "int64"),
    ("wrap", "list of int64"),
    ("target_config", "string"),
    ("topology", "string"),
];

impl ClientOptions {
    /// The options to pass, checked.
    pub(crate) fn checked(&self, platform: Platform) -> Result<Vec<(String, NamedValue)>> {
        let mut out = self.extra.clone();
        if let Some(processes) = &self.processes {
            processes.check()?;
            match platform {
                Platform::Cpu => return Err(err::invalid("a client of the cpu platform has one process")),
                Platform::Cuda => {
                    out.push(("node_id".into(), NamedValue::Int(processes.index as i64)));
                    out.push(("num_nodes".into(), NamedValue::Int(processes.count as i64)));
                }
                // libtpu is told by its environment.
                Platform::Tpu => {}
            }
        }
        if platform == Platform::Cpu {
            if out.iter().all(|(name, _)| name != "cpu_device_count") {
                out.push(("cpu_device_count".into(), NamedValue::Int(self.cpu_devices.unwrap_or(1) as i64)));
            }
        } else if self.cpu_devices.is_some() {
            return Err(err::invalid(format!("`cpu_devices` is no option of the {platform} platform")));
        }
        for (name, value) in &out {
            match KNOWN_OPTIONS.iter().find(|(known, _)| known == name) {
                Some((_, kind)) if *kind != value.kind() => {
                    return Err(err::invalid(format!(
                        "client option `{name}` is a {kind}, got a {}",
                        value.kind()
                    )));
                }
                None if platform == Platform::Cpu => {
                    return Err(err::invalid(format!("`{name}` is no option of the cpu platform")));
                }
                _ => {}
            }
            if name == "cpu_device_count"
                && !value.as_int().is_some_and(|n| (1..=MAX_CPU_DEVICES as i64).contains(&n))
            {
                return Err(err::invalid(format!(
                    "`cpu_device_count` must be 1 to {MAX_CPU_DEVICES}, got {value}"
                )));
            }
        }
        Ok(out)
    }
}

/// Refuses an option whose value is of another kind than plugins expect.
pub(crate) fn check_kinds(options: &[(String, NamedValue)]) -> Result<()> {
    for (name, value) in options {
        match KNOWN_OPTIONS.iter().find(|(known, _)| known == name) {
            Some((_, kind)) if *kind != value.kind() => {
                return Err(err::invalid(format!("option `{name}` is a {kind}, got a {}", value.kind())));
            }
            None if matches!(value, NamedValue::Unknown(_)) => {
                return Err(err::invalid(format!("option `{name}` has a value of unknown kind")));
            }
            _ => {}
        }
    }
    Ok(())
}
