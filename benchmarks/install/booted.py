"""The services of `install-service`, under a systemd that has booted by systemd-nspawn."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

from benchmarks.install.debian import inside

# of the container; the programs of the image are linked there, as the documents say
PATH: Final = "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAM: Final = "/opt/splitedge"
MEMORY_V1: Final = Path("/sys/fs/cgroup/memory")
GROUP: Final = "splitedge-booted"
BOOT_S: Final = 120.0
RESTART_S: Final = 180.0
WATCHDOG_S: Final = 15
LIMIT: Final = "250M"
HOG_BYTES: Final = 500 << 20
KINDS: Final = ("server", "agent")
STATE: Final = "/var/lib/splitedge"
INPUTS: Final = f"{STATE}/agent/inputs.npy"
CERTIFICATES: Final = "/etc/splitedge"
SERVER_OPTIONS: Final = (
    *("--http", "0.0.0.0:8000", "--mqtt", "auto:0.0.0.0:8883"),
    *("--tls-cert", f"{CERTIFICATES}/cert.pem", "--tls-key", f"{CERTIFICATES}/key.pem"),
)
LOW_PORT: Final = 443

# takes what was tried, and what came out
Note = Callable[[str, str], None]


class Booted:
    """A Debian that systemd has booted in a container, without a network but its own loopback.

    Args:
        tree: the system, which `prepare` made.
        log: file for what its console prints.
    """

    def __init__(self, tree: Path, log: Path) -> None:
        self.tree = tree
        self._log = log
        self._leader = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.boot()
        return self

    def __exit__(self, *_: object) -> None:
        self.power_off()

    def boot(self) -> float:
        """Boot it; gives the seconds until all is started.

        Raises: RuntimeError with its console if that takes too long.
        """
        start = time.perf_counter()
        command = ["systemd-nspawn", f"--directory={self.tree}", "--boot", "--register=no"]
        command += ["--keep-unit", "--private-network", f"--machine={GROUP}"]
        if MEMORY_V1.is_dir():  # nspawn passes no controller on there: take a group for it
            (MEMORY_V1 / GROUP).mkdir(exist_ok=True)
            entry = f'echo $$ > {MEMORY_V1 / GROUP}/cgroup.procs; exec "$@"'
            command = ["sh", "-c", entry, "sh", *command]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self._wait(lambda: bool(children.read_text().split()), BOOT_S)
        self._leader = int(children.read_text().split()[0])
        self._wait(self._is_running, BOOT_S)
        if MEMORY_V1.is_dir():
            self.run("mount", "-o", "remount,rw,bind", str(MEMORY_V1))
            self.run("systemctl", "daemon-reexec")
            self._wait(self._is_running, BOOT_S)
        return time.perf_counter() - start

    @property
    def version(self) -> str:
        """Version of systemd there."""
        library = next((self.tree / "usr/lib").rglob("libsystemd-shared-*.so"))
        return library.stem.rpartition("-")[2]

    def power_off(self) -> None:
        """Shut it down, in order if it can."""
        if self._process is None:
            return
        self.attempt("systemctl", "poweroff")
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def attempt(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside, which may fail."""
        enter = ["nsenter", "--all", "--target", str(self._leader), "env", "-i", PATH]
        return subprocess.run(
            [*enter, *words], capture_output=True, text=True, timeout=600, check=False
        )

    def run(self, *words: str) -> str:
        """Run a command inside; gives what it prints.

        Raises: RuntimeError with its errors.
        """
        done = self.attempt(*words)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip())[-2000:]
            raise RuntimeError(f"{' '.join(words)}: {said}")
        return done.stdout

    def show(self, kind: str, key: str) -> str:
        """A property of a service."""
        words = ("systemctl", "show", f"splitedge-{kind}", f"--property={key}", "--value")
        return self.run(*words).strip()

    def signal(self, kind: str, name: str) -> None:
        """Send a signal to the main process of a service."""
        self.run("systemctl", "kill", f"--signal={name}", "--kill-who=main", f"splitedge-{kind}")

    def as_user(self, kind: str, *words: str) -> str:
        """Run `splitedge WORDS` as the user of a service, on its state folder.

        It is run from a folder that this user cannot read, as an operator types it at home.
        """
        program = ("runuser", "-u", f"splitedge-{kind}", "--", "splitedge")
        at_home = ("sh", "-c", 'cd /root && exec "$@"', "sh")
        return self.run(*at_home, *program, *words, "--state", f"{STATE}/{kind}")

    def until(self, done: Callable[[], bool], what: str) -> float:
        """Seconds until a condition holds.

        Raises: RuntimeError naming it after RESTART_S.
        """
        try:
            return self._wait(done, RESTART_S)
        except RuntimeError as err:
            journal = self.attempt("journalctl", "--no-pager", "--lines=30").stdout
            raise RuntimeError(f"{what}: {err}\n{journal}") from None

    def _is_running(self) -> bool:
        words = ("systemctl", "is-system-running")
        return self.attempt(*words).stdout.strip() in {"running", "degraded"}

    @staticmethod
    def _wait(done: Callable[[], bool], timeout_s: float) -> float:
        start = time.perf_counter()
        while not done():
            if time.perf_counter() - start > timeout_s:
                raise RuntimeError(f"not reached within {timeout_s:g} s")
            time.sleep(0.2)
        return time.perf_counter() - start


