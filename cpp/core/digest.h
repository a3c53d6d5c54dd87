// SHA-256 (FIPS 180-4), for names that must never be those of two things, and a checksum that is much faster, for bytes
// that may have been damaged by accident.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace sharpi {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
public:
    Sha256& add(const void* data, size_t bytes);
    // A text with its length, so that no two lists of texts add the same bytes.
    Sha256& add(const std::string& text);
    // Of all that was added. Nothing can be added afterwards.
    Digest end();

private:
    void block(const uint8_t* data);

    std::array<uint32_t, 8> _state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<uint8_t, 64> _rest{};  // what does not fill a block yet
    uint64_t _bytes = 0;
};

// For tables: a digest is as good as random already.
struct DigestHash {
    size_t operator()(const Digest& digest) const {
        size_t hash = 0;
        std::memcpy(&hash, digest.data(), sizeof hash);
        return hash;
    }
};

// 64 lower-case hexadecimal digits.
std::string hex(const Digest& digest);

// Differs for any two inputs of one size that differ in a single aligned word of eight bytes.
uint64_t checksum(const void* data, size_t bytes);

}  // namespace sharpi
