// The kernel at the Autocast key of an operation: it replaces weights by their casts and calls PyTorch's kernel.
//
// Invariants:
// - it handles the common case. All else is run by the reference, the Python kernel registered before it: watched,
//   traced, transformed or recorded calls, sparse tensors and tensor subclasses. Python also makes the casts of held
//   weights that kernels cannot update, and of weights that the table does not store;
// - no Python code runs if every weight has its cast;
// - arguments are processed from last to first, as PyTorch casts them, which determines the order of gradients and
//   hooks;
// - mixed dtypes of operations that refuse every mixture are promoted here; other mixtures are left to Python;
// - products with a float32 result are those of `engine/product_kernels.py`, on devices without a kernel for them.
#pragma once

#include "operation.h"
#include "promotion.h"
#include "state.h"

namespace precast {

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(Operation operation, c10::SafeKernelFunction reference, std::optional<c10::SafeKernelFunction> torch_kernel)
      : operation_(std::move(operation)), reference_(std::move(reference)), torch_kernel_(std::move(torch_kernel)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack);

 private:
  void run_torch_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) const;
  void run_product(const c10::OperatorHandle& op, c10::Stack* stack, ThreadState& here) const;
  bool is_eligible(const at::Tensor& tensor) const;
  void replace_weights(c10::Stack* stack, ThreadState& here) const;

  const Operation operation_;
  const c10::SafeKernelFunction reference_;
  const std::optional<c10::SafeKernelFunction> torch_kernel_;
};

// The cast of a weight for this region, with its gradient: the existing one, or a new one.
at::Tensor copy_of(ThreadState& here, const at::Tensor& source, at::ScalarType dtype);
at::Tensor new_copy_of(ThreadState& here, const at::Tensor& source, at::ScalarType dtype);

// A cast without a gradient, in memory of a previous region if there is any; for where no gradient is recorded.
at::Tensor new_plain_copy_of(ThreadState& here, const at::Tensor& source, at::ScalarType dtype);

}  // namespace precast
