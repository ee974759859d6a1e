"""Sixteen float32 lanes as a value of compiled code, and memory by address.

Inside functions that numba compiles, addresses are int64, and lanes become LLVM vector instructions, which every CPU
gets in the width it has. Vectorising by hand, not by the optimiser, is what makes a row's result independent of the
rows beside it: the lanes and the order of every sum are written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from paceline.models.cpu.processor import has_bfloat


class Bfloat(ir.Type):
    """One bfloat16."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat)

    def __hash__(self) -> int:
        return hash(Bfloat)


LANES = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
F32V, I32V, I16V = (ir.VectorType(lane, LANES) for lane in (FLOAT, I32, I16))

Builder = Any
Value = Any


class _Lanes(types.Type):
    """numba's name for <16 x float>."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


Lanes = _Lanes()
Int, Float, Nothing = types.int64, types.float32, types.void


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, F32V)


def lowered(result: Any, *kinds: Any, outlined: bool = False) -> Callable[[Callable[..., Value]], Any]:
    """Decorator: a function (builder, *values) that emits LLVM instructions becomes callable from compiled code.

    With `outlined` (and no result) the instructions are emitted once, as a function of their own, however often it is
    called: long ones would otherwise be copied to each caller and compiled there.
    """

    def decorate(emit: Callable[..., Value]) -> Any:
        def codegen(context: Any, builder: Builder, signature: Any, args: tuple[Value, ...]) -> Value:
            if outlined:
                _outlined(builder, emit, args)
                return context.get_dummy_value()
            value = emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        names = ", ".join(f"a{i}" for i in range(len(kinds)))
        space: dict[str, Any] = {"answer": (result(*kinds), codegen)}
        exec(f"def {emit.__name__}(typing, {names}): return answer", space)  # numba counts the parameters
        typed = space[emit.__name__]
        typed.__doc__, typed.__module__ = emit.__doc__, emit.__module__
        return intrinsic(typed)

    return decorate


def _outlined(builder: Builder, emit: Callable[..., Value], args: tuple[Value, ...]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, kind, f"{emit.__module__}.{emit.__name__}")
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block())
        emit(inside, *function.args)
        inside.ret_void()
    builder.call(function, args)


def pointer(builder: Builder, address: Value, offset: int = 0) -> Value:
    """Emit a pointer to an integer address plus a constant number of bytes."""
    base = builder.inttoptr(address, I8.as_pointer())
    return builder.gep(base, [ir.Constant(I64, offset)]) if offset else base


def stack_memory(builder: Builder, size: int) -> Value:
    """Emit the address of so many bytes on the stack, aligned to 64, for as long as the function runs.

    Unlike those of numba's `alloca_once` they are not set to zero, which takes LLVM half a minute for 24 KiB.
    """
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(I8, size))
        memory.align = 64
        return builder.ptrtoint(memory, I64)


def load_at(builder: Builder, address: Value, kind: Any, offset: int = 0) -> Value:
    """Emit a load of an LLVM type from an integer address; no alignment is assumed."""
    return builder.load(builder.bitcast(pointer(builder, address, offset), kind.as_pointer()), align=1)


def store_at(builder: Builder, address: Value, value: Value, offset: int = 0) -> None:
    """Emit a store to an integer address; no alignment is assumed."""
    builder.store(value, builder.bitcast(pointer(builder, address, offset), value.type.as_pointer()), align=1)


@contextmanager
def counted(builder: Builder, count: Value) -> Iterator[Value]:
    """Emit a loop from 0 to `count` - 1 around what the block emits; `count` is 1 or more."""
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), before)
    yield index
    following = builder.add(index, ir.Constant(I64, 1))
    index.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)


def call_named(builder: Builder, name: str, result: Any, *args: Value) -> Value:
    """Emit a call of an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def splat(builder: Builder, scalar: Value) -> Value:
    """Emit all lanes of one scalar."""
    empty = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(I32V, [0] * LANES))


