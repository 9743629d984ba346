"""Changes compiled templates: counts their steps (`Steps`), or marks the texts that they write (`Texts`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

# Filters that the environment defines for what is counted: no template can spell these names.
STEP, WRITTEN, BUILT, ADDED, JOINED = " step", " written", " built", " added", " joined"

_Node = TypeVar("_Node", bound=nodes.Node)


class Steps(NodeTransformer):
    """Inserts counts: of each iteration of a loop and each call of a macro, and of each list and text that is
    built."""

    def __init__(self) -> None:
        # How many texts of the template's own what is visited is written into.
        self._inner = 0

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return _counted(self._own_text(node))

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._own_text(node)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.Node:  # noqa: N802
        return self._own_text(node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        return self._own_text(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if self._inner:
            node.nodes = [
                one if isinstance(one, nodes.TemplateData) else _filter(one, WRITTEN) for one in node.nodes
            ]
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node.left, ADDED, [node.right])

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        first, *others = node.nodes
        return _filter(first, JOINED, others)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._built(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._built(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._built(node) if node.ctx == "load" else self.generic_visit(node)

    def _own_text(self, node: _Node) -> _Node:
        self._inner += 1
        self.generic_visit(node)
        self._inner -= 1
        return node

    def _built(self, node: nodes.Literal) -> nodes.Node:
        self.generic_visit(node)
        try:
            node.as_const()
        except nodes.Impossible:
            return _filter(node, BUILT)
        return node  # it is one and the same each time


def _counted(node: nodes.For | nodes.Macro) -> nodes.Node:
    """Counts a step each time that the body begins."""
    chars = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
    step = _filter(nodes.Const(chars, lineno=node.lineno, environment=node.environment), STEP)
    node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno, environment=node.environment))
    return node


def _filter(value: nodes.Expr, name: str, args: Sequence[nodes.Expr] = ()) -> nodes.Filter:
    place = {"lineno": value.lineno, "environment": value.environment}
    return nodes.Filter(value, name, [*args], [], None, None, **place)


class Texts(NodeTransformer):
    """Changes the texts that the template writes, but not those that it compares and looks for."""

    def __init__(self, change: Callable[[str], str], variables: Mapping[str, str]) -> None:
        """`variables`: texts that the template is given by name."""
        self._change = change
        self._variables = variables

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        node.data = self._change(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        if isinstance(node.value, str):
            node.value = self._change(node.value)
        return node

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802
        text = self._variables.get(node.name) if node.ctx == "load" else None
        changed = None if text is None else self._change(text)
        if changed is None or changed == text:
            return node
        return nodes.Const(changed, lineno=node.lineno, environment=node.environment)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        if node.name in ("default", "d", "join"):
            return self.generic_visit(node)
        if node.node is not None:
            node.node = self.visit(node.node)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        if isinstance(node.node, nodes.Name):  # a macro, which may write its arguments
            return self.generic_visit(node)
        node.node = self.visit(node.node)
        return node

    def visit_If(self, node: nodes.If) -> nodes.Node:  # noqa: N802
        for body in (node.body, node.elif_, node.else_):
            body[:] = [self.visit(one) for one in body]
        return node

    def visit_CondExpr(self, node: nodes.CondExpr) -> nodes.Node:  # noqa: N802
        node.expr1 = self.visit(node.expr1)
        if node.expr2 is not None:
            node.expr2 = self.visit(node.expr2)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        return node
