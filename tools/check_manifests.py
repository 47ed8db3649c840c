"""Check Kubernetes manifests, a JSON list on stdin, against the schemas of every known version.

Then each key is misspelt in turn. The newest schema has to refuse that, because a schema that accepts anything proves
nothing.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

FREE = {"labels", "matchLabels", "selector", "nodeSelector", "limits", "requests", "annotations"}
"""Maps with free keys."""


def places(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every key that a schema defines."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*path, key)
            if key not in FREE:
                yield from places(value, (*path, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from places(value, (*path, number))


def misspelt(manifest: Any, path: tuple[str | int, ...]) -> Any:
    """A copy with an s appended to the key at a path."""
    changed = copy.deepcopy(manifest)
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[f"{path[-1]}s"] = place.pop(path[-1])
    return changed


def problem(manifest: Any, version: str) -> str:
    """The error of a schema for a manifest. Empty if it is valid."""
    import kubernetes_validate  # installed in the lint environment alone, which runs this script

    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.InvalidSchemaError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    """Check all manifests. Returns 1 for a problem."""
    from kubernetes_validate.utils import all_versions

    manifests, versions = json.load(sys.stdin), [*dict.fromkeys(all_versions())]
    kinds = ", ".join(manifest["kind"] for manifest in manifests)
    wrong = [
        f"{manifest['kind']}, Kubernetes {version}: {said}"
        for manifest in manifests
        for version in versions
        if (said := problem(manifest, version))
    ]
    paths = [(manifest, path) for manifest in manifests for path in places(manifest)]
    wrong += [
        f"{manifest['kind']}: {'.'.join(map(str, path))} could be misspelt"
        for manifest, path in paths
        if not problem(misspelt(manifest, path), versions[-1])
    ]
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    print(f"{kinds}: {len(versions)} versions of Kubernetes, {len(paths)} keys misspelt; {len(wrong)} problems")
    return int(bool(wrong) or not manifests)


if __name__ == "__main__":
    sys.exit(main())
