"""Causal models of transformers as methods over caches of a fixed length: a chunk of a prompt, one token."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from copy import copy, deepcopy
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchedge.errors import (
    CaptureError,
    InputError,
    check_choice,
    check_whole,
    described,
    first_line,
    needed,
)
from torchedge.graphs.training_steps import TrainingStep
from torchedge.tracing.caches import additive, cache_class, check_logits
from torchedge.tracing.copies import in_float32, sharing
from torchedge.tracing.encoder_decoders import encoder_methods
from torchedge.tracing.quantized_tensors import read_quantized
from torchedge.tracing.quantizing import WeightFormat, quantize
from torchedge.tracing.vision import prepare_torchvision

SLIDING, FULL = "sliding_attention", "full_attention"
LEAST_SPAN, SPAN_RATIO = 64, 4
"""Places that the shortest method for one token reads of the caches; how many times as many the next one."""
CHUNK_SPAN = 256
"""Places that the shortest method for a chunk reads; fewer would save a twentieth of its time."""
GROUPS = {"int4": 32}
"""Weights that share a scale, by format; without an entry: those of a row."""


class CachedModel(torch.nn.Module):
    """A causal model with its caches: forward(ids [texts, T], position [1], last [1]) -> logits of each text.

    The tokens lie at position, position + 1, ...; the logits are those that follow token `last` of them. The
    caches, buffers of this module, hold `length` tokens, of which attention reads the first `span`. Several
    texts end together: forward takes the place at which each one begins, too, and no token sees what lies
    before its own text.

    Raises:
        CaptureError: the model takes no caches. MissingExtraError: transformers is not installed.
    """

    def __init__(self, model: torch.nn.Module, length: int, texts: int = 1) -> None:
        super().__init__()
        self.model, self.length, self.span, self._cache = model, length, length, cache_class()
        self._taken = inspect.signature(model.forward).parameters
        self.keys, self.values = torch.nn.Module(), torch.nn.Module()
        self._layers: list[int] = []
        written = self._written()
        for layer, pair in written.items():
            for holder, new in zip((self.keys, self.values), pair, strict=True):
                holder.register_buffer(str(layer), torch.zeros(texts, new.shape[1], length, new.shape[3]))
        self._layers = sorted(written)

    def caches(self) -> list[torch.Tensor]:
        """Return the keys and the values of each layer, in turn."""
        return [holder.get_buffer(str(n)) for n in self._layers for holder in (self.keys, self.values)]

    def within(self, span: int) -> CachedModel:
        """Return this module, with the same weights and caches, for tokens at positions below `span`."""
        shorter = copy(self)
        shorter.span = span
        return shorter

    def _written(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values of one token, by layer."""
        with torch.no_grad():
            one = torch.zeros(1, 1, dtype=torch.int64)
            cache = self._cache()
            try:
                self._call(one, one, torch.ones(1, 1, 1, dtype=torch.bool), one[0, :, None], one[0], cache)
            except Exception as error:
                raise CaptureError(
                    f"{type(self.model).__name__} raised {type(error).__name__} on one token and a cache: "
                    f"{first_line(error)}; expected a causal model of transformers"
                ) from error
        if not cache.written:
            raise CaptureError(
                f"{type(self.model).__name__} writes nothing into its cache; expected a causal model of "
                "transformers with attention in every layer"
            )
        written: dict[int, tuple[torch.Tensor, torch.Tensor]] = cache.written
        return written

    def forward(
        self,
        ids: torch.Tensor,
        position: torch.Tensor,
        last: torch.Tensor,
        begins: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits that follow one of the tokens; afterwards the caches hold the tokens."""
        places = position + torch.arange(ids.shape[1])
        caches = iter(self.caches())
        held = dict(zip(self._layers, zip(caches, caches, strict=True), strict=True))
        distance = places[:, None] - torch.arange(self.span)
        seen, positions = (distance >= 0)[None], places[None]
        if begins is not None:
            seen = seen & (torch.arange(self.span) >= begins[:, None, None])
            positions = (places - begins[:, None]).clamp(min=0)
        return self._call(ids, positions, seen, distance, last, self._cache(places, held, within=self.span))

    def _call(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor,
        distance: torch.Tensor,
        last: torch.Tensor,
        cache: object,
    ) -> torch.Tensor:
        config: Any = self.model.config
        masks = {FULL: additive(seen)}
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or [FULL if window is None else SLIDING])
        if window is not None:
            masks[SLIDING] = additive(seen & (distance < window))
        if not kinds <= masks.keys():
            raise CaptureError(
                f"{type(self.model).__name__} has layers of {', '.join(sorted(kinds - masks.keys()))}; "
                "expected full or sliding attention in every layer"
            )
        mask: Any = masks[kinds.pop()] if len(kinds) == 1 else masks
        given = {"logits_to_keep": last} if "logits_to_keep" in self._taken else {}
        logits: torch.Tensor = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **given,
        ).logits
        chosen = logits if given else logits.index_select(1, last)
        return chosen[:, 0]


def is_language_model(model: object) -> bool:
    """Whether a model is one of transformers that generates text."""
    can_generate = getattr(model, "can_generate", None)
    return bool(callable(can_generate) and can_generate())


def language_model(
    model: object, form: WeightFormat | None = None, *, shapes: bool = False
) -> torch.nn.Module:
    """Return a language model in evaluation: as given, or of a configuration with random weights.

    form: of the weights of linear layers and embeddings, which the returned model has quantised. shapes: it
    has no values; its weights lie on the meta device.

    Raises:
        InputError: it is neither.
    """
    prepare_torchvision()
    with needed("transformers", purpose="exporting a language model"):
        from transformers import (
            AutoModelForCausalLM,
            AutoModelForSeq2SeqLM,
            AutoModelForSpeechSeq2Seq,
            PreTrainedConfig,
        )
    if isinstance(model, PreTrainedConfig):
        kinds: list[Any] = [AutoModelForCausalLM]
        if getattr(model, "is_encoder_decoder", False):
            kinds = [AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForCausalLM]
        kind = next((k for k in kinds if type(model) in k._model_mapping), AutoModelForCausalLM)
        with torch.device("meta") if shapes else nullcontext():
            model = kind.from_config(model)
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise InputError(
            f"model is {described(model)}; expected a causal model or an encoder-decoder of transformers, "
            "or its config"
        )
    model = read_quantized(model)
    model = in_float32(without_values(model) if shapes else model)
    return (model if form is None else quantize(model, form, group=GROUPS.get(form))).eval()


def without_values(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model whose weights lie on the meta device; those that layers share stay shared."""
    memo: dict[int, torch.Tensor] = {id(b): b.to("meta") for b in model.buffers()}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
    return deepcopy(model, memo)


def with_adapters(
    model: torch.nn.Module, rank: int, length: int, texts: int = 1
) -> tuple[Any, dict[str, torch.Tensor], TrainingStep]:
    """Return a language model with adapters (peft, LoRA) in all linear layers but the head, and their step.

    That is AdamW's on `texts` texts of `length` tokens, an example of which is returned. The model itself
    does not change. Raises InputError for a model of other inputs than tokens, or with adapters.
    """
    rank = check_whole("lora", rank)
    if getattr(model, "main_input_name", "input_ids") != "input_ids" or hasattr(model, "peft_config"):
        raise InputError(
            f"lora is {rank} with {type(model).__name__}, which takes features or has adapters; expected a "
            "model of tokens without: omit it"
        )
    with needed("peft", purpose="adapters"):
        import peft
    base: Any = sharing(model)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=rank, target_modules="all-linear"))
    place = next(model.parameters()).device
    ids = torch.zeros(texts, length, dtype=torch.int64, device=place)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    step = TrainingStep(optimizer=torch.optim.AdamW(trained), loss="model")
    return adapted, {"input_ids": ids, "labels": ids}, step


