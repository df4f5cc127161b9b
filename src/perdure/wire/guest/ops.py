"""Names, limits and defaults that both ends must agree on.

**Calls** go over the control channel: one JSON object with ``op``; the reply has ``ok`` true and its fields, or ``ok`` false
with ``code`` and ``message``. **Streams** go over the data channel: the host opens one with a JSON object with ``op``; the guest
accepts, or refuses with ``code`` and ``message``. The guest opens streams of its own for ``API`` and ``EGRESS``.
"""

from __future__ import annotations

#: Grows when an old agent and a new node could misunderstand each other. Part of a golden snapshot's fingerprint.
#: What an older peer may ignore without harm does not raise it, for memory that holds an agent of another protocol is lost.
PROTOCOL = 2
AGENT_VERSION = "0.3.1"

CONTROL_PORT = "perdure.control"
DATA_PORT = "perdure.data"

# Loopback ports inside the guest.
API_PORT = 7071
PROXY_PORT = 7072


class Call:
    """Operations of the control channel. The data channel answers any call with ``ok``: all that was sent before was read."""

    HELLO = "hello"  # → protocol, agent, boot_id, instance, generation, root_problem, wall_ns
    WAKE = "wake"  # repair everything, write {resume} inside, run hooks within {hooks: {each_s, all_s}}, then thaw
    QUIESCE = "quiesce"  # freeze the users' processes: {deadline_ms} → {frozen, waited_ms}
    THAW = "thaw"  # after a checkpoint: repair the clock, thaw: {host_ns} → {clock_step_ns, wall_ns}
    CLOCK = "clock"  # {host_ns} → {wall_ns}; with {step_ns}: step
    PING = "ping"  # → {cpu_us, running, at_prompt}, the last: ids of shells that wait for somebody to come and type
    SYNC = "sync"  # flush every file system; with {drop_caches_over}: drop a larger page cache → {dropped}, in bytes
    SETTLE = "settle"  # {commands, deadline_s, drop_caches} → {ran, idle}
    GROW_DISK = "grow_disk"  # the user's file system to the size of its disk → {bytes}
    POWEROFF = "poweroff"
    PROGRAM = "program"  # {do: show | start | stop | restart} → what the supervisor knows of the workspace's program


class Note:
    """Notes of the guest on the control channel."""

    EXEC_ENDED = "exec_ended"  # {exec_id}


class Op:
    """Operations of the data channel, opened by the host."""

    EXEC = "exec"  # {trace}: a W3C traceparent, which the command finds in its environment as TRACEPARENT
    PTY = "pty"  # exec on a pseudo-terminal of {rows, cols}; without argv and shell: the user's login shell
    ATTACH = "attach"
    RESIZE = "resize"  # {exec_id, rows, cols}
    SIGNAL = "signal"
    KILL = "kill"
    LIST_EXECS = "list_execs"
    STAT = "stat"
    LIST = "list"
    READ = "read"
    WRITE = "write"
    MKDIR = "mkdir"
    RENAME = "rename"
    REMOVE = "remove"
    # Of agents since 0.3.1; an older one answers that it knows no such operation.
    HASH = "hash"  # SHA-256 of a file
    ATTRIBUTES = "attributes"  # mode and owner
    SYMLINK = "symlink"
    UPLOAD = "upload"  # {id, do: begin | look | drop}: an upload in pieces
    APPEND = "append"  # a piece of one
    FINISH = "finish"  # its name, if its hash is right
    PACK = "pack"  # a directory as tar
    UNPACK = "unpack"
    WATCH = "watch"  # {path, recursive} a new one, or {watch, after} one that goes on
    TCP = "tcp"
    LOGS = "logs"  # {offset | tail, follow} → {offset}, then the program's output, with a message where some is lost
    # Opened by the guest:
    API = "api"
    EGRESS = "egress"


class Sub:
    """Flags of data frames: which bytes of a stream these are."""

    MAIN = 0
    STDOUT = 1
    STDERR = 2


class Hook:
    """How a program in /etc/perdure/on-wake.d ended."""

    OK = "ok"
    FAILED = "failed"  # an exit code that is not 0; 128 + n for signals
    TIMEOUT = "timeout"  # it reached its limit and was killed
    NOT_STARTED = "not-started"
    REFUSED = "refused"  # others than root can change it
    SKIPPED = "skipped"  # those before it had used up the time of all


class ProgramState:
    """What the workspace's program does."""

    NONE = "none"  # nobody has named one, or what names it cannot be understood
    STARTING = "starting"
    RUNNING = "running"
    BACKING_OFF = "backing-off"  # it ended, and is started again after a while
    STOPPING = "stopping"
    STOPPED = "stopped"  # on request
    ENDED = "ended"  # by itself, and its restart policy leaves it so


class Code:
    """Codes of refusals and resets. The host maps them to its error tree."""

    INVALID = "invalid"
    NOT_FOUND = "not_found"
    EXISTS = "exists"
    CONFLICT = "conflict"
    ESCAPE = "escape"  # a path or link that leads out of where it was to stay
    FORBIDDEN = "forbidden"
    NO_SPACE = "no_space"
    BUSY = "busy"
    FAILED = "failed"
    STALE = "stale"  # of an earlier generation or connection
    PROTOCOL = "protocol"


#: How the refusal of an operation begins that an agent does not know, and that of a call.
UNKNOWN_OPERATION = "The agent knows no operation"
UNKNOWN_CALL = "The agent knows no call"
#: Bytes of data that may be on the way in one direction of one stream.
WINDOW = 256 * 1024
#: What a host may ask for when it opens a stream (``window``): a transfer's round trips cost more than its memory.
WINDOW_MAX = 1024 * 1024
#: Streams open at once on one channel, per side that opened them.
STREAMS_MAX = 512
#: Messages a peer may send on one stream that its reader has not taken yet.
MESSAGES_MAX = 256
#: Output kept per standard stream of a command for readers that come late or come back.
SPOOL_BYTES = 1024 * 1024
#: Finished commands remembered, and the output bytes kept for all of them together.
FINISHED_MAX = 64
FINISHED_BYTES = 8 * 1024 * 1024
#: Hooks of one wake that run, the end of the output that is kept of each, and of all: they travel in one frame.
HOOKS_MAX = 32
HOOK_OUTPUT_BYTES = 1000
HOOK_OUTPUTS_BYTES = 6000
#: Rows and columns of a terminal.
TERMINAL_MAX = 4096
#: Commands running at once.
EXECS_MAX = 256
PATH_MAX = 4096
#: Where a workspace's program is named, as users see it; the largest file that is read; the port it has when none is given.
PROGRAM_FILE = "/etc/perdure/program.json"
PROGRAM_FILE_BYTES = 20_000
PROGRAM_PORT = 8080
PROGRAM_STOP_GRACE_S = 10.0
#: The end of its output that is kept, whatever happens to it and to the agent.
PROGRAM_LOG_BYTES = 1024 * 1024
#: Where the pieces of uploads lie in a workspace until they are whole, and for how long (by its clock) after the last one.
UPLOADS_DIR = "/var/lib/perdure/uploads"
UPLOAD_KEPT_S = 24 * 3600
#: Watches at once, the bytes of events kept of each for readers that come back, and for how long without any (awake).
WATCHES_MAX = 32
WATCH_BYTES = 256 * 1024
WATCH_KEPT_S = 3600
#: Files that a program only sees when they are whole are written under names with this beginning.
HIDDEN = ".perdure-"
