// A group for host memory of which this process is the only one that runs, for a device that is not there: all ranks are
// taken to do what this one does, with the same values. What another rank would have to say first is refused.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace oxi_group {
struct AloneWork final : c10d::Work {
  AloneWork(int rank, c10d::OpType type, std::vector<at::Tensor> results) : Work(rank, type), results_(std::move(results)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds = kNoTimeout) override { return true; }
  void synchronize() override {}
  void abort() override {}
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(results_));
    return future;
  }
  std::vector<at::Tensor> results_;
};

class Alone final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Works = c10::intrusive_ptr<c10d::Work>;

  Alone(int rank, int size, c10::intrusive_ptr<Options> options) : Backend(rank, size), options_(std::move(options)) {}

  const std::string getBackendName() const override { return "gloo"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }
  void startCoalescing() override {}
  Works endCoalescing() override { return done(OpType::COALESCED, {}); }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override {
    auto at = std::find(ranks.begin(), ranks.end(), rank_);
    if (at == ranks.end()) return nullptr;
    return c10::make_intrusive<Alone>(static_cast<int>(at - ranks.begin()), static_cast<int>(ranks.size()), options);
  }
  void abort() override {}
  void shutdown() override {}

  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    only_own("broadcast", opts.rootRank);
    return done(OpType::BROADCAST, tensors);
  }
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return reduced(OpType::ALLREDUCE, tensors, opts.reduceOp);
  }
  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return reduced(OpType::ALLREDUCE_COALESCED, tensors, opts.reduceOp);
  }
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return opts.rootRank == rank_ ? reduced(OpType::REDUCE, tensors, opts.reduceOp) : done(OpType::REDUCE, tensors);
  }
  Works allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    for (size_t i = 0; i < outputs.size(); i++) fill(outputs[i], inputs.at(i));
    return done(OpType::ALLGATHER, outputs.empty() ? Tensors() : outputs[0]);
  }
  Works allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    Guard guard;
    for (auto& of_rank : outputs) {
      for (size_t i = 0; i < of_rank.size(); i++) of_rank[i].copy_(inputs.at(i));
    }
    return done(OpType::ALLGATHER_COALESCED, {});
  }
  Works _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return gathered(output, input);
  }
  Works all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& = {}) {
    return gathered(output, input);
  }
  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    for (size_t i = 0; i < outputs.size(); i++) gathered(outputs[i], inputs.at(i));
    return done(OpType::COALESCED, outputs);
  }
  Works all_gather_single_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts = {}) {
    return allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  Works gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    if (opts.rootRank == rank_) fill(outputs.at(0), inputs.at(0));
    return done(OpType::GATHER, opts.rootRank == rank_ ? outputs[0] : Tensors());
  }
  Works scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    only_own("scatter", opts.rootRank);
    Guard guard;
    outputs.at(0).copy_(inputs.at(0).at(static_cast<size_t>(rank_)));
    return done(OpType::SCATTER, outputs);
  }
  Works reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    Guard guard;
    for (size_t i = 0; i < outputs.size(); i++) outputs[i].copy_(inputs.at(i).at(static_cast<size_t>(rank_)));
    return reduced(OpType::REDUCE_SCATTER, outputs, opts.reduceOp);
  }
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return scattered(output, input, opts);
  }
  Works reduce_scatter_single(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts = {}) {
    return scattered(output, input, opts);
  }
  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    for (size_t i = 0; i < outputs.size(); i++) scattered(outputs[i], inputs.at(i), opts);
    return done(OpType::COALESCED, outputs);
  }
  Works reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts = {}) {
    return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  Works alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                      std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    return exchanged(output, input, output_splits, input_splits);
  }
  Works all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& = {}) {
    return exchanged(output, input, output_splits, input_splits);
  }
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    fill(outputs, inputs.at(static_cast<size_t>(rank_)));
    return done(OpType::ALLTOALL, outputs);
  }
  Works send(Tensors& tensors, int, int) override { return done(OpType::SEND, tensors); }
  Works recv(Tensors&, int from, int) override { alone("recv", from); }
  Works recvAnysource(Tensors&, int) override { alone("recv", -1); }
  Works barrier(const c10d::BarrierOptions&) override { return done(OpType::BARRIER, {}); }
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override {}

 private:
  using OpType = c10d::OpType;
  using Guard = at::AutoDispatchBelowADInplaceOrView;

  Works done(OpType type, Tensors results) {
    number_++;
    return c10::make_intrusive<AloneWork>(rank_, type, std::move(results));
  }
  void only_own(const char* what, int64_t root) const {
    if (root != rank_) alone(what, root);
  }
  [[noreturn]] void alone(const char* what, int64_t root) const {
    TORCH_CHECK(false, what, ": the other processes are not there, as preflight runs rank ", rank_, " of ", size_,
                " alone, and nobody knows what ", root < 0 ? std::string("another") : "rank " + std::to_string(root),
                " would say");
  }
  static void fill(Tensors& outputs, const at::Tensor& input) {
    Guard guard;
    for (auto& t : outputs) t.copy_(input.view_as(t));
  }
  // As many equal values, reduced.
  Works reduced(OpType type, Tensors& tensors, const c10d::ReduceOp& op) {
    Guard guard;
    for (auto& t : tensors) {
      switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
        case c10d::ReduceOp::SUM:
          if (t.scalar_type() != at::kBool) t.mul_(size_);
          break;
        case c10d::ReduceOp::PRODUCT: t.pow_(size_); break;
        case c10d::ReduceOp::BXOR:
          if (size_ % 2 == 0) t.zero_();
          break;
        case c10d::ReduceOp::PREMUL_SUM: TORCH_CHECK(false, "Cannot use ReduceOp.PREMUL_SUM with Gloo");  // as gloo says
        default: break;  // it is one of them
      }
    }
    return done(type, tensors);
  }
  Works gathered(at::Tensor& output, const at::Tensor& input) {
    auto rows = output.view({size_, -1}).unbind();
    fill(rows, input);
    return done(OpType::_ALLGATHER_BASE, {output});
  }
  Works scattered(at::Tensor& output, const at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
    Tensors own{output};
    fill(own, input.view({size_, -1})[rank_]);
    return reduced(OpType::_REDUCE_SCATTER_BASE, own, opts.reduceOp);
  }
  // Each rank sends this one what this one sends itself.
  Works exchanged(at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits,
                  const std::vector<int64_t>& input_splits) {
    Guard guard;
    auto parts = [&](const at::Tensor& t, const std::vector<int64_t>& splits) {
      return splits.empty() ? t.chunk(size_) : t.split_with_sizes(splits);
    };
    Tensors own = parts(input, input_splits);
    auto part = own.at(static_cast<size_t>(rank_));
    for (auto& to : parts(output, output_splits)) {
      TORCH_CHECK(to.sizes() == part.sizes(), "all_to_all: the other processes are not there, as preflight runs rank ", rank_,
                  " of ", size_, " alone, and they would send ", part.sizes(), " where ", to.sizes(), " is expected");
      to.copy_(part);
    }
    return done(OpType::ALLTOALL_BASE, {output});
  }
  c10::intrusive_ptr<Options> options_;
  uint64_t number_ = 0;
};
}  // namespace oxi_group
