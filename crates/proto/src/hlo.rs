//! HLO modules as plugins give them back: what is needed to show them to people.
//!
//! Field numbers are those of `xla/service/hlo.proto` and `xla/xla_data.proto`; other fields are skipped when read.

/// A module and how it is to be compiled; the latter is left out.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HloModuleProtoWithConfig {
    /// The module.
    #[prost(message, optional, tag = "1")]
    pub hlo_module: Option<HloModuleProto>,
}

/// A module.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HloModuleProto {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its computations; those that are called come first.
    #[prost(message, repeated, tag = "3")]
    pub computations: Vec<HloComputationProto>,
    /// The computation that it begins with.
    #[prost(int64, tag = "6")]
    pub entry_computation_id: i64,
    /// Which results take the memory of which parameters.
    #[prost(message, optional, tag = "8")]
    pub input_output_alias: Option<HloInputOutputAliasProto>,
}

/// Which results take the memory of which parameters.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HloInputOutputAliasProto {
    /// One pair each.
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<AliasEntryProto>,
}

/// A result that takes the memory of a parameter.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AliasEntryProto {
    /// The result.
    #[prost(int64, repeated, tag = "1")]
    pub output_shape_index: Vec<i64>,
    /// The parameter.
    #[prost(int64, tag = "2")]
    pub parameter_number: i64,
}

/// A computation.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HloComputationProto {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// In an order in which they may run.
    #[prost(message, repeated, tag = "2")]
    pub instructions: Vec<HloInstructionProto>,
    /// Its number.
    #[prost(int64, tag = "5")]
    pub id: i64,
    /// The instruction whose value it has.
    #[prost(int64, tag = "6")]
    pub root_id: i64,
}

/// An instruction.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HloInstructionProto {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// What it does.
    #[prost(string, tag = "2")]
    pub opcode: String,
    /// The type of its value.
    #[prost(message, optional, tag = "3")]
    pub shape: Option<ShapeProto>,
    /// Where it comes from.
    #[prost(message, optional, tag = "7")]
    pub metadata: Option<OpMetadata>,
    /// Of a constant.
    #[prost(message, optional, tag = "8")]
    pub literal: Option<LiteralProto>,
    /// Of a parameter.
    #[prost(int64, tag = "9")]
    pub parameter_number: i64,
    /// Of a fusion.
    #[prost(string, tag = "11")]
    pub fusion_kind: String,
    /// Of an element of a tuple.
    #[prost(int64, tag = "13")]
    pub tuple_index: i64,
    /// Dimensions of many instructions.
    #[prost(int64, repeated, tag = "14")]
    pub dimensions: Vec<i64>,
    /// Of a convolution or a reduction by windows.
    #[prost(message, optional, tag = "15")]
    pub window: Option<Window>,
    /// Of a slice.
    #[prost(message, repeated, tag = "17")]
    pub slice_dimensions: Vec<SliceDimensions>,
    /// Of a slice with dynamic starts.
    #[prost(int64, repeated, tag = "20")]
    pub dynamic_slice_sizes: Vec<i64>,
    /// Of padding.
    #[prost(message, optional, tag = "21")]
    pub padding_config: Option<PaddingConfig>,
    /// Of a custom call.
    #[prost(string, tag = "28")]
    pub custom_call_target: String,
    /// Of a product.
    #[prost(message, optional, tag = "30")]
    pub dot_dimension_numbers: Option<DotDimensionNumbers>,
    /// Its number.
    #[prost(int64, tag = "35")]
    pub id: i64,
    /// Its operands.
    #[prost(int64, repeated, tag = "36")]
    pub operand_ids: Vec<i64>,
    /// Computations that it calls.
    #[prost(int64, repeated, tag = "38")]
    pub called_computation_ids: Vec<i64>,
    /// What the compiler says to itself.
    #[prost(bytes = "vec", tag = "43")]
    pub backend_config: Vec<u8>,
    /// Of a comparison.
    #[prost(string, tag = "63")]
    pub comparison_direction: String,
    /// Who takes part in a collective, in the older spelling.
    #[prost(message, repeated, tag = "49")]
    pub replica_groups: Vec<ReplicaGroup>,
    /// The same, as lists.
    #[prost(message, optional, tag = "87")]
    pub collective_device_list: Option<CollectiveDeviceListProto>,
    /// The same, as a reshaped and transposed count.
    #[prost(message, optional, tag = "92")]
    pub iota_collective_device_list: Option<IotaReplicaGroupListProto>,
    /// The same, as axes of a mesh.
    #[prost(message, optional, tag = "93")]
    pub mesh_axes_replica_group_list: Option<MeshAxesReplicaGroupListProto>,
    /// Who sends to whom.
    #[prost(message, repeated, tag = "52")]
    pub source_target_pairs: Vec<SourceTarget>,
}

