// Promotion of mixed dtypes; see promotion.h.
#include "promotion.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace precast {
namespace {

// The arguments of a call in one dtype, and the temporaries written in place of its outputs.
class Promoted {
 public:
  Promoted(const Operation& operation, c10::IValue* arguments)
      : device_(operation.device), dtype_(Dtypes(operation, arguments).widest()) {
    if (!operation.writes) {
      for (const size_t slot : operation.tensors) {
        promote(arguments[slot]);
      }
      return;
    }
    for (auto slot = operation.tensors.rbegin(); slot != operation.tensors.rend(); ++slot) {
      const c10::IValue before = arguments[*slot];
      promote(arguments[*slot]);
      if (operation.are_written[*slot] && before.isTensor() && !arguments[*slot].is(before)) {
        written_.push_back({before.toTensor(), arguments[*slot].toTensor()});
      }
    }
  }

  // Copies the temporaries to the outputs.
  void copy_back() const {
    for (const auto& [destination, temporary] : written_) {
      write(destination, temporary);
    }
  }

  // Replaces a result that is a temporary by its output.
  void restore(c10::IValue& result) const {
    for (const auto& [destination, temporary] : written_) {
      if (result.isTensor() && result.toTensor().is_same(temporary)) {
        result = destination;
        return;
      }
    }
  }

 private:
  at::Tensor promoted(const at::Tensor& tensor) const {
    const bool is_promotable = tensor.defined() && tensor.device().type() == device_ &&
        c10::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != dtype_;
    return is_promotable ? cast(tensor, dtype_) : tensor;
  }

  void promote(c10::IValue& value) const {
    if (value.isTensor()) {
      value = promoted(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) {
        tensor = promoted(tensor);
      }
      value = std::move(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor.has_value() ? std::optional<at::Tensor>(promoted(*tensor)) : std::nullopt);
      }
      value = std::move(list);
    }
  }

  struct Written {
    at::Tensor destination, temporary;
  };

  const c10::DeviceType device_;
  const at::ScalarType dtype_;
  c10::SmallVector<Written, 2> written_;
};

}  // namespace

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  static const auto to = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::to", "dtype")
                             .typed<at::Tensor(
                                 const at::Tensor&, at::ScalarType, bool, bool, std::optional<at::MemoryFormat>)>();
  return to.call(tensor, dtype, false, false, std::nullopt);
}

void write(const at::Tensor& target, const at::Tensor& source) {
  static const auto copy = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("aten::copy_", "")
                               .typed<at::Tensor&(at::Tensor&, const at::Tensor&, bool)>();
  at::Tensor written = target;
  copy.call(written, source, false);
}

at::Tensor detached(const at::Tensor& tensor) {
  static const auto detach = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("aten::detach", "")
                                 .typed<at::Tensor(const at::Tensor&)>();
  return detach.call(tensor);
}

at::ScalarType Dtypes::widest() const {
  at::ScalarType widest = at::ScalarType::Undefined;
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
    if ((bits_ >> i & 1) != 0) {
      const auto dtype = static_cast<at::ScalarType>(i);
      widest = widest == at::ScalarType::Undefined ? dtype : c10::promoteTypes(widest, dtype);
    }
  }
  return widest;
}

bool have_elements(const Operation& operation, const c10::IValue* arguments) {
  bool all = true;
  for (const size_t slot : operation.tensors) {
    for_each_tensor(arguments[slot], [&](const at::Tensor& tensor) {
      all = all && (!c10::isFloatingType(tensor.scalar_type()) || tensor.numel() > 1);
    });
  }
  return all;
}

void promote(const Operation& operation, const c10::OperatorHandle& op, c10::Stack* stack) {
  const size_t first = stack->size() - operation.are_written.size();
  std::optional<Promoted> promoted;
  {
    // Autocast is off on this device, as in PyTorch's kernels.
    c10::impl::ExcludeDispatchKeyGuard without_autocast{c10::DispatchKeySet(operation.key)};
    promoted.emplace(operation, stack->data() + first);
    op.callBoxed(stack);
  }
  promoted->copy_back();
  for (size_t result = first; result < stack->size(); ++result) {
    promoted->restore((*stack)[result]);
  }
}

}  // namespace precast
