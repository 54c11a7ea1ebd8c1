"""One training of a benchmark: a row of a table with one seed, and what its result depends on."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import orjson

from server.training.recipe.recipe import METHODS, Recipe, read_recipe

# the seed is told apart by every result; the place of the files may differ between machines
_NO_PART_OF_IT: Final = frozenset({"seed", "data.folder"})
# what was so before recipes had these names, where their defaults are something else
_BEFORE: Final[Mapping[str, Any]] = {"normalise_embeddings": False}


@dataclass(frozen=True)  # without slots: `content` is kept in the instance
class Job:
    """One training of a benchmark.

    Attributes:
        table, row: its place in the report.
        given: the recipe as tables, before defaults are filled in.
    """

    table: str
    row: str
    given: Mapping[str, Any]

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe, checked.

        Raises: ConfigurationError.
        """
        return read_recipe(self.given)

    @property
    def seed(self) -> int:
        """Seed of the recipe."""
        return self.recipe.seed

    @property
    def slug(self) -> str:
        """Name of the job's folder among those of its table."""
        return f"{re.sub('[^a-z0-9]+', '-', self.row.lower()).strip('-')}-seed-{self.seed}"

    @cached_property
    def content(self) -> dict[str, Any]:
        """The recipe and all numbers of its methods, by dotted name: a result depends on these.

        Seed and place of the data are left out.
        """
        recipe = self.recipe.to_dict()
        recipe["method_numbers"] = _numbers(self.recipe.method, self.recipe.method_numbers)
        recipe["parts"] = {name: _part(source) for name, source in self.recipe.parts.items()}
        plain = orjson.loads(orjson.dumps(recipe))
        return {k: v for k, v in _flat(plain).items() if k not in _NO_PART_OF_IT}

    @property
    def digest(self) -> str:
        """Short digest of `content`."""
        raw = orjson.dumps(self.content, option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(raw).hexdigest()[:12]

    def is_of(self, content: Mapping[str, Any]) -> bool:
        """Whether a result with that content is this job's.

        A name that the result lacks was added to recipes later. Its default means what was so
        before, but for those of _BEFORE, so the result still holds where the job does not set it.
        """
        now, given = self.content, _flat(self.given)
        return all(
            content[name] == now.get(name)
            if name in content
            else name not in given and _is_as_before(name, now[name])
            for name in now.keys() | content.keys()
        )

    def __str__(self) -> str:
        """The job in a message."""
        return f"{self.table}: {self.row}, seed {self.seed}"


def _is_as_before(name: str, value: object) -> bool:
    """Whether a value means what was so before recipes had that name."""
    last = name.rpartition(".")[2]
    return last not in _BEFORE or _BEFORE[last] == value


def _part(source: Any) -> dict[str, Any]:
    """One part of a composed method, with all its numbers."""
    if isinstance(source, str):
        return {"method": source, "numbers": _numbers(source, {})}
    return {
        "method": source["method"],
        "numbers": _numbers(source["method"], source.get("numbers", {})),
    }


def _numbers(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All numbers of a method: those given, and the defaults of the others."""
    parameters = inspect.signature(METHODS[method]).parameters.values()
    return {each.name: given.get(each.name, each.default) for each in parameters}


def _flat(tables: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Nested tables by dotted name."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{start}{name}.")
        else:
            found[f"{start}{name}"] = value
    return found
