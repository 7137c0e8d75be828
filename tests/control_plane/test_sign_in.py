"""Sign-in with an identity provider: by `geofed login`, and at the dashboard; over real sockets."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import jwt
import pytest
from support.commands import run_here
from support.identity_provider import CLIENT, IdentityProvider, identity_provider, rsa_key

from control_plane.client import Context, ControlClient
from control_plane.oidc import Key, OidcConfig, OpenIdProvider, identity_of, require_secure, same_identity, verified
from control_plane.oidc import _provider as provider_module
from control_plane.oidc._verifying import key_id
from control_plane.server import ServeConfig
from control_plane.service.rpc._signin import SIGN_IN_SECONDS
from control_plane.service.state._callers import SignIn, sign_ins_json, sign_ins_of
from control_plane.store import open_store
from geofed_pb.errors import Exit, GeofedError
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.scenario import run
from tests.control_plane.test_dashboard import browser
from tests.control_plane.test_users import as_user, refused

AT = 1_800_000_000.0


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    with identity_provider() as running:
        yield running


@asynccontextmanager
async def with_provider(config: ServeConfig, provider: IdentityProvider, **settings: Any) -> AsyncIterator[Stage]:
    async with staged(replace(config, oidc=OidcConfig(provider.url, CLIENT, **settings))) as stage:
        yield stage


def key_of(provider: IdentityProvider, algorithm: str = "") -> Key:
    (name, private) = next(iter(provider.keys.items()))
    public = jwt.algorithms.RSAAlgorithm.to_jwk(private.public_key(), as_dict=True)
    return Key(jwt.PyJWK({**public, "kid": name}), algorithm)


def checked(provider: IdentityProvider, token: str, **asked: Any) -> dict[str, Any]:
    return verified(token, [key_of(provider)], issuer=provider.url, client_id=CLIENT, at=AT, **asked)


@pytest.fixture(scope="module")
def signer() -> IdentityProvider:
    return IdentityProvider("https://login.example.org")


@pytest.mark.parametrize("changed", [{}, {"aud": [CLIENT]}, {"azp": CLIENT}, {"nbf": AT}, {"typ": "ID"}], ids=str)
def test_a_valid_token_gives_its_claims(signer: IdentityProvider, changed: Any) -> None:
    claims = checked(signer, signer.id_token(**{"iat": AT, "exp": AT + 300, **changed}))
    assert identity_of(claims, "email") == "Ann@Example.org"
    assert identity_of(claims, "sub") == "248289761001"


@pytest.mark.parametrize(
    "changed",
    [
        {"iss": "https://login.example.com"}, {"iss": "https://login.example.org/"}, {"iss": None},
        {"aud": "another"}, {"aud": None}, {"aud": [CLIENT, "another"]}, {"aud": [CLIENT, "another"], "azp": "another"},
        {"azp": "another"}, {"sub": None}, {"iat": None}, {"exp": None}, {"exp": AT - 61}, {"iat": AT + 61},
        {"iat": AT - 700}, {"exp": "soon"}, {"exp": float("nan")}, {"iat": [AT]}, {"nbf": AT + 61},
        {"typ": "Bearer"}, {"events": {"http://schemas.openid.net/event/backchannel-logout": {}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_token_of_another_client_issuer_kind_or_time_is_refused(signer: IdentityProvider, changed: Any) -> None:
    token = signer.id_token(**{"iat": AT, "exp": AT + 300, **changed})
    with pytest.raises(GeofedError) as caught:
        checked(signer, token)
    assert caught.value.code == "UNAUTHENTICATED"


@pytest.mark.parametrize("type_", ["at+jwt", "logout+jwt", "JWE"])
def test_another_type_of_token_is_refused_by_its_header(type_: str) -> None:
    token = jwt.encode({"sub": "1"}, rsa_key(), algorithm="RS256", headers={"typ": type_})
    with pytest.raises(GeofedError, match="it is a token of type"):
        key_id(token)


def test_a_key_that_names_its_algorithm_is_for_no_other(signer: IdentityProvider) -> None:
    claims = {"iss": signer.url, "aud": CLIENT, "sub": "1", "iat": AT, "exp": AT + 9}
    private = next(iter(signer.keys.values()))
    asked: dict[str, Any] = {"issuer": signer.url, "client_id": CLIENT, "at": AT}
    for algorithm in ("RS256", "RS512", "PS256"):
        token = jwt.encode(claims, private, algorithm=algorithm)
        assert verified(token, [key_of(signer)], **asked) == claims
        for stated in ("RS256", "RS512", "PS256"):
            if stated != algorithm:
                with pytest.raises(GeofedError, match="for this algorithm"):
                    verified(token, [key_of(signer, stated)], **asked)


def test_a_token_without_a_nonce_or_with_another_is_refused(signer: IdentityProvider) -> None:
    checked(signer, signer.id_token(iat=AT, exp=AT + 9, nonce="n1"), nonce="n1")
    for other in (None, "", "n2", ["n1"], "é"):
        with pytest.raises(GeofedError, match="does not belong to this sign-in"):
            checked(signer, signer.id_token(iat=AT, exp=AT + 9, nonce=other), nonce="n1")
    with pytest.raises(GeofedError, match="does not belong to this sign-in"):
        checked(signer, signer.id_token(iat=AT, exp=AT + 9, nonce="n1"))


def test_identities_are_the_same_but_for_the_case_of_ascii_letters() -> None:
    assert same_identity("Ann@Example.org", "ann@example.ORG")
    assert not same_identity("\u212aate@example.org", "kate@example.org"), "a Kelvin sign"
    assert not same_identity("AbC@clients", "aBc@clients", "sub")
    assert same_identity("AbC@clients", "AbC@clients", "sub")


@pytest.mark.parametrize(
    "claims", [{}, {"email": ""}, {"email": ["a@b"]}, {"email": "a@b"}, {"email": "a@b", "email_verified": "true"}]
)
def test_an_address_that_nobody_has_verified_is_nobody(claims: dict[str, Any]) -> None:
    with pytest.raises(GeofedError) as caught:
        identity_of(claims, "email")
    assert caught.value.code == "UNAUTHENTICATED"


def test_an_address_over_which_others_could_read_is_refused() -> None:
    for url in ("https://login.example.org/realm", "http://127.0.0.1:80", "http://localhost", "http://[::1]:5000"):
        require_secure(url, "it")
    for url in ("http://login.example.org", "ftp://localhost", "login.example.org", "", "https://", "http://[::1"):
        with pytest.raises(GeofedError) as caught:
            require_secure(url, "it")
        assert caught.value.code == "CONFIG_INVALID"


def test_without_a_token_the_control_plane_that_leads_is_found(
    serve_config: ServeConfig, provider: IdentityProvider
) -> None:
    async def scenario() -> None:
        async with with_provider(serve_config, provider) as stage:
            await stage.client.add_user("ann", identity="ann@example.org")
            both = f"127.0.0.1:9,{stage.context.address}"
            async with ControlClient(both, stage.context.ca_file.read_bytes(), "") as client:
                assert (await client.sign_in_options()).issuer == provider.url
                assert (await client.sign_in(provider.id_token())).user.name == "ann"
                await refused(client.users(), "UNAUTHENTICATED")

    run(scenario())


def test_forged_tokens_are_refused(serve_config: ServeConfig, provider: IdentityProvider) -> None:
    stranger = IdentityProvider(provider.url)
    unsigned = jwt.encode({"iss": provider.url, "aud": CLIENT, **provider.claims}, "", algorithm="none")
    secret = jwt.encode({"iss": provider.url, "aud": CLIENT}, "s" * 32, algorithm="HS256", headers={"kid": "first"})
    other = IdentityProvider(provider.url)
    other.new_key("other")

    async def scenario() -> None:
        async with with_provider(serve_config, provider) as stage:
            await stage.client.add_user("ann", identity="ANN@example.org")
            forged = (stranger.id_token(), unsigned, secret, other.id_token(), "", "a.b.c", "é", "x" * (17 << 10))
            for token in forged:
                await refused(stage.client.sign_in(token), "UNAUTHENTICATED", "is not valid")
            # However many unknown keys are named, the provider is asked for them once in a while only.
            assert provider.keys_read == 1
            assert (await stage.client.sign_in(provider.id_token())).user.name == "ann"

    run(scenario())


def test_a_new_key_of_the_provider_is_found(provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_module, "_AGAIN_SECONDS", 0.0)

    async def scenario() -> None:
        known = OpenIdProvider(provider.url, CLIENT)
        await known.verify(provider.id_token(), time.time())
        provider.new_key("second")
        await known.verify(provider.id_token(), time.time())

    run(scenario())


def test_a_sign_in_lasts_until_it_is_revoked(serve_config: ServeConfig, provider: IdentityProvider) -> None:
    async def scenario() -> None:
        async with with_provider(serve_config, provider) as stage:
            await refused(stage.client.sign_in(provider.id_token()), "FORBIDDEN", "has the identity Ann@Example.org")
            added = await stage.client.add_user("ann", identity="ann@example.org", role="viewer")
            assert (added.token, added.user.identity) == ("", "ann@example.org")
            error = await refused(
                stage.client.add_user("bob", identity="ann@example.ORG"), "ILLEGAL_STATE", "of user ann"
            )
            assert "geofed user change ann --identity ''" in error.hint
            first, second = [await stage.client.sign_in(provider.id_token()) for _ in range(2)]
            assert first.token != second.token
            assert (first.user.role, second.user.sign_ins) == ("viewer", 2)
            async with as_user(stage, first.token) as ann, as_user(stage, second.token) as elsewhere:
                assert [user.name for user in await ann.users()] == ["ann"]
                await ann.sign_out()
                await refused(ann.users(), "UNAUTHENTICATED", "unknown")
                assert [user.sign_ins for user in await elsewhere.users()] == [1]
                await stage.client.change_user("ann", role="auditor")
                assert (await elsewhere.users())[0].role == "auditor"
                late = provider.id_token()
                # The operator's own token is no sign-in.
                await stage.client.sign_out()
                assert await stage.client.users()
                await stage.client.change_user("ann", identity="")
                await refused(elsewhere.users(), "UNAUTHENTICATED")
            await refused(stage.client.sign_in(late), "FORBIDDEN")
            kinds = [event.kind async for event in stage.client.watch("", follow=False)]
            shown = [kind for kind in kinds if kind.startswith("user.sign")]
            assert shown == ["user.signed-in", "user.signed-in", "user.signed-out"]
        stored = b"".join(path.read_bytes() for path in serve_config.state_dir.glob("state.db*"))
        assert not any(token.encode() in stored for token in (first.token, second.token))

    run(scenario())


@pytest.mark.slow
def test_an_id_token_is_exchanged_once(serve_config: ServeConfig, provider: IdentityProvider) -> None:
    async def scenario() -> None:
        async with with_provider(serve_config, provider) as stage:
            await stage.client.add_user("ann", identity="ann@example.org")
            once = provider.id_token()
            token = (await stage.client.sign_in(once)).token
            await refused(stage.client.sign_in(once), "UNAUTHENTICATED", "has been used before")
            await refused(stage.client.sign_in(f"{once}=="), "UNAUTHENTICATED", "has been used before")
            async with as_user(stage, token) as ann:
                await ann.sign_out()
            await refused(stage.client.sign_in(once), "UNAUTHENTICATED", "has been used before")
            for identity in ("", "ann@example.org"):
                await stage.client.change_user("ann", identity=identity)
            await refused(stage.client.sign_in(once), "UNAUTHENTICATED", "has been used before")
            of_dashboard = provider.id_token(nonce="n")
            await refused(stage.client.sign_in(of_dashboard), "UNAUTHENTICATED", "does not belong to this sign-in")
            assert (await stage.client.users())[0].sign_ins == 0

    run(scenario())


def test_another_identity_ends_the_token(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            for identity in ("ann@example.org", ""):
                if not identity:
                    await stage.client.change_user("ann", identity="ann@example.org")
                token = (
                    (await stage.client.add_user("ann")).token
                    if identity
                    else (await stage.client.change_user("ann", new_token=True)).token
                )
                async with as_user(stage, token) as ann:
                    assert await ann.users()
                    await stage.client.change_user("ann", identity=identity)
                    await refused(ann.users(), "UNAUTHENTICATED", "expired")
            kept = (await stage.client.change_user("ann", identity="ann@example.org", new_token=True)).token
            async with as_user(stage, kept) as ann:
                assert await ann.users()
            for blank in (stage.client.change_user("ann", identity=" "), stage.client.add_user("bob", identity="\t")):
                await refused(blank, "CONFIG_INVALID", "cannot be an identity")
            assert [(user.name, user.identity) for user in await stage.client.users()] == [("ann", "ann@example.org")]

    run(scenario())


def test_an_address_that_somebody_else_has_got_is_another_account(
    serve_config: ServeConfig, provider: IdentityProvider
) -> None:
    async def scenario() -> None:
        async with with_provider(serve_config, provider) as stage:
            await stage.client.add_user("ann", identity="ann@example.org")
            await stage.client.sign_in(provider.id_token())
            provider.claims["sub"] = "another"
            await refused(stage.client.sign_in(provider.id_token()), "FORBIDDEN", "is not the account")
            await stage.client.change_user("ann", identity="ann@example.org")
            assert (await stage.client.sign_in(provider.id_token())).user.name == "ann"

    run(scenario())


def test_a_provider_that_fails_is_asked_once_in_a_while(provider: IdentityProvider) -> None:
    async def scenario() -> None:
        known, at = OpenIdProvider(provider.url, CLIENT), time.time()
        provider.broken = True
        for _ in range(20):
            await refused(known.verify(provider.id_token(), at), "UNAVAILABLE", "no usable key")
        assert provider.keys_read == 1
        with pytest.raises(GeofedError, match="not one of https"):
            OpenIdProvider("http://login.example.org", CLIENT)

    run(scenario())


@pytest.mark.slow
def test_a_user_has_a_few_sign_ins_at_a_time_and_each_ends(
    serve_config: ServeConfig, provider: IdentityProvider
) -> None:
    async def scenario() -> None:
        async with with_provider(serve_config, provider) as stage:
            await stage.client.add_user("ann", identity="ann@example.org")
            tokens = [(await stage.client.sign_in(provider.id_token())).token for _ in range(11)]
            async with as_user(stage, tokens[0]) as oldest, as_user(stage, tokens[1]) as next_one:
                await refused(oldest.users(), "UNAUTHENTICATED")
                assert (await next_one.users())[0].sign_ins == 10
        with open_store(f"sqlite:///{serve_config.state_dir / 'state.db'}") as store:
            (ann,) = store.users()
            aged = [replace(one, expires_at=one.expires_at - SIGN_IN_SECONDS) for one in sign_ins_of(ann)]
            from control_plane.store import Change

            store.commit(Change(users=(replace(ann, sign_ins_json=sign_ins_json(aged)),)))
        async with with_provider(serve_config, provider) as stage, as_user(stage, tokens[1]) as ann_now:
            error = await refused(ann_now.users(), "UNAUTHENTICATED", "the sign-in of ann expired on ")
            assert "geofed login" in error.hint

    run(scenario())


@pytest.mark.slow
def test_without_a_provider_login_says_so(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            error = await refused(stage.client.sign_in_options(), "ILLEGAL_STATE", "has no identity provider")
            assert "geofed user add" in error.hint
            await refused(stage.client.sign_in("x"), "ILLEGAL_STATE")
        for gone in ("http://127.0.0.1:9",):
            async with staged(replace(serve_config, oidc=OidcConfig(gone, CLIENT))) as stage:
                header = jwt.encode({}, "", algorithm="none")
                await refused(stage.client.sign_in(header), "UNAUTHENTICATED")
                provider = IdentityProvider(gone)
                error = await refused(stage.client.sign_in(provider.id_token()), "UNAVAILABLE", "does not answer")
                assert "identity provider runs" in error.hint

    run(scenario())


@pytest.mark.slow
def test_login_makes_a_context_that_commands_use(
    serve_config: ServeConfig, provider: IdentityProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, folder = tmp_path / "home", tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.delenv("GEOFED_CONTEXT", raising=False)
    monkeypatch.chdir(folder)

    async def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        call = functools.partial(run_here, *arguments, program="geofed", XDG_CONFIG_HOME=str(home))
        return await asyncio.to_thread(call)

    async def scenario() -> None:
        async with with_provider(serve_config, provider) as stage:
            await stage.client.add_user("ann", identity="ann@example.org")
            done = await command("login", stage.context.address, "--ca-file", str(stage.context.ca_file))
            assert done.returncode == 0, done.stderr
            assert f"{provider.url}/activate?user_code=WDJB-MJHT" in done.stderr
            assert "must show the code WDJB-MJHT" in done.stderr
            assert "ann (member)" in done.stdout
            token = home / "geofed/credentials/geofed/token"
            assert stat.S_IMODE(token.stat().st_mode) == 0o600
            context = Context.load(home / "geofed/contexts/geofed.json")
            async with ControlClient.connect(context) as client:
                assert (await client.users())[0].name == "ann"
            (listed,) = json.loads((await command("user", "list", "-o", "json")).stdout)["data"]
            assert (listed["sign_ins"], listed["identity"]) == (1, "ann@example.org")
            assert "ann (member)" in (await command("login")).stdout
            assert (await stage.client.users())[0].sign_ins == 1, "the former one was revoked"
            assert (await command("logout")).returncode == 0
            assert not token.exists()
            assert "error[USAGE]: you are not signed in" in (await command("logout")).stderr
            provider.device_error = "access_denied"
            assert "error[FORBIDDEN]: the sign-in was refused" in (await command("login")).stderr
            provider.device_error = "expired_token"
            assert "nobody has signed in with the code in time" in (await command("login")).stderr
            assert "an address needs --ca-file" in (await command("login", stage.context.address)).stderr
            # Contexts that others have made are left alone.
            op = str(stage.config.state_dir / "context.json")
            assert (await command("context", "add", "op", op)).returncode == 0
            shown = (await command("user", "change", "ann", "--role", "member", "--context", "op")).stdout
            assert "ann@example.org; valid sign-ins: 0" in shown
            assert re.search(r"^token until +signs in$", shown, re.MULTILINE), shown
            provider.device_error = ""
            refusal = await command(
                "login", stage.context.address, "--ca-file", str(stage.context.ca_file), "--name", "op"
            )
            assert "error[USAGE]: context op is not of a sign-in" in refusal.stderr
            assert (await command("login", "--context", "op")).returncode == 0
            assert Context.load(home / "geofed/contexts/op.json").token_file == stage.context.token_file
            own = stage.config.state_dir / "context.json"
            assert "is not of a sign-in" in (await command("logout", "--context", str(own))).stderr
            assert stage.context.token_file.exists()
            again = await command("login", stage.context.address, "--ca-file", str(stage.context.ca_file))
            assert again.returncode == 0, again.stderr
            assert token.exists()
        # Of a control plane that does not answer, the token is forgotten here, and the user is told that it is valid.
        ended = await command("logout", "--context", str(home / "geofed/contexts/geofed.json"))
        assert ended.returncode == Exit.UNAVAILABLE, ended.stderr
        assert "removed from this machine, but not revoked" in " ".join(ended.stderr.split())
        assert not token.exists()

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("secret", ["", "s3cr3t"])
def test_the_dashboard_signs_in_by_the_provider(
    serve_config: ServeConfig, provider: IdentityProvider, tmp_path: Path, secret: str
) -> None:
    (tmp_path / "secret").write_text(f"{secret}\n")
    provider.client_secret = secret
    settings = {"client_secret_file": tmp_path / "secret"} if secret else {}

    async def scenario() -> None:
        async with with_provider(serve_config, provider, **settings) as stage:
            await stage.client.add_user("ann", identity="ann@example.org", role="auditor")
            async with browser(stage, "") as pages, browser(stage, "") as others, httpx2.AsyncClient() as outside:
                page = (await pages.get("/signin?next=/compare")).text
                assert 'href="/signin/provider?next=/compare"' in page
                sent = await pages.get("/signin/provider?next=//evil.example.org")
                back = (await outside.get(sent.headers["location"])).headers["location"]
                assert provider.redirects[-1] == f"https://127.0.0.1:{stage.ports.metrics}/signin/provider/back"
                for _ in range(50):
                    await others.get("/signin/provider")
                others.cookies.clear()
                # Whoever follows a link of another's sign-in is not signed in by it.
                assert (await others.get(back)).status_code == 401
                done = await pages.get(back)
                assert (done.status_code, done.headers["location"]) == (303, "/")
                assert (await pages.get("/")).status_code == 200
                assert "ann" in (await pages.get("/")).text
                assert (await pages.get(back)).status_code == 401
                assert (await stage.client.users())[0].sign_ins == 1
                # A sign-in takes the place of the browser's former one.
                sent = await pages.get("/signin/provider")
                await pages.get((await outside.get(sent.headers["location"])).headers["location"])
                assert (await stage.client.users())[0].sign_ins == 1
                await pages.post("/signout")
                assert (await stage.client.users())[0].sign_ins == 0
                assert (await pages.get("/")).status_code == 401
                # A token of `geofed login` is also in its context.
                token = (await stage.client.sign_in(provider.id_token())).token
                assert (await pages.post("/signin", data={"token": token, "next": "/"})).status_code == 303
                await pages.post("/signout")
                assert (await stage.client.users())[0].sign_ins == 1
                assert (await pages.get("/")).status_code == 401
                sent = await pages.get("/signin/provider", headers={"host": "lab.example.org"})
                shown = httpx2.URL(sent.headers["location"]).params["redirect_uri"]
                assert shown == "https://lab.example.org/signin/provider/back"
                sent = await pages.get("/signin/provider")
                state = httpx2.URL(sent.headers["location"]).params["state"]
                refusal = await pages.get(f"/signin/provider/back?state={state}&error=access_denied")
                assert refusal.status_code == 401
                assert "access_denied" in refusal.text

    run(scenario())


def test_sign_ins_are_stored_in_one_form() -> None:
    some = [SignIn("a", 1.0), SignIn("b", 2.5)]
    assert sign_ins_json([]) == ""
    assert json.loads(sign_ins_json(some)) == [["a", 1.0, ""], ["b", 2.5, ""]]
