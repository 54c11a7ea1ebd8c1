"""Gates as text: one measure of uncertainty, or several composed.

    entropy                             a measure: entropy, margin, vacuity or vacuity-exp
    all(entropy:0.3, margin:0.2)        exits where the entropy is below 0.3 and margin below 0.2
    any(entropy:0.3, margin:0.2)        exits where one of them is
    all(vacuity:0.5, any(entropy:0.3, margin:0.2))

A composed gate is again one number, so thresholds, curves and controllers work on it as on a single
measure. With the measures u_i and their scales s_i, the numbers behind the colons,

    all: u = max_i u_i / s_i        any: u = min_i u_i / s_i

and at the threshold 1 the scales are the measures' own thresholds. A measure without a scale is
divided by its largest value (ln N for entropy, 1 for the others, with N classes); an export
chooses scales that are left open. docs/decisions/0015-composed-gates.md says why.

Vacuity is the lack of evidence in the logits. Heads learn evidence as exp(logits), for which the
measure is `vacuity-exp`. Until 0.1.0 they learnt softplus(logits), and `vacuity` in the files of
those releases still means that.

One text stands for a gate in manifests, recipes, weights files, settings and options.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal

from edge_sdk.errors import ConfigurationError
from profiles.checks import Check, number

Activation = Literal["exp", "softplus"]

# measures of evidence, and how a logit becomes evidence
EVIDENCE: Final[Mapping[str, Activation]] = {"vacuity": "softplus", "vacuity-exp": "exp"}
VACUITY: Final[Mapping[Activation, str]] = {"softplus": "vacuity", "exp": "vacuity-exp"}
# The exponential goes on as its tangent from this logit on.
TANGENT_FROM: Final = 10.0
MEASURES: Final = ("entropy", "margin", *EVIDENCE)
COMPOSITIONS: Final = ("all", "any")
TEXT_MAX: Final = 200  # characters; it bounds how deep compositions nest

_TOKEN: Final = re.compile(r"\s*([(),:]|[^\s(),:]+)")
_SCALE: Final = number(above=0)
_KNOWN: Final = f"{', '.join(MEASURES)}, or a composition such as all(entropy:0.3, margin:0.2)"


@dataclass(frozen=True, slots=True)
class GateForm:
    """A measure, or a composition of measures.

    Attributes:
        kind: one of MEASURES or COMPOSITIONS.
        scale: of a term of a composition, in the term's unit; None where it is open.
        terms: of a composition, two or more.
    """

    kind: str
    scale: float | None = None
    terms: tuple[GateForm, ...] = ()

    @property
    def first(self) -> str:
        """The measure that is named first; it says how logits become probabilities."""
        return self.terms[0].first if self.terms else self.kind

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures of which it is made, in the order in which they are named."""
        within = tuple(measure for term in self.terms for measure in term.measures)
        return within or (self.kind,)

    @property
    def threshold(self) -> float | None:
        """The threshold that the scales stand for: 1, or None if a scale is open."""
        return 1.0 if self.terms and all(term.closed for term in self.terms) else None

    @property
    def closed(self) -> bool:
        """Whether a term and all terms within it have their scales."""
        return all(term.closed for term in self.terms) if self.terms else self.scale is not None

    def __str__(self) -> str:
        inside = f"({', '.join(map(str, self.terms))})" if self.terms else ""
        return f"{self.kind}{inside}{'' if self.scale is None else f':{self.scale}'}"


@lru_cache(maxsize=64)
def read_gate(text: str, name: str = "gate") -> GateForm:
    """The gate that a text stands for.

    Args:
        name: of the value, for errors.
    Raises: ConfigurationError saying what was expected and what was got.
    """
    if not isinstance(text, str) or len(text) > TEXT_MAX:
        raise ConfigurationError(f"{name}: expected {_KNOWN}, in at most {TEXT_MAX} characters")
    reader = _Reader(text, name)
    form = reader.form()
    if reader.next:
        raise reader.fault("nothing more", reader.next)
    return form


def check_evidence(measures: Iterable[str], learnt: Activation) -> None:
    """Check that measures of evidence are of the evidence that a network learnt.

    Raises: ConfigurationError naming the measure that is.
    """
    for measure in measures:
        if EVIDENCE.get(measure, learnt) != learnt:
            raise ConfigurationError(
                f"gate: expected {VACUITY[learnt]} for a network that learnt evidence as {learnt},"
                f" got {measure}"
            )


def _accepts(value: Any) -> bool:
    try:
        read_gate(value)
    except (ConfigurationError, TypeError):  # TypeError: a value that cannot be hashed
        return False
    return True


GATE: Final = Check(_KNOWN, _accepts)


class _Reader:
    """Reads a text from left to right; `next` is the word that comes next, empty at the end."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._words = _TOKEN.findall(text)
        self._at = 0

    @property
    def next(self) -> str:
        """The word that comes next."""
        return self._words[self._at] if self._at < len(self._words) else ""

    def form(self) -> GateForm:
        """A measure or a composition, without a scale."""
        word = self._take()
        if word in MEASURES:
            if self.next == ":" and self._at < 2:
                raise self.fault("a scale within all(...) or any(...) only", ":")
            return GateForm(word)
        if word not in COMPOSITIONS:
            raise self.fault(_KNOWN, word)
        self._need("(")
        terms = [self._term()]
        while self.next == ",":
            self._take()
            terms.append(self._term())
        self._need(")")
        if len(terms) < 2:
            raise self.fault(f"two or more measures in {word}(...)", str(terms[0]))
        return GateForm(word, terms=tuple(terms))

    def fault(self, expected: str, got: str) -> ConfigurationError:
        """The error that names the text."""
        found = got or "the end of the text"
        return ConfigurationError(f"{self._name} {self._text!r}: expected {expected}, got {found}")

    def _term(self) -> GateForm:
        form = self.form()
        if self.next != ":":
            return form
        self._take()
        word = self._take()
        try:
            scale = float(word)
        except ValueError:
            raise self.fault("a number above 0 behind ':'", word) from None
        if not _SCALE.accepts(scale):
            raise self.fault("a number above 0 behind ':'", word)
        return replace(form, scale=scale)

    def _need(self, word: str) -> None:
        got = self._take()
        if got != word:
            raise self.fault(repr(word), got)

    def _take(self) -> str:
        word = self.next
        self._at += 1
        return word
