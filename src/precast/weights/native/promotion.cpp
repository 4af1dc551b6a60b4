// Promotion of mixed dtypes; see promotion.h.
#include "promotion.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>

namespace precast {
namespace {

void copy(const at::Tensor& from, const at::Tensor& to) {
  static const auto copy = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("aten::copy_", "")
                               .typed<at::Tensor&(at::Tensor&, const at::Tensor&, bool)>();
  at::Tensor destination = to;
  copy.call(destination, from, false);
}

bool has_word(const char* text, const char* word) {
  const size_t length = std::strlen(word);
  for (const char* at = std::strstr(text, word); at != nullptr; at = std::strstr(at + 1, word)) {
    const auto is_letter = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
    if ((at == text || !is_letter(at[-1])) && !is_letter(at[length])) {
      return true;
    }
  }
  return false;
}

template <class... Kinds>
bool is_any(const c10::Error& error) {
  return ((dynamic_cast<const Kinds*>(&error) != nullptr) || ...);
}

// True if an error is a RuntimeError in Python: the reference catches those.
bool is_runtime_error(const c10::Error& error) {
  return !is_any<c10::IndexError, c10::ValueError, c10::TypeError, c10::BufferError, c10::SyntaxError>(error);
}

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

  // True if a temporary has got another shape than its output, as for `out`.
  bool has_resized() const {
    return std::any_of(written_.begin(), written_.end(), [](const Written& written) {
      return written.temporary.sizes() != written.destination.sizes();
    });
  }

  // Copies the temporaries to the outputs.
  void copy_back() const {
    for (const auto& [destination, temporary] : written_) {
      copy(temporary, destination);
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

// The words are those of `_ABOUT_DTYPES` in `reference_kernels.py`.
bool is_about_dtypes(const c10::Error& error) {
  const char* text = error.what_without_backtrace();
  for (const char* part :
       {"dtype", "Dtype", "calar type", "ScalarType", "Scalartype", "scalarType", "scalartype", "same type",
        "result type", "input type", "different type", "mixed type", "not implemented for '"}) {
    if (std::strstr(text, part) != nullptr) {
      return is_runtime_error(error);
    }
  }
  for (const char* word : {"Half", "BFloat16", "Float", "Double"}) {
    if (has_word(text, word)) {
      return is_runtime_error(error);
    }
  }
  return false;
}

bool is_lasting(const c10::Error& error) {
  return !is_any<c10::OutOfMemoryError, c10::AcceleratorError>(error);
}

bool promote(const Operation& operation, const c10::OperatorHandle& op, c10::Stack* stack, Resized resized) {
  const size_t first = stack->size() - operation.are_written.size();
  try {
    std::optional<Promoted> promoted;
    {
      // Autocast is off on this device, as in PyTorch's kernels.
      c10::impl::ExcludeDispatchKeyGuard without_autocast{c10::DispatchKeySet(operation.key)};
      promoted.emplace(operation, stack->data() + first);
      op.callBoxed(stack);
    }
    if (resized == Resized::Refused && promoted->has_resized()) {
      return false;
    }
    promoted->copy_back();
    for (size_t result = first; result < stack->size(); ++result) {
      promoted->restore((*stack)[result]);
    }
    return true;
  } catch (const c10::Error& error) {
    if (!is_runtime_error(error)) {
      throw;
    }
    return false;
  }
}

}  // namespace precast
