//! Modules as StableHLO text, in the spellings of StableHLO 1.13 (the oldest reader in use).
//!
//! Dead code is left out and values are numbered in print order, so the text is a function of the live ops alone.
//! Constants are printed in every block that uses them, just before the first use there: regions of `reduce`, `sort` and
//! `scatter` may not read outer values.

use crate::builder::decode_f8;
use crate::ir::*;
use crate::types::{DType, TensorType};

/// What the printed text contains besides the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrintOptions {
    /// Write `loc("...")` after every op that was pushed under [`Builder::set_location`](crate::Builder::set_location).
    pub locations: bool,
}

impl Module {
    /// The program as MLIR text, without locations.
    pub fn to_text(&self) -> String {
        self.to_text_with(PrintOptions::default())
    }

    /// The program as MLIR text.
    pub fn to_text_with(&self, options: PrintOptions) -> String {
        let live = live_ops(&self.arena, &self.outputs);
        let count = live.iter().filter(|&&l| l).count();
        let names = vec![Name::NONE; self.arena.values.len()];
        let out = String::with_capacity(256 + 96 * count);
        let mut p =
            Printer { arena: &self.arena, options, live, out, names, next: 0, indent: 2, local: Vec::new() };
        p.module(self);
        p.out
    }

    /// How many ops would be printed, regions included.
    pub fn live_op_count(&self) -> usize {
        live_ops(&self.arena, &self.outputs).iter().filter(|&&l| l).count()
    }
}

/// Which ops are needed for the outputs or have a side effect.
fn live_ops(arena: &Arena, outputs: &[Value]) -> Vec<bool> {
    let mut live = vec![false; arena.ops.len()];
    let mark = |live: &mut Vec<bool>, v: Value| {
        if let Def::Op(id) = arena.values[v.0 as usize].def {
            live[id as usize] = true;
        }
    };
    for &v in outputs {
        mark(&mut live, v);
    }
    // An op comes after its operands and after the ops of its regions, so a walk forwards carries side effects out of
    // regions and a walk backwards carries liveness to operands.
    let mut effects = Vec::new();
    for (id, data) in arena.ops.iter().enumerate() {
        let inside =
            |r: &BlockId| arena.blocks[*r as usize].ops.iter().any(|o| effects.binary_search(o).is_ok());
        if data.op.has_side_effect() || data.regions.iter().any(inside) {
            effects.push(id as OpId);
            live[id] = true;
        }
    }
    for id in (0..arena.ops.len()).rev() {
        if !live[id] {
            continue;
        }
        let data = &arena.ops[id];
        for &v in &data.operands {
            mark(&mut live, v);
        }
        for &r in &data.regions {
            for &v in &arena.blocks[r as usize].returns {
                mark(&mut live, v);
            }
        }
    }
    live
}

/// The printed name of a value: `%number`, `%number#result` or `%argnumber`.
#[derive(Clone, Copy)]
struct Name {
    number: u32,
    /// Result position plus one for results of multi-result ops; 0 for the rest; `ARG` for parameters.
    result: u32,
}

const ARG: u32 = u32::MAX;

impl Name {
    const NONE: Name = Name { number: u32::MAX, result: 0 };

    fn is_none(self) -> bool {
        self.number == u32::MAX
    }
}

struct Printer<'a> {
    arena: &'a Arena,
    options: PrintOptions,
    live: Vec<bool>,
    out: String,
    names: Vec<Name>,
    next: u32,
    indent: usize,
    /// Constants named in the block being printed.
    local: Vec<Value>,
}

