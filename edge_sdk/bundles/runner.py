"""A loaded bundle: from an input to a verdict, to what an offload sends, and from its reply."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import numpy as np

from edge_sdk.bundles.personal_weights import PersonalWeights
from edge_sdk.errors import InputError
from edge_sdk.gate.gate import Gate, Verdict, gate_from
from edge_sdk.gate.threshold_control import steering_from
from edge_sdk.manifest import BundleManifest
from edge_sdk.offload.offloader import Target
from edge_sdk.session import Array, Session
from edge_sdk.settings import AgentSettings
from edge_sdk.wire.codecs import encode
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import RAW_INPUT, Reply


class Engine:
    """The graphs of one bundle, its gate and what steers it. An update puts another engine in its
    place, between two predictions and not within one.

    Args:
        own: what the device learnt for itself, in place of what the bundle holds of it.
    Raises: BundleError if a graph cannot be loaded; ConfigurationError if the settings or the
        device's own weights and the bundle do not go together.
    """

    def __init__(
        self,
        folder: Path,
        manifest: BundleManifest,
        settings: AgentSettings,
        own: PersonalWeights | None = None,
    ) -> None:
        self.manifest = manifest
        self.class_names = manifest.class_names
        self.gate: Gate = gate_from(manifest.gate, settings.threshold)
        self.steering = steering_from(settings.controller, manifest.gate, self.gate)
        self.codec = settings.codec or manifest.smashed.codec
        self.target = Target(manifest.model, manifest.version)
        sessions = {
            name: Session(folder / graph.file, threads=settings.threads)
            for name, graph in manifest.graphs.items()
        }
        self.personal = None if own is None else own.training
        if own is not None:
            for name, values in own.overrides(manifest).items():
                sessions[name].override(values)
        self._exit = sessions["exit"]
        self._prefix = sessions.get("prefix")
        self._back = sessions.get("back")
        self._outputs = ["logits"] if self._prefix is not None else ["logits", "z"]
        self._shape = manifest.input.shape
        self._dtype = np.dtype(manifest.input.dtype)
        self._floating = self._dtype.kind == "f"
        # the first run allocates; do it before the first caller waits for it
        self._exit.run(self._outputs, {RAW_INPUT: np.zeros((1, *self._shape), self._dtype)})

    def check(self, x: object) -> Array:
        """`x` as the graph takes it.

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
        # one fused pass: a sum of squares is finite unless something in it is not, or is huge;
        # vdot, because dot warns of an overflow
        if self._floating and not math.isfinite(np.vdot(x, x)) and not np.isfinite(x).all():
            raise InputError("input: expected finite values, got NaN or infinity")
        return x

    def exit(self, x: Array) -> tuple[Verdict, Array | None, bool]:
        """One run of the exit graph: the verdict, z where the graph gives it, whether to audit."""
        outputs = self._exit.run(self._outputs, {RAW_INPUT: x[None]})
        z = outputs[1] if len(outputs) > 1 else None
        if self.steering is None:
            return self.gate.judge(outputs[0][0]), z, False
        verdict, audit = self.steering.judge(outputs[0][0])
        return verdict, z, audit

    def smashed(self, x: Array, z: Array | None) -> Tensor:
        """What an offload sends: z, encoded; from `x` where the exit graph gives none.

        Raises: InputError if z is not finite.
        """
        if z is None:
            prefix = cast("Session", self._prefix)
            z = prefix.run(["z"], {RAW_INPUT: x[None]})[0]
        array, parameters = encode(z, self.codec)
        return Tensor(self.manifest.smashed.name, array, parameters)

    def read(self, reply: Reply) -> tuple[int, Array]:
        """Label and probabilities that a reply stands for.

        Raises: InputError if the reply holds something else.
        """
        if self._back is not None:
            name = next(iter(self._back.inputs))
            features = reply.tensors.get(name)
            if features is None:
                raise InputError(f"reply: expected {name}, got {sorted(reply.tensors)}")
            logits = self._back.run(["logits"], {name: features.astype(np.float32)})[0]
            reply = Reply(reply.id, {"logits": logits})
        label, probabilities, _ = self.gate.policy(read_logits(reply, len(self.class_names)))
        return label, probabilities


def read_logits(reply: Reply, classes: int) -> Array:
    """The (classes,) logits of a reply.

    Raises: InputError if it holds none of that shape.
    """
    logits = reply.tensors.get("logits")
    if logits is None or logits.shape != (1, classes):
        got = sorted(reply.tensors) if logits is None else logits.shape
        raise InputError(f"reply: expected logits (1, {classes}), got {got}")
    answer: Array = logits[0]
    return answer
