#include "generation.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "executor.h"

namespace torchedge {
namespace {

constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;

/// exp of a number up to 0, by products and sums alone: every machine, and numpy, get the same bits.
double exp_of(double x) {
  if (!(x > -700)) return 0;
  double whole = std::rint(x * 0x1.71547652b82fep+0), rest = x - whole * kLn2High - whole * kLn2Low, sum = 1;
  for (int n = 13; n > 0; --n) sum = 1 + sum * rest / n;
  return std::ldexp(sum, static_cast<int>(whole));
}

/// Whether a method takes tokens, where they begin, and which one's logits it returns.
bool is_window(const Method& method, int64_t tokens) {
  const std::vector<Shape> shapes = {{1, tokens}, {1}, {1}};
  bool fits = method.inputs.size() == 3 && method.outputs.size() == 1;
  for (size_t k = 0; fits && k < 3; ++k) fits = method.inputs[k].shape == shapes[k] && method.inputs[k].dtype == DType::int64;
  if (!fits) return false;
  const Port& logits = method.outputs[0];
  return logits.dtype == DType::float32 && logits.shape.size() == 2 && logits.shape[0] == 1 && logits.shape[1] > 0;
}

}  // namespace

double Generator::next() {
  uint64_t bits = state_ += 0x9E3779B97F4A7C15;
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EB;
  return static_cast<double>((bits ^ bits >> 31) >> 11) * 0x1p-53;
}

int64_t draw(const std::vector<float>& logits, const Sampling& sampling, double number) {
  double most = *std::max_element(logits.begin(), logits.end());
  std::vector<std::pair<double, int64_t>> scores;
  for (float logit : logits) scores.emplace_back((logit - most) / sampling.temperature, static_cast<int64_t>(scores.size()));
  auto likelier = [](auto& a, auto& b) { return a.first > b.first; };
  if (sampling.top_k > 0 && sampling.top_k < scores.size()) {
    auto ranked = scores;
    std::nth_element(ranked.begin(), ranked.begin() + (sampling.top_k - 1), ranked.end(), likelier);
    double least = ranked[sampling.top_k - 1].first;
    scores.erase(std::remove_if(scores.begin(), scores.end(), [&](auto& score) { return score.first < least; }), scores.end());
  }
  std::stable_sort(scores.begin(), scores.end(), likelier);
  std::vector<double> sums;
  for (auto& score : scores) sums.push_back((sums.empty() ? 0 : sums.back()) + exp_of(score.first));
  auto reached = std::lower_bound(sums.begin(), sums.end(), sampling.top_p * sums.back());
  size_t kept = std::min<size_t>(reached - sums.begin() + 1, sums.size());
  auto chosen = std::upper_bound(sums.begin(), sums.begin() + kept, number * sums[kept - 1]);
  return scores[std::min<size_t>(chosen - sums.begin(), kept - 1)].second;
}

/// Run tokens from a position on, and take the logits behind the last one. What fills up a chunk lies behind it:
/// later tokens overwrite it before any of them reads it.
Status Executor::run_tokens(const int64_t* tokens, size_t count, size_t begin, size_t chunk, std::vector<float>& logits) {
  TE_TRY(number, find(chunk > 1 ? "prefill" : "decode"));
  const Placed& placed = placed_[number];
  std::vector<int64_t> padded(chunk);
  std::copy(tokens, tokens + count, padded.begin());
  const int64_t place = static_cast<int64_t>(begin), last = static_cast<int64_t>(count) - 1;
  const int64_t* arrays[] = {padded.data(), &place, &last};
  std::vector<int64_t> before = std::move(tokens_), fed = placed.program->fed();
  tokens_.clear();
  for (size_t port = 0; port < 3; ++port) {
    const Tensor& tensor = placed.program->tensors[fed[port]];
    TE_CHECK(check_values(tensor, arrays[port]));
    TE_CHECK(write(tensor, *placed.memory[fed[port]], arrays[port]));
  }
  TE_CHECK(run(placed));
  const int64_t output = placed.program->outputs[0];
  logits.resize(placed.method->outputs[0].shape[1]);
  TE_CHECK(read(placed.program->tensors[output], *placed.memory[output], logits.data()));
  float most = *std::max_element(logits.begin(), logits.end());
  bool numbers = std::isfinite(most) && std::none_of(logits.begin(), logits.end(), [](float logit) { return std::isnan(logit); });
  if (!numbers)
    return Error{"the logits after token " + std::to_string(begin + count - 1) +
                 " are no numbers; expected weights and a precision with which the model computes numbers: export it again"};
  tokens_ = std::move(before);
  tokens_.resize(std::min(tokens_.size(), begin));
  tokens_.insert(tokens_.end(), tokens, tokens + count);
  return {};
}

Result<std::vector<int64_t>> Executor::generate(const std::vector<int64_t>& prompt, size_t most, const Sampling& sampling) {
  auto prefill = find("prefill"), decode = find("decode");
  size_t chunk = 0, length = 0;
  bool known = prefill.ok() && decode.ok() && bundle_.several;
  if (known) {
    const std::vector<Port>& inputs = bundle_.methods[prefill.value()].inputs;
    if (!inputs.empty() && !inputs[0].shape.empty()) chunk = inputs[0].shape.back();
    known = chunk > 0 && is_window(bundle_.methods[prefill.value()], chunk) && is_window(bundle_.methods[decode.value()], 1);
  }
  for (auto [tensor, memory] : kept()) {
    if (tensor->role != Role::state || (tensor->name.rfind("keys.", 0) != 0 && tensor->name.rfind("values.", 0) != 0)) continue;
    size_t tokens = tensor->form.shape.size() == 4 ? tensor->form.shape[2] : 0;
    known = known && tokens >= chunk && (length == 0 || length == tokens);
    length = tokens;
  }
  if (!known || length == 0) return Error{bundle_.path + ": generates no text; expected a bundle of torchedge.export_lm with a batch of 1"};
  if (find("encode").ok())
    return Error{bundle_.path + ": is an encoder-decoder, for which no text is generated here; expected a causal model: run its " +
                 "methods encode, prefill and decode one by one, or generate with Python"};
  if (prompt.empty()) return Error{"the prompt has no token; expected at least one"};
  if (most < 1 || most > length || prompt.size() > length || prompt.size() + most - 1 > length)
    return Error{std::to_string(prompt.size()) + " tokens and " + std::to_string(most) + " new ones are given, and the caches hold " +
                 std::to_string(length) + "; expected fewer, but at least one new one, or a bundle with a larger max_length"};
  if (!(sampling.temperature >= 0 && sampling.temperature <= 1e6 && sampling.top_p >= 1e-9 && sampling.top_p <= 1))
    return Error{"the temperature is " + number_text(sampling.temperature) + " and top_p " + number_text(sampling.top_p) +
                 "; expected numbers from 0 to 1000000 and from 1e-9 to 1"};
  // What the caches hold already is not computed again, but for the last token, whose logits are not kept.
  size_t done = std::mismatch(prompt.begin(), prompt.end() - 1, tokens_.begin(), tokens_.end()).first - prompt.begin();
  std::vector<int64_t> tokens = prompt;
  std::vector<float> logits;
  while (done < prompt.size()) {
    size_t begin = std::min(done, length - chunk), count = std::min(chunk, prompt.size() - begin);
    TE_CHECK(run_tokens(&prompt[begin], count, begin, chunk, logits));
    done = begin + count;
  }
  Generator generator(sampling.seed);
  for (;;) {
    auto likeliest = std::max_element(logits.begin(), logits.end()) - logits.begin();
    tokens.push_back(sampling.temperature > 0 ? draw(logits, sampling, generator.next()) : likeliest);
    if (sampling.stream) sampling.stream(tokens.back());
    bool ends = std::find(sampling.stop.begin(), sampling.stop.end(), tokens.back()) != sampling.stop.end();
    if (ends || tokens.size() == prompt.size() + most) return std::vector<int64_t>(tokens.begin() + prompt.size(), tokens.end());
    TE_CHECK(run_tokens(&tokens.back(), 1, tokens.size() - 1, 1, logits));
  }
}

}  // namespace torchedge
