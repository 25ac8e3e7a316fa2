"""Write the jobs of the campaign over settings: transformers and CNNs as people train them today.

    python benchmarks/accuracy/settings_jobs.py > jobs.jsonl
    python hooks/training_probe.py jobs.jsonl --out rows.jsonl --wave 14 --hurry      # on the GPU
    python benchmarks/accuracy/settings_jobs.py --without rows.jsonl > rest.jsonl     # what is left
    python benchmarks/accuracy/settings_jobs.py --rows rows.jsonl.gz --out FOLDER     # the tables of it
    python benchmarks/accuracy/settings_jobs.py --limits > limits.jsonl               # runs near their limit
    python hooks/training_probe.py limits.jsonl --out limits-rows.jsonl --memory
    python benchmarks/accuracy/settings_jobs.py --fresh > fresh.jsonl                 # never fitted: to judge

Transformers are built from configurations with random weights and trained on the loss they return, at several
sequence lengths, in float32, autocast, bfloat16 weights, with checkpoints, frozen parameters and optimizers;
CNNs in autocast, channels_last and both. The last runs of some models may reserve less memory than they need.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

Job = dict[str, Any]

HALF = {"amp": "bfloat16"}
SGD, ADAMW = {"optimizer": "sgd-momentum"}, {"optimizer": "adamw"}
LEADING = {"frozen": {"share": 0.9, "way": "leading"}}
SCATTERED = {"frozen": {"share": 0.9, "way": "scattered"}}
SETTINGS: dict[str, Job] = {
    "float32": SGD,
    "float32-adamw": ADAMW,
    "autocast": {**HALF, **ADAMW},
    "bfloat16": {"dtype": "bfloat16", **ADAMW},
    "checkpointing": {"checkpointing": True, **SGD},
    "autocast-checkpointing": {"checkpointing": True, **HALF, **ADAMW},
    "frozen-leading": {**LEADING, **SGD},
    "autocast-frozen": {**SCATTERED, **HALF, **ADAMW},
    "autocast-fused": {**HALF, **ADAMW, "optimizer_options": {"fused": True}},
}
CNN_SETTINGS: dict[str, Job] = {
    "autocast": {**HALF, **SGD},
    "channels-last": {"channels_last": True, **SGD},
    "autocast-channels-last": {"channels_last": True, **HALF, **SGD},
}
LIMITS = (0.8, 0.92, 1.02)
NEAR = (0.8, 0.88, 0.94, 0.98, 1.0)
"""Shares of what a run reserved that PyTorch is allowed."""

_MOST_LIMITED = ("llama-1b", "phi-1b")
"""Not run near their limits: side by side they would fill the device."""

Model = tuple[str, str, str, str, dict[str, Any]]
"""Label, family, kind of inputs, class, configuration."""

DECODERS: list[Model] = [
    ("gpt2", "gpt2", "text", "GPT2LMHeadModel", {}),
    ("llama-1b", "llama", "text-large", "LlamaForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True}),
    ("qwen2-0.5b", "qwen2", "text-large", "Qwen2ForCausalLM", {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}),
    ("pythia-160m", "gpt-neox", "text", "GPTNeoXForCausalLM", {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "vocab_size": 50304}),
    ("mistral-300m", "mistral", "text-large", "MistralForCausalLM", {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 20, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32000}),
    ("opt-125m", "opt", "text", "OPTForCausalLM", {"hidden_size": 768, "num_hidden_layers": 12}),
    ("gpt2-medium", "gpt2", "text-large", "GPT2LMHeadModel", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    ("bloom-560m", "bloom", "text-large", "BloomForCausalLM", {
        "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}),
    ("phi-1b", "phi", "text-large", "PhiForCausalLM", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32}),
    ("qwen3-0.6b", "qwen3", "text-large", "Qwen3ForCausalLM", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}),
    ("smollm-360m", "llama", "text-large", "LlamaForCausalLM", {
        "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
        "num_key_value_heads": 5, "vocab_size": 49152, "tie_word_embeddings": True}),
]  # fmt: skip
ENCODERS: list[Model] = [
    ("bert-base", "bert", "text-512", "BertForMaskedLM", {}),
    ("t5-small", "t5", "text-512", "T5ForConditionalGeneration", {
        "d_model": 512, "num_layers": 6, "num_heads": 8, "d_ff": 2048, "decoder_start_token_id": 0}),
    ("bart-base", "bart", "text-512", "BartForConditionalGeneration", {
        "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}),
    ("distilbert", "distilbert", "text-512", "DistilBertForMaskedLM", {}),
    ("modernbert", "modernbert", "text", "ModernBertForMaskedLM", {}),
    ("bert-large", "bert", "text-512", "BertForMaskedLM", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}),
    ("electra-base", "electra", "text-512", "ElectraForMaskedLM", {
        "hidden_size": 768, "embedding_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12}),
    ("albert-base", "albert", "text-512", "AlbertForMaskedLM", {
        "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}),
    ("t5-base", "t5", "text-512", "T5ForConditionalGeneration", {
        "d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 3072, "decoder_start_token_id": 0}),
]  # fmt: skip
OTHERS: list[Model] = [
    ("vit-base", "vit", "image", "ViTForImageClassification", {"num_labels": 1000}),
    ("wav2vec2", "wav2vec2", "sound", "Wav2Vec2ForSequenceClassification", {
        "apply_spec_augment": False, "layerdrop": 0.0, "num_labels": 10}),
    ("whisper-base", "whisper", "speech", "WhisperForConditionalGeneration", {
        "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
        "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}),
    ("dinov2-base", "dinov2", "image", "Dinov2ForImageClassification", {"num_labels": 1000}),
    ("ast", "ast", "spectrum", "ASTForAudioClassification", {"num_labels": 10}),
    ("swin-tiny", "swin", "image", "SwinForImageClassification", {"num_labels": 1000}),
]  # fmt: skip

FRESH: list[Model] = [
    ("gemma2-400m", "gemma2", "text-large", "Gemma2ForCausalLM", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 64000}),
    ("roberta-base", "roberta", "text-512", "RobertaForMaskedLM", {"max_position_embeddings": 1024}),
    ("falcon-300m", "falcon", "text-large", "FalconForCausalLM", {
        "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "vocab_size": 65024}),
    ("deit-base", "deit", "image", "DeiTForImageClassification", {"num_labels": 1000}),
    ("deberta-base", "deberta", "text-512", "DebertaV2ForMaskedLM", {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"],
        "vocab_size": 128100}),
    ("gpt-neo-200m", "gpt-neo", "text", "GPTNeoForCausalLM", {
        "hidden_size": 768, "num_layers": 12, "num_heads": 12,
        "attention_types": [[["global", "local"], 6]]}),
    ("hubert-base", "hubert", "sound", "HubertForSequenceClassification", {
        "apply_spec_augment": False, "layerdrop": 0.0, "num_labels": 10}),
    ("phi3-500m", "phi3", "text-large", "Phi3ForCausalLM", {
        "hidden_size": 1280, "intermediate_size": 3584, "num_hidden_layers": 20, "num_attention_heads": 20,
        "num_key_value_heads": 20, "vocab_size": 32064}),
    ("mbart-200m", "mbart", "text-512", "MBartForConditionalGeneration", {
        "d_model": 768, "encoder_layers": 8, "decoder_layers": 8, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
        "vocab_size": 50265, "decoder_start_token_id": 2}),
    ("segformer-b0", "segformer", "image", "SegformerForImageClassification", {"num_labels": 1000}),
    ("olmo2-400m", "olmo2", "text-large", "Olmo2ForCausalLM", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 50304}),
    ("mpnet-base", "mpnet", "text-512", "MPNetForMaskedLM", {"max_position_embeddings": 1024}),
    ("gptj-250m", "gptj", "text", "GPTJForCausalLM", {
        "n_embd": 1024, "n_layer": 12, "n_head": 16, "rotary_dim": 32, "n_positions": 2048}),
    ("wavlm-base", "wavlm", "sound", "WavLMForSequenceClassification", {
        "apply_spec_augment": False, "layerdrop": 0.0, "num_labels": 10}),
    ("xlnet-base", "xlnet", "text-512", "XLNetLMHeadModel", {
        "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072, "vocab_size": 32000}),
    ("mpt-200m", "mpt", "text", "MptForCausalLM", {
        "d_model": 768, "n_layers": 12, "n_heads": 12, "vocab_size": 50368}),
    ("convnextv2-tiny", "convnextv2", "image", "ConvNextV2ForImageClassification", {"num_labels": 1000}),
    ("granite-350m", "granite", "text-large", "GraniteForCausalLM", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 20, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 49152}),
    ("pegasus-300m", "pegasus", "text-512", "PegasusForConditionalGeneration", {
        "d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
        "vocab_size": 96103}),
    ("stablelm-400m", "stablelm", "text-large", "StableLmForCausalLM", {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 50304}),
    ("beit-base", "beit", "image", "BeitForImageClassification", {"num_labels": 1000}),
    ("fnet-base", "fnet", "text-512", "FNetForMaskedLM", {"vocab_size": 32000}),
    ("biogpt", "biogpt", "text", "BioGptForCausalLM", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 42384,
        "max_position_embeddings": 2048}),
    ("mixtral-200m", "mixtral", "text-large", "MixtralForCausalLM", {
        "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 32000}),
]  # fmt: skip
"""Families that no campaign has, measured once to judge a frozen model."""

TEXT = [(8, 128), (2, 512), (16, 64), (4, 1024), (1, 2048), (4, 256)]
TEXT_LARGE = [(4, 128), (1, 512), (8, 64), (2, 1024), (1, 2048), (2, 256)]
SHORT = [(8, 128), (4, 512), (32, 64), (16, 256), (2, 384), (8, 512)]
FIXED = [(8, 0), (32, 0), (2, 0), (64, 0), (16, 0), (4, 0)]
FEW = [(4, 0), (8, 0), (2, 0), (16, 0), (1, 0), (6, 0)]
POINTS = {
    "text": TEXT, "text-large": TEXT_LARGE, "text-512": SHORT, "image": FIXED, "sound": FEW, "speech": FEW,
    "spectrum": FEW,
}  # fmt: skip
FIRST = {
    "float32": (1,),
    "autocast": (0, 1, 3),
    "autocast-fused": (5,),
    "autocast-frozen": (1, 3),
    "checkpointing": (3,),
    "autocast-checkpointing": (1, 3),
    "bfloat16": (0, 3),
}
THEN = {
    "float32": (0, 2, 3),
    "float32-adamw": (1, 5),
    "frozen-leading": (1, 5),
    "autocast": (4,),
    "autocast-fused": (0,),
    "checkpointing": (1,),
    "autocast-checkpointing": (4,),
    "bfloat16": (4,),
}
LAST = {"frozen-leading": (0, 3), "autocast-frozen": (0,)}
"""Which of a model's points each setting is measured at, first and later."""

