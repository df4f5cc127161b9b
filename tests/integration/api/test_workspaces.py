"""The lifecycle, images and doctor through the SDK."""

from __future__ import annotations

import httpx2
import pytest

from perdure.core.errors import AlreadyExists, BuildFailed, Busy, InvalidRequest, NotFound, PerdureError, Unavailable
from perdure.sdk import AsyncClient, AsyncWorkspace, CallTimedOut, Client, ServerUnreachable, Workspace
from perdure.wire import public
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY


def test_life_of_a_workspace(client: Client) -> None:
    ws = Workspace.create(
        "demo", client=client, memory_mib=1024, envs={"A": "1"}, metadata={"user": "7"}, allow=["packages.example.org:443"]
    )
    info = ws.info
    assert (info.state, info.memory_mib, info.environment, info.metadata, info.egress_allow, info.isolation) == (
        "running",
        1024,
        {"A": "1"},
        {"user": "7"},
        ["packages.example.org:443"],
        "vm-emulated",
    )
    assert ws.report is not None
    assert ws.report.memory == "new"
    assert ws.checkpoint("before").name == "before"
    assert ws.sleep().reason == "hibernate"
    assert ws.info.state is public.WorkspaceState.HIBERNATED
    report = ws.wake()
    assert (report.memory, report.asleep_s, report.generation) == ("kept", 3600.0, 2)
    ws.keep_awake(60)
    assert ws.info.keep_awake_until is not None
    ws.resize(20)
    assert ws.refresh().disk_gib == 20
    assert [one.reason for one in ws.snapshots()] == ["requested", "hibernate"]
    assert [one.kind for one in ws.log(after_seq=1)] == ["checkpoint", "hibernated", "awake"]
    last = ws.resume_report()
    assert last == report
    assert ws.recover("disk-boot").memory == "lost"
    ws.delete()
    with pytest.raises(NotFound):
        ws.refresh()


def test_a_create_says_what_it_allows_in_vain(client: Client) -> None:
    ws = Workspace.create("demo", client=client, allow=["packages.example.org:443", "10.0.0.5:5432"])
    (warning,) = ws.warnings
    assert "10.0.0.5 is a private address" in warning and "PERDURE_EGRESS_PRIVATE_ALLOW=10.0.0.5:5432" in warning
    assert ws.info.egress_allow == ["packages.example.org:443", "10.0.0.5:5432"], "the operator may allow it later"
    assert Workspace.connect("demo", client=client).warnings == []


def test_names_of_the_field(client: Client) -> None:
    with Workspace.create("demo", template="base", client=client) as ws:
        ws.pause()
        ws.resume()
    assert Workspace.connect("demo", wake=False, client=client).info.state == "running"
    ws.kill()
    assert Workspace.list(client=client) == []


def test_connect_wakes_unless_told_otherwise(demo: Workspace, client: Client) -> None:
    demo.sleep()
    assert Workspace.connect("demo", wake=False, client=client).info.state == "hibernated"
    found = Workspace.connect(demo.id, client=client)
    assert found.info.state == "running"
    assert found.report is not None
    assert found.report.memory == "kept"


def test_any_call_wakes_and_says_so(demo: Workspace) -> None:
    demo.sleep()
    demo.report = None
    demo.files.list("/root")
    assert isinstance(demo.report, public.ResumeReport)


def test_list_filters(client: Client) -> None:
    Workspace.create("a", client=client, metadata={"team": "x"})
    Workspace.create("b", client=client, metadata={"team": "y"}).sleep()

    def names(**filters: object) -> list[str]:
        return [one.name for one in Workspace.list(client=client, **filters)]  # type: ignore[arg-type]

    assert names() == ["a", "b"]
    assert names(state="hibernated") == ["b"]
    assert names(state=["running", "hibernated"]) == ["a", "b"]
    assert names(metadata={"team": "x"}) == ["a"]
    assert names(metadata={"team": "x"}, state=["hibernated"]) == []
    assert names(image="base", name_prefix="b") == ["b"]
    assert names(image="dev") == []
    with pytest.raises(InvalidRequest, match="no option 'states'"):
        names(states=["running"])
    with pytest.raises(InvalidRequest, match="state"):
        names(state="running away")


def test_fork_reports_each_branch(demo: Workspace, server: FakeServer) -> None:
    demo.files.write("/root/x", "shared")
    server.workspaces.fail_fork.add("two")
    one, two, three = demo.fork(3, names=["one", "two", "three"])
    assert isinstance(one, Workspace)
    assert isinstance(three, Workspace)
    assert isinstance(two, Unavailable)
    one.files.write("/root/x", "changed")
    assert (one.files.read("/root/x"), three.files.read("/root/x"), demo.files.read("/root/x")) == ("changed", "shared", "shared")
    with pytest.raises(InvalidRequest, match="2 forks need 2 names"):
        demo.fork(2, names=["x"])


