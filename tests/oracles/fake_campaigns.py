"""Campaigns of the fake probe on this machine, and a controller that a test can kill."""

import json
import sys
from pathlib import Path

from torchedge.profiling.campaigns.plans import parse_plan
from torchedge.profiling.campaigns.running import Campaign, run_campaign
from torchedge.profiling.campaigns.transports import LocalTransport

PROBE = Path(__file__).with_name("fake_probe.py")


class Silent:
    """A listener that remembers."""

    def __init__(self):
        self.steps, self.notes, self.begun = 0, [], []

    def begin(self, label, total, done):
        self.begun.append((label, total, done))

    def doing(self, what):
        pass

    def step(self):
        self.steps += 1

    def note(self, text):
        self.notes.append(text)


def plan_of(networks=3, batches=(1, 2, 256), levels=(0, 50)):
    text = f"""
levels = {list(levels)}
train_batch_sizes = {list(batches)}
infer_batch_sizes = [1]
networks = {[f"net{i}" for i in range(networks)]}
"""
    return parse_plan("plan", text)


def prepare(folder, plan, skipped=()):
    """Write job lines of networks that nobody has to build."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "jobs.jsonl").open("w") as file:
        for item in plan.items():
            job = {"id": item.id, "network": item.network.label, "build": {"nodes": []}}
            if item.id in skipped:
                job = {"skipped": item.id, "reason": "cannot be pruned"}
            file.write(json.dumps(job) + "\n")


def run_fake(folder, plan, listener=None, **options):
    """Run a campaign of the fake probe to its end."""
    options = {"device": "board", "over": "local", "pauses": (0.0,) * 6, **options}
    campaign = Campaign(folder, plan, probe=PROBE, **options)
    transport = LocalTransport(sys.executable, folder / "device")
    return run_campaign(campaign, transport, listener or Silent())


if __name__ == "__main__":
    run_fake(Path(sys.argv[1]), plan_of(networks=int(sys.argv[2]), batches=range(1, 26)))
