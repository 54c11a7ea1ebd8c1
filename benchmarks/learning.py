"""Exit heads that learn on the device: their answers before and after a change of lighting.

    python -m benchmarks.learning --data DIR

cnn6 learns from Fashion-MNIST in plain light. Then the light falls from the left and is dim, for
all images that the device sees. Its exit head learns from a user who corrects one answer in ten, or
from the answers of a real server to the inputs that its gate offloads, without any label. Figures
are of test images that were neither in the stream nor learnt from. The report goes to
benchmarks/results/.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.reports import RESULTS, Data, Results, made_by, provenance, write
from edge_sdk import AgentSettings, EdgeAgent, api
from edge_sdk.bundles.lifecycle import FixedBundle
from edge_sdk.bundles.run_update import run_update
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.learning.learner import QUEUE_MOST, HeadLearner
from edge_sdk.manifest import BundleManifest
from edge_sdk.nets import Supernet, build
from edge_sdk.settings import Learn
from edge_sdk.training.data.load import Dataset, load_dataset
from exporters.model import export_model
from profiles.reference import load_reference
from server.processes import ServerProcess
from server.tokens import create_token

BACKBONE: Final = "cnn6"
DEPTHS: Final = (2, 3)
TRAINED: Final = 12_000
EPOCHS: Final = 3
BATCH: Final = 64
STREAM: Final = 3000
TESTED: Final = 4000
CORRECT_EVERY: Final = 10
AMBIENT: Final = 20.0
ALWAYS_EXIT: Final = 1e9

Array = NDArray[Any]
app = typer.Typer(add_completion=False)


@app.command(epilog="Example: python -m benchmarks.learning --data data")
def main(data: Data = None, results: Results = RESULTS) -> None:
    """Measure learning on the device, and write the report."""
    torch.set_num_threads(1)
    shared = os.environ.get("SPLITEDGE_SHARED", Path(__file__).parents[2] / "shared")
    dataset = load_dataset("fashion-mnist", data or Path(shared) / "data")
    net = trained(dataset)
    rows = []
    with TemporaryDirectory() as name:
        for depth in DEPTHS:
            rows += measure(net, dataset, depth, Path(name) / str(depth))
    about = {"command": "python -m benchmarks.learning", **provenance()}
    report = about | {
        "stream": STREAM,
        "tested": TESTED,
        "load": [round(value, 1) for value in os.getloadavg()],
        "rows": rows,
    }
    blocks = blocks_of(report)
    write(results / "learning-fashion-mnist", report, blocks)
    print("\n\n".join(blocks))


def relit(x: Array) -> Array:
    """Images (n, 1, 28, 28) uint8 in dim light from the left, with a little light everywhere."""
    side = np.linspace(0.15, 0.6, x.shape[-1], dtype=np.float32)
    lit: Array = np.clip(x * side + AMBIENT, 0, 255).astype(np.uint8)
    return lit


def trained(dataset: Dataset) -> Supernet:
    """The backbone, with all its exits, trained on images in plain light."""
    net = build(BACKBONE, mean=dataset.mean, std=dataset.std, seed=0)
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    random = np.random.default_rng(0)
    for _ in range(EPOCHS):
        order = random.permutation(TRAINED)
        for start in range(0, TRAINED, BATCH):
            rows = order[start : start + BATCH]
            x, y = torch.from_numpy(dataset.x_train[rows]), torch.from_numpy(dataset.y_train[rows])
            exits, logits = net.forward_exits(x)
            losses = [torch.nn.functional.cross_entropy(each, y) for each in exits.values()]
            loss = sum(losses, torch.nn.functional.cross_entropy(logits, y))
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimiser.step()
    return net.eval()


def measure(net: Supernet, dataset: Dataset, depth: int, work: Path) -> list[dict[str, Any]]:
    """The rows of one depth: corrections, and the answers of a server."""
    state = work / "server"
    export_model(
        net,
        dataset.x_train[TRAINED : TRAINED + 2000],
        dataset.y_train[TRAINED : TRAINED + 2000],
        state / "models",
        name="garments",
        version=1,
        class_names=dataset.class_names,
        depths=(depth,),
        int8="never",
    )
    bundle = state / "models" / "garments" / "1" / "bundles" / f"d{depth}"
    stream, labels = relit(dataset.x_test[:STREAM]), dataset.y_test[:STREAM]
    plain, y = dataset.x_test[-TESTED:], dataset.y_test[-TESTED:]
    test = relit(plain)
    with torch.no_grad():
        server = net(torch.from_numpy(test)).argmax(1).numpy()
    manifest = BundleManifest.load(bundle)
    untouched = BundleRunner(bundle, manifest, AgentSettings(offload=False))
    before = scores(untouched, test, y, server)
    base = {
        "depth": depth,
        "server_accuracy": float((server == y).mean()),
        "plain_light_accuracy": scores(untouched, plain, y, server)["accuracy"],
        "before": before,
    }
    outcomes = {
        "corrections": correct(bundle, stream, labels, (test, y, server)),
        "server": distil(bundle, work, stream, (test, y, server)),
    }
    return [
        {**base, "labels": how, "after": after, "report": report, "seconds": seconds}
        for how, (after, report, seconds) in outcomes.items()
    ]


Tested = tuple[Array, Array, Array]
Outcome = tuple[dict[str, float], dict[str, Any], float]


def correct(bundle: Path, stream: Array, labels: Array, tested: Tested) -> Outcome:
    """A device without a server, whose user corrects one answer in ten."""
    settings = AgentSettings(offload=False)
    runner = BundleRunner(bundle, BundleManifest.load(bundle), settings)
    learner = HeadLearner(Learn("corrections"), lambda: runner)
    start = time.perf_counter()
    with EdgeAgent(FixedBundle(runner), settings, observers=[learner]) as agent:
        for place, x in enumerate(stream):
            answer = agent.predict(x)
            if place % CORRECT_EVERY == 0:
                agent.correct(answer.id, int(labels[place]))
            if place % (CORRECT_EVERY * QUEUE_MOST // 2) == 0:
                settle(agent)
        settle(agent)
        report = dict(agent.status().reports["learning"])
    return scores(runner, *tested), report, time.perf_counter() - start


def distil(bundle: Path, work: Path, stream: Array, tested: Tested) -> Outcome:
    """A device that learns from a real server's answers to what its gate offloads."""
    server, device = ServerProcess(work / "server"), work / "device"
    server.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))
    try:
        profile = load_reference("raspberry-pi-4")
        api.enroll(
            server.http, create_token(work / "server"), device, profile=profile, name="device"
        )
        run_update(device, BundleManifest.load(bundle).bundle)
        learn = Learn("server")
        start = time.perf_counter()
        with EdgeAgent.open(device, AgentSettings(deadline_s=10.0, learn=learn)) as agent:
            waiting = 0
            for x in stream:
                waiting += agent.predict(x).source == "server"
                if waiting == QUEUE_MOST // 2:
                    settle(agent)
                    waiting = 0
            settle(agent)
            report = dict(agent.status().reports["learning"])
        seconds = time.perf_counter() - start
        settings = AgentSettings(threshold=ALWAYS_EXIT, learn=learn)
        with EdgeAgent.open(device, settings) as agent:  # the head that was kept
            after = compared([agent.predict(x).label for x in tested[0]], *tested[1:])
    finally:
        server.stop()
    return after, report, seconds


