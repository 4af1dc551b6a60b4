// A held copy as the kernels see it: they renew it when an optimizer has stepped its parameter, and make a cast of it that
// carries the gradient.
//
// Invariants:
// - a copy is Python's (`weights/held_copy.py`) or lent to the kernels, and in use by one of the two at a time. Python
//   takes it back before it changes anything, and lends it only where all that Python alone knows allows it;
// - kernels renew a lent copy by the rules of the reference: in place, at its next use, and only while nobody reads it;
// - nothing here keeps a parameter alive, but for a graph that was recorded, as any graph does;
// - gradients are as `weights/held_gradients.py` gives them, bit for bit and in the same layout.
#pragma once

#include "copies.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace precast {

struct ThreadState;

enum class Owner : int32_t { Python = 0, Lent = 1, InUse = 2 };

// What Python and the kernels both know of a copy; Python reads and writes it in place (`weights/held_record.py`).
struct HeldRecord {
  int64_t version = -1;            // the parameter's when it was copied; -1 for a copy that has to be renewed
  int64_t address = -1;            // where the parameter lay then
  int64_t writes = 0;              // how often the copy was written
  std::atomic<int64_t> received{0};  // gradients that have come through casts of it
  int64_t received_then = 0;       // how many had come when it was written
  int64_t had_gradient = 0;        // whether the parameter had a gradient then
  int64_t is_kernels = 0;          // whether kernels wrote it last
  uint64_t thread = 0;             // which thread's kernels it is lent to
  std::atomic<Owner> owner{Owner::Python};
};

// Memory of one parameter's gradient on the CPU, used again once the gradient of the last step is gone.
class GradientMemory {
 public:
  // An uninitialised tensor of that layout and dtype, for the shape of a gradient.
  at::Tensor like(const at::Tensor& gradient, at::IntArrayRef layout, at::ScalarType dtype);

 private:
  at::Tensor own_;
};

class HeldCopy : public std::enable_shared_from_this<HeldCopy> {
 public:
  explicit HeldCopy(int64_t number) : number_(number) {}

  HeldRecord record;
  GradientMemory memory;

  // From now on this thread's kernels may use and renew it, until Python takes it back.
  void lend(const at::Tensor& parameter, const at::Tensor& copy);

  // Back to Python: false where kernels are using it at this moment.
  bool take_back();

  // After an optimizer's step: a lent copy is out of date, and what stood for it is dropped; false where it is not lent.
  bool step(std::vector<Copy>& gone);

  // The cast of the parameter for this region, of a copy that is up to date; undefined where Python has to give it.
  at::Tensor cast_for(ThreadState& here, const at::Tensor& parameter);

 private:
  bool is_written_unseen(bool has_gradient) const;
  bool renew(const at::Tensor& parameter, bool has_gradient);

  const int64_t number_;
  at::Tensor copy_;
  std::optional<Notes> place_;  // where the parameter lay when the copy was lent
  const c10::TensorImpl* source_ = nullptr;
};

// What is held of one parameter, for kernels.
class HeldSource {
 public:
  std::atomic<bool> is_left_to_regions{false};  // it is so small that each region casts it, as if it were not held

  std::shared_ptr<HeldCopy> copy_in(at::ScalarType dtype) {
    std::lock_guard<std::mutex> guard(lock_);
    return dtype == dtype_ ? copy_.lock() : nullptr;
  }

  void set(at::ScalarType dtype, std::weak_ptr<HeldCopy> copy) {
    std::lock_guard<std::mutex> guard(lock_);
    dtype_ = dtype;
    copy_ = std::move(copy);
  }

 private:
  std::mutex lock_;
  at::ScalarType dtype_ = at::ScalarType::Undefined;
  std::weak_ptr<HeldCopy> copy_;
};

// The copy as a cast of the parameter: its gradient is the parameter's, in float32 and in its layout.
at::Tensor with_gradient(const at::Tensor& parameter, const at::Tensor& copy, std::shared_ptr<HeldCopy> held);

// `target.copy_(source)`.
void write(const at::Tensor& target, const at::Tensor& source);

// Whether derivatives are computed forward, so that a tensor may have a tangent.
bool in_forward_mode();

// Drops what stands for a held copy, in all threads; the caller frees it.
void evict_everywhere(
    const c10::TensorImpl* source,
    at::ScalarType dtype,
    int64_t held,
    Evicted which,
    uint32_t version,
    std::vector<Copy>& gone);

}  // namespace precast
