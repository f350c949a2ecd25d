"""Evaluates AMD's pseudo-code of instructions, as the ISA reference prints it: a small language on bits with types.

Written from the reference, for `test_isa`; numbers are exact fractions rounded once, so it shares nothing with the
interpreter that it checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

FORMATS = {"f16": (11, 5), "f32": (24, 8), "f64": (53, 11), "bf16": (8, 8)}  # bits of precision, of exponent
TOKEN = re.compile(
    r"\s+|//[^\n]*|(?P<cast>\d+'[UIFB](?=\s*[\(\[;]|\s*$))|(?P<sized>\d+'(?:0x[0-9a-fA-F]+|\d+(?:\.\d+)?)U?)"
    r"|(?P<number>0x[0-9a-fA-F]+|\d+\.\d+|\d+)(?P<suffix>ULL|LL|U|F|I)?|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>\*\*|\+:|\+=|-=|<<|>>|<=|>=|<>|==|!=|&&|\|\||[-+*/%&|^~!?:=<>(){}\[\],.;])"
)


@dataclass(frozen=True)
class Value:
    """Bits with a type: u, i, f, bf, or b for raw bits."""

    kind: str
    width: int
    bits: int

    @property
    def number(self) -> Any:
        if self.kind in ("f", "bf"):
            return decode_float(self.bits, f"{self.kind}{self.width}")
        if self.kind == "i" and self.bits >> (self.width - 1):
            return self.bits - (1 << self.width)
        return self.bits


def decode_float(bits: int, kind: str) -> Fraction | float:
    """The number; a Fraction, or a float for infinities, NaN and -0."""
    precision, exponent_bits = FORMATS[kind]
    mantissa = bits & ((1 << (precision - 1)) - 1)
    exponent = bits >> (precision - 1) & ((1 << exponent_bits) - 1)
    negative = bits >> (precision - 1 + exponent_bits) & 1
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == (1 << exponent_bits) - 1:
        return math.nan if mantissa else -math.inf if negative else math.inf
    if exponent == 0 and mantissa == 0:
        return -0.0 if negative else Fraction(0)
    value = Fraction(mantissa | (1 << (precision - 1) if exponent else 0)) * Fraction(2) ** (
        max(exponent, 1) - bias - (precision - 1)
    )
    return -value if negative else value


def encode_float(number: Any, kind: str, *, toward_zero: bool = False) -> int:
    """The bits of the nearest number, ties to even."""
    precision, exponent_bits = FORMATS[kind]
    sign_at, bias = precision - 1 + exponent_bits, (1 << (exponent_bits - 1)) - 1
    infinity = ((1 << exponent_bits) - 1) << (precision - 1)
    if isinstance(number, float):
        if math.isnan(number):
            return infinity | 1 << (precision - 2)
        if math.isinf(number):
            return infinity | (number < 0) << sign_at
        if number == 0:
            return (math.copysign(1, number) < 0) << sign_at
    exact = Fraction(number)
    if exact == 0:
        return 0
    sign, exact = (exact < 0) << sign_at, abs(exact)
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > exact
    exponent = max(exponent, 1 - bias)
    scaled = exact / Fraction(2) ** (exponent - (precision - 1))
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    if not toward_zero and (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1)):
        whole += 1
    bits = (exponent + bias - 1 << (precision - 1)) + whole  # a carry goes into the exponent; denormals have none
    if bits >= infinity:
        bits = infinity - 1 if toward_zero else infinity
    return sign | bits


def of(kind: str, width: int, number: Any) -> Value:
    """A number of a type, wrapped or rounded."""
    if kind in ("f", "bf"):
        return Value(kind, width, encode_float(number, f"{kind}{width}"))
    return Value(kind, width, int(number) & ((1 << width) - 1))


def real(value: Value) -> Any:
    return value.number


def zero(number: Any) -> bool:
    return not isinstance(number, bool) and number == 0


class Memory(dict):
    """Bytes by address, read as raw bits and written by type."""

    def __getitem__(self, address: int) -> Value:
        return Value("b", 128, sum(self.get(address + n, 0) << 8 * n for n in range(16)))

    def write(self, address: int, value: Value) -> None:
        for n in range(value.width // 8):
            self.__setitem__(address + n, value.bits >> 8 * n & 255)


class Returned(Exception):
    """A lambda's result."""


class Break(Exception):
    """Out of the innermost loop."""


