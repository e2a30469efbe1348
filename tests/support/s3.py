"""An S3 service on loopback (moto), and stores in it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The URL of an S3 service that is there for the length of the block."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def s3_env(endpoint: str) -> dict[str, str]:
    """The environment in which `s3://` means that service."""
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }


def new_bucket() -> str:
    """The name of a new bucket; `s3_env` must be in this process's environment."""
    import fsspec
    import s3fs

    # fsspec keeps file systems by their arguments, whatever the environment says of the service meanwhile.
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    return bucket
