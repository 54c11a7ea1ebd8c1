"""The installed packages of splitedge: version, date, and how to import them next to user files.

A script's folder comes first on Python's path, so a user's `profiles.py` is found in place of our
package `profiles`. The name `profiles` stays the user's then; our modules are imported from their
own place under their full names, as `profiles.checks`. Python looks a full name up in sys.modules
before it looks at the parent, so both can be used in one process.

A user's own function, `module:function`, is searched the other way round: an installed module wins,
and the user's folder comes last, so that no file there hides anything of ours.
"""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import wraps
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from inspect import isgenerator
from itertools import islice
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Final

from edge_sdk.errors import ConfigurationError, HiddenPackageError

# The day of the newest entry of CHANGELOG.md that has one. No copy of this release is older, so a
# clock that says an earlier time is wrong. A constant, since files may carry any date.
BUILD_DATE: Final = datetime(2026, 11, 27, tzinfo=UTC)
# A clock that says a later time is likelier to be wrong than the release to be so old.
CLOCK_TRUSTED_FOR: Final = timedelta(days=5 * 365)
# a later one from PyPI brings gigabytes of CUDA to a 64-bit ARM device
TORCH_ON_ARM: Final = "torch==2.10.0"

_ROOT = Path(__file__).parents[1]
_FUNCTION: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def installed_version() -> str:
    """The version of the installed distribution."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - 10 ms

    try:
        return version("splitedge")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"


def install_command(extra: str) -> str:
    """The command that adds an extra to this environment, which may be one of pipx."""
    torch = f"{TORCH_ON_ARM} " if extra == "train" and platform.machine() == "aarch64" else ""
    return f"{shlex.quote(sys.executable)} -m pip install {torch}'splitedge[{extra}]'"


def clock_is_wrong(now: datetime | None = None) -> bool:
    """Whether a time is plainly wrong: before this release was built, or years after.

    Args:
        now: None for the time by this machine's clock.
    """
    at = datetime.now(UTC) if now is None else now
    return not BUILD_DATE <= at <= BUILD_DATE + CLOCK_TRUSTED_FOR


def why_clock_is_untrusted() -> str:
    """The reason why this machine's clock is not believed, for people; empty where it is."""
    now = datetime.now(UTC)
    if not clock_is_wrong(now):
        return ""
    return (
        f"clock untrusted: it says {now:%Y-%m-%d}, and this release is of {BUILD_DATE:%Y-%m-%d};"
        " set it (NTP, or `date`)"
    )


def import_profiles() -> None:
    """Make the modules of our package `profiles` importable next to a user's module of that name.

    Does nothing where `import profiles` finds ours.

    Raises: HiddenPackageError if the user's is a package with a module of the same name as ours.
    """
    foreign = _foreign("profiles")
    if foreign is None:
        return
    ours = _ROOT / "profiles"
    names = [f"profiles.{module.name}" for module in iter_modules([str(ours)])]
    if foreign.name == "__init__.py":
        for name in names:
            spec = PathFinder.find_spec(name, [str(foreign.parent)])
            if spec is not None:
                raise _hidden(Path(spec.origin or foreign), name)
    _import_from(ours, names)


def require_package(name: str) -> None:
    """Check that `import name` finds our package.

    Raises: HiddenPackageError naming the user's file to rename.
    """
    foreign = _foreign(name)
    if foreign is not None:
        raise _hidden(foreign, name)


def names_function(word: str) -> bool:
    """Whether a word has the form `package.module:function`."""
    return _FUNCTION.fullmatch(word) is not None


def user_function(
    word: str, folders: Sequence[Path] = (), *, what: str = "function"
) -> Callable[..., Any]:
    """A user's own function `module:function`, imported; it is not called.

    This runs code of this machine: never pass a word that a peer sent. The module is searched where
    Python searches, then in `folders`: an installed module wins. While the function runs, it may
    import from these folders too; a generator may do so until its first value. Its own errors reach
    the caller with their traceback.

    Args:
        folders: searched last, in this order; the current folder if none is given.
        what: the word's meaning, for errors: `data`, `backbone`.
    Raises: ConfigurationError if there is no such module or function.
    """
    module_name, _, function_name = word.partition(":")
    places = [folder.resolve() for folder in folders or (Path.cwd(),)]
    with _also_from(places):
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as err:
            if err.name is None or not f"{module_name}.".startswith(f"{err.name}."):
                raise  # the module exists, but something that it imports does not
            file = f"{module_name.replace('.', '/')}.py"
            raise ConfigurationError(
                f"{what} {word!r}: expected a module {module_name}; put {file} in"
                f" {' or '.join(map(str, places))}"
            ) from err
    function = getattr(module, function_name, None)
    if not callable(function):
        file = getattr(module, "__file__", module_name)
        raise ConfigurationError(
            f"{what} {word!r}: expected a function {function_name} in {file}, found none"
        )

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _also_from(places):
            result = function(*args, **kwargs)
        return _begun(result, places) if isgenerator(result) else result

    return called


def _begun(generator: Iterator[Any], places: Sequence[Path]) -> Iterator[Any]:
    """The values of a generator, whose body runs to the first one as a function would."""
    with _also_from(places):
        values = list(islice(generator, 1))
    yield from values
    yield from generator


@contextmanager
def _also_from(folders: Sequence[Path]) -> Iterator[None]:
    """Import from `folders` too, after all other places."""
    entries = [str(folder) for folder in folders]
    invalidate_caches()  # a file may be younger than Python's last look at its folder
    sys.path += entries
    try:
        yield
    finally:
        for entry in reversed(entries):
            for place in range(len(sys.path) - 1, -1, -1):
                if sys.path[place] == entry:
                    del sys.path[place]
                    break


def _foreign(name: str) -> Path | None:
    """The file that `import name` finds in place of our package; None where it finds ours."""
    module = sys.modules.get(name)
    if module is None:
        spec = find_spec(name)
        origin = None if spec is None else spec.origin
    else:
        origin = getattr(module, "__file__", None)
    ours = _ROOT / name / "__init__.py"
    if origin is None or origin == str(ours) or Path(origin).resolve() == ours.resolve():
        return None
    return Path(origin)


def _import_from(folder: Path, names: list[str]) -> None:
    """Import the package in `folder` with its modules `names`, and give its name back after."""
    package_name = folder.name
    theirs = sys.modules.pop(package_name, None)
    spec = spec_from_file_location(
        package_name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = module_from_spec(spec)
    sys.modules[package_name] = package
    try:
        spec.loader.exec_module(package)
        for name in names:
            import_module(name)
    finally:
        del sys.modules[package_name]
        if theirs is not None:
            sys.modules[package_name] = theirs


def _hidden(file: Path, name: str) -> HiddenPackageError:
    return HiddenPackageError(
        f"{file} hides {name} of splitedge; rename that file", name=name, path=str(file)
    )
