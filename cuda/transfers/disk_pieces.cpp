// See disk_pieces.h.
#include "transfers/disk_pieces.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace sharpi {

namespace {

// Reads of whole blocks: no two of them write to the same block.
void addReads(std::vector<FileReader::Part>& reads, FileReader::Part run) {
    while (run.bytes > DiskPieces::kReadBytes) {
        const size_t bytes = DiskPieces::kReadBytes - reinterpret_cast<uintptr_t>(run.file) % FileReader::kBlock;
        reads.push_back({run.file, bytes, run.to});
        run = {run.file + bytes, run.bytes - bytes, run.to + bytes};
    }
    reads.push_back(run);
}

}  // namespace

DiskPieces::DiskPieces(FileReader& reader, std::vector<HostRange> onDisk)
    : _reader(reader), _onDisk(std::move(onDisk)) {
    std::sort(_onDisk.begin(), _onDisk.end(), [](const HostRange& a, const HostRange& b) { return a.begin < b.begin; });
}

bool DiskPieces::onDisk(const uint8_t* file) const {
    const auto next = std::upper_bound(_onDisk.begin(), _onDisk.end(), file,
                                       [](const uint8_t* at, const HostRange& range) { return at < range.begin; });
    return next != _onDisk.begin() && file < std::prev(next)->begin + std::prev(next)->bytes;
}

bool DiskPieces::reads(const std::vector<StreamPart>& parts) const {
    return std::any_of(parts.begin(), parts.end(), [this](const StreamPart& part) { return onDisk(part.file); });
}

// A stage with room for the parts that stay nowhere; null if there are none.
uint8_t* DiskPieces::stageOf(const std::vector<StreamPart>& parts, Expected& expected) {
    size_t bytes = 0;
    for (const StreamPart& part : parts) {
        if (!part.keep && onDisk(part.file)) bytes += FileReader::roomFor(part.bytes());
    }
    if (bytes == 0) return nullptr;
    const size_t number = _next++ % _stages.size();
    Stage& stage = _stages[number];
    stage.free.await();
    if (!stage.memory || stage.memory->bytes() < bytes) {
        stage.memory.reset();
        stage.memory = std::make_unique<cuda::PinnedBuffer>(bytes);
    }
    expected.stage = number;
    return stage.memory->as<uint8_t>();
}

void DiskPieces::expect(const std::vector<StreamPart>& parts) {
    if (!reads(parts)) return;
    Expected expected;
    uint8_t* room = stageOf(parts, expected);
    std::vector<FileReader::Part> runs, asked;
    for (const StreamPart& part : parts) {
        const size_t bytes = part.bytes();
        if (!onDisk(part.file)) {
            expected.at.push_back(part.file);
            continue;
        }
        uint8_t* to = part.keep;
        FileReader::Part* const last = runs.empty() ? nullptr : &runs.back();
        const bool follows = last && last->file + last->bytes == part.file;
        if (!to && follows && last->to + last->bytes == room) {  // neighbours in the file are one read
            to = room;
            last->bytes += bytes;
        } else {
            if (!to) to = FileReader::placeIn(room, part.file);
            runs.push_back({part.file, bytes, to});
        }
        if (!part.keep) room = to + bytes;
        expected.at.push_back(to);
    }
    for (const FileReader::Part& run : runs) addReads(asked, run);
    expected.first = _reader.ask(asked);
    expected.count = asked.size();
    _expected.push_back(std::move(expected));
}

std::vector<const uint8_t*> DiskPieces::take() {
    if (_expected.empty()) throw Error(ErrorKind::Internal, "parts on the disk are fetched that were not expected");
    Expected first = std::move(_expected.front());
    _expected.pop_front();
    _taken = first.stage;
    for (FileReader::Ticket i = 0; i < first.count; ++i) _reader.await(first.first + i);
    return std::move(first.at);
}

void DiskPieces::copied(cuda::Stream& copies) {
    if (_taken) copies.record(_stages[*_taken].free);
    _taken.reset();
}

}  // namespace sharpi
