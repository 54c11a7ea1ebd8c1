"""Files under one URL, wherever fsspec reaches: a bucket, a share, a folder. The only importer of
fsspec.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import fsspec
from fsspec.core import url_to_fs

from edge_sdk.errors import ConfigurationError, StorageError
from edge_sdk.installation import install_command

BYTES_MOST: Final = 4_000_000_000


class StoredFiles:
    """The files under a URL, by their names, which have `/` between their parts.

    Args:
        url: such as `s3://bucket/prefix` or `file:///mnt/share/splitedge`. Logins come from the
            environment, as the library of each kind reads them.
    Raises: ConfigurationError for a URL that cannot be used.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        if "://" not in url:
            raise ConfigurationError(
                f"--artifacts {url}: expected a URL such as s3://BUCKET/PREFIX or"
                f" file://{Path(url).absolute()}"
            )
        try:
            self._files, self._root = url_to_fs(url)
        except ImportError as err:
            raise ConfigurationError(
                f"--artifacts {url}: a package is missing ({err}); for S3: {install_command('s3')}"
            ) from err
        except ValueError as err:
            known = ", ".join(sorted(fsspec.available_protocols())[:8])
            raise ConfigurationError(
                f"--artifacts {url}: no such kind of URL ({err}); there are {known}..."
            ) from err

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none.

        Raises: StorageError.
        """
        with self._our_errors("read", name):
            try:
                content = self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None
            assert isinstance(content, bytes)
            return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file whole.

        Raises: StorageError.
        """
        with self._our_errors("written", name):
            path = self._path(name)
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, content)

    def upload(self, name: str, file: Path) -> None:
        """Write a file from one on this machine.

        Raises: StorageError.
        """
        with self._our_errors("written", name):
            path = self._path(name)
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(file), path)

    def download(self, name: str, file: Path, sha256: str) -> None:
        """Copy a file to this machine, checked; nothing is there where that fails.

        Args:
            sha256: of its content, in hex.
        Raises: StorageError.
        """
        with self._our_errors("read", name):
            self._files.get_file(self._path(name), str(file))
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != sha256:
            file.unlink()
            raise StorageError(
                f"{self.url}/{name}: its content is not what the index says; it is read again"
            )

    def delete(self, name: str) -> None:
        """Delete a file, if it is there.

        Raises: StorageError.
        """
        with self._our_errors("deleted", name), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _our_errors(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as err:  # each kind of storage raises what its own library does
            raise StorageError(
                f"{self.url}/{name}: cannot be {what} ({type(err).__name__}: {err}); check"
                " --artifacts, its login and its network"
            ) from err
