// Threads that share a handle, and one that opens and closes its own meanwhile; for ThreadSanitizer.
//   threads BUNDLE DEVICE INPUT BYTES OUTPUT BYTES
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "torchedge.h"

namespace {

std::atomic<bool> failed{false};

void check(torchedge_bundle* bundle, int code) {
  if (code != 0 && !failed.exchange(true)) std::fprintf(stderr, "%s\n", torchedge_error(bundle));
}

void count(void* calls, int, int) { ++*static_cast<std::atomic<int>*>(calls); }

torchedge_bundle* open(char** words) {
  static std::atomic<int> calls{0};
  torchedge_options options{};
  options.device = words[2];
  options.progress = count;
  options.context = &calls;
  torchedge_bundle* bundle = nullptr;
  check(bundle, torchedge_open(words[1], &options, &bundle));
  return bundle;
}

void step(torchedge_bundle* bundle, char** words, int times) {
  std::vector<char> input(std::strtoul(words[4], nullptr, 10)), output(std::strtoul(words[6], nullptr, 10));
  for (int k = 0; k < times && !failed; ++k) {
    check(bundle, torchedge_set_input(bundle, nullptr, words[3], input.data(), input.size()));
    check(bundle, torchedge_step(bundle, nullptr));
    check(bundle, torchedge_get_output(bundle, words[5], output.data(), output.size()));
    if (torchedge_describe(bundle) == nullptr) check(bundle, -1);
  }
}

}  // namespace

int main(int, char** words) {
  torchedge_bundle* shared = open(words);
  std::vector<std::thread> threads;
  for (int k = 0; k < 3; ++k) threads.emplace_back(step, shared, words, 10);
  threads.emplace_back([&] {
    torchedge_bundle* own = open(words);
    step(own, words, 5);
    torchedge_close(own);
  });
  for (std::thread& thread : threads) thread.join();
  torchedge_close(shared);
  return failed ? 1 : 0;
}
