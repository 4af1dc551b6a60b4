// Measurements of float32 and bfloat16 values: a fingerprint, statistics and a sketch, as
// `comparison/sketches.py` defines them, in one pass.
//
// Invariant: the fingerprint has the bits of the Python implementation; the other numbers differ by their rounding alone.
#include "exported.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PRECAST_VECTORIZED __attribute__((optimize("O3"), target_clones("arch=haswell", "default")))
#else
#define PRECAST_VECTORIZED
#endif

namespace precast {
namespace {

constexpr int64_t kSize = 127, kBlock = kSize * kSize, kOffsets = 8192, kLanes = 4;
constexpr int64_t kSigns = kBlock + kOffsets;  // of a table
constexpr uint64_t kMask = kOffsets - 1;

using Words = int32_t __attribute__((vector_size(16)));
using Floats = float __attribute__((vector_size(16)));
using Doubles = double __attribute__((vector_size(32)));
using Longs = uint64_t __attribute__((vector_size(32)));

template <class Type, class Element>
__attribute__((always_inline)) inline void load(Type& result, const Element* data) {
  std::memcpy(&result, data, sizeof result);
}

// The results, in the order of the measurement.
struct Measurement {
  uint64_t fingerprint;
  double low, high, sum, squares, nonfinite;
  double sketch[kSize];
};

// SplitMix64, odd.
uint64_t mixed(uint64_t number) {
  number *= 0x9E3779B97F4A7C15U;
  number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9U;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EBU;
  return (number ^ (number >> 31)) | 1;
}

// The sums of one block, by lanes.
struct Lanes {
  Floats low = Floats{} + INFINITY, high = Floats{} - INFINITY;
  Doubles sum{}, squares{};
  Words nonfinite{};
  Longs hash{};

  // Adds elements. Those outside of `mask` repeat others, and add nothing to sums.
  template <class Element>
  __attribute__((always_inline)) inline void add(
      const Element* elements, Words mask, const uint64_t* factors, const float* signs_a, const float* signs_b,
      double* sums) {
    Element loaded __attribute__((vector_size(4 * sizeof(Element))));
    Floats a, b;
    Doubles sketch;
    Longs factor;
    load(loaded, elements);
    load(a, signs_a);
    load(b, signs_b);
    load(factor, factors);
    load(sketch, sums);
    const auto words = __builtin_convertvector(loaded, Words);
    const Words bits = sizeof(Element) == 2 ? words << 16 : words;
    const Words infinite = (bits & 0x7F800000) == 0x7F800000;
    nonfinite -= infinite & mask;
    const Words finite_bits = bits & ~infinite;
    const auto finite = (Floats)finite_bits;
    low = finite < low ? finite : low;
    high = finite > high ? finite : high;
    const auto wide = __builtin_convertvector((Floats)(finite_bits & mask), Doubles);
    sum += wide;
    squares += wide * wide;
    sketch += wide * __builtin_convertvector(a * b, Doubles);
    std::memcpy(sums, &sketch, sizeof sketch);
    hash += __builtin_convertvector(words & mask, Longs) * factor;
  }
};

// Adds the elements of one block.
template <class Element>
PRECAST_VECTORIZED void add_block(
    const Element* data, int64_t count, const uint64_t* factors, const float* a, const float* b, uint64_t mix,
    Measurement& result) {
  Lanes lanes;
  double sketch[kSize + 1] = {};
  for (int64_t row = 0; row < count; row += kSize) {
    const int64_t width = std::min(kSize, count - row);
    int64_t column = 0;
    for (; column + kLanes <= width; column += kLanes) {
      const int64_t i = row + column;
      lanes.add(data + i, Words{} - 1, factors + i, a + i, b + i, sketch + column);
    }
    if (column < width) {
      const int64_t i = row + column;
      Element elements[kLanes];
      Words mask{};
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        elements[lane] = data[std::min(i + lane, row + width - 1)];
        mask[lane] = column + lane < width ? -1 : 0;
      }
      lanes.add(elements, mask, factors + i, a + i, b + i, sketch + column);
    }
  }
  for (int64_t i = 0; i < kSize; ++i) {
    result.sketch[i] += sketch[i];
  }
  uint64_t part = 0;
  for (int64_t i = 0; i < kLanes; ++i) {
    result.low = std::min<double>(result.low, lanes.low[i]);
    result.high = std::max<double>(result.high, lanes.high[i]);
    result.sum += lanes.sum[i];
    result.squares += lanes.squares[i];
    result.nonfinite += lanes.nonfinite[i];
    part += lanes.hash[i];
  }
  result.fingerprint += part * mix;
}

template <class Element>
void add(const Element* data, int64_t count, const uint64_t* factors, const float* signs, Measurement& result) {
  for (int64_t block = 0; block * kBlock < count; ++block) {
    const auto number = static_cast<uint64_t>(block);
    const uint64_t offset = mixed((uint64_t{1} << 41) + number);
    add_block(
        data + block * kBlock, std::min(kBlock, count - block * kBlock), factors, signs + (offset >> 20 & kMask),
        signs + kSigns + (offset >> 40 & kMask), mixed(2 * number + 1), result);
  }
}

}  // namespace
}  // namespace precast

using namespace precast;

// Measures contiguous values. The tables of factors and signs are read up to `kLanes` elements beyond a block.
void precast_measure(void* data, int64_t count, int is_bfloat16, void* factors, void* signs, void* result) {
  guarded([&] {
    auto& measurement = *static_cast<Measurement*>(result);
    measurement.low = INFINITY;
    measurement.high = -INFINITY;
    const auto* factor = static_cast<const uint64_t*>(factors);
    const auto* sign = static_cast<const float*>(signs);
    if (is_bfloat16 != 0) {
      add(static_cast<const int16_t*>(data), count, factor, sign, measurement);
    } else {
      add(static_cast<const int32_t*>(data), count, factor, sign, measurement);
    }
  });
}
