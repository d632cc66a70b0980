"""Digit arithmetic with a calculator: two handwritten digits or numbers as text, one tool, one answer."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np

from mobula.actors.environments.base import Action, EnvironmentSpec, Message, Reset, Step, Tool, describe_tools, encoded

CALCULATOR = Tool("calculator", "Computes a sum, difference or product of whole numbers.", {"expression": "3 * 4"})
OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
SIGNS = ("+", "-", "*")
MAX_CHARACTERS = 64  # of an expression
MAX_VALUE = 10**9
WHITE = 16  # the brightest value in load_digits
SCALE = 7
NUMBER = re.compile(r"-?\d+")


class Calculator:
    """The reward is 1 for an answer whose last number is right, and `tool_bonus` more if the calculator was used.

    With `images` the operands are handwritten digits of scikit-learn, which the policy has to read. An option of a
    reset is `max_operand`.
    """

    def __init__(self, *, images: bool, max_operand: int, max_turns: int, tool_bonus: float) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns} is unfit: give 1 or more")
        self.spec = EnvironmentSpec(max_turns=max_turns, tools=(CALCULATOR,), demonstrates=True)
        self._images = images
        self._max_operand = self._checked(max_operand)
        self._tool_bonus = tool_bonus
        self._expression = ""
        self._result = 0
        self._has_used_tool = False
        self._digits = _digits() if images else {}

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        choice, largest = Random(seed), self._checked(options.get("max_operand", self._max_operand))
        first, second = (choice.randint(0, largest) for _ in range(2))
        sign = choice.choice(SIGNS)
        expression = f"{first} {sign} {second}"
        self._expression, self._result, self._has_used_tool = expression, evaluate(expression), False
        images = tuple(choice.choice(self._digits[value]) for value in (first, second)) if self._images else ()
        task = f"<image> {sign} <image>" if self._images else expression
        text = f"{describe_tools(self.spec.tools)}\nCompute {task} and answer with the number alone."
        return Reset((Message("user", text, images),), {"answer": str(self._result), "solution": self.demonstrate()})

    def step(self, action: Action) -> Step:
        if action.tool_calls:
            return Step((Message("tool", self._called(action)),), 0.0, False, False, {})
        numbers = NUMBER.findall(action.text)
        is_right = bool(numbers) and numbers[-1].lstrip("-").isdecimal() and _equal(numbers[-1], self._result)
        bonus = self._tool_bonus if is_right and self._has_used_tool else 0.0
        return Step((), {"answer": float(is_right), "tool": bonus}, True, False, {})

    def demonstrate(self) -> str:
        """Call the tool, then give its result."""
        if self._has_used_tool:
            return str(self._result)
        return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{self._expression}"}}}}</tool_call>'

    def close(self) -> None:
        """Nothing is held."""

    def _checked(self, max_operand: int) -> int:
        if not 0 <= max_operand <= (9 if self._images else MAX_VALUE):
            raise ValueError(f"max_operand={max_operand} is unfit: give 0 to 9 with images, else 0 to {MAX_VALUE}")
        return max_operand

    def _called(self, action: Action) -> str:
        results = []
        for call in action.tool_calls:
            if call.status != "ok":
                results.append(call.error)
                continue
            try:
                results.append(str(evaluate(str(call.arguments.get("expression", "")))))
                self._has_used_tool = True
            except ValueError as error:
                results.append(f"error: {error}")
        return "\n".join(results)


def evaluate(expression: str) -> int:
    """The value of whole numbers, `+`, `-`, `*` and brackets; nothing else is run.

    Raises:
        ValueError: it is something else, too long, or its value is too large.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError("no expression") from error
    return _value(tree)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            result = value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            result = -_value(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            result = OPERATORS[type(sign)](_value(left), _value(right))
        case _:
            raise ValueError("only whole numbers, +, -, * and brackets")
    if abs(result) > MAX_VALUE**2:
        raise ValueError("the value is too large")
    return result


def _equal(text: str, value: int) -> bool:
    return len(text) <= len(str(MAX_VALUE**2)) + 1 and int(text) == value


def _digits() -> dict[int, list[bytes]]:
    """Encoded images of scikit-learn's handwritten digits, by value."""
    from sklearn.datasets import load_digits  # slow to import, and only images need it

    images, labels = load_digits(return_X_y=True)
    grey = (images.reshape(-1, 8, 8) * 255 / WHITE).astype(np.uint8)
    pixels = np.repeat(grey[..., None], 3, axis=-1)
    found: dict[int, list[bytes]] = {digit: [] for digit in range(10)}
    for image, label in zip(pixels, labels.tolist(), strict=True):
        found[label].append(encoded(image, scale=SCALE))
    return found
