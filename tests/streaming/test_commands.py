"""Reads and copies: every byte arrives where it belongs, in any order that the counts allow."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.small_programs import program, tensor
from oracles.streaming_programs import data_of, instance_of, packed_data, random_plan, weighted_chain

from torchedge.streaming.commands import plan_reads, resolve, ring_places, whole_pages
from torchedge.streaming.schedules import LEAST_STAGING_BYTES, Transfer, make_schedule
from torchedge.textures.layouts import PAGE_BYTES, Layout

LAYOUTS = [Layout((0, 1)), Layout((0, 1), "image", 1), Layout((1, 0), "image", 1, "block-4", 2)]


@st.composite
def stored_tensors(draw):
    """Weights in buffers and images, some of whose rows are larger than a read."""
    tensors = []
    for k in range(draw(st.integers(1, 5))):
        shape = (draw(st.integers(1, 60)), draw(st.sampled_from([1, 3, 40, 700, 9000])))
        layout = draw(st.sampled_from(LAYOUTS))
        dtype = draw(st.sampled_from(["float32", "float16"]))
        tensors.append(tensor(f"w{k}", shape, "parameter", dtype, layout))
    return tensors


@pytest.mark.slow
@given(stored_tensors(), st.sampled_from([4, 8, 100]), st.booleans(), st.data())
def test_reads_bring_every_byte_to_its_place(tensors, pages, join, data):
    made = program(tensors, [], [])
    chance = np.random.default_rng(0)
    packed = [t.layout.pack(chance.random(t.shape).astype(t.dtype)) for t in tensors]
    places, content = {}, b""
    for stored, array in zip(tensors, packed, strict=True):
        content += b"\x00" * data.draw(st.sampled_from([0, 1, 5000, 70_000]))
        places[stored.name] = (len(content), array.nbytes)
        content += array.tobytes()
    groups = []
    for index, (stored, array) in enumerate(zip(tensors, packed, strict=True)):
        unit = stored.layout.unit_bytes(stored.shape, stored.dtype)
        cuts = sorted({0, data.draw(st.integers(0, array.nbytes)) // unit * unit, array.nbytes})
        for start, stop in pairwise(cuts):
            groups.append((data.draw(st.integers(0, 2)), Transfer(index, start, stop)))
    groups.sort(key=lambda group: group[0])
    most = pages * PAGE_BYTES
    transfers = [(n, [t for k, t in groups if k == n]) for n in range(3)]
    reads = plan_reads(made, transfers, places, most, join=join)
    first = {index: min(k for k, t in groups if t.tensor == index) for index in range(len(tensors))}
    arrived = [np.zeros_like(array) for array in packed]
    counts, begins, latest = ([np.zeros(array.nbytes, int) for array in packed] for _ in range(3))
    for launch, transfer in groups:
        latest[transfer.tensor][transfer.start : transfer.stop] = launch
    for read in reads:
        assert read.offset % PAGE_BYTES == 0 and whole_pages(read.nbytes) <= most and read.copies
        staging = np.frombuffer(content[read.offset : read.offset + read.nbytes], np.uint8)
        for copy in read.copies:
            assert copy.after >= first[copy.tensor]  # the weight has memory from there on
            piece = staging[copy.at : copy.at + copy.nbytes]
            target = arrived[copy.tensor]
            if len(copy.place) == 1:
                target.view(np.uint8)[copy.place[0] : copy.place[0] + copy.nbytes] = piece
                counts[copy.tensor][copy.place[0] : copy.place[0] + copy.nbytes] += 1
                begins[copy.tensor][copy.place[0] : copy.place[0] + copy.nbytes] = copy.after
            else:
                x, y, width, height = copy.place
                target[y : y + height, x : x + width] = piece.view(target.dtype).reshape(height, width, 4)
                shape = (*target.shape[:2], -1)
                counts[copy.tensor].reshape(shape)[y : y + height, x : x + width] += 1
                begins[copy.tensor].reshape(shape)[y : y + height, x : x + width] = copy.after
    for index, (before, after) in enumerate(zip(packed, arrived, strict=True)):
        np.testing.assert_array_equal(before, after)
        assert (counts[index] == 1).all()
        assert (begins[index] <= latest[index]).all() if join else (begins[index] == latest[index]).all()
    launches = [copy.after for read in reads for copy in read.copies]
    assert launches == sorted(launches)
    assert join or all(len({copy.after for copy in read.copies}) == 1 for read in reads)


def test_neighbours_in_the_source_are_read_together():
    tensors = [tensor(f"w{k}", (1000,), "parameter") for k in range(6)]
    places = {f"w{k}": (4000 * k, 4000) for k in range(4)} | {"w4": (10**6, 4000), "w5": (10**6 + 4000, 4000)}
    made = program(tensors, [], [])
    whole = [Transfer(k, 0, 4000) for k in range(6)]
    reads = plan_reads(made, [(0, whole[:3]), (1, whole[3:])], places, 2**16, join=False)
    assert [(read.offset, read.nbytes, len(read.copies)) for read in reads] == [
        (0, 12000, 3), (8192, 7808, 1), (999424, 8576, 2)
    ]  # fmt: skip


@given(st.integers(4, 20), st.lists(st.integers(1, 4), max_size=60))
def test_places_in_staging_memory_do_not_overlap(pages, sizes):
    places = ring_places(sizes, pages)
    taken = [range(at, at + nbytes) for (at, _), nbytes in zip(places, sizes, strict=True)]
    assert all(span.start >= 0 and span.stop <= pages for span in taken)
    assert all(before[1] <= after[1] for before, after in pairwise(places))
    for number, (_, freed) in enumerate(places):
        for other in range(freed, number):  # may still be there
            assert taken[other].stop <= taken[number].start or taken[number].stop <= taken[other].start
        if number and freed > places[number - 1][1]:  # what is waited for is in the way
            other = taken[freed - 1]
            assert other.start < taken[number].stop and taken[number].start < other.stop


def test_a_ring_uses_all_of_its_memory():
    places = ring_places([1, 1, 1, 1, 2, 1, 4], 4)
    assert places == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 2), (2, 3), (0, 6)]


class Machine:
    """A device that does one read, copy or launch at a time, and forgets what a run may overwrite."""

    def __init__(self, schedule, loads, packed, content):
        self.made, self.loads, self.packed, self.content = schedule.program, loads, packed, content
        self.staging = np.zeros(schedule.staging_bytes, np.uint8)
        self.arena = np.zeros(self.made.arena.nbytes, np.uint8)
        self.own = {i: np.zeros(self.made.tensors[i].nbytes, np.uint8) for i in schedule.preload}
        for read in loads.preload:
            self.read(read)
            for copy in read.copies:
                self.copy(copy)

    def read(self, read):
        self.staging[read.at : read.at + read.nbytes] = self.content[read.offset :][: read.nbytes]

    def copy(self, copy):
        memory = self.own[copy.tensor] if copy.tensor in self.own else self.part(copy.tensor)
        memory[copy.place[0] : copy.place[0] + copy.nbytes] = self.staging[copy.at :][: copy.nbytes]

    def part(self, index):
        begin = self.made.arena.offset[index]
        return self.arena[begin : begin + self.made.tensors[index].nbytes]

    def launch(self, number):
        """Check the weights of a launch, and fill what it writes."""
        launch = self.made.launches[number]
        for index, access in zip(launch.tensors, self.made.kernels[launch.kernel].access, strict=True):
            stored = self.made.tensors[index]
            if stored.role == "parameter":
                memory = self.own[index] if index in self.own else self.part(index)
                assert memory.tobytes() == self.packed[stored.name].tobytes(), (number, stored.name)
            elif access != "read" and self.made.arena.holds(index):
                self.part(index)[:] = number

    def run(self, order):
        """Do what may be done, in an order that is drawn."""
        loads, copies = self.loads, [copy for read in self.loads.run for copy in read.copies]
        ready = [number for number, read in enumerate(loads.run, 1) for _ in read.copies]
        reads = copied = launches = 0
        while launches < len(loads.waits):
            may = []
            if reads < len(loads.run) and loads.run[reads].after <= copied:
                may.append("read")
            if copied < len(copies) and ready[copied] <= reads and copies[copied].after <= launches:
                may.append("copy")
            if loads.waits[launches] <= copied:
                may.append("launch")
            kind = order(may)
            if kind == "read":
                self.read(loads.run[reads])
                reads += 1
            elif kind == "copy":
                self.copy(copies[copied])
                copied += 1
            else:
                self.launch(launches)
                launches += 1
        assert (reads, copied) == (len(loads.run), len(copies))


ORDERS = ("read", "copy", "launch", None)


def machine_of(seed, *, by_kernels=False, changed=lambda loads: loads):
    """A machine with the loads of a random plan, whose counts may be changed."""
    sizes = random.Random(seed).choices([3, 70, 900, 5000, 12_000, 40_000], k=14)
    made = weighted_chain([*sizes, 7], count=3000)
    instance = instance_of(made)
    schedule = make_schedule(made, instance, random_plan(instance, seed), LEAST_STAGING_BYTES)
    packed = {name: array.view(np.uint8) for name, array in packed_data(made, data_of(made)).items()}
    places, content = {}, np.zeros(0, np.uint8)
    for name, array in packed.items():
        content = np.concatenate([content, np.zeros(-len(content) % 64 + 64 * (seed % 3), np.uint8)])
        places[name], content = (len(content), len(array)), np.concatenate([content, array])
    loads = resolve(schedule, places, by_kernels=by_kernels)
    assert loads.run
    return Machine(schedule, changed(loads), packed, content)


def run_all(machine, seed):
    chance = random.Random(seed)
    for first in ORDERS:
        machine.run(lambda may, first=first: first if first in may else chance.choice(may))


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_counts_alone_bring_all_weights_to_their_launches_in_time(seed, by_kernels):
    run_all(machine_of(seed, by_kernels=by_kernels), seed)
