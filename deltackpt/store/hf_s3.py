"""Hugging Face Buckets through their S3 gateway, hf+s3://buckets/NAMESPACE/NAME/PREFIX, which has conditional writes.

The gateway wants a namespace in its endpoint, paths and not host names for buckets, one region, and none of the
checksums that newer clients send behind a body (its documentation, "S3 Compatibility").  Its keys are made of an access
token on the Hub's settings page, and are looked for where those of S3 are.  It makes no Bucket.
"""

from __future__ import annotations

import os
from dataclasses import replace
from urllib.parse import quote

from deltackpt.store.driver import Driver
from deltackpt.store.fsspec_store import extra_missing
from deltackpt.store.hub import PAUSE, bucket_of
from deltackpt.store.remote import RemoteStore
from deltackpt.store.retry import DEFAULT, RetryPolicy

SCHEME = "hf+s3"
ENDPOINT = "https://s3.hf.co"
REGION = "us-east-1"
VARIABLE = "DELTACKPT_HF_S3_ENDPOINT"  # another gateway, such as one of an own network


def open_gateway(rest: str, retry: RetryPolicy = DEFAULT) -> RemoteStore:
    """The store at ``hf+s3://`` + ``rest``, with the keys that S3's libraries find.

    Raises UsageError ``store-url``, ``store-url-secret``, ``extra-missing``.
    """
    bucket = bucket_of(SCHEME, rest)
    try:
        driver = _driver(bucket.namespace, bucket.name, retry)
    except ImportError:
        raise extra_missing("s3") from None
    return RemoteStore(driver, bucket.url, bucket.root, retry=retry)


def _driver(namespace: str, name: str, retry: RetryPolicy) -> Driver:
    import s3fs

    from deltackpt.store.s3 import S3Driver, options

    made = options(retry)
    made["config_kwargs"] |= {
        "region_name": REGION,
        "s3": {"addressing_style": "path"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    endpoint = os.environ.get(VARIABLE, ENDPOINT).rstrip("/")
    fs = s3fs.S3FileSystem(endpoint_url=f"{endpoint}/{quote(namespace)}", skip_instance_cache=True, **made)
    driver = S3Driver(fs, name, retry)
    # What the Hub allows its own API is all that is known of how often it may be asked.
    driver.capabilities = replace(driver.capabilities, pause=PAUSE)
    return driver
