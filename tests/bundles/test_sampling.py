"""Drawn tokens follow docs/bundle-format.md to the letter: the same numbers, written from the page alone."""

import math

import numpy as np
import pytest

from torchedge.bundles.generation import Sampling

WORD, LONG, WIDE = 2**32 - 1, 2**64 - 1, 2**128 - 1


class Numbers:
    """The uniform numbers of a seed."""

    def __init__(self, seed):
        words = [seed >> 32 * n & WORD for n in range(max(1, -(-seed.bit_length() // 32)))]
        self.constant = 0x43B0D7E5
        pool = [self.hashed(word) for word in (words + [0] * 4)[:4]]
        for source in range(4):
            for target in range(4):
                if source != target:
                    pool[target] = mixed(pool[target], self.hashed(pool[source]))
        for word in words[4:]:
            pool = [mixed(own, self.hashed(word)) for own in pool]
        state, constant = [], 0x8B51F9DD
        for n in range(8):
            word = pool[n % 4] ^ constant
            constant = constant * 0x58F38DED & WORD
            word = word * constant & WORD
            state.append(word ^ word >> 16)
        first, second, third, fourth = (state[n] | state[n + 1] << 32 for n in range(0, 8, 2))
        self.step = ((third << 64 | fourth) << 1 | 1) & WIDE
        self.state = 0
        self.advance()
        self.state = self.state + (first << 64 | second) & WIDE
        self.advance()

    def hashed(self, word):
        word ^= self.constant
        self.constant = self.constant * 0x931E8875 & WORD
        word = word * self.constant & WORD
        return word ^ word >> 16

    def advance(self):
        self.state = self.state * 0x2360ED051FC65DA44385DF649FCCF645 + self.step & WIDE

    def next(self):
        self.advance()
        word, turn = self.state >> 64 ^ self.state & LONG, self.state >> 122
        return ((word >> turn | word << (-turn & 63) & LONG) >> 11) / 2**53


def mixed(one, other):
    word = 0xCA01F9DD * one - 0x4973F715 * other & WORD
    return word ^ word >> 16


def drawn(logits, temperature, top_k, top_p, number):
    scores = [float(value) / temperature for value in logits]
    if top_k is not None and top_k < len(scores):
        least = sorted(scores, reverse=True)[top_k - 1]
        scores = [score if score >= least else -math.inf for score in scores]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    likely = [math.exp(scores[token] - scores[order[0]]) for token in order]
    whole, sums, total = math.fsum(likely), [], 0.0
    for weight in likely:
        total += weight / whole
        sums.append(total)
    kept = len(sums)
    if top_p is not None:
        kept = min(kept, sum(value < top_p for value in sums) + 1)
    chosen = sum(value <= number * sums[kept - 1] for value in sums[:kept])
    return order[min(chosen, kept - 1)]


@pytest.mark.parametrize("seed", [0, 1, 7, 2**32 + 5, 2**200 + 3])
def test_numbers_are_those_of_the_page(seed):
    numbers, generator = Numbers(seed), np.random.default_rng(seed)
    assert [numbers.next() for _ in range(20)] == generator.random(20).tolist()


@pytest.mark.parametrize("top_k", [None, 1, 5])
@pytest.mark.parametrize("top_p", [None, 0.5, 1.0])
def test_tokens_are_those_of_the_page(top_k, top_p):
    logits = np.random.default_rng(3).normal(size=50).astype(np.float32).round(1)  # with equal ones
    numbers, generator = Numbers(11), np.random.default_rng(11)
    for _ in range(50):
        wanted = drawn(logits, 0.7, top_k, top_p, numbers.next())
        assert Sampling(0.7, top_k, top_p).draw(logits, generator) == wanted
    assert Sampling().draw(logits, generator) == logits.tolist().index(logits.max())
