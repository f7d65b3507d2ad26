"""The ``slothplug`` command. Each subcommand imports what it needs when it is called, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typer.core import TyperGroup

from slothplug.errors import SlothplugError

Switch = Literal["on", "off", "status"]

USER_ERROR = 2
"""Exit status of a command that was asked for something it cannot do."""


class _Commands(TyperGroup):
    """Shows errors that the user can mend as a sentence, not as a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SlothplugError as error:
            Console(stderr=True).print(f"[red]error:[/red] {str(error).replace('[', chr(92) + '[')}", highlight=False)
            raise typer.Exit(USER_ERROR) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fused kernels for the model you are about to fine-tune.",
)


def _version(asked: bool) -> None:
    if asked:
        import slothplug

        typer.echo(f"slothplug {slothplug.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Fused kernels for the model you are about to fine-tune."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the curves, the picture and the logs.")] = Path(
        "slothplug-demo"
    ),
    steps: Annotated[
        int | None, typer.Option(min=2, help="Optimiser steps of each run; by default a few minutes' worth.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU even where there is a GPU.")] = False,
) -> None:
    """Fine-tune a small Llama with LoRA twice, stock and with the flag, and compare the two runs."""
    from slothplug.cli.demo import run_demo

    run_demo(out, steps=steps, cpu=cpu)


@app.command()
def doctor() -> None:
    """Show versions, the GPU, the backend and the plugins; exit with 1 where training would not work."""
    from slothplug.cli.doctor import run_doctor

    raise typer.Exit(run_doctor())


@app.command()
def verify(
    target: Annotated[str, typer.Argument(help="A model's folder, a config.json, or a model type such as 'llama'.")],
    layers: Annotated[int | None, typer.Option(min=1, help="Build this many layers only (random weights).")] = None,
    lora: Annotated[int, typer.Option(min=0, help="Rank of LoRA adapters on every linear layer; 0 for none.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default the GPU, if any.")] = None,
    draws: Annotated[int, typer.Option(min=2, help="Random batches whose errors are pooled.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Length of the two rows of each batch.")] = 48,
) -> None:
    """Compare a model's loss, logits and every gradient, stock and patched, with a float64 reference."""
    from slothplug.cli.verify import run_verify
    from slothplug.cli.verify_model import Request

    raise typer.Exit(run_verify(Request(target, layers, lora, dtype, device, draws, tokens)))


# What follows COMMAND is the command's own, --help too.
@app.command(
    no_args_is_help=True,
    options_metavar="COMMAND ...",
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
)
def run(ctx: typer.Context) -> None:
    """Run a training command whose Python then understands use_fast_kernels.

    As an argument of a script with TrainingArguments:

        slothplug run python train.py --use_fast_kernels true

        slothplug run torchrun --nproc-per-node 2 train.py --use_fast_kernels

    Settings are a JSON object:

        slothplug run python train.py --use_fast_kernels '{"strict": true, "skip_ops": ["rotary"]}'

    As a line of a YAML, `use_fast_kernels: true`:

        slothplug run axolotl train cfg.yml

        slothplug run trl sft --config sft.yaml
    """
    from slothplug.cli.run import run as run_command

    if not ctx.args:  # after a bare "--"
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(2)
    raise typer.Exit(run_command(ctx.args))


@app.command()
def autoload(
    what: Annotated[Switch, typer.Argument(help="Put the start-up hook in, take it out, or say which it is.")],
) -> None:
    """Serve the flag in every Python process of this environment, so that no command needs a word in front."""
    from slothplug.cli.autoload import run_autoload

    run_autoload(what)


if __name__ == "__main__":
    app()
