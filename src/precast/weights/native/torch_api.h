// Functions of PyTorch's that are declared in headers which include all of ATen: declared here once more, as including
// those takes ten times as long to compile. The linker compares the names with their arguments, and refuses another
// signature when the library is loaded.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Export.h>

namespace at::autocast {
// ATen/autocast_mode.h, PyTorch 2.11 to 2.15
TORCH_API bool is_autocast_enabled(c10::DeviceType device_type);
TORCH_API void set_autocast_enabled(c10::DeviceType device_type, bool enabled);
TORCH_API c10::ScalarType get_autocast_dtype(c10::DeviceType device_type);
TORCH_API void set_autocast_dtype(c10::DeviceType device_type, c10::ScalarType dtype);
TORCH_API bool is_autocast_cache_enabled();
TORCH_API void set_autocast_cache_enabled(bool enabled);
TORCH_API int increment_nesting();
TORCH_API int decrement_nesting();
TORCH_API void clear_cache();
}  // namespace at::autocast

namespace at::caching {
// ATen/CachedTensorUtils.h
TORCH_API bool is_cached_tensor(const at::Tensor& t);
}  // namespace at::caching

namespace torch::jit {
// torch/csrc/jit/runtime/graph_executor.h
TORCH_API void setGraphExecutorOptimize(bool o);
TORCH_API bool getGraphExecutorOptimize();
}  // namespace torch::jit
