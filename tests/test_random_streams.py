"""Random numbers by counting: uniform, independent, at any position, for any batch."""

import pytest
import torch
from scipy import stats

import torchglb as glb
from torchglb.random_streams import RandomStreams, derived_seed

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
