// Mixed dtypes that PyTorch refuses: detection, classification of errors, and the rerun in the widest dtype.
//
// Invariants:
// - the original arguments are promoted, not the casts of weights;
// - results and errors are those of `reference_kernels.py`.
#pragma once

#include "operation.h"
#include "torch_api.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace precast {

// Casts a tensor through the dispatcher.
at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype);

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

// The floating dtypes of an operation's tensors on its device, and the region's dtype if that widens one of them.
class Dtypes {
 public:
  Dtypes(const Operation& operation, const c10::IValue* arguments) {
    for (const size_t slot : operation.tensors) {
      for_each_tensor(arguments[slot], [&](const at::Tensor& tensor) {
        const uint64_t bit = bit_of(tensor.scalar_type());
        if ((bit & kFloating) != 0 && tensor.unsafeGetTensorImpl()->device_type() == operation.device) {
          bits_ |= bit;
        }
      });
    }
    if (C10_UNLIKELY(operation.mixes_with_region)) {
      const uint64_t lower = bit_of(at::autocast::get_autocast_dtype(operation.device));
      if ((bits_ & ~(lower | bit_of(at::kFloat) | bit_of(at::kDouble))) != 0) {
        bits_ |= lower;
      }
    }
  }

  bool are_mixed() const {
    return (bits_ & (bits_ - 1)) != 0;
  }

  at::ScalarType widest() const;

 private:
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

  uint64_t bits_ = 0;
};

// True if an error is about dtypes that an operation does not support together.
bool is_about_dtypes(const c10::Error& error);

// True if the next such call would raise the error again; false for a lack of memory.
bool is_lasting(const c10::Error& error);

// The state of an output that the operation has resized. PyTorch may have resized it before it refused the call; if
// PyTorch was not called, that is unknown.
enum class Resized : bool { Copied, Refused };

// Runs an operation on the stack with its floating tensors in their widest dtype, and leaves the results there; outputs
// get the result copied back. Returns false, with an undefined stack, if that raises.
bool promote(const Operation& operation, const c10::OperatorHandle& op, c10::Stack* stack, Resized resized);

}  // namespace precast
