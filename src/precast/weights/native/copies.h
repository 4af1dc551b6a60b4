// The casts of one thread, each with a snapshot of its source.
//
// Invariants:
// - a cast is valid while its source has the version counter, memory, shape and strides of the snapshot
//   (`weights/freshness.py`);
// - a snapshot references the source's storage weakly. The storage object's address is not reused while there is a
//   reference, so a storage at the same address is the same storage;
// - a cast with a gradient keeps its source alive through the autograd graph, so the source's address cannot be reused.
//   A cast without one references its source, or belongs to a held parameter and ends with it;
// - a cast without a gradient is used only where no gradient is recorded;
// - `thread_local_casts_` is used by this thread only. Other threads may evict from the tables of held copies, under a
//   lock.
#pragma once

#include "copy_table.h"
#include "spare_memory.h"

#include <mutex>
#include <optional>
#include <utility>

namespace precast {

class Copies {
 public:
  // The valid cast of a source; undefined if there is none, or if it lacks the gradient that is recorded.
  at::Tensor find(const c10::TensorImpl& source, at::ScalarType dtype, bool records) {
    const Copy* entry = thread_local_casts_.find({&source, dtype});
    const bool is_usable = entry != nullptr && (!records || entry->has_gradient());
    return is_usable && entry->snapshot.is_valid_for(source) ? entry->cast : at::Tensor();
  }

  // The held cast of a source with its gradient, in this region.
  at::Tensor find_held_leaf(const c10::TensorImpl& source, at::ScalarType dtype) {
    std::lock_guard<std::mutex> guard(lock_);
    const Copy* entry = held_leaves_.find({&source, dtype});
    return entry != nullptr && entry->snapshot.is_valid_for(source) ? entry->cast : at::Tensor();
  }

  // The held copy of a source; undefined if Python has to make it or to look at it.
  at::Tensor find_held(const c10::TensorImpl& source, at::ScalarType dtype);

  void put(const at::Tensor& source, at::ScalarType dtype, Copy&& copy) {
    if (thread_local_casts_.size() == 0) {
      first_round_ = SpareMemory::all().round();
    }
    has_casts_without_gradient_ |= !copy.has_gradient();
    thread_local_casts_.put({source.unsafeGetTensorImpl(), dtype}, std::move(copy));
  }

  void put_held(const at::Tensor& source, at::ScalarType dtype, bool has_gradient, Copy&& copy) {
    std::optional<Copy> before;  // destroyed after the lock is released: freeing a tensor can run arbitrary code
    std::lock_guard<std::mutex> guard(lock_);
    CopyTable& table = has_gradient ? held_leaves_ : held_copies_;
    before = table.put({source.unsafeGetTensorImpl(), dtype}, std::move(copy));
  }

  // Frees the memory of a stale cast.
  void forget(const c10::TensorImpl& source, at::ScalarType dtype) {
    thread_local_casts_.remove({&source, dtype});
  }

  // True if there is a cast with a gradient.
  bool has_leaves() {
    if (thread_local_casts_.size() > 0) {
      return true;
    }
    std::lock_guard<std::mutex> guard(lock_);
    return held_leaves_.size() > 0;
  }

  // Makes the casts of a source that end with the region stale, in one dtype or (-1) in all, regardless of version
  // counters.
  void invalidate(const c10::TensorImpl& source, int dtype) {
    const auto make_stale = [&](CopyTable& table) {
      for (auto& [key, copy] : table) {
        if (key.source == &source && (dtype < 0 || dtype == static_cast<int>(key.dtype))) {
          copy.snapshot.make_stale();
        }
      }
    };
    make_stale(thread_local_casts_);
    std::lock_guard<std::mutex> guard(lock_);
    make_stale(held_leaves_);
  }

  // The caller destroys the removed casts without a lock: freeing a tensor can run arbitrary code.
  void evict(
      const Key& key, const HeldCopy& held, Eviction which, uint32_t version, std::vector<Copy>& removed) {
    std::lock_guard<std::mutex> guard(lock_);
    for (CopyTable* table : {&held_leaves_, &held_copies_}) {
      const Copy* entry = table->find(key);
      if (entry == nullptr || entry->held.get() != &held) {
        continue;
      }
      if (which == Eviction::All || table == &held_copies_ ||
          (which == Eviction::PersistentAndOlder && entry->snapshot.version() != version)) {
        removed.push_back(*table->remove(key));
      }
    }
  }

  // Drops the casts that do not outlive a region.
  void clear() {
    if (has_casts_without_gradient_) {
      keep_memory();
    }
    const std::vector<Copy> removed = thread_local_casts_.take_all();
    std::vector<Copy> removed_leaves;  // destroyed after the lock is released
    std::lock_guard<std::mutex> guard(lock_);
    removed_leaves = held_leaves_.take_all();
  }

  size_t size() {
    std::lock_guard<std::mutex> guard(lock_);
    return thread_local_casts_.size() + held_leaves_.size() + held_copies_.size();
  }

 private:
  // Passes the memory of casts without a gradient to the next region.
  void keep_memory() {
    std::vector<const at::Tensor*> casts;
    for (const auto& [key, copy] : thread_local_casts_) {
      if (!copy.has_gradient()) {
        casts.push_back(&copy.cast);
      }
    }
    has_casts_without_gradient_ = false;
    SpareMemory::all().keep(casts, first_round_);
  }

  CopyTable thread_local_casts_;
  CopyTable held_leaves_;  // with a gradient, until the outermost region ends
  CopyTable held_copies_;  // without one; they outlive regions
  std::mutex lock_;
  bool has_casts_without_gradient_ = false;  // in `thread_local_casts_`
  uint64_t first_round_ = 0;                 // the round of spare memory when the first copy was made
};

}  // namespace precast
