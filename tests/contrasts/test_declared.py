"""``ConfidenceSequence(contrasts=...)``: a joint set and sharp contrasts from one object."""

import copy
import pickle

import pytest
import torch

import torchglb as glb
from torchglb.errors import InputError
from torchglb.testing.policies import assert_same, reload

DTYPE = torch.float64
NAMED = {"B-A": [-1.0, 1.0, 0.0], "C": [0.0, 0.0, 0.5]}


def rows(family, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn((n, 3), generator=generator, dtype=DTYPE)
    X = 0.99 * X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    return X, family.sample(X @ torch.tensor([1.0, -0.5, 0.3], dtype=DTYPE), generator)


def fed(family=None, n=600, **options):
    family = glb.Bernoulli() if family is None else family
    options = {"contrasts": NAMED} | options
    sequence = glb.ConfidenceSequence(family, glb.Ball(3, 2.0), 0.05, **options)
    sequence.update(*rows(family, n))
    return sequence


@pytest.mark.parametrize("family", [glb.Gaussian(0.5), glb.Poisson()], ids=["gaussian", "poisson"])
def test_the_intervals_are_those_of_a_contrast_sequence(family):
    both = fed(family)
    alone = glb.ContrastSequence(family, glb.Ball(3, 2.0), NAMED, 0.05)
    alone.update(*rows(family, 600))
    for simultaneous in (False, True):
        mine, other = both.contrast(simultaneous=simultaneous), alone.current(simultaneous)
        torch.testing.assert_close(mine.lower, other.lower, rtol=0, atol=1e-4)
        torch.testing.assert_close(mine.upper, other.upper, rtol=0, atol=1e-4)
    one = both.contrast("C", scale="linear")
    assert torch.equal(one.upper, both.contrast().upper[1])
    e = both.test_contrasts([0.0, 0.0], ">=").log_e
    torch.testing.assert_close(e, alone.test(0.0, ">=").log_e, rtol=0, atol=1e-2)


def test_the_joint_set_is_what_it_is_without_contrasts():
    plain, both = fed(contrasts=None), fed()
    assert torch.equal(plain.current().level, both.current().level)
    c = torch.tensor(list(NAMED.values()), dtype=DTYPE)
    assert bool((both.contrast().width < 0.9 * both.current().interval(c).width).all())


@pytest.mark.parametrize("radius", ["centred", "mean-loss", "lipschitz"])
def test_other_radii(radius):
    sequence = fed(radius=radius)
    lower, upper = sequence.contrast()
    outer = sequence.current().at_delta(0.05 * 0.1 * 0.5)
    joint = outer.interval(torch.tensor(list(NAMED.values()), dtype=DTYPE))
    assert bool((lower >= joint.lower - 1e-9).all() and (upper <= joint.upper + 1e-9).all())
    assert bool((lower < upper).all())


def test_a_set_at_another_delta_is_that_of_a_sequence_at_that_delta():
    for radius in ("pac-bayes", "mixture"):
        one = fed(radius=radius, contrasts=None, n=100).current().at_delta(0.01)
        other = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(3, 2.0), 0.01, radius)
        other.update(*rows(glb.Bernoulli(), 100))
        assert float(one.level) == pytest.approx(float(other.current().level), abs=1e-5)
        assert one.delta == 0.01
    # a centred prior shares its level with the uniform one, which is what is left at another
    centred = fed(radius="centred", contrasts=None, n=100).current()
    other = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(3, 2.0), 0.005)
    other.update(*rows(glb.Bernoulli(), 100))
    level = float(other.current().level)
    assert float(centred.at_delta(0.01).level) >= level - 1e-5


