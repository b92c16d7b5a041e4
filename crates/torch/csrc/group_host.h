// What the tasks of collectives do in the host's memory: what a group for it (gloo) is asked for, and what it has not.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <cstring>
#include <optional>

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
inline Tensors host_tensors(const Memory& memory) {
  Tensors all;
  for (auto& m : memory) all.push_back(host_tensor(m));
  return all;
}
// Receives what one rank, or any (-1), sends; says from which. It is told the size first, as hosts abort where it differs.
inline int receive(const Host& host, const OxiMemory& m, int from, int tag) {
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
// Whether each rank sends what its peer expects: hosts abort where one does not.
inline void check_splits(const Host& host, const c10d::AllToAllOptions& opts, std::vector<int64_t> in,
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
inline void exchange(const Host& host, const c10d::AllToAllOptions& opts, const Memory& reads, const Memory& writes) {
  auto lengths = [](const Memory& memory) {
    std::vector<int64_t> all;
    for (auto& m : memory) all.push_back(static_cast<int64_t>(m.len));
    return all;
  };
  auto in = lengths(reads), out = lengths(writes);
  check_splits(host, opts, in, out);
  exchange_parts(host, reads, writes, opts.timeout);
}
}  // namespace oxi_group
