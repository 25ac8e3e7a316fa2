#!/usr/bin/env python3
"""Measures how much kernels slow down if they also load weights: latency under load.

    python3 load_probe.py --out LOADS.jsonl [--repeats 9] [--quick] [--device 0]

One file, Python 3.6 or newer, pyopencl and numpy; torchedge is not needed. For representative kernels of each
operator class (elemental: add, relu, gelu; reusable: matmul, conv; hierarchical: softmax, layer_norm) over
sizes and work-group shapes it measures the plain kernel, and the same kernel if each work-item also copies
its share of an extra buffer into an image2d (a buffer if the device has no images): it fetches a texel before
each step of its work and stores it after the step, without divergence, and copies the remainder at the end
(FlashMem, section 4.4). Extra bytes are 1/8 to 8 times the bytes that the kernel reads, and up to 64 times
for kernels that still take less than 1.5 times their own time. Tensors are stored in half precision and
computed in single precision; the extra bytes come from all over a pool that is larger than caches.

The output starts with a row about the machine ("environment"); then each row is a kernel of one size and one
work-group shape, with its time alone and under each load ("loads": bytes, median of interleaved runs, the
shortest of them, in ms, by the events of the device where it times them), or a stand-alone copy from buffer
to image ("copy"). Started again with the same --out, it continues where it stopped. Sizes that take too long
are skipped.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time

VERSION = "load_probe 1"
TEXEL = 8  # bytes: four halves
WIDTH_BITS = 12
RATIOS = (0.125, 0.25, 0.5, 1, 2, 4, 8)
FURTHER, SLOWED = (16, 32, 64), 1.5
POOL_BYTES = 256 << 20
ROUND_S, WARM_S = 1.5, 0.1  # the longest round that larger sizes may follow; runs of at least so long

SOURCE = r"""
#ifdef LOADED
#ifdef BUFFERS
#define TEXTURE __global ushort4 *texture
#define PUT texture[at] = held;
#else
#define TEXTURE __write_only image2d_t texture
#define PLACE (int2)(at & ((1u << WIDTH_BITS) - 1), at >> WIDTH_BITS)
#define PUT write_imageui(texture, PLACE, convert_uint4(held));
#endif
#define PARAMETERS __global const ushort4 *pool, TEXTURE, const uint first, const uint texels
#define LOADS , PARAMETERS
#define BEGIN(me, all) \
    uint at = (me), step = 0; ushort4 held = 0; \
    const uint stride = (all), steps = (texels + stride - 1) / stride;
#define FETCH if (step < steps) held = pool[first + min(at, texels - 1)];
#define STORE if (step < steps) { if (at < texels) { PUT } at += stride; step++; }
#define REST while (step < steps) { FETCH STORE }
#else
#define LOADS
#define BEGIN(me, all)
#define FETCH
#define STORE
#define REST
#endif
#define HALF __global half *
#define READ __global const half *

#ifdef LOADED
__kernel void copy(PARAMETERS) { BEGIN(get_global_id(0), get_global_size(0)) REST }
#endif

#define ELEMENTAL(name, INPUTS, RESULT) \
__kernel void name(INPUTS, HALF y LOADS) { \
    const uint i = get_global_id(0); \
    BEGIN(i, get_global_size(0)) FETCH \
    const float4 a = vload_half4(i, x); \
    vstore_half4(RESULT, i, y); \
    STORE REST \
}
#define TWO READ x, READ z
ELEMENTAL(relu, READ x, fmax(a, 0.0f))
ELEMENTAL(gelu, READ x, 0.5f * a * (1.0f + erf(a * 0.70710678f)))
ELEMENTAL(add, TWO, a + vload_half4(i, z))

