// Generation of text: how tokens follow from logits, with the bits of torchedge/bundles/generation.py.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace torchedge {

/// temperature 0: the most likely token. top_k: among so many of the most likely; 0: all. top_p: among the fewest
/// whose probabilities reach it. seed: of the first text, one more for each other. stop: tokens that end a text.
/// stream: called with the number of a text and its new token.
struct Sampling {
  double temperature = 0, top_p = 1;
  uint64_t top_k = 0, seed = 0;
  std::vector<int64_t> stop;
  std::function<void(size_t, int64_t)> stream;
};

/// The tokens of several texts at one place; kNone before a text begins.
using Column = std::vector<int64_t>;
constexpr int64_t kNone = INT64_MIN;

/// Numbers from 0 to 1 in 53 bits, by SplitMix64.
class Generator {
 public:
  explicit Generator(uint64_t seed) : state_(seed) {}
  double next();

 private:
  uint64_t state_;
};

/// Return the place of the token that a number from 0 to 1 draws.
int64_t draw(const std::vector<float>& logits, const Sampling& sampling, double number);

}  // namespace torchedge
