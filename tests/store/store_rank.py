"""One rank of a test: commands as JSON lines on standard input, one answer line each on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
from store_helpers import chain

from mlkv.errors import MLKVError
from mlkv.store import Commit, Match, Release, Reserve, Stats, StoreClient

CALL_S = 10.0


class Rank:
    client: StoreClient

    def connect(self, socket_path: str, group: str = "replica", rank: int = 0, **settings: Any) -> dict[str, int]:
        settings = {"host_bytes": 16 * 4096, "page_bytes": 4096, "deadline_s": 20.0, **settings}
        self.client = StoreClient.connect(socket_path, group=group.encode(), rank=rank, **settings)
        return {"owner": self.client.owner_pid, "pages": self.client.num_pages}

    def store(self, text: str, commit: bool = True) -> list[int]:
        """Write each page with its own letter."""
        reserved = self.client.call(Reserve(chain(text)), CALL_S)
        for page, letter in zip(reserved.page_ids.tolist(), text[reserved.first :], strict=False):
            self.client.pool[page * 4096 : (page + 1) * 4096] = letter.encode() * 4096
        if commit:
            self.client.call(Commit(reserved.reservation, len(reserved.page_ids)), CALL_S)
        return reserved.page_ids.tolist()

    def match(self, text: str) -> dict[str, Any]:
        matched = self.client.call(Match(chain(text), len(text)), CALL_S)
        letters = self.peek(matched.page_ids.tolist())
        return {"lease": matched.lease, "pages": matched.page_ids.tolist(), "letters": letters}

    def peek(self, pages: list[int]) -> list[str]:
        return [bytes(self.client.pool[page * 4096 : page * 4096 + 2]).decode() for page in pages]

    def release(self, lease: int) -> None:
        self.client.call(Release([lease]), CALL_S)

    def stats(self) -> dict[str, Any]:
        report = self.client.call(Stats(audit=True), CALL_S)
        return {field: getattr(report, field) for field in report.__struct_fields__}

    def hang_up(self) -> None:
        """Lose the connection as a bug would, with the process alive and the pool still mapped."""
        self.client._channel.close()

    def churn(self, rounds: int, **connect: Any) -> int:
        """Join and leave again and again, so that owners come and go."""
        served = 0
        for _ in range(rounds):
            self.connect(**connect)
            served += self.client.call(Stats(audit=True), CALL_S).problem == ""
            self.close()
        return served

    def close(self) -> None:
        self.client.close()


def main() -> None:
    rank = Rank()
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer = getattr(rank, command)(**arguments)
        except MLKVError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(msgspec.to_builtins(answer)), flush=True)


if __name__ == "__main__":
    main()
