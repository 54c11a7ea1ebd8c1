"""The images of `deploy/`, built and used: compose's services of splitedge, and an agent.

    make installations

Podman builds both Dockerfiles as they are. The image they start from is made here, of Debian's own
Python, because Docker Hub is not needed then. The commands, privileges and volumes of the
containers come from `deploy/compose.yaml` and `docs/install-docker.md`. The containers share one
network namespace without a way out, so no port of this machine is taken.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from benchmarks.install.debian import Registry
from benchmarks.reports import ROOT

DEPLOY: Final = ROOT / "deploy"
COMPOSE: Final = DEPLOY / "compose.yaml"
PAGE: Final = ROOT / "docs" / "install-docker.md"
KINDS: Final = ("agent", "server")
# the whole of podman's own settings: one that may raise no limit keeps these low
SETTINGS: Final = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=2048:2048"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""
HEALTHY_S: Final = 180.0
STOP_S: Final = 20
NOBODY: Final = "65534"  # the user of Prometheus's image
STATE: Final = "/var/lib/splitedge"
NETWORK: Final = "network"
INPUTS: Final = f"{STATE}/inputs.npy"

# takes what was tried, and what came out
Note = Callable[[str, str], None]


class Podman:
    """Podman that keeps its storage apart, and leaves the machine's alone.

    Args:
        folder: of the images and the containers.
    """

    def __init__(self, folder: Path) -> None:
        for tool in ("podman", "runc"):
            if shutil.which(tool) is None:
                raise RuntimeError(f"{tool} is missing: apt install podman runc")
        folder.mkdir(parents=True, exist_ok=True)
        self._settings = folder / "containers.conf"
        self._settings.write_text(SETTINGS)
        hosts = folder / "hosts"
        hosts.write_text("127.0.0.1 localhost mosquitto server\n")
        # options of a container that joins the others
        self.joined = (f"--network=container:{NETWORK}", f"--volume={hosts}:/etc/hosts:ro")
        self._words = ["podman", "--root", str(folder / "storage")]
        self._words += ["--runroot", str(folder / "run")]

    def __call__(self, *words: str, stdin: int | None = None) -> str:
        """Run a command of podman; gives what it prints.

        Raises: RuntimeError with the end of its errors.
        """
        done = self.attempt(*words, stdin=stdin)
        if done.returncode:
            raise RuntimeError(f"podman {' '.join(words)[:300]}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def attempt(self, *words: str, stdin: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of podman, which may fail."""
        return subprocess.run(
            [*self._words, *words],
            env={**os.environ, "CONTAINERS_CONF": str(self._settings)},
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )

    @property
    def version(self) -> str:
        """Version of podman."""
        return self("version", "--format", "{{.Client.Version}}").strip()

    def clear(self) -> None:
        """Remove all containers and volumes; the images stay."""
        names = self("ps", "--all", "--format", "{{.Names}}").split()
        # the one whose network the others have goes last
        for name in sorted(names, key=NETWORK.__eq__):
            self("rm", "--force", "--time", "1", name)
        self("volume", "prune", "--force")


@dataclass(frozen=True)
class Image:
    """An image that was built.

    Attributes:
        size_bytes: of all its layers.
    """

    name: str
    size_bytes: int


def import_base(podman: Podman, tree: Path) -> None:
    """Make the images that the Dockerfiles start from, of a Debian tree."""
    for name in sorted({name for kind in KINDS for name in bases(kind)}):
        whole = f"docker.io/library/{name}"
        if podman.attempt("image", "exists", whole).returncode == 0:
            continue
        path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        with subprocess.Popen(["tar", "-C", str(tree), "-c", "."], stdout=subprocess.PIPE) as tar:
            assert tar.stdout is not None
            change = ("--change", f"ENV {path}", "--change", 'CMD ["python3"]')
            podman("import", *change, "-", whole, stdin=tar.stdout.fileno())


def bases(kind: str) -> set[str]:
    """The images that a Dockerfile starts from."""
    text = (DEPLOY / f"{kind}.Dockerfile").read_text()
    return set(re.findall(r"^FROM (\S+)", text, re.MULTILINE))


