// Held copies in compiled kernels: their update after a step, and the autograd node of their casts. See held.h.
#include "held.h"

#include "cast_node.h"
#include "exported.h"
#include "promotion.h"
#include "state.h"
#include "torch_api.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <pthread.h>

#include <map>

namespace precast {

bool in_forward_mode() {
  return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

namespace {

using torch::autograd::variable_list;

at::Tensor empty_like(const at::Tensor& gradient, at::IntArrayRef layout, at::ScalarType dtype) {
  static const auto empty = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("aten::empty_strided", "")
                                .typed<at::Tensor(
                                    c10::SymIntArrayRef,
                                    c10::SymIntArrayRef,
                                    std::optional<at::ScalarType>,
                                    std::optional<at::Layout>,
                                    std::optional<at::Device>,
                                    std::optional<bool>)>();
  return empty.call(
      c10::fromIntArrayRefSlow(gradient.sizes()),
      c10::fromIntArrayRefSlow(layout),
      dtype,
      std::nullopt,
      gradient.device(),
      std::nullopt);
}

bool is_shared(const at::Tensor& tensor) {
  return tensor.storage().use_count() > 1;
}

// Below the kernels of autograd: nothing is recorded and no version counter moves.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// Memory for gradients that are then added to existing ones. Parameters of one shape share it.
class Temporaries {
  using Kind = std::tuple<std::vector<int64_t>, std::vector<int64_t>, at::ScalarType>;

 public:
  at::Tensor like(const at::Tensor& gradient, at::IntArrayRef layout, at::ScalarType dtype) {
    Kind kind{gradient.sizes().vec(), layout.vec(), dtype};
    at::Tensor memory;
    {
      std::lock_guard<std::mutex> guard(lock);
      const auto spare = spare_.find(kind);
      if (spare != spare_.end()) {
        memory = std::move(spare->second);  // removed, so that two threads never get the same
        spare_.erase(spare);
      }
    }
    if (!memory.defined() || is_shared(memory)) {
      memory = empty_like(gradient, layout, dtype);
    }
    at::Tensor result = detached(memory);
    std::lock_guard<std::mutex> guard(lock);
    std::swap(spare_[std::move(kind)], memory);
    return result;
  }

  void clear() {
    decltype(spare_) removed;
    std::lock_guard<std::mutex> guard(lock);
    removed.swap(spare_);
  }

  std::mutex lock;

 private:
  std::map<Kind, at::Tensor> spare_;
};

Temporaries& temporaries() {
  static auto* instance = new Temporaries;  // never freed: objects destroyed late in the process may use it
  return *instance;
}

// The keys of gradients that are traced, batched or observed by Python.
constexpr c10::DispatchKeySet kSpecialKeys{
    c10::DispatchKey::Python,
    c10::DispatchKey::Functionalize,
    c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::BatchedNestedTensor,
    c10::DispatchKey::Batched};

// True if the cast of a gradient has to be dispatched, because it is recorded, batched or observed.
bool needs_general_cast(const at::Tensor& gradient) {
  const int64_t traces = Process::is_watched.load(std::memory_order_relaxed) ? 1 : 0;  // precast's trace is no obstacle
  return c10::GradMode::is_enabled() || c10::impl::TorchDispatchModeTLS::stack_len() > traces ||
      !(gradient.key_set() & kSpecialKeys).empty();
}

// The autograd node of a held cast. Compiled autograd only traces a cast: it manages layout and memory itself.
class HeldCastBackward final : public CastBackward {
 public:
  HeldCastBackward(
      torch::autograd::edge_list&& next, std::shared_ptr<HeldCopy> held, at::IntArrayRef layout, bool keeps_dtype)
      : CastBackward(
            std::move(next), at::ScalarType::Undefined, keeps_dtype ? at::ScalarType::Undefined : at::kFloat),
        held_(std::move(held)),
        layout_(layout.begin(), layout.end()),
        keeps_dtype_(keeps_dtype) {}

  std::string name() const override {
    return "HeldCastBackward";
  }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) {
      return {at::Tensor()};
    }
    held_->record.received.fetch_add(1, std::memory_order_relaxed);
    return {cast_to_layout(std::move(gradients[0]))};
  }

  variable_list apply_with_saved(const variable_list& inputs, torch::autograd::SwapSavedVariables& saved) override {
    held_->record.received.fetch_add(1, std::memory_order_relaxed);
    return CastBackward::apply_with_saved(inputs, saved);
  }

 private:
  at::Tensor cast_to_layout(at::Tensor gradient) const {
    const at::ScalarType dtype = keeps_dtype_ ? gradient.scalar_type() : at::kFloat;
    if (needs_general_cast(gradient) || gradient.layout() != at::kStrided) {
      return cast(gradient, dtype);
    }
    BelowAutograd guard;
    if (gradient.strides() != at::IntArrayRef(layout_) && dtype != gradient.scalar_type()) {
      // First the layout, then the dtype: 512x512 takes 0.37 ms so, and 0.66 ms at once (2.13, 2-core CPU).
      at::Tensor transposed = empty_like(gradient, layout_, gradient.scalar_type());
      write(transposed, gradient);
      gradient = std::move(transposed);
    }
    if (!gradient.is_cpu()) {
      return cast(gradient, dtype);
    }
    at::Tensor result = held_->memory.like(gradient, layout_, dtype);
    write(result, gradient);
    return result;
  }

  const std::shared_ptr<HeldCopy> held_;
  const c10::SmallVector<int64_t, 4> layout_;
  const bool keeps_dtype_;
};

bool has_gradient(const c10::TensorImpl& parameter) {
  return parameter.requires_grad() && parameter.grad().defined();
}

// The use of a lent copy by a kernel of this thread; false if another one uses the copy or Python has it.
class Claim {
 public:
  explicit Claim(HeldRecord& record) : record_(record) {
    auto lent = Owner::Lent;
    holds_ = record.thread == reinterpret_cast<uint64_t>(pthread_self()) &&
        record.owner.compare_exchange_strong(lent, Owner::InUse, std::memory_order_acq_rel);
  }

