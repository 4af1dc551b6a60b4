// What the kernels at the Autocast keys do; see kernel.h.
#include "kernel.h"

#include "torch_api.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>

namespace precast {
namespace {

// Keys of which one says that a call is traced, transformed or recorded, or that a tensor is of a subclass.
constexpr c10::DispatchKeySet kStrange{
    c10::DispatchKey::Python,
    c10::DispatchKey::PythonTLSSnapshot,
    c10::DispatchKey::Tracer,
    c10::DispatchKey::Functionalize,
    c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::FuncTorchDynamicLayerBackMode,
    c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
    c10::DispatchKey::FuncTorchVmapMode,
    c10::DispatchKey::BatchedNestedTensor,
    c10::DispatchKey::Batched,
    c10::DispatchKey::VmapMode,
    c10::DispatchKey::PreDispatch,
    c10::DispatchKey::PythonDispatcher};

bool is_strange(c10::DispatchKeySet keys) {
  return !(keys & kStrange).empty() || !(c10::impl::tls_local_dispatch_key_set().included_ & kStrange).empty();
}

// Whether Python has to say what is in force in a thread that has no policy of its own: it is new here, or one of
// PyTorch's own that works for a thread that has one.
bool asks_python(const ThreadState& here) {
  static const std::string name = "precast bound policies";
  return here.kind == Thread::Unknown ||
      (here.kind == Thread::PyTorchs && at::impl::ThreadLocalPythonObjects::contains(name));
}

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  static const auto to = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::to", "dtype")
                             .typed<at::Tensor(
                                 const at::Tensor&, at::ScalarType, bool, bool, std::optional<at::MemoryFormat>)>();
  return to.call(tensor, dtype, false, false, std::nullopt);
}

// What PyTorch's cache keeps, and so ours: see `weights/weight_cache.py`.
bool is_kept_by_pytorch(const at::Tensor& tensor) {
  return tensor.is_leaf() && !tensor.is_view() && !at::caching::is_cached_tensor(tensor);
}

// The copy that Python gives for a weight: of what is held, or of a kind that this table does not keep; or nothing,
// where each use casts it. `registration.py` has the function.
std::optional<at::Tensor> copy_from_python(const at::Tensor& source, at::ScalarType dtype, c10::DeviceType device) {
  static const auto ask =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("precast_native::ask", "")
          .typed<std::optional<at::Tensor>(const at::Tensor&, at::ScalarType, c10::string_view)>();
  return ask.call(source, dtype, c10::DeviceTypeName(device, true));
}

// Looks for the copies of weights, for one call.
class Search {
 public:
  Search(ThreadState& here, c10::DeviceType device)
      : here_(here),
        device_(device),
        is_on_(at::autocast::is_autocast_cache_enabled() && here.kind != Thread::PyTorchs),
        is_held_(HeldSources::any()),
        is_inference_(c10::InferenceMode::is_enabled()),
        records_(c10::GradMode::is_enabled()) {
    if (!is_on_ || (is_inference_ && !is_held_)) {
      is_on_ = false;
      return;
    }
    dtype_ = at::autocast::get_autocast_dtype(device);
    if (is_held_ && device != c10::DeviceType::CPU) {
      const auto asks = Process::is_capturing.load();
      captures_ = asks != nullptr && asks() != 0;  // a graph keeps what it is given, whatever becomes of the weights
    }
  }

  bool is_on() const {
    return is_on_;
  }

  bool is_held() const {
    return is_held_;
  }

  // The copy of an argument; undefined where it is to be passed as it is.
  at::Tensor copy_for(const at::Tensor& tensor) {
    const c10::TensorImpl& source = *tensor.unsafeGetTensorImpl();
    if (source.dtype() != caffe2::TypeMeta::Make<float>() || source.device_type() != device_) {
      return {};
    }
    const bool trains = tensor.requires_grad();
    if (!trains && !is_held_) {
      return {};  // PyTorch casts it at each use
    }
    if (!source.has_storage() || source.layout() != at::kStrided || tensor.is_inference() ||
        !source.version_counter().enabled() || captures_) {
      return ask(tensor);
    }
    if (is_held_) {
      const Use use = !records_ ? Use::Persistent : trains ? Use::Leaf : Use::PerRegion;
      at::Tensor copy = here_.copies.find_held(source, dtype_, use);
      if (copy.defined()) {
        return copy;
      }
      if (here_.held.has(&source)) {
        copy = use == Use::Leaf ? here_.copies.find(source, dtype_) : at::Tensor();
        return copy.defined() ? copy : ask(tensor);
      }
      if (tensor.is_view() && here_.held.has(tensor._base().unsafeGetTensorImpl())) {
        return ask(tensor);
      }
    }
    if (!trains || is_inference_) {
      return {};
    }
    at::Tensor copy = here_.copies.find(source, dtype_);
    return copy.defined() || !is_kept_by_pytorch(tensor) ? copy : copy_of(here_, tensor, dtype_);
  }

