// An operation on one device type, as its kernel uses it.
#pragma once

#include "boundary.h"

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace precast {

struct Operation {
  size_t number;  // of this operation and device type, for the process
  c10::DeviceType device;
  c10::DispatchKey key;
  bool takes_weights = false;         // its tensors are replaced by casts
  Mixture mixture = Mixture::Any;     // the mixtures of dtypes that are not left to PyTorch's kernel
  bool writes = false;                // it writes an argument
  bool takes_several = false;         // it can have several tensors, and so mixed dtypes
  std::vector<size_t> tensors = {};    // positions of arguments that are tensors or lists of them, last one first
  std::vector<bool> are_written = {};  // for each argument, true if the operation writes it
  std::optional<size_t> addend = {};   // of a product: the position of the argument that is added, such as a bias
};

}  // namespace precast
