from __future__ import annotations

import pytest

from flatout.tune.rewrite.imports import with_import, with_start, without_unused_import
from flatout.tune.rewrite.source import parsed


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("import torch\n\nf()\n", "import os\n\nimport torch\n\nf()\n"),
        ("import sys\n\nimport torch\n", "import os\nimport sys\n\nimport torch\n"),
        ("import os\n", "import os\n"),
    ],
)
def test_an_import_goes_to_its_kind(text: str, after: str) -> None:
    assert with_import(parsed(text), "os").code == after


def test_what_follows_a_docstring_keeps_its_distance() -> None:
    text = '"""A script."""\n\nimport copy\nimport torch\n\ntorch.ones(1)\n'
    assert without_unused_import(parsed(text), "copy").code == text.replace("import copy\n", "")


def test_an_import_that_is_used_stays() -> None:
    text = '"""A script."""\nimport copy\nx = copy.copy([])\n'
    assert without_unused_import(parsed(text), "copy").code == text


FUNCTIONS = "import os\n\ndef config():\n    return 3\n\ndef main():\n    print(config())\n\n"
GUARD = 'if __name__ == "__main__":\n'


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("import os\nprint(os)\n", "import os\n\nbegin()\n\nprint(os)\n"),
        (
            f"{FUNCTIONS}{GUARD}    main()\n",
            FUNCTIONS.replace("    print", "    begin()\n    print") + f"{GUARD}    main()\n",
        ),
        (
            f"{FUNCTIONS}{GUARD}    c = config()\n    main()\n",
            f"{FUNCTIONS}{GUARD}    begin()\n    c = config()\n    main()\n",
        ),
        (
            f"{FUNCTIONS}{GUARD}    c = config()\n    print(c)\n",
            f"{FUNCTIONS}{GUARD}    begin()\n    c = config()\n    print(c)\n",
        ),
    ],
)
def test_a_start_is_where_the_script_begins_to_work(text: str, after: str) -> None:
    assert with_start(parsed(text), "begin()\n").code == after
