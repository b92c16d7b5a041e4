//! An op with its attributes.

use super::*;

impl Printer<'_> {
    pub(super) fn op_body(&mut self, data: &OpData) {
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
