"""`mlkv verify`: reads every page of a store, or of a disk folder, and checks it against its own header."""

from __future__ import annotations

import argparse
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlkv.commands.find import DEADLINE_S, add_json, add_options, connect
from mlkv.commands.pages import bytes_of, page_lists, pages_of
from mlkv.commands.show import print_json, print_table, table
from mlkv.errors import ConfigError, StoreError
from mlkv.page import verify_own_header
from mlkv.store import Cancel, Quarantine, StoreClient
from mlkv.store.states import READY
from mlkv.store.tiers.disk import DiskTier
from mlkv.store.tiers.disk_folder import folder_bytes, page_sizes
from mlkv.store.wire import generation_bytes_of, page_bytes_of
from mlkv.store.wire_tools import MAX_FETCHED_PAGES, Fetch, Forget, ListPages, ListTier

_KEYS_AT_ONCE = 4096
_TIER_DEADLINE_S = 60.0
_SPARE_BYTES = 64 << 20


@dataclass
class Checked:
    """What was found in one place.

    Attributes:
        bad: keys and what is wrong with their pages.
        why_unchecked: why nobody could look; "" when somebody has.
    """

    where: str
    num_pages: int = 0
    bad: dict[bytes, str] = field(default_factory=dict)
    num_removed: int = 0
    why_unchecked: str = ""

    def to_json(self) -> dict[str, Any]:
        bad = [{"key": key.hex(), "problem": problem} for key, problem in self.bad.items()]
        found = {"where": self.where, "pages": self.num_pages, "bad": bad, "removed": self.num_removed}
        return found | ({"unchecked": self.why_unchecked} if self.why_unchecked else {})


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Make it known to the parser."""
    parser = commands.add_parser(
        "verify",
        help="read and check every page of host memory and of the lower tiers",
        description="Reads every page and checks it against its own header and checksums, while engines go on. "
        "Exit status 1 if bad pages were found; else 2 if a tier could not be checked.",
    )
    parser.add_argument("--tier", metavar="NAME", help='check only this one ("host", or a lower tier)')
    parser.add_argument("--remove", action="store_true", help="remove bad pages")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="a folder of a disk tier that no store uses now")
    add_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check, and say what was found."""
    if options.disk is not None:
        results = [*_check_folder(options.disk, options.remove)]
    else:
        with connect(options) as client:
            results = [
                _check_host(client, options.remove)
                if place == "host"
                else _check_tier(client, place, options.remove)
                if options.tier is not None
                else _try_tier(client, place, options.remove)
                for place in (("host", *client.tiers) if options.tier is None else (options.tier,))
            ]
    if options.json:
        print_json([result.to_json() for result in results])
    else:
        shown = table("", ["where", "pages", "bad", "removed"], right=["pages", "bad", "removed"])
        for result in results:
            shown.add_row(result.where, f"{result.num_pages:,}", f"{len(result.bad):,}", f"{result.num_removed:,}")
        print_table(shown)
        for result in results:
            for key, problem in result.bad.items():
                print(f"{result.where}: {key.hex()}: {problem}")
            if result.why_unchecked:
                print(f"{result.where} was not checked: {result.why_unchecked}")
    if any(result.bad for result in results):
        return 1
    return 2 if any(result.why_unchecked for result in results) else 0


def find_problem(page: npt.NDArray[np.uint8], key: bytes) -> str:
    """What is wrong with a page that lies under `key`; "" if nothing is."""
    header = verify_own_header(page)
    if header is None:
        return "damaged: its header or a checksum does not fit"
    if header.identity.key != key:
        return f"it is the page of another key: {header.identity.key.hex()}"
    return ""


