// An autograd node that casts gradients; see cast_node.h.
#include "cast_node.h"

#include "promotion.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

namespace precast {

using torch::autograd::variable_list;

namespace {

variable_list cast_gradient(const variable_list& gradients, at::ScalarType via, at::ScalarType dtype) {
  at::Tensor gradient = gradients[0];
  for (const at::ScalarType next : {via, dtype}) {
    if (gradient.defined() && next != at::ScalarType::Undefined) {
      gradient = cast(gradient, next);
    }
  }
  return {gradient};
}

}  // namespace

variable_list CastBackward::apply(variable_list&& gradients) {
  return cast_gradient(gradients, via_, dtype_);
}

void CastBackward::compiled_args(torch::autograd::CompiledNodeArgs& args) const {
  args.collect(via_);
  args.collect(dtype_);
}

variable_list CastBackward::apply_with_saved(
    const variable_list& inputs, torch::autograd::SwapSavedVariables& saved) {
  const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
  const std::vector<c10::IValue> arguments{static_cast<int64_t>(via_), static_cast<int64_t>(dtype_)};
  const auto name = compiler->bind_function(
      saved.get_py_compiler(),
      this->name(),
      [](const variable_list& gradients, const std::vector<c10::IValue>& dtypes) -> variable_list {
        const auto dtype = [&](size_t i) { return static_cast<at::ScalarType>(dtypes[i].toInt()); };
        return cast_gradient(gradients, dtype(0), dtype(1));
      },
      {c10::IntType::get(), c10::IntType::get()},
      /*is_custom_function=*/true,
      /*is_traceable=*/true);
  const auto outputs =
      torch::dynamo::autograd::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
          torch::dynamo::autograd::get_input_metadata(next_edges()));
  return compiler->call_function(saved.get_py_compiler(), "apply_functional", name, inputs, arguments, outputs);
}

at::Tensor with_node(const at::Tensor& values, NodePointer node) {
  at::Tensor result;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    result = detached(values);
  }
  const auto number = node->add_input_metadata(result);
  torch::autograd::impl::set_gradient_edge(result, {std::move(node), number});
  return result;
}

}  // namespace precast
