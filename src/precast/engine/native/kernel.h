// The kernel at the Autocast key of one operation: it swaps weights for their copies, and calls PyTorch's kernel.
//
// Invariants:
// - it does the common case. All else is the reference's, the Python kernel that was registered before it: what is
//   watched, traced, transformed or recorded, and tensors of a subclass. Python is asked too for the copy of a weight that
//   is held, or of a kind that the table does not keep;
// - nothing of Python is called where every weight has its copy;
// - arguments are looked at from the last to the first, as PyTorch casts them: backward comes by in the other order,
//   and so do hooks;
// - what is promoted after a failure are the arguments as they came, not the copies of weights.
#pragma once

#include "state.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace precast {

// One operation on one device type.
struct Operation {
  size_t number;
  c10::DeviceType device;
  c10::DispatchKey key;
  bool takes_weights;     // its tensors are looked for among the copies
  bool keeps_autocast_on;  // in what it calls: PyTorch has no kernel here that switches it off
  bool writes;            // it writes to an argument
  bool may_run_twice;     // it looks at dtypes before it writes: PyTorch's own do
  bool takes_several;     // there can be a mixture of dtypes
  std::vector<size_t> tensors;  // positions of arguments that are tensors or lists of them, the last one first
  size_t arguments;
};

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
      const Policy& policy);
  void promote(
      const c10::OperatorHandle& op,
      c10::DispatchKeySet keys,
      c10::Stack* stack,
      std::vector<c10::IValue> arguments) const;

  const Operation operation_;
  const c10::SafeKernelFunction reference_;
  const std::optional<c10::SafeKernelFunction> native_;
};

// The cast of a weight for this region, with its gradient: the copy that the thread has, or a new one.
at::Tensor copy_of(ThreadState& here, const at::Tensor& source, at::ScalarType dtype);

}  // namespace precast