AGAIN = ("frozen-leading", "autocast-frozen", "autocast", "bfloat16", "autocast-checkpointing")
AGAIN_CNNS = ("vit_b_16", "swin_t", "timm:deit_small_patch16_224", "timm:mixer_s32_224", "maxvit_t",
              "timm:coat_tiny", "timm:mobilevit_s", "timm:poolformer_s12")  # fmt: skip
"""Settings and networks measured on a third host, at all their points."""

_NAMES = """
resnet50 mobilenet_v2 resnet18 squeezenet1_0 mnasnet1_0 googlenet alexnet vgg16 densenet121 efficientnet_b0
convnext_tiny regnet_y_800mf resnext50_32x4d shufflenet_v2_x1_0 mobilenet_v3_large efficientnet_v2_s
vgg11_bn inception_v3 vit_b_16 swin_t wide_resnet50_2 regnet_x_1_6gf resnet34 maxvit_t timm:resnet26d
timm:seresnet50 timm:mobilenetv4_conv_small timm:ghostnet_100 timm:rexnet_100 timm:cspresnet50 timm:dla34
timm:res2net50_26w_4s timm:resnest14d timm:hrnet_w18_small timm:mixnet_s timm:repvgg_a0 timm:nf_resnet50
timm:xception41 timm:poolformer_s12 timm:mobilevit_s timm:lcnet_100 timm:fbnetc_100 timm:skresnet18
timm:ese_vovnet19b_dw timm:regnetz_b16 timm:hgnetv2_b0 timm:convmixer_768_32 timm:efficientvit_b0 timm:dpn68
timm:selecsls42b timm:deit_small_patch16_224 timm:mixer_s32_224 timm:starnet_s1 timm:tinynet_a
timm:fastvit_t8 timm:coat_tiny
"""
CNNS = tuple(_NAMES.split())
_FRESH_NAMES = """
timm:tf_efficientnet_lite0 timm:mobileone_s1 timm:regnety_032 timm:resnest26d timm:inception_resnet_v2
timm:convnextv2_nano timm:darknet53 timm:cs3darknet_s timm:res2next50 timm:repvit_m1 timm:vovnet39a
timm:tresnet_m timm:mnasnet_small timm:efficientnet_es timm:legacy_seresnext26_32x4d timm:rdnet_tiny
timm:eca_resnet33ts timm:gcresnet33ts timm:skresnext50_32x4d timm:hgnet_tiny timm:fasternet_t0
timm:dm_nfnet_f0 timm:ghostnetv3_100 timm:mambaout_tiny timm:efficientvit_m1 timm:shvit_s1
timm:visformer_tiny timm:nextvit_small timm:botnet26t_256 timm:halonet26t timm:mobilenetv4_hybrid_medium
timm:coatnet_0_rw_224 timm:tiny_vit_5m_224 timm:davit_tiny timm:mixer_b16_224 timm:swinv2_tiny_window8_256
timm:twins_svt_small timm:vit_small_patch16_224 timm:pvt_v2_b0 timm:volo_d1_224 timm:focalnet_tiny_srf
timm:xcit_tiny_12_p8_224 timm:hiera_tiny_224 timm:mvitv2_tiny timm:sequencer2d_s
"""
FRESH_CNNS = tuple(_FRESH_NAMES.split())
OPTIONS = {
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
}
SIDES = {
    "inception_v3": 299,
    "timm:mobilevit_s": 256,
    "timm:inception_resnet_v2": 299,
    "timm:halonet26t": 256,
    "timm:dm_nfnet_f0": 192,
}
FEW_CACHED = {"use_cache": False}


