// Loads the package without Python, reads an input that torch.save has written, and writes the answer.
#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

int main(int, char** names) {
    c10::InferenceMode inference;
    torch::inductor::AOTIModelPackageLoader package(names[1]);

    std::ifstream given(names[2], std::ios::binary);
    const std::vector<char> bytes(std::istreambuf_iterator<char>(given), {});
    const at::Tensor input = torch::jit::pickle_load(bytes).toTensor();

    const std::vector<at::Tensor> answers = package.run({input});
    const std::vector<char> written = torch::jit::pickle_save(answers[0]);
    std::ofstream(names[3], std::ios::binary).write(written.data(), written.size());
    std::cout << answers[0].sizes() << " in " << answers[0].dtype() << "\n";
}
