"""The command line: `mlserve serve`, `generate`, `chat`, `inspect`, `adapters inspect`, `keys`.

Flags are made from the fields of the option dataclasses, so that a default and its help text stand in one place.
"""

from __future__ import annotations

import argparse
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from typing import Any

from mlserve import __version__
from mlserve.config import OPTION_PARTS, EngineConfig, ServerConfig
from mlserve.errors import ConfigError, MlserveError, StepError
from mlserve.request import SamplingParams

__all__ = ["main"]

# Sampling parameters that a flag can express; `n`, lists and mappings are for the SDK.
SAMPLING_FLAGS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "ignore_eos",
)  # fmt: skip

# Where a chat's defaults are not those of `SamplingParams`: there is somebody to interrupt an answer that is too long.
CHAT_DEFAULTS: dict[str, Any] = {"max_tokens": 512}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 after an error of ours, which is printed in one line, or 130 after
    an interrupt."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        run: Callable[[argparse.Namespace], None] = options.run
        run(options)
    except MlserveError as error:
        print(f"mlserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlserve", description="Many LoRA adapters and images on one base model.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="answer requests of OpenAI's API over HTTP")
    serve.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="default: the embedded one")
    serve.add_argument(
        "--adapter", nargs="+", action="extend", default=[], type=_named_path, metavar="NAME=PATH",
        help="adapters to load; each is a model of its own to clients",
    )  # fmt: skip
    serve.set_defaults(run=_serve)

    generate = commands.add_parser("generate", help="complete one or more prompts")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text, or - to read it from standard input")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk with the model in the terminal")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    chat.set_defaults(run=_chat)

    inspect = commands.add_parser("inspect", help="what a model is, and how much of it fits in memory")
    inspect.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="default: the embedded one"
    )
    inspect.set_defaults(run=_inspect)

    adapters = commands.add_parser("adapters", help="look at LoRA adapters")
    inspect_adapter = adapters.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "inspect", help="rank, targets, size and digest of an adapter, and whether the model can serve it"
    )
    inspect_adapter.add_argument("path", metavar="PATH", help="a folder as PEFT saves it")
    inspect_adapter.set_defaults(run=_inspect_adapter)

    keys = commands.add_parser("keys", help="make an API key for the server, and add it to a file of keys")
    keys.add_argument("file", metavar="FILE", help="as given to `mlserve serve --api-keys`; made if need be")
    keys.add_argument("--tenant", required=True, help="whose key it is")
    keys.add_argument("--admin", action="store_true", help="it may load and unload adapters and reset the cache")
    keys.add_argument("--shares-cache", action="store_true", help="share cached KV with other such tenants")
    keys.add_argument("--requests-per-minute", type=int, metavar="INT", help="default: any number")
    keys.add_argument("--max-concurrent", type=int, metavar="INT", help="requests at once; default: any number")
    keys.set_defaults(run=_create_key)

    for command in (generate, chat):
        command.add_argument("--adapter", metavar="NAME", help="the adapter that answers (default: the base model)")
        command.add_argument(
            "--adapters", nargs="+", default=[], type=_named_path, metavar="NAME=PATH", help="adapters to load"
        )
    for command in (serve, generate, chat, inspect, inspect_adapter):
        for part in (*OPTION_PARTS.values(), *((ServerConfig,) if command is serve else ())):
            group = command.add_argument_group((part.__doc__ or part.__name__).strip().rstrip("."))
            for option in fields(part):
                if not (command in (serve, inspect) and option.name == "model"):
                    _add_flag(group, option, option.default)
    for command in (generate, chat):
        group = command.add_argument_group("Sampling")
        for option in fields(SamplingParams):
            if option.name in SAMPLING_FLAGS:
                own = CHAT_DEFAULTS if command is chat else {}
                _add_flag(group, option, own.get(option.name, option.default))
    return parser


def _add_flag(group: argparse._ArgumentGroup, option: Field[Any], default: Any) -> None:
    """A flag that leaves no trace unless given, so that the dataclass applies its own default. `default` is shown."""
    kind = _scalar_type(option)
    help_text = option.metadata.get("help", "")
    if "default" not in help_text and default not in (None, MISSING):
        help_text = f"{help_text} (default: {default})".strip()
    help_text = help_text.replace("%", "%%")  # argparse formats it
    flag = f"--{option.name.replace('_', '-')}"
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text)
    elif issubclass(kind, StrEnum):
        group.add_argument(flag, choices=[member.value for member in kind], default=argparse.SUPPRESS, help=help_text)
    else:
        group.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar=kind.__name__.upper(), help=help_text)


def _named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=PATH")
    return name, path


def _scalar_type(option: Field[Any]) -> type:
    """`int | None` -> int; `str | BlockHash` -> str: the first type that a flag can express."""
    annotation = option.type
    owner = next(c for c in (*OPTION_PARTS.values(), ServerConfig, SamplingParams) if option in fields(c))
    for_type_checkers = ("BlockHash", "ImageIdentity", "WaitingQueue")  # imported for them only
    names = dict.fromkeys(for_type_checkers, types.NoneType)
    resolved = typing.get_type_hints(owner, localns=names)[option.name] if isinstance(annotation, str) else annotation
    choices: tuple[type, ...] = typing.get_args(resolved) or (resolved,)
    return next(choice for choice in choices if choice is not types.NoneType)


def _serve(options: argparse.Namespace) -> None:
    try:
        from mlserve.server.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} isn't installed: install mlserve[server]") from None

    names = {option.name for option in fields(ServerConfig)}
    server = ServerConfig(**{name: value for name, value in vars(options).items() if name in names})
    serve(EngineConfig.from_options(**_engine_options(options)), server, dict(options.adapter))


def _create_key(options: argparse.Namespace) -> None:
    from mlserve.server.auth import Principal, create_key

    principal = Principal(
        options.tenant, options.admin, options.shares_cache, options.requests_per_minute, options.max_concurrent
    )
    print(create_key(options.file, principal))


def _engine_options(options: argparse.Namespace) -> dict[str, Any]:
    names = {option.name for part in OPTION_PARTS.values() for option in fields(part)}
    return {name: value for name, value in vars(options).items() if name in names}


def _sampling(options: argparse.Namespace, **defaults: Any) -> SamplingParams:
    given = {name: value for name, value in vars(options).items() if name in SAMPLING_FLAGS}
    return SamplingParams(**{**defaults, **given})


def _generate(options: argparse.Namespace) -> None:
    from mlserve.llm import LLM

    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in options.prompts]
    params = _sampling(options)
    llm = LLM(adapters=dict(options.adapters), **_engine_options(options))
    outputs = llm.generate(prompts, params, adapter=options.adapter)
    for output in outputs:
        if len(prompts) > 1:
            print(f"--- {output.prompt}")
        print(output.outputs[0].text)
    for output in outputs:
        if output.error is not None:
            raise StepError(output.error)


def _chat(options: argparse.Namespace) -> None:
    from mlserve.terminal import converse

    llm_options = {"adapters": dict(options.adapters), **_engine_options(options)}
    converse(llm_options, _sampling(options, **CHAT_DEFAULTS), options.system, options.adapter)


def _inspect(options: argparse.Namespace) -> None:
    from mlserve.inspection import describe

    print(describe(EngineConfig.from_options(**_engine_options(options))))


def _inspect_adapter(options: argparse.Namespace) -> None:
    from mlserve.inspection import describe_for_model

    print(describe_for_model(options.path, EngineConfig.from_options(**_engine_options(options))))


if __name__ == "__main__":
    sys.exit(main())
