// The copies of one thread: what a weight was like when it was cast, and the cast.
//
// Invariants:
// - a copy stands for its source while the source has the version counter, the memory, the shape and the strides that
//   it had when it was cast. This is the condition of `weights/freshness.py`;
// - a copy refers to its source's storage weakly. The memory of that object is not given out again while there is a
//   reference, so a storage that is found at the same address is the same storage;
// - a copy that carries a gradient holds its source through its graph, so no other tensor can have the source's address.
//   Copies that carry none belong to held parameters, and end when the parameter does;
// - `own` is used by its thread alone. `held` is emptied by other threads too, so it has a lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <mutex>

namespace precast {

// In which circumstances a copy is used.
enum class Use : uint8_t {
  Leaf = 0,        // it carries a gradient, for this region
  PerRegion = 1,   // a held copy of a frozen weight where gradients are recorded, for this region
  Persistent = 2,  // a held copy where no gradient is recorded; it outlives regions
};

struct Key {
  const c10::TensorImpl* source;
  at::ScalarType dtype;
  Use use;

  bool operator==(const Key& other) const {
    return source == other.source && dtype == other.dtype && use == other.use;
  }
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    const auto address = reinterpret_cast<uintptr_t>(key.source);
    return (address >> 4) * 31 + static_cast<size_t>(key.dtype) * 4 + static_cast<size_t>(key.use);
  }
};

// What a source was like when it was cast.
class Notes {
 public:
  explicit Notes(const at::Tensor& source)
      : storage_(source.storage().getWeakStorageImpl()),
        data_(source.storage().data()),
        offset_(source.storage_offset()),
        version_(source.unsafeGetTensorImpl()->version_counter().current_version()),
        sizes_(source.sizes().begin(), source.sizes().end()),
        strides_(source.strides().begin(), source.strides().end()) {}

  // For a copy that was made earlier, when the source had this version and address.
  Notes(const at::Tensor& source, uint32_t version, const void* address) : Notes(source) {
    if (source.const_data_ptr() != address) {
      data_ = nullptr;
      offset_ = -1;  // nothing lies there
    }
    version_ = version;
  }

  bool is_fresh_for(const c10::TensorImpl& source) const {
    return source.version_counter().current_version() == version_ && is_place_of(source);
  }

  // The same, whatever was written there.
  bool is_place_of(const c10::TensorImpl& source) const {
    const c10::StorageImpl* storage = source.unsafe_storage().unsafeGetStorageImpl();
    return storage == storage_._unsafe_get_target() && storage->data() == data_ && source.storage_offset() == offset_ &&
        source.sizes() == c10::IntArrayRef(sizes_) && source.strides() == c10::IntArrayRef(strides_);
  }

  uint32_t version() const {
    return version_;
  }

  void make_stale() {
    offset_ = -1;
  }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const void* data_;
  int64_t offset_;
  uint32_t version_;
  c10::SmallVector<int64_t, 4> sizes_, strides_;
};

struct Copy {
  Notes notes;
  at::Tensor cast;
  int64_t held = 0;  // the number of the held copy that it stands for
};

// Which entries of a held copy are to go.
enum class Evicted : int { All = 0, Persistent = 1, PersistentAndOlder = 2 };

class Copies {
  using Table = ska::flat_hash_map<Key, Copy, KeyHash>;

 public:
  // The copy of a source, or nothing where there is none or it is out of date.
  at::Tensor find(const c10::TensorImpl& source, at::ScalarType dtype) const {
    return found(own_, {&source, dtype, Use::Leaf});
  }

  at::Tensor find_held(const c10::TensorImpl& source, at::ScalarType dtype, Use use) {
    std::lock_guard<std::mutex> guard(lock_);
    return found(held_, {&source, dtype, use});
  }

  void put(const at::Tensor& source, at::ScalarType dtype, Copy copy) {
    own_.insert_or_assign(Key{source.unsafeGetTensorImpl(), dtype, Use::Leaf}, std::move(copy));
  }

  void put_held(const at::Tensor& source, at::ScalarType dtype, Use use, Copy copy) {
    at::Tensor before;  // freed when the lock is, as that may call anything
    std::lock_guard<std::mutex> guard(lock_);
    const Key key{source.unsafeGetTensorImpl(), dtype, use};
    const auto known = held_.find(key);
    if (known != held_.end()) {
      before = std::move(known->second.cast);
      known->second = std::move(copy);
    } else {
      held_.insert({key, std::move(copy)});
    }
  }

  void forget(const c10::TensorImpl& source, at::ScalarType dtype) {
    own_.erase(Key{&source, dtype, Use::Leaf});
  }

  // Makes the copies of a source, in one dtype or (-1) in all, out of date, whatever version counters say.
  void invalidate(const c10::TensorImpl& source, int dtype) {
    const auto make_stale = [&](Table& table) {
      for (auto& [key, copy] : table) {
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
      const auto known = held_.find({source, dtype, use});
      if (known == held_.end() || known->second.held != held) {
        continue;
      }
      if (which == Evicted::All || use == Use::Persistent ||
          (which == Evicted::PersistentAndOlder && known->second.notes.version() != version)) {
        gone.push_back(std::move(known->second));
        held_.erase(known);
      }
    }
  }

  // Drops what does not outlive a region.
  void clear() {
    decltype(own_) own;
    own.swap(own_);
    std::vector<Copy> gone;
    std::lock_guard<std::mutex> guard(lock_);
    for (auto item = held_.begin(); item != held_.end();) {
      if (item->first.use != Use::Persistent) {
        gone.push_back(std::move(item->second));
        item = held_.erase(item);
      } else {
        ++item;
      }
    }
  }

  size_t size() {
    std::lock_guard<std::mutex> guard(lock_);
    return own_.size() + held_.size();
  }

 private:
  static at::Tensor found(const Table& table, const Key& key) {
    const auto known = table.find(key);
    return known != table.end() && known->second.notes.is_fresh_for(*key.source) ? known->second.cast : at::Tensor();
  }

  Table own_, held_;
  std::mutex lock_;
};

}  // namespace precast
