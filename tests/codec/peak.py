"""Peak memory of a piece of work, counted at the allocator and not in the process, which remembers other work."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of CPU tensors, buffers inside kernels included, that lived at once beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert changes, "the profiler saw no allocation"
    live = peak = 0
    for event in sorted(changes, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
