// An operation on one device type, as its kernel uses it.
//
// Invariants:
// - only PyTorch's own operations (`aten::`) are promoted. They check dtypes before they write, so a refused one may be
//   rerun, and a refusal depends on the call and the thread's state only.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>

#include <cstddef>
#include <vector>

namespace precast {

struct Operation {
  size_t number;  // of this operation and device type, for the process
  c10::DeviceType device;
  c10::DispatchKey key;
  bool takes_weights = false;      // its tensors are replaced by casts
  bool mixes_with_region = false;  // PyTorch's rule is `promote`, which counts the region's dtype among the tensors'
  bool keeps_autocast_on = false;  // for the operations inside: PyTorch has no kernel here that disables it
  bool writes = false;             // it writes an argument
  bool takes_several = false;      // it can have several tensors, and so mixed dtypes
  std::vector<size_t> tensors = {};  // positions of arguments that are tensors or lists of them, last one first
  std::vector<bool> are_written = {};  // for each argument, true if the operation writes it
};

}  // namespace precast
