"""Write the golden hashes again, after a change that is meant to change bits: python tests/golden/make.py."""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from exact_probe import MODELS, train  # noqa: E402 - found by the line above


def main():
    found = {}
    for model in MODELS:
        for optimizer in ("sgd", "adamw"):
            found[f"{model} {optimizer} whole"] = train(model, optimizer)[0]
            found[f"{model} {optimizer} by shards"] = train(model, optimizer, whole=False)[0]
    (HERE / "exact.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
