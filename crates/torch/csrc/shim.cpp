// PyTorch's side of oxitorch: it registers the PrivateUse1 backend and knows no op.
//
// What is here is what only C++ can give PyTorch: allocator, guard, hooks, generator, pinned memory, the metadata
// views, and one boxed kernel that hands every op which the core binds through the flat C boundary of oxitorch_abi.h.
// Ops that the core does not bind reach the boxed CPU fallback, which the core counts.
//
// Built once per torch minor version; see python/oxitorch/_shim.py.
#include <ATen/MemoryOverlap.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_lazy_clone_native.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

#include "oxitorch_abi.h"
#include "attention.h"
#include "calls.h"
#include "device.h"
#include "group_timer.h"
#include "host_calls.h"
#include "nested.h"
#include "objects.h"
#include "process_group.h"
#include "profiler.h"
#include "recipes.h"
#include "sparse.h"
#include "tensors.h"

namespace {
// ---------------------------------------------------------------- the CPU fallback
Tensor without_conj_of_bits(const Tensor& t);
// PyTorch resolves lazy conjugations by cloning, which for bits comes here: they are resolved before.
void resolve_bits(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t n = op.schema().arguments().size();
  for (size_t i = 0; i < n; i++) {
    c10::IValue& v = stack->at(stack->size() - n + i);
    if (!v.isTensor() || !v.toTensor().defined() || !v.toTensor().is_conj()) continue;
    auto* alias = op.schema().arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) v = without_conj_of_bits(v.toTensor());
  }
}
void cpu_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const char* warning = nullptr;
  OxiError e{};
  auto& name = op.operator_name();
  std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  check(g_core->fallback(full.c_str(), &warning, &e), e);
  if (warning) TORCH_WARN(warning);
  const size_t nresults = op.schema().returns().size();
  resolve_bits(op, stack);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (c10::Error& e) {
    e.add_context("in " + full + ", which runs on the CPU");
    throw;
  }
  for (size_t i = stack->size() - nresults; i < stack->size(); i++) {
    const c10::IValue& v = stack->at(i);
    TORCH_CHECK_NOT_IMPLEMENTED(!v.isTensor() || !v.toTensor().defined() || v.toTensor().layout() == c10::kStrided, full,
                                ": tpu tensors have the strided layout, got ", v.toTensor().layout());
  }
}
struct Fallback final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const size_t first = stack->size() - op.schema().arguments().size();
    for (size_t i : unversioned_writes(op)) bump(stack->at(first + i));
    if (!decomposed(op, stack)) cpu_fallback(op, stack);
  }
};

// ---------------------------------------------------------------- the boxed kernel
// PyTorch's out= contract: warn and resize when the size is wrong, with the result's strides, then copy the result in.
Tensor into_resized(const Tensor& out, const OxiOut& o) {
  Tensor value = wrap(o);
  at::native::resize_output(out, value.sizes());
  if (!value.is_contiguous()) out.unsafeGetTensorImpl()->set_sizes_and_strides(value.sizes(), value.strides());
  OxiTensor src, dst;
  describe(src, value);
  describe(dst, out);
  OxiError e{};
  check(g_core->copy(&src, &dst, &e), e);
  return out;
}

