"""What an experiment is: one complete, checked table of plain values.

A configuration determines every number of a run; where and how it is computed (directory,
executor, workers) is not part of it.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from torchglb import environments, policies
from torchglb.checks import check_choice, check_count, check_positive, check_probability, refuse
from torchglb.environments import Environment
from torchglb.errors import InputError
from torchglb.families import Bernoulli, Binomial, Gaussian, GLMFamily, Poisson, QuasiBounded
from torchglb.policies import Policy
from torchglb.random_streams import derived_seed

FAMILIES: dict[str, Callable[..., GLMFamily]] = {
    "bernoulli": Bernoulli,
    "binomial": Binomial,
    "gaussian": Gaussian,
    "poisson": Poisson,
    "probit": lambda: QuasiBounded("probit"),
    "cloglog": lambda: QuasiBounded("cloglog"),
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
#: what a policy gets from the configuration or the environment, and no table may say again
GIVEN = frozenset(
    {"family", "domain", "batch_shape", "replicates", "seed", "horizon", "delta", "theta_star"}
    | {"dtype", "device", "validate", "aggregate"}
)
#: what changes no number: a run may be continued although it differs
PRESENTATION = frozenset({"title"})
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]*")


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

    @classmethod
    def load(cls, table: Mapping[str, Any]) -> Configuration:
        """Checks a table, as a preset holds it, and fills in what it leaves out.

        Args:
            table: ``family``, ``environment``, ``S``, ``horizon``, ``replicates``, ``policies`` (a
                list of labels), and optionally ``name``, ``title``, ``delta``, ``seed``, ``chunk``,
                ``device``, ``dtype``, options of the environment (``arms``, ``dim``,
                ``theta``, ...) and a table ``policy`` with options by label.

        Raises:
            InputError: names the key, the value and what is allowed.
        """
        given = dict(table)
        family = _named("family", given.pop("family", "bernoulli"))
        make_family(family)
        environment, options = _environment(given)
        policy = _policies(given.pop("policies", None), given.pop("policy", {}))
        settings: dict[str, Any] = {
            "name": _word(given.pop("name", "run")),
            "title": _text("title", given.pop("title", "")),
            "family": family,
            "environment": environment,
            "options": options,
            "S": _radii(given.pop("S", None)),
            "horizon": check_count("horizon", given.pop("horizon", None), least=1),
            "replicates": check_count("replicates", given.pop("replicates", 1), least=1),
            "delta": check_probability("delta", given.pop("delta", 0.05)),
            "seed": check_count("seed", given.pop("seed", 0)),
            "policy": policy,
            "chunk": check_count("chunk", given.pop("chunk", 64), least=1),
            "device": _device(given.pop("device", "cpu")),
            "dtype": check_choice("dtype", given.pop("dtype", "float64"), tuple(DTYPES)),
        }
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

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """The keys, with both values, that make another run of it; ``other`` is a dictionary."""
        mine = self.as_dict()
        found = []
        for key in sorted((set(mine) | set(other)) - PRESENTATION):
            if mine.get(key) != other.get(key):
                found.append(f"{key}: {other.get(key)!r} there, {mine.get(key)!r} now")
        return found

    # ---- what it stands for --------------------------------------------------------------

    @property
    def elements(self) -> int:
        """N = number of S times replicates; element ``s R + r`` is replicate r of the s-th S."""
        return len(self.S) * self.replicates

    def chunks(self) -> list[range]:
        """The elements that advance together."""
        return [
            range(first, min(first + self.chunk, self.elements))
            for first in range(0, self.elements, self.chunk)
        ]

    def make_environment(self, elements: range) -> Environment:
        """The environment of some of the elements."""
        index = torch.tensor(elements)
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
            if policies.requirements_of(name).fixed_arms and not world.fixed:
                raise refuse("environment", f"a fixed arm set for {name}", self.environment)
            try:
                self.make_policy(label, world)
            except InputError as error:
                raise InputError(f"policy {label}: {error}") from None


def read_table(path: Path, quick: bool = False) -> dict[str, Any]:
    """The table of a TOML file; its ``[quick]`` table is laid over the rest, or left out."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a TOML file: {error}") from None
    overlay = _table("quick", table.pop("quick", {}))
    table.setdefault("name", path.stem)
    return lay_over(table, overlay) if quick else table


def lay_over(table: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the values of another on top; tables within are merged."""
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


# ---- one key at a time -----------------------------------------------------------------------


def _named(key: str, value: Any) -> dict[str, Any]:
    """``"name"`` or ``{name = "name", ...}``."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return dict(value)
    raise refuse(key, "a name or a table with a name", repr(value))


def _environment(given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Takes the environment and its options out of the table; defaults are written out."""
    name = given.pop("environment", "time-varying")
    if not isinstance(name, str):
        raise refuse("environment", "a name", repr(name))
    options = {}
    for key, default in environments.options_of(name).items():
        options[key] = given.pop(key, default)
        if options[key] is inspect.Parameter.empty:
            raise refuse(key, f"a value, which environment {name} needs", "none")
    return name, options


def _policies(labels: Any, tables: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(labels, list) or not labels or len(set(map(str, labels))) < len(labels):
        raise refuse("policies", "a list of different labels, at least one", repr(labels))
    tables = _table("policy", tables)
    for label in tables:
        if label not in labels:
            raise refuse("policy", "tables of labels in policies", f"a table {label!r}")
    chosen = {}
    for label in labels:
        if not isinstance(label, str) or not _LABEL.fullmatch(label):
            raise refuse("policies", "labels of letters, digits and + . _ -", repr(label))
        options = dict(_table(f"policy.{label}", tables.get(label, {})))
        name = options.pop("policy", label)
        known = policies.available()
        if name not in known:
            expected = "one of " + ", ".join(known)
            raise refuse("policies" if name == label else f"policy.{label}.policy", expected, name)
        takes = sorted(set(policies.options_of(name)) - GIVEN)
        for option in options:
            if option not in takes:
                expected = f"one of {', '.join(takes)}" if takes else "no options"
                raise refuse(f"policy.{label}", expected, repr(option))
        chosen[label] = {"policy": name, **options}
    return chosen


def _radii(value: Any) -> list[float]:
    listed = value if isinstance(value, list | tuple) else [value]
    radii = [check_positive("S", S) for S in listed]
    if not radii or len(set(radii)) < len(radii):
        raise refuse("S", "different positive numbers, at least one", value)
    return radii


def _device(value: Any) -> str:
    try:
        return str(torch.zeros(0, device=value).device)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise refuse("device", "a device of this machine", f"{value!r} ({reason})") from None


def _word(value: Any) -> str:
    if not isinstance(value, str) or not _LABEL.fullmatch(value):
        raise refuse("name", "a word of letters, digits and + . _ -", repr(value))
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refuse(key, "a text", repr(value))
    return value


def _table(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise refuse(key, "a table", repr(value))
    return dict(value)