def inputs(kind: str, config: Job, vocabulary: int, length: int) -> Job:
    """Return the inputs of a model."""
    labels = {"shape": ["batch"], "below": config.get("num_labels", 2)}
    if kind == "image":
        return {"pixel_values": {"shape": ["batch", 3, 224, 224]}, "labels": labels}
    if kind == "sound":
        return {"input_values": {"shape": ["batch", 32000]}, "labels": labels}
    if kind == "spectrum":
        return {"input_values": {"shape": ["batch", 1024, 128]}, "labels": labels}
    if kind == "speech":
        features = {"shape": ["batch", 80, 3000]}
        return {"input_features": features, "labels": {"shape": ["batch", 64], "below": vocabulary}}
    tokens = {"shape": ["batch", length], "below": vocabulary}
    return {"input_ids": tokens, "labels": tokens}


def transformer_jobs(model: Model, chosen: dict[str, tuple[int, ...]]) -> Iterator[Job]:
    """Yield the jobs of one model: settings, each at some of the points."""
    label, family, kind, name, options = model
    vocabulary = {"bert": 30522, "electra": 30522, "distilbert": 30522, "modernbert": 50368, "t5": 32128,
                  "bart": 50265, "roberta": 50265, "mpnet": 30527, "albert": 30000, "opt": 50272,
                  "phi": 51200, "whisper": 51865}  # fmt: skip
    vocab = options.get("vocab_size", vocabulary.get(family, 50257))
    config = {**options, **(FEW_CACHED if kind.startswith("text") or kind == "speech" else {})}
    config.update({"max_position_embeddings": 2048} if family in ("llama", "phi", "opt") else {})
    config.update({"n_positions": 2048} if family == "gpt2" else {})
    build = {"library": "transformers", "name": name, "config": config}
    for setting, places in chosen.items():
        for place in places:
            batch, length = POINTS[kind][place]
            yield {
                "id": "-".join([label, setting, *([str(length)] if length else [])]),
                "network": label,
                "family": family,
                "setting": setting,
                **({"seq_len": length} if length else {}),
                "build": build,
                "inputs": inputs(kind, config, vocab, length),
                "loss": "model",
                **SETTINGS[setting],
                "points": [["train", batch]],
            }


