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
    `name += ...`, which changes arrays in place: the checkpoint would go on holding the object of before."""
    nodes = list(ast.walk(block))
    held = _parts(nodes)
    free = [node.target for node in nodes if isinstance(node, (ast.AugAssign, ast.comprehension))]
    allowed = {id(name) for target in free for name in ast.walk(target)}
    for loop in nodes:
        if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and root(loop.iter.func) == "run":
            stored = (node for node in ast.walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
            yield from ((node.id, node.lineno) for node in stored if node.id in held and id(node) not in allowed)


def _parts(nodes: list[ast.AST]) -> set[str]:
    """The names that `run.resume` is given, also in dicts that it unpacks: `**parts`."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "run.resume"]
    keywords = [keyword for call in calls for keyword in call.keywords]
    tables = {ast.unparse(keyword.value) for keyword in keywords if keyword.arg is None}
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AugAssign)) and tables & {ast.unparse(each) for each in targets if each}:
            for part in ast.walk(node.value):
                keywords += part.keywords if isinstance(part, ast.Call) and ast.unparse(part.func) == "dict" else []
    return {keyword.value.id for keyword in keywords if isinstance(keyword.value, ast.Name)} - tables
