"""A loaded bundle: runs its graphs and its gate, encodes an offload and reads its reply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np

from edge_sdk.answers.input_range import InputRange, range_of
from edge_sdk.answers.tally import AnswerTally
from edge_sdk.bundles.golden import read_golden
from edge_sdk.bundles.personal_weights import PersonalWeights
from edge_sdk.errors import BundleError, FrameError, InputError
from edge_sdk.gate.gate import Decision, Gate, answer_policy, gate_from, largest_uncertainty
from edge_sdk.gate.threshold_control import control_from
from edge_sdk.manifest import BundleManifest
from edge_sdk.offload.pending import Target
from edge_sdk.providers.names import AUTO, CPU
from edge_sdk.session import Array, Session
from edge_sdk.settings import AgentSettings
from edge_sdk.wire.codecs import encode, is_compressed
from edge_sdk.wire.compression import load_compression
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import RAW_INPUT, Reply
from edge_sdk.wire.raw_inputs import encode_raw


class BundleRunner:
    """The graphs of one bundle, its gate and the control of its threshold.

    An update replaces the runner between two predictions, never within one.

    Args:
        personal: the device's personal weights, used in place of the bundle's.
        provider: runs the graphs; None takes the settings', and the CPU for `auto`.
    Attributes:
        provider: the one that runs them.
        tally: histograms of its answers; the agent counts them, under a lock of its own.
    Raises: BundleError if a graph cannot be loaded; ConfigurationError if the settings or the
        personal weights do not fit the bundle.
    """

    def __init__(
        self,
        folder: Path,
        manifest: BundleManifest,
        settings: AgentSettings,
        personal: PersonalWeights | None = None,
        provider: str | None = None,
    ) -> None:
        if provider is None:
            provider = CPU if settings.provider == AUTO else settings.provider
        self.provider = provider
        self.folder = folder
        self.manifest = manifest
        self.class_names = manifest.class_names
        self.gate: Gate = gate_from(
            manifest.gate,
            len(manifest.class_names),
            text=settings.gate,
            threshold=settings.threshold,
        )
        gate = settings.gate or manifest.gate.policy
        self.tally = AnswerTally(largest_uncertainty(gate, len(manifest.class_names)))
        self._answer = answer_policy(manifest.gate)
        self.control = control_from(settings.controller, manifest.gate, self.gate)
        self.codec = settings.codec or manifest.smashed.codec
        self._raw_inputs = settings.raw_inputs and manifest.smashed.raw_input
        if self._raw_inputs or is_compressed(self.codec):
            load_compression()
        self.target = Target(manifest.model, manifest.version)
        own = None if personal is None else personal.fitted(folder, manifest)
        sessions = {
            name: Session(
                folder / graph.file,
                content=None if own is None else own.content.get(name),
                threads=settings.threads,
                provider=provider,
            )
            for name, graph in manifest.graphs.items()
        }
        self.personal = None if personal is None else personal.training
        if own is not None:
            for name, values in own.overrides.items():
                sessions[name].override(values)
        self._exit = sessions["exit"]
        self._prefix = sessions.get("prefix")
        self._back = sessions.get("back")
        self._bottleneck = sessions.get("bottleneck")
        self._sent = manifest.sent[0]
        self._outputs = ["logits"] if self._prefix is not None else ["logits", "z"]
        self._shape = manifest.input.shape
        self._dtype = np.dtype(manifest.input.dtype)
        self._floating = self._dtype.kind == "f"
        self._range = None
        if self._floating:
            self._range = _input_range(manifest, folder)
        # the first run allocates memory: do it before the first prediction
        self._exit.run(self._outputs, {RAW_INPUT: np.zeros((1, *self._shape), self._dtype)})

    def check(self, x: object) -> Array:
        """`x`, if it has the dtype, shape and finite values that the graph takes.

        Raises: InputError naming expected and got.
        """
        if not isinstance(x, np.ndarray):
            expected = f"a numpy array of {self._dtype} {self._shape}"
            raise InputError(f"input: expected {expected}, got {type(x).__name__}")
        if x.shape != self._shape:
            raise InputError(f"input: expected shape {self._shape}, got {x.shape}")
        if x.dtype != self._dtype:
            hint = f"convert it with x.astype({str(self._dtype)!r})"
            raise InputError(f"input: expected dtype {self._dtype}, got {x.dtype}; {hint}")
        # one fused pass: a sum of squares is finite unless a value is not finite, or huge;
        # vdot, because dot warns of an overflow
        if self._floating:
            energy = float(np.vdot(x, x))
            if not math.isfinite(energy) and not np.isfinite(x).all():
                raise InputError("input: expected finite values, got NaN or infinity")
            known = self._range
            if known is not None and (known.young or energy > known.energy_most):
                known.look(x)
        return x

    def exit(self, x: Array) -> tuple[Decision, Array | None, bool]:
        """Run the exit graph once.

        Returns: the gate's decision; z if the exit graph computes it, else None; whether to audit.
        """
        outputs = self._exit.run(self._outputs, {RAW_INPUT: x[None]})
        z = outputs[1] if len(outputs) > 1 else None
        if self.control is None:
            return self.gate.decide(outputs[0][0]), z, False
        decision, audit = self.control.decide(outputs[0][0])
        return decision, z, audit

    def exit_outputs(self, x: Array) -> tuple[Array, Array | None]:
        """The exit graph's logits (classes,) and z (1, ...) of one raw input, without the gate.

        z is None if the exit is a model of its own. Any thread may call it.
        """
        outputs = self._exit.run(self._outputs, {RAW_INPUT: x[None]})
        return outputs[0][0], outputs[1] if len(outputs) > 1 else None

    @property
    def exit_overrides(self) -> Mapping[str, Array]:
        """The values that answer in place of the exit graph's own, by name in the graph."""
        return self._exit.overrides

    def override_exit(self, values: Mapping[str, Array]) -> None:
        """Answer with these values of the exit graph's weights, from the next prediction on.

        Other weights stay as they are. Any thread may call it.

        Raises: ConfigurationError for a name or shape that the graph does not have.
        """
        self._exit.override({**self._exit.overrides, **values})

    def smashed(self, x: Array, z: Array | None) -> Tensor:
        """The encoded smashed data that an offload sends; computed from `x` if z is None.

        If the settings and the bundle allow it, `x` itself, compressed, where that takes fewer
        bytes.

        Raises: InputError if z is not finite.
        """
        if z is None:
            prefix = cast("Session", self._prefix)
            z = prefix.run(["z"], {RAW_INPUT: x[None]})[0]
        if self._bottleneck is not None:
            z = self._bottleneck.run(["b"], {"z": z})[0]
        array, parameters = encode(z, self.codec)
        smashed = Tensor(self._sent, array, parameters)
        if not self._raw_inputs:
            return smashed
        raw = encode_raw(x)
        return raw if raw.array.nbytes < array.nbytes else smashed

    def read(self, reply: Reply) -> tuple[int, Array]:
        """Label and probabilities of a reply.

        Raises: InputError if the reply does not hold the expected tensor.
        """
        if self._back is not None:
            name = next(iter(self._back.inputs))
            features = reply.tensors.get(name)
            if features is None:
                raise InputError(f"reply: expected {name}, got {sorted(reply.tensors)}")
            logits = self._back.run(["logits"], {name: features.astype(np.float32)})[0]
            reply = Reply(reply.id, {"logits": logits})
        label, probabilities, _ = self._answer(read_logits(reply, len(self.class_names)))
        return label, probabilities


def read_logits(reply: Reply, classes: int) -> Array:
    """The (classes,) logits of a reply.

    Raises: InputError if the reply has no logits of that shape.
    """
    logits = reply.tensors.get("logits")
    if logits is None or logits.shape != (1, classes):
        got = sorted(reply.tensors) if logits is None else logits.shape
        raise InputError(f"reply: expected logits (1, {classes}), got {got}")
    answer: Array = logits[0]
    return answer


def _input_range(manifest: BundleManifest, folder: Path) -> InputRange | None:
    """The range of the golden inputs; None where they cannot be read, which the trial judges.

    None too where memory is short: a warning is no reason to give up a bundle.
    """
    try:
        samples, _ = read_golden(folder / manifest.golden)
        return range_of(manifest.bundle, samples)
    except (BundleError, FrameError, MemoryError):
        return None
