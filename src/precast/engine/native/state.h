// What each thread has in force, and what all threads share.
//
// Invariants:
// - a policy never changes and never ends: policies that say the same are one, so their number stays small;
// - a thread is one of Python's, which ends its regions and so empties its copies, or one of PyTorch's own, which keeps
//   none. Until Python has said which, its operations run on the reference.
#pragma once

#include "copies.h"

#include <c10/core/DeviceType.h>

#include <array>
#include <atomic>
#include <unordered_set>
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

enum class Thread : uint8_t { Unknown = 0, Pythons = 1, PyTorchs = 2 };

// The parameters that are held: one set for all threads, and in each thread a copy of it that is read without a lock.
class HeldSources {
 public:
  bool has(const c10::TensorImpl* source) {
    const auto now = generation_.load(std::memory_order_acquire);
    if (now != seen_) {
      std::lock_guard<std::mutex> guard(lock_);
      mirror_ = sources_;
      seen_ = generation_.load(std::memory_order_relaxed);
    }
    return mirror_.count(source) != 0;
  }

  static void change(const c10::TensorImpl* source, bool is_held) {
    std::lock_guard<std::mutex> guard(lock_);
    if (is_held) {
      sources_.insert(source);
    } else {
      sources_.erase(source);
    }
    any_.store(!sources_.empty(), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
  }

  static bool any() {
    return any_.load(std::memory_order_relaxed);
  }

  static std::mutex& lock() {
    return lock_;
  }

 private:
  uint64_t seen_ = 0;
  std::unordered_set<const c10::TensorImpl*> mirror_;

  static inline std::mutex lock_;
  static inline std::unordered_set<const c10::TensorImpl*> sources_;
  static inline std::atomic<uint64_t> generation_{0};
  static inline std::atomic<bool> any_{false};
};

struct ThreadState {
  std::array<const Policy*, kDevices> policies{};  // null outside of all regions of precast's
  std::array<int, kDevices> attempts{};            // operations that are tried with autocast on in what they call
  Thread kind = Thread::Unknown;
  int uses = 0;  // operations that took weights since a held copy was compared with its parameter
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
  static inline int uses_between_checks = 0;  // operations that take weights, set by `precast_begin`
  static inline std::atomic<int (*)()> is_capturing{nullptr};
  static inline std::mutex lock;
  static inline std::atomic<bool> records_casts{false};
  static inline std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> casts;
  static inline std::vector<ThreadState*> threads;
  static inline bool ends = false;  // then tensors are left to the operating system
};

}  // namespace precast
