"""Markdown as HTML: headings with the anchors of GitHub, coloured code, links that lead to pages of the site."""

import html
import re
from dataclasses import dataclass, field

import equations
import sources
from markdown_it import MarkdownIt
from markdown_it.token import Token

PARSER = MarkdownIt("commonmark").enable("table").enable("strikethrough")
HTML = ("html_inline", "", 0)  # a token that is already HTML
PARSER.inline.ruler.before("escape", "equation", equations.rule)


@dataclass
class Page:
    """A page of Markdown as HTML, and what a table of contents and the search need of it."""

    title: str
    body: str
    headings: list = field(default_factory=list)  # (level, anchor, text)
    sections: list = field(default_factory=list)  # (anchor, heading, words), also of the part before the first heading


def slug(title, seen):
    """The anchor that GitHub gives a heading; `seen` counts those that a page already has."""
    plain = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
    seen[plain] = seen.get(plain, -1) + 1
    return plain + (f"-{seen[plain]}" if seen[plain] else "")


def words_of(children):
    """The text of inline tokens."""
    gaps = ("softbreak", "hardbreak")
    return "".join(" " if each.type in gaps else each.meta.get("words", each.content) for each in children or ())


def render(text, path, site):
    """A page of Markdown. `site` answers `link(target, path, words)`, the address of what is linked from `path`,
    `figure(source, words, path)`, a picture as HTML, and `code_link(words, path)`, the address of a flag or verb."""
    tokens, seen = PARSER.parse(re.sub(r"<!--.*?-->\n?", "", text, flags=re.S), {"page": path}), {}
    page, tables = Page("", "", [], [["", "", []]]), 0
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            words = words_of(tokens[i + 1].children)
            anchor = slug(words, seen)
            token.attrSet("id", anchor)
            page.headings.append((int(token.tag[1]), anchor, words))
            page.title = page.title or words
            page.sections.append([anchor, words, []])
        elif token.type == "inline":
            if tokens[i - 1].type != "heading_open":
                page.sections[-1][2].append(words_of(token.children))
            token.children = inline(token.children, path, site)
        elif token.type == "fence":
            page.sections[-1][2].append(token.content)
            token.type, token.content = "html_block", sources.block(token.content, token.info.strip() or "text")
        elif token.type == "table_open":
            tables += 1
            label = html.escape(f"Table {tables} {page.sections[-1][1]}")
            region = f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
            token.type, token.content = "html_block", f"{region}<table>\n"
    page.body = PARSER.renderer.render(tokens, PARSER.options, {})
    page.body = page.body.replace("</table>", "</table></div>")
    page.body = re.sub(r"<p>(<figure.*?</figure>)</p>", r"\1", page.body, flags=re.S)
    page.body = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", page.body)
    page.body = re.sub(r'<th( style="[^"]*")?>', r'<th scope="col"\1>', page.body)
    return page


def inline(children, path, site):
    """Inline tokens whose links and pictures are those of the site; flags and verbs become links."""
    found, inside = [], False
    for i, token in enumerate(children):
        if token.type == "link_open":
            inside, end = True, next(k for k in range(i, len(children)) if children[k].type == "link_close")
            token.attrSet("href", site.link(token.attrGet("href"), path, words_of(children[i + 1 : end])))
        elif token.type == "link_close":
            inside = False
        elif token.type == "image":
            token = Token(*HTML, content=site.figure(token.attrGet("src"), words_of(token.children), path))
        elif token.type == "code_inline" and not inside and (target := site.code_link(token.content, path)):
            words = html.escape(token.content)
            token = Token(*HTML, content=f'<a class="quiet" href="{target}"><code>{words}</code></a>')
        found.append(token)
    return found


def part(text, heading):
    """The text below a heading of the second level of a Markdown page, up to the next one; empty if it has none."""
    match = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
    return match[1] if match else ""
