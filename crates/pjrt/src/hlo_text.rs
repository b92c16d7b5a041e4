//! Optimized programs as text, in the way of XLA's dumps: for people, not to be read back.

use std::collections::HashMap;
use std::fmt::Write;

use oxitorch_proto::Message;
use oxitorch_proto::hlo::{
    HloComputationProto, HloInstructionProto, HloModuleProto, HloModuleProtoWithConfig, LiteralProto,
    ShapeProto,
};

use crate::compiled::OptimizedProgram;

impl OptimizedProgram {
    /// As text; none if the format is not known, or the bytes are not of it.
    pub fn text(&self) -> Option<String> {
        let module = match self.format.as_str() {
            "hlo_with_config" => HloModuleProtoWithConfig::decode(self.code.as_slice()).ok()?.hlo_module?,
            "hlo" => HloModuleProto::decode(self.code.as_slice()).ok()?,
            "mlir" => return std::str::from_utf8(&self.code).ok().map(str::to_owned),
            _ => return None,
        };
        Some(module_text(&module))
    }
}

/// Elements of constants that are shown.
const SHOWN: usize = 8;

struct Names<'m> {
    instructions: HashMap<i64, &'m str>,
    computations: HashMap<i64, &'m str>,
}

fn module_text(module: &HloModuleProto) -> String {
    let all = module.computations.iter();
    let names = Names {
        instructions: all.clone().flat_map(|c| &c.instructions).map(|i| (i.id, i.name.as_str())).collect(),
        computations: all.map(|c| (c.id, c.name.as_str())).collect(),
    };
    let mut out = format!("HloModule {}", module.name);
    let aliases = module.input_output_alias.iter().flat_map(|a| &a.entries);
    let aliases: Vec<String> =
        aliases.map(|e| format!("{}: ({}, {{}})", list(&e.output_shape_index), e.parameter_number)).collect();
    if !aliases.is_empty() {
        // Writing to a String does not fail.
        let _ = write!(out, ", input_output_alias={{ {} }}", aliases.join(", "));
    }
    out.push('\n');
    for c in &module.computations {
        computation(&mut out, c, c.id == module.entry_computation_id, &names);
    }
    out
}

fn computation(out: &mut String, c: &HloComputationProto, is_entry: bool, names: &Names<'_>) {
    let mut parameters: Vec<&HloInstructionProto> =
        c.instructions.iter().filter(|i| i.opcode == "parameter").collect();
    parameters.sort_by_key(|i| i.parameter_number);
    let parameters: Vec<String> =
        parameters.iter().map(|i| format!("{}: {}", i.name, shape(i.shape.as_ref(), false))).collect();
    let root = c.instructions.iter().find(|i| i.id == c.root_id);
    let result = shape(root.and_then(|r| r.shape.as_ref()), false);
    let entry = if is_entry { "ENTRY " } else { "" };
    let _ = writeln!(out, "\n{entry}%{} ({}) -> {result} {{", c.name, parameters.join(", "));
    for i in &c.instructions {
        let root = if i.id == c.root_id { "ROOT " } else { "" };
        let operands: Vec<String> = match (i.opcode.as_str(), &i.literal) {
            ("parameter", _) => vec![i.parameter_number.to_string()],
            ("constant", Some(l)) => vec![literal(l)],
            _ => i
                .operand_ids
                .iter()
                .map(|id| format!("%{}", names.instructions.get(id).unwrap_or(&"?")))
                .collect(),
        };
        let _ = write!(
            out,
            "  {root}%{} = {} {}({})",
            i.name,
            shape(i.shape.as_ref(), true),
            i.opcode,
            operands.join(", ")
        );
        attributes(out, i, names);
        out.push('\n');
    }
    out.push_str("}\n");
}

