// A CUDA device whose memory and kernels are the CPU's, for a CPU build of PyTorch.
//
// Invariants:
// - an operation on the device runs the CPU's kernel on CPU tensors that share the memory;
// - an operation that makes the host wait for a real device is counted. It is refused while a graph is captured, in all
//   threads, and where the sync debug mode is "error";
// - a captured graph is the list of its operations, which a replay runs again, in the same memory;
// - there is one device; streams and events have an identity, and no time passes on them.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

extern "C" {
// Python reads and writes these. The last is the stream whose work is captured; -1 if there is none.
std::atomic<int64_t> pretended_waits{0}, pretended_bytes{0}, pretended_peak{0}, pretended_sync_debug_mode{0},
    pretended_capturing{-1};
}

namespace {

using c10::DeviceType, c10::DispatchKey, c10::OperatorHandle, c10::Storage, c10::Stream, torch::jit::Stack;

const c10::Device kDevice{DeviceType::CUDA, 0}, kHost{DeviceType::CPU};
thread_local int64_t current_stream = 0;

void check_capture(const std::string& cause) {
  TORCH_CHECK(pretended_capturing < 0, "CUDA error: operation not permitted when stream is capturing (", cause, ")");
}

void wait(const std::string& cause) {
  ++pretended_waits;
  check_capture(cause);
  TORCH_CHECK(pretended_sync_debug_mode != 2, "called a synchronizing CUDA operation (", cause, ")");
  if (pretended_sync_debug_mode == 1) {
    TORCH_WARN("called a synchronizing CUDA operation (", cause, ")");
  }
}

// --- memory ---

// Memory that a storage on the other side owns.
struct Loan {
  Storage owner;
  int64_t size;  // counted as memory of the device

  Loan(const Storage& owner, bool counts) : owner(owner), size(counts ? (owner.nbytes() + 511) / 512 * 512 : 0) {
    const int64_t now = pretended_bytes += size;
    pretended_peak = std::max<int64_t>(pretended_peak, now);
  }
  ~Loan() { pretended_bytes -= size; }
};

c10::DataPtr lend(const Storage& owner, c10::Device device) {
  auto* loan = new Loan(owner, device == kDevice);
  return {const_cast<void*>(owner.data()), loan, [](void* loan) { delete static_cast<Loan*>(loan); }, device};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    return lend(Storage(Storage::use_byte_size_t(), size, c10::GetCPUAllocator(), true), kDevice);
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }
} allocator;

Storage share(const Storage& owner, c10::Device device) {
  auto* const of_device = device == kDevice ? static_cast<c10::Allocator*>(&allocator) : c10::GetCPUAllocator();
  return Storage(Storage::use_byte_size_t(), owner.nbytes(), lend(owner, device), of_device, true);
}

at::Tensor tensor_like(const at::Tensor& other, Storage storage, DispatchKey key) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), other.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  result._set_conj(other.is_conj());
  result._set_neg(other.is_neg());
  return result;
}

// The tensors of one call on both sides.
class Aliases {
 public:
  at::Tensor on_host(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device() != kDevice || !tensor.has_storage()) {
      return tensor;
    }
    at::Tensor& alias = aliases_[tensor.unsafeGetTensorImpl()];
    if (!alias.defined()) {
      alias = tensor_like(tensor, on_host(tensor.storage()), DispatchKey::CPU);
      originals_.emplace(alias.unsafeGetTensorImpl(), tensor);
    }
    return alias;
  }

  Storage on_host(const Storage& storage) {
    Storage& alias = host_storages_[storage.unsafeGetStorageImpl()];
    if (!alias) {
      alias = share(storage, kHost);
      device_storages_.emplace(alias.unsafeGetStorageImpl(), storage);
    }
    return alias;
  }

  at::Tensor on_device(const at::Tensor& result) {
    if (!result.defined() || result.device() != kHost || !result.has_storage()) {
      return result;
    }
    const auto original = originals_.find(result.unsafeGetTensorImpl());
    return original != originals_.end() ? original->second
                                        : tensor_like(result, on_device(result.storage()), DispatchKey::CUDA);
  }

  // Updates the tensors of the device after a kernel has resized aliases or set them to another storage.
  void update_originals() {
    for (auto& [original, alias] : aliases_) {
      const auto storage = on_device(alias.storage());
      if (storage.unsafeGetStorageImpl() != original->storage().unsafeGetStorageImpl()) {
        original->set_storage_keep_dtype(storage);
      } else if (alias.storage().data() != storage.data()) {
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(lend(alias.storage(), kDevice));
        storage.unsafeGetStorageImpl()->set_nbytes(alias.storage().nbytes());
      }
      if (alias.sizes() != original->sizes() || alias.strides() != original->strides()) {
        original->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
      }
    }
  }

 private:
  Storage on_device(const Storage& storage) {
    const auto entry = device_storages_.find(storage.unsafeGetStorageImpl());
    return entry != device_storages_.end() ? entry->second : share(storage, kDevice);
  }

  std::unordered_map<c10::TensorImpl*, at::Tensor> aliases_, originals_;
  std::unordered_map<c10::StorageImpl*, Storage> host_storages_, device_storages_;
};

