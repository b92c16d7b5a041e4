// Which attention scaled_dot_product_attention takes, and what autograd does not know of the core's: derivatives of its
// gradients. PyTorch's formulas end with the gradients themselves, as those of its own fused attentions do.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/_scaled_dot_product_fused_attention_overrideable_backward_ops.h>
#include <ATen/ops/eye.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <limits>

#include "device.h"

namespace oxi_attention {
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Backward = at::_ops::_scaled_dot_product_fused_attention_overrideable_backward;

// Whether PyTorch's composite has to serve a tensor: for forward derivatives, and under vmap. Each level of torch.func has a
// tensor of its own in the one of the level above; the dispatcher goes through them.
inline const auto& wants_composite_op() {
  static auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("oxitorch::_wants_composite", "").typed<bool(const Tensor&)>();
  return op;
}
inline bool is_of_transform(const Tensor& t) {
  return t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper) || t.key_set().has(c10::DispatchKey::FuncTorchBatched);
}
inline bool wants_composite(const Tensor& t) {
  if (!t.defined()) return false;
  return is_of_transform(t) ? wants_composite_op().call(t) : torch::autograd::isFwGradDefined(t);
}
inline bool wants_composite_at_level(c10::DispatchKeySet keys, const Tensor& t) {
  if (torch::autograd::isFwGradDefined(t)) return true;
  if (!is_of_transform(t)) return false;
  at::AutoDispatchBelowAutograd below;
  return wants_composite_op().redispatch(keys & c10::after_autograd_keyset, t);
}

