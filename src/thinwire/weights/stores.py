"""Stores: a directory, or any URL that fsspec knows (S3, GCS, HTTP), in which files appear as a whole."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

import fsspec
from fsspec.implementations.local import LocalFileSystem

from thinwire.checkpoint.durable import make_directory, replace_file
from thinwire.collectives.gateway.keys import Keys
from thinwire.collectives.gateway.process import tls_context
from thinwire.errors import UsageError
from thinwire.weights.parts import Name, run_of

_SILENCE: Final = 60.0
"""Seconds without a connection or a byte after which reading over HTTP fails."""


class Store:
    """Files by name.

    Args:
        url: A directory, or a URL of fsspec. Over HTTP a store can be read, and is listed by its index page.
        keys: Directory of keys that an ``https`` server has, too, and asks for.

    Raises:
        UsageError: The URL is empty, or fsspec does not know it, or the keys cannot be read.
    """

    def __init__(self, url: str | os.PathLike[str], keys: str | os.PathLike[str] | None = None) -> None:
        self.url = os.fspath(url)
        options: dict[str, Any] = {}
        if keys is not None:
            if not self.url.startswith("https://"):
                raise UsageError(f"keys = {os.fspath(keys)!r} are for servers: store = {self.url!r} is no https URL")
            read = Keys.read(os.fspath(keys))
            options["ssl"] = tls_context(ssl.PROTOCOL_TLS_CLIENT, str(read.certificate), str(read.key))
        try:
            if not self.url:
                raise ValueError("it is empty")
            if self.url.startswith(("http://", "https://")):
                options["client_kwargs"] = {"timeout": _patience()}
            self._files, self._root = fsspec.core.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            raise UsageError(f"store = {self.url!r}: {error}; give a directory, or a URL that fsspec knows") from error
        self._is_local = isinstance(self._files, LocalFileSystem)
        self._root = self._root.rstrip("/")

    def checked(self) -> Self:
        """The store, which is a directory or may become one.

        Raises:
            UsageError: It is a file.
        """
        if self._is_local and os.path.isfile(self._root):  # noqa: PTH113  (raises nothing where it may not look)
            raise UsageError(f"store = {self.url!r} is a file; give a directory, or a URL that fsspec knows")
        return self

    def names(self) -> list[Name]:
        """Names of all parts; none if the store is not there yet. Other files do not count."""
        return sorted(name for text in self._texts() if (name := Name.read(text)) is not None)

    def _texts(self) -> list[str]:
        self._files.invalidate_cache(self._root)
        try:
            with self._answering():
                found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def read(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            OSError: It is not there, or cannot be read.
        """
        with self._answering():
            content: bytes = self._files.cat_file(f"{self._root}/{name}")
            return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file, which others see as a whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        if not self._is_local:
            self._files.pipe_file(f"{self._root}/{name}", content)
            return
        make_directory(Path(self._root))
        replace_file(Path(self._root) / name, content)

    def remove(self, name: str) -> bool:
        """Remove a file; returns whether it was there.

        Raises:
            OSError: It cannot be removed.
        """
        path = f"{self._root}/{name}"
        if not self._files.exists(path):
            return False
        self._files.rm_file(path)
        return True

    def remove_before(self, run: str) -> None:
        """Remove the files of earlier runs, and drafts of them, which writers that were killed have left.

        Raises:
            OSError: One cannot be removed.
        """
        for text in self._texts():
            if "" < run_of(text) < run:
                self.remove(text)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Errors of the libraries that fsspec calls are of kinds of their own."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {type(error).__name__}: {error}") from error


def _patience() -> Any:
    """A limit on silence, and none on the whole of a request, as a part may take long over a thin link."""
    fsspec.get_filesystem_class("http")  # says what is to be installed
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
