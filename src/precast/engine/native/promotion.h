// Mixed dtypes that PyTorch refuses: whether there are any, which error says so, and the call in the widest of them.
//
// Invariants:
// - what is promoted are the arguments as they came, not the copies of weights;
// - all is as `reference_kernels.py` has it: the same calls, with the same results and errors.
#pragma once

#include "operation.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace precast {

// The tensor in a dtype, through the dispatcher.
at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype);

// Calls `visit` with each tensor of an argument that is a tensor, a list of them, or of some and none.
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
  Dtypes(const Operation& operation, const c10::IValue* arguments) {
    for (const size_t slot : operation.tensors) {
      for_each_tensor(arguments[slot], [&](const at::Tensor& tensor) {
        const uint64_t bit = uint64_t{1} << static_cast<int>(tensor.scalar_type());
        if ((bit & kFloating) != 0 && tensor.unsafeGetTensorImpl()->device_type() == operation.device) {
          bits_ |= bit;
        }
      });
    }
  }

  bool are_mixed() const {
    return (bits_ & (bits_ - 1)) != 0;
  }

  at::ScalarType widest() const;

 private:
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

// Whether an error is about dtypes that an operation does not take together.
bool is_about_dtypes(const c10::Error& error);

// Whether an error is there again at the next such call: not where there was no memory left.
bool is_lasting(const c10::Error& error);

// What to do where the operation has resized what it writes to. PyTorch may have done so to the tensor itself before it
// refused, so where it was not asked, nothing is known.
enum class Resized : bool { Copied, Refused };

// Runs an operation whose arguments are on the stack with its floating tensors in the widest of their dtypes, and leaves
// its results there; what it writes to gets the result copied back. False, and something on the stack, where that raises.
bool promote(const Operation& operation, const c10::OperatorHandle& op, c10::Stack* stack, Resized resized);

}  // namespace precast
