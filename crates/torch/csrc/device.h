// The device as PyTorch sees it: errors, storages, streams and events, generators, pinned memory, hooks.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <map>
#include <mutex>

#include "accelerator.h"
#include "oxitorch_abi.h"

// Python's object, as its headers name it; this file does without them.
struct _object;
namespace torch {
// As torch/csrc/Exceptions.h declares it: torch_python turns whatever derives from it into that Python exception.
struct PyTorchError : public std::exception {
  PyTorchError() = default;
  PyTorchError(std::string msg_) : msg(std::move(msg_)) {}
  virtual _object* python_type() = 0;
  const char* what() const noexcept override { return msg.c_str(); }
  std::string msg;
};
}  // namespace torch

namespace {
using at::Tensor;
using c10::DeviceIndex;
constexpr auto kSelf = c10::DeviceType::PrivateUse1;

const OxiCore* g_core = nullptr;
thread_local DeviceIndex t_device = 0;

// ---------------------------------------------------------------- errors
struct Interrupted final : torch::PyTorchError {
  explicit Interrupted(std::string m) : PyTorchError(std::move(m)), type(static_cast<_object*>(g_core->interrupted_by())) {}
  _object* python_type() override { return type; }
  _object* type;  // KeyboardInterrupt, or what a signal handler raised
};
[[noreturn]] void raise(const OxiError& e) {
  const char* m = e.message ? e.message : "unknown error";
  switch (e.kind) {
    case OXI_ERR_INDEX: TORCH_CHECK_INDEX(false, m);
    case OXI_ERR_TYPE: TORCH_CHECK_TYPE(false, m);
    case OXI_ERR_VALUE: TORCH_CHECK_VALUE(false, m);
    case OXI_ERR_NOT_IMPLEMENTED: TORCH_CHECK_NOT_IMPLEMENTED(false, m);
    case OXI_ERR_OUT_OF_MEMORY: TORCH_CHECK_WITH(OutOfMemoryError, false, m);
    case OXI_ERR_INTERRUPTED: throw Interrupted(m);
    case OXI_ERR_LINALG: TORCH_CHECK_LINALG(false, m);
    default: TORCH_CHECK(false, m);
  }
  abort();  // every branch above throws
}
inline void check(int32_t rc, const OxiError& e) {
  if (C10_UNLIKELY(rc != OXI_OK)) raise(e);
}
// What an op gives that asks for memory of this size; that there is none names the op.
template <class F>
auto naming(const char* op, c10::IntArrayRef size, F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const c10::OutOfMemoryError& e) {
    std::string text = e.what_without_backtrace();
    auto line = std::min(text.find("\n  called at"), text.size());
    text.insert(line, c10::str("\n  in aten::", op, "(", size, ")"));
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  }
}

