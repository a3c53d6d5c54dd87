// See allocator.h.
//
// An allocation takes addresses from the start of a hole. Its granules fall into at most three pieces: the first
// granule if it begins in the middle of one, the last if it ends in the middle of one, and those between, which it
// fills alone. Each piece is one chunk and one commit. So a chunk of several granules has a single user, a chunk with
// several users is a single granule, and giving back the chunks without users gives back every unused granule.
#include "memory/allocator.h"

#include <algorithm>
#include <cstdio>

#include "core/error.h"

namespace sharpi {

namespace {

// Addresses are plentiful, so more are reserved than there is memory: holes must not exhaust them.
constexpr size_t kSpareAddresses = size_t{1} << 30;
constexpr size_t kMostAddresses = size_t{1} << 45;
// No device has more; below it, sizes can be rounded up without overflow.
constexpr size_t kMostBytes = size_t{1} << 60;
// The number of holders that a refusal names; it adds up the others.
constexpr size_t kHoldersNamed = 3;

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }
void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

size_t roundDown(size_t bytes, size_t unit) { return bytes & ~(unit - 1); }
size_t roundUp(size_t bytes, size_t unit) { return roundDown(bytes + unit - 1, unit); }

// Even an empty allocation has an address of its own.
size_t roomFor(size_t bytes) { return Allocator::aligned(std::max<size_t>(bytes, 1)); }

std::string readable(size_t bytes) {
    if (bytes < 1024) return std::to_string(bytes) + " bytes";
    const char* const units[] = {"KiB", "MiB", "GiB"};
    double size = static_cast<double>(bytes) / 1024;
    int unit = 0;
    for (; size >= 1024 && unit < 2; ++unit) size /= 1024;
    char text[48];
    std::snprintf(text, sizeof text, "%.1f %s", size, units[unit]);
    return text;
}

}  // namespace

Allocator::Allocator(DeviceMemory& memory, size_t budget)
    : _memory(memory), _budget(budget), _granularity(memory.granularity()) {}

Allocator::~Allocator() {
    for (const auto& [begin, chunk] : _chunks) _memory.decommit(pointer(begin), chunk.bytes);
    for (const auto& [begin, bytes] : _regions) _memory.release(pointer(begin), bytes);
}

void* Allocator::allocate(size_t bytes, const std::string& name) {
    const std::lock_guard lock(_mutex);
    const size_t room = bytes > kMostBytes ? 0 : roomFor(bytes);
    const uintptr_t address = room ? place(bytes, room) : 0;
    if (!address) throw Error(ErrorKind::OutOfMemory, outOfMemory(bytes, name));
    try {
        _exactHandles.emplace(address, Allocation{bytes, room, name});
    } catch (...) {
        giveBack(address, room);
        throw;
    }
    _held += bytes;
    return pointer(address);
}

void Allocator::free(void* address) {
    if (!address) return;
    const std::lock_guard lock(_mutex);
    const auto handle = _exactHandles.find(number(address));
    if (handle == _exactHandles.end()) throw Error(ErrorKind::Internal, notHeld(number(address)));
    giveBack(handle->first, handle->second.room);
    _held -= handle->second.bytes;
    _exactHandles.erase(handle);
}

// The address of cleared memory, or 0 if there is not enough.
uintptr_t Allocator::place(size_t bytes, size_t room) {
    auto hole = bestHole(room);
    if (hole == _holes.end()) hole = addRegion(room);
    if (hole == _holes.end()) return 0;
    const uintptr_t begin = hole->first;
    const Pieces pieces = piecesOf(begin, room);
    if (!hold(pieces)) {
        removeUnused(hole);
        return 0;
    }
    auto rest = _holes.extract(hole);  // reusing the node cannot fail
    rest.key() += room;
    rest.mapped() -= room;
    if (rest.mapped() > 0) _holes.insert(std::move(rest));
    try {
        clear(begin, bytes, pieces);
    } catch (...) {
        giveBack(begin, room);
        throw;
    }
    return begin;
}

