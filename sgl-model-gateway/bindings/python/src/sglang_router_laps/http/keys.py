"""Authorization by the keys of --control-plane-api-keys and --api-key."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable
from hmac import compare_digest
from ipaddress import ip_address

from sglang_router.router_args import RouterArgs
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

Endpoint = Callable[[Request], Awaitable[Response]]

ASK = {"www-authenticate": 'Basic realm="LAPS router"'}
"""Header that makes a browser ask for a password and send the password with the page's own requests, too."""


def has_keys(args: RouterArgs) -> bool:
    """Return True if --control-plane-api-keys or --api-key is given."""
    return bool(args.control_plane_api_keys or args.api_key)


def is_local(args: RouterArgs) -> bool:
    """Return True if the router listens on a loopback address only."""
    try:
        return ip_address(args.host).is_loopback
    except ValueError:
        return bool(args.host == "localhost")


def allowed(request: Request, args: RouterArgs) -> bool:
    """Return True if ``request`` carries an admin key."""
    # The stock router parses the flag into these fields: id, name, key, role.
    keys = [key for _, _, key, role in args.control_plane_api_keys if role == "admin"]
    if not args.control_plane_api_keys and args.api_key:
        keys = [args.api_key]
    return _brings(request, keys)


def keyed(endpoint: Endpoint, args: RouterArgs) -> Endpoint:
    """Wrap ``endpoint`` so that a request needs one of the keys. Without a key flag ``endpoint`` stays open to all."""
    if not has_keys(args):
        return endpoint
    keys = [key for _, _, key, _ in args.control_plane_api_keys] + ([args.api_key] if args.api_key else [])

    async def asked(request: Request) -> Response:
        if _brings(request, keys):
            return await endpoint(request)
        return PlainTextResponse("needs the key of --api-key", 401, ASK)

    return asked


def _brings(request: Request, keys: Iterable[str]) -> bool:
    """Return True if ``request`` carries one of ``keys``, as a bearer token or as a browser's password."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            given = b64decode(given).decode().partition(":")[2]
        except ValueError:
            return False
    elif scheme.lower() != "bearer":
        return False
    known = [compare_digest(given.encode(), key.encode()) for key in keys]
    return any(known)
