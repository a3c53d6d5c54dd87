// Digests as the standard has them, and checksums that notice what goes wrong with files.
#include "core/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace {

using namespace sharpi;

std::string hashed(const std::string& text) { return hex(Sha256().add(text.data(), text.size()).end()); }

// The examples of FIPS 180-4.
TEST(Digest, IsTheStandards) {
    EXPECT_EQ(hashed(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(hashed("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(hashed("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(hashed(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Digest, DoesNotDependOnHowItsBytesCome) {
    std::string text;
    for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
    for (size_t size = 0; size <= text.size(); ++size) {
        const std::string whole = hashed(text.substr(0, size));
        for (const size_t step : {1, 55, 63, 64, 65}) {
            Sha256 digest;
            for (size_t at = 0; at < size; at += step) digest.add(text.data() + at, std::min(step, size - at));
            ASSERT_EQ(hex(digest.end()), whole) << size << " bytes in steps of " << step;
        }
    }
}

TEST(Digest, OfTextsKnowsWhereEachEnds) {
    EXPECT_NE(Sha256().add(std::string("ab")).add(std::string("c")).end(),
              Sha256().add(std::string("a")).add(std::string("bc")).end());
}

TEST(Checksum, NoticesEveryFlippedBitAndEverySize) {
    std::vector<uint8_t> data(300);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i * i);
    for (const size_t size : {1, 31, 32, 33, 64, 299, 300}) {
        const uint64_t sum = checksum(data.data(), size);
        for (size_t bit = 0; bit < 8 * size; ++bit) {
            std::vector<uint8_t> other(data);
            other[bit / 8] = static_cast<uint8_t>(other[bit / 8] ^ 1u << bit % 8);
            ASSERT_NE(checksum(other.data(), size), sum) << bit;
        }
    }
    const std::vector<uint8_t> zeros(300);
    for (size_t size = 0; size < zeros.size(); ++size)
        ASSERT_NE(checksum(zeros.data(), size), checksum(zeros.data(), size + 1)) << size;
}

// Words that changed places, as when a part of a file is written at another one's place.
TEST(Checksum, NoticesTheOrder) {
    std::vector<uint64_t> words = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    const uint64_t sum = checksum(words.data(), 8 * words.size());
    for (size_t a = 0; a < words.size(); ++a) {
        for (size_t b = a + 1; b < words.size(); ++b) {
            std::vector<uint64_t> other = words;
            std::swap(other[a], other[b]);
            EXPECT_NE(checksum(other.data(), 8 * other.size()), sum) << a << " and " << b;
        }
    }
}

}  // namespace