// --- operations ---

// Calls `change` with each tensor in the last `count` values of a stack, and replaces it by the result.
template <typename Change>
void for_each_tensor(Stack& stack, size_t count, Change change) {
  for (auto value = stack.end() - count; value != stack.end(); ++value) {
    if (value->isTensor()) {
      *value = change(value->toTensor());
    } else if (value->isTensorList()) {
      auto list = value->toTensorList().copy();
      for (size_t i = 0; i < list.size(); ++i) {
        list.set(i, change(list.get(i)));
      }
      *value = list;
    } else if (value->isOptionalTensorList()) {
      auto list = value->toOptionalTensorList().copy();
      for (size_t i = 0; i < list.size(); ++i) {
        const std::optional<at::Tensor> element = list.get(i);
        list.set(i, element ? std::optional<at::Tensor>(change(*element)) : element);
      }
      *value = list;
    }
  }
}

std::vector<at::Tensor> tensors_of(Stack& stack, size_t count) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(stack, count, [&](const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
}

void check_waits(const std::string& name, Stack& stack, size_t count) {
  static const std::unordered_set<std::string> always{
      "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2",
      "aten::unique_dim", "aten::bincount", "aten::repeat_interleave", "aten::linalg_eig"};
  const auto first = stack.end() - count;
  bool is_wait = always.count(name) > 0;
  if (name == "aten::copy_") {
    is_wait = first[0].toTensor().device() != first[1].toTensor().device() && !first[2].toBool();
  } else if (name.find("aten::index") == 0 || name == "aten::_index_put_impl_") {
    for (const auto& tensor : tensors_of(stack, count)) {
      is_wait |= tensor.defined() && tensor.scalar_type() == at::kBool;  // the size of the result depends on a mask
    }
  }
  if (is_wait) {
    wait(name);
  }
}

// Runs the CPU's kernel. It computes in float32 where CUDA's takes or returns another dtype.
void run_on_host(const OperatorHandle& op, Stack* stack) {
  const std::string& name = op.schema().name();
  const auto first = stack->end() - op.schema().arguments().size();
  at::Tensor result;
  if (name == "aten::_amp_foreach_non_finite_check_and_unscale_") {
    for (const at::Tensor& tensor : first[0].toTensorVector()) {
      TORCH_CHECK(tensor.scalar_type() != at::kBFloat16, "CUDA's ", name, " is not implemented for 'BFloat16'");
    }
  } else if ((name == "aten::_softmax" || name == "aten::_log_softmax") && first[2].toBool()) {
    first[0] = first[0].toTensor().to(at::kFloat);  // `half_to_float`
    first[2] = false;
  } else if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
    result = first[4].toTensor();
    first[3] = static_cast<int64_t>(first[0].toTensor().scalar_type());  // `input_dtype`
    first[4] = result.to(first[0].toTensor().scalar_type());
  }
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  if (result.defined()) {
    stack->back() = result.copy_(stack->back().toTensor());
  }
}

struct GraphNode {
  OperatorHandle op;
  Stack arguments;                  // on the host
  std::vector<at::Tensor> results;  // of the capture, on the host
};

std::vector<std::vector<GraphNode>> graphs;
std::mutex lock;  // of the two below
bool records = false;
std::string record;

std::string dtypes_of(Stack& stack, size_t count) {
  std::string text;
  for (const auto& tensor : tensors_of(stack, count)) {
    text += std::string(" ") + (tensor.defined() ? c10::toString(tensor.scalar_type()) : "none");
  }
  return text;
}

