// The kernels at the Autocast keys; see kernel.h.
#include "kernel.h"

#include "capture.h"
#include "cast_node.h"
#include "torch_api.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>


namespace precast {
namespace {

// A call with one of these keys is traced, transformed or recorded, or has a tensor of a subclass.
constexpr c10::DispatchKeySet kUnsupportedKeys{
    c10::DispatchKey::Sparse,  // of which PyTorch has few products in 16 bits
    c10::DispatchKey::SparseCsr,
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

bool has_unsupported_keys(c10::DispatchKeySet keys) {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return !((keys | included) & kUnsupportedKeys).empty();
}

// True if Python has to find the policy for a thread without one: the thread is not registered, or one of PyTorch's
// that works for a thread with a policy.
bool needs_python(const ThreadState& here) {
  return here.kind == ThreadKind::Unknown ||
      (here.kind == ThreadKind::PyTorch && at::impl::ThreadLocalPythonObjects::contains(kInherited));
}

// True if PyTorch's cache would keep the weight, as in `weights/weight_cache.py`.
bool is_kept_by_pytorch(const at::Tensor& tensor) {
  return tensor.is_leaf() && !tensor.is_view() && !at::caching::is_cached_tensor(tensor);
}

// Python's cast of a weight that is held, or that this table does not store; nothing if each use casts it. Implemented
// in `registration.py`.
std::optional<at::Tensor> copy_from_python(const at::Tensor& source, at::ScalarType dtype, c10::DeviceType device) {
  static const auto ask =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("precast_native::cast_in_python", "")
          .typed<std::optional<at::Tensor>(const at::Tensor&, at::ScalarType, c10::string_view)>();
  return ask.call(source, dtype, c10::DeviceTypeName(device, true));
}

// Finds the casts of weights for one call.
class WeightSearch {
 public:
  WeightSearch(ThreadState& here, c10::DeviceType device)
      : here_(here),
        device_(device),
        is_on_(at::autocast::is_autocast_cache_enabled() && here.kind != ThreadKind::PyTorch),
        is_held_(HeldSources::any()),
        is_inference_(c10::InferenceMode::is_enabled()),
        records_(c10::GradMode::is_enabled()) {
    if (!is_on_ || (is_inference_ && !is_held_)) {
      is_on_ = false;
      return;
    }
    dtype_ = at::autocast::get_autocast_dtype(device);
    if (is_held_ && ++here.uses >= Process::uses_between_checks) {
      here.uses = 0;
      if (const auto compare = Process::compare.load()) {
        compare();
      }
    }
    // A graph keeps its inputs even if the weights change, so Python decides for each weight.
    captures_ = is_held_ && device == c10::DeviceType::CUDA && may_be_captured();
  }

  bool is_on() const {
    return is_on_;
  }

  // The cast of an argument; undefined if the argument is passed unchanged.
  at::Tensor copy_for(const at::Tensor& tensor) {
    const c10::TensorImpl& source = *tensor.unsafeGetTensorImpl();
    if (source.dtype() != caffe2::TypeMeta::Make<float>() || source.device_type() != device_) {
      return {};
    }
    const bool trains = tensor.requires_grad();
    if (!trains && !is_held_) {
      return {};  // PyTorch casts it at each use
    }
    if (!source.has_storage() || source.layout() != at::kStrided || source.is_nested() || tensor.is_inference() ||
        !source.version_counter().enabled() || captures_) {
      return ask(tensor);
    }
    if (is_held_) {
      const bool needs_gradient = records_ && trains;
      at::Tensor copy =
          needs_gradient ? here_.copies.find_held_leaf(source, dtype_) : here_.copies.find_held(source, dtype_);
      if (copy.defined()) {
        return copy;
      }
      if (HeldSource* held = here_.held.find(&source)) {
        copy = needs_gradient ? trained(tensor, *held) : at::Tensor();
        return copy.defined() ? copy : ask(tensor);
      }
      if (tensor.is_view() && here_.held.find(tensor._base().unsafeGetTensorImpl()) != nullptr) {
        return ask(tensor);
      }
    }
    if (!trains || is_inference_) {
      return {};
    }
    at::Tensor copy = here_.copies.find(source, dtype_, records_);
    if (copy.defined() || !is_kept_by_pytorch(tensor)) {
      return copy;
    }
    // Where no gradients are recorded, a cast with a graph would take longer.
    const bool is_plain = !records_ && !in_forward_mode();
    return is_plain ? new_plain_copy_of(here_, tensor, dtype_) : new_copy_of(here_, tensor, dtype_);
  }

  // Replaces an argument of any kind by its cast, if it has one.
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
  // The cast of a held weight while gradients are recorded, if these kernels have it or may make it.
  at::Tensor trained(const at::Tensor& tensor, HeldSource& held) {
    at::Tensor copy = here_.copies.find(*tensor.unsafeGetTensorImpl(), dtype_, records_);
    if (copy.defined()) {
      return copy;
    }
    if (held.is_cast_per_region && is_kept_by_pytorch(tensor)) {
      return new_copy_of(here_, tensor, dtype_);
    }
    const auto lent = held.copy_in(dtype_);
    return lent == nullptr ? at::Tensor() : lent->cast_for(here_, tensor);
  }

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

// Adds the result of `make` to the table; the entry keeps `alive` alive.
template <class Make>
at::Tensor put(
    ThreadState& here, const at::Tensor& source, at::ScalarType dtype, const at::Tensor& alive, const Make& make) {
  here.copies.forget(*source.unsafeGetTensorImpl(), dtype);
  SourceSnapshot snapshot(source);  // before the cast: a concurrent write then makes it stale at the next use
  at::Tensor result;
  {
    c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    result = make();
  }
  here.copies.put(source, dtype, Copy{std::move(snapshot), result, nullptr, alive});
  if (Process::records_casts.load(std::memory_order_relaxed)) {
    std::lock_guard<std::mutex> guard(Process::lock);
    Process::casts.emplace_back(result.getIntrusivePtr());
  }
  return result;
}

}  // namespace

at::Tensor copy_of(ThreadState& here, const at::Tensor& source, at::ScalarType dtype) {
  at::Tensor copy = here.copies.find(*source.unsafeGetTensorImpl(), dtype, /*records=*/true);
  return copy.defined() ? copy : new_copy_of(here, source, dtype);
}

at::Tensor new_copy_of(ThreadState& here, const at::Tensor& source, at::ScalarType dtype) {
  if (c10::GradMode::is_enabled()) {
    SpareMemory::all().free();
  }
  return put(here, source, dtype, at::Tensor(), [&] {
    c10::AutoGradMode recorded(true);
    return cast(source, dtype);
  });
}

at::Tensor new_plain_copy_of(ThreadState& here, const at::Tensor& source, at::ScalarType dtype) {
  return put(here, source, dtype, source, [&] {
    const c10::TensorImpl& impl = *source.unsafeGetTensorImpl();
    auto result = SpareMemory::is_for(impl, dtype) ? SpareMemory::all().like(impl, dtype) : std::nullopt;
    if (result.has_value()) {
      write(*result, source);
    } else {
      result = cast(source, dtype);
    }
    return result->set_requires_grad(true);  // as PyTorch's cast, by which products choose their kernels
  });
}

void Kernel::run_torch_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) const {
  if (torch_kernel_.has_value()) {
    torch_kernel_->callBoxed(op, keys, stack);
  } else {
    const auto below = c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, operation_.key);
    op.redispatchBoxed(keys & below, stack);
  }
}

void Kernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  ThreadState& here = ThreadState::here();
  if (C10_UNLIKELY(Process::is_watched.load(std::memory_order_relaxed))) {
    return reference_.callBoxed(op, keys, stack);
  }
  const auto device = static_cast<size_t>(operation_.device);
  const Policy* policy = here.policies[device];
  if (policy == nullptr) {
    policy = Process::installed[device].load(std::memory_order_acquire);
    if (policy == nullptr) {
      return needs_python(here) ? reference_.callBoxed(op, keys, stack) : run_torch_kernel(op, keys, stack);
    }
  }
  const Action action = policy->action(operation_.number);
  if (action == Action::Pass) {
    return run_torch_kernel(op, keys, stack);
  }
  if (C10_UNLIKELY(action == Action::Reference || has_unsupported_keys(keys) || here.kind == ThreadKind::Unknown)) {
    return reference_.callBoxed(op, keys, stack);
  }
  const c10::IValue* arguments = stack->data() + (stack->size() - operation_.are_written.size());
  if (action == Action::Promote || action == Action::Product) {
    const bool is_product = action == Action::Product;
    if (!Dtypes(operation_, arguments).are_of_region() || (is_product && in_forward_mode())) {
      return reference_.callBoxed(op, keys, stack);
    }
    return is_product ? run_product(op, stack, here) : promote(operation_, op, stack);
  }
  // Inside an operation that is being tried PyTorch's error is needed: the outermost one is promoted.
  const bool may_promote = policy->promotes && operation_.takes_several && here.slots->attempts == 0;
  if (may_promote && Dtypes(operation_, arguments).are_mixed()) {
    const bool is_refused = operation_.mixture == Mixture::Refused && have_elements(operation_, arguments);
    return is_refused ? promote(operation_, op, stack) : reference_.callBoxed(op, keys, stack);
  }
  replace_weights(stack, here);
  run_torch_kernel(op, keys, stack);
}

