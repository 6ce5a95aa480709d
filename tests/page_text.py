"""A page without its markup."""

import html
import re


def text_of(page: str) -> str:
    """What a reader sees."""
    page = re.sub(r"<(style|svg|script).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).replace("\u00a0", " ").split())