  ~Claim() {
    if (holds_) {
      record_.owner.store(Owner::Lent, std::memory_order_release);
    }
  }

  explicit operator bool() const {
    return holds_;
  }

 private:
  HeldRecord& record_;
  bool holds_;
};

}  // namespace

at::Tensor GradientMemory::like(const at::Tensor& gradient, at::IntArrayRef layout, at::ScalarType dtype) {
  at::Tensor own;
  {
    std::lock_guard<std::mutex> guard(temporaries().lock);
    std::swap(own, own_);  // removed, so that two threads never get the same
  }
  if (!own.defined() || own.scalar_type() != dtype || own.strides() != layout || own.sizes() != gradient.sizes()) {
    own = empty_like(gradient, layout, dtype);
  }
  const bool is_free = !is_shared(own);
  at::Tensor result = is_free ? detached(own) : at::Tensor();
  {
    std::lock_guard<std::mutex> guard(temporaries().lock);
    std::swap(own, own_);
  }
  return is_free ? result : temporaries().like(gradient, layout, dtype);
}

void HeldCopy::lend(const at::Tensor& parameter, const at::Tensor& copy) {
  lent_source_.emplace(parameter, static_cast<uint32_t>(record.version), reinterpret_cast<const void*>(record.pointer));
  copy_ = copy;
  record.thread = reinterpret_cast<uint64_t>(pthread_self());
  record.owner.store(Owner::Lent, std::memory_order_release);
}

bool HeldCopy::take_back() {
  auto lent = Owner::Lent;
  return record.owner.compare_exchange_strong(lent, Owner::Python, std::memory_order_acq_rel) || lent == Owner::Python;
}

