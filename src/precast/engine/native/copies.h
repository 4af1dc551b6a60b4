// The copies of one thread: what a weight was like when it was cast, and the cast.
//
// Invariants:
// - a copy stands for its source while the source has the version counter, the memory, the shape and the strides that
//   it had when it was cast. This is the condition of `weights/freshness.py`;
// - a copy refers to its source's storage weakly. The memory of that object is not given out again while there is a
//   reference, so a storage that is found at the same address is the same storage;
// - a copy that carries a gradient holds its source through its graph, so no other tensor can have the source's address.
//   Copies that carry none have a reference to it, or belong to held parameters, and end when the parameter does;
// - a copy without a gradient is found only where none is recorded;
// - `own` is used by its thread alone. `held` is emptied by other threads too, so it has a lock.
#pragma once

#include "copy_table.h"
#include "spare_memory.h"

#include <mutex>

namespace precast {

// Which entries of a held copy are to go.
enum class Evicted : int { All = 0, Persistent = 1, PersistentAndOlder = 2 };

class Copies {
 public:
  // The copy of a source, or nothing where there is none, it is out of date, or it lacks the gradient that is recorded.
  at::Tensor find(const c10::TensorImpl& source, at::ScalarType dtype, bool records) const {
    const Copy* known = own_.find({&source, dtype, Use::Leaf});
    const bool serves = known != nullptr && (!records || known->has_gradient());
    return serves && known->notes.is_fresh_for(source) ? known->cast : at::Tensor();
  }

  at::Tensor find_held(const c10::TensorImpl& source, at::ScalarType dtype, Use use) {
    std::lock_guard<std::mutex> guard(lock_);
    return found(held_, {&source, dtype, use});
  }

  void put(const at::Tensor& source, at::ScalarType dtype, Copy&& copy) {
    if (own_.size() == 0) {
      begun_ = SpareMemory::all().round();
    }
    has_plain_ |= !copy.has_gradient();
    put_in(own_, {source.unsafeGetTensorImpl(), dtype, Use::Leaf}, std::move(copy));
  }

  void put_held(const at::Tensor& source, at::ScalarType dtype, Use use, Copy&& copy) {
    at::Tensor before;  // freed when the lock is, as that may call anything
    std::lock_guard<std::mutex> guard(lock_);
    before = put_in(held_, {source.unsafeGetTensorImpl(), dtype, use}, std::move(copy));
  }

  // Frees the memory of a copy that is out of date.
  void forget(const c10::TensorImpl& source, at::ScalarType dtype) {
    own_.remove({&source, dtype, Use::Leaf});
  }

  // Whether there is any copy that carries a gradient.
  bool has_leaves() {
    if (own_.size() > 0) {
      return true;
    }
    std::lock_guard<std::mutex> guard(lock_);
    const auto& held = held_.entries();
    return std::any_of(held.begin(), held.end(), [](const auto& entry) { return entry.key.use == Use::Leaf; });
  }

  // Makes the copies of a source, in one dtype or (-1) in all, out of date, whatever version counters say.
  void invalidate(const c10::TensorImpl& source, int dtype) {
    const auto make_stale = [&](CopyTable& table) {
      for (auto& [key, copy] : table.entries()) {
        if (key.source == &source && key.use == Use::Leaf && (dtype < 0 || dtype == static_cast<int>(key.dtype))) {
          copy.notes.make_stale();
        }
      }
    };
    make_stale(own_);
    std::lock_guard<std::mutex> guard(lock_);
    make_stale(held_);
  }

  // What is dropped is given to the caller, who frees it without a lock: that may call anything.
  void evict(
      const c10::TensorImpl* source,
      at::ScalarType dtype,
      int64_t held,
      Evicted which,
      uint32_t version,
      std::vector<Copy>& gone) {
    std::lock_guard<std::mutex> guard(lock_);
    for (const Use use : {Use::Leaf, Use::PerRegion, Use::Persistent}) {
      const Key key{source, dtype, use};
      const Copy* known = held_.find(key);
      if (known == nullptr || known->held != held) {
        continue;
      }
      if (which == Evicted::All || use == Use::Persistent ||
          (which == Evicted::PersistentAndOlder && known->notes.version() != version)) {
        gone.push_back(*held_.remove(key));
      }
    }
  }

  // Drops what does not outlive a region.
  void clear() {
    if (has_plain_) {
      leave_memory();
    }
    own_.clear();
    std::vector<Copy> gone;
    std::lock_guard<std::mutex> guard(lock_);
    held_.take([](const Key& key) { return key.use != Use::Persistent; }, gone);
  }

  size_t size() {
    std::lock_guard<std::mutex> guard(lock_);
    return own_.size() + held_.size();
  }

 private:
  static at::Tensor found(const CopyTable& table, const Key& key) {
    const Copy* known = table.find(key);
    return known != nullptr && known->notes.is_fresh_for(*key.source) ? known->cast : at::Tensor();
  }

  // Gives the copy that was there before.
  static at::Tensor put_in(CopyTable& table, const Key& key, Copy&& copy) {
    at::Tensor before;
    if (Copy* known = table.find(key)) {
      before = std::move(known->cast);
      *known = std::move(copy);
    } else {
      table.insert(key, std::move(copy));
    }
    return before;
  }

  // Gives the memory of copies without a gradient to the next region.
  void leave_memory() {
    std::vector<const at::Tensor*> left;
    for (const auto& entry : own_.entries()) {
      if (!entry.copy.has_gradient()) {
        left.push_back(&entry.copy.cast);
      }
    }
    has_plain_ = false;
    SpareMemory::all().keep(left, begun_);
  }

  CopyTable own_, held_;
  std::mutex lock_;
  bool has_plain_ = false;  // copies without a gradient
  uint64_t begun_ = 0;      // the round of spare memory when the first copy was made
};

}  // namespace precast
