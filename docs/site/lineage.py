"""The family trees of the algorithm files as one picture."""

import diffs

ROW, COLUMN, LETTER, LEFT = 26, 276, 7.9, 12  # pixels: height of a row, distance of generations, width of a letter
MIDDLE = 13  # pixels from the top of a row to the middle of its names


def picture(families, scripts, titles):
    """What the template of the page draws of the forest: names lead to pages, numbers to diffs."""
    pairs = diffs.edges(scripts)
    first = {child.name: parent.name for parent, child in reversed(pairs)}
    below = {}
    for script in scripts.values():
        below.setdefault(first.get(script.name, ""), []).append(script.name)
    spots, marks, row = {}, [], 0

    def put(name, depth):
        nonlocal row
        spots[name] = LEFT + depth * COLUMN, row * ROW + MIDDLE
        for i, child in enumerate(below.get(name, [])):
            row += i > 0
            put(child, depth + 1)

    for family, files in families.items():
        marks.append((titles[family], row * ROW + MIDDLE + 9))
        row += 1.4
        for script in files:
            if script.name not in first:
                put(script.name, 0)
                row += 1
        row += 0.6
    width = max(x + len(name) * LETTER for name, (x, _) in spots.items()) + LEFT
    arrows = [arrow(spots, parent, child, first[child.name] != parent.name) for parent, child in pairs]
    return {"width": width, "height": row * ROW, "left": LEFT, "marks": marks, "arrows": arrows, "spots": spots}


def arrow(spots, parent, child, second):
    """The line from a file to one that comes from it, with the number of lines changed, which leads to the diff."""
    (x0, y0), (x1, y1) = spots[parent.name], spots[child.name]
    start = x0 + len(parent.name) * LETTER + 6
    added, removed = diffs.changes(parent, child)
    words = f"{parent.name} to {child.name}: {added} lines added, {removed} removed"
    number = x1 - 46, y1 + 4
    if second:
        path = f"M{start} {y0} C{start + 90} {y0} {x1 - 130} {y1} {x1 - 52} {y1}"
        number = start + 4, y0 - 5
    elif y0 == y1:
        path = f"M{start} {y0} H{x1 - 52}"
    else:
        bend = x0 + 18
        path = f"M{bend} {y0 + 9} V{y1 - 8} Q{bend} {y1} {bend + 8} {y1} H{x1 - 52}"
    return path, second, diffs.address(parent, child), words, number, added + removed
