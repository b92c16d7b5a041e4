// Nested tensors of the strided layout, which the device has not: PyTorch's kernels for them read memory, or compute each
// tensor for itself. Those of layout torch.jagged are made of tensors of the device in Python and need nothing here.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace oxi_nested {
struct Refused final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, op.operator_name(),
                                ": the tpu device has no nested tensors of layout torch.strided\n"
                                "hint: make them with layout=torch.jagged, or pad; nn.TransformerEncoder makes none with "
                                "enable_nested_tensor=False or mask_check=True");
  }
};

// PyTorch asks this in order to choose between nested tensors and a mask (nn.TransformerEncoder, which is not in training).
inline bool from_mask_is_possible(const at::Tensor&, const at::Tensor&) {
  return false;
}

inline void install(std::vector<std::unique_ptr<torch::Library>>& libraries) {
  auto library = [&](const char* ns, c10::DispatchKey key) -> torch::Library& {
    libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, ns, key, __FILE__, __LINE__));
    return *libraries.back();
  };
  auto refused = [] { return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Refused>()); };
  auto& makers = library("aten", c10::DispatchKey::PrivateUse1);
  makers.impl("_nested_tensor_from_mask_left_aligned", &from_mask_is_possible);
  for (const char* name : {"_nested_tensor_from_mask", "_nested_tensor_from_tensor_list", "_nested_from_padded",
                           "_nested_from_padded_and_nested_example", "_nested_view_from_buffer"}) {
    makers.impl(name, refused());
  }
  // Said for each op, too, as PyTorch's composite kernels come before a fallback.
  auto& users = library("aten", c10::DispatchKey::NestedTensorPrivateUse1);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& id : dispatcher.getAllOpNames()) {
    if (id.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findSchema(id);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::NestedTensorCPU)) continue;
    std::string name = id.name.substr(6) + (id.overload_name.empty() ? "" : "." + id.overload_name);
    users.impl(name.c_str(), refused());
  }
  library("_", c10::DispatchKey::NestedTensorPrivateUse1).fallback(refused());
}
}  // namespace oxi_nested
