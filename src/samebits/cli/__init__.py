"""The ``samebits`` command."""

from __future__ import annotations

from samebits.errors import exit_on_error


def main() -> None:
    """Run the command, and end the process with its exit code."""
    with exit_on_error():  # also the imports, which take a second on a busy host
        from samebits.cli.commands import main as command

        command(prog_name="samebits")
