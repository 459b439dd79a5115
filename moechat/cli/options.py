"""Every option and argument, declared once and shared by the verbs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


@dataclass
class Invocation:
    """What the place that catches errors must know of a command line (``ctx.obj``)."""

    debug: bool = False


RANGES = {
    "temperature": "0 (always the likeliest token) or more",
    "top_k": "0 (off) or more",
    "top_p": "above 0, up to 1 (off)",
    "min_p": "0 (off) to 1",
    "repetition_penalty": "above 0; 1 is off",
    "presence_penalty": "any number; 0 is off",
    "seed": "0 to 2^64-1",
    "stop": "text that is not empty",
    "max_tokens": "1 or more",
}
# In the order of the help text.
KV_POLICIES = ("native", "auto", "fp16", "int8", "k8v4", "int4", "spectrum", "pdtrim", "snapkv")
KV_POLICIES_WITH_BUDGET = ("auto", "spectrum", "pdtrim", "snapkv")


MAX_CONCURRENCY, DEFAULT_CONCURRENCY = 64, 4


# typer's own types word their errors differently from version to version and name no range.


def _convert(text: str, kind: type[int] | type[float] | type[str], allowed: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        noun = "a whole number" if kind is int else "a number"
        raise typer.BadParameter(f"{text[:40]!a} is not {noun}; allowed: {allowed}") from None


def _sampling(field: str, kind: type[int] | type[float] | type[str]) -> Callable[[str], Any]:
    """A parser for one sampling parameter; SamplingParams decides what is in range."""

    def parse(text: str) -> Any:
        # Imported here: only a command line that sets a parameter needs it.
        from moechat.errors import BadParameter
        from moechat.sample.params import SamplingParams

        value = _convert(text, kind, RANGES[field])
        values: dict[str, Any] = {field: (value,) if field == "stop" else value}
        try:
            SamplingParams(**values)
        except BadParameter:
            allowed = RANGES[field]
            raise typer.BadParameter(f"{text[:40]!a} is out of range; allowed: {allowed}") from None
        return value

    return parse


def _positive(text: Any) -> int:
    allowed = "1 or more"
    value: int = _convert(str(text), int, allowed)
    if value < 1:
        raise typer.BadParameter(f"{value} is out of range; allowed: {allowed}")
    return value


def _kv_budget(text: Any) -> float:
    allowed = "above 0, up to 1"
    value: float = _convert(str(text), float, allowed)
    if not 0 < value <= 1:
        raise typer.BadParameter(f"{text} is out of range; allowed: {allowed}")
    return value


def _concurrency(text: Any) -> int:
    allowed = f"1 to {MAX_CONCURRENCY}"
    value: int = _convert(str(text), int, allowed)
    if not 1 <= value <= MAX_CONCURRENCY:
        raise typer.BadParameter(f"{value} is out of range; allowed: {allowed}")
    return value


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"{text[:40]!a} is not one of {', '.join(choices)}")
        return text

    return parse


def remember_debug(ctx: typer.Context, value: bool) -> bool:
    """Callback of --debug, which may stand before the verb and after it."""
    if isinstance(ctx.obj, Invocation):
        ctx.obj.debug = ctx.obj.debug or value
    return value


def _number(field: str, kind: type[int] | type[float], text: str) -> Any:
    """A typer option for one numeric sampling parameter."""
    return typer.Option(
        f"--{field.replace('_', '-')}",
        parser=_sampling(field, kind),
        metavar="INTEGER" if kind is int else "NUMBER",
        help=f"{text} Range: {RANGES[field]}.",
        show_default=False,
    )


_SAMPLING_DEFAULT = "Default: the vendor's."

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A name that `moechat list` shows, a folder in Hugging Face layout, or a GGUF file.",
        metavar="MODEL",
        show_default=False,
    ),
]
RequiredModelArgument = Annotated[
    str,
    typer.Argument(
        help="A name that `moechat list` shows, a folder in Hugging Face layout, or a GGUF file.",
        metavar="MODEL",
    ),
]
PromptArgument = Annotated[
    str | None,
    typer.Argument(
        help="The question. Text from a pipe goes before it.",
        metavar="PROMPT",
        show_default=False,
    ),
]
Temperature = Annotated[
    float | None, _number("temperature", float, f"Randomness of the choice. {_SAMPLING_DEFAULT}")
]
TopK = Annotated[int | None, _number("top_k", int, "Choose among the K likeliest tokens.")]
TopP = Annotated[
    float | None, _number("top_p", float, "Choose among the likeliest tokens that make up P.")
]
MinP = Annotated[
    float | None, _number("min_p", float, "Drop tokens below P times the likeliest one.")
]
RepetitionPenalty = Annotated[
    float | None, _number("repetition_penalty", float, "Make tokens that occurred less likely.")
]
PresencePenalty = Annotated[
    float | None, _number("presence_penalty", float, "Subtract from tokens that occurred.")
]
Seed = Annotated[
    int | None,
    _number(
        "seed",
        int,
        "Repeat an answer: the same seed gives the same text. Every line of a batch gets it, so "
        "equal lines have equal answers. Default: another one for every answer.",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        parser=_sampling("stop", str),
        metavar="TEXT",
        help="End the answer before this text. May be given several times.",
        show_default=False,
    ),
]
MaxTokens = Annotated[
    int | None, _number("max_tokens", int, "End the answer after this many tokens.")
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="The system text.", show_default=False),
]
SystemFile = Annotated[
    Path | None,
    typer.Option(
        "--system-file",
        metavar="FILE",
        help="Take the system text from a file.",
        show_default=False,
    ),
]
Think = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think",
        help="Have the model think before it answers, or not, where it can be told. With --think "
        "the thinking is shown on stderr, too, if that is a terminal. Default: the model's.",
        show_default=False,
    ),
]
ReasoningEffort = Annotated[
    str | None,
    typer.Option(
        "--reasoning-effort",
        parser=_choice("low", "medium", "high"),
        metavar="low|medium|high",
        help="How long the model thinks, where it can be told. Default: the model's.",
        show_default=False,
    ),
]
ContextTokens = Annotated[
    int | None,
    typer.Option(
        "--ctx",
        parser=_positive,
        metavar="TOKENS",
        help="Limit of prompt and answers together. Default and maximum: what the model was "
        "trained for.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        parser=_positive,
        metavar="N",
        help="Compute threads. Default: the processors that this process may use.",
        show_default=False,
    ),
]
Resident = Annotated[
    bool,
    typer.Option(
        "--resident",
        help="Copy the experts into memory first, in huge pages, a share to each NUMA node. For "
        "machines with several nodes and room for all weights.",
    ),
]
Compute = Annotated[
    str,
    typer.Option(
        "--compute",
        parser=_choice("bf16", "exact", "w8a8"),
        metavar="bf16|exact|w8a8",
        help="Type of matrix inputs and KV cache; exact: float32; w8a8: bf16, but a GPU that reads "
        "prompts multiplies FP8 weights with inputs of 8 bits, less exactly and sooner.",
    ),
]
KV = Annotated[
    str,
    typer.Option(
        "--kv",
        parser=_choice(*KV_POLICIES),
        metavar="POLICY",
        help="How a prompt's KV crosses from prefill to decode: native (bit for bit), auto (native "
        "in shared memory, spectrum over a slow link), or lossy: fp16, int8, k8v4, int4, spectrum "
        "(a precision for each token), pdtrim or snapkv (tokens dropped).",
    ),
]
KVBudget = Annotated[
    float | None,
    typer.Option(
        "--kv-budget",
        parser=_kv_budget,
        metavar="NUMBER",
        help="What spectrum (auto, too), pdtrim and snapkv may send, of 2 bytes an element. "
        "Range: above 0, up to 1. Default: 0.5, or what spectrum needs to drop no token.",
        show_default=False,
    ),
]
Speculate = Annotated[
    bool,
    typer.Option(
        "--speculate",
        help="Draft tokens with the model's multi-token-prediction layer, where it has one: the "
        "same text; faster only where the drafts are good.",
    ),
]
Plain = Annotated[bool, typer.Option("--plain", help="In a chat: no colours and no Markdown.")]
Stats = Annotated[
    str | None,
    typer.Option(
        "--stats",
        parser=_choice("none", "line", "json"),
        metavar="none|line|json",
        help="Counters after each answer, and after a batch, on stderr. Default: none; on a "
        "terminal line, and for a batch what came out of it in the end.",
        show_default=False,
    ),
]
NoHistory = Annotated[
    bool, typer.Option("--no-history", help="In a chat: neither read nor write the history file.")
]
Batch = Annotated[
    bool,
    typer.Option(
        "--batch", help="Answer each line of stdin on its own, as one JSON object a line."
    ),
]
BatchFile = Annotated[
    str,
    typer.Argument(
        help="A file with a prompt on each line; - is stdin.", metavar="FILE", show_default=False
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="A name that `moechat list` shows, a folder in Hugging Face layout, or a GGUF file.",
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        parser=_concurrency,
        metavar="N",
        help=f"Lines of a batch that are answered at once, 1 to {MAX_CONCURRENCY}: more tokens a "
        "second, the same answers in the same order. Default: "
        f"{DEFAULT_CONCURRENCY}, or as many as fit the memory.",
        show_default=False,
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=remember_debug,
        is_eager=True,
        help="Show the traceback of an error.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