void Kernel::replace_weights(c10::Stack* stack, ThreadState& here) const {
  if (!operation_.takes_weights) {
    return;
  }
  WeightSearch search(here, operation_.device);
  if (!search.is_on()) {
    return;
  }
  c10::IValue* arguments = stack->data() + (stack->size() - operation_.are_written.size());
  for (const size_t slot : operation_.tensors) {
    search.replace(arguments[slot]);
  }
}

// Runs a product in float32 on factors that are rounded, and has its gradient rounded before it reaches them.
void Kernel::run_product(const c10::OperatorHandle& op, c10::Stack* stack, ThreadState& here) const {
  const size_t first = stack->size() - operation_.are_written.size();
  const auto lower = at::autocast::get_autocast_dtype(operation_.device);
  WeightSearch search(here, operation_.device);
  for (const size_t slot : operation_.tensors) {
    c10::IValue& value = (*stack)[first + slot];
    if (!value.isTensor() || !is_eligible(value.toTensor())) {
      continue;
    }
    at::Tensor factor = value.toTensor();
    if (slot != operation_.addend) {
      at::Tensor copy = search.is_on() ? search.copy_for(factor) : at::Tensor();
      factor = copy.defined() ? std::move(copy) : cast(factor, lower);
    }
    value = cast(factor, at::kFloat);
  }
  {
    c10::impl::ExcludeDispatchKeyGuard without_autocast{c10::DispatchKeySet(operation_.key)};
    op.callBoxed(stack);
  }
  const at::Tensor result = stack->back().toTensor();
  if (result.requires_grad()) {
    torch::autograd::edge_list next{torch::autograd::impl::gradient_edge(result)};
    stack->back() = with_node(result, make_node<CastBackward>(std::move(next), lower, at::kFloat));
  }
}

bool Kernel::is_eligible(const at::Tensor& tensor) const {
  return tensor.defined() && c10::isFloatingType(tensor.scalar_type()) && tensor.device().type() == operation_.device;
}

}  // namespace precast
