// The process group of device tensors: c10d's collectives as tasks that the core runs in the order of the device's ops.
//
// Where one PJRT client spans the processes, most collectives are programs of the members' devices instead
// (`group_programs.h`).
//
// The tasks call a group for host memory (gloo), which the user's ranks made beside this one, on the bytes of the device's
// tensors. What that cannot compute (averages, dtypes that it has not) is recorded as ATen operations around them.
// A work is done, for its caller, when it is recorded: who reads what a collective writes waits for it.
#pragma once

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "alone.h"
#include "group_host.h"
#include "group_observed.h"
#include "group_programs.h"
#include "group_reductions.h"

namespace oxi_group {
class ProcessGroupTpu final : public Programs {
 public:
  using Programs::Programs;

  const std::string getBackendName() const override { return "tpu"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return host_->supportsSplitting(); }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(Milliseconds timeout) {
    options_->timeout = timeout;
    host_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {}  // they begin at 0 on all ranks
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override {
    auto host_options = copy_of(host_->getBackendOptions(), 0);
    host_options->timeout = options->timeout;
    host_options->group_name = options->group_name;
    host_options->global_ranks_in_group = options->global_ranks_in_group;
    // Groups that are made together have one name in the store, and hosts find each other by it.
    std::string own = "oxitorch";
    for (int rank : ranks) own += "," + std::to_string(rank);
    auto host = host_->split(c10::make_intrusive<c10d::PrefixStore>(own, store), ranks, host_options);
    if (!host) return nullptr;
    std::vector<int32_t> devices;
    if (!devices_.empty()) {
      for (int rank : ranks) devices.push_back(devices_.at(rank));
    }
    return c10::make_intrusive<ProcessGroupTpu>(std::move(host), store, options, std::move(devices));
  }
  ~ProcessGroupTpu() override { end(); }
  void abort() override {
    end();
    host_->abort();
  }
  void shutdown() override {
    end();
    host_->shutdown();
  }

  void startCoalescing() override {
    std::lock_guard<std::mutex> lock(mutex_);
    coalesced_ = std::make_unique<Records>();
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto tasks = coalesced_ ? std::move(*coalesced_) : Records();
    coalesced_.reset();
    return c10::make_intrusive<GroupWork>(rank_, OpType::COALESCED, std::move(tasks), Tensors(), here(), getSequenceNumberForGroup(), false);
  }


  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts = c10d::AllreduceOptions()) override {
    auto seen = observed({"allreduce", "all_reduce", tensors, tensors});
    return allreduce(OpType::ALLREDUCE, "all_reduce", tensors, opts.reduceOp, opts.timeout);
  }
  Works allreduce_coalesced(Tensors& tensors,
                            const c10d::AllreduceCoalescedOptions& opts = c10d::AllreduceCoalescedOptions()) override {
    auto seen = observed({"allreduce_coalesced", "all_reduce", tensors, tensors});
    return allreduce(OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", tensors, opts.reduceOp, opts.timeout);
  }
  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts = c10d::BroadcastOptions()) override {
    auto seen = observed({"broadcast", "broadcast", tensors, tensors, opts.rootRank});
    bool root = opts.rootRank == rank_;
    if (is_program(tensors)) {
      Call call{"broadcast", at::kByte, "", opts.rootRank};
      OxiCollective what{OXI_BROADCAST, 0, static_cast<int32_t>(opts.rootRank), 0, nullptr};
      return launch(OpType::BROADCAST, call, what, tensors, tensors, tensors);
    }
    auto o = opts;
    o.timeout = timeout(opts.timeout);
    auto run = [host = host_, o, root](const Memory& reads, const Memory& writes) {
      for (auto& m : root ? reads : writes) {
        Tensors one{host_tensor(m)};
        host->broadcast(one, o)->wait();
      }
    };
    return record(OpType::BROADCAST, {"broadcast", at::kByte, "", o.rootRank, root ? Common::READS : Common::WRITES}, root ? tensors : Tensors(), root ? Tensors() : tensors, false, run, tensors);
  }
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& opts = c10d::ReduceOptions()) override {
    auto seen = observed({"reduce", "reduce", tensors, tensors, opts.rootRank});
    bool root = opts.rootRank == rank_;
    Guard guard;
    Tensors reads, results;
    for (auto& t : tensors) {
      check_reduction(opts.reduceOp, t.scalar_type());
      // What is not the root's stays as it is; and hosts use it as scratch.
      Tensor x = root && host_reduces(t.scalar_type()) ? t : widened(opts.reduceOp, t);
      scale_before(opts.reduceOp, x);
      results.push_back(x);
    }
    auto o = opts;
    o.timeout = timeout(opts.timeout);
    auto run = [host = host_, o, dtypes = dtypes(results)](const Memory&, const Memory& writes) mutable {
      for (size_t i = 0; i < writes.size(); i++) {
        Tensors one{reducible(writes[i], dtypes[i])};
        auto each = o;
        each.reduceOp = host_reduction(o.reduceOp, dtypes[i]);
        host->reduce(one, each)->wait();
      }
    };
    Call call{"reduce", at::kByte, reduction_name(opts.reduceOp), opts.rootRank};
    auto work = is_program(results)
        ? reduce_by_program(OpType::REDUCE, call, OXI_ALL_REDUCE, opts.reduceOp, results, results, tensors)
        : record(OpType::REDUCE, call, {}, results, true, run, tensors);
    if (root) {
      for (size_t i = 0; i < tensors.size(); i++) {
        Tensor r = narrowed(opts.reduceOp, results[i], tensors[i].scalar_type(), size_);
        if (!r.is_same(tensors[i])) tensors[i].copy_(r);
      }
    }
    return work;
  }
  Works allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                  const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override {
    TORCH_CHECK(outputs.size() == inputs.size(), "all_gather: ", outputs.size(), " lists of outputs for ", inputs.size(), " inputs");
    auto seen = observed({"all_gather", "all_gather", inputs, first(outputs)});
    return gather_all(OpType::ALLGATHER, "all_gather", outputs, inputs, opts);
  }
  Works allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override {
    auto seen = observed({"all_gather", "all_gather", inputs, first(outputs)});
    std::vector<Tensors> by_input(inputs.size());  // a list for each input, of all ranks
    for (auto& of_rank : outputs) {
      TORCH_CHECK(of_rank.size() == inputs.size(), "all_gather_coalesced: ", of_rank.size(), " outputs of a rank for ",
                  inputs.size(), " inputs");
      for (size_t i = 0; i < inputs.size(); i++) by_input[i].push_back(of_rank[i]);
    }
    return gather_all(OpType::ALLGATHER_COALESCED, "all_gather_coalesced", by_input, inputs, opts);
  }
  Works all_gather_single(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) {
    Tensors outputs{output}, inputs{input};
    auto seen = observed({"_allgather_base", "_all_gather_base", inputs, outputs});
    return gather_single(OpType::_ALLGATHER_BASE, "all_gather_into_tensor", outputs, inputs, opts);
  }
  Works _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override {
    return all_gather_single(output, input, opts);
  }
  Works all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) {
    auto seen = observed({"allgather_into_tensor_coalesced", "all_gather_into_tensor_coalesced", inputs, outputs});
    return gather_single(OpType::COALESCED, "all_gather_into_tensor_coalesced", outputs, inputs, opts);
  }
  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override {
    return all_gather_single_coalesced(outputs, inputs, opts);
  }
  Works gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts = c10d::GatherOptions()) override {
    auto seen = observed({"gather", "gather", inputs, first(outputs), opts.rootRank});
    bool root = opts.rootRank == rank_;
    auto o = opts;
    o.timeout = timeout(opts.timeout);
    TORCH_CHECK(inputs.size() == 1 && (!root || outputs.size() == 1), "gather: one input, and one list of outputs on the root");
    TORCH_CHECK(!root || outputs[0].size() == static_cast<size_t>(size_), "gather: ", size_, " outputs are wanted, got ", outputs[0].size());
    if (is_program(inputs)) {
      std::vector<Tensors> outs = outputs;
      if (!root) outs.assign(1, Tensors());
      return gather_by_program(OpType::GATHER, {"gather", at::kByte, "", opts.rootRank}, outs, inputs);
    }
    auto run = [host = host_, o, root](const Memory& reads, const Memory& writes) {
      std::vector<Tensors> out;
      if (root) out.push_back(host_tensors(writes));
      Tensors in{host_tensor(reads[0])};
      host->gather(out, in, o)->wait();
    };
    Tensors written = root ? outputs[0] : Tensors();
    return record(OpType::GATHER, {"gather", at::kByte, "", opts.rootRank, Common::READS}, inputs, written, false, run, written);
  }
  Works scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts = c10d::ScatterOptions()) override {
    auto seen = observed({"scatter", "scatter", first(inputs), outputs, opts.rootRank});
    bool root = opts.rootRank == rank_;
    auto o = opts;
    o.timeout = timeout(opts.timeout);
    TORCH_CHECK(outputs.size() == 1 && (!root || inputs.size() == 1), "scatter: one output, and one list of inputs on the root");
    TORCH_CHECK(!root || inputs[0].size() == static_cast<size_t>(size_), "scatter: ", size_, " inputs are wanted, got ", inputs[0].size());
    auto run = [host = host_, o, root](const Memory& reads, const Memory& writes) {
      std::vector<Tensors> in;
      if (root) in.push_back(host_tensors(reads));
      Tensors out{host_tensor(writes[0])};
      host->scatter(out, in, o)->wait();
    };
    return record(OpType::SCATTER, {"scatter", at::kByte, "", opts.rootRank}, root ? inputs[0] : Tensors(), outputs, false, run, outputs);
  }
  Works reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                       const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) override {
    TORCH_CHECK(outputs.size() == inputs.size(), "reduce_scatter: ", inputs.size(), " lists of inputs for ", outputs.size(), " outputs");
    auto seen = observed({"reduce_scatter", "reduce_scatter", first(inputs), outputs});
    return scatter_reduced(OpType::REDUCE_SCATTER, "reduce_scatter", outputs, inputs, opts);
  }
  Works reduce_scatter_single(Tensor& output, Tensor& input,
                              const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) {
    Tensors outputs{output};
    std::vector<Tensors> inputs{{input}};
    auto seen = observed({"_reduce_scatter_base", "_reduce_scatter_base", inputs[0], outputs});
    return scatter_reduced(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", outputs, inputs, opts);
  }
  Works _reduce_scatter_base(Tensor& output, Tensor& input,
                             const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) override {
    return reduce_scatter_single(output, input, opts);
  }
  Works reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) {
    auto seen = observed({"reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_coalesced", inputs, outputs});
    std::vector<Tensors> lists;
    for (auto& input : inputs) lists.push_back({input});
    return scatter_reduced(OpType::COALESCED, "reduce_scatter_tensor_coalesced", outputs, lists, opts);
  }
  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) override {
    return reduce_scatter_single_coalesced(outputs, inputs, opts);
  }
  Works all_to_all_single(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                          const c10d::AllToAllOptions& opts = c10d::AllToAllOptions()) {
    Tensors outputs{output}, inputs{input};
    bool is_even = output_splits.empty() && input_splits.empty();
    auto seen = observed({is_even ? "all_to_all" : "all_to_allv", "all_to_all", inputs, outputs, std::nullopt, false, input_splits,
                          output_splits});
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), "all_to_all_single: output is ", output.scalar_type(), ", input ",
                input.scalar_type());
    auto out = split_bytes("output", output, output_splits), in = split_bytes("input", input, input_splits);
    // Who names sizes may have others than his peers.
    if (is_even && input.numel() == output.numel() && is_program(inputs)) {
      OxiCollective what{OXI_ALL_TO_ALL, 0, 0, 0, nullptr};
      return launch(OpType::ALLTOALL_BASE, {"all_to_all_single"}, what, inputs, outputs, outputs);
    }
    auto run = [host = host_, o = with_timeout(opts), out, in](const Memory& reads, const Memory& writes) mutable {
      check_splits(host, o, in, out);
      exchange_parts(host, parts(reads[0], in), parts(writes[0], out), o.timeout);
    };
    return record(OpType::ALLTOALL_BASE, {"all_to_all_single", at::kByte, "", -1, Common::NOTHING}, inputs, outputs, false, run, outputs);
  }
  Works alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                      const c10d::AllToAllOptions& opts = c10d::AllToAllOptions()) override {
    return all_to_all_single(output, input, output_splits, input_splits, opts);
  }
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts = c10d::AllToAllOptions()) override {
    auto seen = observed({"all_to_all", "all_to_all", inputs, outputs});
    TORCH_CHECK(outputs.size() == static_cast<size_t>(size_) && inputs.size() == outputs.size(), "all_to_all: ", size_,
                " tensors each are wanted, got ", outputs.size(), " outputs and ", inputs.size(), " inputs");
    auto run = [host = host_, o = with_timeout(opts)](const Memory& reads, const Memory& writes) { exchange(host, o, reads, writes); };
    return record(OpType::ALLTOALL, {"all_to_all", at::kByte, "", -1, Common::NOTHING}, inputs, outputs, false, run, outputs);
  }
  Works send(Tensors& tensors, int to, int tag) override {
    check_tag(tag);
    auto seen = observed({"send", "send", tensors, tensors, to, true});
    auto run = [host = host_, to, tag](const Memory& reads, const Memory&) {
      for (auto& m : reads) {
        auto length = static_cast<int64_t>(m.len);
        Tensors header{at::from_blob(&length, {1}, at::kLong)}, one{host_tensor(m)};
        host->send(header, to, tag)->wait();
        host->send(one, to, tag)->wait();
      }
    };
    return record(OpType::SEND, {"send", at::kByte, "", -1, Common::READS, false}, tensors, {}, false, run, tensors, peer_lane(to, tag, 0));
  }
  Works recv(Tensors& tensors, int from, int tag) override {
    check_tag(tag);
    auto seen = observed({"recv", "recv", tensors, tensors, from, true});
    Receive run{host_, receives_, from, tag, options_->timeout, nullptr, {}};
    auto source = std::make_shared<std::atomic<int>>(from);
    return record(OpType::RECV, {"recv", at::kByte, "", -1, Common::WRITES, false}, {}, tensors, false, run, tensors, peer_lane(from, tag, 1), false, source);
  }
  Works recvAnysource(Tensors& tensors, int tag) override {
    check_tag(tag);
    auto seen = observed({"recvAnySource", "recvAnySource", tensors, tensors, -1, true});
    auto source = std::make_shared<std::atomic<int>>(-1);
    Receive run{host_, receives_, -1, tag, options_->timeout, source, {}};
    return record(OpType::RECVANYSOURCE, {"recv", at::kByte, "", -1, Common::WRITES, false}, {}, tensors, false, run, tensors, peer_lane(-1, tag, 1), true, source);
  }
  Works barrier(const c10d::BarrierOptions& = c10d::BarrierOptions()) override {
    auto seen = observed({"barrier", "barrier", none(), none()});
    auto run = [](const Memory&, const Memory&) {};  // that they agree is all
    // What the device has still to do is before it.
    check_ok([&](OxiError* e) { return g_core->synchronize(here().index(), e); });
    return record(OpType::BARRIER, {"barrier"}, {}, {}, false, run, {}, id_, true);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool all = false) override {
    check_ok([&](OxiError* e) { return g_core->synchronize(here().index(), e); });
    auto o = opts;
    o.timeout = timeout(opts.timeout);
    host_->monitoredBarrier(o, all);
  }

 private:
  // What observers see of the collective that the caller records; the caller holds it until then.
  Observed observed(const Observable& what) {
    return Observed(*this, *options_, what, (what.of_peers ? peers_number_.load() : getSequenceNumberForGroup()) + 1);
  }
  static const Tensors& none() {
    static const Tensors none;
    return none;
  }
  static const Tensors& first(const std::vector<Tensors>& lists) { return lists.empty() ? none() : lists[0]; }
  // What `split` may change. From torch 2.14 on they can be cloned; before, the host's groups
  // share theirs, of which ours use nothing: each task brings its own timeout.
  template <class O>
  static auto copy_of(const c10::intrusive_ptr<O>& options, int) -> decltype(options->clone()) {
    return options->clone();
  }
  template <class O>
  static c10::intrusive_ptr<O> copy_of(const c10::intrusive_ptr<O>& options, long) {
    return options;
  }
  static void check_tag(int tag) {
    TORCH_CHECK(tag >= 0 && tag < kTags, "tags are from 0 to ", kTags - 1, ", got ", tag);
  }
  // Point-to-point operations of one peer, tag and direction keep their order.
  uint64_t peer_lane(int peer, int tag, uint64_t direction) const {
    auto peer_number = static_cast<uint64_t>(peer + 1) & 0xffff;
    return id_ + 1 + (direction | peer_number << 1 | (static_cast<uint64_t>(tag) & 0x3fff) << 17);
  }
  Milliseconds timeout(Milliseconds wanted) const { return wanted == c10d::kUnsetTimeout ? options_->timeout : wanted; }
  template <class Opts>
  Opts with_timeout(Opts opts) const {
    opts.timeout = timeout(opts.timeout);
    return opts;
  }
  static std::vector<at::ScalarType> dtypes(const Tensors& tensors) {
    std::vector<at::ScalarType> all;
    for (auto& t : tensors) all.push_back(t.scalar_type());
    return all;
  }
  std::vector<int64_t> split_bytes(const char* which, const Tensor& t, const std::vector<int64_t>& splits) const {
    int64_t item = static_cast<int64_t>(t.element_size());
    if (splits.empty()) {
      TORCH_CHECK(t.dim() > 0 && t.size(0) % size_ == 0, "all_to_all_single: the ", which, "'s dimension 0 does not divide by ", size_);
      return std::vector<int64_t>(size_, t.numel() / size_ * item);
    }
    int64_t rows = 0, row = t.dim() > 0 && t.size(0) > 0 ? t.numel() / t.size(0) * item : 0;
    std::vector<int64_t> bytes;
    for (auto n : splits) bytes.push_back(n * row), rows += n;
    TORCH_CHECK(splits.size() == static_cast<size_t>(size_) && rows == (t.dim() > 0 ? t.size(0) : 0),
                "all_to_all_single: the ", which, " splits do not sum up to its dimension 0");
    return bytes;
  }
  void end() {
    std::lock_guard<std::mutex> lock(group_->mutex);
    group_->ended = true;
  }
  Works allreduce(OpType type, const char* name, Tensors& tensors, const ReduceOp& op, Milliseconds wanted) {
    bool as_they_are = op != ReduceOp::AVG && op != ReduceOp::PREMUL_SUM;
    for (auto& t : tensors) {
      TORCH_CHECK(t.layout() == c10::kStrided, name, ": tpu tensors have the strided layout, got ", t.layout());
      check_reduction(op, t.scalar_type());
      as_they_are &= host_reduces(t.scalar_type());
    }
    if (as_they_are) return allreduce_own(type, name, tensors, tensors, op, wanted);
    Guard guard;
    Tensors own;
    for (auto& t : tensors) {
      own.push_back(host_reduces(t.scalar_type()) ? t : widened(op, t));
      scale_before(op, own.back());
    }
    auto work = allreduce_own(type, name, own, tensors, op, wanted);
    for (size_t i = 0; i < own.size(); i++) {
      Tensor r = narrowed(op, own[i], tensors[i].scalar_type(), size_);
      if (!r.is_same(tensors[i])) tensors[i].copy_(r);
    }
    return work;
  }
  // Of dtypes that hosts reduce.
  Works allreduce_own(OpType type, const char* name, const Tensors& own, const Tensors& results, const ReduceOp& op,
                      Milliseconds wanted) {
    Call call{name, at::kByte, reduction_name(op)};
    if (is_program(own)) return reduce_by_program(type, call, OXI_ALL_REDUCE, op, own, own, results);
    AllReduce run{host_, group_, op, timeout(wanted), {}};
    for (auto& t : own) run.dtypes.push_back(t.scalar_type());
    return record(type, call, {}, own, true, std::move(run), results);
  }
  Works gather_all(OpType type, const char* name, const std::vector<Tensors>& outputs, const Tensors& inputs,
                   const c10d::AllgatherOptions& opts) {
    Tensors written;
    for (auto& list : outputs) {
      TORCH_CHECK(list.size() == static_cast<size_t>(size_), name, ": ", size_, " outputs are wanted, got ", list.size());
      written.insert(written.end(), list.begin(), list.end());
    }
    for (size_t i = 0; i < inputs.size(); i++) {
      for (auto& t : outputs[i]) {
        TORCH_CHECK(t.scalar_type() == inputs[i].scalar_type(), name, ": an output is ", t.scalar_type(), ", the input ",
                    inputs[i].scalar_type());
      }
      TORCH_CHECK(outputs[i][rank_].numel() == inputs[i].numel(), name, ": the own output has ", outputs[i][rank_].numel(),
                  " elements, the input ", inputs[i].numel());
    }
    auto even = [&](size_t i) {
      return std::all_of(outputs[i].begin(), outputs[i].end(), [&](auto& t) { return t.numel() == inputs[i].numel(); });
    };
    bool all_even = true;
    for (size_t i = 0; i < inputs.size(); i++) all_even &= even(i);
    if (all_even && is_program(inputs)) return gather_by_program(type, {name}, outputs, inputs);
    return record(type, {name}, inputs, written, false, AllGather{host_, timeout(opts.timeout), false}, written);
  }
  Works gather_single(OpType type, const char* name, Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
    TORCH_CHECK(outputs.size() == inputs.size(), name, ": ", outputs.size(), " outputs for ", inputs.size(), " inputs");
    for (size_t i = 0; i < inputs.size(); i++) {
      TORCH_CHECK(outputs[i].scalar_type() == inputs[i].scalar_type(), "output tensor must have the same type as input tensor");
      TORCH_CHECK(outputs[i].numel() == inputs[i].numel() * size_,
                  "output tensor size must be equal to world_size times input tensor size");
    }
    if (is_program(inputs)) return launch(type, {name}, {OXI_ALL_GATHER, 0, 0, 0, nullptr}, inputs, outputs, outputs);
    return record(type, {name}, inputs, outputs, false, AllGather{host_, timeout(opts.timeout), true}, outputs);
  }
  // Each rank gets its part of all ranks' inputs, and reduces it on the device. An input is a list of a tensor for each
  // rank, or one of all.
  Works scatter_reduced(OpType type, const char* name, Tensors& outputs, const std::vector<Tensors>& inputs,
                        const c10d::ReduceScatterOptions& opts) {
    Guard guard;
    if (is_program(outputs) && are_even(outputs, inputs)) return scatter_by_program(type, name, outputs, inputs, opts.reduceOp);
    Tensors reads;
    ReduceScatter run{host_, opts.reduceOp, timeout(opts.timeout), {}, {}};
    for (size_t i = 0; i < outputs.size(); i++) {
      auto& out = outputs[i];
      check_reduction(opts.reduceOp, out.scalar_type());
      int64_t all = 0;
      for (auto& t : inputs[i]) {
        TORCH_CHECK(t.scalar_type() == out.scalar_type(), "input tensor must be the same type as the output tensor.");
        reads.push_back(t);
        if (opts.reduceOp == ReduceOp::PREMUL_SUM) {
          reads.back() = t.clone();
          scale_before(opts.reduceOp, reads.back());
        }
        all += t.numel();
      }
      if (inputs[i].size() == 1) {
        TORCH_CHECK(all == out.numel() * size_, "input tensor must be the same size as output size times world size");
      } else {
        TORCH_CHECK(inputs[i].size() == static_cast<size_t>(size_) && inputs[i][rank_].numel() == out.numel(), name,
                    ": a tensor for each of ", size_, " ranks is wanted, and the own one of the output's size");
      }
      run.dtypes.push_back(out.scalar_type());
      run.single.push_back(inputs[i].size() == 1);
    }
    Call call{name, at::kByte, reduction_name(opts.reduceOp), -1, Common::READS};
    return record(type, call, reads, outputs, false, std::move(run), outputs);
  }

  std::shared_ptr<Receives> receives_ = std::make_shared<Receives>();
};

// Gives a group one for host memory of which only this process runs.
inline void add_alone(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t timeout_ms) {
  auto options = c10::make_intrusive<c10d::Backend::Options>("gloo", Milliseconds(timeout_ms));
  auto backend = c10::make_intrusive<Alone>(group->getRank(), group->getSize(), std::move(options));
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO, c10::intrusive_ptr<c10d::Backend>(std::move(backend)));
}

// Gives a group that has one for host memory one for the device.
inline void add(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t timeout_ms, std::string name,
                const std::vector<int64_t>& ranks, const std::vector<int64_t>& devices) {
  auto options = c10::make_intrusive<c10d::Backend::Options>("tpu", Milliseconds(timeout_ms));
  options->group_name = std::move(name);
  options->global_ranks_in_group.assign(ranks.begin(), ranks.end());
  auto backend = c10::make_intrusive<ProcessGroupTpu>(group->getBackend(c10::kCPU), group->getStore(), std::move(options),
                                                      std::vector<int32_t>(devices.begin(), devices.end()));
  group->setBackend(kSelf, c10d::ProcessGroup::BackendType::CUSTOM, c10::intrusive_ptr<c10d::Backend>(std::move(backend)));
}
}  // namespace oxi_group
