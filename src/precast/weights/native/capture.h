// Detection of a CUDA graph that is being captured. No symbol of a CUDA library is linked, because one library serves
// the CPU, CUDA and ROCm builds of PyTorch.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <dlfcn.h>

namespace precast {

// Newer versions of PyTorch: the device guard has the answer. (2.11 lacks the function, 2.13 has it.)
template <typename Guard>
auto is_captured(const Guard& guard, const c10::Stream& stream, int) -> decltype(guard.isStreamCapturing(stream)) {
  return guard.isStreamCapturing(stream);
}

// Older versions: the CUDA runtime has it, which importing PyTorch puts into the global scope. A runtime that is linked
// in another way, as ROCm's may be, is not found.
template <typename Guard>
bool is_captured(const Guard& guard, const c10::Stream& stream, long) {
  using Query = int (*)(void* stream, int* status);
  static const auto query = reinterpret_cast<Query>(dlsym(RTLD_DEFAULT, "cudaStreamIsCapturing"));
  int status = 0;
  return query == nullptr || query(guard.getStreamNativeHandle(stream), &status) != 0 || status != 0;
}

// True if the current stream of the current CUDA device may be recorded into a graph: it is, or this is not known here.
inline bool may_be_captured() {
  const auto& guard = *c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
  return is_captured(guard, guard.getStream(c10::Device(c10::DeviceType::CUDA, -1)), 0);
}

}  // namespace precast
