"""What the main block of an algorithm file does: how its statements begin, and which names it binds again."""

import ast
from collections.abc import Iterator


def main_block(tree: ast.Module) -> ast.If | None:
    """The statement `if __name__ == "__main__":` of a file."""
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            return node
    return None


def beginnings(node: ast.AST) -> list[ast.expr]:
    """The expressions with which a statement begins, seen without what it assigns to."""
    if isinstance(node, (ast.Expr, ast.Assign, ast.AnnAssign)) and node.value is not None:
        return list(node.value.elts) if isinstance(node.value, ast.Tuple) else [node.value]
    return [node.iter] if isinstance(node, ast.For) else []


def root(node: ast.expr) -> str:
    """The name at the start of `name.a.b`, or an empty string."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def rebound(block: ast.If) -> Iterator[tuple[str, int]]:
    """Name and line where a loop over `run.loop(...)` binds a name again that `run.resume` was given, except by
    `name += ...`, which changes arrays in place (a checkpoint holds no numbers). A name that `run.save` is given, too,
    may be bound again."""
    nodes = list(ast.walk(block))
    held = _given(nodes, "run.resume") - _given(nodes, "run.save")
    free = [node.target for node in nodes if isinstance(node, (ast.AugAssign, ast.comprehension))]
    allowed = {id(name) for target in free for name in ast.walk(target)}
    for loop in nodes:
        if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and root(loop.iter.func) == "run":
            stored = (node for node in ast.walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
            yield from ((node.id, node.lineno) for node in stored if node.id in held and id(node) not in allowed)


def _given(nodes: list[ast.AST], verb: str) -> set[str]:
    """The names that are values in the calls of a verb, also in dicts that these unpack: `**parts`."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == verb]
    values = [keyword.value for call in calls for keyword in call.keywords]
    tables = {ast.unparse(keyword.value) for call in calls for keyword in call.keywords if keyword.arg is None}
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AugAssign)) and tables & {ast.unparse(each) for each in targets if each}:
            values += [x for part in ast.walk(node.value) if isinstance(part, ast.Dict) for x in part.values]
    return {value.id for value in values if isinstance(value, ast.Name)} - tables
