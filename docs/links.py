"""A hook of mkdocs for links to files of the repository. The pages are read there, too, and the site has no such files:
there such a link becomes the path."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    def named(match: re.Match[str]) -> str:
        text, path = match[1].strip("`"), match[2]
        return f"`{path}`" if text in path else f"{text} (`{path}`)"

    return OUTSIDE.sub(named, markdown)
