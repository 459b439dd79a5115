"""Chat templates of families whose GGUF files often come without one.

Facts: the turn formats that the vendors document for their chat models. A file of a base model has
no template either; it then answers as well as a base model can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GEMMA = """{{ bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- for message in messages if message.role != 'system' -%}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
{%- if loop.first and system %}{{ system + '\\n\\n' }}{% endif -%}
{{ message.content | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}"""

_CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""

_LLAMA3 = """{{ bos_token }}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}"""


def usual_template(metadata: Mapping[str, Any]) -> tuple[str, str] | None:
    """The family's name and its template for a GGUF file that has none; None if none is known."""
    architecture = metadata.get("general.architecture")
    if architecture in ("gemma2", "gemma3"):
        return "Gemma", _GEMMA
    if architecture in ("qwen2", "qwen3", "qwen2moe", "qwen3moe"):
        return "Qwen", _CHATML
    if architecture == "llama" and metadata.get("tokenizer.ggml.pre") == "llama-bpe":
        return "Llama 3", _LLAMA3
    return None
