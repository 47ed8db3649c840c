"""What all command lines share."""

import os
from importlib import import_module
from pathlib import Path

from samebits.errors import UserError

HELP_OPTIONS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of every click command."""


def enter_container() -> None:
    """Go on in the image if stages run there (``samebits.container.stage``), or come back.

    It is called by its module's name, so that nothing which trains depends on it: ``host.json`` has the image.
    """
    import_module("samebits.container.stage").enter()


def require_repository() -> None:
    """Refuse to work where no pipeline is: the local store would be made in the wrong folder.

    Raises:
        UserError: there is no params.yaml here.
    """
    if not Path("params.yaml").exists() and "MLFLOW_TRACKING_URI" not in os.environ:
        raise UserError(f"{Path.cwd()} has no params.yaml", hint="run this at the root of the repository")