def _check_host(client: StoreClient, remove: bool) -> Checked:
    """Every complete page. One that gets other content while it is read is looked at again by whoever loads it."""
    result = Checked("host")
    for found in page_lists(client, client.num_pages):
        for page in pages_of(found):
            if page.state != READY:
                continue
            result.num_pages += 1
            problem = find_problem(bytes_of(client, page.number), page.key)
            if not problem or page not in pages_of(client.call(ListPages(page.number, 1), DEADLINE_S)):
                continue
            result.bad[page.key] = problem
            if remove:
                pages = page_bytes_of(np.array([page.number], np.int32))
                generations = generation_bytes_of(np.array([page.generation], np.uint64))
                client.call(Quarantine(pages, generations), DEADLINE_S)
                result.num_removed += 1
    return result


def _try_tier(client: StoreClient, tier: str, remove: bool) -> Checked:
    """One that is down, or that cannot list what it has, keeps nobody from hearing about the others."""
    try:
        return _check_tier(client, tier, remove)
    except StoreError as error:
        return Checked(tier, why_unchecked=str(error))


def _check_tier(client: StoreClient, tier: str, remove: bool) -> Checked:
    """Every page of a tier, through pages of the host pool that are lent for it."""
    result = Checked(tier)
    at_once = max(1, min(MAX_FETCHED_PAGES, client.num_pages // 8))
    after = b""
    while True:
        keys = client.call(ListTier(tier, after, _KEYS_AT_ONCE), _TIER_DEADLINE_S).keys
        for at in range(0, len(keys), 16 * at_once):
            _check_batch(client, result, keys[at : at + 16 * at_once])
        if len(keys) < 16 * _KEYS_AT_ONCE:
            break
        after = keys[-16:]
    if remove and result.bad:
        client.call(Forget(tier, b"".join(result.bad)), DEADLINE_S)
        result.num_removed = len(result.bad)
    return result


def _check_batch(client: StoreClient, result: Checked, keys: bytes) -> None:
    fetched = client.call(Fetch(result.where, keys), _TIER_DEADLINE_S)
    try:
        for at, number in enumerate(fetched.page_ids.tolist()):
            key = keys[16 * at : 16 * at + 16]
            if not fetched.good[at]:
                continue  # it left since it was listed, or the tier found it bad by itself
            result.num_pages += 1
            problem = find_problem(bytes_of(client, number), key)
            if problem:
                result.bad[key] = problem
    finally:
        client.call(Cancel(fetched.reservation), DEADLINE_S)


def _check_folder(directory: Path, remove: bool) -> Iterator[Checked]:
    """Every page of a folder of a disk tier. Raises TierUnavailable while a store uses it."""
    for tier, page_bytes in open_folder(directory):
        page = memoryview(mmap.mmap(-1, page_bytes))
        yield _check_disk(tier, page, Checked(f"{directory} ({page_bytes} bytes a page)"), remove)


def open_folder(directory: Path) -> Iterator[tuple[DiskTier, int]]:
    """A tier for each size of pages in a folder, open until the next one is asked for, and that size.

    Raises ConfigError when there are none, TierUnavailable while a store uses the folder.
    """
    sizes = page_sizes(directory)
    if not sizes:
        raise ConfigError(f"{directory} holds no pages that this version's disk tier can read")
    # As much as is there, so that nothing is cut or removed to stay within it.
    used_bytes = folder_bytes(directory)
    for page_bytes in sizes:
        limit_bytes = used_bytes + used_bytes // page_bytes * 1024 + _SPARE_BYTES + page_bytes
        tier = DiskTier(directory, page_bytes, limit_bytes)
        try:
            tier.connect(memoryview(b""))
            yield tier, page_bytes
        finally:
            tier.close()


def _check_disk(tier: DiskTier, page: memoryview, result: Checked, remove: bool) -> Checked:
    after = b""
    while keys := tier.scan(after, _KEYS_AT_ONCE):
        for key in keys:
            result.num_pages += 1
            if not tier.read([key], [page])[0]:
                result.bad[key] = "it cannot be read, or its header is another page's"
            elif problem := find_problem(np.frombuffer(page, np.uint8), key):
                result.bad[key] = problem
        after = keys[-1]
    if remove and result.bad:
        tier.delete(list(result.bad))
        result.num_removed = len(result.bad)
    return result
