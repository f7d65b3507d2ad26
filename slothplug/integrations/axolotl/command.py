"""``axolotl slothplug COMMAND ...``: Axolotl's own command under ``slothplug run``."""

from __future__ import annotations

import sys

import click

from slothplug.cli.run import run


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def slothplug(command: tuple[str, ...]) -> None:
    """run an axolotl command with use_fast_kernels in its YAML and no plugins entry: axolotl slothplug train cfg.yml"""
    raise SystemExit(run([sys.executable, "-m", "axolotl.cli.main", *command]))
