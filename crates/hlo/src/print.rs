//! Modules as StableHLO text, in the spellings of StableHLO 1.13 (the oldest reader in use).
//!
//! Dead code is left out and values are numbered in print order, so the text is a function of the live ops alone.
//! Constants are printed in every block that uses them, just before the first use there: regions of `reduce`, `sort` and
//! `scatter` may not read outer values.

use crate::ir::*;
use crate::literal::{push_elements, push_int, push_string};
use crate::live::live_ops;
use crate::sharding::{ReplicaGroups, Sharding};
use crate::types::TensorType;

mod ops;

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
}
