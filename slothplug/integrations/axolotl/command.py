"""``axolotl slothplug COMMAND ...``: Axolotl's own command under ``slothplug run``."""

from __future__ import annotations

import sys

import click

from slothplug.cli.run import run


# What follows COMMAND is the command's own, --help too.
@click.command(
    no_args_is_help=True,
    context_settings={"allow_interspersed_args": False},
    short_help="run an axolotl command with use_fast_kernels in its YAML, and no plugins entry",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND CONFIG ...")
def slothplug(command: tuple[str, ...]) -> None:
    """Run an axolotl command that understands use_fast_kernels in its YAML, without an entry under plugins.

    \b
    In the YAML:
        use_fast_kernels: true    # or a mapping of settings
    Then:
        axolotl slothplug train cfg.yml
        axolotl slothplug preprocess cfg.yml
        axolotl slothplug train --help    # the help of train

    It is the same as `slothplug run axolotl COMMAND CONFIG ...`.
    """
    raise SystemExit(run([sys.executable, "-m", "axolotl.cli.main", *command]))
