//! Compile options: `xla/pjrt/proto/compile_options.proto`.

use std::collections::BTreeMap;

/// How one program is to be compiled.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CompileOptionsProto {
    /// The program takes one tuple instead of separate arguments.
    #[prost(bool, tag = "2")]
    pub parameter_is_tupled_arguments: bool,
    /// Replicas, partitions, devices; a plugin aborts the process when it is absent.
    #[prost(message, optional, tag = "3")]
    pub executable_build_options: Option<ExecutableBuildOptionsProto>,
    /// The executable may be launched on any device instead of the assigned one.
    #[prost(bool, tag = "4")]
    pub compile_portable_executable: bool,
    /// Version of a profile to optimise by; 0 for none.
    #[prost(int64, tag = "5")]
    pub profile_version: i64,
    /// XLA debug options by name (the names of `XLA_FLAGS`, without dashes).
    #[prost(btree_map = "string, message", tag = "7")]
    pub env_option_overrides: BTreeMap<String, OptionOverrideProto>,
    /// The plugin may change the module that it parsed, instead of a copy of it.
    #[prost(bool, tag = "9")]
    pub allow_in_place_mlir_modification: bool,
}

/// What the build of an executable depends on beside the program.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ExecutableBuildOptionsProto {
    /// Device to build for; -1 for not given.
    #[prost(int64, tag = "1")]
    pub device_ordinal: i64,
    /// Number of replicas; at least 1.
    #[prost(int64, tag = "4")]
    pub num_replicas: i64,
    /// Number of partitions; at least 1.
    #[prost(int64, tag = "5")]
    pub num_partitions: i64,
    /// Partition one program (SPMD) instead of taking one program per partition.
    #[prost(bool, tag = "6")]
    pub use_spmd_partitioning: bool,
    /// Compile equal computations once.
    #[prost(bool, tag = "8")]
    pub deduplicate_hlo: bool,
    /// Which device runs which replica and partition.
    #[prost(message, optional, tag = "9")]
    pub device_assignment: Option<DeviceAssignmentProto>,
    /// Alias parameters that are returned unchanged.
    #[prost(bool, tag = "10")]
    pub alias_passthrough_params: bool,
    /// Let sharding propagation change the shardings of outputs; one value for all, or one each.
    #[prost(bool, repeated, tag = "12")]
    pub allow_spmd_sharding_propagation_to_output: Vec<bool>,
    /// Memory of the device in bytes that the compiler may plan with; 0 for all of it.
    #[prost(int64, tag = "15")]
    pub device_memory_size: i64,
    /// Let sharding propagation change the shardings of parameters; one value for all, or one each.
    #[prost(bool, repeated, tag = "18")]
    pub allow_spmd_sharding_propagation_to_parameters: Vec<bool>,
    /// Use Shardy (`sdy` in the module) instead of GSPMD.
    #[prost(bool, tag = "19")]
    pub use_shardy_partitioner: bool,
    /// Effort towards fast execution.
    #[prost(enumeration = "EffortLevel", tag = "24")]
    pub optimization_level: i32,
    /// Effort towards fitting into memory.
    #[prost(enumeration = "EffortLevel", tag = "25")]
    pub memory_fitting_level: i32,
}

/// Devices by computation (partition), then by replica.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceAssignmentProto {
    /// Number of replicas.
    #[prost(int32, tag = "1")]
    pub replica_count: i32,
    /// Number of computations (partitions).
    #[prost(int32, tag = "2")]
    pub computation_count: i32,
    /// One entry per computation.
    #[prost(message, repeated, tag = "3")]
    pub computation_devices: Vec<ComputationDevice>,
}

/// The devices of one computation: `DeviceAssignmentProto.ComputationDevice`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ComputationDevice {
    /// Global device id of each replica.
    #[prost(int64, repeated, tag = "1")]
    pub replica_device_ids: Vec<i64>,
}

