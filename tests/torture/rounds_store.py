"""The object store in torture: servers that die while they upload, collect and fetch, and a store that fails at every turn.

The lives that ``kills`` kills have a store in a directory of their home, and an image that is no machine's: it goes to the store
with each snapshot and comes back with it. Rounds of their own tell a story on one node, send it to a store that answers 500,
loses answers, gives less than was asked or flips bits, and bring it back on another node.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from perdure.core.clock import SystemClock, epoch_ms
from perdure.core.errors import CorruptData, NotFound, PerdureError, Unavailable
from perdure.core.ids import DEFAULT_TENANT, SnapshotId
from perdure.fleet.objects import StoreCatalogue
from perdure.images.model import Golden, Image
from perdure.images.moving import ImageMover
from perdure.images.registry import ImageStore, golden_to_json, image_to_json
from perdure.images.sparse import file_facts
from perdure.node.secondhome import NodeSecondHome, ObjectParts, Starts
from perdure.snapshots.manifest import BaseRef
from perdure.snapshots.objects.client import Objects, open_objects
from perdure.snapshots.objects.download import Downloader
from perdure.snapshots.objects.keys import Keyring, PlainKeyring, TenantKeyring
from perdure.snapshots.objects.remote import OWNER, Remote
from perdure.snapshots.objects.upload import Uploader
from perdure.wire.objects import IMAGES, Catalogue, ItemKey, ItemState, Scope
from perdure.workspaces.model import Workspace
from tests.fakes.catalogue import FakeCatalogue
from tests.fakes.objects import FakeObjects, Fault
from tests.torture.model import Outcome, Violation, told_by
from tests.torture.node import DIGEST, DISK_GIB, SIZE, WHEN, TortureNode
from tests.torture.registry import Kind, Part, Work
from tests.torture.saving import MASTER, check_directory
from tests.torture.server import CTX
from tests.torture.story import Stories, Story, check

if TYPE_CHECKING:
    from tests.torture.life import Life
    from tests.torture.server import Server

TENANT = Scope(DEFAULT_TENANT)
PACK_BYTES = 64 << 10
TRIES = 100
FAULT_RATE = 0.08  # of the calls; a fetch makes some dozens, and begins anew after each failure
SURE_CALL = 12  # it fails if none before it did
PASSES = 6


class Images:
    """An image store with one image, that of all torture nodes by name; nothing runs on what is in it."""

    def __init__(self, root: Path) -> None:
        self.store = ImageStore(root)

    @property
    def directory(self) -> Path:
        return self.store.root / "blobs" / DIGEST

    def make(self) -> None:
        golden = self.directory / "golden" / "image"
        golden.mkdir(parents=True)
        for name in ("kernel", "initrd", "root.raw", "agent.raw"):
            (self.directory / name).write_bytes(name.encode() * 1000)
        for name in ("ram.base", "devices.state", "disk.qcow2"):
            (golden / name).write_bytes(hashlib.sha256(name.encode()).digest() * 5000)
        made = Golden(DIGEST, SIZE, golden, "fp", "ab" * 32, 1.0, WHEN, 0, 0)
        (golden / "golden.json").write_bytes(golden_to_json(made, _facts(golden)))
        image = Image(
            *(DIGEST, "base", WHEN, self.directory, SIZE, DISK_GIB, "6", 1, {}, (), (), {}),
            kernel_digest="",
            agent_release="",
            recipe_digest="",
            root_digest="",
        )
        (self.directory / "image.json").write_bytes(image_to_json(image, _facts(self.directory)))

    def lose(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def _facts(directory: Path) -> dict[str, dict[str, Any]]:
    return {path.name: file_facts(path) for path in sorted(directory.iterdir()) if path.is_file()}


def attach(
    node: TortureNode, objects: Objects, catalogue: Catalogue, images: Images, keyring: Keyring | None = None
) -> NodeSecondHome:
    """Give a torture node a way to a store, as the real one has it."""

    def movers(uploader: Uploader, downloader: Downloader) -> ImageMover:
        return ImageMover(images.store, uploader, downloader)

    def bases(_ref: BaseRef) -> Any:
        return node._goldens._ram  # of the only golden there is

    remote = Remote(objects, keyring or PlainKeyring(), lambda: epoch_ms(SystemClock()))
    parts = ObjectParts(remote, catalogue, "torture", PACK_BYTES)
    home = NodeSecondHome(parts, node.store, movers, bases, Starts())
    node.second_home = home
    return home


# ---------------------------------------------------------------------------------------------------------- lives that are killed


def _home(server: Server) -> NodeSecondHome:
    home = server.node.second_home
    assert isinstance(home, NodeSecondHome), "the part has attached it"
    return home


async def begin(server: Server) -> None:
    """A store in the home; what a fetch that was cut off has left undone is done."""
    images = Images(server.home / "images")
    catalogue = StoreCatalogue(server.database, of_snapshots=True)
    images.store.sweep()
    keyring = TenantKeyring(server.home / "keys", MASTER)
    attach(server.node, open_objects(f"file://{server.home}/objects"), catalogue, images, keyring)
    if not (images.directory / "image.json").exists() and not await _are_images_stored(catalogue):
        images.lose()
        images.make()
    here = {facts.snapshot_id for facts in server.node.store.complete()}
    for row in await server.store.on_node(server.node.node_id):
        if row.id not in here:
            await _home(server).fetch(row.id, DEFAULT_TENANT)


async def _are_images_stored(catalogue: StoreCatalogue) -> bool:
    return any(item.state is ItemState.DURABLE for item in await catalogue.items(IMAGES))


async def upload(life: Life, one: Workspace) -> None:
    """What the loop would do now."""
    uploads = life.server.service.upkeep.uploads
    for _ in range(PASSES):
        await uploads.begin()
        await uploads.drain()


async def collect(life: Life, one: Workspace) -> None:
    """Some snapshots go, and what they had in the store follows."""
    await upload(life, one)
    await life._remove(one)
    for _ in range(2):
        await life.server.service.upkeep.room.collect()


async def lose(life: Life, one: Workspace) -> None:
    """Its node loses what it wakes from, perhaps the image too; the store has both. Before that it may be taken for damaged,
    which costs nothing that is whole."""
    server = life.server
    _, snapshot = await server.service.sleep(CTX, one.id)
    server.ledger.note("captured", one.id, snapshot=snapshot.id)
    await server.service.push_snapshot(CTX, one.id, snapshot.id, deadline_s=20)
    if life._random.random() < 0.5:
        await _home(server).fetch(snapshot.id, DEFAULT_TENANT, afresh=True)
        server.node.store.verify(snapshot.id, server.node._goldens._ram)
    await _home(server).evict(snapshot.id)
    if life._random.random() < 0.5:
        Images(server.home / "images").lose()
        _home(server)._known.clear()  # an operator who removes an image by hand restarts the server
    _, report = await server.service.wake(CTX, one.id)
    if report.restored_from != "store":
        raise Violation(
            f"{one.name} woke from {report.snapshot_id}, which was nowhere but in the store, and its report says no word"
        )


async def checked(server: Server) -> None:
    """What rows call durable can be read to its last byte; what nobody wants is gone after three passes."""
    catalogue = StoreCatalogue(server.database)
    downloader = _home(server)._downloader
    upkeep = server.service.upkeep
    for _ in range(3):
        await upkeep.room.collect()
    wanted = {row.id for row in await server.store.on_node(server.node.node_id)}
    for item in await catalogue.items(TENANT):
        if item.state is ItemState.DURABLE:
            if damages := await downloader.verify(item.key):
                raise Violation(f"{item.key} is durable in the store and damaged: {damages[0].why}")
            if item.key.name not in wanted:
                raise Violation(f"{item.key} is in the store although nobody wants it")
    remote = _home(server)._parts.remote
    await _check_objects(remote, catalogue)
    await check_directory(remote.objects, server.home / "objects")


async def _check_objects(remote: Remote, catalogue: Catalogue) -> None:
    """Every object is accounted for by a row."""
    for scope in (TENANT, IMAGES):
        listed, manifests = await remote.listed(scope)
        items = await catalogue.items(scope)
        known = {pack.pack_id for item in items for pack in await catalogue.holds(item.key)}
        known |= {pack.pack_id for pack in await catalogue.packs(scope)}
        if left := set(listed) - known:
            raise Violation(f"objects of the store that no row names, after three collections: {sorted(left)}")
        if unknown := set(manifests) - {(item.key.name, item.attempt) for item in items}:
            raise Violation(f"manifests of the store that no row names, after three collections: {sorted(unknown)}")


WORKS = (
    Work("upload", upload, 1, ("upload.",)),
    Work("collect", collect, 1, ("collect.",)),
    Work("lose", lose, 1, ("fetch.",)),
)
PARTS = (Part(begin, checked, mend=begin),)


# ------------------------------------------------------------------------------------------------------- a store that fails

FAULTS = {
    "store.500": (Fault.REFUSED,),
    "store.timeout": (Fault.LOST, Fault.LATE),
    "store.partial": (Fault.SHORT,),
    "store.bitflip": (Fault.FLIPPED,),
}


class FailingStores(Stories):
    """A story goes to a store that fails, part of it is released and collected, and the rest comes back on another node."""

    points = tuple(FAULTS)

    async def round(self, point: str) -> Outcome:
        seed = self._random.randrange(1 << 30)
        places = [self._scratch / f"store{next(self._numbers)}" for _ in range(2)]
        nodes = []
        fired = _Fired()
        try:
            for place in places:
                place.mkdir(mode=0o711)
                nodes.append(TortureNode(place, self._image))
            await _there_and_back(nodes[0], nodes[1], Random(seed), FAULTS[point], fired)
        except Exception as error:
            return Outcome(point, True, told_by(error), f"seed {seed}")
        finally:
            for node in nodes:
                await node.crash()
            for place in places:
                shutil.rmtree(place, ignore_errors=True)
        return Outcome(point, fired.count > 0)


class _Fired:
    """Decides which calls fail, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self._calls = 0

    def faults(self, random: Random, kinds: tuple[Fault, ...]) -> Callable[[str, str], Fault | None]:
        def decide(operation: str, _name: str) -> Fault | None:
            fault = random.choice(kinds)
            writes = operation in ("put", "delete")
            fits = {
                Fault.LATE: writes,
                Fault.FLIPPED: operation in ("read", "get"),
                Fault.SHORT: operation in ("put", "read", "get"),
            }
            if not fits.get(fault, True):
                return None
            self._calls += 1
            if random.random() > FAULT_RATE and (self.count or self._calls < SURE_CALL):
                return None
            self.count += 1
            return fault

        return decide


