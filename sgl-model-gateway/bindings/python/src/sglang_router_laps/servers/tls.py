"""TLS to the servers: their certificates and the router's own."""

from __future__ import annotations

import ssl

from laps_core.config import ConfigError
from sglang_router.router_args import RouterArgs


def to_servers(args: RouterArgs) -> ssl.SSLContext | bool:
    """Return aiohttp's TLS setting for --client-cert-path, --client-key-path and --ca-cert-paths; True = the system's
    certificates.

    Raises ConfigError if a file is invalid.
    """
    if not (args.client_cert_path or args.ca_cert_paths):
        return True
    context = ssl.create_default_context()
    for path in args.ca_cert_paths:
        try:
            context.load_verify_locations(path)
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(f"--ca-cert-paths: {path}: {e}") from None
    if args.client_cert_path:
        try:
            context.load_cert_chain(args.client_cert_path, args.client_key_path)
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(f"--client-cert-path: {args.client_cert_path}, {args.client_key_path}: {e}") from None
    return context