// ---------------------------------------------------------------- storages
// A storage's data pointer is a fake address that only the core understands (a stray dereference faults); its context
// is the core's Slot. Pointers that PyTorch derives from it (pickling builds tensors over them) are looked up.
void drop_slot(void* slot) {
  g_core->drop_slot(slot);
}
c10::DataPtr data_ptr(void* slot, DeviceIndex device) {
  return {reinterpret_cast<void*>(g_core->address(slot)), slot, &drop_slot, c10::Device(kSelf, device)};
}
inline void* slot_of(const c10::DataPtr& p, int64_t& offset_bytes) {
  offset_bytes = 0;
  if (C10_LIKELY(p.get_deleter() == &drop_slot)) return p.get_context();
  void* slot = g_core->find(reinterpret_cast<uintptr_t>(p.get()), &offset_bytes);
  TORCH_CHECK(slot, "this tensor's storage was not allocated by the tpu device");
  return slot;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    OxiError e{};
    void* slot = g_core->alloc(n, t_device, &e);
    if (!slot) raise(e);
    return data_ptr(slot, t_device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // data and context differ
  void copy_data(void* dest, const void* src, size_t n) const override {
    const int64_t size = static_cast<int64_t>(n), stride = 1;
    auto bytes = [&](const void* p) {
      OxiTensor o{};
      o.slot = g_core->find(reinterpret_cast<uintptr_t>(p), &o.offset);
      TORCH_CHECK(o.slot, "the memory of a tpu tensor has no address: copy the tensor instead");
      o.sizes = &size, o.strides = &stride, o.ndim = 1, o.dtype = static_cast<int16_t>(at::kByte);
      o.flags = OXI_CONTIGUOUS, o.device_type = OXI_DEVICE_SELF, o.device_index = t_device;
      return o;
    };
    OxiTensor from = bytes(src), to = bytes(dest);
    OxiError e{};
    if (n > 0) check(g_core->copy(&from, &to, &e), e);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    int64_t m[8];
    g_core->memory(d, m);
    c10::CachingDeviceAllocator::DeviceStats s;
    auto set = [](auto& stat, const int64_t* v) {
      stat[0].current = v[0];
      stat[0].peak = v[1];
      stat[0].allocated = v[2];
      stat[0].freed = v[3];
    };
    set(s.allocated_bytes, m);
    set(s.reserved_bytes, m);
    set(s.active_bytes, m);
    set(s.allocation, m + 4);
    return s;
  }
  void resetAccumulatedStats(DeviceIndex d) override { g_core->reset_accumulated(d); }
  void resetPeakStats(DeviceIndex d) override { g_core->reset_peak(d); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    size_t free_bytes = 0, total = 0;
    g_core->memory_info(d, &free_bytes, &total);
    return {free_bytes, total};
  }
};
Allocator g_allocator;

// ---------------------------------------------------------------- devices, streams, events
void check_device(DeviceIndex d) {
  OxiError e{};
  check(g_core->check_device(d, &e), e);
}
uint64_t event_id(void* e) {
  return reinterpret_cast<uint64_t>(e);
}
// While it lives, events of this thread are not recorded: they are reached at once.
struct Unrecorded {
  static inline thread_local int here = 0;
  Unrecorded() { here++; }
  ~Unrecorded() { here--; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kSelf;
  static c10::Stream only(c10::Device d) { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::DeviceType type() const override { return kSelf; }
#ifdef OXI_HAS_CAPABILITY
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return oxi_accelerator::capability(); }
#endif
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device old(kSelf, t_device);
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return {kSelf, t_device}; }
  void setDevice(c10::Device d) const override {
    if (d.index() < 0) return;
    check_device(d.index());
    t_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) t_device = d.index();
  }
  // One queue per device: every stream is the default one.
  c10::Stream getStream(c10::Device d) const override { return only(d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return only(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return only(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return only(d.index() < 0 ? getDevice() : d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return only(s.device()); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(g_core->device_count()); }
  bool queryStream(const c10::Stream& s) const override { return g_core->is_idle(s.device_index()); }
  void synchronizeStream(const c10::Stream& s) const override { synchronizeDevice(s.device_index()); }
  void synchronizeDevice(const DeviceIndex d) const override {
    OxiError e{};
    check(g_core->synchronize(d, &e), e);
  }
  void record(void** event, const c10::Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (*event) g_core->event_drop(event_id(*event));
    *event = nullptr;
    if (Unrecorded::here) return;
    *event = reinterpret_cast<void*>(g_core->event_record(s.device_index()));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event) g_core->event_drop(event_id(event));
  }
  void block(void*, const c10::Stream&) const override {}  // one queue: already ordered
  bool queryEvent(void* event) const override { return !event || g_core->event_query(event_id(event)); }
  void synchronizeEvent(void* event) const override {
    OxiError e{};
    if (event) check(g_core->event_wait(event_id(event), &e), e);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    TORCH_CHECK(start && end, "both events must be recorded before their elapsed time is asked for");
    OxiError e{};
    double ms = g_core->event_elapsed_ms(event_id(start), event_id(end), &e);
    if (e.message) raise(e);
    return ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---------------------------------------------------------------- random numbers
// Philox: a seed and an offset counted in blocks of four 32-bit numbers.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Generator(DeviceIndex i) : c10::GeneratorImpl({kSelf, i}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return kSelf; }
  void set_current_seed(uint64_t s) override { seed_ = s, offset_ = 0; }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& s) override {
    TORCH_CHECK_TYPE(s.dtype() == caffe2::TypeMeta::Make<uint8_t>() && s.device().is_cpu() && s.is_contiguous(),
                     "RNG state must be a contiguous torch.ByteTensor on the CPU");
    TORCH_CHECK(s.numel() == 16,
                "RNG state of the tpu device has 16 bytes, got ", s.numel());
    memcpy(&seed_, s.data(), 8);
    memcpy(&offset_, static_cast<const char*>(s.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, at::kByte, false, std::nullopt);
    auto* p = static_cast<char*>(t.mutable_data_ptr());
    memcpy(p, &seed_, 8);
    memcpy(p + 8, &offset_, 8);
    return t.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* g = new Generator(device().index());
    g->seed_ = seed_, g->offset_ = offset_;
    return g;
  }
};
at::Generator& default_generator(DeviceIndex i) {
  static std::mutex mutex;
  static auto* all = new std::map<DeviceIndex, at::Generator>;
  if (i < 0) i = t_device;
  check_device(i);
  std::lock_guard<std::mutex> lock(mutex);
  auto it = all->find(i);
  if (it == all->end()) it = all->emplace(i, at::make_generator<Generator>(i)).first;
  return it->second;
}
Generator* generator(void* g, DeviceIndex device) {
  return static_cast<Generator*>(g ? g : default_generator(device).unsafeGetGeneratorImpl());
}

// ---------------------------------------------------------------- pinned host memory
// Page-aligned, so that a plugin may alias it; "pinned" is otherwise a promise that this host need not make.
struct PinnedAllocator final : at::HostAllocator {
  static std::mutex& mutex() {
    static auto* m = new std::mutex;
    return *m;
  }
  static std::map<uintptr_t, size_t>& blocks() {
    static auto* m = new std::map<uintptr_t, size_t>;
    return *m;
  }
  static void release(void* p) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      blocks().erase(reinterpret_cast<uintptr_t>(p));
    }
    free(p);
  }
  static bool owns(const void* p) {
    auto a = reinterpret_cast<uintptr_t>(p);
    std::lock_guard<std::mutex> lock(mutex());
    auto it = blocks().upper_bound(a);
    if (it == blocks().begin()) return false;
    --it;
    return a < it->first + it->second;
  }
  c10::DataPtr allocate(size_t n) override {
    constexpr size_t kPage = 4096;
    TORCH_CHECK_WITH(OutOfMemoryError, n < (size_t(1) << 62), "cannot pin ", n, " bytes");
    size_t bytes = std::max<size_t>((n + kPage - 1) / kPage * kPage, kPage);
    void* p = aligned_alloc(kPage, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, p, "cannot pin ", n, " bytes of host memory");
    std::lock_guard<std::mutex> lock(mutex());
    blocks()[reinterpret_cast<uintptr_t>(p)] = bytes;
    return {p, p, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* d, const void* s, size_t n) const override { memcpy(d, s, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator g_pinned;

// ---------------------------------------------------------------- hooks
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return deviceCount() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(g_core->device_count()); }
  void setCurrentDevice(DeviceIndex d) const override {
    check_device(d);
    t_device = d;
  }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = t_device;
    setCurrentDevice(d);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    auto old = t_device;
    if (d >= 0 && d < deviceCount()) t_device = d;
    return old;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override { return at::make_generator<Generator>(i < 0 ? t_device : i); }
  c10::Device getDeviceFromPtr(void*) const override { return {kSelf, t_device}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned; }
  bool isPinnedPtr(const void* p) const override { return PinnedAllocator::owns(p); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    TORCH_CHECK(static_cast<int64_t>(n) >= 0, "a storage cannot have ", static_cast<int64_t>(n), " bytes");
    auto* impl = s.unsafeGetStorageImpl();
    int64_t offset_bytes;
    void* old = slot_of(impl->_mutable_data_ptr_no_checks(), offset_bytes);
    OxiError e{};
    void* slot = g_core->resized(old, n, &e);
    if (!slot) raise(e);
    impl->set_data_ptr_noswap(data_ptr(slot, s.device().index()));
    impl->set_nbytes(n);
  }
};
}  // namespace
