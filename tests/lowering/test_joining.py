"""Programs joined: the same launches one after the other, with names of their own and one arena."""

from dataclasses import replace

import pytest
from oracles.small_programs import vector_add
from oracles.streaming_programs import weighted_chain

from torchedge.errors import InputError
from torchedge.lowering.arena_checks import check_arena
from torchedge.lowering.joining import join_programs
from torchedge.lowering.program_files import parse_program, program_document


def test_launches_run_in_turn_on_tensors_of_their_own():
    parts = [weighted_chain([8, 16]), vector_add(), weighted_chain([8, 16, 8])]
    joined = join_programs(parts)
    assert [joined.kernels[launch.kernel].name for launch in joined.launches] == [
        *("add8", "add16", "add", "add8", "add16", "add8")
    ]
    assert len(joined.kernels) == 3  # equal texts are one kernel
    places = [name.partition("/")[0] for name in (joined.tensors[i].name for i in joined.inputs)]
    assert places == ["1", "2", "2", "3"] and len(joined.outputs) == 3
    base = len(parts[0].tensors)
    for launch, alone in zip(joined.launches[2:3], parts[1].launches, strict=True):
        assert launch.tensors == tuple(base + index for index in alone.tensors)
        assert (launch.global_size, launch.scope) == (alone.global_size, "2/")
    check_arena(joined, 512)
    assert joined.arena.nbytes == max(part.arena.nbytes for part in parts)
    assert parse_program("joined", program_document(joined)).digest == joined.digest


def test_the_same_program_may_run_twice():
    joined = join_programs([weighted_chain([8]), weighted_chain([8])])
    assert [t.name for t in joined.tensors if t.role == "parameter"] == ["1/w0", "2/w0"]


def test_programs_that_cannot_be_joined():
    with pytest.raises(InputError, match="targets cpu, mobile; expected one"):
        join_programs([vector_add(), replace(vector_add(), target="mobile")])
    with pytest.raises(InputError, match="targets none"):
        join_programs([])
