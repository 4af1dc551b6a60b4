// Values of a weight that are recorded before it is cast, to find writes that its version counter does not count.
//
// Invariants (the same as in `weights/samples.py`):
// - there is one position in each of `kRecorded` equal parts of the weight, from a fixed sequence that no generator of
//   PyTorch uses. Every second position is preferably one of a value that is not zero;
// - a check compares `kCompared` values, one in each eighth of the weight; the next check compares others. A weight with
//   at most `kRecorded` elements is compared as a whole;
// - only weights on the CPU have samples: elsewhere a comparison would wait;
// - nothing outside of the storage is read.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <array>
#include <atomic>

namespace precast {

class Samples {
 public:
  void record(const c10::TensorImpl& source) {
    static std::atomic<uint64_t> records{0};
    count_ = 0;
    elements_ = source.numel();
    span_ = span_of(source);
    const uint32_t* data = elements_ > 0 ? data_of(source) : nullptr;
    if (data == nullptr) {
      return;
    }
    uint64_t number = records.fetch_add(1, std::memory_order_relaxed) * kRecorded * kAttempts;
    const bool is_dense = source.is_non_overlapping_and_dense();
    const auto count = static_cast<size_t>(std::min<int64_t>(elements_, kRecorded));
    for (size_t i = 0; i < count; ++i) {
      const Range part = is_whole() ? Range{static_cast<int64_t>(i), 1} : part_of(i);
      const int attempts = i % 2 == 0 || part.size == 1 ? 1 : kAttempts;
      for (int attempt = 0; attempt < attempts; ++attempt) {
        const int64_t position = part.start + static_cast<int64_t>(mixed(number++) % static_cast<uint64_t>(part.size));
        offsets_[i] = is_dense ? position : offset_of(source, position);
        values_[i] = data[offsets_[i]];
        if ((values_[i] << 1) != 0) {
          break;  // neither 0 nor -0
        }
      }
    }
    count_ = count;
  }

  // True if the next values are those of the source, or all values if `compares_all`. The source must have the shape and
  // strides that it had in `record`.
  bool match(const c10::TensorImpl& source, bool compares_all) {
    if (count_ == 0) {
      return true;
    }
    const uint32_t* data = data_of(source);
    if (data == nullptr) {
      return false;
    }
    const uint32_t turn = turn_.load(std::memory_order_relaxed);
    turn_.store(turn + 1, std::memory_order_relaxed);
    const bool all = compares_all || is_whole();
    const size_t first = all ? 0 : turn % kRounds * kCompared, end = all ? count_ : first + kCompared;
    uint32_t difference = 0;
    for (size_t i = first; i < end; ++i) {
      difference |= data[offsets_[i]] ^ values_[i];
    }
    return difference == 0;
  }

 private:
  static constexpr size_t kRecorded = 32, kCompared = 8, kRounds = kRecorded / kCompared;
  static constexpr int kAttempts = 8;

  struct Range {
    int64_t start, size;
  };

  bool is_whole() const {
    return elements_ <= static_cast<int64_t>(kRecorded);
  }

  // The part of a sample. Those of one check are an eighth of the weight apart.
  Range part_of(size_t sample) const {
    constexpr auto kParts = static_cast<int64_t>(kRecorded);
    const auto part = static_cast<int64_t>(sample % kCompared * kRounds + sample / kCompared);
    const int64_t start = elements_ / kParts * part + elements_ % kParts * part / kParts;
    const int64_t next = elements_ / kParts * (part + 1) + elements_ % kParts * (part + 1) / kParts;
    return {start, next - start};
  }

  // The float32 values as words; null if they cannot be read.
  const uint32_t* data_of(const c10::TensorImpl& source) const {
    if (source.device_type() != c10::DeviceType::CPU || !source.has_storage() ||
        source.dtype() != caffe2::TypeMeta::Make<float>()) {
      return nullptr;
    }
    const c10::StorageImpl* storage = source.unsafe_storage().unsafeGetStorageImpl();
    const auto end = static_cast<size_t>(source.storage_offset() + span_) * sizeof(float);
    const auto* data = static_cast<const uint32_t*>(storage->data());
    return data == nullptr || storage->nbytes() < end ? nullptr : data + source.storage_offset();
  }

  // The number of elements from the first one in memory to the end of the last one.
  static int64_t span_of(const c10::TensorImpl& source) {
    int64_t span = 1;
    for (size_t i = 0; i < source.sizes().size(); ++i) {
      span += (source.sizes()[i] - 1) * source.strides()[i];
    }
    return span;
  }

  static int64_t offset_of(const c10::TensorImpl& source, int64_t position) {
    int64_t offset = 0;
    for (size_t i = source.sizes().size(); i-- > 0;) {
      offset += position % source.sizes()[i] * source.strides()[i];
      position /= source.sizes()[i];
    }
    return offset;
  }

  // SplitMix64: successive numbers give independent ones.
  static uint64_t mixed(uint64_t number) {
    number = (number + 1) * 0x9E3779B97F4A7C15U;
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9U;
    number = (number ^ (number >> 27)) * 0x94D049BB133111EBU;
    return number ^ (number >> 31);
  }

  std::array<int64_t, kRecorded> offsets_{};  // in elements, from the first element
  std::array<uint32_t, kRecorded> values_{};
  size_t count_ = 0;
  int64_t elements_ = 0, span_ = 0;
  std::atomic<uint32_t> turn_{0};
};

}  // namespace precast
