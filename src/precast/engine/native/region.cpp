// Entering and leaving a region in one call: what a region of Python's changed once is changed again as a whole.
//
// Invariants:
// - a snapshot is all that a region changes in its thread. A shortcut has two, of before and after;
// - a region is entered by a shortcut only from what was before, so that leaving it restores what was there;
// - regions that were entered so lie on a stack here, above all those that Python has records of. Python takes them from
//   here, the outermost first, when it needs their records;
// - each function here changes all or nothing, and Python's signals cannot come between. It is called with Python's lock.
#include "kernel.h"
#include "torch_api.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalPythonObjects.h>

#define PRECAST_API extern "C" __attribute__((visibility("default")))

namespace precast {
namespace {

// Python's own functions, by which its objects are kept, made and read.
struct References {
  static inline void (*keep)(void*) = nullptr;
  static inline void (*drop)(void*) = nullptr;
  static inline void* (*integer)(long) = nullptr;
  static inline void* (*address)(void*) = nullptr;
  static inline void* none = nullptr;

  static void* new_one(void* object) {
    keep(object);
    return object;
  }
};

// What PyTorch's own threads get that work for this one. Python keeps it as long as a snapshot that names it: here it
// would keep policies whose last user is a shortcut of their own, which Python's collector could not see.
struct Lent {
  PyObject* object = nullptr;
  c10::impl::PyInterpreter* interpreter = nullptr;

  static Lent now() {
    using Objects = at::impl::ThreadLocalPythonObjects;
    if (!Objects::contains(kInherited)) {
      return {};
    }
    const auto& known = Objects::get(kInherited);
    c10::impl::PyInterpreter* interpreter = &known->pyinterpreter();
    return {known->ptr(interpreter), interpreter};
  }

  void lend() const {
    References::keep(object);  // which the next line takes
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

// The flags of the two device types that say the guard id, see `compile_guards.py`.
struct GuardTypes {
  static inline c10::DeviceType low{}, high{};
};

struct Snapshot {
  c10::DeviceType device;
  Flags flags, low, high;
  bool cache_enabled, optimizes_torchscript;
  const Policy* policy;
  int64_t bound, guard_id;
  Lent lent;

  explicit Snapshot(c10::DeviceType of)
      : device(of),
        flags(Flags::of(of)),
        low(Flags::of(GuardTypes::low)),
        high(Flags::of(GuardTypes::high)),
        cache_enabled(at::autocast::is_autocast_cache_enabled()),
        optimizes_torchscript(torch::jit::getGraphExecutorOptimize()),
        policy(ThreadState::here().policies[static_cast<size_t>(of)]),
        bound(ThreadState::here().numbers->bound[static_cast<size_t>(of)]),
        guard_id(ThreadState::here().numbers->guard_id),
        lent(Lent::now()) {}

  bool is_now(const ThreadState& here) const {
    const Numbers& numbers = *here.numbers;
    return bound == numbers.bound[static_cast<size_t>(device)] && guard_id == numbers.guard_id &&
        guard_id == numbers.written_guard_id && flags == Flags::of(device) && low == Flags::of(GuardTypes::low) &&
        high == Flags::of(GuardTypes::high) && cache_enabled == at::autocast::is_autocast_cache_enabled() &&
        optimizes_torchscript == torch::jit::getGraphExecutorOptimize();
  }

  // Has this in force, where `now` is.
  void replace(const Snapshot& now, ThreadState& here) const {
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
    here.policies[static_cast<size_t>(device)] = policy;
    here.numbers->bound[static_cast<size_t>(device)] = bound;
    here.numbers->guard_id = here.numbers->written_guard_id = guard_id;
    if (lent.object != nullptr && lent.object != now.lent.object) {
      lent.lend();
    }
  }
};

}  // namespace

struct Shortcut {
  Snapshot before, after;
  int64_t registration, installed;

