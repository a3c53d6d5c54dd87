// See device_memory.h.
#include "execution/device_memory.h"

#include <cstdlib>
#include <mutex>

namespace sharpi::emulator {

namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kGuardBytes = 4096;

}  // namespace

DeviceMemory& DeviceMemory::instance() {
    static DeviceMemory* const memory = new DeviceMemory;  // never ends: modules give back theirs at exit
    return *memory;
}

DeviceMemory::DeviceMemory() : _total(size_t{8} << 30) {}

size_t DeviceMemory::freeBytes() const {
    const int64_t used = _used;
    return used < static_cast<int64_t>(_total) ? _total - used : 0;
}

void* DeviceMemory::take(size_t bytes) {
    if (bytes > freeBytes()) return nullptr;
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    auto* block = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, rounded + 2 * kGuardBytes));
    if (!block) return nullptr;
    uint8_t* const data = block + kGuardBytes;
    const std::unique_lock<std::shared_mutex> lock(_mutex);
    _ranges[reinterpret_cast<uintptr_t>(data)] = {reinterpret_cast<uintptr_t>(data), bytes, false};
    _used += static_cast<int64_t>(bytes);
    return data;
}

bool DeviceMemory::release(void* address) {
    const std::unique_lock<std::shared_mutex> lock(_mutex);
    const auto found = _ranges.find(reinterpret_cast<uintptr_t>(address));
    if (found == _ranges.end()) return false;
    _used -= static_cast<int64_t>(found->second.bytes);
    _ranges.erase(found);
    std::free(static_cast<uint8_t*>(address) - kGuardBytes);
    return true;
}

bool DeviceMemory::add(const void* address, size_t bytes, bool readOnly) {
    const auto begin = reinterpret_cast<uintptr_t>(address);
    const std::unique_lock<std::shared_mutex> lock(_mutex);
    const auto next = _ranges.lower_bound(begin);
    if (next != _ranges.end() && next->first < begin + bytes) return false;
    if (next != _ranges.begin() && std::prev(next)->first + std::prev(next)->second.bytes > begin) return false;
    _ranges[begin] = {begin, bytes, readOnly};
    return true;
}

bool DeviceMemory::remove(const void* address) {
    const std::unique_lock<std::shared_mutex> lock(_mutex);
    return _ranges.erase(reinterpret_cast<uintptr_t>(address)) == 1;
}

Range DeviceMemory::find(uintptr_t address) const {
    const std::shared_lock<std::shared_mutex> lock(_mutex);
    auto next = _ranges.upper_bound(address);
    if (next == _ranges.begin()) return {};
    const Range& range = std::prev(next)->second;
    return address - range.begin < range.bytes ? range : Range{};
}

}  // namespace sharpi::emulator
