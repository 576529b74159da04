"""A Marian student in NumPy: the same file, read and computed independently of our code.

It computes one sentence per call, without padding, and the recurrence as a loop.
"""

import math
import struct
from pathlib import Path

import numpy as np

INT8 = 0x4101
HEADS = 8


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a binary file; matrices of int8 as what they stand for, in float32."""
    data = path.read_bytes()
    _, count = struct.unpack_from("<2Q", data)
    headers = np.frombuffer(data, "<u8", 4 * count, offset=16).reshape(count, 4)
    place = 16 + 32 * count
    names = data[place : place + int(headers[:, 0].sum())].split(b"\0")[:-1]
    place += int(headers[:, 0].sum())
    axes = np.frombuffer(data, "<i4", int(headers[:, 2].sum()), offset=place)
    shapes = np.split(axes, np.cumsum(headers[:, 2])[:-1])
    place += axes.nbytes
    place += 8 + struct.unpack_from("<Q", data, place)[0]
    tensors = {}
    for name, (_, kind, _, length), shape in zip(names, headers, shapes, strict=True):
        size = int(np.prod(shape))
        if kind == INT8:
            factor = struct.unpack_from("<f", data, place + size)[0]
            values = np.frombuffer(data, "<i1", size, place).astype(np.float32) / np.float32(factor)
            transposed = name != b"Wemb"
            tensors[name.decode()] = values.reshape(shape[::-1]).T if transposed else values
        elif not name.startswith(b"special:"):
            tensors[name.decode()] = np.frombuffer(data, "<f4", size, place).reshape(shape)
        place += int(length)
    tensors["Wemb"] = tensors["Wemb"].reshape(-1, tensors["encoder_l1_self_bq"].size)
    return tensors


class Student:
    """A model of "tiny" shape: post-norm, an SSRU in the decoder, one table for everything."""

    def __init__(self, path: Path, dtype: str = "float64"):
        self.dtype = dtype
        self.w = {name: tensor.astype(dtype) for name, tensor in read(path).items()}

    def log_probabilities(self, source: list[int], target: list[int]) -> np.ndarray:
        """Of every token of the vocabulary, before each of `target`: [T, V]."""
        encoded = self.positioned(self.w["Wemb"][source])
        for layer in range(1, 7):
            name = f"encoder_l{layer}"
            attended = self.attend(f"{name}_self", encoded, encoded)
            encoded = self.norm(f"{name}_self_Wo", encoded + attended)
            encoded = self.feed_forward(name, encoded)
        start = np.zeros((1, encoded.shape[1]), self.dtype)
        x = self.positioned(np.concatenate([start, self.w["Wemb"][target[:-1]]]))
        for layer in (1, 2):
            name = f"decoder_l{layer}"
            x = self.norm(f"{name}_rnn_ffn", x + self.recur(f"{name}_rnn", x))
            attended = self.attend(f"{name}_context", x, encoded)
            x = self.norm(f"{name}_context_Wo", x + attended)
            x = self.feed_forward(name, x)
        logits = x @ self.w["Wemb"].T + self.w["decoder_ff_logit_out_b"]
        highest = logits.max(axis=-1, keepdims=True)
        return logits - highest - np.log(np.exp(logits - highest).sum(axis=-1, keepdims=True))

    def positioned(self, embedded: np.ndarray) -> np.ndarray:
        length, width = embedded.shape
        rates = 10000.0 ** -(np.arange(width // 2) / (width // 2 - 1))
        angles = np.arange(length)[:, None] * rates
        waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        return math.sqrt(width) * embedded + waves.astype(self.dtype)

    def affine(self, name: str, letter: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w[f"{name}_W{letter}"] + self.w[f"{name}_b{letter}"]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        centered = x - x.mean(axis=-1, keepdims=True)
        deviation = np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + 1e-6)
        return centered / deviation * self.w[f"{name}_ln_scale"] + self.w[f"{name}_ln_bias"]

    def attend(self, name: str, x: np.ndarray, keys: np.ndarray) -> np.ndarray:
        q, k, v = (
            self.affine(name, letter, rows).reshape(len(rows), HEADS, -1)
            for letter, rows in (("q", x), ("k", keys), ("v", keys))
        )
        scores = np.einsum("thk,shk->hts", q, k) / math.sqrt(q.shape[-1])
        # In float32, the exponentials of some scores are out of range.
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        context = np.einsum("hts,shk->thk", weights, v).reshape(len(x), -1)
        return self.affine(name, "o", context)

    def feed_forward(self, name: str, x: np.ndarray) -> np.ndarray:
        hidden = np.maximum(self.affine(f"{name}_ffn", "1", x), 0)
        return self.norm(f"{name}_ffn_ffn", x + self.affine(f"{name}_ffn", "2", hidden))

    def recur(self, name: str, x: np.ndarray) -> np.ndarray:
        forget = np.exp(-np.logaddexp(0, -self.affine(name, "f", x)))
        new = x @ self.w[f"{name}_W"]
        memory = np.zeros_like(x[0])
        outputs = []
        for gate, row in zip(forget, new, strict=True):
            memory = gate * memory + (1 - gate) * row
            outputs.append(np.maximum(memory, 0))
        return np.array(outputs)
