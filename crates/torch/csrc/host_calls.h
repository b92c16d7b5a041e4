// Calls of PyTorch's own CPU kernels by programs, on the memory of XLA's buffers.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <map>
#include <mutex>

#include "results.h"
#include "tensors.h"

// Of the libraries that PyTorch's kernels use, if this build of it has them.
extern "C" {
__attribute__((weak)) int omp_get_max_threads(void);
__attribute__((weak)) void omp_set_num_threads(int);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int);
}

namespace {
// ---------------------------------------------------------------- calls of PyTorch's CPU kernels by programs
Tensor borrow(const OxiTensor& t) {
  auto dtype = static_cast<c10::ScalarType>(t.dtype);
  auto* data = static_cast<char*>(const_cast<void*>(t.host)) + t.offset * static_cast<int64_t>(c10::elementSize(dtype));
  return at::from_blob(data, {t.sizes, static_cast<size_t>(t.ndim)}, {t.strides, static_cast<size_t>(t.ndim)}, dtype);
}
c10::IValue unpack(const OxiArg& a) {
  switch (a.tag) {
    case OXI_NONE: return {};
    case OXI_TENSOR: return borrow(*a.u.t);
    case OXI_INT: return a.u.i;
    case OXI_BOOL: return a.u.i != 0;
    case OXI_DOUBLE: return a.u.d;
    case OXI_INTS: return std::vector<int64_t>(a.u.ints, a.u.ints + a.len);
    case OXI_BOOLS: return std::vector<bool>(a.u.ints, a.u.ints + a.len);
    case OXI_STR: return std::string(a.u.s, a.len);
    default: TORCH_CHECK(false, "an argument of kind ", a.tag);
  }
}
c10::OperatorHandle overload(const char* op) {
  static std::mutex mutex;
  static auto* known = new std::map<std::string, c10::OperatorHandle, std::less<>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto it = known->find(op);
  if (it == known->end()) {
    std::string name(op), suffix;
    if (auto dot = name.find('.'); dot != name.npos) suffix = name.substr(dot + 1), name.resize(dot);
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name).c_str(), suffix.c_str());
    it = known->emplace(op, handle).first;
  }
  return it->second;
}
// While it lives, kernels that this thread calls do not spread to other threads. What says so is the libraries' own, in
// each thread for itself, and not in all builds of PyTorch.
struct Alone {
  int threads = 0, mkl = 0;
  Alone() {
    at::internal::lazy_init_num_threads();  // sets the thread's number when it is asked for first
    if (omp_get_max_threads && omp_set_num_threads) threads = omp_get_max_threads(), omp_set_num_threads(1);
    if (MKL_Set_Num_Threads_Local) mkl = MKL_Set_Num_Threads_Local(1);
  }
  ~Alone() {
    if (threads) omp_set_num_threads(threads);
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(mkl);
  }
};
void call(const char* name, const OxiArg* args, uint32_t nargs, const OxiTensor* results, uint32_t nresults) {
  c10::InferenceMode guard;
  auto op = overload(name);
  bool out = nargs < op.schema().arguments().size();
  Results made;  // ends after what is in its memory
  torch::jit::Stack stack;
  for (uint32_t i = 0; i < nargs; i++) stack.push_back(unpack(args[i]));
  // Kept: PyTorch 2.11 drops the arguments of a boxed call before it copies the references that the kernel returned.
  c10::SmallVector<Tensor, 4> kept;
  for (uint32_t i = 0; out && i < nresults; i++) {
    kept.push_back(borrow(results[i]));
    stack.push_back(kept.back());
  }
  TORCH_CHECK(stack.size() == op.schema().arguments().size(), "takes ", op.schema().arguments().size(), " arguments");
  if (out) return op.callBoxed(&stack);
  std::vector<Tensor> wanted(nresults);
  for (uint32_t i = 0; i < nresults; i++) {
    if (!(results[i].flags & OXI_UNDEFINED)) wanted[i] = borrow(results[i]);
  }
  made.want(std::move(wanted));
  op.callBoxed(&stack);
  made.take(stack);
}
}  // namespace
