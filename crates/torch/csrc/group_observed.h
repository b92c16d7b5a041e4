// What PyTorch's profilers and execution traces see of a collective among the host's operations, as of c10d's other groups:
// `record_param_comms`, with what it is of, and in that `tpu:all_reduce`. Both are of recording it: on the device's timeline
// is when it was done. While nobody observes, it is two looks.
#pragma once

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace oxi_group {
// A collective as observers are told of it.
struct Observable {
  const char* comms;  // for `record_param_comms`, as NCCL's groups call it: "allreduce"
  const char* title;  // behind the backend's name: "all_reduce"
  const std::vector<at::Tensor>& in;
  const std::vector<at::Tensor>& out;
  std::optional<int64_t> rank = std::nullopt;  // the root's or the peer's; else it is the own one
  bool of_peers = false;
  c10::IntArrayRef in_splits = {}, out_splits = {};
};

// It goes on while this lives.
class Observed {
 public:
  // `number`: among the group's collectives, or among those of peers.
  Observed(c10d::Backend& group, const c10d::Backend::Options& options, const Observable& what, uint64_t number) {
    auto function = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    auto range = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (function || range) scopes_ = std::make_unique<Scopes>(std::move(function), std::move(range), group, options, what, number);
  }

 private:
  // The ranks of a group as a first one and a step; -1 if they have no step.
  static std::pair<int, int> steps(const std::vector<uint64_t>& ranks) {
    if (ranks.size() < 2) return {ranks.empty() ? 0 : static_cast<int>(ranks[0]), 1};
    auto step = ranks[1] - ranks[0];
    for (size_t i = 1; i < ranks.size(); i++) {
      if (ranks[i] - ranks[i - 1] != step) return {static_cast<int>(ranks[0]), -1};
    }
    return {static_cast<int>(ranks[0]), static_cast<int>(step)};
  }
  static int64_t numel(const std::vector<at::Tensor>& tensors) {
    int64_t all = 0;
    for (auto& t : tensors) all += t.numel();
    return all;
  }

  struct Scopes {
    Scopes(std::optional<at::StepCallbacks> function, std::optional<at::StepCallbacks> range, c10d::Backend& group,
           const c10d::Backend::Options& options, const Observable& what, uint64_t number) {
      if (function) begin_function(std::move(*function), group, options, what, number);
      if (!range) return;
      range_.emplace(std::move(*range));
      range_->_setAsync();
      auto title = group.getBackendName() + ":" + what.title;
      std::vector<c10::IValue> inputs;
      if (range_->needsInputs()) {
        for (auto& t : what.in.empty() ? what.out : what.in) inputs.emplace_back(t);
      }
      range_->before(title, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
    }

   private:
    // As the macro RECORD_PARAM_COMMS_DATA does, which has no bound but a function's.
    void begin_function(at::StepCallbacks callbacks, c10d::Backend& group, const c10d::Backend::Options& options,
                        const Observable& what, uint64_t number) {
      auto rank = static_cast<int>(what.rank.value_or(group.getRank()));
      auto name = std::make_tuple(options.group_name, group.getGroupDesc());
      auto sequence = std::make_tuple(static_cast<int64_t>(number), what.of_peers);
      auto [start, step] = steps(options.global_ranks_in_group);
      auto& first = what.in.empty() ? what.out : what.in;
      auto info = std::make_shared<torch::ParamCommsDebugInfo>(
          name, rank, what.comms, numel(what.in), numel(what.out), first.empty() ? at::kByte : first[0].scalar_type(),
          what.in_splits.vec(), what.out_splits.vec(), start, step, group.getSize());
      std::vector<c10::IValue> inputs{what.in, sequence, name, rank, what.comms, what.in_splits.vec(),
                                      what.out_splits.vec(), start, step, group.getSize()};
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
      torch::maybeSetSequenceInfo(info, sequence);
      inputs.emplace_back(true);
#endif
      info_.emplace(c10::DebugInfoKind::PARAM_COMMS_INFO, std::move(info));
      function_.emplace(std::move(callbacks));
      if (function_->needsInputs()) {
        function_->before(at::kParamCommsCallName, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
      } else {
        function_->before(at::kParamCommsCallName);
      }
      if (function_->needsOutputs()) function_->setOutputs(std::vector<c10::IValue>(1, what.out));
    }

    // In the order in which they begin; they end in the other one.
    std::optional<c10::DebugInfoGuard> info_;
    std::optional<at::RecordFunction> function_, range_;
  };
  std::unique_ptr<Scopes> scopes_;
};
}  // namespace oxi_group
