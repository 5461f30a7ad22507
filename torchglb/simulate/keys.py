"""The keys of a configuration, one at a time: each is checked, and refused by name."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from torchglb import environments, policies
from torchglb.checks import check_count, check_positive, refuse
from torchglb.plugins import load_plugins
from torchglb.simulate.record import LABEL

#: what a policy gets from the configuration or the environment, and no table may say again
GIVEN = frozenset(
    {"family", "domain", "batch_shape", "replicates", "seed", "horizon", "delta", "theta_star"}
    | {"dtype", "device", "validate", "aggregate"}
)


def named(key: str, value: Any) -> dict[str, Any]:
    """``"name"`` or ``{name = "name", ...}``."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return dict(value)
    raise refuse(key, "a name or a table with a name", repr(value))


def environment_of(given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
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


def policies_of(labels: Any, tables: Any) -> dict[str, dict[str, Any]]:
    """For each label its policy and the options that its table gives."""
    if not isinstance(labels, list) or not labels or len(set(map(str, labels))) < len(labels):
        raise refuse("policies", "a list of different labels, at least one", repr(labels))
    tables = table_of("policy", tables)
    for label in tables:
        if label not in labels:
            raise refuse("policy", "tables of labels in policies", f"a table {label!r}")
    chosen = {}
    for label in labels:
        if not isinstance(label, str) or not LABEL.fullmatch(label):
            raise refuse("policies", "labels of letters, digits and + . _ -", repr(label))
        options = dict(table_of(f"policy.{label}", tables.get(label, {})))
        name = options.pop("policy", label)
        known = policies.available() + policies.available(pairs=True)
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


def radii_of(value: Any) -> list[float]:
    """One S or several, all different."""
    listed = value if isinstance(value, list | tuple) else [value]
    radii = [check_positive("S", S) for S in listed]
    if not radii or len(set(radii)) < len(radii):
        raise refuse("S", "different positive numbers, at least one", value)
    return radii


def imported(value: Any) -> list[str]:
    """Imports modules, in which policies or environments are registered, and installed plugins."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refuse("imports", "a list of modules", repr(value))
    load_plugins(value)
    return list(value)


def stages_of(value: Any, size: list[int]) -> list[list[int]]:
    """Earlier sizes ``[horizon, replicates]``, none smaller than the one before."""
    found = []
    for stage in value if isinstance(value, list) else [value]:
        if not isinstance(stage, list) or len(stage) != 2:
            raise refuse("stages", "a list of [horizon, replicates]", repr(value))
        found.append([check_count("stages", number, least=1) for number in stage])
    for before, after in itertools.pairwise([*found, size]):
        if before[0] > after[0] or before[1] > after[1] or before == after:
            raise refuse("stages", f"sizes that grow, up to {size}", repr(value))
    return found


def count(key: str, value: Any, least: int = 0) -> int:
    """An integer, which may be written as 1e4."""
    whole = isinstance(value, float) and value.is_integer()
    return check_count(key, int(value) if whole else value, least=least)


def device_of(value: Any) -> str:
    """A device that this machine has."""
    try:
        return str(torch.zeros(0, device=value).device)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise refuse("device", "a device of this machine", f"{value!r} ({reason})") from None


def word(value: Any) -> str:
    """A name."""
    if not isinstance(value, str) or not LABEL.fullmatch(value):
        raise refuse("name", "a word of letters, digits and + . _ -", repr(value))
    return value


def text_of(key: str, value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise refuse(key, "a text", repr(value))
    return value


def table_of(key: str, value: Any) -> dict[str, Any]:
    """A table."""
    if not isinstance(value, Mapping):
        raise refuse(key, "a table", repr(value))
    return dict(value)