def prepare(debian: Path, tree: Path, program: Path) -> None:
    """Make a system that boots, of a Debian tree, with splitedge in /opt/splitedge.

    Args:
        debian: the tree.
        tree: of the system; what an earlier trial left there is removed.
        program: the virtual environment of an image, for this place.
    """
    if not (tree / "made").exists():
        shutil.rmtree(tree, ignore_errors=True)
        subprocess.run(["cp", "--archive", str(debian), str(tree)], check=True)
        (tree / "made").unlink()
        inside(tree, "apt-get", "update")
        packages = ("systemd", "systemd-sysv", "dbus", "util-linux")
        inside(tree, "apt-get", "install", "--yes", "--no-install-recommends", *packages)
        (tree / "made").touch()
    for left in (STATE, CERTIFICATES, PROGRAM):
        shutil.rmtree(tree / left[1:], ignore_errors=True)
    for unit in (tree / "etc/systemd/system").rglob("splitedge-*"):
        shutil.rmtree(unit) if unit.is_dir() else unit.unlink()
    subprocess.run(["cp", "--archive", str(program), str(tree / PROGRAM[1:])], check=True)
    link = tree / "usr/local/bin/splitedge"
    link.unlink(missing_ok=True)
    link.symlink_to(f"{PROGRAM}/bin/splitedge")


def use(system: Booted, models: Path, inputs: Path, threshold: float, note: Note) -> None:
    """Install both services, hold systemd to what their units promise, and remove them.

    Args:
        models: folder of models of a server.
        inputs: file of inputs for the agent.
        threshold: of the gate, above which some of the inputs lie.
    Raises: RuntimeError at the first thing that does not work.
    """
    _install_server(system, models, note)
    _install_agent(system, inputs, threshold, note)
    for kind in KINDS:
        _hang(system, kind, note)
        _crash(system, kind, note)
    _limit_memory(system, threshold, note)
    _listen_below_1024(system, note)
    system.power_off()
    system.boot()
    system.until(lambda: all(_active(system, kind) for kind in KINDS), "both after a new boot")
    note("after a new boot, both start by themselves; answers", ask(system, threshold))
    _remove(system, note)


def _install_server(system: Booted, models: Path, note: Note) -> None:
    """Install the server as in docs/services.md, first with a key that its user cannot read."""
    folder = system.tree / CERTIFICATES[1:]
    folder.mkdir(parents=True)
    openssl = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    openssl += ["-nodes", "-days", "30", "-subj", "/CN=localhost"]
    openssl += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    openssl += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(openssl, check=True, capture_output=True)
    (folder / "key.pem").chmod(0o600)
    (folder / "cert.pem").chmod(0o644)
    printed = system.run("splitedge", "server", "install-service", "--", *SERVER_OPTIONS)
    _need("may not read it" in printed and not _active(system, "server"), printed)
    note("`server install-service` names a key that the user cannot read", "and starts nothing")
    system.run("chgrp", "splitedge-server", f"{CERTIFICATES}/key.pem")
    system.run("chmod", "640", f"{CERTIFICATES}/key.pem")
    shutil.copytree(models, system.tree / f"{STATE}/server/models"[1:])
    system.run("chown", "-R", "splitedge-server:", f"{STATE}/server/models")
    start = time.perf_counter()
    system.run("systemctl", "start", "splitedge-server")
    start_s = time.perf_counter() - start
    note("`systemctl start` of the server returns when it is ready", f"after {start_s:.1f} s")


def _install_agent(system: Booted, inputs: Path, threshold: float, note: Note) -> None:
    token = system.as_user("server", "server", "token", "create").split()[0]
    printed = system.run("splitedge", "agent", "install-service")
    _need("next, enrol the device" in printed, printed)
    authority = ("--ca", f"{CERTIFICATES}/cert.pem")
    words = ("agent", "enroll", "--server", "https://127.0.0.1:8000", "--token", token)
    system.as_user("agent", *words, *authority)
    start = time.perf_counter()
    system.run("systemctl", "start", "splitedge-agent")
    start_s = time.perf_counter() - start
    note("`systemctl start` of the agent returns when it is ready", f"after {start_s:.1f} s")
    note("systemd's status of the agent", system.show("agent", "StatusText"))
    shutil.copy(inputs, system.tree / INPUTS[1:])
    system.run("chown", "splitedge-agent:", INPUTS)
    note("answers of the agent", ask(system, threshold))


