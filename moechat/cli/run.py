"""``moechat run``: a chat, one answer, or a batch, decided by the streams and the arguments."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moechat.cli import device_options, options
from moechat.cli.answer_lines import Lines, answer_lines
from moechat.cli.interrupt import EXIT_CODE as EXIT_INTERRUPTED
from moechat.cli.interrupt import Interrupt
from moechat.cli.prompt_text import check_argument, compose_prompt, read_piped, system_text
from moechat.errors import ModelNotFound, PromptTooLong, Usage

if TYPE_CHECKING:
    from moechat.engine.conversation import Conversation
    from moechat.engine.engine import Engine
    from moechat.registry import ResolvedModel
    from moechat.sample.params import SamplingParams
    from moechat.terminal.thinking_printer import ThinkingPrinter


def run(
    model: options.ModelArgument = "mini",
    prompt: options.PromptArgument = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    max_tokens: options.MaxTokens = None,
    system: options.System = None,
    system_file: options.SystemFile = None,
    think: options.Think = None,
    reasoning_effort: options.ReasoningEffort = None,
    ctx: options.ContextTokens = None,
    threads: options.Threads = None,
    resident: options.Resident = False,
    device: device_options.Device = "auto",
    gpu_memory: device_options.GpuMemory = None,
    gpu_prefill_tokens: device_options.GpuPrefillTokens = None,
    gpu_decode: device_options.GpuDecode = "auto",
    gpu_experts: device_options.GpuExperts = None,
    compute: options.Compute = "bf16",
    kv: options.KV = "native",
    kv_budget: options.KVBudget = None,
    speculate: options.Speculate = False,
    plain: options.Plain = False,
    stats: options.Stats = None,
    no_history: options.NoHistory = False,
    batch: options.Batch = False,
    concurrency: options.Concurrency = None,
    debug: options.Debug = False,
) -> int:
    """Chat with a model, or get one answer.

    On a terminal, without a prompt: a chat. With a prompt, or with text on stdin: one answer on
    stdout; everything else is on stderr. MODEL comes first; left out, it is mini.

    \b
      moechat run mini
      moechat run mini --temperature 0 "What is the capital of Norway?"
      cat notes.txt | moechat run mini "What is the code of Clara?"
      moechat run mini --batch < questions.txt > answers.jsonl
      moechat run /path/to/folder -- "--this is a question, no option"

    \b
    A line of a batch is plain text, a JSON string, or a JSON object:
      {"prompt": "..."}  or  {"messages": [{"role": "user", "content": "..."}]}
    both with "system" if wanted; metadata is ignored. Its result is
      {"index", "text", "finish_reason", "usage"}  or  {"index", "error"}
    where index counts the lines of stdin from 0; an id or custom_id of the line
    (a string or a whole number) is repeated. What the model thought before its
    answer is "reasoning", beside "text".
    """
    given = locals()
    chat = _is_chat(prompt, batch)
    if concurrency is not None and not batch:
        raise Usage("--concurrency is for batches", "there is one conversation", "Add --batch")
    return start(
        **shared_options(given),
        prompt=prompt,
        lines=Lines(sys.stdin.buffer, concurrency) if batch else None,
        chat=Look(plain, not no_history, debug) if chat else None,
    )


@dataclasses.dataclass(frozen=True)
class Look:
    """How a chat looks and what it keeps."""

    plain: bool
    history: bool
    debug: bool


def shared_options(given: dict[str, Any]) -> dict[str, Any]:
    """What ``start`` takes of the options that ``run`` and ``batch`` both have, by their names."""

    def named(names: str) -> dict[str, Any]:
        return {name: given[name] for name in names.split()}

    return {
        **named("model think reasoning_effort resident stats"),
        "sampling": named("temperature top_k top_p min_p repetition_penalty presence_penalty")
        | named("seed stop max_tokens"),
        "system": system_text(given["system"], given["system_file"]),
        "settings": named(
            "compute threads kv kv_budget speculate device gpu_prefill_tokens gpu_decode "
            "gpu_experts"
        )
        | {"context_tokens": given["ctx"], "gpu_memory_bytes": given["gpu_memory"]},
    }


def start(
    *,
    model: str,
    prompt: str | None,
    sampling: dict[str, Any],
    system: str,
    think: bool | None,
    reasoning_effort: str | None,
    settings: dict[str, Any],
    resident: bool,
    stats: str | None,
    lines: Lines | None,
    chat: Look | None,
) -> int:
    """What ``run`` and ``batch`` do once their arguments are read; without ``lines`` and ``chat``
    one answer. ``sampling`` and ``settings``, which are Engine.open's, have None for what was not
    given."""
    from moechat.terminal_size import fold_words

    overrides = {name: value for name, value in sampling.items() if value is not None}
    settings = {name: value for name, value in settings.items() if value is not None}
    if stop := overrides.pop("stop", None):
        overrides["stop"] = tuple(check_argument(text, "--stop") for text in stop)
    _check_kv_budget(settings)
    switches = {} if think is None else {"think": "on" if think else "off"}
    if reasoning_effort is not None:
        switches["reasoning_effort"] = reasoning_effort
    resolved = _resolve(model, may_be_question=lines is None and prompt is None)
    usual = "line" if lines is None else "summary"
    shown_stats = stats or (usual if sys.stderr.isatty() else "none")
    budget = settings.get("kv_budget")
    with Interrupt() as interrupt:
        text = "" if chat or lines else _read_prompt(prompt)
        open_ = _open_resident if resident else open_engine
        engine = open_(resolved.path, **settings)
        try:
            if resident and engine.residency is not None and shown_stats == "line":
                print(fold_words(engine.residency.line, sys.stderr), file=sys.stderr)
            has_gpu = engine.prefill_choice.gpu is not None
            for notice in (
                engine.notice,
                device_options.idle_options(settings, has_gpu=has_gpu),
            ):
                if notice:
                    print(fold_words(notice, sys.stderr), file=sys.stderr)
            if settings.get("kv") == "spectrum":
                with Interrupt():  # of its own: Ctrl-C ends the probe, not the program
                    settle_tiers(engine, budget)
            if lines is not None:
                params = dataclasses.replace(engine.default_sampling(), **overrides)
                # The lines get the system text one by one.
                new = functools.partial(_conversation, engine, "", switches)
                return answer_lines(
                    engine, new, lines, params, interrupt, system, shown_stats, budget
                )
            conversation = _conversation(engine, system, switches)
            if chat is None:
                params = dataclasses.replace(engine.default_sampling(), **overrides)
                thinking = _thinking_printer(asked=think is True)
                return _one_answer(
                    engine, conversation, text, params, interrupt, shown_stats, thinking, budget
                )
            from moechat.terminal.repl import run_chat
            from moechat.terminal.settings import Settings

            return run_chat(
                conversation,
                Settings(engine.default_sampling(), overrides),
                model_name=resolved.name,
                is_demo=resolved.name == "mini" and resolved.entry is not None,
                stats=shown_stats,
                plain=chat.plain,
                history=chat.history,
                switches=switches,
                debug=chat.debug,
            )
        finally:
            engine.close()


def open_engine(path: Path, **settings: Any) -> Engine:
    """Engine.open, imported only now: tests put a scripted engine here."""
    from moechat.engine.engine import Engine

    return Engine.open(path, **settings)


def settle_tiers(engine: Engine, budget: float | None) -> None:
    """As in eval.command, imported only now: few runs need it."""
    from moechat.eval.command import settle_tiers

    settle_tiers(engine, budget)


def _check_kv_budget(settings: dict[str, Any]) -> None:
    """Raise Usage for a budget that the KV policy would not read."""
    readers, kv = options.KV_POLICIES_WITH_BUDGET, settings["kv"]
    if "kv_budget" in settings and kv not in readers:
        raise Usage(
            f"--kv-budget does nothing with --kv {kv}",
            f"that policy has bytes of its own; {', '.join(readers)} have a budget",
        )


def _open_resident(path: Path, **settings: Any) -> Engine:
    """open_engine with resident weights, and a line on a terminal while they are copied."""
    from moechat.sizes import size_text
    from moechat.terminal.progress import ProgressLine

    line = ProgressLine(sys.stderr)

    def show(done: int, total: int) -> None:
        line.show(f"copying weights: {size_text(done)} of {size_text(total)}")

    try:
        return open_engine(path, resident=True, progress=show, **settings)
    finally:
        line.erase()


def new_conversation(engine: Engine, system: str) -> Conversation:
    """A conversation, imported only now: tests put a scripted one here."""
    from moechat.engine.conversation import Conversation

    return Conversation(engine, system)


def _conversation(engine: Engine, system: str, switches: dict[str, str]) -> Conversation:
    conversation = new_conversation(engine, system)
    for name, value in switches.items():
        conversation.set_switch(name, value)
    return conversation


def _is_chat(prompt: str | None, batch: bool) -> bool:
    if batch:
        if prompt is not None:
            raise Usage("--batch takes its prompts from stdin", "there is a PROMPT argument, too")
        if sys.stdin.isatty():
            raise Usage(
                "--batch takes its prompts from stdin",
                "stdin is a terminal",
                "Try `moechat run mini --batch < questions.txt`",
            )
        return False
    if prompt is not None or not sys.stdin.isatty():
        return False
    if not sys.stdout.isatty():
        raise Usage(
            "there is no prompt, and stdout is no terminal for a chat",
            next_step='Give a prompt: `moechat run mini "…" > answer.txt`',
        )
    return True


def _resolve(model: str, may_be_question: bool) -> ResolvedModel:
    from moechat.registry import load_registry

    registry = load_registry()
    try:
        return registry.resolve(model)
    except ModelNotFound as error:
        if model in registry.entries or not may_be_question:
            raise
        order = 'The model comes before the question: `moechat run mini "…"`'
        raise ModelNotFound(error.what, error.why, order) from None


def _read_prompt(argument: str | None) -> str:
    if argument is not None:
        argument = check_argument(argument, "the prompt")
    piped = None
    if not sys.stdin.isatty():
        piped = read_piped(sys.stdin.buffer, _say_waiting if sys.stderr.isatty() else None)
    return compose_prompt(piped, argument)


def _say_waiting() -> None:
    print("reading stdin (for none: < /dev/null)", file=sys.stderr, flush=True)


def _thinking_printer(asked: bool) -> ThinkingPrinter | None:
    """Where one answer's thinking goes: to a person who watches the answer or asked for it."""
    from moechat.terminal.sinks import escapes_allowed
    from moechat.terminal.thinking_printer import ThinkingPrinter

    if not (sys.stderr.isatty() and (asked or sys.stdout.isatty())):
        return None
    return ThinkingPrinter(sys.stderr, dim=escapes_allowed(sys.stderr))


