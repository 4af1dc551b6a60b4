// The state of each thread, and the state that threads share.
//
// Invariants:
// - policies are immutable and never freed; equal policies are one object, so there are few;
// - until Python has registered a thread, its operations run on the reference;
// - what kernels read without the GIL is atomic, locked, or of their own thread. The GIL protects what only Python's calls
//   use: the list of policies, the registrations, PyTorch's recorded kernels, and a thread's open regions. Without a GIL
//   the library is not loaded (`library.py`);
// - locks that are held together are taken in this order: `Process::lock`, then a thread's lock of its shared casts. A
//   fork takes all but the latter, which no other thread uses without the first.
#pragma once

#include "boundary.h"
#include "copies.h"
#include "held.h"

#include <c10/core/DeviceType.h>

#include <array>
#include <atomic>
#include <string>
#include <unordered_map>
#include <vector>

namespace precast {

constexpr size_t kDevices = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);

struct Policy {
  bool promotes;                // mixed dtypes that raise an error are promoted
  std::vector<Action> actions;  // by operation number

  Action action(size_t operation) const {
    return operation < actions.size() ? actions[operation] : Action::Pass;
  }
};

// The name under which PyTorch's own threads inherit the policies of the thread that they work for; also in
// `compile_guards.py`.
inline const std::string kInherited = "precast bound policies";

// The held parameters: a table for all threads, and a copy of it in each thread that is read without a lock.
class HeldSources {
  using Table = std::unordered_map<const c10::TensorImpl*, std::shared_ptr<HeldSource>>;

 public:
  // The held parameter; null if it is not held.
  HeldSource* find(const c10::TensorImpl* source) {
    const auto now = generation_.load(std::memory_order_acquire);
    if (now != seen_) {
      std::lock_guard<std::mutex> guard(lock_);
      mirror_ = sources_;
      seen_ = generation_.load(std::memory_order_relaxed);
    }
    const auto entry = mirror_.find(source);
    return entry == mirror_.end() ? nullptr : entry->second.get();
  }

  static void change(const c10::TensorImpl* source, bool is_held) {
    std::lock_guard<std::mutex> guard(lock_);
    if (is_held) {
      sources_.insert_or_assign(source, std::make_shared<HeldSource>());
    } else {
      sources_.erase(source);
    }
    any_.store(!sources_.empty(), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
  }

  // The same for Python, in any thread.
  static std::shared_ptr<HeldSource> of(const c10::TensorImpl* source) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto entry = sources_.find(source);
    return entry == sources_.end() ? nullptr : entry->second;
  }

  static bool any() {
    return any_.load(std::memory_order_relaxed);
  }

  static std::mutex& lock() {
    return lock_;
  }

 private:
  uint64_t seen_ = 0;
  Table mirror_;

  static inline std::mutex lock_;
  static inline Table sources_;
  static inline std::atomic<uint64_t> generation_{0};
  static inline std::atomic<bool> any_{false};
};

// Numbers of a thread that Python accesses in place. A thread that ends leaves its object to a later one, so the memory
// stays valid until the process ends.
struct ThreadSlots : ThreadNumbers {
  std::array<int64_t, kDevices> bound{};  // the bound policy in force on each device type; 0 is none
};

struct FastEntry;

// A region entered by a fast entry, until Python takes its record. The pointers are owned references to Python objects.
struct OpenRegion {
  const FastEntry* fast_entry;
  void* owner;
  void* entry_object;  // the fast entry as a Python object
  void* record;        // empty until Python needs it
  int count;           // PyTorch's count of open regions after the entry
};

struct ThreadState {
  std::array<const Policy*, kDevices> policies{};  // null outside of precast's regions
  ThreadSlots* const slots;
  std::vector<OpenRegion> open;                    // outermost first; `slots->open` is its size
  ThreadKind kind = ThreadKind::Unknown;
  int uses = 0;                   // operations that took weights since a held copy was last compared
  Copies copies;
  HeldSources held;

  ThreadState();
  ~ThreadState();

  static ThreadState& here();
};

struct Process {
  static inline std::array<std::atomic<const Policy*>, kDevices> installed{};  // for regions of PyTorch's own
  static inline std::atomic<bool> is_watched{false};                           // a trace is open
  static inline std::atomic<void (*)()> compare{nullptr};  // compares a held copy with its parameter
  static inline std::atomic<int> uses_between_checks{0};  // operations that take weights
  static inline std::mutex lock;
  static inline std::atomic<bool> records_casts{false};
  static inline std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> casts;
  static inline std::vector<ThreadState*> threads;
  static inline std::vector<ThreadSlots*> free_slots;  // of threads that have ended
  static inline std::array<std::atomic<int64_t>, kDevices> installed_numbers{};  // of bound policies; 0 is none
  static inline std::atomic<int64_t> registration{0};  // of the kernels; 0 while fast entries are not allowed
  static inline std::atomic<bool> finalizing{false};   // then tensors are left to the operating system
};

}  // namespace precast