def build(podman: Podman, kind: str, registry: Registry, folder: Path) -> Image:
    """Build an image by its Dockerfile."""
    configuration = folder / "pip.conf"
    configuration.write_text(registry.configuration)
    mounts = {configuration: Path("/etc/pip.conf"), **{path: path for path in registry.paths}}
    volumes = [f"--volume={here}:{there}:ro" for here, there in mounts.items()]
    words = ["build", "--format=docker", "--pull=never", "--network=host", *volumes]
    podman(*words, "--file", str(DEPLOY / f"{kind}.Dockerfile"), "--tag", f"splitedge-{kind}",
           str(ROOT))  # fmt: skip
    size = int(podman("image", "inspect", f"splitedge-{kind}", "--format", "{{.Size}}"))
    return Image(f"splitedge-{kind}", size)


@dataclass(frozen=True)
class Service:
    """A service of `deploy/compose.yaml`, as words of `podman run`.

    Attributes:
        options: before the image.
        command: after it.
        health: the command of its health check, if compose has one.
    """

    options: tuple[str, ...]
    command: tuple[str, ...]
    health: tuple[str, ...]

    @classmethod
    def read(cls, name: str) -> Service:
        """Read one; what belongs to PostgreSQL is left out, so that the registry is SQLite."""
        content = yaml.safe_load(COMPOSE.read_text())["services"][name]
        options = [f"--cap-drop={each}" for each in content["cap_drop"]]
        options += [
            f"--security-opt={each.removesuffix(':true')}" for each in content["security_opt"]
        ]
        options += [f"--volume={each}" for each in content["volumes"]]
        if "entrypoint" in content:
            options.append(f"--entrypoint={json.dumps(content['entrypoint'])}")
        health = content.get("healthcheck", {}).get("test", ["CMD"])
        return cls(tuple(options), tuple(content["command"]), tuple(health[1:]))


def use(podman: Podman, models: Path, inputs: Path, threshold: float, note: Note) -> None:
    """Start compose's services and an agent, and ask the agent; each fact is noted.

    Args:
        models: folder of models of a server, which is put into the running one.
        inputs: file of inputs for the agent.
        threshold: of the gate, above which some of the inputs lie.
    Raises: RuntimeError at the first thing that does not work.
    """
    podman.clear()
    podman("run", "--detach", "--name", NETWORK, "--network=none", "--entrypoint=sleep",
           "splitedge-agent", "infinity")  # fmt: skip
    try:
        _start_services(podman, note)
        _give_model(podman, models, note)
        _start_agent(podman, inputs, threshold, note)
        _stop_and_start(podman, threshold, note)
    finally:
        podman.clear()


def take_program(podman: Podman, kind: str, place: Path) -> None:
    """Copy the virtual environment of an image out of it."""
    name = podman("create", f"splitedge-{kind}").strip()
    podman("cp", f"{name}:/opt/splitedge", str(place))
    podman("rm", name)


def _start(podman: Podman, name: str, *more: str) -> str:
    """Start a service of compose; gives what it prints if it ends by itself."""
    service = Service.read(name)
    return podman("run", "--name", name, *podman.joined, *more, *service.options,
                  "splitedge-server", *service.command)  # fmt: skip


def _start_services(podman: Podman, note: Note) -> None:
    _start(podman, "broker-config")
    note("`broker-config` writes Mosquitto's configuration into its volume, once", "yes")
    _start(podman, "mosquitto", "--detach")
    check = Service.read("mosquitto").health
    mosquitto_s = _wait(lambda: podman.attempt("exec", "mosquitto", *check).returncode == 0)
    note("`mosquitto` is healthy by compose's check", f"after {mosquitto_s:.1f} s")
    _start(podman, "server", "--detach")
    note("`server` is healthy by the image's check", f"after {_healthy(podman, 'server'):.1f} s")
    _start(podman, "metrics-key")
    script = (
        "import urllib.request as r; key = open('/keys/metrics').read().strip();"
        "print(r.urlopen(r.Request('http://server:8000/metrics',"
        " headers={'Authorization': f'Bearer {key}'})).status)"
    )
    status = podman("run", "--rm", *podman.joined, f"--user={NOBODY}",
                    "--volume=keys:/keys:ro", "--entrypoint=python", "splitedge-server",
                    "-c", script).strip()  # fmt: skip
    note("`metrics-key` makes a key, with which another user reads `/metrics`", f"HTTP {status}")
    privileges = podman("exec", "server", "sh", "-c", "id -u; grep CapBnd /proc/1/status").split()
    note("user and capabilities of the server's container", f"{privileges[0]}, {privileges[-1]}")


