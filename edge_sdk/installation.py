"""The installed packages of splitedge: their version, and how to import them next to user files.

A script's folder comes first on Python's path, so a user's `profiles.py` is found in place of our
package `profiles`. The name `profiles` stays the user's then; our modules are imported from their
own place under their full names, as `profiles.checks`. Python looks a full name up in sys.modules
before it looks at the parent, so both can be used in one process.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules

from edge_sdk.errors import HiddenPackageError

_ROOT = Path(__file__).parents[1]


def installed_version() -> str:
    """The version of the installed distribution."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - 10 ms

    try:
        return version("splitedge")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"


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
