"""Packing of small integers into bytes, lowest bits first: the compiled form of ``kernels.reference.bits``.

Codes are bytes while they are worked on. Widths 1, 2, 4 and 8 are plain loops. Any other width takes eight codes as
one 64-bit word, whose bits move together in three shifts (pairs, fours, eights) and leave as ``bits`` bytes in one
store: no state is carried from code to code, so the loops become vector code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lightning_compress.kernels.cpu.compiling import njit

BYTES = np.uint64(0x0101010101010101)
"""One in every byte."""


class Codes(NamedTuple):
    """Scratch for the codes of one block, one byte each, 8-byte aligned with words to spare."""

    byte: npt.NDArray[np.uint8]
    word: npt.NDArray[np.uint64]
    """The same memory, eight codes at a time, the first one lowest."""


@njit()
def code_scratch(scratch):
    """The codes that lie in a uint64 array."""
    return Codes(scratch.view(np.uint8), scratch)


def _load_word(typingctx, array, offset):
    def codegen(context, builder, signature, args):
        return builder.load(_word_pointer(context, builder, signature, args), align=1)

    return types.uint64(array, offset), codegen


def _store_word(typingctx, array, offset, word):
    def codegen(context, builder, signature, args):
        builder.store(args[2], _word_pointer(context, builder, signature, args), align=1)
        return context.get_dummy_value()

    return types.void(array, offset, types.uint64), codegen


def _word_pointer(context, builder, signature, args):
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.bitcast(builder.gep(array.data, [args[1]]), ir.IntType(64).as_pointer())


# numba adds the first argument itself, which a type checker cannot know
load_word: Any = intrinsic(_load_word)
"""``load_word(array, offset)``: eight bytes of a uint8 array from any offset, as uint64."""
store_word: Any = intrinsic(_store_word)
"""``store_word(array, offset, word)``: writes the eight bytes of a uint64 to a uint8 array at any offset."""


@njit()
def pack_block(codes, n, bits, payload, at):
    """Writes the lowest ``bits`` bits (1 to 8) of n codes as ceil(n * bits / 8) bytes from ``payload[at]`` on.

    ``codes`` may be changed.
    """
    byte = codes.byte
    if bits == 8:
        out = payload[at : at + n]
        for i in range(n):
            out[i] = byte[i]
        return
    for i in range(n, (n + 7) // 8 * 8):  # the last byte is padded with zero bits
        byte[i] = 0
    nbytes = (n * bits + 7) // 8
    out = payload[at : at + nbytes]
    if bits == 4:
        for i in range(nbytes):
            out[i] = byte[2 * i] & 15 | byte[2 * i + 1] << 4
    elif bits == 2:
        for i in range(nbytes):
            out[i] = byte[4 * i] & 3 | (byte[4 * i + 1] & 3) << 2 | (byte[4 * i + 2] & 3) << 4 | byte[4 * i + 3] << 6
    elif bits == 1:
        word = codes.word
        for i in range(nbytes):  # the product brings byte k's bit to bit 56 + k
            out[i] = (word[i] & BYTES) * np.uint64(0x0102040810204080) >> np.uint64(56)
    else:
        pack_words(codes.word, n, bits, out)


@njit()
def unpack_block(payload, at, n, bits, codes):
    """The inverse of :func:`pack_block`; codes beyond n may be overwritten (up to the next multiple of eight)."""
    byte = codes.byte
    if bits == 8:
        packed = payload[at : at + n]
        for i in range(n):
            byte[i] = packed[i]
        return
    nbytes = (n * bits + 7) // 8
    packed = payload[at : at + nbytes]
    if bits == 4:
        for i in range(nbytes):
            byte[2 * i] = packed[i] & 15
            byte[2 * i + 1] = packed[i] >> 4
    elif bits == 2:
        for i in range(nbytes):
            byte[4 * i] = packed[i] & 3
            byte[4 * i + 1] = packed[i] >> 2 & 3
            byte[4 * i + 2] = packed[i] >> 4 & 3
            byte[4 * i + 3] = packed[i] >> 6
    elif bits == 1:
        word = codes.word
        for i in range(nbytes):  # eight copies, bit k kept in byte k, then moved to its lowest place
            w = np.uint64(packed[i]) * BYTES & np.uint64(0x8040201008040201)
            word[i] = w + np.uint64(0x7F) * BYTES >> np.uint64(7) & BYTES
    else:
        unpack_words(packed, n, bits, codes.word)


@njit()
def lower_halves(bits):
    """Masks of the packed lower half of every two, four and eight codes; shifted by their width, of the upper half."""
    return (
        np.uint64((1 << bits) - 1) * np.uint64(0x0001000100010001),
        np.uint64((1 << 2 * bits) - 1) * np.uint64(0x0000000100000001),
        np.uint64((1 << 4 * bits) - 1),
    )


@njit()
def whole_words(nbytes, bits):
    """Groups of ``bits`` bytes that can be moved as eight bytes without touching what lies beyond ``nbytes``."""
    return 0 if nbytes < 8 else (nbytes - 8) // bits + 1


@njit()
def pack_words(word, n, bits, out):
    one, two, four = lower_halves(bits)
    b, gap = np.uint64(bits), np.uint64(8 - bits)
    b2, b4, gap2, gap4 = b + b, b * np.uint64(4), gap + gap, gap * np.uint64(4)
    for g in range((n + 7) // 8):
        w = word[g]
        w = w & one | w >> gap & one << b
        w = w & two | w >> gap2 & two << b2
        word[g] = w & four | w >> gap4 & four << b4
    nbytes = out.shape[0]
    whole = whole_words(nbytes, bits)
    for g in range(whole):
        store_word(out, g * bits, word[g])  # its upper bytes are zero; the next group comes there
    for k in range(whole * bits, nbytes):
        out[k] = word[k // bits] >> np.uint64(8 * (k % bits))


@njit()
def unpack_words(packed, n, bits, word):
    one, two, four = lower_halves(bits)
    b, gap = np.uint64(bits), np.uint64(8 - bits)
    b2, b4, gap2, gap4 = b + b, b * np.uint64(4), gap + gap, gap * np.uint64(4)
    nbytes = packed.shape[0]
    groups, whole = (n + 7) // 8, whole_words(nbytes, bits)
    for g in range(whole):
        word[g] = load_word(packed, g * bits)
    for g in range(whole, groups):
        word[g] = 0
    for k in range(whole * bits, nbytes):
        word[k // bits] |= np.uint64(packed[k]) << np.uint64(8 * (k % bits))
    for g in range(groups):
        w = word[g]
        w = w & four | (w & four << b4) << gap4
        w = w & two | (w & two << b2) << gap2
        word[g] = w & one | (w & one << b) << gap
