"""Job lines follow from the plan alone, survive a killed expansion, and name what is skipped."""

import json
import subprocess
import sys

import pytest

from torchedge.errors import InputError, ProfileError
from torchedge.profiling.campaigns.expansion import expand, make_job, read_jobs
from torchedge.profiling.campaigns.plans import parse_plan
from torchedge.profiling.topologies import build_network
from torchedge.tracing.vision import prepare_torchvision

prepare_torchvision()
pytest.importorskip("torchvision")

PLAN = """
levels = [0, 60]
strategies = ["random", "l1"]
train_batch_sizes = [2]
networks = [{name = "squeezenet1_1", input_size = [3, 64, 64]}, "shufflenet_v2_x0_5"]
"""


@pytest.fixture(scope="module")
def expanded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("campaign")
    (folder / "plan.toml").write_text(PLAN)
    told = []
    expand(folder, told.append)
    return folder, told


@pytest.mark.slow
def test_a_line_an_item(expanded):
    folder, told = expanded
    plan = parse_plan("p", PLAN)
    assert told == [item.id for item in plan.items()]
    jobs = list(read_jobs(folder))
    assert [job.get("id", job.get("skipped")) for job in jobs] == told
    first, random, l1 = jobs[:3]
    assert (first["pruning_level"], first["strategy"], first["input_size"]) == (0, "", [3, 64, 64])
    assert [job["network"] for job in jobs[:3]] == ["squeezenet1_1"] * 3
    assert abs(random["pruning_reached"] - 60) < 0.5 and abs(l1["pruning_reached"] - 60) < 0.5
    assert random["build"] != l1["build"]
    parameters = [sum(p.numel() for p in build_network(job["build"]).parameters()) for job in jobs[:3]]
    assert parameters[0] == 1235496 and all(abs(n / parameters[0] - 0.4) < 0.005 for n in parameters[1:])


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.0, 0.3, 0.999])
def test_torn_file_goes_on(expanded, tmp_path, part):
    whole = (expanded[0] / "jobs.jsonl").read_bytes()
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "jobs.jsonl").write_bytes(whole[: int(len(whole) * part)])
    expand(tmp_path)
    assert (tmp_path / "jobs.jsonl").read_bytes() == whole


def test_damaged_file_is_named(tmp_path):
    (tmp_path / "jobs.jsonl").write_text("{}\n")
    with pytest.raises(ProfileError, match=r"jobs\.jsonl: is damaged"):
        list(read_jobs(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reason"), [("convnext_tiny", "get_attr"), ("vit_b_16", "")])
def test_what_cannot_be_sent_as_layers_is_named_with_its_library(name, reason):
    plan = parse_plan("p", f'train_batch_sizes = [1]\nlevels = [0, 50]\nnetworks = ["{name}"]')
    whole, pruned = (make_job(item, plan) for item in plan.items())
    assert whole["build"] == {"library": "torchvision", "name": name, "kwargs": {}}
    assert pruned["skipped"] == f"{name}-random-50" and pruned["reason"] and reason in pruned["reason"]


def test_layers_of_torchvisions_own_are_sent_too():
    plan = parse_plan("p", 'train_batch_sizes = [1]\nnetworks = ["efficientnet_b0"]')
    (job,) = (make_job(item, plan) for item in plan.items())
    assert "StochasticDepth" in {node.get("type") for node in job["build"]["nodes"]}


@pytest.mark.parametrize(
    ("networks", "said"),
    [
        ('["resnet81"]', "no network 'resnet81'; did you mean resnet18"),
        ('["timm:resnet81"]', "timm has no network"),
    ],
)
def test_unknown_networks_are_refused_at_once(networks, said, tmp_path):
    if "timm" in networks:
        pytest.importorskip("timm")
    (tmp_path / "plan.toml").write_text(f"train_batch_sizes = [1]\nnetworks = {networks}")
    with pytest.raises(InputError, match=said):
        expand(tmp_path)


def test_wrong_arguments_are_skipped_with_the_builders_words(tmp_path):
    plan = parse_plan("p", 'train_batch_sizes = [1]\nnetworks = [{name = "resnet18", kwargs = {depth = 3}}]')
    (job,) = (make_job(item, plan) for item in plan.items())
    assert "depth" in job["reason"]


@pytest.mark.slow
def test_as_a_process_it_tells_errors(tmp_path):
    (tmp_path / "plan.toml").write_text('train_batch_sizes = [1]\nnetworks = ["nothing"]')
    words = [sys.executable, "-m", "torchedge.profiling.campaigns.expansion", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["input"] is True and "no network 'nothing'" in told["error"]
