"""The Python service's server: SOCKET RETRY_INTERVAL RETRY_TIMEOUT."""

import asyncio
import os
import sys

sys.path.insert(0, os.environ["GMS_PYTHON"])

from gpu_memory_service.server.rpc import GMSRPCServer  # noqa: E402


async def main():
    path, interval, timeout = sys.argv[1:]
    server = GMSRPCServer(
        path,
        0,
        allocation_retry_interval=float(interval),
        allocation_retry_timeout=float(timeout),
    )
    await server.serve()


asyncio.run(main())
