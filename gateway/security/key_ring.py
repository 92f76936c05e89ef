"""The API keys that are in force.

Reads the key file anew when it has changed; a file that cannot be used leaves the last keys in
force, and is logged.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ...cluster.watched_files import WatchedFiles
from ...core.errors import StartupFailed
from .key_file import ApiKey, BadKeyFile, load_keys

log = logging.getLogger(__name__)


class KeyRing:
    """The keys of a file. Raises StartupFailed if it is unusable at the beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = WatchedFiles((path,))
        self._files.have_changed()
        try:
            self._keys = load_keys(path)
        except BadKeyFile as error:
            raise StartupFailed(
                f"--api-keys {path}: {error}", hint="make one: baton keys add --tenant T FILE"
            ) from error

    def current(self) -> tuple[ApiKey, ...]:
        """Those that are in force."""
        if self._files.have_changed():
            try:
                self._keys = load_keys(self._path)
                log.info("API keys were read anew: %d", len(self._keys))
            except BadKeyFile as error:
                log.error("--api-keys %s: %s; the keys read before stay", self._path, error)
                if isinstance(error.__cause__, OSError):  # the file may be right as it is
                    self._files.forget()
        return self._keys
