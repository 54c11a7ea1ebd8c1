"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("splitedge")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"
