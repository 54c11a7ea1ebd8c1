"""A Debian tree for this processor, and the settings that a build in it needs of this machine.

The archive is the one that this machine's apt uses, and pip is configured as here: no address of a
registry stands in the repository.
"""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SUITE: Final = "bookworm"
PACKAGES: Final = ("python3", "python3-venv", "ca-certificates")
CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True)
class Registry:
    """pip's configuration of this machine, as a tree or a container needs it.

    Attributes:
        configuration: text of a pip.conf.
        paths: files and folders that it names, each absolute; they belong at the same place.
    """

    configuration: str
    paths: tuple[Path, ...]

    @classmethod
    def of_this_machine(cls) -> Registry:
        """Read it from pip, which knows the files and the variables."""
        command = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        values: dict[str, str] = {}
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            values.setdefault(key.rpartition(".")[2], value.strip().strip("'\""))
        values.pop("require-virtualenv", None)
        parser = configparser.ConfigParser(interpolation=None)
        parser["global"] = {key: value.replace("\\n", "\n") for key, value in values.items()}
        words = [word for value in parser["global"].values() for word in value.split()]
        paths = {CERTIFICATES, *(Path(word) for word in words)}
        # an index of files may name such as lie beside it
        urls = [Path(word.removeprefix("file://")) for word in words if "file://" in word]
        paths |= {url.parent for url in urls}
        lines = [f"{key} = {' '.join(value.split())}" for key, value in parser["global"].items()]
        return cls(
            "\n".join(["[global]", *lines, ""]),
            tuple(sorted(_upper({path for path in paths if path.is_absolute() and path.exists()}))),
        )


def make_tree(place: Path, *more: str) -> None:
    """Make a Debian with Python at `place`, unless there is one.

    Args:
        more: packages beside Python's.
    Raises: RuntimeError if debootstrap is missing, or fails.
    """
    done = place / "made"
    if done.exists():
        return
    for tool in ("debootstrap", "apt-get"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"{tool} is missing: this needs Debian, and apt install debootstrap")
    if place.exists():
        shutil.rmtree(place)
    place.mkdir(parents=True)
    include = ",".join((*PACKAGES, *more))
    command = ["debootstrap", "--variant=minbase", f"--include={include}", SUITE, str(place)]
    _run([*command, _archive()], place.with_name(f"{place.name}.log"))
    settings = [*_transport_settings()]
    (place / "etc/apt/apt.conf.d/99transport").write_text("".join(f"{each}\n" for each in settings))
    # as in the images of Python
    (place / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    for package in (place / "var/cache/apt/archives").glob("*.deb"):
        package.unlink()
    done.touch()


def inside(place: Path, *words: str) -> None:
    """Run a command in the tree, as root.

    Raises: RuntimeError with the end of its log.
    """
    clean = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"}
    shutil.copy("/etc/resolv.conf", place / "etc/resolv.conf")
    _run(["chroot", str(place), *words], place.with_name(f"{place.name}.log"), clean)


def _run(command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
    with log.open("wb") as file:
        done = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {log.read_text()[-2000:]}")


def _archive() -> str:
    """The archive from which this machine's apt takes Debian's packages."""
    command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)"]
    command.append("Created-By: Packages")
    rows = [
        line.split() for line in subprocess.check_output(command, text=True).splitlines() if line
    ]
    found = [uri for release, uri in rows if release == SUITE] or [uri for _, uri in rows]
    if not found:
        raise RuntimeError("apt knows no archive: run apt-get update")
    return found[0]


def _transport_settings() -> Iterator[str]:
    """Lines of this machine's apt on how packages are fetched, such as those of a proxy."""
    for file in sorted(Path("/etc/apt/apt.conf.d").iterdir()):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith(("Acquire::http", "Acquire::Check", "Acquire::Retries")):
                yield line


def _upper(paths: set[Path]) -> set[Path]:
    """The paths without those inside another; a folder of packages stands for its parts."""
    return {path for path in paths if not any(each in path.parents for each in paths)}
