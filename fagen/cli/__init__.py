"""The command line. Each command lives in a module that is imported when the command runs, so that `fagen --help` and
a mistyped flag answer at once; only commands that compute import torch.

Results go to standard output, everything else to standard error; with `--json`, standard output is one JSON document.
Exit codes: 0, 1 for a failed build or check, 2 for bad input, 130 after Ctrl-C.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fagen import __version__
from fagen.cli.options import MODS_HELP
from fagen.errors import FagenError, SpecError, ToolchainError

# Name of the command: where it is, and the line that describes it.
COMMANDS = {
    "build": ("fagen.cli.build:build", "Build kernels, or find them in the cache."),
    "bundle": ("fagen.cli.bundle:bundle", "Put built kernels into one file, for machines without a compiler."),
    "check": ("fagen.cli.check:check", "Run kernels and compare them with a float64 reference."),
    "trace": ("fagen.cli.trace:trace", "Find the first intermediate of a kernel that departs from float64."),
    "watch": ("fagen.cli.watch:watch", "Build, run and judge kernels again whenever a template is saved."),
    "show": ("fagen.cli.show:show", "Print the generated source of a kernel."),
    "inspect": ("fagen.cli.inspect:inspect", "Say what kernels cost: registers, occupancy, instructions."),
    "tune": ("fagen.cli.tune:tune", "Find the fastest tiles of kernels on this GPU, for load to use."),
    "list": ("fagen.cli.artifacts:list_artifacts", "List the built kernels."),
    "why": ("fagen.cli.why:why", "Say why a kernel would be built again, or not."),
    "clean": ("fagen.cli.artifacts:clean", "Remove built kernels."),
    "doctor": ("fagen.cli.doctor:doctor", "Say what this machine can build and run, and what is missing."),
    "bench": ("fagen.cli.bench:bench", "Measure compile times, or the speed of kernels on a GPU."),
}

EXAMPLES = {
    "build": "fagen build --head-dim 64,128 --both causal --softcap --arch sm80,sm90",
    "bundle": "fagen bundle variants.toml -o kernels.zip",
    "check": "fagen check --head-dim 128 --causal --softcap --seqlen-q 300 --seqlen-k 512",
    "trace": "fagen trace --head-dim 64 --causal --softcap --emulate",
    "watch": "fagen watch --head-dim 128 --causal --emulate",
    "show": "fagen show --head-dim 128 --softcap | less",
    "inspect": "fagen inspect --head-dim 128 --causal --diff '--head-dim 128'",
    "tune": "fagen tune --head-dim 128 --causal --seqlen 4096,16384",
    "clean": "fagen clean --older-than 30d --keep-size 2G",
    "why": "fagen why --head-dim 128 --softcap",
    "bench": "fagen bench --compile",
}

# Some releases of typer carry their own click, others use the package; its errors share these bases in both.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_INTERRUPTED = 130


class _PlainFlags:
    """Keeps the help of a flag that takes no value from showing one: some releases of typer print `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_PlainFlags, TyperCommand):
    """One command."""


class _Commands(_PlainFlags, TyperGroup):
    """Lists the commands from COMMANDS, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, load(name) if stub is not None and name in COMMANDS else stub, rest


def _stub() -> None:
    """Stands in the listing for a command that is not imported."""


def load(name: str) -> Any:
    """The command called `name`, with its flags."""
    place, line = COMMANDS[name]
    module, function = place.split(":")
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    epilog = f"Example: {EXAMPLES[name]}" if name in EXAMPLES else None
    register = single.command(name, cls=_Command, help=line, epilog=epilog, context_settings=_SETTINGS)
    command = getattr(import_module(module), function)
    register(getattr(command, "anew", lambda: command)())
    return typer.main.get_command(single)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fagen {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=_Commands,
    name="fagen",
    help="Builds the one attention kernel that you describe.",
    epilog="Start with: fagen doctor, then fagen build --head-dim 128 --softcap",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)
for _name, (_, _line) in COMMANDS.items():
    app.command(_name, help=_line)(_stub)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    mods: Annotated[list[str] | None, typer.Option("--mods", metavar="DIR", help=MODS_HELP)] = None,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's) and returns the exit code. Raises nothing on purpose."""
    if argv is not None:
        return _run(list(argv))
    # In a process that starts, looks something up and ends, the collector finds nothing and takes 50 of the 300 ms of a
    # warm build: in passes while modules are imported, and once more at exit.
    gc.set_threshold(100_000)
    try:
        return _run(sys.argv[1:])
    finally:
        gc.freeze()


def _run(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    try:
        with warnings.catch_warnings():
            # PyTorch says so at its first tensor; nothing here needs NumPy.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            warnings.showwarning = _warn
            code = app(args=_with_mods(arguments), prog_name="fagen", standalone_mode=False)
    except FagenError as error:
        return _fail(error, error.exit_code, str(error), as_json)
    except _CommandLineError as error:
        return _usage(error, as_json)
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "this command computes with PyTorch, which is not installed: pip install torch (see fagen doctor)"
        return _fail(ToolchainError(message), ToolchainError.exit_code, message, as_json)
    if code == _INTERRUPTED:
        return _fail(KeyboardInterrupt(), _INTERRUPTED, "interrupted", as_json)
    return code if isinstance(code, int) else 0


def _with_mods(arguments: list[str]) -> list[str]:
    """The arguments without `--mods DIR`, wherever that stands, whose folders are loaded: they bring flags."""
    rest, folders = [], []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--mods":
            rest.append(word)
        elif folder := value if equals else next(words, ""):
            folders.append(folder)
        else:
            raise SpecError("--mods wants a folder: --mods DIR")
    if folders:
        from fagen.registry import load_mods

        for folder in folders:
            load_mods(Path(folder).expanduser(), source="--mods")
    return rest


def _warn(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    print(f"fagen: warning: {message}", file=sys.stderr)


def _usage(error: Any, as_json: bool) -> int:
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if not message:  # a bare `fagen`: its help is on the screen already
        return int(error.exit_code)
    if not as_json and context is not None and isinstance(error, _UsageError):
        message += f"\nSee: {context.command_path} --help"
    return _fail(error, error.exit_code, message, as_json)


def _fail(error: BaseException, code: int, message: str, as_json: bool) -> int:
    print(f"fagen: error: {message}" if code != _INTERRUPTED else f"fagen: {message}", file=sys.stderr)
    if as_json:
        from fagen.cli.output import emit_error

        emit_error(error, code, message)
    return code
