// The library's C functions, called through ctypes, and its operations. `native/api.py` is the Python side.
//
// Invariants:
// - no function here runs Python code, and no exception leaves one (`exported.h`);
// - a tensor is passed as the address of its TensorImpl (`tensor._cdata`); Python keeps it alive during the call.
#include "exported.h"
#include "kernel.h"
#include "torch_api.h"

#include <torch/library.h>

#include <pthread.h>

#include <map>
#include <memory>

namespace precast {

namespace {
ThreadSlots* new_slots() {
  std::lock_guard<std::mutex> guard(Process::lock);
  auto& free = Process::free_slots;
  if (free.empty()) {
    return new ThreadSlots{};
  }
  ThreadSlots* slots = free.back();
  free.pop_back();
  *slots = ThreadSlots{};
  return slots;
}
}  // namespace

ThreadState::ThreadState() : slots(new_slots()) {
  std::lock_guard<std::mutex> guard(Process::lock);
  Process::threads.push_back(this);
}

ThreadState::~ThreadState() {
  std::lock_guard<std::mutex> guard(Process::lock);
  auto& threads = Process::threads;
  threads.erase(std::remove(threads.begin(), threads.end(), this), threads.end());
  Process::free_slots.push_back(slots);
}

ThreadState& ThreadState::here() {
  struct Owner {
    ThreadState* state = new ThreadState;
    ~Owner() {
      if (!Process::finalizing) {  // otherwise Python has ended, and freeing tensors may need it
        delete state;
      }
    }
  };
  static thread_local Owner owner;
  return *owner.state;
}

namespace {

std::vector<std::unique_ptr<Policy>> policies;
std::map<size_t, c10::RegistrationHandleRAII> registrations;

const c10::TensorImpl* source_of(void* tensor) {
  return static_cast<const c10::TensorImpl*>(tensor);
}

Operation operation_of(const c10::OperatorHandle& op, size_t number, c10::DeviceType device, c10::DispatchKey key) {
  const auto& arguments = op.schema().arguments();
  Operation operation{number, device, key};
  for (size_t i = arguments.size(); i-- > 0;) {
    const std::string kind = arguments[i].type()->str();
    if (kind.find("Tensor") != std::string::npos) {
      operation.takes_several |= !operation.tensors.empty() || kind.find("[]") != std::string::npos;
      operation.tensors.push_back(i);
    }
    if (arguments[i].name() == "bias") {
      operation.addend = i;
    }
  }
  for (const auto& argument : arguments) {
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    operation.are_written.push_back(is_written);
    operation.writes |= is_written;
  }
  const std::string& name = op.operator_name().name;
  if (name == "aten::addmm" || name == "aten::baddbmm") {
    operation.addend = 0;
  }
  return operation;
}

// A child process has one thread and keeps its state; other threads may have held the locks during the fork.
void hold_for_fork() {
  Process::lock.lock();
  HeldSources::lock().lock();
  HeldSource::lock().lock();
  gradient_memory_lock().lock();
  SpareMemory::all().lock().lock();
}

void release_in_parent() {
  SpareMemory::all().lock().unlock();
  gradient_memory_lock().unlock();
  HeldSource::lock().unlock();
  HeldSources::lock().unlock();
  Process::lock.unlock();
}

void release_in_child() {
  release_in_parent();
  Process::threads.assign(1, &ThreadState::here());
}

at::Tensor region_copy(const at::Tensor& source, at::ScalarType dtype) {
  return copy_of(ThreadState::here(), source, dtype);
}

int64_t number_of(at::ScalarType dtype) {
  return static_cast<int64_t>(dtype);
}

std::optional<at::Tensor> find(const at::Tensor& source, at::ScalarType dtype) {
  ThreadState& here = ThreadState::here();
  const c10::TensorImpl& impl = *source.unsafeGetTensorImpl();
  at::Tensor copy = here.copies.find_held_leaf(impl, dtype);
  if (!copy.defined()) {
    copy = here.copies.find(impl, dtype, c10::GradMode::is_enabled());
  }
  return copy.defined() ? std::optional<at::Tensor>(std::move(copy)) : std::nullopt;
}

struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::map<std::string, c10::SafeKernelFunction> torch_kernels;

std::string key_of(const char* name, const char* overload, const char* key) {
  return std::string(name) + "." + overload + " " + key;
}

// Defines the operations until the process ends. A library that its probe refuses has defined none.
void define_operations() {
  static auto* library =
      new torch::Library(torch::Library::DEF, "precast_native", std::nullopt, "precast", /*line=*/0);
  library->def("copy_of(Tensor source, ScalarType dtype) -> Tensor", region_copy);
  library->def("number_of(ScalarType dtype) -> int", number_of);
  library->def("cast_in_python(Tensor source, ScalarType dtype, str device_type) -> Tensor?");  // Python implements it
  library->def("find(Tensor source, ScalarType dtype) -> Tensor?", find);
  define_held_operations(*library);
}

}  // namespace
}  // namespace precast

using namespace precast;

// Called after the probe and `precast_set_python_functions`; again if Ctrl-C interrupted Python before it was done.
void precast_begin(Callback compare, int uses_between_checks) {
  static bool is_registered = false;
  guarded([&] {
    Process::compare = compare;
    Process::uses_between_checks = uses_between_checks;
    if (!is_registered) {
      define_operations();
      pthread_atfork(hold_for_fork, release_in_parent, release_in_child);
      is_registered = true;
    }
  });
}

