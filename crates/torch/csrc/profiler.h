// What torch.profiler shows of the core: launches, compiles, waits and copies on the host, programs on the device.
//
// PyTorch's profiler is Kineto, which asks child profilers for what happened between a start and a stop. From 2.15's
// headers on there is a registry for backends from outside; before, Kineto is told itself. Nothing runs while no
// profiler does.
#pragma once

#if __has_include(<libkineto.h>) && __has_include(<output_base.h>)
#define OXI_HAS_KINETO
#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY
#endif
#ifndef KINETO_NAMESPACE
#define KINETO_NAMESPACE libkineto
#endif
#include <libkineto.h>
#include <output_base.h>
#if __has_include(<torch/csrc/profiler/standalone/privateuse1_profiler.h>)
#ifndef USE_KINETO
#define USE_KINETO
#endif
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>
#define OXI_HAS_REGISTRY
#endif

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "oxitorch_abi.h"

namespace oxi_profiler {
using libkineto::ActivityType;

inline const OxiCore*& core() {
  static const OxiCore* core = nullptr;
  return core;
}

// Correlates a launch with its program. PyTorch's own numbers count up from 1.
constexpr uint64_t kFirstCorrelation = 1u << 30;
constexpr uint64_t kFirstOther = kFirstCorrelation + (1u << 29);

// Numbers of the operations and ranges that run in this thread, as PyTorch's profiler counts them.
inline std::vector<uint64_t>& running() {
  static thread_local std::vector<uint64_t> numbers;
  return numbers;
}

// The innermost; 0 while there is none, or no profiler.
inline uint64_t running_now() {
  return running().empty() ? 0 : running().back();
}

class Session : public libkineto::IActivityProfilerSession {
 public:
  explicit Session(bool device) : device_(device), buffer_(std::make_unique<libkineto::CpuTraceBuffer>()) {
    buffer_->gpuOpCount = 0;
    buffer_->span.name = "oxitorch";
  }

  void start() override {
    running().clear();
    number_ = core()->profile_start();
    status_ = libkineto::TraceStatus::RECORDING;
  }

  void stop() override {
    if (number_ == 0) {
      return;
    }
    auto visit = [](void* self, const OxiSpan* span) { static_cast<Session*>(self)->add(*span); };
    core()->profile_stop(number_, visit, this);
    number_ = 0;
    status_ = libkineto::TraceStatus::PROCESSING;
  }

  std::vector<std::string> errors() override {
    return {};
  }

  void processTrace(libkineto::ActivityLogger& logger) override {
    for (const auto& [activity, _] : all_) {
      activity->log(logger);
    }
  }

  // Time on the device belongs to the operation or range in which it was launched.
  void processTrace(
      libkineto::ActivityLogger& logger,
      libkineto::getLinkedActivityCallback activity_of,
      int64_t,
      int64_t) override {
    for (auto& [activity, launched_in] : all_) {
      activity->linked = launched_in == 0 ? nullptr : activity_of(static_cast<int32_t>(launched_in));
    }
    processTrace(logger);
  }

  void pushCorrelationId(uint64_t id) override {
    running().push_back(id);
  }
  void popCorrelationId() override {
    pop();
  }
  void pushUserCorrelationId(uint64_t id) override {
    running().push_back(id);
  }
  void popUserCorrelationId() override {
    pop();
  }

  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override {
    if (!device_) {
      return nullptr;
    }
    // A brace list: it had a constructor in older headers.
    return std::unique_ptr<libkineto::DeviceInfo>(
        new libkineto::DeviceInfo{0, libkineto::kExceedMaxPid, std::string("tpu"), std::string("tpu 0")});
  }

  std::vector<libkineto::ResourceInfo> getResourceInfos() override {
    return {};
  }

  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override {
    return std::move(buffer_);
  }

 private:
  // A range may have begun before the profiler.
  static void pop() {
    if (!running().empty()) {
      running().pop_back();
    }
  }

  void add(const OxiSpan& span) {
    const bool on_device = span.kind == OXI_SPAN_PROGRAM;
    if (on_device && !device_) {
      return;
    }
    buffer_->emplace_activity(
        buffer_->span, on_device ? ActivityType::CONCURRENT_KERNEL : ActivityType::PRIVATEUSE1_RUNTIME, span.name);
    auto& activity = *buffer_->activities.back();
    activity.startTime = span.start_ns;
    activity.endTime = span.end_ns;
    activity.device = on_device ? span.device : libkineto::processId();
    activity.resource = on_device ? 0 : static_cast<int32_t>(span.thread);
    activity.threadId = activity.resource;
    // Without a number of its own it would be taken for the operation that PyTorch gave the same one.
    activity.id = static_cast<int32_t>(kFirstOther + all_.size());
    if (span.window != 0) {
      activity.id = static_cast<int32_t>(kFirstCorrelation + span.window % (kFirstOther - kFirstCorrelation));
      activity.flow.id = static_cast<uint32_t>(activity.id);
      activity.flow.type = libkineto::kLinkAsyncCpuGpu;
      activity.flow.start = !on_device;
    }
    if (span.line[0] != 0) {
      std::string line;
      for (const char* c = span.line; *c != 0; ++c) {
        line += *c == '"' || *c == '\\' ? '\'' : *c;
      }
      activity.addMetadataQuoted("line", line);
    }
    if (span.bytes >= 0) {
      activity.addMetadata("bytes", span.bytes);
    }
    all_.emplace_back(&activity, span.launched_in);
  }

  bool device_;
  uint64_t number_ = 0;
  // Kineto takes the buffer before or after it asks for what is in it.
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
  std::vector<std::pair<libkineto::GenericTraceActivity*, uint64_t>> all_;
};

class Profiler : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override {
    return name_;
  }

  const std::set<ActivityType>& availableActivities() const override {
    return types_;
  }

  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& wanted, const libkineto::Config&) override {
    return std::make_unique<Session>(wanted.count(ActivityType::CONCURRENT_KERNEL) != 0);
  }

  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t, int64_t, const std::set<ActivityType>& wanted, const libkineto::Config& config) override {
    return configure(wanted, config);
  }

 private:
  std::string name_ = "oxitorch";
  std::set<ActivityType> types_{ActivityType::CONCURRENT_KERNEL, ActivityType::PRIVATEUSE1_RUNTIME};
};

inline void install(const OxiCore* table) {
  core() = table;
#ifdef OXI_HAS_REGISTRY
  torch::profiler::impl::PrivateUse1ProfilerRegistry::instance().registerFactory(
      [] { return std::make_unique<Profiler>(); });
#else
  libkineto::api().registerProfilerFactory([] { return std::make_unique<Profiler>(); });
#endif
}
}  // namespace oxi_profiler
#else
namespace oxi_profiler {
// PyTorch without Kineto has nothing to show this in.
inline void install(const OxiCore*) {}
inline uint64_t running_now() {
  return 0;
}
}  // namespace oxi_profiler
#endif
