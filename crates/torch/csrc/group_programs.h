// Collectives that are programs of the members' devices, where one PJRT client spans the processes; the host only compares
// before each what the ranks are about to do.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "group_records.h"
#include "group_reductions.h"

namespace oxi_group {
class Programs : public Recorder {
 public:
  // `devices`: the id of each rank's device among those of one client, or nothing.
  Programs(Host host, c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<Options> options, std::vector<int32_t> devices)
      : Recorder(std::move(host), std::move(store), std::move(options)), devices_(std::move(devices)),
        programs_(g_core->are_programs(devices_.data(), static_cast<uint32_t>(devices_.size())) != 0) {}

 protected:
  // Whether a collective of these is a program of the members' devices. What has no elements is none.
  bool is_program(const Tensors& tensors) const {
    return programs_ && !tensors.empty() && std::all_of(tensors.begin(), tensors.end(), [](auto& t) { return t.numel() > 0; });
  }
  // As programs name it what hosts are asked for.
  static int32_t program_reduction(const ReduceOp& op, at::ScalarType t) {
    switch (static_cast<ReduceOp::RedOpType>(host_reduction(op, t))) {
      case ReduceOp::PRODUCT: return OXI_PRODUCT;
      case ReduceOp::MIN: return OXI_MIN;
      case ReduceOp::MAX: return OXI_MAX;
      case ReduceOp::BAND: return OXI_AND;
      case ReduceOp::BOR: return OXI_OR;
      case ReduceOp::BXOR: return OXI_XOR;
      default: return OXI_SUM;
    }
  }
  // Records a program for each of these tensors.
  Works launch(OpType type, const Call& call, OxiCollective what, const Tensors& ins, const Tensors& outs, Tensors results) {
    Guard guard;
    Records launched;
    for (size_t i = 0; i < ins.size(); i++) launched.push_back(launch_one(call, what, ins[i], outs[i]));
    return works_of(type, std::move(launched), std::move(results));
  }
  std::shared_ptr<Recorded> launch_one(Call call, OxiCollective what, const Tensor& in, const Tensor& out) {
    TORCH_CHECK(in.device() == out.device(), call.name, ": tensors on ", in.device(), " and ", out.device());
    at::assert_no_internal_overlap(out);
    make_own(out);
    Tensor from = in.reshape({-1});
    Tensor to = out.is_contiguous() ? out.view({-1}) : at::empty({out.numel()}, out.options());
    call.program = std::string(at::toString(in.scalar_type())) + "[" + std::to_string(in.numel()) + "]";
    what.devices = devices_.data(), what.ndevices = static_cast<uint32_t>(devices_.size());
    OxiTensor x, y;
    describe_kept(x, from), describe_kept(y, to);
    std::shared_ptr<Recorded> recorded;
    {
      std::lock_guard<std::mutex> lock(mutex_);  // all ranks see the collectives of a group in one order
      check_whole(call.name);
      auto nothing = [](const Memory&, const Memory&) {};  // that they agree is all
      std::unique_ptr<Task> task = std::make_unique<Does<decltype(nothing)>>(group_, call, nothing);
      OxiTask t{task.get(), task->call.name, group_->core.handle, id_};
      task.release();
      OxiError e{};
      void* work = g_core->collective(&t, &what, &x, &y, &e);
      if (!work) check(OXI_ERROR, e);
      recorded = std::make_shared<Recorded>(work, in.device().index());
      if (coalesced_) coalesced_->push_back(recorded);
    }
    if (!out.is_contiguous()) out.copy_(to.view(out.sizes()));
    return recorded;
  }
  // Reduces tensors of dtypes that hosts reduce too; booleans as bytes.
  Works reduce_by_program(OpType type, const Call& call, int32_t kind, const ReduceOp& op, const Tensors& ins, const Tensors& outs,
                          Tensors results) {
    Guard guard;
    Records launched;
    for (size_t i = 0; i < ins.size(); i++) {
      auto t = ins[i].scalar_type();
      OxiCollective what{kind, program_reduction(op, t), 0, 0, nullptr};
      bool bytes = t == at::kBool;
      Tensor out = bytes ? at::empty(outs[i].sizes(), outs[i].options().dtype(at::kByte)) : outs[i];
      launched.push_back(launch_one(call, what, bytes ? ins[i].to(at::kByte) : ins[i], out));
      if (bytes) outs[i].copy_(out);
    }
    return works_of(type, std::move(launched), std::move(results));
  }
  // Each input from all ranks into a list of tensors; an empty list on ranks that do not want them.
  Works gather_by_program(OpType type, const Call& call, const std::vector<Tensors>& outputs, const Tensors& inputs) {
    Guard guard;
    Records launched;
    Tensors results;
    for (size_t i = 0; i < inputs.size(); i++) {
      Tensor all = at::empty({size_, inputs[i].numel()}, inputs[i].options());
      launched.push_back(launch_one(call, {OXI_ALL_GATHER, 0, 0, 0, nullptr}, inputs[i], all));
      for (size_t r = 0; r < outputs[i].size(); r++) {
        auto& t = outputs[i][r];
        TORCH_CHECK(t.numel() == inputs[i].numel(), call.name, ": an output has ", t.numel(), " elements, the input ",
                    inputs[i].numel());
        t.copy_(all.select(0, static_cast<int64_t>(r)).view(t.sizes()));
        results.push_back(t);
      }
    }
    return works_of(type, std::move(launched), std::move(results));
  }
  // Whether each rank gets as much as the others.
  bool are_even(const Tensors& outputs, const std::vector<Tensors>& inputs) const {
    for (size_t i = 0; i < outputs.size(); i++) {
      auto n = outputs[i].numel();
      bool one = inputs[i].size() == 1 && inputs[i][0].numel() == n * size_;
      bool each = inputs[i].size() == static_cast<size_t>(size_) &&
          std::all_of(inputs[i].begin(), inputs[i].end(), [&](auto& t) { return t.numel() == n; });
      if (!one && !each) return false;
    }
    return true;
  }
  Works scatter_by_program(OpType type, const char* name, const Tensors& outputs, const std::vector<Tensors>& inputs,
                           const ReduceOp& op) {
    Tensors ins, outs;
    for (size_t i = 0; i < outputs.size(); i++) {
      auto& out = outputs[i];
      check_reduction(op, out.scalar_type());
      Tensors flat;
      for (auto& t : inputs[i]) {
        TORCH_CHECK(t.scalar_type() == out.scalar_type(), "input tensor must be the same type as the output tensor.");
        flat.push_back(t.reshape({-1}));
      }
      Tensor x = flat.size() == 1 ? flat[0] : at::cat(flat);
      bool own = flat.size() > 1;
      if (!host_reduces(x.scalar_type()) || (op == ReduceOp::PREMUL_SUM && !own)) x = widened(op, x);
      scale_before(op, x);
      ins.push_back(x);
      outs.push_back(x.scalar_type() == out.scalar_type() ? out : at::empty(out.sizes(), x.options()));
    }
    auto work = reduce_by_program(type, {name, at::kByte, reduction_name(op)}, OXI_REDUCE_SCATTER, op, ins, outs, outputs);
    for (size_t i = 0; i < outputs.size(); i++) {
      Tensor r = narrowed(op, outs[i], outputs[i].scalar_type(), size_);
      if (!r.is_same(outputs[i])) outputs[i].copy_(r);
    }
    return work;
  }

  std::vector<int32_t> devices_;
  bool programs_;
};
}  // namespace oxi_group
