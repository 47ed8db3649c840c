"""A file whose shape changes gets another number, by which another version refuses it in words of its own."""

import pytest
import schemas

GOLDEN = schemas.read(schemas.GOLDEN.read_text())


def test_no_shape_changes_without_its_number():
    """What a change makes of the golden file: ``python tests/golden/make.py schemas``."""
    now = schemas.shapes()
    assert list(schemas.faults(GOLDEN, now)) == [], "raise SCHEMA of that class"
    assert {name: number for name, (number, _) in now.items()} == {name: number for name, (number, _) in GOLDEN.items()}


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        (["Part.a: integer", "Part.b?: string"], []),
        (["Part.a: integer", "Part.b?: string", "Part.b?: null"], []),  # another choice
        (["Part.a: integer", "Part.b?: string", "Other.x: integer"], []),  # of another class
        (["Part.a: integer"], ["gone"]),
        (["Part.a: number", "Part.b?: string"], ["gone"]),
        (["Part.a: integer", "Part.b: string"], ["gone", "new"]),  # no longer to be left out
        (["Part.a: integer", "Part.b?: string", "Part.c: integer"], ["new"]),
    ],
)
def test_what_counts_as_a_change(lines, faults):
    before = {"File": (1, ["Part.a: integer", "Part.b?: string"])}
    assert [fault.rpartition(": ")[2] for fault in schemas.faults(before, {"File": (1, lines)})] == faults
    assert list(schemas.faults(before, {"File": (2, lines)})) == []


def test_the_golden_file_is_read_as_it_is_written():
    assert schemas.text_of(GOLDEN) == schemas.GOLDEN.read_text()
