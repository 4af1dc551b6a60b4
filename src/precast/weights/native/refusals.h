// Records the calls with mixed dtypes that PyTorch has refused in a thread. An equal call is then promoted directly.
//
// Invariants:
// - calls with equal signatures are both refused or both accepted. A signature contains everything that PyTorch checks
//   before it refuses: dtypes, sizes as far as they matter (0, 1, more), the arguments present, and the thread's state.
//   A call with other kinds of arguments or tensors has no signature;
// - each thread has a table of bounded size: a call that is not in it is refused once more.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace precast {

struct Operation;
struct Policy;

class Signature {
 public:
  // The signature of a call, if it has one.
  static std::optional<Signature> of(
      const Operation& operation, const Policy& policy, c10::ArrayRef<c10::IValue> arguments);

  bool operator==(const Signature& other) const {
    return words_ == other.words_;
  }

  size_t hash() const {
    uint64_t hash = 0;
    for (const uint64_t word : words_) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15;
      hash ^= hash >> 32;
    }
    return hash;
  }

 private:
  // Return true if the argument can be part of a signature.
  bool add(const c10::IValue& argument);
  bool add(const at::Tensor& tensor);
  bool add_text(const std::string& text);

  static constexpr size_t kMostTensors = 8, kMostDimensions = 8, kMostElements = 8;

  c10::SmallVector<uint64_t, 24> words_;
  c10::SmallVector<const void*, kMostTensors> storages_;  // of the tensors, to detect sharing
};

class Refusals {
 public:
  // True if any call of an operation was refused.
  bool has_any(size_t operation) const {
    return operation < operations_.size() && operations_[operation];
  }

  bool has(const Signature& signature) const {
    return signatures_.count(signature) != 0;
  }

  void add(size_t operation, const Signature& signature) {
    if (signatures_.size() >= kMost) {
      signatures_.clear();
    }
    signatures_.insert(signature);
    if (operation >= operations_.size()) {
      operations_.resize(operation + 1);
    }
    operations_[operation] = true;
  }

 private:
  struct Hash {
    size_t operator()(const Signature& signature) const {
      return signature.hash();
    }
  };

  static constexpr size_t kMost = 4096;
  ska::flat_hash_set<Signature, Hash> signatures_;
  std::vector<bool> operations_;  // by operation number
};

}  // namespace precast