void run(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const size_t arguments = schema.arguments().size(), results = schema.returns().size();
  check_waits(schema.name(), *stack, arguments);
  std::string line = schema.name() + "." + schema.overload_name() + dtypes_of(*stack, arguments);
  Aliases aliases;
  for_each_tensor(*stack, arguments, [&](const at::Tensor& tensor) { return aliases.on_host(tensor); });
  for (auto value = stack->end() - arguments; value != stack->end(); ++value) {
    if (value->isDevice() && value->toDevice().type() == DeviceType::CUDA) {
      *value = kHost;
    } else if (value->isStorage() && value->toStorage().device_type() == DeviceType::CUDA) {
      *value = aliases.on_host(value->toStorage());
    }
  }
  const bool is_captured = pretended_capturing == current_stream;
  Stack copy = is_captured ? Stack(stack->end() - arguments, stack->end()) : Stack();
  {
    const at::AutoDispatchBelowADInplaceOrView without_autograd;
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    run_on_host(op, stack);
  }
  if (is_captured) {
    graphs.back().push_back({op, std::move(copy), tensors_of(*stack, results)});
  }
  line += " ->" + dtypes_of(*stack, results) + "\n";
  aliases.update_originals();
  for_each_tensor(*stack, results, [&](const at::Tensor& tensor) { return aliases.on_device(tensor); });
  const std::lock_guard<std::mutex> guard(lock);
  record += records ? line : "";
}

void choose_math(const OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  torch::jit::drop(*stack, 8);
  stack->emplace_back(int64_t{0});
}

void ignore(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

// --- the device ---

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(c10::Device) const override { return stream(current_stream); }
  Stream getDefaultStream(c10::Device) const override { return stream(0); }
  Stream getNewStream(c10::Device, int) const override {
    static std::atomic<int64_t> last{0};
    return stream(++last);
  }
  Stream exchangeStream(Stream next) const override { return stream(std::exchange(current_stream, next.id())); }
  bool isStreamCapturing(const Stream& stream) const { return pretended_capturing == stream.id(); }  // 2.13 and newer
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void record(void** event, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = &current_stream;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return check_capture("query of an event"), true; }
  bool queryStream(const Stream&) const override { return check_capture("query of a stream"), true; }
  void synchronizeStream(const Stream&) const override { wait("stream"); }
  void synchronizeEvent(void*) const override { wait("event"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait("device"); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }

  static Stream stream(int64_t id) { return Stream(Stream::UNSAFE, kDevice, id); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

extern "C" {

// Puts the device into place; called once.
void pretended_begin() {
  static std::vector<c10::RegistrationHandleRAII> kept;
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto fallback = c10::KernelFunction::makeFromBoxedFunction<&run>();
  kept.push_back(dispatcher.registerFallback(DispatchKey::CUDA, fallback, "pretended"));
  const auto add = [&](const c10::OperatorName& name, const c10::KernelFunction& kernel) {
    kept.push_back(dispatcher.registerImpl(name, DispatchKey::CUDA, kernel, std::nullopt, nullptr, "pretended"));
  };
  // Kernels for all devices hide the fallback; on CUDA, these operations have kernels of their own.
  const std::unordered_set<std::string> own{"aten::copy_", "aten::fill_", "aten::masked_fill_"};
  for (const auto& name : dispatcher.getAllOpNames()) {
    const bool is_own = own.count(name.name) > 0 || name.name.find("aten::_foreach_") == 0;
    if (is_own && !dispatcher.findOp(name)->hasKernelForDispatchKey(DispatchKey::CUDA)) {
      add(name, fallback);
    }
  }
  add({"aten::_fused_sdp_choice", ""}, c10::KernelFunction::makeFromBoxedFunction<&choose_math>());
  add({"aten::record_stream", ""}, c10::KernelFunction::makeFromBoxedFunction<&ignore>());
  c10::SetAllocator(DeviceType::CUDA, &allocator);
}

// A function of the CUDA runtime. precast calls it where PyTorch's device guard has no `isStreamCapturing`.
int cudaStreamIsCapturing(void* stream, int* status) {
  *status = pretended_capturing == reinterpret_cast<int64_t>(stream);
  return 0;
}

// Starts or ends the record of kernels.
void pretended_record(bool on) {
  const std::lock_guard<std::mutex> guard(lock);
  records = on;
  record = on ? "" : record;
}

// The kernels of the last record with their dtypes, a line for each.
const char* pretended_recorded() { return record.c_str(); }

// Starts a graph; returns its number.
int64_t pretended_begin_capture() {
  graphs.emplace_back();
  pretended_capturing = current_stream;
  return static_cast<int64_t>(graphs.size()) - 1;
}

void pretended_replay(int64_t graph) {
  const at::AutoDispatchBelowADInplaceOrView without_autograd;
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  for (const auto& node : graphs.at(graph)) {
    Stack stack = node.arguments;
    run_on_host(node.op, &stack);
    const auto results = tensors_of(stack, node.op.schema().returns().size());
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].defined() && results[i].data_ptr() != node.results[i].data_ptr()) {
        node.results[i].copy_(results[i]);
      }
    }
  }
}

}  // extern "C"
