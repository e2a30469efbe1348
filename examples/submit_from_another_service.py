"""Submits a batch from a service that has nothing of Batchmill but the broker's URL: a plain Celery task.

    BATCHMILL_BROKER_URL=amqp://… python examples/submit_from_another_service.py

The task's result is the batch's id. What is wrong with the batch is raised here as a ValueError.
"""

from __future__ import annotations

import os
import sys
import uuid

from celery import Celery
from celery.exceptions import TimeoutError as NoReply


def submit(app: Celery, questions: dict[str, str], idempotency_key: str) -> str:
    """Submit one question a custom_id; the batch's id. Sending again under the same key gives the same batch."""
    requests = [
        {"custom_id": name, "body": {"messages": [{"role": "user", "content": text}], "max_tokens": 40}}
        for name, text in questions.items()
    ]
    result = app.send_task(
        "batchmill.submit",
        # Or url="s3://bucket/in/file.jsonl", below one of the fleet's security.intake_urls.
        kwargs={"requests": requests, "name": "from a service", "idempotency_key": idempotency_key},
        queue="intake",
        # Celery would put the first kilobyte of the prompts into the message's headers, for monitors to show.
        kwargsrepr=f"{{'requests': <{len(requests)}>}}",
    )
    batch_id: str = result.get(timeout=60)
    return batch_id


def main() -> int:
    """Submit three questions."""
    # rpc:// takes replies over the broker itself; no other service is needed.
    app = Celery("my-service", broker=os.environ["BATCHMILL_BROKER_URL"], backend="rpc://")
    questions = {
        "sky": "Why is the sky blue?",
        "sea": "Why is the sea salty?",
        "sun": "Why is the sun hot?",
    }
    try:
        print(submit(app, questions, idempotency_key=str(uuid.uuid4())))
    except ValueError as refused:
        print(f"refused: {refused}", file=sys.stderr)
        return 2
    except NoReply:
        print("no coordinator answered; the task waits in the queue", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