def settle(agent: EdgeAgent) -> None:
    """Wait until the learning thread has come to rest."""
    turns = -1
    while turns != (now := agent.status().reports["learning"]["turns"]):
        turns = now
        time.sleep(0.6)  # longer than a turn and its pause


def scores(runner: BundleRunner, x: Array, y: Array, server: Array) -> dict[str, float]:
    """Accuracy of the exit head, and its agreement with the server's whole network."""
    return compared([runner.exit(each)[0].label for each in x], y, server)


def compared(answers: Sequence[int], y: Array, server: Array) -> dict[str, float]:
    """The share of answers that are right, and that are the server's."""
    found = np.asarray(answers)
    return {"accuracy": float((found == y).mean()), "agreement": float((found == server).mean())}


def blocks_of(report: dict[str, Any]) -> list[str]:
    """The report as text."""
    percent: Callable[[float], str] = lambda share: f"{100 * share:.1f} %"  # noqa: E731 - as short
    lines = [
        (
            "| depth | labels | exit, plain light | exit before | exit after | server"
            " | agreement with the server before | after | labelled | dropped | turns |"
        ),
        "| --- " * 11 + "|",
    ]
    for row in report["rows"]:
        before, after, own = row["before"], row["after"], row["report"]
        labelled = own["corrections"] if row["labels"] == "corrections" else own["server_answers"]
        lines.append(
            f"| {row['depth']} | {row['labels']} | {percent(row['plain_light_accuracy'])}"
            f" | {percent(before['accuracy'])} | {percent(after['accuracy'])}"
            f" | {percent(row['server_accuracy'])} | {percent(before['agreement'])}"
            f" | {percent(after['agreement'])} | {labelled} | {own['drops']} | {own['turns']} |"
        )
    return [
        "# Learning on the device: a change of lighting on Fashion-MNIST",
        f"{made_by(report)} Load {report['load'][0]}: other jobs ran at the same time.",
        (
            f"`{BACKBONE}` learnt from {TRAINED} images in plain light, {EPOCHS} epochs. The device"
            f" then sees {report['stream']} images in dim light from the left. `corrections`: its"
            f" user gives the label of one answer in {CORRECT_EVERY}. `server`: no labels; it"
            " learns from a real server's answers to the inputs that its gate offloads. Accuracy"
            f" is of the exit head alone, on {report['tested']} other test images in that light. A"
            " dropped head did worse than the bundle's on held-out samples of the device, and was"
            " learnt again from the bundle's."
        ),
        "\n".join(lines),
    ]


if __name__ == "__main__":
    app()