impl Printer<'_> {
    // ---- text

    fn s(&mut self, text: &str) {
        self.out.push_str(text);
    }

    fn int(&mut self, v: i64) {
        push_int(&mut self.out, v);
    }

    fn bool(&mut self, v: bool) {
        self.s(if v { "true" } else { "false" });
    }

    fn comma_list<T>(&mut self, items: impl IntoIterator<Item = T>, mut each: impl FnMut(&mut Self, T)) {
        for (i, item) in items.into_iter().enumerate() {
            if i > 0 {
                self.s(", ");
            }
            each(self, item);
        }
    }

    /// `[1, 2]`
    fn dims(&mut self, dims: &[i64]) {
        self.s("[");
        self.comma_list(dims, |p, &d| p.int(d));
        self.s("]");
    }

    /// `array<i64: 1, 2>`
    fn array(&mut self, dims: &[i64]) {
        self.s("array<i64");
        if !dims.is_empty() {
            self.s(": ");
            self.comma_list(dims, |p, &d| p.int(d));
        }
        self.s(">");
    }

    /// `[[0, 1], [2, 3]]`
    fn pairs(&mut self, padding: &[(i64, i64)]) {
        self.s("[");
        self.comma_list(padding, |p, &(low, high)| p.dims(&[low, high]));
        self.s("]");
    }

    fn ty(&mut self, ty: &TensorType) {
        self.s("tensor<");
        for &d in &ty.shape {
            self.int(d);
            self.s("x");
        }
        self.s(ty.dtype.hlo_name());
        self.s(">");
    }

    fn value_ty(&mut self, v: Value) {
        let arena = self.arena;
        self.ty(arena.ty(v));
    }

    fn value(&mut self, v: Value) {
        let name = self.names[v.0 as usize];
        self.s(if name.result == ARG { "%arg" } else { "%" });
        self.int(i64::from(name.number));
        if name.result != 0 && name.result != ARG {
            self.s("#");
            self.int(i64::from(name.result) - 1);
        }
    }

    fn values(&mut self, vs: &[Value]) {
        self.comma_list(vs, |p, &v| p.value(v));
    }

    fn newline(&mut self) {
        self.s("\n");
        for _ in 0..self.indent {
            self.s("  ");
        }
    }

    fn fresh(&mut self) -> u32 {
        self.next += 1;
        self.next - 1
    }

    // ---- structure

    fn module(&mut self, module: &Module) {
        self.s("module @");
        self.s(&module.name);
        self.s(" {\n  func.func public @main(");
        for (i, &v) in module.arena.params.iter().enumerate() {
            if i > 0 {
                self.s(", ");
            }
            self.names[v.0 as usize] = Name { number: i as u32, result: ARG };
            self.value(v);
            self.s(": ");
            self.value_ty(v);
            if let Some(attrs) = module.arena.param_attrs.get(i).filter(|a| !a.is_empty()) {
                self.param_attrs(attrs);
            }
        }
        self.s(") -> (");
        self.comma_list(&module.outputs, |p, &v| p.value_ty(v));
        self.s(") {");
        self.block_body(ROOT, &module.outputs, "return");
        self.s("\n  }\n}\n");
    }

    fn param_attrs(&mut self, attrs: &[ArgAttr]) {
        self.s(" {");
        self.comma_list(attrs, |p, attr| match attr {
            ArgAttr::Donor => p.s("jax.buffer_donor = true"),
            ArgAttr::AliasingOutput(n) => {
                p.s("tf.aliasing_output = ");
                p.int(i64::from(*n));
                p.s(" : i32");
            }
            ArgAttr::Other(text) => p.s(text),
        });
        self.s("}");
    }

    /// The ops of a block and its terminator. Constants named inside get their outer names back at the end.
    fn block_body(&mut self, id: BlockId, returns: &[Value], terminator: &str) {
        let arena = self.arena;
        let outer: Vec<Value> = std::mem::take(&mut self.local);
        let saved: Vec<Name> = outer.iter().map(|&v| self.names[v.0 as usize]).collect();
        for &v in &outer {
            self.names[v.0 as usize] = Name::NONE;
        }
        for &op in &arena.blocks[id as usize].ops {
            if self.live[op as usize] {
                let data = &arena.ops[op as usize];
                self.constants(&data.operands);
                self.newline();
                self.op(data);
            }
        }
        self.constants(returns);
        self.newline();
        self.s(terminator);
        if !returns.is_empty() {
            self.s(" ");
            self.values(returns);
            self.s(" : ");
            self.comma_list(returns, |p, &v| p.value_ty(v));
        }
        for v in std::mem::replace(&mut self.local, outer) {
            self.names[v.0 as usize] = Name::NONE;
        }
        for (i, name) in saved.into_iter().enumerate() {
            let v = self.local[i];
            self.names[v.0 as usize] = name;
        }
    }

    /// Prints the constants among `vs` that this block has not printed yet.
    fn constants(&mut self, vs: &[Value]) {
        let arena = self.arena;
        for &v in vs {
            let data = &arena.values[v.0 as usize];
            let Def::Constant(id) = data.def else { continue };
            if !self.names[v.0 as usize].is_none() {
                continue;
            }
            self.names[v.0 as usize] = Name { number: self.fresh(), result: 0 };
            self.local.push(v);
            self.newline();
            self.value(v);
            self.s(" = stablehlo.constant dense<");
            push_elements(&mut self.out, &data.ty, &arena.constants[id as usize]);
            self.s("> : ");
            self.ty(&data.ty);
        }
    }

    fn op(&mut self, data: &OpData) {
        let number = if data.results > 0 { self.fresh() } else { 0 };
        for (i, v) in data.result_values().enumerate() {
            let result = if data.results == 1 { 0 } else { i as u32 + 1 };
            self.names[v.0 as usize] = Name { number, result };
        }
        if data.results > 0 {
            self.s("%");
            self.int(i64::from(number));
            if data.results > 1 {
                self.s(":");
                self.int(i64::from(data.results));
            }
            self.s(" = ");
        }
        self.op_body(data);
        if self.options.locations && data.location > 0 {
            let arena = self.arena;
            self.s(" loc(");
            push_string(&mut self.out, &arena.locations[data.location as usize - 1]);
            self.s(")");
        }
    }

    /// `(operand types) -> result types`
    fn signature(&mut self, data: &OpData) {
        self.s(" : (");
        self.comma_list(&data.operands, |p, &v| p.value_ty(v));
        self.s(") -> ");
        self.result_types(data);
    }

    fn result_types(&mut self, data: &OpData) {
        let plain = data.results == 1;
        self.s(if plain { "" } else { "(" });
        self.comma_list(data.result_values(), |p, v| p.value_ty(v));
        self.s(if plain { "" } else { ")" });
    }

    /// `name %a, %b`
    fn head(&mut self, data: &OpData) {
        self.s(data.op.name());
        self.s(" ");
        self.values(&data.operands);
    }

    /// `"name"(%a, %b) <{attributes}>`; attributes that are all absent leave nothing behind.
    fn generic(&mut self, data: &OpData, attrs: impl FnOnce(&mut Self)) {
        self.s("\"");
        self.s(data.op.name());
        self.s("\"(");
        self.values(&data.operands);
        self.s(")");
        let before = self.out.len();
        self.s(" <{");
        let start = self.out.len();
        attrs(self);
        if self.out.len() == start {
            self.out.truncate(before);
        } else {
            self.s("}>");
        }
        self.regions(data);
        self.signature(data);
    }

    fn regions(&mut self, data: &OpData) {
        if data.regions.is_empty() {
            return;
        }
        self.s(" (");
        self.comma_list(&data.regions, |p, &r| p.region(r));
        self.s(")");
    }

    fn region(&mut self, id: BlockId) {
        let arena = self.arena;
        let block = &arena.blocks[id as usize];
        self.s("{");
        if !block.args.is_empty() {
            self.newline();
            self.s("^bb0(");
            for (i, &arg) in block.args.iter().enumerate() {
                self.names[arg.0 as usize] = Name { number: self.fresh(), result: 0 };
                self.s(if i > 0 { ", " } else { "" });
                self.value(arg);
                self.s(": ");
                self.value_ty(arg);
            }
            self.s("):");
        }
        self.indent += 1;
        self.block_body(id, &block.returns, "stablehlo.return");
        self.indent -= 1;
        self.newline();
        self.s("}");
    }

    // ---- ops

    fn op_body(&mut self, data: &OpData) {
        let result = Value(data.first_result);
        match &data.op {
            Op::Unary(u) => self.unary(*u, data),
            Op::Binary(b) => self.binary(*b, data),
            Op::Compare(direction, kind) => self.compare(data, *direction, *kind),
            Op::Select | Op::Clamp if self.is_select_regular(data) => {
                self.head(data);
                self.s(" : ");
                if matches!(data.op, Op::Select) {
                    self.value_ty(data.operands[0]);
                    self.s(", ");
                }
                self.value_ty(result);
            }
            Op::Select | Op::Clamp => self.generic(data, |_| ()),
            Op::Complex | Op::DynamicUpdateSlice | Op::Convert | Op::BitcastConvert | Op::Reshape => {
                self.head(data);
                match data.op {
                    Op::Complex => {
                        self.s(" : ");
                        self.value_ty(result);
                    }
                    _ => self.signature(data),
                }
            }
            Op::ReducePrecision { exponent_bits, mantissa_bits } => {
                self.head(data);
                self.s(", format = e");
                self.int(i64::from(*exponent_bits));
                self.s("m");
                self.int(i64::from(*mantissa_bits));
                self.s(" : ");
                self.value_ty(result);
            }
            Op::Iota(dim) => {
                self.s("stablehlo.iota dim = ");
                self.int(*dim);
                self.s(" : ");
                self.value_ty(result);
            }
            Op::BroadcastInDim(dims) | Op::Transpose(dims) => self.with_dims(data, ", dims = ", dims),
            Op::DynamicSlice(sizes) => self.with_dims(data, ", sizes = ", sizes),
            Op::Reverse(dims) => {
                self.head(data);
                self.s(", dims = ");
                self.dims(dims);
                self.s(" : ");
                self.value_ty(result);
            }
            Op::Slice(bounds) => self.slice(data, bounds),
            Op::Pad(config) => self.pad(data, config),
            Op::Concatenate(dim) => {
                self.head(data);
                self.s(", dim = ");
                self.int(*dim);
                self.signature(data);
            }
            Op::DotGeneral(dot) => self.dot_general(data, &dot.0, dot.1),
            Op::Convolution(conv) => self.convolution(data, conv),
            Op::Cholesky { lower } => {
                self.head(data);
                self.s(", lower = ");
                self.bool(*lower);
                self.s(" : ");
                self.value_ty(result);
            }
            Op::TriangularSolve(flags) => self.generic(data, |p| p.triangular_solve(flags)),
            Op::Fft(kind, length) => {
                self.head(data);
                self.s(", type = ");
                self.s(kind.name());
                self.with_dims_tail(data, ", length = ", length);
            }
            Op::Gather(attrs, sorted) => self.generic(data, |p| p.gather(&attrs.0, &attrs.1, *sorted)),
            Op::Scatter(dims, flags) => self.generic(data, |p| p.scatter(dims, *flags)),
            Op::Reduce(dims) => self.reduce(data, dims),
            Op::ReduceWindow(window) => self.generic(data, |p| p.window(window, true)),
            Op::SelectAndScatter(window) => self.generic(data, |p| p.window(window, false)),
            Op::Sort { dimension, is_stable } => self.generic(data, |p| {
                p.s("dimension = ");
                p.int(*dimension);
                p.s(" : i64, is_stable = ");
                p.bool(*is_stable);
            }),
            Op::TopK(k) => self.generic(data, |p| {
                p.s("k = ");
                p.int(*k);
                p.s(" : i64");
            }),
            Op::While | Op::If | Op::Case | Op::OptimizationBarrier => self.generic(data, |_| ()),
            Op::RngBitGenerator(algorithm) => {
                self.head(data);
                self.s(", algorithm = ");
                self.s(algorithm.name());
                self.signature(data);
            }
            Op::CustomCall(call) => self.generic(data, |p| p.custom_call(call, data.results)),
        }
    }

    /// Whether the short form, which leaves out repeated types, can say it.
    fn is_select_regular(&self, data: &OpData) -> bool {
        let ty = |i: usize| self.arena.ty(data.operands[i]);
        matches!(data.op, Op::Select) || (ty(0) == ty(1) && ty(2) == ty(1))
    }

    fn unary(&mut self, op: Unary, data: &OpData) {
        self.head(data);
        if op.name().starts_with("chlo.") {
            self.s(" : ");
            self.value_ty(data.operands[0]);
            self.s(" -> ");
            self.result_types(data);
        } else if op.row().result == ResultKind::Same || self.is_real_abs(op, data) {
            self.s(" : ");
            self.value_ty(data.operands[0]);
        } else {
            self.signature(data);
        }
    }

    /// `abs` of a real tensor keeps its type and takes the short form; of a complex one it does not.
    fn is_real_abs(&self, op: Unary, data: &OpData) -> bool {
        op == Unary::Abs && !self.arena.ty(data.operands[0]).dtype.is_complex()
    }

    fn binary(&mut self, op: Binary, data: &OpData) {
        self.head(data);
        self.s(" : ");
        if op.name().starts_with("chlo.") {
            self.comma_list(&data.operands, |p, &v| p.value_ty(v));
            self.s(" -> ");
        }
        self.value_ty(Value(data.first_result));
    }

    fn compare(&mut self, data: &OpData, direction: Direction, kind: CompareKind) {
        self.s("stablehlo.compare ");
        self.s(direction.name());
        self.s(", ");
        self.values(&data.operands);
        let dtype = self.arena.ty(data.operands[0]).dtype;
        self.s(match kind {
            CompareKind::TotalOrder => ", TOTALORDER",
            CompareKind::Natural if dtype.is_float() || dtype.is_complex() => ", FLOAT",
            CompareKind::Natural if dtype.is_signed() => ", SIGNED",
            CompareKind::Natural => ", UNSIGNED",
        });
        self.signature(data);
    }

    fn with_dims(&mut self, data: &OpData, key: &str, dims: &[i64]) {
        self.head(data);
        self.with_dims_tail(data, key, dims);
    }

    fn with_dims_tail(&mut self, data: &OpData, key: &str, dims: &[i64]) {
        self.s(key);
        self.dims(dims);
        self.signature(data);
    }

    fn slice(&mut self, data: &OpData, b: &SliceBounds) {
        self.head(data);
        self.s(" [");
        self.comma_list(0..b.start.len(), |p, i| {
            p.int(b.start[i]);
            p.s(":");
            p.int(b.limit[i]);
            if b.strides[i] != 1 {
                p.s(":");
                p.int(b.strides[i]);
            }
        });
        self.s("]");
        self.signature(data);
    }

    fn pad(&mut self, data: &OpData, c: &PadConfig) {
        self.head(data);
        self.s(", low = ");
        self.dims(&c.low);
        self.s(", high = ");
        self.dims(&c.high);
        self.with_dims_tail(data, ", interior = ", &c.interior);
    }

    fn dot_general(&mut self, data: &OpData, d: &DotDims, precision: Precision) {
        self.head(data);
        if !d.lhs_batching.is_empty() {
            self.s(", batching_dims = ");
            self.dims(&d.lhs_batching);
            self.s(" x ");
            self.dims(&d.rhs_batching);
        }
        self.s(", contracting_dims = ");
        self.dims(&d.lhs_contracting);
        self.s(" x ");
        self.dims(&d.rhs_contracting);
        self.s(", precision = [");
        self.comma_list([precision; 2], |p, x| p.s(x.name()));
        self.s("]");
        self.signature(data);
    }

    fn convolution(&mut self, data: &OpData, c: &Convolution) {
        let d = &c.dims;
        self.s("stablehlo.convolution(");
        self.values(&data.operands);
        self.s(") dim_numbers = ");
        self.conv_layout(&d.input_spatial, (d.input_batch, "b"), (d.input_feature, "f"));
        self.s("x");
        self.conv_layout(&d.kernel_spatial, (d.kernel_output_feature, "o"), (d.kernel_input_feature, "i"));
        self.s("->");
        self.conv_layout(&d.output_spatial, (d.output_batch, "b"), (d.output_feature, "f"));
        self.s(", window = {");
        if !c.strides.is_empty() {
            self.s("stride = ");
            self.dims(&c.strides);
            self.s(", pad = ");
            self.pairs(&c.padding);
            self.s(", lhs_dilate = ");
            self.dims(&c.lhs_dilation);
            self.s(", rhs_dilate = ");
            self.dims(&c.rhs_dilation);
            self.s(", reverse = [");
            self.comma_list(&c.reversal, |p, &r| p.bool(r));
            self.s("]");
        }
        self.s("} {batch_group_count = ");
        self.int(c.batch_group_count);
        self.s(" : i64, feature_group_count = ");
        self.int(c.feature_group_count);
        self.s(" : i64, precision_config = [");
        self.comma_list([c.precision; 2], |p, x| {
            p.s("#stablehlo<precision ");
            p.s(x.name());
            p.s(">");
        });
        self.s("]}");
        self.signature(data);
    }

    /// `[b, f, 0, 1]`: what each dimension means.
    fn conv_layout(&mut self, spatial: &[i64], first: (i64, &'static str), second: (i64, &'static str)) {
        self.s("[");
        self.comma_list(0..spatial.len() as i64 + 2, |p, dim| {
            if dim == first.0 {
                p.s(first.1);
            } else if dim == second.0 {
                p.s(second.1);
            } else if let Some(i) = spatial.iter().position(|&s| s == dim) {
                p.int(i as i64);
            }
        });
        self.s("]");
    }

    fn triangular_solve(&mut self, flags: &TriangularSolve) {
        self.s("left_side = ");
        self.bool(flags.left_side);
        self.s(", lower = ");
        self.bool(flags.lower);
        self.s(", transpose_a = #stablehlo<transpose ");
        self.s(flags.transpose_a.name());
        self.s(">, unit_diagonal = ");
        self.bool(flags.unit_diagonal);
    }

    fn named_dims(&mut self, rows: &[(&str, &[i64])]) {
        for (name, dims) in rows {
            if !dims.is_empty() {
                self.s(name);
                self.s(" = ");
                self.dims(dims);
                self.s(", ");
            }
        }
    }

    fn gather(&mut self, d: &GatherDims, sizes: &[i64], sorted: bool) {
        self.s("dimension_numbers = #stablehlo.gather<");
        self.named_dims(&[
            ("offset_dims", &d.offset_dims),
            ("collapsed_slice_dims", &d.collapsed_slice_dims),
            ("operand_batching_dims", &d.operand_batching_dims),
            ("start_indices_batching_dims", &d.start_indices_batching_dims),
            ("start_index_map", &d.start_index_map),
        ]);
        self.s("index_vector_dim = ");
        self.int(d.index_vector_dim);
        self.s(">, indices_are_sorted = ");
        self.bool(sorted);
        self.s(", slice_sizes = ");
        self.array(sizes);
    }

    fn scatter(&mut self, d: &ScatterDims, flags: ScatterFlags) {
        self.s("indices_are_sorted = ");
        self.bool(flags.indices_are_sorted);
        self.s(", scatter_dimension_numbers = #stablehlo.scatter<");
        self.named_dims(&[
            ("update_window_dims", &d.update_window_dims),
            ("inserted_window_dims", &d.inserted_window_dims),
            ("input_batching_dims", &d.input_batching_dims),
            ("scatter_indices_batching_dims", &d.scatter_indices_batching_dims),
            ("scatter_dims_to_operand_dims", &d.scatter_dims_to_operand_dims),
        ]);
        self.s("index_vector_dim = ");
        self.int(d.index_vector_dim);
        self.s(">, unique_indices = ");
        self.bool(flags.unique_indices);
    }

    fn reduce(&mut self, data: &OpData, dims: &[i64]) {
        let Some(name) = self.single_op_reducer(data) else {
            return self.generic(data, |p| {
                p.s("dimensions = ");
                p.array(dims);
            });
        };
        self.s("stablehlo.reduce(");
        self.value(data.operands[0]);
        self.s(" init: ");
        self.value(data.operands[1]);
        self.s(") applies ");
        self.s(name);
        self.s(" across dimensions = ");
        self.dims(dims);
        self.signature(data);
    }

    /// The op's name if the reducer is one binary op on its two arguments in order.
    fn single_op_reducer(&self, data: &OpData) -> Option<&'static str> {
        let block = &self.arena.blocks[*data.regions.first()? as usize];
        let [id] = block.ops[..] else { return None };
        let inner = &self.arena.ops[id as usize];
        let simple = inner.operands[..] == block.args[..]
            && block.args.len() == 2
            && block.returns[..] == [Value(inner.first_result)]
            && matches!(inner.op, Op::Binary(b) if b.name().starts_with("stablehlo."));
        simple.then(|| inner.op.name())
    }

    fn window(&mut self, w: &Window, dilations: bool) {
        if dilations {
            self.s("base_dilations = ");
            self.array(&w.base_dilations);
            self.s(", ");
        }
        self.s("padding = dense<");
        if !w.padding.is_empty() {
            self.pairs(&w.padding);
        }
        self.s("> : tensor<");
        self.int(w.padding.len() as i64);
        self.s("x2xi64>");
        if dilations {
            self.s(", window_dilations = ");
            self.array(&w.window_dilations);
        }
        self.s(", window_dimensions = ");
        self.array(&w.dims);
        self.s(", window_strides = ");
        self.array(&w.strides);
    }

    fn custom_call(&mut self, call: &CustomCall, results: u32) {
        self.s("api_version = 4 : i32, backend_config = {");
        self.s(&call.backend_config);
        self.s("}, call_target_name = ");
        push_string(&mut self.out, &call.target);
        self.s(", has_side_effect = ");
        self.bool(call.has_side_effect);
        if !call.output_operand_aliases.is_empty() {
            self.s(", output_operand_aliases = [");
            self.comma_list(&call.output_operand_aliases, |p, &(output, operand)| {
                p.s("#stablehlo.output_operand_alias<output_tuple_indices = ");
                p.dims(if results == 1 { &[] } else { std::slice::from_ref(&output) });
                p.s(", operand_index = ");
                p.int(operand);
                p.s(", operand_tuple_indices = []>");
            });
            self.s("]");
        }
    }
}