def test_mistakes_make_nothing(demo: Workspace, client: Client, server: FakeServer) -> None:
    mistakes: list[tuple[type[PerdureError], str, dict[str, object]]] = [
        (AlreadyExists, "exists already", {"name": "demo"}),
        (NotFound, "no image 'none'", {"name": "x", "image": "none"}),
        (InvalidRequest, "too little", {"name": "x", "memory_mib": 64}),
        (InvalidRequest, "not a workspace name", {"name": "No_Good"}),
        (InvalidRequest, "no option 'memory'", {"name": "x", "memory": 5}),
    ]
    for kind, says, options in mistakes:
        with pytest.raises(kind, match=says) as caught:
            Workspace.create(client=client, **options)  # type: ignore[arg-type]
        assert caught.value.hint
    assert [row.name for row in server.workspaces.rows.values()] == ["demo"]
    assert Workspace.create("demo", exist_ok=True, client=client).id == demo.id


def test_busy_server_is_asked_again_and_ambiguity_is_not(client: Client, server: FakeServer) -> None:
    server.workspaces.refuse = Busy("The queue is full.")
    assert Workspace.create("demo", client=client).name == "demo"
    server.workspaces.refuse = Unavailable("The node may have started it.", ambiguous=True)
    with pytest.raises(Unavailable, match="may have started"):
        Workspace.create("other", client=client)


def test_two_clients_at_once(server: FakeServer) -> None:
    with Client(settings=server.settings) as one, Client(url=server.url, api_key=KEY) as two:
        ours = Workspace.create("demo", client=one)
        theirs = Workspace.connect("demo", client=two)
        ours.files.write("/root/x", "1")
        assert theirs.files.read("/root/x") == "1"
        ours.sleep()
        assert theirs.files.read("/root/x") == "1"
        assert server.workspaces.wakes["demo"] == 2


def test_images_and_builds(client: Client, server: FakeServer) -> None:
    assert [one.name for one in client.images()] == ["base"]
    assert [(one.name, one.built) for one in client.recipes()] == [("base", True), ("node", False)]
    assert client.image("base").memory_mib == 512
    assert [event.type for event in client.build_image()] == ["step", "log", "done"]
    with pytest.raises(BuildFailed, match="'make' failed with exit code 2"):
        list(client.build_image("broken = true"))
    client.remove_image("base")
    with pytest.raises(NotFound):
        client.image("base")


def test_build_whose_client_leaves_is_cancelled(client: Client, server: FakeServer) -> None:
    events = client.build_image("endless = true")
    assert next(events).type == "step"
    events.close()  # type: ignore[attr-defined]
    server.wait_for(server.images.cancelled.is_set)


def test_doctor(client: Client) -> None:
    report = client.doctor()
    assert report.ok
    assert [check.status for check in report.checks] == ["ok", "warn"]


def test_nobody_answers(server: FakeServer) -> None:
    settings = server.settings.model_copy(update={"home": server.settings.home / "elsewhere"})
    with Client(settings=settings) as client, pytest.raises(ServerUnreachable, match="No Perdure server answers at") as caught:
        client.health()
    assert "perdure up" in caught.value.hint
    with Client(url="http://127.0.0.1:9", api_key="x") as client, pytest.raises(ServerUnreachable):
        client.health()


def test_timeout_of_a_call_is_the_callers_only(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client stops waiting; the server finishes what it was asked."""
    import asyncio

    create = server.workspaces.create
    proceed = asyncio.Event()

    async def slow(*args: object) -> object:
        await proceed.wait()
        return await create(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(server.workspaces, "create", slow)
    with Client(settings=server.settings, timeout_s=0.2) as client, pytest.raises(CallTimedOut) as caught:
        Workspace.create("demo", client=client)
    assert caught.value.ambiguous

    async def go() -> None:
        proceed.set()

    server.run(go)
    server.wait_for(lambda: len(server.workspaces.rows) == 1)


def test_answers_state_what_they_ran_on(demo: Workspace, server: FakeServer) -> None:
    transport = httpx2.HTTPTransport(uds=str(server.settings.api_socket))
    with httpx2.Client(transport=transport, base_url="http://perdure") as http:
        base = "/v1/workspaces/demo"
        calls = [("GET", "/files/list?path=/"), ("GET", "/execs"), ("POST", "/files/mkdir?path=/x"), ("DELETE", "/files?path=/x")]
        for method, path in calls:
            headers = http.request(method, base + path).headers
            assert (headers[public.ISOLATION_HEADER], headers[public.GENERATION_HEADER]) == ("vm-emulated", "1")


async def test_async_life(server: FakeServer) -> None:
    async with AsyncClient(settings=server.settings) as client:
        async with await AsyncWorkspace.create("demo", client=client) as ws:
            await ws.sleep()
            assert (await ws.wake()).memory == "kept"
            branches = await ws.fork(2)
            assert [one.name for one in branches if isinstance(one, AsyncWorkspace)] == ["demo-1", "demo-2"]
        assert [one.name for one in await AsyncWorkspace.list(client=client)] == ["demo", "demo-1", "demo-2"]
        await ws.delete()
