// See digest.h.
#include "core/digest.h"

#include <algorithm>

namespace sharpi {

namespace {

constexpr size_t kBlock = 64;

constexpr std::array<uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotated(uint32_t value, int right) { return value >> right | value << (32 - right); }
uint64_t rotated(uint64_t value, int right) { return value >> right | value << (64 - right); }

// One to one in `hash` and in `word`.
uint64_t mixed(uint64_t hash, uint64_t word) { return rotated((hash ^ word) * 0x9E3779B97F4A7C15u, 29); }

}  // namespace

void Sha256::block(const uint8_t* data) {
    std::array<uint32_t, 64> w;
    for (size_t i = 0; i < 16; ++i) {
        const uint8_t* at = data + 4 * i;
        w[i] = uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
    }
    for (size_t i = 16; i < 64; ++i) {
        const uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) + w[i - 7] +
               (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = _state;
    for (size_t i = 0; i < 64; ++i) {
        const uint32_t first =
            h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
        const uint32_t second = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    const std::array<uint32_t, 8> added = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) _state[i] += added[i];
}

Sha256& Sha256::add(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    while (bytes > 0) {
        const size_t held = _bytes % kBlock, count = std::min(kBlock - held, bytes);
        std::memcpy(_rest.data() + held, from, count);
        _bytes += count;
        from += count;
        bytes -= count;
        if (_bytes % kBlock == 0) block(_rest.data());
    }
    return *this;
}

Sha256& Sha256::add(const std::string& text) {
    const uint64_t size = text.size();
    return add(&size, sizeof size).add(text.data(), text.size());
}

Digest Sha256::end() {
    const uint64_t bits = 8 * _bytes;
    std::array<uint8_t, kBlock + 8> padding{0x80};
    const size_t zeros = (kBlock + 56 - _bytes % kBlock - 1) % kBlock;
    for (size_t i = 0; i < 8; ++i) padding[1 + zeros + i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
    add(padding.data(), 1 + zeros + 8);
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<uint8_t>(_state[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
}

std::string hex(const Digest& digest) {
    static const char* const digits = "0123456789abcdef";
    std::string text;
    for (const uint8_t byte : digest) text += {digits[byte >> 4], digits[byte & 15]};
    return text;
}

// Four sums side by side, because each waits for its own multiplications only.
uint64_t checksum(const void* data, size_t bytes) {
    std::array<uint64_t, 4> sums = {1, 2, 3, 4};
    const auto* from = static_cast<const uint8_t*>(data);
    const uint64_t size = bytes;
    for (; bytes >= sizeof sums; bytes -= sizeof sums, from += sizeof sums) {
        std::array<uint64_t, 4> words;
        std::memcpy(words.data(), from, sizeof words);
        for (size_t i = 0; i < 4; ++i) sums[i] = mixed(sums[i], words[i]);
    }
    std::array<uint64_t, 4> rest{};
    std::memcpy(rest.data(), from, bytes);
    uint64_t all = size;
    for (size_t i = 0; i < 4; ++i) all = mixed(all, mixed(sums[i], rest[i]));
    return all;
}

}  // namespace sharpi
