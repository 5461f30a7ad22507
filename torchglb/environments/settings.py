"""The settings of environments, as types: what ``**settings`` of a class takes, nothing else."""

from __future__ import annotations

from typing import Literal, TypedDict, get_args

#: where theta* points
ThetaKind = Literal["paper", "random"]
THETAS: tuple[ThetaKind, ...] = get_args(ThetaKind)
#: what a table of classes asks for
Task = Literal["find", "label"]
TASKS: tuple[Task, ...] = get_args(Task)


class EnvironmentSettings(TypedDict, total=False):
    """Those of every environment; :class:`torchglb.environments.Environment` explains them."""

    seed: int
    dim: int


class BanditSettings(EnvironmentSettings, total=False):
    """Those of :class:`torchglb.environments.bandits.GLMBandit`."""

    theta: ThetaKind


class FiniteArmsSettings(BanditSettings, total=False):
    """Those of :class:`torchglb.environments.bandits.FiniteArms`."""

    arms: int
    shared_arms: bool


class SeedSettings(TypedDict, total=False):
    """Those of environments that have a d of their own."""

    seed: int


class RowsSettings(SeedSettings, total=False):
    """Those of tables with a d of their own."""

    arms: int


class TableSettings(RowsSettings, total=False):
    """Those of :class:`torchglb.environments.datasets.TableBandit`."""

    dim: int


class EnvironmentOptions(TypedDict, total=False):
    """Those of :func:`torchglb.environments.make`: of every environment that the package has.

    Which of them an environment takes, :func:`torchglb.environments.options_of` says. One of your
    own with options of its own is better built by its class.
    """

    dim: int
    arms: int
    shared_arms: bool
    theta: ThetaKind
    items: int
    period: int
    rank: int
    speed: float
    target: int
    task: Task