struct Kernel final : c10::OperatorKernel {
  const void* served;  // what the core bound
  c10::SmallVector<size_t, 4> written;  // see unversioned_writes
  c10::SmallVector<size_t, 4> owned;    // see writes
  const char* expanded;  // what to warn of where the first argument's elements share memory, if anything
  Kernel(const void* served, const c10::OperatorHandle& op)
      : served(served), written(unversioned_writes(op)), owned(writes(op)), expanded(g_core->warns_of_expanded(served)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const size_t n = op.schema().arguments().size();
    c10::IValue* base = stack->data() + (stack->size() - n);
    for (size_t i : owned) make_own(base[i]);
    Call call(n);
    for (size_t i = 0; i < n; i++) call.put(i, base[i]);
    if (C10_UNLIKELY(expanded != nullptr) && at::has_internal_overlap(base[0].toTensor()) == at::MemOverlap::Yes) {
      TORCH_WARN(expanded);
    }
    // PyTorch's way of walking lists, one op for each entry, as on CUDA. The CPU's kernels are just that.
    if (C10_UNLIKELY(call.spread) && op.schema().name().rfind("aten::_foreach_", 0) == 0) {
      return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    OxiResult r{};
    int32_t rc = g_core->dispatch(served, call.device < 0 ? t_device : call.device, call.args.data(), static_cast<uint32_t>(n), &r);
    if (C10_UNLIKELY(rc == OXI_FALLBACK)) {
      for (size_t i : written) bump(base[i]);
      return cpu_fallback(op, stack);
    }
    check(rc, r.error);
    for (size_t i : written) bump(base[i]);
    if (C10_LIKELY(r.nouts == 1 && r.outs[0].kind == OXI_OUT_NEW)) {
      Tensor t = wrap(r.outs[0]);
      torch::jit::drop(*stack, n);
      stack->emplace_back(std::move(t));
      return;
    }
    c10::SmallVector<c10::IValue, 4> results;
    for (uint32_t k = 0; k < r.nouts;) {
      if (r.outs[k].kind == OXI_OUT_LIST) {
        c10::List<Tensor> list;
        uint32_t end = k + 1 + static_cast<uint32_t>(r.outs[k].arg);
        for (k++; k < end; k++) list.push_back(result(base, r.outs[k]));
        results.emplace_back(std::move(list));
      } else if (r.outs[k].kind == OXI_OUT_UNDEFINED && is_int(op.schema().returns()[results.size()])) {
        results.emplace_back(int64_t(0));  // sequence lengths of nested tensors, which the core has not
        k++;
      } else {
        results.emplace_back(result(base, r.outs[k++]));
      }
    }
    torch::jit::drop(*stack, n);
    for (auto& v : results) stack->emplace_back(std::move(v));
  }

  static bool is_int(const c10::Argument& a) {
    return a.type()->kind() == c10::TypeKind::IntType || a.type()->kind() == c10::TypeKind::SymIntType;
  }
  static Tensor result(c10::IValue* base, const OxiOut& o) {
    switch (o.kind) {
      case OXI_OUT_NEW: return wrap(o);
      case OXI_OUT_ARG: return base[o.arg].toTensor();
      case OXI_OUT_ARG_ITEM: return base[o.arg].toTensorList().get(o.item);
      case OXI_OUT_RESIZED: return into_resized(base[o.arg].toTensor(), o);
      default: return Tensor();
    }
  }
};

// ---------------------------------------------------------------- typed kernels
// Boxing a call costs about as much as recording it. Overloads with one of these few signatures get a kernel that
// PyTorch calls directly; what it does is the same. Which op it is makes no difference.
template <size_t N>
struct TypedCall {
  OxiArg args[N];
  OxiTensor tensors[N];
  double complex[N][2];
  DeviceIndex device = -1;

  void put(size_t i, const Tensor& t) {
    describe(tensors[i], t);
    if (tensors[i].device_type == OXI_DEVICE_SELF && device < 0) device = static_cast<DeviceIndex>(tensors[i].device_index);
    args[i].tag = OXI_TENSOR, args[i].len = 0, args[i].u.t = &tensors[i];
  }
  void put(size_t i, const at::Scalar& v) {
    OxiArg& a = args[i];
    a.len = 0;
    if (v.isFloatingPoint()) {
      a.tag = OXI_DOUBLE, a.u.d = v.toDouble();
    } else if (v.isComplex()) {
      auto c = v.toComplexDouble();
      complex[i][0] = c.real(), complex[i][1] = c.imag();
      a.tag = OXI_COMPLEX, a.u.doubles = complex[i];
    } else if (v.type() == at::kUInt64 && v.toUInt64() >> 63) {
      a.tag = OXI_OTHER;  // the core has no such number, boxed or not
    } else {
      a.tag = v.isBoolean() ? OXI_BOOL : OXI_INT, a.u.i = v.toLong();
    }
  }
};
template <class... Args>
struct TypedKernel {
  const void* served;  // what the core bound
  const c10::OperatorHandle* op;  // lives as long as the registration: for ever

