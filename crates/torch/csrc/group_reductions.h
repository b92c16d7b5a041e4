// What the host reduces, and what is done on the device before and after it.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/all.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/any.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <limits>

#include "group_tasks.h"

namespace oxi_group {
// Host groups reduce these; the others are gathered and reduced on the device.
inline bool host_reduces(at::ScalarType t) {
  switch (t) {
    case at::kFloat: case at::kDouble: case at::kHalf: case at::kBFloat16: case at::kChar: case at::kByte: case at::kInt:
    case at::kLong: case at::kBool: case at::kComplexFloat: case at::kComplexDouble: return true;
    default: return false;
  }
}
inline bool is_bitwise(const ReduceOp& op) {
  return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
}
inline const char* reduction_name(const ReduceOp& op) {
  static constexpr const char* names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  auto i = static_cast<size_t>(static_cast<ReduceOp::RedOpType>(op));
  return i < std::size(names) ? names[i] : "an unknown reduction";
}
inline void check_reduction(const ReduceOp& op, at::ScalarType t) {
  TORCH_CHECK(!is_bitwise(op) || c10::isIntegralType(t, /*includeBool=*/true), "Cannot use ReduceOp.", reduction_name(op),
              " with ", t);
  TORCH_CHECK(!c10::isComplexType(t) || op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM,
              "ReduceOp.", reduction_name(op), " does not support complex tensors");
}
// What a host group is asked for, for a tensor of this dtype.
inline ReduceOp host_reduction(const ReduceOp& op, at::ScalarType t) {
  if (t == at::kBool) {  // as bytes that are 0 or 1
    if (op == ReduceOp::BXOR) return ReduceOp::BXOR;
    return op == ReduceOp::PRODUCT || op == ReduceOp::MIN || op == ReduceOp::BAND ? ReduceOp::MIN : ReduceOp::MAX;
  }
  return op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM ? ReduceOp(ReduceOp::SUM) : op;
}
inline Tensor reducible(const OxiMemory& m, at::ScalarType t) {
  if (t == at::kBool) return host_tensor(m);
  if (t == at::kComplexFloat) return host_tensor(m, at::kFloat);
  if (t == at::kComplexDouble) return host_tensor(m, at::kDouble);
  return host_tensor(m, t);
}
inline void scale_before(const ReduceOp& op, Tensor& t) {
  if (op != ReduceOp::PREMUL_SUM) return;
  auto* factor = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (factor->tensor_factor.defined()) {
    t.mul_(factor->tensor_factor.reshape({}));
  } else {
    t.mul_(factor->double_factor);
  }
}
inline void scale_after(const ReduceOp& op, Tensor& t, int64_t size) {
  if (op != ReduceOp::AVG || t.scalar_type() == at::kBool) return;
  if (c10::isIntegralType(t.scalar_type(), false)) {
    t.div_(size, "trunc");
  } else {
    t.div_(size);
  }
}
// The dtype in which tensors of this one are reduced: one that hosts reduce, with all of its values. uint64, of which no
// other has all, goes as int64: sums and products have the same bits, and the order is that of the other sign bit.
inline at::ScalarType reduced_dtype(at::ScalarType t) {
  if (host_reduces(t)) return t;
  if (c10::isComplexType(t)) return at::kComplexFloat;
  if (c10::isFloatingType(t)) return at::kFloat;
  return t == at::kUInt32 || t == at::kUInt64 ? at::kLong : at::kInt;
}
inline Tensor ordered_bits(const ReduceOp& op, const Tensor& t) {
  bool orders = op == ReduceOp::MIN || op == ReduceOp::MAX;
  return orders ? t.bitwise_xor(std::numeric_limits<int64_t>::min()) : t;
}
// A tensor of its own, of a dtype in which it can be reduced.
inline Tensor widened(const ReduceOp& op, const Tensor& t) {
  auto wide = reduced_dtype(t.scalar_type());
  if (wide == t.scalar_type()) return t.clone();
  return t.scalar_type() == at::kUInt64 ? ordered_bits(op, t.to(wide)) : t.to(wide);
}
// What was reduced, as a dtype that was widened for it; an average is divided where its sum has no other meaning.
inline Tensor narrowed(const ReduceOp& op, Tensor x, at::ScalarType t, int64_t size) {
  bool bits = t == at::kUInt64;
  if (!bits) scale_after(op, x, size);
  if (x.scalar_type() == t) return x;
  Tensor r = (bits ? ordered_bits(op, x) : x).to(t);
  if (bits) scale_after(op, r, size);
  return r;
}
// The reduction of rows to one; sums of what is narrower than float32 are made in float32.
inline Tensor reduced(const ReduceOp& op, const Tensor& rows, int64_t size) {
  auto t = rows.scalar_type();
  if (t == at::kBool && op != ReduceOp::BXOR) {
    return host_reduction(op, t) == ReduceOp::MIN ? at::all(rows, 0) : at::any(rows, 0);
  }
  bool narrow = c10::isFloatingType(t) && c10::elementSize(t) < 4;
  Tensor x = narrow ? rows.to(at::kFloat) : host_reduces(t) ? rows : widened(op, rows);
  Tensor r;
  switch (static_cast<ReduceOp::RedOpType>(op)) {
    case ReduceOp::PRODUCT: r = at::prod(x, 0, false, x.scalar_type()); break;
    case ReduceOp::MIN: r = at::amin(x, {0}); break;
    case ReduceOp::MAX: r = at::amax(x, {0}); break;
    case ReduceOp::BAND: case ReduceOp::BOR: case ReduceOp::BXOR:
      r = x.select(0, 0).clone();
      for (int64_t i = 1; i < x.size(0); i++) {
        auto row = x.select(0, i);
        op == ReduceOp::BAND ? r.bitwise_and_(row) : op == ReduceOp::BOR ? r.bitwise_or_(row) : r.bitwise_xor_(row);
      }
      break;
    default: r = at::sum(x, 0, false, x.scalar_type());
  }
  return narrowed(op, r, t, size);
}
// The same into a tensor; a sum without another one in between.
inline void reduce_into(Tensor& out, const ReduceOp& op, const Tensor& rows, int64_t size) {
  auto t = rows.scalar_type();
  bool adds = op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM;
  bool exact = t != at::kBool && host_reduces(t) && (!c10::isFloatingType(t) || c10::elementSize(t) >= 4);
  if (adds && exact) {
    at::sum_out(out, rows, 0, false, t);
    scale_after(op, out, size);
  } else {
    out.copy_(reduced(op, rows, size));
  }
}
// The same of a tensor for each rank, of which one may be the result: one after another where that is exact.
inline void reduce_some(Tensor out, const ReduceOp& op, const Tensors& rows) {
  auto t = out.scalar_type();
  auto size = static_cast<int64_t>(rows.size());
  bool exact = size > 1 && host_reduces(t) && t != at::kBool && (!c10::isFloatingType(t) || c10::elementSize(t) >= 4);
  bool orders = op == ReduceOp::MAX || op == ReduceOp::MIN;
  if (!exact || is_bitwise(op) || op == ReduceOp::PRODUCT) return reduce_into(out, op, at::stack(rows), size);
  for (size_t i = 1; i < rows.size(); i++) {
    const Tensor& before = i == 1 ? rows[0] : out;
    if (!orders) at::add_out(out, before, rows[i]);
    if (op == ReduceOp::MAX) at::maximum_out(out, before, rows[i]);
    if (op == ReduceOp::MIN) at::minimum_out(out, before, rows[i]);
  }
  scale_after(op, out, size);
}
// The same in parts for which PyTorch starts no threads: a group's thread would have a pool of its own.
inline void reduce_each_into(const Tensor& out, const ReduceOp& op, const Tensors& rows) {
  for (int64_t at = 0; at < out.numel(); at += at::internal::GRAIN_SIZE) {
    auto count = std::min(at::internal::GRAIN_SIZE, out.numel() - at);
    Tensors some;
    for (auto& row : rows) some.push_back(row.narrow(0, at, count));
    reduce_some(out.narrow(0, at, count), op, some);
  }
}
}  // namespace oxi_group
