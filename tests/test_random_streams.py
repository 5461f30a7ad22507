"""Random numbers by counting: uniform, independent, at any position, for any batch."""

import random

import numpy as np
import pytest
import torch
from scipy import stats

import torchglb as glb
from torchglb.random_streams import RandomStreams, derived_seed, philox

CPU = torch.device("cpu")


def streams(seed=0, names=(0, 1, 2)):
    return RandomStreams(seed, (len(names),), torch.tensor(names), CPU)


def test_numbers_are_uniform_and_strictly_inside():
    drawn = streams().uniform(50_000, dtype=torch.float64)
    assert bool(((drawn > 0) & (drawn < 1)).all())
    for row in drawn:
        assert stats.kstest(row.numpy(), "uniform").pvalue > 1e-4
    assert (
        abs(float(torch.corrcoef(drawn)[0, 1:].abs().max())) < 5 / 50_000**0.5
    )  # streams do not know each other


def test_a_position_is_what_drawing_up_to_it_gives():
    moving, still = streams(), streams()
    drawn = torch.cat([moving.uniform(k, dtype=torch.float64) for k in (3, 1, 6)], dim=-1)
    assert torch.equal(still.uniform_at(0, 10, dtype=torch.float64), drawn)
    assert torch.equal(still.uniform_at(4, 2, 3, dtype=torch.float64).flatten(1), drawn[:, 4:])
    assert torch.equal(still.uniform(2, dtype=torch.float64), drawn[:, :2])  # it did not move


def test_a_stream_is_its_own_in_every_batch():
    whole = streams(names=(5, 2, 9)).uniform(4, dtype=torch.float64)
    assert torch.equal(streams(names=(9, 5)).uniform(4, dtype=torch.float64), whole[[2, 0]])


def test_purposes_have_seeds_of_their_own():
    seeds = {derived_seed(seed, purpose) for seed in range(50) for purpose in ("arms", "rewards")}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert derived_seed(0, "arms") == 2846672268642336326  # stays so: it names recorded runs


def test_a_seed_must_be_an_integer():
    with pytest.raises(glb.InputError, match="seed: expected an integer, got 0.5"):
        streams(seed=0.5)


# ---- the generator ---------------------------------------------------------------------------

#: multipliers of the two products and increments of the two key words, by bits of a word
CONSTANTS = {
    32: (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85),
    64: (0xD2E7470EE14C6C93, 0xCA5A826395121157, 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B),
}


def reference(counter, key, bits):
    """Philox4xW-10 for words of any width W, from its definition, in Python's integers."""
    multiplier0, multiplier1, increment0, increment1 = CONSTANTS[bits]
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for turn in range(10):
        if turn:
            k0, k1 = (k0 + increment0) % 2**bits, (k1 + increment1) % 2**bits
        (high0, low0), (high1, low1) = (
            divmod(multiplier0 * c0, 2**bits),
            divmod(multiplier1 * c2, 2**bits),
        )
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


#: the known answers that Random123 publishes for philox4x32 with 10 rounds: counter, key, output
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text):
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    assert reference(words(counter), words(key), 32) == words(expected)
    assert philox(*words(counter), *words(key)) == words(expected)
    tensors = (torch.tensor(word) for word in words(counter) + words(key))
    assert tuple(int(word) for word in philox(*tensors)) == words(expected)


def test_the_reference_is_numpys_bit_by_bit():
    """NumPy's Philox is the one of 64-bit words: the same definition at twice the width."""
    chance = random.Random(0)
    for _ in range(20):
        counter = [chance.getrandbits(64) for _ in range(4)]
        key = [chance.getrandbits(64) for _ in range(2)]
        bits = np.random.Philox(counter=np.array(counter, np.uint64), key=np.array(key, np.uint64))
        drawn = [int(word) for word in bits.random_raw(8)]
        number = sum(word << 64 * i for i, word in enumerate(counter))
        for block in (1, 2):  # it counts before it draws
            at = (number + block) % 2**256
            assert drawn[4 * block - 4 : 4 * block] == list(
                reference([at >> 64 * i & (2**64 - 1) for i in range(4)], key, 64)
            )


def test_streams_are_the_words_of_the_reference():
    """Compiled and by tensors: key = seed, counter = (block, replicate), 53 bits of each half."""
    chance = random.Random(1)
    for _ in range(20):
        seed, position = chance.getrandbits(70) - 2**69, chance.getrandbits(62)
        names = [chance.getrandbits(64) - 2**63 for _ in range(3)]
        found = streams(seed, names)
        drawn = found.uniform_at(position, 5, dtype=torch.float64)
        assert torch.equal(found._on_device(position, 5), drawn)
        for name, row in zip(names, drawn.tolist(), strict=True):
            for place, number in enumerate(row, start=position):
                block, replicate, key = place // 2, name % 2**64, seed % 2**64
                counter = (block % 2**32, block >> 32, replicate % 2**32, replicate >> 32)
                output = reference(counter, (key % 2**32, key >> 32), 32)
                low, high = output[2:] if place % 2 else output[:2]
                assert number == ((low + (high << 32) >> 11) + 0.5) / 2**53


def test_float32_numbers_are_strictly_inside_too():
    drawn = streams(names=range(40)).uniform(1_000_000, dtype=torch.float32)
    assert float(drawn.max()) < 1.0  # one in 2^25 would round to it
    assert float(drawn.min()) > 0.0


def test_a_state_says_which_generator_made_it():
    state = streams().state_dict()
    assert state["generator"] == "philox4x32-10"
    del state["generator"]  # as it was before there was a choice
    with pytest.raises(glb.InputError, match="state: expected .* philox4x32-10, got splitmix64"):
        streams().load_state_dict(state)