def limit_jobs(model: Model) -> Iterator[Job]:
    """Yield runs of a model of text with all memory, then with shares of what the run before reserved."""
    for job in transformer_jobs(model, {"float32": (1,), "autocast": (1,)}):
        for share in (None, *LIMITS) if "seq_len" in job else ():
            limit = {} if share is None else {"limit_share": share}
            yield {**job, **limit, "id": f"{job['id']}-limit-{share or 'none'}", "setting": "limit"}


def near_limit_jobs() -> Iterator[Job]:
    """Yield one small point of every network and setting, without a limit and then near the limit."""
    models = [model for model in (*DECODERS, *ENCODERS, *OTHERS) if model[0] not in _MOST_LIMITED]
    options = {**CNN_SETTINGS, "float32": SGD}
    for model, name in itertools.zip_longest(models, CNNS):
        jobs = list(transformer_jobs(model, dict.fromkeys(SETTINGS, (0,)))) if model is not None else []
        cnn = next(cnn_jobs(name)) if name is not None else {}
        for setting, chosen in options.items() if name is not None else ():
            plain = {key: value for key, value in cnn.items() if key not in ("amp", "optimizer")}
            named = {"id": f"{name}-{setting}", "setting": f"cnn-{setting}"}
            jobs.append({**plain, **chosen, **named, "points": [["train", 32]]})
        for job in jobs:
            for share in (None, *NEAR):
                limit = {} if share is None else {"limit_share": share}
                yield {**job, **limit, "id": f"{job['id']}-near-{share or 'none'}"}


