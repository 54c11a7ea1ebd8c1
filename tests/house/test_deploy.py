"""The images and the services of `deploy/`: their commands are ones that splitedge takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.main import get_command

from edge_sdk.cli.agent import app as agent_app
from server.cli import app as server_app
from server.errors import AuthenticationError
from server.registry.database import Registry

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = YAML(typ="safe").load(DEPLOY / "compose.yaml")


def parse(app: Any, words: list[str]) -> None:
    """Parse a command line to its last word, without running it."""
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    command.make_context(command.name, words)


@pytest.mark.deadline
def test_a_key_of_metrics_is_replaced_only_if_the_server_does_not_know_it(tmp_path: Path) -> None:
    """A server that knows the registry's keys; it can also close connections without an answer."""
    state = tmp_path / "server"
    state.mkdir(mode=0o700)
    registry = Registry.open(f"sqlite:///{state / 'registry.db'}")
    silent = threading.Event()

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if silent.is_set():
                return
            try:
                registry.keys.authenticate(self.headers["Authorization"].removeprefix("Bearer "))
            except AuthenticationError:
                self.send_response(401)
            else:
                self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    key = tmp_path / "metrics"
    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shell = COMPOSE["services"]["metrics-key"]
        script = shell["command"][0].replace("/keys/metrics", str(key))
        script = script.replace("http://server:8000", f"http://127.0.0.1:{server.server_port}")
        script = script.replace("/var/lib/splitedge/server", str(state))
        path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

        def run() -> str:
            subprocess.run([*shell["entrypoint"], script], env=path, check=True, timeout=60)
            return key.read_text()

        first = run()
        assert first
        assert run() == first
        silent.set()
        assert run() == first
        silent.clear()
        key.unlink()  # the folder of keys is lost, and the registry knows the name
        second = run()
        assert second not in ("", first)
        key.write_text("of a database that is gone\n")
        third = run()
        assert third not in ("", first, second)
        assert run() == third
        assert key.stat().st_mode & 0o777 == 0o644
        server.shutdown()
    registry.close()


def test_grafana_starts_with_the_dashboard() -> None:
    mounts = dict(each.split(":")[:2] for each in COMPOSE["services"]["grafana"]["volumes"])
    inside = {place: DEPLOY / here for here, place in mounts.items() if here.startswith(".")}
    folder = inside["/etc/grafana/provisioning/dashboards"]
    (provider,) = YAML(typ="safe").load(folder / "splitedge.yaml")["providers"]
    (dashboard,) = [
        at for place, at in inside.items() if place.startswith(f"{provider['options']['path']}/")
    ]
    assert json.loads(dashboard.read_text())["panels"]


@pytest.mark.parametrize("kind", ["agent", "server"])
def test_an_image_starts_a_command_of_its_own_as_a_user_without_privileges(kind: str) -> None:
    text = (DEPLOY / f"{kind}.Dockerfile").read_text()
    words = {
        key: json.loads(value)
        for key, value in re.findall(r"^(ENTRYPOINT|CMD) (\[.*\])", text, re.MULTILINE)
    }
    assert words["ENTRYPOINT"] == ["splitedge", kind]
    parse(agent_app if kind == "agent" else server_app, words["CMD"])
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    assert "HEALTHCHECK" in text
    final = text.rpartition("\nFROM ")[2]
    assert "pip install" not in final
    assert ("torch" in text) == (kind == "server")


def test_the_services_of_splitedge_are_commands_of_it_on_loopback_alone() -> None:
    services = COMPOSE["services"]
    for name in ("broker-config", "server"):
        parse(server_app, services[name]["command"])
    script = services["metrics-key"]["command"][0].replace("\\\n", "")
    typed = re.findall(r"splitedge server (.*?) (?:>|\|\|)", script)
    assert len(typed) == 2
    for command in typed:
        parse(server_app, command.split())
    with pytest.raises(Exception, match="No such option"):
        parse(server_app, ["run", "--no-such-option"])
    ports = [port for each in services.values() for port in each.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports), ports


def manifests() -> list[dict[str, Any]]:
    """Every object of deploy/kubernetes."""
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [one for file in files for one in YAML(typ="safe").load_all(file)]


def test_the_pods_of_kubernetes_run_commands_of_splitedge_without_privileges() -> None:
    workloads = [one for one in manifests() if one["kind"] in ("Deployment", "StatefulSet")]
    pods = [one["spec"]["template"]["spec"] for one in workloads]
    assert len(pods) == 4
    commands = []
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            if container["image"] == "splitedge-server" and "args" in container:
                parse(server_app, container["args"])
                commands.append(container["args"][0])
    assert sorted(commands) == ["api", "backend", "broker-config"]


def test_the_objects_of_kubernetes_name_each_other() -> None:
    """Secrets that the document makes, settings, claims, services, and what is scaled."""
    objects = [one for one in manifests() if one["kind"] != "ConfigMap"]
    names = {(one["kind"], one["metadata"]["name"]) for one in manifests()}
    made = (DEPLOY.parent / "docs" / "scaling.md").read_text()
    text = json.dumps(objects)
    for secret in set(re.findall(r'"secret(?:Ref": {"name|Name)": "([\w-]+)"', text)):
        assert f"create secret generic {secret} " in made, secret
    for claim in set(re.findall(r'"claimName": "([\w-]+)"', text)):
        assert ("PersistentVolumeClaim", claim) in names
    for settings in set(re.findall(r'"configMapRef": {"name": "([\w-]+)"', text)):
        assert ("ConfigMap", settings) in names
    for host in set(re.findall(r"@([\w-]+)[:/]", json.dumps(manifests()))):
        assert ("Service", host) in names, host
    (scaler,) = [one for one in objects if one["kind"] == "HorizontalPodAutoscaler"]
    scaled = scaler["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) in names
