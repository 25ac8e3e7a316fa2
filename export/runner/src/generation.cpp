// Generation of text: how tokens follow from logits, with the bits of torchedge/bundles/generation.py.
#include <algorithm>
#include <cmath>
#include <cstdlib>

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

/// Whether ports are whole numbers of these shapes.
bool are(const std::vector<Port>& ports, const std::vector<Shape>& shapes) {
  return std::equal(ports.begin(), ports.end(), shapes.begin(), shapes.end(),
                    [](const Array& port, const Shape& shape) { return port == Array{shape, DType::int64}; });
}

/// Whether a method takes tokens, where they begin, which one's logits it returns, and where each of several texts begins.
bool is_window(const Method& method, int64_t texts, int64_t tokens) {
  std::vector<Shape> shapes = {{texts, tokens}, {1}, {1}};
  if (texts > 1) shapes.push_back({texts});
  if (!are(method.inputs, shapes) || method.outputs.size() != 1) return false;
  const Port& logits = method.outputs[0];
  return logits.dtype == DType::float32 && logits.shape.size() == 2 && logits.shape[0] == texts && logits.shape[1] > 0;
}

/// Whether a method takes tokens and their number, and returns the first token of a text.
bool is_encoder(const Method& method) {
  const std::vector<Port>& inputs = method.inputs;
  return !inputs.empty() && inputs[0].shape.size() == 2 && are(inputs, {{1, inputs[0].shape[1]}, {1}}) && are(method.outputs, {{1}});
}

/// The next number from 0 to 1 in 53 bits, by SplitMix64.
double next_number(uint64_t& state) {
  uint64_t bits = state += 0x9E3779B97F4A7C15;
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EB;
  return static_cast<double>((bits ^ bits >> 31) >> 11) * 0x1p-53;
}

/// Return the place of the token that a number from 0 to 1 draws.
int64_t draw(const std::vector<float>& logits, const torchedge_sampling& sampling, double number) {
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
  auto reached = std::lower_bound(sums.begin(), sums.end(), (sampling.top_p == 0 ? 1 : sampling.top_p) * sums.back());
  size_t kept = std::min<size_t>(reached - sums.begin() + 1, sums.size());
  auto chosen = std::upper_bound(sums.begin(), sums.begin() + kept, number * sums[kept - 1]);
  return scores[std::min<size_t>(chosen - sums.begin(), kept - 1)].second;
}

}  // namespace

/// Run a method on arrays for its inputs, and read what it returns.
Status Executor::run_on(const Placed& placed, const std::vector<const int64_t*>& arrays, void* output) {
  for (size_t port = 0; port < placed.method->inputs.size(); ++port) TE_CHECK(feed(placed, port, arrays[port]));
  TE_CHECK(run(placed));
  const int64_t made = placed.program->outputs[0];
  return read(placed.program->tensors[made], placed.memory[made], output);
}

/// The method like this one that reads least of the caches, for places below `end`: "decode_64" serves the first 64.
size_t Executor::shortest(size_t number, size_t end) const {
  const Method& whole = bundle_.methods[number];
  size_t best = number, least = SIZE_MAX;
  for (size_t other = 0; other < bundle_.methods.size(); ++other) {
    const Method& method = bundle_.methods[other];
    const bool alike = method.name.rfind(whole.name + "_", 0) == 0 && method.inputs == whole.inputs && method.outputs == whole.outputs;
    const size_t span = alike ? std::strtoul(method.name.c_str() + whole.name.size() + 1, nullptr, 10) : 0;
    if (span >= end && span < least && method.name == whole.name + "_" + std::to_string(span)) best = other, least = span;
  }
  return best;
}

/// Run a chunk of columns at most, from one on, and take the logits behind the last. What fills it up is overwritten before it is read.
Status Executor::run_tokens(const std::vector<Column>& columns, size_t begin, size_t chunk, const std::vector<int64_t>& begins, std::vector<float>& logits) {
  TE_TRY(number, find(chunk > 1 ? "prefill" : "decode"));
  const Placed& placed = placed_[shortest(number, begin + chunk)];
  const size_t texts = begins.size(), count = std::min(chunk, columns.size() - begin);
  std::vector<int64_t> padded(texts * chunk);
  for (size_t k = 0; k < padded.size(); ++k) {
    const int64_t token = k % chunk < count ? columns[begin + k % chunk][k / chunk] : kNone;
    padded[k] = token == kNone ? 0 : token;
  }
  const int64_t place = static_cast<int64_t>(begin), last = static_cast<int64_t>(count) - 1;
  const int64_t words = placed.method->outputs[0].shape[1];
  std::vector<Column> before = std::exchange(columns_, {});
  logits.resize(texts * words);
  TE_CHECK(run_on(placed, {padded.data(), &place, &last, begins.data()}, logits.data()));
  bool numbers = std::none_of(logits.begin(), logits.end(), [](float logit) { return std::isnan(logit); });
  for (auto text = logits.begin(); text != logits.end(); text += words) numbers = numbers && std::isfinite(*std::max_element(text, text + words));
  if (!numbers)
    return Error{"the logits after token " + std::to_string(begin + count - 1) +
                 " are no numbers; expected weights and a precision with which the model computes numbers: export it again"};
  columns_ = std::move(before);
  columns_.resize(std::min(columns_.size(), begin));
  columns_.insert(columns_.end(), columns.begin() + begin, columns.begin() + begin + count);
  return {};
}

