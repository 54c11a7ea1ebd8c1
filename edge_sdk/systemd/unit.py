"""The text of a service's unit for systemd, and of the files beside it. No I/O."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edge_sdk.errors import ConfigurationError

# What an agent and a server can do without. Left out, with the reason:
# MemoryDenyWriteExecute: graph compilers (OpenVINO, CUDA, oneDNN of torch) write code and run it;
# ProcSubset: free memory and cores are read from /proc; PrivateUsers: groups open devices.
HARDENING: Final = """\
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
KeyringMode=private
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
UMask=0077
"""
HIDDEN: Final = ("/home/", "/root/", "/run/user/")  # by ProtectHome
# a trial of TensorRT, which builds an engine (bundles.trial.SLOW_S), those of the other providers,
# and a first bundle over a slow link
START_MIN: Final = 45
_FOLDER: Final = re.compile(r"/[^\s'\"\\\\%$]+")
_USER: Final = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_MEMORY: Final = re.compile(r"[1-9]\d*[KMGT]|[1-9]\d?%|100%|infinity")


@dataclass(frozen=True, slots=True)
class ServiceUnit:
    """A service of systemd, and its places on the machine.

    Attributes:
        kind: `agent` or `server`; the service is `splitedge-{kind}`.
        command: the program and its first words, such as /opt/splitedge/bin/splitedge.
        user: of the service; a group of the same name is made too.
        memory_max: as systemd takes it: bytes with K, M or G, or a share of the machine's.
        watchdog_s: time without a sign of life after which systemd restarts the service.
        about: for people.
        groups: groups that give the user access to devices; missing ones are made.
        devices: device nodes that the service may open, as systemd takes them.
        privileged_ports: whether it may listen below port 1024.
        write: folders beside its state that it may write into.
    Raises: ConfigurationError for a user, a memory or a folder that systemd would refuse.
    """

    kind: str
    command: Sequence[str]
    user: str
    memory_max: str
    watchdog_s: int
    about: str
    groups: Sequence[str] = ()
    devices: Sequence[str] = ()
    privileged_ports: bool = False
    write: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not _USER.fullmatch(self.user):
            raise ConfigurationError(
                f"--user {self.user!r:.60}: expected a name such as {self.name}: small letters,"
                " digits, - and _, at most 31"
            )
        if not _MEMORY.fullmatch(self.memory_max):
            raise ConfigurationError(
                f"--memory-max {self.memory_max!r:.60}: expected bytes such as 512M or 2G, a share"
                " of the machine's memory such as 70%, or infinity"
            )
        for folder in self.write:
            if not _FOLDER.fullmatch(folder) or folder.startswith(HIDDEN):
                raise ConfigurationError(
                    f"--write {folder!r:.60}: expected a whole path such as /srv/answers, without"
                    " spaces, quotes and %, and not in a home folder, which the service cannot see"
                )

    @property
    def name(self) -> str:
        """The service's name."""
        return f"splitedge-{self.kind}"

    @property
    def unit_path(self) -> str:
        """The unit."""
        return f"/etc/systemd/system/{self.name}.service"

    @property
    def users_path(self) -> str:
        """The declaration of its user."""
        return f"/etc/sysusers.d/{self.name}.conf"

    @property
    def options_path(self) -> str:
        """The options and the environment of the service, which the operator edits."""
        return f"/etc/splitedge/{self.kind}.env"

    @property
    def state(self) -> str:
        """The state folder."""
        return f"/var/lib/splitedge/{self.kind}"

    @property
    def options_variable(self) -> str:
        """The variable with the options of `run`."""
        return f"SPLITEDGE_{self.kind.upper()}_OPTIONS"

    def text(self) -> str:
        """The unit's text."""
        program = " ".join(_quoted(word) for word in self.command)
        ports = "CAP_NET_BIND_SERVICE" if self.privileged_ports else ""
        devices = "".join(f"DeviceAllow={each}\n" for each in self.devices)
        private = "" if self.devices else "PrivateDevices=yes\n"
        write = "".join(f"ReadWritePaths={each}\n" for each in self.write)
        return f"""\
# Written by `splitedge {self.kind} install-service`, which writes it anew. Your own changes belong
# in {self.options_path} and in `systemctl edit {self.name}`.
[Unit]
Description=splitedge {self.kind}: {self.about}
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
User={self.user}
Group={self.user}
EnvironmentFile=-{self.options_path}
ExecStart={program} {self.kind} run --state {self.state} ${self.options_variable}
WorkingDirectory={self.state}
StateDirectory=splitedge/{self.kind}
StateDirectoryMode=0700
ConfigurationDirectory=splitedge
Restart=always
RestartSec=5
# a first bundle may come over a slow link, and graphics processors are tried with it
TimeoutStartSec={START_MIN}min
TimeoutStopSec=30
KillMode=mixed
# the process says that it is alive only while its own parts answer
WatchdogSec={self.watchdog_s}
MemoryMax={self.memory_max}
# a bundle that needs too much memory in its trial is refused, and is no reason to stop
OOMPolicy=continue
TasksMax=512
{devices}{private}{write}AmbientCapabilities={ports}
CapabilityBoundingSet={ports}
{HARDENING}
[Install]
WantedBy=multi-user.target
"""

    def users(self) -> str:
        """The user, for systemd-sysusers."""
        lines = [f'u {self.user} - "splitedge {self.kind}" /var/lib/splitedge']
        lines += [f"m {self.user} {group}" for group in self.groups]
        return "\n".join(lines) + "\n"

    def options(self, words: Sequence[str], old: str = "") -> str:
        """The file of options, with these words as options of `run`.

        Args:
            old: text of an earlier file, whose other lines stay as they are.
        """
        line = f'{self.options_variable}="{_escaped(shlex.join(words))}"\n'
        if not old:
            return f"""\
# Options of `splitedge {self.kind} run`, and environment of the service.
# After a change: systemctl restart {self.name}
{line}"""
        pattern = self._options_line()
        if pattern.search(old) is None:
            return old + ("" if old.endswith("\n") else "\n") + line
        kept = iter((line,))
        return pattern.sub(lambda _: next(kept, ""), old)

    def options_in(self, text: str) -> list[str]:
        """The options of `run` in a file of options, as systemd reads them; [] if there are none.

        Raises: ConfigurationError for quotes that are not closed.
        """
        found = list(self._options_line().finditer(text))
        value = found[-1]["value"].replace("\\\n", "") if found else ""
        try:
            return shlex.split(" ".join(shlex.split(value)))
        except ValueError as err:
            raise ConfigurationError(
                f"{self.options_path}: {self.options_variable}: {err}; correct it, or give the"
                " options behind two dashes"
            ) from None

    def _options_line(self) -> re.Pattern[str]:
        """Pattern of the line with the options, which quotes or a backslash continue."""
        value = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\n\\"'])*"""
        return re.compile(
            rf"^[ \t]*{self.options_variable}[ \t]*=(?P<value>{value}|[^\n]*)(?:\n|\Z)",
            re.MULTILINE | re.DOTALL,
        )


