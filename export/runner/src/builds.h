// Kernels from text: few programs for many kernels, and compiled programs kept on disk.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "opencl.h"
#include "program.h"

namespace torchedge {

/// Called between builds, since a first start can take long: programs done, of how many.
using Progress = std::function<void(int done, int total)>;

struct Built {
  std::vector<cl_program> programs;
  std::map<std::string, cl_program> by_kernel;
  int from_cache = 0;
};

/// Build kernels. cache: a folder of compiled programs, empty for none; an entry that is damaged, another key's or
/// not this user's own counts as absent, for the driver would run it.
Status build_kernels(const ClLibrary& cl, const ClDevice& device, cl_context context, const std::vector<Kernel>& kernels,
                     const std::string& cache, const Progress& progress, Built& built);

}  // namespace torchedge
