"""The segments of a small model from one of its entries to the end, joined into one graph.

A run of a graph costs some microseconds whatever it computes, which is most of the time of a small
model. The joined graphs hold weights a second time, so a model has them only where they are small
(docs/decisions/0080).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from edge_sdk.manifest import ModelManifest

logger = logging.getLogger(__name__)

# of all joined graphs of a model together
JOINED_BYTES: Final = 4_000_000


def joined_suffixes(folder: Path, manifest: ModelManifest) -> dict[int, bytes]:
    """ONNX graphs from an entry to the logits, by entry, for all entries but the deepest.

    Returns: none if they would be larger than JOINED_BYTES together, or cannot be joined.
    """
    files = [folder / "segments" / segment.file for segment in manifest.segments]
    sizes = [file.stat().st_size for file in files]
    # the segment at a place is part of each graph that begins there or before
    copies = sum(size * (at + 1) for at, size in enumerate(sizes)) - sizes[-1]
    if len(files) == 1 or copies > JOINED_BYTES:
        return {}
    import onnx  # noqa: PLC0415 - 6 MB and 0.2 s, which a server of large models can save
    from onnx import checker, compose  # noqa: PLC0415

    segments = [onnx.load(file) for file in files]
    # a graph within a node may name tensors around it, which the joining does not rename
    if any(
        attribute.HasField("g") or attribute.graphs
        for segment in segments
        for node in segment.graph.node
        for attribute in node.attribute
    ):
        return {}
    found: dict[int, bytes] = {}
    try:
        suffix = compose.add_prefix(segments[-1], f"{len(segments) - 1}/")
        for at in reversed(range(len(segments) - 1)):
            segment = compose.add_prefix(segments[at], f"{at}/")
            joint = segment.graph.output[0].name, suffix.graph.input[0].name
            suffix = compose.merge_models(segment, suffix, io_map=[joint])
            found[manifest.segments[at].entry] = suffix.SerializeToString()
    except (ValueError, checker.ValidationError) as err:  # of unlike versions of operators, say
        logger.info("model=%s: its segments run one by one: %s", manifest.name, err)
        return {}
    return found
