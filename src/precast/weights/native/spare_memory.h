// Memory of casts from previous regions, reused by the next: a model that infers in successive regions casts the same
// weights again and again.
//
// The CPU allocator returns blocks of this size to the operating system, which clears each page again: that takes half
// of a forward pass of one token, or more. On accelerators, PyTorch's allocators cache memory themselves.
//
// Invariants:
// - only where no gradients are recorded: a region that records them frees the memory, because it needs it otherwise;
// - memory that the last region has used is kept. Memory that was unused during a whole region is freed at its end;
// - memory is kept only if nothing else references it, and only if it comes from the CPU allocator;
// - nothing is freed while the lock is held: freeing can run arbitrary code.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace precast {

class SpareMemory {
 public:
  // Smaller copies are cheap to allocate: the C library has lists of such blocks.
  static constexpr size_t kFewestBytes = size_t{64} << 10;

  static SpareMemory& all() {
    static auto* memory = new SpareMemory;  // never freed: objects destroyed late in the process may use it
    return *memory;
  }

  // True if a copy of a source may use such memory: the source is dense and large enough.
  static bool is_for(const c10::TensorImpl& source, at::ScalarType dtype) {
    return source.device_type() == c10::DeviceType::CPU && source.is_non_overlapping_and_dense() &&
        bytes_of(source, dtype) >= kFewestBytes;
  }

  // An uninitialised tensor like the source in another dtype; nothing if there is no spare memory of its size.
  std::optional<at::Tensor> like(const c10::TensorImpl& source, at::ScalarType dtype) {
    const size_t bytes = bytes_of(source, dtype);
    at::DataPtr memory = take(bytes);
    if (!memory) {
      return std::nullopt;
    }
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), bytes, std::move(memory), c10::GetCPUAllocator(), /*resizable=*/true);
    auto impl = c10::make_intrusive<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
    impl->set_sizes_and_strides(source.sizes(), source.strides());
    return at::Tensor(std::move(impl));
  }

  // The number of regions that have left memory here; a region reads it at its first cast.
  uint64_t round() const {
    return round_.load(std::memory_order_relaxed);
  }

  // Keeps the memory of a region's copies at its end, and frees memory that is unused since before `begun`.
  void keep(const std::vector<const at::Tensor*>& copies, uint64_t begun) {
    std::vector<Block> removed;
    std::lock_guard<std::mutex> guard(lock_);
    const uint64_t now = round_.fetch_add(1, std::memory_order_relaxed) + 1;
    for (auto& [bytes, blocks] : blocks_) {
      const auto has_waited = [&](const Block& block) { return block.round <= begun; };
      const auto first = std::partition(blocks.begin(), blocks.end(), std::not_fn(has_waited));
      std::move(first, blocks.end(), std::back_inserter(removed));
      blocks.erase(first, blocks.end());
    }
    for (const at::Tensor* copy : copies) {
      c10::Storage storage = copy->storage();
      const bool is_free = copy->use_count() == 1 && storage.use_count() == 2;  // of which one is `storage`
      const bool is_useful = copy->device().is_cpu() && storage.nbytes() >= kFewestBytes;
      if (is_free && is_useful && storage.data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter()) {
        at::DataPtr nothing(nullptr, c10::Device(c10::DeviceType::CPU));
        blocks_[storage.nbytes()].push_back({storage.set_data_ptr(std::move(nothing)), now});
      }
    }
    count();
  }

  void free() {
    if (any_.load(std::memory_order_relaxed)) {
      decltype(blocks_) removed;
      std::lock_guard<std::mutex> guard(lock_);
      removed.swap(blocks_);
      count();
    }
  }

  // Bytes of spare memory.
  size_t bytes() {
    std::lock_guard<std::mutex> guard(lock_);
    size_t sum = 0;
    for (const auto& [bytes, blocks] : blocks_) {
      sum += bytes * blocks.size();
    }
    return sum;
  }

  std::mutex& lock() {
    return lock_;
  }

 private:
  struct Block {
    at::DataPtr memory;
    uint64_t round;  // in which it was kept
  };

  static size_t bytes_of(const c10::TensorImpl& source, at::ScalarType dtype) {
    return static_cast<size_t>(source.numel()) * c10::elementSize(dtype);
  }

  at::DataPtr take(size_t bytes) {
    if (!any_.load(std::memory_order_relaxed)) {
      return {};
    }
    std::lock_guard<std::mutex> guard(lock_);
    const auto entry = blocks_.find(bytes);
    if (entry == blocks_.end() || entry->second.empty()) {
      return {};
    }
    at::DataPtr memory = std::move(entry->second.back().memory);
    entry->second.pop_back();
    return memory;
  }

  // Removes empty lists.
  void count() {
    for (auto entry = blocks_.begin(); entry != blocks_.end();) {
      entry = entry->second.empty() ? blocks_.erase(entry) : std::next(entry);
    }
    any_.store(!blocks_.empty(), std::memory_order_relaxed);
  }

  std::map<size_t, std::vector<Block>> blocks_;  // by their number of bytes
  std::mutex lock_;
  std::atomic<bool> any_{false};
  std::atomic<uint64_t> round_{0};
};

}  // namespace precast
