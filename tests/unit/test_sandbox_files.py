"""Files of a sandbox: links, loops, fifos and exchanged directories never lead out of its root."""

import itertools
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlagent.errors import SandboxError
from rlagent.sandboxes.files import copy_tree, delete_tree, inside, read_file, write_file

PARTS = st.lists(st.sampled_from(["..", ".", "a", "up", "within", "b.txt", "", "loop"]), min_size=1, max_size=6)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path)


def make_root(directory: Path) -> Path:
    """root/ beside a secret, with links that lead out, within and in a circle."""
    root = directory.resolve() / "root"
    (root / "a").mkdir(parents=True)
    (directory / "secret").write_bytes(b"host")
    (root / "up").symlink_to("..")
    (root / "within").symlink_to("a")
    (root / "loop").symlink_to("loop")
    (root / "a" / "b.txt").write_bytes(b"inside")
    return root


@given(PARTS, st.booleans())
@settings(deadline=None, max_examples=150)
def test_no_path_leads_out(tmp_path_factory: pytest.TempPathFactory, parts: list[str], absolute: bool) -> None:
    directory = tmp_path_factory.mktemp("property")
    root = make_root(directory)
    path = ("/" if absolute else "") + "/".join(parts)
    for call in (lambda: write_file(root, path, b"x"), lambda: read_file(root, path)):
        try:
            call()
        except SandboxError:
            continue
        assert inside(root, path).is_relative_to(root)
    assert sorted(found.name for found in directory.iterdir()) == ["root", "secret"]
    assert (directory / "secret").read_bytes() == b"host"


def test_a_link_within_the_root_is_followed(root: Path) -> None:
    assert read_file(root, "within/b.txt") == b"inside"
    write_file(root, "within/b.txt", b"new")
    write_file(root, "within/deep/er.txt", b"made")
    assert read_file(root, "a/b.txt") == b"new"
    assert read_file(root, "a/deep/er.txt") == b"made"


@pytest.mark.parametrize(("path", "why"), [
    ("up/secret", "outside"), ("loop/x", "loop"), ("a\0b", "null"), ("a" * 5000, "long"), (".", "directory"), ("a", "irectory"),
    ("fifo", "regular|device"), ("none", "No such file"), ("a/b.txt/c", "Not a directory"),
])  # fmt: skip
def test_what_cannot_be_read_or_written_is_said(root: Path, path: str, why: str) -> None:
    os.mkfifo(root / "fifo")
    with pytest.raises(SandboxError, match=why):
        read_file(root, path)
    if path != "none":
        with pytest.raises(SandboxError, match=why):
            write_file(root, path, b"x")


def test_an_upload_does_not_write_through_links_of_the_sandbox(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "up").mkdir(parents=True)
    (source / "up" / "secret").write_bytes(b"overwritten")
    with pytest.raises(SandboxError, match="outside"):
        copy_tree(root, source, ".")
    (root / "file").symlink_to(tmp_path / "secret")
    flat = tmp_path / "flat"
    flat.mkdir()
    (flat / "file").write_bytes(b"overwritten")
    with pytest.raises(SandboxError, match="outside"):
        copy_tree(root, flat, ".")
    assert (tmp_path / "secret").read_bytes() == b"host"


def test_an_upload_keeps_modes_and_empty_directories_and_leaves_links_out(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "run.sh").write_bytes(b"#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("/etc/passwd")
    (source / "linked").symlink_to("/etc")
    copy_tree(root, source, "new/place")
    assert sorted(found.name for found in (root / "new" / "place").iterdir()) == ["empty", "run.sh"]
    assert os.access(root / "new" / "place" / "run.sh", os.X_OK)
    with pytest.raises(SandboxError, match="not a directory"):
        copy_tree(root, tmp_path / "nothing", ".")


def test_a_directory_that_becomes_a_link_in_between_is_not_followed(root: Path, tmp_path: Path) -> None:
    """A writer exchanges `swap` for a link to the host's directory as fast as it can; no call ever lands there."""
    (root / "swap").mkdir()
    done = threading.Event()

    def swap() -> None:
        for number in itertools.count():
            (root / "swap").rename(root / f"kept{number}")
            with suppress(FileExistsError):  # a write made the directory anew
                (root / "swap").symlink_to(tmp_path)
                (root / "swap").unlink()
                (root / "swap").mkdir()
            if done.is_set():
                return

    swapper = threading.Thread(target=swap)
    swapper.start()
    outcomes: set[bytes | None] = set()
    try:
        for _ in range(2000):
            for call in (lambda: write_file(root, "swap/secret", b"inside"), lambda: read_file(root, "swap/secret")):
                try:
                    outcomes.add(call())
                except SandboxError:
                    outcomes.add(b"refused")
    finally:
        done.set()
        swapper.join()
    assert outcomes <= {None, b"inside", b"refused"}
    assert (tmp_path / "secret").read_bytes() == b"host"


def test_deleting_takes_closed_directories_and_follows_no_link(root: Path, tmp_path: Path) -> None:
    (root / "shut" / "in").mkdir(parents=True)
    (root / "shut").chmod(0)
    delete_tree(root)
    assert not root.exists()
    assert (tmp_path / "secret").read_bytes() == b"host"
