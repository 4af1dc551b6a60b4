// The boundary between Python and the library. Made from boundary.py by `python -m tools.native_boundary`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace precast {

enum class Action : uint8_t { Pass = 0, Delegate = 1, Reference = 2, Promote = 3, Product = 4 };
enum class Mixture : uint8_t { Any = 0, Refused = 1, Float64 = 2, Foreign = 3 };
enum class Eviction : uint8_t { All = 0, Persistent = 1, PersistentAndOlder = 2 };
enum class Owner : uint8_t { Python = 0, Lent = 1, InUse = 2 };
enum class ThreadKind : uint8_t { Unknown = 0, Python = 1, PyTorch = 2 };
enum class RegionPart : uint8_t { Owner = 0, Entry = 1, Record = 2 };
enum class RegionExit : uint8_t { Elsewhere = 0, OneOfSeveral = 1, Outermost = 2, OthersElsewhere = 3 };

struct HeldRecord {
  std::atomic<int64_t> version{-1};
  int64_t pointer = -1;
  int64_t writes = 0;
  std::atomic<int64_t> received{0};
  int64_t received_at_write = 0;
  int64_t had_gradient_at_write = 0;
  std::atomic<int64_t> has_optimizer{0};
  uint64_t thread = 0;
  std::atomic<Owner> owner{Owner{0}};
};
static_assert(sizeof(HeldRecord) == 72);
static_assert(offsetof(HeldRecord, version) == 0);
static_assert(offsetof(HeldRecord, pointer) == 8);
static_assert(offsetof(HeldRecord, writes) == 16);
static_assert(offsetof(HeldRecord, received) == 24);
static_assert(offsetof(HeldRecord, received_at_write) == 32);
static_assert(offsetof(HeldRecord, had_gradient_at_write) == 40);
static_assert(offsetof(HeldRecord, has_optimizer) == 48);
static_assert(offsetof(HeldRecord, thread) == 56);
static_assert(offsetof(HeldRecord, owner) == 64);

struct ThreadNumbers {
  int64_t guard_id = 0;
  int64_t written_guard_id = 0;
  int64_t policies_inherited = 0;
  int64_t open = 0;
  int64_t attempts = 0;
};
static_assert(sizeof(ThreadNumbers) == 40);
static_assert(offsetof(ThreadNumbers, guard_id) == 0);
static_assert(offsetof(ThreadNumbers, written_guard_id) == 8);
static_assert(offsetof(ThreadNumbers, policies_inherited) == 16);
static_assert(offsetof(ThreadNumbers, open) == 24);
static_assert(offsetof(ThreadNumbers, attempts) == 32);

using Callback = void (*)();

}  // namespace precast

#pragma GCC visibility push(default)
extern "C" {
void precast_set_python_functions(void* increment_references, void* decrement_references, void* new_integer, void*
    integer_as_pointer, void* set_error, void* none, void* error_type);
void precast_begin(precast::Callback compare, int uses_between_checks);
void precast_end();
int precast_device(const char* type);
void precast_record_torch_kernel(const char* name, const char* overload, const char* key);
void precast_register(const char* name, const char* overload, const char* key, int device, int64_t number, int
    takes_weights, int mixture);
void precast_deregister(int64_t number);
void* precast_policy(int promotes, const char* actions, int64_t count);
void precast_put_in_force(int device, void* policy, int64_t number);
void precast_install(int device, void* policy, int64_t number);
void precast_watch(int is_watched);
void precast_register_thread(int kind);
void precast_set_guard_devices(int low, int high);
void* precast_snapshot(int device);
void precast_free_snapshot(void* snapshot);
void precast_allow_fast_entries(int64_t registration);
void* precast_bound_number(int device);
void* precast_thread_numbers();
void* precast_fast_entry(void* before);
void precast_free_fast_entry(void* fast_entry);
void* precast_open_region(int64_t index, int part);
int precast_open_count(int64_t index);
void* precast_take_record();
int precast_any_open();
void precast_clear();
int64_t precast_count();
void precast_record_casts();
int64_t precast_recorded_casts(int are_alive);
int precast_has(void* source, int dtype);
void precast_invalidate(void* source, int dtype);
void precast_hold(void* source, int is_held);
void* precast_new_held(void* source, int dtype);
void precast_free_held(void* held);
void* precast_held_record(void* held);
void precast_keep(void* held, void* source, void* cast, int has_gradient, int64_t version, int64_t address);
void precast_evict(void* held, int which, int64_t version);
void precast_record_samples(void* held, void* parameter);
int precast_match_samples(void* held, void* parameter, int compares_all);
void precast_lend(void* held, void* parameter, void* copy);
int precast_take_back(void* held);
int precast_step_held(void* held);
void precast_set_cast_per_region(void* source, int is_cast_per_region);
int precast_is_shared(void* tensor);
void precast_free_temporaries();
void precast_free_spare_memory();
int64_t precast_spare_bytes();
void precast_measure(void* data, int64_t count, int is_bfloat16, void* factors, void* signs, void* result);
void* precast_enter(void* module, void* const* arguments, std::ptrdiff_t count);
void* precast_leave(void* module, void* const* arguments, std::ptrdiff_t count);
void* precast_has_leaves(void* module, void* const* arguments, std::ptrdiff_t count);
}
#pragma GCC visibility pop
