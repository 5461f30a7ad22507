"""Every preset is complete, and its quick form runs."""

import pytest
from fake_records import PAPER

from torchglb import policies
from torchglb.plotting import figures
from torchglb.report import table
from torchglb.simulate import Configuration, find_preset, presets, read_table, run

NAMES = sorted(presets())
ONE_PASS = ("glb-omd", "glb-omd-realised", "glb-omd-rows")


def test_the_experiments_of_the_paper_and_more_are_there():
    assert set(NAMES) >= {
        "figure1", "figure1-random", "figure2", "figure2-long", "figure3", "figure4", "poisson",
        "gaussian", "high-dim", "fixed-high-dim", "digits", "breast-cancer", "randhie", "duels",
        "changing", "conservative",
    }  # fmt: skip
    assert all(presets().values()), "a preset has no title"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "figure1",
            dict(
                environment="time-varying",
                arms=20,
                horizon=10_000,
                theta="paper",
                policies=[*PAPER, *ONE_PASS],
            ),
        ),
        (
            "figure1-random",
            dict(
                environment="time-varying",
                arms=20,
                horizon=10_000,
                theta="random",
                policies=[*PAPER, *ONE_PASS],
            ),
        ),
        (
            "figure2",
            dict(environment="fixed", arms=20, horizon=10_000, theta="paper", policies=[*PAPER]),
        ),
        ("figure2-long", dict(environment="fixed", arms=20, horizon=50_000, policies=[*PAPER])),
        ("figure3", dict(environment="time-varying", arms=10, horizon=10_000)),
        ("figure4", dict(environment="fixed", arms=10, horizon=10_000)),
    ],
)
def test_the_settings_of_the_paper(name, expected):
    table = Configuration.load(read_table(find_preset(name))).as_dict()
    common = dict(family={"name": "bernoulli"}, dim=2, S=[4, 6, 8, 10], replicates=10, delta=0.05)
    for key, value in (common | expected).items():
        assert table[key] == value, key
    if name in {"figure3", "figure4"}:
        assert table["policy"]["emk-vaw"] == {"policy": "emk", "regularizer": "vaw"}
        assert "evill-theory" in table["policies"]


@pytest.mark.parametrize("name", NAMES)
def test_full_form_is_larger_than_the_quick_one(name):
    full, quick = (
        Configuration.load(read_table(find_preset(name), quick)) for quick in (False, True)
    )
    assert full.horizon > quick.horizon
    assert full.elements > quick.elements
    assert full.policy == quick.policy
    assert full.name == quick.name == name


#: what another preset has too, with other arms or for longer
LIKE_OTHERS = ("figure1-random", "figure2-long")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in LIKE_OTHERS else []) for n in NAMES],
)
def test_quick_form_runs(name, tmp_path):
    settings = read_table(find_preset(name), quick=True)
    record = run(Configuration.load(settings | {"horizon": 4, "replicates": 2}), tmp_path)
    assert record.complete
    printed = table(record)
    for label in record.labels:
        arrays = record.arrays(label)
        assert arrays["regret"].shape == (len(settings["S"]), 2, 4)
        assert (arrays["regret"] >= 0).all()
        assert label in printed
    assert "regret" in figures(record)


def test_figure3_has_no_warm_up_and_figure4_has():
    """The paper warms EVILL up on fixed arms only."""
    for name, warm in (("figure3", False), ("figure4", True)):
        config = Configuration.load(read_table(find_preset(name), quick=True))
        world = config.make_environment(range(config.elements))
        policy = config.make_policy("evill-theory", world)
        assert bool(policy.warming_up(world.arms(0)).all()) is warm


def test_presets_name_policies_that_exist():
    for name in NAMES:
        config = Configuration.load(read_table(find_preset(name)))
        known = {*policies.available(), *policies.available(pairs=True)}
        assert {table["policy"] for table in config.policy.values()} <= known
