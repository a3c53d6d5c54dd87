// Where the CPU finds the experts of a layer if the model is larger than RAM. The disk is read by whole experts, many
// at a time, from the moment the layer's choices are known, and products begin with the experts that are in memory.
//
// If the plan gives experts room in RAM, it holds those that are used most, as slots in VRAM do on a GPU: the same
// manager says which expert is in which slot, and missing ones are read there past the page cache. What finds no slot,
// and everything if there are no slots, is read where the file is mapped.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "experts/expert_slots.h"
#include "memory/stream/file_reader.h"
#include "operations/operations.h"

namespace sharpi {

class ExpertSource {
public:
    // slots: made with ramSlotLayout(). It may hold none. The profiler is told what slots had and what was read to
    // them. All must outlive this object.
    ExpertSource(ExpertSlotManager& slots, FileReader& reader, ExpertAccessProfiler& profiler)
        : _slots(slots), _reader(reader), _profiler(profiler) {}

    void beginPass(int64_t rows);
    // The pass was given up. Waits for reads on their way.
    void passFailed();

    // A layer's rows chose experts: those of e are pairs [expertBegin[e], expertBegin[e + 1]). Begins to read what is
    // not in memory. Returns false if everything is to be used where the file is mapped, and nothing is to be waited
    // for.
    bool find(const ExpertCall& call, const std::vector<int32_t>& expertBegin);
    // After find() has returned true, of a chosen expert. which: 0, 1, 2 for gate, up and down.
    Matrix matrix(int32_t expert, size_t which) const { return at(expert).matrices[which]; }
    bool arrived(int32_t expert, size_t which);
    // Throws what FileReader::await() throws.
    void await(int32_t expert, size_t which);

    // Bytes that were read from the disk to slots.
    uint64_t bytesRead() { return _reader.bytesRead(); }

private:
    using Ticket = FileReader::Ticket;
    struct Place {
        std::array<Matrix, 3> matrices;
        std::optional<Ticket> first;  // of the first matrix, if they are being read
        bool present = false;
    };
    const Place& at(int32_t expert) const { return _places[static_cast<size_t>(expert)]; }
    void settleBefore(int32_t layer);
    void placeInSlots(int32_t layer, const std::vector<int32_t>& chosen, const std::vector<int32_t>& expertBegin);
    void readAhead(int32_t layer);
    void toSlot(int32_t layer, int32_t expert, const ExpertSlotManager::Place& slot, Place& place);
    void askFor(Place& place, const std::array<uint8_t*, 3>& to);
    static std::array<Matrix, 3> inFile(const ExpertStacks& file, int32_t expert);

    ExpertSlotManager& _slots;
    FileReader& _reader;
    ExpertAccessProfiler& _profiler;
    int64_t _rows = 0;
    std::vector<Place> _places;                            // of the layer at hand, by expert
    std::map<std::pair<int32_t, int32_t>, Ticket> _ahead;  // (layer, expert) read ahead to slots in this pass
};

}  // namespace sharpi
