"""The environment that chat templates are written for, in which each step of a template has a bound.

It is that of `transformers.PreTrainedTokenizerBase.apply_chat_template`: a sandbox with trimmed blocks, loop
controls, `{% generation %}`, a `tojson` that escapes no characters unless asked, `strftime_now`, and
`raise_exception` to refuse a conversation.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import re
import threading
from collections.abc import Callable, ItemsView, KeysView, Mapping, Sequence, ValuesView
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from services.router.text.render_budget import RenderBudget, check_output
from services.router.text.template_tree import ADDED, BUILT, JOINED, STEP, WRITTEN, Steps, Texts

# Filters, methods and functions that can build more than they are given (`_cost`).
_COSTS = frozenset(
    (
        *("batch", "center", "e", "escape", "expandtabs", "forceescape", "format", "format_map", "indent"),
        *("generate_lorem_ipsum", "join", "ljust", "pprint", "replace", "rjust", "slice", "string"),
        *("striptags", "sum", "to_bytes", "translate", "urlencode", "urlize", "wordwrap", "xmlattr", "zfill"),
    )
)
# Further filters whose results are counted. Those of all others are no larger than what they are given.
_BUILDING = frozenset(
    (
        "capitalize",
        "dictsort",
        "groupby",
        "items",
        "list",
        "lower",
        "sort",
        "striptags",
        "sum",
        "title",
        "upper",
    )
)
# Shorter texts are not counted: what there can be of them is bounded by the time.
_SMALL = 256
_DIGITS = re.compile(r"\d{1,9}")
# The largest number that a step may compute, in bits.
_MOST_BITS = 4096
# Characters that are copied in the time in which slow filters read one.
_SLOW = 64
# Characters of a paragraph of `lipsum`, by what its arguments make of one.
_LOREM = 1000
# Levels of indented JSON are written at each line.
_MOST_INDENT = 64


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates, which are rendered between `begin` and `end`."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self._running = threading.local()
        self.filters["tojson"] = self._tojson
        for name in _COSTS | _BUILDING:
            if name in self.filters:
                self.filters[name] = self._bounded(name, self.filters[name])
        self.filters |= {STEP: self._step, WRITTEN: self._written, BUILT: self._new}
        self.filters |= {ADDED: self._added, JOINED: self._joined}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def compiled(
        self, source: str, change: Callable[[str], str] | None = None, variables: Mapping[str, str] = {}
    ) -> jinja2.Template:
        """Compiles a template; jinja2.TemplateError if it is broken. `change`: of each text that it seems to
        write, of its own or of these variables."""
        tree = self.parse(source)
        if change is not None:
            tree = Texts(change, variables).visit(tree)
        return self.from_string(Steps().visit(tree))

    def begin(self) -> None:
        """Sets one budget for all that the current thread renders from now on."""
        self._running.budget = RenderBudget()

    def end(self) -> None:
        """Ends the budget that `begin` began."""
        del self._running.budget

    @property
    def _budget(self) -> RenderBudget:
        """The current rendering's; one of its own for each constant of a template that is compiled."""
        return getattr(self._running, "budget", None) or RenderBudget()

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Calls a function, a method or a macro."""
        name = getattr(called, "__name__", "")
        if name in _COSTS:
            args = self._checked(called, name, args, kwargs)
        result = super().call(context, called, *args, **kwargs)
        if type(result) is not bool and not (type(result) is str and len(result) < _SMALL):
            self._budget.built(result)
        return result

    def _checked(
        self, called: object, name: str, args: tuple[Any, ...], kwargs: Mapping[str, object]
    ) -> tuple[Any, ...]:
        """Checks what a method of a text, or `lipsum`, would build. Returns its arguments."""
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps some
        owner = getattr(method, "__self__", None)
        if owner is None or isinstance(owner, str | bytes | int):
            if name == "join" and args:
                args = ([*args[0]],)
            given = (value for key, value in kwargs.items() if not key.startswith("_"))
            budget = self._budget
            check_output(_cost(budget, name, [owner, *args, *given]))
        return args

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """Computes one of the operators that can build far more than they are given."""
        if operator == "%" and type(left) is int:
            return left % right
        if isinstance(left, int) and isinstance(right, int):
            bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(0, right)}
            if bits.get(operator, 0) > _MOST_BITS:
                raise OverflowError
            return super().call_binop(context, operator, left, right)
        budget = self._budget
        if operator == "%":
            parts = right if isinstance(right, tuple) else (right,)
            check_output(_cost(budget, operator, [left, *parts]))
        elif isinstance(left, int) or isinstance(right, int):
            count, value = (left, right) if isinstance(left, int) else (right, left)
            check_output(max(1, count) * budget.size(value))
        result = super().call_binop(context, operator, left, right)
        budget.built(result)
        return result

    def _bounded(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose cost is checked. It keeps its name and what Jinja passes to it."""
        skipped = 1 if hasattr(filter_, "jinja_pass_arg") else 0

        @functools.wraps(filter_)
        def bounded(*args: Any, **kwargs: object) -> object:  # noqa: ANN401
            budget = self._budget
            if name == "join" and len(args) > skipped:
                args = (*args[:skipped], [*args[skipped]], *args[skipped + 1 :])
            if name in _COSTS:
                check_output(_cost(budget, name, [*args[skipped:], *kwargs.values()]))
            result = filter_(*args, **kwargs)
            budget.built(result)
            return result

        return bounded

    @staticmethod
    @pass_context
    def _step(context: Context, chars: int) -> None:
        """Counts an iteration of a loop or the call of a macro, which writes `chars` characters of its
        own."""
        context.environment._running.budget.step(chars)  # type: ignore[attr-defined]

    def _written(self, value: object) -> object:
        """Counts a value that is written into a text of the template's own."""
        if type(value) is not str or len(value) >= _SMALL:
            budget = self._budget
            budget.step(_text_size(budget, value))
        return value

    def _added(self, left: Any, right: Any) -> Any:  # noqa: ANN401
        """The operator +, whose result is at most twice as large as what it is given."""
        result = left + right
        if type(result) is not str or len(result) >= _SMALL:
            budget = self._budget
            if isinstance(result, list | tuple):
                budget.note_size(result, budget.size(left) + budget.size(right))
            check_output(budget.size(result))
            budget.built(result)
        return result

    def _joined(self, *values: object) -> str:
        """Joins values as the operator ~ does."""
        budget = self._budget
        size = sum(len(one) if type(one) is str else _text_size(budget, one) for one in values)
        if size >= _SMALL:
            check_output(size)
            budget.step(size)
        return "".join(map(str, values))

    def _new(self, value: object) -> object:
        """A list, tuple or object that the template builds."""
        self._budget.built(value)
        return value

    def _tojson(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as `json.dumps` writes it, which has the same arguments."""
        budget = self._budget
        width = max(
            indent if isinstance(indent, int) else len(indent or ""), *map(len, separators or ("", ""))
        )
        if width > _MOST_INDENT:
            check_output(width * budget.size(value))
        if indent is None:
            text = json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
            budget.step(len(text))
            return text
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        pieces = []
        for piece in encoder.iterencode(value):
            budget.step(len(piece))
            pieces.append(piece)
        return "".join(pieces)


class _Generation(Extension):
    """`{% generation %}`, which marks the text of the assistant for training: it writes what is in it."""

    tags = {"generation"}  # noqa: RUF012 (as declared by Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # Variables that are set in it are its own, as in the body of a macro.
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict` of templates, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: object) -> dict[Any, Any]:  # noqa: ANN401
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:  # noqa: ANN401
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` of templates, without private attributes."""

    def __init__(*args: Any, **kwargs: object) -> None:  # noqa: ANN401
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # not what is in it, which has no bound
        return "<Namespace>"


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace has no private attributes")


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _text_size(budget: RenderBudget, value: object) -> int:
    """The characters of `str(value)`, without those that escapes take."""
    if isinstance(value, ItemsView | KeysView | ValuesView):
        return sum(map(budget.size, value))
    return budget.size(value)


def _cost(budget: RenderBudget, name: str, values: Sequence[Any]) -> int:
    """The characters that a filter, method or operator would build at most. `values`: what it is applied to,
    then its arguments."""
    text, others = values[0], values[1:]
    most = max((value for value in others if isinstance(value, int)), default=0)
    longest = max((budget.size(value) for value in others if not isinstance(value, int)), default=0)
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    length = _text_size(budget, text)
    written = text if isinstance(text, str) else ""
    match name:
        case "center" | "ljust" | "rjust" | "zfill" | "to_bytes" | "batch" | "slice":
            return length + most
        case "expandtabs":
            return length + written.count("\t") * most
        case "indent":
            return length + (written.count("\n") + 1) * max(most, longest)
        case "translate":
            return length * max(1, longest)
        case "wordwrap" | "pprint":  # tens of times slower than a copy
            return length * max(_SLOW, longest)
        case "striptags" | "urlize":  # look at all that follows for each character
            return length * length // _SLOW
        case "sum":  # copies a list for each one that it adds
            starts = any(isinstance(one, list | tuple) for one in others)
            return length * len(text) if starts and isinstance(text, list | tuple) else length
        case "replace" if len(others) > 1 and all(isinstance(one, str) for one in others[:2]):
            return length + (written.count(others[0]) if others[0] else length + 1) * len(others[1])
        case "join":
            items = text if isinstance(text, list) else next(iter(others), [])
            return longest + length + len(items) * (length if isinstance(text, str) else longest)
        case "format" | "format_map" | "%":
            widths = max(map(int, _DIGITS.findall(written)), default=0)
            fields = written.count("%") + written.count("{")
            return length + fields * (longest + max(most, widths))
        case "replace":
            return length * max(1, longest)
        case "generate_lorem_ipsum":
            return _LOREM * math.prod(max(1, value) for value in others if isinstance(value, int))
        case _:
            return length
