"""Documents that hypothesis makes up: trees of JSON, and valid ones of which a part was replaced."""

import copy

from hypothesis import strategies as st

from samebits.errors import UserError

_LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
    | st.sampled_from(["fp32", "ddp", "exact", "..", "/etc/passwd", "a.b:c", "\x1b[2J", "\u202e", "1e400", "9" * 400])
)  # fmt: skip
TREES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _paths(tree, before=()):
    """The path of every part of a tree but the whole."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        yield (*before, key)
        yield from _paths(value, (*before, key))


@st.composite
def changed(draw, tree):
    """A tree of which one or two parts were replaced, left out, or joined by another."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 2))):
        *path, last = draw(st.sampled_from(list(_paths(tree)) or [("x",)]))
        place = tree
        for key in path:
            place = place[key]
        match draw(st.sampled_from(["replace", "leave out", "join"])):
            case "leave out":
                del place[last]
            case "join" if isinstance(place, dict):
                place[draw(st.text(max_size=8))] = draw(TREES)
            case _:
                place[last] = draw(TREES)
    return tree


def refusal(read):
    """The line by which something is refused; empty if it is not."""
    try:
        read()
    except UserError as error:
        return str(error)
    return ""
