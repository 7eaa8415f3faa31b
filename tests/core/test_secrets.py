"""What looks like a credential goes; everything else, and every place in a command line, stays."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.core.records.plan import Plan, digest_of_run, from_toml, to_toml
from flatout.core.secrets import HIDDEN, has_left_out, is_secret_name, redacted_arguments, redacted_text

NAMES = st.sampled_from(
    ["api-key", "api_key", "apikey", "token", "hf_token", "HF_TOKEN", "WANDB_API_KEY", "authToken", "password", "PGPASSWORD",
     "db-passwd", "secret", "client_secret", "aws_secret_access_key", "credentials", "auth", "private-key"]
)  # fmt: skip
VALUES = st.text(string.ascii_letters + string.digits + "-_/+=.:~", min_size=12, max_size=60).filter(
    lambda value: not value.startswith("--")
)
PLAIN = st.sampled_from(
    ["train.py", "--lr", "1e-3", "--epochs=3", "--num-tokens", "512", "--tokenizer", "gpt2", "--pad-token", "<pad>", "--sort-key",
     "x", "model.depth=4", "--author", "me", "-v", "--max_token", "9", "https://host/data", "key"]
)  # fmt: skip
SPELLINGS = {
    "--name value": lambda name, value: [f"--{name}", value],
    "--name=value": lambda name, value: [f"--{name}={value}"],
    "NAME=value": lambda name, value: [f"{name.upper().replace('-', '_')}={value}"],
    "hydra": lambda name, value: [f"+logger.{name}={value}"],
    "within a word": lambda name, value: [f"env {name.replace('-', '_')}='{value}' python train.py"],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@given(name=NAMES, value=VALUES, before=st.lists(PLAIN, max_size=4), after=st.lists(PLAIN, max_size=4))
@pytest.mark.slow
def test_the_value_of_a_credential_is_left_out_wherever_it_stands(
    spelling: str, name: str, value: str, before: list[str], after: list[str]
) -> None:
    words = SPELLINGS[spelling](name, value)
    shown = redacted_arguments([*before, *words, *after])
    assert value not in " ".join(shown[len(before) :][: len(words)])
    assert len(shown) == len(before) + len(words) + len(after)
    assert has_left_out(shown)
    assert redacted_arguments(shown) == shown


@given(words=st.lists(PLAIN, max_size=8))
def test_an_ordinary_command_line_stays_as_it_is(words: list[str]) -> None:
    assert redacted_arguments(words) == tuple(words)


@given(user=st.text(string.ascii_letters, max_size=8), word=VALUES.filter(lambda v: "/" not in v))
def test_a_password_in_an_address_is_left_out(user: str, word: str) -> None:
    address = f"postgres://{user}:{word}@host:5432/runs"
    assert redacted_arguments(["--db", address]) == ("--db", f"postgres://{HIDDEN}@host:5432/runs")
    assert word not in redacted_text(f"cannot connect to {address}")


@given(name=NAMES, value=VALUES)
def test_a_programs_last_words_lose_their_credentials(name: str, value: str) -> None:
    assert value not in redacted_text(f"Traceback\n  wandb.login(key)\nValueError: {name}={value} is refused")


@pytest.mark.parametrize(
    "token",
    ["ghp_" + "a1" * 18, "hf_" + "Ab" * 15, "sk-" + "x9" * 12, "AKIA" + "A1B2C3D4E5F6G7H8", "xoxb-1234567890-abc"],
)
def test_tokens_in_their_makers_form_are_known_without_a_name(token: str) -> None:
    assert token not in redacted_text(f"login with {token}")
    assert redacted_arguments(["--x", token]) == ("--x", HIDDEN)


@given(text=st.text(max_size=300))
def test_any_text_can_be_looked_through(text: str) -> None:
    assert redacted_text(redacted_text(text)) is not None
    is_secret_name(text)


def test_a_plan_fits_its_script_whatever_the_credential() -> None:
    """Arguments of a plan are not compared; the digest of the run that its losses are of leaves credentials out."""
    one, two = (("--lr", "1", "--api-key", key) for key in ("first-secret", "second-secret"))
    assert digest_of_run(b"text", one) == digest_of_run(b"text", two)
    assert digest_of_run(b"text", one) != digest_of_run(b"text", ("--lr", "2", "--api-key", "first-secret"))
    plan = Plan(script="train.py", arguments=redacted_arguments(one))
    assert from_toml(to_toml(plan)) == plan
    assert b"first-secret" not in to_toml(plan)
