"""Names in any script in pictures."""

import re
from typing import Any

from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.text import Text


def legible(figure: Any) -> None:
    """Give texts with signs that the font of pictures lacks, as Chinese names, a font of this machine that has them;
    where there is none, such a sign is written as its code."""
    usual = get_font(findfont("DejaVu Sans")).get_charmap()
    for text in figure.findobj(Text):
        if not (lacking := {sign for sign in text.get_text() if ord(sign) not in usual and sign != "\n"}):
            continue
        wide = (font for font in fontManager.ttflist if re.search("CJK|Hei|Song|Ming|Gothic|Unifont", font.name))
        own = next((font.name for font in wide if lacking <= {*map(chr, get_font(font.fname).get_charmap())}), None)
        codes = {ord(sign): sign.encode("unicode_escape").decode() for sign in lacking if own is None}
        text.set_text(text.get_text().translate(codes))
        text.set_fontfamily(["DejaVu Sans", *filter(None, [own])])
