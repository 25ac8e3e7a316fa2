"""Sparse and meta tensors are refused by name, wherever a tensor comes in."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchedge
from torchedge.errors import InputError
from torchedge.tracing.plain_tensors import check_tensors

DENSE, CLASSES = torch.ones(2, 3), torch.tensor([0, 1])
SPARSE, META = DENSE.to_sparse(), DENSE.to("meta")


def sparse_model():
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(model.weight.detach().to_sparse())
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tree", "name"),
    [
        ((DENSE, {"mask": [DENSE, SPARSE]}), r"x\.1\.mask\.1 is a tensor of kind sparse_coo"),
        ((DENSE.to_sparse_csr(),), r"x\.0 is a tensor of kind sparse_csr"),
        ({"a": META}, r"x\.a is on the meta device, without values"),
        ([torch.quantize_per_tensor(DENSE, 0.1, 0, torch.qint8)], r"x\.0 is a tensor of kind quantized"),
    ],
)
def test_the_tensor_is_named(tree, name):
    with pytest.raises(InputError, match=name):
        check_tensors(tree, "x")


def test_tensors_with_values_pass_and_meta_ones_where_shapes_are_enough():
    check_tensors((DENSE, "text", {"a": 1}), "x")
    check_tensors((META,), "x", values=False)


@pytest.mark.parametrize("wrong", [SPARSE, DENSE.to_sparse_csr()], ids=["coo", "csr"])
def test_predict_export_and_plan_refuse_sparse_examples(tmp_path, wrong):
    with pytest.raises(InputError, match="example is a tensor of kind sparse"):
        torchedge.predict(nn.Linear(3, 2), example=wrong, batch_size=2, device="jetson-tx2")
    with pytest.raises(InputError, match=r"input\.0 is a tensor of kind sparse"):
        torchedge.export(nn.Linear(3, 2), wrong, device="local-cpu", out=tmp_path / "b", onnx=False)
    with pytest.raises(InputError, match="example is a tensor of kind sparse"):
        torchedge.plan(nn.Linear(3, 2), wrong, device="adreno-640")
    with pytest.raises(InputError, match=r"Linear\.weight is a tensor of kind sparse"):
        torchedge.predict(sparse_model(), example=DENSE, batch_size=2, device="jetson-tx2")


def trainer(model, example):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return torchedge.Trainer(model, example, CLASSES, loss=F.cross_entropy, optimizer=optimizer)


def test_the_trainer_refuses_both():
    pytest.importorskip("pyopencl")
    with pytest.raises(InputError, match=r"Linear\.weight is on the meta device"):
        trainer(nn.Linear(3, 2, device="meta"), DENSE)
    for wrong, words in ((SPARSE, "sparse_coo"), (META, "meta device")):
        with pytest.raises(InputError, match=rf"input\.0 is .*{words}"):
            trainer(nn.Linear(3, 2), wrong)
    with trainer(nn.Linear(3, 2), DENSE) as own:
        for wrong, words in ((SPARSE, "sparse_coo"), (META, "meta device")):
            for call in (lambda x=wrong: own.step(x, CLASSES), lambda x=wrong: own.predict(x)):
                with pytest.raises(InputError, match=rf"input\.0 is .*{words}"):
                    call()
        with pytest.raises(InputError, match=r"target\.0 is on the meta device"):
            own.step(DENSE, CLASSES.to("meta"))
