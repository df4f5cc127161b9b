"""API keys of a tenant."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from perdure.core.scopes import KeyScope, KeyState
from perdure.wire.public.common import Answer, Body, Name, Paged, Text


class CreateKey(Body):
    """``tenant``: an id or a name, for the operator only; without it the key is for the tenant of whoever makes it."""

    name: Name
    scopes: list[Annotated[KeyScope, Field(strict=False)]] = Field(min_length=1, max_length=len(KeyScope))
    expires_s: Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | None = Field(
        default=None, description="Seconds from now; null: it does not expire."
    )
    tenant: Text | None = None


class KeyInfo(Answer):
    """A key without its secret. ``prefix`` is how the secret begins; ``created_by`` and ``revoked_by`` are as in a thread."""

    id: str
    tenant_id: str
    name: str
    prefix: str
    scopes: list[KeyScope]
    state: KeyState
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    last_used_at: datetime | None = Field(description="To within ten minutes.")
    revoked_at: datetime | None
    revoked_by: str | None


class AwsPair(Answer):
    """What AWS's clients are configured with. It belongs to an API key: it may what that may, and ends with it."""

    aws_access_key_id: str
    aws_secret_access_key: str


class AwsAccess(AwsPair):
    """``port``: on which this server speaks HTTP, for whoever has asked over its Unix socket."""

    port: int


class CreatedKey(AwsPair):
    """The only answer that ever has the secret."""

    key: KeyInfo
    secret: str


class KeyList(Paged):
    keys: list[KeyInfo]
