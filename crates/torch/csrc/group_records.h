// How a process group records: a collective is a task of the core, in the order of the device's ops.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "group_tasks.h"

namespace oxi_group {
class Recorder : public c10d::Backend {
 public:
  using Works = c10::intrusive_ptr<c10d::Work>;

  Recorder(Host host, c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<Options> options)
      : Backend(host->getRank(), host->getSize()), host_(host), options_(options),
        group_(std::make_shared<Group>(std::move(host), std::move(store), std::move(options))), id_(next_id()) {}

  uint64_t getSequenceNumberForGroup() override { return g_core->group_number(group_->core.handle, id_); }

 protected:
  // What it records of ATen is no part of the user's autograd graph, and bumps no version, as collectives do not.
  struct Guard {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
  };
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
  Works works_of(OpType type, Records launched, Tensors results) {
    auto device = results.empty() ? here() : results[0].device();
    auto number = launched.empty() ? getSequenceNumberForGroup() : launched.back()->number();
    return c10::make_intrusive<GroupWork>(rank_, type, std::move(launched), std::move(results), device, number, false);
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
  std::atomic<uint64_t> peers_number_{0};
  std::mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<CoreGroup>> between_peers_;  // by the name of the call
  std::unique_ptr<Records> coalesced_;
};
}  // namespace oxi_group
