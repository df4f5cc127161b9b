"""Ports of a workspace: their addresses, and who may reach them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from perdure.wire.public.common import Answer, Body, Paged

PortNumber = Annotated[int, Field(ge=1, le=65535)]


class ShareInfo(Answer):
    """A port that is shared. What lets in by a link, its token, is kept nowhere."""

    workspace_id: str
    port: int
    url: str = Field(description="Where a public port is open to everybody; others need a link or a key there.")
    public: bool
    links_until: datetime | None = Field(description="When the last link that was given out ends; null: there is none.")
    shared_at: datetime
    shared_by: str = Field(description="As in a thread.")


class LinkInfo(Answer):
    """A share link that counts. The link itself, which has its token in it, is kept nowhere."""

    id: str
    port: int
    expires_at: datetime
    made_at: datetime
    made_by: str = Field(description="As in a thread.")


class LinkList(Paged):
    links: list[LinkInfo]


class ShareList(Answer):
    shares: list[ShareInfo]


class PortInfo(Answer):
    """Where a port is reached, whether anything listens there or not."""

    workspace_id: str
    port: int
    url: str = Field(description="At a host of its own where the server has a domain for ports; else below the API's path.")
    path: str = Field(description="On the API's own origin, for programs.")
    share: ShareInfo | None


class SharePort(Body):
    """``public`` opens the port to everybody; otherwise a link is made."""

    port: PortNumber
    expires_s: Annotated[float, Field(gt=0, le=366 * 86400)] = Field(default=3600.0, description="Of a link; seconds from now.")
    public: bool = False


class SharedPort(Answer):
    """``url`` is the link, with its token in it: whoever has it may go in until ``expires_at``, or until the link (by its
    ``link_id``) is taken back or the port unshared. The token may also be sent as the header Perdure-Share. Null of a public
    port, which needs none."""

    share: ShareInfo
    url: str
    token: str | None
    link_id: str | None = None
    expires_at: datetime | None
