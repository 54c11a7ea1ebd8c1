"""A backend's side of a store: its models and signed bundles, copied into a state folder.

The registry has the last word on a model: `refuse_used_number` checks its files against the digest
that was published, so whoever may write to the store alone cannot put another model in its place.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from edge_sdk.durable import make_folder, storage_error, sync_file, sync_folder, sync_tree
from edge_sdk.errors import StorageError
from server.store.files import StoredFiles
from server.store.index import INDEX_NAME, StoreIndex

logger = logging.getLogger(__name__)


class StoreMirror:
    """Keeps a state folder of its own in line with a store; for one thread."""

    def __init__(self, files: StoredFiles, state: Path) -> None:
        self._files = files
        self._state = state
        self._seen: bytes | None = None
        self._whole: set[str] = set()  # models whose files were all read, or copied

    def refresh(self) -> None:
        """Copy what is new in the store, and delete what it no longer has.

        A model appears in one rename, the timestamp of the signed bundles last. After a power cut,
        what is there under its name is whole, or is copied again by the next process.

        Raises: StorageError; then the next call tries again, with what is there already.
        """
        try:
            self._refresh()
        except OSError as err:
            raise storage_error(self._state, 0, err) from err

    def _refresh(self) -> None:
        raw = self._files.read(INDEX_NAME)
        if raw is None:
            raise StorageError(
                f"{self._files.url}: no {INDEX_NAME} is there; start `splitedge server api` with"
                " the same --artifacts, which writes it"
            )
        if raw == self._seen:
            return
        index = StoreIndex.from_json(raw)
        models = index.models()
        self._forget_models(models)
        for model, files in models.items():
            self._take_model(model, files)
        signed = index.signed()
        for name, digest in signed.items():
            self._take_file(name, digest)
        self._forget_signed(signed)
        self._seen = raw

    def _take_model(self, model: str, files: Mapping[str, str]) -> None:
        folder = self._state / "models" / model
        # a version never changes, and may be large: all of it is read once
        looked = {"model.json"} if model in self._whole else {"model.json", *files}
        if all(_has(folder / file, files.get(file, "")) for file in looked):
            self._whole.add(model)
            return
        shutil.rmtree(folder, ignore_errors=True)
        draft = folder.with_name(f".{folder.name}-copy")
        shutil.rmtree(draft, ignore_errors=True)
        for file, digest in files.items():
            make_folder((draft / file).parent)
            self._files.download(f"models/{model}/{file}", draft / file, digest)
        sync_tree(draft)
        draft.rename(folder)
        sync_folder(folder.parent)
        self._whole.add(model)
        logger.info("model %s: copied from %s", model, self._files.url)

    def _take_file(self, name: str, digest: str) -> None:
        path = self._state / name
        if _has(path, digest):
            return
        make_folder(path.parent)
        draft = path.with_name(f".{path.name}.copy")
        self._files.download(name, draft, digest)
        sync_file(draft)
        draft.replace(path)
        sync_folder(path.parent)

    def _forget_models(self, wanted: Mapping[str, object]) -> None:
        for manifest in (self._state / "models").glob("*/*/model.json"):
            model = "/".join(manifest.parts[-3:-1])
            if model not in wanted and not manifest.parent.name.startswith("."):
                shutil.rmtree(manifest.parent)
                logger.info("model %s: no longer in %s", model, self._files.url)

    def _forget_signed(self, wanted: Mapping[str, object]) -> None:
        for path in (self._state / "tuf").rglob("*"):
            if path.is_file() and path.relative_to(self._state).as_posix() not in wanted:
                path.unlink()


def _has(path: Path, sha256: str) -> bool:
    """Whether a file with that hash is there and can be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False
