// check.json: what each launch wrote on the exporting machine, and the same on this device. Python's side, which
// measures the bounds and documents the figures: torchedge/bundles/checks.py.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "executor.h"

namespace torchedge {
namespace {

constexpr const char* kFigures[] = {"sum", "sum of absolute values", "weighted sum", "least number", "greatest number", "count of numbers that are not finite"};

std::array<double, 6> figures_of(const Form& form, const std::string& array) {
  double sum = 0, absolute = 0, weighted = 0, least = INFINITY, greatest = -INFINITY, missing = 0;
  for (int64_t k = 0; k < form.elements(); ++k) {
    double value = element_of<double>(form.dtype, array.data(), k);
    if (!std::isfinite(value)) ++missing, value = 0;
    sum += value;
    absolute += std::abs(value);
    weighted += value * (static_cast<uint32_t>(static_cast<uint32_t>(k) * 2654435761u) / 4294967296.0 - 0.5);
    least = std::min(least, value);
    greatest = std::max(greatest, value);
  }
  if (least > greatest) least = greatest = 0;
  return {sum, absolute, weighted, least, greatest, missing};
}

/// The numbers that a check feeds to a port.
std::string check_input(const Tensor& tensor, uint32_t port) {
  const Form& form = tensor.form;
  std::string array(form.array_bytes(), '\0');
  for (int64_t k = 0; k < form.elements(); ++k) {
    uint32_t bits = (static_cast<uint32_t>(k) + 1 + 40503 * port) * 2654435761u;
    bits = (bits ^ bits >> 15) * 2246822519u;
    bits ^= bits >> 13;
    double fraction = (bits >> 21) / 2048.0;
    bool ranged = tensor.indices && tensor.indices->high > tensor.indices->low;
    int64_t whole = ranged ? tensor.indices->low + bits % (tensor.indices->high - tensor.indices->low) : bits & 1;
    put_element(form.dtype, array.data(), k, is_float(form.dtype) ? fraction : static_cast<double>(whole));
  }
  return array;
}

}  // namespace

Status read_check(const std::string& name, const std::string& text, Bundle& bundle) {
  TE_TRY(document, Document::parse(name, text));
  Entry entry = document.root();
  entry.only({"schema", "device", "accumulating", "program", "methods"});
  entry.at("schema").word({"torchedge-check-1"});
  bundle.check.device = entry.at("device").text();
  std::vector<Entry> lists = {entry.at("program")};
  for (size_t k = 1; k < bundle.methods.size(); ++k) lists.push_back(entry.at("methods").at(bundle.methods[k].name.c_str()));
  lists.push_back(entry.at("accumulating"));
  for (size_t number = 0; number < lists.size(); ++number) {
    bundle.check.results.emplace_back();
    for (const Entry& item : lists[number].items(size_t{1} << 16)) {
      item.only({"launch", "tensor", "sha256", "figures", "bounds"});
      if (number == bundle.programs.size()) item.refuse("checks a program that is not there");
      if (!document.ok()) break;
      const Program& program = bundle.programs[number];
      Checked result{item.at("launch").integer(0, static_cast<int64_t>(program.launches.size()) - 1),
                     item.at("tensor").integer(0, static_cast<int64_t>(program.tensors.size()) - 1), item.at("sha256").sha256(), {}, {}};
      auto figures = item.at("figures").items(6, 6), bounds = item.at("bounds").items(6, 6);
      if (!document.ok() || program.launches.empty()) break;
      for (size_t k = 0; k < 6; ++k) result.figures[k] = figures[k].number(), result.bounds[k] = bounds[k].number();
      const Launch& launch = program.launches[result.launch];
      auto& results = bundle.check.results[number];
      bool writes = false;
      for (size_t k = 0; k < launch.tensors.size(); ++k)
        writes |= launch.tensors[k] == result.tensor && program.kernels[launch.kernel].access[k] != Access::read;
      if (!writes) item.refuse("checks a tensor that its launch does not write");
      if (!results.empty() && results.back().launch > result.launch) item.refuse("comes after a later launch");
      results.push_back(std::move(result));
    }
  }
  return document.status();
}

/// Run a batch through each program, the accumulating one first, and compare what each launch wrote.
Result<Json> Executor::check() {
  if (bundle_.check.results.empty())
    return Error{bundle_.path + ": holds no check.json; export the model with check=True (torchedge export --check)"};
  int64_t count = 0, identical = 0;
  Json off;
  for (size_t number = placed_.size(); number-- > 0 && off.is_null();) {
    const Placed& placed = placed_[number];
    const Program& program = *placed.program;
    std::vector<int64_t> fed = program.fed();
    for (size_t port = 0; port < fed.size(); ++port) {
      const std::string array = check_input(program.tensors[fed[port]], static_cast<uint32_t>(port));
      TE_CHECK(feed(placed, port, array.data()));
    }
    const std::vector<Checked>& results = bundle_.check.results[number];
    auto next = results.begin();
    std::string array;
    Status status = enqueue(placed, [&](int64_t position) -> Status {
      for (; next != results.end() && next->launch == position && off.is_null(); ++next) {
        const Tensor& tensor = program.tensors[next->tensor];
        array.assign(tensor.form.array_bytes(), '\0');
        TE_CHECK(read(tensor, placed.memory[next->tensor], array.data()));
        ++count;
        if (sha256_of(array) == next->sha256) {
          ++identical;
          continue;
        }
        auto figures = figures_of(tensor.form, array);
        for (size_t k = 0; k < figures.size() && off.is_null(); ++k) {
          if (std::abs(figures[k] - next->figures[k]) <= next->bounds[k]) continue;
          const Launch& launch = program.launches[position];
          off = {{"program", number < bundle_.methods.size() ? placed.method->file : "accumulating.json"}, {"launch", position}, {"kernel", program.kernels[launch.kernel].name},
                 {"scope", launch.scope}, {"tensor", tensor.name}, {"figure", kFigures[k]}, {"measured", figures[k]},
                 {"expected", next->figures[k]}, {"bound", next->bounds[k]}};
        }
      }
      return {};
    });
    cl_.Finish(queue_);
    end_copies();
    TE_CHECK(std::move(status));
  }
  return Json{{"model", bundle_.model}, {"device", device_.title()}, {"driver", device_.driver}, {"made_on", bundle_.check.device},
              {"results", count}, {"identical", identical}, {"off", off}};
}

}  // namespace torchedge
