"""Every public door that learns from rows, with one row in it: what is put in, what is kept."""

import copy
from functools import partial

import numpy as np
import torch
from input_kinds import R, X

import torchglb as glb
from torchglb import policies, preferences
from torchglb.testing.policies import assert_same
from torchglb.ucb import RefitProgram


def family():
    return glb.Bernoulli()


def ball():
    return glb.Ball(2, 3.0)


class History:
    def __init__(self):
        self.made = glb.History(2, family=family())
        self.made.append([0.6, 0.8], 1.0)

    def put(self, x, r):
        self.made.append(x, r)
        return self.made.X[1:]

    def state(self):
        return self.made.state_dict()


class Sequence(History):
    def __init__(self):
        self.made = glb.ConfidenceSequence(family(), ball(), 0.05)
        self.made.update([0.6, 0.8], 1.0)

    def put(self, x, r):
        self.made.update(x, r)
        return self.made.history.X[1:]


class Policy(History):
    def __init__(self, name="ofuglb"):
        options = {"theta_star": [1.0, 0.0]} if name == "oracle" else {}
        self.made = policies.make(name, family=family(), domain=ball(), horizon=50, **options)
        self.made.update([0.6, 0.8], 1.0)

    def put(self, x, r):
        plain = copy.deepcopy(self.made)
        self.made.update(x, r)
        plain.update(torch.tensor(X).double(), torch.tensor(R).double())
        assert_same(self.made.state_dict(), plain.state_dict())


class Head(History):
    def __init__(self):
        torch.manual_seed(0)
        network = torch.nn.Linear(2, 2)
        self.made = glb.GLMHead(network, family(), ball())
        self.made.update(torch.tensor([[0.6, 0.8]]), [1.0])

    def put(self, x, r):
        self.made.update(x, r)
        return self.made.observations.rows()[0][1:]

    def state(self):
        return {"rows": self.made.get_extra_state()["observations"]}


class Neural(Head):
    """Replicates have a network each, and it is not trained."""

    def __init__(self):
        torch.manual_seed(0)
        network = torch.nn.Linear(2, 2)
        self.made = glb.NeuralPolicy(network, "greedy", family(), ball(), train_every=None)
        self.made.update([0.6, 0.8], 1.0)

    def state(self):
        return self.made.state_dict()


class Pairs(Head):
    def __init__(self):
        torch.manual_seed(0)
        self.made = glb.PairHead(torch.nn.Linear(2, 2), dim=2, S=2.0)
        self.made.update([0.6, 0.8], [0.0, 1.0], 1.0)

    def put(self, x, r):
        self.made.update(x, x, r)
        return self.made.head.observations.rows()[0][1:, 1]

    def state(self):
        return {"rows": self.made.head.get_extra_state()["observations"]}


class Preferences(History):
    def __init__(self):
        self.made = glb.PreferenceSequence(2, S=2.0, delta=0.05)
        self.made.update([0.6, 0.8], [0.0, 1.0], 1.0)

    def put(self, x, r):
        self.made.update(x, [[0.0, 0.0]] * 3, r)
        return 2.0 * self.made.sequence.history.X[1:]


class PairRows(History):
    def __init__(self):
        self.made = preferences.PairHistory(2)
        self.made.append([0.6, 0.8], [0.0, 1.0], 1.0)

    def put(self, x, r):
        self.made.append(x, [[0.0, 0.0]] * 3, r)
        return 2.0 * self.made.rows().X[1:]

    def state(self):
        return self.made.history.state_dict()


class PairChoices(History):
    def __init__(self):
        self.made = preferences.make_pair_policy("random-pairs", dim=2, S=2.0)
        self.made.update([0.6, 0.8], [0.0, 1.0], 1.0)

    def put(self, x, r):
        plain, nothing = copy.deepcopy(self.made), [[0.0, 0.0]] * 3
        self.made.update(x, nothing, r)
        plain.update(torch.tensor(X).double(), nothing, torch.tensor(R).double())
        assert_same(self.made.state_dict(), plain.state_dict())


class Contrasts(History):
    def __init__(self):
        self.made = glb.ContrastSequence(family(), ball(), [[1.0, -1.0]], delta=0.05)
        self.made.update([0.6, 0.8], 1.0)

    def put(self, x, r):
        self.made.update(x, r)
        return self.made.joint.history.X[1:]


class Leashed(Policy):
    def __init__(self):
        self.made = policies.Conservative(Policy().made, np.int64(0), alpha=0.1)


class Refitted(History):
    def __init__(self):
        self.made = RefitProgram(family(), ball())
        self.made.append([0.6, 0.8], 1.0)

    def put(self, x, r):
        self.made.append(x, r)
        return self.made.history.X[1:]


class Anchored(Refitted):
    def __init__(self):
        self.made = glb.AnchoredProgram(family(), ball())
        self.made.append([0.6, 0.8], 1.0)


NAMES = policies.available(glb.Bernoulli()) + policies.available(pairs=True)
POLICIES = {name: partial(Policy, name) for name in NAMES}
OTHERS = [History, Sequence, Head, Neural, Pairs, Preferences, Contrasts, Leashed, Refitted]
OTHERS += [Anchored, PairRows, PairChoices]
DOORS = {door.__name__: door for door in OTHERS} | POLICIES
#: contexts are the network's business
FREE = ("Head", "Neural", "Pairs")
