// Entry and exit of a region in one call: the changes that Python made once are repeated as a whole.
//
// Invariants:
// - a snapshot contains everything that a region changes in its thread. A fast entry has one from before and one from
//   after;
// - a fast entry is used only in the state from before, so the exit can restore that state;
// - the regions entered here are on a stack above Python's records. Python moves them to its records, outermost first,
//   when it needs these;
// - each function changes everything or nothing, and signals of Python cannot interrupt it. The caller holds the GIL.
#include "kernel.h"
#include "torch_api.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalPythonObjects.h>

#define PRECAST_API extern "C" __attribute__((visibility("default")))

namespace precast {
namespace {

// Functions of Python's C API: reference counts, and conversion of integers.
struct PythonFunctions {
  static inline void (*keep)(void*) = nullptr;
  static inline void (*drop)(void*) = nullptr;
  static inline void* (*integer)(long) = nullptr;
  static inline void* (*address)(void*) = nullptr;
  static inline void* none = nullptr;

  static void* new_reference(void* object) {
    keep(object);
    return object;
  }
};

// The policies that PyTorch's own threads inherit. Python keeps the object alive as long as a snapshot that names it.
// An owning reference here would form a cycle, through the policy's own fast entry, that the garbage collector cannot
// see.
struct InheritedPolicies {
  PyObject* object = nullptr;
  c10::impl::PyInterpreter* interpreter = nullptr;

  static InheritedPolicies now() {
    using Objects = at::impl::ThreadLocalPythonObjects;
    if (!Objects::contains(kInherited)) {
      return {};
    }
    const auto& entry = Objects::get(kInherited);
    c10::impl::PyInterpreter* interpreter = &entry->pyinterpreter();
    return {entry->ptr(interpreter), interpreter};
  }

  void pass_on() const {
    PythonFunctions::keep(object);  // the next line takes this reference
    at::impl::ThreadLocalPythonObjects::set(kInherited, std::make_shared<c10::SafePyObject>(object, interpreter));
  }
};

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

// The two device types whose flags encode the guard id, see `compile_guards.py`.
struct GuardDevices {
  static inline c10::DeviceType low{}, high{};
};

struct Snapshot {
  c10::DeviceType device;
  Flags flags, low, high;
  bool cache_enabled, optimizes_torchscript;
  const Policy* policy;
  int64_t bound, guard_id;
  InheritedPolicies inherited;

  explicit Snapshot(c10::DeviceType of)
      : device(of),
        flags(Flags::of(of)),
        low(Flags::of(GuardDevices::low)),
        high(Flags::of(GuardDevices::high)),
        cache_enabled(at::autocast::is_autocast_cache_enabled()),
        optimizes_torchscript(torch::jit::getGraphExecutorOptimize()),
        policy(ThreadState::here().policies[static_cast<size_t>(of)]),
        bound(ThreadState::here().slots->bound[static_cast<size_t>(of)]),
        guard_id(ThreadState::here().slots->guard_id),
        inherited(InheritedPolicies::now()) {}

  bool is_current(const ThreadState& here) const {
    const ThreadSlots& slots = *here.slots;
    return bound == slots.bound[static_cast<size_t>(device)] && guard_id == slots.guard_id &&
        guard_id == slots.written_guard_id && flags == Flags::of(device) && low == Flags::of(GuardDevices::low) &&
        high == Flags::of(GuardDevices::high) && cache_enabled == at::autocast::is_autocast_cache_enabled() &&
        optimizes_torchscript == torch::jit::getGraphExecutorOptimize();
  }

  // Changes the thread's state from `now` to this one.
  void replace(const Snapshot& now, ThreadState& here) const {
    flags.set(device);
    if (!(low == now.low)) {
      low.set(GuardDevices::low);
    }
    if (!(high == now.high)) {
      high.set(GuardDevices::high);
    }
    at::autocast::set_autocast_cache_enabled(cache_enabled);
    if (optimizes_torchscript != now.optimizes_torchscript) {
      torch::jit::setGraphExecutorOptimize(optimizes_torchscript);
    }
    here.policies[static_cast<size_t>(device)] = policy;
    here.slots->bound[static_cast<size_t>(device)] = bound;
    here.slots->guard_id = here.slots->written_guard_id = guard_id;
    if (inherited.object != nullptr && inherited.object != now.inherited.object) {
      inherited.pass_on();
    }
  }
};

}  // namespace

struct FastEntry {
  Snapshot before, after;
  int64_t registration, installed;

  bool is_usable(const ThreadState& here) const {
    return registration == Process::registration && here.kind == ThreadKind::Python && !Process::is_watched &&
        installed == Process::installed_numbers[static_cast<size_t>(before.device)] &&
        (here.slots->lends != 0 || after.inherited.object == nullptr) && !at::impl::torch_function_mode_enabled() &&
        before.is_current(here);
  }
};

}  // namespace precast

using namespace precast;

PRECAST_API void precast_set_guard_devices(int low, int high) {
  GuardDevices::low = static_cast<c10::DeviceType>(low);
  GuardDevices::high = static_cast<c10::DeviceType>(high);
}

PRECAST_API void precast_set_python_functions(
    void (*keep)(void*), void (*drop)(void*), void* (*integer)(long), void* (*address)(void*), void* none) {
  PythonFunctions::keep = keep;
  PythonFunctions::drop = drop;
  PythonFunctions::integer = integer;
  PythonFunctions::address = address;
  PythonFunctions::none = none;
}

// Allows the fast entries made since the kernels with this registration number were registered; 0 allows none.
PRECAST_API void precast_allow_fast_entries(int64_t registration) {
  Process::registration = registration;
}

