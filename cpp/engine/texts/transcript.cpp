// See transcript.h.
#include "engine/texts/transcript.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace sharpi {

// Grows by at least half, so that appending one token at a time does not copy all of them each time.
void Transcript::reserve(int64_t tokens) {
    const auto wanted = static_cast<size_t>(tokens);
    if (wanted > _tokens.capacity()) _tokens.reserve(std::max(wanted, _tokens.capacity() + _tokens.capacity() / 2));
}

void Transcript::append(const int32_t* tokens, int64_t count, RowKind kind) {
    _tokens.insert(_tokens.end(), tokens, tokens + count);
    if (kind == RowKind::Prompt && count) _promptTokens = size();
}

void Transcript::follow(const Transcript& longer, int64_t end) {
    _tokens.insert(_tokens.end(), longer._tokens.begin() + size(), longer._tokens.begin() + end);
    _promptTokens = std::min(longer._promptTokens, end);
}

void Transcript::truncate(int64_t tokens) {
    _tokens.resize(static_cast<size_t>(tokens));
    _promptTokens = std::min(_promptTokens, tokens);
}

int64_t Transcript::agreement(const Transcript& other, bool oneArithmetic) const {
    const auto most = static_cast<size_t>(std::min(size(), other.size()));
    const auto differs =
        std::mismatch(_tokens.begin(), _tokens.begin() + static_cast<std::ptrdiff_t>(most), other._tokens.begin())
            .first;
    const int64_t same = differs - _tokens.begin();
    if (oneArithmetic || _promptTokens == other._promptTokens) return same;
    return std::min({same, _promptTokens, other._promptTokens});
}

Stretch Transcript::piece(int64_t begin, int64_t wanted, const PieceRules& rules) const {
    if (begin >= _promptTokens)
        return {RowKind::Decode, begin, std::clamp(wanted, begin + 1, std::min(size(), begin + rules.decodeRows))};
    const int64_t step = rules.promptStep;
    const auto roundedDown = [step](int64_t tokens) { return tokens / step * step; };
    int64_t end = std::min(roundedDown(std::max(wanted, begin + 1) + step - 1), _promptTokens);
    if (end - begin > rules.rows) end = roundedDown(begin + rules.rows);
    if (begin % step || end <= begin) {
        throw Error(ErrorKind::Internal, "prompt rows from token " + std::to_string(begin) + " on in batches of " +
                                             std::to_string(rules.rows) +
                                             ": the backend takes them only from multiples of " + std::to_string(step) +
                                             " on");
    }
    return {RowKind::Prompt, begin, end};
}

}  // namespace sharpi
