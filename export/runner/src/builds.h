// Kernels from text: few programs for many kernels, and compiled programs kept on disk.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "opencl.h"
#include "program.h"
#include "torchedge.h"

namespace torchedge {

struct Built {
  std::vector<cl_program> programs;
  std::map<std::string, cl_program> by_kernel;
  int from_cache = 0;
};

/// Build kernels, by the cache and the progress of the options. An entry of the cache that is damaged, another key's or
/// not this user's own counts as absent, for the driver would run it.
Status build_kernels(const ClLibrary& cl, const ClDevice& device, cl_context context, const std::vector<Kernel>& kernels,
                     const torchedge_options& options, Built& built);

}  // namespace torchedge
