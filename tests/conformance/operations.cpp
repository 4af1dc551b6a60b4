// Operations of an extension: one made of PyTorch's, one with a kernel of its own, one that brings its own autocast.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/softmax.h>
#include <torch/library.h>

using at::Tensor;

namespace {

Tensor attention(const Tensor& x, const Tensor& query, const Tensor& key) {
  const Tensor scores = at::matmul(at::linear(x, query), at::linear(x, key).transpose(-1, -2));
  return at::matmul(at::softmax(scores, -1), x);
}

Tensor product(const Tensor& x, const Tensor& weight) {
  return at::mm(x, weight);
}

// What PyTorch's own kernels do: the weight comes from PyTorch's cache.
Tensor product_autocast(const Tensor& x, const Tensor& weight) {
  const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastCPU);
  const auto dtype = at::autocast::get_autocast_dtype(at::kCPU);
  const auto call = c10::Dispatcher::singleton()
                        .findSchemaOrThrow("precast_conformance_cpp::product", "")
                        .typed<Tensor(const Tensor&, const Tensor&)>();
  return call.call(
      at::autocast::cached_cast(dtype, x, c10::DeviceType::CPU),
      at::autocast::cached_cast(dtype, weight, c10::DeviceType::CPU));
}

Tensor product_below(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "one dtype, please");
  return at::mm(x, weight);
}

}  // namespace

TORCH_LIBRARY(precast_conformance_cpp, m) {
  m.def("attention(Tensor x, Tensor query, Tensor key) -> Tensor", attention);
  m.def("product(Tensor x, Tensor weight) -> Tensor", product);
  m.def("below(Tensor x, Tensor weight) -> Tensor");
}

TORCH_LIBRARY_IMPL(precast_conformance_cpp, AutocastCPU, m) {
  m.impl("product", product_autocast);
}

TORCH_LIBRARY_IMPL(precast_conformance_cpp, CPU, m) {
  m.impl("below", product_below);
}
