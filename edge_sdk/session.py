"""A session: one ONNX graph, loaded once and run many times. The only importer of onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edge_sdk.errors import BundleError, ConfigurationError, InputError, OutOfMemoryError
from edge_sdk.providers.names import CPU, ORT_NAMES

Array = NDArray[Any]

# from the C++ library, and from the two allocators of onnxruntime
NO_MEMORY: Final = ("bad_alloc", "Failed to allocate memory", "bad allocation")

_NUMPY_OF: Final[dict[str, np.dtype[Any]]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(double)": np.dtype(np.float64),
    "tensor(uint8)": np.dtype(np.uint8),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(int64)": np.dtype(np.int64),
}


class Session:
    """A loaded graph.

    Args:
        path: the ONNX file.
        content: of the file, where it is not to be read; None reads it.
        threads: for one run; 1 keeps a small device responsive and its bits reproducible.
        provider: runs the graph; what it cannot run, the CPU does (edge_sdk.providers).
        quiet: whether onnxruntime keeps failures to itself, where one is an answer: a probe.
    Raises: BundleError if onnxruntime refuses the file; OutOfMemoryError.
    """

    def __init__(
        self,
        path: Path,
        *,
        content: bytes | None = None,
        threads: int = 1,
        provider: str = CPU,
        quiet: bool = False,
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # 4 is fatal, 3 error: overridable initialisers warn in every session
        options.log_severity_level = 4 if quiet else 3
        # the arena never shrinks: with fixed shapes its peak is the working set
        options.enable_mem_pattern = True
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(
                str(path) if content is None else content,
                options,
                providers=_with_cpu(provider, threads),
            )
        except Exception as err:  # onnxruntime's errors have no common base class
            if _is_memory(err):
                raise OutOfMemoryError(
                    f"{path.name}: onnxruntime has no memory to load it: {_first_line(err)}"
                ) from err
            raise BundleError(f"{path.name}: onnxruntime refuses it: {_first_line(err)}") from err
        # onnxruntime takes the CPU in silence where a library of the provider is missing
        if ORT_NAMES[provider] not in self._session.get_providers():
            raise BundleError(
                f"{path.name}: provider {provider} does not start here; are its driver and its"
                " libraries installed?"
            )
        try:
            self.inputs = {node.name: _NUMPY_OF[node.type] for node in self._session.get_inputs()}
        except KeyError as err:
            raise BundleError(f"{path.name}: inputs of {err.args[0]} are not supported") from None
        self.outputs = tuple(node.name for node in self._session.get_outputs())
        initialisers = self._session.get_overridable_initializers()
        self.overridable = {node.name: tuple(node.shape) for node in initialisers}
        self._overrides: dict[str, Array] = {}
        # the bound method saves a lookup on the hot path
        self._run = self._session.run

    def override(self, values: Mapping[str, Array]) -> None:
        """Replace the named initialisers from now on; without values the file's apply again.

        Raises: ConfigurationError for a name or shape that the graph does not have.
        """
        for name, value in values.items():
            expected = self.overridable.get(name)
            if expected is None or tuple(value.shape) != expected:
                known = ", ".join(f"{n} {s}" for n, s in self.overridable.items()) or "none"
                raise ConfigurationError(f"override {name} {value.shape}: this graph takes {known}")
        self._overrides = {
            name: np.ascontiguousarray(value, np.float32) for name, value in values.items()
        }

    @property
    def overrides(self) -> Mapping[str, Array]:
        """The values in place of the file's; empty where the file's apply."""
        return self._overrides

    def run(self, names: Sequence[str] | None, feeds: dict[str, Array]) -> list[Array]:
        """Run the graph once.

        Args:
            names: outputs to return; None returns all.
            feeds: values by input name, with the batch axis.
        Raises: InputError if onnxruntime refuses the feeds; OutOfMemoryError.
        """
        if self._overrides:
            feeds = {**feeds, **self._overrides}
        try:
            outputs: list[Array] = self._run(names, feeds)
        except Exception as err:  # onnxruntime's errors have no common base class
            if _is_memory(err):
                raise OutOfMemoryError(f"onnxruntime: no memory: {_first_line(err)}") from err
            raise InputError(f"onnxruntime: {_first_line(err)}") from err
        return outputs


def available_providers() -> tuple[str, ...]:
    """The providers that this onnxruntime was built with, the CPU among them."""
    there = onnxruntime.get_available_providers()
    return tuple(name for name, known in ORT_NAMES.items() if known in there)


def onnxruntime_version() -> str:
    """Version of onnxruntime, and the providers that it was built with."""
    return f"{onnxruntime.__version__} {','.join(available_providers())}"


def _with_cpu(provider: str, threads: int) -> list[str | tuple[str, dict[str, str]]]:
    """The providers of a session, the first one preferred, with their options."""
    cpu = ORT_NAMES[CPU]
    if provider == CPU:
        return [cpu]
    options = {
        "cuda": {"use_tf32": "0"},  # its products have ten bits, and answers would differ
        "openvino": {"device_type": "CPU", "num_of_threads": str(threads)},
        "xnnpack": {"intra_op_num_threads": str(threads)},  # it has threads of its own
    }
    return [(ORT_NAMES[provider], options.get(provider, {})), cpu]


def _is_memory(err: Exception) -> bool:
    """Whether the error says that memory was missing; onnxruntime has no type for it."""
    return isinstance(err, MemoryError) or any(words in str(err) for words in NO_MEMORY)


def _first_line(err: Exception) -> str:
    return (str(err).splitlines() or [type(err).__name__])[0][:300]
