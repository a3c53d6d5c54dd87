// How the scheduler divides time between prompts and the answers that are being written.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/launch_rows.h"

namespace sharpi {

// Measures passes over pieces of prompts, and says how large the next one should be so that no answer waits longer than
// the greatest gap. If each pass brings weights over, small pieces are as slow as large ones: pieces are then as large
// as the backend takes them, and answers get as much time as prompts.
class Pace {
public:
    Pace(double greatestGap, int64_t mostRows, bool streams)
        : _greatestGap(greatestGap), _mostRows(mostRows), _streams(streams) {}

    // The rows of the next piece. answers: whether any are being written.
    int64_t pieceRows(bool answers) const {
        if (!answers || _streams) return _mostRows;
        if (_secondsPerRow == 0) return std::min(_mostRows, kFirstRows);
        const auto rows = static_cast<int64_t>(std::min(kAim * _greatestGap / _secondsPerRow, 1e9));
        return std::clamp<int64_t>(rows / kPromptTile * kPromptTile, std::min<int64_t>(kPromptTile, _mostRows),
                                   _mostRows);
    }
    // Whether answers come first, before another piece.
    bool answersAreDue() const { return _streams && _answerSeconds < _pieceSeconds; }

    void countPiece(int64_t rows, double seconds) {
        _pieceSeconds = seconds;
        _answerSeconds = 0;
        if (rows < kPromptTile) return;  // it says little about the others
        const double measured = seconds / static_cast<double>(rows);
        _secondsPerRow = _secondsPerRow == 0 ? measured : _secondsPerRow + (measured - _secondsPerRow) / 4;
    }
    void countStep(double seconds) { _answerSeconds += seconds; }
    // Seconds that a prompt of this length is expected to take.
    double promptSeconds(int64_t rows) const { return _secondsPerRow * static_cast<double>(rows); }

private:
    // A piece fills this part of the gap: a step follows it, and attention makes later pieces of a prompt slower.
    static constexpr double kAim = 0.7;
    static constexpr int64_t kFirstRows = 256;

    double _greatestGap;
    int64_t _mostRows;
    bool _streams;
    double _secondsPerRow = 0, _pieceSeconds = 0, _answerSeconds = 0;
};

}  // namespace sharpi
