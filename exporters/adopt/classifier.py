"""A user's ONNX classifier, read and made ready to be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.manifest import TensorSpec
from edge_sdk.session import Session
from exporters.adopt.graph.answer import (
    are_probabilities,
    classes_of,
    from_probabilities,
    with_logits,
)
from exporters.adopt.graph.graph import MODEL, Graph, part
from exporters.adopt.graph.loading import load_graph, with_open_reshapes
from exporters.adopt.graph.preprocess import Preprocessing, raw_input, with_preprocessing
from exporters.adopt.graph.reading import read_fixed
from exporters.adopt.graph.split import open_session, require_same, takes_batches
from exporters.adopt.operating import require_finite

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Classifier:
    """A graph from raw inputs to logits.

    Attributes:
        path: of the file. graph: preprocessing and model.
        model_input: the tensor that the file takes, behind the preprocessing.
        shape, output: what was given for what the file leaves open.
        batches: whether the graph takes batches; None before that was tried.
    """

    path: Path
    graph: Graph
    model_input: str
    shape: tuple[int, ...] | None = None
    output: str | None = None
    batches: bool | None = None

    @property
    def raw(self) -> TensorSpec:
        """Dtype and shape of one raw input."""
        return raw_input(self.graph)

    def open_file(self) -> Session:
        """A session of the file as it is: the oracle."""
        return open_session(read_fixed(self.path, shape=self.shape, output=self.output))

    @property
    def classes(self) -> int:
        """Number of classes."""
        return classes_of(self.graph)


def load_classifier(
    path: Path,
    preprocessing: Preprocessing | None = None,
    *,
    shape: Sequence[int] | None = None,
    output: str | None = None,
) -> Classifier:
    """Read a classifier.

    Args:
        shape: of one sample, for what the file leaves open.
        output: which of several outputs holds the scores.
    Raises: ExportError naming the tensor or node that stands in the way.
    """
    graph = with_logits(load_graph(path, MODEL, shape=shape, output=output))
    fixed = None if shape is None else tuple(shape)
    plain = Classifier(path, graph, graph.input, fixed, output)
    return prepared(plain, preprocessing or Preprocessing())


def prepared(classifier: Classifier, preprocessing: Preprocessing) -> Classifier:
    """A classifier that had no preprocessing, with one in front.

    Raises: ExportError where it does not fit the model's input.
    """
    return replace(classifier, graph=with_preprocessing(classifier.graph, preprocessing))


def checked(classifier: Classifier, x: Array) -> Classifier:
    """The classifier, once it was seen that the graph answers as the file does, and whether it
    takes batches.

    Args:
        x: (n, ...) raw inputs.
    Raises: ParityError.
    """
    graph = classifier.graph
    session = open_session(part(graph, ("x", graph.input), {"logits": graph.output}, batch=1))
    outputs = [session.run(None, {"x": x[row : row + 1]})[0] for row in range(min(8, len(x)))]
    require_finite(f"logits of the first {len(outputs)} samples", np.concatenate(outputs))
    if are_probabilities(np.concatenate(outputs), rounded=graph.quantised):
        graph = from_probabilities(graph)
    require_same(graph, classifier.model_input, classifier.open_file(), x)
    for form in (graph, with_open_reshapes(graph)):
        if takes_batches(form, x):
            return replace(classifier, graph=form, batches=True)
    return replace(classifier, graph=graph, batches=False)
