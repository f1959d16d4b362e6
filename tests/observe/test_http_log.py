"""What malformed HTTP requests write to the log of a server."""

import asyncio

from aiohttp import web

from areal.observe.http_log import HttpLogger
from tests.rollout.http_kit import listening


async def test_malformed_requests_write_one_counted_line_per_minute_and_one_at_the_end(caplog):
    now_s = 0.0
    logger = HttpLogger(lambda: now_s)
    async with listening(web.Application(), access_log=None, logger=logger) as address:
        host, port = address.removeprefix("http://").split(":")
        for count in range(8):
            now_s = 100.0 if count >= 5 else 0.0
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.")
            writer.close()
    logger.close()
    records = [record for record in caplog.records if record.name == "areal.http"]
    assert [(record.exc_info, record.args[1]) for record in records] == [(None, 0), (None, 4), (None, 2)]


async def test_a_defect_of_a_handler_keeps_its_traceback(caplog):
    HttpLogger().error("failed", exc_info=ValueError("a defect"))
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]
