"""hooks/training_probe.py with networks that misbehave: run with its path and then its own arguments.

A job's build may be {"test": NAME}: "large" says it is out of memory, "killed" and "gone" end their process
at batch size 2, "hungry" takes 512 MiB there in small blocks and keeps one.
"""

import importlib.util
import os
import signal
import sys

import torch


class Misbehaving(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.layer, self.kept = how, torch.nn.Linear(4, 3), None

    def forward(self, x):
        if self.how == "large":
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if len(x) == 2:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "gone":
                os._exit(3)
            if self.how == "hungry":
                blocks = [torch.ones(16384) for _ in range(8192)]
                self.kept = blocks[-1]
        return self.layer(x)


def main():
    spec = importlib.util.spec_from_file_location("training_probe", sys.argv.pop(1))
    probe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(probe)
    build = probe.build
    probe.build = lambda recipe: Misbehaving(recipe["test"]) if "test" in recipe else build(recipe)
    probe.load = lambda name: {}[name]  # not needed here, nor the seconds it takes
    torch.set_num_threads(1)
    probe.main()


if __name__ == "__main__":
    main()