def fused(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """Emit a * b + c, rounded once."""
    return call_named(builder, "llvm.fma.v16f32", F32V, a, b, c)


def maximum(builder: Builder, a: Value, b: Value) -> Value:
    """Emit the larger of each pair of lanes."""
    return call_named(builder, "llvm.maxnum.v16f32", F32V, a, b)


def whole_within(builder: Builder, lanes: Value, top: float) -> Value:
    """Emit the nearest whole numbers, none beyond `top`; NaN becomes one too."""
    bounded = call_named(builder, "llvm.minnum.v16f32", F32V, maximum(builder, lanes, floats(-top)), floats(top))
    return call_named(builder, "llvm.rint.v16f32", F32V, bounded)


def integers(value: int) -> Value:
    """All lanes of one int32 constant."""
    return ir.Constant(I32V, [value] * LANES)


def floats(value: float) -> Value:
    """All lanes of one float32 constant."""
    return ir.Constant(F32V, [float(value)] * LANES)


def shuffle(builder: Builder, a: Value, b: Value, mask: list[int]) -> Value:
    """Emit lanes picked from a (0 to 15) and b (16 to 31)."""
    return builder.shuffle_vector(a, b, ir.Constant(I32V, mask))


def widen(builder: Builder, halves: Value) -> Value:
    """Emit float32 lanes of sixteen bfloat16 given as integers."""
    return builder.bitcast(builder.shl(builder.zext(halves, I32V), integers(16)), F32V)


def narrow(builder: Builder, lanes: Value) -> Value:
    """Emit sixteen bfloat16 as integers, rounded to nearest even; NaN stays NaN.

    By one instruction, subnormals become 0.
    """
    if has_bfloat():
        halves = call_named(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(Bfloat(), LANES), lanes)
        return builder.bitcast(halves, I16V)
    bits = builder.bitcast(lanes, I32V)
    odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
    rounded = builder.lshr(builder.add(builder.add(bits, odd), integers(0x7FFF)), integers(16))
    is_nan = builder.fcmp_unordered("uno", lanes, lanes)
    return builder.trunc(builder.select(is_nan, integers(0x7FC0), rounded), I16V)


@lowered(Lanes, Lanes, Lanes)
def add(builder: Builder, a: Value, b: Value) -> Value:
    """a + b."""
    return builder.fadd(a, b)


@lowered(Lanes, Lanes, Lanes)
def sub(builder: Builder, a: Value, b: Value) -> Value:
    """a - b."""
    return builder.fsub(a, b)


@lowered(Lanes, Lanes, Lanes)
def mul(builder: Builder, a: Value, b: Value) -> Value:
    """a * b."""
    return builder.fmul(a, b)


@lowered(Lanes, Lanes, Lanes)
def div(builder: Builder, a: Value, b: Value) -> Value:
    """a / b."""
    return builder.fdiv(a, b)


@lowered(Lanes, Lanes, Lanes)
def larger(builder: Builder, a: Value, b: Value) -> Value:
    """The larger of each pair of lanes."""
    return maximum(builder, a, b)


@lowered(Lanes, Lanes)
def absolute(builder: Builder, lanes: Value) -> Value:
    """Absolute values."""
    return call_named(builder, "llvm.fabs.v16f32", F32V, lanes)


@lowered(Lanes, Lanes, Lanes)
def smaller(builder: Builder, a: Value, b: Value) -> Value:
    """The smaller of each pair of lanes."""
    return call_named(builder, "llvm.minnum.v16f32", F32V, a, b)


@lowered(Lanes, Lanes, Lanes, Lanes)
def fma(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """a * b + c, rounded once."""
    return fused(builder, a, b, c)


@lowered(Lanes, Float)
def broadcast(builder: Builder, scalar: Value) -> Value:
    """All lanes of one float32."""
    return splat(builder, scalar)


@lowered(Lanes, Int)
def load(builder: Builder, address: Value) -> Value:
    """Sixteen float32 from an address."""
    return load_at(builder, address, F32V)


@lowered(Nothing, Int, Lanes)
def store(builder: Builder, address: Value, lanes: Value) -> None:
    """Sixteen float32 to an address."""
    store_at(builder, address, lanes)


@lowered(Nothing, Int, Lanes)
def store_bytes(builder: Builder, address: Value, whole: Value) -> None:
    """Write whole numbers as signed bytes."""
    store_at(builder, address, builder.trunc(builder.fptosi(whole, I32V), ir.VectorType(I8, LANES)))


@lowered(Lanes, Int)
def load_half(builder: Builder, address: Value) -> Value:
    """Sixteen bfloat16 from an address, as float32."""
    return widen(builder, load_at(builder, address, I16V))


@lowered(Nothing, Int, Lanes)
def store_half(builder: Builder, address: Value, lanes: Value) -> None:
    """Sixteen lanes to an address, rounded to bfloat16."""
    store_at(builder, address, narrow(builder, lanes))


def fold(builder: Builder, value: Value, emit: Callable[[Builder, Value, Value], Value]) -> Value:
    """Emit one scalar of all lanes: halves are combined until one is left."""
    for width in (8, 4, 2, 1):
        turned = shuffle(builder, value, value, [(lane + width) % LANES for lane in range(LANES)])
        value = emit(builder, value, turned)
    return builder.extract_element(value, ir.Constant(I32, 0))


@lowered(Float, Lanes)
def total(builder: Builder, lanes: Value) -> Value:
    """Sum of the lanes: halves are added until one is left."""
    return fold(builder, lanes, lambda b, x, y: b.fadd(x, y))


@lowered(Float, Lanes)
def largest(builder: Builder, lanes: Value) -> Value:
    """Largest lane."""
    return fold(builder, lanes, maximum)


_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_EXP = (1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0)


def emit_exponential(builder: Builder, lanes: Value) -> Value:
    """Emit e^x to 2 units in the last place: 2^n times a polynomial of what is left. 0 below -87.3.

    Above 88 its value at 88.
    """
    top = builder.select(builder.fcmp_ordered(">", lanes, floats(88.0)), floats(88.0), lanes)
    low = builder.fcmp_ordered("<", top, floats(-87.3))
    x = builder.select(low, floats(0.0), top)
    turns = call_named(builder, "llvm.rint.v16f32", F32V, builder.fmul(x, floats(_LOG2_E)))
    rest = fused(builder, turns, floats(-_LN2_LOW), fused(builder, turns, floats(-_LN2_HIGH), x))
    value = floats(_EXP[0])
    for factor in _EXP[1:]:
        value = fused(builder, value, rest, floats(factor))
    power = builder.shl(builder.fptosi(turns, I32V), integers(23))
    scaled = builder.bitcast(builder.add(builder.bitcast(value, I32V), power), F32V)
    return builder.select(low, floats(0.0), scaled)


@lowered(Lanes, Lanes)
def exponential(builder: Builder, lanes: Value) -> Value:
    """e^x, see `emit_exponential`."""
    return emit_exponential(builder, lanes)


_ERF, _ERF_STEP = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592), 0.3275911


@lowered(Lanes, Lanes)
def error_function(builder: Builder, lanes: Value) -> Value:
    """erf(x) to 1.5e-7: 1 - e^(-x^2) times a polynomial of 1 / (1 + 0.33 |x|) (Abramowitz and Stegun, 7.1.26)."""
    size = call_named(builder, "llvm.fabs.v16f32", F32V, lanes)
    share = builder.fdiv(floats(1.0), fused(builder, size, floats(_ERF_STEP), floats(1.0)))
    value = floats(_ERF[0])
    for factor in _ERF[1:]:
        value = fused(builder, value, share, floats(factor))
    rest = builder.fmul(builder.fmul(value, share), emit_exponential(builder, builder.fneg(builder.fmul(size, size))))
    return call_named(builder, "llvm.copysign.v16f32", F32V, builder.fsub(floats(1.0), rest), lanes)


_ARTANH = (1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0)


@lowered(Lanes, Lanes)
def softplus(builder: Builder, lanes: Value) -> Value:
    """log(1 + e^x) to a few units in the last place: the larger of x and 0, plus log(1 + u) = 2 artanh(u / (2 + u)) of
    u = e^-|x|.
    """
    size = call_named(builder, "llvm.fabs.v16f32", F32V, lanes)
    small = emit_exponential(builder, builder.fneg(size))
    share = builder.fdiv(small, builder.fadd(small, floats(2.0)))
    squared, value = builder.fmul(share, share), floats(_ARTANH[0])
    for factor in _ARTANH[1:]:
        value = fused(builder, value, squared, floats(factor))
    return fused(builder, builder.fmul(share, floats(2.0)), value, maximum(builder, lanes, floats(0.0)))


@lowered(Float, Float)
def root(builder: Builder, value: Value) -> Value:
    """Square root."""
    return call_named(builder, "llvm.sqrt.f32", FLOAT, value)


@lowered(Int, Int)
def read(builder: Builder, address: Value) -> Value:
    """The int64 at an address."""
    return load_at(builder, address, I64)


@lowered(Nothing, Int, Int)
def write(builder: Builder, address: Value, value: Value) -> None:
    """An int64 to an address."""
    store_at(builder, address, value)


@lowered(Nothing, Int, Float)
def write_float(builder: Builder, address: Value, value: Value) -> None:
    """A float32 to an address."""
    store_at(builder, address, value)


@lowered(Float, Int)
def read_float(builder: Builder, address: Value) -> Value:
    """The float32 at an address."""
    return load_at(builder, address, FLOAT)


@lowered(Nothing, Int)
def call(builder: Builder, address: Value) -> None:
    """Call the C function `void f(void)` at an address."""
    builder.call(builder.inttoptr(address, ir.FunctionType(ir.VoidType(), []).as_pointer()), [])


@lowered(Int, Int)
def call_int(builder: Builder, address: Value) -> Value:
    """Call the C function `int f(void)` at an address."""
    result = builder.call(builder.inttoptr(address, ir.FunctionType(I32, []).as_pointer()), [])
    return builder.sext(result, I64)


@lowered(Nothing, *[Int] * 6)
def call_part(builder: Builder, address: Value, *arguments: Value) -> None:
    """Call the entry of models.cpu.latent, mixers or selected_attention at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(arguments))
    builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)
