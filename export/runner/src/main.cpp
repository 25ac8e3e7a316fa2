// torchedge-run: runs a bundle from a shell, through the C API alone for all that touches a device.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "tensors.h"
#include "torchedge.h"

using namespace torchedge;

namespace {

constexpr const char* kUsage = R"(usage: torchedge-run BUNDLE [options]

Run an exported bundle through OpenCL. Without --inputs and --prompt-ids, describe it.

  --inputs FILE        arrays by name (.safetensors): NAME for every step, or K.NAME for step K, from 0
  --outputs FILE       write the outputs of every step, as K.NAME (.safetensors)
  --method NAME        run this one of several methods; default: the first
  --prompt-ids 1,2,3   print the tokens that follow these, by a language model's bundle; repeat it for a batch
  --max-new-tokens N   at most so many of them; default: 64
  --temperature X      draw tokens, above 0; default: 0, the most likely ones
  --top-k N            draw among so many of the most likely
  --top-p X            draw among the fewest whose probabilities reach this
  --seed N             the same seed draws the same; default: 0
  --stop 1,2           end at one of these tokens
  --steps N            number of steps; default: as many as --inputs has, or 1
  --set NAME=VALUE     set a hyperparameter before the first step; repeat it
  --load FILE          begin with a saved state (.safetensors)
  --save FILE          write weights, optimizer state and hyperparameters at the end (.safetensors)
  --device TEXT        a part of "PLATFORM DEVICE VENDOR"
  --cache FOLDER       keep compiled programs there; default: $TORCHEDGE_CACHE/opencl or
                       $XDG_CACHE_HOME/torchedge/opencl or ~/.cache/torchedge/opencl; an empty text: nowhere
  --memory-limit BYTES refuse to run with more device memory
  --hint WORD          fast, sparing or record: what a driver with the extension for it may do; repeat it
  --sha256 DIGEST      refuse any bundle but that with this SHA-256 in its manifest
  --check              compare what every launch writes with what it wrote on the exporting machine, and name the
                       first that is off; the exit status is 1 then. For bundles exported with check=True
  --json               with --check: print the result as JSON
  --figures            print times and memory as JSON at the end
  --times N            run each launch up to N times in a row; --figures gives the shortest time of each

The OpenCL library is $TORCHEDGE_OPENCL, else libOpenCL.so.1 or the vendors' places on Android.
)";

struct Arguments {
  std::string bundle, inputs, outputs, load, save, device, cache, sha256, method;
  std::vector<int64_t> prompts, stop;
  std::vector<size_t> counts;  // tokens of each prompt
  torchedge_sampling sampling{};
  torchedge_options options{};
  uint64_t new_tokens = 64, steps = 0, times = 0;
  std::vector<std::pair<std::string, double>> settings;
  bool figures = false, check = false, json = false;
};

std::string default_cache() {
  using Pair = std::pair<const char*, const char*>;
  for (auto [variable, below] : {Pair("TORCHEDGE_CACHE", ""), Pair("XDG_CACHE_HOME", "/torchedge"), Pair("HOME", "/.cache/torchedge")})
    if (const std::string folder = given(std::getenv(variable)); !folder.empty()) return folder + below + "/opencl";
  return "";
}

Result<double> number(const std::string& option, const std::string& text, double low, double high) {
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(low <= value && value <= high)) return Error{option + " is " + text + "; expected a number"};
  return value;
}

/// Whole numbers with commas between them.
Result<std::vector<int64_t>> whole_numbers(const std::string& option, const std::string& text) {
  std::vector<int64_t> numbers;
  for (size_t at = 0, comma = 0; comma != std::string::npos; at = comma + 1) {
    comma = text.find(',', at);
    TE_TRY(value, number(option, text.substr(at, comma - at), -1e15, 1e15));
    numbers.push_back(static_cast<int64_t>(value));
  }
  return numbers;
}