  Tensor operator()(Args... args) const {
    TypedCall<sizeof...(Args)> call;
    size_t i = 0;
    (call.put(i++, args), ...);
    OxiResult r;
    int32_t rc = g_core->dispatch(served, call.device < 0 ? t_device : call.device, call.args, sizeof...(Args), &r);
    if (C10_LIKELY(rc == OXI_OK && r.nouts == 1 && r.outs[0].kind == OXI_OUT_NEW)) return wrap(r.outs[0]);
    if (rc == OXI_FALLBACK) {
      torch::jit::Stack stack;
      (stack.emplace_back(args), ...);
      cpu_fallback(*op, &stack);
      return stack.back().toTensor();
    }
    check(rc, r.error);
    TORCH_CHECK(false, op->operator_name().name, " gave ", r.nouts, " results instead of a tensor");
  }
};
using T = const Tensor&;
using S = const at::Scalar&;
std::string signature(const c10::FunctionSchema& schema) {
  std::string s;
  for (auto& a : schema.arguments()) s += (a.alias_info() ? "alias " : "") + a.type()->str() + ",";
  s += "->";
  for (auto& r : schema.returns()) s += (r.alias_info() ? "alias " : "") + r.type()->str() + ",";
  return s;
}
template <class... Args>
torch::CppFunction typed(const void* served, const c10::OperatorHandle& op) {
  return torch::CppFunction(TypedKernel<Args...>{served, new c10::OperatorHandle(op)});
}
// The two products that PyTorch leaves zero tensors to; see zero_tensor.
Tensor zero_tensor(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                   std::optional<c10::Device> device, std::optional<bool> pin);
struct Dot {
  TypedKernel<T, T> kernel;
  Tensor operator()(T a, T b) const {
    if (C10_LIKELY(!a._is_zerotensor() && !b._is_zerotensor())) return kernel(a, b);
    return zero_tensor({}, a.scalar_type(), std::nullopt, a.device(), std::nullopt);
  }
};
// A typed kernel if the signature has one, else the boxed one.
torch::CppFunction kernel_for(const void* served, const c10::OperatorHandle& op) {
  auto s = signature(op.schema());
  if (s == "Tensor,->Tensor,") return typed<T>(served, op);
  if (s == "Tensor,Tensor,->Tensor,") {
    const auto& name = op.operator_name().name;
    if (name == "aten::dot" || name == "aten::vdot") return torch::CppFunction(Dot{{served, new c10::OperatorHandle(op)}});
    return typed<T, T>(served, op);
  }
  if (s == "Tensor,Scalar,->Tensor,") return typed<T, S>(served, op);
  if (s == "Tensor,Tensor,Scalar,->Tensor,") return typed<T, T, S>(served, op);
  if (s == "Tensor,Tensor,Tensor,->Tensor,") return typed<T, T, T>(served, op);
  if (s == "Tensor,Tensor,Tensor,Scalar,Scalar,->Tensor,") return typed<T, T, T, S, S>(served, op);
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(served, op));
}

