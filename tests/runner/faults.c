/* What goes wrong on a device, on demand: preloaded into the runner, and its OpenCL library, linked to the real one.
 *
 * FAULT=NAME:WHAT:N  the N-th call of NAME, from 1 on, and with WHAT "short" every call from there on:
 *   fail   reports an error; short: moves at most 7 bytes; kill: ends the process before the call, as SIGKILL does
 * FAULT_PATH         the calls on files whose path contains this are counted, no others
 * FAULT_LOG          a file for the OpenCL objects that were created and not released, a line with their number
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static long calls, objects;
static int reading;

static const char *due(const char *name) {
  static __thread char what[16];
  const char *fault = getenv("FAULT");
  char wanted[64];
  long number;
  if (fault == NULL || sscanf(fault, "%63[^:]:%15[^:]:%ld", wanted, what, &number) != 3 || strcmp(wanted, name) != 0) return "";
  long call = ++calls;
  if (strcmp(what, "short") == 0 ? call < number : call != number) return "";
  if (strcmp(what, "kill") == 0) kill(getpid(), SIGKILL);
  return what;
}

static int watched(const char *path) {
  const char *part = getenv("FAULT_PATH");
  return part != NULL && strstr(path, part) != NULL;
}

static int watched_file(int descriptor) {
  char link[64], path[4096] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  int is = readlink(link, path, sizeof path - 1) > 0 && watched(path);
  reading |= is;
  return is;
}

#define REAL(result, name, ...) ((result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

#define FILE_CALL(name, type, count, parameters, arguments)                                   \
  ssize_t name parameters {                                                                   \
    const char *what = watched_file(descriptor) ? due(#name) : "";                            \
    if (strcmp(what, "fail") == 0) return errno = type, -1;                                   \
    if (strcmp(what, "short") == 0 && count > 7) count = 7;                                   \
    return ((ssize_t(*) parameters)dlsym(RTLD_NEXT, #name))arguments;                         \
  }
FILE_CALL(pread, EIO, size, (int descriptor, void *data, size_t size, off_t at), (descriptor, data, size, at))
FILE_CALL(write, ENOSPC, size, (int descriptor, const void *data, size_t size), (descriptor, data, size))

int fsync(int descriptor) {
  if (watched_file(descriptor) && strcmp(due("fsync"), "fail") == 0) return errno = EIO, -1;
  return REAL(int, "fsync", int)(descriptor);
}

int rename(const char *from, const char *to) {
  if (watched(to) && strcmp(due("rename"), "fail") == 0) return errno = EIO, -1;
  return REAL(int, "rename", const char *, const char *)(from, to);
}

/* Large allocations, from the first watched read on. */
void *malloc(size_t size) {
  static void *(*real)(size_t);
  if (real == NULL) real = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
  return reading && size >= 4096 && strcmp(due("malloc"), "fail") == 0 ? NULL : real(size);
}

/* OpenCL: arguments are passed on as words, which the ABIs of 64-bit systems allow for integers and pointers. */
typedef long word;
#define WORDS word a, word b, word c, word d, word e, word f, word g, word h, word i, word j, word k
#define CALL(name) ((word(*)(WORDS))dlsym(RTLD_NEXT, #name))(a, b, c, d, e, f, g, h, i, j, k)
#define CODE(name) \
  int name(WORDS) { return strcmp(due(#name), "fail") == 0 ? -5 : (int)CALL(name); }
#define CREATE(name, place)                                                     \
  word name(WORDS) {                                                            \
    if (strcmp(due(#name), "fail") == 0) return *(int *)place = -4, (word)0;    \
    word made = CALL(name);                                                     \
    if (made != 0) ++objects;                                                   \
    return made;                                                                \
  }
#define RELEASE(name) \
  int name(WORDS) { return --objects, (int)CALL(name); }
CODE(clBuildProgram) CODE(clEnqueueNDRangeKernel) CODE(clSetKernelArg) CODE(clFinish)
CODE(clEnqueueReadBuffer) CODE(clEnqueueWriteBuffer)
CREATE(clCreateContext, f) CREATE(clCreateCommandQueue, d) CREATE(clCreateBuffer, e) CREATE(clCreateSubBuffer, e)
CREATE(clCreateImage, f) CREATE(clCreateProgramWithSource, e) CREATE(clCreateProgramWithBinary, g) CREATE(clCreateKernel, c)
RELEASE(clReleaseContext) RELEASE(clReleaseCommandQueue) RELEASE(clReleaseMemObject) RELEASE(clReleaseProgram) RELEASE(clReleaseKernel)

__attribute__((destructor)) static void report(void) {
  const char *path = getenv("FAULT_LOG");
  FILE *file = path == NULL ? NULL : fopen(path, "w");
  if (file == NULL) return;
  fprintf(file, "%ld\n", objects);
  fclose(file);
}