bool HeldCopy::step(std::vector<Copy>& removed) {
  auto lent = Owner::Lent;
  if (!record.owner.compare_exchange_strong(lent, Owner::InUse, std::memory_order_acq_rel)) {
    return false;
  }
  record.version = -1;
  evict(Eviction::All, 0, removed);
  record.owner.store(Owner::Lent, std::memory_order_release);
  return true;
}

void HeldCopy::evict(Eviction which, uint32_t version, std::vector<Copy>& removed) const {
  std::lock_guard<std::mutex> guard(Process::lock);
  for (ThreadState* thread : Process::threads) {
    thread->copies.evict({source_, dtype_}, *this, which, version, removed);
  }
}

bool HeldCopy::may_have_been_written(const c10::TensorImpl& parameter) const {
  const bool has_gradient = precast::has_gradient(parameter), had_gradient = record.had_gradient_at_write != 0;
  const bool has_new_gradient = record.received.load(std::memory_order_relaxed) != record.received_at_write;
  // An optimizer's steps are observed, so another write is possible only if a gradient was removed without a step.
  return record.has_optimizer ? has_new_gradient && !has_gradient
                              : has_new_gradient || has_gradient != had_gradient;
}

bool HeldCopy::is_current(const c10::TensorImpl& parameter) {
  if (!may_have_been_written(parameter) && samples.match(parameter, /*compares_all=*/false)) {
    return true;
  }
  record.version = -1;
  return false;
}

bool HeldCopy::renew(const at::Tensor& parameter) {
  const uint32_t version = parameter.unsafeGetTensorImpl()->version_counter().current_version();
  {
    std::vector<Copy> removed;
    evict(Eviction::PersistentAndOlder, version, removed);
  }
  if (is_shared(copy_)) {
    return false;  // it has other users: Python writes a new copy
  }
  record.version = -1;
  std::atomic_thread_fence(std::memory_order_release);
  samples.record(*parameter.unsafeGetTensorImpl());
  {
    BelowAutograd guard;
    write(copy_, parameter);
  }
  record.writes += 1;
  record.received_at_write = record.received.load(std::memory_order_relaxed);
  record.had_gradient_at_write = has_gradient(*parameter.unsafeGetTensorImpl());
  std::atomic_thread_fence(std::memory_order_release);
  record.version = version;
  return true;
}

at::Tensor HeldCopy::cast_for(ThreadState& here, const at::Tensor& parameter) {
  Claim claim(record);
  const c10::TensorImpl& source = *parameter.unsafeGetTensorImpl();
  if (!claim || &source != source_ || !lent_source_->has_same_memory(source) || in_forward_mode()) {
    return {};
  }
  const bool is_valid =
      record.version == static_cast<int64_t>(source.version_counter().current_version()) && is_current(source);
  if (!is_valid && !renew(parameter)) {
    return {};
  }
  const auto version = static_cast<uint32_t>(record.version);
  at::Tensor cast = with_gradient(parameter, copy_, shared_from_this());
  SourceSnapshot snapshot(parameter, version, reinterpret_cast<const void*>(record.pointer));
  here.copies.put_held(
      parameter, dtype_, /*has_gradient=*/true, Copy{std::move(snapshot), cast, shared_from_this(), at::Tensor()});
  return cast;
}

at::Tensor Copies::find_held(const c10::TensorImpl& source, at::ScalarType dtype) {
  std::lock_guard<std::mutex> guard(lock_);
  const Copy* entry = held_copies_.find({&source, dtype});
  const bool is_usable =
      entry != nullptr && entry->snapshot.is_valid_for(source) && entry->held->is_current(source);
  return is_usable ? entry->cast : at::Tensor();
}

at::Tensor with_gradient(const at::Tensor& parameter, const at::Tensor& copy, std::shared_ptr<HeldCopy> held) {
  const bool keeps_dtype = parameter.grad_dtype() == copy.scalar_type();
  torch::autograd::edge_list next{torch::autograd::impl::gradient_edge(parameter)};
  return with_node(
      copy, make_node<HeldCastBackward>(std::move(next), std::move(held), copy.strides(), keeps_dtype));
}

