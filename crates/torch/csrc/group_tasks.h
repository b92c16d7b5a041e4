// What a process does in a collective, as a task that the core runs in its turn: first the ranks compare what they are about
// to do, and if that or the task fails, each says what all were about. And c10d's work, by which its caller knows of it.
#pragma once

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "alone.h"
#include "group_messages.h"
#include "tensors.h"

namespace oxi_group {
using c10d::OpType;
using c10d::ReduceOp;

// ---------------------------------------------------------------- ranks that do not do the same
// Hosts hang or abort where ranks call different collectives, or with other sizes. So each collective begins with a small
// one, by which all ranks know whether they agree; if not, or if the host fails, each says what the others were about.
struct CoreGroup {  // a group as the core names it in tasks: its own, or one of those between two peers
  CoreGroup(const std::string& name, const std::vector<uint64_t>& ranks)
      : handle(g_core->group(name.c_str(), ranks.data(), static_cast<uint32_t>(ranks.size()))) {}
  CoreGroup(const CoreGroup&) = delete;
  ~CoreGroup() { g_core->group_drop(handle); }
  void* handle;
};
struct Group {  // what the tasks of a group share
  Group(Host host, c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend::Options> options)
      : alone(dynamic_cast<Alone*>(host.get())), name(options->group_name.empty() ? "default" : options->group_name),
        core(name, options->global_ranks_in_group), host(host), store(std::move(store)), options(std::move(options)),
        comparison(std::move(host)) {}
  const bool alone;  // the others are taken to do and say the same
  const std::string name;
  const CoreGroup core;
  Host host;
  c10::intrusive_ptr<c10d::Store> store;  // may be null
  c10::intrusive_ptr<c10d::Backend::Options> options;
  Comparison comparison;  // of the thread of the group's lane
  std::mutex mutex;
  std::string failure;  // of the first task that failed: ranks are not where each other believes
  bool ended = false;
  std::string key(int rank) const { return "oxitorch/failed/" + name + "/" + std::to_string(rank); }
};
// Which sizes all ranks have in common.
enum class Common { NOTHING, READS, WRITES };
struct Call {  // what a task does, in few words
  const char* name;  // a literal
  at::ScalarType dtype = at::kByte;
  const char* reduction = "";
  int64_t root = -1;
  Common common = Common::WRITES;
  bool of_all = true;  // not of two peers
  bool waits = false;  // Python waits for it
  std::string program;  // of a collective that is one: what each rank has
  std::string words(const Memory& reads, const Memory& writes) const {
    std::string text;
    auto add = [&](const std::string& word) { text += (text.empty() ? "" : ", ") + word; };
    if (!program.empty()) add(program);
    for (auto& m : common == Common::NOTHING || !program.empty() ? Memory() : common == Common::READS ? reads : writes) {
      add(std::string(at::toString(dtype)) + "[" + std::to_string(m.len / c10::elementSize(dtype)) + "]");
    }
    if (common == Common::NOTHING && program.empty()) add(at::toString(dtype));
    if (*reduction) add(std::string("op=") + reduction);
    if (root >= 0) add("root=" + std::to_string(root));
    return std::string(name) + "(" + text + ")";
  }
};
using Rows = std::vector<const uint8_t*>;  // what each rank carried
struct Task {
  Task(std::shared_ptr<Group> group, Call call) : group(std::move(group)), call(std::move(call)) {}
  virtual ~Task() = default;
  // The core has recorded it.
  virtual void begin() {}
  // The same, not recorded yet.
  virtual std::unique_ptr<Task> again() const = 0;
  virtual void run(const Memory& reads, const Memory& writes) = 0;
  // For little data: what this rank has to say, and the same with what all had to say.
  virtual std::optional<Memory> carries(const Memory& reads, const Memory& writes) const = 0;
  virtual void run_carried(const Rows& rows, const Memory& reads, const Memory& writes) = 0;
  const std::shared_ptr<Group> group;
  Call call;
  uint64_t number = 0;
};
template <class Run, class = void>
constexpr bool kBegins = false;
template <class Run>
constexpr bool kBegins<Run, std::void_t<decltype(std::declval<Run&>().begin())>> = true;
// What is done, as a function of `run`'s arguments, and perhaps also of those of `run_carried`: then it says what it carries. It
// may have to know when it begins.
template <class Run>
struct Does final : Task {
  static constexpr bool kCarries = std::is_invocable_v<Run&, const Rows&, const Memory&, const Memory&>;
  Does(std::shared_ptr<Group> group, Call call, Run does) : Task(std::move(group), std::move(call)), does(std::move(does)) {}
  void begin() override {
    if constexpr (kBegins<Run>) does.begin();
  }
  std::unique_ptr<Task> again() const override { return std::make_unique<Does>(group, call, does); }
  void run(const Memory& reads, const Memory& writes) override { does(reads, writes); }
  std::optional<Memory> carries(const Memory& reads, const Memory& writes) const override {
    if constexpr (kCarries) return does.carries(reads, writes);
    return std::nullopt;
  }
  void run_carried(const Rows& rows, const Memory& reads, const Memory& writes) override {
    if constexpr (kCarries) does(rows, reads, writes);
  }
  Run does;
};
inline uint64_t hash(const std::string& text) {  // FNV-1a; never 0
  uint64_t h = 0xcbf29ce484222325;
  for (unsigned char c : text) h = (h ^ c) * 0x100000001b3;
  return h ? h : 1;
}
// Of what a rank says of itself.
constexpr size_t kWords = 512;
constexpr const char* kDisagree = "the ranks do not do the same:";
// Raises what each rank is about, unless that is the same.
inline void agree(Group& group, const std::string& words, const Memory& carried, const std::function<std::string()>& line) {
  auto about = hash(words + "#" + std::to_string(carried_bytes(carried)));
  if (group.comparison.is_same(about, carried, group.options->timeout)) return;
  auto size = static_cast<size_t>(group.host->getSize());
  std::string own = words + " at " + line(), all(size * kWords, '\0');
  own.resize(kWords);
  auto bytes = [](char* at) { return at::from_blob(at, {static_cast<int64_t>(kWords)}, at::kByte); };
  Tensors in{bytes(own.data())};
  std::vector<Tensors> out(1);
  for (size_t r = 0; r < size; r++) out[0].push_back(bytes(all.data() + r * kWords));
  group.host->allgather(out, in)->wait();
  std::string text = kDisagree;
  for (size_t r = 0; r < size; r++) {
    text += "\n  rank " + std::to_string(r) + ": " + std::string(all, r * kWords, kWords - 1).c_str();
  }
  TORCH_CHECK(false, text);
}
// How long a rank that failed waits for what the others say, and for the store, which may be out of reach: a call of it
// has no timeout.
constexpr Milliseconds kPatience(2000), kStorePatience(4000);
// What the ranks were about when the host failed, as far as they say it.
inline std::string said_by_ranks(const Group& group, const std::string& own) {
  std::string text;
  int size = group.host->getSize();
  group.store->set(group.key(group.host->getRank()), std::vector<uint8_t>(own.begin(), own.end()));
  std::vector<bool> said(size);
  auto until = std::chrono::steady_clock::now() + kPatience;
  for (bool late = false; !late; std::this_thread::sleep_for(Milliseconds(100))) {
    late = std::chrono::steady_clock::now() > until;
    for (int r = 0; r < size; r++) said[r] = said[r] || group.store->check({group.key(r)});
    if (std::find(said.begin(), said.end(), false) == said.end()) break;
  }
  for (int r = 0; r < size; r++) {
    text += "\n  rank " + std::to_string(r) + ": ";
    if (said[r]) {
      auto words = group.store->get(group.key(r));
      text.append(words.begin(), words.end());
    } else {
      text += "says nothing: it has ended, or has not come so far; if it computes or compiles for longer than the "
              "timeout, give init_process_group(timeout=...) more";
    }
  }
  return text;
}
inline std::string standing(const std::shared_ptr<Group>& group, const std::string& own) {
  if (!group->store) return "";
  struct Answer {  // no std::promise, which takes a symbol of glibc 2.34, and no steady clock, which takes one of 2.30
    std::mutex mutex;
    std::condition_variable there;
    bool done = false;
    std::string text;
  };
  auto answer = std::make_shared<Answer>();
  std::thread([group, own, answer] {
    std::string text;
    try {
      text = said_by_ranks(*group, own);
    } catch (const std::exception&) {  // the store does not answer
    }
    std::lock_guard<std::mutex> lock(answer->mutex);
    answer->text = std::move(text);
    answer->done = true;
    answer->there.notify_one();
  }).detach();
  std::unique_lock<std::mutex> lock(answer->mutex);
  answer->there.wait_until(lock, std::chrono::system_clock::now() + kStorePatience, [&] { return answer->done; });
  if (!answer->text.empty()) return answer->text;
  return "\n  " + own + "\n  the store by which the ranks met does not answer";
}
// Whether ranks compare what they are about to do. A bench that measures what it costs has them not.
inline std::atomic<bool> g_compares{true};
inline void run_task(Task& task, const char* declined, const Memory& reads, const Memory& writes,
                     const std::function<std::string()>& line) {
  auto& group = *task.group;
  auto words = task.call.words(reads, writes);
  if (declined) words += std::string(", which this rank cannot do: ") + declined;
  std::string what;
  try {
    auto carried = declined || group.alone ? std::nullopt : task.carries(reads, writes);
    auto ranks = static_cast<size_t>(group.host->getSize());
    if (carried && carried_bytes(*carried) > most_carried(ranks)) carried.reset();
    bool compares = task.call.of_all && !group.alone && (g_compares || carried || declined);
    if (compares) agree(group, words, carried.value_or(Memory()), line);
    if (declined) return;
    if (!carried) return task.run(reads, writes);
    g_messages.carrying++;
    return task.run_carried(group.comparison.carried(), reads, writes);
  } catch (const c10::Error& e) {
    what = e.what_without_backtrace();
  } catch (const std::exception& e) {
    what = e.what();
  }
  auto number = "number " + std::to_string(task.number);
  if (what.rfind(kDisagree, 0) != 0) what += standing(task.group, number + ", " + words + " at " + line());
  std::string text = c10::str(words, ", ", number, " of process group ", group.name, ", rank ", group.host->getRank(),
                              " of ", group.host->getSize(), ": ", what);
  {
    std::lock_guard<std::mutex> lock(group.mutex);
    if (group.failure.empty()) group.failure = text;
  }
  TORCH_CHECK_WITH(DistBackendError, false, text);
}
inline int32_t run(void* context, const char* declined, const OxiMemory* reads, uint32_t nreads, const OxiMemory* writes, uint32_t nwrites,
                   void (*line)(const void* place, char* text, size_t size), const void* place, OxiError* error) {
  static thread_local std::string message;
  try {
    c10::InferenceMode inference;
    auto here = [&] {
      char text[256] = "";
      line(place, text, sizeof(text));
      return std::string(text);
    };
    run_task(*static_cast<Task*>(context), declined, Memory(reads, reads + nreads), Memory(writes, writes + nwrites), here);
    return OXI_OK;
  } catch (const c10::Error& e) {
    message = e.what_without_backtrace();
  } catch (const std::exception& e) {
    message = e.what();
  } catch (...) {
    message = "an exception that is none of C++'s";
  }
  error->message = message.c_str();
  return OXI_ERROR;
}
inline void begin(void* context, uint64_t number) {
  auto* task = static_cast<Task*>(context);
  task->number = number;
  task->begin();
}
inline void* again(const void* context) {
  auto* task = static_cast<const Task*>(context);
  if (task->call.waits) return nullptr;
  {
    std::lock_guard<std::mutex> lock(task->group->mutex);
    if (task->group->ended || !task->group->failure.empty()) return nullptr;
  }
  return task->again().release();
}
inline void drop(void* context) {
  delete static_cast<Task*>(context);
}

// ---------------------------------------------------------------- receives
// What a rank sends is two messages for the host: the size and the bytes. A receive from any rank and one from that rank
// would each take one of them, so those keep the order in which they were recorded. Receives from certain ranks wait for
// none but these: blocking calls in any order must find each other.
class Receives {
 public:
  // A receive, from when it is recorded until it is done or will not be.
  class Turn {
   public:
    Turn(std::shared_ptr<Receives> all, int tag, bool from_any) : all_(std::move(all)) {
      std::lock_guard<std::mutex> lock(all_->mutex_);
      number_ = all_->next_++;
      all_->open_.push_back({number_, tag, from_any});
    }
    Turn(const Turn&) = delete;
    ~Turn() {
      std::lock_guard<std::mutex> lock(all_->mutex_);
      auto& open = all_->open_;
      open.erase(std::find_if(open.begin(), open.end(), [&](auto& o) { return o.number == number_; }));
      all_->ended_.notify_all();
    }
    // Waits for those before it that may take its messages.
    void wait(Milliseconds timeout) const {
      std::unique_lock<std::mutex> lock(all_->mutex_);
      auto& open = all_->open_;
      auto own = *std::find_if(open.begin(), open.end(), [&](auto& o) { return o.number == number_; });
      auto is_first = [&] {
        return std::none_of(open.begin(), open.end(), [&](auto& o) {
          return o.number < own.number && o.tag == own.tag && (o.from_any || own.from_any);
        });
      };
      // No steady clock, as above.
      TORCH_CHECK(all_->ended_.wait_until(lock, std::chrono::system_clock::now() + timeout, is_first),
                  "a receive before it, with the same tag, was not done after ", timeout.count(), " ms");
    }

