"""Names of execution providers: the libraries by which onnxruntime runs a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CPU: Final = "cpu"
AUTO: Final = "auto"

# onnxruntime's names
ORT_NAMES: Final[Mapping[str, str]] = {
    CPU: "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
# builds its engine anew at each start, which takes minutes on a Jetson: only where it is asked for
NOT_AUTOMATIC: Final = ("tensorrt",)
SETTINGS: Final = (AUTO, *ORT_NAMES)
