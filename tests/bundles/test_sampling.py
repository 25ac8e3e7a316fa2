"""Drawn tokens follow docs/language-models.md to the letter: the same ones, written from the page alone."""

import math

import numpy as np
import pytest

from torchedge.bundles.generation import Generator, Sampling


def numbers(seed):
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & 2**64 - 1
        word = state
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = (word ^ word >> shift) * factor & 2**64 - 1
        yield ((word ^ word >> 31) >> 11) / 2**53


def weight(score):
    n = round(score * float.fromhex("0x1.71547652b82fep+0"))
    r = score - n * float.fromhex("0x1.62e42feep-1") - n * float.fromhex("0x1.a39ef35793c76p-33")
    s = 1.0
    for k in range(13, 0, -1):
        s = 1 + s * r / k
    return 0.0 if score < -700 else s * 2.0**n


def drawn(logits, temperature, top_k, top_p, u):
    largest = max(map(float, logits))
    scores = {token: (float(value) - largest) / temperature for token, value in enumerate(logits)}
    if top_k is not None and top_k < len(scores):
        least = sorted(scores.values(), reverse=True)[top_k - 1]
        scores = {token: score for token, score in scores.items() if score >= least}
    order = sorted(scores, key=lambda token: (-scores[token], token))
    sums, total = [], 0.0
    for token in order:
        total += weight(scores[token])
        sums.append(total)
    if top_p is not None:
        sums = sums[: 1 + next(n for n, value in enumerate(sums) if value >= top_p * sums[-1])]
    return next(token for token, value in zip(order, sums, strict=False) if value > u * sums[-1])


def test_numbers_are_those_of_the_published_generator():
    # Vigna's splitmix64.c, begun with 1234567: its first words.
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    generator = Generator(1234567)
    assert [generator.random() for _ in words] == [(word >> 11) / 2**53 for word in words]


def test_weights_are_exponentials_to_the_last_bits():
    for score in np.linspace(-699, 0, 500):
        assert weight(score) == pytest.approx(math.exp(score), rel=1e-15)


@pytest.mark.parametrize("top_k", [None, 1, 5])
@pytest.mark.parametrize("top_p", [None, 0.5, 1.0])
def test_tokens_are_those_of_the_page(top_k, top_p):
    logits = np.random.default_rng(3).normal(size=50).astype(np.float32).round(1)  # with equal ones
    generator = Generator(11)
    for _, u in zip(range(200), numbers(11), strict=False):
        wanted = drawn(logits, 0.7, top_k, top_p, u)
        assert Sampling(0.7, top_k, top_p).draw(logits, generator) == wanted
    assert Sampling().draw(logits, generator) == logits.tolist().index(logits.max())
