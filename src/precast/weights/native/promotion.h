// Mixed dtypes that PyTorch refuses: detection, and the call in the widest dtype.
//
// Invariants:
// - results and errors are those of `reference_kernels.py`, which also runs what PyTorch may accept.
#pragma once

#include "operation.h"
#include "torch_api.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace precast {

// Casts a tensor through the dispatcher.
at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype);

// `target.copy_(source)` through the dispatcher.
void write(const at::Tensor& target, const at::Tensor& source);

// A separate tensor on the same memory, without a graph.
at::Tensor detached(const at::Tensor& tensor);

// Calls `visit` with each tensor in an argument that is a tensor or a list.
template <class Visit>
void for_each_tensor(const c10::IValue& argument, const Visit& visit) {
  if (argument.isTensor()) {
    visit(argument.toTensor());
  } else if (argument.isList()) {
    for (const c10::IValue& element : argument.toListRef()) {
      if (element.isTensor()) {
        visit(element.toTensor());
      }
    }
  }
}

// The floating dtypes of an operation's tensors on its device.
class Dtypes {
 public:
  Dtypes(const Operation& operation, const c10::IValue* arguments) : operation_(operation) {
    for (const size_t slot : operation.tensors) {
      for_each_tensor(arguments[slot], [&](const at::Tensor& tensor) {
        const uint64_t bit = bit_of(tensor.scalar_type());
        if ((bit & kFloating) != 0 && tensor.unsafeGetTensorImpl()->device_type() == operation.device) {
          bits_ |= bit;
        }
      });
    }
  }

  // True if PyTorch's kernel gets several dtypes, or one that its rule refuses.
  bool are_mixed() const {
    switch (operation_.mixture) {
      case Mixture::Float64:
        return (bits_ & bit_of(at::kDouble)) != 0 && are_several();
      case Mixture::Foreign:
        return foreign() != 0 && (are_several() || foreign() != bit_of(at::kDouble));
      default:
        return are_several();
    }
  }

  // True if there are tensors, and all are float32 or have the lower precision of the region.
  bool are_of_region() const {
    return bits_ != 0 && foreign() == 0;
  }

  at::ScalarType widest() const;

 private:
  uint64_t foreign() const {
    return bits_ & ~(bit_of(at::kFloat) | bit_of(at::autocast::get_autocast_dtype(operation_.device)));
  }

  bool are_several() const {
    return (bits_ & (bits_ - 1)) != 0;
  }

  static uint64_t bit_of(at::ScalarType dtype) {
    return uint64_t{1} << static_cast<int>(dtype);
  }

  static_assert(static_cast<int>(at::ScalarType::NumOptions) <= 64);
  static inline const uint64_t kFloating = [] {
    uint64_t bits = 0;
    for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
      bits |= uint64_t{c10::isFloatingType(static_cast<at::ScalarType>(i))} << i;
    }
    return bits;
  }();

  const Operation& operation_;
  uint64_t bits_ = 0;
};

// True if every floating tensor has several elements. PyTorch accepts some mixtures with a tensor of one or none.
bool have_elements(const Operation& operation, const c10::IValue* arguments);

// Runs an operation on the stack with its floating tensors in their widest dtype, and leaves the results there; outputs
// get the result copied back.
void promote(const Operation& operation, const c10::OperatorHandle& op, c10::Stack* stack);

}  // namespace precast
