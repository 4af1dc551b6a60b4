// What each thread has in force, and what all threads share.
//
// Invariants:
// - a policy never changes and never ends: policies that say the same are one, so their number stays small;
// - a thread is one of Python's, which ends its regions and so empties its copies, or one of PyTorch's own, which keeps
//   none. Until Python has said which, its operations run on the reference.
#pragma once

#include "copies.h"
#include "held.h"
#include "refusals.h"

#include <c10/core/DeviceType.h>

#include <array>
#include <atomic>
#include <string>
#include <unordered_map>
#include <vector>

namespace precast {

constexpr size_t kDevices = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);

// What a policy has the kernel of one operation do.
enum class Action : uint8_t {
  Pass = 0,      // PyTorch's kernel does what the policy says
  Delegate = 1,  // PyTorch's kernel does, with weights that are cast already
  Reference = 2  // the Python kernel does
};

struct Policy {
  bool promotes;                // whether mixed dtypes that raise an error are promoted
  std::vector<Action> actions;  // by the number of the operation

  Action action(size_t operation) const {
    return operation < actions.size() ? actions[operation] : Action::Pass;
  }
};

// Under what name PyTorch's own threads inherit the policies of the thread that they work for: `compile_guards.py` has it
// too.
inline const std::string kInherited = "precast bound policies";

enum class Thread : uint8_t { Unknown = 0, Pythons = 1, PyTorchs = 2 };

// The parameters that are held: one table for all threads, and in each thread a copy of it that is read without a lock.
class HeldSources {
  using Table = std::unordered_map<const c10::TensorImpl*, std::shared_ptr<HeldSource>>;

 public:
  // What is held of a parameter; null where it is not held.
  HeldSource* find(const c10::TensorImpl* source) {
    const auto now = generation_.load(std::memory_order_acquire);
    if (now != seen_) {
      std::lock_guard<std::mutex> guard(lock_);
      mirror_ = sources_;
      seen_ = generation_.load(std::memory_order_relaxed);
    }
    const auto known = mirror_.find(source);
    return known == mirror_.end() ? nullptr : known->second.get();
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
    const auto known = sources_.find(source);
    return known == sources_.end() ? nullptr : known->second;
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

// Numbers of a thread that Python reads and writes as memory. A thread that ends leaves its array to a later one, so the
// memory stays valid for as long as the process lives.
struct Numbers {
  std::array<int64_t, kDevices> bound;  // of the bound policy in force on each device type; 0 is none
  int64_t guard_id;                     // that the thread's policies have
  int64_t written_guard_id;             // that the flags hold; 0 while they are being changed
  int64_t lends;                        // whether PyTorch's own threads have been given this thread's policies
  int64_t open;                         // how many regions are open that Python has no record of
};

struct Shortcut;

// A region that was entered by a shortcut, until Python asks for its record. The pointers are Python objects, of which
// each counts as a reference.
struct OpenRegion {
  const Shortcut* shortcut;
  void* owner;
  void* way;     // the shortcut, as Python knows it
  void* record;  // which Python fills when it needs it
  int count;     // of regions, PyTorch's own too, that were open with it
};

struct ThreadState {
  std::array<const Policy*, kDevices> policies{};  // null outside of all regions of precast's
  Numbers* const numbers;
  std::vector<OpenRegion> open;                    // the outermost first; `numbers->open` is its size
  std::array<int, kDevices> attempts{};            // operations that are tried with autocast on in what they call
  Thread kind = Thread::Unknown;
  int64_t promoted_at_once = 0;  // operations, without asking PyTorch first; for tests
  int uses = 0;  // operations that took weights since a held copy was compared with its parameter
  Copies copies;
  HeldSources held;
  Refusals refusals;
  bool uses_copies = false;  // whether an operation may have used copies of weights since this was set to false

  ThreadState();
  ~ThreadState();

  static ThreadState& here();
};

struct Process {
  static inline std::array<std::atomic<const Policy*>, kDevices> installed{};  // for regions of PyTorch's own
  static inline std::atomic<bool> is_watched{false};                           // a trace is open
  static inline std::atomic<void (*)()> compare{nullptr};  // compares a held copy with its parameter
  static inline int uses_between_checks = 0;  // operations that take weights, set by `precast_begin`
  static inline std::atomic<int (*)()> is_capturing{nullptr};
  static inline std::mutex lock;
  static inline std::atomic<bool> records_casts{false};
  static inline std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> casts;
  static inline std::vector<ThreadState*> threads;
  static inline std::vector<Numbers*> free_numbers;  // of threads that have ended
  static inline std::array<int64_t, kDevices> installed_numbers{};  // of the installed bound policies; 0 is none
  static inline int64_t registration = 0;  // of the kernels on the dispatcher; 0 while no shortcut may be taken
  static inline bool ends = false;  // then tensors are left to the operating system
};

}  // namespace precast
