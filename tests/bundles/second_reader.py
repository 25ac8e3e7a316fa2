"""A second reader of bundles, from docs/bundle-format.md alone: json, numpy, pyopencl, no torchedge.

    python tests/bundles/second_reader.py BUNDLE INPUTS.npz OUTPUTS.npz [DEVICE]

INPUTS holds arrays called `STEP.NAME`, the inputs of each step by name; OUTPUTS gets the outputs likewise,
of a bundle that trains what parameters, buffers and states hold at the end, as `state.NAME`, and the bytes of
the device's memory as `bytes`. DEVICE: a part of the names of its platform and its own. Intermediates lie in
the arena where the device takes its places, else in memory of their own: the numbers are the same.
"""

import hashlib
import json
import sys
from math import prod
from pathlib import Path

import numpy as np
import pyopencl as cl

LANES = 4
CHANNELS = {"float32": cl.channel_type.FLOAT, "float16": cl.channel_type.HALF_FLOAT}


class Layout:
    """Where the elements of a tensor lie."""

    def __init__(self, tensor):
        entry = tensor["layout"]
        self.shape, self.dtype = tuple(tensor["shape"]), np.dtype(tensor["dtype"])
        self.order, self.image = entry["order"], entry.get("storage", "buffer") != "buffer"
        self.over_buffer = entry.get("storage") == "image_buffer"
        self.split, self.fold = entry.get("split", 0), entry.get("fold", 1)
        self.pattern, self.row_texels = entry.get("pattern", "row"), entry.get("row_texels", 0)
        self.sizes = [self.shape[d] for d in self.order]
        padded = [*(self.sizes or [1])]
        self.inner = padded[-1]
        padded[-1] = -(-padded[-1] // LANES)
        self.steps, self.lines = prod(padded[self.split :]), prod(padded[: self.split])
        step, line = np.arange(self.steps)[None, :], np.arange(self.lines)[:, None]
        width, height, x, y = self.pattern_places(step, line)
        self.width, self.height = -(-width // self.fold), height * self.fold
        x, y = (x, y) if self.fold == 1 else (x % self.width, y * self.fold + x // self.width)
        self.x, self.y = (a.reshape(-1) for a in np.broadcast_arrays(x, y))

    def pattern_places(self, step, line):
        steps, lines = max(self.steps, 1), max(self.lines, 1)
        if self.pattern == "row":
            return steps, lines, step, line
        if self.pattern == "column":
            return lines, steps, line, step
        rows = int(self.pattern.removeprefix("block-"))
        return -(-steps // rows), lines * rows, step // rows, line * rows + step % rows

    def empty(self):
        """Return an array of the packed form."""
        if self.image:
            return np.zeros((self.height, self.width, LANES), self.dtype)
        return np.zeros(max(prod(self.shape), 1), self.dtype)

    def pack(self, array):
        """Return an array as the device holds it."""
        packed, ordered = self.empty(), np.ascontiguousarray(np.transpose(array, self.order))
        if not self.image:
            packed[: ordered.size] = ordered.reshape(-1)
        elif ordered.size:
            rows = np.zeros((ordered.size // self.inner, -(-self.inner // LANES) * LANES), self.dtype)
            rows[:, : self.inner] = ordered.reshape(-1, self.inner)
            packed[self.y, self.x] = rows.reshape(-1, LANES)
        return packed

    def unpack(self, packed):
        """Return what `pack` was given."""
        if self.image:
            rows = packed[self.y, self.x].reshape(-1, -(-self.inner // LANES) * LANES)
            packed = np.ascontiguousarray(rows[:, : self.inner])
        ordered = packed.reshape(-1)[: prod(self.shape)].reshape(self.sizes)
        return np.transpose(ordered, np.argsort(self.order)) if self.order else ordered.reshape(())


class Device:
    """A context, a queue, and copies that end before they return."""

    def __init__(self, name):
        devices = [device for platform in cl.get_platforms() for device in platform.get_devices()]
        self.device = next(d for d in devices if name in f"{d.platform.name} {d.name}")
        self.context = cl.Context([self.device])
        self.queue = cl.CommandQueue(self.context)
        self.alignment = self.device.mem_base_addr_align // 8
        extension = "cl_khr_image2d_from_buffer" in self.device.extensions.split()
        self.over_buffers = extension and self.device.type & cl.device_type.GPU
        self.built, self.nbytes = {}, 0

    def buffer(self, nbytes):
        self.nbytes += nbytes
        return cl.Buffer(self.context, cl.mem_flags.READ_WRITE, max(nbytes, 1))

    def image(self, width, height, dtype):
        self.nbytes += width * height * LANES * np.dtype(dtype).itemsize
        form = cl.ImageFormat(cl.channel_order.RGBA, CHANNELS[dtype])
        return cl.create_image(self.context, cl.mem_flags.READ_WRITE, form, shape=(width, height))

    def memory(self, layout, buffer=None):
        """Return memory for a tensor: new, or over a buffer."""
        if not layout.image:
            return buffer or self.buffer(layout.empty().nbytes)
        if buffer is None:
            return self.image(layout.width, layout.height, str(layout.dtype))
        form = cl.ImageFormat(cl.channel_order.RGBA, CHANNELS[str(layout.dtype)])
        described = cl.ImageDescriptor()
        described.image_type, described.shape = cl.mem_object_type.IMAGE2D, (layout.width, layout.height)
        pitch = max(layout.width, layout.row_texels) * LANES * layout.dtype.itemsize
        described.pitches, described.buffer = (pitch, 0), buffer
        return cl.Image(self.context, cl.mem_flags.READ_WRITE, form, described)

    def write(self, memory, packed):
        self.copy(memory, packed, packed)

    def read(self, memory, packed):
        self.copy(packed, memory, packed)
        return packed

    def copy(self, target, source, packed):
        image = isinstance(target, cl.Image) or isinstance(source, cl.Image)
        where = {"origin": (0, 0), "region": packed.shape[1::-1]} if image else {}
        cl.enqueue_copy(self.queue, target, source, is_blocking=True, **where)

    def kernel(self, name, text):
        if name not in self.built:
            self.built[name] = cl.Program(self.context, text).build(options=["-cl-std=CL1.2"])
        return cl.Kernel(self.built[name], name)


class Program:
    """The tensors of a program on a device, and its launches with their arguments set."""

    def __init__(self, device, entry, texts, shared, file, plan):
        self.device, self.entry, self.tensors = device, entry | plan, entry["tensors"]
        self.file, self.staging = file, np.empty(plan.get("staging_bytes", 0), np.uint8)
        self.loads = plan.get("loads", {"preload": [], "run": [], "waits": [0] * len(entry["launches"])})
        self.layouts = [Layout(tensor) for tensor in self.tensors]
        self.parts = {}
        self.memory = self.placed(shared)
        self.calls = []
        for launch in entry["launches"]:
            described = entry["kernels"][launch["kernel"]]
            kernel = device.kernel(described["name"], texts[described["name"]])
            arguments = [self.memory[index] for index in launch["tensors"]]
            for place, argument in enumerate([*arguments, *map(np.int32, launch.get("sizes", ()))]):
                kernel.set_arg(place, argument)
            local = launch.get("local_size")
            self.calls.append((kernel, tuple(launch["global_size"]), local and tuple(local)))

    def placed(self, shared):
        """Return the memory of each tensor. shared: parameters, buffers and states by name, which grows."""
        device, arena, memory = self.device, self.entry["arena"], {}
        offsets, slots = dict(arena["offsets"]), dict(arena["slot_of"])
        begins = np.cumsum([0, *arena.get("pieces", [])])[:-1] if arena.get("pieces") else np.array([0])
        sizes = arena.get("pieces") or [arena["nbytes"]]
        pieces = [device.buffer(nbytes) for nbytes in sizes] if arena["nbytes"] else []
        images = [device.image(*slot) for slot in arena["slots"]]
        for index, (tensor, layout) in enumerate(zip(self.tensors, self.layouts, strict=True)):
            if index in slots:
                memory[index] = images[slots[index]]
            elif index in offsets:
                memory[index] = self.part(pieces, begins, offsets[index], layout)
            elif tensor["role"] in ("parameter", "buffer", "state"):
                memory[index] = shared.setdefault(tensor["name"], device.memory(layout))
            else:
                memory[index] = device.memory(layout)
        return memory

    def part(self, pieces, begins, offset, layout):
        """Return a part of the arena; memory of its own for what the device does not take there."""
        piece = int(np.searchsorted(begins, offset, side="right")) - 1
        within = offset - int(begins[piece])
        nbytes = layout.empty().nbytes
        if layout.over_buffer:
            nbytes = max(layout.width, layout.row_texels) * layout.height * LANES * layout.dtype.itemsize
        if not nbytes or within % self.device.alignment or (layout.image and not self.device.over_buffers):
            return self.device.memory(layout)
        key = (piece, within, nbytes)
        if key not in self.parts:
            self.parts[key] = pieces[piece].get_sub_region(within, nbytes)
        return self.device.memory(layout, self.parts[key])

    def close(self):
        """Give parts of the arena back, the last one first: in another order NVIDIA's driver 580 crashes."""
        self.calls.clear()
        self.memory.clear()
        while self.parts:
            self.parts.popitem()

    def step(self, inputs):
        """Return the outputs of a step."""
        for name, array in inputs.items():
            self.write(name, array)
        copies, copied = self.copies(self.loads["run"]), 0
        for (kernel, size, local), needed in zip(self.calls, self.loads["waits"], strict=True):
            while copied < needed:
                copied = next(copies)
            cl.enqueue_nd_range_kernel(self.device.queue, kernel, size, local)
        for index, tensor in enumerate(self.tensors):
            flag = tensor["role"] == "output" and (tensor.get("indices") or tensor.get("divisor"))
            if flag and self.at(index):
                raise SystemExit(f"{tensor['name']}: a computed index or divisor is out of range")
        return [self.at(index) for index in self.entry["outputs"]]

    def index(self, name):
        resident = [tensor["name"] if tensor["role"] != "intermediate" else "" for tensor in self.tensors]
        return resident.index(name)

    def at(self, index):
        layout = self.layouts[index]
        return layout.unpack(self.device.read(self.memory[index], layout.empty()))

    def write(self, name, array):
        index = self.index(name)
        bound, layout = self.tensors[index].get("indices"), self.layouts[index]
        if bound:
            inside = (array >= bound["low"]) & (array < bound["high"]) | (array == bound.get("ignored"))
            if not inside.all():
                raise SystemExit(f"{name}: an index is out of range")
        self.device.write(self.memory[index], layout.pack(np.asarray(array, layout.dtype)))

    def copies(self, reads):
        """Do reads and their copies in order; yield the number of copies so far after each."""
        copied, queue = 0, self.device.queue
        for read in reads:
            content = self.file[read["offset"] : read["offset"] + read["nbytes"]]
            self.staging[read["at"] : read["at"] + read["nbytes"]] = content
            for copy in read["copies"]:
                content, place = self.staging[copy["at"] : copy["at"] + copy["nbytes"]], copy["place"]
                image = len(place) == 4
                where = {"origin": place[:2], "region": place[2:]} if image else {"dst_offset": place[0]}
                cl.enqueue_copy(queue, self.memory[copy["tensor"]], content, is_blocking=True, **where)
                yield (copied := copied + 1)

    def load(self, weights):
        """Write what the weights file holds, and the fill of states that it does not."""
        list(self.copies(self.loads["preload"]))
        reads = [*self.loads["preload"], *self.loads["run"]]
        planned = {copy["tensor"] for read in reads for copy in read["copies"]}
        for index, (tensor, layout) in enumerate(zip(self.tensors, self.layouts, strict=True)):
            if index not in planned and tensor["role"] in ("parameter", "buffer", "state", "constant"):
                packed = layout.empty()
                if tensor["name"] in weights:
                    data = weights[tensor["name"]]
                    packed.reshape(-1)[: len(data) // packed.itemsize] = data.view(packed.dtype)
                elif tensor["role"] == "state":
                    packed = layout.pack(np.full(tensor["shape"], tensor.get("fill", 0), layout.dtype))
                self.device.write(self.memory[index], packed)


def read_bundle(folder):
    """Return (manifest, programs, kernels' texts, plan, weights' file, its tensors), all as hashed."""
    manifest = json.loads((folder / "manifest.json").read_text())
    entries = {key: value for key, value in manifest.items() if key != "sha256"}
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == manifest["sha256"], "manifest.json was changed"
    contents = {name: np.memmap(folder / name, np.uint8, "r") for name in manifest["files"]}
    for name, file in manifest["files"].items():
        assert hashlib.sha256(contents[name]).hexdigest() == file["sha256"], f"{name} was changed"
    names = [name for name in ("program.json", "accumulating.json") if name in contents]
    programs = [json.loads(bytes(contents[name])) for name in names]
    texts = {Path(n).stem: bytes(data).decode() for n, data in contents.items() if n.endswith(".cl")}
    data = contents["weights.safetensors"]
    begin = 8 + int.from_bytes(bytes(data[:8]), "little")
    header = json.loads(bytes(data[8:begin]))
    spans = {n: entry["data_offsets"] for n, entry in header.items() if n != "__metadata__" and n[0] != "~"}
    plan = json.loads(bytes(contents.get("streaming_plan.json", b"{}")))
    weights = {name: data[begin + start : begin + end] for name, (start, end) in spans.items()}
    return manifest, programs, texts, plan, data, weights


def main(folder, inputs, outputs, name=""):
    """Run the steps of INPUTS."""
    manifest, entries, texts, plan, file, weights = read_bundle(Path(folder))
    device, shared = Device(name), {}
    programs = [Program(device, entry, texts, shared, file, plan) for entry in entries]
    for program in reversed(programs):
        program.load(weights)
        for name, index in program.entry.get("hyperparameters", {}).items():
            program.write(program.tensors[index]["name"], np.array(manifest["hyperparameters"][name]))
    arrays, results = np.load(inputs), {}
    for step in range(1 + max(int(name.split(".")[0]) for name in arrays)):
        completes = (step + 1) % manifest.get("accumulation", 1) == 0
        program = programs[0 if completes else -1]
        fed = {n.split(".", 1)[1]: arrays[n] for n in arrays if n.split(".")[0] == str(step)}
        returned = zip(manifest["outputs"], program.step(fed), strict=True)
        results |= {f"{step}.{output['name']}": array for output, array in returned}
    for index, tensor in enumerate(programs[0].tensors):
        if manifest["mode"] == "train" and tensor["role"] in ("parameter", "buffer", "state"):
            results[f"state.{tensor['name']}"] = programs[0].at(index)
    np.savez(outputs, bytes=device.nbytes + len(programs[0].staging), **results)
    for program in programs:
        program.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
