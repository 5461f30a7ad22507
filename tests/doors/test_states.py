"""States say what they belong to; what is not a state is refused, and changes nothing."""

import pytest
import torch
from door_objects import DOORS, ball
from input_kinds import R, X

import torchglb as glb
from torchglb import policies
from torchglb.testing.policies import assert_same


def test_states_of_other_settings_are_refused():
    def sequence(fam=None, S=3.0, delta=0.05, radius="pac-bayes"):
        return glb.ConfidenceSequence(fam or glb.Binomial(10), glb.Ball(2, S), delta, radius)

    def head(fam=None, **settings):
        torch.manual_seed(0)
        made = glb.GLMHead(torch.nn.Linear(2, 2), fam or glb.Binomial(10), ball(), **settings)
        made.update([[0.6, 0.8]], [1.0])
        return made

    def policy(fam=None, S=3.0, **settings):
        return policies.make(
            "ofuglb", family=fam or glb.Binomial(10), domain=glb.Ball(2, S), **settings
        )

    for build, other, part in [
        (sequence, dict(fam=glb.Binomial(20)), "trials"),
        (sequence, dict(fam=glb.Gaussian()), "class"),
        (sequence, dict(S=2.0), "S"),
        (sequence, dict(delta=0.1), "delta"),
        (sequence, dict(radius=glb.radii.Lipschitz()), "radius"),
        (head, dict(fam=glb.Binomial(20)), "trials"),
        (head, dict(delta=0.1), "delta"),
        (policy, dict(fam=glb.Binomial(20)), "trials"),
        (policy, dict(S=2.0), "S"),
        (policy, dict(delta=0.1), "delta"),
        (policy, dict(radius="lipschitz"), "inf"),
    ]:
        mine, state = build(), build(**other).state_dict()
        with pytest.raises(glb.InputError, match=rf"state\['settings'\].*{part}.*expected"):
            mine.load_state_dict(state)
        mine.load_state_dict(build().state_dict())
    a, b = (policies.make("oful", family=glb.Gaussian(s), domain=ball()) for s in (1.0, 0.5))
    with pytest.raises(glb.InputError, match="sigma"):
        a.load_state_dict(b.state_dict())


def paths(state, above=()):
    """The places of all entries of nested tables."""
    for key, value in state.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def spoilt(state, path, gone):
    """The state without one entry, or with a word in its place."""
    inner = {} if len(path) == 1 else {path[0]: spoilt(state[path[0]], path[1:], gone)}
    if len(path) == 1 and not gone:
        inner = {path[0]: "nonsense"}
    return {key: value for key, value in state.items() if key != path[0]} | inner


SPOILT = ["Sequence", "Contrasts", "Preferences", "Leashed", "Neural", "PairChoices"]
SPOILT += ["ofuglb", "ofuglb-pb", "ofuglb-e", "ada-ofu-ecolog", "evill", "ts"]


@pytest.mark.parametrize("door", SPOILT)
@pytest.mark.parametrize("gone", [True, False])
def test_what_is_no_state_is_refused_and_changes_nothing(door, gone):
    """An entry that is missing or not what it was; some may be left out, such as None."""
    made, other = DOORS[door]().made, DOORS[door]().made
    other.update(*([X, X, R] if door in ("Preferences", "PairChoices") else [X, R]))
    before, state, refused = made.state_dict(), other.state_dict(), 0
    places = list(paths(state))
    for path in places:
        try:
            made.load_state_dict(spoilt(state, path, gone))
        except glb.InputError:
            refused += 1
            assert_same(made.state_dict(), before)
        else:
            made.load_state_dict(before)
    assert refused > 0.8 * len(places)


def merged_program(rows: int = 5) -> glb.AnchoredProgram:
    program = glb.AnchoredProgram(glb.Bernoulli(), ball(), aggregate=True, validate=False)
    for _ in range(rows):
        program.append([0.6, 0.8], 1.0)
    return program


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("history", "distinct"), torch.tensor(10**9)),  # once read, and written, so far away
        (("history", "distinct"), torch.tensor(-1)),
        (("history", "distinct"), torch.tensor(1.0)),
        (("history", "distinct"), torch.tensor(1).to_sparse()),
        (("history", "observations"), -1),
        (("history", "observations"), 0.5),
        (("minimum", "sums"), torch.nan),
        (("anchors", "sums"), torch.nan),
    ],
)
def test_numbers_of_rows_that_cannot_be_are_refused(path, value):
    """Whatever the values of rows are: as far as these numbers say compiled code reads and writes."""
    program, state = merged_program(3), merged_program().state_dict()
    table, name = state[path[0]], path[1]
    table[name] = table[name] * value if name == "sums" else value
    before = program.state_dict()
    with pytest.raises(glb.InputError, match="state"):
        program.load_state_dict(state)
    assert_same(program.state_dict(), before)


def test_a_state_of_parameters_is_a_state():
    program, state = merged_program(3), merged_program().state_dict()
    plain = merged_program().state_dict()
    for table in (state["history"], state["minimum"], state["anchors"], state):
        for name, value in table.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                table[name] = torch.nn.Parameter(value)
    program.load_state_dict(state)
    assert_same(program.state_dict(), plain)
    program.append([0.8, 0.6], 0.0)


@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_mapping_is_no_state(door):
    made = DOORS[door]().made
    # those of modules are refused by torch
    if hasattr(made, "load_state_dict") and not isinstance(made, torch.nn.Module):
        with pytest.raises(glb.InputError, match="^state: expected what state_dict"):
            made.load_state_dict(None)
