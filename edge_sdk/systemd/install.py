"""Installation of a service: its user, its folders and its unit, on this machine or in an image."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from edge_sdk.durable import make_folder, sync_tree, write_atomic
from edge_sdk.errors import ConfigurationError, StateInUseError, StorageError
from edge_sdk.state import Role, is_held
from edge_sdk.systemd.unit import HIDDEN, START_MIN, OldUnit, ServiceUnit
from edge_sdk.systemd.users import SystemUser

# as sd_booted(3): only where systemd is the first process
BOOTED: Final = Path("/run/systemd/system")
TOOL_S: Final = 90.0


class Installer:
    """Installs and removes one service.

    Args:
        unit: the service.
        root: of the system to install into: / for this machine, else an image, where nothing is
            started.
        ready_file: name of a file in the state folder, without which a start is of no use.
    """

    def __init__(self, unit: ServiceUnit, root: Path, ready_file: str | None = None) -> None:
        self._unit = unit
        self._root = root.absolute()
        self._here = self._root == Path("/")
        self._ready_file = ready_file
        self.stopped = False  # whether `install` stopped a service that ran

    def check(self) -> None:
        """Check that this user may install, and that there is a systemd to install for.

        Raises: ConfigurationError saying what to do.
        """
        name = f"splitedge {self._unit.kind} install-service"
        if os.geteuid() != 0:
            raise ConfigurationError(
                f"this changes /etc and makes a user: run it as root: sudo {name}"
            )
        if self._here and not BOOTED.is_dir():
            raise ConfigurationError(
                f"systemd does not run this machine ({BOOTED} is missing), so it has no services to"
                f" install; see the unit by `{name} --dry-run`, install into an image by --root"
                " DIR, or let your own supervisor run"
                f" `splitedge {self._unit.kind} run --state DIR`"
            )
        if not (self._root / "etc").is_dir():
            raise ConfigurationError(
                f"--root {self._root}: expected a Debian-like system with /etc"
            )
        for tool in ("systemctl", "systemd-sysusers"):
            if shutil.which(tool) is None:
                raise ConfigurationError(f"{tool} is missing: apt install systemd")

    def install(
        self,
        options: Sequence[str] | None,
        *,
        take: Path | None = None,
        settings: tuple[str, str] | None = None,
    ) -> bool:
        """Make the user, the folders and the unit, and enable the service; a running one stops.

        Args:
            options: of `run`; None keeps those of an earlier installation.
            take: a state folder that is moved to the service's place.
            settings: name and first content of the service's settings file, which stands in
                /etc/splitedge; the state folder has a link to it.
        Returns: whether the state folder holds what a start needs; `stopped` says whether a
            service ran, which does not any more.
        Raises: ConfigurationError, StorageError, StateInUseError if `take` is in use.
        """
        unit = self._unit
        state = self._at(unit.state)
        self._check_command()
        if take is not None:
            self._check_take(take, state)
            if settings is not None:
                self._check_settings(take, *settings)
        self._write(unit.users_path, unit.users())
        self._run("systemd-sysusers", *([] if self._here else [f"--root={self._root}"]),
                  str(self._at(unit.users_path)))  # fmt: skip
        user = SystemUser.find(unit.user, self._root)
        with self._stopped():
            _open_folder(state.parent)
            if take is not None:
                _move(take, state)
            make_folder(state, mode=0o700)
            self._write_options(options)
            if settings is not None:
                self._link_settings(state, *settings, group=user.gid)
            if take is not None or state.lstat().st_uid != user.uid:
                _give(state, user.uid, user.gid)
            self._write(unit.unit_path, unit.text())
            if self._here:
                self._run("systemctl", "daemon-reload")
                self._run("systemctl", "enable", unit.name)
            else:
                self._run("systemctl", f"--root={self._root}", "enable", unit.name)
        return self._ready_file is None or (state / self._ready_file).exists()

    def start(self, say: Callable[[str], None]) -> bool:
        """Start the service, and wait until it is ready; False in an image, which does not run.

        Raises: ConfigurationError if it does not start.
        """
        if self._here:
            name = self._unit.name
            say(f"{name} starts; a first start may take minutes, see: journalctl -fu {name}")
            limit_s = 60.0 * (START_MIN + 2)  # systemd's own ends before, and says why
            self._run("systemctl", "restart", name, limit_s=limit_s)
        return self._here

    def uninstall(self, *, purge: bool, say: Callable[[str], None]) -> None:
        """Stop and remove the service; its state and settings stay unless `purge` is true.

        Raises: ConfigurationError if it is not installed, or cannot be stopped.
        """
        unit = self._unit
        path = self._at(unit.unit_path)
        left = [self._at(unit.state), *self._configuration()]
        if not path.exists() and not (purge and any(each.exists() for each in left)):
            raise ConfigurationError(f"{path}: not there, so {unit.name} is not installed")
        if path.exists():
            if self._here:
                self._run("systemctl", "disable", "--now", unit.name)
            else:
                self._run("systemctl", f"--root={self._root}", "disable", unit.name)
            path.unlink()
            self._at(unit.users_path).unlink(missing_ok=True)
            if self._here:
                self._run("systemctl", "daemon-reload")
            say(f"removed {unit.name}")
        if purge:
            for each in left:
                if each.is_dir():
                    shutil.rmtree(each)
                else:
                    each.unlink(missing_ok=True)
            say("removed its state and its settings: " + ", ".join(map(str, left)))
        else:
            kept = ", ".join(str(each) for each in left if each.exists())
            say(f"kept: {kept}; `--purge` removes them too")

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        """Stop a service that runs, because its user could change files meanwhile.

        It is started again if the installation fails.

        Raises: what the installation raises; ConfigurationError with that and the reason, if the
            service could not be started again.
        """
        name = self._unit.name
        there = self._here and self._at(self._unit.unit_path).exists()
        ran = there and _runs(name)
        if there:
            self._run("systemctl", "stop", name)
        try:
            yield
        except BaseException as err:
            if ran:
                self._start_again(err)
            raise
        self.stopped = ran

    def _start_again(self, why: BaseException) -> None:
        try:
            self._run("systemctl", "start", self._unit.name)
        except ConfigurationError as err:
            raise ConfigurationError(
                f"{why}; {self._unit.name}, which was stopped for this, does not start again: {err}"
            ) from why

    def _write_options(self, options: Sequence[str] | None) -> None:
        """Write the file of options; lines of the operator stay.

        It may hold passwords, and systemd reads it as root.
        """
        place = self._at(self._unit.options_path)
        old = place.read_text() if place.exists() else ""
        if options is None and old:
            place.chmod(0o600)
        else:
            text = self._unit.options(options or (), old)
            self._write(self._unit.options_path, text.encode(), mode=0o600)

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def _configuration(self) -> list[Path]:
        return [
            self._at(f"/etc/splitedge/{self._unit.kind}.{suffix}") for suffix in ("env", "toml")
        ]

    def _check_command(self) -> None:
        """Check that the service's user can start the program, and that its folders are there.

        Raises: ConfigurationError saying what to do.
        """
        program = self._unit.command[0]
        if not self._at(program).exists():
            raise ConfigurationError(
                f"{self._at(program)}: no such program; give the one to start by --command"
            )
        for folder in self._unit.write:
            if not self._at(folder).is_dir():
                raise ConfigurationError(f"--write {folder}: no such folder; make it first")
        if any(place.startswith(HIDDEN) for place in self._places(program)):
            extra = "server" if self._unit.kind == "server" else "serve"
            raise ConfigurationError(
                f"{program} is in a home folder, or leads to one, which the service cannot read;"
                " install splitedge's wheel for all users (docs/services.md):"
                " sudo PIPX_HOME=/opt/pipx PIPX_BIN_DIR=/usr/local/bin pipx install"
                f" './splitedge-VERSION-py3-none-any.whl[{extra}]', then"
                f" sudo /usr/local/bin/splitedge {self._unit.kind} install-service"
            )

    def _places(self, program: str) -> Iterator[str]:
        """Places that a start of the program reads: itself, and on this machine what it leads to.

        A link, or the interpreter of a script, may lie in a home folder.
        """
        yield program
        if not self._here:
            return
        real = Path(program).resolve()
        yield str(real)
        with real.open("rb") as file:
            first = file.readline(4096)
        if first.startswith(b"#!") and (words := first[2:].decode("utf-8", "replace").split()):
            yield str(Path(words[0]).resolve())

    def _check_take(self, take: Path, state: Path) -> None:
        """Check that a state folder can be moved, and that nothing runs on it.

        Raises: ConfigurationError, StateInUseError.
        """
        if not take.is_dir():
            raise ConfigurationError(f"--take {take}: expected a state folder")
        if take.is_symlink():
            raise ConfigurationError(f"--take {take}: is a link; give --take {take.resolve()}")
        if self._ready_file is not None and not (take / self._ready_file).exists():
            raise ConfigurationError(f"--take {take}: not the state folder of an enrolled device")
        if state.exists() and any(each.name != "agent.toml" for each in state.iterdir()):
            raise ConfigurationError(
                f"--take {take}: {state} has a state already, which is never overwritten; move it"
                " away first"
            )
        role: Role = "server" if self._unit.kind == "server" else "agent"
        if is_held(take, role):
            raise StateInUseError(f"--take {take}: the {role} runs on it; stop it first")

    def _link_settings(self, state: Path, name: str, template: str, *, group: int) -> None:
        """Put a settings file into /etc/splitedge, and a link to it into the state folder.

        Raises: ConfigurationError if both places hold settings of the user.
        """
        here, path = state / name, f"/etc/splitedge/{name}"
        place = self._at(path)
        own = self._check_settings(state, name, template)
        if own is not None:  # of a folder that was taken
            self._write(path, own, mode=0o640)
        elif not place.exists():
            self._write(path, template.encode(), mode=0o640)
        here.unlink(missing_ok=True)
        here.symlink_to(path)
        os.chown(place, 0, group)
        place.chmod(0o640)  # it may hold the password of a broker

    def _check_settings(self, folder: Path, name: str, template: str) -> bytes | None:
        """A state folder's own settings; None for none or a link.

        Raises: ConfigurationError if /etc/splitedge holds other settings of the user.
        """
        here, place = folder / name, self._at(f"/etc/splitedge/{name}")
        own = _read_own(here)
        if own is None or not place.exists():
            return own
        if place.read_bytes() not in (template.encode(), own):
            raise ConfigurationError(
                f"{here} and {place} hold different settings; keep one of them, remove the"
                " other, and run this again"
            )
        return own

    def _write(self, path: str, content: str | bytes, *, mode: int = 0o644) -> None:
        place = self._at(path)
        _open_folder(place.parent)
        raw = content.encode() if isinstance(content, str) else content
        write_atomic(place, raw, mode=mode)

    def _run(self, *words: str, limit_s: float = TOOL_S) -> None:
        """Run a tool of systemd.

        Raises: ConfigurationError with the last line of what it says.
        """
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise ConfigurationError(
                f"{' '.join(words)}: not finished after {limit_s:g} s"
            ) from None
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
            raise ConfigurationError(f"{' '.join(words)}: {lines[-1]}")


def this_command() -> list[str]:
    """The command `splitedge` of this installation."""
    program = Path(sys.executable).with_name("splitedge")
    return [str(program)] if program.exists() else [sys.executable, "-P", "-m", "edge_sdk.cli"]


def old_unit(kind: str, root: Path) -> OldUnit:
    """The unit of an earlier installation, as far as it is known."""
    try:
        text = (root / f"etc/systemd/system/splitedge-{kind}.service").read_text()
    except (FileNotFoundError, PermissionError):
        return OldUnit()
    old = OldUnit.read(kind, text)
    there = bool(old.command) and (root / old.command[0].lstrip("/")).exists()
    return old if there else replace(old, command=())


def old_options(unit: ServiceUnit, root: Path) -> list[str] | None:
    """Options of an earlier installation; None for a user who may not read them.

    Raises: ConfigurationError for quotes that are not closed.
    """
    try:
        return unit.options_in((root / unit.options_path.lstrip("/")).read_text())
    except FileNotFoundError:
        return []
    except PermissionError:
        return None


def _runs(name: str) -> bool:
    """Whether a service runs or is being started."""
    words = ("systemctl", "is-active", name)
    done = subprocess.run(words, capture_output=True, text=True, timeout=TOOL_S, check=False)
    return done.stdout.strip() in ("active", "activating", "reloading")


def _open_folder(path: Path) -> None:
    """Make a folder that every user may enter, whatever the umask; it is root's own."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    make_folder(path)
    for folder in missing:
        folder.chmod(0o755)
    if path.name == "splitedge":  # an earlier installation may have left it closed
        path.chmod(0o755)


