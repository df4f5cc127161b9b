"""The node's steps in a trace, with a real machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from perdure.core import tracing
from perdure.core.ids import ExecId
from perdure.wire.node import CaptureMode, ExecOutput, ExecSpec, FromSnapshot
from tests.contract.node.real import real_bench


@pytest.mark.qemu
@pytest.mark.slow
async def test_a_wake_and_a_command_are_steps_of_one_trace(home: Path, base_image: Path) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with real_bench(home) as bench:
        bench.listen()
        workspace, _ = await bench.begin()
        facts = await bench.capture(workspace, 1, CaptureMode.HIBERNATE)
        tracing.use(provider)
        try:
            with tracing.span("caller"):
                await bench.node.start(bench.spec(workspace, 2, source=FromSnapshot(facts.snapshot_id)))
                guest = bench.node.guest(workspace, 2)
                handle = await guest.start_exec(ExecSpec(ExecId("exe_1"), shell="echo $TRACEPARENT"))
                printed = b"".join([event.data async for event in handle.events() if isinstance(event, ExecOutput)]).decode()
        finally:
            tracing.use(None)
            bench.deafen()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    names = {span.context.span_id: name for name, span in spans.items()}
    parents = {name: names[span.parent.span_id] for name, span in spans.items() if span.parent is not None}
    assert parents == {
        "node.start": "caller",
        "node.claim": "node.start",
        "node.restore": "node.start",
        "guest.handshake": "node.start",
        "guest.wake": "node.start",
        "guest.exec": "caller",
    }
    executed = spans["guest.exec"].context
    assert printed.strip() == f"00-{executed.trace_id:032x}-{executed.span_id:016x}-{executed.trace_flags:02x}"
