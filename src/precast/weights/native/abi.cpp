// The library's probe: whether the loaded PyTorch has the layout of the headers.
//
// Invariants:
//   - The probe compares values that inline functions of the headers, compiled into this library, read from real
//     objects with the results of functions of the loaded libraries. It leaves no changes, and gives the same result
//     inside modes, transforms and regions.
//   - Nothing is registered when the library is loaded.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#define PRECAST_EXPORT extern "C" __attribute__((visibility("default"), used))

namespace {

using torch::jit::Stack;

// `what` names the compared property; it is the message of the failure.
void expect(bool holds, const char* what) {
  if (!holds) {
    throw std::string(what);
  }
}

// Calls an operation's CPU kernel directly, with its arguments on a stack.
template <typename... Arguments>
c10::IValue call(const char* name, const char* overload, Arguments&&... arguments) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!found.has_value()) {
    throw std::string("the dispatcher does not know ") + name;
  }
  Stack stack;
  (stack.emplace_back(std::forward<Arguments>(arguments)), ...);
  const auto given = stack.size();
  if (found->schema().arguments().size() != given) {
    throw std::string("the schema has another number of arguments: ") + name;
  }
  found->redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  expect(stack.size() == 1, "an operation leaves its one result on the stack");
  return std::move(stack.front());
}

at::Tensor made(const std::vector<int64_t>& sizes) {
  const auto none = c10::IValue();
  return call("aten::empty", "memory_format", sizes, static_cast<int64_t>(at::kFloat), none,
              c10::IValue(c10::Device(c10::kCPU)), none, none)
      .toTensor();
}

at::Tensor strided(const at::Tensor& base, const std::vector<int64_t>& sizes,
                   const std::vector<int64_t>& strides, int64_t offset) {
  return call("aten::as_strided", "", base, sizes, strides, offset).toTensor();
}

void check_sizes_and_strides(const at::Tensor& view) {
  expect(view.dim() == 2 && view.sizes() == c10::IntArrayRef({2, 3}), "sizes of a tensor");
  expect(view.strides() == c10::IntArrayRef({6, 2}), "strides of a tensor");
  expect(view.storage_offset() == 1 && view.numel() == 6, "the offset and the number of elements");
  expect(!view.is_contiguous(), "whether a tensor is contiguous");
  for (int64_t i = 0; i < 2; ++i) {
    expect(call("aten::size", "int", view, i).toInt() == view.size(i), "the size of a dimension");
    expect(call("aten::stride", "int", view, i).toInt() == view.stride(i), "the stride of a dimension");
  }
}

void check_dtype_and_device(const at::Tensor& tensor) {
  expect(tensor.scalar_type() == at::kFloat && tensor.itemsize() == 4, "the dtype of a tensor");
  expect(tensor.device() == c10::Device(c10::kCPU), "the device of a tensor");
  expect(tensor.defined() && !tensor.requires_grad(), "whether a tensor requires a gradient");
}

void check_storage(const at::Tensor& base, const at::Tensor& view) {
  call("aten::zero_", "", base);
  auto* data = static_cast<float*>(base.unsafeGetTensorImpl()->unsafe_storage().mutable_data());
  expect(data == view.unsafeGetTensorImpl()->unsafe_storage().data(), "the storage of a view");
  expect(base.storage().use_count() == 2, "how many tensors use a storage");
  expect(base.storage().nbytes() == 24 * sizeof(float), "the size of a storage");
  data[1 + 6 + 2 * 2] = 3.5f;
  const auto last = strided(base, {}, {}, 1 + 6 + 2 * 2);
  const auto seen = call("aten::_local_scalar_dense", "", last).toScalar();
  expect(seen.toDouble() == 3.5, "the memory of a tensor");
}

void check_version_counter(const at::Tensor& tensor) {
  auto* implementation = tensor.unsafeGetTensorImpl();
  const auto before = tensor._version();
  expect(implementation->version_counter().current_version() == before, "the version counter of a tensor");
  implementation->bump_version();
  expect(tensor._version() == before + 1, "the version counter of a tensor that was written");
}

void check_keys(const at::Tensor& tensor) {
  using Key = c10::DispatchKey;
  const auto keys = tensor.unsafeGetTensorImpl()->key_set();
  expect(keys == c10::DispatchKeySet({Key::CPU, Key::ADInplaceOrView, Key::AutogradCPU, Key::AutocastCPU}),
         "the dispatch keys of a tensor");
  // The loaded library maps the numbers compiled into this one to names.
  const std::pair<Key, const char*> names[] = {
      {Key::CPU, "CPU"},
      {Key::CUDA, "CUDA"},
      {Key::Python, "Python"},
      {Key::AutogradCPU, "AutogradCPU"},
      {Key::ADInplaceOrView, "ADInplaceOrView"},
      {Key::AutocastCPU, "AutocastCPU"},
      {Key::AutocastCUDA, "AutocastCUDA"},
      {Key::AutocastXPU, "AutocastXPU"},
      {Key::AutocastMPS, "AutocastMPS"},
  };
  for (const auto& [key, name] : names) {
    expect(std::strcmp(c10::toString(key), name) == 0, "the numbers of the dispatch keys");
  }
}

void check_stack(const at::Tensor& tensor) {
  const auto implementation = tensor.unsafeGetTensorImpl();
  const auto uses = tensor.use_count();
  {
    const auto rows = call("aten::unbind", "int", tensor, static_cast<int64_t>(0)).toTensorVector();
    expect(rows.size() == 4 && rows.back().sizes() == c10::IntArrayRef({6}), "a list of tensors on the stack");
    expect(call("aten::equal", "", tensor, tensor).toBool(), "a truth value on the stack");
    c10::IValue kept(tensor);
    expect(kept.isTensor() && kept.toTensor().unsafeGetTensorImpl() == implementation, "a tensor on the stack");
    expect(tensor.use_count() == uses + 1, "the number of references to a tensor");
  }
  expect(tensor.use_count() == uses, "the number of references to a tensor that was on the stack");
}

void check_errors(const at::Tensor& tensor) {
  bool caught = false;
  try {
    call("aten::size", "int", tensor, static_cast<int64_t>(7));
  } catch (const c10::Error&) {
    caught = true;
  }
  expect(caught, "an error that PyTorch raises");
}

void check_all() {
  // Inference mode, dispatch modes, transforms and regions would change the results.
  const c10::InferenceMode no_inference(false);
  const auto above = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  const c10::impl::ForceDispatchKeyGuard plain(c10::DispatchKeySet{}, above);
  const auto base = made({4, 6});
  const auto view = strided(base, {2, 3}, {6, 2}, 1);
  check_dtype_and_device(base);
  check_sizes_and_strides(view);
  check_storage(base, view);
  check_version_counter(base);
  check_keys(base);
  check_stack(base);
  check_errors(base);
}

std::string refusal;

}  // namespace

PRECAST_EXPORT const char* precast_native_probe();

// Returns null if this library may be used, otherwise a message about the difference. Call it from one thread only.
const char* precast_native_probe() {
  try {
    check_all();
    return nullptr;
  } catch (const std::string& what) {
    refusal = "the loaded PyTorch differs from its headers in " + what;
  } catch (const std::exception& error) {
    refusal = std::string("a check of the loaded PyTorch failed: ") + error.what();
    refusal.resize(std::min(refusal.find('\n'), refusal.size()));
  } catch (...) {
    refusal = "a check of the loaded PyTorch failed with an unknown error";
  }
  return refusal.c_str();
}
