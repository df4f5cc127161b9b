"""What each route needs, in one place. A route that is not named here is open to nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perdure.access.model import Principal
from perdure.api.trail import Record
from perdure.core.errors import Forbidden, MissingScope
from perdure.core.ids import DEFAULT_TENANT
from perdure.core.scopes import KeyScope


@dataclass(frozen=True, slots=True)
class Need:
    """``of_server``: what it does concerns all tenants, so only the operator may."""

    scope: KeyScope
    of_server: bool = False


READ = Need(KeyScope.READ)
INVOKE = Need(KeyScope.INVOKE)
OPERATE = Need(KeyScope.OPERATE)
ADMIN = Need(KeyScope.ADMIN)
OPERATOR = Need(KeyScope.ADMIN, of_server=True)

#: By the route's name, which is the operation's id in the OpenAPI document. Whatever may wake a workspace needs ``invoke``.
NEEDS: Mapping[str, Need] = {
    "openapi": READ,
    "health": READ,
    "metrics": OPERATOR,
    "doctor": OPERATOR,  # it says how the host is made
    "list_images": READ,
    "get_image": READ,
    "build_image": OPERATOR,  # images are the node's, for all tenants
    "remove_image": OPERATOR,
    "prune_images": OPERATOR,
    "make_backup": OPERATOR,
    "create_tenant": OPERATOR,
    "list_tenants": OPERATOR,
    "shred_tenant": OPERATOR,
    "tenant_quota": OPERATOR,
    "set_quota": OPERATOR,
    "quota": READ,
    "audit": ADMIN,
    "create_key": ADMIN,
    "list_keys": ADMIN,
    "revoke_key": ADMIN,
    "aws_access": READ,  # of the caller's own key
    "create_workspace": OPERATE,
    "list_workspaces": READ,
    "get_workspace": READ,
    "delete_workspace": OPERATE,
    "configure_workspace": OPERATE,
    "wake_workspace": INVOKE,
    "sleep_workspace": OPERATE,
    "checkpoint_workspace": OPERATE,
    "fork_workspace": OPERATE,
    "rewind_workspace": OPERATE,
    "promote_branch": OPERATE,
    "discard_branch": OPERATE,
    "workspace_tree": READ,
    "resize_workspace": OPERATE,
    "recover_workspace": OPERATE,
    "keep_awake": INVOKE,
    "wake_at": INVOKE,
    "resume_report": READ,
    "workspace_log": READ,
    "usage": READ,
    "events": READ,
    "create_webhook": ADMIN,  # it sends what a tenant does out of the server
    "list_webhooks": ADMIN,
    "remove_webhook": ADMIN,
    "test_webhook": ADMIN,
    "list_deliveries": ADMIN,
    "redeliver_webhook": ADMIN,
    "meters": READ,
    "list_snapshots": READ,
    "name_snapshot": OPERATE,
    "push_snapshot": OPERATE,
    "remove_snapshot": OPERATE,
    "verify_histories": OPERATOR,
    "verify_snapshots": OPERATE,  # it reads everything, and may start machines
    "start_exec": INVOKE,
    "list_execs": INVOKE,
    "get_exec": INVOKE,
    "follow_exec": INVOKE,
    "write_stdin": INVOKE,
    "signal_exec": INVOKE,
    "resize_exec": INVOKE,
    "exec_socket": INVOKE,
    "kill_exec": INVOKE,
    "read_file": INVOKE,
    "write_file": INVOKE,
    "stat_file": INVOKE,
    "list_dir": INVOKE,
    "make_dir": INVOKE,
    "rename": INVOKE,
    "remove": INVOKE,
    "set_attributes": INVOKE,
    "make_link": INVOKE,
    "hash_file": INVOKE,
    "begin_upload": INVOKE,
    "upload_offset": INVOKE,
    "append_upload": INVOKE,
    "finish_upload": INVOKE,
    "drop_upload": INVOKE,
    "read_dir": INVOKE,
    "write_dir": INVOKE,
    "watch_dir": INVOKE,
    "tunnel": INVOKE,
    "proxy_port": INVOKE,  # both forms, HTTP and WebSocket; who has a share link needs no key
    "describe_port": READ,
    "list_shares": READ,
    "share_port": OPERATE,  # it lets others in
    "unshare_port": OPERATE,
    "list_links": READ,
    "revoke_link": OPERATE,
    "get_program": INVOKE,
    "set_program": OPERATE,
    "unset_program": OPERATE,
    "start_program": OPERATE,
    "stop_program": OPERATE,
    "restart_program": OPERATE,
    "program_logs": INVOKE,
    "run_python": INVOKE,
    "follow_python": INVOKE,
    "interrupt_python": INVOKE,
    "restart_python": INVOKE,
    "invoke": INVOKE,
    "invoke_socket": INVOKE,
    "register_worker": OPERATE,  # it runs what the tenant's executions do
    "remove_worker": OPERATE,
    "take_work": OPERATE,
    "beat_worker": OPERATE,
    "answer_work": OPERATE,
    "fail_work": OPERATE,
    "list_functions": READ,
    "start_execution": INVOKE,
    "list_executions": READ,
    "get_execution": READ,
    "execution_result": READ,
    "execution_history": READ,
    "execution_operations": READ,
    "stop_execution": OPERATE,
    "pause_execution": OPERATE,
    "resume_execution": OPERATE,
    "retry_execution": OPERATE,
    "delete_execution": OPERATE,
    "list_callbacks": READ,
    "succeed_callback": INVOKE,
    "fail_callback": INVOKE,
    "beat_callback": INVOKE,
}
#: What AWS's clients ask (``api.aws``), which is not in the OpenAPI document: botocore has a model of it.
AWS: Mapping[str, Need] = {
    "aws_invoke": INVOKE,
    "aws_checkpoint": INVOKE,
    "aws_state": INVOKE,
    "aws_succeed": INVOKE,
    "aws_fail": INVOKE,
    "aws_heartbeat": INVOKE,
    "aws_task": INVOKE,
    "aws_describe": READ,
    "aws_history": READ,
    "aws_list": READ,
    "aws_stop": OPERATE,
    "aws_pause": OPERATE,
    "aws_resume": OPERATE,
    "aws_delete": OPERATE,
}
_ALL = {**NEEDS, **AWS}
#: What workers and functions say all the time. The execution that it is about has a history, which tells all of it.
WORK_IN_A_HISTORY = frozenset({"take_work", "beat_worker", "answer_work", "fail_work"})
IN_A_HISTORY = WORK_IN_A_HISTORY | {"aws_checkpoint", "aws_heartbeat"}


def recorded(route: str, method: str) -> Record:
    """How the audit keeps a call of a route. ``method`` is empty for a WebSocket."""
    if method in {"GET", "HEAD", "OPTIONS"} or route in IN_A_HISTORY:
        return Record.NEVER
    # What uses a workspace changes nothing but the workspace, whose thread has its wakes. A verification changes nothing at all.
    is_use = _ALL[route].scope is KeyScope.INVOKE or route in {"verify_snapshots", "verify_histories"}
    return Record.AFTER if is_use else Record.AROUND


def check(caller: Principal, route: str) -> None:
    """Raises MissingScope for a caller whose key is for less than the route needs."""
    need = _ALL.get(route)
    if need is None:
        raise Forbidden(f"Nobody has said what a key needs for {route!r}; this is a defect in Perdure.")
    if not caller.may(need.scope):
        has = ", ".join(sorted(caller.scopes))
        error = MissingScope(
            f"This needs the scope {need.scope.value!r}; the API key has {has!r}.",
            hint=f"Use a key that has it, or let an admin make one: perdure key create NAME --scope {need.scope.value}.",
        )
        error.details = {"needs": need.scope.value, "has": has}
        raise error
    if need.of_server and not caller.is_operator:
        error = MissingScope(
            "This concerns the whole server, so only an admin of the default tenant may do it.",
            hint="Ask whoever runs the server.",
        )
        error.details = {"needs": need.scope.value, "tenant": DEFAULT_TENANT}
        raise error
