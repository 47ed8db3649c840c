"""Print the Service and the Job of the least and of the most settings as JSON, for ``tools/check_manifests.py``."""

import json
import sys

from test_kubernetes import LEAST, MOST, made

if __name__ == "__main__":
    json.dump([manifest for settings in (LEAST, MOST) for manifest in made(settings)], sys.stdout)