/// What else an instruction says, each after a comma.
fn attributes(out: &mut String, i: &HloInstructionProto, names: &Names<'_>) {
    let mut say = |name: &str, value: &str| _ = write!(out, ", {name}={value}");
    if !i.dimensions.is_empty() || matches!(i.opcode.as_str(), "broadcast" | "reduce") {
        say("dimensions", &list(&i.dimensions));
    }
    if i.opcode == "get-tuple-element" {
        say("index", &i.tuple_index.to_string());
    }
    if let Some(d) = &i.dot_dimension_numbers {
        let both = [
            ("lhs_batch_dims", &d.lhs_batch_dimensions),
            ("lhs_contracting_dims", &d.lhs_contracting_dimensions),
            ("rhs_batch_dims", &d.rhs_batch_dimensions),
            ("rhs_contracting_dims", &d.rhs_contracting_dimensions),
        ];
        both.iter().filter(|(_, dims)| !dims.is_empty()).for_each(|(name, dims)| say(name, &list(dims)));
    }
    if let Some(w) = i.window.as_ref().filter(|w| !w.dimensions.is_empty()) {
        let each = |f: &dyn Fn(&oxitorch_proto::hlo::WindowDimension) -> String| {
            w.dimensions.iter().map(f).collect::<Vec<_>>().join("x")
        };
        let mut text = format!("size={}", each(&|d| d.size.to_string()));
        if w.dimensions.iter().any(|d| d.stride != 1) {
            let _ = write!(text, " stride={}", each(&|d| d.stride.to_string()));
        }
        if w.dimensions.iter().any(|d| (d.padding_low, d.padding_high) != (0, 0)) {
            let _ = write!(text, " pad={}", each(&|d| format!("{}_{}", d.padding_low, d.padding_high)));
        }
        say("window", &format!("{{{text}}}"));
    }
    if !i.slice_dimensions.is_empty() {
        let one = |d: &oxitorch_proto::hlo::SliceDimensions| match d.stride {
            0 | 1 => format!("[{}:{}]", d.start, d.limit),
            stride => format!("[{}:{}:{stride}]", d.start, d.limit),
        };
        say("slice", &format!("{{{}}}", i.slice_dimensions.iter().map(one).collect::<Vec<_>>().join(", ")));
    }
    if !i.dynamic_slice_sizes.is_empty() {
        say("dynamic_slice_sizes", &list(&i.dynamic_slice_sizes));
    }
    if let Some(p) = &i.padding_config {
        let one = |d: &oxitorch_proto::hlo::PaddingConfigDimension| match d.interior_padding {
            0 => format!("{}_{}", d.edge_padding_low, d.edge_padding_high),
            between => format!("{}_{}_{between}", d.edge_padding_low, d.edge_padding_high),
        };
        say("padding", &p.dimensions.iter().map(one).collect::<Vec<_>>().join("x"));
    }
    if !i.comparison_direction.is_empty() {
        say("direction", &i.comparison_direction);
    }
    if !i.custom_call_target.is_empty() {
        say("custom_call_target", &format!("{:?}", i.custom_call_target));
    }
    if !i.fusion_kind.is_empty() {
        say("kind", &i.fusion_kind);
    }
    if !i.called_computation_ids.is_empty() {
        let called: Vec<String> = i
            .called_computation_ids
            .iter()
            .map(|id| format!("%{}", names.computations.get(id).unwrap_or(&"?")))
            .collect();
        say(
            "calls",
            &if called.len() == 1 { called[0].clone() } else { format!("{{{}}}", called.join(", ")) },
        );
    }
    if let Some(name) = i.metadata.as_ref().map(|m| &m.op_name).filter(|n| !n.is_empty()) {
        say("metadata", &format!("{{op_name={name:?}}}"));
    }
    if let Ok(config) = std::str::from_utf8(&i.backend_config)
        && !config.is_empty()
    {
        say("backend_config", config);
    }
}

fn list(dims: &[i64]) -> String {
    let dims: Vec<String> = dims.iter().map(i64::to_string).collect();
    format!("{{{}}}", dims.join(","))
}

/// Names by `PrimitiveType`.
const TYPES: [&str; 19] = [
    "invalid", "pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "f32", "f64", "tuple",
    "opaque", "c64", "bf16", "token", "c128",
];

pub(crate) fn shape(shape: Option<&ShapeProto>, with_layout: bool) -> String {
    let Some(s) = shape else { return "?".to_owned() };
    let name = match s.element_type {
        13 => {
            let all: Vec<String> = s.tuple_shapes.iter().map(|s| self::shape(Some(s), with_layout)).collect();
            return format!("({})", all.join(", "));
        }
        19 => "f8e5m2",
        20 => "f8e4m3fn",
        21 => "s4",
        22 => "u4",
        other => usize::try_from(other).ok().and_then(|i| TYPES.get(i)).copied().unwrap_or("other"),
    };
    let dims: Vec<String> = s.dimensions.iter().map(i64::to_string).collect();
    let layout = s.layout.as_ref().filter(|l| with_layout && !l.minor_to_major.is_empty());
    format!("{name}[{}]{}", dims.join(","), layout.map_or_else(String::new, |l| list(&l.minor_to_major)))
}

fn literal(l: &LiteralProto) -> String {
    fn some<T: ToString>(values: &[T]) -> Option<String> {
        let shown: Vec<String> = values.iter().take(SHOWN).map(T::to_string).collect();
        match values.len() {
            0 => None,
            1 => Some(shown.concat()),
            n if n > SHOWN => Some("{...}".to_owned()),
            _ => Some(format!("{{{}}}", shown.join(", "))),
        }
    }
    some(&l.preds)
        .or_else(|| some(&l.s32s))
        .or_else(|| some(&l.s64s))
        .or_else(|| some(&l.u32s))
        .or_else(|| some(&l.u64s))
        .or_else(|| some(&l.f32s))
        .or_else(|| some(&l.f64s))
        .unwrap_or_else(|| "{...}".to_owned())
}
