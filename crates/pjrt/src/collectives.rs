//! What the devices of a program that is split send each other, read from the program as the compiler left it.

use std::collections::{BTreeMap, HashMap};

use oxitorch_proto::Message;
use oxitorch_proto::hlo::{
    HloComputationProto, HloInstructionProto, HloModuleProto, HloModuleProtoWithConfig,
    IotaReplicaGroupListProto, MeshAxesReplicaGroupListProto, ShapeProto,
};

use crate::compiled::OptimizedProgram;
use crate::element::ElementType;
use crate::hlo_text;
use crate::loops::{Computations, rounds};

/// A kind of collective, by XLA's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CollectiveKind {
    /// Everybody has the sum.
    AllReduce,
    /// Everybody has all parts.
    AllGather,
    /// Everybody has a part of the sum.
    ReduceScatter,
    /// Everybody has a part of everybody's.
    AllToAll,
    /// Everybody has what another one had.
    CollectivePermute,
    /// Everybody has what one had.
    CollectiveBroadcast,
}

impl CollectiveKind {
    const ALL: [CollectiveKind; 6] = [
        CollectiveKind::AllReduce,
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllToAll,
        CollectiveKind::CollectivePermute,
        CollectiveKind::CollectiveBroadcast,
    ];

    /// XLA's name.
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllReduce => "all-reduce",
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::ReduceScatter => "reduce-scatter",
            CollectiveKind::AllToAll => "all-to-all",
            CollectiveKind::CollectivePermute => "collective-permute",
            CollectiveKind::CollectiveBroadcast => "collective-broadcast",
        }
    }

    /// Of an instruction; the end of an asynchronous one does not count.
    fn of(opcode: &str) -> Option<CollectiveKind> {
        let name = opcode.strip_suffix("-start").unwrap_or(opcode);
        let name = name.strip_prefix("ragged-").unwrap_or(name);
        Self::ALL.into_iter().find(|k| k.name() == name)
    }
}

/// Collectives of one kind on tensors of the same types between the same devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Collective {
    /// The kind.
    pub kind: CollectiveKind,
    /// What each device puts in, for instance `f32[4,8]`; the largest first and how many more if it is several tensors.
    pub operands: String,
    /// Bytes that each device has before or after it, whichever is more.
    pub bytes: u64,
    /// The devices of the first group; for a permutation, those of the first pair.
    pub group: Vec<u64>,
    /// How often a launch does it.
    pub count: u64,
}

impl OptimizedProgram {
    /// What the devices send each other in a launch, the most bytes first; none if the format is not known. A loop that
    /// does not say how often it goes round counts once.
    pub fn collectives(&self) -> Option<Vec<Collective>> {
        Some(of_module(&module(self)?))
    }
}

/// The program's module; none if the format is not known, or the bytes are not of it.
pub(crate) fn module(program: &OptimizedProgram) -> Option<HloModuleProto> {
    match program.format.as_str() {
        "hlo_with_config" => HloModuleProtoWithConfig::decode(program.code.as_slice()).ok()?.hlo_module,
        "hlo" => HloModuleProto::decode(program.code.as_slice()).ok(),
        _ => None,
    }
}

fn of_module(module: &HloModuleProto) -> Vec<Collective> {
    let computations: Computations<'_> = module.computations.iter().map(|c| (c.id, c)).collect();
    let mut found = BTreeMap::new();
    if let Some(&entry) = computations.get(&module.entry_computation_id) {
        walk(entry, 1, &computations, &mut found);
    }
    let mut all: Vec<Collective> = found.into_values().collect();
    all.sort_by_key(|c| std::cmp::Reverse(c.bytes * c.count));
    all
}

/// By kind, operands and group.
type Found = BTreeMap<(CollectiveKind, String, Vec<u64>), Collective>;

