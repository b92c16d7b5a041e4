// Results of PyTorch's kernels in the memory where a program wants them.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "tensors.h"

namespace {
// ---------------------------------------------------------------- memory for results
// A kernel asks PyTorch's allocator for the memory of its results. While a program's call runs in a thread, what has the size
// of a result gets that result's memory, so that it need not be copied, nor the system clear pages for it. Whatever it was
// meant for: that is looked at when the kernel has returned.
struct Place {
  void* at;
  size_t bytes;
  bool taken;
};
using Places = std::vector<Place>;
// Of the call that this thread runs.
thread_local Places* own_places = nullptr;
// Of all threads' calls, as memory that one has taken may be given back by another.
struct Active {
  std::mutex mutex;
  std::vector<Places*> all;
};
Active& active() {
  static auto* a = new Active;
  return *a;
}

// PyTorch's allocator for the CPU, but for these.
class ResultAllocator final : public c10::Allocator {
 public:
  static bool install() {
    static bool installed = [] {
      rest = c10::GetCPUAllocator();
      if (!rest->raw_deleter()) return false;
      auto* own = new ResultAllocator;
      c10::SetCPUAllocator(own, 1);
      return c10::GetCPUAllocator() == own;  // not where somebody's own is stronger
    }();
    return installed;
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (own_places && bytes) {
      std::lock_guard<std::mutex> lock(active().mutex);
      for (auto& p : *own_places) {
        if (p.taken || p.bytes != bytes) continue;
        p.taken = true;
        return {p.at, p.at, &give_back, c10::Device(c10::DeviceType::CPU)};
      }
    }
    return rest->allocate(bytes);
  }
  // Of what was allocated raw, either way.
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static inline c10::Allocator* rest = nullptr;
  static void give_back(void* at) {
    {
      std::lock_guard<std::mutex> lock(active().mutex);
      for (auto* places : active().all) {
        auto it = std::find_if(places->begin(), places->end(), [&](const Place& p) { return p.at == at; });
        if (it == places->end()) continue;
        it->taken = false;
        return;
      }
    }
    rest->raw_deleter()(at);
  }
};

// The results of a call, each in its memory. While it lives, this thread's kernels are given that.
class Results {
 public:
  Results() = default;
  void want(std::vector<Tensor> wanted) {
    wanted_ = std::move(wanted);
    if (!ResultAllocator::install()) return;
    for (auto& t : wanted_) {
      if (t.defined() && t.nbytes() && t.is_non_overlapping_and_dense()) places_.push_back({t.data_ptr(), t.nbytes(), false});
    }
    std::lock_guard<std::mutex> lock(active().mutex);
    active().all.push_back(&places_);
    own_places = &places_;
  }
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;
  ~Results() {
    own_places = nullptr;
    std::lock_guard<std::mutex> lock(active().mutex);
    auto& all = active().all;
    all.erase(std::remove(all.begin(), all.end(), &places_), all.end());
  }
  // Takes what a kernel returned, and leaves nothing of it.
  void take(torch::jit::Stack& stack) {
    own_places = nullptr;
    std::vector<std::pair<Tensor, Tensor>> copies;
    for (size_t i = 0; i < wanted_.size(); i++) {
      if (!wanted_[i].defined()) continue;
      auto t = stack.at(i).toTensor();
      if (is_there(t, wanted_[i])) continue;
      // It may be where another result belongs, or in another order where it belongs itself.
      copies.emplace_back(wanted_[i], is_in_place(t) ? t.clone() : t);
    }
    stack.clear();
    for (auto& [to, from] : copies) to.copy_(from);
    copies.clear();
    std::lock_guard<std::mutex> lock(active().mutex);
    bool kept = std::any_of(places_.begin(), places_.end(), [](const Place& p) { return p.taken; });
    TORCH_CHECK(!kept, "the kernel keeps the memory of a result; please report this");
  }

 private:
  static bool is_there(const Tensor& t, const Tensor& wanted) {
    if (t.data_ptr() != wanted.data_ptr() || t.scalar_type() != wanted.scalar_type() || t.sizes() != wanted.sizes()) return false;
    for (int64_t d = 0; d < t.dim(); d++) {
      if (t.size(d) > 1 && t.stride(d) != wanted.stride(d)) return false;
    }
    return true;
  }
  bool is_in_place(const Tensor& t) const {
    const void* at = t.storage().data();
    return std::any_of(places_.begin(), places_.end(), [&](const Place& p) { return p.at == at; });
  }
  std::vector<Tensor> wanted_;
  Places places_;
};
}  // namespace