class Machine:
    """State and evaluation of one instruction for one lane."""

    def __init__(
        self, code: Callable[[str], str], state: dict[str, Any], *, ieee: bool = True, toward_zero: bool = False
    ):
        self.code, self.names, self.ieee, self.toward_zero = code, state, ieee, toward_zero
        self.tokens: list[tuple[str, str]] = []
        self.at = 0

    # --- tokens
    def run(self, text: str) -> None:
        saved = self.tokens, self.at
        self.tokens, self.at, position = [], 0, 0
        while position < len(text):
            found = TOKEN.match(text, position)
            if not found:
                raise SyntaxError(f"at {text[position : position + 30]!r}")
            position = found.end()
            for kind in ("cast", "sized", "number", "name", "sign"):
                if found.group(kind) is not None:
                    self.tokens.append(
                        (kind, found.group(kind) + (found.group("suffix") or "" if kind == "number" else ""))
                    )
        self.tokens.append(("end", ""))
        self.block(())
        self.tokens, self.at = saved

    def peek(self) -> str:
        return self.tokens[self.at][1]

    def take(self, expected: str | None = None) -> str:
        text = self.tokens[self.at][1]
        if expected is not None and text != expected:
            raise SyntaxError(f"{expected!r} expected, found {text!r}")
        self.at += 1
        return text

    # --- statements
    def block(self, ends: tuple[str, ...], *, live: bool = True) -> str:
        while True:
            while self.peek() == ";":
                self.take()
            if self.tokens[self.at][0] == "end" or self.peek() in ends:
                return self.peek()
            self.statement(live)

    def statement(self, live: bool) -> None:
        word = self.peek()
        if word == "if":
            self.take()
            done = False
            while True:
                condition = self.condition(live and not done)
                self.take("then")
                now = live and not done and condition
                end = self.block(("elsif", "else", "endif"), live=now)
                done = done or now
                self.take()
                if end == "elsif":
                    continue
                if end == "else":
                    self.block(("endif",), live=live and not done)
                    self.take("endif")
                return
        if word == "for":
            self.loop(live)
        elif word == "declare":
            self.take()
            name = self.take()
            self.take(":")
            width, kind = self.take().split("'")
            self.names[name] = of(kind.lower(), int(width), 0) if self.peek() != "[" else [0] * 64
            while self.peek() not in (";", ""):
                self.take()
        elif word == "return":
            self.take()
            value = self.expression(live)
            if live:
                raise Returned(value)
        elif word == "break":
            self.take()
            if live:
                raise Break
        elif self.tokens[self.at + 1][1] == "=" and self.tokens[self.at + 2][1] == "lambda":
            self.define()
        else:
            self.assignment(live)

    def condition(self, live: bool) -> bool:
        value = self.expression(live)
        return live and bool(value.number)

    def loop(self, live: bool) -> None:
        self.take("for")
        name = self.take()
        self.take("in")
        first = self.expression(live)
        self.take(":")
        last = self.expression(live)
        self.take("do")
        start = self.at
        if live:
            try:
                for index in range(first.number, last.number + 1):
                    self.at = start
                    self.names[name] = of("i", 32, index)
                    self.block(("endfor",))
            except Break:
                pass
        self.at = start
        self.block(("endfor",), live=False)
        self.take("endfor")

    def define(self) -> None:
        name = self.take()
        self.take("=")
        self.take("lambda")
        self.take("(")
        parameters = []
        while self.peek() != ")":
            parameters.append(self.take())
            if self.peek() == ",":
                self.take()
        self.take(")")
        start = self.at
        depth = 0
        while True:
            depth += {"(": 1, ")": -1}.get(self.take(), 0)
            if depth == 0:
                break
        self.names[name] = (parameters, self.tokens[start + 1 : self.at - 1])

    def call(self, function: Any, arguments: list[Value]) -> Value:
        parameters, body = function
        saved = self.tokens, self.at, {p: self.names.get(p) for p in parameters}
        self.names.update(zip(parameters, arguments, strict=True))
        self.tokens, self.at = [*body, ("end", "")], 0
        try:
            if body[0][1] in ("if", "declare", "return"):
                self.block(())
                raise SyntaxError("a lambda without a result")
            return self.expression(True)
        except Returned as result:
            return result.args[0]
        finally:
            self.tokens, self.at = saved[0], saved[1]
            self.names.update(saved[2])

    # --- places that can be assigned
    def assignment(self, live: bool) -> None:
        if self.peek() == "{":
            self.take()
            parts = [self.place(live)]
            while self.peek() == ",":
                self.take()
                parts.append(self.place(live))
            self.take("}")
            self.take("=")
            value = self.expression(live)
            if live:
                at = 0
                for place in reversed(parts):
                    self.store(place, Value("b", place[3], value.bits >> at & ((1 << place[3]) - 1)))
                    at += place[3]
            return
        place = self.place(live)
        if self.peek() not in ("=", "+=", "-="):
            return  # a call without an effect here
        operator = self.take()
        value = self.expression(live)
        if not live:
            return
        if operator != "=":
            value = self.arithmetic(operator[0], self.read(place), value)
        self.store(place, value)

    def place(self, live: bool) -> tuple[str, str | None, int | None, int, Any]:
        """Name, type, lowest bit, width, index of an element."""
        name = self.take()
        kind: str | None = None
        low: int | None = None
        width, element = 0, None
        if self.peek() == "(":  # a call
            while self.take() != ")":
                pass
            return name, None, None, 0, None
        while self.peek() in (".", "["):
            if self.take() == ".":
                kind = self.take()
                if low is None or width > 1 or kind != "u1":
                    width = int(re.sub(r"\D", "", kind) or 0)
                continue
            first = self.expression(live)
            if isinstance(self.names.get(name), list | dict):
                element = first.number if live else 0
                if self.peek() == ",":
                    raise SyntaxError("two indices")
                self.take("]")
                continue
            index = first.number if live else 0
            if self.peek() == ":":
                self.take()
                second = self.expression(live)
                low = second.number if live else 0
                width = index - low + 1
            else:
                low, width = index, 1
                kind = None
            self.take("]")
        return name, kind, low, width, element

    def read(self, place: tuple[str, str | None, int | None, int, Any]) -> Value:
        name, kind, low, width, element = place
        held = self.names.get(name, Value("b", 64, 0))
        value = held[element] if element is not None else held
        if low is not None:
            value = Value("u", width, value.bits >> low & ((1 << width) - 1))
        return typed(value, kind) if kind else value

    def store(self, place: tuple[str, str | None, int | None, int, Any], value: Value) -> None:
        name, kind, low, width, element = place
        if isinstance(self.names.get(name), Memory):
            self.names[name].write(element, convert(value, str(kind)))
            return
        if element is not None:
            self.names[name][element] = convert(value, kind) if kind else value
            return
        if kind:
            value = convert(value, kind)
        if low is None and (kind is None or not isinstance(self.names.get(name), Value)):
            self.names[name] = value
            return
        low = low or 0
        old = self.names.get(name, Value("b", 64, 0))
        mask = ((1 << width) - 1) << low
        bits = (old.bits & ~mask) | (value.bits & ((1 << width) - 1)) << low
        self.names[name] = Value(old.kind, max(old.width, width + low), bits)

    # --- expressions
    LEVELS = (
        ("||",),
        ("&&",),
        ("|",),
        ("^",),
        ("&",),
        ("==", "!=", "<>"),
        ("<", ">", "<=", ">="),
        ("<<", ">>"),
        ("+", "-"),
        ("*", "/", "%"),
        ("**",),
    )

    def expression(self, live: bool) -> Value:
        condition = self.binary(0, live)
        if self.peek() != "?":
            return condition
        self.take()
        holds = live and bool(condition.number)
        first = self.expression(live and holds)
        self.take(":")
        second = self.expression(live and not holds)
        return first if holds else second

    def binary(self, level: int, live: bool) -> Value:
        if level == len(self.LEVELS):
            return self.unary(live)
        left = self.binary(level + 1, live)
        while self.peek() in self.LEVELS[level]:
            operator = self.take()
            needed = live and not (operator == "&&" and not left.number) and not (operator == "||" and left.number)
            right = self.binary(level + 1, needed)
            if live:
                left = self.arithmetic(operator, left, right) if needed else of("u", 1, operator == "||")
        return left

    def arithmetic(self, operator: str, a: Value, b: Value) -> Value:
        x, y = a.number, b.number
        if operator in ("==", "!=", "<>", "<", ">", "<=", ">="):
            if (denormal := self.denormal(operator, a, b)) is not None:
                return of("u", 1, denormal)
            if any(isinstance(v, float) and math.isnan(v) for v in (x, y)):
                return of("u", 1, operator == "!=")
            results = {"==": x == y, "!=": x != y, "<>": x != y, "<": x < y, ">": x > y, "<=": x <= y, ">=": x >= y}
            return of("u", 1, results[operator])
        if operator in ("&&", "||"):
            return of("u", 1, (bool(x) and bool(y)) if operator == "&&" else bool(x) or bool(y))
        if a.kind in ("f", "bf") or b.kind in ("f", "bf"):
            if operator == "**":
                return Value("power", 0, y)  # multiplied as a whole, see below
            if "power" in (a.kind, b.kind):
                f, power = (b, a) if a.kind == "power" else (a, b)
                number = f.number
                scaled = number if isinstance(number, float) else number * power_of_two(power.bits)
                return of(f.kind, f.width, scaled)
            widest = max((v for v in (a, b) if v.kind in ("f", "bf")), key=lambda v: v.width)
            return of(widest.kind, widest.width, float_operation(operator, x, y))
        if operator in ("<<", ">>"):
            return of(a.kind, max(a.width, 32), x << y if operator == "<<" else x >> y)
        width = max(a.width, b.width, 32)
        kind = "i" if a.kind == b.kind == "i" else "b" if a.kind == b.kind == "b" else "u"
        if kind == "u" and "i" in (a.kind, b.kind) and a.width != b.width:
            kind = a.kind if a.width > b.width else b.kind
        if operator == "/":
            return of(kind, width, abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1))
        if operator == "%":
            return of(kind, width, x % y)
        table = {"+": x + y, "-": x - y, "*": x * y, "&": a.bits & b.bits, "|": a.bits | b.bits, "^": a.bits ^ b.bits}
        return of(kind, width, table[operator])

    def denormal(self, operator: str, a: Value, b: Value) -> bool | None:
        """``x == DENORM.f32``: is it one? For f32 the pseudo-code divides in f64 and means the quotient in f32."""
        if b.kind == "f" and b.bits == -1:
            number = a.number
            limit = Fraction(2) ** (-126 if self.names["single"] else -1022)
            return not isinstance(number, float) and 0 < abs(number) < limit
        return None

    def unary(self, live: bool) -> Value:
        sign = self.peek()
        if sign in ("-", "!", "~", "+"):
            self.take()
            value = self.unary(live)
            if sign == "+" or not live:
                return value
            if sign == "!":
                return of("u", 1, not value.number)
            if sign == "~":
                return of(value.kind, value.width, ~value.bits)
            if value.kind in ("f", "bf"):
                return Value(value.kind, value.width, value.bits ^ 1 << (value.width - 1))
            return of(value.kind, value.width, -value.number)
        return self.postfix(live)

    def postfix(self, live: bool) -> Value:
        value = self.primary(live)
        while self.peek() in (".", "["):
            if self.take() == ".":
                kind = self.take()
                if live:
                    value = typed(value, kind)
                continue
            first = self.expression(live)
            if self.peek() in (":", "+:"):
                operator = self.take()
                second = self.expression(live)
                if live:
                    low, width = (
                        (second.number, first.number - second.number + 1)
                        if operator == ":"
                        else (first.number, second.number)
                    )
                    if width < 1:  # [0 : 31]: the bits reversed
                        low, width = first.number, second.number - first.number + 1
                        turned = f"{value.bits >> low & ((1 << width) - 1):0{width}b}"[::-1]
                        value = Value("u", width, int(turned, 2))
                    else:
                        value = Value("u", width, value.bits >> low & ((1 << width) - 1))
            elif live:
                value = (
                    value[first.number]
                    if isinstance(value, list | dict)
                    else Value("u", 1, value.bits >> first.number & 1)
                )
            self.take("]")
        return value

    def primary(self, live: bool) -> Value:
        kind, text = self.tokens[self.at]
        self.at += 1
        if text == "(":
            value = self.expression(live)
            self.take(")")
            return value
        if text == "{":
            parts = [self.expression(live)]
            while self.peek() == ",":
                self.take()
                parts.append(self.expression(live))
            self.take("}")
            bits = width = 0
            for part in parts if live else ():
                bits, width = bits << part.width | part.bits, width + part.width
            return Value("b", width or 1, bits)
        if kind == "cast":
            width_text, target = text.split("'")
            self.take("(")
            value = self.expression(live)
            self.take(")")
            return convert(value, f"{target.lower()}{width_text}") if live else value
        if kind == "sized":
            width_text, literal = text.split("'")
            if "." in literal:
                return of("f", int(width_text), Fraction(literal))
            return of(
                "u" if literal.endswith("U") else "i" if width_text != "1" else "u",
                int(width_text),
                int(literal.rstrip("U"), 0),
            )
        if kind == "number":
            return number_literal(text)
        if self.peek() == "(" and text not in ("if",):
            self.take()
            arguments = []
            while self.peek() != ")":
                arguments.append(self.expression(live))
                if self.peek() == ",":
                    self.take()
            self.take(")")
            return self.function(text, arguments) if live else of("u", 32, 0)
        return self.name(text, live)

    def name(self, text: str, live: bool) -> Any:
        if text in self.names:
            return self.names[text]
        constants = {"PI": math.pi, "INF": math.inf, "NAN": math.nan}
        if text in constants:
            if self.peek() == ".":
                self.take()
                kind = self.take()
                return of("f", int(kind[1:]), constants[text])
            return of("f", 64, constants[text])
        if text == "DENORM":
            self.take(".")
            return Value("f", int(self.take()[1:]), -1)
        if text in ("UNDERFLOW_F32", "UNDERFLOW_F64", "OVERFLOW_F32", "OVERFLOW_F64"):
            width = int(text[-2:])
            return of("f", width, math.inf if text.startswith("O") else Fraction(0))
        if text == "MAX_FLOAT_F32":
            return Value("f", 32, 0x7F7FFFFF)
        if text == "WAVE_MODE":
            self.take(".")
            self.take("IEEE")
            return of("u", 1, self.ieee)
        if not live:
            return of("u", 32, 0)
        if text == "tmp":
            return Value("b", 64, 0)
        raise KeyError(text)

    # --- functions
    def function(self, name: str, arguments: list[Value]) -> Value:
        held = self.names.get(name)
        if isinstance(held, tuple):
            return self.call(held, arguments)
        if conversion := re.fullmatch(r"(u|i|f|bf)(\d+)_to_(u|i|f|bf)(\d+)", name):
            kind, width = conversion.group(3), int(conversion.group(4))
            source = typed(arguments[0], conversion.group(1) + conversion.group(2))
            if kind in ("f", "bf"):
                if source.kind in ("f", "bf") and isinstance(source.number, float) and math.isnan(source.number):
                    return convert(source, f"{kind}{width}")
                return Value(kind, width, encode_float(source.number, f"{kind}{width}", toward_zero=self.toward_zero))
            return saturated(kind, width, source.number)
        if match := re.fullmatch(r"f(\d+)_to_([su])norm", name):
            number = real(typed(arguments[0], f"f{match.group(1)}"))
            number = (
                0
                if isinstance(number, float) and math.isnan(number)
                else min(max(number, -1 if match.group(2) == "s" else 0), 1)
            )
            return of("i", 16, round(Fraction(number) * (32767 if match.group(2) == "s" else 65535)))
        if name.startswith("v_"):
            return self.instruction(name, arguments)
        function = getattr(self, f"do_{name}", None)
        if function is None:
            raise KeyError(name)
        return function(*arguments)

    def instruction(self, name: str, arguments: list[Value]) -> Value:
        """Another instruction as a function."""
        if name in ("v_cvt_i16_f32", "v_cvt_u16_f32"):
            return saturated(name[6], 16, arguments[0].number)
        names = {f"S{n}": a for n, a in enumerate(arguments)}
        inner = Machine(self.code, {**names, "D0": Value("b", 64, 0), "single": self.names["single"]}, ieee=self.ieee)
        inner.run(self.code(name.upper()))
        return Value(arguments[0].kind, arguments[0].width, inner.names["D0"].bits & ((1 << arguments[0].width) - 1))

    def do_fma(self, a: Value, b: Value, c: Value) -> Value:
        product = float_operation("*", a.number, b.number)
        return of(a.kind, a.width, float_operation("+", product, c.number))

    def do_isNAN(self, a: Value) -> Value:
        return of("u", 1, isinstance(a.number, float) and math.isnan(a.number))

    def do_isSignalNAN(self, a: Value) -> Value:
        quiet = a.bits >> (FORMATS[f"f{a.width}"][0] - 2) & 1
        return of("u", 1, bool(self.do_isNAN(a).bits) and not quiet)

    def do_isQuietNAN(self, a: Value) -> Value:
        return of("u", 1, bool(self.do_isNAN(a).bits) and not self.do_isSignalNAN(a).bits)

    def do_cvtToQuietNAN(self, a: Value) -> Value:
        return Value(a.kind, a.width, a.bits | 1 << (FORMATS[f"f{a.width}"][0] - 2))

    def do_abs(self, a: Value) -> Value:
        return (
            Value(a.kind, a.width, a.bits & ~(1 << (a.width - 1)))
            if a.kind == "f"
            else of(a.kind, a.width, abs(a.number))
        )

    def do_sign(self, a: Value) -> Value:
        return of("u", 1, a.bits >> (a.width - 1))

    def do_exponent(self, a: Value) -> Value:
        precision, bits = FORMATS[f"f{a.width}"]
        return of("i", 32, a.bits >> (precision - 1) & ((1 << bits) - 1))

    def do_floor(self, a: Value) -> Value:
        return of(
            a.kind,
            a.width,
            a.number
            if isinstance(a.number, float)
            else math.floor(a.number) or (-0.0 if a.bits >> (a.width - 1) else 0),
        )

    def do_trunc(self, a: Value) -> Value:
        return of(
            a.kind,
            a.width,
            a.number if isinstance(a.number, float) else math.trunc(a.number) or (-0.0 if a.number < 0 else 0),
        )

    def do_fract(self, a: Value) -> Value:
        return of(a.kind, a.width, a.number - math.floor(a.number))

    def do_isEven(self, a: Value) -> Value:
        return of("u", 1, not (isinstance(a.number, float) and not math.isfinite(a.number)) and a.number % 2 == 0)

    def do_ldexp(self, a: Value, b: Value) -> Value:
        return of(a.kind, a.width, a.number if isinstance(a.number, float) else a.number * power_of_two(b.number))

    def do_mantissa(self, a: Value) -> Value:
        number = a.number
        if isinstance(number, float) or number == 0:
            return a
        while abs(number) >= 1:
            number /= 2
        while abs(number) < Fraction(1, 2):
            number *= 2
        return of(a.kind, a.width, number)

    def do_sqrt(self, a: Value) -> Value:
        number = a.number
        if isinstance(number, float):
            return of(a.kind, a.width, math.nan if number < 0 else number)
        return of(a.kind, a.width, math.nan if number < 0 else irrational_root(number))

    def do_pow(self, a: Value, b: Value) -> Value:
        exponent = float(b.number)
        return of(
            b.kind,
            b.width,
            math.nan
            if math.isnan(exponent)
            else math.inf
            if exponent >= 1024
            else 0.0
            if exponent < -1200
            else 2.0**exponent,
        )

    def do_log2(self, a: Value) -> Value:
        number = float(a.number)
        return of(a.kind, a.width, -math.inf if number == 0 else math.nan if not number > 0 else math.log2(number))

    def do_sin(self, a: Value) -> Value:
        return of(a.kind, a.width, math.sin(float(a.number)) if math.isfinite(float(a.number)) else math.nan)

    def do_cos(self, a: Value) -> Value:
        return of(a.kind, a.width, math.cos(float(a.number)) if math.isfinite(float(a.number)) else math.nan)

    def do_signext(self, a: Value) -> Value:
        return of("i", 64, Value("i", a.width, a.bits).number)

    def do_signext_from_bit(self, a: Value, bit: Value) -> Value:
        width = bit.number
        return of(a.kind, a.width, Value("i", width, a.bits & ((1 << width) - 1)).number if width else 0)

    def do_countbits(self, a: Value) -> Value:
        return of("u", 32, a.bits.bit_count())

    def do_s_ff1_i32_b32(self, a: Value) -> Value:
        return of("i", 32, (a.bits & -a.bits).bit_length() - 1)


