"""Topologies from files: what is not of the format is named, and nothing else is raised."""

import pytest

from torchedge.errors import ProfileError
from torchedge.profiling.topologies import build_topology

INPUT = {"name": "x", "op": "input"}
LAYER = {"name": "a", "op": "module", "type": "ReLU", "args": [{"node": "x"}]}
OUTPUT = {"op": "output", "args": [{"node": "a"}]}


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (3, "nodes is 3; expected a list"),
        ([], "expected a list of 1 to 20,000"),
        ([3], r"nodes\[0\] is 3; expected an object"),
        ([{"name": "x"}], r"nodes\[0\] has no 'op'"),
        ([{**LAYER, "type": "Lineer"}], r"nodes\[0\].type is 'Lineer'; expected one of"),
        ([{**LAYER, "type": None}], r"nodes\[0\].type is None; expected the name of a known module"),
        ([{**LAYER, "op": "function", "target": "view"}], r"nodes\[0\].target is 'view'; expected the name"),
        ([{**LAYER, "op": "method", "target": "__class__"}], r"nodes\[0\].target is '__class__'"),
        ([{"name": "m", "op": "method", "target": "view"}], r"nodes\[0\] has no args"),
        ([{"op": "output"}], r"nodes\[0\] has no args"),
        ([{**LAYER, "kwargs": [1]}], r"nodes\[0\].kwargs is \[1\]; expected an object"),
        ([{**LAYER, "args": {"node": "x"}}], r"nodes\[0\].args is .*; expected a list"),
        ([{**LAYER, "argz": []}], "unknown key 'argz'; expected 'args'"),
        ([{**LAYER, "name": 3}], r"nodes\[0\].name is 3; expected printable text"),
        ([INPUT, INPUT], "two nodes have the same name"),
        ([INPUT, {**LAYER, "kwargs": {"depth": 3}}, OUTPUT], r"node 'a' \(ReLU\) is not valid"),
        ([INPUT, LAYER], "there is no output node"),
        ([LAYER, INPUT, OUTPUT], r"nodes\[0\] reads node 'x' before it is computed"),
        ([INPUT, {**LAYER, "args": [{"node": 3}]}], r"nodes\[1\] reads node '3' before"),
        ([{**LAYER, "type": "Linear", "kwargs": {"in_features": 1 << 40}}], "has a size above"),
    ],
)
def test_a_wrong_topology_is_refused_by_name(nodes, message):
    with pytest.raises(ProfileError, match=f"^line 3: .*{message}"):
        build_topology(nodes, "line 3")
