"""params.yaml as typed, frozen objects. A wrong file is refused with one clear line."""

from samebits.params.load import (
    load_params,
    parse_params,
    read_yaml,
    require_every_key,
    require_repository,
    with_num_devices,
    write_params,
)
from samebits.params.schema import Params, keys_affecting, values_affecting
from samebits.section import differences, flatten

__all__ = [
    "Params",
    "differences",
    "flatten",
    "keys_affecting",
    "load_params",
    "parse_params",
    "read_yaml",
    "require_every_key",
    "require_repository",
    "values_affecting",
    "with_num_devices",
    "write_params",
]
