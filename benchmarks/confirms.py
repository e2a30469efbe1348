"""What waiting for RabbitMQ's confirms costs a sender: `python -m benchmarks.confirms` (`make bench-confirms`).

Messages of the size of a packed chunk go to a quorum queue, one by one and with several on their way, directly and
through a line that takes a while. Printed: messages a second, the best of several runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from pathlib import Path

from common.interrupts import terminated_like_interrupted
from common.publisher import Publisher
from common.settings import load
from producers.coordinator.dispatcher import CONFIRM_WINDOW
from tests.conftest import make_fleet_env
from tests.fault.proxy import Proxy
from tests.support.brokers import rabbit_server


def rate(publisher: Publisher, body: bytes, messages: int, window: int) -> float:
    """Messages a second with up to `window` of them unconfirmed; 0: each waits for the one before."""
    began = time.monotonic()
    for number in range(messages):
        publisher.begin("infer.bench.1", body, key=str(number))
        publisher.settle(window)
    publisher.settle()
    took = time.monotonic() - began
    if len(publisher.confirmed()) != messages:
        raise SystemExit("not all were confirmed")
    return messages / took


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100)
    parser.add_argument("--kilobytes", type=int, default=100, help="of a message")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 2, 10], help="of the line, one way, ms")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    body = os.urandom(options.kilobytes * 1000)
    with (
        terminated_like_interrupted(),
        tempfile.TemporaryDirectory(prefix="bm-bench-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        server = stack.enter_context(rabbit_server(folder))
        print(f"messages of {options.kilobytes} kB a second; ms one way, one by one, {CONFIRM_WINDOW} on their way")
        for delay in options.delays:
            port = stack.enter_context(Proxy(server.port, delay_s=delay / 1000)).port if delay else server.port
            url = f"amqp://guest:guest@127.0.0.1:{port}//"
            publisher = Publisher(load(env=make_fleet_env(folder, url, "redis://127.0.0.1/0")))
            publisher.publish("infer.bench.1", b"declares the queue")
            found = [
                [rate(publisher, body, options.messages, n) for n in (0, CONFIRM_WINDOW)] for _ in range(options.runs)
            ]
            publisher.close()
            alone, several = (max(column) for column in zip(*found, strict=True))
            print(f"{delay:>6g}{alone:>10.0f}{several:>10.0f}{several / alone:>8.1f} x", flush=True)


if __name__ == "__main__":
    main()
