"""What compiled code must say to the processor and to the system that numba has no word for."""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.extending import intrinsic


def _pointer(_context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


def _trailing_zeros(_context, bits):  # type: ignore[no-untyped-def]
    def generate(context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], context.get_constant(types.boolean, False))

    return types.int64(types.uint64), generate


def _load_acquire(_context, array, index):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load_atomic(builder.gep(place, [arguments[1]]), "acquire", 8)

    return types.int64(array, types.intp), generate


def _store_release(_context, array, index, value):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        builder.store_atomic(arguments[2], builder.gep(place, [arguments[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), generate


pointer: Any = intrinsic(_pointer)
"""``pointer(address)``: an integer as the address that ``numba.carray`` takes."""

trailing_zeros: Any = intrinsic(_trailing_zeros)
"""``trailing_zeros(bits)`` of a uint64. A search by halves is mispredicted at every other branch."""

load_acquire: Any = intrinsic(_load_acquire)
"""``load_acquire(array, index)`` of int64: what another thread wrote before it stored this value is seen after it."""

store_release: Any = intrinsic(_store_release)
"""``store_release(array, index, value)`` of int64: seen by another thread after everything written before it."""

sleep_microseconds: Any = types.ExternalFunction("usleep", types.int32(types.uint32))
"""``sleep_microseconds(uint32)``, by the system's C library."""