  bool may_be_taken(const ThreadState& here) const {
    return registration == Process::registration && here.kind == Thread::Pythons && !Process::is_watched &&
        installed == Process::installed_numbers[static_cast<size_t>(before.device)] &&
        (here.numbers->lends != 0 || after.lent.object == nullptr) && !at::impl::torch_function_mode_enabled() &&
        before.is_now(here);
  }
};

}  // namespace precast

using namespace precast;

PRECAST_API void precast_guard_types(int low, int high) {
  GuardTypes::low = static_cast<c10::DeviceType>(low);
  GuardTypes::high = static_cast<c10::DeviceType>(high);
}

PRECAST_API void precast_references(
    void (*keep)(void*), void (*drop)(void*), void* (*integer)(long), void* (*address)(void*), void* none) {
  References::keep = keep;
  References::drop = drop;
  References::integer = integer;
  References::address = address;
  References::none = none;
}

// Allows the shortcuts that were made since kernels were registered last, which has this number; 0 allows none.
PRECAST_API void precast_allow_shortcuts(int64_t registration) {
  Process::registration = registration;
}

// Numbers of this thread, as the address of an int64_t: of the bound policy on a device type, or one of the others.
PRECAST_API void* precast_number(int device, int which) {
  Numbers& numbers = *ThreadState::here().numbers;
  int64_t* const others[] = {&numbers.guard_id, &numbers.written_guard_id, &numbers.lends, &numbers.open};
  return device < 0 ? others[which] : &numbers.bound[device];
}

PRECAST_API void* precast_snapshot(int device) {
  return new Snapshot(static_cast<c10::DeviceType>(device));
}

PRECAST_API void precast_free_snapshot(void* snapshot) {
  if (!Process::ends) {
    delete static_cast<Snapshot*>(snapshot);
  }
}

// The shortcut for entries like the one between the snapshot and now.
PRECAST_API void* precast_shortcut(const void* before) {
  const auto& found = *static_cast<const Snapshot*>(before);
  return new Shortcut{
      found,
      Snapshot(found.device),
      Process::registration,
      Process::installed_numbers[static_cast<size_t>(found.device)]};
}

PRECAST_API void precast_free_shortcut(void* shortcut) {
  if (!Process::ends) {
    delete static_cast<Shortcut*>(shortcut);
  }
}

// Enters a region: 1, or 0 where it did not, and changed nothing, because something is otherwise than when the shortcut
// was made, or somebody is to hear of it. Python calls it as a function of its own (`built_in.py`), with the shortcut's
// number, the region, the shortcut and an empty record.
PRECAST_API void* precast_enter(void* /*module*/, void* const* arguments, std::ptrdiff_t /*count*/) {
  ThreadState& here = ThreadState::here();
  const auto& known = *static_cast<const Shortcut*>(References::address(arguments[0]));
  if (!known.may_be_taken(here)) {
    return References::integer(0);
  }
  void *owner = arguments[1], *way = arguments[2], *record = arguments[3];
  here.open.push_back({&known, owner, way, record, 0});
  for (void* object : {owner, way, record}) {
    References::keep(object);
  }
  here.numbers->open = static_cast<int64_t>(here.open.size());
  known.after.replace(known.before, here);
  here.open.back().count = at::autocast::increment_nesting();
  return References::integer(1);
}

// Leaves the thread's innermost region, if it was entered by a shortcut of this owner's and is as it was then. 0: it did
// not; 1: others are open around it; 2: of all regions, PyTorch's too, it was the outermost, and all copies have ended;
// 3: all that are open were entered otherwise. Python calls it as it calls `precast_enter`.
PRECAST_API void* precast_leave(void* /*module*/, void* const* arguments, std::ptrdiff_t /*count*/) {
  ThreadState& here = ThreadState::here();
  if (here.open.empty() || here.open.back().owner != arguments[0]) {
    return References::integer(0);
  }
  const OpenRegion left = here.open.back();
  const Snapshot& after = left.shortcut->after;
  const Numbers& numbers = *here.numbers;
  if (Process::is_watched || at::impl::torch_function_mode_enabled() ||
      after.bound != numbers.bound[static_cast<size_t>(after.device)] || after.guard_id != numbers.guard_id ||
      after.guard_id != numbers.written_guard_id) {
    return References::integer(0);
  }
  here.open.pop_back();
  here.numbers->open = static_cast<int64_t>(here.open.size());
  left.shortcut->before.replace(after, here);
  const int count = at::autocast::decrement_nesting();
  if (count == 0) {
    at::autocast::clear_cache();
    here.copies.clear();
  }
  for (void* object : {left.record, left.way, left.owner}) {
    References::drop(object);
  }
  return References::integer(count == 0 ? 2 : here.open.empty() ? 3 : 1);
}

// Whether this thread has copies that a step of an optimizer makes out of date: 1 or 0. Called as `precast_enter` is.
PRECAST_API void* precast_has_leaves(void* /*module*/, void* const* /*arguments*/, std::ptrdiff_t /*count*/) {
  return References::integer(ThreadState::here().copies.has_leaves() ? 1 : 0);
}

// What Python fills a record with: the region's owner, its shortcut, and the record.
PRECAST_API void* precast_open_region(int64_t index, int which) {
  const auto& open = ThreadState::here().open;
  if (static_cast<size_t>(index) >= open.size()) {
    return References::new_one(References::none);
  }
  const OpenRegion& region = open[static_cast<size_t>(index)];
  return References::new_one(which == 0 ? region.owner : which == 1 ? region.way : region.record);
}

PRECAST_API int precast_open_count(int64_t index) {
  const auto& open = ThreadState::here().open;
  return static_cast<size_t>(index) < open.size() ? open[static_cast<size_t>(index)].count : 0;
}

// Gives Python the record of the outermost region, which is no longer here then; None where there is none.
PRECAST_API void* precast_take_record() {
  ThreadState& here = ThreadState::here();
  if (here.open.empty()) {
    return References::new_one(References::none);
  }
  const OpenRegion region = here.open.front();
  here.open.erase(here.open.begin());
  here.numbers->open = static_cast<int64_t>(here.open.size());
  References::drop(region.way);
  References::drop(region.owner);
  return region.record;
}

// Whether any thread has a region here.
PRECAST_API int precast_any_open() {
  std::lock_guard<std::mutex> guard(Process::lock);
  const auto& threads = Process::threads;
  return std::any_of(threads.begin(), threads.end(), [](const ThreadState* thread) { return !thread->open.empty(); });
}
