"""Contrasts and hypotheses, written with the names of the coefficients."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchglb.checks import check_text, refuse, renamed, with_nearest
from torchglb.choices import Relation
from torchglb.errors import InputError

_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_RELATION = re.compile(r"<=|>=|==|=")
_MEANING: dict[str, Relation] = {"=": "==", "==": "==", "<=": "<=", ">=": ">="}


class Hypothesis(NamedTuple):
    """``<c, beta>  relation  b``.

    Attributes:
        c: ``(d,)``.
        b: a number.
        relation: ``"=="``, ``"<="`` or ``">="``.
    """

    c: np.ndarray
    b: float
    relation: Relation


class Names:
    """The names of the coefficients, and those of reference levels, whose coefficient is 0.

    ``C(arm)[B]`` stands for ``C(arm)[T.B]`` where the model has that one.

    Args:
        names: of the d coefficients.
        references: names that are known to be 0.
    """

    def __init__(self, names: Sequence[str], references: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._place: dict[str, int | None] = dict.fromkeys(references)
        for index, name in enumerate(names):
            self._place.setdefault(name.replace("[T.", "["), index)
        self._place |= {name: index for index, name in enumerate(names)}
        self._longest_first = sorted(self._place, key=len, reverse=True)

    def contrast(self, text: str) -> np.ndarray:
        """``(d,)``, from a sum such as ``"C(arm)[B] - C(arm)[A]"`` or ``"2*x + 0.5*z"``.

        Example:
            >>> Names(["x", "z"]).contrast("2*x - z")
            array([ 2., -1.])
        """
        check_text("contrast", text, f"a text such as {self.names[0]!r}")
        c, constant = self._sum(text)
        if constant:
            raise InputError(f"contrast: expected coefficients only, got {constant:g} in {text!r}")
        return c

    def hypothesis(self, text: str) -> Hypothesis:
        """From ``"price = 0"``, ``"x <= z + 1"`` and the like.

        Example:
            >>> Names(["x", "z"]).hypothesis("x <= z + 1")
            Hypothesis(c=array([ 1., -1.]), b=1.0, relation='<=')
        """
        check_text("hypothesis", text, f"a text such as '{self.names[0]} = 0'")
        # names of coefficients may hold signs of their own: only what stands outside them counts
        sides, relation, rest = [""], "", text
        while rest:
            name = self._name_at(rest)
            found = _RELATION.match(rest)
            if name is not None:
                sides[-1], rest = sides[-1] + name, rest[len(name) :]
            elif found:
                if relation:
                    break
                relation, rest = found.group(), rest[found.end() :]
                sides.append("")
            else:
                sides[-1], rest = sides[-1] + rest[0], rest[1:]
        if not relation or len(sides) != 2 or rest:
            raise InputError(f"hypothesis: expected one of =, <=, >= as in 'x = 0', got {text!r}")
        try:
            (left, less), (right, more) = map(self._sum, sides)
        except InputError as error:
            raise renamed(error, contrast="hypothesis") from None
        c = left - right
        if not c.any():
            raise InputError(f"hypothesis: expected a coefficient that counts, got {text!r}")
        return Hypothesis(c, more - less, _MEANING[relation])

    def _name_at(self, text: str) -> str | None:
        for name in self._longest_first:
            if text.startswith(name):
                after = text[len(name) : len(name) + 1]
                if not (name[-1].isalnum() and (after.isalnum() or after in ("_", "[", "("))):
                    return name
        return None

    def _sum(self, text: str) -> tuple[np.ndarray, float]:
        c, constant, rest, first = np.zeros(len(self.names)), 0.0, text.strip(), True
        while rest or first:
            sign = 1.0
            while rest[:1] in ("+", "-"):
                sign, rest, first = (-sign if rest[0] == "-" else sign), rest[1:].lstrip(), True
            if not first:
                raise self._unknown(text, rest)
            value, name, rest = self._product(text, rest)
            if name is None:
                constant += sign * value
            elif (index := self._place[name]) is not None:
                c[index] += sign * value
            first = False
        return c, constant

    def _product(self, text: str, rest: str) -> tuple[float, str | None, str]:
        """``2*x``, ``x*2``, ``x/2``, ``x`` or ``2``."""
        value, named, operator = 1.0, None, "*"
        while True:
            name, number = self._name_at(rest), _NUMBER.match(rest)
            if name is not None and named is None and operator == "*":
                named, rest = name, rest[len(name) :].lstrip()
            elif name is None and number:
                factor = float(number.group())
                if not math.isfinite(factor) or (operator == "/" and factor == 0.0):
                    raise self._unknown(text, rest)
                value = value * factor if operator == "*" else value / factor
                rest = rest[number.end() :].lstrip()
            else:
                raise self._unknown(text, rest)
            if rest[:1] not in ("*", "/"):
                return value, named, rest
            operator, rest = rest[0], rest[1:].lstrip()

    def _unknown(self, text: str, rest: str) -> InputError:
        place = f" (at {rest!r})" if rest.strip() not in ("", text.strip()) else ""
        expected = f"a sum of the coefficients {', '.join(self.names)}"
        return refuse("contrast", expected, f"{with_nearest(text.strip(), self.names)}{place}")