// Which implementation scaled_dot_product_attention takes: the core's fused one, unless PyTorch's composite must serve.
inline int64_t choice(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double, bool,
                      std::optional<double>, bool) {
  // Sizes are symbolic while a graph is captured; what is not known then is taken to be as the composite needs it.
  auto dense = [](const Tensor& t) {
    return !t.is_nested() && t.dim() == 4 && t.sym_numel().sym_gt(0).guard_or_false(__FILE__, __LINE__);
  };
  auto same = [](const Tensor& a, int64_t i, const Tensor& b, int64_t j) {
    return a.sym_size(i).sym_eq(b.sym_size(j)).guard_or_false(__FILE__, __LINE__);
  };
  auto divides = [](const c10::SymInt& n, const c10::SymInt& of) {
    return (of % n).sym_eq(0).guard_or_false(__FILE__, __LINE__);
  };
  // The core's is all that is not the composite: who asks for one of CUDA's by name wants that.
  auto& user = at::globalContext();
  bool wanted = user.userEnabledOverrideableSDP() || user.userEnabledFlashSDP() || user.userEnabledMemEfficientSDP() ||
      user.userEnabledCuDNNSDP();
  bool fused = wanted && dense(q) && dense(k) && dense(v) &&
      at::isFloatingType(q.scalar_type()) && q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type() &&
      same(q, 0, k, 0) && same(q, 0, v, 0) && same(k, 1, v, 1) && divides(k.sym_size(1), q.sym_size(1)) &&
      same(k, 2, v, 2) && same(q, 3, k, 3) &&
      !(wants_composite(q) || wants_composite(k) || wants_composite(v) || (mask && wants_composite(*mask)));
  return static_cast<int64_t>(fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}
// The numbers of a call of the backward.
struct Numbers {
  std::array<bool, 4> wanted;
  double dropout;
  bool causal;
  std::optional<double> scale;
};

// What dropout multiplied the probabilities with, (batch, heads, queries, keys): the gradient of values that are given it
// by the core, where each probability is 1.
inline Tensor dropped(const Tensor& q, const Tensor& k, const Tensor& seed, const Tensor& offset, double p, at::ScalarType dtype) {
  auto batch = q.sym_size(0), heads = q.sym_size(1), rows = q.sym_size(2), keys = k.sym_size(2);
  auto zeros = [&](c10::SymInt length, c10::SymInt width) {
    return q.new_zeros_symint({batch, heads, std::move(length), std::move(width)}, dtype);
  };
  auto each = at::eye_symint(rows, q.options().dtype(dtype)).expand_symint({batch, heads, rows, rows});
  auto lse = q.new_zeros_symint({batch, heads, rows}, dtype);
  auto [of_q, of_k, of_v, of_bias] = Backward::call(each, zeros(rows, 1), zeros(keys, 1), zeros(keys, rows), {}, {false, false, true, false},
                                                    zeros(rows, rows), lse, {}, {}, rows, keys, p, false, seed, offset, {});
  return of_v.transpose(2, 3);
}

// Attention in PyTorch's operations, in the dtype of its scores.
struct Composed {
  Tensor q, k, v, p, factor;
  c10::SymInt shared;  // heads of q for each of k and v
  std::array<at::ScalarType, 4> dtypes;
  c10::SymDimVector of_bias;
  double scale;
  bool has_bias;

  Composed(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor& seed,
           const Tensor& offset, const Numbers& n)
      : shared(query.sym_size(1) / key.sym_size(1)), has_bias(bias.defined()) {
    auto acc = at::toOpMathType(query.scalar_type());
    auto scale_of = c10::SymFloat(1.0) / c10::SymFloat(query.sym_size(3)).sqrt();
    scale = n.scale ? *n.scale : scale_of.guard_float(__FILE__, __LINE__);
    dtypes = {query.scalar_type(), key.scalar_type(), value.scalar_type(), has_bias ? bias.scalar_type() : acc};
    q = query.to(acc), k = each(key.to(acc)), v = each(value.to(acc));
    Tensor scores = q.matmul(k.transpose(2, 3)).mul(scale);
    if (has_bias) {
      of_bias = c10::SymDimVector(bias.sym_sizes());
      scores = scores.add(bias.to(acc));
    }
    if (n.causal) {
      auto future = scores.new_ones_symint({q.sym_size(2), k.sym_size(2)}, at::kBool).triu(1);
      scores = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
    }
    p = at::_safe_softmax(scores, 3);
    if (n.dropout > 0) factor = dropped(query, key, seed, offset, n.dropout, acc);
  }

  Tensor each(const Tensor& x) const { return shared == 1 ? x : x.repeat_interleave_symint(shared, 1); }
  Tensor together(const Tensor& x) const {
    return shared == 1 ? x : x.unflatten_symint(1, {x.sym_size(1) / shared, shared}).sum(2);
  }
  Tensor drop(const Tensor& x) const { return factor.defined() ? x.mul(factor) : x; }
  // The backward of softmax.
  Tensor of_scores(const Tensor& g) const { return p.mul(g.sub(p.mul(g).sum({3}, true))); }
  static Tensor t(const Tensor& x) { return x.transpose(2, 3); }

  Gradients given(Tensor of_q, Tensor of_k, Tensor of_v, Tensor of_scores) const {
    auto bias = has_bias && of_scores.defined() ? of_scores.sum_to_size_symint(of_bias).to(dtypes[3]) : Tensor();
    return {of_q.to(dtypes[0]), together(of_k).to(dtypes[1]), together(of_v).to(dtypes[2]), bias};
  }

  Gradients gradients(const Tensor& grad) const {
    auto g = grad.to(q.scalar_type());
    auto ds = of_scores(drop(g.matmul(t(v))));
    return given(ds.matmul(k).mul(scale), t(ds).matmul(q).mul(scale), t(drop(p)).matmul(g), ds);
  }

  // Of the gradients' gradients (undefined ones are zero): those of `grad`, q, k, v and the bias.
  std::pair<Tensor, Gradients> second(const Tensor& grad, const variable_list& gg) const {
    auto acc = q.scalar_type();
    auto g = grad.to(acc), dp = drop(g.matmul(t(v))), ds = of_scores(dp);
    // Of the scores' gradient, and what the gradients of q and k take of q and k beside it.
    Tensor of_ds = p.new_zeros_symint({}), of_g = g.mul(0), of_q = q.mul(0), of_k = k.mul(0), of_v = v.mul(0), of_p = p.mul(0);
    if (gg[0].defined()) {
      auto x = gg[0].to(acc).mul(scale);
      of_ds = of_ds.add(x.matmul(t(k)));
      of_k = of_k.add(t(ds).matmul(x));
    }
    if (gg[1].defined()) {
      auto x = each(gg[1].to(acc)).mul(scale);
      of_ds = of_ds.add(q.matmul(t(x)));
      of_q = of_q.add(ds.matmul(x));
    }
    if (gg[3].defined()) of_ds = of_ds.add(gg[3].to(acc));
    if (gg[2].defined()) {
      auto x = each(gg[2].to(acc));
      of_g = of_g.add(drop(p).matmul(x));
      of_p = of_p.add(drop(g.matmul(t(x))));
    }
    of_ds = of_ds.expand_as(p);
    of_p = of_p.add(of_ds.mul(dp.sub(p.mul(dp).sum({3}, true)))).sub(dp.mul(p.mul(of_ds).sum({3}, true)));
    auto of_dp = drop(of_scores(of_ds));
    of_g = of_g.add(of_dp.matmul(v));
    of_v = of_v.add(t(of_dp).matmul(g));
    auto of_s = of_scores(of_p);
    of_q = of_q.add(of_s.matmul(k).mul(scale));
    of_k = of_k.add(t(of_s).matmul(q).mul(scale));
    return {of_g.to(grad.scalar_type()), given(of_q, of_k, of_v, of_s)};
  }
};

// The node of the gradients.
struct OfGradients final : torch::autograd::Node {
  SavedVariable grad, q, k, v, bias, seed, offset;
  Numbers numbers;

  variable_list apply(variable_list&& gg) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto [of_q, of_k, of_v, of_bias] = Gradients{};
    Tensor of_grad;
    if (std::any_of(gg.begin(), gg.end(), [](const Tensor& x) { return x.defined(); })) {
      Composed c(q.unpack(), k.unpack(), v.unpack(), bias.unpack(), seed.unpack(), offset.unpack(), numbers);
      auto [first, rest] = c.second(grad.unpack(), gg);
      of_grad = first;
      std::tie(of_q, of_k, of_v, of_bias) = rest;
    }
    return {of_grad, of_q, of_k, of_v, of_bias};
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* x : {&grad, &q, &k, &v, &bias, &seed, &offset}) x->reset_data();
  }
  std::string name() const override { return "FusedAttentionBackwardBackward"; }
};
// Nodes are counted by one pointer or by another, as the version of PyTorch has it.
template <class T, class P = std::decay_t<decltype(std::declval<const Tensor&>().grad_fn())>>
std::pair<P, T*> make_node() {
  if constexpr (std::is_constructible_v<P, T*>) {
    auto* node = new T();
    return {P(node), node};
  } else {
    auto node = c10::make_intrusive<T>();
    auto* raw = node.get();
    return {P(std::move(node)), raw};
  }
}

