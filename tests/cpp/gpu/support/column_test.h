// Quantized rows with their columns (WideColumns), and what the columns must hold, written from its description alone.
#pragma once

#include "gpu_test.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// Over a buffer of quantizedRowsBytes(). The columns are written, too, if there is room for them.
inline QuantizedRows rowsWithColumns(const DeviceArray<uint8_t>& buffer, int64_t rows, int64_t cols) {
    QuantizedRows over = quantizedRowsOver(buffer.get(), rows, cols);
    over.wide.written = over.wide.codes != nullptr;
    return over;
}

// Whether the buffer's columns are those of its rows, and what lies past the last row is still poison.
inline ::testing::AssertionResult hasItsColumns(const DeviceArray<uint8_t>& buffer, int64_t rows, int64_t cols) {
    std::vector<uint8_t> bytes = buffer.read();
    const QuantizedRows at = quantizedRowsOver(bytes.data(), rows, cols);
    const int64_t blocks = cols / 32, bundles = (rows + 31) / 32;
    for (int64_t unit = 0; at.wide.codes && unit < bundles * blocks; ++unit) {
        for (int64_t column = 0; column < 32; ++column) {
            const int64_t row = unit / blocks * 32 + column, block = unit % blocks, i = row * blocks + block;
            std::vector<uint8_t> codes(32, 0xff), gotCodes;
            std::vector<float> ends(4), gotEnds;
            std::memset(ends.data(), 0xff, 16);
            if (row < rows) {
                for (int64_t half = 0; half < 2; ++half)
                    std::memcpy(&codes[half * 16], at.q + ((row * 2 + half) * blocks + block) * 16, 16);
                const float scale = at.scale[i];
                const int first = static_cast<int16_t>(at.sums[i] & 0xffff), second = at.sums[i] >> 16;
                ends = {scale, scale * static_cast<float>(first + second), scale * static_cast<float>(first),
                        scale * static_cast<float>(second)};
            }
            for (int64_t half = 0; half < 2; ++half) {
                const uint8_t* const from = at.wide.codes + unit * 1024 + half * 512 + column * 16;
                gotCodes.insert(gotCodes.end(), from, from + 16);
            }
            for (int64_t field = 0; field < 4; ++field)
                gotEnds.push_back(at.wide.ends[unit * 128 + field * 32 + column]);
            bool same = codes == gotCodes;
            for (size_t field = 0; field < 4; ++field)  // a NaN has no bits of its own
                same = same && (std::memcmp(&ends[field], &gotEnds[field], 4) == 0 ||
                                (row < rows && ends[field] != ends[field] && gotEnds[field] != gotEnds[field]));
            if (!same)
                return ::testing::AssertionFailure() << "row " << row << " of " << rows << ", block " << block << " of "
                                                     << blocks << " has other columns";
        }
    }
    return ::testing::AssertionSuccess();
}

}  // namespace sharpi::cuda
