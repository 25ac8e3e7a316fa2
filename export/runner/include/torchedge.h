/* torchedge: run and train exported bundles on a device without Python.
 *
 * A handle is one bundle on one device. Functions return 0, or -1 with a one-line reason in torchedge_error.
 * Nothing is printed, and nothing is kept outside of handles. Threads may share a handle: its calls run one after
 * the other. Handles are independent. A process that has opened one may not use it after fork().
 *
 * Arrays are dense, little endian, in the order of their dimensions, as numpy and PyTorch have them by default.
 */
#ifndef TORCHEDGE_H
#define TORCHEDGE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(TORCHEDGE_BUILD)
#define TORCHEDGE_API __attribute__((visibility("default")))
#else
#define TORCHEDGE_API
#endif

typedef struct torchedge_bundle torchedge_bundle;

/* How a bundle is opened. Set it to zeros, then set what is wanted. */
typedef struct {
  const char *device;       /* a part of "PLATFORM DEVICE VENDOR", in any case; NULL: the first GPU, else the first */
  const char *library;      /* the OpenCL library; NULL: $TORCHEDGE_OPENCL, libOpenCL.so.1, the vendors' places */
  const char *cache;        /* a folder for compiled programs, of this user alone; NULL: none */
  const char *sha256;       /* what the manifest's own SHA-256 has to be; NULL: any */
  uint64_t memory_limit;    /* bytes of all device memory; 0: what the device has. Below what is needed: an error */
  void (*progress)(void *context, int done, int total); /* called while kernels are compiled; NULL: not */
  void *context;            /* passed on to progress */
  int time_launches;        /* most runs of each launch, one after the other, whose shortest time torchedge_figures
                               gives, with that of reading the weights file; what a step computes is of no use then */
} torchedge_options;

/* Open a bundle's folder: check every file, build, allocate, load the weights. options may be NULL. *handle is set
 * in any case but a full memory, also on errors, so that torchedge_error can say why; close it. */
TORCHEDGE_API int torchedge_open(const char *folder, const torchedge_options *options, torchedge_bundle **handle);

/* The model, inputs, outputs, parameters, states, hyperparameters and the device, as JSON. Valid until the next
 * call of this function on the handle. */
TORCHEDGE_API const char *torchedge_describe(torchedge_bundle *handle);

/* Copy an array to an input, where it stays until it is set again. nbytes: that of the whole array. Whole numbers
 * that the model indexes with are checked. */
TORCHEDGE_API int torchedge_set_input(torchedge_bundle *handle, const char *name, const void *data, size_t nbytes);

/* Run one batch: an inference or a training step. It returns when the device has ended it. With accumulation N
 * every N-th step updates the weights. A step that computes an index out of range, or divides whole numbers by
 * zero, is an error. */
TORCHEDGE_API int torchedge_step(torchedge_bundle *handle);

/* Copy an output of the last step, or a parameter, buffer or state as it is now. nbytes: that of the whole array. */
TORCHEDGE_API int torchedge_get_output(torchedge_bundle *handle, const char *name, void *data, size_t nbytes);

/* Set a hyperparameter, such as "lr", which keeps its value until it is set again. */
TORCHEDGE_API int torchedge_set(torchedge_bundle *handle, const char *name, double value);

/* Write parameters, buffers, optimizer state, hyperparameters and the number of batches to a safetensors file: the
 * old file or the new one is there, whenever the process ends. */
TORCHEDGE_API int torchedge_save(torchedge_bundle *handle, const char *path);

/* Read such a file, or one of parameters and buffers alone, whose optimizer state begins anew. Steps after it have
 * the bits of a run that was never stopped. The file is checked before anything is replaced. */
TORCHEDGE_API int torchedge_load(torchedge_bundle *handle, const char *path);

/* Steps, times in ms (median and quartiles: of the last 1,000 steps), bytes allocated on the device, compiled and
 * cached programs, the process's largest resident set until kernels were built and until now, as JSON. Valid until
 * the next call of this function on the handle. */
TORCHEDGE_API const char *torchedge_figures(torchedge_bundle *handle);

/* Run one batch launch by launch, and compare what each writes with what it wrote on the exporting machine, which
 * the bundle's check.json tells: the first launch that is off, or null, as JSON. "{}" on an error. Open the bundle
 * again before it is used for anything else. Valid until the next call of this function on the handle. */
TORCHEDGE_API const char *torchedge_check(torchedge_bundle *handle);

/* Why the last call failed: one line; empty after a call that did not. Valid until the next call on the handle. */
TORCHEDGE_API const char *torchedge_error(torchedge_bundle *handle);

/* Give everything back. NULL is allowed. */
TORCHEDGE_API void torchedge_close(torchedge_bundle *handle);

#ifdef __cplusplus
}
#endif

#endif
