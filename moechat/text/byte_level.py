"""Byte-level vocabularies: every byte has a printable character, so tokens are byte strings."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF = _alphabet()


def token_to_bytes(name: str) -> bytes:
    """The bytes of a vocabulary entry; an entry outside the alphabet stands for itself."""
    try:
        return bytes([_BYTE_OF[character] for character in name])
    except KeyError:
        return name.encode("utf-8", "replace")


def is_byte_level(decoder: object) -> bool:
    """Whether tokenizer.json's ``decoder`` is the byte-level one and nothing else."""
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and len(parts) == 1 and is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"
