"""The KV codec in numpy, row by row: what kernels/kv_codec/kv_codec.h says, and nothing else."""

from __future__ import annotations

import numpy as np
from formats import bf16_bits, bf16_values

Parts = list[tuple[int, int, str]]


def scale_of(values: np.ndarray, steps: int) -> np.float16:
    """Largest magnitude / steps, rounded up to a float16; one that is not 0 unless all are."""
    wanted = np.abs(values).max() / np.float32(steps)
    with np.errstate(over="ignore"):
        scale = np.float16(wanted)
    if np.float32(scale) < wanted or (scale == 0 and np.any(values)):
        scale = np.nextafter(scale, np.float16(np.inf))
    return scale


def codes_of(values: np.ndarray, scale: np.float16) -> np.ndarray:
    inverse = np.float32(1) / np.float32(scale) if scale else np.float32(0)
    return np.rint(values * inverse).astype(np.int32)


def encode_part(values: np.ndarray, code: str) -> tuple[bytes, list[np.float16]]:
    if code == "f16":
        return values.astype("<f2").tobytes(), []
    if code == "int8":
        scale = scale_of(values, 127)
        return codes_of(values, scale).astype(np.int8).tobytes(), [scale]
    largest = np.abs(values).max()
    scale = scale_of(values, 8) * np.float16(1 if largest == 0 or -largest in values else -1)
    codes = np.minimum(codes_of(values, scale), 7) + 8
    half = (len(codes) + 1) // 2
    high = np.concatenate([codes[half:], [8] * (len(codes) % 2)]).astype(int)
    return bytes((codes[:half] | high << 4).astype(np.uint8)), [scale]


def encode(rows: np.ndarray, parts: Parts, centre: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows [m, W] uint16 or float32 -> payload uint8 [m, bytes], scales float16 [m, parts]."""
    wide = bf16_values(rows) if rows.dtype == np.uint16 else rows
    payloads, scales = [], []
    for row in wide:
        payload, row_scales = b"", []
        for begin, width, code in parts:
            values = row[begin : begin + width]
            if code != "f16" and begin + width <= len(centre):
                values = values - centre[begin : begin + width].astype(np.float32)
            part_payload, part_scales = encode_part(values, code)
            payload += part_payload
            row_scales += part_scales
        payloads.append(np.frombuffer(payload, np.uint8))
        scales.append(np.array(row_scales, np.float16))
    return np.stack(payloads), np.stack(scales)


def decode(
    payload: np.ndarray, scales: np.ndarray, parts: Parts, centre: np.ndarray, bf16: bool
) -> np.ndarray:
    """The rows again, uint16 or float32 [m, W]; parts cover the row."""
    rows = []
    for row_payload, row_scales in zip(payload, scales):
        row, offset, part_scales = [], 0, list(row_scales.astype(np.float32))
        for begin, width, code in parts:
            size = {"f16": 2 * width, "int8": width, "int4": (width + 1) // 2}[code]
            raw = row_payload[offset : offset + size]
            offset += size
            if code == "f16":
                row.append(raw.view("<f2").astype(np.float32))
                continue
            codes = raw.view(np.int8).astype(np.int32)
            if code == "int4":
                codes = np.concatenate([raw & 15, raw >> 4]).astype(np.int32)[:width] - 8
            values = codes.astype(np.float32) * part_scales.pop(0)
            if begin + width <= len(centre):
                values = values + centre[begin : begin + width].astype(np.float32)
            row.append(values)
        rows.append(np.concatenate(row))
    wide = np.stack(rows).astype(np.float32)
    return bf16_bits(wide) if bf16 else wide
