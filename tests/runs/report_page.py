"""Reads a report page as a browser does, for tests."""

import json
from html.parser import HTMLParser

from cukit.runs.report import write_report


class Page(HTMLParser):
    """The elements of a page, their attributes, and the texts outside of scripts and styles."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.elements, self.attributes, self.inside, self.blocks, self.text = [], [], None, {}, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += attrs
        if tag in ("script", "style"):
            self.inside = f"{tag} {dict(attrs).get('type', '')}".strip()

    def handle_endtag(self, tag):
        self.elements.append("/" + tag)
        self.inside = None

    def handle_comment(self, data):
        self.elements.append("comment")

    def handle_data(self, data):
        if self.inside:
            self.blocks[self.inside] = self.blocks.get(self.inside, "") + data
        else:
            self.text += data

    @property
    def data(self) -> dict:
        return json.loads(self.blocks["script application/json"])


def page_of(*folders, output) -> Page:
    return Page(write_report([str(folder) for folder in folders], output).read_text(encoding="utf-8"))
