// The process group of device tensors: c10d's collectives as tasks that the core runs in the order of the device's ops.
//
// Where one PJRT client spans the processes, most collectives are programs of the members' devices instead ("programs"
// below), and the host only compares before each what the ranks are about to do.
//
// The tasks call a group for host memory (gloo), which the user's ranks made beside this one, on the bytes of the device's
// tensors. What that cannot compute (averages, dtypes that it has not) is recorded as ATen operations around them.
// A work is done, for its caller, when it is recorded: who reads what a collective writes waits for it.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <array>
#include <numeric>
#include <unordered_map>

#include "alone.h"
#include "group_observed.h"
#include "group_reductions.h"
#include "group_tasks.h"

namespace oxi_group {
// The host's all-reduce of tensors of these dtypes, or the reduction of what all ranks have said.
struct AllReduce {
  Host host;
  std::shared_ptr<Group> group;
  ReduceOp op;
  Milliseconds timeout;
  c10::SmallVector<at::ScalarType, 4> dtypes;

  void operator()(const Memory&, const Memory& writes) const {
    c10d::AllreduceOptions o;
    o.timeout = timeout;
    for (size_t i = 0; i < writes.size(); i++) {
      Tensors one{reducible(writes[i], dtypes[i])};
      o.reduceOp = host_reduction(op, dtypes[i]);
      if (host->getSize() == 2 && !group->alone && writes[i].len <= kTurns / 2) {
        between_two(writes[i], dtypes[i]);
      } else {
        host->allreduce(one, o)->wait();
      }
    }
  }
  // In messages as large as those that carry data: a host's own takes longer where two ranks send at once.
  void between_two(const OxiMemory& m, at::ScalarType t) const {
    for (size_t at = 0; at < m.len; at += most_carried(2)) {
      Memory piece{{static_cast<char*>(m.bytes) + at, std::min(most_carried(2), m.len - at)}};
      group->comparison.is_same(1, piece, timeout);  // that they agree is known
      reduce(piece[0], t, group->comparison.carried(), 0);
    }
  }
  void reduce(const OxiMemory& m, at::ScalarType t, const Rows& rows, size_t at) const {
    Tensors all;
    for (auto* row : rows) all.push_back(reducible({const_cast<uint8_t*>(row) + at, m.len}, t));
    reduce_each_into(reducible(m, t), host_reduction(op, t), all);
  }
  Memory carries(const Memory&, const Memory& writes) const { return writes; }
  void operator()(const Rows& rows, const Memory&, const Memory& writes) const {
    size_t at = 0;
    for (size_t i = 0; i < writes.size(); i++) {
      reduce(writes[i], dtypes[i], rows, at);
      at += padded(writes[i].len);
    }
  }
};
// Each rank's inputs to all ranks. Sizes may differ between ranks, of which each knows all. `single`: all that comes of an
// input is one tensor; else there is one for each rank.
struct AllGather {
  Host host;
  Milliseconds timeout;
  bool single;

  Memory places(size_t i, const Memory& writes) const {
    auto size = static_cast<size_t>(host->getSize());
    if (!single) return Memory(writes.begin() + i * size, writes.begin() + (i + 1) * size);
    return parts(writes[i], size);
  }
  void operator()(const Memory& reads, const Memory& writes) const {
    for (size_t i = 0; i < reads.size(); i++) {
      auto places = this->places(i, writes);
      exchange_parts(host, Memory(places.size(), reads[i]), places, timeout);
    }
  }
  // Where all ranks have as much.
  std::optional<Memory> carries(const Memory& reads, const Memory& writes) const {
    for (size_t i = 0; i < reads.size(); i++) {
      for (auto& place : places(i, writes)) {
        if (place.len != reads[i].len) return std::nullopt;
      }
    }
    return reads;
  }
  void operator()(const Rows& rows, const Memory& reads, const Memory& writes) const {
    size_t at = 0;
    for (size_t i = 0; i < reads.size(); i++) {
      auto places = this->places(i, writes);
      for (size_t r = 0; r < rows.size(); r++) std::memcpy(places[r].bytes, rows[r] + at, places[r].len);
      at += padded(reads[i].len);
    }
  }
};
// A part of each rank's inputs to each rank, which reduces what it gets. `single`: an input is one tensor of equal parts; else
// there is one for each rank.
struct ReduceScatter {
  Host host;
  ReduceOp op;
  Milliseconds timeout;
  c10::SmallVector<at::ScalarType, 4> dtypes;
  c10::SmallVector<bool, 4> single;

