"""Models on the disk that a server does not serve, because they cannot be loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from edge_sdk.errors import BundleError
from server.backend.models import manifests_in, read_model, serve_model
from server.deployment.publisher import refuse_used_number
from server.registry.catalogue import ModelCatalogue


def unserved(
    models: Path, catalogue: ModelCatalogue, known: Collection[str] = ()
) -> Iterator[tuple[Path, str]]:
    """Folders `NAME/VERSION` whose model a server does not serve, and why; each is loaded.

    Args:
        models: the folder `models` of a server's state.
        known: versions `NAME/VERSION` that are served, and so are not loaded again.
    """
    for manifest in manifests_in(models):
        folder = manifest.parent
        if f"{folder.parent.name}/{folder.name}" in known:
            continue
        try:
            serve_model(read_model(folder, check=partial(refuse_used_number, catalogue)))
        except BundleError as err:
            yield folder, str(err)