// ---------------------------------------------------------------- memory kernels
void check_copy(int32_t rc, const OxiError& e, const Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(rc == OXI_OK || e.kind != OXI_ERR_NOT_IMPLEMENTED, "aten::_copy_from(", t.scalar_type(),
                              t.sizes(), "): ", e.message);
  check(rc, e);
}
c10::Device device_or_current(std::optional<c10::Device> d) {
  return d && d->has_index() ? *d : c10::Device(kSelf, t_device);
}
// What nobody wrote reads as zeros here; with torch.use_deterministic_algorithms it is what PyTorch fills it with.
bool fills_what_is_new() {
  auto& context = at::globalContext();
  return C10_UNLIKELY(context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory());
}
Tensor filled(Tensor t) {
  if (fills_what_is_new()) at::native::fill_empty_deterministic_(t);
  return t;
}
Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
             std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "tpu tensors have the strided layout, got ", *layout);
  c10::DeviceGuard guard(device_or_current(device));
  return naming("empty.memory_format", size, [&]() -> Tensor {
    return filled(at::detail::empty_generic(size, &g_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                            c10::dtype_or_default(dtype), format));
  });
}
// Zeros that PyTorch knows to be zeros, as tangents of what has none: zero times infinity is zero. Kernels that read them
// find zeros.
Tensor zero_tensor(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                   std::optional<c10::Device> device, std::optional<bool> pin) {
  Tensor zeros = at::zeros(size, dtype, layout, device_or_current(device), pin);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(zeros.storage()), keys.add(c10::DispatchKey::ZeroTensor),
                                                    zeros.dtype());
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "tpu tensors have the strided layout, got ", *layout);
  c10::DeviceGuard guard(device_or_current(device));
  return naming("empty_strided", size, [&]() -> Tensor {
    return filled(at::detail::empty_strided_generic(size, stride, &g_allocator,
                                                    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                    c10::dtype_or_default(dtype)));
  });
}
void write_host(const Tensor& src, const Tensor& dst) {
  Tensor h = src.to(dst.scalar_type()).expand(dst.sizes());
  if (dst.is_conj() && is_bits(dst)) h = h.conj();
  h = h.resolve_conj().resolve_neg().contiguous();
  OxiTensor d;
  describe_kept(d, dst);
  OxiError e{};
  check_copy(g_core->write(&d, h.const_data_ptr(), &e), e, dst);
}
void read_into(const Tensor& src, const Tensor& dst) {
  OxiTensor s;
  describe_kept(s, src);
  OxiError e{};
  check_copy(g_core->read(&s, dst.mutable_data_ptr(), &e), e, src);
}
Tensor read_host(const Tensor& src) {
  Tensor h = at::detail::empty_cpu(src.sizes(), src.scalar_type(), false, std::nullopt);
  read_into(src, h);
  return src.is_conj() && is_bits(src) ? h.conj() : h;
}
// Whether memory of the CPU is as a read leaves it: row-major, with nothing lazy.
bool holds_what_is_read(const Tensor& dst, const Tensor& src) {
  return dst.device().is_cpu() && dst.layout() == at::kStrided && dst.scalar_type() == src.scalar_type() &&
         dst.is_contiguous() && dst.sizes() == src.sizes() && !dst.is_conj() && !dst.is_neg() &&
         !(src.is_conj() && is_bits(src));
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool /*non_blocking*/) {
  if (dst.numel() == 0) {
    (void)self.expand(dst.sizes());  // refuses sizes that do not fit
    return dst;
  }
  make_own(dst);
  bool from_self = self.device().type() == kSelf, to_self = dst.device().type() == kSelf;
  if (to_self) {
    at::assert_no_internal_overlap(dst);
    if (from_self) at::assert_no_partial_overlap(dst, self);
  }
  bool same = self.scalar_type() == dst.scalar_type() && self.is_conj() == dst.is_conj();
  if (from_self && to_self && !same && (is_bits(self) || is_bits(dst))) {
    write_host(read_host(self), dst);
  } else if (from_self && to_self) {
    OxiTensor a, b;
    Tensor s = self.expand(dst.sizes());
    describe_kept(a, s);
    describe_kept(b, dst);
    OxiError e{};
    check_copy(g_core->copy(&a, &b, &e), e, dst);
  } else if (to_self) {
    TORCH_CHECK(self.device().is_cpu() || self.device().is_cuda(), "cannot copy a ", self.device(), " tensor to the tpu device");
    write_host(self.to(at::kCPU), dst);
  } else if (holds_what_is_read(dst, self)) {
    read_into(self, dst);
  } else {
    dst.copy_(read_host(self));
  }
  return dst;
}
Tensor without_conj_of_bits(const Tensor& t) {
  if (t.device().type() != kSelf || !is_bits(t)) return t;
  return copy_from(t, empty_strided(t.sizes(), t.strides(), t.scalar_type(), std::nullopt, t.device(), std::nullopt), false);
}
const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  // at::native::resize_ would memcpy between data pointers.
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != sizes) {
    size_t had = impl->unsafe_storage().nbytes();
    size_t need = at::detail::computeStorageNbytesContiguous(sizes, impl->itemsize(), impl->storage_offset());
    if (need > had) {
      naming("resize_", sizes, [&] { at::native::resize_bytes_nocuda(impl->unsafe_storage(), need); });
    }
    impl->set_sizes_contiguous(sizes);
    if (fills_what_is_new()) at::native::fill_resize_deterministic_(self, static_cast<int64_t>(had));
  }
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (dst.sizes() != self.sizes()) resize(dst, c10::fromIntArrayRefSlow(self.sizes()), std::nullopt);
  return copy_from(self, dst, false);
}
at::Scalar local_scalar_dense(const Tensor& self) {
  return at::_local_scalar_dense(read_host(self));
}
bool equal(const Tensor& a, const Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "Expected object of data type ", a.scalar_type(), " but got data type ",
              b.scalar_type(), " for argument 'other' in call to equal");
  return a.numel() == 0 || at::eq(a, b).all().item<bool>();
}
void record_stream(Tensor&, at::Stream) {}
// Whether `a.data = b` may keep the tensor object: what lets Module.to() move parameters in place, ties included.
bool has_compatible_shallow_copy_type(const Tensor& a, const Tensor& b) {
  auto dense = [](const Tensor& t) {
    return t.layout() == c10::kStrided && (t.device().is_cpu() || t.device().type() == kSelf || t.device().is_cuda());
  };
  return dense(a) && dense(b);
}

