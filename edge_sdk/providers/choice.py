"""The execution provider of a bundle: chosen among those that are there, by trials on this device.

    {state}/providers.json    by digest of a bundle: onnxruntime's version, and each trial's outcome

A provider that is not the CPU must give the golden answers, in a process of its own, before it
answers an input. Where onnxruntime has the CPU alone, nothing is tried and nothing is written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from edge_sdk.durable import write_atomic
from edge_sdk.errors import ConfigurationError, StorageError
from edge_sdk.providers.names import AUTO, CPU, NOT_AUTOMATIC

logger = logging.getLogger(__name__)

FILE_NAME: Final = "providers.json"
KEPT_MOST: Final = 30
#: A driver that hangs would cost a minute at each start, and at each switch of bundles.
AGAIN_S: Final = 24 * 3600.0
# a provider that is hardly faster is not worth its memory and its start
FASTER: Final = 0.9
FIXED: Final = "it takes the weights for constants, so personal weights and learning have no effect"


@dataclass(frozen=True, slots=True)
class ProviderTrial:
    """Outcome of a trial by one provider.

    Attributes:
        latency_ms: of the graph `exit`; None if the trial failed.
        why: the failure, for people.
        overrides: whether personal weights and learning reach the graphs; OpenVINO takes weights
            for constants.
        lasting: whether another trial would end alike, so that this one is kept. A library that is
            missing, a driver that is busy or memory that is short may be there the next time.
        again_at: seconds since 1970 when a trial that was not finished in its time is made again;
            None for all other outcomes.
    """

    latency_ms: float | None
    why: str = ""
    overrides: bool = True
    lasting: bool = True
    again_at: float | None = None

    @classmethod
    def read(cls, kept: Any) -> ProviderTrial | None:
        """An outcome as a file has it; None for what is none."""
        if not isinstance(kept, dict):
            return None
        latency_ms, why = kept.get("latency_ms"), kept.get("why", "")
        timed = isinstance(latency_ms, float | int) and latency_ms > 0
        if not isinstance(why, str) or not (timed or (latency_ms is None and why)):
            return None
        again_at = kept.get("again_at")
        if not (again_at is None or isinstance(again_at, float | int)):
            return None
        return cls(latency_ms, why, kept.get("overrides", True) is True, again_at=again_at)

    def to_dict(self) -> dict[str, Any]:
        """The outcome as a file has it."""
        known = {"latency_ms": self.latency_ms, "why": self.why, "overrides": self.overrides}
        return known if self.again_at is None else {**known, "again_at": self.again_at}


def choose_provider(
    wanted: str,
    there: Sequence[str],
    trials_of: Callable[[Sequence[str]], Mapping[str, ProviderTrial]],
    *,
    overrides: bool,
) -> str:
    """The provider to run a bundle by.

    Args:
        wanted: a name, or `auto` for the fastest that passes its trial.
        there: the providers of this onnxruntime.
        trials_of: gives the outcomes of these providers' trials with the bundle.
        overrides: whether weights are replaced as the agent runs: personal ones, or by learning.
    Raises: ConfigurationError if `wanted` is not there.
    """
    check_available(wanted, there)
    asked = [each for each in there if each not in NOT_AUTOMATIC] if wanted == AUTO else [wanted]
    if asked == [CPU]:
        return CPU
    names = list(dict.fromkeys((CPU, *asked)))
    trials = {
        name: replace(each, latency_ms=None, why=FIXED)
        if overrides and not each.overrides
        else each
        for name, each in trials_of(names).items()
    }
    if wanted == AUTO:
        return fastest({name: trials[name] for name in names})
    if trials[wanted].why:
        logger.warning("provider %s: %s; the CPU answers", wanted, trials[wanted].why)
        return CPU
    return wanted


def check_available(wanted: str, there: Sequence[str]) -> None:
    """Check that a provider is in this onnxruntime.

    Raises: ConfigurationError naming what is there.
    """
    if wanted not in (AUTO, *there):
        raise ConfigurationError(
            f"provider {wanted}: this onnxruntime has {', '.join(there)}; install one that has"
            f' {wanted} (docs/providers.md), or take provider = "auto"'
        )


def fastest(trials: Mapping[str, ProviderTrial]) -> str:
    """The provider with the shortest time; the CPU unless another one is clearly faster."""
    times = {name: each.latency_ms for name, each in trials.items() if each.latency_ms is not None}
    others = {name: ms for name, ms in times.items() if name != CPU}
    if not others:
        return CPU
    best = min(others, key=lambda name: others[name])
    return best if CPU not in times or others[best] < FASTER * times[CPU] else CPU


class KeptTrials:
    """The outcomes of a state folder, for one bundle and one onnxruntime.

    Args:
        digest: of the bundle.
        onnxruntime: its version and providers: others ask for new trials.
        attempt: tries a provider.
        asked: name of the provider that the user asks for, whose failure is not kept, unless its
            trial was not finished in its time.
        clock: gives seconds since 1970.
    """

    def __init__(
        self,
        state: Path,
        digest: str,
        onnxruntime: str,
        attempt: Callable[[str], ProviderTrial],
        *,
        asked: str = AUTO,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._state = state
        self._digest = digest
        self._onnxruntime = onnxruntime
        self._attempt = attempt
        self._asked = asked

    def of(self, names: Sequence[str]) -> dict[str, ProviderTrial]:
        """The outcomes of these providers; those that are missing are tried now."""
        everything = _read(self._state)
        trials = self._kept(everything.pop(self._digest, None))
        for name in names:
            if name in trials and self._stands(name, trials[name]):
                continue
            trials[name] = self._attempt(name)
            found = trials[name].why or f"{trials[name].latency_ms:.3f} ms an answer"
            logger.info("provider=%s: %s", name, found)
            # each by itself: the next one may take minutes, or the machine with it
            outcome = {name: each.to_dict() for name, each in trials.items() if each.lasting}
            entry = {self._digest: {"onnxruntime": self._onnxruntime, "trials": outcome}}
            self._write({**dict(list(everything.items())[1 - KEPT_MOST :]), **entry})
        return trials

    def _stands(self, name: str, kept: ProviderTrial) -> bool:
        if kept.again_at is not None:  # longer than that: the clock was set back since
            return 0 < kept.again_at - self._clock() <= AGAIN_S
        return not (kept.why and name == self._asked)

    def _kept(self, entry: Any) -> dict[str, ProviderTrial]:
        """The outcomes that are known; what a file has in another shape is tried again."""
        if not isinstance(entry, dict) or entry.get("onnxruntime") != self._onnxruntime:
            return {}
        trials = entry.get("trials")
        found = trials.items() if isinstance(trials, dict) else ()
        return {name: read for name, each in found if (read := ProviderTrial.read(each))}

    def _write(self, everything: Mapping[str, Any]) -> None:
        raw = orjson.dumps(everything, option=orjson.OPT_INDENT_2)
        try:
            write_atomic(self._state / FILE_NAME, raw)
        except StorageError as err:
            logger.warning("the trials of providers were not saved: %s", err)


def _read(state: Path) -> dict[str, Any]:
    try:
        read = orjson.loads((state / FILE_NAME).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        logger.warning("%s: unreadable, taken as empty (%s)", state / FILE_NAME, err)
        return {}
    return read if isinstance(read, dict) else {}
