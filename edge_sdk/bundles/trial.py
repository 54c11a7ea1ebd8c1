"""The trial of a bundle: it runs in a process of its own, under limits, and cannot crash the agent.

`python -P -m edge_sdk.bundles.trial PARENT_PID PROVIDER FOLDER [OTHER]` prints one line of JSON,
either `{"ok": true, ...}` with the golden report and what the bundle takes here, or `{"ok": false,
"why": ...}`. The bundle in OTHER is timed beside it, in turns. It ends with its parent.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from edge_sdk.errors import (
    BundleError,
    FrameError,
    InputError,
    OutOfMemoryError,
    StorageError,
    TrialTimeoutError,
    UpdateRefusedError,
    WrongAnswersError,
)
from edge_sdk.processes.end_with_parent import end_with_parent
from edge_sdk.providers.names import CPU
from profiles.measured import BundleMeasurement

TIMEOUT_S: Final = 60.0
# TensorRT builds an engine, which takes minutes on a Jetson
SLOW_S: Final = 900.0
# Address space, not memory: onnxruntime reserved 190 MB before its first model on 2 cores, and
# reserves more with more cores; a model is mapped, parsed and packed, so add three times its size.
BASE_BYTES: Final = 1 << 30
PER_MODEL_BYTE: Final = 3


# the agent runs a graph on one thread, so the speed of one core is measured too
_ONE_THREAD: Final = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True)
class TrialReport:
    """Result of a trial.

    Attributes:
        samples, difference: of the golden check, see `edge_sdk.bundles.golden.GoldenReport`.
        measurement: what the bundle takes on this device.
        beside: the same of another bundle, whose memory is not to be relied on: it was loaded
            second; None if there was none.
        overrides: whether other weights reach the loaded graphs (golden.takes_overrides).
    """

    samples: int
    difference: float
    measurement: BundleMeasurement
    beside: BundleMeasurement | None = None
    overrides: bool = True


def run_trial(
    folder: Path,
    beside: Path | None = None,
    *,
    provider: str = CPU,
    timeout_s: float | None = None,
) -> TrialReport:
    """Check and measure the bundle in `folder` in a child process.

    Args:
        beside: folder of another bundle to time in turns with it.
        provider: runs its graphs.
        timeout_s: None takes TIMEOUT_S, or SLOW_S for a provider that builds its own engine.
    Raises: UpdateRefusedError saying why the bundle cannot run, as WrongAnswersError if it runs and
        misses its golden answers; OutOfMemoryError; StorageError if the child process cannot be
        started.
    """
    if timeout_s is None:
        timeout_s = SLOW_S if provider == "tensorrt" else TIMEOUT_S
    folders = [str(path) for path in (folder, beside) if path is not None]
    command = [sys.executable, "-P", "-m", "edge_sdk.bundles.trial", str(os.getpid()), provider]
    environment = {**os.environ, **_ONE_THREAD}
    try:
        done = subprocess.run(
            [*command, *folders],
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise TrialTimeoutError(f"trial: not finished after {timeout_s:g} s") from None
    except OSError as err:
        raise StorageError(f"trial: cannot be started ({err.strerror}); try again later") from err
    if done.returncode == -signal.SIGKILL:  # what fails by itself ends by other signals
        raise OutOfMemoryError(f"trial: {_death(done)}, as the system does where memory is short")
    try:
        report = orjson.loads(done.stdout)
    except orjson.JSONDecodeError:
        raise UpdateRefusedError(f"trial: {_death(done)}") from None
    if not report["ok"]:
        kind = OutOfMemoryError if report.get("memory") else UpdateRefusedError
        if report.get("answers"):
            kind = WrongAnswersError
        raise kind(f"trial: {report['why']}")
    measurement, *others = map(BundleMeasurement.from_dict, report["measurements"])
    return TrialReport(
        int(report["samples"]),
        float(report["difference"]),
        measurement,
        others[0] if others else None,
        bool(report["overrides"]),
    )


def main() -> None:
    """Set resource limits, then load and run the bundle."""
    end_with_parent(int(sys.argv[1]), signal.SIGKILL)
    provider, *folders = sys.argv[2], *map(Path, sys.argv[3:])
    _limit(folders, provider)
    try:
        report = {"ok": True, **_try(provider, *folders)}
    except MemoryError as err:
        report = {"ok": False, "why": str(err) or "out of memory", "memory": True}
    except (BundleError, InputError, FrameError) as err:
        wrong = isinstance(err, UpdateRefusedError)  # as the golden check raises it, and no other
        report = {"ok": False, "why": str(err), "answers": wrong}
    sys.stdout.buffer.write(orjson.dumps(report))


def _try(provider: str, folder: Path, *others: Path) -> dict[str, Any]:
    # imported under the limits, and never by the parent process
    from edge_sdk.bundles.golden import check_golden, read_golden, takes_overrides  # noqa: PLC0415
    from edge_sdk.bundles.measure import BundleMeter, measure_in_turns  # noqa: PLC0415
    from edge_sdk.manifest import BundleManifest  # noqa: PLC0415
    from profiles.device import measure_compute_score_gflops  # noqa: PLC0415

    manifest = BundleManifest.load(folder)
    x, _ = read_golden(folder / manifest.golden)
    score_gflops = measure_compute_score_gflops()
    meter = BundleMeter(folder, manifest, x[:1], provider)
    golden = check_golden(folder, meter.sessions)
    overrides = provider == CPU or takes_overrides(folder, manifest, meter.sessions, x[:1])
    beside = [BundleMeter(other, BundleManifest.load(other), x[:1], provider) for other in others]
    measured = measure_in_turns([meter, *beside], score_gflops)
    return {
        **asdict(golden),
        "overrides": overrides,
        "measurements": [each.to_dict() for each in measured],
    }


def _limit(folders: Sequence[Path], provider: str) -> None:
    model_bytes = sum(path.stat().st_size for folder in folders for path in folder.iterdir())
    if provider == CPU:  # others reserve address space by the gigabyte: a driver's, a compiler's
        _lower(resource.RLIMIT_AS, BASE_BYTES + PER_MODEL_BYTE * model_bytes)
        _lower(resource.RLIMIT_CPU, int(TIMEOUT_S))  # ends a child that outlives its parent
    else:
        _lower(resource.RLIMIT_CPU, int(SLOW_S) * (os.cpu_count() or 1))
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _death(done: subprocess.CompletedProcess[bytes]) -> str:
    """The end of the child process in words, with the last line it printed."""
    if done.returncode < 0:
        how = f"killed by {signal.Signals(-done.returncode).name}"
    else:
        how = f"ended with {done.returncode}"
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"{how}: {lines[-1][:300]}" if lines else how


if __name__ == "__main__":
    main()
