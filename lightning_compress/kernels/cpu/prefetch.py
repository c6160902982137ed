"""Asking the memory for what will be needed soon. A hint: no address is wrong, and nothing is read or written."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from lightning_compress.kernels.cpu.compiling import njit

LINE = 64
"""Bytes that travel together."""


def line(array: Any) -> Any:
    """Elements of a line of ``array``. In kernels only."""
    raise NotImplementedError


@overload(line)
def _line(array):
    elements = LINE * 8 // array.dtype.bitwidth
    return lambda array: elements


def _hint(write: bool) -> Any:
    def prefetch(typingctx, array, element):
        def codegen(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            pointer, integer = ir.IntType(8).as_pointer(), ir.IntType(32)
            function = builder.module.declare_intrinsic(
                "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, integer, integer, integer])
            )
            address = builder.bitcast(builder.gep(data, [args[1]]), pointer)
            builder.call(function, [address, integer(int(write)), integer(3), integer(1)])  # to the nearest cache; data
            return context.get_dummy_value()

        return types.void(array, element), codegen

    return intrinsic(prefetch)


# numba adds the first argument itself, which a type checker cannot know
_hint_read, _hint_write = _hint(write=False), _hint(write=True)


@njit()
def prefetch_read(array, first, end):
    """The elements ``first`` to ``end`` will be read."""
    for element in range(first, end, line(array)):
        _hint_read(array, element)


@njit()
def prefetch_write(array, first, end):
    """The elements ``first`` to ``end`` will be written, all of them and perhaps without having been read."""
    for element in range(first, end, line(array)):
        _hint_write(array, element)