  // What goes to each rank for an output, of the inputs from `next` on.
  Memory to_ranks(size_t i, Memory::const_iterator& next) const {
    auto size = static_cast<size_t>(host->getSize());
    auto first = next;
    next += single[i] ? 1 : size;
    return single[i] ? parts(*first, size) : Memory(first, next);
  }
  void operator()(const Memory& reads, const Memory& writes) const {
    auto size = static_cast<size_t>(host->getSize()), rank = static_cast<size_t>(host->getRank());
    auto next = reads.begin();
    for (size_t i = 0; i < writes.size(); i++) {
      auto to = to_ranks(i, next);
      Tensor scratch = at::empty({static_cast<int64_t>((size - 1) * writes[i].len)}, at::kByte);
      std::vector<int64_t> others(size - 1, static_cast<int64_t>(writes[i].len));
      auto from = parts({scratch.mutable_data_ptr(), static_cast<size_t>(scratch.numel())}, others);
      from.insert(from.begin() + rank, to[rank]);
      TORCH_CHECK(to[rank].len == writes[i].len, "the own part has ", to[rank].len, " bytes, the output ", writes[i].len);
      exchange_parts(host, to, from, timeout);
      reduce_each_into(typed(writes[i], dtypes[i]), op, typed(from, dtypes[i]));
    }
  }
  Memory carries(const Memory& reads, const Memory&) const { return reads; }
  void operator()(const Rows& rows, const Memory& reads, const Memory& writes) const {
    auto rank = static_cast<size_t>(host->getRank());
    auto next = reads.begin();
    size_t at = 0;
    for (size_t i = 0; i < writes.size(); i++) {
      auto before = next;
      auto own = to_ranks(i, next)[rank];
      auto skip = at;  // to this rank's part in what each carried
      if (single[i]) {
        skip += rank * own.len;
      } else {
        skip += carried_bytes(Memory(before, before + rank));
      }
      Memory from;
      for (auto* row : rows) from.push_back({const_cast<uint8_t*>(row) + skip, own.len});
      reduce_each_into(typed(writes[i], dtypes[i]), op, typed(from, dtypes[i]));
      at += carried_bytes(Memory(before, next));
    }
  }
  // Of complex numbers their parts, as PyTorch's division of complex numbers rounds more than once.
  static Tensor typed(const OxiMemory& m, at::ScalarType t) { return host_tensor(m, c10::toRealValueType(t)); }
  static Tensors typed(const Memory& memory, at::ScalarType t) {
    Tensors all;
    for (auto& m : memory) all.push_back(typed(m, t));
    return all;
  }
};

class ProcessGroupTpu final : public c10d::Backend {
 public:
  // `devices`: the id of each rank's device among those of one client, or nothing.
  ProcessGroupTpu(Host host, c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<Options> options,
                  std::vector<int32_t> devices)
      : Backend(host->getRank(), host->getSize()), host_(host), options_(options),
        group_(std::make_shared<Group>(std::move(host), std::move(store), std::move(options))), id_(next_id()),
        devices_(std::move(devices)),
        programs_(g_core->are_programs(devices_.data(), static_cast<uint32_t>(devices_.size())) != 0) {}

