"""The command line: `llmrt run`, `chat`, `bench`, `doctor`. It uses the public Engine only.

stdout carries the answer and nothing else; what is said about it goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import llmrt
from llmrt.bench.runner import as_text as line_as_text
from llmrt.bench.runner import run_workloads
from llmrt.bench.workloads import select_workloads
from llmrt.cache_entries import cache_folder
from llmrt.display.terminal_chat import TerminalChat
from llmrt.doctor import as_text, report
from llmrt.errors import ConfigError, LlmrtError, RequestError
from llmrt.sampling import SamplingParams

if TYPE_CHECKING:
    from llmrt.engine import Engine
    from llmrt.outputs import Increment

DEFAULT_MAX_TOKENS = 512
EXIT_FAILED, EXIT_MISUSED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141

OpenEngine = Callable[..., "Engine"]
"""What makes an engine: `llmrt.Engine`, or a fake of it."""


def main(arguments: Sequence[str] | None = None, *, engine: OpenEngine | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: Without the program's name; None takes sys.argv.
        engine: Makes the engine.
    """
    options = _parser().parse_args(arguments)
    _allow_any_text_on(sys.stdout)
    try:
        code: int = options.command(options, engine)
        print(end="", flush=True)  # here, where a reader that has gone can still be told
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except LlmrtError as error:
        print(f"llmrt: error: {_first_line(error)}", file=sys.stderr)
        return EXIT_MISUSED if isinstance(error, (ConfigError, RequestError)) else EXIT_FAILED


# ---- the commands ----


def _run(options: argparse.Namespace, engine: OpenEngine | None) -> int:
    prompt = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    with _engine(options, engine) as llm:
        as_chat = llm.tokenizer.has_chat_template and not options.raw
        _print_stream(llm.stream([_user(prompt)] if as_chat else prompt, params))
    return 0


def _chat(options: argparse.Namespace, engine: OpenEngine | None) -> int:
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    with _engine(options, engine) as llm:
        TerminalChat(lambda messages: llm.stream(messages, params), system=options.system).run()
    return 0


def _bench(options: argparse.Namespace, engine: OpenEngine | None) -> int:
    workloads = select_workloads([name for name in options.workloads.split(",") if name])
    make_engine = engine or llmrt.Engine
    lines = run_workloads(
        lambda: make_engine(options.bench_model, **_bench_engine_options(options)),
        workloads,
        repeat=options.repeat,
        tp=options.tp,
    )
    for line in lines:
        print(json.dumps(line) if options.json else line_as_text(line), flush=True)
    return 0


def _bench_engine_options(options: argparse.Namespace) -> dict[str, Any]:
    return {
        **{name: getattr(options, name) for name in ("tp", "device", "dtype", "quantization")},
        "num_threads": options.threads,
        "max_model_len": options.max_model_len,
        "prefix_caching": not options.no_prefix_caching,
        "progress": False,
    }


def _doctor(options: argparse.Namespace, engine: OpenEngine | None) -> int:
    found = report(cache_folder=cache_folder())
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return 0


def _engine(options: argparse.Namespace, engine: OpenEngine | None) -> Engine:
    names = ("tp", "backend", "device", "dtype")
    return (engine or llmrt.Engine)(
        options.model, **{name: getattr(options, name) for name in names}
    )


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _print_stream(increments: Iterable[Increment]) -> None:
    for increment in increments:
        sys.stdout.write(increment.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


# ---- its arguments ----


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llmrt", description="Run large language models.")
    parser.add_argument("--version", action="version", version=f"llmrt {llmrt.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser("run", help="print the answer to one prompt")
    run.add_argument("prompt", help="the prompt; - reads it from stdin")
    run.add_argument(
        "--raw", action="store_true", help="give the prompt as it is, without a chat template"
    )
    _add_engine_options(run)
    run.set_defaults(command=_run)

    chat = commands.add_parser("chat", help="hold a conversation in the terminal")
    chat.add_argument("--system", help="how the model is to behave")
    _add_engine_options(chat)
    chat.set_defaults(command=_chat)

    _add_bench(commands)

    doctor = commands.add_parser("doctor", help="show what llmrt finds on this machine")
    doctor.add_argument("--json", action="store_true", help="print it as JSON")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure how fast this machine runs a model")
    bench.add_argument("bench_model", metavar="MODEL", nargs="?", help="as --model of `llmrt run`")
    bench.add_argument("--workloads", default="", help="names, separated by commas (default: all)")
    bench.add_argument(
        "--repeat", type=_count, default=3, help="measured runs of each (%(default)s)"
    )
    bench.add_argument("--tp", type=int, default=1, help="number of workers that share the model")
    bench.add_argument("--threads", type=_count, help="threads per worker (default: its share)")
    bench.add_argument("--device", default="auto", help="auto, cpu or cuda")
    bench.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    bench.add_argument("--quantization", help="int8 or int4")
    bench.add_argument("--max-model-len", type=_count, default=2048, help="(default: %(default)s)")
    bench.add_argument(
        "--no-prefix-caching", action="store_true", help="compute every prompt in full"
    )
    bench.add_argument("--json", action="store_true", help="print a line of JSON for each")
    bench.set_defaults(command=_bench)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return number


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="a directory, a GGUF file or a hub id (default: a small one)"
    )
    parser.add_argument("--tp", type=int, default=1, help="number of workers that share the model")
    parser.add_argument("--backend", default="auto", help="auto, mp, inprocess or ray")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, help="longest answer (%(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token"
    )


# ---- the terminal ----


def _allow_any_text_on(stream: Any) -> None:
    # A terminal in the C locale cannot show every character; an answer should not end for that.
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")


def _first_line(error: LlmrtError) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
