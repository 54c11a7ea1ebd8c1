"""The installed distribution: its version, and whether a user's file hides one of its packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from edge_sdk.errors import HiddenPackageError

try:
    __version__ = version("splitedge")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"


def require_package(name: str) -> None:
    """Make sure that `import name` finds the package that was installed with this one.

    A script's folder comes first on Python's path, so that a file `profiles.py` beside a user's
    script is found in place of our package `profiles`. Both cannot be imported in one process.

    Raises: HiddenPackageError naming the file to rename.
    """
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return  # the import itself says what is missing
    found, ours = Path(spec.origin), Path(__file__).parents[1] / name / "__init__.py"
    if found.resolve() != ours.resolve():
        raise HiddenPackageError(
            f"{found} hides splitedge's package {name}; rename that file",
            name=name,
            path=str(found),
        )