/// A value of one XLA option.
#[derive(Clone, PartialEq, prost::Message)]
pub struct OptionOverrideProto {
    /// The value; a plugin refuses a value whose kind does not fit the option.
    #[prost(oneof = "option_override::Value", tags = "1, 2, 3, 4")]
    pub value: Option<option_override::Value>,
}

/// The kinds of value of [`OptionOverrideProto`].
pub mod option_override {
    /// The value.
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Value {
        /// Text, also names of enumerators.
        #[prost(string, tag = "1")]
        String(String),
        /// A flag.
        #[prost(bool, tag = "2")]
        Bool(bool),
        /// An integer.
        #[prost(int64, tag = "3")]
        Int(i64),
        /// A float.
        #[prost(double, tag = "4")]
        Double(f64),
    }
}

/// `ExecutionOptions.EffortLevel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum EffortLevel {
    /// The platform's default.
    Unknown = 0,
    /// Least effort.
    O0 = 9,
    /// Little effort.
    O1 = 19,
    /// What production work wants.
    O2 = 29,
    /// Costly and experimental optimisations too.
    O3 = 39,
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    fn hex(message: &impl Message) -> String {
        message.encode_to_vec().iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(" ")
    }

    fn build(replicas: i64, partitions: i64) -> ExecutableBuildOptionsProto {
        ExecutableBuildOptionsProto {
            num_replicas: replicas,
            num_partitions: partitions,
            ..Default::default()
        }
    }

    fn options(build: ExecutableBuildOptionsProto) -> CompileOptionsProto {
        CompileOptionsProto { executable_build_options: Some(build), ..Default::default() }
    }

    #[test]
    fn smallest_valid_options() {
        assert_eq!(hex(&options(build(1, 1))), "1a 04 20 01 28 01");
    }

    #[test]
    fn negative_ordinal_takes_ten_bytes() {
        let b = ExecutableBuildOptionsProto { device_ordinal: -1, ..build(1, 1) };
        assert_eq!(hex(&b), "08 ff ff ff ff ff ff ff ff ff 01 20 01 28 01");
    }

    #[test]
    fn spmd_over_four_devices_with_shardy() {
        let assignment = DeviceAssignmentProto {
            replica_count: 1,
            computation_count: 2,
            computation_devices: vec![
                ComputationDevice { replica_device_ids: vec![3] },
                ComputationDevice { replica_device_ids: vec![0] },
            ],
        };
        let b = ExecutableBuildOptionsProto {
            use_spmd_partitioning: true,
            device_assignment: Some(assignment),
            allow_spmd_sharding_propagation_to_output: vec![true],
            use_shardy_partitioner: true,
            optimization_level: EffortLevel::O1.into(),
            ..build(1, 2)
        };
        // Tags: 9 -> 4a, 12 -> 62, 19 -> 98 01, 24 -> c0 01; the device ids are packed.
        assert_eq!(
            hex(&b),
            "20 01 28 02 30 01 4a 0e 08 01 10 02 1a 03 0a 01 03 1a 03 0a 01 00 62 01 01 98 01 01 c0 01 13"
        );
    }

    #[test]
    fn overrides_are_sorted_and_typed() {
        let over = |v| OptionOverrideProto { value: Some(v) };
        let mut o = CompileOptionsProto::default();
        o.env_option_overrides.insert("b".into(), over(option_override::Value::Int(5)));
        o.env_option_overrides.insert("a".into(), over(option_override::Value::Bool(false)));
        o.env_option_overrides.insert("c".into(), over(option_override::Value::String("x".into())));
        o.env_option_overrides.insert("d".into(), over(option_override::Value::Double(1.0)));
        assert_eq!(
            hex(&o),
            "3a 07 0a 01 61 12 02 10 00 3a 07 0a 01 62 12 02 18 05 3a 08 0a 01 63 12 03 0a 01 78 \
             3a 0e 0a 01 64 12 09 21 00 00 00 00 00 00 f0 3f"
        );
        assert_eq!(CompileOptionsProto::decode(&o.encode_to_vec()[..]).unwrap(), o);
    }
}
