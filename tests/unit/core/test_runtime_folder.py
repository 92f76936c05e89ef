"""Folders for sockets: leftovers of killed processes are removed, those of live ones are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.process.runtime_folder import RuntimeFolder

KILLED = """
import os, signal
from baton.core.process.runtime_folder import RuntimeFolder
folder = RuntimeFolder.make("baton-x-")
(folder.path / "redis.sock").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path, as pytest's are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="b-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_a_killed_process_s_folder_goes_with_the_next_that_is_made(root: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED]).returncode < 0
    (left,) = names(root)
    with RuntimeFolder.make("baton-y-"):
        assert left in names(root)
    with RuntimeFolder.make("baton-x-") as one, RuntimeFolder.make("baton-x-") as other:
        assert names(root) == {one.path.name, other.path.name}
        assert one.path.stat().st_mode & 0o777 == 0o700
    assert names(root) == set()


def test_a_folder_that_was_removed_is_made_again_and_is_nobody_else_s(root: Path) -> None:
    with RuntimeFolder.make("baton-x-") as one:
        (one.path / "redis.sock").touch()
        one.restore()
        assert names(one.path) == {"redis.sock"}, "it was there"
        shutil.rmtree(root)
        one.restore()
        assert one.path.stat().st_mode & 0o777 == 0o700
        with RuntimeFolder.make("baton-x-"):
            assert one.path.exists(), "it is locked again"
        one.path.rmdir()
        one.path.mkdir(mode=0o700)
        with pytest.raises(FileExistsError):
            one.restore()  # its owner might read the sockets
    assert names(root) == set()


def test_what_is_no_folder_of_ours_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = root / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (root / "baton-x-link").symlink_to(precious)
    (root / "baton-x-file").touch()
    foreign = root / "baton-x-foreign"
    foreign.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: os.stat(root).st_uid + 1)
    RuntimeFolder.make("baton-x-").remove()
    monkeypatch.undo()
    assert names(root) == {"precious", "baton-x-link", "baton-x-file", "baton-x-foreign"}
    assert names(precious) == {"file"}


def test_a_folder_that_was_swept_before_it_was_locked_is_made_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open, paths = os.open, []

    def swept(path: Path, flags: int) -> int:
        paths.append(path)
        lock = -1 if len(paths) == 1 else really_open(path, flags)
        if len(paths) < 3:
            path.rmdir()
        if lock < 0:
            raise FileNotFoundError(path)
        return lock

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", swept)
        folder = RuntimeFolder.make("baton-x-")
    assert folder.path == paths[2] and names(root) == {folder.path.name}
    folder.remove()


def test_a_root_that_is_too_long_for_sockets_is_not_taken(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = root / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with RuntimeFolder.make("baton-x-") as folder:
        assert folder.path.parent != long
