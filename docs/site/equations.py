"""Equations in LaTeX, `$...$` in a line and `$$...$$` as a block, as MathML, which a browser sets without a network."""

import html
import re
from xml.etree import ElementTree

from latex2mathml.converter import convert

# As GitHub has it: no space inside of the dollars; no letter, digit or dollar next to them, as prices and shells have.
EQUATION = re.compile(r"(?<![\w\\$])(?:\$\$([^$`]+)\$\$|\$(?!\s)([^$`\n]+)(?<!\s)\$)(?![\w$])")
# Thin spaces as LaTeX sets them between a name of letters and what it belongs to, which latex2mathml leaves out.
SPACES = (
    (r"(?<=[\w})'] )(?=\\(?:log|exp|cos|tanh|mathrm)\b|\\(?:max|min)\()", r"\\, "),
    (r"(\\(?:log|exp|cos|tanh)) (?=[^\s(_^])", r"\1\\, "),
)
# Found in the MathML of latex2mathml -> what a browser sets better.
BETTER = (
    (r' xmlns="[^"]*"', ""),
    (r"<mi>&#x0007E;</mi>", "<mo>&#x223C;</mo>"),  # "is distributed as" is a relation
    (r"(&#x0002[8C];</mo><mo)(>&#x02212;)", r'\1 form="prefix"\2'),  # a sign, not a difference
    (r"<mo>(max|min)</mo>(?=<mo[^>]*>&#x00028;)", r"<mi>\1</mi>"),  # a function in front of its bracket
    # fonts of text, which a machine without a font for mathematics has, raise a prime by themselves
    (r"<msup>(<mi>[^<]+</mi>)<mi>&#x02032;</mi></msup>", r'<mrow>\1<mo lspace="0" rspace="0">&#x2032;</mo></mrow>'),
)
SHORT = 12  # signs of an equation that stays in one piece
# A line may end after one of these -> if there are more signs than this in front of it.
BREAKS = dict.fromkeys("=∝←∼", 1) | dict.fromkeys("+−/", 10) | {",": 24}


def mathml(latex, block=False):
    """An equation as MathML."""
    for pattern, better in SPACES:
        latex = re.sub(pattern, better, latex)
    text = convert(latex, display="block" if block else "inline")
    for pattern, better in BETTER:
        text = re.sub(pattern, better, text)
    math = ElementTree.fromstring(text)
    if "\\" in text or any(len(each) < 2 for each in math.iter() if each.tag in ("mfrac", "msub", "msup", "mover")):
        raise ValueError("a command without a sign or an argument")
    return text if block or len(signs(math)) <= SHORT else pieces(math[0])


def signs(*nodes):
    """What is seen of MathML."""
    return "".join(each for node in nodes for each in node.itertext())


def pieces(row):
    """A long row of MathML cut where a line may end: browsers break no line inside of an equation."""
    parts = [[]]
    for node in row:
        parts[-1].append(node)
        most = BREAKS.get(node.text) if node.tag == "mo" and not node.get("form") else None
        if most and len(signs(*parts[-1])) > most:
            node.set("form", "infix")  # as if more came after it
            parts.append([])
    return "".join(f"<math>{''.join(ElementTree.tostring(each, 'unicode') for each in part)}</math>" for part in parts)


def rule(state, silent):
    """The rule for Markdown, which code never reaches. An equation that cannot be set ends the build."""
    match = EQUATION.match(state.src, state.pos, state.posMax)
    if match and not silent:
        token = state.push("html_inline", "", 0)
        try:
            token.content = mathml(match[1] or match[2], bool(match[1]))
        except Exception as error:
            raise ValueError(f"{state.env.get('page')}: latex2mathml cannot set {match[0]}: {error!r}") from error
        token.meta["words"] = html.unescape(re.sub("<.*?>", "", token.content))
    state.pos = match.end() if match else state.pos
    return bool(match)
