// The C API: one lock a handle, and no exception beyond it.
#include "torchedge.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>

#include "executor.h"

using namespace torchedge;

struct torchedge_bundle {
  std::mutex lock;
  std::unique_ptr<Executor> executor;
  std::string error, checked;
};

namespace {

Json port_json(const std::string& name, const Array& array) {
  return {{"name", name}, {"shape", array.shape}, {"dtype", name_of(array.dtype)}, {"bytes", array.array_bytes()}};
}

Json ports_json(const std::vector<Port>& ports) {
  Json list = Json::array();
  for (const Port& port : ports) list.push_back(port_json(port.name, port));
  return list;
}

Json limits_json(const Executor& executor) {
  const ClDevice& device = executor.device();
  return {{"name", device.name}, {"vendor", device.vendor}, {"platform", device.platform_name}, {"opencl", device.version},
          {"type", device.type}, {"unified", device.unified}, {"compute_units", device.compute_units}, {"clock_mhz", device.clock_mhz},
          {"memory_bytes", device.memory}, {"allocation_bytes", device.allocation}, {"local_bytes", device.local_bytes},
          {"base_alignment", device.base_alignment}, {"work_group", device.work_group}, {"work_item_sizes", device.work_item_sizes},
          {"image_width", device.image_width}, {"image_height", device.image_height}, {"pitch_alignment", device.pitch_alignment},
          {"image_from_buffer", device.image_from_buffer()}, {"half", device.has("cl_khr_fp16")}, {"double", device.has("cl_khr_fp64")},
          {"warp", executor.figures().warp}};
}

/// A quantile of sorted times, interpolated between its neighbours; 0 of none.
double quantile(const std::vector<double>& sorted, double share) {
  if (sorted.empty()) return 0.0;
  double place = share * static_cast<double>(sorted.size() - 1);
  size_t low = static_cast<size_t>(place), high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (place - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

Json report(const Executor& executor) {
  const Figures& figures = executor.figures();
  std::vector<double> times = figures.recent_ms;
  std::sort(times.begin(), times.end());
  Json document = {{"device", executor.device().title()},
                   {"driver", executor.device().driver},
                   {"steps", figures.steps},
                   {"step_ms", figures.step_ms},
                   {"mean_step_ms", figures.steps ? figures.total_step_ms / static_cast<double>(figures.steps) : 0.0},
                   {"median_step_ms", quantile(times, 0.5)},
                   {"lower_quartile_step_ms", quantile(times, 0.25)},
                   {"upper_quartile_step_ms", quantile(times, 0.75)},
                   {"build_ms", figures.build_ms},
                   {"load_ms", figures.load_ms},
                   {"allocated_bytes", figures.allocated_bytes},
                   {"streamed_bytes", figures.streamed_bytes},
                   {"built_peak_bytes", figures.built_peak_bytes},
                   {"peak_bytes", peak_resident_bytes()},
                   {"programs", figures.programs},
                   {"programs_from_cache", figures.programs_from_cache}};
  if (!figures.launch_ns.empty()) {
    document["launch_ns"] = figures.launch_ns;
    document["disk"] = {{"bytes", executor.bundle().weights.size()}, {"ms", figures.disk_ms}};
  }
  return document;
}

std::string describe(const Executor& executor) {
  const Bundle& bundle = executor.bundle();
  Json state = Json::array(), methods = Json::array();
  for (const auto& [tensor, memory] : executor.kept()) {
    state.push_back(port_json(tensor->name, tensor->form));
    state.back()["role"] = name_of(tensor->role);
  }
  for (const Method& method : bundle.methods)
    methods.push_back({{"name", method.name}, {"inputs", ports_json(method.inputs)}, {"outputs", ports_json(method.outputs)}});
  Json document = {{"model", bundle.model},
                   {"mode", bundle.trains ? "train" : "infer"},
                   {"accumulation", bundle.accumulation},
                   {"sha256", bundle.sha256},
                   {"made_for", bundle.made_for},
                   {"device", executor.device().title()},
                   {"driver", executor.device().driver},
                   {"methods", methods},
                   {"limits", limits_json(executor)},
                   {"inputs", ports_json(bundle.methods[0].inputs)},
                   {"outputs", ports_json(bundle.methods[0].outputs)},
                   {"state", state},
                   {"hyperparameters", executor.hyperparameters()},
                   {"launches", bundle.programs[0].launches.size()},
                   {"streams", bundle.streams},
                   {"figures", report(executor)}};
  return document.dump(2, ' ', false, Json::error_handler_t::replace);
}

/// Run a function under the lock of a handle; its error, or that of memory that ran out, is the handle's.
template <class Function>
int guarded(torchedge_bundle& handle, Function function) {
  std::lock_guard<std::mutex> held(handle.lock);
  try {
    Status status = function();
    handle.error = status.ok() ? "" : status.error().text;
    return status.ok() ? 0 : -1;
  } catch (const std::bad_alloc&) {
    handle.error.assign("the host has too little memory");
  } catch (...) {
    handle.error.assign("an unexpected failure: report it");
  }
  return -1;
}

/// Run a function of the executor; a bundle that did not open still says why.
template <class Function>
int call(torchedge_bundle* handle, Function function) {
  if (handle == nullptr) return -1;
  return guarded(*handle, [&]() -> Status {
    if (handle->executor == nullptr) return Error{handle->error};
    return function(*handle->executor);
  });
}

}  // namespace

int torchedge_open(const char* folder, const torchedge_options* options, torchedge_bundle** handle) {
  if (handle == nullptr) return -1;
  *handle = new (std::nothrow) torchedge_bundle();
  if (*handle == nullptr) return -1;
  return guarded(**handle, [&]() -> Status {
    const torchedge_options chosen = options == nullptr ? torchedge_options{} : *options;
    TE_TRY(bundle, open_bundle(given(folder), given(chosen.sha256)));
    auto executor = std::make_unique<Executor>(std::move(bundle));
    TE_CHECK(executor->open(chosen));
    (*handle)->executor = std::move(executor);
    return {};
  });
}

const char* torchedge_describe(torchedge_bundle* handle) {
  static thread_local std::string described;  // another thread may ask for the handle's meanwhile
  int code = call(handle, [&](Executor& executor) { return described = describe(executor), Status(); });
  return code == 0 ? described.c_str() : "{}";
}

int torchedge_set_input(torchedge_bundle* handle, const char* method, const char* name, const void* data, size_t nbytes) {
  return call(handle, [&](Executor& executor) { return executor.set_input(given(method), given(name), data, static_cast<int64_t>(nbytes)); });
}

int torchedge_step(torchedge_bundle* handle, const char* method) {
  return call(handle, [&](Executor& executor) { return executor.step(given(method)); });
}

int torchedge_generate(torchedge_bundle* handle, const int64_t* prompts, const size_t* counts, size_t texts, int64_t* tokens, size_t most,
                       size_t* made, const torchedge_sampling* how) {
  return call(handle, [&](Executor& executor) -> Status {
    std::vector<std::vector<int64_t>> given;
    for (size_t text = 0; text < texts; prompts += counts[text++]) given.emplace_back(prompts, prompts + counts[text]);
    TE_TRY(continued, executor.generate(given, most, how == nullptr ? torchedge_sampling{} : *how));
    for (size_t text = 0; text < texts; ++text) {
      std::copy(continued[text].begin(), continued[text].end(), tokens + text * most);
      made[text] = continued[text].size();
    }
    return {};
  });
}

int torchedge_get_output(torchedge_bundle* handle, const char* name, void* data, size_t nbytes) {
  return call(handle, [&](Executor& executor) { return executor.read(given(name), data, static_cast<int64_t>(nbytes)); });
}

int torchedge_set(torchedge_bundle* handle, const char* name, double value) {
  return call(handle, [&](Executor& executor) { return executor.set(given(name), value); });
}

int torchedge_save(torchedge_bundle* handle, const char* path) {
  return call(handle, [&](Executor& executor) { return executor.save(given(path)); });
}

int torchedge_load(torchedge_bundle* handle, const char* path) {
  return call(handle, [&](Executor& executor) { return executor.load(given(path)); });
}

const char* torchedge_check(torchedge_bundle* handle) {
  int code = call(handle, [&](Executor& executor) -> Status {
    TE_TRY(report, executor.check());
    handle->checked = report.dump(2, ' ', false, Json::error_handler_t::replace);
    return {};
  });
  return code == 0 ? handle->checked.c_str() : "{}";
}

const char* torchedge_error(torchedge_bundle* handle) {
  return handle == nullptr ? "there is no handle: the host has too little memory" : handle->error.c_str();
}

void torchedge_close(torchedge_bundle* handle) { delete handle; }
