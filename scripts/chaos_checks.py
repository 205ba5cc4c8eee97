"""What must hold after every run of the chaos campaign: right bytes, balanced books, nothing left."""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import chaos_engine
from chaos_engine import LAYOUT
from chaos_site import DISK_BYTES, Ending, Remote, Site, command_line, descendants

from mlkv import cli
from mlkv.commands.verify import open_folder
from mlkv.errors import TierUnavailable
from mlkv.store import Stats, StoreClient
from mlkv.store.tiers.base import Tier

END_S = 30.0
"""For processes to end, pages to be given back, and sockets to go."""


class Checks:
    """Checks of one run; what they find goes into its `Ending`.

    Args:
        socket: of the run's owner, alone in its folder.
        known: pids of processes that the run has started and waits for.
    """

    def __init__(self, site: Site, socket: Path, ending: Ending, known: Callable[[], set[int]]) -> None:
        self._site = site
        self._socket = socket
        self._ending = ending
        self._known = known
        self._shared = set(os.listdir("/dev/shm"))

    def verify(self, *where: str) -> None:
        """`mlkv verify`. Bad pages are those that were damaged; once removed, there are none."""
        bad = self._count_bad("verify", *where, "--json", "--remove")
        self._ending.bad_found += bad
        if bad and not self._ending.damaged:
            self._problem(f"mlkv verify finds {bad} bad pages")
        if bad and self._count_bad("verify", *where, "--json"):
            self._problem("mlkv verify --remove left bad pages behind")

    def _count_bad(self, *command: str) -> int:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = cli.main(command)
        try:
            results = json.loads(out.getvalue())
        except json.JSONDecodeError:
            self._problem(f"mlkv {' '.join(command)}: status {status}: {out.getvalue()[-500:]}")
            return 0
        return sum(len(result["bad"]) for result in results)

    def books(self) -> None:
        """Nothing is held any more, and every page is accounted for."""

        def problem() -> str:
            with StoreClient.find(self._socket, group=os.urandom(16), deadline_s=END_S) as client:
                books = client.call(Stats(audit=True), END_S)
            held = books.leases, books.reservations, books.reserved, books.quarantined
            # Pages on their way to a tier are pinned, not leased to anybody; hung ones would stay so.
            hung = sum(tier.hung for tier in books.tiers)
            balanced = books.free + books.ready == books.num_pages
            return "" if balanced and not any(held) and not hung and not books.problem else str(books)

        end = time.monotonic() + END_S
        while found := problem():
            if time.monotonic() > end:
                self._problem(f"the owner still holds something: {found}")
                return
            time.sleep(0.05)

    def compare_disk(self) -> None:
        compared = 0
        page = memoryview(mmap.mmap(-1, LAYOUT.page_bytes))  # aligned, as O_DIRECT wants it
        with contextlib.suppress(StopIteration):
            for tier, _page_bytes in open_folder(self._site.disk):
                compared += self._compare("disk", tier, page)
        self._ending.pages_compared["disk"] = compared
        used = sum(path.stat().st_blocks * 512 for path in self._site.disk.rglob("*") if path.is_file())
        if used > DISK_BYTES:
            self._problem(f"the disk folder occupies {used} bytes, its limit is {DISK_BYTES}")
        named = re.compile(r"lock|pages-v[^/]*(/(slab|catalog\.sqlite3(-wal|-shm)?))?")
        for path in self._site.disk.rglob("*"):
            if not named.fullmatch(str(path.relative_to(self._site.disk))):
                self._problem(f"{path} is left in the disk folder")

    def compare_remote(self, kind: Remote) -> None:
        with self._site.look_into(kind) as (tier, page):
            try:
                compared = self._compare("remote", tier, page)
            except NotImplementedError:  # it cannot list what it has
                compared = sum(self._is_served_right("remote", tier, page, key) for key in self._site.keys)
        self._ending.pages_compared[kind] = compared

    def _compare(self, where: str, tier: Tier, page: memoryview) -> int:
        """Every page of a tier is that of its key, byte by byte."""
        compared, after = 0, b""
        while keys := tier.scan(after, 1024):
            for key in keys:
                if key not in self._site.keys:
                    self._problem(f"{where}: there is a page of a key that nobody stored: {key.hex()}")
                elif not self._is_right(where, tier, page, key):
                    self._problem(f"{where}: {key.hex()} is listed and cannot be read")
                compared += 1
            after = keys[-1]
        return compared

    def _is_right(self, where: str, tier: Tier, page: memoryview, key: bytes) -> bool:
        """Whether the page is there. If it has the bytes of another one, that is a problem."""
        if not tier.read([key], [page])[0]:
            return False
        if page[LAYOUT.header_bytes :][: LAYOUT.payload_bytes] != chaos_engine.payload(key):
            self._problem(f"{where}: {key.hex()} has wrong bytes")
        return True

    def _is_served_right(self, where: str, tier: Tier, page: memoryview, key: bytes) -> bool:
        """The same of a store of many hosts, in which a page may be known and lie with one that was struck."""
        try:
            return self._is_right(where, tier, page, key)
        except TierUnavailable:
            return False  # a miss for engines, too

    def leftovers(self, socket_may_stay: bool) -> None:
        def problem() -> str:
            left = {pid: command_line(pid) for pid in self.left_processes()}
            if left:
                return f"processes are left: {left}"
            folder = self._socket.parent
            files = [path.name for path in folder.iterdir()] if folder.exists() else []
            if files and not socket_may_stay:
                return f"files are left: {files}"
            shared = [name for name in set(os.listdir("/dev/shm")) - self._shared if "mlkv" in name]
            if shared:
                return f"shared memory is left: {shared}"
            # Nobody else of us lives, so only this process could still keep a pool.
            memory = [line for line in Path("/proc/self/maps").read_text().splitlines() if "mlkv-pool" in line]
            return f"memory is still mapped: {memory}" if memory else ""

        end = time.monotonic() + END_S
        while found := problem():
            if time.monotonic() > end:
                self._problem(found)
                return
            time.sleep(0.02)

    def left_processes(self) -> Iterator[int]:
        """Below this one, and none of those that the run knows of."""
        known = self._site.baseline | self._known()
        return (pid for pid in descendants() if pid not in known)

    def _problem(self, what: str) -> None:
        self._ending.problems.append(what)
