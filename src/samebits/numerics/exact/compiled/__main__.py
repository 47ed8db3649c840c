"""Compile the kernels if nobody has yet; print as JSON which devices were tried, and why some have none, with hints."""

import json

import click
import torch

from samebits.numerics.exact.compiled.check import CPU, start

devices = [CPU, torch.device("cuda", 0)] if torch.cuda.is_available() else [CPU]
failed = [(error.message, error.hint) for device in devices if (error := start(device))]
click.echo(json.dumps({"devices": [device.type for device in devices], "failed": failed}))
