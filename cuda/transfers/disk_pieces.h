// Pieces of the model's files that prompts read from the disk: of a model that is larger than RAM, the experts of which
// no copy is in RAM. They are read ahead of their use, in the order of the pass, to pinned stages or to where they are
// to stay, and copied to the device from there.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "device/stream.h"
#include "memory/stream/file_reader.h"
#include "memory/stream/transfers.h"

namespace sharpi {

class DiskPieces {
public:
    // Pieces that are being read or copied at once.
    static constexpr int kStages = 8;
    // A longer read is cut, so that several threads work at it.
    static constexpr size_t kReadBytes = size_t{4} << 20;

    // onDisk: parts of the mapped files. The reader must outlive this object.
    DiskPieces(FileReader& reader, std::vector<HostRange> onDisk);

    // Whether some of these parts must be read.
    bool reads(const std::vector<StreamPart>& parts) const;
    // Begins to read them, once a stage is free. Throws Error(OutOfMemory) if there is no memory for the stage.
    void expect(const std::vector<StreamPart>& parts);
    // Of the parts that were expected first: returns once they are in RAM, and says where each one is. Throws what
    // FileReader::await() throws.
    std::vector<const uint8_t*> take();
    // `copies` has been given all that copies the parts which were taken last.
    void copied(cuda::Stream& copies);
    // A pass begins: forgets what an earlier one expected and did not take. The reader has begun a pass since.
    void forget() { _expected.clear(); }

private:
    struct Stage {
        std::unique_ptr<cuda::PinnedBuffer> memory;
        cuda::Event free;
    };
    struct Expected {
        std::vector<const uint8_t*> at;  // by part
        FileReader::Ticket first = 0, count = 0;
        std::optional<size_t> stage;
    };
    bool onDisk(const uint8_t* file) const;
    uint8_t* stageOf(const std::vector<StreamPart>& parts, Expected& expected);

    FileReader& _reader;
    std::vector<HostRange> _onDisk;  // ascending
    std::array<Stage, kStages> _stages;
    size_t _next = 0;  // of the stages
    std::deque<Expected> _expected;
    std::optional<size_t> _taken;  // the stage of what was taken last
};

}  // namespace sharpi
