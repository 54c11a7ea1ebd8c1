"""Words such as `csv:motion.csv?window=128&step=64`: a kind, what it is of, and options.

A shell gives `?` and `&` a meaning of their own, so a user puts such a word in quotes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from edge_sdk.errors import ConfigurationError, SplitedgeError

# added where a login may have been cut in two, whose parts no error quotes then
SIGNS: Final = "; the signs / @ : ? of a password are written %2F %40 %3A %3F"


@dataclass(frozen=True, slots=True)
class Word:
    """A word in its parts.

    Attributes:
        text: the whole word, for errors.
        kind: before the first colon. rest: between it and the first question mark.
        options: by key, in the order given.
    """

    text: str
    kind: str
    rest: str
    options: Mapping[str, str] = field(default_factory=dict)

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An option that is a whole number.

        Raises: ConfigurationError where it is none, is below `least`, or is missing and has no
            default.
        """
        given = self.options.get(key)
        if given is None and default is not None:
            return default
        if given is None or not given.isascii() or not given.isdecimal() or int(given) < least:
            got = "none" if given is None else given
            raise self.fault(f"{key}: expected a whole number of at least {least}, got {got}")
        return int(given)

    def names(self, key: str) -> tuple[str, ...]:
        """An option that is a list with commas between; empty where it is not given.

        Raises: ConfigurationError for an empty entry, or one that is given twice.
        """
        given = self.options.get(key)
        if given is None:
            return ()
        entries = tuple(entry.strip() for entry in given.split(","))
        if not all(entries) or len(set(entries)) != len(entries):
            raise self.fault(f"{key}: expected different names with commas between, got {given}")
        return entries

    def fault(self, why: str) -> SplitedgeError:
        """The error that names this word."""
        return _fault(self.text, why)


def read_word(text: str, known: Collection[str]) -> Word:
    """The parts of `kind:rest?key=value&key=value`.

    Args:
        known: keys of the options.
    Raises: ConfigurationError naming the word and what is wrong with it.
    """
    head, _, tail = text.partition("?")
    kind, _, rest = head.partition(":")
    options: dict[str, str] = {}
    for pair in tail.split("&") if tail else ():
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise _fault(text, f"expected key=value after '?' and '&', got {pair!r}")
        if key not in known:
            options_known = ", ".join(known) or "none"
            raise _fault(text, f"expected options {options_known}, got {key}")
        if key in options:
            raise _fault(text, f"{key} is given twice")
        options[key] = value
    return Word(text, kind, rest, options)


def without_login(text: str) -> str:
    """A word or a URL for people: a login in it stays out of errors and logs.

    It ends at the last `@`, because a password may have such signs too.
    """
    start, slashes, place = text.partition("//")
    return f"{start}{slashes}{place.rpartition('@')[2]}"


def _fault(text: str, why: str) -> ConfigurationError:
    """The error that names a word, and quotes nothing of it that may be a part of a password."""
    place = text.partition("//")[2]
    if "@" in place:
        login = place.rpartition("@")[0]
        cut = any(sign in login for sign in "/@?")
        why = why.partition(", got ")[0] + SIGNS if cut else why
    return ConfigurationError(f"{without_login(text)}: {why}")


def printable(name: str) -> str:
    """A name with escapes in place of bytes that are no UTF-8, which file names may have.

    JSON cannot hold such bytes.
    """
    return name.encode("utf-8", "backslashreplace").decode()