fn walk(c: &HloComputationProto, times: u64, computations: &Computations<'_>, found: &mut Found) {
    let shapes: HashMap<i64, &ShapeProto> =
        c.instructions.iter().filter_map(|i| Some((i.id, i.shape.as_ref()?))).collect();
    for i in &c.instructions {
        let config = std::str::from_utf8(&i.backend_config).unwrap_or_default();
        if let Some(kind) = CollectiveKind::of(&i.opcode) {
            if goes_on(config) {
                continue;
            }
            // libtpu keeps a reduce-scatter as the sum of all and the choice of a part of it.
            let is_part = kind == CollectiveKind::AllReduce && c.name.starts_with("all-reduce-scatter");
            let kind = if is_part { CollectiveKind::ReduceScatter } else { kind };
            let one = collective(kind, i, &shapes);
            let key = (one.kind, one.operands.clone(), one.group.clone());
            found.entry(key).or_insert(Collective { count: 0, ..one }).count += times;
            continue; // what it calls is the sum of two numbers
        }
        let times = match i.opcode.as_str() {
            "while" => times * rounds(i, c, computations),
            // Their computations were begun before.
            "async-done" | "async-update" => continue,
            _ => times,
        };
        let called = i.called_computation_ids.iter().filter_map(|id| computations.get(id));
        called.for_each(|&inner| walk(inner, times, computations, found));
    }
}

/// Whether it is a further part of a collective that has begun in another fusion, as libtpu spreads them.
fn goes_on(config: &str) -> bool {
    let Some((_, rest)) = config.split_once("\"async_collective_fusion_config\":{\"flag_start\":\"") else {
        return false;
    };
    !rest.starts_with("-1\"")
}

fn collective(
    kind: CollectiveKind,
    i: &HloInstructionProto,
    shapes: &HashMap<i64, &ShapeProto>,
) -> Collective {
    let group = group(i);
    let operands: Vec<&ShapeProto> = i.operand_ids.iter().filter_map(|id| shapes.get(id).copied()).collect();
    let put_in: u64 = operands.iter().map(|s| bytes(s)).sum();
    let bytes_after = match kind {
        CollectiveKind::AllGather => put_in * group.len().max(1) as u64,
        _ => put_in,
    };
    let largest = operands.iter().max_by_key(|s| bytes(s));
    let mut text = largest.map_or_else(String::new, |s| name(s));
    if operands.len() > 1 {
        text += &format!(" and {} more", operands.len() - 1);
    }
    Collective { kind, operands: text, bytes: bytes_after, group, count: 1 }
}

fn name(s: &ShapeProto) -> String {
    hlo_text::shape(Some(s), false)
}

pub(crate) fn bytes(s: &ShapeProto) -> u64 {
    if !s.tuple_shapes.is_empty() {
        return s.tuple_shapes.iter().map(bytes).sum();
    }
    let name = name(s);
    let dtype = name.split('[').next().unwrap_or_default();
    let bits = ElementType::ALL.iter().find(|t| t.name() == dtype).map_or(0, |t| t.bits());
    let elements: i64 = s.dimensions.iter().product();
    (elements.max(0) as u64 * bits as u64).div_ceil(8)
}

/// The first group of devices.
fn group(i: &HloInstructionProto) -> Vec<u64> {
    let ids = |ids: &[i64]| ids.iter().map(|&n| n.max(0) as u64).collect::<Vec<_>>();
    if let Some(mesh) = &i.mesh_axes_replica_group_list {
        return along_axes(mesh);
    }
    let listed = i.collective_device_list.as_ref();
    if let Some(first) = listed.and_then(|l| l.replica_groups.first()).or(i.replica_groups.first()) {
        return ids(&first.replica_ids);
    }
    let iota = i.iota_collective_device_list.as_ref();
    if let Some(list) = iota.or(listed.and_then(|l| l.iota_replica_group_list.as_ref())) {
        return counted(list);
    }
    i.source_target_pairs.first().map_or_else(Vec::new, |p| ids(&[p.source, p.target]))
}

