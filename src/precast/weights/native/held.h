// A held copy in compiled kernels: they update it after a step of its parameter's optimizer, and make a cast of it with
// a gradient.
//
// Invariants:
// - a copy is owned by Python (`weights/held_copy.py`) or lent to kernels, and used by one of them at a time. Python
//   takes it back before any change, and lends it only if nothing that only Python knows prevents that;
// - kernels update a lent copy by the reference's rules: in place, at its next use, and only if it has no other user;
// - the samples are written while no kernel has the copy: it was evicted before, or is lent and in use;
// - nothing here keeps a parameter alive, except a recorded graph;
// - gradients are float32 and in the parameter's layout, unless its `grad_dtype` is the copy's dtype. Each region adds a
//   node, so the gradients of several regions are summed in float32, as in PyTorch.
#pragma once

#include "copies.h"
#include "samples.h"

#include <torch/library.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace precast {

struct ThreadState;

// Reusable CPU memory for one parameter's gradient, free once the gradient of the last step is released.
class GradientMemory {
 public:
  // An uninitialised tensor of that layout and dtype, with the shape of a gradient.
  at::Tensor like(const at::Tensor& gradient, at::IntArrayRef layout, at::ScalarType dtype);

 private:
  at::Tensor own_;
};

class HeldCopy : public std::enable_shared_from_this<HeldCopy> {
 public:
  HeldCopy(const c10::TensorImpl* source, at::ScalarType dtype) : source_(source), dtype_(dtype) {}

  HeldRecord record;
  GradientMemory memory;
  Samples samples;  // of the parameter, from before the last write of the copy

  // Lets this thread's kernels use and update it, until Python takes it back.
  void lend(const at::Tensor& parameter, const at::Tensor& copy);

  // Returns it to Python; false while a kernel is using it.
  bool take_back();

  // After an optimizer's step: makes a lent copy stale and evicts its casts; false if it is not lent.
  bool step(std::vector<Copy>& removed);

  // The up-to-date cast of the parameter for this region; undefined if Python has to make it.
  at::Tensor cast_for(ThreadState& here, const at::Tensor& parameter);

  // False if the parameter, whose version and memory are those of the copy, has or may have been written. The copy must
  // then be rewritten.
  bool is_current(const c10::TensorImpl& parameter);

  // Removes its casts in all threads; the caller destroys them.
  void evict(Eviction which, uint32_t version, std::vector<Copy>& removed) const;

 private:
  bool may_have_been_written(const c10::TensorImpl& parameter) const;
  bool renew(const at::Tensor& parameter);

  const c10::TensorImpl* const source_;
  const at::ScalarType dtype_;
  at::Tensor copy_;
  std::optional<SourceSnapshot> lent_source_;  // the parameter's memory when the copy was lent
};

// A held parameter in compiled kernels.
class HeldSource {
 public:
  std::atomic<bool> is_cast_per_region{false};  // small: each region casts it, as if it were not held

  std::shared_ptr<HeldCopy> copy_in(at::ScalarType dtype) {
    std::lock_guard<std::mutex> guard(lock());
    return dtype == dtype_ ? copy_.lock() : nullptr;
  }

  void set(at::ScalarType dtype, std::weak_ptr<HeldCopy> copy) {
    std::lock_guard<std::mutex> guard(lock());
    dtype_ = dtype;
    copy_.swap(copy);  // the earlier one is released without the lock
  }

  // One lock for all, which a fork can hold.
  static std::mutex& lock() {
    static auto* all = new std::mutex;
    return *all;
  }

 private:
  at::ScalarType dtype_ = at::ScalarType::Undefined;
  std::weak_ptr<HeldCopy> copy_;
};

// A tensor that Python passes as the address of its TensorImpl.
inline at::Tensor tensor_of(void* address) {
  auto* impl = static_cast<c10::TensorImpl*>(address);
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
}

// The copy as a cast of the parameter, whose gradient flows to the parameter in float32 and in its layout.
at::Tensor with_gradient(const at::Tensor& parameter, const at::Tensor& copy, std::shared_ptr<HeldCopy> held);

// The lock of the memory that gradients use.
std::mutex& gradient_memory_lock();

// Defines the operations of this file.
void define_held_operations(torch::Library& library);

// True if forward-mode derivatives are computed, so that a tensor may have a tangent.
bool in_forward_mode();

}  // namespace precast