Result<std::vector<std::vector<int64_t>>> Executor::generate(std::vector<std::vector<int64_t>> prompts, size_t most, const torchedge_sampling& sampling) {
  auto prefill = find("prefill"), decode = find("decode");
  size_t texts = 0, chunk = 0, length = 0, longest = 0;
  bool known = prefill.ok() && decode.ok() && bundle_.several;
  if (known) {
    const std::vector<Port>& inputs = bundle_.methods[prefill.value()].inputs;
    if (!inputs.empty() && inputs[0].shape.size() == 2) texts = inputs[0].shape[0], chunk = inputs[0].shape[1];
    known = texts > 0 && chunk > 0 && is_window(bundle_.methods[prefill.value()], texts, chunk) && is_window(bundle_.methods[decode.value()], texts, 1);
  }
  for (auto [tensor, memory] : kept_) {
    if (tensor->role != Role::state || (tensor->name.rfind("keys.", 0) != 0 && tensor->name.rfind("values.", 0) != 0)) continue;
    size_t tokens = tensor->form.shape.size() == 4 ? tensor->form.shape[2] : 0;
    known = known && tokens >= chunk && (length == 0 || length == tokens);
    length = tokens;
  }
  if (!known || length == 0) return Error{bundle_.path + ": generates no text; expected a bundle of torchedge.export_lm"};
  if (prompts.empty() || prompts.size() > texts)
    return Error{std::to_string(prompts.size()) + " prompts are given, and the bundle takes " + std::to_string(texts) +
                 " at once; expected at least one and no more, or a bundle of torchedge.export_lm(..., batch=)"};
  if (auto encode = find("encode"); encode.ok() && !prompts[0].empty()) {
    const Method& method = bundle_.methods[encode.value()];
    const int64_t count = static_cast<int64_t>(prompts[0].size()), room = is_encoder(method) ? method.inputs[0].shape[1] : 0;
    if (count > room)
      return Error{std::to_string(count) + " tokens are given, and the encoder takes " + std::to_string(room) +
                   "; expected fewer, or a bundle with a larger encoder_length; one that takes features runs by its methods"};
    prompts[0].resize(room);
    columns_.clear();
    int64_t begin = 0;
    TE_CHECK(run_on(placed_[encode.value()], {prompts[0].data(), &count}, &begin));
    prompts[0] = {begin};
  }
  for (auto& prompt : prompts) {
    if (prompt.empty()) return Error{"the prompt has no token; expected at least one"};
    longest = std::max(longest, prompt.size());
  }
  if (most < 1 || most > length || longest > length || longest + most - 1 > length)
    return Error{std::to_string(longest) + " tokens and " + std::to_string(most) + " new ones are given, and the caches hold " +
                 std::to_string(length) + "; expected fewer, but at least one new one, or a bundle with a larger max_length"};
  if (!(sampling.temperature >= 0 && sampling.temperature <= 1e6 && (sampling.top_p == 0 || (sampling.top_p >= 1e-9 && sampling.top_p <= 1))))
    return Error{"the temperature is " + number_text(sampling.temperature) + " and top_p " + number_text(sampling.top_p) +
                 "; expected numbers from 0 to 1000000 and from 1e-9 to 1"};
  // Texts end together; those that are not given compute what the first one does.
  std::vector<Column> columns(longest, Column(texts, kNone));
  std::vector<int64_t> begins;
  std::vector<uint64_t> states;  // of each text's random numbers
  for (size_t text = 0; text < texts; ++text) {
    const std::vector<int64_t>& prompt = prompts[text < prompts.size() ? text : 0];
    begins.push_back(static_cast<int64_t>(longest - prompt.size()));
    for (size_t k = 0; k < prompt.size(); ++k) columns[begins[text] + k][text] = prompt[k];
    states.push_back(sampling.seed + text);
  }
  // What the caches hold already is not computed again, but for the last token, whose logits are not kept.
  size_t done = std::mismatch(columns.begin(), columns.end() - 1, columns_.begin(), columns_.end()).first - columns.begin();
  std::vector<float> logits;
  while (done < longest) {
    size_t begin = std::min(done, length - chunk);
    TE_CHECK(run_tokens(columns, begin, chunk, begins, logits));
    done = std::min(begin + chunk, longest);
  }
  std::vector<std::vector<int64_t>> made(prompts.size());
  auto ended = [&](auto& text) { return text.size() == most || (!text.empty() && std::count(sampling.stop, sampling.stop + sampling.stops, text.back())); };
  for (;;) {
    for (size_t text = 0; text < made.size(); ++text) {
      if (ended(made[text])) continue;
      std::vector<float> own(logits.begin() + text * logits.size() / texts, logits.begin() + (text + 1) * logits.size() / texts);
      auto likeliest = std::max_element(own.begin(), own.end()) - own.begin();
      made[text].push_back(sampling.temperature > 0 ? draw(own, sampling, next_number(states[text])) : likeliest);
      if (sampling.stream != nullptr) sampling.stream(sampling.context, text, made[text].back());
    }
    if (std::all_of(made.begin(), made.end(), ended)) return made;
    columns.emplace_back();
    for (size_t text = 0; text < texts; ++text) columns.back().push_back(made[text < made.size() ? text : 0].back());
    TE_CHECK(run_tokens(columns, columns.size() - 1, 1, begins, logits));
  }
}

}  // namespace torchedge