def ask(system: Booted, threshold: float) -> str:
    """Ask the running agent; gives the number of answers by source.

    Raises: RuntimeError if the server has answered none.
    """

    def sources() -> Mapping[str, int]:
        words = ("predict", INPUTS, "--json", "--deadline", "10", "--threshold", repr(threshold))
        done = system.as_user("agent", "agent", *words)
        return Counter(each["source"] for each in json.loads(done))

    system.until(lambda: bool(sources().get("server")), "answers of the server")
    return ", ".join(f"{count} {source}" for source, count in sorted(sources().items()))


def _hang(system: Booted, kind: str, note: Note) -> None:
    """Stop a service's process in the middle, and wait for systemd to notice."""
    drop_in = system.tree / f"etc/systemd/system/splitedge-{kind}.service.d"
    drop_in.mkdir(exist_ok=True)
    (drop_in / "watchdog.conf").write_text(f"[Service]\nWatchdogSec={WATCHDOG_S}\n")
    system.run("systemctl", "daemon-reload")
    system.run("systemctl", "restart", f"splitedge-{kind}")
    process = system.show(kind, "MainPID")
    system.signal(kind, "STOP")
    seconds = system.until(
        lambda: _active(system, kind) and system.show(kind, "MainPID") != process,
        f"the restart of a {kind} that hangs",
    )
    words = ("journalctl", "--no-pager", f"--unit=splitedge-{kind}")
    _need("Watchdog timeout" in system.run(*words), "systemd says nothing of its watchdog")
    note(
        f"{kind} that hangs (SIGSTOP): it is ended by the watchdog, here of {WATCHDOG_S} s, and"
        " runs again",
        f"after {seconds:.0f} s",
    )
    shutil.rmtree(drop_in)
    system.run("systemctl", "daemon-reload")
    system.run("systemctl", "restart", f"splitedge-{kind}")


def _crash(system: Booted, kind: str, note: Note) -> None:
    process = system.show(kind, "MainPID")
    system.signal(kind, "KILL")
    seconds = system.until(
        lambda: _active(system, kind) and system.show(kind, "MainPID") != process,
        f"the restart of a {kind} that was killed",
    )
    note(f"{kind} that is killed (SIGKILL): it runs again", f"after {seconds:.0f} s")


def _limit_memory(system: Booted, threshold: float, note: Note) -> None:
    """Let a process in the agent's control group take more than the limit."""
    system.run("splitedge", "agent", "install-service", "--memory-max", LIMIT)
    before = system.show("agent", "MainPID")
    group = system.show("agent", "ControlGroup")
    folder = MEMORY_V1 if MEMORY_V1.is_dir() else MEMORY_V1.parent
    script = f"import os; x = b'1' * {HOG_BYTES}; print('not ended')"
    enter = f'echo $$ > {folder}{group}/cgroup.procs; exec python3 -c "{script}"'
    done = system.attempt("sh", "-c", enter)
    _need(done.returncode in {-9, 137}, f"a process above the limit ended with {done}")
    _need(system.show("agent", "MainPID") == before, "the agent was ended too")
    note(
        f"with `--memory-max {LIMIT}`, the kernel ends a process of the service that takes"
        f" {HOG_BYTES >> 20} MB; the agent itself goes on",
        ask(system, threshold),
    )


def _listen_below_1024(system: Booted, note: Note) -> None:
    settings = system.tree / CERTIFICATES[1:] / "agent.toml"
    settings.write_text(f'[serve]\naddress = "127.0.0.1:{LOW_PORT}"\n')
    system.run("splitedge", "agent", "install-service")
    url = f"http://127.0.0.1:{LOW_PORT}/v2/health/ready"
    script = f"import urllib.request; print(urllib.request.urlopen('{url}').status)"
    status = system.run("python3", "-c", script).strip()
    note(f"an agent whose `agent.toml` has port {LOW_PORT} answers there", f"HTTP {status}")


def _remove(system: Booted, note: Note) -> None:
    for kind in KINDS:
        system.run("splitedge", kind, "uninstall-service")
        _need(not _active(system, kind), f"{kind} still runs")
        _need((system.tree / f"{STATE}/{kind}"[1:]).is_dir(), f"{kind}: its state is gone")
        system.run("splitedge", kind, "uninstall-service", "--purge")
        _need(not (system.tree / f"{STATE}/{kind}"[1:]).exists(), f"{kind}: its state is left")
    left = list((system.tree / "etc/systemd/system").rglob("splitedge-*"))
    _need(not left, f"left: {left}")
    note("`uninstall-service` stops both and keeps their state; `--purge` removes it", "yes")


def _active(system: Booted, kind: str) -> bool:
    return system.show(kind, "ActiveState") == "active"


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise RuntimeError(otherwise)