// ---- literals

fn push_int(out: &mut String, v: i64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    let mut rest = v.unsigned_abs();
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    if v < 0 {
        out.push('-');
    }
    out.extend(digits[at..].iter().map(|&d| d as char));
}

fn push_hex(out: &mut String, bytes: impl Iterator<Item = u8>) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for b in bytes {
        out.push(DIGITS[usize::from(b >> 4)] as char);
        out.push(DIGITS[usize::from(b & 15)] as char);
    }
}

/// A quoted MLIR string.
fn push_string(out: &mut String, text: &str) {
    out.push('"');
    for b in text.bytes() {
        match b {
            b'"' | b'\\' | 0..0x20 | 0x7f.. => {
                out.push('\\');
                push_hex(out, std::iter::once(b));
            }
            _ => out.push(b as char),
        }
    }
    out.push('"');
}

/// What stands inside `dense<>`.
fn push_elements(out: &mut String, ty: &TensorType, data: &Constant) {
    match data {
        _ if ty.numel() == 0 => (),
        Constant::Splat(bytes) => push_element(out, ty.dtype, bytes),
        // MLIR packs i1 in hex differently from version to version; words are unambiguous.
        Constant::Dense(bytes) if ty.dtype == DType::Pred => push_nested_bools(out, &ty.shape, bytes),
        Constant::Dense(bytes) => {
            out.reserve(bytes.len() * 2 + 8);
            out.push_str("\"0x");
            push_hex(out, bytes.iter().copied());
            out.push('"');
        }
    }
}

