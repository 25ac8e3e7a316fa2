// torchedge-open: opens the bundles that standard input lists, a folder a line, and prints what is wrong with each.
// It needs no OpenCL, and is built with the sanitizers alone: a fuzzer changes bundles, and this program reads them.
#include <cstdio>
#include <iostream>

#include "bundle.h"

int main() {
  std::string folder;
  while (std::getline(std::cin, folder)) {
    auto bundle = torchedge::open_bundle(folder, "");
    auto weights = bundle.ok() ? bundle.value().read_weights([](auto&, auto) { return torchedge::Status(); }) : bundle.error();
    std::printf("%s\n", weights.ok() ? "" : weights.error().text.c_str());
    std::fflush(stdout);
  }
  return 0;
}
