"""The probe of convolutions where there is no GPU; what it measures is checked where its rows are read."""

import importlib.util

import pytest
import torch


@pytest.fixture(scope="module")
def probe(checkout):
    spec = importlib.util.spec_from_file_location(
        "convolution_probe", checkout / "hooks/convolution_probe.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_refuses_without_a_gpu(probe, tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["convolution_probe.py", "shapes.jsonl", "--out", str(out)])
    with pytest.raises(SystemExit, match=r"^convolution_probe: this PyTorch sees no GPU"):
        probe.main()
    assert not out.exists()


def test_sizes_are_those_of_the_caching_allocator(probe):
    assert [probe.rounded(torch.empty(n)) for n in (1, 128, 129, 256)] == [512, 512, 1024, 1024]


def test_a_convolution_has_the_dtype_and_the_layout_of_its_line(probe):
    plain = probe.tensor([2, 8, 4, 4], {}, "cpu")
    assert plain.dtype == torch.float32 and plain.is_contiguous()
    other = probe.tensor([2, 8, 4, 4], {"dtype": "bfloat16", "channels_last": True}, "cpu")
    assert other.dtype == torch.bfloat16 and other.is_contiguous(memory_format=torch.channels_last)