fn push_nested_bools(out: &mut String, shape: &[i64], bytes: &[u8]) {
    let Some((&n, inner)) = shape.split_first() else {
        return out.push_str(if bytes.first() == Some(&1) { "true" } else { "false" });
    };
    out.push('[');
    for (i, part) in bytes.chunks(bytes.len() / n.max(1) as usize).enumerate() {
        out.push_str(if i > 0 { ", " } else { "" });
        push_nested_bools(out, inner, part);
    }
    out.push(']');
}

fn push_element(out: &mut String, dtype: DType, bytes: &[u8]) {
    match dtype {
        DType::Pred => out.push_str(if bytes[0] != 0 { "true" } else { "false" }),
        DType::C64 | DType::C128 => {
            let (re, im) = bytes.split_at(bytes.len() / 2);
            out.push('(');
            push_float(out, dtype.real(), re);
            out.push_str(", ");
            push_float(out, dtype.real(), im);
            out.push(')');
        }
        _ if dtype.is_float() => push_float(out, dtype, bytes),
        _ => push_integer(out, dtype, bytes),
    }
}

fn push_integer(out: &mut String, dtype: DType, bytes: &[u8]) {
    let negative = dtype.is_signed() && bytes.last().is_some_and(|b| b & 0x80 != 0);
    let mut wide = if negative { [0xff; 8] } else { [0; 8] };
    wide[..bytes.len()].copy_from_slice(bytes);
    if dtype == DType::U64 {
        out.push_str(&u64::from_le_bytes(wide).to_string());
    } else {
        push_int(out, i64::from_le_bytes(wide));
    }
}

