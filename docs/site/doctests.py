"""Docstring examples as code: without a fence, Markdown takes the prompt >>> for a quotation in a quotation."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put a fence around every run of lines that starts with a prompt and ends with an empty line."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