// The address of a number of this thread: of the bound policy on a device type, or another field of `ThreadSlots`.
PRECAST_API void* precast_slot(int device, int which) {
  ThreadSlots& slots = *ThreadState::here().slots;
  int64_t* const others[] = {&slots.guard_id, &slots.written_guard_id, &slots.lends, &slots.open};
  return device < 0 ? others[which] : &slots.bound[device];
}

PRECAST_API void* precast_snapshot(int device) {
  return new Snapshot(static_cast<c10::DeviceType>(device));
}

PRECAST_API void precast_free_snapshot(void* snapshot) {
  if (!Process::finalizing) {
    delete static_cast<Snapshot*>(snapshot);
  }
}

// Makes the fast entry from the snapshot and the present state.
PRECAST_API void* precast_fast_entry(const void* before) {
  const auto& found = *static_cast<const Snapshot*>(before);
  return new FastEntry{
      found,
      Snapshot(found.device),
      Process::registration,
      Process::installed_numbers[static_cast<size_t>(found.device)]};
}

PRECAST_API void precast_free_fast_entry(void* fast_entry) {
  if (!Process::finalizing) {
    delete static_cast<FastEntry*>(fast_entry);
  }
}

// Enters a region and returns 1; returns 0 without changes if the state differs from that of the fast entry, or if
// there is an observer. Called as a built-in function (`built_in.py`), with the address of the fast entry, the region,
// the fast entry's object and an empty record.
PRECAST_API void* precast_enter(void* /*module*/, void* const* arguments, std::ptrdiff_t /*count*/) {
  ThreadState& here = ThreadState::here();
  const auto& entry = *static_cast<const FastEntry*>(PythonFunctions::address(arguments[0]));
  if (!entry.is_usable(here)) {
    return PythonFunctions::integer(0);
  }
  void *owner = arguments[1], *entry_object = arguments[2], *record = arguments[3];
  here.open.push_back({&entry, owner, entry_object, record, 0});
  for (void* object : {owner, entry_object, record}) {
    PythonFunctions::keep(object);
  }
  here.slots->open = static_cast<int64_t>(here.open.size());
  entry.after.replace(entry.before, here);
  here.open.back().count = at::autocast::increment_nesting();
  return PythonFunctions::integer(1);
}

// Leaves the thread's innermost region if this owner entered it here and its state is unchanged. Returns 0 if not; 1 if
// other regions entered here are open; 2 if it was the outermost of all, PyTorch's included, so all casts were dropped;
// 3 if all open regions were entered elsewhere. Called as `precast_enter` is.
PRECAST_API void* precast_leave(void* /*module*/, void* const* arguments, std::ptrdiff_t /*count*/) {
  ThreadState& here = ThreadState::here();
  if (here.open.empty() || here.open.back().owner != arguments[0]) {
    return PythonFunctions::integer(0);
  }
  const OpenRegion left = here.open.back();
  const Snapshot& after = left.fast_entry->after;
  const ThreadSlots& slots = *here.slots;
  if (Process::is_watched || at::impl::torch_function_mode_enabled() ||
      after.bound != slots.bound[static_cast<size_t>(after.device)] || after.guard_id != slots.guard_id ||
      after.guard_id != slots.written_guard_id) {
    return PythonFunctions::integer(0);
  }
  here.open.pop_back();
  here.slots->open = static_cast<int64_t>(here.open.size());
  left.fast_entry->before.replace(after, here);
  const int count = at::autocast::decrement_nesting();
  if (count == 0) {
    at::autocast::clear_cache();
    here.copies.clear();
  }
  for (void* object : {left.record, left.entry_object, left.owner}) {
    PythonFunctions::drop(object);
  }
  return PythonFunctions::integer(count == 0 ? 2 : here.open.empty() ? 3 : 1);
}

// Returns 1 if this thread has casts that an optimizer's step makes stale, else 0. Called as `precast_enter` is.
PRECAST_API void* precast_has_leaves(void* /*module*/, void* const* /*arguments*/, std::ptrdiff_t /*count*/) {
  return PythonFunctions::integer(ThreadState::here().copies.has_leaves() ? 1 : 0);
}

// An object of an open region: its owner, its fast entry, or its record.
PRECAST_API void* precast_open_region(int64_t index, int which) {
  const auto& open = ThreadState::here().open;
  if (static_cast<size_t>(index) >= open.size()) {
    return PythonFunctions::new_reference(PythonFunctions::none);
  }
  const OpenRegion& region = open[static_cast<size_t>(index)];
  return PythonFunctions::new_reference(which == 0 ? region.owner : which == 1 ? region.entry_object : region.record);
}

PRECAST_API int precast_open_count(int64_t index) {
  const auto& open = ThreadState::here().open;
  return static_cast<size_t>(index) < open.size() ? open[static_cast<size_t>(index)].count : 0;
}

// Removes the outermost region and returns its record; None if there is none.
PRECAST_API void* precast_take_record() {
  ThreadState& here = ThreadState::here();
  if (here.open.empty()) {
    return PythonFunctions::new_reference(PythonFunctions::none);
  }
  const OpenRegion region = here.open.front();
  here.open.erase(here.open.begin());
  here.slots->open = static_cast<int64_t>(here.open.size());
  PythonFunctions::drop(region.entry_object);
  PythonFunctions::drop(region.owner);
  return region.record;
}

// Returns 1 if any thread has a region here.
PRECAST_API int precast_any_open() {
  std::lock_guard<std::mutex> guard(Process::lock);
  const auto& threads = Process::threads;
  return std::any_of(threads.begin(), threads.end(), [](const ThreadState* thread) { return !thread->open.empty(); });
}