async def _there_and_back(here: TortureNode, there: TortureNode, random: Random, kinds: tuple[Fault, ...], fired: _Fired) -> None:
    objects, catalogue = FakeObjects(), FakeCatalogue()
    homes = []
    for node in (here, there):
        await node.open()
        images = Images(node._parts.settings.home / "images")
        homes.append(attach(node, objects, catalogue, images))
    Images(here._parts.settings.home / "images").make()
    story = Story(here, Random(random.random()))
    await story.create()
    await story.live(random.randint(6, 14))
    told = {name: one.value for name, one in story.told.items() if _is_there(here, name)}
    if not told:
        return
    objects.faults = fired.faults(random, kinds)
    for name in told:
        await _until_done(lambda name=name: homes[0].upload(name, {}, lambda _sent: None), objects, random, name)  # type: ignore[misc]
    dropped = [name for name in told if random.random() < 0.4][: len(told) - 1]
    for name in dropped:
        await catalogue.release(ItemKey(TENANT, name))
    for _ in range(3):
        await _until_done(lambda: homes[0].collect(TENANT), objects, random, "a collection")
    for name, value in told.items():
        if name in dropped:
            continue
        await _until_done(lambda name=name: homes[1].fetch(name, DEFAULT_TENANT), objects, random, name)  # type: ignore[misc]
        check(await there.prove_snapshot(name), value, f"snapshot {name}, brought back from the store")
    objects.faults = lambda operation, name: None
    await _ends_empty(homes[0], objects, catalogue, random)


