"""Files are whole or absent, and folders of a run are what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.training.errors import DataError
from dspark.training.whole_files import read_json, whole_file, write_json


class Broken(Exception):
    pass


def write_and_break(path: Path) -> None:
    with whole_file(path) as partial:
        partial.write_text("two")
        assert path.read_text() == "one"
        raise Broken


def test_a_file_appears_whole(tmp_path: Path) -> None:
    """By renaming what was written elsewhere; until then the old one stands."""
    path = tmp_path / "new" / "file"
    with whole_file(path) as partial:
        partial.write_text("one")
        assert not path.exists()
        node = partial.stat().st_ino
    assert path.stat().st_ino == node
    with pytest.raises(Broken):
        write_and_break(path)
    assert path.read_text() == "one"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_json_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_json(path, {"a": [1, 2]})
    assert read_json(path) == {"a": [1, 2]}
    path.write_text("{")
    with pytest.raises(DataError, match=r"facts\.json: is not JSON"):
        read_json(path)
    path.write_text("[]")
    with pytest.raises(DataError, match="is not a JSON object"):
        read_json(path)
    with pytest.raises(DataError, match=r"nowhere\.json: cannot be read"):
        read_json(tmp_path / "nowhere.json")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"), whole_file(tmp_path / "file" / "x"):
        pass