@dataclass(frozen=True, slots=True)
class OldUnit:
    """Parts of an earlier installation's unit, which a new one keeps."""

    command: Sequence[str] = ()
    user: str | None = None
    memory_max: str | None = None
    privileged_ports: bool = False
    write: Sequence[str] = ()

    @classmethod
    def read(cls, kind: str, text: str) -> OldUnit:
        """Read the text of a unit; a line that is missing gives None or nothing."""

        def value(key: str) -> str | None:
            found = re.findall(rf"^{key}=(.+)$", text, re.MULTILINE)
            return found[-1].strip() if found else None

        program = (value("ExecStart") or "").rpartition(f" {kind} run ")[0]
        try:
            words = shlex.split(program)
        except ValueError:
            words = []
        return cls(
            [word.replace("%%", "%").replace("$$", "$") for word in words],
            value("User"),
            value("MemoryMax"),
            value("AmbientCapabilities") is not None,
            re.findall(r"^ReadWritePaths=(.+)$", text, re.MULTILINE),
        )


def _quoted(word: str) -> str:
    """A word of ExecStart, which takes `%` and `$` for its own."""
    word = word.replace("%", "%%").replace("$", "$$")
    return f'"{_escaped(word)}"' if re.search(r"[\s'\"\\;]", word) else word


def _escaped(text: str) -> str:
    """Text between double quotes, as systemd reads it."""
    return text.replace("\\", "\\\\").replace('"', '\\"')
