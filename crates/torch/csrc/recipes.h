// What is recorded by a recipe: compiled graphs, and ops that have a decomposition in Python.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <mutex>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

#include "calls.h"

namespace {
// ---------------------------------------------------------------- compiled graphs
// Whether a recipe can have it: no tensor that is handled in Python or stands for others in a transform, whose storage is not
// ours, none without strides (sparse, nested), and no lazy clone.
bool is_plain(const Tensor& t) {
  const auto others = c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                           c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::BatchedNestedTensor,
                                           c10::DispatchKey::FuncTorchGradWrapper});
  if (!t.defined()) return true;
  return t.layout() == c10::kStrided && !t.is_nested() && !t.key_set().has_any(others) && !is_shared(t);
}
// Called by python/oxitorch/_recipes.py with the tensors among a graph's arguments.
struct Described {
  c10::SmallVector<OxiTensor, 16> tensors;
  int32_t device = -1;
  bool plain = true;

  explicit Described(at::TensorList list) {
    tensors.resize(list.size());
    for (size_t i = 0; i < list.size(); i++) {
      if (!(plain = is_plain(list[i]))) return;
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
// The results of what was recorded by a recipe; `argument`: the tensors that they may be views of, by their numbers.
template <class Argument>
std::vector<Tensor> recorded(const OxiResult& r, Argument argument) {
  std::vector<Tensor> outs;
  outs.reserve(r.nouts);
  for (uint32_t k = 0; k < r.nouts; k++) {
    const OxiOut& o = r.outs[k];
    switch (o.kind) {
      case OXI_OUT_NEW: outs.push_back(wrap(o)); break;
      case OXI_OUT_VIEW_ARG: outs.push_back(view_of(argument(o.arg), o)); break;
      case OXI_OUT_VIEW_OUT: outs.push_back(view_of(outs[o.arg], o)); break;
      default: outs.emplace_back();
    }
  }
  return outs;
}
std::vector<Tensor> recorded(const OxiResult& r) {
  return recorded(r, [](int32_t) -> const Tensor& { throw std::out_of_range("a view of an argument"); });
}
std::tuple<bool, std::vector<Tensor>> replay(int64_t graph, at::TensorList args) {
  Described a(args);
  if (!a.plain) return {false, {}};
  OxiResult r{};
  int32_t rc = g_core->replay(graph, a.device, a.tensors.data(), a.size(), &r);
  if (rc == OXI_FALLBACK) return {false, {}};
  check(rc, r.error);
  return {true, recorded(r, [&](int32_t i) -> const Tensor& { return args.at(i); })};
}
// Called by python/oxitorch/_padding.py. Nothing where it would take a program.
std::optional<Tensor> pad(const Tensor& x, at::IntArrayRef shape, const at::Scalar& value) {
  if (x.device().type() != kSelf || !is_plain(x)) return std::nullopt;
  auto made = at::empty(shape, x.options());
  auto fill = at::scalar_tensor(value, x.options().device(c10::kCPU));
  OxiTensor from, to;
  describe(from, x);
  describe(to, made);
  OxiError e{};
  int32_t rc = g_core->pad(&from, &to, fill.const_data_ptr(), &e);
  if (rc == OXI_FALLBACK) return std::nullopt;
  check(rc, e);
  return made;
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

// ---------------------------------------------------------------- functions that are one program
// Called by python/oxitorch/_jit.py.
thread_local int32_t t_traced = 0;  // the device of the function that this thread runs
bool trace(at::TensorList args, bool dry) {
  Described a(args);
  TORCH_CHECK(a.plain, "torch.tpu.jit: an argument is no plain tensor of the device or of the host");
  OxiError e{};
  t_traced = a.device;
  int32_t began = g_core->trace(a.device, a.tensors.data(), a.size(), dry, &e);
  if (e.message) raise(e);
  return began;
}
void trace_also(const Tensor& tensor) {
  TORCH_CHECK(is_plain(tensor), "torch.tpu.jit: it uses a tensor that is no plain tensor of the device or of the host");
  OxiTensor t;
  describe(t, tensor);
  OxiError e{};
  check(g_core->trace_also(t_traced, &t, &e), e);
}
std::tuple<int64_t, std::string> traced(int64_t graph, at::TensorList args, at::TensorList outs, bool ends_step, bool dry,
                                        at::IntArrayRef donated) {
  Described a(args), o(outs);
  TORCH_CHECK(a.plain && o.plain, "torch.tpu.jit: a result is no plain tensor of the device");
  OxiError e{};
  std::vector<uint32_t> given(donated.begin(), donated.end());
  int32_t found = g_core->traced(graph, t_traced, a.tensors.data(), a.size(), o.tensors.data(), o.size(), ends_step,
                                 dry, given.data(), static_cast<uint32_t>(given.size()), &e);
  if (found < OXI_TRACED_REFUSED) check(found, e);
  return {found, e.message ? e.message : ""};
}
void untrace(at::TensorList args) {
  Described a(args);
  OxiError e{};
  check(g_core->untrace(t_traced, a.tensors.data(), a.size(), &e), e);
}

void trace_pause(bool on) {
  OxiError e{};
  check(g_core->trace_pause(t_traced, on, &e), e);
}

// ---------------------------------------------------------------- loops and branches
// Called by python/oxitorch/_loops.py.
thread_local int32_t t_body = 0;  // the device of the body that this thread records
std::string said(const OxiError& e) { return e.message ? e.message : ""; }
std::tuple<bool, std::vector<Tensor>, std::string> answered(int32_t rc, const OxiResult& r) {
  if (rc == OXI_FALLBACK) return {false, {}, said(r.error)};
  check(rc, r.error);
  return {true, recorded(r), ""};
}
std::tuple<bool, std::vector<Tensor>, std::string> body_begin(at::TensorList like) {
  Described d(like);
  if (!d.plain) return {false, {}, "a tensor that is handled in Python"};
  OxiResult r{};
  t_body = d.device;
  int32_t rc = g_core->body_begin(d.device, d.tensors.data(), d.size(), &r);
  return answered(rc, r);
}
std::string body_end(at::TensorList gives) {
  Described d(gives);
  OxiError e{};
  if (!d.plain) {
    g_core->body_drop(t_body, true, &e);
    return "a tensor that is handled in Python";
  }
  int32_t rc = g_core->body_end(t_body, d.tensors.data(), d.size(), &e);
  if (rc == OXI_FALLBACK) return said(e);
  check(rc, e);
  return "";
}
std::string body_drop(bool open) {
  OxiError e{};
  g_core->body_drop(t_body, open, &e);
  return said(e);
}
std::tuple<bool, std::vector<Tensor>, std::string> control(std::string name, at::IntArrayRef numbers, at::TensorList operands) {
  TORCH_CHECK(numbers.size() == 4, "a loop has four numbers");
  Described d(operands);
  if (!d.plain) return {false, {}, "a tensor that is handled in Python"};
  OxiResult r{};
  int32_t rc = g_core->control(t_body, name.c_str(), numbers.data(), d.tensors.data(), d.size(), &r);
  return answered(rc, r);
}

// ---------------------------------------------------------------- decompositions in Python
// An op that the core does not know may have one. python/oxitorch/_decompose.py runs it for the first call with arguments
// of a kind, while the core watches; later ones are recorded by the recipe, and no Python runs.
const void* decomposable(const c10::OperatorHandle& op, const std::string& name) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, const void*>;
  std::lock_guard lock(mutex);
  auto [at, is_new] = known->try_emplace(name, nullptr);
  if (is_new) {
    std::ostringstream schema;
    schema << op.schema();
    at->second = g_core->decomposable(name.c_str(), schema.str().c_str());
  }
  return at->second;
}
bool is_plain(const c10::IValue& v) {
  if (v.isTensor()) return is_plain(v.toTensor());
  if (!v.isList()) return true;
  auto l = v.toListRef();
  return std::all_of(l.begin(), l.end(), [](const c10::IValue& x) { return is_plain(x); });
}
bool is_dtype(const c10::Argument& a) {
  auto optional = a.real_type()->cast<c10::OptionalType>();
  return (optional ? optional->getElementType() : a.real_type())->kind() == c10::TypeKind::ScalarTypeType;
}
bool give(torch::jit::Stack* stack, size_t n, c10::ArrayRef<Tensor> results) {
  torch::jit::drop(*stack, n);
  for (auto& t : results) stack->emplace_back(t);
  return true;
}
bool decomposed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto& id = op.operator_name();
  std::string name = id.overload_name.empty() ? id.name : id.name + "." + id.overload_name;
  const void* known = decomposable(op, name);
  if (!known) return false;
  const size_t n = schema.arguments().size();
  const c10::IValue* args = stack->data() + (stack->size() - n);
  int64_t graph = 0;
  if (std::all_of(args, args + n, [](const c10::IValue& v) { return is_plain(v); })) {
    Call call(n);
    for (size_t i = 0; i < n; i++) call.put(i, args[i]);
    OxiResult r{};
    int32_t rc = g_core->decomposed(known, call.device < 0 ? t_device : call.device, call.args.data(),
                                    static_cast<uint32_t>(n), &graph, &r);
    if (rc == OXI_OK) return give(stack, n, recorded(r));
    if (rc != OXI_FALLBACK) check(rc, r.error);
    if (graph < 0) return false;
  }
  c10::impl::GenericList given(c10::AnyType::get());
  for (size_t i = 0; i < n; i++) {
    bool dtype = is_dtype(schema.arguments()[i]) && args[i].isInt();
    given.push_back(dtype ? at::empty({0}, static_cast<c10::ScalarType>(args[i].toInt())) : args[i]);
  }
  torch::jit::Stack call{name, graph, std::move(given)};
  {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::Dispatcher::singleton().findSchemaOrThrow("oxitorch::_decompose", "").callBoxed(&call);
  }
  if (call[0].isNone()) return false;
  std::vector<Tensor> results;
  for (const c10::IValue& r : call[0].toListRef()) results.push_back(r.isNone() ? Tensor() : r.toTensor());
  TORCH_CHECK(results.size() == schema.returns().size(), name, ": its decomposition gave ", results.size(), " results");
  return give(stack, n, results);
}
}  // namespace
