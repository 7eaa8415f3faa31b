"""What looks like a credential is not stored: by its name, or by what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

_NAMES: Final = re.compile(
    r"(^|[^a-z])(secrets?|[a-z0-9]*passw(or)?d|passwd|passphrase|pwd|credentials?|bearer|auth|(auth|hf|gh)?-?token"
    r"|(api|access|private|secret|license|signing|encryption|wandb|neptune|comet|openai|anthropic|hf|aws|gcp|azure|ssh)-?keys?)"
    r"($|[^a-z])"
)
"""Words of names, in small letters with '-' between them; 'tokens' and 'tokenizer' are ordinary in this field and stay."""
_ORDINARY: Final = re.compile(
    r"(^|-)(pad|padding|eos|bos|unk|mask|cls|sep|special|image|audio|video|start|end|stop|begin|first|last|next|per|num|max|min|"
    r"each|blank|class|time|decoder-start|forced-bos|forced-eos)-token($|-)"
)
"""Tokens of a vocabulary, which options of language models name."""
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_FILES: Final = re.compile(
    r"^(\.env(\..*)?|\.netrc|\.npmrc|\.pypirc|id_(rsa|dsa|ecdsa|ed25519)|.*\.(pem|key|p12|pfx|keystore|kdbx))$", re.I
)
_TEXTS: Final = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{20,}"
    r"|\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bglpat-[\w-]{20}|\bAIza[\w-]{35}"
    r"|(?<=://)[^/\s:@'\"\\<>]{0,200}:[^/\s@'\"\\<>]{1,1000}(?=@)"
)
"""Forms that their makers document: AWS, GitHub, Hugging Face, OpenAI, Slack, GitLab, Google; and a password in an address."""
_ASSIGNED: Final = re.compile(r"(?P<name>-{0,2}\+{0,2}[A-Za-z_][\w./-]*)=(?P<value>.*)", re.S)
"""`--name=value`, `NAME=value`, and `part.name=value` as Hydra has it."""
_NAMED: Final = re.compile(
    r"(?P<name>(?<![\w-])--?[A-Za-z_][\w-]{0,60}(?=\s)|(?<![\w-])-{0,2}[A-Za-z_][\w-]{0,60}(?=\s{0,4}[=:]))"
    r"(\s{0,4}[=:]\s{0,4}|\s{1,4})"
)
"""`--name `, `name=` and `name: ` in a text. Lengths have limits: the time stays linear in that of the text."""
_VALUE: Final = re.compile(r"(?!<|--)('[^'\n]*'|\"[^\"\n]*\"|[^\s'\",;|)\]}]+)")
HIDDEN: Final = "<left out>"


def is_secret_name(name: str) -> bool:
    """Whether a variable, an option or a key is called like a credential.

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "api-key", "authToken", "num_tokens", "pad_token", "author")]
    [True, True, True, False, False, False]
    """
    words = re.sub(r"[^a-z0-9]", "-", _CAMEL.sub("-", name).lower())
    return bool(_NAMES.search(_ORDINARY.sub("-", words)))


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


def redacted_text(text: str) -> str:
    """A text, say a program's output, with what has the form of a credential replaced, and what is assigned to such a name.

    >>> redacted_text("401 for https://me:pw@host/x with WANDB_API_KEY=abc and lr=1")
    '401 for https://<left out>@host/x with WANDB_API_KEY=<left out> and lr=1'
    >>> redacted_text("unrecognized arguments: --api-key abc; the token is missing")
    'unrecognized arguments: --api-key <left out>; the token is missing'
    """
    text, at = _TEXTS.sub(HIDDEN, text), 0
    shown: list[str] = []
    while (found := _NAMED.search(text, at)) is not None:
        value = _VALUE.match(text, found.end()) if is_secret_name(found["name"]) else None
        end = found.end("name") if value is None else found.end()  # what follows a name may be a name itself
        shown.append(text[at:end])
        at = end
        if value is not None:
            shown.append(HIDDEN)
            at = value.end()
    return "".join(shown) + text[at:]


def redacted_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command line with the values of options for credentials replaced; of equal length, so that places stay what they are.

    >>> redacted_arguments(["train.py", "--api-key", "abc", "--lr=1", "WANDB_API_KEY=x", "--pad-token", "<pad>"])
    ('train.py', '--api-key', '<left out>', '--lr=1', 'WANDB_API_KEY=<left out>', '--pad-token', '<pad>')
    """
    return without_secrets(arguments)[0]


def has_left_out(arguments: Sequence[str]) -> bool:
    """Whether something was replaced in this command line when it was written: it cannot be run as it stands."""
    return any(HIDDEN in argument for argument in arguments)


def without_secrets(arguments: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """A command line with the values of such options replaced, and the options' names.

    >>> without_secrets(["train.py", "--api-key", "abc", "--lr=1", "--token=x"])
    (('train.py', '--api-key', '<left out>', '--lr=1', '--token=<left out>'), ['--api-key', '--token'])
    """
    shown: list[str] = []
    named: list[str] = []
    is_value = False
    for argument in arguments:
        assigned = _ASSIGNED.fullmatch(argument)
        is_option = argument[:2] == "--" and argument[2:3].isalpha()
        if assigned is not None and is_secret_name(assigned["name"]):
            named.append(assigned["name"])
            shown.append(f"{named[-1]}={HIDDEN}")
        elif is_option and assigned is None and is_secret_name(argument):
            named.append(argument)
            shown.append(argument)
            is_value = True
            continue
        elif is_value and not is_option:  # a value may begin with '-'
            shown.append(HIDDEN)
        elif redacted_text(argument) != argument:
            named.append("an argument")
            shown.append(redacted_text(argument))
        elif argument[:1] == "-" and is_secret_name(argument) and not argument[1:2].isdigit() and " " not in argument:
            named.append(argument)
            shown.append(argument)
            is_value = True
            continue
        else:
            shown.append(argument)
        is_value = False
    return tuple(shown), named


def without_secret_values(values: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The values that do not look like credentials, and the names of those left out."""
    secret = [name for name, value in values.items() if is_secret_name(name) or redacted_text(value) != value]
    return {name: value for name, value in values.items() if name not in secret}, secret
