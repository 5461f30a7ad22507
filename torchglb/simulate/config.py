"""What an experiment is: one complete, checked table of plain values.

A configuration determines every number of a run; where and how it is computed (directory,
executor, workers) is not part of it.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from torchglb import environments, policies
from torchglb.checks import check_choice, check_probability, refuse
from torchglb.environments import Environment
from torchglb.environments.settings import EnvironmentOptions
from torchglb.errors import InputError
from torchglb.families import Bernoulli, Binomial, Gaussian, GLMFamily, Poisson, QuasiBounded
from torchglb.policies import Policy
from torchglb.random_streams import derived_seed
from torchglb.simulate.keys import (
    count,
    device_of,
    environment_of,
    imported,
    named,
    policies_of,
    radii_of,
    stages_of,
    table_of,
    text_of,
    word,
)

FAMILIES: dict[str, Callable[..., GLMFamily]] = {
    "bernoulli": Bernoulli,
    "binomial": Binomial,
    "gaussian": Gaussian,
    "poisson": Poisson,
    "probit": lambda: QuasiBounded("probit"),
    "cloglog": lambda: QuasiBounded("cloglog"),
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
#: what changes no number: a run may be continued although it differs
PRESENTATION = frozenset({"title", "imports"})
#: what may grow from one stage of a run to the next, and the list of the stages
GROWING = frozenset({"policies", "policy", "horizon", "replicates", "stages"})
#: recorded rounds at most, in every stage
RECORDED = 1000


class RunSettings(EnvironmentOptions, total=False):
    """What :func:`torchglb.simulate` takes besides its arguments: the other keys of a preset.

    Those of every run, as in :class:`Configuration`, beside options of the environments that the
    package has; others may have options of their own.
    """

    name: str
    title: str
    family: str | Mapping[str, Any]
    delta: float
    seed: int
    chunk: int
    device: str
    dtype: Literal["float64", "float32"]
    imports: Sequence[str]
    stages: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Configuration:
    """An experiment. :meth:`load` makes one from a table that may leave things out.

    Attributes:
        name: a word.
        title: a sentence for pictures and reports.
        family: ``{"name": "gaussian", "sigma": 0.5}``.
        environment: its name.
        options: of the environment, all written out: ``dim``, ``arms``, ``theta``, ...
        S: the radii; each is a problem of its own.
        horizon: T.
        replicates: R, for each S.
        delta: the failure level.
        seed: of everything random.
        policy: for each label ``{"policy": name, ...}`` with its options.
        chunk: elements (S, replicate) that advance as one batch; it never depends on the executor.
        device: of the tensors.
        dtype: ``"float64"`` or ``"float32"``.
        imports: modules that register policies or environments of their own.
        stages: ``[horizon, replicates]`` of what the run was each time before it was extended.

    Example:
        >>> table = {
        ...     "family": "bernoulli", "environment": "fixed", "arms": 5, "S": 3.0,
        ...     "horizon": 10, "replicates": 2, "policies": ["random"],
        ... }
        >>> config = Configuration.load(table)
        >>> config.horizon, config.delta
        (10, 0.05)
    """

    name: str
    title: str
    family: dict[str, Any]
    environment: str
    options: dict[str, Any]
    S: list[float]
    horizon: int
    replicates: int
    delta: float
    seed: int
    policy: dict[str, dict[str, Any]]
    chunk: int
    device: str
    dtype: str
    imports: list[str]
    stages: list[list[int]]

    @classmethod
    def load(cls, table: Mapping[str, Any]) -> Configuration:
        """Checks a table, as a preset holds it, and fills in what it leaves out.

        Args:
            table: ``family``, ``environment``, ``S``, ``horizon``, ``replicates``, ``policies`` (a
                list of labels), and optionally ``name``, ``title``, ``delta``, ``seed``, ``chunk``,
                ``device``, ``dtype``, ``imports``, ``stages``, options of the environment
                (``arms``, ``dim``, ``theta``, ...) and a table ``policy`` with options by label.

        Raises:
            InputError: names the key, the value and what is allowed.
        """
        given = dict(table)
        imports = imported(given.pop("imports", []))
        family = named("family", given.pop("family", "bernoulli"))
        make_family(family)
        environment, options = environment_of(given)
        policy = policies_of(given.pop("policies", None), given.pop("policy", {}))
        settings: dict[str, Any] = {
            "name": word(given.pop("name", "run")),
            "title": text_of("title", given.pop("title", "")),
            "family": family,
            "environment": environment,
            "options": options,
            "S": radii_of(given.pop("S", None)),
            "horizon": count("horizon", given.pop("horizon", None), least=1),
            "replicates": count("replicates", given.pop("replicates", 1), least=1),
            "delta": check_probability("delta", given.pop("delta", 0.05)),
            "seed": count("seed", given.pop("seed", 0)),
            "policy": policy,
            "chunk": count("chunk", given.pop("chunk", 64), least=1),
            "device": device_of(given.pop("device", "cpu")),
            "dtype": check_choice("dtype", given.pop("dtype", "float64"), tuple(DTYPES)),
            "imports": imports,
        }
        size = [settings["horizon"], settings["replicates"]]
        settings["stages"] = stages_of(given.pop("stages", []), size)
        if given:
            known = (
                {field.name for field in fields(cls)} - {"options"} | {"policies"} | set(options)
            )
            key, value = next(iter(given.items()))
            expected = "one of the keys " + ", ".join(sorted(known))
            raise refuse("configuration", expected, f"{key} = {value!r}")
        return cls(**settings)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, in the form that :meth:`load` takes."""
        table = asdict(self)
        return table | table.pop("options") | {"policies": list(self.policy)}

    def differences(self, other: Configuration) -> list[str]:
        """The keys, with both values, that make another run of it."""
        return self._differing(other, PRESENTATION)

    def extends(self, other: Configuration) -> list[str]:
        """Why this cannot be what another one grows into; nothing if it can.

        A run may get more policies, more replicates and more rounds. What it has is kept.
        """
        found = self._differing(other, PRESENTATION | GROWING)
        for label in self.policy.keys() & other.policy.keys():
            old, new = other.policy[label], self.policy[label]
            if old != new:
                found.append(f"policy.{label}: {old!r} there, {new!r} now")
        for key in ("horizon", "replicates"):
            old, new = getattr(other, key), getattr(self, key)
            if new < old:
                found.append(f"{key}: {old} there, fewer now ({new})")
        if self.horizon > other.horizon:
            found += [
                f"horizon: {other.horizon} there, {self.horizon} now, but {label} depends on it"
                for label, options in other.policy.items()
                if policies.requirements_of(options["policy"]).horizon
            ]
        return found

    def grown_from(self, other: Configuration) -> Configuration:
        """This configuration as the next stage of another one, with the policies of both."""
        before, now = [other.horizon, other.replicates], [self.horizon, self.replicates]
        return replace(
            self,
            policy=other.policy | self.policy,
            imports=list(dict.fromkeys(other.imports + self.imports)),
            stages=other.stages + ([before] if before != now else []),
        )

    def _differing(self, other: Configuration, ignored: frozenset[str]) -> list[str]:
        mine, theirs = self.as_dict(), other.as_dict()
        return [
            f"{key}: {theirs.get(key)!r} there, {mine.get(key)!r} now"
            for key in sorted((set(mine) | set(theirs)) - ignored)
            if mine.get(key) != theirs.get(key)
        ]

    def what_determines(self, label: str, elements: Sequence[int]) -> dict[str, Any]:
        """All that the rounds of a policy on some elements depend on, as plain values."""
        options = self.policy[label]
        tuned = policies.requirements_of(options["policy"]).horizon
        table = self.as_dict()
        ignored = PRESENTATION | GROWING | {"name", "S", "chunk"}
        return {key: value for key, value in table.items() if key not in ignored} | {
            "label": label,
            "options": options,
            "horizon": self.horizon if tuned else None,
            "elements": [
                [self.S[element // self.replicates], element % self.replicates]
                for element in elements
            ],
        }

    # ---- what it stands for --------------------------------------------------------------

    @property
    def elements(self) -> int:
        """N = number of S times replicates; element ``s R + r`` is replicate r of the s-th S."""
        return len(self.S) * self.replicates

    def chunks(self) -> list[list[int]]:
        """The elements that advance together: those of the first stage, then what each added."""
        found, known = [], 0
        for _, replicates in [*self.stages, [self.horizon, self.replicates]]:
            new = [
                s * self.replicates + r
                for s in range(len(self.S))
                for r in range(known, replicates)
            ]
            found += [new[i : i + self.chunk] for i in range(0, len(new), self.chunk)]
            known = replicates
        return found

    def recorded_rounds(self) -> np.ndarray:
        """The rounds after which values are recorded, of every stage."""
        grid, last = [], 0
        for horizon, _ in [*self.stages, [self.horizon, self.replicates]]:
            rounds = recorded_rounds(horizon)
            grid.append(rounds[rounds > last])
            last = horizon
        return np.concatenate(grid)

    def make_environment(self, elements: Sequence[int]) -> Environment:
        """The environment of some of the elements."""
        index = torch.tensor(list(elements))
        S = torch.tensor(self.S, dtype=DTYPES[self.dtype])[index // self.replicates]
        return environments.make(
            self.environment,
            family=make_family(self.family),
            S=S.to(self.device),
            replicates=(index % self.replicates).to(self.device),
            seed=self.seed,
            dtype=DTYPES[self.dtype],
            device=self.device,
            **self.options,
        )

    def make_policy(self, label: str, world: Environment) -> Policy:
        """The policy of a label for an environment."""
        options = dict(self.policy[label])
        name = options.pop("policy")
        takes = policies.options_of(name)
        if world.fixed and not world.whole_ball and "aggregate" in takes:
            options["aggregate"] = True
        if "theta_star" in takes:
            options["theta_star"] = world.theta_star
        return policies.make(
            name,
            family=world.family,
            domain=world.domain,
            delta=self.delta,
            horizon=self.horizon,
            batch_shape=tuple(world.S.shape),
            seed=derived_seed(self.seed, f"policy {label}"),
            replicates=world.replicates,
            validate=False,  # the environment's arms and rewards are what they should be
            dtype=world.dtype,
            device=world.device,
            **options,
        )

    def try_out(self) -> None:
        """Builds everything once, so that a refusal comes before the first round."""
        world = self.make_environment(range(0, self.elements, self.replicates))
        for label, options in self.policy.items():
            name = options["policy"]
            if world.whole_ball and name not in policies.playing_the_ball():
                able = ", ".join(policies.playing_the_ball())
                raise refuse("policies", f"for environment {self.environment} one of {able}", name)
            if policies.requirements_of(name).pairs and not world.pairs:
                raise refuse(
                    "environment", f"one of pairs, such as duels, for {name}", self.environment
                )
            if policies.requirements_of(name).fixed_arms and not world.fixed:
                raise refuse("environment", f"a fixed arm set for {name}", self.environment)
            try:
                self.make_policy(label, world)
            except InputError as error:
                raise InputError(f"policy {label}: {error}") from None


def recorded_rounds(horizon: int) -> np.ndarray:
    """Every round up to 1000; beyond, 1000 equally spaced ones, the last being the horizon."""
    points = min(horizon, RECORDED)
    return -(-np.arange(1, points + 1) * horizon // points)


def read_table(path: Path, quick: bool = False) -> dict[str, Any]:
    """The table of a TOML file; its ``[quick]`` table is laid over the rest, or left out.

    Raises:
        InputError: if the file cannot be read, or has no ``[quick]`` table and it is asked for.

    Example:
        >>> from torchglb.simulate import find_preset
        >>> full, quick = (read_table(find_preset("figure1"), quick) for quick in (False, True))
        >>> full["horizon"] > quick["horizon"]
        True
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a TOML file: {error}") from None
    if quick and "quick" not in table:
        raise refuse("quick", "a table [quick] in the configuration", f"none in {path}")
    overlay = table_of("quick", table.pop("quick", {}))
    table.setdefault("name", path.stem)
    return lay_over(table, overlay) if quick else table


def lay_over(table: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the values of another on top; tables within are merged.

    Example:
        >>> lay_over({"S": 3, "policy": {"emk": {"seed": 1}}}, {"policy": {"emk": {"seed": 2}}})
        {'S': 3, 'policy': {'emk': {'seed': 2}}}
    """
    merged = dict(table)
    for key, value in overlay.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = lay_over(old, value) if both else value  # type: ignore[arg-type]
    return merged


def make_family(spec: Mapping[str, Any]) -> GLMFamily:
    """The family of ``{"name": ..., options}``."""
    options = {key: value for key, value in spec.items() if key != "name"}
    maker = FAMILIES[check_choice("family", spec["name"], tuple(FAMILIES))]
    takes = list(inspect.signature(maker).parameters)
    for option in options:
        if option not in takes:
            expected = f"one of {', '.join(takes)}" if takes else "no options"
            raise refuse(f"family {spec['name']}", expected, repr(option))
    try:
        return maker(**options)
    except TypeError:
        missing = ", ".join(key for key in takes if key not in options)
        raise refuse(f"family {spec['name']}", f"its option {missing}", dict(spec)) from None
