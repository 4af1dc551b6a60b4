// Signatures of calls; see refusals.h.
#include "refusals.h"

#include "state.h"
#include "operation.h"
#include "torch_api.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>

namespace precast {
namespace {

// The kind of the next element of a signature.
enum class Kind : uint64_t { None = 1, Undefined, Bool, Int, Double, Text, List };

uint64_t word(Kind kind, uint64_t value = 0) {
  return value << 8 | static_cast<uint64_t>(kind);
}

uint64_t number_of(at::ScalarType dtype) {
  return static_cast<uint8_t>(dtype);
}

// A size as operations check it: 0, 1 or more.
uint64_t kind_of(int64_t size) {
  return size < 2 ? static_cast<uint64_t>(size) : 2;
}

// True if there is a mask among indices: the number of selected elements depends on its values. On the CPU `index_put`
// checks dtypes first.
bool has_mask(c10::ArrayRef<c10::IValue> arguments) {
  const auto is_mask = [](const c10::IValue& element) {
    return element.isTensor() && element.toTensor().defined() &&
        (element.toTensor().scalar_type() == at::ScalarType::Bool ||
         element.toTensor().scalar_type() == at::ScalarType::Byte);
  };
  return std::any_of(arguments.begin(), arguments.end(), [&](const c10::IValue& argument) {
    const auto elements = argument.isList() ? argument.toListRef() : c10::ArrayRef<c10::IValue>();
    return std::any_of(elements.begin(), elements.end(), is_mask);
  });
}

}  // namespace

std::optional<Signature> Signature::of(
    const Operation& operation, const Policy& policy, c10::ArrayRef<c10::IValue> arguments) {
  // A refused call may have saved tensors, which a pack hook counts: a checkpoint runs the call twice.
  const bool packs = !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
  if (packs || (operation.device != c10::DeviceType::CPU && has_mask(arguments))) {
    return std::nullopt;
  }
  std::optional<Signature> signature(std::in_place);
  auto& words = signature->words_;
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  words.push_back(operation.number);
  words.push_back(reinterpret_cast<uintptr_t>(&policy));
  words.push_back(keys.included_.raw_repr());
  words.push_back(keys.excluded_.raw_repr());
  words.push_back(
      uint64_t{c10::GradMode::is_enabled()} | number_of(at::autocast::get_autocast_dtype(operation.device)) << 8 |
      number_of(c10::typeMetaToScalarType(c10::get_default_dtype())) << 16);
  for (const c10::IValue& argument : arguments) {
    if (!signature->add(argument)) {
      return std::nullopt;
    }
  }
  return signature;
}

bool Signature::add(const c10::IValue& argument) {
  if (argument.isTensor()) {
    return add(argument.toTensor());
  }
  if (argument.isNone()) {
    words_.push_back(word(Kind::None));
  } else if (argument.isBool()) {
    words_.push_back(word(Kind::Bool, argument.toBool()));
  } else if (argument.isInt()) {
    // Dimensions, dtypes and enumerations are small; larger numbers are sizes.
    words_.push_back(word(Kind::Int, static_cast<uint64_t>(std::clamp<int64_t>(argument.toInt(), -64, 64) + 64)));
  } else if (argument.isDouble()) {
    const double value = argument.toDouble();
    words_.push_back(word(Kind::Double, value == 0.0 ? 0 : value == 1.0 ? 1 : 2));
  } else if (argument.isString()) {
    return add_text(argument.toStringRef());
  } else if (argument.isList() && argument.toListRef().size() <= kMostElements) {
    const auto elements = argument.toListRef();
    words_.push_back(word(Kind::List, elements.size()));
    return std::all_of(elements.begin(), elements.end(), [this](const c10::IValue& element) { return add(element); });
  } else {
    return false;
  }
  return true;
}

bool Signature::add_text(const std::string& text) {
  uint64_t letters = 0;
  if (text.size() > sizeof(letters)) {
    return false;
  }
  std::memcpy(&letters, text.data(), text.size());
  words_.push_back(word(Kind::Text));
  words_.push_back(letters);
  return true;
}

bool Signature::add(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    words_.push_back(word(Kind::Undefined));
    return true;
  }
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (impl.is_nested()) {
    return false;  // it has no sizes
  }
  const auto dimensions = static_cast<uint64_t>(impl.dim());
  if (!impl.has_storage() || impl.layout() != at::kStrided || dimensions > kMostDimensions ||
      storages_.size() == kMostTensors) {
    return false;
  }
  const void* storage = impl.unsafe_storage().unsafeGetStorageImpl();
  const auto shared = static_cast<uint64_t>(std::find(storages_.begin(), storages_.end(), storage) - storages_.begin());
  storages_.push_back(storage);
  uint64_t sizes = 0;
  for (const int64_t size : impl.sizes()) {
    sizes = sizes << 2 | kind_of(size);
  }
  const c10::Device device = impl.device();
  const uint64_t flags = uint64_t{impl.requires_grad()} | uint64_t{impl.is_wrapped_number()} << 1 |
      uint64_t{impl.is_contiguous()} << 2;
  words_.push_back(impl.key_set().raw_repr());
  words_.push_back(
      number_of(c10::typeMetaToScalarType(impl.dtype())) | static_cast<uint64_t>(device.type()) << 8 |
      static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 16 | flags << 24 | shared << 32 |
      dimensions << 36 | sizes << 40);
  return true;
}

}  // namespace precast
