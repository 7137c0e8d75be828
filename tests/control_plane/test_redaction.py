"""What leaves a federation for a report of a defect has no secrets, and is otherwise as it was."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane._redaction import REMOVED, redacted, redacted_text

SECRET = st.text(string.ascii_letters + string.digits, min_size=16, max_size=40)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("abc xyz", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)


@given(SECRET, st.sampled_from(["token", "adminToken", "aws_secret_access_key", "PASSWORD", "apiKey"]), PLAIN)
def test_a_value_with_a_secrets_name_is_removed_however_deep(secret: str, name: str, beside: object) -> None:
    document = {"spec": [{"a": beside, name: secret}, {"task": {"env": {"HOME": secret, "WANDB_KEY": secret}}}]}
    told = redacted(document)
    assert secret not in json.dumps(told)
    assert told["spec"][0]["a"] == beside
    assert told["spec"][1]["task"]["env"] == {"HOME": REMOVED, "WANDB_KEY": REMOVED}


@pytest.mark.parametrize(
    "shape",
    [
        "joined with geofed1.{} today", "curl -H 'Authorization: Bearer {}' host", "redis://user:{}@host:6379/0",
        "export HF_TOKEN={}", "password: {}", "db_password='{}' host=x",
        "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\n{}",
    ],
)  # fmt: skip
@given(secret=SECRET)
def test_a_secret_in_a_line_is_removed(shape: str, secret: str) -> None:
    assert secret not in redacted_text(shape.format(secret))


@pytest.mark.parametrize(
    "line",
    [
        "Traceback: KeyError: 'tokens' in tokenizer.py:12", "loss 0.5 at step 12, 3 tokens per second",
        "link to west is down", "s3://bucket/key and https://host:8443/path", "keys: a, b",
    ],
)  # fmt: skip
def test_what_explains_a_failure_stays(line: str) -> None:
    assert redacted_text(line) == line
