// Tensors across the boundary to the core, their version counters, and lazy clones.
#pragma once

#include <ATen/EmptyTensor.h>
#include <c10/core/impl/COW.h>

#include "device.h"

namespace {
// ---------------------------------------------------------------- tensors across the boundary
inline void describe(OxiTensor& o, const Tensor& t) {
  if (C10_UNLIKELY(!t.defined())) {
    o = OxiTensor{};
    o.flags = OXI_UNDEFINED;
    return;
  }
  auto* impl = t.unsafeGetTensorImpl();
  o.sizes = impl->sizes().data();
  o.strides = impl->strides().data();
  o.ndim = static_cast<int32_t>(impl->dim());
  o.offset = impl->storage_offset();
  o.dtype = static_cast<int16_t>(c10::typeMetaToScalarType(impl->dtype()));
  o.flags = (impl->is_wrapped_number() ? OXI_WRAPPED_NUMBER : 0) | (impl->is_contiguous() ? OXI_CONTIGUOUS : 0);
  if (C10_UNLIKELY(t.is_conj())) o.flags |= OXI_CONJ;  // lazy conjugation and negation: the core applies them
  if (C10_UNLIKELY(t.is_neg())) o.flags |= OXI_NEG;
  o.device_index = impl->device().index();
  o.host = nullptr;
  o.slot = nullptr;
  o.reserved = 0;
  if (C10_LIKELY(impl->device_type() == kSelf)) {
    int64_t offset_bytes;
    o.device_type = OXI_DEVICE_SELF;
    o.slot = slot_of(impl->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks(), offset_bytes);
    if (C10_UNLIKELY(offset_bytes)) o.offset += offset_bytes / static_cast<int64_t>(impl->itemsize());
  } else if (impl->device_type() == c10::kCPU && t.layout() == c10::kStrided) {
    o.device_type = OXI_DEVICE_CPU;
    o.host = impl->has_storage() ? impl->data() : nullptr;
  } else {
    o.device_type = OXI_DEVICE_OTHER;
  }
}
// Dtypes that StableHLO has not (complex32, some of 8 bits and less) are kept as integers of their size: bits, which are
// copied and shown, and computed with on the CPU alone. A lazy conjugation is theirs and not the integers'.
inline bool is_bits(const Tensor& t) {
  auto code = static_cast<int32_t>(t.scalar_type());
  return C10_UNLIKELY(g_core->kept_as(code, t.itemsize()) != code);
}
inline void describe_kept(OxiTensor& o, const Tensor& t) {
  describe(o, t);
  int32_t kept = g_core->kept_as(o.dtype, t.itemsize());
  if (C10_LIKELY(kept == o.dtype)) return;
  TORCH_CHECK_NOT_IMPLEMENTED(kept >= 0, "aten::_copy_from(", t.scalar_type(), t.sizes(), "): a dtype that the tpu device has not");
  o.dtype = static_cast<int16_t>(kept);
  o.flags &= ~OXI_CONJ;
}
void set_layout(const Tensor& t, const OxiOut& o) {
  c10::IntArrayRef sizes(o.sizes, o.ndim);
  auto* impl = t.unsafeGetTensorImpl();
  if (o.contiguous) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, c10::IntArrayRef(o.strides, o.ndim));
  }
  if (C10_UNLIKELY(o.offset)) impl->set_storage_offset(o.offset);
}
Tensor wrap(const OxiOut& o) {
  auto meta = c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(o.dtype));
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(o.nbytes),
                                                       data_ptr(o.slot, static_cast<DeviceIndex>(o.device_index)),
                                                       &g_allocator, /*resizable=*/true);
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), meta);
  set_layout(t, o);
  return t;
}

// ---------------------------------------------------------------- version counters
// Autograd finds by them that a saved tensor was written. PyTorch's ADInplaceOrView kernels count the writes of tensors
// that an op returns. Ops that return nothing (lists) or that PyTorch composes of others have none of these kernels:
// elsewhere what they are made of is counted, and here nothing is.
// The positions of the arguments whose writes are left to us: of in-place and out= forms. Others that write (the running
// averages of a batch norm) are counted nowhere.
c10::SmallVector<size_t, 4> unversioned_writes(const c10::OperatorHandle& op) {
  c10::SmallVector<size_t, 4> written;
  auto& schema = op.schema();
  if (op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView)) return written;
  bool in_place = schema.name().back() == '_' || schema.name().rfind("aten::__i", 0) == 0;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto& a = schema.arguments()[i];
    if (a.alias_info() && a.alias_info()->isWrite() && (in_place || a.is_out())) written.push_back(i);
  }
  return written;
}
// The positions of all arguments that the op says it writes.
c10::SmallVector<size_t, 4> writes(const c10::OperatorHandle& op) {
  c10::SmallVector<size_t, 4> written;
  for (size_t i = 0; i < op.schema().arguments().size(); i++) {
    auto* alias = op.schema().arguments()[i].alias_info();
    if (alias && alias->isWrite()) written.push_back(i);
  }
  return written;
}
void bump(const Tensor& t) {
  if (t.defined() && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}
void bump(const c10::IValue& v) {
  if (v.isTensor()) {
    bump(v.toTensor());
  } else if (v.isTensorList()) {
    auto list = v.toTensorList();
    for (size_t k = 0; k < list.size(); k++) bump(list.get(k));
  }
}

// ---------------------------------------------------------------- lazy clones
// Whether another storage has the same slot until one of the two is written; see lazy_clone.
bool is_shared(const Tensor& t) {
  if (!t.defined() || t.device().type() != kSelf || !t.has_storage()) return false;
  const auto& p = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return C10_UNLIKELY(p.get_deleter() != &drop_slot) && c10::impl::cow::is_cow_data_ptr(p);
}
void make_own(const Tensor& t) {
  if (C10_LIKELY(!is_shared(t))) return;
  c10::DeviceGuard guard(t.device());
  t.storage().mutable_data();
}
void make_own(const c10::IValue& v) {
  if (v.isTensor()) {
    make_own(v.toTensor());
  } else if (v.isTensorList()) {
    auto list = v.toTensorList();
    for (size_t k = 0; k < list.size(); k++) make_own(list.get(k));
  }
}
}  // namespace