def ends_of(model: torch.nn.Module) -> tuple[int, ...]:
    """Return the tokens that end a text, as a model's generation settings or its configuration name them."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if named is None:
        named = getattr(getattr(model, "config", None), "eos_token_id", None)
    return tuple(sorted({n for n in tree_leaves(named) if type(n) is int and 0 <= n < 2**31}))


def _check_equal(cached: CachedModel, length: int, texts: int) -> None:
    """Raise CaptureError where a text in two parts has other logits than the model gives for the whole.

    It has 16 tokens, or 8 more than a window of the model's attention; of several texts every second one is
    shorter by a token. The caches are empty afterwards.
    """
    model: Any = cached.model
    entries = model.config.get_text_config().to_dict().items()
    windows = [size for name, size in entries if "window" in name and type(size) is int]
    with torch.no_grad():
        count = min(length, 8 + max([8, *windows]))
        ids = (torch.arange(count) * 7 % model.config.get_text_config().vocab_size).expand(texts, -1)
        begins = torch.arange(texts) % 2
        expected = torch.cat([model(ids[:1, begin:]).logits[:, -1] for begin in range(min(texts, 2))])[begins]
        half = count // 2
        for part, position in ((ids[:, :half], 0), (ids[:, half:], half)):
            last = torch.tensor([part.shape[1] - 1])
            found = cached(part, torch.tensor([position]), last, *[begins][: texts - 1])
        for cache in cached.caches():
            cache.zero_()
    check_logits(model, found, expected)


def methods_of(
    model: torch.nn.Module,
    length: int,
    chunk: int,
    texts: int = 1,
    cache_dtype: str = "float32",
    encoder_length: int | None = None,
) -> dict[str, tuple[torch.nn.Module, Any]]:
    """Return "prefill", "decode" and an encoder's "encode" as `torchedge.export` takes them.

    Of a causal model also "decode_64", "decode_256", ..., whose attention reads so much of longer caches, and
    "prefill_256", "prefill_1024", ... of caches four times as long.
    """
    check_choice("cache_dtype", cache_dtype, ("float32", "float16"))
    length, texts = check_whole("max_length", length, 2), check_whole("batch", texts)
    chunk = min(check_whole("chunk", chunk, 2), length)
    config: Any = model.config
    place = next(model.parameters()).device
    if getattr(config, "is_encoder_decoder", False):
        with place:
            return encoder_methods(model, length, chunk, encoder_length, texts, cache_dtype)
    if encoder_length is not None:
        raise InputError(f"encoder_length is given, and {type(model).__name__} has no encoder: omit it")
    with place:
        cached = CachedModel(model, length, texts)
        if place.type != "meta":
            _check_equal(cached, length, texts)
    for holder in (cached.keys, cached.values):
        holder.to(getattr(torch, cache_dtype))
    zero, begins = torch.zeros(1, dtype=torch.int64), torch.zeros(texts, dtype=torch.int64)
    modules = {"prefill": cached, "decode": cached}
    span = LEAST_SPAN
    while 2 * span <= length:
        modules[f"decode_{span}"] = cached.within(span)
        if span >= max(CHUNK_SPAN, chunk) and SPAN_RATIO * span <= length:
            modules[f"prefill_{span}"] = cached.within(span)
        span *= SPAN_RATIO
    return {
        name: (module, (torch.zeros(texts, tokens, dtype=torch.int64), zero, zero, *[begins][: texts - 1]))
        for name, module in modules.items()
        for tokens in [chunk if name.startswith("prefill") else 1]
    }