// The hole for which the fewest granules must be taken, and the first of equal ones.
Allocator::Ranges::iterator Allocator::bestHole(size_t room) {
    auto best = _holes.end();
    size_t bestMissing = SIZE_MAX;
    for (auto hole = _holes.begin(); hole != _holes.end() && bestMissing > 0; ++hole) {
        if (hole->second < room) continue;
        const size_t missing = piecesOf(hole->first, room).missing();
        if (missing < bestMissing) {
            best = hole;
            bestMissing = missing;
        }
    }
    return best;
}

// A hole of newly reserved addresses, or the end if there are none.
Allocator::Ranges::iterator Allocator::addRegion(size_t room) {
    const size_t least = roundUp(room, _granularity);
    const size_t generous =
        roundUp(std::min(2 * std::min(availableNow(), kMostBytes) + kSpareAddresses, kMostAddresses), _granularity);
    for (const size_t bytes : {std::max(least, generous), least}) {
        void* address = nullptr;
        try {
            address = _memory.reserve(bytes);
            _regions.emplace(number(address), bytes);
            return _holes.emplace(number(address), bytes).first;
        } catch (const Error& error) {
            if (error.kind() != ErrorKind::OutOfMemory) throw;  // addresses are limited: the next try asks for fewer
        } catch (...) {
            if (address) {
                _regions.erase(number(address));
                _memory.release(address, bytes);
            }
            throw;
        }
    }
    return _holes.end();
}

// Gives back a region without allocations, unless it is the only one: that will be needed again.
void Allocator::removeUnused(Ranges::iterator hole) noexcept {
    const auto region = _regions.find(hole->first);
    if (_regions.size() < 2 || region == _regions.end() || region->second != hole->second) return;
    _memory.release(pointer(region->first), region->second);
    _regions.erase(region);
    _holes.erase(hole);
}

Allocator::Pieces Allocator::piecesOf(uintptr_t begin, size_t room) const {
    const uintptr_t end = begin + room;
    const uintptr_t first = roundDown(begin, _granularity), last = roundUp(end, _granularity);
    const uintptr_t innerBegin = roundUp(begin, _granularity), innerEnd = roundDown(end, _granularity);
    Pieces pieces;
    const auto add = [&](uintptr_t from, size_t bytes, bool alone) {
        pieces.list[pieces.count++] = {from, bytes, !alone && _chunks.count(from) > 0};
    };
    if (first < innerBegin) add(first, _granularity, false);
    if (innerBegin < innerEnd) add(innerBegin, innerEnd - innerBegin, true);
    const bool withinOne = first < innerBegin && innerEnd == first;
    if (innerEnd < last && !withinOne) add(innerEnd, _granularity, false);
    return pieces;
}

size_t Allocator::Pieces::missing() const {
    size_t bytes = 0;
    for (int i = 0; i < count; ++i) bytes += list[i].taken ? 0 : list[i].bytes;
    return bytes;
}

// Returns false, and changes nothing, if there is not enough memory.
bool Allocator::hold(const Pieces& pieces) {
    if (_budget && pieces.missing() > _budget - std::min(_budget, _taken)) return false;
    int done = 0;
    try {
        while (done < pieces.count && holdOne(pieces.list[done])) ++done;
    } catch (...) {
        while (done > 0) drop(pieces.list[--done]);
        throw;
    }
    if (done == pieces.count) return true;
    while (done > 0) drop(pieces.list[--done]);
    return false;
}

bool Allocator::holdOne(const Piece& piece) {
    const auto [chunk, isNew] = _chunks.try_emplace(piece.begin, Chunk{piece.bytes, 0});
    if (isNew) {
        bool committed = false;
        try {
            committed = _memory.commit(pointer(piece.begin), piece.bytes);
        } catch (...) {
            _chunks.erase(chunk);
            throw;
        }
        if (!committed) {
            _chunks.erase(chunk);
            return false;
        }
        _taken += piece.bytes;
    }
    ++chunk->second.users;
    return true;
}

void Allocator::drop(const Piece& piece) noexcept {
    const auto chunk = _chunks.find(piece.begin);
    if (--chunk->second.users > 0) return;
    _memory.decommit(pointer(piece.begin), chunk->second.bytes);
    _taken -= chunk->second.bytes;
    _chunks.erase(chunk);
}

