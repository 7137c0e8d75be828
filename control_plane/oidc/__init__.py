"""Sign-in with an organisation's identity provider by OpenID Connect (Core 1.0, Discovery 1.0; RFC 8628, RFC 7636)."""

from control_plane.oidc._provider import SCOPE, OidcConfig, OpenIdProvider, require_secure
from control_plane.oidc._verifying import FRESH_SECONDS, LEEWAY_SECONDS, Key, identity_of, same_identity, verified

__all__ = [
    "FRESH_SECONDS",
    "LEEWAY_SECONDS",
    "SCOPE",
    "Key",
    "OidcConfig",
    "OpenIdProvider",
    "identity_of",
    "require_secure",
    "same_identity",
    "verified",
]