Result<Arguments> parse(int count, char** words) {
  Arguments arguments;
  arguments.cache = default_cache();
  std::map<std::string, std::string*> texts = {
      {"--inputs", &arguments.inputs}, {"--outputs", &arguments.outputs}, {"--load", &arguments.load},   {"--save", &arguments.save},
      {"--device", &arguments.device}, {"--cache", &arguments.cache},     {"--sha256", &arguments.sha256},
      {"--method", &arguments.method}};
  std::map<std::string, std::vector<int64_t>*> lists = {{"--prompt-ids", &arguments.prompts}, {"--stop", &arguments.stop}};
  std::map<std::string, double*> shares = {{"--temperature", &arguments.sampling.temperature}, {"--top-p", &arguments.sampling.top_p}};
  std::map<std::string, uint64_t*> counts = {{"--steps", &arguments.steps}, {"--memory-limit", &arguments.options.memory_limit}, {"--times", &arguments.times},
                                             {"--top-k", &arguments.sampling.top_k}, {"--max-new-tokens", &arguments.new_tokens}, {"--seed", &arguments.sampling.seed}};
  std::map<std::string, bool*> flags = {{"--figures", &arguments.figures}, {"--check", &arguments.check}, {"--json", &arguments.json}};
  for (int k = 1; k < count; ++k) {
    std::string word = words[k];
    if (flags.count(word)) {
      *flags[word] = true;
      continue;
    }
    if (word.rfind("--", 0) != 0) {
      if (!arguments.bundle.empty()) return Error{"two bundles are given; expected one"};
      arguments.bundle = word;
      continue;
    }
    bool known = texts.count(word) || lists.count(word) || shares.count(word) || counts.count(word) || word == "--set" || word == "--hint";
    if (!known || ++k == count) return Error{word + (known ? " has no value" : " is no option") + "; see torchedge-run --help"};
    std::string value = words[k];
    if (texts.count(word)) {
      *texts[word] = value;
    } else if (word == "--hint") {
      const std::map<std::string, uint32_t> hints = {{"fast", TORCHEDGE_FAST}, {"sparing", TORCHEDGE_SPARING}, {"record", TORCHEDGE_RECORD}};
      if (!hints.count(value)) return Error{"--hint is " + value + "; expected fast, sparing or record"};
      arguments.options.hints |= hints.at(value);
    } else if (word == "--set") {
      size_t equals = value.find('=');
      if (equals == std::string::npos) return Error{"--set is " + value + "; expected NAME=VALUE, such as lr=0.1"};
      TE_TRY(setting, number("--set", value.substr(equals + 1), -HUGE_VAL, HUGE_VAL));
      arguments.settings.emplace_back(value.substr(0, equals), setting);
    } else if (lists.count(word)) {
      TE_TRY(numbers, whole_numbers(word, value));
      if (word == "--prompt-ids") arguments.counts.push_back(numbers.size());
      lists[word]->insert(lists[word]->end(), numbers.begin(), numbers.end());
    } else if (shares.count(word)) {
      TE_TRY(share, number(word, value, 0, 1e6));
      *shares[word] = share;
    } else {
      TE_TRY(amount, number(word, value, word == "--seed" ? 0 : 1, word == "--times" ? 1e6 : 1e15));
      *counts[word] = static_cast<uint64_t>(amount);
    }
  }
  if (arguments.bundle.empty()) return Error{"no bundle is given; see torchedge-run --help"};
  return arguments;
}

Status check(torchedge_bundle* handle, int code) { return code == 0 ? Status() : Status(Error{torchedge_error(handle)}); }

Array array_of(const Json& port) {
  int kind = 0;
  while (port["dtype"] != name_of(static_cast<DType>(kind))) ++kind;  // the library gave the name
  return {port["shape"].get<Shape>(), static_cast<DType>(kind)};
}