def _is_there(node: TortureNode, name: SnapshotId) -> bool:
    try:
        return node.store.manifest(name).memory is not None
    except NotFound:
        return False


async def _until_done(work: Callable[[], Any], objects: FakeObjects, random: Random, what: str) -> None:
    """Repeated as the loops repeat it. Damage that a read met on its way is told as damage, and another read may not meet it."""
    last: PerdureError | None = None
    for _ in range(TRIES):
        try:
            await work()
        except (Unavailable, CorruptData) as error:
            last = error
            objects.deliver(random)
            await asyncio.sleep(0)
            continue
        return
    raise Violation(f"{what} did not come through in {TRIES} tries: {last}")


async def _ends_empty(home: NodeSecondHome, objects: FakeObjects, catalogue: FakeCatalogue, random: Random) -> None:
    """When nobody wants anything, nothing is left but whose store it is."""
    while objects.late:
        objects.deliver(random)
    for scope in (TENANT, IMAGES):
        for item in await catalogue.items(scope):
            await catalogue.release(item.key)
    for _ in range(4):
        for scope in (TENANT, IMAGES):
            await home.collect(scope)
    if left := set(objects.data) - {OWNER}:
        raise Violation(f"everything is released, and these objects remain: {sorted(left)}")


KINDS = (Kind("store", FailingStores),)