  // The same for an argument of any kind: what has a copy is replaced.
  void replace(c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      at::Tensor copy = tensor.defined() ? copy_for(tensor) : at::Tensor();
      if (copy.defined()) {
        value = c10::IValue(std::move(copy));
      }
    } else if (value.isTensorList()) {
      replace_in_list(value);
    }
  }

 private:
  at::Tensor ask(const at::Tensor& tensor) const {
    return copy_from_python(tensor, dtype_, device_).value_or(at::Tensor());
  }

  void replace_in_list(c10::IValue& value) {
    std::vector<at::Tensor> tensors = value.toTensorVector();
    bool has_copies = false;
    for (at::Tensor& tensor : tensors) {
      at::Tensor copy = tensor.defined() ? copy_for(tensor) : at::Tensor();
      if (copy.defined()) {
        tensor = std::move(copy);
        has_copies = true;
      }
    }
    if (has_copies) {
      value = c10::IValue(std::move(tensors));
    }
  }

  ThreadState& here_;
  const c10::DeviceType device_;
  bool is_on_;
  const bool is_held_, is_inference_, records_;
  bool captures_ = false;
  at::ScalarType dtype_ = at::ScalarType::Undefined;
};

// A set of dtypes.
class Dtypes {
 public:
  void add(const c10::IValue& value, c10::DeviceType device) {
    if (value.isTensor()) {
      add(value.toTensor(), device);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        add(tensor, device);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        if (tensor.has_value()) {
          add(*tensor, device);
        }
      }
    }
  }

  void add(const at::Tensor& tensor, c10::DeviceType device) {
    if (tensor.defined() && tensor.device().type() == device && c10::isFloatingType(tensor.scalar_type())) {
      bits_ |= uint64_t{1} << static_cast<int>(tensor.scalar_type());
    }
  }

  bool are_several() const {
    return (bits_ & (bits_ - 1)) != 0;
  }

  at::ScalarType widest() const {
    at::ScalarType widest = at::ScalarType::Undefined;
    for (int i = 0; i < 64; ++i) {
      if (bits_ >> i & 1) {
        const auto dtype = static_cast<at::ScalarType>(i);
        widest = widest == at::ScalarType::Undefined ? dtype : c10::promoteTypes(widest, dtype);
      }
    }
    return widest;
  }

 private:
  uint64_t bits_ = 0;
};

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

// Whether an error is about dtypes that an operation does not take together; as `reference_kernels.py` has it.
bool is_about_dtypes(const char* text) {
  for (const char* part :
       {"dtype", "Dtype", "calar type", "ScalarType", "Scalartype", "scalarType", "scalartype", "same type",
        "result type", "input type", "different type", "mixed type", "not implemented for '"}) {
    if (std::strstr(text, part) != nullptr) {
      return true;
    }
  }
  for (const char* word : {"Half", "BFloat16", "Float", "Double"}) {
    if (has_word(text, word)) {
      return true;
    }
  }
  return false;
}

struct Attempt {
  int& count;
  explicit Attempt(int& attempts) : count(attempts) {
    ++count;
  }
  ~Attempt() {
    --count;
  }
};

}  // namespace

at::Tensor copy_of(ThreadState& here, const at::Tensor& source, at::ScalarType dtype) {
  at::Tensor known = here.copies.find(*source.unsafeGetTensorImpl(), dtype);
  if (known.defined()) {
    return known;
  }
  here.copies.forget(*source.unsafeGetTensorImpl(), dtype);
  Notes notes(source);  // before the cast: what another thread writes meanwhile is then seen at the next use
  at::Tensor made;
  {
    c10::AutoGradMode recorded(true);
    c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    made = cast(source, dtype);
  }
  here.copies.put(source, dtype, Copy{std::move(notes), made});
  if (Process::records_casts.load(std::memory_order_relaxed)) {
    std::lock_guard<std::mutex> guard(Process::lock);
    Process::casts.emplace_back(made.getIntrusivePtr());
  }
  return made;
}

void Kernel::run_native(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) const {
  if (native_.has_value()) {
    native_->callBoxed(op, keys, stack);
  } else {
    const auto below = c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, operation_.key);
    op.redispatchBoxed(keys & below, stack);
  }
}

void Kernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  if (C10_UNLIKELY(Process::is_watched.load(std::memory_order_relaxed))) {
    return reference_.callBoxed(op, keys, stack);
  }
  ThreadState& here = ThreadState::here();
  const auto device = static_cast<size_t>(operation_.device);
  const Policy* policy = here.policies[device];
  if (policy == nullptr) {
    policy = Process::installed[device].load(std::memory_order_acquire);
    if (policy == nullptr) {
      return asks_python(here) ? reference_.callBoxed(op, keys, stack) : run_native(op, keys, stack);
    }
  }
  switch (policy->action(operation_.number)) {
    case Action::Pass:
      return run_native(op, keys, stack);
    case Action::Reference:
      return reference_.callBoxed(op, keys, stack);
    case Action::Delegate:
      if (C10_UNLIKELY(is_strange(keys) || here.kind == Thread::Unknown)) {
        return reference_.callBoxed(op, keys, stack);
      }
      return run_delegated(op, keys, stack, here, *policy);
  }
}

void Kernel::run_delegated(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    c10::Stack* stack,
    ThreadState& here,
    const Policy& policy) {
  const size_t first = stack->size() - operation_.arguments;
  bool is_mixed = false;
  if (policy.promotes && operation_.takes_several) {
    Dtypes dtypes;
    for (size_t slot : operation_.tensors) {
      dtypes.add((*stack)[first + slot], operation_.device);
    }
    is_mixed = dtypes.are_several();
  }
  std::vector<c10::IValue> arguments;
  if (is_mixed) {
    arguments.assign(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  }
  if (operation_.takes_weights) {
    Search search(here, operation_.device);
    if (search.is_on()) {
      if (search.is_held() && ++here.uses >= Process::uses_between_checks) {
        here.uses = 0;
        if (const auto compare = Process::compare.load()) {
          compare();
        }
      }
      for (size_t slot : operation_.tensors) {
        search.replace((*stack)[first + slot]);
      }
    }
  }
  if (!is_mixed) {
    return run_native(op, keys, stack);
  }
  try {
    if (operation_.keeps_autocast_on) {
      Attempt attempt(here.attempts[static_cast<size_t>(operation_.device)]);
      run_native(op, keys, stack);
    } else {
      run_native(op, keys, stack);
    }
    return;
  } catch (const c10::Error& error) {
    if (!operation_.may_run_twice || here.attempts[static_cast<size_t>(operation_.device)] != 0 ||
        !is_about_dtypes(error.what_without_backtrace())) {
      throw;
    }
    stack->resize(first);
    try {
      promote(op, keys, stack, std::move(arguments));
      return;
    } catch (const c10::Error&) {
    }
    throw;
  }
}

void Kernel::promote(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    c10::Stack* stack,
    std::vector<c10::IValue> arguments) const {
  if (operation_.writes) {  // what it writes to gets the result copied back: the reference does that
    stack->insert(
        stack->end(), std::make_move_iterator(arguments.begin()), std::make_move_iterator(arguments.end()));
    return reference_.callBoxed(op, keys, stack);
  }
  Dtypes dtypes;
  for (size_t slot : operation_.tensors) {
    dtypes.add(arguments[slot], operation_.device);
  }
  const at::ScalarType widest = dtypes.widest();
  c10::impl::ExcludeDispatchKeyGuard without_autocast{
      c10::DispatchKeySet(operation_.key)};  // of this device, as PyTorch's kernels do
  const auto promoted = [&](const at::Tensor& tensor) {
    const bool is_promotable = tensor.defined() && tensor.device().type() == operation_.device &&
        c10::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != widest;
    return is_promotable ? cast(tensor, widest) : tensor;
  };
  for (size_t slot : operation_.tensors) {
    c10::IValue& value = arguments[slot];
    if (value.isTensor()) {
      value = promoted(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) {
        tensor = promoted(tensor);
      }
      value = std::move(tensors);
    } else if (value.isOptionalTensorList()) {
      std::vector<std::optional<at::Tensor>> tensors = value.toOptionalTensorVector();
      c10::List<std::optional<at::Tensor>> list;
      for (auto& tensor : tensors) {
        list.push_back(tensor.has_value() ? std::optional<at::Tensor>(promoted(*tensor)) : std::nullopt);
      }
      value = std::move(list);
    }
  }
  stack->insert(stack->end(), std::make_move_iterator(arguments.begin()), std::make_move_iterator(arguments.end()));
  op.callBoxed(stack);
}

}  // namespace precast