#ifdef TILE
__kernel __attribute__((reqd_work_group_size(TILE, TILE, 1)))
void matmul(READ a, READ b, HALF c, const uint depth, const uint columns LOADS) {
    __local float left[TILE][TILE];
    __local float4 right[TILE][TILE];
    const uint i = get_local_id(1), j = get_local_id(0), row = get_global_id(1), column = get_global_id(0);
    BEGIN(row * get_global_size(0) + column, get_global_size(0) * get_global_size(1))
    float4 sum = 0.0f;
    for (uint k = 0; k < depth; k += TILE) {
        left[i][j] = vload_half(row * depth + k + j, a);
        right[i][j] = vload_half4((k + i) * columns + column, b);
        FETCH
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint t = 0; t < TILE; t++) sum += left[i][t] * right[t][j];
        barrier(CLK_LOCAL_MEM_FENCE);
        STORE
    }
    vstore_half4(sum, row * columns + column, c);
    REST
}
#endif

__kernel void conv(READ x, READ w, HALF y, const uint inputs, const uint width, const uint outputs LOADS) {
    const uint o = get_global_id(0), p = get_global_id(1);
    BEGIN(p * outputs + o, outputs * get_global_size(1))
    float4 sum = 0.0f;
    for (uint tap = 0; tap < 9; tap++) {
        const uint source = ((p / width + tap / 3) * (width + 2) + p % width + tap % 3) * inputs;
        FETCH
        for (uint c = 0; c < inputs; c += 4) {
            const float4 v = vload_half4((source + c) / 4, x);
            const uint at_w = (tap * inputs + c) * outputs + o;
            sum += v.x * vload_half4(at_w, w) + v.y * vload_half4(at_w + outputs, w)
                 + v.z * vload_half4(at_w + 2 * outputs, w) + v.w * vload_half4(at_w + 3 * outputs, w);
        }
        STORE
    }
    vstore_half4(sum, p * outputs + o, y);
    REST
}

#ifdef GROUP
#define PLUS(a, b) ((a) + (b))
#define REDUCE(value, JOIN) \
    part[me] = value; barrier(CLK_LOCAL_MEM_FENCE); \
    for (uint s = GROUP / 2; s > 0; s >>= 1) { \
        if (me < s) part[me] = JOIN(part[me], part[me + s]); barrier(CLK_LOCAL_MEM_FENCE); \
    } \
    value = part[0]; barrier(CLK_LOCAL_MEM_FENCE);
#define EACH for (uint q = me; q < quads; q += GROUP)
#define ROWS __attribute__((reqd_work_group_size(GROUP, 1, 1))) void
#define ENTER \
    __local float part[GROUP]; \
    const uint me = get_local_id(0), row = get_group_id(0) * quads; \
    BEGIN(get_global_id(0), get_global_size(0))

__kernel ROWS softmax(READ x, HALF y, const uint quads LOADS) {
    ENTER
    float most = -INFINITY, sum = 0.0f;
    FETCH
    EACH { const float4 v = vload_half4(row + q, x); most = fmax(most, fmax(fmax(v.x, v.y), fmax(v.z, v.w)));}
    REDUCE(most, fmax)
    STORE FETCH
    EACH { const float4 v = exp(vload_half4(row + q, x) - most); sum += v.x + v.y + v.z + v.w; }
    REDUCE(sum, PLUS)
    STORE FETCH
    EACH vstore_half4(exp(vload_half4(row + q, x) - most) / sum, row + q, y);
    STORE REST
}

