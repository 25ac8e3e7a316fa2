/* A driver with vendors' extensions, in front of the real one: preloaded into the runner, and its OpenCL library.
 *
 * VENDOR_EXTENSIONS  names that the device lists beside its own
 * VENDOR_ALLOCATION  bytes of its largest allocation
 * VENDOR_REFUSES     contexts and queues with hints cannot be made
 * VENDOR_LOG         a file for a line for each hint, recording, recorded launch and replay
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef long word;
#define NEXT(name) dlsym(RTLD_NEXT, name)

static void say(const char *format, ...) {
  FILE *file = fopen(getenv("VENDOR_LOG"), "a");
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fclose(file);
}

int clGetDeviceInfo(void *device, unsigned key, size_t size, void *value, size_t *given) {
  int (*real)(void *, unsigned, size_t, void *, size_t *) = NEXT("clGetDeviceInfo");
  const char *more = getenv("VENDOR_EXTENSIONS"), *most = getenv("VENDOR_ALLOCATION");
  if (key == 0x1010 && most != NULL) return *(unsigned long *)value = strtoul(most, NULL, 10), 0;
  if (key != 0x1030 || more == NULL) return real(device, key, size, value, given);
  char text[65536] = "";
  if (real(device, key, sizeof text / 2, text, NULL) != 0) return -30;
  strcat(strcat(text, " "), more);
  if (given != NULL) *given = strlen(text) + 1;
  if (value != NULL) memcpy(value, text, size < strlen(text) + 1 ? size : strlen(text) + 1);
  return 0;
}

void *clCreateContext(const word *properties, unsigned count, void *const *devices, void *notify, void *data, int *code) {
  void *(*real)(const word *, unsigned, void *const *, void *, void *, int *) = NEXT("clCreateContext");
  const word plain[] = {properties[0], properties[1], 0};
  for (const word *hint = properties + 2; *hint != 0; hint += 2) say("context %lx %lx\n", hint[0], hint[1]);
  if (getenv("VENDOR_REFUSES") != NULL && properties[2] != 0) return *code = -64, NULL;
  return real(plain, count, devices, notify, data, code);
}

static void *recorder;
static struct {
  void *kernel;
  unsigned dimensions;
  size_t global[3], local[3];
  int grouped;
} recorded[4096];
static int launches, recording;

void *clCreateCommandQueue(void *context, void *device, unsigned long properties, int *code) {
  void *(*real)(void *, void *, unsigned long, int *) = NEXT("clCreateCommandQueue");
  void *queue = real(context, device, 0, code);
  if (properties == 1ul << 30) recorder = queue;
  return queue;
}

void *clCreateCommandQueueWithProperties(void *context, void *device, const unsigned long *properties, int *code) {
  say("queue %lx %lx\n", properties[0], properties[1]);
  return getenv("VENDOR_REFUSES") != NULL ? (*code = -35, NULL) : clCreateCommandQueue(context, device, 0, code);
}

typedef int (*Enqueue)(void *, void *, unsigned, const size_t *, const size_t *, const size_t *, unsigned, const void *, void *);

int clEnqueueNDRangeKernel(void *queue, void *kernel, unsigned dimensions, const size_t *offset, const size_t *global, const size_t *local,
                           unsigned count, const void *events, void *event) {
  if (recorder == NULL || queue != recorder) return ((Enqueue)NEXT("clEnqueueNDRangeKernel"))(queue, kernel, dimensions, offset, global, local, count, events, event);
  if (!recording) return -59;
  recorded[launches].kernel = kernel;
  recorded[launches].dimensions = dimensions;
  memcpy(recorded[launches].global, global, dimensions * sizeof *global);
  if ((recorded[launches].grouped = local != NULL)) memcpy(recorded[launches].local, local, dimensions * sizeof *local);
  return ++launches, 0;
}

void *clNewRecordingQCOM(void *queue, int *code) { return say("recording\n"), recording = queue == recorder, *code = 0, &recorded; }
int clEndRecordingQCOM(void *made) { return say("%d launches\n", launches), recording = 0; }
int clReleaseRecordingQCOM(void *made) { return say("released\n"), 0; }
int clEnqueueRecordingQCOM(void *queue, void *made, size_t a, void *b, size_t c, void *d, size_t e, void *f, size_t g, void *h, unsigned count,
                           const void *events, void *event) {
  say("replay\n");
  for (int k = 0; k < launches; ++k) {
    int code = ((Enqueue)NEXT("clEnqueueNDRangeKernel"))(queue, recorded[k].kernel, recorded[k].dimensions, NULL, recorded[k].global,
                                                         recorded[k].grouped ? recorded[k].local : NULL, 0, NULL, NULL);
    if (code != 0) return code;
  }
  return a || c || e || g ? -30 : 0;
}