def merged(jobs: Iterator[Job]) -> Iterator[Job]:
    """Yield successive jobs that differ in their points alone as one."""
    last: Job | None = None
    for job in jobs:
        if last is not None and last["id"] == job["id"]:
            last["points"] += job["points"]
            continue
        if last is not None:
            yield last
        last = job
    if last is not None:
        yield last


def cnn_jobs(
    name: str, settings: dict[str, Job] = CNN_SETTINGS, batch_sizes: tuple[int, ...] = (8, 32, 128)
) -> Iterator[Job]:
    """Yield the jobs of one network of torchvision or timm."""
    library = "timm" if name.startswith("timm:") else "torchvision"
    build = {
        "library": library,
        "name": name.removeprefix("timm:"),
        "kwargs": OPTIONS.get(name, {}),
    }
    side = SIDES.get(name, 256 if name.endswith("256") else 224)
    for setting, options in settings.items():
        yield {
            "id": f"{name}-{setting}",
            "network": name,
            "family": name,
            "setting": f"cnn-{setting}",
            "build": build,
            "input_size": [3, side, side],
            **options,
            "points": [["train", batch] for batch in batch_sizes],
        }


def every_job() -> Iterator[Job]:
    """Yield all jobs, those of one network in a row, the most telling ones first."""
    models = [*DECODERS[:6], *ENCODERS[:4], *OTHERS, *ENCODERS[4:], *DECODERS[6:]]
    half = len(CNNS) // 2
    for chosen, names in ((FIRST, CNNS[:half]), (THEN, CNNS[half:])):
        for model, name in itertools.zip_longest(models, names):
            yield from merged(transformer_jobs(model, chosen)) if model is not None else ()
            yield from cnn_jobs(name) if name is not None else ()
    for model in models:
        yield from limit_jobs(model)
    for model in models:
        yield from merged(transformer_jobs(model, LAST))


def fresh_jobs() -> Iterator[Job]:
    """Yield a point of every setting of the fresh networks, those of one network in a row."""
    for n, (name, model) in enumerate(itertools.zip_longest(FRESH_CNNS, FRESH)):
        if model is not None:
            yield from transformer_jobs(model, {way: ((n + k) % 2,) for k, way in enumerate(SETTINGS)})
        yield from cnn_jobs(name, {"float32": SGD, **CNN_SETTINGS}, (64 if n % 2 else 16,))


def jobs_again() -> Iterator[Job]:
    """Yield the jobs of the third call: those of one network in a row, the weakest settings first."""
    places: dict[str, tuple[int, ...]] = {}
    for setting in AGAIN:
        places[setting] = sum((chosen.get(setting, ()) for chosen in (FIRST, THEN, LAST)), ())
    models = [*DECODERS, *ENCODERS, *OTHERS]
    for model, name in itertools.zip_longest(models[::-1], AGAIN_CNNS):
        yield from merged(transformer_jobs(model, places)) if model is not None else ()
        yield from cnn_jobs(name) if name is not None else ()


COLUMNS = (
    "id", "mode", "batch_size", "fits", "memory_mib", "allocated_mib", "reserved_mib", "latency_ms",
    "latency_p10_ms", "latency_p90_ms", "steps", "clock_mhz", "throttled", "limit_mib", "launch_us", "reason",
)  # fmt: skip


