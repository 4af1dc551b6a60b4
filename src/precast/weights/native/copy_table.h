// A hash table of casts by source. It is filled and cleared in every region, so it keeps its memory.
//
// Invariant: freeing a cast can run arbitrary code that uses this table. So removed casts are moved out, and destroyed
// when the table is consistent.
#pragma once

#include "boundary.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/SizesAndStrides.h>
#include <c10/util/flat_hash_map.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace precast {

class HeldCopy;

struct Key {
  const c10::TensorImpl* source;
  at::ScalarType dtype;

  bool operator==(const Key& other) const {
    return source == other.source && dtype == other.dtype;
  }

  // For `ska::flat_hash_map`, which mixes the bits.
  struct Hash {
    size_t operator()(const Key& key) const {
      return (reinterpret_cast<uintptr_t>(key.source) >> 1) + static_cast<size_t>(key.dtype);
    }
  };
};

// Version counter, storage, offset, shape and strides of a source when it was cast.
class SourceSnapshot {
 public:
  explicit SourceSnapshot(const at::Tensor& source)
      : storage_(source.storage().getWeakStorageImpl()),
        data_(source.storage().data()),
        offset_(source.storage_offset()),
        version_(source.unsafeGetTensorImpl()->version_counter().current_version()) {
    if (!source.is_nested()) {  // a nested tensor has none, and no operation changes its shape in place
      shape_.set_sizes(source.sizes());
      shape_.set_strides(source.strides());
    }
  }

  // For a copy that was made earlier, when the source had this version and address.
  SourceSnapshot(const at::Tensor& source, uint32_t version, const void* address) : SourceSnapshot(source) {
    if (source.const_data_ptr() != address) {
      data_ = nullptr;
      offset_ = -1;  // matches no source
    }
    version_ = version;
  }

  bool is_valid_for(const c10::TensorImpl& source) const {
    return source.version_counter().current_version() == version_ && has_same_memory(source);
  }

  // The same without the version counter.
  bool has_same_memory(const c10::TensorImpl& source) const {
    const c10::StorageImpl* storage = source.unsafe_storage().unsafeGetStorageImpl();
    return storage == storage_._unsafe_get_target() && storage->data() == data_ && source.storage_offset() == offset_ &&
        (source.is_nested() ||
         (source.sizes() == shape_.sizes_arrayref() && source.strides() == shape_.strides_arrayref()));
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
  c10::impl::SizesAndStrides shape_;
};

struct Copy {
  SourceSnapshot snapshot;
  at::Tensor cast;
  std::shared_ptr<HeldCopy> held;  // null for a cast that is not held
  at::Tensor source;               // of a cast without a gradient that is not held: kept alive, as a graph would do

  bool has_gradient() const {
    return !source.defined();
  }
};

class CopyTable {
 public:
  Copy* find(const Key& key) {
    const auto entry = copies_.find(key);
    return entry == copies_.end() ? nullptr : &entry->second;
  }

  // Returns the replaced copy.
  std::optional<Copy> put(const Key& key, Copy&& copy) {
    if (Copy* entry = find(key)) {
      return std::exchange(*entry, std::move(copy));
    }
    copies_.emplace(key, std::move(copy));
    return std::nullopt;
  }

  // Removes the copy of a key, if there is one.
  std::optional<Copy> remove(const Key& key) {
    const auto entry = copies_.find(key);
    if (entry == copies_.end()) {
      return std::nullopt;
    }
    std::optional<Copy> removed = std::move(entry->second);
    copies_.erase(entry);
    return removed;
  }

  // Removes all copies; the caller destroys them.
  std::vector<Copy> take_all() {
    std::vector<Copy> taken;
    if (!copies_.empty()) {
      taken.reserve(copies_.size());
      for (auto& [key, copy] : copies_) {
        taken.push_back(std::move(copy));
      }
      copies_.clear();
      if (copies_.bucket_count() > kMostKept) {
        copies_ = {};
      }
    }
    return taken;
  }

  auto begin() {
    return copies_.begin();
  }

  auto end() {
    return copies_.end();
  }

  size_t size() const {
    return copies_.size();
  }

 private:
  static constexpr size_t kMostKept = 8192;  // places that stay allocated, of about 200 bytes

  ska::flat_hash_map<Key, Copy, Key::Hash> copies_;
};

}  // namespace precast
