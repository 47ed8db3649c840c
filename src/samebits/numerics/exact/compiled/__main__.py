"""Compile the kernels if nobody has yet, and print why they cannot be used, if so."""

import click

from samebits.numerics.exact.compiled.check import start

if why := start():
    click.echo(why)