// ---------------------------------------------------------------- views: PyTorch's metadata, nothing of ours
Tensor as_strided(const Tensor& s, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto off = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(s, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), off);
}
Tensor view(const Tensor& s, c10::SymIntArrayRef size) {
  return at::native::view(s, C10_AS_INTARRAYREF_SLOW(size));
}
Tensor reshape_alias(const Tensor& s, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(s, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor unfold(const Tensor& s, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(s, dim, size, step);
}
Tensor& set_tensor(Tensor& s, const Tensor& source) {
  return at::native::set_tensor_(s, source);
}
Tensor& set_storage(Tensor& s, at::Storage source) {
  return at::native::set_(s, std::move(source));
}
Tensor& set_storage_offset(Tensor& s, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  size_t before = source.nbytes();
  at::native::set_storage_meta__symint(s, source, std::move(offset), size, stride);
  // As elsewhere, the storage grows to what is shown of it; so far only its size does.
  if (source.nbytes() > before) at::native::resize_bytes_nocuda(source, source.nbytes());
  return s;
}
Tensor& set_empty(Tensor& s) {
  c10::DeviceGuard guard(s.device());
  s.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), 0, &g_allocator, true));
  s.unsafeGetTensorImpl()->set_storage_offset(0);
  s.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  return s;
}
// PyTorch counts the storages that share what was cloned lazily; a write gives one its own. What it counts is a pointer
// that is also its context.
void drop_address(void* address) {
  int64_t offset;
  if (void* slot = g_core->find(reinterpret_cast<uintptr_t>(address), &offset)) drop_slot(slot);
}
Tensor lazy_clone(const Tensor& s) {
  auto* storage = s.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  auto& p = storage->_mutable_data_ptr_no_checks();
  if (p.get_deleter() == &drop_slot) {
    void* address = p.get();
    p.release_context();
    storage->set_data_ptr_noswap({address, address, &drop_address, s.device()});
  }
  return at::native::_lazy_clone(s);
}