   private:
    std::shared_ptr<Receives> all_;
    uint64_t number_;
  };

 private:
  struct Open {
    uint64_t number;
    int tag;
    bool from_any;
  };
  std::mutex mutex_;
  std::condition_variable ended_;
  uint64_t next_ = 0;
  std::vector<Open> open_;
};

// ---------------------------------------------------------------- work
struct Recorded {  // a task or a collective that the core has
  void* work;
  int32_t device;
  Recorded(void* work, int32_t device) : work(work), device(device) {}
  Recorded(const Recorded&) = delete;
  uint64_t number() const { return g_core->task_number(work); }
  ~Recorded() { g_core->task_drop(work); }
  // Whether it is done; raises what went wrong.
  bool wait(int64_t ms) const {
    OxiError e{};
    int32_t code = g_core->task_outcome(work, device, ms, &e);
    if (code == OXI_PENDING) return false;
    check(code, e);
    return true;
  }
};

using Records = c10::SmallVector<std::shared_ptr<Recorded>, 1>;

class GroupWork final : public c10d::Work {
 public:
  // `waits`: the caller is to wait for the other processes, and not only the device.
  GroupWork(int rank, OpType type, Records tasks, Tensors results, c10::Device device,
            uint64_t number, bool waits, std::shared_ptr<std::atomic<int>> source = nullptr)
      : Work(rank, type), tasks_(std::move(tasks)), results_(std::move(results)), device_(device), number_(number),
        waits_(waits), source_(std::move(source)) {}

