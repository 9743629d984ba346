"""TLS of the check's two clients, from one configuration."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path

from baton.client.tls import Tls
from services.common.config.settings_tree.reader import invalid


def usable(tls: Tls) -> Tls:
    """The same with the system's authorities where those of `tls` are not there."""
    return tls if tls.ca_file is None or Path(tls.ca_file).exists() else replace(tls, ca_file=None)


def http_context(tls: Tls) -> ssl.SSLContext:
    """Creates the TLS context of HTTPS calls. Raises `BatonError(INVALID)` where a file is unusable."""
    context = ssl.create_default_context(cafile=tls.ca_file)
    if tls.cert_file is not None and tls.key_file is not None:
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file)
        except ssl.SSLError:
            raise invalid(f"{tls.cert_file} and {tls.key_file} are no certificate and its key") from None
        except OSError as error:
            raise invalid(f"cannot read {tls.cert_file} or {tls.key_file}: {error.strerror}") from None
    return context
