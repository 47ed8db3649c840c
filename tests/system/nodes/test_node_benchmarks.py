"""The benchmarks that are measured on machines out of network namespaces."""

import pytest
from node_fixtures import needs_machines

from conftest import smoke

pytestmark = needs_machines


@pytest.mark.parametrize("name", ["nodes", "scale"])
def test_it_still_works(name):
    smoke(name)