TIMES = ("latency_ms", "latency_p10_ms", "latency_p90_ms", "layers")


def write_tables(rows: list[Path], folder: Path) -> None:
    """Write measurements.csv.gz, networks.jsonl.gz, layer_rows.jsonl.gz and environment.json of the rows.

    Rows that were measured while other networks were prepared (--ahead of an earlier probe) keep their memory
    alone; frozen models of text among them also trained their embeddings, and are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {job["id"]: job for job in (*every_job(), *near_limit_jobs(), *fresh_jobs())}
    points: dict[tuple[str, str, int], Job] = {}
    for file in rows:
        with gzip.open(file, "rt") as lines:
            environment, *others = map(json.loads, lines)
        (folder / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")
        ahead = "--ahead" in environment["command"]
        disturbed = ahead or "--memory" in environment["command"]
        for row in others:
            if row["row"] != "point" or row["fits"] is None or row["job"] not in jobs:
                continue
            if ahead and "frozen" in jobs[row["job"]] and "seq_len" in jobs[row["job"]]:
                continue
            times = dict.fromkeys(TIMES) if disturbed else {}
            points[row["job"], row["mode"], row["batch_size"]] = {**row, **times, "id": row["job"]}
    measured = {key[0] for key in points}
    with _packed(folder / "measurements.csv.gz") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(points.values())
    with _packed(folder / "networks.jsonl.gz") as file:
        for job in jobs.values():
            if job["id"] in measured:
                described = {name: value for name, value in job.items() if name != "points"}
                file.write(json.dumps(described, separators=(",", ":")) + "\n")
    with _packed(folder / "layer_rows.jsonl.gz") as file:
        for row in points.values():
            if row["layers"]:
                file.write(json.dumps({n: row[n] for n in ("id", "mode", "batch_size", "layers")}) + "\n")


def _packed(file: Path) -> TextIO:
    """Return a compressed file to write, the same bytes for the same text."""
    return io.TextIOWrapper(gzip.GzipFile(file, "wb", mtime=0), newline="")


def main() -> int:
    """Write the jobs, or the tables of their rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, nargs="+", help="rows of the probe, compressed")
    parser.add_argument("--out", type=Path, help="folder of the tables")
    parser.add_argument("--without", type=Path, nargs="+", default=[], help="rows of points to leave out")
    parser.add_argument("--limits", action="store_true", help="runs near their limit instead")
    parser.add_argument("--fresh", action="store_true", help="networks that no fit has seen")
    parser.add_argument("--again", action="store_true", help="the jobs of the third call")
    parser.add_argument("--tiny", action="store_true", help="two layers, small inputs: a trial on a CPU")
    arguments = parser.parse_args()
    if arguments.rows:
        write_tables(arguments.rows, arguments.out)
        return 0
    done = {
        (row["job"], row["batch_size"])
        for file in arguments.without
        for row in map(json.loads, file.read_text().splitlines())
        if row["row"] == "point"
    }
    chosen = [way for way in ("limits", "again", "fresh") if getattr(arguments, way)]
    ways = {"limits": near_limit_jobs, "again": jobs_again, "fresh": fresh_jobs}
    jobs = ways[chosen[0]]() if chosen else every_job()
    for job in jobs:
        job = tiny(job) if arguments.tiny else job
        job["points"] = [point for point in job["points"] if (job["id"], point[1]) not in done]
        if job["points"]:
            sys.stdout.write(json.dumps(job) + "\n")
    return 0


def tiny(job: Job) -> Job:
    """Return a job that a CPU runs in a second."""
    small = json.loads(json.dumps(job))
    if "config" in small["build"]:
        layers = ("n_layer", "encoder_layers", "decoder_layers", "num_layers")
        config = small["build"]["config"]
        config.update({name: 2 for name in layers if name in config} or {"num_hidden_layers": 2})
        config.update({} if small["network"].startswith("swin") else {"vocab_size": 1000})
        config.update({"pad_token_id": 0} if "pad_token_id" not in config else {})
    for form in small.get("inputs", {}).values():
        if "below" in form and len(form["shape"]) == 2:
            form["shape"][1], form["below"] = 16, 1000
    small["points"] = [["train", 1]]
    return small


if __name__ == "__main__":
    sys.exit(main())
