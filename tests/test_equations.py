"""Equations of the pages: GitHub and the site set each of them."""

import html
import re
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT
from markdown_it import MarkdownIt

sys.path.insert(0, str(ROOT / "docs/site"))

import equations
import writing

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "algorithms").rglob("*.md")]
PLAIN = MarkdownIt("commonmark").enable(["table", "strikethrough"])  # knows no equations
SITE = SimpleNamespace(link=lambda target, *_: target, code_link=lambda *_: None, figure=lambda *_: "")


def texts(page):
    """The inline texts of a page, without its code, and the equations in them."""
    for token in PLAIN.parse(page.read_text()):
        if token.type == "inline":
            for text in re.split(r"`[^`]*`", token.content):
                yield text, [match[1] or match[2] for match in equations.EQUATION.finditer(text)]


def body(text):
    return writing.render(text, "page.md", SITE).body


def seen(latex):
    """What is seen of an equation."""
    return html.unescape(re.sub("<.*?>", "", equations.mathml(latex)))


def test_every_equation_of_all_pages_is_set():
    """By latex2mathml, with every dollar sign of a text that is not code."""
    found = {page: [each for _, several in texts(page) for each in several] for page in PAGES}
    assert sum(map(len, found.values())) > 200 and len([page for page in found if found[page]]) > 40
    for page, several in found.items():
        for latex in several:
            parts = re.findall("<math.*?</math>", equations.mathml(latex))
            widest = max(len(html.unescape(re.sub("<.*?>", "", part))) for part in parts)
            assert widest <= 33, f"{page.name}: {latex} is too wide for 390 pixels"
        for text, of_text in texts(page):
            assert text.count("$") in (2 * len(of_text), 4 * len(of_text)), f"{page.name}: {text}"


def test_github_sets_every_equation():
    """Its Markdown comes first and must leave an equation as it is: no emphasis, no escape. Next to the dollars there
    are spaces or the marks of a sentence, and macros are those that its MathJax allows."""
    macros = set()
    for page in PAGES:
        for token in PLAIN.parse(page.read_text()):
            several = equations.EQUATION.findall(re.sub(r"`[^`]*`", "`", token.content)) * (token.type == "inline")
            for latex in map("".join, several):
                assert latex in writing.words_of(token.children), f"{page.name}: Markdown changes {latex}"
                macros |= {*re.findall(r"\\([a-zA-Z]+|.)", latex)}
            text = re.sub(r"`[^`]*`", "code", token.content) * bool(several)
            for match in equations.EQUATION.finditer(text):
                before, after = text[: match.start()][-1:], text[match.end() :][:1]
                assert before in ("", " ", "\n", "(") and after in ("", *" \n.,:;)"), f"{page.name}: {match[0]}"
    greek = "alpha beta gamma delta Delta eta kappa lambda mu nu pi sigma tau theta varepsilon"
    names = "cos exp ln log max min sqrt tanh mathrm mathbf mathcal text bar hat tilde frac left right"
    others = "cdot cdots circ geq int lVert ldots le leftarrow lt mid nabla neq parallel propto rVert sim sum"
    assert macros == {*greek.split(), *names.split(), *others.split()}


@pytest.mark.parametrize(
    "text",
    ["It costs $5 or $10.", "From $HOME to $PATH, or $HOME/$PATH.", r"Not \$a$ here.", "a$b$c", "$ a$, $a $", "`$a$`",
     "```bash\necho $a $b$\n```", "    echo $a$\n", "$a\nb$"],
)  # fmt: skip
def test_what_is_not_an_equation_stays(text):
    assert "<math" not in body(text) and body(text).count("$") == text.replace("\\$a", "$a").count("$")


def test_equations_stand_in_lines_blocks_tables_and_links():
    for text in ("$a$", "With $a$, ($a$).", "| x |\n|---|\n| $a$ |", "[the $a$](there.md)", "- **Bold**: $a$"):
        assert '<math display="inline"><mrow><mi>a</mi></mrow></math>' in body(text), text
    block = body("With\n\n$$\nx = \\frac{1}{2}\n$$\n\nit ends.")
    assert '<p><math display="block">' in block and "<mfrac>" in block and "$" not in block


def test_an_equation_is_seen_as_it_is_meant():
    assert seen(r"y = r + \gamma (1 - d) \max_{a'} \bar Q(s', a')") == "y=r+γ(1−d)maxa′Q¯(s′,a′)"
    assert seen(r"x \sim \mathcal{N}(\mu, \sigma)") == "x∼𝒩(μ,σ)"
    assert equations.mathml(r"\alpha \log \pi").count("<mspace") == 2 and "<mspace" not in equations.mathml(r"\log(x)")


def test_a_long_equation_can_be_broken_and_keeps_its_signs():
    latex = r"y = r + \gamma (1 - d) (\min(Q_1, Q_2)(s, a) - \alpha \log \pi(a \mid s))"
    parts = re.findall("<math>(.*?)</math>", equations.mathml(latex))
    assert [html.unescape(re.sub("<.*?>", "", part)) for part in parts] == [
        "y=", "r+γ(1−d)(min(Q1,Q2)(s,a)−", "αlogπ(a∣s))",
    ]  # fmt: skip


@pytest.mark.parametrize("latex", [r"\foo x", r"\frac{1}", "x^", r"\left( x", r"\bar", "{"])
def test_what_cannot_be_set_names_page_and_equation(latex):
    with pytest.raises(ValueError, match=re.escape(f"page.md: latex2mathml cannot set ${latex}$")):
        body(f"With ${latex}$.")


def test_the_search_finds_what_is_seen_of_an_equation():
    page = writing.render("# Title\n\nWith $\\bar Q$ it is.", "page.md", SITE)
    assert page.sections[-1][2] == ["With Q¯ it is."]