/// A decimal where the reader, which goes through f64, gets these very bits back; else the bits in hex.
fn push_float(out: &mut String, dtype: DType, bytes: &[u8]) {
    let exact = match dtype {
        DType::F32 => {
            let v = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            decimal(f64::from(v), format!("{v:?}"), |back| (back as f32).to_bits() == v.to_bits())
        }
        DType::F64 => {
            let mut b = [0; 8];
            b.copy_from_slice(bytes);
            let v = f64::from_le_bytes(b);
            decimal(v, format!("{v:?}"), |back| back.to_bits() == v.to_bits())
        }
        DType::F16 => {
            let v = half::f16::from_le_bytes([bytes[0], bytes[1]]);
            decimal(v.to_f64(), format!("{:?}", v.to_f64()), |back| back == v.to_f64())
        }
        DType::BF16 => {
            let v = half::bf16::from_le_bytes([bytes[0], bytes[1]]);
            decimal(v.to_f64(), format!("{:?}", v.to_f64()), |back| back == v.to_f64())
        }
        _ => {
            let (exponent, finite) = if dtype == DType::F8E5M2 { (5, 0x7b) } else { (4, 0x7e) };
            let code = bytes[0] & 0x7f;
            let v = decode_f8(code, exponent) * if bytes[0] & 0x80 != 0 { -1.0 } else { 1.0 };
            decimal(v, format!("{v:?}"), |_| code <= finite)
        }
    };
    match exact {
        Some(text) => out.push_str(&text),
        None => {
            out.push_str("0x");
            push_hex(out, bytes.iter().rev().copied());
        }
    }
}