// ---------------------------------------------------------------- registration
std::vector<std::unique_ptr<torch::Library>>& libraries() {
  static auto* v = new std::vector<std::unique_ptr<torch::Library>>;  // never destroyed: PyTorch's registry may be gone by then
  return *v;
}
torch::Library& library(const char* ns) {
  libraries().push_back(std::make_unique<torch::Library>(torch::Library::IMPL, ns, c10::DispatchKey::PrivateUse1, __FILE__, __LINE__));
  return *libraries().back();
}
void register_memory_and_views() {
  auto& m = library("aten");
  m.impl("_fused_sdp_choice", &oxi_attention::choice);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zero_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("equal", &equal);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("resize_", &resize);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_", &set_empty);
  m.impl("_lazy_clone", &lazy_clone);
}
// The overloads of one namespace that the core has rows for.
void bind_ops(const std::string& ns) {
  auto& m = library(ns.c_str());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.compare(0, ns.size() + 2, ns + "::") != 0) continue;
    const bool aten = ns == "aten";
    const std::string base = name.name.substr(ns.size() + 2);
    if (!g_core->knows((aten ? base : name.name).c_str())) continue;
    auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    // What has a structured kernel is no composition, even if PyTorch can take it apart too: silu_backward.
    bool composite = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                     !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    std::ostringstream schema;
    schema << op->schema();
    const void* served = g_core->bind(schema.str().c_str(), composite);
    if (!served) continue;
    std::string full = base + (name.overload_name.empty() ? "" : "." + name.overload_name);
    m.impl(full.c_str(), kernel_for(served, *op));
  }
}
void register_core_ops() {
  bind_ops("aten");
  library("_").fallback(torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Fallback>()));
}

void register_graphs() {
  libraries().push_back(
      std::make_unique<torch::Library>(torch::Library::FRAGMENT, "oxitorch", std::nullopt, __FILE__, __LINE__));
  auto& m = *libraries().back();
  m.def("_replay(int graph, Tensor[] args) -> (bool, Tensor[])", &replay);
  m.def("_pad(Tensor x, int[] shape, Scalar value) -> Tensor?", &pad);
  m.def("_watch(Tensor[] args) -> bool", &watch);
  m.def("_watched(int graph, Tensor[] args, Tensor[] outs) -> bool", &watched);
  m.def("_trace(Tensor[] args, bool dry=False) -> bool", &trace);
  m.def("_trace_also(Tensor tensor) -> ()", &trace_also);
  m.def("_traced(int graph, Tensor[] args, Tensor[] outs, bool ends_step, bool dry, int[] donated) -> (int, str)", &traced);
  m.def("_untrace(Tensor[] args) -> ()", &untrace);
  m.def("_trace_pause(bool on) -> ()", &trace_pause);
  m.def("_body_begin(Tensor[] like) -> (bool, Tensor[], str)", &body_begin);
  m.def("_body_end(Tensor[] gives) -> str", &body_end);
  m.def("_body_drop(bool open) -> str", &body_drop);
  m.def("_control(str name, int[] numbers, Tensor[] operands) -> (bool, Tensor[], str)", &control);
  m.def("_decompose(str name, int graph, Any[] args) -> Tensor?[]?");
  m.def("_sparse(str name, Any[] args) -> Any[]");
  m.def("_process_group(__torch__.torch.classes.c10d.ProcessGroup group, int timeout_ms, str name, int[] ranks, int[] devices) -> ()",
        [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t timeout_ms, std::string name,
           std::vector<int64_t> ranks, std::vector<int64_t> devices) {
           oxi_group::add(group, timeout_ms, std::move(name), ranks, devices);
         });
  m.def("_alone(__torch__.torch.classes.c10d.ProcessGroup group, int timeout_ms) -> ()", &oxi_group::add_alone);
  // For tests and benches: how many messages this process has sent to compare what ranks are about to do, and of how many
  // collectives the data went with those; and whether ranks compare.
  m.def("_group_messages() -> (int, int)", [] {
    auto& messages = oxi_group::g_messages;
    return std::make_tuple(static_cast<int64_t>(messages.sent), static_cast<int64_t>(messages.carrying));
  });
  m.def("_group_compares(bool on) -> ()", [](bool on) { oxi_group::g_compares = on; });
  m.def("_bind(str namespace) -> ()", [](std::string ns) { bind_ops(ns); });
}

