//! Options of a compilation, and the program to compile.

use oxitorch_pjrt_sys as sys;
use oxitorch_proto::{
    CompileOptionsProto, ComputationDevice, DeviceAssignmentProto, EffortLevel, ExecutableBuildOptionsProto,
    Message, OptionOverrideProto, option_override,
};
use sys::CStruct;

use crate::client::Client;
use crate::device::Device;
use crate::element::BufferType;
use crate::error::{Result, err};
use crate::guard;
use crate::platform::Platform;
use crate::signature;

/// A program: StableHLO as text, bytecode or portable artifact, or a serialized `HloModuleProto`.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// The bytes.
    pub code: &'a [u8],
    /// What they are.
    pub format: Format,
}

/// The form of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// An MLIR module of StableHLO: text, bytecode or portable artifact.
    Mlir,
    /// A serialized `HloModuleProto`.
    Hlo,
}

impl<'a> Program<'a> {
    /// StableHLO text, bytecode or portable artifact.
    pub fn mlir(code: &'a [u8]) -> Program<'a> {
        Program { code, format: Format::Mlir }
    }

    /// A serialized `HloModuleProto`.
    pub fn hlo(code: &'a [u8]) -> Program<'a> {
        Program { code, format: Format::Hlo }
    }

    pub(crate) fn check(&self, platform: Platform) -> Result<()> {
        if self.code.is_empty() {
            return Err(err::invalid("compile: the program is empty"));
        }
        if self.format == Format::Mlir { guard::dynamic_dims(self.code, platform) } else { Ok(()) }
    }

    pub(crate) fn to_c(self) -> sys::PJRT_Program {
        let format = match self.format {
            Format::Mlir => "mlir",
            Format::Hlo => "hlo",
        };
        let mut c = sys::PJRT_Program::sized();
        c.code = self.code.as_ptr().cast_mut().cast();
        c.code_size = self.code.len();
        c.format = format.as_ptr().cast();
        c.format_size = format.len();
        c
    }
}

/// The value of an XLA option.
pub type OptionValue = option_override::Value;

/// How to compile a program.
#[derive(Clone, Debug)]
pub struct CompileOptions {
    /// Copies of the program that run together; at least 1.
    pub replicas: usize,
    /// Parts that the program is split into; at least 1.
    pub partitions: usize,
    /// For a program on one device: the index of that device in `Client::devices`; the first if not given.
    pub device_ordinal: Option<i64>,
    /// For a program on several devices: their global ids, all replicas' first partitions, then all replicas' second
    /// partitions, and so on. Some may be devices of other processes, which then have to compile and launch the same.
    /// Empty for the first `replicas * partitions` devices of this process, partition by partition within a replica.
    pub device_ids: Vec<i32>,
    /// The program is one for all partitions; the compiler splits it by its sharding annotations.
    pub spmd: bool,
    /// The annotations are Shardy's (`sdy`).
    pub shardy: bool,
    /// For each output of a program that is split, whether the compiler may choose how; empty for none.
    pub open_outputs: Vec<bool>,
    /// The same for each parameter.
    pub open_params: Vec<bool>,
    /// The executable may run on any one device, chosen at each launch.
    pub portable: bool,
    /// Effort towards fast execution; the plugin's default if not given.
    pub optimization_level: Option<EffortLevel>,
    /// Effort towards fitting into memory; the plugin's default if not given.
    pub memory_fitting_level: Option<EffortLevel>,
    /// Options by the names that `XLA_FLAGS` has, for this compilation alone.
    pub overrides: Vec<(String, OptionValue)>,
    /// The types of the program's parameters on each device, which every launch is checked against. If not given they
    /// are read from the module's text where that can be done.
    pub param_types: Option<Vec<BufferType>>,
}

impl Default for CompileOptions {
    fn default() -> Self {
        CompileOptions {
            replicas: 1,
            partitions: 1,
            device_ordinal: None,
            device_ids: Vec::new(),
            spmd: false,
            shardy: false,
            open_outputs: Vec::new(),
            open_params: Vec::new(),
            portable: false,
            optimization_level: None,
            memory_fitting_level: None,
            overrides: Vec::new(),
            param_types: None,
        }
    }
}

impl CompileOptions {
    /// The parameter types given, or those in the program's text: that has the types on one device only where the
    /// program is not split.
    pub(crate) fn params_of(&self, program: &Program<'_>) -> Option<Vec<BufferType>> {
        let from_text = || match program.format {
            Format::Mlir if self.partitions == 1 => signature::params(program.code),
            _ => None,
        };
        self.param_types.clone().or_else(from_text)
    }

    /// The bytes for a client: with a device assignment.
    pub(crate) fn encode(&self, client: &Client) -> Result<Vec<u8>> {
        let here: Vec<i32> = client.devices().iter().map(Device::id).collect();
        let ids: Vec<i64> = self.ids(&here, client.device_ids())?.into_iter().map(i64::from).collect();
        if client.platform() == Platform::Cpu
            && let Some(id) = ids.iter().find(|id| here.iter().all(|h| i64::from(*h) != **id))
        {
            // The plugin would wait for it, and abort.
            return Err(err::invalid(format!("compile: device {id} is not of this process")));
        }
        self.encode_with((!self.portable).then(|| self.assignment(&ids)))
    }

    /// The bytes for a topology of devices with these ids: with a device assignment if devices are named.
    pub(crate) fn encode_for_topology(&self, available: &[i32], platform: Platform) -> Result<Vec<u8>> {
        let ids: Vec<i64> = self.ids(available, available)?.into_iter().map(i64::from).collect();
        let count = ids.len() as i64;
        if platform == Platform::Tpu && !self.device_ids.is_empty() && ids.iter().any(|id| *id >= count) {
            // Collectives in it would abort libtpu, which counts a program's devices from 0.
            let words =
                format!("compile: libtpu takes a program of {count} devices for the first {count} alone");
            return Err(err::invalid(format!("{words}, not for {ids:?}")));
        }
        self.encode_with((!self.device_ids.is_empty()).then(|| self.assignment(&ids)))
    }

    fn assignment(&self, ids: &[i64]) -> DeviceAssignmentProto {
        DeviceAssignmentProto {
            replica_count: self.replicas as i32,
            computation_count: self.partitions as i32,
            computation_devices: ids
                .chunks(self.replicas)
                .map(|replicas| ComputationDevice { replica_device_ids: replicas.to_vec() })
                .collect(),
        }
    }

    fn encode_with(&self, device_assignment: Option<DeviceAssignmentProto>) -> Result<Vec<u8>> {
        self.check_counts()?;
        let build = ExecutableBuildOptionsProto {
            device_ordinal: -1,
            num_replicas: self.replicas as i64,
            num_partitions: self.partitions as i64,
            use_spmd_partitioning: self.spmd,
            use_shardy_partitioner: self.shardy,
            allow_spmd_sharding_propagation_to_output: self.open_outputs.clone(),
            allow_spmd_sharding_propagation_to_parameters: self.open_params.clone(),
            device_assignment,
            optimization_level: self.optimization_level.unwrap_or(EffortLevel::Unknown).into(),
            memory_fitting_level: self.memory_fitting_level.unwrap_or(EffortLevel::Unknown).into(),
            ..Default::default()
        };
        let overrides = self.overrides.iter().map(|(name, value)| {
            let name = name.trim_start_matches("--").to_string();
            (name, OptionOverrideProto { value: Some(value.clone()) })
        });
        let proto = CompileOptionsProto {
            executable_build_options: Some(build),
            compile_portable_executable: self.portable,
            env_option_overrides: overrides.collect(),
            ..Default::default()
        };
        Ok(proto.encode_to_vec())
    }

    fn check_counts(&self) -> Result<()> {
        let (r, p) = (self.replicas, self.partitions);
        let product = r.checked_mul(p).filter(|&n| n > 0 && i32::try_from(n).is_ok());
        match product {
            None => Err(err::invalid(format!("compile: {r} replicas of {p} partitions"))),
            Some(n) if n > 1 && self.portable => {
                Err(err::invalid("compile: a portable executable runs on one device"))
            }
            Some(n) if n > 1 && self.device_ordinal.is_some() => {
                Err(err::invalid(format!("compile: `device_ordinal` is for one device, the program has {n}")))
            }
            Some(_) => Ok(()),
        }
    }

    /// The ids of the program's devices, partition-major; `here` are those of this process, `all` those of the job.
    fn ids(&self, here: &[i32], all: &[i32]) -> Result<Vec<i32>> {
        self.check_counts()?;
        let (r, p) = (self.replicas, self.partitions);
        let count = r * p;
        let available = if self.device_ids.is_empty() { here.len() } else { all.len() };
        if count > available {
            return Err(err::invalid(format!(
                "compile: {count} devices are needed, the client has {available}"
            )));
        }
        if !self.device_ids.is_empty() {
            self.check_ids(count, here, all)?;
            return Ok(self.device_ids.clone());
        }
        let Some(ordinal) = self.device_ordinal else {
            return Ok((0..p).flat_map(|part| (0..r).map(move |replica| here[replica * p + part])).collect());
        };
        let known = usize::try_from(ordinal).ok().and_then(|i| here.get(i));
        let missing = || err::invalid(format!("compile: device {ordinal} of {} does not exist", here.len()));
        Ok(vec![*known.ok_or_else(missing)?])
    }

    /// That so many are named, each once, all exist, and one at least is here.
    fn check_ids(&self, count: usize, here: &[i32], all: &[i32]) -> Result<()> {
        let ids = &self.device_ids;
        if ids.len() != count {
            let named = ids.len();
            return Err(err::invalid(format!("compile: {count} devices are needed, {named} are named")));
        }
        for (i, id) in ids.iter().enumerate() {
            if !all.contains(id) {
                return Err(err::invalid(format!("compile: there is no device with id {id}")));
            }
            if ids[..i].contains(id) {
                return Err(err::invalid(format!("compile: device {id} is named twice")));
            }
        }
        if ids.iter().any(|id| here.contains(id)) {
            return Ok(());
        }
        Err(err::invalid(format!("compile: none of the devices {ids:?} is of this process")))
    }
}
