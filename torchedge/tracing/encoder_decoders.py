"""Encoder-decoders of transformers as methods: the encoder once, then chunks of tokens and single ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from torchedge.errors import CaptureError, InputError, TorchedgeError, check_whole, first_line
from torchedge.tracing.caches import additive, cache_class, check_logits

TOKENS, FEATURES = "input_ids", "input_features"
_BUCKETS = "_relative_position_bucket"


class Encoder(torch.nn.Module):
    """The encoder of a model: forward(ids [1, T], count [1]) or (features) -> first tokens of a text [1].

    Of T tokens the first `count` are read. Afterwards `encoded` holds what the decoder reads: keys and values
    of its cross-attention, and a mask of the tokens.

    Raises:
        CaptureError: the model has no such encoder, or its decoder takes no caches.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        super().__init__()
        self.model = model
        self._cache = cache_class()
        self.example = _example(model, tokens)
        self.encoded = torch.nn.Module()
        self.register_buffer("start", torch.tensor([_first_token(model)]))
        self.register_buffer("buckets", _buckets(self.model.get_encoder(), tokens))
        pairs = self._crossed(*self.example)
        if not pairs:
            raise CaptureError(
                f"{type(model).__name__} writes no keys of an encoder's states into its cache; expected "
                "cross-attention in layers of its decoder"
            )
        for layer, pair in pairs.items():
            for name, tensor in zip(("keys", "values"), pair, strict=True):
                self.encoded.register_buffer(f"{name}_{layer}", torch.zeros_like(tensor))
        if len(self.example) > 1:
            self.encoded.register_buffer("mask", torch.zeros(1, 1, 1, tokens))

    def forward(self, source: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """Return the first tokens of a text."""
        for layer, pair in self._crossed(source, count).items():
            for name, tensor in zip(("keys", "values"), pair, strict=True):
                self.encoded.get_buffer(f"{name}_{layer}").copy_(tensor)
        if count is not None:
            self.encoded.get_buffer("mask").copy_(_mask(source, count))
        return self.get_buffer("start").clone()

    def _crossed(self, source: torch.Tensor, count: torch.Tensor | None = None) -> dict[int, Any]:
        """Return keys and values of the decoder's cross-attention, by layer."""
        from transformers import EncoderDecoderCache

        encoder = self.model.get_encoder()
        masks = {"attention_mask": _mask(source, count)} if count is not None else {}
        with _looked_up(encoder, self._buffers["buckets"]):
            states = encoder(source, **masks).last_hidden_state
        cross = self._cache()
        self.model(
            encoder_outputs=(states,),
            decoder_input_ids=self.get_buffer("start")[None],
            decoder_attention_mask=torch.zeros(1, 1, 1, 1),
            past_key_values=EncoderDecoderCache(self._cache(), cross),
            use_cache=True,
            **masks,
        )
        pairs: dict[int, Any] = cross.written
        return pairs


class Decoder(torch.nn.Module):
    """The decoder of a model: forward(ids [1, T], position [1], last [1]) -> logits [1, vocabulary].

    As `language_models.CachedModel` over what an encoder has written; it holds the same weights and states.
    """

    def __init__(self, encoder: Encoder, length: int) -> None:
        super().__init__()
        self.model, self.encoded, self.length = encoder.model, encoder.encoded, length
        self.register_buffer("buckets", _buckets(self.model.get_decoder(), length))
        self._cache = cache_class()
        self._takes_positions = "decoder_position_ids" in inspect.signature(self.model.forward).parameters
        self._layers: list[int] = []
        self.keys, self.values = torch.nn.Module(), torch.nn.Module()
        one, own = torch.zeros(1, dtype=torch.int64), self._cache()
        self._call(one[None], one, torch.zeros(1, 1, 1, 1), own)
        for layer, pair in own.written.items():
            for holder, new in zip((self.keys, self.values), pair, strict=True):
                holder.register_buffer(str(layer), new.new_zeros(1, new.shape[1], length, new.shape[3]))
        self._layers = sorted(own.written)

    def forward(self, ids: torch.Tensor, position: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the logits that follow one of the tokens; afterwards the caches hold the tokens."""
        places = position + torch.arange(ids.shape[1])
        held = {n: (self.keys.get_buffer(str(n)), self.values.get_buffer(str(n))) for n in self._layers}
        seen = (places[:, None] >= torch.arange(self.length))[None]
        own = self._cache(places, held, position)
        return self._call(ids, places, additive(seen), own).index_select(1, last)[:, 0]

    def _call(self, ids: torch.Tensor, places: torch.Tensor, mask: torch.Tensor, own: object) -> torch.Tensor:
        from transformers import EncoderDecoderCache

        cross = self._cache()
        names = [name for name, _ in self.encoded.named_buffers() if name.startswith("keys_")]
        pairs = [(self.encoded.get_buffer(n), self.encoded.get_buffer(f"values{n[4:]}")) for n in names]
        cross.layers = [SimpleNamespace(keys=keys, values=values) for keys, values in pairs]
        caches = EncoderDecoderCache(own, cross)
        caches.is_updated = dict.fromkeys(range(len(pairs)), True)
        given: dict[str, torch.Tensor] = {}
        if self._takes_positions:
            given["decoder_position_ids"] = places[None]
        if hasattr(self.encoded, "mask"):
            given["attention_mask"] = self.encoded.get_buffer("mask")
        states = torch.zeros(1, pairs[0][0].shape[2], self.model.config.hidden_size)  # read by no layer
        with _looked_up(self.model.get_decoder(), self._buffers["buckets"]):
            logits: torch.Tensor = self.model(
                encoder_outputs=(states,),
                decoder_input_ids=ids,
                decoder_attention_mask=mask,
                past_key_values=caches,
                use_cache=True,
                **given,
            ).logits
        return logits


def _mask(ids: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return a mask [1, 1, 1, T] that is added to scores: it hides tokens from `count` on."""
    return additive((torch.arange(ids.shape[1]) < count)[None, None])


def _example(model: torch.nn.Module, tokens: int) -> tuple[torch.Tensor, ...]:
    """Return what the encoder takes: ids and their number, or features."""
    kind, config = getattr(model, "main_input_name", None), getattr(model, "config", object())
    if kind == TOKENS:
        return torch.zeros(1, tokens, dtype=torch.int64), torch.tensor([tokens])
    if kind == FEATURES and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return (torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions),)
    raise CaptureError(
        f"{type(model).__name__} takes {kind}; expected an encoder-decoder of transformers that takes "
        "input_ids, or the input_features of Whisper"
    )


def _first_token(model: Any) -> int:
    """Return the token with which the decoder begins."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        for config in (getattr(model, "generation_config", None), model.config):
            token = getattr(config, name, None)
            if type(token) is int:
                return token
    raise CaptureError(
        f"{type(model).__name__} has no decoder_start_token_id in its configuration; expected one: set it"
    )


# relative positions -----------------------------------------------------------------------------------------


def _biased(stack: torch.nn.Module) -> list[Any]:
    """Return the layers that give distances of tokens numbers of buckets, as T5's do."""
    return [layer for layer in stack.modules() if hasattr(layer, _BUCKETS)]


def _buckets(stack: torch.nn.Module, length: int) -> torch.Tensor | None:
    """Return the number of each distance from 1 - length to length - 1; None where the model has none.

    A logarithm gives it, and its last bit decides at powers of two: the device looks up PyTorch's numbers.
    """
    for layer in _biased(stack):
        numbers: torch.Tensor = getattr(layer, _BUCKETS)(
            torch.arange(1 - length, length),
            bidirectional=not layer.is_decoder,
            num_buckets=layer.relative_attention_num_buckets,
            max_distance=layer.relative_attention_max_distance,
        )
        return numbers
    return None


@contextmanager
def _looked_up(stack: torch.nn.Module, numbers: torch.Tensor | None) -> Iterator[None]:
    """Let layers look the numbers of distances up."""
    layers = [] if numbers is None else _biased(stack)

    def look_up(distances: torch.Tensor, **_: Any) -> torch.Tensor:
        assert numbers is not None
        return numbers[distances + numbers.shape[0] // 2]

    for layer in layers:
        setattr(layer, _BUCKETS, look_up)
    try:
        yield
    finally:
        for layer in layers:
            delattr(layer, _BUCKETS)


# methods ----------------------------------------------------------------------------------------------------


def _check_equal(encoder: Encoder, decoder: Decoder) -> None:
    """Raise CaptureError where a text in two parts has other logits than the model gives for the whole.

    The encoder takes 16 tokens or fewer; states are empty afterwards.
    """
    model: Any = encoder.model
    vocabulary = model.config.vocab_size
    source, *counts = encoder.example
    tokens = (torch.arange(min(decoder.length, 12)) * 5 % vocabulary)[None]
    if counts:
        count = max(1, min(source.shape[1] - 1, 16))
        source = (torch.arange(source.shape[1]) * 7 % vocabulary)[None]
        counts = [torch.tensor([count])]
        expected = model(input_ids=source[:, :count], decoder_input_ids=tokens)
    else:
        source = torch.randn(source.shape, generator=torch.Generator().manual_seed(0))
        expected = model(input_features=source, decoder_input_ids=tokens)
    encoder(source, *counts)
    half = tokens.shape[1] // 2
    for part, position in ((tokens[:, :half], 0), (tokens[:, half:], half)):
        last = torch.tensor([part.shape[1] - 1])
        logits = decoder(part, torch.tensor([position]), last)
    for holder in (decoder.keys, decoder.values, decoder.encoded):
        for state in holder.buffers():
            state.zero_()
    check_logits(model, logits, expected.logits[:, -1])


def encoder_methods(
    model: torch.nn.Module, length: int, chunk: int, tokens: int | None, texts: int, cache_dtype: str
) -> dict[str, tuple[torch.nn.Module, Any]]:
    """Return the methods "prefill", "decode" and "encode" as `torchedge.export` takes them."""
    title = type(model).__name__
    if texts != 1:
        raise InputError(f"batch is {texts} with {title}, an encoder-decoder; expected 1: omit it")
    config: Any = model.config
    most = getattr(config, "max_target_positions", None)
    if isinstance(most, int) and length > most:
        raise InputError(f"max_length is {length}, and {title} has {most} positions; expected no more")
    if tokens is not None and getattr(model, "main_input_name", None) != TOKENS:
        raise InputError(
            f"encoder_length is {tokens} with {title}, whose encoder takes features of a length of its own; "
            "expected none: omit it"
        )
    tokens = check_whole("encoder_length", length if tokens is None else tokens, 2)
    try:
        with torch.no_grad():
            encoder = Encoder(model, tokens)
            decoder = Decoder(encoder, length)
            if not encoder.get_buffer("start").is_meta:
                _check_equal(encoder, decoder)
    except TorchedgeError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{title} raised {type(error).__name__} on an encoder's input, tokens and caches: "
            f"{first_line(error)}; expected an encoder-decoder of transformers like T5 or Whisper"
        ) from error
    for holder in (decoder.keys, decoder.values):
        holder.to(getattr(torch, cache_dtype))
    zero = torch.zeros(1, dtype=torch.int64)
    sizes = {"prefill": chunk, "decode": 1}
    decoding = {n: (decoder, (zero.new_zeros(1, size), zero, zero)) for n, size in sizes.items()}
    return {**decoding, "encode": (encoder, encoder.example)}
