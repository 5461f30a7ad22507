import math

import pytest
import torch
from mpmath import mp, mpf

from torchglb import Bernoulli, Gaussian, InputError, Poisson
from torchglb.families import CustomFamily
from torchglb.theory import kappa, kappa_star, realised_certificate, regret_bound


def test_kappa():
    assert kappa(Bernoulli(), 4.0) == pytest.approx(2 + math.exp(4) + math.exp(-4), rel=1e-12)
    assert kappa(Poisson(), 3.0) == pytest.approx(math.exp(3))
    assert kappa(Gaussian(), 7.0) == 1.0
    assert kappa(CustomFamily(lambda z: z**4, min_variance=0.0), 1.0) == math.inf
    with pytest.raises(InputError):
        kappa(Bernoulli(), -1.0)


def test_kappa_star():
    z = torch.tensor([[0.0, 0.0], [3.0, -3.0]], dtype=torch.float64)
    slope = math.exp(3) / (1 + math.exp(3)) ** 2
    expected = torch.tensor([4.0, 1 / slope], dtype=torch.float64)
    torch.testing.assert_close(kappa_star(Bernoulli(), z), expected)
    for bad in (torch.zeros(()), torch.zeros(3, 0), torch.zeros(3, dtype=torch.complex64)):
        with pytest.raises(InputError):
            kappa_star(Bernoulli(), bad)


@pytest.mark.parametrize(
    ("family", "S", "R", "Rm", "k", "g", "span"),
    [
        (Bernoulli(), 2.0, "tanh(1)", "1/4", "2+exp(2)+exp(-2)", "1", "tanh(1)"),
        (Poisson(), 1.0, "1", "e", "e", "1", "2*sinh(1)"),
        (Gaussian(0.5), 3.0, "0", "1", "1", "1/4", "6"),
    ],
    ids=["Bernoulli", "Poisson", "Gaussian"],
)
def test_regret_bound_golden_values(family, S, R, Rm, k, g, span):
    mp.dps = 40
    names = {name: getattr(mp, name) for name in ("tanh", "exp", "sinh", "e")}
    R, Rm, k, g, D = (
        mp.mpf(eval(f"mp.mpf(1)*({v})", {"mp": mp} | names)) for v in (R, Rm, k, g, span)
    )
    d, T, radius, star = 3, 5000, mpf(20), mpf(12)
    lam, log2 = 1 / (4 * mpf(S) ** 2), mp.log(2)
    b2 = 4 * lam * mpf(S) ** 2 + radius
    N = (
        2
        * d
        / log2
        * (mp.log(1 + Rm / (2 * lam * g * log2)) + mp.log(1 + 1 / (2 * k * lam * g * log2)))
    )
    a2 = 2 * g / log2 * d * b2 * mp.log(1 + Rm * T / (2 * d * g * lam))
    C = 7 * g * k * R * Rm / log2 * d * b2 * mp.log(1 + T / (2 * d * g * k * lam))
    # X is the largest solution of X = sqrt(a2) sqrt(T/ks + 2 R X) + C
    X = mp.findroot(
        lambda x: x - mp.sqrt(a2 * (T / star + 2 * R * x)) - C, C + a2 * R + mp.sqrt(a2 * T)
    )
    expected = min(D * N + 2 * X, T * D)
    found = regret_bound(family, S, d, T, torch.tensor(20.0).double(), torch.tensor(12.0).double())
    assert float(found.value) == pytest.approx(float(expected), rel=1e-10)
    total = float(found.warmup + found.leading + found.transient)
    assert total == pytest.approx(float(D * N + 2 * X), rel=1e-10)
    assert bool(found.vacuous) == (total >= T * D)


def test_regret_bound_is_batched_and_grows_like_a_root():
    radius = torch.tensor([10.0, 40.0], dtype=torch.float64)
    star = torch.full((2,), 1.0, dtype=torch.float64)
    short, long = (regret_bound(Gaussian(), 1.0, 2, T, radius, star) for T in (10**8, 4 * 10**8))
    assert not short.vacuous.any()
    assert (long.value > short.value).all()
    assert (long.value < 2.2 * short.value).all()
    assert short.value[0] < short.value[1]
    # small logistic problems: the transient term rules, and the bound says nothing
    assert regret_bound(Bernoulli(), 4.0, 2, 1000, radius, star).vacuous.all()
    tighter = regret_bound(Gaussian(), 1.0, 2, 1000, radius, star, largest_gap=0.1)
    assert float(tighter.value[0]) == pytest.approx(100.0)
    with pytest.raises(InputError):
        regret_bound(Bernoulli(), 4.0, 2, 0, radius, star)
    rough = CustomFamily(lambda z: z**4, self_concordance=math.inf)
    with pytest.raises(InputError, match="self-concordant"):
        regret_bound(rough, 1.0, 2, 10, radius, star)


def test_realised_certificate():
    upper = torch.tensor([[1.0, 0.8, 0.7], [0.5, 0.5, 0.5]], dtype=torch.float64)
    lower = torch.tensor([[0.0, 0.4, 0.6], [0.5, 0.4, 0.3]], dtype=torch.float64)
    expected = torch.tensor([[1.0, 1.4, 1.5], [0.0, 0.1, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(realised_certificate(upper, lower), expected)
    capped = torch.tensor([[0.3, 0.6, 0.7], [0.0, 0.1, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(realised_certificate(upper, lower, 0.3), capped)
    with pytest.raises(InputError):
        realised_certificate(upper, lower[:1])