  const std::string getBackendName() const override { return "tpu"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return host_->supportsSplitting(); }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(Milliseconds timeout) {
    options_->timeout = timeout;
    host_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {}  // they begin at 0 on all ranks
  uint64_t getSequenceNumberForGroup() override { return g_core->group_number(group_->core.handle, id_); }
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

  using Works = c10::intrusive_ptr<c10d::Work>;

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
  // What it records of ATen is no part of the user's autograd graph, and bumps no version, as collectives do not.
  struct Guard {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
  };
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
  static c10::Device here() { return c10::Device(kSelf, t_device); }
  static uint64_t next_id() {
    static std::atomic<uint64_t> next{1};
    return next++ << 32;
  }
  template <class F>
  static void check_ok(F f) {
    OxiError e{};
    check(f(&e), e);
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
  static Tensors host_tensors(const Memory& memory) {
    Tensors all;
    for (auto& m : memory) all.push_back(host_tensor(m));
    return all;
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
  // Receives what one rank, or any (-1), sends, into each tensor; its turn is its own.
  struct Receive {
    struct Turn {
      std::shared_ptr<Receives::Turn> turn;
      Turn() = default;
      Turn(const Turn&) {}
      Turn(Turn&&) = default;
    };
    Host host;
    std::shared_ptr<Receives> all;
    int from, tag;
    Milliseconds limit;
    std::shared_ptr<std::atomic<int>> source;
    Turn own;
    void begin() { own.turn = std::make_shared<Receives::Turn>(all, tag, from < 0); }
    void operator()(const Memory&, const Memory& writes) const {
      own.turn->wait(limit);
      for (auto& m : writes) {
        int sender = receive(host, m, from, tag);
        if (source) *source = sender;
      }
    }
  };
  // Receives what one rank, or any (-1), sends; says from which. It is told the size first, as hosts abort where it differs.
  static int receive(const Host& host, const OxiMemory& m, int from, int tag) {
    int64_t length = 0;
    Tensors header{at::from_blob(&length, {1}, at::kLong)};
    auto work = from < 0 ? host->recvAnysource(header, tag) : host->recv(header, from, tag);
    work->wait();
    if (from < 0) from = work->sourceRank();
    bool fits = length == static_cast<int64_t>(m.len);
    Tensors one{fits ? host_tensor(m) : at::empty({length}, at::kByte)};
    host->recv(one, from, tag)->wait();
    TORCH_CHECK(fits, "rank ", from, " sent ", length, " bytes, and ", m.len, " were expected");
    return from;
  }
  // Whether each rank sends what its peer expects: hosts abort where one does not.
  static void check_splits(const Host& host, const c10d::AllToAllOptions& opts, std::vector<int64_t> in,
                           const std::vector<int64_t>& out) {
    std::vector<int64_t> sent(out.size()), none;
    Tensor from = at::from_blob(in.data(), {static_cast<int64_t>(in.size())}, at::kLong);
    Tensor to = at::from_blob(sent.data(), {static_cast<int64_t>(sent.size())}, at::kLong);
    host->alltoall_base(to, from, none, none, opts)->wait();
    int64_t fits = sent == out;
    Tensors one{at::from_blob(&fits, {1}, at::kLong)};
    c10d::AllreduceOptions o;
    o.reduceOp = ReduceOp::MIN;
    o.timeout = opts.timeout;
    host->allreduce(one, o)->wait();
    for (size_t r = 0; r < out.size(); r++) {
      TORCH_CHECK(sent[r] == out[r], "rank ", r, " sends ", sent[r], " bytes to this one, which expects ", out[r]);
    }
    TORCH_CHECK(fits, "another rank is sent other sizes than it expects");
  }
  // Each rank sends reads[r] to rank r; in one buffer, as hosts want it.
  static void exchange(const Host& host, const c10d::AllToAllOptions& opts, const Memory& reads, const Memory& writes) {
    auto lengths = [](const Memory& memory) {
      std::vector<int64_t> all;
      for (auto& m : memory) all.push_back(static_cast<int64_t>(m.len));
      return all;
    };
    auto in = lengths(reads), out = lengths(writes);
    check_splits(host, opts, in, out);
    exchange_parts(host, reads, writes, opts.timeout);
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

  // ---- programs
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
  Works works_of(OpType type, Records launched, Tensors results) {
    auto device = results.empty() ? here() : results[0].device();
    auto number = launched.empty() ? getSequenceNumberForGroup() : launched.back()->number();
    return c10::make_intrusive<GroupWork>(rank_, type, std::move(launched), std::move(results), device, number, false);
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
  // Raises what went wrong before; with the lock.
  void check_whole(const char* name) const {
    std::lock_guard<std::mutex> failed(group_->mutex);
    TORCH_CHECK_WITH(DistBackendError, group_->failure.empty(), name,
                     ": the process group cannot go on, as a collective failed before: ", group_->failure);
  }

  template <class Run>
  Works record(OpType type, Call call, const Tensors& reads, const Tensors& writes, bool in_place, Run run,
               const Tensors& results, std::optional<uint64_t> lane = std::nullopt, bool waits = false,
               std::shared_ptr<std::atomic<int>> source = nullptr) {
    if (!reads.empty() || !writes.empty()) call.dtype = (reads.empty() ? writes : reads)[0].scalar_type();
    auto task = std::make_unique<Does<Run>>(group_, std::move(call), std::move(run));
    return record_task(type, std::move(task), reads, writes, in_place, results, lane.value_or(id_), waits, std::move(source));
  }
  Works record_task(OpType type, std::unique_ptr<Task> task, const Tensors& reads, const Tensors& writes, bool in_place,
                    const Tensors& results, uint64_t lane, bool waits, std::shared_ptr<std::atomic<int>> source) {
    std::lock_guard<std::mutex> lock(mutex_);  // all ranks see the collectives of a group in one order
    auto& call = task->call;
    c10::Device device = here();
    if (!reads.empty() || !writes.empty()) device = (reads.empty() ? writes : reads)[0].device();
    auto described = [&](const Tensors& tensors) {
      c10::SmallVector<OxiTensor, 2> all(tensors.size());
      for (size_t i = 0; i < tensors.size(); i++) {
        TORCH_CHECK(tensors[i].device() == device, call.name, ": tensors on ", device, " and ", tensors[i].device());
        describe_kept(all[i], tensors[i]);
      }
      return all;
    };
    for (auto& t : writes) {
      at::assert_no_internal_overlap(t);
      make_own(t);
    }
    auto r = described(reads), w = described(writes);
    check_whole(call.name);
    if (!call.of_all) peers_number_++;
    call.waits = waits;
    auto& group = call.of_all ? group_->core : of_peer(call.name);
    OxiTask t{task.get(), call.name, group.handle, lane};
    task.release();
    OxiError e{};
    void* work = g_core->task(&t, device.index(), r.data(), static_cast<uint32_t>(r.size()), w.data(),
                              static_cast<uint32_t>(w.size()), in_place, &e);
    if (!work) check(OXI_ERROR, e);
    Records recorded(1, std::make_shared<Recorded>(work, device.index()));
    auto number = recorded[0]->number();
    if (coalesced_) coalesced_->push_back(recorded[0]);
    return c10::make_intrusive<GroupWork>(rank_, type, std::move(recorded), results, device, number, waits, std::move(source));
  }
  // By what the core names sends or receives, which have numbers of their own on each rank; with the lock.
  const CoreGroup& of_peer(const char* name) {
    auto& group = between_peers_[name];
    if (!group) {
      auto label = c10::str(group_->name, ", ", name, " of rank ", rank_);
      group = std::make_unique<CoreGroup>(label, options_->global_ranks_in_group);
    }
    return *group;
  }

  Host host_;
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Group> group_;
  uint64_t id_;
  std::vector<int32_t> devices_;
  bool programs_;
  std::atomic<uint64_t> peers_number_{0};
  std::shared_ptr<Receives> receives_ = std::make_shared<Receives>();
  std::mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<CoreGroup>> between_peers_;  // by the name of the call
  std::unique_ptr<Records> coalesced_;
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

// DDP's statistics of time, by when the device reaches what DDP marks in some of its steps. A mark launches nothing, or
// those steps would have other programs than the rest.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(c10::Device device) : device_(device) {}
  Timer(const Timer&) = delete;
  ~Timer() override {
    for (auto mark : marks_) g_core->event_drop(mark);
  }
  void record(Event event) override {
    c10d::Timer::record(event);  // the host's time
    auto& mark = marks_.at(static_cast<size_t>(event));
    g_core->event_drop(mark);
    mark = g_core->event_note(device_.index(), event == Event::kBackwardCommEnd);
  }
  // In nanoseconds. DDP asks before the next step of which it takes the times, and waits for the device then.
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto first = marks_.at(static_cast<size_t>(start)), last = marks_.at(static_cast<size_t>(end));
    if (!is_reached(first) || !is_reached(last)) return std::nullopt;
    OxiError e{};
    double ms = g_core->event_elapsed_ms(first, last, &e);
    if (e.message) raise(e);
    // One of them is of an earlier step, or the thread that tells of the first was later than the other's.
    return ms < 0 ? std::nullopt : std::optional<int64_t>(static_cast<int64_t>(ms * 1e6));
  }

 private:
  static bool is_reached(uint64_t mark) {
    if (!mark) return false;
    OxiError e{};
    check(g_core->event_wait(mark, &e), e);
    return g_core->event_query(mark);
  }
  c10::Device device_;
  std::array<uint64_t, 5> marks_{};  // by their numbers in c10d's enumeration; 0 is none
};
}  // namespace oxi_group

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, oxi_group::Timer)
}
