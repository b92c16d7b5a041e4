// What is recorded by a recipe: compiled graphs, and ops that have a decomposition in Python.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "tensors.h"

namespace {
// ---------------------------------------------------------------- compiled graphs
// Called by python/oxitorch/_recipes.py with the tensors among a graph's arguments.
struct Described {
  c10::SmallVector<OxiTensor, 16> tensors;
  int32_t device = -1;
  bool plain = true;  // no tensors that are handled in Python, whose storages are not ours, and no lazy clones

  explicit Described(at::TensorList list) {
    tensors.resize(list.size());
    for (size_t i = 0; i < list.size(); i++) {
      if (list[i].key_set().has(c10::DispatchKey::Python) || is_shared(list[i])) {
        plain = false;
        return;
      }
      describe(tensors[i], list[i]);
      if (device < 0 && tensors[i].device_type == OXI_DEVICE_SELF) device = tensors[i].device_index;
    }
    if (device < 0) device = t_device;
  }
  uint32_t size() const { return static_cast<uint32_t>(tensors.size()); }
};
// Another look at a storage, whose writes autograd counts together.
Tensor view_of(const Tensor& base, const OxiOut& o) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(base.storage()),
                                                    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                    c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(o.dtype)));
  set_layout(t, o);
  t.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
  return t;
}
std::tuple<bool, std::vector<Tensor>> replay(int64_t graph, at::TensorList args) {
  Described a(args);
  std::vector<Tensor> outs;
  if (!a.plain) return {false, std::move(outs)};
  OxiResult r{};
  int32_t rc = g_core->replay(graph, a.device, a.tensors.data(), a.size(), &r);
  if (rc == OXI_FALLBACK) return {false, std::move(outs)};
  check(rc, r.error);
  outs.reserve(r.nouts);
  for (uint32_t k = 0; k < r.nouts; k++) {
    const OxiOut& o = r.outs[k];
    outs.push_back(o.kind == OXI_OUT_NEW ? wrap(o) : view_of(o.kind == OXI_OUT_VIEW_ARG ? args[o.arg] : outs[o.arg], o));
  }
  return {true, std::move(outs)};
}
bool watch(at::TensorList args) {
  Described a(args);
  if (!a.plain) return false;
  OxiError e{};
  int32_t began = g_core->watch(a.device, a.tensors.data(), a.size(), &e);
  if (e.message) raise(e);
  return began;
}
bool watched(int64_t graph, at::TensorList args, at::TensorList outs) {
  Described a(args), o(outs);
  if (!a.plain || !o.plain) return false;
  OxiError e{};
  int32_t kept = g_core->watched(graph, a.device, a.tensors.data(), a.size(), o.tensors.data(), o.size(), &e);
  if (e.message) raise(e);
  return kept;
}

// ---------------------------------------------------------------- decompositions in Python
// An op that the core does not know may have one. python/oxitorch/_decompose.py runs it for the first call with arguments
// of a kind, while the core watches; later ones are recorded by the recipe, and no Python runs.
struct Decomposition {
  int64_t recipe;
  c10::SmallVector<bool, 4> defined;  // its results
};
// Only what is functional has a recipe: tensors go in, new ones come out.
bool is_functional(const c10::FunctionSchema& schema) {
  for (auto& a : schema.arguments()) {
    if (a.alias_info()) return false;
  }
  for (auto& r : schema.returns()) {
    if (r.alias_info() || r.type()->kind() != c10::TypeKind::TensorType) return false;
  }
  return !schema.returns().empty();
}
bool is_a(const c10::Argument& a, c10::TypeKind kind) {
  auto optional = a.real_type()->cast<c10::OptionalType>();
  return (optional ? optional->getElementType() : a.real_type())->kind() == kind;
}
// Spells out what tells kinds of arguments apart, and collects the tensors; false if no recipe can have the argument.
bool spell(std::ostream& s, const c10::IValue& v, std::vector<Tensor>& tensors) {
  if (v.isTensor() && v.toTensor().defined()) {
    tensors.push_back(v.toTensor());
    s << 'T' << v.toTensor().sizes();
  } else if (v.isNone() || v.isTensor()) {
    s << 'N';
  } else if (v.isList()) {
    s << '[';
    for (const c10::IValue& x : v.toListRef()) {
      if (!spell(s, x, tensors)) return false;
    }
    s << ']';
  } else if (v.isString()) {
    s << v.toStringRef().size() << ':' << v.toStringRef();
  } else if (v.isInt() || v.isDouble() || v.isBool() || v.isComplexDouble() || v.isDevice()) {
    s << v;
  } else {
    return false;
  }
  s << ',';
  return true;
}
void give(torch::jit::Stack* stack, size_t n, c10::ArrayRef<Tensor> results) {
  torch::jit::drop(*stack, n);
  for (auto& t : results) stack->emplace_back(t);
}
bool decomposed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static std::mutex mutex;
  static auto* none = new std::set<std::string>;  // ops without one
  static auto* known = new std::map<std::string, Decomposition>;
  auto& schema = op.schema();
  auto& id = op.operator_name();
  std::string name = id.overload_name.empty() ? id.name : id.name + "." + id.overload_name;
  {
    std::lock_guard lock(mutex);
    if (none->count(name)) return false;
    if (!is_functional(schema)) return none->insert(name), false;
  }
  const size_t n = schema.arguments().size();
  const c10::IValue* args = stack->data() + (stack->size() - n);
  std::vector<Tensor> tensors;
  std::ostringstream kind;
  kind << name << '(';
  for (size_t i = 0; i < n; i++) {
    auto& a = schema.arguments()[i];
    bool number = is_a(a, c10::TypeKind::LayoutType) || is_a(a, c10::TypeKind::MemoryFormatType);
    if ((number && !args[i].isNone()) || !spell(kind, args[i], tensors)) return false;
  }
  Decomposition d{0, {}};
  {
    std::lock_guard lock(mutex);
    if (auto found = known->find(kind.str()); found != known->end()) d = found->second;
  }
  if (d.recipe > 0) {
    auto [done, made] = replay(d.recipe, tensors);
    if (done) {
      std::vector<Tensor> results;
      for (size_t i = 0, k = 0; i < d.defined.size(); i++) results.push_back(d.defined[i] ? made[k++] : Tensor());
      return give(stack, n, results), true;
    }
  }
  c10::impl::GenericList given(c10::AnyType::get());
  for (size_t i = 0; i < n; i++) {
    bool dtype = is_a(schema.arguments()[i], c10::TypeKind::ScalarTypeType) && args[i].isInt();
    given.push_back(dtype ? at::empty({0}, static_cast<c10::ScalarType>(args[i].toInt())) : args[i]);
  }
  torch::jit::Stack call{name, kind.str(), std::move(given)};
  {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::Dispatcher::singleton().findSchemaOrThrow("oxitorch::_decompose", "").callBoxed(&call);
  }
  d.recipe = call[0].toInt();
  if (call[1].isNone()) {
    std::lock_guard lock(mutex);
    if (d.recipe < 0) none->insert(name);
    return false;
  }
  std::vector<Tensor> results;
  for (const c10::IValue& r : call[1].toListRef()) results.push_back(r.isNone() ? Tensor() : r.toTensor());
  TORCH_CHECK(results.size() == schema.returns().size(), name, ": its decomposition gave ", results.size(), " results");
  d.defined.clear();
  for (auto& t : results) d.defined.push_back(t.defined());
  if (d.recipe > 0) {
    std::lock_guard lock(mutex);
    (*known)[kind.str()] = d;
  }
  return give(stack, n, results), true;
}
}  // namespace
