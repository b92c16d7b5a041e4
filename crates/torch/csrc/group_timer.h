// DDP's statistics of time, by when the device reaches what DDP marks in some of its steps. A mark launches nothing, or
// those steps would have other programs than the rest.
#pragma once

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <array>

#include "device.h"

namespace oxi_group {
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