inline Gradients backward(c10::DispatchKeySet keys, const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Tensor& bias, std::array<bool, 4> wanted, const Tensor& out, const Tensor& logsumexp,
                          const Tensor& cum_q, const Tensor& cum_k, c10::SymInt max_q, c10::SymInt max_k, double dropout,
                          bool causal, const Tensor& seed, const Tensor& offset, std::optional<double> scale) {
  using namespace torch::autograd;
  Numbers numbers{wanted, dropout, causal, scale};
  for (auto* x : {&grad, &q, &k, &v, &bias}) {
    if (isFwGradDefined(*x)) return Composed(q, k, v, bias, seed, offset, numbers).gradients(grad);
  }
  std::decay_t<decltype(grad.grad_fn())> node;
  if (compute_requires_grad(grad, q, k, v, bias)) {
    auto [made, own] = make_node<OfGradients>();
    made->set_next_edges(collect_next_edges(grad, q, k, v, bias));
    own->grad = SavedVariable(grad, false), own->q = SavedVariable(q, false), own->k = SavedVariable(k, false);
    own->v = SavedVariable(v, false), own->bias = SavedVariable(bias, false);
    own->seed = SavedVariable(seed, false), own->offset = SavedVariable(offset, false);
    own->numbers = numbers;
    node = made;
  }
  auto results = [&] {
    at::AutoDispatchBelowAutograd below;
    return Backward::redispatch(keys & c10::after_autograd_keyset, grad, q, k, v, bias, wanted, out, logsumexp, cum_q,
                                cum_k, max_q, max_k, dropout, causal, seed, offset, scale);
  }();
  if (node) {
    set_history({std::get<0>(results), std::get<1>(results), std::get<2>(results), std::get<3>(results)}, node);
  }
  return results;
}

// Of a forward outside of vmap whose backward is inside: for all rows of a Jacobian, for instance.
inline Gradients backward_of_batch(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
                                   std::array<bool, 4> wanted, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   c10::SymInt, c10::SymInt, double dropout, bool causal, const Tensor& seed,
                                   const Tensor& offset, std::optional<double> scale) {
  return Composed(q, k, v, bias, seed, offset, {wanted, dropout, causal, scale}).gradients(grad);
}

inline void install(std::vector<std::unique_ptr<torch::Library>>& libraries) {
  auto library = [&](torch::Library::Kind kind, const char* ns, std::optional<c10::DispatchKey> key) -> torch::Library& {
    libraries.push_back(std::make_unique<torch::Library>(kind, ns, key, __FILE__, __LINE__));
    return *libraries.back();
  };
  using c10::DispatchKey;
  library(torch::Library::IMPL, "aten", DispatchKey::AutogradPrivateUse1)
      .impl("_scaled_dot_product_fused_attention_overrideable_backward", &backward);
  library(torch::Library::IMPL, "aten", DispatchKey::FuncTorchBatched)
      .impl("_scaled_dot_product_fused_attention_overrideable_backward", &backward_of_batch);
  library(torch::Library::FRAGMENT, "oxitorch", std::nullopt).def("_wants_composite(Tensor x) -> bool");
  auto implement = [&](DispatchKey key, auto&& f) { library(torch::Library::IMPL, "oxitorch", key).impl("_wants_composite", f); };
  implement(DispatchKey::PrivateUse1, [](const Tensor&) { return false; });
  implement(DispatchKey::AutogradPrivateUse1, &wants_composite_at_level);
  implement(DispatchKey::FuncTorchBatched, [](const Tensor&) { return true; });
}
}  // namespace oxi_attention
