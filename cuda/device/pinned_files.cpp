// See pinned_files.h.
//
// Pinning reads pages that are not in memory yet from the disk, one after another. So they are read ahead, several at a
// time. A system that is asked to pin more memory than it has may kill the process instead of refusing, and so may a
// container's limit. So the room that both leave is checked first. A process with less memory than the file takes pins
// what fits and leaves room for the other pages to come and go.
#include "device/pinned_files.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>

#include "core/error.h"
#include "device/launch.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, since Linux 5.14, which older headers lack

struct Mappings {
    std::vector<AddressRange> all, writable;  // ascending
};

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

// What this process has mapped. Empty if the system does not say.
Mappings mappingsNow() {
    Mappings found;
    const File file(std::fopen("/proc/self/maps", "re"), std::fclose);
    char* line = nullptr;
    size_t room = 0;
    while (file && ::getline(&line, &room, file.get()) > 0) {
        AddressRange range;
        char rights[5] = {};
        if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &range.begin, &range.end, rights) != 3) continue;
        found.all.push_back(range);
        if (rights[1] == 'w') found.writable.push_back(range);
    }
    std::free(line);
    return found;
}

bool fits(size_t bytes, size_t room) {
    return room == SIZE_MAX || bytes <= room - room / 16;  // a sixteenth is left for other processes
}

bool contained(const AddressRange& range, const std::vector<AddressRange>& in) {
    return std::any_of(in.begin(), in.end(),
                       [&](const AddressRange& r) { return r.begin <= range.begin && range.end <= r.end; });
}

std::vector<AddressRange> mergedPages(const std::vector<HostRange>& ranges, const std::vector<AddressRange>& mappings,
                                      uintptr_t page) {
    std::vector<AddressRange> pages;
    for (const HostRange& range : ranges) {
        if (range.bytes == 0) continue;
        const auto begin = reinterpret_cast<uintptr_t>(range.begin);
        pages.push_back({begin / page * page, (begin + range.bytes + page - 1) / page * page});
    }
    std::sort(pages.begin(), pages.end(),
              [](const AddressRange& a, const AddressRange& b) { return a.begin < b.begin; });
    std::vector<AddressRange> merged;
    for (const AddressRange& next : pages) {
        AddressRange* last = merged.empty() ? nullptr : &merged.back();
        const bool together =
            last && (next.begin < last->end || (next.begin - last->end < kPinnedGap &&
                                                contained({last->begin, std::max(last->end, next.end)}, mappings)));
        if (together) last->end = std::max(last->end, next.end);
        else merged.push_back(next);
    }
    return merged;
}

size_t bytesOf(const std::vector<AddressRange>& ranges) {
    size_t bytes = 0;
    for (const AddressRange& range : ranges) bytes += range.bytes();
    return bytes;
}

// The parts of `ranges` that are not in `taken`. Both are ascending.
std::vector<AddressRange> without(const std::vector<AddressRange>& ranges, const std::vector<AddressRange>& taken) {
    std::vector<AddressRange> left;
    for (const AddressRange& range : ranges) {
        uintptr_t begin = range.begin;
        for (const AddressRange& other : taken) {
            if (other.end <= begin || other.begin >= range.end) continue;
            if (other.begin > begin) left.push_back({begin, other.begin});
            begin = std::min(other.end, range.end);
        }
        if (begin < range.end) left.push_back({begin, range.end});
    }
    return left;
}

void readAhead(const AddressRange& pages) {
    ::madvise(reinterpret_cast<void*>(pages.begin), pages.bytes(), MADV_WILLNEED);
    // If the system does not support this, pinning reads the missing pages.
    inParts(pages, [](const AddressRange& part) {
        ::madvise(reinterpret_cast<void*>(part.begin), part.bytes(), kPopulateRead);
    });
}

bool pinningWanted() {
    const char* value = std::getenv("SHARPI_CUDA_PIN");
    return !value || std::strcmp(value, "0") != 0;
}

std::string mebibytes(size_t bytes) { return std::to_string((bytes + (size_t{1} << 20) - 1) >> 20) + " MiB"; }
std::string onlyRoom(size_t bytes) { return "only " + mebibytes(bytes) + " of memory is available"; }

}  // namespace

void inParts(const AddressRange& range, const std::function<void(const AddressRange&)>& body) {
    constexpr uintptr_t kPart = uintptr_t{8} << 20;
    std::atomic<uintptr_t> next{range.begin};
    const auto work = [&] {
        for (;;) {
            const uintptr_t begin = next.fetch_add(kPart);
            if (begin >= range.end) return;
            body(AddressRange{begin, std::min(begin + kPart, range.end)});
        }
    };
    const uintptr_t parts = (range.bytes() + kPart - 1) / kPart;
    const auto threads = std::min<uintptr_t>({parts, std::max(1u, std::thread::hardware_concurrency()), 8});
    std::vector<std::thread> others;
    others.reserve(threads);
    try {
        while (others.size() + 1 < threads) others.emplace_back(work);
    } catch (const std::system_error&) {
        // The threads that could be started do the work.
    }
    work();
    for (std::thread& thread : others) thread.join();
}