def _one_answer(
    engine: Engine,
    conversation: Conversation,
    prompt: str,
    params: SamplingParams,
    interrupt: Interrupt,
    stats: str,
    thinking: ThinkingPrinter | None,
    kv_budget: float | None,
) -> int:
    from moechat.terminal.sinks import PlainSink
    from moechat.terminal.stats_text import kv_note
    from moechat.terminal_size import fold_words

    sink = PlainSink(
        sys.stdout,
        sys.stderr,
        stats=stats,
        context_tokens=engine.context_tokens,
        thinking=thinking,
    )
    # Until the events come Ctrl-C raises; from then on it cancels and the rest is still printed.
    try:
        events = conversation.ask(prompt, params)
    except PromptTooLong as error:
        trained = engine.trained_context_tokens
        if error.next_step or engine.context_tokens >= trained:
            raise
        offer = f"A larger --ctx helps, up to {trained}"
        raise PromptTooLong(error.what, error.why, offer) from error
    with interrupt.cancels(conversation.cancel):
        finished = sink.consume(events)
    note = ""
    if finished is not None and stats != "json":  # JSON has the figures, and must stay JSON
        note = kv_note(finished, kv_budget, counted=stats == "line")
    if note:
        print(fold_words(f"[KV: {note}]", sys.stderr), file=sys.stderr)
    return EXIT_INTERRUPTED if interrupt.requested else 0
