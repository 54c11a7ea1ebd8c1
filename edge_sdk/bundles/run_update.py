"""Ask for a bundle: run the updater as a short-lived process and read its outcome.

So the agent never imports tuf and cryptography (12 MB), and no failure of an update reaches it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import orjson

Status = Literal["installed", "unchanged", "refused", "unreachable", "no_space", "busy", "stopped"]

Begun = Callable[["subprocess.Popen[bytes]"], None]

# a slow link takes its time; what was fetched till then is kept, and the next update resumes it
TIMEOUT_S: Final = 3600.0
STOPPED: Final = "the updater was stopped before it was done; the next update goes on from there"
MEASURE_STOPPED: Final = "it was stopped before it was done"


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """Result of an update. Unless it is `installed`, the bundle before it keeps running.

    Attributes:
        status: `unchanged`: the assigned bundle is here and whole, or none is assigned;
            `unreachable`: the server is away, or its signed metadata expired; `busy`: another
            update, or a measurement, is under way; `stopped`: a measurement was ended from outside.
        bundle: the one that was asked for; None where the server named none.
        reason: for people; empty when all is well.
        fresh_at: when metadata was last fresh, ISO 8601 UTC; None for never.
        needed_bytes, available_bytes: disk space, where the status is `no_space`.
    """

    status: Status
    bundle: str | None
    reason: str = ""
    fresh_at: str | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None

    def to_json(self) -> bytes:
        """The outcome as one line."""
        return orjson.dumps(asdict(self), option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_json(cls, raw: bytes) -> UpdateOutcome:
        """Read what the updater printed.

        Raises: ValueError, TypeError if it is not an outcome.
        """
        data: dict[str, Any] = orjson.loads(raw)
        return cls(**data)


def run_update(
    state: Path,
    bundle: str | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    begun: Begun | None = None,
) -> UpdateOutcome:
    """Bring the device to `bundle`, or to the one the server assigns it.

    Blocks until the updater is done: call it in a thread that nothing waits for. Never raises
    because of the network, the disk or an answer of the server.

    Args:
        begun: called with the updater's process, which may be terminated at any time: the next
            update goes on from there.
    """
    command = [sys.executable, "-P", "-m", "edge_sdk.bundles.update", "--state", str(state)]
    if bundle is not None:
        command += ["--bundle", bundle]
    try:
        done = _run(command, timeout_s, begun)
        if done.returncode == -signal.SIGTERM:
            return UpdateOutcome("refused", bundle, STOPPED)
        return UpdateOutcome.from_json(done.stdout)
    except subprocess.TimeoutExpired:
        return UpdateOutcome("unreachable", bundle, f"not done after {timeout_s:g} s; run it again")
    except OSError as err:
        return UpdateOutcome("refused", bundle, f"updater cannot be started ({err.strerror})")
    except (ValueError, TypeError):
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        reason = f"updater ended with {done.returncode}: {lines[-1][:300]}"
        return UpdateOutcome("refused", bundle, reason)


def run_measure(
    state: Path,
    bundles: Sequence[str],
    *,
    timeout_s: float = TIMEOUT_S,
    begun: Begun | None = None,
) -> UpdateOutcome:
    """Fetch and measure bundles that this device does not run, and report what they take here.

    Blocks until it is done. Never raises, as `run_update`; `unchanged` where all were measured.

    Args:
        begun: called with the process, which may be terminated at any time.
    """
    command = [sys.executable, "-P", "-m", "edge_sdk.bundles.update", "--state", str(state)]
    for bundle in bundles:
        command += ["--measure", bundle]
    try:
        done = _run(command, timeout_s, begun)
        if done.returncode == -signal.SIGTERM:
            return UpdateOutcome("stopped", None, MEASURE_STOPPED)
        return UpdateOutcome.from_json(done.stdout)
    except subprocess.TimeoutExpired:
        return UpdateOutcome("unreachable", None, f"not done after {timeout_s:g} s")
    except OSError as err:
        return UpdateOutcome("refused", None, f"cannot be started ({err.strerror})")
    except (ValueError, TypeError):
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        return UpdateOutcome("refused", None, f"ended with {done.returncode}: {lines[-1][:300]}")


def _run(
    command: Sequence[str], timeout_s: float, begun: Begun | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end, as `subprocess.run` does, and tell `begun` its process.

    Raises: OSError; subprocess.TimeoutExpired, after the process was killed.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            if begun is not None:
                begun(process)
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)
