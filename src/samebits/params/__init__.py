"""params.yaml as typed, frozen objects, refused with one clear line where it is wrong."""

from samebits.params.load import load_params, parse_params, require_every_key, with_num_devices
from samebits.params.schema import Params

__all__ = ["Params", "load_params", "parse_params", "require_every_key", "with_num_devices"]
