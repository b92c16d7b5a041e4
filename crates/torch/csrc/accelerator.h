// What torch.accelerator asks that only some versions of PyTorch know.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#if __has_include(<c10/core/DeviceCapability.h>)
#include <c10/core/DeviceCapability.h>
#define OXI_HAS_CAPABILITY
#endif
#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define OXI_HAS_GRAPHS
#endif

#include <memory>

namespace oxi_accelerator {
#ifdef OXI_HAS_CAPABILITY
// The same dtypes as `torch.tpu.get_device_capability()`.
inline c10::DeviceCapability capability() {
  c10::DeviceCapability found;
  found.capability_data.capability_bits = 0;
  auto& has = found.capability_data.supported_scalar_types;
  has.has_Bool = has.has_Byte = has.has_Char = has.has_Short = has.has_Int = has.has_Long = 1;
  has.has_Half = has.has_BFloat16 = has.has_Float = has.has_Double = has.has_ComplexFloat = has.has_ComplexDouble = 1;
  return found;
}
#endif

inline void refuse_graphs(c10::DeviceType device) {
#ifdef OXI_HAS_GRAPHS
  at::GraphImplRegistry()->Register(c10::DeviceTypeName(device, false), [](at::GraphImplArgs) -> std::unique_ptr<at::GraphImplInterface> {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "torch.accelerator.Graph: a tpu device has no streams to capture, and needs no graphs: steps that repeat "
                                "become programs by themselves, which are launched as one\n"
                                "hint: call the function without a graph; for a graph of your own choice, torch.compile(f, backend=\"tpu\")");
  });
#endif
}
}  // namespace oxi_accelerator