/// Set an input of a step to the array of the --inputs file for it.
Status feed(torchedge_bundle* handle, const std::string& method, const Json& port, const File& file, const FileHeader& header, int64_t step) {
  const std::string name = port["name"], own = std::to_string(step) + "." + name;
  auto entry = header.entries.find(header.entries.count(own) ? own : name);
  if (entry == header.entries.end()) return Error{file.name() + ": holds no " + name + " and no " + own};
  const FileEntry& array = entry->second;
  if (!(array == array_of(port))) return Error{file.name() + ": holds " + name + " as " + array.text() + "; expected " + array_of(port).text()};
  std::string data(array.array_bytes(), '\0');
  TE_CHECK(file.read(array.begin, data.data(), data.size()));
  return check(handle, torchedge_set_input(handle, method.c_str(), name.c_str(), data.data(), data.size()));
}

/// Run steps of a method; described: its inputs and outputs; trains: whether the first one is a loss.
Status run_steps(torchedge_bundle* handle, const Arguments& arguments, const Json& described, bool trains) {
  File file;
  FileHeader header;
  int64_t steps = std::max<int64_t>(static_cast<int64_t>(arguments.steps), 1);
  if (!arguments.inputs.empty()) {
    TE_TRY(opened, File::open(arguments.inputs));
    TE_TRY(read, read_file_header(opened));
    file = std::move(opened);
    header = std::move(read);
    if (arguments.steps == 0 && !described["inputs"].empty())
      while (header.entries.count(std::to_string(steps) + "." + std::string(described["inputs"][0]["name"]))) ++steps;
  }
  std::vector<FileTensor> outputs;
  for (int64_t step = 0; step < steps; ++step) {
    for (const Json& port : described["inputs"]) TE_CHECK(feed(handle, arguments.method, port, file, header, step));
    TE_CHECK(check(handle, torchedge_step(handle, arguments.method.c_str())));
    for (const Json& port : described["outputs"]) {
      const std::string name = port["name"];
      auto data = std::make_shared<std::string>(port["bytes"].get<size_t>(), '\0');
      TE_CHECK(check(handle, torchedge_get_output(handle, name.c_str(), data->data(), data->size())));
      if (trains && &port == &described["outputs"][0] && port["dtype"] == "float32")
        std::printf("step %lld loss %.9g\n", static_cast<long long>(step), element_of<double>(DType::float32, data->data(), 0));
      if (arguments.outputs.empty()) continue;
      outputs.push_back({array_of(port), std::to_string(step) + "." + name, [data](void* target) {
                           std::memcpy(target, data->data(), data->size());
                           return Status();
                         }});
    }
  }
  return arguments.outputs.empty() ? Status() : write_tensors(arguments.outputs, std::move(outputs), {});
}

/// Print the tokens that follow each prompt, a line for each; those of one prompt as soon as they are there.
Status continue_texts(torchedge_bundle* handle, const Arguments& arguments) {
  bool first = true;
  auto show = [](void* begins, size_t, int64_t token) {
    std::printf("%s%lld", *static_cast<bool*>(begins) ? "" : ",", static_cast<long long>(token));
    std::fflush(stdout);
    *static_cast<bool*>(begins) = false;
  };
  const size_t texts = arguments.counts.size(), most = arguments.new_tokens;
  torchedge_sampling how = arguments.sampling;
  how.stop = arguments.stop.data();
  how.stops = arguments.stop.size();
  how.stream = texts == 1 ? +show : nullptr;
  how.context = &first;
  std::vector<int64_t> tokens(texts * most);
  std::vector<size_t> made(texts);
  int code = torchedge_generate(handle, arguments.prompts.data(), arguments.counts.data(), texts, tokens.data(), most, made.data(), &how);
  if (!first) std::printf("\n");
  TE_CHECK(check(handle, code));
  for (size_t text = 0; texts > 1 && text < texts; ++text, first = true) {
    for (size_t k = 0; k < made[text]; ++k) show(&first, text, tokens[text * most + k]);
    std::printf("\n");
  }
  return {};
}

