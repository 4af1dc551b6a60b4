// A hash table of casts by source. It is filled and cleared in every region, so it keeps its memory.
//
// Invariants:
// - `entries_` is contiguous. `places_` is its index, with open addressing and linear probing: a place contains the
//   index of an entry plus 1, or 0 if it is free, and at least half of them are free;
// - freeing a cast can run arbitrary code that uses this table: removed casts are destroyed when the table is
//   consistent.
#pragma once

#include "boundary.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/SizesAndStrides.h>

#include <algorithm>
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

  // The upper bits are mixed best (Knuth's multiplicative hashing: 2**64 divided by the golden ratio).
  uint64_t hash() const {
    const auto address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(source)) >> 4;
    return (address * 8 + static_cast<uint64_t>(dtype)) * 0x9E3779B97F4A7C15U;
  }
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
  struct Entry {
    Entry(const Key& key, Copy&& copy) : key(key), copy(std::move(copy)) {}

    Key key;
    Copy copy;
  };

  const Copy* find(const Key& key) const {
    const size_t place = place_of(key);
    return place == kNone ? nullptr : &entries_[places_[place] - 1].copy;
  }

  Copy* find(const Key& key) {
    return const_cast<Copy*>(std::as_const(*this).find(key));
  }

  // Adds a copy for a key without one.
  void insert(const Key& key, Copy&& copy) {
    if (2 * (entries_.size() + 1) > places_.size()) {
      rebuild_index(places_.empty() ? kFewest : 2 * places_.size());
    }
    entries_.emplace_back(key, std::move(copy));
    occupy(key, entries_.size());
  }

  // Removes the copy of a key, if there is one.
  std::optional<Copy> remove(const Key& key) {
    const size_t place = place_of(key);
    if (place == kNone) {
      return std::nullopt;
    }
    const uint32_t number = places_[place];
    vacate(place);
    std::optional<Copy> removed = std::move(entries_[number - 1].copy);
    if (number < entries_.size()) {
      places_[place_of(entries_.back().key)] = number;
      entries_[number - 1] = std::move(entries_.back());
    }
    entries_.pop_back();
    return removed;
  }

  // Removes all copies; the caller destroys them.
  void take_all(std::vector<Copy>& taken) {
    if (entries_.empty()) {
      return;
    }
    for (Entry& entry : entries_) {
      taken.push_back(std::move(entry.copy));
    }
    entries_.clear();
    std::fill(places_.begin(), places_.end(), 0);
  }

  void clear() {
    if (entries_.empty()) {
      return;
    }
    std::vector<Entry> removed;
    removed.swap(entries_);
    std::fill(places_.begin(), places_.end(), 0);
    removed.clear();
    if (removed.capacity() > kMostKept) {
      removed.shrink_to_fit();
    }
    if (entries_.capacity() == 0) {
      entries_.swap(removed);
    }
  }

  std::vector<Entry>& entries() {
    return entries_;
  }

  size_t size() const {
    return entries_.size();
  }

 private:
  static constexpr size_t kNone = SIZE_MAX, kFewest = 64;
  static constexpr size_t kMostKept = 4096;  // capacity that `clear` keeps, about 200 bytes per entry

  size_t first_place(const Key& key) const {
    return (key.hash() >> 32) & (places_.size() - 1);
  }

  size_t place_of(const Key& key) const {
    if (entries_.empty()) {
      return kNone;
    }
    for (size_t place = first_place(key);; place = (place + 1) & (places_.size() - 1)) {
      if (places_[place] == 0) {
        return kNone;
      }
      if (entries_[places_[place] - 1].key == key) {
        return place;
      }
    }
  }

  void occupy(const Key& key, size_t number) {
    size_t place = first_place(key);
    while (places_[place] != 0) {
      place = (place + 1) & (places_.size() - 1);
    }
    places_[place] = static_cast<uint32_t>(number);
  }

  // Frees a place, and moves later entries that would no longer be found.
  void vacate(size_t place) {
    const size_t mask = places_.size() - 1;
    for (size_t next = (place + 1) & mask; places_[next] != 0; next = (next + 1) & mask) {
      const size_t wanted = first_place(entries_[places_[next] - 1].key);
      if (((next - wanted) & mask) >= ((next - place) & mask)) {
        places_[place] = places_[next];
        place = next;
      }
    }
    places_[place] = 0;
  }

  void rebuild_index(size_t size) {
    places_.assign(size, 0);
    for (size_t number = 1; number <= entries_.size(); ++number) {
      occupy(entries_[number - 1].key, number);
    }
  }

  std::vector<Entry> entries_;
  std::vector<uint32_t> places_;
};

}  // namespace precast