/// `text` with the point that MLIR wants, if it is short and `same` accepts what it reads back as.
fn decimal(v: f64, text: String, same: impl Fn(f64) -> bool) -> Option<String> {
    // Longer ones are no more readable than hex, and 17 digits are the most that f64 needs.
    if !v.is_finite() || text.len() > 24 || !text.parse().is_ok_and(same) {
        return None;
    }
    if text.contains('.') {
        return Some(text);
    }
    Some(match text.split_once('e') {
        Some((mantissa, exponent)) => format!("{mantissa}.0e{exponent}"),
        None => format!("{text}.0"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_print_like_std() {
        for v in [0, 7, -1, 10, i64::MIN, i64::MAX, 1234567890] {
            let mut out = String::new();
            push_int(&mut out, v);
            assert_eq!(out, v.to_string());
        }
    }

    #[test]
    fn floats_print_exactly_or_in_hex() {
        let print = |dtype: DType, bytes: &[u8]| {
            let mut out = String::new();
            push_float(&mut out, dtype, bytes);
            out
        };
        assert_eq!(print(DType::F32, &0.1f32.to_le_bytes()), "0.1");
        assert_eq!(print(DType::F32, &1e-20f32.to_le_bytes()), "1.0e-20");
        assert_eq!(print(DType::F32, &(-0.0f32).to_le_bytes()), "-0.0");
        assert_eq!(print(DType::F32, &f32::NAN.to_le_bytes()), "0x7FC00000");
        assert_eq!(print(DType::F64, &f64::NEG_INFINITY.to_le_bytes()), "0xFFF0000000000000");
        assert_eq!(print(DType::BF16, &half::bf16::from_f32(1.5).to_le_bytes()), "1.5");
        assert_eq!(print(DType::F8E4M3FN, &[0x7e]), "448.0");
        assert_eq!(print(DType::F8E4M3FN, &[0xff]), "0xFF");
        assert_eq!(print(DType::F8E5M2, &[0x7c]), "0x7C");
    }

    #[test]
    fn strings_are_escaped() {
        let mut out = String::new();
        push_string(&mut out, "a\"b\\\n\u{e9}");
        assert_eq!(out, r#""a\22b\5C\0A\C3\A9""#);
    }
}
