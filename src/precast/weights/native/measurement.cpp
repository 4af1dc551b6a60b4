// Measurements of float32 and bfloat16 values: a fingerprint, statistics and a sketch, as
// `comparison/sketches.py` defines them, in one pass.
//
// Invariant: the fingerprint equals that of the Python implementation; the other results differ by rounding only.
#include "exported.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

// Other C libraries than glibc do not select a clone when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define PRECAST_VECTORIZED __attribute__((optimize("O3"), target_clones("arch=haswell", "default")))
#else
#define PRECAST_VECTORIZED
#endif

namespace precast {
namespace {

constexpr int64_t kSketchSize = 127, kBlockSize = kSketchSize * kSketchSize, kOffsets = 8192, kLanes = 4;
constexpr int64_t kSignTableSize = kBlockSize + kOffsets;
constexpr uint64_t kMask = kOffsets - 1;

using Words = int32_t __attribute__((vector_size(16)));
using Floats = float __attribute__((vector_size(16)));
using Doubles = double __attribute__((vector_size(32)));
using Longs = uint64_t __attribute__((vector_size(32)));

template <class Type, class Element>
__attribute__((always_inline)) inline void load(Type& result, const Element* data) {
  std::memcpy(&result, data, sizeof result);
}

// The results, in the order in which `comparison/sketches.py` reads them.
struct Measurement {
  uint64_t fingerprint;
  double low, high, sum, squares, nonfinite;
  double sketch[kSketchSize];
};

// The hash of a number by SplitMix64, made odd.
uint64_t odd_hash(uint64_t number) {
  number *= 0x9E3779B97F4A7C15U;
  number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9U;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EBU;
  return (number ^ (number >> 31)) | 1;
}

// Adds the results of one block, `kLanes` elements at once. Lanes beyond the end of a row repeat its last element, and
// a mask excludes them from sums.
template <class Element>
PRECAST_VECTORIZED void add_block(
    const Element* data, int64_t count, const uint64_t* factors, const float* signs_a, const float* signs_b,
    uint64_t block_factor, Measurement& result) {
  Floats low = Floats{} + INFINITY, high = Floats{} - INFINITY;
  Doubles sum{}, squares{}, sketch[kSketchSize / kLanes + 1] = {};
  Words nonfinite{};
  Longs hash{};
  for (int64_t row = 0; row < count; row += kSketchSize) {
    const auto width = static_cast<int32_t>(std::min(kSketchSize, count - row));
    Element elements[kSketchSize + 1];
    std::copy_n(data + row, width, elements);
    std::fill(elements + width, std::end(elements), elements[width - 1]);
    for (int32_t column = 0; column < width; column += kLanes) {
      Element loaded __attribute__((vector_size(4 * sizeof(Element))));
      Floats a, b;
      Longs factor;
      load(loaded, elements + column);
      load(a, signs_a + row + column);
      load(b, signs_b + row + column);
      load(factor, factors + row + column);
      const Words mask = Words{0, 1, 2, 3} < width - column;
      const auto words = __builtin_convertvector(loaded, Words);
      const Words bits = sizeof(Element) == 2 ? words << 16 : words;
      const Words infinite = (bits & 0x7F800000) == 0x7F800000;
      nonfinite -= infinite & mask;
      const auto finite = (Floats)(bits & ~infinite);
      low = finite < low ? finite : low;
      high = finite > high ? finite : high;
      const auto wide = __builtin_convertvector((Floats)(bits & ~infinite & mask), Doubles);
      sum += wide;
      squares += wide * wide;
      sketch[column / kLanes] += wide * __builtin_convertvector(a * b, Doubles);
      hash += __builtin_convertvector(words & mask, Longs) * factor;
    }
  }
  for (int64_t i = 0; i < kSketchSize; ++i) {
    result.sketch[i] += sketch[i / kLanes][i % kLanes];
  }
  uint64_t block_hash = 0;
  for (int64_t i = 0; i < kLanes; ++i) {
    result.low = std::min<double>(result.low, low[i]);
    result.high = std::max<double>(result.high, high[i]);
    result.sum += sum[i];
    result.squares += squares[i];
    result.nonfinite += nonfinite[i];
    block_hash += hash[i];
  }
  result.fingerprint += block_hash * block_factor;
}

template <class Element>
void add(const void* data, int64_t count, const uint64_t* factors, const float* signs, Measurement& result) {
  for (int64_t first = 0, number = 0; first < count; first += kBlockSize, ++number) {
    const uint64_t offset = odd_hash((uint64_t{1} << 41) + number);
    add_block(
        static_cast<const Element*>(data) + first, std::min(kBlockSize, count - first), factors,
        signs + (offset >> 20 & kMask), signs + kSignTableSize + (offset >> 40 & kMask), odd_hash(2 * number + 1),
        result);
  }
}

}  // namespace
}  // namespace precast

using namespace precast;

// Measures contiguous values. The tables of factors and signs are read up to `kLanes` elements beyond the block.
void precast_measure(void* data, int64_t count, int is_bfloat16, void* factors, void* signs, void* result) {
  guarded([&] {
    auto& measurement = *static_cast<Measurement*>(result);
    measurement.low = INFINITY;
    measurement.high = -INFINITY;
    (is_bfloat16 != 0 ? add<int16_t> : add<int32_t>)(
        data, count, static_cast<const uint64_t*>(factors), static_cast<const float*>(signs), measurement);
  });
}
