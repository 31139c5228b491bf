#include "late.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <vector>
namespace late {
namespace {
// Something of a stream, by its number there: 0 is before everything.
struct Place {
  Stream stream = 0;
  long number = 0;
};
// What waits in a stream: a copy, or (bytes = 0) a wait for another stream's `other`.
struct Entry {
  long number;
  Kind kind = WITHIN_CARD;
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
  std::vector<char> before;  // FROM_PINNED: what was there when the copy was asked for (or made, if a copy brings it)
  Place other;
};
struct Queue {
  std::deque<Entry> entries;
  long last = 0;                              // number of the last entry that was made
  long known = 0;                             // the host knows that all up to this one is through
  std::vector<std::pair<long, Place>> waits;  // that were passed: what is through with them
};
// A copy that is made and of which the host does not know: what is to be seen in `pinned`, or what must still be there.
struct Unseen {
  Place place;
  Kind kind;
  char* pinned;
  std::vector<char> bytes;
};
const int POLLS = 200;
std::recursive_mutex mutex;
std::map<Stream, Queue> queues;
std::map<size_t, Place> events;
std::map<size_t, int> polls;
std::list<Unseen> unseen;
long reported = 0;
using Lock = std::lock_guard<std::recursive_mutex>;

bool overlap(const Unseen& one, const void* p, size_t n) {
  return one.pinned < (const char*)p + n && (const char*)p < one.pinned + one.bytes.size();
}

// A later copy reads or writes this pinned memory in the card's order: what came before is there.
void settle(const void* pinned, size_t n, bool is_written) {
  for (auto it = unseen.begin(); it != unseen.end();) {
    bool hit = overlap(*it, pinned, n), is_over = hit && (it->kind == TO_PINNED || is_written);
    if (hit && it->kind == TO_PINNED) memcpy(it->pinned, it->bytes.data(), it->bytes.size());
    it = is_over ? unseen.erase(it) : std::next(it);
  }
}

void make(Stream stream, Entry& entry) {
  Place place{stream, entry.number};
  const char* from = (const char*)entry.from;
  if (entry.kind == TO_PINNED) {
    settle(entry.to, entry.bytes, true);
    unseen.push_back({place, TO_PINNED, (char*)entry.to, std::vector<char>(from, from + entry.bytes)});
    return;
  }
  if (entry.kind == FROM_PINNED) {
    settle(entry.from, entry.bytes, false);
    if (entry.before.empty()) entry.before.assign(from, from + entry.bytes);
  }
  memmove(entry.to, entry.from, entry.bytes);
  if (entry.kind == FROM_PINNED) unseen.push_back({place, FROM_PINNED, (char*)entry.from, std::move(entry.before)});
}

// A copy that is still to be made, or to be seen, writes this pinned memory.
bool is_awaited(const void* pinned, size_t n) {
  for (const Unseen& one : unseen)
    if (one.kind == TO_PINNED && overlap(one, pinned, n)) return true;
  for (auto& [stream, queue] : queues)
    for (const Entry& one : queue.entries)
      if (one.kind == TO_PINNED && (char*)one.to < (const char*)pinned + n &&
          (const char*)pinned < (char*)one.to + one.bytes)
        return true;
  return false;
}

void run(Place upto) {
  Queue& queue = queues[upto.stream];
  while (!queue.entries.empty() && queue.entries.front().number <= upto.number) {
    Entry entry = std::move(queue.entries.front());
    queue.entries.pop_front();
    if (entry.bytes) {
      make(upto.stream, entry);
    } else {
      run(entry.other);
      queue.waits.push_back({entry.number, entry.other});
    }
  }
}

void show(Unseen& one) {
  if (one.kind == TO_PINNED) {
    memcpy(one.pinned, one.bytes.data(), one.bytes.size());
  } else if (memcmp(one.pinned, one.bytes.data(), one.bytes.size())) {
    reported++;
    fprintf(stderr, "nullcuda: %zu bytes of pinned memory were changed before the copy out of them was waited for\n",
            one.bytes.size());
  }
}

// The host knows that a stream is through up to here, and so everything that it waited for.
void tell_host(Place upto) {
  run(upto);
  Queue& queue = queues[upto.stream];
  if (upto.number <= queue.known) return;
  queue.known = upto.number;
  for (auto it = unseen.begin(); it != unseen.end();) {
    bool is_through = it->place.stream == upto.stream && it->place.number <= upto.number;
    if (is_through) show(*it);
    it = is_through ? unseen.erase(it) : std::next(it);
  }
  std::vector<Place> through;
  for (auto it = queue.waits.begin(); it != queue.waits.end();) {
    if (it->first > upto.number) break;
    through.push_back(it->second);
    it = queue.waits.erase(it);
  }
  for (const Place& place : through) tell_host(place);
}

Entry& add(Stream stream) {
  Queue& queue = queues[stream];
  queue.entries.push_back({++queue.last});
  return queue.entries.back();
}

bool is_ready(size_t asked, Place place) {
  if (place.number <= queues[place.stream].known) return true;
  if (++polls[asked] < POLLS) return false;
  polls.erase(asked);
  tell_host(place);
  return true;
}
}  // namespace

bool is_on() {
  static const char* words = getenv("NULLCUDA_LATE_COPIES");
  return words && *words && strcmp(words, "0");
}
void copy(Stream stream, Kind kind, void* to, const void* from, size_t bytes) {
  if (!bytes) return;
  Lock lock(mutex);
  Entry& entry = add(stream);
  entry.kind = kind;
  entry.to = to;
  entry.from = from;
  entry.bytes = bytes;
  if (kind == FROM_PINNED && !is_awaited(from, bytes))
    entry.before.assign((const char*)from, (const char*)from + bytes);
}
void begin_work(Stream stream) {
  Lock lock(mutex);
  run({stream, queues[stream].last});
}
void record(size_t event, Stream stream) {
  Lock lock(mutex);
  events[event] = {stream, queues[stream].last};
  polls.erase(event);
}
void forget(size_t event) {
  Lock lock(mutex);
  events.erase(event);
  polls.erase(event);
}
void wait(Stream stream, size_t event) {
  Lock lock(mutex);
  auto it = events.find(event);
  if (it != events.end() && it->second.stream != stream) add(stream).other = it->second;
}
void host_waits_for_event(size_t event) {
  Lock lock(mutex);
  auto it = events.find(event);
  if (it != events.end()) tell_host(it->second);
}
void host_waits_for_stream(Stream stream) {
  Lock lock(mutex);
  tell_host({stream, queues[stream].last});
}
void host_waits_for_all() {
  Lock lock(mutex);
  std::vector<Place> ends;
  for (auto& [stream, queue] : queues) ends.push_back({stream, queue.last});
  for (const Place& end : ends) tell_host(end);
}
bool is_event_ready(size_t event) {
  Lock lock(mutex);
  auto it = events.find(event);
  return it == events.end() || is_ready(event, it->second);
}
bool is_stream_ready(Stream stream) {
  Lock lock(mutex);
  return is_ready(stream, {stream, queues[stream].last});
}
long overwritten() {
  Lock lock(mutex);
  return reported;
}
}  // namespace late