def test_batches_on_the_mean_scale():
    family, batch = glb.Bernoulli(), (2,)
    X, r = rows(family, 200)
    c = torch.tensor([[1.0, 0.0, 0.0]], dtype=DTYPE)
    sequence = glb.ConfidenceSequence(
        family, glb.Ball(3, 2.0), 0.05, batch_shape=batch, contrasts={"first": c[0].expand(2, 3)}
    )
    sequence.update(X.expand(2, 200, 3), r.expand(2, 200))
    mean = sequence.contrast("first", scale="mean")
    assert mean.upper.shape == batch
    torch.testing.assert_close(mean.upper, torch.sigmoid(sequence.contrast("first").upper))


def test_rows_that_are_recorded_are_taken():
    X, r = rows(glb.Bernoulli(), 60)
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(3, 2.0), 0.05, contrasts=NAMED)
    sequence.update(X.requires_grad_(), r)
    assert not sequence.contrast().upper.requires_grad


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state"])
@pytest.mark.parametrize("running", [False, True])
def test_copies_continue_bit_by_bit(how, running):
    X, r = rows(glb.Bernoulli(), 90)
    sequence = fed(n=60, running=running)
    sequence.contrast()
    if how == "deepcopy":
        other = copy.deepcopy(sequence)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(sequence))
    else:
        other = fed(n=5, running=running)
        other.contrast()  # its own weights are forgotten
        other.load_state_dict(reload(sequence.state_dict()))
    frozen = reload(other.state_dict())
    sequence.update(X[60:], r[60:])
    sequence.contrast()
    assert_same(reload(other.state_dict()), frozen)  # nothing is shared
    other.update(X[60:], r[60:])
    for a, b in zip(other.contrast(), sequence.contrast(), strict=True):
        assert torch.equal(a, b)
    assert_same(reload(other.state_dict()), reload(sequence.state_dict()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ellipsoidal": True}, "ellipsoidal: expected False with contrasts"),
        ({"aggregate": True}, "aggregate: expected False with contrasts"),
        ({"forgetting": glb.Window(50)}, "forgetting: expected None with contrasts"),
        ({"radius": "gaussian-prior"}, "radius: expected one that keeps to the ball, for contrast"),
        ({"dtype": torch.float32}, "dtype: expected torch.float64, for contrasts"),
        ({"contrasts": {}}, "contrasts: expected at least one"),
        ({"contrasts": {"x": [0.0, 0.0, 0.0]}}, "contrasts: expected vectors of positive length"),
    ],
)
def test_refusals(change, message):
    options = {"contrasts": NAMED} | change
    with pytest.raises(InputError, match=message):
        glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(3, 2.0), 0.05, **options)


def test_names_and_states_that_do_not_fit_are_refused():
    sequence, plain = fed(n=20), fed(n=20, contrasts=None)
    with pytest.raises(InputError, match=r"name: expected one of \['B-A', 'C'\]"):
        sequence.contrast("A-B")
    for ask in (plain.contrast, lambda: plain.test_contrasts(0.0)):
        with pytest.raises(InputError, match="a sequence with contrasts="):
            ask()
    with pytest.raises(InputError, match="state"):
        plain.load_state_dict(sequence.state_dict())
    with pytest.raises(InputError, match="state"):
        sequence.load_state_dict(plain.state_dict())
    other = fed(n=20, contrasts={"B-A": NAMED["C"], "C": NAMED["B-A"]})
    with pytest.raises(InputError, match="contrasts"):
        other.load_state_dict(sequence.state_dict())


def test_a_level_that_spends_delta_in_another_way_is_refused():
    """The paper's radius for Gaussian rewards has a share of delta for its Lipschitz constant."""
    sequence = fed(glb.Gaussian(1.0), n=30, radius="lipschitz")
    with pytest.raises(InputError, match=r"log\(1/delta\) plus what does not depend on delta"):
        sequence.contrast()
    alone = glb.ContrastSequence(
        glb.Gaussian(1.0), glb.Ball(3, 2.0), NAMED, 0.05, radius="lipschitz"
    )
    alone.update(*rows(glb.Gaussian(1.0), 30))
    assert bool((alone.current().width > 0).all())  # built at the level that is needed
    with pytest.raises(InputError, match="radius: expected one whose level is"):
        alone.test(0.0)