/// The devices that differ from the first along these axes.
fn along_axes(list: &MeshAxesReplicaGroupListProto) -> Vec<u64> {
    let Some(mesh) = &list.mesh else { return Vec::new() };
    let sizes: Vec<u64> = mesh.axes.iter().map(|a| a.size.max(1) as u64).collect();
    let mut group = vec![0];
    for axis in &list.axes {
        let Some(&whole) = sizes.get(axis.mesh_axis_index.max(0) as usize) else { continue };
        let inner: u64 = sizes[axis.mesh_axis_index as usize + 1..].iter().product();
        let (before, size) =
            axis.sub_axis_info.as_ref().map_or((1, whole), |s| (s.pre_size.max(1) as u64, s.size as u64));
        let stride = inner * (whole / (before * size).max(1)).max(1);
        group = group.iter().flat_map(|&at| (0..size).map(move |k| at + k * stride)).collect();
    }
    let device = |at: u64| mesh.device_ids.get(at as usize).map_or(at, |&id| id.max(0) as u64);
    group.into_iter().map(device).collect()
}

/// The first group of a reshaped and transposed count.
fn counted(list: &IotaReplicaGroupListProto) -> Vec<u64> {
    let dims: Vec<u64> = list.iota_reshape_dims.iter().map(|&d| d.max(1) as u64).collect();
    let stride = |d: usize| dims[d + 1..].iter().product::<u64>();
    let order: Vec<usize> = match list.iota_transpose_perm.is_empty() {
        true => (0..dims.len()).collect(),
        false => list.iota_transpose_perm.iter().map(|&d| d.max(0) as usize).collect(),
    };
    let at = |mut n: u64| {
        let mut device = 0;
        for &d in order.iter().rev().filter(|&&d| d < dims.len()) {
            device += n % dims[d] * stride(d);
            n /= dims[d];
        }
        device
    };
    (0..list.num_devices_per_group.max(0) as u64).map(at).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use oxitorch_proto::hlo::{AxisRefProto, MeshAxis, MeshProto, ReplicaGroup, SubAxis};

    pub(crate) fn f32s(dims: &[i64]) -> Option<ShapeProto> {
        Some(ShapeProto { element_type: 11, dimensions: dims.to_vec(), ..Default::default() })
    }

    pub(crate) fn op(
        id: i64,
        opcode: &str,
        shape: Option<ShapeProto>,
        operands: &[i64],
    ) -> HloInstructionProto {
        HloInstructionProto {
            id,
            opcode: opcode.into(),
            shape,
            operand_ids: operands.to_vec(),
            ..Default::default()
        }
    }

    fn pairs() -> Vec<ReplicaGroup> {
        vec![ReplicaGroup { replica_ids: vec![0, 2] }, ReplicaGroup { replica_ids: vec![1, 3] }]
    }

    pub(crate) fn calls(i: HloInstructionProto, computation: i64) -> HloInstructionProto {
        HloInstructionProto { called_computation_ids: vec![computation], ..i }
    }

    fn module(computations: Vec<(&str, Vec<HloInstructionProto>)>) -> HloModuleProto {
        let computations = computations.into_iter().enumerate().map(|(id, (name, instructions))| {
            HloComputationProto { name: name.into(), id: id as i64, instructions, ..Default::default() }
        });
        HloModuleProto { computations: computations.collect(), ..Default::default() }
    }

    #[test]
    fn collectives_are_found_in_loops_fusions_and_asynchronous_parts() {
        let grouped = |i| HloInstructionProto { replica_groups: pairs(), ..i };
        let config = |i, text: &str| HloInstructionProto { backend_config: text.into(), ..i };
        let goes_on = |start: &str| {
            format!(
                "{{\"async_collective_fusion_config\":{{\"flag_start\":\"{start}\",\"flag_end\":\"3\"}}}}"
            )
        };
        let loop_of_five =
            config(calls(op(9, "while", None, &[]), 1), "{\"known_trip_count\":{\"n\":\"5\"}}");
        let found = of_module(&module(vec![
            (
                "main",
                vec![
                    op(0, "parameter", f32s(&[8, 4]), &[]),
                    op(1, "parameter", f32s(&[4]), &[]),
                    grouped(op(2, "all-reduce", None, &[0, 1])),
                    grouped(op(3, "all-gather-start", None, &[1])),
                    op(4, "all-gather-done", f32s(&[8]), &[3]),
                    loop_of_five,
                    calls(op(5, "fusion", None, &[]), 2),
                    calls(op(6, "async-start", None, &[]), 3),
                    calls(op(7, "async-done", None, &[]), 3),
                    calls(op(8, "fusion", None, &[]), 4),
                ],
            ),
            ("body", vec![op(20, "parameter", f32s(&[2]), &[]), grouped(op(21, "all-to-all", None, &[20]))]),
            (
                "all-reduce-scatter.1",
                vec![op(30, "parameter", f32s(&[16]), &[]), grouped(op(31, "all-reduce", None, &[30]))],
            ),
            (
                "wrapped",
                vec![
                    op(40, "parameter", f32s(&[4]), &[]),
                    config(grouped(op(41, "all-gather", None, &[40])), &goes_on("-1")),
                ],
            ),
            (
                "further",
                vec![
                    op(50, "parameter", f32s(&[4]), &[]),
                    config(grouped(op(51, "all-gather", None, &[50])), &goes_on("2")),
                ],
            ),
        ]));
        let told: Vec<_> =
            found.iter().map(|c| (c.kind.name(), c.operands.as_str(), c.bytes, c.count)).collect();
        let expected = [
            ("all-reduce", "f32[8,4] and 1 more", 4 * (32 + 4), 1),
            ("all-gather", "f32[4]", 2 * 16, 2),
            ("reduce-scatter", "f32[16]", 64, 1),
            ("all-to-all", "f32[2]", 8, 5),
        ];
        assert_eq!(told, expected);
        assert!(found.iter().all(|c| c.group == [0, 2]));
    }

    #[test]
    fn groups_have_four_spellings() {
        let lists = HloInstructionProto { replica_groups: pairs(), ..Default::default() };
        assert_eq!(group(&lists), [0, 2]);
        let iota = IotaReplicaGroupListProto {
            num_replica_groups: 2,
            num_devices_per_group: 2,
            iota_reshape_dims: vec![2, 2],
            iota_transpose_perm: vec![1, 0],
        };
        assert_eq!(counted(&iota), [0, 2]);
        let axis = |size| MeshAxis { name: String::new(), size };
        let along = |axes: Vec<AxisRefProto>, device_ids: Vec<i64>| {
            let mesh = Some(MeshProto { axes: vec![axis(2), axis(4)], device_ids });
            along_axes(&MeshAxesReplicaGroupListProto { mesh, axes })
        };
        let whole = |i| AxisRefProto { mesh_axis_index: i, sub_axis_info: None };
        assert_eq!(along(vec![whole(0)], Vec::new()), [0, 4]);
        assert_eq!(along(vec![whole(1)], Vec::new()), [0, 1, 2, 3]);
        assert_eq!(along(vec![whole(0)], (0..8).rev().collect()), [7, 3]);
        let part = AxisRefProto { mesh_axis_index: 1, sub_axis_info: Some(SubAxis { pre_size: 1, size: 2 }) };
        assert_eq!(along(vec![part], Vec::new()), [0, 2]);
        let sent = HloInstructionProto {
            source_target_pairs: vec![oxitorch_proto::hlo::SourceTarget { source: 3, target: 0 }],
            ..Default::default()
        };
        assert_eq!(group(&sent), [3, 0]);
    }
}
