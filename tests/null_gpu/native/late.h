// Copies that happen as late as CUDA's order of streams allows (NULLCUDA_LATE_COPIES), so that memory which is used
// again too early gives wrong numbers. Kernels still run when they are launched.
//
// * A copy between the card and pinned memory waits in its stream. It is made when a kernel begins in that stream, when
// a
//   stream that waits for an event behind it goes on, or when the host waits for it. Until then its source may be
//   overwritten and its target holds what was there.
// * What a copy brings to pinned memory is seen there once the host waited for it, not before.
// * Pinned memory that the host changes before it waited for a copy out of it is reported (overwritten()).
// * An event that the host asks about is "not ready" as long as that may be true (POLLS times).
#pragma once
#include <cstddef>
namespace late {
using Stream = size_t;  // a handle, or the number of the device whose default stream it is
enum Kind { WITHIN_CARD, TO_PINNED, FROM_PINNED };

bool is_on();
void copy(Stream, Kind, void* to, const void* from, size_t bytes);
void begin_work(Stream);  // a kernel, or a copy that cannot be late
void record(size_t event, Stream);
void forget(size_t event);
void wait(Stream, size_t event);
void host_waits_for_event(size_t event);
void host_waits_for_stream(Stream);
void host_waits_for_all();
bool is_event_ready(size_t event);
bool is_stream_ready(Stream);
long overwritten();
}  // namespace late
