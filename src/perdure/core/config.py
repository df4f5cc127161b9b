"""The one reader of the environment: a frozen tree of settings, passed to whoever needs a value.

Each field is read from ``PERDURE_<FIELD>``. Lists are comma-separated.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PREFIX = "PERDURE_"


def default_home() -> Path:
    """``/var/lib/perdure`` for root, the user's data directory otherwise."""
    if os.geteuid() == 0:
        return Path("/var/lib/perdure")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "perdure"


def notify_socket() -> str | None:
    """Where a supervising systemd listens, sd_notify(3)."""
    return os.environ.get("NOTIFY_SOCKET")


@dataclass(frozen=True, slots=True)
class OtelSettings:
    """What the standard environment of OpenTelemetry says about traces. No exporters: nobody asked."""

    exporters: tuple[str, ...] = ()
    protocol: str = ""
    has_service_name: bool = False


def otel_settings() -> OtelSettings:
    """Asked for is an exporter by its name, or an endpoint, where that is OTLP."""
    values = os.environ
    if values.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return OtelSettings()
    endpoint = values.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or values.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    names = values.get("OTEL_TRACES_EXPORTER") or ("otlp" if endpoint else "none")
    exporters = tuple(name.strip() for name in names.split(",") if name.strip() not in {"", "none"})
    protocol = values.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or values.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    named = bool(values.get("OTEL_SERVICE_NAME") or "service.name=" in values.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    return OtelSettings(exporters, protocol, named)


def inherited_environment() -> dict[str, str]:
    """What a program that this one starts for its user finds, if nothing is changed."""
    return dict(os.environ)


def terminal_kind() -> str | None:
    """What the terminal that a command runs at understands, for terminfo(5)."""
    return os.environ.get("TERM")


class Settings(BaseModel):
    """Everything an operator can set: what is given, else what the environment says, else the default. Immutable.

    What may hold a secret is marked by ``repr=False``: it is shown nowhere (``SECRETS``).
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    home: Path = Field(default_factory=default_home, description="Data directory of this node and its embedded database.")
    image_dir: Path | None = Field(default=None, description="Images and golden snapshots; default HOME/images.")
    database_url: str | None = Field(
        default=None, description="PostgreSQL URL; unset starts the embedded one under HOME/db.", repr=False
    )
    listen_host: str = Field(default="127.0.0.1", description="TCP address of the API; TCP always needs a key.")
    listen_port: int = Field(default=7070, ge=0, le=65535, description="TCP port of the API; 0 picks a free one.")
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="Host names accepted in the Host header besides loopback and listen_host."
    )
    trusted_proxies: tuple[str, ...] = Field(
        default=(),
        description="Addresses or networks of proxies before TCP, whose X-Forwarded-For and X-Forwarded-Proto are believed.",
    )
    ingress_domain: str | None = Field(
        default=None,
        description="Ports of workspaces are served at WORKSPACE--PORT.DOMAIN, such as ws.localhost, on the API's port; "
        "https://DOMAIN when TLS ends before this server. It must not be a domain that serves anything else.",
    )
    port_answer_s: float = Field(
        default=300.0,
        gt=0,
        description="How long a program in a workspace may take to answer a request that was passed to its port.",
    )
    url: str | None = Field(default=None, description="Client: base URL of the server; unset uses the Unix socket under HOME.")
    api_key: str | None = Field(default=None, description="Client: API key; unset reads HOME/run/api.key.", repr=False)

    qemu: str = Field(default="qemu-system-x86_64", description="QEMU binary, name or path.")
    qemu_data: Path | None = Field(default=None, description="QEMU data directory (-L) for a QEMU outside the system paths.")
    accelerator: Literal["auto", "kvm", "tcg"] = Field(default="auto", description="auto probes by booting the image's kernel.")
    jail: Literal["auto", "require", "off"] = Field(default="auto", description="bubblewrap around each VMM.")
    pool_size: int = Field(default=1, ge=0, le=64, description="Warm paused VMMs per golden; 0 turns the pool off.")
    parallel_starts: int = Field(default=2, ge=1, le=256, description="VMMs that may be starting at the same time.")

    idle_timeout_s: float = Field(default=900.0, ge=0, description="Default idle time before hibernation; 0 means never.")
    checkpoint_interval_s: float = Field(default=60.0, ge=0, description="Default interval of automatic checkpoints; 0 off.")
    unresponsive_s: float = Field(default=20.0, gt=0, description="A guest silent this long is failed.")
    hook_limit_s: float = Field(
        default=20.0, gt=0, le=3600, description="What one program in /etc/perdure/on-wake.d may take at a wake."
    )
    hooks_limit_s: float = Field(default=40.0, gt=0, le=3600, description="What all of them together may take at a wake.")
    guest_cache_mib: int = Field(
        default=128, ge=0, description="A workspace that falls asleep with a larger page cache drops it first; 0: never."
    )
    rebase_mib: int = Field(
        default=512,
        ge=0,
        description="Asleep, a workspace gets a base of its own if more of its memory, or over 60 %, is changed; 0: never.",
    )
    wake_deadline_s: float = Field(default=60.0, gt=0, description="How long a call waits for a workspace to be awake.")
    program_deadline_s: float = Field(
        default=60.0, gt=0, description="How long an invocation waits for a workspace's program to answer GET /ping."
    )
    invoke_limit_s: float = Field(
        default=900.0, gt=0, description="How long a program may take to begin its answer to an invocation."
    )
    shutdown_deadline_s: float = Field(
        default=60.0,
        gt=0,
        description="SIGTERM: how long a hibernation that fails is tried again while no other one ends; none is cut short.",
    )
    lost_branch_days: float = Field(default=7.0, ge=0, description="How long NAME@lost-TIME branches are kept.")
    keep_automatic_checkpoints: int = Field(
        default=2,
        ge=1,
        description="Snapshots that nobody asked for, kept while awake; asleep, the last. A workspace may say otherwise.",
    )

    store_url: str | None = Field(
        default=None,
        description="Object store for snapshots: file:///DIR, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX; "
        "unset: snapshots stay on this node only.",
    )
    store_options: tuple[str, ...] = Field(
        default=(),
        repr=False,
        description="NAME=VALUE for the object store's client, such as endpoint=http://127.0.0.1:9000 or region=eu-west-1.",
    )
    store_encryption: bool = Field(
        default=False, description="Seal what a tenant has in the object store with a key of its own, kept under HOME/keys."
    )
    store_uploads: int = Field(default=2, ge=1, le=64, description="Snapshots that are uploaded at the same time.")
    store_collect_s: float = Field(
        default=3600.0, ge=0, description="Interval of the object store's garbage collection; 0: never."
    )
    store_local_copies: Literal["keep", "drop"] = Field(
        default="keep",
        description="drop: files of a sleeping workspace go from the node once the object store has them; its wake fetches them.",
    )

    lease_s: float = Field(default=20.0, gt=0, description="Node lease in the database.")
    freeze_s: float = Field(default=15.0, gt=0, description="The node freezes its VMs this long after its last sure renewal.")

    egress_private_allow: tuple[str, ...] = Field(
        default=(), description="HOST:PORT on private or node addresses that workspaces may be allowed to reach."
    )
    rate_limit_per_s: float = Field(
        default=100.0, ge=0, description="Calls that one API key may make over TCP each second, in the long run; 0: any number."
    )
    rate_limit_burst: int = Field(default=1000, ge=1, description="Calls that a key which has been quiet may make at once.")
    auth_failures_per_min: float = Field(
        default=30.0,
        ge=0,
        description="Wrong keys from one address that are answered with 401 each minute, others with 429; 0: any number.",
    )
    audit_keep_days: float = Field(default=90.0, ge=1, description="How long rows of the audit are kept.")

    execution_operations_max: int = Field(
        default=50_000, ge=1, description="Operations after which an execution is paused until somebody raises this or stops it."
    )
    execution_history_mib: int = Field(
        default=512, ge=1, description="Bytes of a history after which its execution is paused too."
    )
    execution_payload_mib: int = Field(
        default=16, ge=1, le=256, description="The largest input, result or payload of an execution and its operations."
    )
    execution_keep_days: float = Field(
        default=90.0, ge=0, description="Executions are deleted with their histories so long after their end; 0: never."
    )

    metrics_port: int = Field(
        default=0, ge=0, le=65535, description="A port of 127.0.0.1 that answers GET /metrics without a key; 0: none."
    )
    webhook_private_allow: tuple[str, ...] = Field(
        default=(), description="HOST:PORT on private or node addresses that webhooks may be sent to."
    )
    webhook_keep_days: float = Field(
        default=30.0, ge=1, description="How long events that were given up are kept, to be sent again by 'webhook redeliver'."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe messages that are logged."
    )
    log_format: Literal["console", "json"] = Field(default="console", description="Log lines for people or for machines.")
    crash_file: Path | None = Field(
        default=None, description="Tests of crashes: a file that names the point at which a process is killed; unset: none."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_environment(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        names = {PREFIX + name.upper(): name for name in cls.model_fields}
        said = {name: os.environ[variable] for variable, name in names.items() if variable in os.environ}
        return {**said, **given}

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.strip().lower() if isinstance(value, str) else value

    @field_validator("idle_timeout_s")
    @classmethod
    def _long_enough(cls, value: float) -> float:
        if 0 < value < 5:
            raise ValueError("an idle timeout is 5 seconds or more, or 0 for never")
        return value

    @field_validator(
        "allowed_hosts", "trusted_proxies", "egress_private_allow", "webhook_private_allow", "store_options", mode="before"
    )
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @property
    def images(self) -> Path:
        return self.image_dir or self.home / "images"

    @property
    def run_dir(self) -> Path:
        return self.home / "run"

    @property
    def machines_dir(self) -> Path:
        """Each machine has a directory below it while it runs; what a node finds there at its start is left over."""
        return self.run_dir / "vm"

    @property
    def api_socket(self) -> Path:
        return self.run_dir / "api.sock"

    @property
    def api_key_file(self) -> Path:
        return self.run_dir / "api.key"

    @property
    def master_key_file(self) -> Path:
        return self.home / "master.key"

    @property
    def store_keys_dir(self) -> Path:
        """The keys of tenants in the object store, wrapped by one derived from the master key."""
        return self.home / "keys"

    @property
    def lock_file(self) -> Path:
        """Held by the server of this home; holds its process id."""
        return self.run_dir / "server.lock"

    @property
    def stop_file(self) -> Path:
        """How the last stop went: ``core.stop``."""
        return self.run_dir / "stop.json"

    @property
    def store(self) -> Path:
        return self.home / "store"


#: Settings that may hold a password or a key: nothing that others can read says what they are.
SECRETS = frozenset(name for name, field in Settings.model_fields.items() if not field.repr)