namespace {

std::shared_ptr<HeldCopy>& held_of(void* held) {
  return *static_cast<std::shared_ptr<HeldCopy>*>(held);
}

at::Tensor with_gradient_of(const at::Tensor& parameter, const at::Tensor& copy, int64_t held) {
  return with_gradient(parameter, copy, held_of(reinterpret_cast<void*>(held)));
}

}  // namespace

void define_held_operations(torch::Library& library) {
  library.def("with_gradient(Tensor parameter, Tensor copy, int held) -> Tensor", with_gradient_of);
}

std::mutex& gradient_memory_lock() {
  return temporaries().lock;
}

}  // namespace precast

using namespace precast;

void* precast_new_held(void* source, int dtype) {
  return guarded([&]() -> void* {
    const auto* parameter = static_cast<const c10::TensorImpl*>(source);
    return new std::shared_ptr<HeldCopy>(std::make_shared<HeldCopy>(parameter, static_cast<at::ScalarType>(dtype)));
  });
}

void precast_free_held(void* held) {
  guarded([&] {
    if (!Process::finalizing) {
      delete static_cast<std::shared_ptr<HeldCopy>*>(held);
    }
  });
}

void* precast_held_record(void* held) {
  return &held_of(held)->record;
}

// Adds a cast of a copy to this thread. The parameter had this version and address when the copy was written.
void precast_keep(void* held, void* source, void* cast, int has_gradient, int64_t version, int64_t address) {
  guarded([&] {
    const at::Tensor parameter = tensor_of(source), tensor = tensor_of(cast);
    SourceSnapshot snapshot(parameter, static_cast<uint32_t>(version), reinterpret_cast<const void*>(address));
    ThreadState::here().copies.put_held(
        parameter,
        tensor.scalar_type(),
        has_gradient != 0,
        Copy{std::move(snapshot), tensor, held_of(held), at::Tensor()});
  });
}

void precast_evict(void* held, int which, int64_t version) {
  guarded([&] {
    std::vector<Copy> removed;  // destroyed here, without a lock
    held_of(held)->evict(static_cast<Eviction>(which), static_cast<uint32_t>(version), removed);
  });
}

// Records samples of the parameter, before the copy is written.
void precast_record_samples(void* held, void* parameter) {
  guarded([&] { held_of(held)->samples.record(*static_cast<const c10::TensorImpl*>(parameter)); });
}

// Returns 1 if the parameter has the recorded values, else 0. Compares all samples, or the next few in turn.
int precast_match_samples(void* held, void* parameter, int compares_all) {
  return guarded([&]() -> int {
    return held_of(held)->samples.match(*static_cast<const c10::TensorImpl*>(parameter), compares_all != 0);
  });
}

void precast_lend(void* held, void* parameter, void* copy) {
  guarded([&] {
    const at::Tensor source = tensor_of(parameter), cast = tensor_of(copy);
    held_of(held)->lend(source, cast);
    if (const auto entry = HeldSources::of(source.unsafeGetTensorImpl())) {
      entry->set(cast.scalar_type(), held_of(held));
    }
  });
}

int precast_step_held(void* held) {
  return guarded([&]() -> int {
    std::vector<Copy> removed;  // freed here, without a lock
    return held_of(held)->step(removed);
  });
}

int precast_take_back(void* held) {
  return held_of(held)->take_back();
}

void precast_set_cast_per_region(void* source, int is_cast_per_region) {
  guarded([&] {
    if (const auto entry = HeldSources::of(static_cast<const c10::TensorImpl*>(source))) {
      entry->is_cast_per_region = is_cast_per_region != 0;
    }
  });
}

int precast_is_shared(void* tensor) {
  return guarded([&]() -> int { return is_shared(tensor_of(tensor)); });
}

void precast_free_temporaries() {
  guarded([] { temporaries().clear(); });
}
