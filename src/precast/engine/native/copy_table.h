// A table of copies by what they are copies of. It is filled and cleared with every region, so it keeps its memory.
//
// Invariants:
// - the entries lie side by side in `entries_`. `places_` is an index of them with open addressing and linear probing: a
//   place has the number of an entry and 1, or 0 where it is free, and at least half of them are free;
// - freeing a copy may run any code, which may use this table: what is removed is freed when the table is whole again.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/SizesAndStrides.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

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

  // The upper bits are mixed best (Knuth's multiplicative hashing, with 2**64 by the golden ratio).
  uint64_t hash() const {
    const auto address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(source)) >> 4;
    return (address * 8 + static_cast<uint64_t>(dtype) * 3 + static_cast<uint64_t>(use)) * 0x9E3779B97F4A7C15U;
  }
};

// What a source was like when it was cast.
class Notes {
 public:
  explicit Notes(const at::Tensor& source)
      : storage_(source.storage().getWeakStorageImpl()),
        data_(source.storage().data()),
        offset_(source.storage_offset()),
        version_(source.unsafeGetTensorImpl()->version_counter().current_version()) {
    shape_.set_sizes(source.sizes());
    shape_.set_strides(source.strides());
  }

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
        source.sizes() == shape_.sizes_arrayref() && source.strides() == shape_.strides_arrayref();
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
  Notes notes;
  at::Tensor cast;
  int64_t held = 0;   // the number of the held copy that it stands for
  at::Tensor source;  // of a copy without a gradient that is not held: kept alive, as a graph would

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

  // Adds a copy of what has none here.
  void insert(const Key& key, Copy&& copy) {
    if (2 * (entries_.size() + 1) > places_.size()) {
      index_anew(places_.empty() ? kFewest : 2 * places_.size());
    }
    entries_.emplace_back(key, std::move(copy));
    occupy(key, entries_.size());
  }

  // Takes out the copy of a key, if there is one.
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

  // Takes out all copies whose key satisfies a condition; the caller frees them.
  template <typename Condition>
  void take(const Condition& condition, std::vector<Copy>& taken) {
    const auto is_kept = [&](const Entry& entry) { return !condition(entry.key); };
    const auto first = std::stable_partition(entries_.begin(), entries_.end(), is_kept);
    if (first == entries_.end()) {
      return;
    }
    for (auto entry = first; entry != entries_.end(); ++entry) {
      taken.push_back(std::move(entry->copy));
    }
    entries_.erase(first, entries_.end());
    index_anew(places_.size());
  }

  void clear() {
    if (entries_.empty()) {
      return;
    }
    std::vector<Entry> gone;
    gone.swap(entries_);
    std::fill(places_.begin(), places_.end(), 0);
    gone.clear();
    if (gone.capacity() > kMostKept) {
      gone.shrink_to_fit();
    }
    if (entries_.capacity() == 0) {
      entries_.swap(gone);
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
  static constexpr size_t kMostKept = 4096;  // entries whose memory a table keeps, about 200 bytes each

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

  // Frees a place, and moves those after it that would no longer be found.
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

  void index_anew(size_t size) {
    places_.assign(size, 0);
    for (size_t number = 1; number <= entries_.size(); ++number) {
      occupy(entries_[number - 1].key, number);
    }
  }

  std::vector<Entry> entries_;
  std::vector<uint32_t> places_;
};

}  // namespace precast
