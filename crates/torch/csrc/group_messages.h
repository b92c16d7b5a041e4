// The messages by which the ranks of a group compare what they are about to do, and those that take data from each rank to
// each. Both are sends and receives of the host in the caller's thread: a host's collectives have threads of their own, and
// to wake one takes as long as a small collective.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "alone.h"
#include "tensors.h"

namespace oxi_group {
using at::Tensor;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<Tensor>;
using Host = c10::intrusive_ptr<c10d::Backend>;
using HostWork = c10::intrusive_ptr<c10d::Work>;

// ---------------------------------------------------------------- memory of the host
using Memory = std::vector<OxiMemory>;
inline Tensor host_tensor(const OxiMemory& m, at::ScalarType dtype = at::kByte) {
  return at::from_blob(m.bytes, {static_cast<int64_t>(m.len / c10::elementSize(dtype))}, dtype);
}
// So many equal parts of it, or parts of these sizes.
inline Memory parts(const OxiMemory& m, const std::vector<int64_t>& sizes) {
  Memory all;
  auto* at = static_cast<char*>(m.bytes);
  for (auto n : sizes) {
    all.push_back({at, static_cast<size_t>(n)});
    at += n;
  }
  return all;
}
inline Memory parts(const OxiMemory& m, size_t count) {
  return parts(m, std::vector<int64_t>(count, static_cast<int64_t>(m.len / count)));
}

// ---------------------------------------------------------------- tags
// From here on tags are the group's own, and a user's are refused: a tag for each round of a comparison, and one for data.
constexpr int kTags = 0x7fff0000, kDataTag = kTags + 64;

// ---------------------------------------------------------------- comparing
// Of all groups of this process, for tests: messages sent to compare, and collectives whose data went with them.
struct Messages {
  std::atomic<uint64_t> sent{0}, carrying{0};
};
inline Messages g_messages;

// The bytes of a message before the data, and what the places of data are multiples of.
constexpr size_t kHead = 16;
constexpr size_t padded(size_t bytes) { return (bytes + kHead - 1) / kHead * kHead; }
// What all ranks receive of this together, at most: each gets what each carries. Beyond, to send each rank only what it needs
// takes less; and a message should fit into what a connection buffers.
constexpr size_t kCarried = 2 << 20;
inline size_t most_carried(size_t ranks) { return kCarried / (ranks * ranks) / kHead * kHead; }
// Two ranks take turns to send up to so many bytes; beyond, both send at once.
constexpr size_t kTurns = 2 << 20;
inline size_t carried_bytes(const Memory& data) {
  size_t bytes = 0;
  for (auto& m : data) bytes += padded(m.len);
  return bytes;
}

// Each rank says what it is about, as a number, and the data of a small collective goes with that. All know what all say in
// log2 rounds; a host's own gathering goes round a ring. Receives are posted ahead, since a host sends nothing before it
// knows that it is awaited. One thread at a time compares.
//
// Of two ranks that send each other, one sends first. Where both send at once, gloo's thread that reads finds the connection
// locked by the thread that writes, and tries again and again; if the two share a core, until the scheduler takes it away,
// some milliseconds later.
class Comparison {
 public:
  explicit Comparison(Host host) : host_(std::move(host)) {
    auto size = static_cast<size_t>(host_->getSize()), rank = static_cast<size_t>(host_->getRank());
    said_.resize(size);
    int tag = kTags;
    for (size_t known = 1; known < size; known *= 2, tag++) {
      rounds_.push_back({known, std::min(known, size - known), static_cast<int>((rank + size - known) % size),
                         static_cast<int>((rank + known) % size), tag, {}, 0, {}});
    }
  }
  Comparison(const Comparison&) = delete;

  // Whether all ranks are about the same; `about` is not 0. Then `carried` has the data of each.
  bool is_same(uint64_t about, const Memory& data, Milliseconds timeout) {
    stride_ = kHead + carried_bytes(data);
    for (auto& round : rounds_) {
      if (!round.posted) post(round);
    }
    auto* own = at_least(own_, stride_);
    write_head(own, about);
    size_t at = kHead;
    for (auto& m : data) {
      std::memcpy(own + at, m.bytes, m.len);
      at += padded(m.len);
    }
    said_[0] = own;
    bool same = true;
    for (auto& round : rounds_) {
      HostWork sent;
      auto send = [&] {
        Tensors mine{same ? message(round.count) : disagreement()};
        sent = host_->send(mine, round.to, round.tag);
        g_messages.sent++;
      };
      bool answers = round.from == round.to && host_->getRank() > round.to;
      if (!answers) send();
      round.posted->wait(timeout);
      auto* got = round.inboxes[round.current].template const_data_ptr<uint8_t>();
      post_next(round);
      // One who says the same sent as many bytes. What follows one who does not is never looked at.
      for (size_t i = 0; same && i < round.count; i++) {
        said_[round.known + i] = got + i * stride_;
        same = head(said_[round.known + i]) == about;
      }
      if (answers) send();
      sent->wait(timeout);
    }
    return same;
  }
  // What each rank carried, by rank; until the next comparison.
  std::vector<const uint8_t*> carried() const {
    auto size = said_.size(), rank = static_cast<size_t>(host_->getRank());
    std::vector<const uint8_t*> by_rank(size);
    for (size_t i = 0; i < size; i++) by_rank[(rank + size - i) % size] = said_[i] + kHead;
    return by_rank;
  }

