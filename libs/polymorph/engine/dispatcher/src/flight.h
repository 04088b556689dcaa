// The flight record: which kernel is being called, in a file that outlives this process. Whoever finds the process dead,
// or silent, reads there what it was doing.
#pragma once

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

namespace polymorph {

constexpr size_t kDigestBytes = 64;

// 128 bytes, little endian; libs/polymorph/engine/flight.py reads it.
struct Flight {
  std::atomic<int64_t> began{0};  // CLOCK_MONOTONIC, ns; 0 while no kernel is called
  std::atomic<int64_t> epoch{0};
  char artifact[kDigestBytes]{};
  std::atomic<int64_t> calls{0};
  char reserved[40]{};
};
static_assert(sizeof(Flight) == 128, "the record's layout is a contract");

inline Flight *&flight() {
  static Flight nowhere;
  static Flight *record = &nowhere;
  return record;
}

inline void open_flight(const std::string &path) {
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  TORCH_CHECK_VALUE(file >= 0, "cannot write the flight record ", path, ": ", std::strerror(errno));
  const bool sized = ftruncate(file, sizeof(Flight)) == 0;
  void *mapped = sized ? mmap(nullptr, sizeof(Flight), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  TORCH_CHECK_VALUE(mapped != MAP_FAILED, "cannot map the flight record ", path, ": ", std::strerror(errno));
  flight() = new (mapped) Flight{};
}

inline void take_off(const std::string &artifact, int64_t epoch, int64_t now) {
  Flight *record = flight();
  const size_t size = std::min(artifact.size(), kDigestBytes);
  std::memcpy(record->artifact, artifact.data(), size);
  if (size < kDigestBytes) std::memset(record->artifact + size, 0, kDigestBytes - size);
  record->epoch.store(epoch, std::memory_order_relaxed);
  record->calls.store(record->calls.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  record->began.store(now, std::memory_order_release);
}

inline void land() { flight()->began.store(0, std::memory_order_release); }

// A call that ends with an exception has landed too.
struct InFlight {
  InFlight(const std::string &artifact, int64_t epoch, int64_t now) { take_off(artifact, epoch, now); }
  ~InFlight() { land(); }
  InFlight(const InFlight &) = delete;
  InFlight &operator=(const InFlight &) = delete;
};

}  // namespace polymorph
