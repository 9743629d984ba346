"""Sums of up to three digits with every step written out.

Each step is of one digit, and each line of a fixed width, so that what a step needs stands a fixed number
of tokens before it. `7*5+0=5c3` reads: write 5, carry 3; in a difference c1 is a borrow.

    347 * 285                         123 - 456
    5: 7*5+0=5c3 … = 1735             456 - 123
    8: … = 2776                       6-3-0=3c0 5-2-0=3c0 4-1-0=3c0 = 333
    2: … = 0694                       Result: -333
    001735 + 027760 + 069400
    5+0+0+0=5c0 … = 098895
    Result: 98895
"""

from __future__ import annotations

import random

from models.demo_training.tasks.turn import Turn, below, pick

TASK = "arithmetic"
SIGNS = ("+", "-", "*")

_QUESTIONS = (
    "What is {}?",
    "What's {}?",
    "what is {}",
    "Compute {}.",
    "Calculate {}.",
    "calculate {} please",
    "{}",
    "{} = ?",
    "{}=",
    "{}?",
    "Work out {}.",
    "How much is {}?",
)
_SPELLINGS = {
    "+": ("+", "+", "+", "plus"),
    "-": ("-", "-", "-", "minus"),
    "*": ("*", "*", "*", "times", "x", "×", "multiplied by"),
    "/": ("/", "divided by", ":"),
}
_TOO_LONG = "I can only work with whole numbers of up to three digits."
_NO_DIVISION = "I can add, subtract and multiply, but I cannot divide."
_ONE_SIGN = "I can only work with two numbers at a time."


def sum_of(draw: random.Random, *, three_digits: bool = False) -> Turn:
    """A question of any sign; three in four operands have three digits, all with `three_digits`."""
    sign = pick(draw, SIGNS)
    a, b = (_operand(draw, three_digits) for _ in range(2))
    question = pick(draw, _QUESTIONS).format(_written(draw, str(a), sign, str(b)))
    answer = worked(a, sign, b)
    result = answer.rsplit("\n", 1)[1]
    return Turn(TASK, question, answer, lambda text: text.rsplit("\n", 1)[-1] == result)


def too_hard(draw: random.Random) -> Turn:
    """A sum that the model has to decline: longer numbers, fractions, divisions, more than two numbers."""
    sign, a, b = pick(draw, SIGNS), _operand(draw, False), _operand(draw, False)
    chance = draw.random()
    if chance < 0.5:
        long = below(draw, 10 ** (1 + below(draw, 5))) * 1000 + 1000 + below(draw, 1000)
        odd = str(long) if draw.random() < 0.8 else f"{a}.{below(draw, 100)}"
        first, second = (odd, str(b)) if draw.random() < 0.5 else (str(b), odd)
        written, answer = _written(draw, first, sign, second), _TOO_LONG
    elif chance < 0.75:
        written, answer = _written(draw, str(a), "/", str(b)), _NO_DIVISION
    else:
        both = _written(draw, str(a), sign, str(b))
        written, answer = _written(draw, both, pick(draw, SIGNS), str(_operand(draw, False))), _ONE_SIGN
    return Turn(TASK, pick(draw, _QUESTIONS).format(written), answer)


def _written(draw: random.Random, a: str, sign: str, b: str) -> str:
    spelling = pick(draw, _SPELLINGS[sign])
    if draw.random() < 0.3 and len(spelling) == 1:
        return f"{a}{spelling}{b}"
    return f"{a} {spelling} {b}"


def worked(a: int, sign: str, b: int) -> str:
    """The steps and the result; operands in [0, 999]."""
    if sign == "+":
        steps, result = [f"{a:03d} + {b:03d}", _add([a, b], 3, carry_out=True)], a + b
    elif sign == "-":
        high, low = max(a, b), min(a, b)
        steps, result = [f"{high:03d} - {low:03d}", _subtract(high, low)], a - b
    else:
        steps, result = _multiply(a, b), a * b
    return "\n".join([*steps, f"Result: {result}"])


def _operand(draw: random.Random, three_digits: bool) -> int:
    if three_digits or draw.random() < 0.75:
        return 100 + below(draw, 900)
    return below(draw, 100 if draw.random() < 0.7 else 10)


def _digit(number: int, place: int) -> int:
    power: int = 10**place
    return number // power % 10


def _add(numbers: list[int], places: int, *, carry_out: bool = False) -> str:
    """Column by column from the right; the carry is each column's last addend."""
    steps, carry = [], 0
    for place in range(places):
        digits = [_digit(number, place) for number in numbers]
        total = sum(digits) + carry
        steps.append(f"{'+'.join(map(str, digits))}+{carry}={total % 10}c{total // 10}")
        carry = total // 10
    return f"{' '.join(steps)} = {sum(numbers):0{places + carry_out}d}"


def _subtract(high: int, low: int) -> str:
    steps, borrow = [], 0
    for place in range(3):
        top, bottom = _digit(high, place), _digit(low, place)
        rest = top - bottom - borrow
        steps.append(f"{top}-{bottom}-{borrow}={rest % 10}c{int(rest < 0)}")
        borrow = int(rest < 0)
    return f"{' '.join(steps)} = {high - low:03d}"


def _multiply(a: int, b: int) -> list[str]:
    lines, parts = [f"{a:03d} * {b:03d}"], []
    for place in range(3):
        factor, carry, steps = _digit(b, place), 0, []
        for column in range(3):
            digit = _digit(a, column)
            total = digit * factor + carry
            steps.append(f"{digit}*{factor}+{carry}={total % 10}c{total // 10}")
            carry = total // 10
        lines.append(f"{factor}: {' '.join(steps)} = {a * factor:04d}")
        parts.append(a * factor * 10**place)
    lines.append(" + ".join(f"{part:06d}" for part in parts))
    lines.append(_add(parts, 6))
    return lines
