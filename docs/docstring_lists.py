"""Lists in docstrings follow their sentence at once, as in plain text; Markdown wants a blank line."""

import re

import griffe


class DocstringLists(griffe.Extension):
    """Put a blank line before the first item of each list."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Of every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^(?! *[*-] )( *)(\S.*)\n(?=\1 ? ?[*-] )",
                r"\1\2\n\n",
                obj.docstring.value,
                flags=re.MULTILINE,
            )
