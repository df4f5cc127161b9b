"""The one place where a house rule is set aside: rule -> place -> reason.

A place is a file below the repository's root, or ``file::function`` (the qualified name, ``Class.method``). Every entry must
still be needed: ``test_rules.py`` fails on one that excuses nothing. Add one only with a reason that a reviewer would accept.
"""

from __future__ import annotations

ALLOW: dict[str, dict[str, str]] = {
    "environment": {
        "src/perdure/core/config.py": "the one reader of the environment",
        "src/perdure/api/kernels/inside/kernel.py": "runs in a workspace: the environment of a user's own Python",
    },
    "process": {
        "src/perdure/cli/daemon.py": "up --detach starts the server in a process of its own",
        "src/perdure/core/programs.py": "starts a short program: an image build's tools, PostgreSQL's own (ADR 4)",
        "src/perdure/machines/process.py": "starts a VMM: the one place, since it must happen on the main thread",
        "src/perdure/api/kernels/inside/kernel.py": "runs in a workspace: a kernel is its keeper's child",
        "src/perdure/api/kernels/inside/keeper.py": "runs in a workspace: it outlives the command that starts it",
        "src/perdure/worker/launch.py": "the last step of a runtime client's command: exec in its own process",
        "src/perdure/guest/control.py": "grows the user's file system with the agent disk's own resize2fs",
        "src/perdure/guest/launch.py": "the last step of a user's command: exec in its own process",
        "src/perdure/guest/forker.py": "forks users' commands, which the agent cannot because it has threads",
        "src/perdure/guest/worker.py": "rare work that may block runs in a process rooted in the user's disk",
        "src/perdure/guest/world.py": "makes the users' PID namespace with its reaper",
    },
    "sleep": {
        "src/perdure/db/keeper.py::DatabaseKeeper._keep": "a period between attempts to start a database",
        "src/perdure/node/resident.py::Resident._await_room": "a period: nothing tells that a file system has room again",
        "src/perdure/node/resident.py::Resident._follow_pulse": "a period between pings",
        "src/perdure/api/invoking.py::await_ready": "between two questions: a program tells nobody when it begins to listen",
        "tests/fakes/api_server.py::FakeServer.wait_for.watch": "looks at a condition inside the server between its events",
        "tests/fakes/program.py::FakeProgram._supervise": "the wait before a program that ended is started again",
        "tests/fakes/guest_agent.py::_child": "the kernel sends no event for a child's birth",
        "src/perdure/node/compaction.py::Compaction._work": "a period: what fell asleep is looked at a while later, on purpose",
        "src/perdure/node/shared.py::SharedFiles._work": "a while after the server's start, on purpose: at first everybody wakes",
        "src/perdure/node/lease.py::LeaseKeeper._keep": "a period, not a wait: a lease is renewed by the clock",
        "src/perdure/demo/runs.py::_Driver.waiting": "a time after which what is left counts as idle",
        "src/perdure/demo/runs.py::_Driver._commits": "the time over which commits are counted",
        "src/perdure/worker/pool.py::Pool._start_one": "a period between starts that fail: nobody tells that it was mended",
        "src/perdure/worker/service.py::Worker._beat": "a period, not a wait: leases are kept by the clock",
        "src/perdure/sdk/_acompat.py::apause": "delay between retries of a call; the server has nothing to signal with",
        "src/perdure/sdk/_acompat.py::pause": "the sync twin of apause",
    },
    "wall-clock": {
        "src/perdure/images/build.py": "when an image was built, for people; nothing decides on it",
        "src/perdure/images/golden.py": "when a golden snapshot was made, for people; nothing decides on it",
        "src/perdure/snapshots/capture.py::now_ms": "for ids only, which sort by creation",
        "src/perdure/core/clock.py": "the one place where the host's clock is read; everything else receives a Clock",
        "src/perdure/guest/execs.py": "the guest's own clock, for the start times of its commands",
        "src/perdure/guest/program.py": "the guest's own clock, for the start time of its program",
        "src/perdure/guest/uploads.py": "the guest's own clock: how long ago the last piece of an upload came",
        "src/perdure/guest/repair.py": "reads and steps the guest's clock: that is its job",
    },
    "broad-except": {
        "src/perdure/cli/main.py::main": "the top of the program: a defect is told in one sentence too",
        "src/perdure/cli/main.py::_complete": "the top of the program for a shell that draws its prompt: told by the exit code",
        "src/perdure/core/inbox.py::Inbox._attempt": "the top of a job: told to the caller, recorded by the owner's on_defect",
        "src/perdure/api/streams.py::EventStream._pump": "the top of an answer's task; the last line records it",
        "src/perdure/api/streams.py::ServerSentEvents._pump": "the top of an answer's task; the last event records it",
        "src/perdure/api/underway.py::Underway.watch": "the top of a loop: logged, and the next look comes",
        "src/perdure/journal/feed.py::Feed._run": "the top of a loop: logged, and the next pass comes",
        "src/perdure/webhooks/delivery.py::Deliverer._run": "the top of a loop: logged, and the next pass comes",
        "src/perdure/worker/child.py::invoke": "the top of an invocation: told to the server",
        "src/perdure/worker/child.py::_loaded": "the top of a process: whatever a user's module raises at import is told",
        "src/perdure/guest/forker.py::_live": "the top of a process: it must end here and say why",
        "src/perdure/guest/hands.py::Hands._live": "the top of a thread: it must end here and say why",
        "src/perdure/guest/worker.py::_child": "the top of a process: it must end here and say why",
        "src/perdure/workspaces/upkeep.py::_logged": "the top of background tasks and loops: logged, and the next pass comes",
        "src/perdure/workspaces/uploads.py::Uploads._upload": "the top of an upload's task: recorded in its job, and tried again",
    },
    "built-sql": {
        "src/perdure/db/embedded.py::EmbeddedPostgres._ensure_database": "takes no parameters; a constant name",
    },
    "sql-clock": {},
    "state-literal": {},
    "function-length": {},
    "file-length": {},
    "parameters": {},
    "machine-path": {
        "tests/style/test_text.py": "names what it forbids",
    },
}
