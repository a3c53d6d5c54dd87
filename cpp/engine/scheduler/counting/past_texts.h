// What earlier requests had evaluated, so that what is evaluated again can be counted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/scheduler/entry.h"
#include "engine/texts/transcript.h"

namespace sharpi {

// Tokens of requests that have ended, whatever the cache still has of them. Those of the latest requests: what repeats
// an older text does not count. Only the scheduler's thread may use it.
class PastTexts {
public:
    // Remembers what a request that ends has evaluated, instead of texts that it continued. If there is no memory for
    // it, it is not remembered.
    void add(const RequestEntry& entry) noexcept;
    // The most that an earlier text, or that of another request, has in common with the prompt of a request that has
    // begun; all 0 if that is no more than what need not be evaluated. The prompt's last token does not count: it is
    // evaluated always, for its logits.
    EarlierText earlier(const RequestEntry& entry, const RequestEntries& running) const;
    void clear() { _texts.clear(), _tokens = 0; }

private:
    struct Text {
        std::string salt;
        Transcript evaluated;
        int64_t prompt = 0;  // tokens of the request's prompt
    };
    void drop(size_t index);

    std::vector<Text> _texts;  // the latest is the last
    int64_t _tokens = 0;       // of all
};

}  // namespace sharpi
