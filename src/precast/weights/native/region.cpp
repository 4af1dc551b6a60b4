// Entry and exit of a region in one call, which repeats the changes of an earlier entry that Python made.
//
// Invariants:
// - a snapshot contains all state of the thread that a region changes. A fast entry has one from before the entry and
//   one from after it;
// - a fast entry is used only if the thread's state equals the snapshot from before, so the exit can restore it;
// - the regions entered here are on a stack above Python's records. When Python needs its records, it moves these
//   regions to them, outermost first;
// - each function makes all its changes or none, and no Python signal handler interrupts it. The caller holds the GIL.
#include "exported.h"
#include "kernel.h"
#include "torch_api.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalPythonObjects.h>

namespace precast {
namespace {

// The policies that PyTorch's own threads inherit. Python keeps the object alive as long as a snapshot has its address:
// an owning reference here would form a cycle, through the fast entry of a policy in it, which the garbage collector
// does not see.
struct InheritedPolicies {
  PyObject* object = nullptr;
  c10::impl::PyInterpreter* interpreter = nullptr;

  static InheritedPolicies current() {
    using Objects = at::impl::ThreadLocalPythonObjects;
    if (!Objects::contains(kInherited)) {
      return {};
    }
    const auto& entry = Objects::get(kInherited);
    c10::impl::PyInterpreter* interpreter = &entry->pyinterpreter();
    return {entry->ptr(interpreter), interpreter};
  }

  void set() const {
    PythonFunctions::increment_references(object);  // `SafePyObject` owns this reference
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

  explicit Snapshot(c10::DeviceType device)
      : device(device),
        flags(Flags::of(device)),
        low(Flags::of(GuardDevices::low)),
        high(Flags::of(GuardDevices::high)),
        cache_enabled(at::autocast::is_autocast_cache_enabled()),
        optimizes_torchscript(torch::jit::getGraphExecutorOptimize()),
        policy(ThreadState::here().policies[static_cast<size_t>(device)]),
        bound(ThreadState::here().slots->bound[static_cast<size_t>(device)]),
        guard_id(ThreadState::here().slots->guard_id),
        inherited(InheritedPolicies::current()) {}

  bool is_current(const ThreadState& here) const {
    const ThreadSlots& slots = *here.slots;
    return bound == slots.bound[static_cast<size_t>(device)] && guard_id == slots.guard_id &&
        guard_id == slots.written_guard_id && flags == Flags::of(device) && low == Flags::of(GuardDevices::low) &&
        high == Flags::of(GuardDevices::high) && cache_enabled == at::autocast::is_autocast_cache_enabled() &&
        optimizes_torchscript == torch::jit::getGraphExecutorOptimize();
  }

  // Changes the state of a thread from `current` to this one.
  void restore(const Snapshot& current, ThreadState& here) const {
    flags.set(device);
    if (!(low == current.low)) {
      low.set(GuardDevices::low);
    }
    if (!(high == current.high)) {
      high.set(GuardDevices::high);
    }
    at::autocast::set_autocast_cache_enabled(cache_enabled);
    if (optimizes_torchscript != current.optimizes_torchscript) {
      torch::jit::setGraphExecutorOptimize(optimizes_torchscript);
    }
    here.policies[static_cast<size_t>(device)] = policy;
    here.slots->bound[static_cast<size_t>(device)] = bound;
    here.slots->guard_id = here.slots->written_guard_id = guard_id;
    if (inherited.object != nullptr && inherited.object != current.inherited.object) {
      inherited.set();
    }
  }
};

}  // namespace

struct FastEntry {
  Snapshot before, after;
  int64_t registration, installed;  // the numbers of the registered kernels and of the installed policy