// pieces: their state before hold().
void Allocator::clear(uintptr_t begin, size_t bytes, const Pieces& pieces) {
    if (!_memory.commitsZeroes()) {
        if (bytes > 0) _memory.zero(pointer(begin), bytes);
        return;
    }
    for (int i = 0; i < pieces.count; ++i) {
        const Piece& piece = pieces.list[i];
        const uintptr_t from = std::max(begin, piece.begin), to = std::min(begin + bytes, piece.begin + piece.bytes);
        if (piece.taken && from < to) _memory.zero(pointer(from), to - from);
    }
}

void Allocator::giveBack(uintptr_t begin, size_t room) {
    auto hole = _holes.emplace(begin, room).first;
    const Pieces pieces = piecesOf(begin, room);
    for (int i = 0; i < pieces.count; ++i) drop(pieces.list[i]);
    // Two regions may touch, but no allocation may lie across them.
    const auto next = std::next(hole);
    if (next != _holes.end() && next->first == begin + room && _regions.count(next->first) == 0) {
        hole->second += next->second;
        _holes.erase(next);
    }
    if (hole != _holes.begin() && _regions.count(begin) == 0) {
        const auto before = std::prev(hole);
        if (before->first + before->second == begin) {
            before->second += hole->second;
            _holes.erase(hole);
            hole = before;
        }
    }
    removeUnused(hole);
}

size_t Allocator::held() const {
    const std::lock_guard lock(_mutex);
    return _held;
}

size_t Allocator::taken() const {
    const std::lock_guard lock(_mutex);
    return _taken;
}

size_t Allocator::available() const {
    const std::lock_guard lock(_mutex);
    return availableNow();
}

size_t Allocator::availableNow() const {
    const size_t free = _memory.freeBytes();
    return _budget ? std::min(free, _budget - std::min(_budget, _taken)) : free;
}

std::vector<Holding> Allocator::holdings() const {
    const std::lock_guard lock(_mutex);
    return holdingsNow();
}

std::vector<Holding> Allocator::holdingsNow() const {
    std::map<std::string, size_t> byName;
    for (const auto& [address, allocation] : _exactHandles) byName[allocation.name] += allocation.bytes;
    std::vector<Holding> holdings;
    for (const auto& [name, bytes] : byName) {
        if (bytes > 0) holdings.push_back({name, bytes});
    }
    std::stable_sort(holdings.begin(), holdings.end(),
                     [](const Holding& a, const Holding& b) { return a.bytes > b.bytes; });
    return holdings;
}

std::string Allocator::outOfMemory(size_t bytes, const std::string& name) const {
    const size_t free = availableNow();
    std::string text = "out of memory on " + _memory.name() + ": '" + name + "' needs " + readable(bytes) + ", " +
                       readable(free) + " are free";
    if (_budget && free < _memory.freeBytes()) text += " within the budget of " + readable(_budget);
    return text + largestHolders();
}

// "; held: 'a' 4.0 GiB, 'b' 1.0 GiB", or nothing if nothing is held. _mutex is held.
std::string Allocator::largestHolders() const {
    const std::vector<Holding> holdings = holdingsNow();
    const size_t named = std::min(holdings.size(), kHoldersNamed);
    size_t others = _held;
    std::string text;
    for (size_t i = 0; i < named; ++i) {
        text += (i ? ", '" : "; held: '") + holdings[i].name + "' " + readable(holdings[i].bytes);
        others -= holdings[i].bytes;
    }
    if (others) text += " and " + std::to_string(holdings.size() - named) + " more with " + readable(others);
    return text;
}

std::string Allocator::notHeld(uintptr_t address) const {
    char text[32];
    std::snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(address));
    const std::string what = std::string("cannot free address ") + text + " on " + _memory.name() + ": ";
    const auto next = _exactHandles.upper_bound(address);
    if (next != _exactHandles.begin()) {
        const auto& [begin, allocation] = *std::prev(next);
        if (address < begin + allocation.room) {
            return what + "it lies " + std::to_string(address - begin) + " bytes inside '" + allocation.name + "'";
        }
    }
    const auto after = _regions.upper_bound(address);
    const bool ours = after != _regions.begin() && address - std::prev(after)->first < std::prev(after)->second;
    return what + (ours ? "it is not held, or was freed before" : "it was not allocated here");
}

}  // namespace sharpi