__kernel ROWS layer_norm(READ x, READ gain, READ bias, HALF y, const uint quads LOADS) {
    ENTER
    float mean = 0.0f, spread = 0.0f;
    FETCH
    EACH { const float4 v = vload_half4(row + q, x); mean += v.x + v.y + v.z + v.w; }
    REDUCE(mean, PLUS)
    mean /= 4 * quads;
    STORE FETCH
    EACH { const float4 v = vload_half4(row + q, x) - mean; spread += dot(v, v); }
    REDUCE(spread, PLUS)
    spread = rsqrt(spread / (4 * quads) + 1e-5f);
    STORE FETCH
    EACH vstore_half4((vload_half4(row + q, x) - mean) * spread * vload_half4(q, gain) + vload_half4(q, bias),
                      row + q, y);
    STORE REST
}
#endif
"""


# kernels and sizes ------------------------------------------------------------------------------------------


def case(kernel, load_class, size, flops, inputs, outputs, shape, local, scalars=(), options=()):
    """Return one kernel of one size: elements of each input and of its output, and its launch."""
    return {
        "kernel": kernel, "class": load_class, "size": list(size), "flops": flops,
        "input_bytes": 2 * sum(inputs), "output_bytes": 2 * outputs,
        "global": list(shape), "local": list(local),
        "inputs": list(inputs), "scalars": list(scalars), "options": list(options),
    }  # fmt: skip


def elemental_cases(quick):
    """Yield element-wise kernels: a work-item computes four elements."""
    for kernel, operands, flops in (("add", 2, 1), ("relu", 1, 1), ("gelu", 1, 8)):
        for count in [1 << exponent for exponent in range(14, 26, 3 if quick else 1)]:
            for local in (64,) if quick else (64, 256, 1024):
                yield case(
                    kernel, "elemental", [count], flops * count, [count] * operands, count,
                    [count // 4], [local],
                )  # fmt: skip


def matmul_cases(quick):
    """Yield matrix products (rows, depth, columns), tiled in local memory: a work-item computes 1 x 4."""
    sizes = [(n, n, n) for n in (128, 256, 512, 1024, 2048)]
    sizes += [(128, 768, 768), (128, 768, 3072), (128, 3072, 768), (128, 2048, 2048), (128, 2048, 8192)]
    sizes += [(512, 1024, 1024), (1024, 1024, 4096), (1024, 512, 128), (2048, 256, 256), (256, 4096, 1024)]
    sizes.sort(key=lambda size: size[0] * size[1] * size[2])
    for m, k, n in sizes[:6:2] if quick else sizes:
        for tile in (16,) if quick else (8, 16, 32):
            yield case(
                "matmul", "reusable", [m, k, n], 2 * m * k * n, [m * k, k * n], m * n,
                [n // 4, m], [tile, tile], [k, n // 4], ["-DTILE={}".format(tile)],
            )  # fmt: skip


def conv_cases(quick):
    """Yield direct 3x3 convolutions (side, inputs, outputs), channels last: a work-item computes 1 x 4."""
    sizes = [(56, 64, 64), (32, 128, 128), (16, 256, 256), (8, 512, 512), (32, 320, 320), (16, 640, 640)]
    sizes += [(112, 32, 32), (64, 128, 128), (32, 64, 256), (128, 16, 64), (64, 32, 32), (16, 64, 128)]
    sizes.sort(key=lambda size: size[0] ** 2 * size[1] * size[2])
    for side, c, o in sizes[:6:2] if quick else sizes:
        for local in ((8, 8),) if quick else ((8, 8), (4, 16), (16, 16)):
            shape = [o // 4, side * side]
            if not any(whole % part for whole, part in zip(shape, local)):
                yield case(
                    "conv", "reusable", [side, c, o], 18 * side * side * c * o,
                    [(side + 2) ** 2 * c, 9 * c * o], side * side * o, shape, local, [c, side, o // 4],
                )  # fmt: skip


def row_cases(quick):
    """Yield softmax and layer norm over rows (rows, length): a work-group takes a row."""
    sizes = [(rows, length) for length in (256, 768, 1024, 4096) for rows in (64, 512, 2048, 16384)]
    sizes.sort(key=lambda size: size[0] * size[1])
    for kernel, flops in (("softmax", 5), ("layer_norm", 5)):
        for rows, length in sizes[:9:3] if quick else sizes:
            for local in (64,) if quick else (64, 256):
                count, more = rows * length, [length] * 2 if kernel == "layer_norm" else []
                yield case(
                    kernel, "hierarchical", [rows, length], flops * count, [count] + more, count,
                    [rows * local], [local], [length // 4], ["-DGROUP={}".format(local)],
                )  # fmt: skip


def cases(quick):
    """Return all kernels, sizes of each ascending."""
    makers = (elemental_cases, matmul_cases, conv_cases, row_cases)
    return [spec for maker in makers for spec in maker(quick)]


# measuring -------------------------------------------------------------------------------------------------


def rounded(ms):
    """Return a time to five digits."""
    return float("{:.5g}".format(ms))


class Bench:
    """A device's context, queue and compiled kernels, and the buffers of the current case."""

    def __init__(self, device, pool_bytes):
        import numpy
        import pyopencl

        self.cl, self.np, self.device = pyopencl, numpy, device
        self.context = pyopencl.Context([device])
        timed = device.queue_properties & pyopencl.command_queue_properties.PROFILING_ENABLE
        self.profiling = bool(timed)
        self.queue = pyopencl.CommandQueue(self.context, properties=timed)
        form = pyopencl.ImageFormat(pyopencl.channel_order.RGBA, pyopencl.channel_type.UNSIGNED_INT16)
        flags, kind = pyopencl.mem_flags.WRITE_ONLY, pyopencl.mem_object_type.IMAGE2D
        images = device.image_support and device.image2d_max_width >= 1 << WIDTH_BITS
        known = pyopencl.get_supported_image_formats(self.context, flags, kind) if images else []
        self.format = form if form in known else None
        self.most_bytes = min(pool_bytes, device.max_mem_alloc_size, device.global_mem_size // 8)
        if self.format:
            self.most_bytes = min(self.most_bytes, (TEXEL << WIDTH_BITS) * device.image2d_max_height)
        filled = numpy.random.RandomState(0).randint(0, 1 << 16, self.most_bytes // 2, numpy.uint16)
        self.pool, self.first = self.buffer(filled), 0
        self.textures, self.programs = {}, {}

    def buffer(self, array):
        """Return a buffer with the contents of an array."""
        flags = self.cl.mem_flags
        return self.cl.Buffer(self.context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=array)

    def texture(self, texels):
        """Return an image (or buffer) of at least so many texels."""
        rows = 1
        while rows << WIDTH_BITS < texels:
            rows *= 2
        if rows not in self.textures:
            self.textures.clear()
            flags = self.cl.mem_flags.READ_WRITE
            if self.format:
                shape = (1 << WIDTH_BITS, rows)
                texture = self.cl.create_image(self.context, flags, self.format, shape)
            else:
                texture = self.cl.Buffer(self.context, flags, rows * TEXEL << WIDTH_BITS)
            self.textures[rows] = texture
        return self.textures[rows]

    def kernel(self, name, options, loaded):
        """Return a compiled kernel, plain or with loads."""
        key = (tuple(options), loaded)
        if key not in self.programs:
            flags = list(options) + ["-DWIDTH_BITS={}".format(WIDTH_BITS)]
            flags += ["-DLOADED"] * loaded + ["-DBUFFERS"] * (self.format is None)
            self.programs[key] = self.cl.Program(self.context, SOURCE).build(flags)
        return self.cl.Kernel(self.programs[key], name)

    def prepare(self, spec):
        """Take a case: fill its inputs (values around 0, of size about 1), compile it."""
        random = self.np.random.RandomState(1)
        self.host = [random.uniform(-1, 1, count).astype(self.np.float16) for count in spec["inputs"]]
        self.inputs = [self.buffer(array) for array in self.host]
        self.output = self.cl.Buffer(self.context, self.cl.mem_flags.READ_WRITE, max(spec["output_bytes"], 4))
        scalars = [self.np.uint32(number) for number in spec["scalars"]]
        self.shape = tuple(spec["global"]), tuple(spec["local"])
        self.arguments = self.inputs + [self.output] * (spec["kernel"] != "copy") + scalars
        loaded = (True,) if spec["kernel"] == "copy" else (False, True)
        self.kernels = {kind: self.kernel(spec["kernel"], spec["options"], kind) for kind in loaded}

    def launch(self, texels):
        """Enqueue the case with a load of so many texels (0: the plain kernel); return its event."""
        arguments = list(self.arguments)
        if texels:
            if (self.first + texels) * TEXEL > self.most_bytes:
                self.first = 0
            arguments += [self.pool, self.target, self.np.uint32(self.first), self.np.uint32(texels)]
            self.first += texels
        return self.kernels[texels > 0](self.queue, *(self.shape + tuple(arguments)))

    def round(self, loads):
        """Run the case once under each load; return the times in ms."""
        if self.profiling:
            events = [self.launch(texels) for texels in loads]
            self.queue.finish()
            return [(event.profile.end - event.profile.start) / 1e6 for event in events]
        times = []
        for texels in loads:
            start = time.perf_counter()
            self.launch(texels)
            self.queue.finish()
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def measure(self, loads, repeats):
        """Return the median and the shortest time under each load, in ms, and the number of runs."""
        start = time.perf_counter()
        self.round(loads)
        seconds = max(time.perf_counter() - start, 1e-6)
        count = max(repeats, min(10 * repeats, int(WARM_S / seconds)))
        rounds = [self.round(loads) for _ in range(count)]
        return [(rounded(statistics.median(times)), rounded(min(times))) for times in zip(*rounds)], count

    def run(self, spec, repeats, quick):
        """Measure a case alone and under loads; return its row."""
        self.prepare(spec)
        texels = [int(spec["input_bytes"] * ratio) // TEXEL for ratio in RATIOS + FURTHER]
        texels = [count for count in texels if 0 < count * TEXEL <= self.most_bytes]
        self.target = self.texture(max(texels))
        near = [count for count in texels if count * TEXEL <= RATIOS[-1] * spec["input_bytes"]]
        loads = [0] + (near[::3] if quick else near)
        for count in [] if quick else texels[len(near) :]:
            alone, loaded = [min(times) for times in zip(*[self.round([0, loads[-1]]) for _ in range(3)])]
            if loaded > SLOWED * alone:
                break
            loads.append(count)
        self.round(loads)
        times, runs = self.measure(loads, repeats)
        row = {key: spec[key] for key in spec if key not in ("inputs", "scalars", "options")}
        row["loads"] = [[count * TEXEL, ms, least] for count, (ms, least) in zip(loads, times)]
        return dict(row, runs=runs)

    def copy(self, nbytes, local, repeats):
        """Measure a kernel that only copies; return its row."""
        texels = nbytes // TEXEL
        self.prepare(case("copy", "copy", [nbytes], 0, [], 0, [min(texels, 1 << 20)], [local]))
        self.target = self.texture(texels)
        self.round([texels])
        ((ms, least),), runs = self.measure([texels], repeats)
        row = {"kernel": "copy", "size": [nbytes], "local": [local]}
        return dict(row, ms=ms, least_ms=least, runs=runs)


# the rows ---------------------------------------------------------------------------------------------------


def key_of(row):
    """Return the key of a row: kernel, size and work-group shape."""
    return row["kernel"], tuple(row["size"]), tuple(row["local"])


def read_done(path, environment):
    """Return the rows of a file by key; remove an incomplete last line from it."""
    if not path or not os.path.exists(path):
        return {}
    with open(path, "rb+") as file:
        data = file.read()
        end = data.rfind(b"\n") + 1
        file.truncate(end)
    done = {}
    for number, line in enumerate(data[:end].decode("utf-8", "replace").splitlines(), 1):
        try:
            row = json.loads(line)
            if row.get("row") == "environment":
                differs = [name for name in ("probe", "device", "quick") if row[name] != environment[name]]
                if differs:
                    sys.exit("load_probe: {} has {} {!r}, now {!r}; choose another --out".format(
                        path, differs[0], row[differs[0]], environment[differs[0]]))  # fmt: skip
            else:
                done[key_of(row)] = row
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            sys.exit("load_probe: {} line {} is none of this probe's rows ({}); choose another --out".format(
                path, number, error))  # fmt: skip
    return done


def find_devices():
    """Return the OpenCL devices; ends with a message where there are none."""
    try:
        import numpy  # noqa: F401
        import pyopencl
    except ImportError as error:
        sys.exit("load_probe: needs {}; pip install 'pyopencl[pocl]' numpy".format(error.name))
    try:
        devices = [device for platform_ in pyopencl.get_platforms() for device in platform_.get_devices()]
    except pyopencl.Error as error:
        devices, reason = [], " ({})".format(error)
    else:
        reason = ""
    if not devices:
        sys.exit("load_probe: OpenCL finds no device{}; install its driver, or pip install "
                 "'pyopencl[pocl]' for the processor".format(reason))  # fmt: skip
    return devices


def command_of(arguments):
    """Return the command, without the paths of this machine."""
    quick = " --quick" if arguments.quick else ""
    return "load_probe.py --repeats {}{} --device {}".format(arguments.repeats, quick, arguments.device)


def environment_of(bench, arguments):
    """Return the environment row."""
    import numpy
    import pyopencl

    device = bench.device
    return {
        "row": "environment", "probe": VERSION, "quick": arguments.quick, "device": device.name.strip(),
        "vendor": device.vendor.strip(), "platform": device.platform.name.strip(),
        "opencl": device.version.strip(), "driver": device.driver_version.strip(),
        "profiling": bench.profiling, "texture": "image2d" if bench.format else "buffer",
        "pool_bytes": bench.most_bytes, "python": platform.python_version(), "numpy": numpy.__version__,
        "pyopencl": pyopencl.VERSION_TEXT, "command": command_of(arguments),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }  # fmt: skip


def main():
    """Find the device, measure the missing rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="file to append rows to (default: standard output)")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each point, at least")
    parser.add_argument("--quick", action="store_true", help="few sizes and loads: a test of a minute")
    parser.add_argument("--device", type=int, default=0, help="number of the OpenCL device, from 0")
    arguments = parser.parse_args()
    devices = find_devices()
    if not 0 <= arguments.device < len(devices) or arguments.repeats < 1:
        names = "; ".join("{} is {}".format(i, device.name) for i, device in enumerate(devices))
        sys.exit("load_probe: --device takes one of: {}; --repeats at least 1".format(names))
    bench = Bench(devices[arguments.device], POOL_BYTES // 4 if arguments.quick else POOL_BYTES)
    environment = environment_of(bench, arguments)
    done = read_done(arguments.out, environment)
    with open(arguments.out, "a") if arguments.out else sys.stdout as out:
        for row in rows_of(bench, environment, done, arguments):
            out.write(json.dumps(row) + "\n")
            out.flush()


def rows_of(bench, environment, done, arguments):
    """Yield the environment and each missing row; report the progress on standard error."""
    import pyopencl

    yield environment
    most_ms = 1e3 * ROUND_S / (10 if arguments.quick else 1)
    todo, slow = cases(arguments.quick), set()
    for number, spec in enumerate(todo, 1):
        kind = spec["kernel"], tuple(spec["local"])
        items = spec["local"][0] * (spec["local"] + [1])[1]
        biggest = max(spec["input_bytes"], spec["output_bytes"])
        if kind in slow or items > bench.device.max_work_group_size or 2 * biggest > bench.most_bytes:
            continue
        row = done.get(key_of(spec))
        if row is None:
            sys.stderr.write("load_probe: {} of {}: {} {}, work-group {}\n".format(
                number, len(todo), spec["kernel"], spec["size"], spec["local"]))  # fmt: skip
            try:
                row = bench.run(spec, arguments.repeats, arguments.quick)
            except pyopencl.Error as error:  # too few registers or too little local memory
                row = {name: spec[name] for name in ("kernel", "size", "local")}
                row["reason"] = " ".join(str(error).split())[:200]
            yield row
        if sum(ms for _, ms, _ in row.get("loads", ())) > most_ms:
            slow.add(kind)
    for nbytes in (1 << 20, 4 << 20, 16 << 20, 64 << 20):
        for local in (64, 256):
            if ("copy", (nbytes,), (local,)) not in done and nbytes <= bench.most_bytes:
                yield bench.copy(nbytes, local, arguments.repeats)


if __name__ == "__main__":
    main()