/// Print what --check finds; the exit status is 1 where a launch was off.
Result<int> self_test(torchedge_bundle* handle, bool json) {
  const std::string text = torchedge_check(handle);
  TE_CHECK(check(handle, *torchedge_error(handle) != '\0'));
  const Json report = Json::parse(text);
  const Json& off = report["off"];
  auto word = [](const Json& from, const char* key) { return from[key].get<std::string>(); };
  if (json) {
    std::printf("%s\n", text.c_str());
  } else {
    std::printf("%s on %s: %lld results, %lld with the bits of %s\n", word(report, "model").c_str(), word(report, "device").c_str(),
                report["results"].get<long long>(), report["identical"].get<long long>(), word(report, "made_on").c_str());
    if (!off.is_null())
      std::printf("off: launch %lld of %s, kernel %s%s%s: the %s of %s is %.9g; expected %.9g within %.3g. Results before it are right.\n",
                  off["launch"].get<long long>(), word(off, "program").c_str(), word(off, "kernel").c_str(), off["scope"] == "" ? "" : " of ",
                  word(off, "scope").c_str(), word(off, "figure").c_str(), word(off, "tensor").c_str(), off["measured"].get<double>(),
                  off["expected"].get<double>(), off["bound"].get<double>());
  }
  return off.is_null() ? 0 : 1;
}

/// Do what the arguments ask of an opened bundle, and return the exit status.
Result<int> run(torchedge_bundle* handle, const Arguments& arguments) {
  if (arguments.check) return self_test(handle, arguments.json);
  const Json described = Json::parse(torchedge_describe(handle));
  const Json* method = arguments.method.empty() ? &described : nullptr;
  for (const Json& each : described["methods"])
    if (each["name"] == arguments.method) method = &each;
  if (method == nullptr) TE_CHECK(check(handle, torchedge_step(handle, arguments.method.c_str())));  // its error names those that are there
  const bool generates = !arguments.counts.empty();
  if (!generates && arguments.inputs.empty() && !(*method)["inputs"].empty() && arguments.steps == 0) {
    std::printf("%s\n", described.dump(2).c_str());
    return 0;
  }
  if (!arguments.load.empty()) TE_CHECK(check(handle, torchedge_load(handle, arguments.load.c_str())));
  for (const auto& [name, value] : arguments.settings) TE_CHECK(check(handle, torchedge_set(handle, name.c_str(), value)));
  TE_CHECK(generates ? continue_texts(handle, arguments) : run_steps(handle, arguments, *method, described["mode"] == "train"));
  if (!arguments.save.empty()) TE_CHECK(check(handle, torchedge_save(handle, arguments.save.c_str())));
  if (arguments.figures) std::printf("%s\n", Json::parse(torchedge_describe(handle))["figures"].dump(2).c_str());
  return 0;
}

void show_progress(void*, int done, int total) {
  std::fprintf(stderr, done < total ? "\rbuilding kernels %d/%d" : "\r\033[K", done, total);
}

int fail(const std::string& reason) {
  std::fprintf(stderr, "error: %s\n", reason.c_str());
  return 2;
}

}  // namespace

int main(int count, char** words) {
  if (count == 2 && std::strcmp(words[1], "--help") == 0) return std::fputs(kUsage, stdout), 0;
  auto arguments = parse(count, words);
  if (!arguments.ok()) return fail(arguments.error().text);
  const Arguments& chosen = arguments.value();
  torchedge_options options = chosen.options;
  options.device = chosen.device.c_str();
  options.cache = chosen.cache.c_str();
  options.sha256 = chosen.sha256.c_str();
  options.time_launches = static_cast<int>(chosen.times);
  if (isatty(STDERR_FILENO)) options.progress = show_progress;
  torchedge_bundle* handle = nullptr;
  int code = torchedge_open(chosen.bundle.c_str(), &options, &handle);
  Result<int> result = Error{"the host has too little memory"};
  try {
    Status opened = check(handle, code);
    result = opened.ok() ? run(handle, chosen) : Result<int>(opened.error());
  } catch (const std::bad_alloc&) {  // it stays so
  }
  torchedge_close(handle);
  return result.ok() ? result.value() : fail(result.error().text);
}