// Called before Python ends.
void precast_end() {
  guarded([] {
    Process::finalizing = true;
    Process::compare = nullptr;
    ThreadState::here().copies.clear();
  });
}

int precast_device(const char* type) {
  return guarded([&] { return static_cast<int>(c10::Device(type).type()); });
}

// Records PyTorch's kernel, before one of precast's is registered above it.
void precast_record_torch_kernel(const char* name, const char* overload, const char* key) {
  guarded([&] {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    torch_kernels.insert_or_assign(
        key_of(name, overload, key), op.getComputedKernelForDispatchKey(c10::parseDispatchKey(key)));
  });
}

// Registers a kernel above the present one at an operation's autocast key, the reference.
void precast_register(
    const char* name,
    const char* overload,
    const char* key,
    int device,
    int64_t number,
    int takes_weights,
    int mixture) {
  guarded([&] {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    const auto dispatch_key = c10::parseDispatchKey(key);
    const auto torch_kernel = torch_kernels.find(key_of(name, overload, key));
    Operation operation =
        operation_of(op, static_cast<size_t>(number), static_cast<c10::DeviceType>(device), dispatch_key);
    operation.takes_weights = takes_weights != 0;
    operation.mixture = static_cast<Mixture>(mixture);
    auto kernel = std::make_unique<Kernel>(
        operation,
        op.getComputedKernelForDispatchKey(dispatch_key),
        torch_kernel == torch_kernels.end() ? std::nullopt
                                            : std::optional<c10::SafeKernelFunction>(torch_kernel->second));
    Silence silence;  // suppresses PyTorch's warning about overridden kernels
    c10::WarningUtils::WarningHandlerGuard guard(&silence);
    registrations.insert_or_assign(
        static_cast<size_t>(number),
        c10::Dispatcher::singleton().registerImpl(
            op.operator_name(),
            dispatch_key,
            c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)),
            std::nullopt,
            nullptr,
            "precast"));
  });
}

void precast_deregister(int64_t number) {
  guarded([&] { registrations.erase(static_cast<size_t>(number)); });
}

// Returns the policy with these actions, by operation number; one object for equal policies.
void* precast_policy(int promotes, const char* actions, int64_t count) {
  return guarded([&]() -> void* {
    Policy policy{promotes != 0, {}};
    for (int64_t i = 0; i < count; ++i) {
      policy.actions.push_back(static_cast<Action>(actions[i]));
    }
    while (!policy.actions.empty() && policy.actions.back() == Action::Pass) {
      policy.actions.pop_back();
    }
    for (const auto& entry : policies) {
      if (entry->promotes == policy.promotes && entry->actions == policy.actions) {
        return entry.get();
      }
    }
    policies.push_back(std::make_unique<Policy>(std::move(policy)));
    return policies.back().get();
  });
}

// Puts a policy in force in this thread; `number` is the bound policy's.
void precast_put_in_force(int device, void* policy, int64_t number) {
  guarded([&] {
    ThreadState& here = ThreadState::here();
    const auto place = static_cast<size_t>(device);
    here.policies.at(place) = static_cast<const Policy*>(policy);
    here.slots->bound.at(place) = number;
  });
}

void precast_install(int device, void* policy, int64_t number) {
  guarded([&] {
    const auto place = static_cast<size_t>(device);
    Process::installed.at(place).store(static_cast<const Policy*>(policy));
    Process::installed_numbers.at(place) = number;
  });
}

void precast_watch(int is_watched) {
  Process::is_watched = is_watched != 0;
}

void precast_register_thread(int kind) {
  guarded([&] { ThreadState::here().kind = static_cast<ThreadKind>(kind); });
}

void precast_clear() {
  guarded([] { ThreadState::here().copies.clear(); });
}

void precast_free_spare_memory() {
  guarded([] { SpareMemory::all().free(); });
}

// Bytes of spare memory; for tests.
int64_t precast_spare_bytes() {
  return guarded([] { return static_cast<int64_t>(SpareMemory::all().bytes()); });
}

int64_t precast_count() {
  return guarded([] { return static_cast<int64_t>(ThreadState::here().copies.size()); });
}

// Records the casts of weights from now on, in all threads; for tests.
void precast_record_casts() {
  guarded([] {
    std::lock_guard<std::mutex> guard(Process::lock);
    Process::casts.clear();
    Process::records_casts = true;
  });
}

// The number of recorded casts, or of those that are alive.
int64_t precast_recorded_casts(int are_alive) {
  return guarded([&]() -> int64_t {
    std::lock_guard<std::mutex> guard(Process::lock);
    const auto& casts = Process::casts;
    return are_alive == 0 ? static_cast<int64_t>(casts.size())
                          : std::count_if(casts.begin(), casts.end(), [](const auto& cast) { return !cast.expired(); });
  });
}

int precast_has(void* source, int dtype) {
  return guarded([&]() -> int {
    ThreadState& here = ThreadState::here();
    const auto scalar = static_cast<at::ScalarType>(dtype);
    const c10::TensorImpl& impl = *source_of(source);
    return here.copies.find_held_leaf(impl, scalar).defined() ||
        here.copies.find(impl, scalar, /*records=*/false).defined();
  });
}

// `dtype` is -1 for all dtypes.
void precast_invalidate(void* source, int dtype) {
  guarded([&] { ThreadState::here().copies.invalidate(*source_of(source), dtype); });
}

void precast_hold(void* source, int is_held) {
  guarded([&] { HeldSources::change(source_of(source), is_held != 0); });
}
