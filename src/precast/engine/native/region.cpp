// Entering and leaving a region in one call: what a region of Python's changed once is changed again as a whole.
//
// Invariants:
// - a snapshot is all that a region changes in its thread. A region that was entered has two, of before and after;
// - it is entered by them only from what was before, so that leaving it restores what was there;
// - each function here changes all or nothing, and Python's signals cannot come between.
#include "kernel.h"
#include "torch_api.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalPythonObjects.h>

#define PRECAST_API extern "C" __attribute__((visibility("default")))

namespace precast {
namespace {

const std::string kInherited = "precast bound policies";

struct Flags {
  bool enabled;
  at::ScalarType dtype;

  static Flags of(c10::DeviceType device) {
    return {at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)};
  }

  void set(c10::DeviceType device) const {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
  }

  bool operator==(const Flags& other) const {
    return enabled == other.enabled && dtype == other.dtype;
  }
};

// The flags of the two device types that say the guard id, see `compile_guards.py`.
struct GuardTypes {
  static inline c10::DeviceType low{}, high{};
};

struct Snapshot {
  c10::DeviceType device;
  Flags flags, low, high;
  bool cache_enabled, optimizes_torchscript;
  const Policy* policy;
  std::shared_ptr<c10::SafePyObject> inherited;  // what PyTorch's own threads get that work for this one

  explicit Snapshot(c10::DeviceType of)
      : device(of),
        flags(Flags::of(of)),
        low(Flags::of(GuardTypes::low)),
        high(Flags::of(GuardTypes::high)),
        cache_enabled(at::autocast::is_autocast_cache_enabled()),
        optimizes_torchscript(torch::jit::getGraphExecutorOptimize()),
        policy(ThreadState::here().policies[static_cast<size_t>(of)]) {
    using Objects = at::impl::ThreadLocalPythonObjects;
    if (Objects::contains(kInherited)) {
      inherited = Objects::get(kInherited);
    }
  }

  bool is_now() const {
    return flags == Flags::of(device) && low == Flags::of(GuardTypes::low) && high == Flags::of(GuardTypes::high) &&
        cache_enabled == at::autocast::is_autocast_cache_enabled() &&
        optimizes_torchscript == torch::jit::getGraphExecutorOptimize() &&
        policy == ThreadState::here().policies[static_cast<size_t>(device)];
  }

  // Has this in force, where `now` is.
  void replace(const Snapshot& now) const {
    flags.set(device);
    if (!(low == now.low)) {
      low.set(GuardTypes::low);
    }
    if (!(high == now.high)) {
      high.set(GuardTypes::high);
    }
    at::autocast::set_autocast_cache_enabled(cache_enabled);
    if (optimizes_torchscript != now.optimizes_torchscript) {
      torch::jit::setGraphExecutorOptimize(optimizes_torchscript);
    }
    ThreadState::here().policies[static_cast<size_t>(device)] = policy;
    if (inherited != nullptr && inherited != now.inherited) {
      at::impl::ThreadLocalPythonObjects::set(kInherited, inherited);
    }
  }
};

}  // namespace
}  // namespace precast

using namespace precast;

PRECAST_API void precast_guard_types(int low, int high) {
  GuardTypes::low = static_cast<c10::DeviceType>(low);
  GuardTypes::high = static_cast<c10::DeviceType>(high);
}

PRECAST_API void* precast_snapshot(int device) {
  return new Snapshot(static_cast<c10::DeviceType>(device));
}

PRECAST_API void precast_free_snapshot(void* snapshot) {
  if (!Process::ends) {
    delete static_cast<Snapshot*>(snapshot);
  }
}

// Enters a region by its snapshots: how many are open then, or -1, and nothing is changed, where another state is now
// than when it was entered first, or a function mode is to hear of it.
PRECAST_API int precast_enter(const void* before, const void* after) {
  const auto& old = *static_cast<const Snapshot*>(before);
  if (at::impl::torch_function_mode_enabled() || !old.is_now()) {
    return -1;
  }
  static_cast<const Snapshot*>(after)->replace(old);
  return at::autocast::increment_nesting();
}

// Leaves it: how many are still open, or -1, and nothing is changed, where a function mode is to hear of it. Behind the
// outermost, all copies of this thread end.
PRECAST_API int precast_leave(const void* before, const void* after) {
  if (at::impl::torch_function_mode_enabled()) {
    return -1;
  }
  static_cast<const Snapshot*>(before)->replace(*static_cast<const Snapshot*>(after));
  const int open = at::autocast::decrement_nesting();
  if (open == 0) {
    at::autocast::clear_cache();
    ThreadState::here().copies.clear();
  }
  return open;
}
