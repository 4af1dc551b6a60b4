// An autograd node that casts gradients: of held copies, and of products that return float32.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace precast {

class CastBackward : public torch::autograd::Node {
 public:
  // Casts a gradient to `via`, then to `dtype`; `Undefined` is no cast.
  CastBackward(torch::autograd::edge_list&& next, at::ScalarType via, at::ScalarType dtype)
      : Node(std::move(next)), via_(via), dtype_(dtype) {}

  std::string name() const override {
    return "CastBackward";
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

  // For compiled autograd, which traces the casts.
  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override;
  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& inputs, torch::autograd::SwapSavedVariables& saved) override;

 private:
  const at::ScalarType via_, dtype_;
};

// The pointer in an edge: from PyTorch 2.13 on nodes are counted intrusively, before by a shared_ptr.
using NodePointer = decltype(torch::autograd::Edge::function);

template <class Node, class Pointer = NodePointer, class... Arguments>
Pointer make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
  }
}

// A tensor on the memory of `values` whose gradient goes to the node.
at::Tensor with_node(const at::Tensor& values, NodePointer node);

}  // namespace precast
