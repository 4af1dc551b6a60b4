// One operation on one device type, as its kernel sees it.
//
// Invariants:
// - operations whose mixed dtypes are promoted are PyTorch's own, `aten::`. They look at dtypes before they write, so one
//   that was refused may run once more, and whether they refuse a call depends on nothing else than the call and the thread.
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
  bool takes_weights = false;      // its tensors are looked for among the copies
  bool keeps_autocast_on = false;  // in what it calls: PyTorch has no kernel here that switches it off
  bool writes = false;             // it writes to an argument
  bool takes_several = false;      // there can be a mixture of dtypes
  std::vector<size_t> tensors;     // positions of arguments that are tensors or lists of them, the last one first
  std::vector<bool> are_written;   // of each argument, whether the operation writes to it
};

}  // namespace precast
