// The arguments of a boxed call as flat C structs.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "tensors.h"

namespace {
// Arguments of one call, laid out for the core. Grows only for list arguments.
struct Call {
  c10::SmallVector<OxiArg, 16> args;
  c10::SmallVector<OxiTensor, 8> tensors;
  c10::SmallVector<int64_t, 32> ints;
  c10::SmallVector<double, 8> doubles;
  std::vector<std::unique_ptr<std::vector<OxiTensor>>> tensor_lists;  // lists are off the hot path
  std::vector<std::unique_ptr<std::vector<OxiArg>>> scalar_lists;
  std::vector<std::unique_ptr<std::vector<int64_t>>> int_lists;
  std::vector<std::unique_ptr<std::vector<double>>> double_lists;
  DeviceIndex device = -1;
  bool spread = false;  // a list has tensors of several devices

  explicit Call(size_t n) {
    args.resize(n);
    tensors.resize(n);  // never grows: args point into it
  }
  static bool has_tensors(const c10::IValue& v) {
    auto l = v.toListRef();
    return !l.empty() && std::all_of(l.begin(), l.end(), [](const c10::IValue& x) { return x.isTensor() || x.isNone(); });
  }
  // Lists in which tensors may be left out are indices.
  static void warn_of_byte_mask(const std::optional<Tensor>& t) {
    if (t && t->defined() && t->scalar_type() == at::kByte) {
      TORCH_WARN("indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead.");
    }
  }
  void note(const OxiTensor& t) {
    if (t.device_type == OXI_DEVICE_SELF && device < 0) device = static_cast<DeviceIndex>(t.device_index);
  }
  void put_scalar(OxiArg& a, const c10::IValue& v) {
    if (v.isDouble()) {
      a.tag = OXI_DOUBLE, a.u.d = v.toDouble();
    } else if (v.isBool()) {
      a.tag = OXI_BOOL, a.u.i = v.toBool();
    } else if (v.isComplexDouble()) {
      auto c = v.toComplexDouble();
      double_lists.push_back(std::make_unique<std::vector<double>>(std::vector<double>{c.real(), c.imag()}));
      a.tag = OXI_COMPLEX, a.u.doubles = double_lists.back()->data();
    } else {
      a.tag = OXI_INT, a.u.i = v.toInt();
    }
  }
  template <class List, class Get>
  void put_tensors(OxiArg& a, const List& list, Get get) {
    auto v = std::make_unique<std::vector<OxiTensor>>(list.size());
    for (size_t k = 0; k < v->size(); k++) {
      get(k, (*v)[k]);
      note((*v)[k]);
      const OxiTensor& t = (*v)[k];
      spread |= t.device_type == OXI_DEVICE_SELF ? t.device_index != device : t.device_type == OXI_DEVICE_CPU && t.ndim > 0;
    }
    a.tag = OXI_TENSORS, a.len = static_cast<uint32_t>(v->size()), a.u.t = v->data();
    tensor_lists.push_back(std::move(v));
  }
  void put(size_t i, const c10::IValue& v) {
    OxiArg& a = args[i];
    a.len = 0;
    if (v.isTensor()) {
      describe(tensors[i], v.toTensor());
      note(tensors[i]);
      a.tag = OXI_TENSOR, a.u.t = &tensors[i];
    } else if (v.isNone()) {
      a.tag = OXI_NONE;
    } else if (v.isInt() || v.isDouble() || v.isBool() || v.isComplexDouble()) {
      put_scalar(a, v);
    } else if (v.isSymInt()) {
      a.tag = OXI_INT, a.u.i = v.toSymInt().guard_int(__FILE__, __LINE__);
    } else if (v.isIntList() || v.isSymIntList()) {
      auto list = std::make_unique<std::vector<int64_t>>();
      if (v.isIntList()) {
        *list = v.toIntVector();
      } else {
        for (const auto& s : v.toSymIntVector()) list->push_back(s.guard_int(__FILE__, __LINE__));
      }
      a.tag = OXI_INTS, a.len = static_cast<uint32_t>(list->size()), a.u.ints = list->data();
      int_lists.push_back(std::move(list));
    } else if (v.isBoolList()) {
      auto l = v.toBoolList();
      auto list = std::make_unique<std::vector<int64_t>>();
      for (size_t k = 0; k < l.size(); k++) list->push_back(l.get(k));
      a.tag = OXI_BOOLS, a.len = static_cast<uint32_t>(list->size()), a.u.ints = list->data();
      int_lists.push_back(std::move(list));
    } else if (v.isDoubleList()) {
      double_lists.push_back(std::make_unique<std::vector<double>>(v.toDoubleVector()));
      a.tag = OXI_DOUBLES, a.len = static_cast<uint32_t>(double_lists.back()->size()), a.u.doubles = double_lists.back()->data();
    } else if (v.isTensorList()) {
      auto l = v.toTensorList();
      put_tensors(a, l, [&](size_t k, OxiTensor& o) { describe(o, l.get(k)); });
    } else if (v.isOptionalTensorList()) {
      auto l = v.toOptionalTensorList();
      put_tensors(a, l, [&](size_t k, OxiTensor& o) {
        std::optional<Tensor> t = l.get(k);
        warn_of_byte_mask(t);
        describe(o, t ? *t : Tensor());
      });
    } else if (v.isDevice()) {
      a.tag = OXI_DEVICE, a.u.i = v.toDevice().index();
      if (v.toDevice().type() == kSelf) device = v.toDevice().index() < 0 ? t_device : v.toDevice().index();
    } else if (v.isString()) {
      a.tag = OXI_STR, a.u.s = v.toStringRef().data(), a.len = static_cast<uint32_t>(v.toStringRef().size());
    } else if (v.isGenerator()) {
      TORCH_CHECK(v.toGenerator().device().type() == kSelf, "Expected a 'tpu' device type for generator but found '",
                  v.toGenerator().device().type(), "'");
      a.tag = OXI_GENERATOR, a.u.p = v.toGenerator().unsafeGetGeneratorImpl();
    } else if (v.isList() && has_tensors(v)) {  // TorchScript's, whose static type is lost
      auto l = v.toListRef();
      put_tensors(a, l, [&](size_t k, OxiTensor& o) {
        auto t = l[k].to<std::optional<Tensor>>();
        warn_of_byte_mask(t);
        describe(o, t ? *t : Tensor());
      });
    } else if (v.isList()) {  // Scalar[], and others whose static type is lost
      auto l = v.toListRef();
      auto list = std::make_unique<std::vector<OxiArg>>(l.size());
      for (size_t k = 0; k < l.size(); k++) {
        if (!l[k].isScalar() && !l[k].isBool()) {
          a.tag = OXI_OTHER;
          return;
        }
        (*list)[k].len = 0;
        put_scalar((*list)[k], l[k]);
      }
      a.tag = OXI_SCALARS, a.len = static_cast<uint32_t>(list->size()), a.u.args = list->data();
      scalar_lists.push_back(std::move(list));
    } else {
      a.tag = OXI_OTHER;
    }
  }
};
}  // namespace
