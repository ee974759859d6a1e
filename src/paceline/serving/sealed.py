"""Texts that clients of `/v1/responses` send back unread: thoughts, and summaries of conversations. Clients that keep a
conversation themselves carry them as `encrypted_content`. They are no secret here, and not encrypted: whoever has them
has had the text.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

from paceline.serving.api_errors import ApiError

MARK: Final = "paceline-1."
"""Every sealed text begins with this."""


def sealed(text: str) -> str:
    """Return a text as clients carry it."""
    return MARK + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()


def unsealed(content: str, param: str) -> str:
    """Return the text that was sealed.

    Args:
        param: the field that it is in.
    Raises:
        ApiError: it was not sealed here.
    """
    try:
        if not content.startswith(MARK):
            raise ValueError("it does not begin with the mark")
        return base64.b64decode(content.removeprefix(MARK), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        why = f"{param} is not of a server of this kind, and cannot be read here; leave the item out"
        raise ApiError(why, param=param) from None
