// Tensors that Python holds, for calls that go past PyTorch's dispatcher: it would count each of them up and down, and
// Python's lock with it. Where in Python's object a tensor is, the core knows.
#pragma once

#include <ATen/record_function.h>

#include "recipes.h"

// Of libtorch_python; its header asks for Python's, which need not be there.
struct _object;
_object* THPVariable_Wrap(at::TensorBase&& tensor);

namespace {
const Tensor& tensor_at(const void* at) { return *static_cast<const Tensor*>(at); }

uint8_t describe_held(const void* const* tensors, uint32_t n, OxiTensor* described) {
  // A profiler sees operators.
  if (at::hasGlobalCallbacks() || at::hasThreadLocalCallbacks()) return false;
  try {
    for (uint32_t i = 0; i < n; i++) {
      const Tensor& t = tensor_at(tensors[i]);
      if (!is_plain(t)) return false;
      describe(described[i], t);
    }
  } catch (const std::exception&) {
    return false;  // the operator raises it once more
  }
  return true;
}
// Which reads a flag, and raises nothing.
uint8_t requires_grad(const void* tensor) { return tensor_at(tensor).requires_grad(); }
int32_t objects_of(const OxiResult* r, const void* const* args, void** objects, OxiError* error) {
  static thread_local std::string message;
  try {
    // All before the first object: making one may run anything, which may call the core.
    auto made = recorded(*r, [&](int32_t i) -> const Tensor& { return tensor_at(args[i]); });
    for (size_t i = 0; i < made.size(); i++) {
      objects[i] = THPVariable_Wrap(std::move(made[i]));
      if (!objects[i]) return OXI_FALLBACK;
    }
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
}  // namespace
