// The streaming plan of a bundle: reads of the weights file, copies to the device, and what waits for what.
#pragma once

#include <string>

#include "program.h"

namespace torchedge {

/// Give a program the loads and the arena of its plan, checked: `header` and `nbytes` are those of the weights file.
Status read_plan(const std::string& name, const std::string& text, const FileHeader& header, int64_t nbytes, Program& program);

}  // namespace torchedge