 private:
  // Each rank sends what so many know: itself, the rank before, and so on.
  struct Round {
    size_t known, count;
    int from, to, tag;
    Tensor inboxes[2];  // one is read while the other waits for the next message
    int current;
    HostWork posted;
  };
  static uint64_t head(const uint8_t* message) {
    uint64_t about;
    std::memcpy(&about, message, sizeof(about));
    return about;
  }
  static void write_head(uint8_t* message, uint64_t about) {
    std::memset(message, 0, kHead);
    std::memcpy(message, &about, sizeof(about));
  }
  static uint8_t* at_least(Tensor& t, size_t bytes) {
    if (!t.defined() || static_cast<size_t>(t.numel()) < bytes) t = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
    return t.mutable_data_ptr<uint8_t>();
  }
  void post(Round& round) {
    auto& inbox = round.inboxes[round.current];
    at_least(inbox, round.count * (kHead + most_carried(said_.size())));  // ranks that differ send what they will
    Tensors one{inbox};
    round.posted = host_->recv(one, round.from, round.tag);
  }
  // A peer may be gone by now: that is no failure of this comparison.
  void post_next(Round& round) {
    round.posted.reset();
    round.current ^= 1;
    try {
      post(round);
    } catch (const std::exception&) {  // who compares next will be told
    }
  }
  Tensor message(size_t count) {
    auto bytes = static_cast<int64_t>(count * stride_);
    if (count == 1) return own_.narrow(0, 0, bytes);
    auto* to = at_least(forwarded_, count * stride_);
    for (size_t i = 0; i < count; i++) std::memcpy(to + i * stride_, said_[i], stride_);
    return forwarded_.narrow(0, 0, bytes);
  }
  // Says that the ranks differ: nobody is about 0.
  Tensor disagreement() {
    write_head(at_least(own_, kHead), 0);
    return own_.narrow(0, 0, kHead);
  }

  Host host_;
  Tensor own_, forwarded_;
  size_t stride_ = kHead;
  std::vector<const uint8_t*> said_;  // of this rank, the one before, and so on
  std::vector<Round> rounds_;
};

// ---------------------------------------------------------------- data
// Sends each rank its part and receives from each its own, with nothing between the host and this memory. All know the sizes.
inline void exchange_parts(const Host& host, const Memory& to, const Memory& from, Milliseconds timeout) {
  auto size = to.size(), rank = static_cast<size_t>(host->getRank());
  TORCH_CHECK(to[rank].len == from[rank].len, "this rank has ", to[rank].len, " bytes for itself, and ", from[rank].len,
              " are expected");
  if (from[rank].bytes != to[rank].bytes) std::memcpy(from[rank].bytes, to[rank].bytes, to[rank].len);
  if (dynamic_cast<Alone*>(host.get())) {  // each rank sends this one what this one sends itself
    for (size_t r = 0; r < size; r++) {
      TORCH_CHECK(from[r].len == to[rank].len, "the other processes are not there, as preflight runs rank ", rank, " of ", size,
                  " alone, and they would send ", to[rank].len, " bytes where ", from[r].len, " are expected");
      if (r != rank) std::memcpy(from[r].bytes, to[rank].bytes, to[rank].len);
    }
    return;
  }
  std::vector<HostWork> received, sent;
  auto wait = [&](std::vector<HostWork>& works) {
    for (auto& work : works) work->wait(timeout);
    works.clear();
  };
  for (size_t i = 1; i < size; i++) {
    auto r = (rank + size - i) % size;
    Tensors one{host_tensor(from[r])};
    if (from[r].len) received.push_back(host->recv(one, static_cast<int>(r), kDataTag));
  }
  bool answers = size == 2 && rank == 1 && to[0].len + from[0].len <= kTurns;
  if (answers) wait(received);
  for (size_t i = 1; i < size; i++) {
    auto r = (rank + i) % size;
    Tensors one{host_tensor(to[r])};
    if (to[r].len) sent.push_back(host->send(one, static_cast<int>(r), kDataTag));
  }
  wait(received);
  wait(sent);
}
}  // namespace oxi_group
