"""A batch from Python: requests made on the fly, answers read in their order.

python examples/python_client.py            # the embedded fleet of this machine
BATCHMILL_BROKER_URL=… python examples/python_client.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from common.errors import BatchmillError
from producers.batch_view import BatchView
from producers.client import Client

CITIES = ("Lisbon", "Nairobi", "Osaka", "Quito")


def requests() -> Iterator[dict[str, Any]]:
    """One line of a batch file each; a generator, so a million of them would take no memory."""
    for city in CITIES:
        question = f"Name one thing that {city} is known for."
        yield {
            "custom_id": city,
            "body": {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "temperature": 0},
        }


def show(seen: BatchView) -> None:
    """Progress, on one line."""
    counts = seen.request_counts
    print(f"\r{seen.status} {counts.completed + counts.failed}/{counts.total} ", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Submit, wait, print."""
    with Client() as client:
        batch = client.submit(requests(), name="cities", metadata={"example": "python_client"})
        ended = client.wait(batch.id, on_update=show)
        print(file=sys.stderr)
        for line in client.results(batch.id):
            if line["response"] is not None and line["response"]["status_code"] == 200:
                answer = line["response"]["body"]["choices"][0]["message"]["content"]
            else:
                answer = f"failed: {line['error'] or line['response']['body']}"
            print(f"{line['custom_id']}: {answer}")
        return 1 if ended.request_counts.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BatchmillError as exc:
        sys.exit(f"error: {exc}")
