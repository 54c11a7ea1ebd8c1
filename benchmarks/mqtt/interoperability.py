"""Ten tests of the public MQTT 3.1.1 suite against the embedded broker, and against Mosquitto.

    git clone https://github.com/eclipse-paho/paho.mqtt.testing
    python -m benchmarks.mqtt.interoperability --suite paho.mqtt.testing/interoperability

The suite is `client_test.py` of Eclipse's paho.mqtt.testing, which is not part of this repository.
The broker's policy is opened for it: every client may use every topic. Takes about two minutes.
Writes mqtt-interoperability.json and .md into benchmarks/results/.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer

from benchmarks.mqtt.open_broker import open_broker
from benchmarks.reports import RESULTS, Results, commit, write
from server.bench import brokers

TESTS: Final[Mapping[str, str]] = {
    "testBasic": "basic",
    "test_retained_messages": "retained messages",
    "test_offline_message_queueing": "offline queueing",
    "will_message_test": "will",
    "test_overlapping_subscriptions": "overlapping subscriptions",
    "test_keepalive": "keep-alive",
    "test_redelivery_on_reconnect": "redelivery on reconnect",
    "test_zero_length_clientid": "client id of length zero",
    "test_dollar_topics": "`$` topics",
    "test_unsubscribe": "unsubscribe",
}

# The suite reads its settings from globals of its own module, and prints freely.
_RUNNER: Final = """
import json, sys, unittest
sys.path.insert(0, ".")
import client_test as suite
suite.host, suite.port = "127.0.0.1", int(sys.argv[1])
suite.topics = ("TopicA", "TopicA/B", "Topic/C", "TopicA/C", "/TopicA")
suite.wildtopics = ("TopicA/+", "+/C", "#", "/#", "/+", "+/+", "TopicA/#")
suite.nosubscribe_topics = ("test/nosubscribe",)
passed = {}
for name in sys.argv[2:]:
    result = unittest.TestResult()
    unittest.TestSuite([suite.Test(name)]).run(result)
    passed[name] = result.wasSuccessful()
print("\\n" + json.dumps(passed))
"""

app = typer.Typer(add_completion=False)


def run_suite(suite: Path, port: int) -> dict[str, bool]:
    """Run the suite: which of its tests pass on the broker at that port.

    Raises: RuntimeError with what the suite printed if it does not run.
    """
    ran = subprocess.run(
        [sys.executable, "-c", _RUNNER, str(port), *TESTS],
        cwd=suite,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"{suite}: the suite did not run:\n{ran.stdout}{ran.stderr}")
    passed: dict[str, bool] = orjson.loads(ran.stdout.splitlines()[-1])
    return passed


@app.command()
def main(
    suite: Annotated[Path, typer.Option(help="Folder of the suite's `client_test.py`.")],
    results: Results = RESULTS,
) -> None:
    """Run the suite against both brokers, and write which tests pass.

    Example: python -m benchmarks.mqtt.interoperability --suite paho.mqtt.testing/interoperability
    """
    found: dict[str, dict[str, bool]] = {}
    with open_broker() as port:
        found[brokers.EMBEDDED] = run_suite(suite, port)
    if brokers.find_mosquitto() is not None:
        with tempfile.TemporaryDirectory() as work, brokers.mosquitto(Path(work)) as other:
            found[brokers.MOSQUITTO] = run_suite(suite, other.port)
    report: dict[str, Any] = {
        "command": "python -m benchmarks.mqtt.interoperability --suite DIR",
        "commit": commit(),
        "python": platform.python_version(),
        "passed": found,
    }
    rows = [
        "| test | " + " | ".join(found) + " |",
        "|---|" + "---|" * len(found),
        *(
            f"| {label} | "
            + " | ".join("passes" if passed[name] else "fails" for passed in found.values())
            + " |"
            for name, label in TESTS.items()
        ),
    ]
    sums = ", ".join(
        f"{name} {sum(passed.values())} of {len(passed)}" for name, passed in found.items()
    )
    blocks = [
        "# MQTT 3.1.1 interoperability",
        f"Ten tests of `client_test.py` of Eclipse's paho.mqtt.testing, the policy opened: {sums}.",
        "\n".join(rows),
        f"`{report['command']}`; Python {report['python']}, commit {report['commit']}.",
    ]
    write(results / "mqtt-interoperability", report, blocks)
    typer.echo(sums)


if __name__ == "__main__":
    app()
