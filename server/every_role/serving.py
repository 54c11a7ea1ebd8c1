"""The parts of a process that answer queries: the models, and the engine in front of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Self

from edge_sdk.providers.names import AUTO
from edge_sdk.session import available_providers
from server.backend.batcher import Batcher
from server.backend.inference import Inference
from server.backend.models import ModelStore
from server.backend.provider import provider_of
from server.backend.senders import Senders
from server.deployment.publisher import refuse_used_number
from server.registry.catalogue import ModelCatalogue
from server.settings import ServerSettings
from server.tracing.query_traces import QueryTraces


@dataclass(frozen=True, slots=True)
class Serving:
    """Models and engine of one process, in whichever role; it asks no broker.

    Attributes:
        traces: of queries; None where none are made.
    """

    models: ModelStore
    batcher: Batcher
    inference: Inference
    traces: QueryTraces | None

    @classmethod
    def open(cls, settings: ServerSettings, catalogue: ModelCatalogue) -> Self:
        """The parts over the models in the state folder; nothing is loaded yet.

        Args:
            catalogue: knows the files of each published version, and refuses others.
        Raises: ConfigurationError for a provider that this onnxruntime was not built with.
        """
        traces = None if settings.traces is None else QueryTraces.open(settings.traces)
        models = ModelStore(
            settings.state / "models",
            threads=settings.threads,
            provider=provider_of(settings.provider, available_providers()),
            or_cpu=settings.provider == AUTO,
            check=partial(refuse_used_number, catalogue),
        )
        batcher = Batcher(
            batch_max=settings.batch_max,
            queue_max=settings.queue_max,
            queue_bytes=settings.queue_bytes,
        )
        senders = Senders(settings.limits)
        inference = Inference(models, batcher, settings.batch_max, senders, traces=traces)
        return cls(models, batcher, inference, traces)