/// Devices that take part in one collective together.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ReplicaGroup {
    /// Their numbers.
    #[prost(int64, repeated, tag = "1")]
    pub replica_ids: Vec<i64>,
}

/// Groups of devices.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CollectiveDeviceListProto {
    /// As lists.
    #[prost(message, repeated, tag = "1")]
    pub replica_groups: Vec<ReplicaGroup>,
    /// As a reshaped and transposed count.
    #[prost(message, optional, tag = "2")]
    pub iota_replica_group_list: Option<IotaReplicaGroupListProto>,
}

/// Groups of devices: 0, 1, 2, ... reshaped, transposed, and cut into groups.
#[derive(Clone, PartialEq, prost::Message)]
pub struct IotaReplicaGroupListProto {
    /// How many groups.
    #[prost(int64, tag = "1")]
    pub num_replica_groups: i64,
    /// Devices of each.
    #[prost(int64, tag = "2")]
    pub num_devices_per_group: i64,
    /// The shape before the transposition.
    #[prost(int64, repeated, tag = "3")]
    pub iota_reshape_dims: Vec<i64>,
    /// The order of the dimensions after it.
    #[prost(int32, repeated, tag = "4")]
    pub iota_transpose_perm: Vec<i32>,
}

/// Groups of devices: those that differ along axes of a mesh.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MeshAxesReplicaGroupListProto {
    /// The mesh.
    #[prost(message, optional, tag = "1")]
    pub mesh: Option<MeshProto>,
    /// The axes.
    #[prost(message, repeated, tag = "2")]
    pub axes: Vec<AxisRefProto>,
}

/// A mesh of devices.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MeshProto {
    /// Its axes, the last of which counts fastest.
    #[prost(message, repeated, tag = "1")]
    pub axes: Vec<MeshAxis>,
    /// The devices in it; 0, 1, 2, ... if none are named.
    #[prost(int64, repeated, tag = "2")]
    pub device_ids: Vec<i64>,
}

/// An axis of a mesh.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MeshAxis {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Devices along it.
    #[prost(int64, tag = "2")]
    pub size: i64,
}

/// An axis, or a part of it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AxisRefProto {
    /// Number of the axis.
    #[prost(int64, tag = "1")]
    pub mesh_axis_index: i64,
    /// The part.
    #[prost(message, optional, tag = "2")]
    pub sub_axis_info: Option<SubAxis>,
}

/// A part of an axis.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SubAxis {
    /// Product of the sizes of the parts before it.
    #[prost(int64, tag = "1")]
    pub pre_size: i64,
    /// Its size.
    #[prost(int64, tag = "2")]
    pub size: i64,
}

/// A device sends to another.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SourceTarget {
    /// From.
    #[prost(int64, tag = "1")]
    pub source: i64,
    /// To.
    #[prost(int64, tag = "2")]
    pub target: i64,
}

