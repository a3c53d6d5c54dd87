// Where a processor finds the experts of a model that is larger than RAM. The disk is read by whole experts, many at a
// time, from the moment a layer's choices are known, and products begin with the experts that are in memory.
//
// If the plan gives experts room in RAM, it holds those that are used most, as slots in VRAM do on a GPU: the same
// manager says which expert is in which slot, and missing ones are read there past the page cache. What finds no slot,
// and everything if there are no slots, is read where the file is mapped. On a GPU only what its slots miss is asked
// for, so RAM comes to hold what VRAM does not.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "experts/expert_slots.h"
#include "memory/stream/file_reader.h"

namespace sharpi {

// How slots in RAM keep matrices: with room for the whole blocks of the disk around them.
DeviceLayout ramSlotLayout();

class RamExperts {
public:
    // slots: made with ramSlotLayout(), with all layers of experts. It may hold none. The profiler is told what slots
    // had and what was read to them; it may be null. All must outlive this object.
    RamExperts(ExpertSlotManager& slots, FileReader& reader, ExpertAccessProfiler* profiler)
        : _slots(slots), _reader(reader), _profiler(profiler) {}

    // Between passes: reads these experts, the most wanted first, to free slots. Returns when they have come. Throws
    // what FileReader::await() throws; the slots hold none of them then.
    void fill(const LayerExperts& wanted);

    // rows: of all kinds.
    void beginPass(int64_t rows);
    // The pass was given up. Waits for reads on their way.
    void passFailed();

    // --- what rows chose ---

    // A layer's rows chose experts: those of e are pairs [expertBegin[e], expertBegin[e + 1]). Begins to read what is
    // not in memory, and what the layer `next` will need if there are many rows; below 0: none. Returns false if
    // everything is to be used where the file is mapped, and nothing is to be waited for.
    bool find(int32_t layer, const std::vector<int32_t>& expertBegin, int32_t next);
    // After find() has returned true, of a chosen expert. which: 0, 1, 2 for gate, up and down.
    Matrix matrix(int32_t expert, size_t which) const { return at(expert).matrices[which]; }
    // Whether find() found the expert in RAM.
    bool present(int32_t expert) const { return at(expert).present; }
    bool arrived(int32_t expert, size_t which);
    // Whether all three matrices have.
    bool arrived(int32_t expert) { return arrived(expert, 0) && arrived(expert, 1) && arrived(expert, 2); }
    // Throws what FileReader::await() throws.
    void await(int32_t expert, size_t which);
    // An expert that find() found in RAM is being fetched into a slot of the device that it keeps. Its slot here
    // becomes free once the next layer's choices are known, or the next pass begins: it has been fetched by then.
    void fetched(int32_t layer, int32_t expert) { _fetched.emplace_back(layer, expert); }

    // --- a prompt on a device, which brings over all experts that it does not have ---

    // After beginPass(): of each of these experts of all layers, its three matrices. wanted: by layer, ascending. Free
    // slots are given to some of them, layer by layer in turn. The caller reads to `keep` within the pass.
    using Origins = std::vector<std::vector<std::array<StreamOrigin, 3>>>;
    Origins originsOf(const std::vector<std::vector<int32_t>>& wanted);
    // `rows` rows of a prompt chose this expert.
    void addUses(int32_t layer, int32_t expert, float rows) { _slots.addUses(layer, expert, rows); }

    // Since the model was loaded. Any thread may ask.
    DiskCounts counts() const;

private:
    using Ticket = FileReader::Ticket;
    struct Place {
        std::array<Matrix, 3> matrices;
        std::optional<Ticket> first;  // of the first matrix, if they are being read
        bool present = false;
    };
    const Place& at(int32_t expert) const { return _places[static_cast<size_t>(expert)]; }
    void settleBefore(int32_t layer);
    void releaseFetched();
    void placeInSlots(int32_t layer, const std::vector<int32_t>& chosen, const std::vector<int32_t>& expertBegin);
    void readAhead(int32_t layer);
    void toSlot(int32_t layer, int32_t expert, const ExpertSlotManager::Place& slot, Place& place);
    void askFor(Place& place, const std::array<uint8_t*, 3>& to);
    std::array<uint8_t*, 3> roomOf(int32_t layer, int32_t slot, const std::array<Matrix, 3>& matrices) const;
    static std::array<Matrix, 3> inFile(const ExpertStacks& file, int32_t expert);

    ExpertSlotManager& _slots;
    FileReader& _reader;
    ExpertAccessProfiler* _profiler;
    int64_t _rows = 0;
    std::vector<std::pair<int32_t, int32_t>> _fetched;     // (layer, expert) that have a slot of the device now
    std::vector<Place> _places;                            // of the layer at hand, by expert
    std::map<std::pair<int32_t, int32_t>, Ticket> _ahead;  // (layer, expert) read ahead to slots in this pass
    std::atomic<uint64_t> _hits{0}, _reads{0};
};

}  // namespace sharpi
