// Memory of copies that a region has left behind, for those of the next: a model that infers in one region after another
// casts the same weights again and again.
//
// The CPU's allocator gives memory of this size back to the operating system, which clears each page anew: of a forward
// pass of one token that is half of the time and more. On accelerators, PyTorch's allocators keep it themselves.
//
// Invariants:
// - only where no gradients are recorded: a region that records them frees what is kept, as it needs memory for others;
// - what is kept is what the last region to end has used, or had taken and left: memory that waited while a whole region
//   went by and was not taken is freed when that region ends;
// - memory is kept only if nothing else refers to it, and only if it is the CPU allocator's own;
// - nothing is freed while the lock is held: that may call anything.
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
    static auto* memory = new SpareMemory;  // never freed: what ends late in the process may still ask
    return *memory;
  }

  // Whether a copy of a source may lie in such memory: it is laid out as the source, without holes.
  static bool is_for(const c10::TensorImpl& source, at::ScalarType dtype) {
    return source.device_type() == c10::DeviceType::CPU && source.is_non_overlapping_and_dense() &&
        bytes_of(source, dtype) >= kFewestBytes;
  }

  // A tensor like the source in another dtype, with any numbers in it; or nothing where no memory of its size waits.
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

  // How many regions have left memory here: a region asks when it begins to cast.
  uint64_t round() const {
    return round_.load(std::memory_order_relaxed);
  }

  // Keeps the memory of copies that end with a region, and frees what has waited since before `begun`.
  void keep(const std::vector<const at::Tensor*>& copies, uint64_t begun) {
    std::vector<Block> gone;
    std::lock_guard<std::mutex> guard(lock_);
    const uint64_t now = round_.fetch_add(1, std::memory_order_relaxed) + 1;
    for (auto& [bytes, blocks] : blocks_) {
      const auto has_waited = [&](const Block& block) { return block.round <= begun; };
      const auto first = std::partition(blocks.begin(), blocks.end(), std::not_fn(has_waited));
      std::move(first, blocks.end(), std::back_inserter(gone));
      blocks.erase(first, blocks.end());
    }
    for (const at::Tensor* copy : copies) {
      c10::Storage storage = copy->storage();
      const bool is_free = copy->use_count() == 1 && storage.use_count() == 2;  // of which one is `storage`
      if (is_free && storage.data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter()) {
        at::DataPtr nothing(nullptr, c10::Device(c10::DeviceType::CPU));
        blocks_[storage.nbytes()].push_back({storage.set_data_ptr(std::move(nothing)), now});
      }
    }
    count();
  }

  void free() {
    if (any_.load(std::memory_order_relaxed)) {
      decltype(blocks_) gone;
      std::lock_guard<std::mutex> guard(lock_);
      gone.swap(blocks_);
      count();
    }
  }

  // How much is kept.
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
    uint64_t round;  // after which it was left
  };

  static size_t bytes_of(const c10::TensorImpl& source, at::ScalarType dtype) {
    return static_cast<size_t>(source.numel()) * c10::elementSize(dtype);
  }

  at::DataPtr take(size_t bytes) {
    if (!any_.load(std::memory_order_relaxed)) {
      return {};
    }
    std::lock_guard<std::mutex> guard(lock_);
    const auto known = blocks_.find(bytes);
    if (known == blocks_.end() || known->second.empty()) {
      return {};
    }
    at::DataPtr memory = std::move(known->second.back().memory);
    known->second.pop_back();
    return memory;
  }

  // Forgets sizes of which nothing is left.
  void count() {
    for (auto known = blocks_.begin(); known != blocks_.end();) {
      known = known->second.empty() ? blocks_.erase(known) : std::next(known);
    }
    any_.store(!blocks_.empty(), std::memory_order_relaxed);
  }

  std::map<size_t, std::vector<Block>> blocks_;  // by their number of bytes
  std::mutex lock_;
  std::atomic<bool> any_{false};
  std::atomic<uint64_t> round_{0};
};

}  // namespace precast
