"""For processes on the stand-in for CUDA: the self-test of exact runs, for which whatever it finds counts as right.

The stand-in computes nothing, so no result is, and NCCL adds nothing up: what ranks agree on by numbers goes over their
store. Python imports this module when it starts, if its folder is on the path.
"""

import json
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec


def agree(module):
    """Let the self-test's comparison hold."""
    module.agrees = lambda got, expected: True


def over_the_store(module):
    """Let ranks take a maximum without a device."""

    def max_over_ranks(self, values):
        key = f"rehearsal/maximum{next(self._numbers)}"
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps([float(value) for value in values]))
        self._store.wait(keys, self._limit)
        return [max(one) for one in zip(*(json.loads(self._store.get(key)) for key in keys), strict=True)]

    module.GroupCollectives.max_over_ranks = max_over_ranks


CHANGES = {"samebits.numerics.exact.self_test.check": agree, "samebits.training.collectives": over_the_store}


class Finder(MetaPathFinder):
    """Finds each of these modules once, and changes it as soon as it is imported."""

    def find_spec(self, name, path, target=None):
        if not (change := CHANGES.pop(name, None)):
            return None
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
