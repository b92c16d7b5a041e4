// Sparse tensors: PyTorch's own, whose parts (indices, values) are strided tensors of the device.
//
// Many of PyTorch's kernels for them read no memory: they call ops on the parts. The core says which; a call of such an
// op is sent on to that kernel. All other calls go to Python (_sparse.py).
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <vector>

#include "oxitorch_abi.h"

// Its shared kernels, and its checks of coalesced tensors, number elements by this. It is in no header; a PyTorch without
// it has it null.
namespace at::native {
using flatten_indices_fn = Tensor (*)(const Tensor& indices, IntArrayRef sizes);
struct flatten_indices_stub_DECLARE_DISPATCH_type : DispatchStub<flatten_indices_fn, flatten_indices_stub_DECLARE_DISPATCH_type> {};
extern __attribute__((weak)) flatten_indices_stub_DECLARE_DISPATCH_type flatten_indices_stub;
}  // namespace at::native

namespace oxi_sparse {
// The place of each element among the sparse dimensions, in row-major order.
inline at::Tensor flatten_indices(const at::Tensor& indices, at::IntArrayRef sizes) {
  if (sizes.empty()) return at::zeros({indices.size(1)}, indices.options().dtype(at::kLong));
  at::Tensor keys = indices.select(0, 0).to(at::kLong);
  for (size_t d = 1; d < sizes.size(); d++) keys = keys * sizes[d] + indices.select(0, static_cast<int64_t>(d));
  return keys;
}

// PyTorch's kernel for the CPU.
struct Shared final : c10::OperatorKernel {
  c10::DispatchKeySet keys;
  explicit Shared(c10::DispatchKey key) : keys(key) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    op.redispatchBoxed(keys, stack);
  }
};

struct InPython final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const size_t n = op.schema().arguments().size();
    c10::impl::GenericList args(c10::AnyType::get());
    for (auto& v : torch::jit::last(*stack, n)) args.push_back(v);
    auto& id = op.operator_name();
    torch::jit::Stack call{id.overload_name.empty() ? id.name : id.name + "." + id.overload_name, std::move(args)};
    {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto run = c10::Dispatcher::singleton().findSchemaOrThrow("oxitorch::_sparse", "");
      run.callBoxed(&call);
    }
    torch::jit::drop(*stack, n);
    for (const c10::IValue& result : call[0].toListRef()) stack->push_back(result);
  }
};

inline void install(const OxiCore* core, std::vector<std::unique_ptr<torch::Library>>& libraries) {
  if (&at::native::flatten_indices_stub) at::native::flatten_indices_stub.set_privateuse1_dispatch_ptr(&flatten_indices);
  auto library = [&](const char* ns, c10::DispatchKey key) -> torch::Library& {
    libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, ns, key, __FILE__, __LINE__));
    return *libraries.back();
  };
  const struct {
    c10::DispatchKey key, of_cpu;
  } layouts[] = {{c10::DispatchKey::PrivateUse1, c10::DispatchKey::CPU},
                 {c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::SparseCPU},
                 {c10::DispatchKey::SparseCsrPrivateUse1, c10::DispatchKey::SparseCsrCPU}};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (int layout = 0; layout < 3; layout++) {
    auto [key, of_cpu] = layouts[layout];
    auto& m = library("aten", key);
    for (const auto& id : dispatcher.getAllOpNames()) {
      if (id.name.rfind("aten::", 0) != 0) continue;
      auto op = dispatcher.findSchema(id);
      if (!op || !op->hasKernelForDispatchKey(of_cpu)) continue;
      std::string name = id.name.substr(6) + (id.overload_name.empty() ? "" : "." + id.overload_name);
      const int32_t server = core->sparse(layout, name.c_str());
      if (server == 1) {
        m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Shared>(of_cpu)));
      } else if (server == 2) {  // said for each, as PyTorch's composite kernels come before a fallback
        m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<InPython>()));
      }
    }
    if (layout > 0) library("_", key).fallback(torch::CppFunction::makeFromBoxedFunctor(std::make_unique<InPython>()));
  }
}
}  // namespace oxi_sparse
