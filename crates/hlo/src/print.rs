//! Modules as StableHLO text, in the spellings of StableHLO 1.13 (the oldest reader in use).
//!
//! Dead code is left out and values are numbered in print order, so the text is a function of the live ops alone.
//! Constants are printed in every block that uses them, just before the first use there: regions of `reduce`, `sort` and
//! `scatter` may not read outer values.

use crate::ir::*;
use crate::literal::{push_elements, push_int, push_string};
use crate::sharding::{ReplicaGroups, Sharding};
use crate::types::TensorType;

/// What the printed text contains besides the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrintOptions<'a> {
    /// What the numbers of [`Builder::set_location`](crate::Builder::set_location) stand for. Ops without one have no
    /// location.
    pub locations: &'a [Location],
}

/// Where an op comes from. XLA hands it on to what becomes of the op, as the metadata of its instructions.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Location {
    /// What it is called there.
    pub name: String,
    /// File and line.
    pub line: Option<(String, u32)>,
}

impl Module {
    /// The program as MLIR text, without locations.
    pub fn to_text(&self) -> String {
        self.to_text_with(PrintOptions::default())
    }

    /// The program as MLIR text.
    pub fn to_text_with(&self, options: PrintOptions<'_>) -> String {
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

impl Module {
    /// For each parameter, whether the program reads it.
    pub fn used_params(&self) -> Vec<bool> {
        let mut used = vec![false; self.arena.params.len()];
        let mut mark = |v: &Value| {
            if let Def::Param(index) = self.arena.values[v.0 as usize].def {
                used[index as usize] = true;
            }
        };
        self.outputs.iter().for_each(&mut mark);
        for (op, live) in self.arena.ops.iter().zip(live_ops(&self.arena, &self.outputs)) {
            if live {
                op.operands.iter().for_each(&mut mark);
                let returns = |r: &BlockId| self.arena.blocks[*r as usize].returns.iter();
                op.regions.iter().flat_map(returns).for_each(&mut mark);
            }
        }
        used
    }
}

impl Module {
    /// Whether XLA fuses all that the first so many results need into what reads them, so that they need no memory of
    /// their own.
    pub fn is_fusible(&self, results: usize) -> bool {
        let live = live_ops(&self.arena, &self.outputs[..results.min(self.outputs.len())]);
        self.arena.ops.iter().zip(live).all(|(op, live)| !live || op.op.is_fusible())
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
    options: PrintOptions<'a>,
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
        self.s(" {\n");
        if let Some(mesh) = &module.arena.mesh {
            self.s("  sdy.mesh @mesh = ");
            self.s(&mesh.to_string());
            self.s("\n");
        }
        self.s("  func.func public @main(");
        for (i, &v) in module.arena.params.iter().enumerate() {
            if i > 0 {
                self.s(", ");
            }
            self.names[v.0 as usize] = Name { number: i as u32, result: ARG };
            self.value(v);
            self.s(": ");
            self.value_ty(v);
            if let Some(attrs) = module.arena.param_attrs.get(i).filter(|a| !a.is_empty()) {
                self.param_attrs(attrs, self.arena.ty(v).rank());
            }
        }
        self.s(") -> (");
        self.comma_list(module.outputs.iter().enumerate(), |p, (i, &v)| {
            p.value_ty(v);
            if let Some(sharding) = module.output_shardings.get(i) {
                p.s(" {");
                p.sharding_attr(sharding, p.arena.ty(v).rank());
                p.s("}");
            } else if module.host_outputs.contains(&i) {
                p.s(" {");
                p.memory_attr(MemorySpace::PinnedHost);
                p.s("}");
            }
        });
        self.s(") {");
        self.block_body(ROOT, &module.outputs, "return");
        self.s("\n  }\n}\n");
        for (i, location) in self.options.locations.iter().enumerate() {
            self.location(i, location);
        }
    }

    /// `#op3 = loc("name"("file.py":12:0))`
    fn location(&mut self, number: usize, location: &Location) {
        self.s("#op");
        self.int(number as i64);
        self.s(" = loc(");
        push_string(&mut self.out, &location.name);
        if let Some((file, line)) = &location.line {
            self.s("(");
            push_string(&mut self.out, file);
            self.s(":");
            self.int(i64::from(*line));
            self.s(":0)");
        }
        self.s(")\n");
    }

    /// `sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>`
    fn sharding_attr(&mut self, sharding: &Sharding, rank: usize) {
        self.s("sdy.sharding = #sdy.sharding");
        self.s(&sharding.text(rank));
    }

    /// `mhlo.memory_kind = "pinned_host"`
    fn memory_attr(&mut self, memory: MemorySpace) {
        self.s("mhlo.memory_kind = \"");
        self.s(memory.kind());
        self.s("\"");
    }

    fn param_attrs(&mut self, attrs: &[ArgAttr], rank: usize) {
        self.s(" {");
        self.comma_list(attrs, |p, attr| match attr {
            ArgAttr::Donor => p.s("jax.buffer_donor = true"),
            ArgAttr::AliasingOutput(n) => {
                p.s("tf.aliasing_output = ");
                p.int(i64::from(*n));
                p.s(" : i32");
            }
            ArgAttr::Sharding(sharding) => p.sharding_attr(sharding, rank),
            ArgAttr::Memory(memory) => p.memory_attr(*memory),
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
        if data.location > 0 && data.location as usize <= self.options.locations.len() {
            self.s(" loc(#op");
            self.int(i64::from(data.location) - 1);
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
    /// `"name"(%a, %b)`
    fn head_of(&mut self, data: &OpData) {
        self.s("\"");
        self.s(data.op.name());
        self.s("\"(");
        self.values(&data.operands);
        self.s(")");
    }

    fn generic(&mut self, data: &OpData, attrs: impl FnOnce(&mut Self)) {
        self.head_of(data);
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
        match &data.op {
            Op::Unary(u) => self.unary(*u, data),
            Op::Binary(b) => self.binary(*b, data),
            Op::Compare(direction, kind) => self.compare(data, *direction, *kind),
            Op::Select => self.select(data),
            Op::Clamp => self.clamp(data),
            Op::Complex => self.typed(data, |_| ()),
            Op::Convert | Op::BitcastConvert | Op::Reshape | Op::DynamicUpdateSlice => {
                self.signed(data, |_| ())
            }
            Op::ReducePrecision { exponent_bits, mantissa_bits } => self.typed(data, |p| {
                p.keyed(", format = e", i64::from(*exponent_bits));
                p.keyed("m", i64::from(*mantissa_bits));
            }),
            Op::Iota(dim) => self.typed(data, |p| p.keyed("dim = ", *dim)),
            Op::BroadcastInDim(dims) | Op::Transpose(dims) => {
                self.signed(data, |p| p.keyed_dims(", dims = ", dims))
            }
            Op::DynamicSlice(sizes) => self.signed(data, |p| p.keyed_dims(", sizes = ", sizes)),
            Op::Reverse(dims) => self.typed(data, |p| p.keyed_dims(", dims = ", dims)),
            Op::Slice(bounds) => self.signed(data, |p| p.slice(bounds)),
            Op::Pad(c) => self.signed(data, |p| {
                p.keyed_dims(", low = ", &c.low);
                p.keyed_dims(", high = ", &c.high);
                p.keyed_dims(", interior = ", &c.interior);
            }),
            Op::Concatenate(dim) => self.signed(data, |p| p.keyed(", dim = ", *dim)),
            Op::DotGeneral(dot) => self.signed(data, |p| p.dot_general(&dot.0, dot.1)),
            Op::Convolution(conv) => self.convolution(data, conv),
            Op::Cholesky { lower } => {
                self.typed(data, |p| p.s(if *lower { ", lower = true" } else { ", lower = false" }))
            }
            Op::TriangularSolve(flags) => self.generic(data, |p| p.triangular_solve(flags)),
            Op::Fft(kind, length) => self.signed(data, |p| {
                p.s(", type = ");
                p.s(kind.name());
                p.keyed_dims(", length = ", length);
            }),
            Op::Gather(attrs, sorted) => self.generic(data, |p| p.gather(&attrs.0, &attrs.1, *sorted)),
            Op::Scatter(dims, flags) => self.generic(data, |p| p.scatter(dims, *flags)),
            Op::Reduce(dims) => self.reduce(data, dims),
            Op::ReduceWindow(window) => self.generic(data, |p| p.window(window, true)),
            Op::SelectAndScatter(window) => self.generic(data, |p| p.window(window, false)),
            Op::Sort { dimension, is_stable } => self.generic(data, |p| {
                p.keyed("dimension = ", *dimension);
                p.s(" : i64, is_stable = ");
                p.bool(*is_stable);
            }),
            Op::TopK(k) => self.generic(data, |p| {
                p.keyed("k = ", *k);
                p.s(" : i64");
            }),
            Op::While | Op::If | Op::Case | Op::OptimizationBarrier | Op::Deferred(_) => {
                self.generic(data, |_| ());
            }
            Op::RngBitGenerator(algorithm) => self.signed(data, |p| {
                p.s(", algorithm = ");
                p.s(algorithm.name());
            }),
            Op::AnnotateDevicePlacement(memory) => self.placement(data, *memory),
            Op::CustomCall(call) => self.generic(data, |p| p.custom_call(call, data.results)),
            Op::Collective(c) => self.generic(data, |p| p.collective(c.0, &c.1)),
            Op::CollectivePermute(pairs) => self.generic(data, |p| {
                p.s("source_target_pairs = dense<");
                if !pairs.is_empty() {
                    p.pairs(pairs);
                }
                p.keyed("> : tensor<", pairs.len() as i64);
                p.s("x2xi64>");
            }),
            Op::ShardingConstraint(sharding) => {
                let rank = self.arena.ty(data.operands[0]).rank();
                self.typed(data, |p| {
                    p.s(" ");
                    p.s(&sharding.text(rank));
                });
            }
        }
    }

    /// `name %a, %b<attributes> : result type`
    fn typed(&mut self, data: &OpData, attrs: impl FnOnce(&mut Self)) {
        self.head(data);
        attrs(self);
        self.s(" : ");
        self.value_ty(Value(data.first_result));
    }

    /// `name %a, %b<attributes> : (operand types) -> result types`
    fn signed(&mut self, data: &OpData, attrs: impl FnOnce(&mut Self)) {
        self.head(data);
        attrs(self);
        self.signature(data);
    }

    fn keyed(&mut self, key: &str, v: i64) {
        self.s(key);
        self.int(v);
    }

    fn keyed_dims(&mut self, key: &str, dims: &[i64]) {
        self.s(key);
        self.dims(dims);
    }

    fn select(&mut self, data: &OpData) {
        self.head(data);
        self.s(" : ");
        self.value_ty(data.operands[0]);
        self.s(", ");
        self.value_ty(Value(data.first_result));
    }

    /// The short form says one type for all operands.
    fn clamp(&mut self, data: &OpData) {
        let ty = |i: usize| self.arena.ty(data.operands[i]);
        if ty(0) == ty(1) && ty(2) == ty(1) { self.typed(data, |_| ()) } else { self.generic(data, |_| ()) }
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

    fn slice(&mut self, b: &SliceBounds) {
        self.s(" [");
        self.comma_list(0..b.start.len(), |p, i| {
            p.int(b.start[i]);
            p.keyed(":", b.limit[i]);
            if b.strides[i] != 1 {
                p.keyed(":", b.strides[i]);
            }
        });
        self.s("]");
    }

    fn dot_general(&mut self, d: &DotDims, precision: Precision) {
        if !d.lhs_batching.is_empty() {
            self.keyed_dims(", batching_dims = ", &d.lhs_batching);
            self.keyed_dims(" x ", &d.rhs_batching);
        }
        self.keyed_dims(", contracting_dims = ", &d.lhs_contracting);
        self.keyed_dims(" x ", &d.rhs_contracting);
        self.s(", precision = [");
        self.comma_list([precision; 2], |p, x| p.s(x.name()));
        self.s("]");
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
            self.keyed_dims("stride = ", &c.strides);
            self.s(", pad = ");
            self.pairs(&c.padding);
            self.keyed_dims(", lhs_dilate = ", &c.lhs_dilation);
            self.keyed_dims(", rhs_dilate = ", &c.rhs_dilation);
            self.s(", reverse = [");
            self.comma_list(&c.reversal, |p, &r| p.bool(r));
            self.s("]");
        }
        self.keyed("} {batch_group_count = ", c.batch_group_count);
        self.keyed(" : i64, feature_group_count = ", c.feature_group_count);
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
        self.keyed("index_vector_dim = ", d.index_vector_dim);
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
        self.keyed("index_vector_dim = ", d.index_vector_dim);
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

    fn collective(&mut self, what: Collective, groups: &ReplicaGroups) {
        match what {
            Collective::AllReduce | Collective::ReduceScatter(_) => {}
            Collective::AllGather(dim) => {
                self.keyed("all_gather_dim = ", dim);
                self.s(" : i64, ");
            }
            Collective::AllToAll { concat, .. } => {
                self.keyed("concat_dimension = ", concat);
                self.s(" : i64, ");
            }
        }
        self.s("replica_groups = dense<[");
        self.comma_list(groups.groups(), |p, group| p.dims(group));
        self.keyed("]> : tensor<", groups.groups().len() as i64);
        self.keyed("x", groups.size() as i64);
        self.s("xi64>");
        match what {
            Collective::AllReduce | Collective::AllGather(_) => {}
            Collective::ReduceScatter(dim) => {
                self.keyed(", scatter_dimension = ", dim);
                self.s(" : i64");
            }
            Collective::AllToAll { split, .. } => {
                self.keyed(", split_count = ", groups.size() as i64);
                self.keyed(" : i64, split_dimension = ", split);
                self.s(" : i64");
            }
        }
    }

    /// `"stablehlo.custom_call"(%0) <{...}> {mhlo.frontend_attributes = {...}} : ...`
    fn placement(&mut self, data: &OpData, memory: MemorySpace) {
        self.head_of(data);
        self.s(" <{api_version = 1 : i32, call_target_name = \"");
        self.s(PLACEMENT_TARGET);
        self.s("\", has_side_effect = true}> {mhlo.frontend_attributes = {_xla_buffer_placement = \"");
        self.s(memory.kind());
        self.s("\"}}");
        self.signature(data);
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
