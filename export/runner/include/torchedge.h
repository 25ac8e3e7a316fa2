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
  uint32_t hints;           /* some of those below; 0: what the driver does by itself */
  int time_launches;        /* most runs of each launch, one after the other, whose shortest time the figures give,
                               with that of reading the weights file; what a step computes is of no use then */
} torchedge_options;

/* Hints for drivers, each without effect where the device does not list the extension: high clocks and priority
 * (cl_qcom_perf_hint, cl_qcom_priority_hint, cl_khr_priority_hints), low ones, and launches of a step that are recorded
 * once (cl_qcom_recordable_queues). */
enum { TORCHEDGE_FAST = 1, TORCHEDGE_SPARING = 2, TORCHEDGE_RECORD = 4 };

/* Open a bundle's folder: check every file, build, allocate, load the weights. options may be NULL. *handle is set
 * in any case but a full memory, also on errors, so that torchedge_error can say why; close it. */
TORCHEDGE_API int torchedge_open(const char *folder, const torchedge_options *options, torchedge_bundle **handle);

/* The model, methods, inputs, outputs, parameters, states, hyperparameters and the device, as JSON, and "figures":
 * steps, times in ms (median and quartiles: of the last 1,000 steps), bytes allocated on the device, compiled and
 * cached programs, the process's largest resident set until kernels were built and until now. Valid until the next
 * call of this function in the same thread. */
TORCHEDGE_API const char *torchedge_describe(torchedge_bundle *handle);

/* Copy an array to an input, where it stays until it is set again. method: whose input; NULL: the first one's.
 * nbytes: that of the whole array. Whole numbers that the model indexes with are checked. */
TORCHEDGE_API int torchedge_set_input(torchedge_bundle *handle, const char *method, const char *name, const void *data,
                                      size_t nbytes);

/* Run one batch of a method; NULL: the first one. It is an inference or a training step, and returns when the device
 * has ended it. Methods share weights and states. With accumulation N every N-th step updates the weights. A step that
 * computes an index out of range, or divides whole numbers by zero, is an error. */
TORCHEDGE_API int torchedge_step(torchedge_bundle *handle, const char *method);

/* Copy an output of the last step, or a parameter, buffer or state as it is now. nbytes: that of the whole array. */
TORCHEDGE_API int torchedge_get_output(torchedge_bundle *handle, const char *name, void *data, size_t nbytes);

/* How torchedge_generate chooses tokens. Set it to zeros, then set what is wanted. */
typedef struct {
  double temperature;                             /* 0: the most likely token; above it tokens are drawn */
  double top_p;                                   /* among the fewest whose probabilities reach it; 0: all */
  uint64_t top_k;                                 /* among so many of the most likely; 0: all */
  uint64_t seed;                                  /* the same seed draws the same; text n draws by seed + n */
  const int64_t *stop;                            /* tokens that end a text, and are returned, too */
  size_t stops;                                   /* their number */
  /* called with each new token and its text, from 0; may not call the handle; NULL: not */
  void (*stream)(void *context, size_t text, int64_t token);
  void *context;                                  /* passed on to stream */
} torchedge_sampling;

/* Write the tokens that follow each prompt, at most `most` for each, by a bundle of torchedge.export_lm. prompts: one
 * behind the other, text n of counts[n] tokens; texts: their number, at most the bundle's batch. Of text n, made[n]
 * tokens are written from tokens[n * most] on. Prompts run in chunks; what they have in common with the tokens of the
 * call before is not computed again. how: NULL takes the most likely tokens. */
TORCHEDGE_API int torchedge_generate(torchedge_bundle *handle, const int64_t *prompts, const size_t *counts, size_t texts,
                                     int64_t *tokens, size_t most, size_t *made, const torchedge_sampling *how);

/* Set a hyperparameter, such as "lr", which keeps its value until it is set again. */
TORCHEDGE_API int torchedge_set(torchedge_bundle *handle, const char *name, double value);

/* Write parameters, buffers, optimizer state, hyperparameters and the number of batches to a safetensors file: the
 * old file or the new one is there, whenever the process ends. */
TORCHEDGE_API int torchedge_save(torchedge_bundle *handle, const char *path);

/* Read such a file, or one of parameters and buffers alone, whose optimizer state begins anew. Steps after it have
 * the bits of a run that was never stopped. The file is checked before anything is replaced. */
TORCHEDGE_API int torchedge_load(torchedge_bundle *handle, const char *path);

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