  bool is_usable(const ThreadState& here) const {
    return registration == Process::registration && here.kind == ThreadKind::Python && !Process::is_watched &&
        installed == Process::installed_numbers[static_cast<size_t>(before.device)] &&
        (here.slots->policies_inherited != 0 || after.inherited.object == nullptr) &&
        !at::impl::torch_function_mode_enabled() && before.is_current(here);
  }
};

}  // namespace precast

using namespace precast;

void precast_set_guard_devices(int low, int high) {
  GuardDevices::low = static_cast<c10::DeviceType>(low);
  GuardDevices::high = static_cast<c10::DeviceType>(high);
}

void precast_set_python_functions(
    void* increment_references, void* decrement_references, void* new_integer, void* integer_as_pointer,
    void* set_error, void* none, void* error_type) {
  PythonFunctions::increment_references = reinterpret_cast<void (*)(void*)>(increment_references);
  PythonFunctions::decrement_references = reinterpret_cast<void (*)(void*)>(decrement_references);
  PythonFunctions::new_integer = reinterpret_cast<void* (*)(long)>(new_integer);
  PythonFunctions::integer_as_pointer = reinterpret_cast<void* (*)(void*)>(integer_as_pointer);
  PythonFunctions::set_error = reinterpret_cast<void (*)(void*, const char*)>(set_error);
  PythonFunctions::none = PythonFunctions::new_reference(none);
  PythonFunctions::error_type = PythonFunctions::new_reference(error_type);
}

// Allows only fast entries that were made under the registration of kernels with this number; 0 allows none.
void precast_allow_fast_entries(int64_t registration) {
  Process::registration = registration;
}

// Returns the address at which this thread has the number of the policy in force on a device type.
void* precast_bound_number(int device) {
  return guarded([&]() -> void* { return &ThreadState::here().slots->bound.at(static_cast<size_t>(device)); });
}

void* precast_thread_numbers() {
  return guarded([]() -> void* { return static_cast<ThreadNumbers*>(ThreadState::here().slots); });
}

void* precast_snapshot(int device) {
  return guarded([&]() -> void* { return new Snapshot(static_cast<c10::DeviceType>(device)); });
}

void precast_free_snapshot(void* snapshot) {
  if (!Process::finalizing) {
    delete static_cast<Snapshot*>(snapshot);
  }
}

// Makes a fast entry from a snapshot, of the state before an entry, and the current state, after it.
void* precast_fast_entry(void* before) {
  return guarded([&]() -> void* {
    const auto& earlier = *static_cast<const Snapshot*>(before);
    return new FastEntry{
        earlier,
        Snapshot(earlier.device),
        Process::registration,
        Process::installed_numbers[static_cast<size_t>(earlier.device)]};
  });
}

void precast_free_fast_entry(void* fast_entry) {
  if (!Process::finalizing) {
    delete static_cast<FastEntry*>(fast_entry);
  }
}

// Enters a region and returns 1. Returns 0 without changes if the fast entry cannot be used in the current state. The
// arguments are the address of the fast entry, the region, the `FastEntry` of Python, and an empty record.
void* precast_enter(void* /*module*/, void* const* arguments, std::ptrdiff_t /*count*/) {
  return guarded([&]() -> void* {
    ThreadState& here = ThreadState::here();
    const auto& entry = *static_cast<const FastEntry*>(PythonFunctions::integer_as_pointer(arguments[0]));
    if (!entry.is_usable(here)) {
      return PythonFunctions::new_integer(0);
    }
    void *owner = arguments[1], *entry_object = arguments[2], *record = arguments[3];
    here.open.push_back({&entry, owner, entry_object, record, 0});
    for (void* object : {owner, entry_object, record}) {
      PythonFunctions::increment_references(object);
    }
    here.slots->open = static_cast<int64_t>(here.open.size());
    entry.after.restore(entry.before, here);
    here.open.back().count = at::autocast::increment_nesting();
    return PythonFunctions::new_integer(1);
  });
}

// Leaves the innermost region of the thread if it is the only argument, was entered here, and the state is unchanged.
// Returns a `RegionExit`.
void* precast_leave(void* /*module*/, void* const* arguments, std::ptrdiff_t /*count*/) {
  return guarded([&]() -> void* {
    ThreadState& here = ThreadState::here();
    const auto result = [](RegionExit exit) { return PythonFunctions::new_integer(static_cast<long>(exit)); };
    if (here.open.empty() || here.open.back().owner != arguments[0]) {
      return result(RegionExit::Elsewhere);
    }
    const OpenRegion region = here.open.back();
    const Snapshot& after = region.fast_entry->after;
    const ThreadSlots& slots = *here.slots;
    if (Process::is_watched || at::impl::torch_function_mode_enabled() ||
        after.bound != slots.bound[static_cast<size_t>(after.device)] || after.guard_id != slots.guard_id ||
        after.guard_id != slots.written_guard_id) {
      return result(RegionExit::Elsewhere);
    }
    here.open.pop_back();
    here.slots->open = static_cast<int64_t>(here.open.size());
    region.fast_entry->before.restore(after, here);
    const int count = at::autocast::decrement_nesting();
    if (count == 0) {
      at::autocast::clear_cache();
      here.copies.clear();
    }
    for (void* object : {region.record, region.entry_object, region.owner}) {
      PythonFunctions::decrement_references(object);
    }
    return result(
        count == 0               ? RegionExit::Outermost
            : here.open.empty() ? RegionExit::OthersElsewhere
                                : RegionExit::OneOfSeveral);
  });
}

// Returns 1 if this thread has casts that an optimizer's step makes stale, else 0.
void* precast_has_leaves(void* /*module*/, void* const* /*arguments*/, std::ptrdiff_t /*count*/) {
  return guarded(
      []() -> void* { return PythonFunctions::new_integer(ThreadState::here().copies.has_leaves() ? 1 : 0); });
}

// Returns an object of the open region with this index, from 0 for the outermost; None if there is no such region.
void* precast_open_region(int64_t index, int part) {
  const auto& open = ThreadState::here().open;
  if (static_cast<size_t>(index) >= open.size()) {
    return PythonFunctions::new_reference(PythonFunctions::none);
  }
  const OpenRegion& region = open[static_cast<size_t>(index)];
  const auto region_part = static_cast<RegionPart>(part);
  return PythonFunctions::new_reference(
      region_part == RegionPart::Owner       ? region.owner
          : region_part == RegionPart::Entry ? region.entry_object
                                             : region.record);
}

int precast_open_count(int64_t index) {
  const auto& open = ThreadState::here().open;
  return static_cast<size_t>(index) < open.size() ? open[static_cast<size_t>(index)].count : 0;
}

// Removes the outermost region from the stack and returns its record; None if the stack is empty.
void* precast_take_record() {
  ThreadState& here = ThreadState::here();
  if (here.open.empty()) {
    return PythonFunctions::new_reference(PythonFunctions::none);
  }
  const OpenRegion region = here.open.front();
  here.open.erase(here.open.begin());
  here.slots->open = static_cast<int64_t>(here.open.size());
  PythonFunctions::decrement_references(region.entry_object);
  PythonFunctions::decrement_references(region.owner);
  return region.record;
}

// Returns 1 if any thread has a region on this stack, else 0.
int precast_any_open() {
  return guarded([]() -> int {
    std::lock_guard<std::mutex> guard(Process::lock);
    const auto& threads = Process::threads;
    return std::any_of(threads.begin(), threads.end(), [](const ThreadState* thread) { return !thread->open.empty(); });
  });
}
