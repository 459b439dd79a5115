"""Chat templates are code from strangers: they run in jinja2's immutable sandbox.

Extensions and functions are those of Hugging Face transformers, for which templates are written.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

from moechat.text.text_guard import PRIVATE_RANGES

if TYPE_CHECKING:
    import jinja2
    import jinja2.parser
    import jinja2.sandbox

_PRIVATE = "".join(f"{chr(codes[0])}-{chr(codes[-1])}" for codes in PRIVATE_RANGES)
_TO_ESCAPE = re.compile(f"[^\x00-\x7f{_PRIVATE}]")


class TemplateRefusal(Exception):
    """The template called raise_exception: it does not take this conversation."""


def compile_template(source: str) -> jinja2.Template:
    """The template, ready to render. Raises jinja2.TemplateSyntaxError and the like."""
    return _environment().from_string(source)


def names_in_template(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """What a template that compiles reads: variables given to it, and fields of values."""
    from jinja2 import meta, nodes

    tree = _environment().parse(source)
    keys = [item.arg for item in tree.find_all(nodes.Getitem)]
    for call in tree.find_all(nodes.Call):  # message.get("name")
        if isinstance(call.node, nodes.Getattr) and call.node.attr == "get":
            keys += call.args[:1]
    fields = {node.attr for node in tree.find_all(nodes.Getattr)}
    fields |= {key.value for key in keys if isinstance(key, nodes.Const)}
    return frozenset(meta.find_undeclared_variables(tree)), frozenset(fields)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks answers for training; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, without HTML escapes. Private characters are never escaped."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:
        text = _TO_ESCAPE.sub(lambda match: json.dumps(match[0])[1:-1], text)
    return text
