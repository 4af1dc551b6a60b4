// The kernel at the Autocast key of one operation: it swaps weights for their copies, and calls PyTorch's kernel.
//
// Invariants:
// - it does the common case. All else is the reference's, the Python kernel that was registered before it: what is
//   watched, traced, transformed or recorded, and tensors of a subclass. Python is asked too for the copy of a weight that
//   is held, or of a kind that the table does not keep;
// - nothing of Python is called where every weight has its copy;
// - arguments are looked at from the last to the first, as PyTorch casts them: backward comes by in the other order,
//   and so do hooks;
// - mixed dtypes are promoted where PyTorch refuses them: at once where it has refused such a call before, and no copy
//   of a weight was used before it did, so that this changes nothing but the time.
#pragma once

#include "operation.h"
#include "promotion.h"
#include "state.h"

namespace precast {

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(Operation operation, c10::SafeKernelFunction reference, std::optional<c10::SafeKernelFunction> native)
      : operation_(std::move(operation)), reference_(std::move(reference)), native_(std::move(native)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack);

 private:
  void run_native(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) const;
  void run_delegated(
      const c10::OperatorHandle& op,
      c10::DispatchKeySet keys,
      c10::Stack* stack,
      ThreadState& here,
      const Policy& policy) const;
  void run_mixed(
      const c10::OperatorHandle& op,
      c10::DispatchKeySet keys,
      c10::Stack* stack,
      ThreadState& here,
      const Policy& policy) const;
  void replace_weights(c10::Stack* stack, ThreadState& here) const;
  void attempt(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack, ThreadState& here) const;
  void hand_over(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack, ThreadState& here) const;

  const Operation operation_;
  const c10::SafeKernelFunction reference_;
  const std::optional<c10::SafeKernelFunction> native_;
};

// The cast of a weight for this region, with its gradient: the copy that the thread has, or a new one.
at::Tensor copy_of(ThreadState& here, const at::Tensor& source, at::ScalarType dtype);
at::Tensor new_copy_of(ThreadState& here, const at::Tensor& source, at::ScalarType dtype);

// A cast without a gradient, for where none is recorded, in memory that the region before has left if there is any.
at::Tensor new_plain_copy_of(ThreadState& here, const at::Tensor& source, at::ScalarType dtype);

}  // namespace precast
