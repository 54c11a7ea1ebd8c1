"""Records as tables and back: a plan as JSON, a recipe as TOML.

A table has one entry for each field of its record. A field that holds a record is a table within
the table. A field declared with `inline` has no entry of its own: its record's fields are entries
of the outer table, so a format can stay flat where the code holds one record inside another.

A field declared with `added` is newer than the format. It is left out of the table while it has its
default, so a reader of the release before refuses only what it cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from edge_sdk.errors import ConfigurationError, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_PREFIX: Final = "prefix"
_ADDED: Final = "added"


def inline(prefix: str = "") -> dict[str, str]:
    """Metadata of a field whose record's fields are entries of the outer table.

    Args:
        prefix: stands before each of their names in the table.
    """
    return {_PREFIX: prefix}


def prefix_of(field: Field[Any]) -> str | None:
    """The prefix of an inlined record's names; None for a field with an entry of its own."""
    prefix: str | None = field.metadata.get(_PREFIX)
    return prefix


def added() -> dict[str, bool]:
    """Metadata of a field that older readers do not know; its default means what they do."""
    return {_ADDED: True}


def table_of(record: DataclassInstance) -> dict[str, Any]:
    """The record as a table; tuples stay tuples, and other values are the record's own."""
    table: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if _ADDED in field.metadata and value == field.default:
            continue
        inner = table_of(value) if is_dataclass(value) and not isinstance(value, type) else value
        if _PREFIX in field.metadata:
            table |= {field.metadata[_PREFIX] + name: entry for name, entry in inner.items()}
        else:
            table[field.name] = inner
    return table


def read_record(kind: type[T], table: object, name: str, *, unknown: str = "") -> T:
    """Build a record out of a table. Lists become tuples and texts paths, as the fields' types say.

    Args:
        table: usually a mapping that was read from JSON or TOML.
        name: of the table, for errors; tables within it have their keys for names.
        unknown: what to do about a key that is not known; by default the known ones are listed.
    Raises: ConfigurationError naming the table, the key, what was expected and what was got.
    """
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{name}: expected a table, got {shown(table)}")
    entries = _entries(kind)
    records = {
        key: read_record(record, value, key, unknown=unknown)
        for key, value in table.items()
        if key in entries and (record := entries[key].record_of(value)) is not None
    }
    try:
        _check_keys(table, entries, unknown)
        plain = {key: value for key, value in table.items() if key not in records}
        check_types(plain, {key: entries[key].type for key in plain})
        values = {key: _converted(value, entries[key].type) for key, value in plain.items()}
        return _build(kind, values | records)
    except ConfigurationError as err:
        raise ConfigurationError(f"{name}: {err}") from err


def check_types(values: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Check that each value has the type annotated under its name.

    A list passes for a tuple and a text for a path, as JSON and TOML write them. Entries of a table
    within the values are not checked, nor are values without an annotation.

    Args:
        types: as `typing.get_type_hints` gives them.
    Raises: ConfigurationError naming the value and what was expected.
    """
    for name, value in values.items():
        if name in types and not _is_of(value, types[name]):
            raise ConfigurationError(
                f"{name}: expected {describe_type(types[name])}, got {shown(value)}"
            )


def describe_type(kind: Any) -> str:
    """An annotation in words: `a whole number`, `one of fp32, fp16`, `a list of 2, each ...`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # leaving an entry out means None, which TOML cannot write
        return " or ".join(describe_type(each) for each in inner if each is not NoneType)
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if origin is tuple:
        counted = "a list" if inner[-1] is ... else f"a list of {len(inner)}"
        return f"{counted}, each {describe_type(inner[0])}"
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(kind, "a table" if origin is Mapping else "text")


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of a table.

    record: what a table within the table is read into; None for any other value.
    """

    type: Any
    required: bool
    record: type[DataclassInstance] | None

    def record_of(self, value: object) -> type[DataclassInstance] | None:
        """Record class of a value; None for a plain value and for a record left out."""
        left_out = value is None and NoneType in get_args(self.type)
        return None if left_out else self.record


def _check_keys(table: Mapping[Any, Any], entries: Mapping[str, _Entry], unknown: str) -> None:
    strange = sorted(str(key) for key in table if key not in entries)
    if strange:
        advice = unknown or f"known are {', '.join(sorted(entries))}"
        raise ConfigurationError(f"unknown {', '.join(strange)}; {advice}")
    missing = [key for key, entry in entries.items() if entry.required and key not in table]
    if missing:
        raise ConfigurationError(f"expected also {', '.join(missing)}")


@cache
def _entries(kind: type[DataclassInstance], prefix: str = "") -> Mapping[str, _Entry]:
    """Every entry of the record's table, by name; those of inlined records included."""
    found: dict[str, _Entry] = {}
    for field, hint, record in _fields(kind):
        inlined = prefix_of(field)
        if inlined is not None:
            assert record is not None, f"{kind.__name__}.{field.name}: only a record is inlined"
            found |= _entries(record, prefix + inlined)
        else:
            required = field.default is field.default_factory is MISSING
            found[prefix + field.name] = _Entry(hint, required, record)
    return found


@cache
def _fields(
    kind: type[DataclassInstance],
) -> Sequence[tuple[Field[Any], Any, type[DataclassInstance] | None]]:
    """Every field with its type, and the record in that type if there is one."""
    hints = get_type_hints(kind)
    return [(field, hints[field.name], _record_in(hints[field.name])) for field in fields(kind)]


def _record_in(hint: Any) -> type[DataclassInstance] | None:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def _build(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """A record out of the values of its table's entries."""
    arguments = {}
    for field, _, record in _fields(kind):
        if _PREFIX in field.metadata and record is not None:
            arguments[field.name] = _build(record, values, prefix + field.metadata[_PREFIX])
        elif prefix + field.name in values:
            arguments[field.name] = values[prefix + field.name]
    return kind(**arguments)


def _is_of(value: object, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        return isinstance(value, list | tuple) and _is_list_of(value, inner)
    if isinstance(value, bool):  # a number to Python, but not to the author of a recipe
        return kind in (bool, Any)
    taken: dict[Any, Any] = {float: (int, float), Path: (str, Path), Any: object}
    return isinstance(value, taken.get(kind, origin or kind))


def _is_list_of(values: Sequence[object], inner: tuple[Any, ...]) -> bool:
    each = inner[:1] * len(values) if inner[-1] is ... else inner
    return len(values) == len(each) and all(map(_is_of, values, each))


def _converted(value: Any, kind: Any) -> Any:
    """A list as a tuple and a text as a path, where the type is one."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if isinstance(value, list) and any(get_origin(each) is tuple for each in kinds):
        return tuple(value)
    return Path(value) if isinstance(value, str) and Path in kinds else value
