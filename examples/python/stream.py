"""Streams an answer: python stream.py PROMPT [ADDRESS]"""

import asyncio
import os
import signal
import sys

from whippet_client import AsyncClient, InvalidArgument, WhippetError


async def main(prompt: str, address: str = "127.0.0.1:50051") -> int:
    client = AsyncClient(
        address,
        token=os.environ.get("WHIPPET_TOKEN"),
        ca=os.environ.get("WHIPPET_CA"),
        timeout=60,  # seconds, retries included
    )
    async with client, client.stream(prompt, max_tokens=64, temperature=0) as stream:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stream.cancel)
        try:
            async for message in stream:
                print(message.text, end="", flush=True)
        except InvalidArgument as refused:
            for one in refused.violations:
                print(f"{one.field}: {one.description}", file=sys.stderr)
            return 2
        except WhippetError as failed:
            later = "" if failed.retry_after is None else f"; try again in {failed.retry_after:g} s"
            print(f"\n{failed}{later}", file=sys.stderr)
            return 1
    print()
    if stream.finish is not None:  # it was not cancelled
        print(f"{stream.finish.usage.completion_tokens} tokens", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