// ---------------------------------------------------------------- what the core asks of PyTorch
uint64_t node_number(uint64_t thread, uint64_t count) {
  return thread << 40 | (count & ((uint64_t(1) << 40) - 1));
}
// A backward of nothing, in autograd's thread of the device: when it is done, that thread has put away what it ran before.
struct OfNothing final : torch::autograd::Node {
  OfNothing() : Node(UINT64_MAX) {}  // so that it counts no node of this thread
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
};
void settle(int32_t device) {
  try {
    auto on = c10::Device(c10::DeviceType::PrivateUse1, static_cast<DeviceIndex>(device));
    at::Tensor nothing = at::empty({0}, at::TensorOptions().device(on));
    auto [node, raw] = oxi_attention::make_node<OfNothing>();
    raw->add_input_metadata(nothing);
    torch::autograd::Engine::get_default_engine().execute({torch::autograd::Edge(node, 0)}, {nothing}, false, false, true);
  } catch (const std::exception&) {
    // Compiled autograd takes no node that it does not know. Its backward runs in the thread that calls it, which has
    // nothing to wait for.
  }
}
// A backward runs in the thread that asks for it, as on the CPU: it only records, so a thread of its own for each device is
// no gain, and to wake that one up and to be woken by it costs more than what a small model records. A thread's flag says
// so, from its first op on. Whoever sets that flag is stronger, and PyTorch sets it back where inference mode ends.
void keep_backward_here(int64_t task) {
  static thread_local bool is_said = false;
  auto& state = c10::AutogradState::get_tls_state();
  if (is_said || !state.get_multithreading_enabled() || task >= 0 || c10::InferenceMode::is_enabled()) return;
  is_said = true;
  state.set_multithreading_enabled(false);
}
const OxiShim kShim = {
    OXI_ABI_VERSION,
    [](void* g, int32_t device, uint64_t blocks, uint64_t* seed, uint64_t* offset) {
      auto* gen = generator(g, static_cast<DeviceIndex>(device));
      std::lock_guard<std::mutex> lock(gen->mutex_);
      *seed = gen->seed_, *offset = gen->offset_;
      gen->offset_ += blocks;
    },
    [](int32_t device, uint64_t* seed, uint64_t* offset) {
      auto* gen = generator(nullptr, static_cast<DeviceIndex>(device));
      std::lock_guard<std::mutex> lock(gen->mutex_);
      *seed = gen->seed_, *offset = gen->offset_;
    },
    [](int32_t device, uint64_t seed, uint64_t offset) {
      auto* gen = generator(nullptr, static_cast<DeviceIndex>(device));
      std::lock_guard<std::mutex> lock(gen->mutex_);
      gen->seed_ = seed, gen->offset_ = offset;
    },
    []() -> uint64_t {
      static thread_local const uint64_t thread = at::RecordFunction::currentThreadId();
      uint64_t next = at::sequence_number::peek();
      return next ? node_number(thread, next) : 0;
    },
    []() -> uint64_t {
      auto node = torch::autograd::get_current_node();
      return node ? node_number(node->thread_id(), node->sequence_nr() + 1) : 0;
    },
    [](OxiCaller* caller) {
      static thread_local const uint64_t thread = at::RecordFunction::currentThreadId();
      auto task = torch::autograd::get_current_graph_task_id();
      keep_backward_here(task);
      if (task < 0) {
        *caller = {thread, task, 0, 0, 0};
        return;
      }
      auto node = torch::autograd::get_current_node();
      bool is_of_leaf = node && node->sequence_nr() == UINT64_MAX;
      *caller = {thread, task, node && !is_of_leaf ? node->thread_id() : 0,
                 c10::GradMode::is_enabled(), torch::autograd::get_current_graph_task_keep_graph()};
    },
    &settle,
    []() -> int32_t { return t_device; },
    [](int32_t d) { t_device = static_cast<DeviceIndex>(d); },
    []() -> int32_t { return static_cast<int32_t>(c10::get_default_dtype_as_scalartype()); },
    []() -> uint32_t { return static_cast<uint32_t>(at::globalContext().float32MatmulPrecision()); },
    []() -> uint8_t { return at::globalContext().deterministicAlgorithms(); },
    [] { return oxi_profiler::running_now(); },
    []() -> const char* { return TORCH_VERSION; },
    [](const char* op, const OxiArg* args, uint32_t nargs, const OxiTensor* results, uint32_t nresults, uint8_t alone, OxiError* error) -> int32_t {
      static thread_local std::string message;
      try {
        std::optional<Alone> here;
        if (alone) here.emplace();
        call(op, args, nargs, results, nresults);
        return OXI_OK;
      } catch (const c10::LinAlgError& e) {
        error->kind = OXI_ERR_LINALG;
        message = e.what_without_backtrace();
      } catch (const c10::Error& e) {
        message = e.what_without_backtrace();
      } catch (const std::exception& e) {
        message = e.what();
      } catch (...) {
        message = "an exception that is none of C++'s";
      }
      error->message = message.c_str();
      return OXI_ERROR;
    },
    &oxi_group::run,
    &oxi_group::begin,
    &oxi_group::again,
    &oxi_group::drop,
    &describe_held,
    &requires_grad,
    &objects_of,
};
}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &oxi_attention::choice)
}

