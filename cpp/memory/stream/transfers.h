// How a device fetches weights from the mapped files. CudaTransfers copies across PCIe beside the computation; tests
// have a strict fake.
#pragma once

#include <string>
#include <vector>

#include "core/matrix.h"
#include "memory/stream/host_ranges.h"

namespace sharpi {

// Where a matrix comes from, if not only from the mapped file.
struct StreamOrigin {
    const uint8_t* inRam = nullptr;  // a copy of its bytes
    uint8_t* keep = nullptr;         // where they are to stay in RAM, once they are read from the disk
};

// Rows of a matrix that are fetched.
struct StreamPart {
    Matrix to;  // on the device; the part is its rows [rowBegin, rowBegin + rows)
    int64_t rowBegin = 0, rows = 0;
    const uint8_t* file = nullptr;  // in the mapped file, or StreamOrigin::inRam
    int64_t fileRow = 0;            // the first row's number in the file's matrix
    uint8_t* keep = nullptr;        // see StreamOrigin
    size_t bytes() const { return rowBytes(to.type, to.cols) * static_cast<size_t>(rows); }
};

// Fetches run in the order of the device's own work, except where these calls let them run ahead.
class Transfers {
public:
    // Streamed weights pass through a ring of up to this many buffers. A buffer is named by its number in the ring.
    static constexpr int kMostBuffers = 6;

    virtual ~Transfers() = default;
    // Prepares ranges of the mapped files for fetching; adjacent ranges are prepared as one. staging: DeviceLayout's
    // `stages` buffers of stageBytes each. Throws Error(OutOfMemory) if the system refuses the memory for `always`;
    // notes() says what was done.
    virtual void prepare(const HostRanges& ranges, void* staging, size_t stageBytes) = 0;
    // All resident weights have arrived: releases `once`.
    virtual void finishOnce() = 0;
    // Lines for people: what could not be pinned, and what was done instead.
    virtual std::vector<std::string> notes() const { return {}; }
    // The address at which kernels read bytes of an `always` or `optional` range; nullptr if they cannot read all of
    // them contiguously.
    virtual const uint8_t* reachable(const uint8_t* file, size_t) const { return file; }

    // A pass: fetches between begin() and end() come after what was computed before begin(), and what is computed after
    // end() comes after all of them.
    virtual void begin() = 0;
    virtual void end() = 0;
    // How many pieces beyond those that are fetched it wants to hear of by expect(), in passes over prompts.
    virtual int looksAhead() const { return 0; }
    // These parts will be fetched, after those that were expected before. So the disk can be read ahead.
    virtual void expect(const std::vector<StreamPart>&) {}
    // Starts to fetch parts; if release(buffer) was called in this pass, after that. All parts together fit into a
    // stage, each aligned to Allocator::kAlignment.
    virtual void fetch(const std::vector<StreamPart>& parts, int buffer) = 0;
    // What is computed from here on comes after the last fetch(buffer).
    virtual void await(int buffer) = 0;
    // What was computed up to here was the last to read the buffer.
    virtual void release(int buffer) = 0;
};

}  // namespace sharpi