PagesToPin pagesToPin(const HostRanges& ranges, const std::vector<AddressRange>& mappings, uintptr_t page) {
    PagesToPin pages;
    pages.always = mergedPages(ranges.always, mappings, page);
    pages.optional = without(mergedPages(ranges.optional, mappings, page), pages.always);
    pages.once = without(without(mergedPages(ranges.once, mappings, page), pages.always), pages.optional);
    return pages;
}

std::vector<AddressRange> pagesThatFit(const std::vector<AddressRange>& ranges, size_t pinned, size_t room,
                                       uintptr_t page) {
    if (fits(pinned + bytesOf(ranges), room)) return ranges;
    const size_t most = room - room / 4;
    size_t left = most > pinned ? (most - pinned) / page * page : 0;
    std::vector<AddressRange> fitting;
    for (const AddressRange& range : ranges) {
        if (left == 0) break;
        const uintptr_t bytes = std::min<uintptr_t>(range.bytes(), left);
        fitting.push_back({range.begin, range.begin + bytes});
        left -= bytes;
    }
    return fitting;
}

PinnedFiles::~PinnedFiles() { unpinAll(); }

void PinnedFiles::pin(const HostRanges& ranges) {
    if (!_pins.empty()) throw Error(ErrorKind::Internal, "parts of the files are pinned already");
    check(cudaSetDevice(_device.index), "choosing the device");
    const Mappings mappings = mappingsNow();
    const PagesToPin pages = pagesToPin(ranges, mappings.all, static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)));
    try {
        _pins.reserve(pages.always.size() + pages.optional.size() + pages.once.size());
        // What every pass needs goes first, in case memory runs short.
        for (const AddressRange& range : pages.always) {
            const std::string refusal = pinInPlace(range, false, contained(range, mappings.writable));
            if (refusal.empty()) continue;
            _refusal = refusal;
            copyToPinned(range);
        }
        pinWhatFits(pages.optional, mappings.writable);
        for (const AddressRange& range : pages.once) pinInPlace(range, true, contained(range, mappings.writable));
    } catch (...) {
        unpinAll();
        throw;
    }
    std::sort(_pins.begin(), _pins.end(), [](const Pin& a, const Pin& b) { return a.pages.begin < b.pages.begin; });
}

// Pins pages until memory is short or the system refuses.
void PinnedFiles::pinWhatFits(const std::vector<AddressRange>& pages, const std::vector<AddressRange>& writable) {
    _optional = _left = bytesOf(pages);
    const size_t room = _room().forFiles;
    _whyLeft = onlyRoom(room);
    for (const AddressRange& range :
         pagesThatFit(pages, _inPlace, room, static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)))) {
        const std::string refusal = pinInPlace(range, false, contained(range, writable));
        if (!refusal.empty()) {
            _whyLeft = refusal;
            return;
        }
        _left -= range.bytes();
    }
}

// Returns why the system refused, or an empty text on success. _pins already has room for the new entry.
std::string PinnedFiles::pinInPlace(const AddressRange& pages, bool once, bool writable) {
    if (!pinningWanted()) return "SHARPI_CUDA_PIN=0";
    // Pages pinned so far still count as available, since they are a file's.
    const size_t room = _room().forFiles;
    if (!fits(pages.bytes() + _inPlace, room)) return onlyRoom(room);
    int readOnly = 0;
    check(cudaDeviceGetAttribute(&readOnly, cudaDevAttrHostRegisterReadOnlySupported, _device.index),
          "asking whether the device reads pinned files");
    if (!readOnly && !writable) return _device.name + " or its driver pins no read-only pages";

    readAhead(pages);
    auto* begin = reinterpret_cast<uint8_t*>(pages.begin);
    const cudaError_t status =
        cudaHostRegister(begin, pages.bytes(), cudaHostRegisterMapped | (readOnly ? cudaHostRegisterReadOnly : 0));
    if (status != cudaSuccess) {
        cudaGetLastError();
        return cudaGetErrorString(status);
    }
    _pins.push_back({pages, nullptr, nullptr, once});
    _inPlace += pages.bytes();
    if (once) return {};
    void* device = nullptr;
    check(cudaHostGetDevicePointer(&device, begin, 0), "asking for the device's address of a pinned file");
    _pins.back().device = static_cast<const uint8_t*>(device);
    return {};
}