// The core writes through lazy conjugation and negation. These ops do not say that they write, so PyTorch would hand
// them a resolved copy of the destination.
#define OXI_LAZY_COPIES(m)                                                       \
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());                   \
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough())
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  OXI_LAZY_COPIES(m);
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  OXI_LAZY_COPIES(m);
}
#undef OXI_LAZY_COPIES

// Autocast follows the lists PyTorch keeps for its other accelerators.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
#define OXI_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(OXI_LOWER)
#undef OXI_LOWER
#define OXI_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(OXI_FP32)
#undef OXI_FP32
#define OXI_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(OXI_FP32_DTYPE)
#undef OXI_FP32_DTYPE
#define OXI_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(OXI_PROMOTE)
#undef OXI_PROMOTE
}

extern "C" __attribute__((visibility("default"))) const OxiShim* oxitorch_shim_init(const OxiCore* core, const char** error) {
  static std::string message;
  if (core->abi_version != OXI_ABI_VERSION) {
    *error = "the shim was built for another version of oxitorch";
    return nullptr;
  }
  try {
    g_core = core;
    c10::SetAllocator(kSelf, &g_allocator);
    at::setHostAllocator(kSelf, &g_pinned);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    register_memory_and_views();
    oxi_nested::install(libraries());  // before the core's, which leave out what has a kernel
    register_core_ops();
    register_graphs();
    oxi_accelerator::refuse_graphs(kSelf);
    oxi_sparse::install(core, libraries());
    oxi_attention::install(libraries());
    oxi_profiler::install(core);
    return &kShim;
  } catch (const std::exception& e) {
    message = e.what();
    *error = message.c_str();
    return nullptr;
  }
}
