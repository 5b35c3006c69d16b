from __future__ import annotations

import os
import tarfile

import pytest

from regrow.errors import UsageError
from regrow.multihost.package import packed


def test_a_folder_is_packed_without_what_nobody_needs(tmp_path):
    for path in ("a.py", "sub/b.py", ".git/config", "sub/__pycache__/c.pyc", "data/big", "x.log"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / "link").symlink_to("a.py")
    with packed(tmp_path, ["data", "*.log"]) as package:
        assert package.files == 2
        # Each reader has a position of its own.
        for _ in range(2):
            with package.reader() as reader, open(reader, "rb", closefd=False) as file:
                with tarfile.open(fileobj=file) as archive:
                    names = archive.getnames()
                assert os.fstat(reader).st_size == package.size
        assert sorted(names) == [".", "./a.py", "./link", "./sub", "./sub/b.py"]


def test_what_is_no_folder(tmp_path):
    with pytest.raises(UsageError, match="there is no such folder"), packed(tmp_path / "nowhere"):
        pass