void PinnedFiles::copyToPinned(const AddressRange& pages) {
    void *copy = nullptr, *device = nullptr;
    cudaError_t status = cudaErrorMemoryAllocation;
    if (fits(pages.bytes() + _inPlace, _room().available))
        status = cudaHostAlloc(&copy, pages.bytes(), cudaHostAllocMapped);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        throw Error(ErrorKind::OutOfMemory,
                    std::to_string(pages.bytes()) + " bytes (" + mebibytes(pages.bytes()) +
                        ") of the model's file, which the GPU reads while it runs, " + "could not be pinned in RAM (" +
                        _refusal + "), and there is no memory for a pinned copy: raise the limit on locked memory " +
                        "(ulimit -l), close other programs, keep more of the model in VRAM (a smaller context leaves "
                        "room for it), or use --device cpu");
    }
    check(status, "taking page-locked host memory");
    _pins.push_back({pages, static_cast<uint8_t*>(copy), nullptr, false});
    _copied += pages.bytes();
    check(cudaHostGetDevicePointer(&device, copy, 0), "asking for the device's address of pinned memory");
    _pins.back().device = static_cast<const uint8_t*>(device);
    inParts(pages, [&](const AddressRange& part) {
        std::memcpy(static_cast<uint8_t*>(copy) + (part.begin - pages.begin), reinterpret_cast<const void*>(part.begin),
                    part.bytes());
    });
}

void PinnedFiles::unpin(const Pin& pin) noexcept {
    const cudaError_t status =
        pin.copy ? cudaFreeHost(pin.copy) : cudaHostUnregister(reinterpret_cast<void*>(pin.pages.begin));
    if (status != cudaSuccess) cudaGetLastError();  // after a fault, when nothing reads any more
}

void PinnedFiles::unpinAll() noexcept {
    if (_pins.empty()) return;
    cudaSetDevice(_device.index);
    for (const Pin& pin : _pins) unpin(pin);
    _pins.clear();
    _inPlace = _copied = _optional = _left = 0;
}

void PinnedFiles::unpinOnce() {
    check(cudaSetDevice(_device.index), "choosing the device");
    const auto kept = std::stable_partition(_pins.begin(), _pins.end(), [](const Pin& pin) { return !pin.once; });
    std::for_each(kept, _pins.end(), [&](const Pin& pin) {
        unpin(pin);
        _inPlace -= pin.pages.bytes();
    });
    _pins.erase(kept, _pins.end());
}

// The first pin that ends behind an address, or null.
const PinnedFiles::Pin* PinnedFiles::find(const uint8_t* file) const {
    const auto address = reinterpret_cast<uintptr_t>(file);
    const auto pin = std::upper_bound(_pins.begin(), _pins.end(), address,
                                      [](uintptr_t a, const Pin& p) { return a < p.pages.end; });
    return pin == _pins.end() ? nullptr : &*pin;
}

const uint8_t* PinnedFiles::reachable(const uint8_t* file, size_t bytes) const {
    const Pin* pin = find(file);
    const auto address = reinterpret_cast<uintptr_t>(file);
    if (!pin || address < pin->pages.begin || bytes > pin->pages.end - address || !pin->device) return nullptr;
    return pin->device + (address - pin->pages.begin);
}

void PinnedFiles::expect(const uint8_t* file, size_t bytes) const {
    const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    auto begin = reinterpret_cast<uintptr_t>(file);
    const uintptr_t end = begin + bytes;
    while (begin < end) {
        const Pin* pin = find(reinterpret_cast<const uint8_t*>(begin));
        const uintptr_t stop = pin ? std::min(end, pin->pages.begin) : end;
        if (begin < stop)
            ::madvise(reinterpret_cast<void*>(begin / page * page), stop - begin / page * page, MADV_WILLNEED);
        begin = pin ? std::max(begin, pin->pages.end) : end;
    }
}

HostRange PinnedFiles::source(const uint8_t* file, size_t bytes) const {
    const Pin* pin = find(file);
    if (!pin) return {file, bytes};
    const auto address = reinterpret_cast<uintptr_t>(file);
    if (address < pin->pages.begin) return {file, std::min<size_t>(bytes, pin->pages.begin - address)};
    return {pin->copy ? pin->copy + (address - pin->pages.begin) : file,
            std::min<size_t>(bytes, pin->pages.end - address)};
}

std::vector<std::string> PinnedFiles::notes() const {
    std::vector<std::string> notes;
    if (_copied > 0)
        notes.push_back("the system refused to pin " + mebibytes(_copied) + " of the file (" + _refusal +
                        "): a pinned copy of it was made");
    if (_left > 0) {
        notes.push_back(mebibytes(_left) + " of " + mebibytes(_optional) +
                        " of experts that are not in VRAM could not be pinned in RAM (" + _whyLeft +
                        "): the GPU reads them through the system's file cache, which is slower");
    }
    return notes;
}

}  // namespace sharpi::cuda