  bool isCompleted() override {
    try {
      return done(0);
    } catch (...) {
      return true;
    }
  }
  bool isSuccess() const override { return !failure(); }
  std::exception_ptr exception() const override { return failure(); }
  int sourceRank() const override {
    done(-1);
    return source_ ? source_->load() : rank_;
  }
  Tensors result() override { return results_; }
  void synchronize() override { done(waits_ ? -1 : 0); }
  bool wait(Milliseconds timeout = kNoTimeout) override {
    if (timeout == kNoTimeout) {
      synchronize();
    } else {
      TORCH_CHECK_WITH(DistBackendError, done(timeout.count()), c10d::opTypeToString(opType_), " was not done after ",
                       timeout.count(), " ms");
    }
    return true;
  }
  void abort() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    if (waits_) done(-1);
    auto type = c10::ListType::create(c10::TensorType::get());
    // What follows on the device is behind the collective anyway: no event has to say so.
    Unrecorded guard;
    future_ = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{device_});
    future_->markCompleted(c10::IValue(results_));
    return future_;
  }
  uint64_t getSequencenumber() const override { return number_; }
  const Records& tasks() const { return tasks_; }

 private:
  bool done(int64_t ms) const {
    bool all = true;
    for (auto& task : tasks_) all &= task->wait(ms);
    return all;
  }
  std::exception_ptr failure() const {
    try {
      done(0);
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }
  Records tasks_;
  Tensors results_;
  c10::Device device_;
  uint64_t number_;
  bool waits_;
  std::shared_ptr<std::atomic<int>> source_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};
}  // namespace oxi_group