/// The type of a value.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ShapeProto {
    /// `PrimitiveType`.
    #[prost(int32, tag = "2")]
    pub element_type: i32,
    /// Sizes.
    #[prost(int64, repeated, tag = "3")]
    pub dimensions: Vec<i64>,
    /// Of a tuple.
    #[prost(message, repeated, tag = "4")]
    pub tuple_shapes: Vec<ShapeProto>,
    /// The order of dimensions in memory.
    #[prost(message, optional, tag = "5")]
    pub layout: Option<LayoutProto>,
}

/// The order of dimensions in memory.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LayoutProto {
    /// Fastest first.
    #[prost(int64, repeated, tag = "1")]
    pub minor_to_major: Vec<i64>,
}

/// Where an instruction comes from.
#[derive(Clone, PartialEq, prost::Message)]
pub struct OpMetadata {
    /// The name of the operation before optimisation.
    #[prost(string, tag = "2")]
    pub op_name: String,
}

/// The value of a constant; of types that are not here, nothing is read.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LiteralProto {
    /// `pred`.
    #[prost(bool, repeated, tag = "2")]
    pub preds: Vec<bool>,
    /// `s32`.
    #[prost(int32, repeated, tag = "4")]
    pub s32s: Vec<i32>,
    /// `s64`.
    #[prost(int64, repeated, tag = "5")]
    pub s64s: Vec<i64>,
    /// `u32`.
    #[prost(uint32, repeated, tag = "6")]
    pub u32s: Vec<u32>,
    /// `u64`.
    #[prost(uint64, repeated, tag = "7")]
    pub u64s: Vec<u64>,
    /// `f32`.
    #[prost(float, repeated, tag = "8")]
    pub f32s: Vec<f32>,
    /// `f64`.
    #[prost(double, repeated, tag = "9")]
    pub f64s: Vec<f64>,
}

/// Half-open ranges of a slice.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SliceDimensions {
    /// First.
    #[prost(int64, tag = "1")]
    pub start: i64,
    /// One past the last.
    #[prost(int64, tag = "2")]
    pub limit: i64,
    /// Step.
    #[prost(int64, tag = "3")]
    pub stride: i64,
}

/// Padding of each dimension.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PaddingConfig {
    /// One each.
    #[prost(message, repeated, tag = "1")]
    pub dimensions: Vec<PaddingConfigDimension>,
}

/// Padding of a dimension.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PaddingConfigDimension {
    /// Before.
    #[prost(int64, tag = "1")]
    pub edge_padding_low: i64,
    /// Behind.
    #[prost(int64, tag = "2")]
    pub edge_padding_high: i64,
    /// Between elements.
    #[prost(int64, tag = "3")]
    pub interior_padding: i64,
}

/// A window that moves over a tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Window {
    /// One each.
    #[prost(message, repeated, tag = "1")]
    pub dimensions: Vec<WindowDimension>,
}

/// A dimension of a window.
#[derive(Clone, PartialEq, prost::Message)]
pub struct WindowDimension {
    /// Size.
    #[prost(int64, tag = "1")]
    pub size: i64,
    /// How far it moves.
    #[prost(int64, tag = "2")]
    pub stride: i64,
    /// Before.
    #[prost(int64, tag = "3")]
    pub padding_low: i64,
    /// Behind.
    #[prost(int64, tag = "4")]
    pub padding_high: i64,
}

/// Which dimensions a product sums over.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DotDimensionNumbers {
    /// Of the left operand.
    #[prost(int64, repeated, tag = "1")]
    pub lhs_contracting_dimensions: Vec<i64>,
    /// Of the right one.
    #[prost(int64, repeated, tag = "2")]
    pub rhs_contracting_dimensions: Vec<i64>,
    /// That both have.
    #[prost(int64, repeated, tag = "3")]
    pub lhs_batch_dimensions: Vec<i64>,
    /// The same in the right one.
    #[prost(int64, repeated, tag = "4")]
    pub rhs_batch_dimensions: Vec<i64>,
}