def _give_model(podman: Podman, models: Path, note: Note) -> None:
    podman("cp", str(models), f"server:{STATE}/server/")
    start = time.perf_counter()
    words = ("exec", "server", "splitedge", "server", "models", "list")
    state = ("--state", f"{STATE}/server")
    _wait(lambda: "digits" in podman.attempt(*words, *state).stdout)
    note("the running server takes a model", f"after {time.perf_counter() - start:.1f} s")


def _start_agent(podman: Podman, inputs: Path, threshold: float, note: Note) -> None:
    """Enrol an agent by the commands of the document, start it, and ask it."""
    state = ("--state", f"{STATE}/server")
    token = podman("exec", "server", "splitedge", "server", "token", "create", *state).split()[0]
    enrol, run = agent_commands(token, podman.joined)
    refused = podman.attempt("run", "--rm", *podman.joined, "splitedge-agent")
    said = refused.stderr.strip().rpartition("; ")[2]
    note("an agent that is not enrolled ends", f"status {refused.returncode}: {said}")
    podman(*enrol)
    podman(*run)
    note("`agent` is healthy by the image's check", f"after {_healthy(podman, 'agent'):.1f} s")
    podman("cp", str(inputs), f"agent:{INPUTS}")
    note("its answers", _in_words(_ask(podman, threshold)))


def agent_commands(token: str, joined: Sequence[str]) -> tuple[list[str], list[str]]:
    """The two `docker run` of the document, for enrolment and for the agent, in our network."""
    text = PAGE.read_text().replace("\\\n", " ")
    lines = re.findall(r"^docker (run .*splitedge-agent.*)$", text, re.MULTILINE)
    commands = []
    for line in lines:
        words = shlex.split(line.replace("TOKEN", token))
        at = words.index("--network")
        commands.append([*words[:at], *joined, *words[at + 2 :]])
    enrol, run = commands
    return enrol, run


def _stop_and_start(podman: Podman, threshold: float, note: Note) -> None:
    """Stop each side as `docker stop` does, and start it again."""
    note("`docker stop` of the server", _stop(podman, "server"))
    alone = _ask(podman, threshold)
    if alone.get("server") or not alone.get("fallback"):
        raise RuntimeError(f"without a server, expected answers of the device, got {alone}")
    note("the agent's answers meanwhile", _in_words(alone))
    podman("start", "server")
    _healthy(podman, "server")
    back_s = _wait(lambda: bool(_ask(podman, threshold).get("server")))
    note("the server is started again, and asked by the agent", f"after {back_s:.1f} s")
    note("`docker stop` of the agent", _stop(podman, "agent"))
    podman("start", "agent")
    _healthy(podman, "agent")
    note("the agent is started again; its answers", _in_words(_ask(podman, threshold)))


def _stop(podman: Podman, name: str) -> str:
    start = time.perf_counter()
    podman("stop", "--time", str(STOP_S), name)
    status = podman("inspect", name, "--format", "{{.State.ExitCode}}").strip()
    return f"status {status} after {time.perf_counter() - start:.1f} s"


def _ask(podman: Podman, threshold: float) -> Mapping[str, int]:
    """Number of answers by source, of the running agent to the inputs."""
    words = ["predict", INPUTS, "--state", "agent", "--json", "--deadline", "10"]
    words += ["--threshold", repr(threshold)]
    printed = podman("exec", "agent", "splitedge", "agent", *words)
    return Counter(each["source"] for each in json.loads(printed))


def _in_words(sources: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {source}" for source, count in sorted(sources.items()))


def _healthy(podman: Podman, name: str) -> float:
    """Seconds until the image's health check succeeds.

    Raises: RuntimeError with its log if the container ends.
    """

    def healthy() -> bool:
        if podman("inspect", name, "--format", "{{.State.Running}}").strip() != "true":
            done = podman.attempt("logs", "--tail", "20", name)
            raise RuntimeError(f"{name} has ended: {done.stdout}{done.stderr}")
        return podman.attempt("healthcheck", "run", name).returncode == 0

    return _wait(healthy)


def _wait(done: Callable[[], bool]) -> float:
    """Seconds until a condition holds.

    Raises: RuntimeError after HEALTHY_S.
    """
    start = time.perf_counter()
    while not done():
        if time.perf_counter() - start > HEALTHY_S:
            raise RuntimeError(f"not reached within {HEALTHY_S:g} s")
        time.sleep(0.5)
    return time.perf_counter() - start