def _read_own(path: Path) -> bytes | None:
    """A file in the state folder, whose user may have put anything there; None for none or a link.

    Raises: ConfigurationError for what is no ordinary file, or has a second name elsewhere.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        if err.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise ConfigurationError(f"{path}: expected an ordinary file; remove it")
        return file.read()


def _give(folder: Path, uid: int, gid: int) -> None:
    """Give a folder and all in it to a user, without following a link out of it."""

    def failed(err: OSError) -> None:
        if not isinstance(err, FileNotFoundError):
            raise err

    for _, folders, files, handle in os.fwalk(folder, follow_symlinks=False, onerror=failed):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                os.chown(name, uid, gid, dir_fd=handle, follow_symlinks=False)
        os.fchown(handle, uid, gid)


def _move(source: Path, target: Path) -> None:
    """Move a state folder, whole or not at all, also to another file system.

    Raises: StorageError if it cannot be copied; it is then where it was.
    """
    if target.exists():  # empty but for a link to the settings: it was checked
        shutil.rmtree(target)
    for each in source.iterdir():
        if stat.S_ISSOCK(each.lstat().st_mode):  # an agent that was killed left it
            each.unlink()
    try:
        source.rename(target)
    except OSError as err:
        if err.errno != errno.EXDEV:
            raise
    else:
        return
    try:
        shutil.copytree(source, target, symlinks=True)
        sync_tree(target)
    except OSError as err:  # shutil.Error is one
        shutil.rmtree(target, ignore_errors=True)
        raise StorageError(
            f"--take {source}: not copied to {target} ({err}); it was not moved"
        ) from err
    shutil.rmtree(source)