def power_of_two(exponent: int) -> Fraction:
    """What is farther out than any format is as good as its end."""
    return Fraction(2) ** min(max(exponent, -3000), 3000)


def irrational_root(number: Fraction) -> Fraction:
    """A root to 200 bits, with a sticky bit where it is not exact."""
    shift = 400 - (number.numerator.bit_length() - number.denominator.bit_length())
    shift += shift & 1
    scaled = number * Fraction(2) ** shift
    root = math.isqrt(scaled.numerator // scaled.denominator)
    exact = root * root == scaled
    return Fraction(root * 2 + (not exact), 2) / Fraction(2) ** (shift // 2)


def float_operation(operator: str, x: Any, y: Any) -> Any:
    """IEEE rules around exact fractions; -0 comes as a float."""
    special = isinstance(x, float) or isinstance(y, float)
    if not special and not (operator == "/" and y == 0):
        result = x + y if operator == "+" else x - y if operator == "-" else x * y if operator == "*" else x / y
        if result == 0 and operator in ("*", "/") and ((x < 0) != (y < 0)):
            return -0.0
        return result
    if operator in ("+", "-"):
        if operator == "-":
            y = -y if y != 0 else (-0.0 if not isinstance(y, float) or math.copysign(1, y) > 0 else Fraction(0))
        if (isinstance(x, float) and (math.isnan(x) or math.isinf(x))) or (
            isinstance(y, float) and (math.isnan(y) or math.isinf(y))
        ):
            return float_or_infinity(x) + float_or_infinity(y)
        if zero(x) and zero(y):
            both = isinstance(x, float) and isinstance(y, float)
            return -0.0 if both else Fraction(0)
        return y if zero(x) else x
    a, b = float_or_infinity(x), float_or_infinity(y)
    if operator == "*":
        return a * b
    if b == 0:
        return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)
    return a / b


def float_or_infinity(number: Any) -> float:
    """Only its sign, and whether it is 0, infinite or NaN, counts."""
    return number if isinstance(number, float) else float((number > 0) - (number < 0))


def typed(value: Value, kind: str) -> Value:
    """The same bits as another type."""
    name, width = re.fullmatch(r"([a-z]+)(\d+)", kind).groups()  # type: ignore[union-attr]
    bits = value.number if value.kind == "i" else value.bits  # of a shorter signed one, the sign goes up
    return Value(name, int(width), bits & ((1 << int(width)) - 1))


def convert(value: Value, kind: str) -> Value:
    """The same number as another type; the same bits from or to raw ones."""
    name, width_text = re.fullmatch(r"([a-z]+)(\d+)", kind).groups()  # type: ignore[union-attr]
    width = int(width_text)
    if value.kind == "power":
        return value
    if name == "b" or value.kind == "b" or (value.kind not in ("f", "bf") and name not in ("f", "bf")):
        return Value(
            name,
            width,
            value.number & ((1 << width) - 1) if value.kind in ("u", "i") else value.bits & ((1 << width) - 1),
        )
    if name in ("f", "bf"):
        if value.kind in ("f", "bf"):
            if (value.kind, value.width) == (name, width):
                return value
            if isinstance(value.number, float) and math.isnan(value.number):  # keeps whether it signals
                have, want = FORMATS[f"{value.kind}{value.width}"], FORMATS[f"{name}{width}"]
                payload = value.bits & ((1 << (have[0] - 1)) - 1)
                moved = payload << (want[0] - have[0]) if want[0] >= have[0] else payload >> (have[0] - want[0]) or 1
                return Value(name, width, encode_float(math.inf, f"{name}{width}") | moved)
            return of(name, width, value.number)
        if (value.kind != "f" and value.width == width and value.bits >> 20 in (0xFFC, 0xFE0)) or value.bits == 0xFE00:
            return Value(name, width, value.bits)  # 32'F(0xffc00000): bits of a NaN
        return of(name, width, value.number)
    return saturated(name, width, value.number)


def saturated(kind: str, width: int, number: Any) -> Value:
    """Toward zero, cut off at the ends; NaN is 0."""
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind == "i" else (0, (1 << width) - 1)
    if isinstance(number, float):
        return of(kind, width, 0 if math.isnan(number) or number == 0 else high if number > 0 else low)
    return of(kind, width, min(max(math.trunc(number), low), high))


def number_literal(text: str) -> Value:
    if "." in text:
        return of("f", 32 if text.endswith("F") else 64, Fraction(text.rstrip("F")))
    digits = re.match(r"0x[0-9a-fA-F]+|\d+", text).group()  # type: ignore[union-attr]
    suffix = text[len(digits) :]
    width, kind = (64 if "LL" in suffix else 32), ("u" if suffix.startswith("U") else "i")
    number = int(digits, 0)
    return of(kind if number < 1 << (width - (kind == "i")) else "u", 64 if number >= 1 << 32 else width, number)
