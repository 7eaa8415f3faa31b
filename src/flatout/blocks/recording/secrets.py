"""What looks like a credential is not stored: by its name, or by what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

from flatout.core.records.run import FileLeftOut

_NAMES: Final = re.compile(
    r"(^|[^a-z])(secrets?|passw(or)?d|passwd|credentials?|api[_-]?keys?|access[_-]?keys?|private[_-]?keys?|auth|token)($|[^a-z])",
    re.I,
)
"""Words of names; 'tokens' and 'tokenizer' are ordinary in this field and stay."""
_FILES: Final = re.compile(
    r"^(\.env(\..*)?|\.netrc|\.npmrc|\.pypirc|id_(rsa|dsa|ecdsa|ed25519)|.*\.(pem|key|p12|pfx|keystore|kdbx))$", re.I
)
_TEXTS: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{20,}"
    r"|\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bglpat-[\w-]{20}|\bAIza[\w-]{35}"
    r"|://[^/\s:@]+:[^/\s:@]+@"
)
"""Forms that their makers document: AWS, GitHub, Hugging Face, OpenAI, Slack, GitLab, Google; and a password in an address."""
_FLAG: Final = re.compile(r"^--?(?P<name>[\w-]+)(=(?P<value>.*))?$", re.S)
HIDDEN: Final = "<left out>"


def is_secret_name(name: str) -> bool:
    """Whether a variable, an option or a key is called like a credential.

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "api-key", "num_tokens", "author")]
    [True, True, False, False]
    """
    return bool(_NAMES.search(name.replace("_", "-")))


def is_secret_text(text: str) -> bool:
    """Whether a text holds something in the form of a credential."""
    return bool(_TEXTS.search(text))


def is_secret_file(path: str) -> bool:
    """Whether a file is one for credentials, by its name.

    >>> [is_secret_file(path) for path in (".env", "keys/id_rsa", "conf/secret.yaml", "train.py", "tokens.py")]
    [True, True, True, False, False]
    """
    name = PurePath(path).name
    return bool(_FILES.match(name)) or is_secret_name(PurePath(name).stem)


def without_secrets(arguments: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """A command line with the values of such options replaced, and the options' names.

    >>> without_secrets(["train.py", "--api-key", "abc", "--lr=1", "--token=x"])
    (('train.py', '--api-key', '<left out>', '--lr=1', '--token=<left out>'), ['--api-key', '--token'])
    """
    shown: list[str] = []
    named: list[str] = []
    is_value = False
    for argument in arguments:
        flag = _FLAG.match(argument)
        if flag is not None and is_secret_name(flag["name"]):
            named.append(argument.partition("=")[0])
            is_value = flag["value"] is None
            shown.append(argument if is_value else f"{named[-1]}={HIDDEN}")
            continue
        if is_value and flag is None:
            shown.append(HIDDEN)
        elif is_secret_text(argument):
            named.append("an argument")
            shown.append(HIDDEN)
        else:
            shown.append(argument)
        is_value = False
    return tuple(shown), named


def without_secret_values(values: Mapping[str, str], label: str) -> tuple[dict[str, str], list[FileLeftOut]]:
    """The values that do not look like credentials, and those left out, by their names behind the label."""
    secret = [name for name, value in values.items() if is_secret_name(name) or is_secret_text(value)]
    left_out = [FileLeftOut(name=f"{label}{name}", because="it looks like a credential") for name in secret]
    return {name: value for name, value in values.items() if name not in secret}, left_out
